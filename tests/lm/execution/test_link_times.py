"""Times of links: each rank takes part, and there is a time for every size that steps may have."""

from typing import Any

import pytest
import torch

from holdfast.core.layout import Layout
from holdfast.lm.execution import link_times
from holdfast.lm.execution.link_times import time_links
from holdfast.lm.execution.stage_link import GlooLink
from tests.ranks import in_ranks


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3), (2, 2)])
def test_links_between_ranks_are_timed_by_size(tp, pp):
    layout = Layout(tp, pp)

    def timed(rank):
        link = GlooLink(rank.processes(range(layout.ranks)), layout, rank.rank) if pp > 1 else None
        stage = layout.stage_of(rank.rank)
        times = time_links(
            rank.group(), link, first=stage == 0, last=stage == pp - 1, stages=pp, width=64, max_tokens=200,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        return times, link  # messages that it has sent go on while it exists

    times, _ = in_ranks(layout, timed, gloo=True)[0]
    for found, there in ((times.all_reduce, tp > 1), (times.send, pp > 1)):
        assert (found is not None) == there
        if found is not None:
            assert found.sizes == tuple(tokens * 64 * 4 for tokens in (1, 16, 128))
            assert all(0 < seconds < 1 for seconds in found.seconds)


class Chain:
    """The link of the first of several stages, over which each token takes 2 ms a hop, on a clock of its own."""

    def __init__(self, stages: int) -> None:
        self.now, self._stages = 0.0, stages

    def perf_counter(self) -> float:
        return self.now

    def send(self, stream: torch.Tensor) -> None:
        self.now += 0.002 * len(stream) * (self._stages - 1)

    def receive_tokens(self, count: int) -> None:
        self.now += 0.002 * count


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_send_takes_the_time_of_one_hop_of_a_round(stages, monkeypatch):
    link: Any = Chain(stages)
    monkeypatch.setattr(link_times, "time", link)
    times = time_links(
        None, link, first=True, last=False, stages=stages, width=8, max_tokens=200, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert times.send is not None
    assert times.send.seconds == pytest.approx([0.002 * tokens for tokens in (1, 16, 128)])
