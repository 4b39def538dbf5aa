"""AdapterInputs: which token of a step has which adapter, as the kernels read it."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from holdfast.lm.execution.batch import Arrays, Fields, ModelInputs
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.lora.groups import Groups, groups_of, most_tiles, tiles_of
from holdfast.lm.kernels.lora.protocol import LayerStacks, StepAdapters
from holdfast.lm.kernels.lora.torch_lora import TorchLora
from holdfast.lm.parts.adapters.values import AdapterPlan
from holdfast.lm.types import StepPlan

if TYPE_CHECKING:
    from holdfast.lm.kernels.launch import SideStream  # a CPU installation has no Triton
    from holdfast.lm.kernels.lora.shrink_expand import TiledLora

TOKENS, ROWS = "adapted", "adapted_rows"
"""First part of the names of the fields: the tiles by adapter of a step's tokens, and of its sampled rows."""
TILE_FIELDS = ("slot", "start", "count")


class Adapted(NamedTuple):
    """The adapters of one step, on the host."""

    tokens: Groups
    """The tokens by the slot of their adapter."""
    rows: Groups
    """The sampled rows likewise; the same object where all tokens are sampled."""


class AdapterInputs(ModelInputs):
    """The adapters of one batch's steps."""

    plans = (AdapterPlan,)

    def __init__(
        self,
        layers: tuple[LayerStacks, ...],
        slots: int,
        *,
        max_tokens: int,
        samples: int,
        device: torch.device,
        gains: bool = False,
        scaled: Set[int] = frozenset(),
        fixed: bool = False,
    ) -> None:
        """`layers` are the adapters in the slots. A step has at most `max_tokens` tokens and `samples` sampled rows.

        `gains` says whether `layers` have gains. `scaled` holds the slots whose adapters use them, and may change.
        `fixed`: a token's bits must not depend on the step (`TiledLora.fixed`).
        """
        self._layers, self._device, self._slots = layers, device, slots
        self._gains, self._scaled, self._fixed = gains, scaled, fixed
        sizes: dict[str, int] = {}
        for name, most in ((TOKENS, max_tokens), (ROWS, samples)):
            sizes |= {f"{name}_order": most, f"{name}_used": 2}
            sizes |= dict.fromkeys([f"{name}_{field}" for field in TILE_FIELDS], most_tiles(most, slots, fixed=fixed))
            if gains:
                sizes[f"{name}_gain"] = most
        self.sizes = sizes
        most = most_tiles(max_tokens, slots, fixed=fixed)
        self._counts = torch.zeros(4 * most, dtype=torch.int32, device=device)
        """Counters of the kernels, which leave them at 0."""
        self._beside: SideStream | None = None
        """Where adapters are computed next to the layers."""

    def pack(self, plan: StepPlan, segments: Segments, num_sampled: int) -> Adapted | None:
        of_segments = plan.part(AdapterPlan).slots
        if not of_segments:
            return None
        slots = np.array(of_segments, np.int64)
        sampled = np.array([sampling is not None for sampling in plan.columns.column("sampling")])
        tokens = groups_of(np.repeat(slots, np.diff(segments.query_start)))
        drawn = slots[sampled] if plan.samples is None else np.repeat(slots[sampled], plan.samples)
        return Adapted(tokens, tokens if num_sampled == segments.num_tokens else groups_of(drawn))

    def write(self, packed: Adapted, arrays: Arrays, num_tokens: int, num_rows: int, *, apart: bool) -> None:
        self._write(arrays, TOKENS, packed.tokens, num_tokens)
        if apart or packed.rows is not packed.tokens:
            self._write(arrays, ROWS, packed.rows, num_rows)

    def clear(self, fields: Fields) -> None:
        for name in (TOKENS, ROWS):
            fields.tensors[f"{name}_used"].zero_()

    def entered(
        self, packed: Adapted | None, fields: Fields, num_tokens: int, num_rows: int | None
    ) -> StepAdapters | None:
        if packed is None:
            return None
        if self._device.type == "cuda":
            return self.captured(fields, num_tokens, num_rows)
        tokens = TorchLora(packed.tokens, self._device)
        rows = tokens if num_rows is None else TorchLora(packed.rows, self._device)
        return StepAdapters(self._layers, tokens, rows, not self._scaled.isdisjoint(packed.tokens.slots.tolist()))

    def captured(self, fields: Fields, num_tokens: int, num_rows: int | None) -> StepAdapters:
        tokens = self._tiles(fields, TOKENS, num_tokens)
        rows = tokens if num_rows is None else self._tiles(fields, ROWS, num_rows)
        return StepAdapters(self._layers, tokens, rows, self._gains)

    def _write(self, arrays: Arrays, name: str, groups: Groups, size: int) -> None:
        """Write the tiles of a step of `size` tokens or rows into the fields that begin with `name`."""
        tiles = tiles_of(groups, size, fixed=self._fixed)
        for field in ("order", *TILE_FIELDS, "used"):
            column = getattr(tiles, field)
            arrays[f"{name}_{field}"][: len(column)] = column
        if self._gains:
            rows = arrays[f"{name}_gain"][:size]
            rows[:] = self._slots  # the row of ones
            rows[groups.order[: groups.starts[-1]]] = np.repeat(groups.slots, np.diff(groups.starts))

    def _tiles(self, fields: Fields, name: str, count: int) -> TiledLora:
        """The adapters of `count` tokens or sampled rows, in the fields that begin with `name`."""
        from holdfast.lm.kernels.launch import SideStream
        from holdfast.lm.kernels.lora.shrink_expand import TiledLora

        self._beside = self._beside or SideStream(self._device)
        return TiledLora(
            count,
            fields.take(f"{name}_order", count),
            **{field: fields.tensors[f"{name}_{field}"] for field in (*TILE_FIELDS, "used")},
            counts=self._counts,
            gain=fields.take(f"{name}_gain", count) if self._gains else None,
            beside=self._beside,
            fixed=self._fixed,
        )
