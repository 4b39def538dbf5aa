"""AdapterSlots: LoRA adapters on the device, stacked by slot, as the layers of a decoder read them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from holdfast.lm.kernels.lora.protocol import Lora, LoraStack
from holdfast.lm.models.peft_files import AdapterWeights, DecoderSizes, module_shapes

FIELDS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""For each linear field of LayerWeights, the modules that it fuses, in the order of its rows."""


@dataclass(frozen=True, slots=True)
class LayerStacks:
    """The adapters of one layer's linear fields."""

    qkv: LoraStack
    o: LoraStack
    gate_up: LoraStack
    down: LoraStack


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The LoRA adapters of one step: their weights, and the adapter of each token."""

    layers: tuple[LayerStacks, ...]
    tokens: Lora
    """The adapters of all tokens of the step."""
    rows: Lora
    """The adapters of the tokens whose logits are needed, in the order of the logits."""


class Piece(NamedTuple):
    """A contiguous range of a packed adapter's numbers, and its place in a slot."""

    start: int
    length: int
    place: int


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter on the host, ready to be copied to a slot: its numbers in the order in which a slot stores them."""

    numbers: torch.Tensor  # [n], in the type of the slots
    pieces: tuple[Piece, ...]
    ranks: torch.Tensor  # [layers · modules] int32
    scales: torch.Tensor  # [layers · modules] float32

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes


class AdapterSlots:
    """Device memory for `slots` adapters of rank `max_rank` or less.

    The numbers of a slot are contiguous, so an adapter of the full rank is one copy.
    """

    def __init__(
        self, sizes: DecoderSizes, *, slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the slots, all empty. An empty slot changes no output."""
        self.max_rank, self.dtype = max_rank, dtype
        shapes = module_shapes(sizes)
        self._places: dict[tuple[int, str], tuple[int, int, int, int]] = {}
        """For each layer and field: the offsets of A and B in a slot, then the numbers of inputs and outputs."""
        at = 0
        for layer in range(sizes.num_layers):
            for field, modules in FIELDS.items():
                inputs, outputs = shapes[modules[0]][1], sum(shapes[module][0] for module in modules)
                b = at + len(modules) * max_rank * inputs
                self._places[layer, field] = at, b, inputs, outputs
                at = b + max_rank * outputs
        self._numbers = torch.zeros(slots, at, dtype=dtype, device=device)
        self._modules = sum(map(len, FIELDS.values()))
        tables = (slots, sizes.num_layers * self._modules)
        self._ranks = torch.zeros(tables, dtype=torch.int32, device=device)
        self._scales = torch.zeros(tables, dtype=torch.float32, device=device)
        self._widths = {module: shape[0] for module, shape in shapes.items()}
        self.layers = tuple(
            LayerStacks(**{field: self._stack(layer, field) for field in FIELDS}) for layer in range(sizes.num_layers)
        )

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def nbytes(self) -> int:
        """Size of all slots in bytes."""
        return self._numbers.nbytes + self._ranks.nbytes + self._scales.nbytes

    def pack(self, weights: AdapterWeights, *, pinned: bool) -> PackedAdapter:
        """Pack an adapter whose ranks fit, rounded once to the slots' dtype.

        With `pinned`, the result is in pinned memory.
        """
        ranks = torch.zeros(self._ranks.shape[1], dtype=torch.int32)
        scales = torch.zeros(self._scales.shape[1], dtype=torch.float32)
        pieces: list[Piece] = []
        sources: list[tuple[Piece, torch.Tensor]] = []
        total = 0

        def add(place: int, source: torch.Tensor) -> None:
            nonlocal total
            piece = Piece(total, source.numel(), place)
            sources.append((piece, source))
            total += piece.length
            last = pieces[-1] if pieces else None
            if last is not None and last.place + last.length == place:
                pieces[-1] = Piece(last.start, last.length + piece.length, last.place)
            else:
                pieces.append(piece)

        for (layer, field), (a_at, b_at, inputs, outputs) in self._places.items():
            pairs = [weights.pairs.get((layer, module)) for module in FIELDS[field]]
            most = max((pair.rank for pair in pairs if pair is not None), default=0)
            b = torch.zeros(most, outputs)
            column = 0
            for part, (module, pair) in enumerate(zip(FIELDS[field], pairs, strict=True)):
                if pair is not None:
                    table = self._table(layer, field) + part
                    ranks[table], scales[table] = pair.rank, pair.scale
                    add(a_at + part * self.max_rank * inputs, pair.a)
                    b[: pair.rank, column : column + self._widths[module]] = pair.b.t()
                column += self._widths[module]
            if most:
                add(b_at, b)
        numbers = torch.empty(total, dtype=self.dtype, pin_memory=pinned)
        for piece, source in sources:
            numbers[piece.start : piece.start + piece.length] = source.reshape(-1)
        if pinned:
            ranks, scales = ranks.pin_memory(), scales.pin_memory()
        return PackedAdapter(numbers, tuple(pieces), ranks, scales)

    def write(self, slot: int, adapter: PackedAdapter) -> None:
        """Copy an adapter into a slot, on the current stream."""
        row = self._numbers[slot]
        for start, length, place in adapter.pieces:
            row[place : place + length].copy_(adapter.numbers[start : start + length], non_blocking=True)
        self._ranks[slot].copy_(adapter.ranks, non_blocking=True)
        self._scales[slot].copy_(adapter.scales, non_blocking=True)

    def fill(self) -> None:
        """Fill every slot with an adapter of the full rank that adds zero: the widest case, for measuring steps."""
        self._numbers.zero_()
        self._ranks.fill_(self.max_rank)
        self._scales.zero_()

    def clear(self) -> None:
        """Empty every slot."""
        self._ranks.zero_()

    def _table(self, layer: int, field: str) -> int:
        """The index of a field's first part in the tables of ranks and scales."""
        before = list(FIELDS)[: list(FIELDS).index(field)]
        return layer * self._modules + sum(len(FIELDS[other]) for other in before)

    def _stack(self, layer: int, field: str) -> LoraStack:
        a_at, b_at, inputs, outputs = self._places[layer, field]
        parts, rank = len(FIELDS[field]), self.max_rank
        table = slice(self._table(layer, field), self._table(layer, field) + parts)
        ends, end = [], 0
        for module in FIELDS[field]:
            end += self._widths[module]
            ends.append(end)
        return LoraStack(
            a=self._cut(a_at, (parts, rank, inputs)),
            b=self._cut(b_at, (rank, outputs)),
            rank=self._ranks[:, table],
            scale=self._scales[:, table],
            ends=tuple(ends),
        )

    def _cut(self, at: int, shape: tuple[int, ...]) -> torch.Tensor:
        return self._numbers[:, at : at + prod(shape)].view(len(self), *shape)
