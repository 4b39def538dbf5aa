"""What leaves the current stream and comes back: on a GPU beside it, on a CPU in order."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.launch import SideStream

LONG = 20_000_000
"""Cycles of the GPU's clock: some 10 ms, so that what does not wait comes too early."""


def later(device: str) -> None:
    if device == "cuda":
        torch.cuda._sleep(LONG)


def test_what_is_forked_is_done_after_the_join(device: str) -> None:
    branch, number = SideStream(torch.device(device)), torch.zeros(4, device=device)
    with branch.fork():
        later(device)
        number.fill_(1.0)
    branch.join()
    assert number.clone().tolist() == [1.0] * 4


def test_what_is_forked_sees_what_came_before(device: str) -> None:
    branch, number, found = SideStream(torch.device(device)), *torch.zeros(2, 4, device=device)
    later(device)
    number.fill_(2.0)
    with branch.fork():
        found.copy_(number)
    branch.join()
    assert found.clone().tolist() == [2.0] * 4


@pytest.mark.gpu
def test_a_graph_holds_the_branch() -> None:
    branch, numbers = SideStream(torch.device("cuda")), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers[0] += 1.0
        with branch.fork():
            torch.cuda._sleep(LONG)
            numbers[1].copy_(numbers[0])
        branch.join()
        numbers[2].copy_(numbers[1])
    for _ in range(3):
        graph.replay()
    assert numbers.tolist() == [3.0] * 3
