"""RowPieces: the states of rows on the host, as the pieces that jobs of lower tiers write and read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.lm.padded.host_rows import HostRows
from holdfast.lm.padded.state_bytes import StateBytes
from holdfast.lm.padded.state_layout import State
from holdfast.lm.tiers import JobBytes, Outcome, Pieces, StateAbout, TierJob

MOST_PARTS = 64
"""A piece in more parts than this is joined before it is written: one call takes a limited number."""


class RowPieces:
    """The memory of jobs that move states of rows (`HostBytes`).

    A state is its description, its numbers, and zeros up to a whole number of pieces. A job that writes holds the state
    from the moment when it is queued, so the slot may be given up meanwhile. A state that is read is put into its slot
    once all its pieces are there.
    """

    def __init__(self, rows: HostRows, codec: StateBytes, size: int, *, pinned: bool) -> None:
        """`size` is the bytes of a piece. `pinned`: states are read into locked memory, from which a GPU copies."""
        self._rows, self._codec, self._size, self._pinned = rows, codec, size, pinned
        self._arriving: dict[int, _Arrival] = {}

    def begin(self, job: TierJob) -> JobBytes:
        """The memory of a job. Called between two plans."""
        slot = job.blocks[0].host
        if job.kind == "write":
            return _Departure(job, self._rows.stored(slot), self._codec, self._size)
        if slot not in self._arriving:
            self._arriving[slot] = _Arrival(slot, job.state, job.state.pieces * self._size, self._pinned)
        return _Part(job, self._arriving[slot], self)

    def finish(self, arrival: _Arrival) -> bool:
        """Take the state out of the bytes that have arrived, and put it into its slot. Returns whether it is one."""
        del self._arriving[arrival.slot]
        if arrival.arrived < arrival.state.pieces:
            return False
        try:
            if StateAbout.unpacked(bytes(arrival.view[: arrival.state.size])) != arrival.state:
                return False
            state = self._codec.read(arrival.memory[arrival.state.size :], arrival.state.positions)
        except ValueError:
            return False
        self._rows.put(arrival.slot, state, arrival.state.positions)
        return True

    def piece(self, memory: memoryview, place: int) -> Pieces:
        """One piece of the bytes of a state."""
        return (memory[place * self._size : (place + 1) * self._size],)


@dataclass(slots=True)
class _Arrival:
    """A state that is being read."""

    slot: int
    state: StateAbout
    size: int
    pinned: bool
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """Bytes of the whole state, once a thread has asked for them."""
    arrived: int = 0
    """Number of pieces that are there."""
    ended: int = 0
    """Number of pieces whose jobs have ended."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def view(self) -> memoryview:
        """The bytes of the whole state."""
        return self.memory.numpy().data

    def allocate(self) -> memoryview:
        """Allocate the memory at the first call: locked memory takes a while, and threads may wait for it."""
        with self.lock:
            if len(self.memory) < self.size:
                self.memory = torch.empty(self.size, dtype=torch.uint8, pin_memory=self.pinned)
        return self.view


class _Part:
    """The pieces of a state that one job reads (`JobBytes`)."""

    def __init__(self, job: TierJob, arrival: _Arrival, rows: RowPieces) -> None:
        self._job, self._arrival, self._rows = job, arrival, rows

    def pieces(self) -> list[Pieces]:
        """The memory to fill."""
        memory = self._arrival.allocate()
        return [self._rows.piece(memory, block.place) for block in self._job.blocks]

    def end(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes; all are corrupt if this was the last job of a state that cannot be read."""
        arrival = self._arrival
        with arrival.lock:
            arrival.ended += len(outcomes)
            arrival.arrived += outcomes.count("done")
            last = arrival.ended == arrival.state.pieces
        whole = arrival.arrived == arrival.state.pieces
        if last and not self._rows.finish(arrival) and whole:
            return ["corrupt"] * len(outcomes)
        return [*outcomes]


class _Departure:
    """The pieces of a state that a job writes (`JobBytes`)."""

    def __init__(self, job: TierJob, states: Sequence[State], codec: StateBytes, size: int) -> None:
        """`states` is the state, or empty if the device has lost it."""
        self._job, self._states, self._codec, self._size = job, states, codec, size

    def pieces(self) -> list[Pieces]:
        """The pieces that the job names. Empty if the state is gone."""
        about = self._job.state
        for state in self._states:
            parts = [memoryview(about.packed()), *self._codec.written(state, about.positions)]
            cut = [*pieces_of(parts, self._size)]
            return [cut[block.place] for block in self._job.blocks]
        return []

    def end(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes as they are. The state need not stay any longer."""
        self._states = ()
        return [*outcomes]


def pieces_of(parts: Sequence[memoryview], size: int) -> Iterator[Pieces]:
    """Cut bytes that lie in several parts of memory into pieces of `size`. Zeros follow the last part."""
    piece, room = list[memoryview](), size
    for part in parts:
        while len(part):
            piece.append(part[:room])
            room -= len(piece[-1])
            part = part[len(piece[-1]) :]
            if not room:
                yield joined(piece)
                piece, room = [], size
    if piece:
        yield joined([*piece, memoryview(bytes(room))])


def joined(piece: Sequence[memoryview]) -> Pieces:
    """A piece, in one part if it has too many of them."""
    return tuple(piece) if len(piece) <= MOST_PARTS else (memoryview(b"".join(piece)),)
