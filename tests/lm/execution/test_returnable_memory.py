"""Memory that is returned to the device and comes back at the same addresses, on a CPU and on a GPU."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import pytest
import torch

from holdfast.lm.execution import returnable_memory
from holdfast.lm.execution.returnable_memory import (
    ReturnableMemory,
    ReturnableWeights,
    SleepMemory,
    tensors_of,
)
from holdfast.lm.kernels.address_range import PAGE, HostRange
from holdfast.lm.kernels.cache.kv_cache import KVCache, KVShape

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
PIECE = 2 * PAGE


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(returnable_memory, "PIECE_BYTES", PIECE)
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


def filled(size: int, device: torch.device) -> ReturnableMemory:
    memory = ReturnableMemory.allocated(size, device)
    memory.tensor.copy_(pattern(size))
    return memory


def pattern(size: int) -> torch.Tensor:
    return (torch.arange(size) % 251).to(torch.uint8)


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the whole pages of a tensor of the host that have memory."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(pages * mmap.PAGESIZE)
    assert libc.mincore(ctypes.c_void_p(start), length, found) == 0, ctypes.get_errno()
    return sum(each & 1 for each in found) * mmap.PAGESIZE


def free_on(device: torch.device, memory: ReturnableMemory) -> int:
    """Free bytes of a GPU; on a CPU, the bytes of this memory that the system does not have to give, negative."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else -resident(memory.tensor)


def test_kept_bytes_come_back_at_the_same_address_and_their_memory_is_free_meanwhile(device):
    size = 3 * PIECE - 5
    memory = filled(size, device)
    address, view, before = memory.tensor.data_ptr(), memory.tensor[PIECE - 7 : PIECE + 9], free_on(device, memory)
    memory.release(keep=True)
    assert memory.mapped_bytes == 0 and memory.kept_bytes == size
    assert free_on(device, memory) - before >= 2 * PIECE
    memory.restore()
    assert memory.tensor.data_ptr() == address and memory.kept_bytes == 0
    assert torch.equal(memory.tensor.cpu(), pattern(size))
    assert torch.equal(view.cpu(), pattern(size)[PIECE - 7 : PIECE + 9])


def test_memory_that_is_not_kept_is_given_back_and_can_be_written_again(device):
    memory = filled(PIECE + 1, device)
    memory.release(keep=False)
    memory.release(keep=True)  # a second order finds nothing to keep
    assert memory.mapped_bytes == memory.kept_bytes == 0
    memory.restore()
    memory.tensor.fill_(7)
    assert int(memory.tensor.long().sum()) == 7 * (PIECE + 1)


def test_kept_bytes_can_be_given_up_later(device):
    memory = filled(PIECE + 1, device)
    memory.release(keep=True)
    memory.release(keep=False)
    assert memory.kept_bytes == 0


def test_bytes_that_cannot_be_copied_back_stay_on_the_host(monkeypatch):
    memory = filled(PIECE, torch.device("cpu"))
    memory.release(keep=True)
    monkeypatch.setattr(memory, "tensor_of", lambda start, stop: torch.empty(1, dtype=torch.uint8))
    with pytest.raises(RuntimeError):
        memory.restore()
    assert (memory.mapped_bytes, memory.kept_bytes) == (0, PIECE)
    monkeypatch.undo()
    memory.restore()
    assert torch.equal(memory.tensor, pattern(PIECE))


class FullRange(HostRange):
    """A range of a device that gives out some pieces and has no more."""

    def __init__(self, size: int, left: int) -> None:
        super().__init__(size)
        self.left, self.mapped = left, set[int]()

    def map(self, start: int, stop: int) -> None:
        if not self.left:
            raise MemoryError("the device is full")
        self.left -= 1
        self.mapped.add(start)

    def unmap(self, start: int, stop: int) -> None:
        super().unmap(start, stop)
        self.mapped.remove(start)
        self.left += 1


