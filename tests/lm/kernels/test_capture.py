"""Tests of capturing a CUDA graph."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from holdfast.lm.kernels.capture import capture, free_workspaces

pytestmark = pytest.mark.gpu


class Held:
    """A captured graph in a ring of references: only the collector can destroy it."""

    def __init__(self) -> None:
        self.itself, self.graph = self, torch.cuda.CUDAGraph()
        with capture(self.graph):
            torch.ones(8, device="cuda").add_(1)


def test_an_old_graph_that_becomes_garbage_does_not_end_a_capture() -> None:
    before = gc.get_threshold()
    value, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    gc.collect()
    try:
        gc.disable()
        Held()
        gc.set_threshold(1)
        gc.enable()
        with capture(graph):
            kept = [[index] for index in range(1_000)]
            value.add_(1)
    finally:
        gc.set_threshold(*before)
        gc.enable()
    graph.replay()
    assert value.tolist() == [1.0] * 8 and len(kept) == 1_000


def test_another_thread_may_pin_memory_during_a_capture() -> None:
    value, graph, pinned = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph(), []
    other = threading.Thread(target=lambda: pinned.append(torch.zeros(1 << 24, pin_memory=True)))
    with capture(graph):
        value.add_(1)
        other.start()
        other.join()
    graph.replay()
    assert value.tolist() == [1.0] * 8 and pinned[0].is_pinned()


def test_workspaces_are_freed_only_when_no_graph_may_write_to_them() -> None:
    gc.collect()
    assert free_workspaces()
    factors, product = torch.rand(2, 512, 512, device="cuda"), torch.empty(512, 512, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        product.copy_(factors[0] @ factors[1])
    assert not free_workspaces()
    graph.replay()
    torch.testing.assert_close(product, factors[0] @ factors[1])
    del graph
    gc.collect()
    assert free_workspaces()
