"""RecurrentStates: the recurrent states of sequences and of snapshots, in slots on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.cache.kv_cache import KVCache, copy_blocks
from holdfast.lm.kernels.recurrent.protocol import CapturableRecurrence, Recurrence
from holdfast.lm.kernels.upload import upload
from holdfast.lm.models.base import NO_STATES, ZEROS, LayerState, ModelSpec, RecurrentStep, StateMemory
from holdfast.lm.types.states import StateCopy


class RecurrentStates(StateMemory):
    """A tensor [layers, slots, ...] for each tensor of a layer's state.

    Slot r is the state of the sequence in row r of the batch. Slots after the rows hold snapshots. All stay at their
    addresses, so that graphs can read them.
    """

    def __init__(self, spec: ModelSpec, recurrence: Recurrence[Any], slots: int, host_slots: int = 0) -> None:
        self._recurrence, self._device = recurrence, spec.device
        count = spec.recurrent_layers
        self._tensors = [
            torch.zeros(count, slots, *each.shape, dtype=each.dtype, device=spec.device) for each in spec.state
        ]
        # On the host, all layers of a state are contiguous.
        pinned = spec.device.type == "cuda"
        host = [
            torch.empty(host_slots, count, *each.shape, dtype=each.dtype, pin_memory=pinned and host_slots > 0)
            for each in spec.state
        ]
        self._host = [kept.flatten(1).view(torch.uint8) for kept in host]
        """The bytes of each tensor of the states on the host, by slot."""
        self._pairs = [
            (_as_cache(tensor), _as_cache(kept.transpose(0, 1)))
            for tensor, kept in zip(self._tensors, host, strict=True)
        ]
        """For each tensor, the states on the device and those on the host, in the form that `copy_blocks` takes."""
        self.layers: tuple[LayerState, ...] = tuple(zip(*self._tensors, strict=True))
        """The states of each recurrent layer, as `RecurrentStep` has them."""

    def step(self, segments: Segments) -> RecurrentStep:
        """The input of the recurrent layers for a batch.

        Raises ValueError for a row with two segments: the second would need the state that the first one leaves.
        """
        rows, counts = np.unique(segments.row, return_counts=True)
        if len(rows) < len(segments.row):
            row = int(rows[counts.argmax()])
            raise ValueError(f"row {row} has {int(counts.max())} segments in one step; recurrent layers compute one")
        return RecurrentStep(self._recurrence, self._recurrence.make_metadata(segments), self.layers)

    def reserve(self, segments: int, tokens: int | None) -> RecurrentStep:
        recurrence = self._recurrence
        if not isinstance(recurrence, CapturableRecurrence):
            raise TypeError(f"CUDA graphs cannot hold a {type(recurrence).__name__}")
        return RecurrentStep(recurrence, recurrence.reserve(segments, tokens), self.layers)

    def refill(self, step: RecurrentStep | None, segments: Segments) -> bool:
        recurrence = self._recurrence
        if step is None or not isinstance(recurrence, CapturableRecurrence):
            return False
        return recurrence.refill(step.metadata, segments)

    @torch.inference_mode()
    def copy(self, copies: Sequence[StateCopy]) -> None:
        kept = [copy for copy in copies if copy.source != ZEROS]
        if kept:
            sources, targets = self._numbers(kept)
            for tensor in self._tensors:
                tensor.index_copy_(1, targets, tensor.index_select(1, sources))
        if cleared := [copy.target for copy in copies if copy.source == ZEROS]:
            targets = upload(cleared, self._device)
            for tensor in self._tensors:
                tensor.index_fill_(1, targets, 0)

    @torch.inference_mode()
    def swap_out(self, copies: Sequence[StateCopy]) -> None:
        if copies:
            sources, targets = self._numbers(copies)
            for device, host in self._pairs:
                copy_blocks(device, sources, host, targets)

    @torch.inference_mode()
    def swap_in(self, copies: Sequence[StateCopy]) -> None:
        if copies:
            sources, targets = self._numbers(copies)
            for device, host in self._pairs:
                copy_blocks(host, sources, device, targets)

    def on_host(self, slot: int) -> tuple[memoryview, ...]:
        return tuple([tensor[slot].numpy().data for tensor in self._host])

    def _numbers(self, copies: Iterable[StateCopy]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sources and targets on the device."""
        sources, targets = zip(*copies, strict=True)
        return upload(sources, self._device), upload(targets, self._device)


def _as_cache(states: torch.Tensor) -> KVCache:
    """States [layers, slots, ...] as blocks: one for each slot, with a run of numbers for each layer."""
    return KVCache(states.flatten(2)[None, :, :, None, None])


def states_of(spec: ModelSpec, recurrence: Recurrence[Any] | None, slots: int, host_slots: int = 0) -> StateMemory:
    """The states of a model in this many slots. NO_STATES for a model without recurrent layers."""
    return NO_STATES if recurrence is None else RecurrentStates(spec, recurrence, slots, host_slots)
