"""AdapterSlots: LoRA adapters on the device, stacked by slot, as the layers of a decoder read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from holdfast.lm.kernels.collectives.protocol import Group, in_rows
from holdfast.lm.kernels.lora.protocol import LayerStacks, LoraStack
from holdfast.lm.models.adapted import AdaptedModule, AdaptedModules
from holdfast.lm.models.layer_weights import LayerWeights
from holdfast.lm.models.peft_files import AdapterWeights, LoraPair

INPUTS_SPLIT = ("o", "down")
"""The fields whose inputs are split where several devices share a layer. Each device has a part of each row."""

ROWS_AT_A_TIME = 1024
"""Number of a weight's rows whose norms are computed together, which bounds the memory for them."""


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
    gains: torch.Tensor | None = None  # [outputs of all fields of all layers] float32
    """The gains of a DoRA, or the magnitudes of rows that several devices share; None: all gains are 1."""
    squares: torch.Tensor | None = None  # [outputs of shared rows] float32
    """This device's part of the sum of squares of each shared row; None for no DoRA."""

    @property
    def nbytes(self) -> int:
        of_dora = sum(each.nbytes for each in (self.gains, self.squares) if each is not None)
        return self.numbers.nbytes + of_dora


class _Place(NamedTuple):
    """The place of one field of one layer in a slot."""

    a: int
    """The offset of A."""
    b: int
    """The offset of B."""
    table: int
    """The index of its first module in the tables of ranks and scales."""
    gain: int
    """The index of its first output among the gains."""
    names: tuple[str, ...]
    """The short names of its modules."""
    modules: tuple[AdaptedModule, ...]

    @property
    def outputs(self) -> int:
        return int(self.modules[-1].columns.stop)


