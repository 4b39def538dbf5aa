"""Values that pass between `LowerTiers`, which decides the moves of the lower tiers, and the threads that copy."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import xxhash

TierName = Literal["disk", "remote"]
"""The disk is this engine's alone. The remote tier is a service that engines share."""

JobKind = Literal["write", "read", "renew", "probe", "find", "check"]
"""Kinds of jobs of a lower tier.

- write: copy blocks of the host to the tier.
- read: copy blocks of the tier to the host.
- renew: note on the disk when these blocks of it were last used.
- probe: ask the remote tier which blocks it has.
- find: ask the remote tier which recurrent states come after these full blocks (`TierDone.found`).
- check: wait for REMOTE_PAUSE, and see whether the remote tier works again. It names no blocks, and has one outcome:
  missing if the tier works and has lost its contents.
"""

REMOTE_PAUSE = 10.0
"""Seconds for which a remote tier that has failed is left alone, before each check."""

Outcome = Literal["done", "missing", "corrupt", "failed"]
"""Outcome for one block of a job. `corrupt`: its bytes differ from those written."""

NO_SLOT = -1

Pieces = tuple[memoryview, ...]
"""The bytes of a block of the host tier, in place: the share of each rank of the engine, in rank order.

For a piece of a row's state, memory that together is the piece.
"""


def checksum_of(pieces: Iterable[bytes | memoryview]) -> int:
    """The checksum of all of these, one after another: XXH3 of 64 bits, 10 times as fast as CRC-32."""
    found = xxhash.xxh3_64()
    for piece in pieces:
        found.update(piece)
    return found.intdigest()


ABOUT = struct.Struct("<4sIQQQ")
"""Head of a state's bytes: ABOUT_MAGIC, the size of its key, its positions, its pieces, and a checksum of these."""
ABOUT_MAGIC = b"HFRW"
ALIGNMENT = 64
"""The numbers of a state begin at a multiple of this many bytes."""


LEAST_PIECE, MOST_PIECE = 1 << 12, 1 << 20
"""Limits of the bytes of a piece of a state: a page, and what a disk reads at its full rate."""
PIECES, POSITIONS = 8, 256
"""A state of POSITIONS positions has about PIECES pieces, so that the last piece of a state wastes little."""


def piece_bytes(bytes_of: Callable[[int], int]) -> int:
    """Bytes of a piece, a power of two. `bytes_of` gives the bytes of a state by its length."""
    wanted = max(LEAST_PIECE, min(bytes_of(POSITIONS) // PIECES, MOST_PIECE))
    return 1 << (wanted.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class StateAbout:
    """Description that a tier keeps with the state of a row.

    The bytes of the state follow it. Together they are cut into pieces of equal size.
    """

    positions: int
    key: bytes
    """The planner's description of the state's tokens."""
    pieces: int
    """Number of pieces of the description and the state together."""

    @property
    def size(self) -> int:
        """Bytes before those of the state."""
        return self.size_with(len(self.key))

    @staticmethod
    def size_with(key: int) -> int:
        """Bytes before those of a state whose key has this many bytes."""
        return -(-(ABOUT.size + key) // ALIGNMENT) * ALIGNMENT

    def packed(self) -> bytes:
        """The bytes before those of the state."""
        checksum = checksum_of((struct.pack("<QQ", self.positions, self.pieces), self.key))
        head = ABOUT.pack(ABOUT_MAGIC, len(self.key), self.positions, self.pieces, checksum)
        return (head + self.key).ljust(self.size, b"\0")

    @classmethod
    def unpacked(cls, data: bytes) -> StateAbout:
        """The description at the start of these bytes. Raises ValueError if there is none, or not all of it."""
        if len(data) >= ABOUT.size:
            magic, size, positions, pieces, _ = ABOUT.unpack_from(data)
            about = cls(positions, bytes(data[ABOUT.size : ABOUT.size + size]), pieces)
            if magic == ABOUT_MAGIC and len(about.key) == size and data.startswith(about.packed()[: ABOUT.size]):
                return about
        raise ValueError(f"{len(data)} bytes do not begin with the description of a state")

    @staticmethod
    def size_of(data: bytes) -> int:
        """How many bytes the description takes that begins with these; 0 if none does."""
        if len(data) < ABOUT.size or not data.startswith(ABOUT_MAGIC):
            return 0
        return ABOUT.size + int(ABOUT.unpack_from(data)[1])


NO_STATE = StateAbout(0, b"", 0)


class TierBlock(NamedTuple):
    """A block that a job moves, or asks for; or a piece of the state of a row."""

    digest: bytes
    place: int
    """Place of the block in its sequence, or of the piece in its state: 0 for the first."""
    host: int = -1
    """The block of the host tier that is read or filled, or the slot of the state; -1: none."""
    slot: int = NO_SLOT
    """Place of the block on the disk; NO_SLOT: none."""
    last_use: float = 0.0
    """Time of its last use, in seconds on the engine's clock. Set in writes and renewals."""


class StoredBlock(NamedTuple):
    """A block that the disk holds when the engine starts."""

    slot: int
    digest: bytes
    place: int
    age: float
    """Seconds since its last use."""


class StoredState(NamedTuple):
    """The state of a row, or a recurrent state, that the disk holds when the engine starts."""

    digest: bytes
    """The digest of each of its pieces, which no other state has."""
    slots: tuple[int, ...]
    """Places of its pieces on the disk, in their order."""
    about: StateAbout
    age: float
    """Seconds since its last use."""


@dataclass(frozen=True, slots=True)
class TierJob:
    """Blocks to be moved together. No other job names the same blocks of the host or the disk meanwhile."""

    number: int
    tier: TierName
    kind: JobKind
    blocks: tuple[TierBlock, ...]
    state: StateAbout = NO_STATE
    """The state that the blocks are pieces of, if they are no KV blocks. Other jobs may name more of its pieces."""


@dataclass(frozen=True, slots=True)
class TierDone:
    """The end of a job."""

    number: int
    outcomes: tuple[Outcome, ...]
    """Outcome for each of its blocks. In a probe, done means that the tier has the block."""
    seconds: float
    """Seconds from its start to its end, without its wait for a thread."""
    found: tuple[bytes, ...] = ()
    """Packed keys (`StateKey.packed`) of the recurrent states that a job of kind find has found."""


@dataclass(frozen=True, slots=True)
class LowerShape:
    """The tiers below the host tier, as the engine has them. A value."""

    block_bytes: int
    """Bytes of a block; on padded rows, of a piece of a state."""
    disk_blocks: int = 0
    """Number of blocks on the disk; 0: no disk tier."""
    stored: tuple[StoredBlock, ...] = ()
    """Blocks that the disk holds at the start, the least recently used first."""
    remote: bool = False
    remote_down: bool = False
    """Whether the remote tier did not answer at the start."""
    states: tuple[StoredState, ...] = ()
    """If the disk holds states in place of blocks, those at the start, the least recently used first."""
    snapshots: LowerShape | None = None
    """The tiers of recurrent states, next to those of blocks; None for a model without recurrent layers."""


class JobBytes(Protocol):
    """The host's memory of one job. Used by the thread that runs the job."""

    def pieces(self) -> Sequence[Pieces]:
        """The memory of each block of the job. Empty if it is gone."""
        ...

    def end(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The job has ended. Called once, whatever happened. Returns the outcomes as they count."""
        ...


class HostBytes(Protocol):
    """The host's memory that jobs read and fill."""

    def begin(self, job: TierJob) -> JobBytes:
        """The memory of a job. Called between two plans, by the thread that plans, when the job is queued."""
        ...
