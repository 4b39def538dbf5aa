"""Models with recurrent layers give the logits of Transformers' own code, however their tokens are cut into steps."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.models.base import Model, StepInput
from holdfast.lm.models.loader import load
from holdfast.lm.parts.states.device import StateDevice
from holdfast.lm.types import (
    MemoryMeasurement,
    Sampling,
    Segment,
    StateCopy,
    StatePlan,
    StateShape,
    StepPlan,
    TableWrite,
)
from holdfast.lm.types.plan import BlockMove
from tests.checkpoints import VOCAB, make

ODD = dict(
    num_hidden_layers=5,
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    num_attention_heads=3,
    num_key_value_heads=1,
    linear_num_key_heads=3,
    linear_num_value_heads=9,
    linear_key_head_dim=8,
    linear_value_head_dim=24,
    linear_conv_kernel_dim=3,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
)
"""Sizes that no published model has."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", {}),
    "qwen3.5-tied": ("Qwen3_5Text", {"tie_word_embeddings": True}),
    "qwen3.5-odd": ("Qwen3_5Text", ODD),
    "qwen3.5-attention-first": ("Qwen3_5Text", {"layer_types": ["full_attention", "linear_attention"]}),
    "qwen3.5-moe": ("Qwen3_5MoeText", {}),
    "qwen3-next": ("Qwen3Next", {}),
    "qwen3-next-odd": ("Qwen3Next", {**ODD, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "qwen3-next-dense": ("Qwen3Next", {"num_experts": 0}),
}
BLOCK, ROWS, SNAPSHOTS, HOST_SNAPSHOTS, WIDTH = 4, 6, 4, 3, 12
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


class Watched:
    """A model that notes the logits of all tokens of its last step."""

    def __init__(self, model: Model) -> None:
        self._model, self.spec = model, model.spec
        self.logits = torch.empty(0)

    def forward(self, step: StepInput) -> torch.Tensor:
        self.logits = self._model.forward(replace(step, sample_at=None))
        return self.logits if step.sample_at is None else self.logits[step.sample_at]


class Steps:
    """Runs plans that a test makes, on a device with snapshots. Row r has the blocks from r * WIDTH on."""

    def __init__(self, model: Model) -> None:
        self.model = Watched(model)
        config = EngineConfig(max_sequences=ROWS, block_size=BLOCK, device="cpu", host_cache_gb=0.0)
        self.device = PagedDevice(self.model, config, parts=[StateDevice(0.25)])
        self.shape = self.device.allocate(
            MemoryMeasurement(
                device="test",
                total=0,
                weights=0,
                activations=0,
                cache=ROWS * WIDTH,
                block=1,
                snapshots=SNAPSHOTS,
                host_snapshots=HOST_SNAPSHOTS,
            )
        )
        self.number = 0
        self._tables = tuple(TableWrite(row, 0, blocks(row)) for row in range(ROWS))

    def write(self, row: int, found: tuple[int, ...]) -> None:
        """Give a row these blocks from the next step on."""
        self._tables += (TableWrite(row, 0, found),)

    def run(self, *work: tuple[int, int, tuple[int, ...]], states: StatePlan | None = None) -> list[torch.Tensor]:
        """The logits of the tokens of each (row, start, tokens), in one step."""
        segments = tuple(
            Segment(str(row), row, start, start + len(tokens), tokens, GREEDY) for row, start, tokens in work
        )
        parts = () if states is None else (states,)
        self.device.executor.submit(StepPlan(self.number, segments, table_writes=self._tables, parts=parts))
        self.number, self._tables = self.number + 1, ()
        self.device.executor.collect()
        return [] if not work else list(self.model.logits.split([len(tokens) for *_, tokens in work]))


def start(row: int, source: int = -1) -> StatePlan:
    """A plan's states for a sequence that begins in a row."""
    return StatePlan(starts=(StateCopy(source, row),))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Model]:
    torch.set_num_threads(1)
    family, differences = CASES[request.param]
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    return make(directory, family, **differences), load(directory, device="cpu", dtype="float32")


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, VOCAB) for _ in range(length))


def expected(module: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = module(torch.tensor([tokens])).logits[0]
    return logits


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-4)


def test_a_whole_prompt_gives_the_logits_of_transformers(case: tuple[Any, Model]) -> None:
    module, model = case
    tokens = prompt(41)
    (found,) = Steps(model).run((2, 0, tokens), states=start(2))
    same(found, expected(module, tokens))