def test_a_device_without_room_gets_back_what_it_gave_and_the_kept_bytes_stay(monkeypatch):
    monkeypatch.setattr(returnable_memory, "PIECE_BYTES", PIECE)
    ranges: list[FullRange] = []

    def range_of(size: int, device: torch.device) -> FullRange:
        ranges.append(FullRange(size, 3))
        return ranges[0]

    memory = ReturnableMemory(3 * PIECE, torch.device("cpu"), range_of=range_of)
    memory.map_to(3 * PIECE)
    memory.tensor.copy_(pattern(3 * PIECE))
    memory.release(keep=True)
    ranges[0].left = 2
    with pytest.raises(MemoryError, match="full"):
        memory.restore()
    assert not ranges[0].mapped and memory.kept_bytes == 3 * PIECE
    ranges[0].left = 3
    memory.restore()
    assert torch.equal(memory.tensor, pattern(3 * PIECE))


def test_a_host_without_room_leaves_the_memory_where_it_is(monkeypatch):
    monkeypatch.setattr(returnable_memory, "PIECE_BYTES", PIECE)
    memory = filled(2 * PIECE, torch.device("cpu"))
    copies = iter([memory._copied(memory.tensor_of(0, PIECE))])

    def copied(piece: torch.Tensor) -> torch.Tensor:
        for copy in copies:
            return copy
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(memory, "_copied", copied)
    with pytest.raises(MemoryError, match="the host has no room"):
        memory.release(keep=True)
    assert memory.mapped_bytes == 2 * PIECE and memory.kept_bytes == 0
    assert torch.equal(memory.tensor, pattern(2 * PIECE))


@dataclass
class Layer:
    matrix: torch.Tensor
    parts: list[torch.Tensor]
    bias: torch.Tensor | None = None


Layer.__module__ = "holdfast.lm.made_up"


def model_of(device: torch.device, seed: int, width: int = 40) -> tuple[Layer, dict[str, torch.Tensor]]:
    """Weights with views, one matrix that is used twice, a transposed one, and one that is not contiguous."""
    torch.manual_seed(seed)
    matrix = torch.randn(width, 24, device=device, dtype=torch.bfloat16).t()
    whole = torch.randn(3, 50, 8, device=device)
    layer = Layer(matrix, [whole[1], whole[2, ::2]], torch.randint(0, 9, (5,), device=device))
    return layer, {"tied": matrix, "empty": torch.empty(0, device=device), "elsewhere": torch.empty(3, device="meta")}


def test_placed_weights_keep_values_views_and_strides(device):
    model, expected = model_of(device, 3), model_of(device, 3)
    weights = ReturnableWeights(device)
    weights.place(model)
    assert weights.memory is not None
    found, first = list(tensors_of(model)), weights.memory.tensor.data_ptr()
    for tensor, other in zip(found, tensors_of(expected), strict=True):
        assert tensor.stride() == other.stride() and tensor.device == other.device
        if tensor.device == device:
            assert torch.equal(tensor, other)
    moved = [tensor for tensor in found if tensor.numel() and tensor.device == device]
    assert {tensor.untyped_storage().data_ptr() for tensor in moved} == {first}
    firsts = [model[0].matrix, model[0].parts[0], model[0].bias]
    assert all((tensor.data_ptr() - first) % 512 == 0 for tensor in firsts), "each storage begins like PyTorch's own"
    assert model[1]["tied"].data_ptr() == model[0].matrix.data_ptr()


def test_a_model_that_is_read_again_fills_the_places_of_the_first(device):
    model = model_of(device, 3)
    weights = ReturnableWeights(device)
    weights.place(model)
    assert weights.memory is not None
    places = [tensor.data_ptr() for tensor in tensors_of(model)]
    weights.memory.release(keep=False)
    weights.place(model_of(device, 4))
    assert [tensor.data_ptr() for tensor in tensors_of(model)] == places
    for tensor, other in zip(tensors_of(model), tensors_of(model_of(device, 4)), strict=True):
        assert tensor.device != device or torch.equal(tensor, other)


def test_a_model_of_other_sizes_is_not_placed_over_the_first():
    weights = ReturnableWeights(torch.device("cpu"))
    weights.place(model_of(torch.device("cpu"), 3))
    with pytest.raises(ValueError, match="other sizes"):
        weights.place(model_of(torch.device("cpu"), 3, width=41))


