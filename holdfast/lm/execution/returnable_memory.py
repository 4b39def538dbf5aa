"""Memory of weights and caches that can be returned to the device, and comes back at the same addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.lm.devices import memory_of
from holdfast.lm.kernels.address_range import AddressRange, reserve

PIECE_BYTES = 256 << 20
"""Bytes that are mapped, copied and unmapped at a time. A power of two, to which PyTorch rounds pinned memory."""
ALIGNMENT = 512
"""Bytes of which the address of each tensor's first byte is a multiple, as for tensors that PyTorch allocates."""
HOST = torch.device("cpu")
STALE_BYTES = 1 << 30
"""Bytes of weights that are moved before PyTorch returns the memory that they had to the device."""


class ReturnableMemory:
    """Bytes on a device at fixed addresses. Their memory can be returned to the device and restored.

    Views of `tensor` may be read and written only while the memory is there.
    """

    def __init__(
        self, size: int, device: torch.device, *, range_of: Callable[[int, torch.device], AddressRange] = reserve
    ) -> None:
        """Reserve addresses for `size` bytes, at least one. `map_to` maps them. Raises MemoryError."""
        self.size, self.device = size, device
        self._range = range_of(size, device)
        unit = self._range.granularity
        piece = max(unit, PIECE_BYTES // unit * unit)
        end = -(-size // unit) * unit
        self._pieces = [(start, min(start + piece, end)) for start in range(0, end, piece)]
        self._mapped = 0
        """Number of pieces that are mapped: the first ones."""
        self._kept: list[torch.Tensor] = []
        """Copies of pieces on the host, from the first piece on."""
        self._whole: torch.Tensor | None = None

    @classmethod
    def allocated(cls, size: int, device: torch.device) -> ReturnableMemory:
        """Bytes that are mapped at once. Raises MemoryError."""
        memory = cls(size, device)
        memory.map_to(size)
        return memory

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes, uint8 [size], always in the same storage. The first ones must have been mapped once."""
        if self._whole is None:
            with torch.inference_mode(mode=False):  # others write to it outside that mode, too
                self._whole = self._range.tensor()
        return self._whole[: self.size]

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are taken from the device now."""
        return self._pieces[self._mapped - 1][1] if self._mapped else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that lie on the host now."""
        return sum(len(each) for each in self._kept)

    def map_to(self, stop: int) -> None:
        """Map memory up to this byte, as far as it is not. Raises MemoryError, and then maps nothing."""
        before = self._mapped
        try:
            while self.mapped_bytes < min(stop, self.size):
                self._range.map(*self._pieces[self._mapped])
                self._mapped += 1
        except MemoryError:
            self._unmap_to(before)
            raise

    def release(self, *, keep: bool) -> None:
        """Return the memory to the device. With `keep`, its bytes are kept on the host, else they are lost.

        The caller sees that the device uses none of it. Raises MemoryError if the host has no room; all is as it was
        then.
        """
        if keep and self._mapped:
            try:
                for start, stop in self._pieces[len(self._kept) : self._mapped]:
                    self._kept.append(self._copied(self.tensor_of(start, stop)))
            except (MemoryError, RuntimeError) as error:
                self._kept.clear()
                raise MemoryError(f"the host has no room for {self.size / 1e9:.2f} GB: {error}") from None
        elif not keep:
            self._kept.clear()
        self._unmap_to(0)

    def restore(self) -> None:
        """Map the memory again, with the bytes that were kept. Raises MemoryError, and then nothing has changed."""
        before = self._mapped
        self.map_to(self.size)
        try:
            for (start, stop), kept in zip(self._pieces, self._kept, strict=False):
                self.tensor_of(start, stop).copy_(kept)
        except BaseException:
            self._unmap_to(before)
            raise
        self._kept.clear()

    def tensor_of(self, start: int, stop: int) -> torch.Tensor:
        """The bytes [start, stop), as far as the memory reaches."""
        return self.tensor[start:stop]

    def _copied(self, piece: torch.Tensor) -> torch.Tensor:
        """A copy of bytes on the host, complete."""
        copy = torch.empty(len(piece), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return copy.copy_(piece)

    def _unmap_to(self, pieces: int) -> None:
        while self._mapped > pieces:
            self._mapped -= 1
            self._range.unmap(*self._pieces[self._mapped])


class Place(NamedTuple):
    """The place of one storage's used bytes in the memory of the weights."""

    start: int
    size: int
    tensors: int
    """Number of tensors that share these bytes."""


class ReturnableWeights:
    """The weights of a model, which are moved to returnable memory once they have been read.

    `place` is called by the model itself, with all its weights, before anything holds their addresses. The first call
    moves them. A model that is read again calls it, too: its weights then take the places of the first one's, whose
    tensors thus have their content again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.memory: ReturnableMemory | None = None
        """The memory of all weights; None until they are placed."""
        self._places: list[Place] = []

    def place(self, weights: object) -> None:
        """Move all tensors of the device in these weights. Raises MemoryError; ValueError if a later model differs."""
        shared = [*_by_storage(weights, self._device)]
        places = list[Place]()
        end = 0
        for each in shared:
            size = each.stop - each.start
            places.append(Place(end, size, len(each.tensors)))
            end += -(-size // ALIGNMENT) * ALIGNMENT
        if self.memory is None:
            self._places = places
            self.memory = ReturnableMemory(max(end, 1), self._device)
        elif places != self._places:
            raise ValueError("the checkpoint's weights have other sizes than those that were loaded before")
        stale = 0
        shared.reverse()
        for place in places:
            stale += place.size
            self._move(shared.pop(), place, self.memory)
            if stale > STALE_BYTES and self._device.type == "cuda":
                torch.cuda.empty_cache()
                stale = 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _move(self, shared: _Shared, place: Place, memory: ReturnableMemory) -> None:
        memory.map_to(place.start + place.size)
        source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(shared.storage)
        memory.tensor_of(place.start, place.start + place.size).copy_(source[shared.start : shared.stop])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        storage = memory.tensor.untyped_storage()
        for tensor in shared.tensors:
            first = tensor.storage_offset() + (place.start - shared.start) // tensor.element_size()
            tensor.set_(storage, first, tensor.size(), tensor.stride())


class _Shared(NamedTuple):
    """The tensors that share a storage, and the bytes [start, stop) of it that they use."""

    storage: torch.UntypedStorage
    tensors: list[torch.Tensor]
    start: int
    stop: int


def _by_storage(weights: object, device: torch.device) -> Iterator[_Shared]:
    """The storages of all tensors of a device, in the order in which they are found."""
    found: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors_of(weights):
        if tensor.device == device and tensor.numel():
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for tensors in found.values():
        spans = [_span(tensor) for tensor in tensors]
        start = min(first for first, _ in spans) // 16 * 16  # a multiple of the size of any element
        yield _Shared(tensors[0].untyped_storage(), tensors, start, max(stop for _, stop in spans))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and the one after the last."""
    last = sum(int((size - 1) * stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


def tensors_of(weights: object) -> Iterator[torch.Tensor]:
    """All tensors in an object of Holdfast's, in its fields, and in lists and mappings; each once, in their order."""
    seen = set[int]()
    todo: list[Any] = [weights]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, Mapping):
            todo += reversed([*each.values()])
        elif isinstance(each, list | tuple):
            todo += reversed(each)
        elif type(each).__module__.startswith("holdfast.lm."):
            todo += reversed(_fields(each))


def _fields(each: object) -> list[Any]:
    """The values of an object's attributes."""
    slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
    named = [getattr(each, name) for name in slots if hasattr(each, name)]
    return [*named, *getattr(each, "__dict__", {}).values()]


class SleepMemory:
    """The memory of one device that an engine returns while it sleeps: that of the weights, and that of the KV cache.

    No step may run, and none may begin before `is_awake`. Any thread may call one method at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.weights = ReturnableWeights(device)
        self._cache: list[ReturnableMemory] = []
        self._reload: Callable[[], object] = lambda: None
        self._absent: dict[str, int] = {}
        """The level at which each kind of memory was returned, by its tag: `weights` and `kv_cache`."""

    def reload_by(self, reload: Callable[[], object]) -> None:
        """Read the weights by this function after a sleep that drops them: it makes the model once more."""
        self._reload = reload

    def cache_of(self, size: int) -> torch.Tensor:
        """Memory of the KV cache, uint8 [size]. Raises MemoryError."""
        memory = ReturnableMemory.allocated(size, self._device)
        self._cache.append(memory)
        return memory.tensor

    @property
    def is_awake(self) -> bool:
        """Whether all memory is there."""
        return not self._absent

    @property
    def absent(self) -> tuple[str, ...]:
        """The tags of the memory that is not on the device."""
        return tuple(self._absent)

    def level_of(self, tag: str) -> int:
        """The level at which memory of a tag was returned; 0 if it is there."""
        return self._absent.get(tag, 0)

    @property
    def mapped_bytes(self) -> int:
        """Bytes that this memory takes on the device now."""
        return sum(each.mapped_bytes for each in self._all)

    @property
    def _all(self) -> list[ReturnableMemory]:
        return [*self._of("weights"), *self._cache]

    def _of(self, tag: str) -> list[ReturnableMemory]:
        if tag == "kv_cache":
            return self._cache
        return [] if self.weights.memory is None else [self.weights.memory]

    def sleep(self, level: int) -> None:
        """Return the memory to the device. At level 1 the weights are kept on the host, at level 2 they are dropped.

        The KV cache is lost. Raises MemoryError if the host has no room for the weights; all is as it was then.
        """
        self._synchronize()
        for memory in self._of("weights"):
            missing = memory.mapped_bytes if level == 1 else 0
            free, total = memory_of(HOST)
            if missing > free:
                raise MemoryError(
                    f"level is 1, and the weights take {missing / 1e9:.2f} GB of host memory: of {total / 1e9:.1f} GB "
                    f"{free / 1e9:.1f} are free; use level 2, which drops them"
                )
            memory.release(keep=level == 1)
        self._absent["weights"] = max(level, self._absent.get("weights", level))
        for memory in self._cache:
            memory.release(keep=False)
        self._absent["kv_cache"] = level
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, tags: Sequence[str] = ()) -> None:
        """Restore the memory of these tags, by default of all. The weights are as they were before.

        Raises MemoryError if the device has no room, and ValueError or OSError if the weights cannot be read again. The
        memory of that tag is then still absent, and another call may follow.
        """
        for tag in [tag for tag in self._absent if not tags or tag in tags]:
            needed, (free, total) = sum(each.size for each in self._of(tag)), memory_of(self._device)
            if needed > free:
                raise MemoryError(
                    f"{tag} takes {needed / 1e9:.2f} GB, and of {total / 1e9:.1f} GB on the device {free / 1e9:.1f} "
                    "are free: free some, and wake it up again"
                )
            if tag == "weights" and self._absent[tag] > 1:
                self._read_again()
            else:
                for each in self._of(tag):
                    each.restore()
            self._synchronize()
            del self._absent[tag]

    def _read_again(self) -> None:
        """Read the dropped weights into their places."""
        try:
            self._reload()
        except BaseException:
            for each in self._of("weights"):
                each.release(keep=False)
            raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what reading took besides the weights

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
