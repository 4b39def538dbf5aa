"""Memset nodes of captured graphs, replaced by kernels. A kernel follows another one sooner than a memset does.

The library's largest products hand out their tiles by a counter, which a memset clears before each product. On an H200
5 to 10 us pass from the kernel before such a memset to the product after it, where one kernel follows another within 1.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.capture import capture

MOST_BYTES = 4096
"""Largest memset that a kernel of one program replaces. A larger one takes longer than its launch."""
FIRST_BINDINGS = 13
"""First major version of cuda-bindings whose calls take the arguments used here. PyTorch depends on that package."""
NUMBERS = {1: tl.int8, 2: tl.int16, 4: tl.int32}
"""Type of a memset's number, by its size in bytes."""


@triton.jit(do_not_specialize=["address", "value"])
def fill_kernel(address, value, COUNT: tl.constexpr, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    """Write `value` COUNT times from `address` on. One program."""
    place = tl.arange(0, BLOCK)
    tl.store(address.to(tl.pointer_type(NUMBER)) + place, value.to(NUMBER), mask=place < COUNT)


@dataclass(frozen=True, slots=True)
class Memset:
    """A memset of consecutive numbers."""

    address: int
    value: int
    """The number, as a signed one of its size."""
    number_bytes: int
    count: int

    def fill(self) -> None:
        """Launch the kernel that does the same."""
        number = NUMBERS[self.number_bytes]
        block = triton.next_power_of_2(self.count)
        fill_kernel[(1,)](self.address, self.value, COUNT=self.count, NUMBER=number, BLOCK=block, num_warps=1)


class MemsetNodes:
    """Replaces the memset nodes of graphs that are captured but not instantiated."""

    def __init__(self, driver: Any) -> None:
        """`driver` is the module `cuda.bindings.driver`."""
        self._driver = driver
        self._fills: dict[Memset, tuple[torch.cuda.CUDAGraph, Any]] = {}
        """For each memset so far, a graph that holds only its kernel, and the parameters of that kernel's node."""

    @classmethod
    def of(cls) -> MemsetNodes | None:
        """One that uses cuda-bindings; None where these are missing or too old."""
        try:
            from cuda.bindings import __version__, driver
        except ImportError:
            return None
        return cls(driver) if int(__version__.split(".")[0]) >= FIRST_BINDINGS else None

    def replace(self, graph: torch.cuda.CUDAGraph) -> int:
        """Replace the memsets of at most MOST_BYTES by kernels with the same edges. Returns their number.

        The graph was captured with `keep_graph`. Raises RuntimeError if CUDA refuses a change; the graph must not be
        replayed then.
        """
        driver, raw = self._driver, self._driver.CUgraph(graph.raw_cuda_graph())
        replaced = 0
        for node in self._nodes(raw):
            (kind,) = self._call("cuGraphNodeGetType", node)
            if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
                continue
            memset = self._memset(node)
            if memset is not None:
                self._replace_node(raw, node, memset)
                replaced += 1
        return replaced

    def _memset(self, node: Any) -> Memset | None:
        """The memset of a node; None if it stays."""
        (params,) = self._call("cuGraphMemsetNodeGetParams", node)
        size, count = params.elementSize, params.width
        if params.height > 1 or not 0 < size * count <= MOST_BYTES:
            return None
        value = int.from_bytes(params.value.to_bytes(4, "little")[:size], "little", signed=True)
        return Memset(int(params.dst), value, size, count)

    def _replace_node(self, raw: Any, node: Any, memset: Memset) -> None:
        before = self._around("cuGraphNodeGetDependencies", node)
        after = self._around("cuGraphNodeGetDependentNodes", node)
        kernel_params = self._kernel_params(memset)
        (kernel,) = self._call("cuGraphAddKernelNode", raw, before, len(before), kernel_params)
        if after:
            self._call("cuGraphAddDependencies", raw, [kernel] * len(after), after, None, len(after))
        self._call("cuGraphDestroyNode", node)

    def _kernel_params(self, memset: Memset) -> Any:
        """The parameters of the node of a kernel that does the same as a memset."""
        if memset not in self._fills:
            scratch = torch.empty(memset.number_bytes * memset.count, dtype=torch.uint8, device="cuda")
            replace(memset, address=scratch.data_ptr()).fill()  # compiles the kernel and loads it
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with capture(graph):
                memset.fill()
            (node,) = self._nodes(self._driver.CUgraph(graph.raw_cuda_graph()))
            (params,) = self._call("cuGraphKernelNodeGetParams", node)
            self._fills[memset] = graph, params
        return self._fills[memset][1]

    def _nodes(self, raw: Any) -> Sequence[Any]:
        """All nodes of a graph."""
        _, count = self._call("cuGraphGetNodes", raw, 0)
        nodes: Sequence[Any] = self._call("cuGraphGetNodes", raw, count)[0]
        return nodes

    def _around(self, name: str, node: Any) -> Sequence[Any]:
        """The nodes at the edges of a node that this call of the driver lists."""
        *_, count = self._call(name, node, 0)
        nodes: Sequence[Any] = self._call(name, node, count)[0]
        return nodes

    def _call(self, name: str, *given: Any) -> list[Any]:
        """The results of a call of the driver. Raises RuntimeError if it fails."""
        results: list[Any]
        status, *results = getattr(self._driver, name)(*given)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed with {status.name} on a captured graph")
        return results
