"""Padded rows with a disk tier: the second turn after a restart has the tokens of the model alone, and finds the first.

The models are unmodified ones of Transformers, with random weights.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

import pytest

from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.engine.client.client import EngineClient
from holdfast.engine.process.build import build_engine
from holdfast.engine.process.parts.tiers import TierHandler
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution import disk_store
from tests.engine.conftest import SMALL, wait_for_end
from tests.padded_checks import FAMILIES, draw_prompts, generate_alone, write_tiny

SIZES = {"executor": "padded", "disk_cache_gb": 0.005, "host_cache_gb": 0.01, "eviction": "lru"}
"""Without costs every state is worth reading."""
FIRST, MORE = draw_prompts(40, 5)
OTHERS = draw_prompts(*[30] * 8, seed=11)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Makes a family's checkpoint directory and its module, once."""
    made = {}

    def model(family):
        if family not in made:
            directory = tmp_path_factory.mktemp("models") / family
            made[family] = directory, write_tiny(directory, family)
        return made[family]

    return model


@pytest.fixture
def engine_of(models, tmp_path):
    """Makes engines of a family over one directory. They are closed in the end."""
    engines = []

    def make(family, **options):
        disk = {"disk_cache_dir": str(tmp_path / "disk")}
        engines.append(
            build_engine(EngineConfig(**{"model": str(models(family)[0]), **SMALL, **SIZES, **disk, **options}))
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def answer(engine, prompt, max_tokens=9, name="r", **more):
    """An engine's tokens for a prompt, and how many of its tokens were found, in all and by tier."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    arrival = time.monotonic()
    engine.loop.add(Request(name, tuple(prompt), params, arrival=arrival, **more))
    tokens, cached = (), 0
    while engine.loop.stats().running + engine.loop.stats().waiting:
        for output in engine.loop.step() or ():
            tokens += output.tokens
            cached = output.cached_tokens
        assert time.monotonic() < arrival + 120
    return tokens, cached


def write_all(engine):
    engine.handler(TierHandler).flush(engine.loop, 200)


def second_turn(first):
    return (*FIRST, *first, *MORE)


@pytest.mark.always("llama", "mamba2", "rwkv")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_second_turn_after_a_restart_reads_the_first_and_has_the_tokens_of_the_model_alone(
    family, engine_of, models
):
    module = models(family)[1]
    engine = engine_of(family)
    first, cached = answer(engine, FIRST)
    assert (first, cached) == (generate_alone(module, FIRST, 9), 0)
    write_all(engine)
    engine.close()
    engine = engine_of(family)
    prompt = second_turn(first)
    tokens, cached = answer(engine, prompt)
    assert tokens == generate_alone(module, prompt, 9)
    stats = engine.loop.stats()
    assert cached == stats.prefix_hits_on_disk == len(FIRST) + 8, "all but the last drawn token"
    assert stats.blocks_corrupt == stats.tier_failures == 0


@pytest.mark.always("llama-3", "mamba2-1")
@pytest.mark.parametrize("steps_in_flight", [1, 3])
@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_states_come_back_from_the_disk_after_the_device_and_the_host_gave_them_up(
    family, steps_in_flight, engine_of, models
):
    module = models(family)[1]
    row = 256 * 2 * 2 * 32 * 4 if family == "llama" else 60_000
    engine = engine_of(
        family,
        cache_gb=1.3 * row / 1e9,
        host_cache_gb=0.4 * row / 1e9,
        max_sequences=1,
        steps_in_flight=steps_in_flight,
    )
    talks = [list(prompt) for prompt in OTHERS]
    for turn in range(3):
        for number, talk in enumerate(talks):
            tokens, _ = answer(engine, talk, 5, name=f"{turn}-{number}")
            assert tokens == generate_alone(module, talk, 5)
            talk += [*tokens, *draw_prompts(3, seed=number)[0]]
            engine.handler(TierHandler).exchange()
    stats = engine.loop.stats()
    assert stats.prefix_hits_on_disk > 0
    pool = engine.loop.planner.pool
    assert pool.kept.held_bytes == 0 and pool.host_free >= 0


def test_the_state_of_one_tenant_serves_no_other_after_a_restart(engine_of):
    engine = engine_of("llama")
    answer(engine, FIRST)
    write_all(engine)
    engine.close()
    engine = engine_of("llama")
    assert answer(engine, FIRST, identity=Identity(tenant="other"))[1] == 0
    assert answer(engine, FIRST, name="own")[1] == 32


def test_a_model_with_other_weights_reads_nothing(engine_of, models, tmp_path):
    engine = engine_of("llama")
    answer(engine, FIRST)
    write_all(engine)
    engine.close()
    module = write_tiny(tmp_path / "other", "llama", seed=5)
    engine = engine_of("llama", model=str(tmp_path / "other"))
    assert answer(engine, FIRST) == (generate_alone(module, FIRST, 9), 0)


def damage(disk, kind):
    (blocks,), (index,) = disk.glob("kv-*/blocks"), disk.glob("kv-*/index")
    match kind:
        case "numbers":
            with blocks.open("r+b") as file:
                for at in range(900, blocks.stat().st_size, 500):
                    file.seek(at)
                    file.write(b"\x7f")
        case "descriptions":
            with blocks.open("r+b") as file:
                for at in range(0, blocks.stat().st_size, 4096):
                    file.seek(at)
                    file.write(b"\x7f" * 16)
        case "cut blocks":
            os.truncate(blocks, 5000)
        case "cut index":
            os.truncate(index, 70)
        case "no blocks":
            blocks.unlink()


@pytest.mark.parametrize("kind", ["numbers", "descriptions", "cut blocks", "cut index", "no blocks"])
def test_damaged_files_cost_computing_time_and_a_line_in_the_log(kind, engine_of, models, tmp_path, caplog):
    module = models("llama")[1]
    engine = engine_of("llama")
    first, _ = answer(engine, FIRST)
    write_all(engine)
    engine.close()
    damage(tmp_path / "disk", kind)
    with caplog.at_level(logging.WARNING, "holdfast.engine"):
        engine = engine_of("llama")
        prompt = second_turn(first)
        assert answer(engine, prompt) == (generate_alone(module, prompt, 9), 0)
    assert any("corrupt" in line or "not whole" in line for line in caplog.messages)
    write_all(engine)
    engine.close()
    again = engine_of("llama")
    assert answer(again, prompt)[1] >= 48, "the disk is of use again"


def test_foreign_files_are_left_alone(engine_of, tmp_path):
    engine = engine_of("llama")
    answer(engine, FIRST)
    write_all(engine)
    engine.close()
    notes = tmp_path / "disk" / "notes.txt"
    notes.write_text("not ours")
    engine = engine_of("llama")
    assert answer(engine, FIRST)[1] == 32 and notes.read_text() == "not ours"


def test_a_disk_that_is_full_loses_states_and_no_answer(engine_of, models, monkeypatch, caplog):
    module = models("llama")[1]

    def full(*args):
        raise OSError(28, "No space left on device")

    engine = engine_of("llama")
    monkeypatch.setattr(disk_store.os, "pwritev", full)
    with caplog.at_level(logging.WARNING, "holdfast.engine"):
        for number, prompt in enumerate(OTHERS):
            assert answer(engine, prompt, name=str(number)) == (generate_alone(module, prompt, 9), 0)
            write_all(engine)
    assert len([line for line in caplog.messages if "could not write" in line]) == 1
    stats = engine.loop.stats()
    assert stats.tier_failures > 0 and stats.disk_blocks_cached == 0
    assert engine.loop.planner.pool.host_free > 0.9 * 0.01e9
    monkeypatch.undo()
    answer(engine, FIRST, name="later")
    write_all(engine)
    assert engine.loop.stats().disk_blocks_cached >= 48


def test_the_files_stay_within_their_size_and_the_latest_conversations_stay(engine_of, tmp_path):
    size = 200_000
    engine = engine_of("llama", disk_cache_gb=size / 1e9)
    for number, prompt in enumerate(OTHERS):
        answer(engine, prompt, name=str(number))
        write_all(engine)
    stats = engine.loop.stats()
    assert stats.disk_blocks_dropped > 0 and stats.disk_blocks_cached <= stats.disk_blocks_total
    engine.close()
    assert sum(file.stat().st_size for file in (tmp_path / "disk").glob("kv-*/*") if file.name != "about") <= size
    engine = engine_of("llama", disk_cache_gb=size / 1e9)
    found = [answer(engine, prompt, name=str(number))[1] > 0 for number, prompt in enumerate(reversed(OTHERS))]
    assert found[0] and not found[-1] and found == sorted(found, reverse=True), "the earliest went first"


def test_a_model_whose_states_serve_no_other_prompt_is_refused_a_disk(tmp_path):
    from tests.lm.padded.test_encoder_decoder import make

    make("T5").save_pretrained(tmp_path / "t5")
    config = {**SMALL, **SIZES, "disk_cache_dir": str(tmp_path / "disk")}
    with pytest.raises(ValueError, match="no state of this model serves a later prompt"):
        build_engine(EngineConfig(model=str(tmp_path / "t5"), **config))


def test_auto_brings_a_host_tier_on_a_cpu_and_a_size_of_0_is_refused(engine_of):
    engine = engine_of("llama", host_cache_gb="auto")
    assert engine.loop.stats().host_blocks_total > 0
    with pytest.raises(ValueError, match="host_cache_gb is 0"):
        engine_of("llama", host_cache_gb=0)


def test_a_second_engine_is_refused_the_directory(engine_of):
    engine_of("llama")
    with pytest.raises(ValueError, match="which another engine uses"):
        engine_of("llama")


async def test_what_was_written_survives_a_kill(engine_of, models, tmp_path):
    directory, module = models("llama")
    config = EngineConfig(model=str(directory), disk_cache_dir=str(tmp_path / "disk"), **SMALL, **SIZES)
    client = await EngineClient.start(config)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        first = tuple([token async for delta in client.stream(FIRST, params) for token in delta.tokens])
        while (await client.health()).disk_blocks_cached < len(FIRST):
            await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGKILL)
        await client.dead.wait()
        wait_for_end(client.pid)
    finally:
        await client.close()
    assert first == generate_alone(module, FIRST, 9)
    engine = engine_of("llama")
    prompt, identity = second_turn(first), Identity(engine.info.model, "", engine.info.precision)
    assert answer(engine, prompt, identity=identity) == (generate_alone(module, prompt, 9), len(FIRST) + 8)
