"""Fork and join of a side stream: in parallel on a GPU, in order on a CPU."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.launch import SideStream

LONG = 20_000_000
"""Cycles of the GPU's clock: about 10 ms, so that work which does not wait runs too early."""


def later(device: str) -> None:
    if device == "cuda":
        torch.cuda._sleep(LONG)


def test_the_current_stream_waits_at_join_for_forked_work(device: str) -> None:
    side, number = SideStream(torch.device(device)), torch.zeros(4, device=device)
    with side.fork():
        later(device)
        number.fill_(1.0)
    side.join()
    assert number.clone().tolist() == [1.0] * 4


def test_forked_work_waits_for_earlier_work_of_the_current_stream(device: str) -> None:
    side, number, found = SideStream(torch.device(device)), *torch.zeros(2, 4, device=device)
    later(device)
    number.fill_(2.0)
    with side.fork():
        found.copy_(number)
    side.join()
    assert found.clone().tolist() == [2.0] * 4


@pytest.mark.gpu
def test_a_graph_captures_the_side_stream() -> None:
    side, numbers = SideStream(torch.device("cuda")), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers[0] += 1.0
        with side.fork():
            torch.cuda._sleep(LONG)
            numbers[1].copy_(numbers[0])
        side.join()
        numbers[2].copy_(numbers[1])
    for _ in range(3):
        graph.replay()
    assert numbers.tolist() == [3.0] * 3
