"""RecurrentStates: recurrent states in slots on the device and on the host, and kept inputs of drafted tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast.lm.execution.host_memory import slot_stride
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.cache.kv_cache import KVCache, copy_blocks
from holdfast.lm.kernels.recurrent.protocol import CapturableRecurrence, Recurrence
from holdfast.lm.kernels.upload import upload
from holdfast.lm.models.base import NO_STATES, ZEROS, LayerState, ModelSpec, RecurrentStep, StateMemory
from holdfast.lm.types.states import KeptInputs, StateCopy

REPLAY_BYTES = 1 << 26
"""Bytes of kept inputs that are read at a time. It bounds the memory that a replay takes."""
REHEARSED = (1, 16)
"""Numbers of tokens for which the kernels differ (`recurrent.tiles.FEW`)."""


class RecurrentStates(StateMemory):
    """A tensor [layers, slots, ...] for each tensor of a layer's state.

    Slot r is the state of the sequence in row r of the batch. Slots after the rows hold snapshots. All stay at their
    addresses, so that graphs can read them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        recurrence: Recurrence[Any],
        slots: int,
        host_slots: int = 0,
        places: int = 0,
        within: torch.Tensor | None = None,
    ) -> None:
        """`places` is the number of drafted tokens whose inputs can be kept; 0: no drafts are verified.

        `within` is the memory of the slots on the host, `host_bytes` of uint8; None: it is allocated here.
        """
        self._recurrence, self._device, self._layers = recurrence, spec.device, spec.recurrence
        self._places = places
        self._most_replayed = max(1, REPLAY_BYTES // max(1, spec.kept_bytes))
        """Number of tokens that one batch of a replay has, unless a single sequence has more."""
        count = spec.recurrent_layers
        self._tensors = [
            torch.zeros(count, slots, *each.shape, dtype=each.dtype, device=spec.device) for each in spec.state
        ]
        if within is None:
            pinned = spec.device.type == "cuda" and host_slots > 0
            within = torch.empty(host_bytes(spec, host_slots), dtype=torch.uint8, pin_memory=pinned)
        self._host = within
        """The bytes of the states on the host, slot after slot."""
        host = in_slots(spec, within, host_slots)
        self._pairs = [
            (_as_cache(tensor), _as_cache(kept.transpose(0, 1)))
            for tensor, kept in zip(self._tensors, host, strict=True)
        ]
        """For each tensor, the states on the device and those on the host, in the form that `copy_blocks` takes."""
        self.layers: tuple[LayerState, ...] = tuple(zip(*self._tensors, strict=True))
        """The states of each recurrent layer, as `RecurrentStep` has them."""
        self._kept = [
            torch.zeros(count, places, *each.shape, dtype=each.dtype, device=spec.device)
            for each in spec.kept
            if places
        ]
        """For each kept input of a token, a tensor [layers, places, ...]."""
        self._kept_layers: tuple[LayerState, ...] = tuple(zip(*self._kept, strict=True))

    def step(self, segments: Segments) -> RecurrentStep:
        """The input of the recurrent layers for a batch.

        Raises ValueError for a row with two segments: the second would need the state that the first one leaves. Also
        raises it for a place that does not exist.
        """
        rows, counts = np.unique(segments.row, return_counts=True)
        if len(rows) < len(segments.row):
            row = int(rows[counts.argmax()])
            raise ValueError(f"row {row} has {int(counts.max())} segments in one step; recurrent layers compute one")
        self._check_places(segments)
        return RecurrentStep(self._recurrence, self._recurrence.make_metadata(segments), self.layers, self._kept_layers)

    def reserve(self, segments: int, tokens: int | None) -> RecurrentStep:
        recurrence = self._recurrence
        if not isinstance(recurrence, CapturableRecurrence):
            raise TypeError(f"CUDA graphs cannot hold a {type(recurrence).__name__}")
        metadata = recurrence.reserve(segments, tokens, self._places)
        return RecurrentStep(recurrence, metadata, self.layers, self._kept_layers)

    def refill(self, step: RecurrentStep | None, segments: Segments) -> bool:
        recurrence = self._recurrence
        if step is None or not isinstance(recurrence, CapturableRecurrence):
            return False
        self._check_places(segments)
        return recurrence.refill(step.metadata, segments)

    def _check_places(self, segments: Segments) -> None:
        """Raise ValueError for a place that does not exist."""
        last = -1 if segments.places is None else int(segments.places.max())
        if last >= self._places:
            raise ValueError(f"the inputs of a drafted token go to place {last}; there are {self._places} places")

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
    def replay(self, replays: Sequence[KeptInputs]) -> None:
        """One batch has the segments of all layers, so the number of launches does not depend on their number."""
        for piece in self._pieces(replays):
            self._replay(piece)

    def _pieces(self, replays: Sequence[KeptInputs]) -> Iterator[list[KeptInputs]]:
        """The replays in batches of bounded size."""
        piece, tokens = list[KeptInputs](), 0
        for replay in replays:
            if piece and tokens + len(replay.places) > self._most_replayed:
                yield piece
                piece, tokens = [], 0
            piece.append(replay)
            tokens += len(replay.places)
        if piece:
            yield piece

    def _replay(self, replays: Sequence[KeptInputs]) -> None:
        layers, slots = self._tensors[0].shape[:2]
        number = np.arange(layers)[:, None]
        places = (number * self._places + [place for each in replays for place in each.places]).reshape(-1)
        rows = (number * slots + [each.row for each in replays]).reshape(-1).astype(np.int32)
        lengths = np.tile([len(each.places) for each in replays], layers)
        stops = np.cumsum(lengths).astype(np.int32)
        segments = Segments(np.concatenate([[0], stops]).astype(np.int32), stops, rows)
        chosen = upload(places, self._device)
        inputs = [kept.flatten(0, 1).index_select(0, chosen) for kept in self._kept]
        states = tuple(tensor.flatten(0, 1) for tensor in self._tensors)
        assert self._layers is not None
        self._layers.replay(self._recurrence, states, inputs, self._recurrence.make_metadata(segments))

    def rehearsals(self) -> Sequence[Callable[[], None]]:
        return [partial(self.replay, (KeptInputs(0, (0,) * count),)) for count in REHEARSED if self._places]

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

    def rehearse_copies(self) -> None:
        if len(self._host):
            first = (StateCopy(0, 0),)
            self.swap_out(first)
            self.swap_in(first)

    @property
    def host(self) -> memoryview:
        return self._host.numpy().data

    def _numbers(self, copies: Iterable[StateCopy]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sources and targets on the device."""
        sources, targets = zip(*copies, strict=True)
        return upload(sources, self._device), upload(targets, self._device)


def _as_cache(states: torch.Tensor) -> KVCache:
    """States [layers, slots, ...] as blocks: one for each slot, with a run of numbers for each layer."""
    return KVCache(states.flatten(2)[None, :, :, None, None])


def host_bytes(spec: ModelSpec, slots: int) -> int:
    """Bytes of this many slots on the host."""
    return slots * slot_stride(spec.state_bytes)


def in_slots(spec: ModelSpec, data: torch.Tensor, slots: int) -> list[torch.Tensor]:
    """The tensors of the states in slots on the host: for each of `ModelSpec.state`, one [slots, layers, ...].

    `data` are the bytes of all slots, uint8. A state is in one piece: tensor after tensor, those of the widest numbers
    first, so that each is aligned. A tensor's numbers of all layers come together.
    """
    rows, found, at = data.view(slots, slot_stride(spec.state_bytes)), dict[int, torch.Tensor](), 0
    for index, each in sorted(enumerate(spec.state), key=lambda pair: -pair[1].dtype.itemsize):
        size = spec.recurrent_layers * each.nbytes
        numbers = rows[:, at : at + size].view(each.dtype)
        found[index], at = numbers.view(slots, spec.recurrent_layers, *each.shape), at + size
    return [found[index] for index in range(len(found))]


def states_of(
    spec: ModelSpec,
    recurrence: Recurrence[Any] | None,
    slots: int,
    host_slots: int = 0,
    places: int = 0,
    within: torch.Tensor | None = None,
) -> StateMemory:
    """The states of a model in this many slots, and places for drafted tokens. `within` is as for RecurrentStates.

    NO_STATES for a model without recurrent layers.
    """
    return NO_STATES if recurrence is None else RecurrentStates(spec, recurrence, slots, host_slots, places, within)
