"""One micro-batch as a list of units, which may run in any slices. Its tensors lie in memory that a caller lends.

The bits of loss and gradients do not depend on how the units are cut into slices, nor on which tensors are kept,
released or computed again: a unit uses the same operations on the same numbers each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.halves import AdapterLayout, Halves, Kept, LayerAdapter, PackedTokens
from holdfast.training.jobs import HEAD_ROWS, Unit
from holdfast.training.stages import Stages

ALIGNMENT = 256
"""The alignment of every tensor's place in bytes, counted from the end of its plane."""

Half = str
"""The name of a half: attention or mlp."""


@dataclass(frozen=True)
class Places:
    """The places of tensors in the two planes of each layer, the same in all layers.

    Offsets count from the planes' ends.
    """

    at: dict[str, tuple[int, int]]
    """For each tensor, by name: its plane, 0 or 1, and the distance from the plane's end to its beginning, in bytes."""
    depths: tuple[int, int] = (0, 0)
    """Number of bytes that are taken at the end of each plane."""

    def then(self, sizes: Iterable[tuple[str, int]]) -> Places:
        """These places and more tensors before them.

        Each tensor (name, bytes) goes to the plane that has less so far.
        """
        at, depths = dict(self.at), [*self.depths]
        for name, size in sizes:
            plane = int(depths[1] < depths[0])
            depths[plane] += -(-size // ALIGNMENT) * ALIGNMENT
            at[name] = plane, depths[plane]
        return Places(at, (depths[0], depths[1]))


class Arena:
    """The ends of the KV cache's planes as memory for tensors. A layer has two planes: of keys and of values."""

    def __init__(
        self, planes: Sequence[tuple[torch.Tensor, torch.Tensor]], block_bytes: int, *, shared: bool = False
    ) -> None:
        """`planes` are whole, as bytes [num_blocks * block_bytes] uint8. Creating the arena writes nothing.

        The arenas of a model that is `shared` by several ranks need equally many blocks, wherever their planes end.
        """
        self.planes, self.block_bytes = planes, block_bytes
        # A plane may end anywhere; places count from the last aligned byte.
        self._slack = max((plane.data_ptr() + plane.numel()) % ALIGNMENT for pair in planes for plane in pair)
        if shared:
            self._slack = ALIGNMENT - 1

    @property
    def num_blocks(self) -> int:
        return self.planes[0][0].numel() // self.block_bytes

    def blocks(self, places: Places) -> int:
        """The number of blocks, at the end of the cache, that these places occupy."""
        deepest = max(places.depths)
        return -(-(deepest + self._slack) // self.block_bytes) if deepest else 0

    def tensor(self, places: Places, layer: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor at a place, with the current contents of its memory.

        Raises ValueError if the plane is too small.
        """
        number, offset = places.at[name]
        plane = self.planes[layer][number]
        end = plane.numel() - (plane.data_ptr() + plane.numel()) % ALIGNMENT
        if offset > end:
            raise ValueError(f"{name} lies {offset} bytes before the end of a plane of {end} bytes: take fewer tokens")
        start = end - offset
        return plane[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def arena_of(cache: KVCache, *, shared: bool = False) -> Arena:
    """The arena at the end of a KV cache. Each layer's keys and each layer's values must be contiguous.

    For `shared`, see `Arena`.
    """
    planes = [(_bytes(key), _bytes(value)) for key, value in map(cache.layer, range(len(cache.places)))]
    return Arena(planes, planes[0][0].numel() // cache.num_blocks, shared=shared)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, [bytes] uint8."""
    return tensor.view(-1).view(torch.uint8)


def kept_places(halves: Halves, tokens: int, before: Places) -> tuple[Places, Places]:
    """Places for the inputs of all halves of `tokens` tokens, and places that hold their kept tensors too."""
    size = tokens * halves.model.decoder.hidden_size * halves.model.spec.dtype.itemsize
    inputs = before.then((half, size) for half in ("attention", "mlp"))
    shapes = {**halves.kept_shapes("attention", tokens), **halves.kept_shapes("mlp", tokens)}
    sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    # Large ones first, so that the two planes are filled evenly.
    return inputs, inputs.then(sorted(sizes.items(), key=lambda item: -item[1]))


@torch.no_grad()
def workspace_bytes(model: Decoder, tokens: int, rank: int, *, dora: bool = False) -> int:
    """The most GPU memory in bytes that units take outside the arena, for a sequence of `tokens` tokens; 0 on a CPU.

    It is measured by running the units that take most, on the first layer and on the first one with experts. It
    includes the stream that a micro-batch holds from its last forward.
    """
    device, dtype = model.spec.device, model.spec.dtype
    if device.type != "cuda":
        return 0
    layout = AdapterLayout(model.decoder, adapted_modules(model.decoder).everywhere, rank, dora)
    halves = Halves(model, layout, 1.0)
    adapter: LayerAdapter = layout.views(torch.zeros(layout.elements, dtype=dtype, device=device))
    grads: LayerAdapter = layout.views(torch.zeros(layout.elements, device=device))
    adapter, grads = halves.own(adapter), halves.own(grads)
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    packed = halves.pack(ids, (tokens,))
    x = torch.zeros(tokens, model.decoder.hidden_size, dtype=dtype, device=device)
    gradient = torch.zeros_like(x)
    rows = min(tokens, HEAD_ROWS)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    experts = model.decoder.experts
    for layer in {0, experts.sparse.index(True) if experts is not None and any(experts.sparse) else 0}:
        halves.mlp_backward(layer, gradient, x.clone(), x, adapter, grads, None)
    halves.attention_backward(0, gradient, x, packed, adapter, grads, None, torch.zeros_like(x))
    if model.shard.last:
        halves.head(gradient[:rows], ids[:rows], torch.zeros(rows, device=device), backward=True)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before + gradient.nbytes


class Iteration:
    """The computation of one micro-batch, which stands at one of its units. Runs without autograd."""

    def __init__(
        self,
        halves: Halves,
        arena: Arena,
        before: Places,
        units: tuple[Unit, ...],
        tokens: PackedTokens,
        targets: torch.Tensor,
        weights: torch.Tensor,
        adapters: Sequence[LayerAdapter],
        grads: Sequence[LayerAdapter],
        stages: Stages | None = None,
    ) -> None:
        """`before` are the places that are already taken. `targets` and `weights` [T] are those of `Halves.head`.

        `adapters` and `grads` are by layer of this device. The backward writes each gradient once, and overwrites the
        old contents. `stages` sends streams and gradients between the devices that have layers.
        """
        self._stages = stages or Stages(halves.model.shard, halves.model.decoder.num_layers, None)
        self.units = tuple(unit for unit in units if unit.kind != "optimizer")
        self.at = 0
        """The index of the next unit."""
        self._halves, self._arena, self._tokens = halves, arena, tokens
        self._targets, self._weights, self._adapters, self._grads = targets, weights, adapters, grads
        self._inputs, self._all = kept_places(halves, tokens.count, before)
        self._kept: dict[tuple[Half, int], Kept] = {}
        self._backward = any(unit.kind == "mlp_backward" for unit in self.units)
        chunks = sum(unit.kind == "head" for unit in self.units)
        spec = halves.model.spec
        sums = torch.float64 if spec.dtype == torch.float64 else torch.float32
        self._losses = torch.zeros(chunks, dtype=sums, device=spec.device)
        self._stream: torch.Tensor | None = None
        """The output of the last layer, and later the gradient of the stream, [T, hidden]."""

    @property
    def done(self) -> bool:
        return self.at == len(self.units)

    @property
    def places(self) -> Places:
        """The places whose tensors are in use."""
        return self._all if self._kept else self._inputs

    @property
    def loss(self) -> torch.Tensor:
        """The sum of the weighted losses of the head's chunks so far, on the device."""
        return self._losses.sum()

    @torch.no_grad()
    def run(self, first: int, stop: int, *, keep: bool) -> None:
        """Compute units [first, stop); `first` must be the next one.

        With `keep`, forward halves keep the tensors that their backward needs; otherwise only their inputs.
        """
        if not self.at == first <= stop <= len(self.units):
            raise ValueError(f"units {first} to {stop} cannot run: the next is {self.at} of {len(self.units)}")
        for unit in self.units[first:stop]:
            self._run(unit, keep and self._backward)
            self.at += 1

    def release(self) -> None:
        """Release the tensors that forward halves have kept, except their inputs. The backward computes them again."""
        self._kept.clear()

    def _run(self, unit: Unit, keep: bool) -> None:
        """Run a unit of this device, or take part in the message that another device sends at its end."""
        kind, number = unit
        stages = self._stages
        if kind == "head":
            if stages.last:
                self._run_head(number)
        elif number in stages.layers:
            self._run_half(kind, number - stages.layers.start, keep)
        elif kind == "mlp" and number == stages.layers.start - 1:
            stages.receive_on(self._input("attention", 0))
        elif kind == "attention_backward" and number == stages.layers.stop:
            stages.receive_back(self._gradient)

    def _run_head(self, number: int) -> None:
        rows = slice(number * HEAD_ROWS, (number + 1) * HEAD_ROWS)
        self._losses[number] = self._halves.head(
            self._gradient[rows], self._targets[rows], self._weights[rows], backward=self._backward
        )

    def _run_half(self, kind: str, number: int, keep: bool) -> None:
        """Run a half of this device's layer of this number, and pass on what it gives to another stage."""
        halves, stages = self._halves, self._stages
        if kind == "attention":
            x, out = self._input("attention", number), self._input("mlp", number)
            if number == 0 and stages.first:
                halves.embed(self._tokens, x)
            kept = self._keep("attention", number, keep)
            halves.attention_forward(number, x, self._tokens, self._adapters[number], kept, out)
        elif kind == "mlp":
            x, last = self._input("mlp", number), number == len(stages.layers) - 1
            if last:
                self._stream = torch.empty_like(x)
            out = self._stream if last and self._stream is not None else self._input("attention", number + 1)
            entered, kept = self._input("attention", number), self._keep("mlp", number, keep)
            halves.mlp_forward(number, x, entered, self._adapters[number], kept, out)
            if last and not stages.last:
                stages.send_on(out)
        elif kind == "mlp_backward":
            halves.mlp_backward(
                number,
                self._gradient,
                self._input("mlp", number),
                self._input("attention", number),
                self._adapters[number],
                self._grads[number],
                self._kept.pop(("mlp", number), None),
            )
        else:
            halves.attention_backward(
                number,
                self._gradient,
                self._input("attention", number),
                self._tokens,
                self._adapters[number],
                self._grads[number],
                self._kept.pop(("attention", number), None),
                self._input("mlp", number),
            )
            if number == 0 and not stages.first:
                stages.send_back(self._gradient)

    @property
    def _gradient(self) -> torch.Tensor:
        assert self._stream is not None
        return self._stream

    def _input(self, half: Half, layer: int) -> torch.Tensor:
        """The input of a half, [T, hidden]."""
        spec = self._halves.model.spec
        shape = (self._tokens.count, self._halves.model.decoder.hidden_size)
        return self._arena.tensor(self._inputs, layer, half, shape, spec.dtype)

    def _keep(self, half: Half, layer: int, keep: bool) -> Kept:
        """The memory for a half's kept tensors: places in the arena, or none, so that the forward allocates them."""
        if not keep:
            return {}
        shapes = self._halves.kept_shapes(half, self._tokens.count)
        self._kept[half, layer] = {
            name: self._arena.tensor(self._all, layer, name, shape, dtype) for name, (shape, dtype) in shapes.items()
        }
        return self._kept[half, layer]
