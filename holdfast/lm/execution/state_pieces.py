"""StatePieces: recurrent states on the host, as the pieces that jobs of the disk tier write and read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from holdfast.lm.tiers import Outcome, Pieces, TierJob


class Slots(Protocol):
    """The bytes of recurrent states on the host (`host_memory.HostStates`)."""

    def __getitem__(self, slot: int, /) -> Pieces:
        """The bytes of the state in a slot, in place."""
        ...


class StatePieces:
    """The memory of jobs that move recurrent states (`HostBytes`).

    A state is its description, the bytes of its tensors, and zeros up to a whole number of pieces. They are written
    and read in place. So the slot of a job must stay as it is until the job has ended.
    """

    def __init__(self, states: Slots, size: int) -> None:
        """`size` is the bytes of a piece."""
        self._states, self._size = states, size

    def begin(self, job: TierJob) -> StatePart:
        """The memory of a job."""
        return StatePart(job, self._states[job.blocks[0].host], self._size)


class StatePart:
    """The pieces of a state that one job writes or reads (`JobBytes`)."""

    def __init__(self, job: TierJob, state: Sequence[memoryview], size: int) -> None:
        self._job, self._state, self._size = job, state, size

    def pieces(self) -> list[Pieces]:
        """The bytes of each piece. A read puts the description into memory that nobody needs."""
        about = self._job.state
        rest = about.pieces * self._size - about.size - sum(map(len, self._state))
        parts = [memoryview(bytearray(about.packed())), *self._state, memoryview(bytearray(rest))]
        cut = [*cut_into(parts, self._size)]
        return [cut[block.place] for block in self._job.blocks]

    def end(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes as they are: the checksum of each piece has been compared."""
        return [*outcomes]


def cut_into(parts: Sequence[memoryview], size: int) -> Iterator[Pieces]:
    """Cut bytes that lie in several parts of memory into pieces of `size`, in place. They are whole pieces together."""
    piece, room = list[memoryview](), size
    for part in parts:
        while len(part):
            piece.append(part[:room])
            part, room = part[room:], room - len(piece[-1])
            if not room:
                yield tuple(piece)
                piece, room = [], size
