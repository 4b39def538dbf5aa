"""Engines with a disk or a remote tier below a host tier that is far too small: greedy answers stay the same."""

from __future__ import annotations

import logging
import random
import threading
import time
from functools import partial

import pytest

from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.engine.client.client import EngineClient
from holdfast.engine.process.build import build_engine
from holdfast.engine.process.parts import tiers
from holdfast.engine.process.parts.moves import ChunkFinder
from holdfast.engine.process.parts.tiers import TierHandler
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.tier_threads import TierThreads
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.parts.moves.messages import ChunksFound
from holdfast.lm.parts.tiers.planner import TierPart
from tests.checkpoints import make
from tests.served import free_port

BLOCK = 2 * 2 * 16 * 2 * 16 * 4
"""Bytes of a block: layers, keys and values, tokens, heads, head size, bytes of a float32."""
DRAW = random.Random(4)
PROMPTS = [tuple(DRAW.randrange(2, 60) for _ in range(100)) for _ in range(6)]


@pytest.fixture
def tiny(small, tmp_path):
    """Configurations with a device of 12 blocks, a host tier of 16 and a disk tier of 200. Nothing is priced."""

    def make(**changes):
        block = BLOCK // 4 if changes.get("kv_cache_dtype") == "fp8" else BLOCK
        sizes = {"cache_gb": 12 * block / 1e9, "host_cache_gb": 16 * block / 1e9, "disk_cache_gb": 200 * BLOCK / 1e9}
        disk = {"disk_cache_dir": str(tmp_path / "disk"), "eviction": "lru"}
        return small(**{**sizes, **disk, "max_sequences": 3, **changes})

    return make


