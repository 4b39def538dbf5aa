"""One micro-batch as a list of units, which may run in any slices. Its tensors lie in memory that a caller lends.

The bits of loss and gradients do not depend on how the units are cut into slices, nor on which tensors are kept,
released or computed again: a unit uses the same operations on the same numbers each time.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from holdfast.core.training_cost import BACKWARDS, HALF_OF, HALVES, HalfKind
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.kernels.training.losses import CrossEntropy, PositionLoss
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.halves import AdapterLayout, Halves, LayerAdapter, layer_halves
from holdfast.lm.models.trained_mixers import Kept, PackedTokens
from holdfast.training.jobs import HEAD_ROWS, Unit
from holdfast.training.stages import Stages

ALIGNMENT = 256
"""The alignment of every tensor's place in bytes, counted from the end of its plane."""

Half = tuple[int, HalfKind]
"""A half: the number of its layer among those of the device, and its kind."""


@dataclass(frozen=True)
class Places:
    """The places of tensors in the planes of an arena. Offsets count from the planes' ends."""

    depths: tuple[int, ...]
    """Number of bytes that are taken at the end of each plane."""
    at: dict[Hashable, tuple[int, int]]
    """For each tensor, by name: its plane, and the distance from the plane's end to its beginning, in bytes."""

    @classmethod
    def none(cls, planes: int) -> Places:
        """No places in this many planes."""
        return cls((0,) * planes, {})

    def then(self, sizes: Iterable[tuple[Hashable, int]]) -> Places:
        """These places and more tensors before them.

        Each tensor (name, bytes) goes to the plane that has least so far.
        """
        at, depths = dict(self.at), [*self.depths]
        planes = [(depth, plane) for plane, depth in enumerate(depths)]
        heapq.heapify(planes)
        for name, size in sizes:
            plane = planes[0][1]
            depths[plane] += -(-size // ALIGNMENT) * ALIGNMENT
            heapq.heapreplace(planes, (depths[plane], plane))
            at[name] = plane, depths[plane]
        return Places(tuple(depths), at)


class Arena:
    """The ends of the KV cache's planes as memory for tensors. A layer with attention has two: of keys and of values.

    Tensors of a layer may lie in the planes of any layer, so layers without a cache have room, too.
    """

    def __init__(self, planes: Sequence[torch.Tensor], block_bytes: int, *, shared: bool = False) -> None:
        """`planes` are whole, as bytes [num_blocks * block_bytes] uint8. Creating the arena writes nothing.

        The arenas of a model that is `shared` by several ranks need equally many blocks, wherever their planes end.
        """
        self.planes, self.block_bytes = planes, block_bytes
        # A plane may end anywhere; places count from the last aligned byte.
        self._slack = max((plane.data_ptr() + plane.numel()) % ALIGNMENT for plane in planes)
        if shared:
            self._slack = ALIGNMENT - 1

    @property
    def num_blocks(self) -> int:
        return self.planes[0].numel() // self.block_bytes

    @property
    def free(self) -> Places:
        """The places of an empty arena: none."""
        return Places.none(len(self.planes))

    def blocks(self, places: Places) -> int:
        """The number of blocks, at the end of the cache, that these places occupy."""
        deepest = max(places.depths)
        return -(-(deepest + self._slack) // self.block_bytes) if deepest else 0

    def tensor(self, places: Places, name: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor at a place, with the current contents of its memory.

        Raises ValueError if the plane is too small.
        """
        number, offset = places.at[name]
        plane = self.planes[number]
        end = plane.numel() - (plane.data_ptr() + plane.numel()) % ALIGNMENT
        if offset > end:
            raise ValueError(f"{name} lies {offset} bytes before the end of a plane of {end} bytes: take fewer tokens")
        start = end - offset
        return plane[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def arena_of(cache: KVCache, *, shared: bool = False) -> Arena:
    """The arena at the end of a KV cache. Each layer's keys and each layer's values must be contiguous.

    For `shared`, see `Arena`.
    """
    planes = [_bytes(plane) for layer in range(len(cache.places)) for plane in cache.layer(layer)]
    return Arena(planes, planes[0].numel() // cache.num_blocks, shared=shared)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, [bytes] uint8."""
    return tensor.view(-1).view(torch.uint8)


def kept_places(halves: Halves, tokens: int, before: Places) -> tuple[Places, Places]:
    """Places for the inputs of all halves of `tokens` tokens, and places that hold their kept tensors too."""
    size = tokens * halves.model.decoder.hidden_size * halves.model.spec.dtype.itemsize
    own = [(layer, kind) for layer, kinds in enumerate(halves.layers) for kind in kinds]
    inputs = before.then((half, size) for half in own)
    sizes = [
        ((*half, name), prod(shape) * dtype.itemsize)
        for half in own
        for name, (shape, dtype) in halves.kept_shapes(*half, tokens).items()
    ]
    # Large ones first, so that the planes are filled evenly.
    return inputs, inputs.then(sorted(sizes, key=lambda item: -item[1]))


@torch.no_grad()
def workspace_bytes(model: Decoder, tokens: int, rank: int, *, dora: bool = False) -> int:
    """The most GPU memory in bytes that units take outside the arena, for a sequence of `tokens` tokens; 0 on a CPU.

    It is measured by running the units that take most, on the first layer of each kind. It includes the stream that a
    micro-batch holds from its last forward.
    """
    device, dtype = model.spec.device, model.spec.dtype
    if device.type != "cuda":
        return 0
    base = adapted_modules(model.decoder)
    layout = AdapterLayout(model.decoder, base.scalable if dora else base.tunable, rank, dora)
    halves = Halves(model, layout, 1.0)
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    packed = halves.pack(ids, (tokens,))
    x = torch.zeros(tokens, model.decoder.hidden_size, dtype=dtype, device=device)
    gradient = torch.zeros_like(x)
    rows = min(tokens, HEAD_ROWS)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for layer, kind in largest_halves(halves):
        numbers = torch.zeros(layout.sizes[model.shard.layers.start + layer], dtype=dtype, device=device)
        sums = torch.zeros(len(numbers), device=device)
        adapter, grads = (halves.own(layout.views(model.shard.layers.start + layer, each)) for each in (numbers, sums))
        if halves.mixes(kind):
            halves.mixer_backward(layer, gradient, x, packed, adapter, grads, None, torch.zeros_like(x))
        else:
            halves.mlp_backward(layer, gradient, x.clone(), x, adapter, grads, None)
    if model.shard.last:
        halves.head(gradient[:rows], ids[:rows], CrossEntropy(torch.zeros(rows, device=device)), backward=True)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before + gradient.nbytes


def largest_halves(halves: Halves) -> tuple[Half, ...]:
    """The first half of each kind on the device, where an MLP and experts in its place are two kinds."""
    found: dict[tuple[HalfKind, bool], Half] = {}
    for layer, kinds in enumerate(halves.layers):
        for kind in kinds:
            found.setdefault((kind, halves.model.layers[layer].experts is not None), (layer, kind))
    return tuple(found.values())


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
        loss: PositionLoss,
        adapters: Sequence[LayerAdapter],
        grads: Sequence[LayerAdapter],
        stages: Stages | None = None,
    ) -> None:
        """`before` are the places that are already taken. `targets` and `loss` are those of `Halves.head`.

        `adapters` and `grads` are by layer of this device. The backward writes each gradient once, and overwrites the
        old contents. `stages` sends streams and gradients between the devices that have layers.
        """
        self._stages = stages or Stages(halves.model.shard, halves.model.decoder.num_layers, None)
        self.units = tuple(unit for unit in units if unit.kind != "optimizer")
        self.at = 0
        """The index of the next unit."""
        self._halves, self._arena, self._tokens = halves, arena, tokens
        self._targets, self._loss, self._adapters, self._grads = targets, loss, adapters, grads
        self._passes = loss.passes
        self._inputs, self._all = kept_places(halves, tokens.count, before)
        own = [(layer, kind) for layer, kinds in enumerate(halves.layers) for kind in kinds]
        self._next = dict(pairwise(own))
        """For each half but the last, the half that reads its result."""
        self._first = own[0]
        self._whole = layer_halves(halves.model.decoder)
        self._kept: dict[Half, Kept] = {}
        self._backward = any(unit.kind in BACKWARDS.values() for unit in self.units)
        self._chunks = -(-tokens.count // HEAD_ROWS)
        """Number of chunks of the head in each pass of the loss."""
        if (heads := sum(unit.kind == "head" for unit in self.units)) != (wanted := self._chunks * loss.passes):
            raise ValueError(f"the micro-batch has {heads} units of the head; its loss needs {wanted}")
        spec = halves.model.spec
        sums = torch.float64 if spec.dtype == torch.float64 else torch.float32
        self._losses = torch.zeros(self._chunks, dtype=sums, device=spec.device)
        self.logprobs = torch.zeros(targets.shape, dtype=sums, device=spec.device)
        """The log probability of each target, on the device; 0 where the head has not been, or is not here."""
        self._stream: torch.Tensor | None = None
        """The output of the last layer, and later the gradient of the stream, [T, hidden]."""

    @property
    def done(self) -> bool:
        return self.at == len(self.units)

    @property
    def most_places(self) -> Places:
        """The places whose tensors are in use once all halves keep theirs."""
        return self._all

    @property
    def places(self) -> Places:
        """The places whose tensors are in use."""
        return self._all if self._kept else self._inputs

    @property
    def loss(self) -> torch.Tensor:
        """The sum of the losses of the head's chunks so far, on the device. A pass before the last one has none."""
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
            half = number - stages.layers.start, HALF_OF[kind]
            if kind in HALVES:
                self._run_forward(half, keep)
            else:
                self._run_backward(half)
        elif number == stages.layers.start - 1 and kind == self._whole[number][-1]:
            stages.receive_on(self._input(self._first))
        elif number == stages.layers.stop and kind == BACKWARDS[self._whole[number][0]]:
            stages.receive_back(self._gradient)

    def _run_head(self, number: int) -> None:
        turn, chunk = divmod(number, self._chunks)
        if turn and not chunk:
            self._loss = self._loss.after(self.logprobs, self._tokens.packing.starts)
        rows = slice(chunk * HEAD_ROWS, (chunk + 1) * HEAD_ROWS)
        last = turn == self._passes - 1
        self._losses[chunk], self.logprobs[rows] = self._halves.head(
            self._gradient[rows], self._targets[rows], self._loss.part(rows), backward=self._backward and last
        )

    def _run_forward(self, half: Half, keep: bool) -> None:
        """Run a half of this device, and pass on what it gives to another stage."""
        halves, stages, (layer, kind) = self._halves, self._stages, half
        x, last = self._input(half), half not in self._next
        if half == self._first and stages.first:
            halves.embed(self._tokens, x)
        if last:
            self._stream = torch.empty_like(x)
        out = self._gradient if last else self._input(self._next[half])
        kept = self._keep(half, keep)
        if halves.mixes(kind):
            halves.mixer_forward(layer, x, self._tokens, self._adapters[layer], kept, out)
        else:
            halves.mlp_forward(layer, x, self._entered(layer), self._adapters[layer], kept, out)
        if last and not stages.last:
            stages.send_on(out)

    def _run_backward(self, half: Half) -> None:
        """Run the backward of a half of this device, and pass on what it gives to another stage."""
        halves, stages, (layer, kind) = self._halves, self._stages, half
        x, adapter, grads = self._input(half), self._adapters[layer], self._grads[layer]
        kept = self._kept.pop(half, None)
        if halves.mixes(kind):
            beside = self._input((layer, halves.layers[layer][-1]))
            halves.mixer_backward(layer, self._gradient, x, self._tokens, adapter, grads, kept, beside)
        else:
            halves.mlp_backward(layer, self._gradient, x, self._entered(layer), adapter, grads, kept)
        if half == self._first and not stages.first:
            stages.send_back(self._gradient)

    @property
    def _gradient(self) -> torch.Tensor:
        assert self._stream is not None
        return self._stream

    def _entered(self, layer: int) -> torch.Tensor:
        """The input of a layer, [T, hidden]."""
        return self._input((layer, self._halves.layers[layer][0]))

    def _input(self, half: Half) -> torch.Tensor:
        """The input of a half, [T, hidden]."""
        spec = self._halves.model.spec
        shape = (self._tokens.count, self._halves.model.decoder.hidden_size)
        return self._arena.tensor(self._inputs, half, shape, spec.dtype)

    def _keep(self, half: Half, keep: bool) -> Kept:
        """The memory for a half's kept tensors: places in the arena, or none, so that the forward allocates them."""
        if not keep:
            return {}
        shapes = self._halves.kept_shapes(*half, self._tokens.count)
        self._kept[half] = {
            name: self._arena.tensor(self._all, (*half, name), shape, dtype) for name, (shape, dtype) in shapes.items()
        }
        return self._kept[half]