def sleeping(device: torch.device) -> tuple[SleepMemory, tuple[Layer, dict[str, torch.Tensor]], KVCache]:
    memory = SleepMemory(device)
    model = model_of(device, 3)
    memory.weights.place(model)
    memory.reload_by(lambda: memory.weights.place(model_of(device, 3)))
    shapes = (KVShape(2, 16, 16), KVShape(1, 16, 16))
    cache = KVCache.allocate_layers(
        shapes, num_blocks=3, block_size=4, dtype=torch.float32, device=device, make=memory.cache_of
    )
    return memory, model, cache


@pytest.mark.parametrize("level", [1, 2])
def test_weights_and_cache_are_absent_while_asleep_and_usable_after(device, level):
    memory, model, cache = sleeping(device)
    before = memory.mapped_bytes
    memory.sleep(level)
    assert memory.mapped_bytes == 0 and memory.absent == ("weights", "kv_cache") and not memory.is_awake
    memory.wake(["weights"])
    assert memory.absent == ("kv_cache",) and not memory.is_awake
    memory.wake(["weights"])  # they are there already
    memory.wake(["kv_cache"])
    assert memory.is_awake and memory.mapped_bytes == before
    for tensor, other in zip(tensors_of(model), tensors_of(model_of(device, 3)), strict=True):
        assert tensor.device != device or torch.equal(tensor, other)
    for group in cache.groups:
        group.fill_(2.0)
        assert float(group.sum()) == 2.0 * group.numel()


def test_a_deeper_sleep_gives_up_the_kept_weights(device):
    memory, model, _ = sleeping(device)
    memory.sleep(1)
    memory.sleep(2)
    assert memory.level_of("weights") == 2
    memory.wake()
    assert torch.equal(model[0].matrix, model_of(device, 3)[0].matrix)


def test_dropped_weights_are_read_again_even_if_a_lighter_sleep_follows():
    memory, model, _ = sleeping(torch.device("cpu"))
    memory.sleep(2)
    memory.sleep(1)
    assert memory.level_of("weights") == 2
    memory.wake()
    assert torch.equal(model[0].matrix, model_of(torch.device("cpu"), 3)[0].matrix)


def test_weights_that_cannot_be_read_stay_absent_and_can_be_read_later():
    memory, model, _ = sleeping(torch.device("cpu"))
    failures = [OSError("the file is gone")]

    def reload() -> None:
        if failures:
            memory.weights.memory.map_to(1)
            raise failures.pop()
        memory.weights.place(model_of(torch.device("cpu"), 3))

    memory.reload_by(reload)
    memory.sleep(2)
    with pytest.raises(OSError, match="gone"):
        memory.wake(["weights"])
    assert memory.weights.memory.mapped_bytes == 0 and memory.absent == ("weights", "kv_cache")
    memory.wake()
    assert memory.is_awake and torch.equal(model[0].matrix, model_of(torch.device("cpu"), 3)[0].matrix)


@pytest.mark.parametrize(("name", "free"), [("host", 5), ("device", 7)])
def test_too_little_memory_is_refused_with_both_numbers(monkeypatch, name, free):
    memory, _, _ = sleeping(torch.device("cpu"))
    if name == "device":
        memory.sleep(1)
    monkeypatch.setattr(returnable_memory, "memory_of", lambda device: (free, 64 * 10**9))
    with pytest.raises(MemoryError, match=r"GB.*of 64\.0 GB"):
        memory.wake() if name == "device" else memory.sleep(1)
    assert memory.is_awake == (name == "host")


@pytest.mark.gpu
def test_a_captured_graph_reads_the_restored_memory():
    device = torch.device("cuda", 0)
    memory = filled(PAGE, device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    total.copy_(memory.tensor.sum())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.copy_(memory.tensor.sum())
    expected = int(pattern(PAGE).long().sum())
    for _ in range(2):
        torch.cuda.synchronize()
        memory.release(keep=True)
        torch.empty(PAGE, dtype=torch.uint8, device=device).fill_(1)
        memory.restore()
        total.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert int(total) == expected