@pytest.mark.parametrize("cuts", [(1, 2, 3), (7, 8, 31), (2, 40), tuple(range(1, 41))])
def test_chunks_give_the_logits_of_the_whole(case: tuple[Any, Model], cuts: tuple[int, ...]) -> None:
    module, model = case
    tokens, steps, found = prompt(41), Steps(model), []
    for first, last in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        found += steps.run((3, first, tokens[first:last]), states=None if first else start(3))
    same(torch.cat(found), expected(module, tokens))


def test_sequences_of_a_step_do_not_change_each_other(case: tuple[Any, Model]) -> None:
    module, model = case
    draw, steps = random.Random(3), Steps(model)
    sequences = {row: prompt(draw.randint(5, 40), seed=row) for row in range(ROWS)}
    done, found = dict.fromkeys(sequences, 0), dict[int, list[torch.Tensor]]()
    while running := [row for row, tokens in sequences.items() if done[row] < len(tokens)]:
        chosen = draw.sample(running, draw.randint(1, len(running)))
        work = [(row, done[row], sequences[row][done[row] : done[row] + draw.choice((1, 1, 3, 9))]) for row in chosen]
        begins = StatePlan(starts=tuple(StateCopy(-1, row) for row, first, _ in work if not first))
        for (row, first, tokens), logits in zip(work, steps.run(*work, states=begins), strict=True):
            found.setdefault(row, []).append(logits)
            done[row] = first + len(tokens)
    for row, tokens in sequences.items():
        same(torch.cat(found[row]), expected(module, tokens))


def saved(steps: Steps, first: tuple[int, ...], slot: int) -> None:
    """Compute `first` in row 0, and save its state in a step that gives the row and other blocks to a new sequence."""
    steps.run((0, 0, first), states=start(0))
    steps.write(0, blocks(3))
    steps.run((0, 0, prompt(5, seed=9)), states=StatePlan(saves=(StateCopy(0, slot),), starts=(StateCopy(-1, 0),)))


def blocks(row: int) -> tuple[int, ...]:
    """The blocks that a row has at first."""
    return tuple(range(row * WIDTH, (row + 1) * WIDTH))


def test_sequences_go_on_from_a_snapshot_in_other_rows(case: tuple[Any, Model]) -> None:
    # The snapshot has 10 tokens: two full blocks, which the new rows share, and half of one, which each gets a copy of.
    module, model = case
    steps, first, slot = Steps(model), prompt(10), ROWS + 1
    saved(steps, first, slot)
    for row, turn in ((4, prompt(6, seed=2)), (5, prompt(9, seed=3))):
        own = blocks(row)[2:]
        steps.write(row, (*blocks(0)[:2], *own))
        states = StatePlan(starts=(StateCopy(slot, row),), tails=(BlockMove(blocks(0)[2], own[0]),))
        (found,) = steps.run((row, len(first), turn), states=states)
        same(found, expected(module, first + turn)[len(first) :])


def test_a_snapshot_comes_back_from_the_host(case: tuple[Any, Model]) -> None:
    module, model = case
    steps, first, turn, slot = Steps(model), prompt(8), prompt(6, seed=2), ROWS + 2
    saved(steps, first, slot)
    steps.run(states=StatePlan(swap_out=(StateCopy(slot, 1),)))
    steps.run(states=StatePlan(starts=(StateCopy(-1, slot),)))  # something else has its slot meanwhile
    steps.write(4, (*blocks(0)[:2], *blocks(4)[2:]))
    back = StatePlan(swap_in=(StateCopy(1, slot - 1),), starts=(StateCopy(slot - 1, 4),))
    (found,) = steps.run((4, len(first), turn), states=back)
    same(found, expected(module, first + turn)[len(first) :])


def test_two_segments_of_a_row_are_refused(case: tuple[Any, Model]) -> None:
    steps = Steps(case[1])
    with pytest.raises(ValueError, match="row 2 has 2 segments in one step"):
        steps.run((2, 0, prompt(3)), (2, 3, prompt(2)), states=start(2))


def test_the_shape_has_the_sizes_of_states(case: tuple[Any, Model]) -> None:
    steps, spec = Steps(case[1]), case[1].spec
    slots, layers = ROWS + SNAPSHOTS, steps.device.memory.states.layers
    assert len(layers) == spec.recurrent_layers and len(layers) + spec.num_layers == len(case[0].model.layers)
    assert {len(tensor) for layer in layers for tensor in layer} == {slots}
    size = sum(tensor.nbytes for layer in layers for tensor in layer) // slots
    assert steps.shape.states == StateShape(snapshots=SNAPSHOTS, host_snapshots=HOST_SNAPSHOTS, slot_bytes=size)
