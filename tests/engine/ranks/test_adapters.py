"""Adapters in engines of several ranks: the tokens of one process, whichever slots and ranks they pass through."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from types import SimpleNamespace

import pytest
import torch

from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.engine.messages import Refused
from holdfast.engine.process.build import Engine, build_engine
from holdfast.engine.process.parts.adapters import AdapterHandler, FilesOfRanks
from holdfast.lm.config import EngineConfig
from holdfast.lm.models.loader import decoder_spec
from holdfast.lm.models.peft_files import AdapterWeights
from holdfast.lm.parts.adapters.messages import (
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from tests.adapters import drawn, write
from tests.checkpoints import VOCAB, make
from tests.engine.conftest import SMALL
from tests.invariants import check_scheduler
from tests.tokenizers_made import byte_level

LAYOUTS = [(2, 1), (1, 2), (2, 2)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
ADAPTERS = {
    "all": (8, None),
    "some": (4, ("q", "o", "gate")),
    "rest": (16, ("k", "v", "up", "down")),
    "dora": (4, None),
}
"""Rank and modules of each adapter. "dora" is a DoRA."""

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of a model and of its adapters."""
    root = tmp_path_factory.mktemp("adapted")
    make(root / "model", "Llama", num_hidden_layers=4, max_position_embeddings=256, eos_token_id=1)
    byte_level().save(str(root / "model" / "tokenizer.json"))
    sizes = decoder_spec(root / "model")
    for seed, (name, (rank, modules)) in enumerate(ADAPTERS.items()):
        chosen = {} if modules is None else {"modules": modules}
        weights = drawn(sizes, rank, seed=seed, strength=0.8, **chosen)
        write(root / name, with_magnitudes(weights) if name == "dora" else weights)
    return {name: root / name for name in ("model", *ADAPTERS)}


@pytest.fixture(scope="module")
def make_engine(directories: dict[str, Path]) -> Make:
    """Makes engines with two slots and two of the adapters, by the options in which they differ."""
    given = tuple(f"{name}={directories[name]}" for name in ("all", "some"))
    options = {**SMALL, "model": str(directories["model"]), "token_budget": 48, "adapter": given, "max_adapters": 2}
    return lambda **changes: build_engine(EngineConfig(**{**options, **changes}))


@pytest.fixture(scope="module")
def alone(make_engine: Make) -> Iterator[Engine]:
    """An engine of one process."""
    engine = make_engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, make_engine: Make) -> Iterator[Engine]:
    """An engine of this layout."""
    tp, pp = request.param
    engine = make_engine(tp=tp, pp=pp)
    yield engine
    engine.close()


layouts = pytest.mark.parametrize("engine", LAYOUTS, ids=str, indirect=True, scope="module")


def with_magnitudes(weights: AdapterWeights) -> AdapterWeights:
    """The adapter as a DoRA with random magnitudes."""
    draw = torch.Generator().manual_seed(9)
    pairs = {
        key: pair._replace(magnitude=torch.rand(len(pair.b), generator=draw) + 0.5)
        for key, pair in weights.pairs.items()
    }
    return AdapterWeights(pairs, weights.names)


def answers(engine: Engine, kind: type, seconds: float = 200.0) -> list:
    """The handler's answers, once one of this kind is among them."""
    found: list = []
    deadline = time.monotonic() + seconds
    handler = engine.handler(AdapterHandler)
    while not any(isinstance(each, kind) for each in found):
        assert time.monotonic() < deadline, found
        if engine.loop.has_work():
            engine.loop.step()
        found += handler.answers()
    return found


def load(engine: Engine, name: str, directory: Path) -> str:
    """Load an adapter while the engine runs. Returns its id."""
    engine.handler(AdapterHandler).load(1, name, str(directory))
    [loaded] = [each for each in answers(engine, AdapterLoaded) if isinstance(each, AdapterLoaded)]
    return str(loaded.info.id)


