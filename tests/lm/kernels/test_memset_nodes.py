"""Tests of replacing memset nodes of captured graphs: by a model of CUDA's graph API, and on a GPU."""

from __future__ import annotations

import sys
from enum import Enum
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.lm.kernels.capture import capture
from holdfast.lm.kernels.memset_nodes import MOST_BYTES, Memset, MemsetNodes


class Status(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Kind(Enum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMSET = 2


class Driver:
    """The calls of `cuda.bindings.driver` on one graph of named nodes."""

    CUresult, CUgraphNodeType = Status, Kind

    def __init__(self, edges: list[tuple[str, str]], memsets: dict[str, Any], refused: str = "") -> None:
        self.edges, self.memsets, self.refused = {*edges}, memsets, refused
        self.nodes = [*dict.fromkeys(name for edge in edges for name in edge)]
        self.added: dict[str, Any] = {}

    def CUgraph(self, raw: Any) -> Any:
        return raw

    def _list(self, names: list[str], room: int, *between: Any) -> Any:
        return Status.CUDA_SUCCESS, names[:room], *between, len(names)

    def cuGraphGetNodes(self, graph: Any, room: int) -> Any:
        return self._list(self.nodes, room)

    def cuGraphNodeGetType(self, node: str) -> Any:
        return Status.CUDA_SUCCESS, Kind.CU_GRAPH_NODE_TYPE_MEMSET if node in self.memsets else Kind(0)

    def cuGraphMemsetNodeGetParams(self, node: str) -> Any:
        return Status.CUDA_SUCCESS, self.memsets[node]

    def cuGraphNodeGetDependencies(self, node: str, room: int) -> Any:
        names = sorted(before for before, after in self.edges if after == node)
        return self._list(names, room, [None] * room)

    def cuGraphNodeGetDependentNodes(self, node: str, room: int) -> Any:
        return self._list(sorted(after for before, after in self.edges if before == node), room, [None] * room)

    def cuGraphAddKernelNode(self, graph: Any, before: list[str], count: int, params: Any) -> Any:
        name = f"fill {len(self.added)}"
        self.added[name] = params
        self.nodes.append(name)
        self.edges |= {(each, name) for each in before[:count]}
        return Status.CUDA_SUCCESS, name

    def cuGraphAddDependencies(self, graph: Any, before: list[str], after: list[str], data: None, count: int) -> Any:
        assert len(before) == len(after) == count > 0
        if self.refused:
            return (Status[self.refused],)
        self.edges |= {*zip(before, after, strict=True)}
        return (Status.CUDA_SUCCESS,)

    def cuGraphDestroyNode(self, node: str) -> Any:
        self.nodes.remove(node)
        self.edges = {edge for edge in self.edges if node not in edge}
        return (Status.CUDA_SUCCESS,)


def params(size: int = 4, width: int = 1, height: int = 1, value: int = 0) -> Any:
    return SimpleNamespace(dst=1 << 40, value=value, elementSize=size, width=width, height=height)


GRAPH: Any = SimpleNamespace(raw_cuda_graph=lambda: "graph")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Memset]:
    """The memsets for which kernels are made, none of which runs. The memset stands for its kernel's parameters."""
    made: list[Memset] = []

    def kernel_params(self: MemsetNodes, memset: Memset) -> Memset:
        made.append(memset)
        return memset

    monkeypatch.setattr(MemsetNodes, "_kernel_params", kernel_params)
    return made


def test_a_kernel_takes_a_memset_s_place_among_all_its_neighbours(kernels: list[Memset]) -> None:
    edges = [("norm", "memset"), ("side", "memset"), ("memset", "product"), ("memset", "other"), ("norm", "other")]
    driver = Driver(edges, {"memset": params(value=7)})
    assert MemsetNodes(driver).replace(GRAPH) == 1
    assert driver.edges == {
        ("norm", "fill 0"), ("side", "fill 0"), ("fill 0", "product"), ("fill 0", "other"), ("norm", "other")
    }  # fmt: skip
    assert "memset" not in driver.nodes
    assert driver.added == {"fill 0": Memset(1 << 40, 7, 4, 1)}


def test_every_small_memset_of_a_graph_is_replaced(kernels: list[Memset]) -> None:
    chain = ["first memset", "product", "norm", "second memset", "another product", "last memset"]
    driver = Driver([*pairwise(chain)], {name: params() for name in chain if "memset" in name})
    assert MemsetNodes(driver).replace(GRAPH) == 3
    assert driver.edges == {
        ("fill 0", "product"), ("product", "norm"), ("norm", "fill 1"), ("fill 1", "another product"),
        ("another product", "fill 2"),
    }  # fmt: skip


@pytest.mark.parametrize("stays", [params(width=MOST_BYTES // 4 + 1), params(height=2), params(size=1, width=0)])
def test_a_memset_of_much_memory_or_of_several_rows_stays(stays: Any, kernels: list[Memset]) -> None:
    driver = Driver([("norm", "memset"), ("memset", "product")], {"memset": stays})
    assert MemsetNodes(driver).replace(GRAPH) == 0
    assert driver.edges == {("norm", "memset"), ("memset", "product")} and not kernels


@pytest.mark.parametrize(
    ("size", "value", "number"), [(1, 0xFF, -1), (2, 0x8001, -0x7FFF), (4, 0xFFFFFFFE, -2), (4, 5, 5)]
)
def test_a_memset_s_number_is_read_in_its_size(size: int, value: int, number: int, kernels: list[Memset]) -> None:
    driver = Driver([("norm", "memset")], {"memset": params(size=size, width=3, value=value)})
    MemsetNodes(driver).replace(GRAPH)
    assert kernels == [Memset(1 << 40, number, size, 3)]


def test_a_change_that_cuda_refuses_is_named(kernels: list[Memset]) -> None:
    driver = Driver([("norm", "memset"), ("memset", "product")], {"memset": params()}, "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(RuntimeError, match="cuGraphAddDependencies failed with CUDA_ERROR_INVALID_VALUE"):
        MemsetNodes(driver).replace(GRAPH)


@pytest.mark.parametrize(
    ("version", "used"), [("12.9.4", False), ("13.0.3", True), ("13.2.0.dev1", True), (None, False)]
)
def test_only_bindings_with_the_calls_used_here_are_used(
    version: str | None, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = None if version is None else SimpleNamespace(__version__=version, driver=Driver([], {}))
    for name, module in (("cuda", SimpleNamespace(bindings=bindings)), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    assert (MemsetNodes.of() is not None) == used


@pytest.mark.parametrize(("dtype", "count"), [(torch.int8, 1), (torch.int8, 13), (torch.int16, 5), (torch.int32, 300)])
def test_the_kernel_writes_the_memset_s_numbers_and_no_others(dtype: torch.dtype, count: int, device: str) -> None:
    memory = torch.full((count + 8,), 77, dtype=dtype, device=device)
    first = 4
    Memset(memory[first:].data_ptr(), -3, dtype.itemsize, count).fill()
    expected = [77] * first + [-3] * count + [77] * 4
    assert memory.tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [128, 600, 2048])
def test_products_of_a_graph_without_memsets_are_the_library_s(tokens: int) -> None:
    nodes = MemsetNodes.of()
    assert nodes is not None
    weights = [torch.randn(outputs, 4096, device="cuda").bfloat16() / 64 for outputs in (6144, 4096, 28672)]
    x = torch.randn(tokens, 4096, device="cuda").bfloat16()
    expected = [x @ weight.t() for weight in weights]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capture(graph):
        given = [x @ weight.t() for weight in weights]
    replaced = nodes.replace(graph)
    graph.instantiate()
    for _ in range(3):
        for each in given:
            each.zero_()
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True)), replaced
    assert nodes.replace(graph) == 0  # none is left
