"""Engines of models with recurrent layers: turns of a conversation, sizes, and what they refuse."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.config import DEFAULT_SEQUENCES
from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.engine.process.build import Engine, build, build_engine
from holdfast.engine.process.parts.tiers import TierHandler
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution import paged_device, state_memory
from holdfast.lm.models.loader import decoder_spec, load
from holdfast.lm.types import LanguageLoop
from tests.adapters import drawn as drawn_adapter
from tests.adapters import merged, write
from tests.checkpoints import VOCAB, make
from tests.combinations.place import paced

SIZES: dict[str, Any] = dict(
    device="cpu", threads=1, block_size=4, cache_gb=0.01, max_sequences=4, max_model_len=200, token_budget=32
)


@pytest.fixture(
    scope="module", params=["Qwen3_5Text", "Qwen3Next", "Lfm2", "GraniteMoeHybrid", "NemotronH", "FalconH1"]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    return make(directory, request.param), directory


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for what does not differ by family."""
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    make(directory, "Qwen3_5Text")
    return directory


@pytest.fixture
def loop(served: tuple[Any, Path]) -> Iterator[LanguageLoop]:
    built, info = build(EngineConfig(model=str(served[1]), **SIZES))
    assert info.executor == "paged"
    yield built
    built.close()


def generated(module: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = module.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return tuple(tokens[0, len(prompt) :].tolist())


def answers(loop: LanguageLoop, *requests: Request) -> dict[str, tuple[tuple[int, ...], int]]:
    """The tokens of each request, and how many tokens of its prompt were not computed."""
    tokens, cached = {each.id: () for each in requests}, dict[str, int]()
    for each in requests:
        loop.add(each)
    while loop.has_work():
        for output in loop.step() or ():
            tokens[output.request_id] += output.tokens
            cached[output.request_id] = output.cached_tokens
    return {name: (found, cached[name]) for name, found in tokens.items()}


def request(name: str, prompt: tuple[int, ...], count: int = 9) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))


def drawn(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, VOCAB) for _ in range(length))


def test_the_next_turn_computes_only_its_new_tokens(served: tuple[Any, Path], loop: LanguageLoop) -> None:
    module, prompt = served[0], drawn(41, seed=1)
    for turn in range(3):
        found, cached = answers(loop, request(str(turn), prompt))[str(turn)]
        assert found == generated(module, prompt, 9)
        assert cached == (0 if not turn else len(prompt) - len(drawn(7, seed=turn)) - 1)
        prompt += found + drawn(7, seed=turn + 1)


@pytest.mark.always("Qwen3_5Text", "NemotronH")
def test_branches_of_a_conversation_begin_at_the_end_of_the_same_turn(
    served: tuple[Any, Path], loop: LanguageLoop
) -> None:
    first = drawn(30, seed=5)
    said, _ = answers(loop, request("first", first))["first"]
    branches = {str(seed): first + said + drawn(seed, seed=seed) for seed in (3, 6, 11)}
    found = answers(loop, *(request(name, prompt) for name, prompt in branches.items()))
    for name, prompt in branches.items():
        assert found[name] == (generated(served[0], prompt, 9), len(first + said) - 1)


@pytest.mark.always("Qwen3_5Text", "FalconH1")
def test_drafts_change_no_token_of_a_conversation(served: tuple[Any, Path]) -> None:
    few = SamplingParams(temperature=0.5, seed=1, max_tokens=30, ignore_eos=True, logit_bias=((3, 40.0), (7, 39.0)))
    said = dict[str, list[tuple[tuple[int, ...], int]]]()
    for speculation in ("off", "ngram"):
        with paced("free"):
            loop, info = build(EngineConfig(model=str(served[1]), **SIZES, speculation=speculation))
        assert info.executor == "paged"
        prompt, said[speculation] = drawn(5, seed=1), []
        for turn in range(3):
            found = answers(loop, Request(str(turn), prompt, few))[str(turn)]
            said[speculation].append(found)
            prompt += found[0] + drawn(4, seed=turn + 1)
        stats = loop.stats()
        loop.close()
    assert [tokens for tokens, _ in said["ngram"]] == [tokens for tokens, _ in said["off"]]
    assert stats.tokens_drafted >= stats.drafts_accepted > 0
    assert all(cached >= 30 * turn for turn, (_, cached) in enumerate(said["ngram"])), "each turn goes on from the last"


@pytest.mark.always("Qwen3_5Text")
def test_kept_inputs_of_drafts_count_as_memory_of_running_sequences(served: tuple[Any, Path]) -> None:
    spec, rows = load(served[1], device="cpu", dtype="float32").spec, dict[str, int]()
    for speculation in ("auto", "ngram"):
        loop, info = build(EngineConfig(model=str(served[1]), **SIZES, speculation=speculation))
        rows[speculation] = info.memory.rows
        loop.close()
    assert rows["auto"] == SIZES["max_sequences"] * spec.state_bytes
    assert rows["ngram"] == rows["auto"] + 64 * spec.kept_bytes > rows["auto"]


