"""Shards of models with recurrent layers give the logits of Transformers' own code, from snapshots too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.layout import Layout
from holdfast.lm.kernels.collectives import torch_group
from holdfast.lm.kernels.linear.layers import NormInParts
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from holdfast.lm.types import StateCopy, StatePlan
from holdfast.lm.types.plan import BlockMove
from tests.checkpoints import make
from tests.lm.execution.test_recurrent import (
    BIASED,
    CASES,
    EXPERTS,
    ROWS,
    Steps,
    blocks,
    expected,
    prompt,
    same,
    saved,
    start,
)
from tests.ranks import Rank, in_ranks

VOCAB = 389  # a prime number: no number of devices divides it
ONE_GROUP = dict(mamba_n_groups=1, mamba_n_heads=4, mamba_d_head=32)
BIASED_NEMOTRON = {key: CASES["nemotron-h-odd"][1][key] for key in ("use_bias", "mlp_bias", "use_conv_bias")}
SPLIT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": CASES["qwen3.5"],
    "qwen3.5-one-key-head": ("Qwen3_5Text", dict(linear_num_key_heads=1)),
    "qwen3.5-moe": CASES["qwen3.5-moe"],
    "qwen3-next": CASES["qwen3-next"],
    "lfm2": CASES["lfm2"],
    "lfm2-biased": ("Lfm2", dict(conv_bias=True, conv_L_cache=5)),
    "bamba": CASES["bamba"],
    "bamba-one-group": ("Bamba", ONE_GROUP | BIASED),
    "granite-4": CASES["granite-4"],
    "granite-4-experts": ("GraniteMoeHybrid", EXPERTS | ONE_GROUP | dict(mamba_proj_bias=True)),
    "falcon-h1": CASES["falcon-h1"],
    "falcon-h1-normed": ("FalconH1", dict(mamba_rms_norm=True, mamba_norm_before_gate=False)),
    "nemotron-h": CASES["nemotron-h"],
    "nemotron-3": CASES["nemotron-3"],
    "nemotron-h-biased": ("NemotronH", BIASED_NEMOTRON),
}
"""Models whose groups and key heads are fewer than the devices, as many, and more."""

FIRST, TURN = prompt(10), prompt(7, seed=2)
SLOT = ROWS + 1


def chunks(steps: Steps) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The logits of a prompt in chunks, the first of them next to another sequence's prompt."""
    tokens = prompt(41)
    _, first = steps.run(
        (1, 0, prompt(9, seed=5)), (3, 0, tokens[:17]), states=StatePlan(starts=(*start(1).starts, *start(3).starts))
    )
    found = [first]
    for begin, stop in ((17, 18), (18, 40), (40, 41)):
        found += steps.run((3, begin, tokens[begin:stop]))
    return torch.cat(found), tokens


def from_a_snapshot(steps: Steps) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The logits of a turn after a snapshot, in another row."""
    saved(steps, FIRST, SLOT)
    own = blocks(4)[2:]
    steps.write(4, (*blocks(0)[:2], *own))
    states = StatePlan(starts=(StateCopy(SLOT, 4),), tails=(BlockMove(blocks(0)[2], own[0]),))
    (found,) = steps.run((4, len(FIRST), TURN), states=states)
    return found, FIRST + TURN


def from_the_host(steps: Steps) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The logits of a turn after a snapshot that comes back from the host."""
    saved(steps, FIRST[:8], SLOT)
    steps.run(states=StatePlan(swap_out=(StateCopy(SLOT, 1),)))
    steps.run(states=start(SLOT))  # another state has its slot meanwhile
    steps.write(5, (*blocks(0)[:2], *blocks(5)[2:]))
    (found,) = steps.run((5, 8, TURN), states=StatePlan(swap_in=(StateCopy(1, 5),)))
    return found, FIRST[:8] + TURN


@pytest.fixture(scope="module", params=SPLIT)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.set_num_threads(1)
    family, differences = SPLIT[request.param]
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    return make(directory, family, vocab_size=VOCAB, **differences), directory


Story = Callable[[Steps], tuple[torch.Tensor, tuple[int, ...]]]
"""Runs steps, and returns logits and the tokens of their sequence."""


def compare(checkpoint: tuple[Any, Path], tp: int, story: Story) -> None:
    """Compare the logits of a story on shards with those of Transformers."""
    module, directory = checkpoint

    def work(rank: Rank) -> tuple[torch.Tensor, tuple[int, ...]]:
        return story(Steps(load(directory, device="cpu", layout=rank.layout, rank=rank.rank, group=rank.group())))

    ranks = in_ranks(Layout(tp=tp), work)
    found, tokens = torch.cat([columns for columns, _ in ranks], dim=1), ranks[0][1]
    same(found, expected(module, tokens)[-len(found) :])


@pytest.mark.parametrize(("story", "tp"), [(chunks, 4), (from_a_snapshot, 2), (from_the_host, 4)])
def test_the_shards_of_a_model_give_the_logits_of_transformers(
    checkpoint: tuple[Any, Path], tp: int, story: Story
) -> None:
    compare(checkpoint, tp, story)


@pytest.mark.each_value
@pytest.mark.parametrize("tp", [2, 4])
def test_no_device_holds_more_than_its_share(checkpoint: tuple[Any, Path], tp: int) -> None:
    def part(rank: Rank) -> Decoder:
        model = load(checkpoint[1], device="cpu", layout=rank.layout, rank=rank.rank, group=rank.group())
        assert isinstance(model, Decoder)
        return model

    whole = load(checkpoint[1], device="cpu").spec
    parts = [model.spec for model in in_ranks(Layout(tp=tp), part)]
    # All devices have the norms. Heads and groups that are fewer than the devices are there more than once.
    assert sum(spec.weight_bytes for spec in parts) < (1.15 if tp == 2 else 1.25) * whole.weight_bytes
    assert {spec.state_bytes for spec in parts} == {parts[0].state_bytes}
    assert whole.state_bytes <= tp * parts[0].state_bytes < (1.15 if tp == 2 else 1.45) * whole.state_bytes


@pytest.mark.parametrize("checkpoint", ["qwen3.5-moe", "nemotron-h", "falcon-h1"], indirect=True)
def test_sums_in_halves_give_the_logits_of_transformers(
    checkpoint: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_group, "HALVED_ROWS", 5)
    compare(checkpoint, 2, chunks)


def test_a_later_stage_of_layers_with_one_sum_has_none_in_halves(tmp_path: Path) -> None:
    make(tmp_path, "NemotronH", vocab_size=32, layers_block_type=["linear_attention", "full_attention", "mlp"] * 2)

    def in_halves(rank: Rank) -> bool:
        """Whether a sum of many rows travels in halves."""
        model = load(tmp_path, device="cpu", layout=rank.layout, rank=rank.rank, group=rank.group())
        assert isinstance(model, Decoder)
        layer, ops = model.layers[1], model._ops
        stream, attended = torch.zeros(600, 64), torch.zeros(600, layer.o.shape[1])
        normed = ops.add_linear_norm(stream, attended, layer.o, None, layer.input_norm)
        ops.computed(normed)
        return isinstance(normed, NormInParts)

    assert in_ranks(Layout(2, 2), in_halves) == [True, True, False, False]
