"""Times of links: each rank takes part, and there is a time for every size that steps may have."""

import pytest
import torch

from holdfast.core.layout import Layout
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
        return times, link  # what it has sent goes on while it exists

    times, _ = in_ranks(layout, timed)[0]
    for found, there in ((times.all_reduce, tp > 1), (times.send, pp > 1)):
        assert (found is not None) == there
        if found is not None:
            assert found.sizes == tuple(tokens * 64 * 4 for tokens in (1, 16, 128))
            assert all(0 < seconds < 1 for seconds in found.seconds)