@pytest.mark.always("Qwen3_5Text")
def test_snapshots_take_their_share_of_the_cache(served: tuple[Any, Path]) -> None:
    shapes = {}
    for share in (0.25, 0.75):
        config = EngineConfig(model=str(served[1]), **SIZES, snapshot_share=share, host_cache_gb=0.004)
        engine = build_engine(config)
        memory, info = engine.info.memory, engine.info
        slot = memory.rows // SIZES["max_sequences"]
        assert memory.cache + memory.snapshots * slot == pytest.approx(1e7, abs=slot)
        assert memory.snapshots == int(1e7 * share) // slot
        assert memory.host_snapshots == int(4e6 * share) // slot
        shapes[share] = info.num_blocks
        engine.close()
    assert shapes[0.75] < shapes[0.25] / 2


def test_by_default_running_sequences_keep_states_in_a_quarter_of_the_cache_memory(one: Path) -> None:
    slot = load(one, device="cpu", dtype="float32").spec.state_bytes
    sizes = {name: value for name, value in SIZES.items() if name != "max_sequences"}
    for cache, wanted in ((40 * slot, 10), (4000 * slot, DEFAULT_SEQUENCES)):
        engine = build_engine(EngineConfig(model=str(one), **sizes | {"cache_gb": cache / 1e9}))
        assert (engine.info.max_sequences, engine.info.memory.rows) == (wanted, wanted * slot)
        engine.close()


def test_a_given_number_of_sequences_is_kept_whatever_share_their_states_take(one: Path) -> None:
    slot = load(one, device="cpu", dtype="float32").spec.state_bytes
    engine = build_engine(EngineConfig(model=str(one), **SIZES | {"cache_gb": 40 * slot / 1e9, "max_sequences": 99}))
    assert (engine.info.max_sequences, engine.info.memory.rows) == (99, 99 * slot)
    engine.close()


