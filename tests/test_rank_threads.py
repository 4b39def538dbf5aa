"""Ranks that are threads exchange in memory what gloo exchanges between processes, and end with one that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.core.layout import Layout
from holdfast.lm.execution.stage_link import GlooLink
from tests.ranks import Rank, in_ranks


def exchanged(rank: Rank) -> list[torch.Tensor]:
    """What each kind of exchange gives a rank of two stages of two devices."""
    group, link = rank.group(), GlooLink(rank.processes(range(4)), rank.layout, rank.rank)
    assert group is not None
    stage, own = rank.layout.stage_of(rank.rank), torch.arange(6.0).view(3, 2) + 10 * rank.rank
    found = [group.all_reduce(own.clone()), group.gather(own[:, 0]), group.exchange_rows(own.repeat(3, 1), 4)]
    sums = group.begin_sum(300, 2, torch.float32)
    assert sums is not None
    for part, rows in enumerate(sums.parts):
        sums.room(part).copy_(torch.arange(600.0).view(300, 2)[rows] * (rank.rank + 1))
        sums.send(part)
    found += [sums.receive(part) for part in range(len(sums.parts))]
    if stage == 0:
        link.send(own)
        link.send(own + 100)
        own.zero_()  # it belongs to the sender again
        found.append(link.receive_tokens(2))
    else:
        for _ in range(2):
            link.receive(own)
            found.append(own.clone())
        link.send_tokens(torch.tensor([rank.rank, 7]))
    kept.append(link)
    return found


kept: list[Any] = []
"""Links, whose messages on their way must not end with them."""


def test_exchanges_in_memory_give_what_gloo_gives() -> None:
    in_memory, by_gloo = (in_ranks(Layout(2, 2), exchanged, gloo=gloo) for gloo in (False, True))
    kept.clear()
    assert in_memory[0][0].tolist() == [[10.0, 12.0], [14.0, 16.0], [18.0, 20.0]]
    for ours, theirs in zip(in_memory, by_gloo, strict=True):
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_a_rank_that_fails_ends_the_wait_of_the_others_and_its_error_is_raised() -> None:
    def work(rank: Rank) -> None:
        group = rank.group()
        assert group is not None
        if rank.rank == 1:
            raise ValueError("no weights")
        group.all_reduce(torch.ones(2))

    with pytest.raises(ValueError, match="no weights"):
        in_ranks(Layout(tp=2), work)
