"""Engines of several ranks with hybrid models: turns that are found again, memory, and the end of a rank."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.types import Identity
from holdfast.engine.process.build import Engine, build_engine
from holdfast.engine.ranks.ranks import RankFailure
from holdfast.lm.config import EngineConfig
from holdfast.lm.models.loader import decoder_spec
from holdfast.lm.types import COPIES_AHEAD_BYTES
from tests.adapters import drawn as drawn_adapter
from tests.adapters import merged, write
from tests.checkpoints import make
from tests.engine.conftest import wait_for_end
from tests.engine.process.parts.test_states import SIZES, answers, drawn, generated, request
from tests.engine.ranks.test_adapters import with_magnitudes
from tests.hybrid_engines import play
from tests.long import then_long

PAIRS: dict[str, Any] = dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
"""Layers for two stages, each with attention and a recurrent layer."""
UNEVEN: dict[str, Any] = dict(
    num_hidden_layers=6,
    layer_types=["linear_attention", *["full_attention"] * 2] + ["linear_attention"] * 2 + ["full_attention"],
)
"""Layers for two stages: one recurrent layer and two with attention, and the other way round."""


@pytest.mark.always("1-2-*")
@pytest.mark.parametrize(("tp", "pp", "seeds"), then_long(2, [(2, 1, (9,)), (1, 2, (9,)), (2, 2, (9,))]))
def test_answers_of_random_histories_on_several_ranks_are_those_of_transformers(
    tmp_path: Path, tp: int, pp: int, seeds: tuple[int, ...]
) -> None:
    torch.set_num_threads(1)
    module, seen = make(tmp_path, "Qwen3_5Text", **PAIRS), Counter[str]()
    for seed in seeds:
        seen += play(seed, module, tmp_path, 45, pairs=2, tp=tp, pp=pp)
    assert seen["suspensions"] > 0
    assert seen["snapshot_hits"] > 9
    assert seen["snapshots_swapped_in"] > 4
    assert seen["ties"] < seen["tokens"] / 100


@pytest.mark.always("Bamba-*", "Qwen3_5Moe*")
@pytest.mark.parametrize(
    ("family", "changes", "tp", "pp"),
    [
        ("Bamba", dict(mamba_n_groups=1), 2, 1),  # two devices have a half of one group each
        ("NemotronH", {}, 4, 1),
        ("Lfm2", dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2), 2, 2),
        ("Qwen3_5MoeText", UNEVEN, 1, 2),
    ],
)
def test_the_next_turn_computes_only_its_new_tokens(
    tmp_path: Path, family: str, changes: dict[str, Any], tp: int, pp: int
) -> None:
    torch.set_num_threads(1)
    module = make(tmp_path, family, **changes)
    engine, prompt = build_engine(EngineConfig(model=str(tmp_path), **SIZES, tp=tp, pp=pp)), drawn(41, seed=1)
    for turn in range(3):
        found, cached = answers(engine.loop, request(str(turn), prompt))[str(turn)]
        assert found == generated(module, prompt, 9)
        assert cached == (0 if not turn else len(prompt) - len(drawn(7, seed=turn)) - 1)
        prompt += found + drawn(7, seed=turn + 1)
    engine.close()


@pytest.mark.always("Qwen3_5Text-*")
@pytest.mark.parametrize(
    ("family", "changes", "tp", "pp"),
    then_long(
        3,
        [
            ("Qwen3_5Text", PAIRS, 2, 2),
            ("NemotronH", {}, 4, 1),
            ("Lfm2", dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2), 1, 2),
            ("Bamba", dict(mamba_n_groups=1), 2, 1),  # two devices have a half of one group each
            ("FalconH1", {}, 2, 1),
        ],
    ),
)
def test_adapters_on_several_ranks_go_on_from_their_own_states(
    tmp_path: Path, family: str, changes: dict[str, Any], tp: int, pp: int
) -> None:
    torch.set_num_threads(1)
    module = make(tmp_path / "model", family, **changes)
    spec = decoder_spec(tmp_path / "model")
    given = {name: drawn_adapter(spec, 3, seed=seed) for seed, name in enumerate("ab")}
    paths = tuple(f"{name}={write(tmp_path / name, weights)}" for name, weights in given.items())
    engine = build_engine(EngineConfig(model=str(tmp_path / "model"), **SIZES, adapter=paths, tp=tp, pp=pp))
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
            assert said == generated(modules[name], prompt, 9), name
            assert cached == (0 if not turn else len(prompt) - 6)
            prompts[name] = prompt + said + drawn(5, seed=turn + 3)
    assert len({*prompts.values()}) == 3
    engine.close()


def test_a_dora_of_recurrent_layers_is_the_same_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make(tmp_path / "model", "Qwen3_5Text", **PAIRS)
    weights = with_magnitudes(drawn_adapter(decoder_spec(tmp_path / "model"), 3, seed=1))
    path, said = write(tmp_path / "dora", weights), list[Any]()
    for tp in (1, 2):
        config = EngineConfig(model=str(tmp_path / "model"), **SIZES, adapter=(f"dora={path}",), tp=tp)
        engine = build_engine(config)
        identity = Identity(adapter=engine.info.adapters[0].id)
        said.append(answers(engine.loop, replace(request("dora", drawn(29, seed=2)), identity=identity)))
        said.append(answers(engine.loop, request("base", drawn(29, seed=2))))
        engine.close()
    assert said[0] == said[2] and said[1] == said[3] and said[0]["dora"] != said[1]["base"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three recurrent layers, two of them in the second of two stages."""
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    make(directory, "Qwen3_5Text", **UNEVEN)
    return directory


@pytest.fixture
def engines(directory: Path) -> Iterator[Any]:
    """Makes engines of the model on ranks. All end with the test."""
    made: list[Engine] = []

    def build(**changes: Any) -> Engine:
        made.append(build_engine(EngineConfig(model=str(directory), **SIZES, host_cache_gb=0.004, **changes)))
        return made[-1]

    yield build
    for engine in made:
        engine.close()
        for pid in engine.ranks.pids:
            wait_for_end(pid)


def test_ranks_have_the_blocks_and_snapshots_that_one_process_would(engines: Any) -> None:
    sizes = {}
    for layout in ((1, 1), (2, 1), (1, 2)):
        engine = engines(tp=layout[0], pp=layout[1])
        memory, states = engine.info.memory, engine.loop.planner._kind.states
        sizes[layout] = engine.info.num_blocks, engine.info.num_host_blocks, states.total, states.host_total
        assert states._copies_ahead == COPIES_AHEAD_BYTES // (3 * 3200)
        assert (memory.snapshots, memory.host_snapshots) == (states.total, states.host_total)
        assert memory.rows == SIZES["max_sequences"] * 3 * 3200, "three recurrent layers"
    for found in sizes.values():
        assert found == pytest.approx(sizes[1, 1], abs=1), "a share is rounded down"


def test_snapshots_end_with_the_rank_that_is_killed(engines: Any) -> None:
    first = drawn(30, seed=5)
    engine = engines(tp=2)
    said, _ = answers(engine.loop, request("first", first))["first"]
    turn = request("second", first + said + drawn(3, seed=6))
    os.kill(engine.ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RankFailure, match=r"rank 1 .* was killed by SIGKILL"):
        answers(engine.loop, turn)
    again, cached = answers(engines(tp=2).loop, turn)["second"]
    assert cached == 0 and again == answers(engines().loop, turn)["second"][0]
