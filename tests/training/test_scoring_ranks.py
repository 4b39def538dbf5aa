"""The losses of calls over ranks that share a model: log probabilities, losses and gradients of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.core.layout import Layout
from holdfast.lm.execution.stage_link import GlooLink
from holdfast.lm.kernels.collectives.protocol import in_rows
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.halves import AdapterLayout, Halves, layer_halves
from holdfast.lm.models.loader import load
from holdfast.training.iteration import Iteration, arena_of
from holdfast.training.jobs import units_of
from holdfast.training.losses import LOSSES, Loss
from holdfast.training.scoring import position_loss
from holdfast.training.stages import Stages
from tests.ranks import Rank, in_ranks
from tests.training.test_ranks import OPEN, SIZES
from tests.tuning import cache_of, native

LENGTHS = (9, 4, 17)
COUNT = sum(LENGTHS)
Numbers = tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]
"""Log probabilities and loss, which are right on the first rank, and the gradient of each layer that the rank has."""


def scored(rank: Rank, base: Path, name: str) -> Numbers:
    """A drawn micro-batch of a loss on one rank."""
    torch.set_num_threads(1)
    layout, group = rank.layout, rank.group()
    link = GlooLink(rank.processes(range(layout.ranks)), layout, rank.rank) if layout.pp > 1 else None
    OPEN.append(link)
    model = load(base, device="cpu", dtype="float32", layout=layout, rank=rank.rank, group=group)
    assert isinstance(model, Decoder)
    generator = torch.Generator().manual_seed(5)
    adapter = AdapterLayout(model.decoder, ("q", "v", "up", "down"), 4)
    vector = torch.randn(sum(adapter.sizes), generator=generator) * 0.1
    ids, targets = torch.randint(1, 90, (2, COUNT), generator=generator)
    drawn = {each: torch.randn(COUNT, generator=generator) for each in LOSSES[name].needs}
    stages, own = Stages(model.shard, model.decoder.num_layers, link), model.shard.layers
    halves, arena = Halves(model, adapter, 2.0), arena_of(cache_of(model), shared=layout.ranks > 1)
    pieces = adapter.split(vector)
    grads = {layer: torch.zeros_like(pieces[layer]) for layer in own}
    loss = position_loss(Loss(name=name), drawn, targets)
    units = units_of(layer_halves(model.decoder), COUNT, backward=True, optimizer=False, passes=loss.passes)
    iteration = Iteration(
        halves,
        arena,
        arena.free,
        units,
        halves.pack(ids, LENGTHS),
        targets,
        loss,
        [halves.own(adapter.views(layer, pieces[layer])) for layer in own],
        [halves.own(adapter.views(layer, grads[layer])) for layer in own],
        stages,
    )
    iteration.run(0, len(units), keep=True)
    if group is not None:
        grads = {layer: group.all_reduce(in_rows(each)).view(-1) for layer, each in grads.items()}
    return stages.at_first(iteration.logprobs), stages.at_first(iteration.loss[None]), grads


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "model"
    native("qwen3", directory, **SIZES)
    return directory


@pytest.mark.parametrize("name", ["cross_entropy", "ppo", "gspo"])
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)], ids=lambda layout: layout.suffix)
def test_ranks_give_the_numbers_of_one(layout: Layout, name: str, base: Path) -> None:
    (logprobs, loss, grads), *_ = in_ranks(Layout(), lambda rank: scored(rank, base, name))
    found = in_ranks(layout, lambda rank: scored(rank, base, name))
    torch.testing.assert_close(found[0][0], logprobs, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found[0][1], loss, atol=1e-4, rtol=1e-5)
    assert {layer for _, _, own in found for layer in own} == {*grads}
    for _, _, own in found:
        for layer, gradient in own.items():
            assert float((gradient - grads[layer]).norm() / grads[layer].norm()) < 1e-4