def test_more_states_than_the_memory_holds_are_refused_with_the_number_that_fits(
    one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = load(one, device="cpu", dtype="float32").spec.state_bytes
    monkeypatch.setattr(paged_device, "memory_of", lambda device: (70 * slot, 100 * slot))
    config = EngineConfig(model=str(one), **SIZES | {"max_sequences": 71})
    with pytest.raises(MemoryError, match=r"max_sequences is 71, .* room for the states of 70 sequences; lower it"):
        build_engine(config)


def test_the_first_copies_of_states_to_the_host_are_made_at_the_start(
    one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = list[int]()

    def copy(source: Any, sources: Any, target: Any, targets: Any) -> None:
        copied.append(len(sources))

    monkeypatch.setattr(state_memory, "copy_blocks", copy)
    for host, wanted in ((0.004, 2), (0.0, 0)):
        engine = build_engine(EngineConfig(model=str(one), **SIZES | {"host_cache_gb": host}))
        tensors = len(load(one, device="cpu", dtype="float32").spec.state)
        assert copied == [1] * wanted * tensors, "each tensor of one state, there and back"
        copied.clear()
        engine.close()


@pytest.mark.always("Qwen3_5Text-*")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tuning": True, "tp": 2}, "a model with recurrent layers is tuned on one device"),
        ({"pp": 2, "tp": 3}, "tp is 3; it must divide the model's 4 attention heads"),
    ],
)
def test_options_that_recurrent_layers_do_not_have_are_refused(
    served: tuple[Any, Path], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        build_engine(EngineConfig(model=str(served[1]), **SIZES, **options, executor="paged")).close()


@pytest.mark.always("Qwen3_5Text", "NemotronH", "FalconH1")
def test_turns_with_adapters_go_on_from_their_own_states(served: tuple[Any, Path], tmp_path: Path) -> None:
    module, directory = served
    spec = decoder_spec(directory)
    given = {name: drawn_adapter(spec, 3, seed=seed) for seed, name in enumerate("ab")}
    paths = {name: str(write(tmp_path / name, weights)) for name, weights in given.items()}
    config = EngineConfig(
        model=str(directory), **SIZES, adapter=tuple(f"{name}={path}" for name, path in paths.items())
    )
    engine = build_engine(config)
    assert engine.info.executor == "paged"
    ids = {info.name: info.id for info in engine.info.adapters} | {"": ""}
    modules = {name: merged(module, weights) for name, weights in given.items()} | {"": module}
    prompts = dict.fromkeys(ids, drawn(29, seed=2))
    for turn in range(2):
        asked = [
            replace(request(f"{name}{turn}", prompt), identity=Identity(adapter=ids[name]))
            for name, prompt in prompts.items()
        ]
        found = answers(engine.loop, *asked)
        for name, prompt in prompts.items():
            said, cached = found[f"{name}{turn}"]
            assert said == generated(modules[name], prompt, 9)
            assert cached == (0 if not turn else len(prompt) - 6)
            prompts[name] = prompt + said + drawn(5, seed=turn + 3)
    assert len({*prompts.values()}) == 3
    engine.close()


def with_disk(served: tuple[Any, Path], disk: Path, **changes: Any) -> Engine:
    """An engine with a disk tier. With `lru` nothing is priced: a tiny model computes faster than a disk reads."""
    options = {"host_cache_gb": 0.004, "disk_cache_dir": str(disk), "disk_cache_gb": 0.02, "eviction": "lru", **changes}
    return build_engine(EngineConfig(model=str(served[1]), **SIZES, **options))


def turn(engine: Engine, name: str, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The answer to a prompt, and how many of its tokens were not computed. The engine then writes what is idle."""
    handler, tokens, cached = engine.handler(TierHandler), tuple[int, ...](), 0
    engine.loop.add(replace(request(name, prompt), arrival=time.monotonic()))
    while engine.loop.stats().waiting or engine.loop.stats().running:
        handler.exchange()
        for output in engine.loop.step() or ():
            tokens, cached = tokens + output.tokens, output.cached_tokens
    handler.flush(engine.loop, 200)
    return tokens, cached


def conversation(engine: Engine, turns: int) -> tuple[int, ...]:
    """The tokens of a conversation of this many turns, with the prompt of the next one."""
    prompt = drawn(41, seed=1)
    for number in range(turns):
        said, _ = turn(engine, str(number), prompt)
        prompt += said + drawn(7, seed=number + 2)
    return prompt


@pytest.mark.always("Qwen3_5Text", "NemotronH")
def test_an_engine_goes_on_from_what_another_has_left_on_the_disk(served: tuple[Any, Path], tmp_path: Path) -> None:
    engine = with_disk(served, tmp_path / "disk")
    prompt = conversation(engine, turns=2)
    engine.close()
    engine = with_disk(served, tmp_path / "disk")
    assert engine.info.executor == "paged" and engine.loop.stats().disk_snapshots_kept == 2
    assert turn(engine, "next", prompt) == (generated(served[0], prompt, 9), len(prompt) - 7 - 1)
    stats = engine.loop.stats()
    assert stats.prefix_hits_on_disk == len(prompt) - 8 and stats.blocks_corrupt == 0
    engine.close()


@pytest.mark.always("Qwen3_5Text-*")
@pytest.mark.parametrize("store", ["states", "blocks"])
def test_a_flipped_bit_on_the_disk_costs_computing_and_no_wrong_token(
    served: tuple[Any, Path], tmp_path: Path, store: str
) -> None:
    engine = with_disk(served, tmp_path / "disk")
    prompt = conversation(engine, turns=1)
    engine.close()
    (path,) = (tmp_path / "disk").glob("kv-*/blocks" if store == "blocks" else "kv-*/states/kv-*/blocks")
    data = bytearray(path.read_bytes())
    at = next(at for at in range(256, len(data)) if data[at])  # after a state's description
    data[at] ^= 1
    path.write_bytes(data)
    engine = with_disk(served, tmp_path / "disk")
    assert turn(engine, "next", prompt) == (generated(served[0], prompt, 9), 0)
    assert engine.loop.stats().blocks_corrupt == 1
    engine.close()


@pytest.mark.always("Qwen3_5Text")
def test_a_state_that_a_kill_left_incomplete_is_dropped_at_the_start(
    served: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = with_disk(served, tmp_path / "disk")
    prompt = conversation(engine, turns=1)
    engine.close()
    (index,) = (tmp_path / "disk").glob("kv-*/states/kv-*/index")
    has_pieces = index.read_bytes()[64:68] != bytes(4)  # a small state is one piece, which is there or not
    with index.open("r+b") as file:
        file.write(bytes(64))  # the entry of the first piece
    with caplog.at_level(logging.WARNING, "holdfast.engine"):
        engine = with_disk(served, tmp_path / "disk")
    assert ("1 recurrent states in" in caplog.text) == has_pieces
    assert engine.loop.stats().disk_snapshots_kept == 0
    assert turn(engine, "next", prompt) == (generated(served[0], prompt, 9), 0)
    engine.close()


@pytest.mark.always("Qwen3_5Text")
def test_the_snapshots_share_of_the_disk_follows_the_option(served: tuple[Any, Path], tmp_path: Path) -> None:
    totals = []
    for share in (0.25, 0.75):
        engine = with_disk(served, tmp_path / "disk", snapshot_share=share)
        stats = engine.loop.stats()
        totals.append((stats.disk_snapshots_total, stats.disk_blocks_total))
        engine.close()
    (few, many_blocks), (many, few_blocks) = totals
    assert many == pytest.approx(3 * few, abs=3) and many_blocks == pytest.approx(3 * few_blocks, abs=3)