def run(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    """Tokens of each request."""
    given: dict[str, tuple[int, ...]] = {request.id: () for request in requests}
    waiting, step = list(requests), 0
    while waiting or engine.loop.has_work():
        if waiting and step % 2 == 0:
            engine.loop.add(waiting.pop(0))
        for output in engine.loop.step() or ():
            given[output.request_id] += tuple(output.tokens)
        check_scheduler(engine.loop.planner)
        step += 1
    return given


def requests_of(ids: list[str], count: int, seed: int) -> list[Request]:
    """Requests with the base model and these adapters in turns."""
    draw = random.Random(seed)
    return [
        Request(
            f"{number}",
            tuple(draw.choices(range(1, VOCAB), k=draw.randint(1, 60))),
            GREEDY,
            identity=Identity(adapter=("", *ids)[number % (1 + len(ids))]),
        )
        for number in range(count)
    ]


@pytest.mark.always("(2, 1)", "(1, 2)")
@layouts
def test_a_mixed_batch_gets_the_tokens_of_one_process(
    engine: Engine, alone: Engine, directories: dict[str, Path]
) -> None:
    """Three adapters share two slots, so that slots are written again while others are in use."""
    ids = [adapter.id for adapter in engine.info.adapters]
    assert ids == [adapter.id for adapter in alone.info.adapters]
    for each in (engine, alone):
        third = load(each, "rest", directories["rest"])
    requests = requests_of([*ids, third], 16, seed=3)
    expected, loads = run(alone, requests), engine.loop.stats().adapter_loads
    assert run(engine, requests) == expected
    assert engine.loop.stats().adapter_loads > loads + 3
    plain = [Request(request.id, request.prompt, GREEDY) for request in requests]
    base = run(alone, plain)
    adapted = [request for request in requests if request.identity.adapter]
    assert sum(expected[request.id] != base[request.id] for request in adapted) > len(adapted) // 2
    for each in (engine, alone):
        each.handler(AdapterHandler).receive(UnloadAdapter(2, third))
        assert AdapterUnloaded(2) in answers(each, AdapterUnloaded)


@pytest.mark.always("(2, 1)", "(1, 2)")
@layouts
def test_a_dora_that_takes_turns_in_a_slot_gets_the_tokens_of_one_process(
    engine: Engine, alone: Engine, directories: dict[str, Path]
) -> None:
    """Three adapters share two slots, and the norms of a DoRA's rows are sums over all ranks of a stage."""
    first = engine.info.adapters[0].id
    for each in (engine, alone):
        ids = [load(each, name, directories[name]) for name in ("dora", "rest")]
    requests = requests_of([*ids, first], 16, seed=7)
    expected, loads = run(alone, requests), engine.loop.stats().adapter_loads
    assert run(engine, requests) == expected
    assert engine.loop.stats().adapter_loads > loads + 3
    undone = [replace(request, identity=Identity(adapter="")) for request in requests]
    assert any(run(alone, undone)[str(number)] != expected[str(number)] for number in range(1, 16, 4))
    for each in (engine, alone):
        for number, adapter in enumerate(ids):
            each.handler(AdapterHandler).receive(UnloadAdapter(5 + number, adapter))
            assert AdapterUnloaded(5 + number) in answers(each, AdapterUnloaded)


@pytest.mark.always("(2, 1)")
@layouts
def test_an_adapter_whose_files_are_gone_ends_its_requests_and_nothing_else(
    engine: Engine, alone: Engine, directories: dict[str, Path], tmp_path: Path
) -> None:
    """Rank 0 still has the adapter on the host; the other ranks read their parts when a plan loads it."""
    copy = tmp_path / "copy"
    copytree(directories["rest"], copy)
    lost = load(engine, "rest", copy)
    rmtree(copy)
    known = engine.info.adapters[0].id
    requests = requests_of([lost, known], 3, seed=5)
    for request in requests:
        engine.loop.add(request)
    refused = [each for each in answers(engine, Refused) if isinstance(each, Refused)]
    assert [each.request_id for each in refused] == ["1"]
    assert "adapter rest have changed or are gone" in refused[0].reason
    while engine.loop.has_work():
        engine.loop.step()
    again = requests_of([known], 4, seed=6)
    assert run(engine, again) == run(alone, again)
    engine.handler(AdapterHandler).receive(UnloadAdapter(3, lost))
    answers(engine, AdapterUnloaded)


@pytest.mark.always("(2, 1)")
@layouts
def test_an_adapter_that_does_not_fit_is_refused_by_rank_0(engine: Engine, tmp_path: Path) -> None:
    engine.handler(AdapterHandler).receive(LoadAdapter(4, "none", str(tmp_path)))
    [refused] = answers(engine, AdapterRefused)
    assert "adapter_config.json of the adapter cannot be read" in refused.reason


@pytest.mark.always("(2, 1)", "(1, 2)")
@layouts
def test_all_ranks_slots_are_counted(engine: Engine, alone: Engine) -> None:
    assert engine.info.memory.adapters > 0
    if engine.info.tp == 1:
        assert engine.info.memory.adapters == alone.info.memory.adapters, "each stage has its own layers"
    else:
        assert engine.info.memory.adapters > alone.info.memory.adapters, "each shard has whole As of some modules"


def test_the_directory_that_other_ranks_get_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list = []
    info = SimpleNamespace(id="a@1", name="a")
    own = SimpleNamespace(register=lambda read: info)
    device = SimpleNamespace(announce=told.append)
    monkeypatch.chdir(tmp_path)
    FilesOfRanks(own, device).register(SimpleNamespace(directory=Path("here")))  # type: ignore[arg-type]
    assert told[0].directory == str(tmp_path / "here")
