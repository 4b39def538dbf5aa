"""Greedy tokens with an adapter are those of the model that the adapter is merged into, whatever else runs."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from holdfast.lm.models.peft_files import UnsupportedAdapter
from holdfast.lm.parts.adapters.device import AdapterDevice
from holdfast.lm.parts.adapters.values import AdapterPlan
from tests.adapted_engine import Engine
from tests.adapters import drawn, generated, merged, write
from tests.checkpoints import VOCAB, make

RANKS = {"a": 4, "b": 8, "c": 16, "d": 32, "e": 64, "f": 128, "g": 5, "h": 100, "i": 16}
PARTIAL = {"g": ("q", "v"), "h": ("o", "down"), "i": ("gate", "k")}
"""Adapters of some modules only."""
REQUESTS, LONGEST_PROMPT, GENERATED = 30, 40, 14


@dataclass
class Case:
    """A model with adapters on disk, and requests with what the merged models generate for them."""

    model: Decoder
    module: Any
    directories: dict[str, Path]
    requests: list[tuple[str, Request]]
    """Each with the name of its adapter, or an empty one."""
    expected: dict[str, tuple[int, ...]]


@pytest.fixture(
    scope="module",
    params=[("Llama", "cpu"), ("Qwen2", "cpu"), pytest.param(("Llama", "cuda"), marks=pytest.mark.gpu)],
    ids="-".join,
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("adapters")
    family, device = request.param
    module = make(directory / "base", family)
    model = load(directory / "base", device=device, dtype="float32")
    assert isinstance(model, Decoder)
    modules, directories = {"": module}, {}
    for number, (name, rank) in enumerate(RANKS.items()):
        options = {"modules": PARTIAL[name]} if name in PARTIAL else {}
        weights = drawn(model.decoder, rank, seed=number, scale=0.5 + number / 4, **options)
        directories[name] = write(directory / name, weights)
        modules[name] = merged(module, weights)
    draw = random.Random(2)
    requests, expected = [], {}
    for number in range(REQUESTS):
        prompt = tuple(draw.randrange(1, VOCAB) for _ in range(draw.randint(1, LONGEST_PROMPT)))
        wanted = draw.randint(1, GENERATED)
        params = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True)
        name = ("", *RANKS)[number % 10]
        requests.append((name, Request(str(number), prompt, params)))
        expected[str(number)] = generated(modules[name], prompt, wanted)
    return Case(model, module, directories, requests, expected)


def run(case: Case, **options: Any) -> Engine:
    """All requests of a case, at once."""
    engine = Engine(case.model, **options)
    ids = {"": ""} | {name: engine.register(name, directory) for name, directory in case.directories.items()}
    for name, request in case.requests:
        engine.add(request, ids[name])
    engine.run()
    engine.close()
    return engine


@pytest.mark.each_value
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_nine_adapters_of_all_ranks_beside_none_give_the_tokens_of_their_merged_models(
    case: Case, steps_in_flight: int
) -> None:
    engine = run(case, steps_in_flight=steps_in_flight, budget=512)
    assert engine.tokens == case.expected
    assert max(len(set(plan.part(AdapterPlan).slots)) for plan in engine.plans) == 10
    plain = [generated(case.module, tuple(request.prompt), request.params.max_tokens) for _, request in case.requests]
    assert sum(tokens != case.expected[str(number)] for number, tokens in enumerate(plain)) > 20


def test_tokens_are_equal_in_chunks_when_memory_is_short(case: Case) -> None:
    engine = run(case, budget=24, blocks=30)
    assert engine.tokens == case.expected
    assert any(plan.preempted for plan in engine.plans)


def test_tokens_are_equal_when_suspended_state_is_swapped_in_again(case: Case) -> None:
    engine = run(case, budget=48, blocks=20, host_blocks=200)
    assert engine.tokens == case.expected
    assert any(plan.copies.swap_in for plan in engine.plans)


@pytest.mark.parametrize("slots", [1, 2])
def test_tokens_are_equal_with_more_adapters_than_slots(case: Case, slots: int) -> None:
    engine = run(case, slots=slots)
    assert engine.tokens == case.expected
    assert engine.adapters.loads >= len(RANKS) > len(engine.slots.slots)


def test_adapters_that_do_not_fit_the_host_are_read_again(case: Case) -> None:
    one = Engine(case.model, slots=1)
    biggest = max(one.store.read(name, path).info.bytes for name, path in case.directories.items())
    one.close()
    engine = run(case, slots=2, host_gb=1.5 * biggest / 1e9)
    assert engine.tokens == case.expected


def test_an_adapter_that_is_registered_again_takes_its_room_on_the_host_once(case: Case) -> None:
    engine = Engine(case.model)
    bytes_of = {name: engine.store.read(name, case.directories[name]).info.bytes for name in ("a", "b")}
    engine.close()
    engine = Engine(case.model, host_gb=(sum(bytes_of.values()) + 0.5 * bytes_of["a"]) / 1e9)
    ids = [engine.register(name, case.directories[name]) for name in ("a", "b", "b", "a", "b")]
    assert all(engine.store.kept(adapter) is not None for adapter in ids), "both have room"
    engine.store.forget(ids[0])
    engine.store.forget(ids[1])
    ids = [engine.register(name, case.directories[name]) for name in ("a", "b")]
    assert all(engine.store.kept(adapter) is not None for adapter in ids), "forgotten adapters give their room back"
    engine.close()


def test_a_name_with_other_content_finds_no_cached_tokens(case: Case, tmp_path: Path) -> None:
    engine = Engine(case.model)
    request = Request("0", tuple(range(1, 33)), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    weights = drawn(case.model.decoder, 8, seed=70)
    first = engine.register("x", write(tmp_path, weights))
    for name in ("0", "1"):
        engine.add(replace(request, id=name), first)
        engine.run()
    other = engine.register("x", write(tmp_path, drawn(case.model.decoder, 8, seed=71)))
    for name, adapter in (("2", other), ("3", ""), ("4", first)):
        engine.add(replace(request, id=name), adapter)
        engine.run()
    engine.close()
    assert first != other and first.split("@")[0] == other.split("@")[0] == "x"
    assert engine.cached == {"0": 0, "1": 28, "2": 0, "3": 0, "4": 28}


def test_an_adapter_whose_files_changed_ends_its_requests_and_no_others(case: Case, tmp_path: Path) -> None:
    engine = Engine(case.model, host_gb=1e-3, slots=1)
    kept = engine.register("kept", write(tmp_path / "kept", drawn(case.model.decoder, 16, seed=0)))
    lost = engine.register("lost", write(tmp_path / "lost", drawn(case.model.decoder, 4, seed=1)))
    engine.store._packed.clear()
    write(tmp_path / "lost", drawn(case.model.decoder, 4, seed=2))
    _, request = case.requests[1]
    engine.add(replace(request, id="1"), lost)
    engine.add(replace(request, id="2"), kept)
    engine.add(replace(request, id="3"))
    tokens = engine.run()
    engine.close()
    assert tokens["1"] == () and tokens["2"] and tokens["3"]
    assert list(engine.part.refused) == [("1", lost)]


def test_steps_without_an_adapter_name_no_slots_and_upload_no_tiles(case: Case) -> None:
    engine = Engine(case.model)
    engine.register("a", case.directories["a"])
    engine.add(case.requests[0][1])
    engine.run()
    engine.close()
    assert all(plan.part(AdapterPlan).slots == () and plan.part(AdapterPlan).loads == () for plan in engine.plans)
    assert engine.device.memory.batch.stage(engine.plans[0]).kind == 0


def test_an_adapter_above_the_rank_limit_is_refused(case: Case, tmp_path: Path) -> None:
    device = AdapterDevice(case.model, EngineConfig(max_adapters=1, max_adapter_rank=8))
    with pytest.raises(UnsupportedAdapter, match="rank 16; it must be from 1 to 8"):
        device.store.read("x", write(tmp_path, drawn(case.model.decoder, 16, seed=0)))


def test_an_adapter_larger_than_the_host_has_room_for_is_refused(case: Case) -> None:
    device = AdapterDevice(case.model, EngineConfig(max_adapters=1, max_adapter_rank=128, adapter_host_gb=1e-6))
    with pytest.raises(UnsupportedAdapter, match="adapter_host_gb is 1e-06"):
        device.store.read("x", case.directories["f"])


def test_slots_are_counted_beside_the_cache(case: Case) -> None:
    config = EngineConfig(max_adapters=3, max_adapter_rank=16, token_budget=32, max_sequences=4, cache_gb=0.01)
    device = PagedDevice(case.model, config, parts=[AdapterDevice(case.model, config)])
    hidden, inner, layers = 64, 128, 2
    widths = (hidden * 3 + (64 + 32 + 32)) + (64 + hidden) + (hidden * 2 + 2 * inner) + (inner + hidden)
    outputs = (64 + 32 + 32) + hidden + 2 * inner + hidden
    gains = (3 + 1) * layers * outputs * 4 if case.model.spec.device.type == "cpu" else 0
    assert device.measure().adapters == 3 * layers * (16 * widths * 4 + 7 * 8) + gains


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_reads_the_same_adapters_and_merges_them_to_the_same_tokens(case: Case) -> None:
    peft = pytest.importorskip("peft")
    for name in ("c", "g"):
        base = copy.deepcopy(case.module)  # it merges in place
        with_adapter = peft.PeftModel.from_pretrained(base, str(case.directories[name])).merge_and_unload()
        for _, request in [pair for pair in case.requests if pair[0] == name]:
            found = generated(with_adapter, tuple(request.prompt), request.params.max_tokens)
            assert found == case.expected[request.id]