class AdapterSlots:
    """Device memory for `slots` adapters of rank `max_rank` or less.

    The numbers of a slot are contiguous, so an adapter of the full rank is one copy.
    """

    def __init__(
        self,
        base: AdaptedModules,
        *,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        dora: bool = False,
        group: Group | None = None,
    ) -> None:
        """Allocate the slots for a device's modules, all empty. An empty slot changes no output.

        With `dora`, slots have gains. `group` is the devices that share each layer, if there are several.
        """
        self.max_rank, self.dtype = max_rank, dtype
        self._base = base
        self._places: dict[tuple[int, str], _Place] = {}
        """For each layer and field, its place in a slot."""
        at = tables = outputs = 0
        for layer in range(self._base.num_layers):
            for field, names in self._base.fields(layer).items():
                modules = tuple(self._base.of_layer(layer)[name] for name in names)
                place = _Place(at, at + len(modules) * max_rank * modules[0].inputs, tables, outputs, names, modules)
                self._places[layer, field] = place
                at, tables, outputs = place.b + max_rank * place.outputs, tables + len(names), outputs + place.outputs
        self._numbers = torch.zeros(slots, at, dtype=dtype, device=device)
        self._ranks = torch.zeros(slots, tables, dtype=torch.int32, device=device)
        self._scales = torch.zeros(slots, tables, dtype=torch.float32, device=device)
        self.takes_gains = dora
        """Whether adapters may have gains."""
        self._gains = torch.ones(slots + 1, outputs if dora else 0, dtype=torch.float32, device=device)
        self._sum_over_devices = in_place if group is None else group.all_reduce
        shared = [
            torch.arange(place.gain, place.gain + place.outputs)
            for (_, field), place in self._places.items()
            if dora and group is not None and field in INPUTS_SPLIT
        ]
        self._shared = torch.cat([torch.empty(0, dtype=torch.int64), *shared])
        """Indices among the gains of the rows that devices share, on the host."""
        self._shared_here = self._shared.to(device)
        self._squares = torch.zeros(slots, len(self._shared), dtype=torch.float32, device=device)
        """This device's part of the sums of squares of the shared rows, by slot."""
        self.scaled: set[int] = set()
        """The slots whose adapters have gains."""
        self.layers = tuple(
            LayerStacks(**{field: self._stack(self._places[layer, field]) for field in self._base.fields(layer)})
            for layer in range(self._base.num_layers)
        )

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def nbytes(self) -> int:
        """Size of all slots in bytes."""
        tables = (self._numbers, self._ranks, self._scales, self._gains, self._squares)
        return sum(table.nbytes for table in tables)

    def pack(self, weights: AdapterWeights, layers: Sequence[LayerWeights], *, pinned: bool) -> PackedAdapter:
        """Pack an adapter whose ranks fit, rounded once to the slots' dtype. A DoRA scales the rows of `layers`.

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

        magnitudes, squares = (torch.ones(self._gains.shape[1]) for _ in range(2))
        squares[self._shared] = 0.0
        for (layer, field), place in self._places.items():
            pairs = [weights.pairs.get((layer, name)) for name in place.names]
            most = max((pair.rank for pair in pairs if pair is not None), default=0)
            b = torch.zeros(most, place.outputs)
            for part, (module, pair) in enumerate(zip(place.modules, pairs, strict=True)):
                if pair is None:
                    continue
                ranks[place.table + part], scales[place.table + part] = pair.rank, pair.scale
                add(place.a + part * self.max_rank * module.inputs, pair.a)
                b[: pair.rank, module.columns] = module.placed(pair.b).t()
                if self.takes_gains and pair.magnitude is not None:
                    columns = slice(place.gain + module.columns.start, place.gain + module.columns.stop)
                    magnitudes[columns] = module.placed(pair.magnitude).float()
                    squares[columns] = squares_of(layers[layer].rows(field, module.columns), module, pair).cpu()
            if most:
                add(place.b, b)
        numbers = torch.empty(total, dtype=self.dtype, pin_memory=pinned)
        for piece, source in sources:
            numbers[piece.start : piece.start + piece.length] = source.reshape(-1)
        tables = [ranks, scales]
        if weights.has_magnitudes and self.takes_gains:
            shared = squares[self._shared]
            squares[self._shared] = 1.0  # the devices divide the magnitudes of these rows together
            tables += [magnitudes / squares.sqrt(), shared]
        return PackedAdapter(numbers, tuple(pieces), *(table.pin_memory() if pinned else table for table in tables))

    def write(self, slot: int, adapter: PackedAdapter) -> None:
        """Copy an adapter into a slot, on the current stream."""
        row = self._numbers[slot]
        for start, length, place in adapter.pieces:
            row[place : place + length].copy_(adapter.numbers[start : start + length], non_blocking=True)
        self._ranks[slot].copy_(adapter.ranks, non_blocking=True)
        self._scales[slot].copy_(adapter.scales, non_blocking=True)
        if adapter.gains is not None and adapter.squares is not None:
            self._gains[slot].copy_(adapter.gains, non_blocking=True)
            self._squares[slot].copy_(adapter.squares, non_blocking=True)
            self.scaled.add(slot)
        elif slot in self.scaled:
            self._gains[slot].fill_(1.0)
            self.scaled.discard(slot)

    @torch.no_grad()
    def complete(self, slot: int) -> None:
        """Divide the magnitudes of the shared rows by the rows' norms over all devices, once after each `write`.

        All devices that share the layers call this in the same order. A row of zeros keeps its magnitude: it stays zero
        whatever its gain is.
        """
        if slot in self.scaled and len(self._shared):
            squares = self._sum_over_devices(in_rows(self._squares[slot])).view(-1)
            self._gains[slot, self._shared_here] *= torch.where(squares > 0, squares, 1.0).rsqrt()

    def fill(self) -> None:
        """Fill every slot with an adapter of the full rank that adds zero: the widest case, for measuring steps."""
        self._numbers.zero_()
        self._ranks.fill_(self.max_rank)
        self._scales.zero_()

    def clear(self) -> None:
        """Empty every slot."""
        self._ranks.zero_()

    def _stack(self, place: _Place) -> LoraStack:
        parts, rank = len(place.modules), self.max_rank
        table = slice(place.table, place.table + parts)
        return LoraStack(
            a=self._cut(place.a, (parts, rank, place.modules[0].inputs)),
            b=self._cut(place.b, (rank, place.outputs)),
            rank=self._ranks[:, table],
            scale=self._scales[:, table],
            ends=tuple(module.columns.stop for module in place.modules),
            gain=self._gains[:, place.gain : place.gain + place.outputs] if self.takes_gains else None,
        )

    def _cut(self, at: int, shape: tuple[int, ...]) -> torch.Tensor:
        return self._numbers[:, at : at + prod(shape)].view(len(self), *shape)


def in_place(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over one device: x itself."""
    return x


@torch.no_grad()
def squares_of(rows: torch.Tensor, module: AdaptedModule, pair: LoraPair) -> torch.Tensor:
    """The squared norm of each row of W + scale · B A [outputs] float32, from the module's rows W of its field.

    A DoRA's gain is the pair's magnitude over the norm (DoRA, Liu et al., 2024, eq. 5). Where devices share rows, each
    has the squares of its own inputs.
    """
    return row_squares(rows, pair.a.to(rows.device), module.placed(pair.b).to(rows.device), pair.scale)


def row_squares(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """The squared norm of each of the rows of W + scale · B A, [outputs] float32, or float64 for float64 weights."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    a = a.to(dtype)
    squares = [
        torch.linalg.vector_norm(torch.addmm(part.to(dtype), b_part.to(dtype), a, alpha=scale), dim=1).square()
        for part, b_part in zip(torch.split(rows, ROWS_AT_A_TIME), torch.split(b, ROWS_AT_A_TIME), strict=True)
    ]
    return torch.cat(squares)