def answers(engine, prompts=PROMPTS, name="", tenant="", at_once=False):
    """An engine's answer to each of these prompts, and the number of tokens found for each."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    tokens, cached, loop = [()] * len(prompts), [0] * len(prompts), engine.loop
    for number, prompt in enumerate(prompts):
        arrival = time.monotonic()
        loop.add(Request(f"{name}-{number}", prompt, params, identity=Identity(tenant=tenant), arrival=arrival))
        while not at_once or number == len(prompts) - 1:
            for output in loop.step() or ():
                place = int(output.request_id.rpartition("-")[2])
                tokens[place] += output.tokens
                cached[place] = output.cached_tokens
            if not (loop.stats().waiting or loop.stats().running):
                break
            assert time.monotonic() < arrival + 120
    return tokens, cached


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_answers_stay_the_same_after_a_drop_to_the_disk_and_after_a_restart(small, tiny, kv_cache_dtype):
    plain = build_engine(small(prefix_sharing=False, kv_cache_dtype=kv_cache_dtype))
    expected, _ = answers(plain)
    plain.loop.close()
    engine = build_engine(tiny(kv_cache_dtype=kv_cache_dtype))
    assert answers(engine, at_once=True) == (expected, [0] * 6)
    engine.handler(TierHandler).flush(engine.loop, 200)
    assert engine.loop.stats().disk_blocks_cached >= 36
    assert answers(engine, name="again") == (expected, [96] * 6)
    assert engine.loop.stats().prefix_hits_on_disk >= 4 * 96
    engine.handler(TierHandler).flush(engine.loop, 200)
    engine.loop.close()
    engine = build_engine(tiny(kv_cache_dtype=kv_cache_dtype))
    chain = block_digests(Identity().root(), PROMPTS[0][:96], 16)
    assert engine.handler(ChunkFinder).find(1, chain) == ChunksFound(1, device=0, host=0, lower=96)
    assert answers(engine, at_once=True) == (expected, [96] * 6), "each waits for its room on the host"
    stats = engine.loop.stats()
    assert stats.prefix_hits_on_disk == 6 * 96 and stats.blocks_corrupt == 0
    assert answers(engine, PROMPTS[:1], "other", tenant="other")[1] == [0], "tenants share nothing"
    engine.loop.close()


def test_the_last_flush_ends_what_runs_and_writes_what_it_leaves(tiny):
    engine = build_engine(tiny())
    long = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    engine.loop.add(Request("long", PROMPTS[0], long))
    while not any(output.tokens for output in engine.loop.step() or ()):
        pass
    steps, step = [], engine.loop.step
    engine.loop.step = lambda: (steps.append(1), step())[1]
    engine.handler(TierHandler).flush(engine.loop, 200)
    stats = engine.loop.stats()
    assert (stats.running, stats.waiting) == (0, 0) and len(steps) < 10
    assert stats.disk_blocks_cached >= 6
    engine.loop.close()


def test_a_restart_knows_which_conversation_of_the_disk_was_used_last(tiny):
    engine = build_engine(tiny())
    for number in range(3):
        answers(engine, PROMPTS[number : number + 1], name=str(number))
    engine.handler(TierHandler).flush(engine.loop, 200)
    answers(engine, PROMPTS[:1], name="again")
    engine.handler(TierHandler).flush(engine.loop, 200)
    engine.loop.close()
    engine = build_engine(tiny())
    disk = engine.loop.planner.part(TierPart).lower.disk
    chains = [block_digests(Identity().root(), prompt[:96], 16) for prompt in PROMPTS[:3]]
    first, *others = [{disk.last_use(disk.find(digest))[0] for digest in chain} for chain in chains]
    assert min(first) > max(max(uses) for uses in others)
    engine.loop.close()


def test_an_end_that_leaves_state_unwritten_says_so(tiny, caplog):
    engine = build_engine(tiny())
    answers(engine, PROMPTS[:1])
    engine.handler(TierHandler).flush(engine.loop, 0.0)
    assert "0 s did not suffice to write all state to the lower tiers" in caplog.text
    assert "0 blocks or states of the host and more of the device are left" in caplog.text
    caplog.clear()
    engine.handler(TierHandler).flush(engine.loop, 200)
    assert not caplog.text
    engine.loop.close()


def test_corrupt_blocks_are_found_and_computed_again(tiny, tmp_path):
    engine = build_engine(tiny())
    expected, _ = answers(engine)
    engine.handler(TierHandler).flush(engine.loop, 200)
    engine.loop.close()
    (blocks,) = tmp_path.glob("disk/kv-*/blocks")
    with blocks.open("r+b") as file:
        for at in range(100, blocks.stat().st_size, 1000):
            file.seek(at)
            file.write(b"\x7f")
    engine = build_engine(tiny())
    after, cached = answers(engine)
    assert (after, cached) == (expected, [0] * 6)
    assert engine.loop.stats().blocks_corrupt >= 36
    engine.loop.close()


def test_another_model_finds_nothing_on_the_disk(tiny, checkpoint, tmp_path):
    from tests.checkpoints import make

    engine = build_engine(tiny())
    answers(engine)
    engine.handler(TierHandler).flush(engine.loop, 200)
    engine.loop.close()
    make(tmp_path / checkpoint.name, "Llama", max_position_embeddings=4096, eos_token_id=1, seed=9)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / checkpoint.name / name).write_bytes((checkpoint / name).read_bytes())
    engine = build_engine(tiny(model=str(tmp_path / checkpoint.name)))
    assert answers(engine, PROMPTS[:1])[1] == [0]
    assert engine.loop.stats().blocks_corrupt == 0
    engine.loop.close()


def test_blocks_of_transformers_code_are_read_after_a_restart_by_the_same_weights_alone(tiny, tmp_path):
    from tests.checkpoints import make

    make(tmp_path / "one", "Starcoder2")
    make(tmp_path / "two", "Starcoder2", seed=9)
    engine = build_engine(tiny(model=str(tmp_path / "one")))
    assert "Transformers" in engine.info.executor_reason
    prompt = [PROMPTS[0][:50]]
    expected, _ = answers(engine, prompt)
    engine.handler(TierHandler).flush(engine.loop, 200)
    engine.loop.close()
    engine = build_engine(tiny(model=str(tmp_path / "one")))
    assert answers(engine, prompt) == (expected, [48])
    engine.loop.close()
    engine = build_engine(tiny(model=str(tmp_path / "two")))
    assert answers(engine, prompt)[1] == [0]
    engine.loop.close()


def test_engines_share_blocks_that_one_of_them_put_into_the_remote_tier(tiny):
    fakeredis = pytest.importorskip("fakeredis")
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    remote = {"remote_cache": f"redis://127.0.0.1:{server.server_address[1]}/0", "disk_cache_dir": None}
    config = tiny(**remote, disk_cache_gb=EngineConfig.disk_cache_gb)
    one = build_engine(config)
    expected, _ = answers(one)
    one.handler(TierHandler).flush(one.loop, 200)
    one.loop.close()
    other = build_engine(config)
    tokens, found = answers(other)
    assert tokens == expected
    assert sorted(found)[1:] == [96] * 5, "on a busy machine one prompt's blocks may be late, and are computed"
    assert other.loop.stats().prefix_hits_on_remote == sum(found)
    server.shutdown()
    server.server_close()
    assert answers(other, name="again")[0] == expected, "a service that is gone costs nothing but misses"
    other.loop.close()


def test_a_remote_tier_that_is_not_there_is_named_at_the_start_and_used_once_it_comes(tiny, monkeypatch, caplog):
    fakeredis = pytest.importorskip("fakeredis")
    monkeypatch.setattr(tiers, "TierThreads", partial(TierThreads, pause=0.02))
    port = free_port()
    remote = {"remote_cache": f"redis://:secret@127.0.0.1:{port}/0", "disk_cache_dir": None}
    woken = threading.Event()
    with caplog.at_level(logging.WARNING, "holdfast.engine"):
        engine = build_engine(tiny(**remote, disk_cache_gb=EngineConfig.disk_cache_gb), wake=woken.set)
        assert "refused" in engine.info.remote_trouble and engine.loop.stats().remote_down == 1
        expected, _ = answers(engine, PROMPTS[:1])
        engine.handler(TierHandler).flush(engine.loop, 200)
    (said,) = caplog.messages
    assert f"redis://127.0.0.1:{port}/0 does not work: " in said and "refused" in said and "secret" not in said
    woken.clear()
    service = fakeredis.TcpFakeServer(("127.0.0.1", port), server_type="redis")
    threading.Thread(target=service.serve_forever, daemon=True).start()
    caplog.clear()
    deadline = time.monotonic() + 200
    while engine.loop.stats().remote_bytes_written < 6 * BLOCK:  # idle: found blocks wake it
        assert woken.wait(deadline - time.monotonic())
        woken.clear()
        engine.handler(TierHandler).exchange()
    assert engine.loop.stats().remote_down == 0
    assert [message for message in caplog.messages if "works again" in message]
    assert answers(engine, PROMPTS[:1], "again") == (expected, [96])
    engine.loop.close()
    service.shutdown()
    service.server_close()


async def test_an_engine_process_keeps_conversations_over_its_end(tiny):
    found = []
    for _ in range(2):
        client = await EngineClient.start(tiny())
        try:
            deltas = [
                delta
                async for delta in client.stream(
                    PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
                )
            ]
            usage = deltas[-1].usage
            found.append(
                ((usage.cached_tokens, usage.cached_by_tier), [token for delta in deltas for token in delta.tokens])
            )
        finally:
            await client.close()
    assert found[0][1] == found[1][1]
    assert [cached for cached, _ in found] == [(0, (0, 0, 0)), (96, (0, 96, 0))]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"host_cache_gb": 0}, "host_cache_gb is 0"),
        ({"prefix_sharing": False}, "prefix_sharing is off"),
        ({"executor": "padded", "remote_cache": "redis://localhost"}, "paged executor"),
        ({"remote_cache": ""}, "remote_cache is empty"),
    ],
)
def test_an_option_that_excludes_lower_tiers_is_refused_by_name(changes, match):
    with pytest.raises(ValueError, match=match):
        EngineConfig(disk_cache_dir="d", **changes)
    with pytest.raises(ValueError, match="no disk_cache_dir"):
        EngineConfig(disk_cache_gb=3)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_blocks_of_layers_of_two_head_sizes_come_back_from_the_disk(small, tiny, tmp_path, kv_cache_dtype):
    make(tmp_path / "gemma", "Gemma4Text")
    block = 16 * 2 * (2 * 2 * 16 + 2 * 32) * (1 if kv_cache_dtype == "fp8" else 4)
    sizes = {"cache_gb": 12 * block / 1e9, "host_cache_gb": 16 * block / 1e9}
    given = {"model": str(tmp_path / "gemma"), "kv_cache_dtype": kv_cache_dtype}
    plain = build_engine(small(prefix_sharing=False, **given))
    expected, _ = answers(plain)
    plain.loop.close()
    for cached in (0, 96):
        engine = build_engine(tiny(**given, **sizes))
        assert answers(engine, at_once=True) == (expected, [cached] * 6)
        engine.handler(TierHandler).flush(engine.loop, 200)
        engine.loop.close()
