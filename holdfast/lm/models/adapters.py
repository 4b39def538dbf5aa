"""AdapterSlots: LoRA adapters on the device, stacked by slot, as the layers of a decoder read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.lora.protocol import LayerStacks, LoraStack
from holdfast.lm.models.adapted import AdaptedModule, AdaptedModules
from holdfast.lm.models.decoder import LayerWeights
from holdfast.lm.models.peft_files import AdapterWeights, LoraPair

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
    """The gains of a DoRA; None: all are 1."""

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + (0 if self.gains is None else self.gains.nbytes)


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
    ) -> None:
        """Allocate the slots for a device's modules, all empty. An empty slot changes no output.

        With `dora`, slots have gains.
        """
        self.max_rank, self.dtype = max_rank, dtype
        self._base = base
        self._places: dict[tuple[int, str], _Place] = {}
        """For each layer and field, its place in a slot."""
        at = tables = outputs = 0
        for layer in range(self._base.num_layers):
            for field, names in self._base.fields(layer).items():
                modules = tuple(self._base.modules[name] for name in names)
                place = _Place(at, at + len(modules) * max_rank * modules[0].inputs, tables, outputs, names, modules)
                self._places[layer, field] = place
                at, tables, outputs = place.b + max_rank * place.outputs, tables + len(names), outputs + place.outputs
        self._numbers = torch.zeros(slots, at, dtype=dtype, device=device)
        self._ranks = torch.zeros(slots, tables, dtype=torch.int32, device=device)
        self._scales = torch.zeros(slots, tables, dtype=torch.float32, device=device)
        self._gains = torch.ones(slots + 1, outputs, dtype=torch.float32, device=device) if dora else None
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
        gains = 0 if self._gains is None else self._gains.nbytes
        return self._numbers.nbytes + self._ranks.nbytes + self._scales.nbytes + gains

    @property
    def takes_gains(self) -> bool:
        """Whether adapters may have gains."""
        return self._gains is not None

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

        gains = torch.ones(self._gains.shape[1]) if weights.has_magnitudes and self._gains is not None else None
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
                if gains is not None and pair.magnitude is not None:
                    columns = slice(place.gain + module.columns.start, place.gain + module.columns.stop)
                    gains[columns] = gains_of(getattr(layers[layer], field), module, pair).cpu()
            if most:
                add(place.b, b)
        numbers = torch.empty(total, dtype=self.dtype, pin_memory=pinned)
        for piece, source in sources:
            numbers[piece.start : piece.start + piece.length] = source.reshape(-1)
        if pinned:
            ranks, scales = ranks.pin_memory(), scales.pin_memory()
            gains = None if gains is None else gains.pin_memory()
        return PackedAdapter(numbers, tuple(pieces), ranks, scales, gains)

    def write(self, slot: int, adapter: PackedAdapter) -> None:
        """Copy an adapter into a slot, on the current stream."""
        row = self._numbers[slot]
        for start, length, place in adapter.pieces:
            row[place : place + length].copy_(adapter.numbers[start : start + length], non_blocking=True)
        self._ranks[slot].copy_(adapter.ranks, non_blocking=True)
        self._scales[slot].copy_(adapter.scales, non_blocking=True)
        if self._gains is None:
            return
        if adapter.gains is not None:
            self._gains[slot].copy_(adapter.gains, non_blocking=True)
            self.scaled.add(slot)
        elif slot in self.scaled:
            self._gains[slot].fill_(1.0)
            self.scaled.discard(slot)

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
            gain=None if self._gains is None else self._gains[:, place.gain : place.gain + place.outputs],
        )

    def _cut(self, at: int, shape: tuple[int, ...]) -> torch.Tensor:
        return self._numbers[:, at : at + prod(shape)].view(len(self), *shape)


@torch.no_grad()
def gains_of(weight: Weight, module: AdaptedModule, pair: LoraPair) -> torch.Tensor:
    """The gains of a module's outputs [outputs] float32, in the order of its field (DoRA, Liu et al., 2024, eq. 5).

    Each is the pair's magnitude over the norm of that row of W + scale · B A.
    """
    assert pair.magnitude is not None
    whole: Any = weight if isinstance(weight, torch.Tensor) else weight.dequantized(torch.float32)
    rows = whole[module.columns]
    a, b = pair.a.to(rows.device, torch.float32), module.placed(pair.b).to(rows.device, torch.float32)
    norms = [
        torch.linalg.vector_norm(torch.addmm(part.float(), b_part, a, alpha=pair.scale), dim=1)
        for part, b_part in zip(torch.split(rows, ROWS_AT_A_TIME), torch.split(b, ROWS_AT_A_TIME), strict=True)
    ]
    return module.placed(pair.magnitude).to(rows.device, torch.float32) / torch.cat(norms)
