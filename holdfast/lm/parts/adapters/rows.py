"""Adapters on padded rows: LoRA on the linear layers of an unmodified model, for each row that of its own request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.core.types import AdapterInfo
from holdfast.lm.copy_streams import CopyStream
from holdfast.lm.models.peft_files import UnsupportedAdapter
from holdfast.lm.models.peft_modules import read_named
from holdfast.lm.padded.driver import Driver
from holdfast.lm.padded.lora import RowLora
from holdfast.lm.parts.adapters.device import AdapterExecutor, AdapterShelf, ReadAdapter
from holdfast.lm.parts.adapters.options import AdapterOptions
from holdfast.lm.parts.adapters.values import AdapterPlan
from holdfast.lm.types import EngineShape, PartResult, StepPlan


class RowAdapterStore(AdapterShelf[torch.Tensor]):
    """The adapters of an unmodified model, by the names of its linear layers."""

    def __init__(self, lora: RowLora, host_bytes: int) -> None:
        super().__init__(host_bytes)
        self._lora = lora

    def _read(self, name: str, directory: Path) -> ReadAdapter[torch.Tensor]:
        weights = read_named(directory, self._lora.shapes, max_rank=self._lora.max_rank)
        packed = self._lora.pack(weights.pairs)
        self._check_size(packed.nbytes)
        if not bool(packed.isfinite().all()):
            kind = str(self._lora.dtype).removeprefix("torch.")
            layer = next(name for name, pair in weights.pairs.items() if not pair.is_finite(self._lora.dtype))
            raise UnsupportedAdapter(f"the tensors of {layer}, times their scale, are infinite as {kind}")
        info = AdapterInfo(f"{name}@{weights.digest()[:16]}", name, weights.rank, packed.nbytes, weights.modules)
        return ReadAdapter(info, directory, packed)


class RowAdapterWork:
    """The work of adapters in the steps of padded rows: loads, and whose rows have which slot.

    See `lm.padded.row_parts.RowWork`.
    """

    def __init__(self, lora: RowLora, store: RowAdapterStore, make_stream: Callable[[], CopyStream]) -> None:
        self._lora = lora
        self._loads = AdapterExecutor(lora, store, make_stream)
        self._slots: dict[int, int] = {}
        """By row, the slot of its adapter in the plan that runs."""

    def before(self, plan: StepPlan) -> None:
        self._loads.before(plan)
        slots = plan.part(AdapterPlan).slots
        self._slots = dict(zip(plan.columns.column("row"), slots, strict=True)) if slots else {}

    def changes(self, rows: Sequence[int]) -> bool:
        return any(self._slots.get(row, -1) >= 0 for row in rows)

    def forward(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        return self._lora.applied([self._slots.get(row, -1) for row in rows])

    def completed(self, *, wait: bool) -> Sequence[PartResult]:
        return self._loads.completed(wait=wait)

    def close(self) -> None:
        self._loads.close()


class RowAdapters:
    """Adapters on a device of padded rows. See `lm.padded.row_parts.RowPart`."""

    def __init__(self, driver: Driver, config: AdapterOptions) -> None:
        """Allocate the slots. Raises ValueError for an encoder-decoder, and if no linear layer computes every token."""
        if driver.model.is_encoder_decoder:
            raise ValueError(
                f"adapters are those of causal models (task_type CAUSAL_LM), and {driver.model.architecture} is an "
                "encoder-decoder; leave out adapter and max_adapters"
            )
        self.lora = RowLora(driver, slots=config.adapter_slots, max_rank=config.max_adapter_rank)
        if not self.lora.shapes:
            raise ValueError(
                f"{driver.model.architecture} has no torch.nn.Linear that computes every token, which an adapter could "
                "change; leave out adapter and max_adapters"
            )
        self.store = RowAdapterStore(self.lora, config.adapter_host_bytes)

    def shaped(self, shape: EngineShape) -> EngineShape:
        return replace(shape, adapter_slots=len(self.lora))

    def row_rules(self, rows: int, device: torch.device) -> tuple[()]:
        return ()

    def row_work(self, make_stream: Callable[[], CopyStream]) -> tuple[RowAdapterWork, ...]:
        return (RowAdapterWork(self.lora, self.store, make_stream),)
