"""Models with recurrent layers give the logits of Transformers' own code, however their tokens are cut into steps."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.lm.config import EngineConfig
from holdfast.lm.execution import state_memory
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.models.base import Model, StepInput
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from holdfast.lm.parts.speculation.options import SpeculationName
from holdfast.lm.parts.states.device import StateDevice
from holdfast.lm.types import (
    KeptInputs,
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
from tests.checkpoints import NEMOTRON_3, VOCAB, make

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
ODD_MAMBA = dict(
    hidden_size=48,
    num_hidden_layers=5,
    num_attention_heads=3,
    num_key_value_heads=1,
    mamba_n_heads=9,
    mamba_d_head=16,
    mamba_expand=3,
    mamba_n_groups=3,
    mamba_d_state=20,
    mamba_d_conv=3,
)
BIASED = dict(mamba_proj_bias=True, attention_bias=True, mlp_bias=True, mamba_conv_bias=False)
THIRD = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]
EXPERTS = dict(num_local_experts=6, num_experts_per_tok=3)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", {}),
    "qwen3.5-tied": ("Qwen3_5Text", {"tie_word_embeddings": True}),
    "qwen3.5-odd": ("Qwen3_5Text", ODD),
    "qwen3.5-attention-first": ("Qwen3_5Text", {"layer_types": ["full_attention", "linear_attention"]}),
    "qwen3.5-moe": ("Qwen3_5MoeText", {}),
    "qwen3-next": ("Qwen3Next", {}),
    "qwen3-next-odd": ("Qwen3Next", {**ODD, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "qwen3-next-dense": ("Qwen3Next", {"num_experts": 0}),
    "lfm2": ("Lfm2", {}),
    "lfm2-odd": (
        "Lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 5,
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 40,
            "tie_word_embeddings": False,
        },
    ),
    "bamba": ("Bamba", {}),
    "bamba-odd": ("Bamba", {**ODD_MAMBA, "attn_layer_indices": [0, 3]}),
    "bamba-biased": ("Bamba", {**BIASED, "time_step_limit": (0.5, 0.9)}),
    "granite-4": ("GraniteMoeHybrid", {}),
    "granite-4-odd": (
        "GraniteMoeHybrid",
        {**ODD_MAMBA, "layer_types": THIRD, "position_embedding_type": "rope", "rms_norm_eps": 0.05},
    ),
    "falcon-h1": ("FalconH1", {}),
    "falcon-h1-odd": (
        "FalconH1",
        {**ODD_MAMBA, "mamba_d_ssm": 144, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron-h": ("NemotronH", {}),
    "nemotron-h-odd": (
        "NemotronH",
        {
            "layers_block_type": [*THIRD, "linear_attention", "full_attention", "full_attention", "mlp", "mlp"],
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 2,
            "time_step_min": 0.9,
        },
    ),
    "nemotron-3": ("NemotronH", NEMOTRON_3),
    "nemotron-3-odd": (
        "NemotronH",
        {
            **NEMOTRON_3,
            "layers_block_type": ["moe", "mlp", "linear_attention", "full_attention"],
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
        },
    ),
    "granite-4-experts": ("GraniteMoeHybrid", {**EXPERTS, "mamba_proj_bias": True, "attention_bias": True}),
}
KINDS = ("qwen3.5", "qwen3-next-odd", "lfm2-odd", "bamba-odd", "falcon-h1", "nemotron-3")
"""One case for each kind of recurrent layer, and each way in which its tensors are laid out."""
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

    def __init__(self, model: Model, speculation: SpeculationName = "off") -> None:
        self.model = Watched(model)
        config = EngineConfig(
            max_sequences=ROWS, block_size=BLOCK, device="cpu", host_cache_gb=0.0, speculation=speculation
        )
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
        verified = {row for row, _ in states.verifies} if states is not None else set()
        samples = tuple(len(tokens) if row in verified else 1 for row, _, tokens in work) if verified else None
        plan = StepPlan(self.number, segments, table_writes=self._tables, parts=parts, samples=samples)
        self.device.executor.submit(plan)
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


@pytest.mark.each_value
@pytest.mark.parametrize("cuts", [(1, 2, 3), (7, 8, 31), (2, 40), tuple(range(1, 41))])
def test_chunks_give_the_logits_of_the_whole(case: tuple[Any, Model], cuts: tuple[int, ...]) -> None:
    module, model = case
    tokens, steps, found = prompt(41), Steps(model), []
    for first, last in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        found += steps.run((3, first, tokens[first:last]), states=None if first else start(3))
    same(torch.cat(found), expected(module, tokens))


@pytest.mark.always(*KINDS)
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


@pytest.mark.always(*KINDS)
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


@pytest.mark.always(*KINDS)
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


@pytest.mark.each_value
@pytest.mark.parametrize("accepted", [1, 3, 5])
def test_a_state_moves_on_by_the_accepted_tokens_of_a_draft(case: tuple[Any, Model], accepted: int) -> None:
    module, model = case
    steps, first, draft = Steps(model, "ngram"), prompt(9), prompt(5, seed=4)
    other, long, chunk = prompt(7, seed=5), prompt(20, seed=6), 11
    steps.run((0, 0, first), (1, 0, other[:-2]), states=StatePlan(starts=(StateCopy(-1, 0), StateCopy(-1, 1))))
    places = KeptInputs(0, (63, 2, 40, 7, 11))
    beside = (1, len(other) - 2, other[-2:-1]), (2, 0, long[:chunk])
    states = StatePlan(starts=(StateCopy(-1, 2),), verifies=(places,))
    found = steps.run((0, len(first), draft), *beside, states=states)
    same(found[0], expected(module, first + draft)[len(first) :])
    same(found[2], expected(module, long[:chunk]))
    replay = StatePlan(replays=(KeptInputs(0, places.places[:accepted]),), saves=(StateCopy(0, ROWS),))
    known, turn = first + draft[:accepted], prompt(3, seed=8)
    beside = (1, len(other) - 1, other[-1:]), (2, chunk, long[chunk:])
    found = steps.run((0, len(known), turn), *beside, states=replay)
    same(found[0], expected(module, known + turn)[len(known) :])
    same(found[1], expected(module, other)[-1:])
    same(found[2], expected(module, long)[chunk:])
    steps.write(4, blocks(0))  # the saved state is the one after the accepted tokens
    (found,) = steps.run((4, len(known), turn), states=start(4, ROWS))
    same(found, expected(module, known + turn)[len(known) :])


@pytest.mark.always(*KINDS)
def test_several_replays_are_computed_in_batches_of_bounded_size(
    case: tuple[Any, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, model = case
    monkeypatch.setattr(state_memory, "REPLAY_BYTES", 4 * model.spec.kept_bytes)
    steps, sequences = Steps(model, "ngram"), [prompt(8 + row, seed=row) for row in range(4)]
    work = [(row, 0, tokens[:5]) for row, tokens in enumerate(sequences)]
    steps.run(*work, states=StatePlan(starts=tuple(StateCopy(-1, row) for row in range(4))))
    kept = [KeptInputs(row, tuple(range(8 * row, 8 * row + 2 + row))) for row in range(4)]
    work = [(row, 5, tokens[5:-1]) for row, tokens in enumerate(sequences)]
    steps.run(*work, states=StatePlan(verifies=tuple(kept)))
    work = [(row, len(tokens) - 1, tokens[-1:]) for row, tokens in enumerate(sequences)]
    for found, tokens in zip(steps.run(*work, states=StatePlan(replays=tuple(kept))), sequences, strict=True):
        same(found, expected(module, tokens)[-1:])


@pytest.mark.always("qwen3.5")
def test_places_that_do_not_fit_a_draft_are_refused(case: tuple[Any, Model]) -> None:
    for places, message in (
        ((0, 1, 64), "place 64; there are 64 places"),
        ((0, 1), "3 tokens to verify, and 2 places"),
    ):
        steps = Steps(case[1], "ngram")
        with pytest.raises(ValueError, match=message):
            steps.run((1, 0, prompt(3)), states=StatePlan(verifies=(KeptInputs(1, places),)))


@pytest.mark.always("qwen3.5")
def test_no_inputs_are_kept_if_no_drafter_is_named(case: tuple[Any, Model]) -> None:
    for speculation, places in (("off", 0), ("auto", 0), ("suffix", 64)):
        states = Steps(case[1], speculation).shape.states
        assert states is not None
        assert states.places == places


@pytest.mark.always("qwen3.5")
def test_two_segments_of_a_row_are_refused(case: tuple[Any, Model]) -> None:
    steps = Steps(case[1])
    with pytest.raises(ValueError, match="row 2 has 2 segments in one step"):
        steps.run((2, 0, prompt(3)), (2, 3, prompt(2)), states=start(2))


def test_the_shape_has_the_sizes_of_states(case: tuple[Any, Model]) -> None:
    model = case[1]
    assert isinstance(model, Decoder)
    steps, spec, decoder = Steps(model), model.spec, model.decoder
    slots, layers = ROWS + SNAPSHOTS, steps.device.memory.states.layers
    assert len(layers) == spec.recurrent_layers == sum(decoder.recurrent)
    kept = len(layers) + spec.num_layers, len(case[0].model.layers) * (1 if decoder.parallel_factors is None else 2)
    assert kept[0] + sum(decoder.mlps) == kept[1]
    assert {len(tensor) for layer in layers for tensor in layer} == {slots}
    size = sum(tensor.nbytes for layer in layers for tensor in layer) // slots
    assert steps.shape.states == StateShape(snapshots=SNAPSHOTS, host_snapshots=HOST_SNAPSHOTS, slot_bytes=size)
