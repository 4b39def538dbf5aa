"""Values that pass between `LowerTiers`, which decides the moves of the lower tiers, and the threads that copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import xxhash

TierName = Literal["disk", "remote"]
"""The disk is this engine's alone. The remote tier is a service that engines share."""

JobKind = Literal["write", "read", "renew", "probe", "check"]
"""Kinds of jobs of a lower tier.

- write: copy blocks of the host to the tier.
- read: copy blocks of the tier to the host.
- renew: note on the disk when these blocks of it were last used.
- probe: ask the remote tier which blocks it has.
- check: wait for REMOTE_PAUSE, and see whether the remote tier works again. It names no blocks, and has one outcome:
  missing if the tier works and has lost its contents.
"""

REMOTE_PAUSE = 10.0
"""Seconds for which a remote tier that has failed is left alone, before each check."""

Outcome = Literal["done", "missing", "corrupt", "failed"]
"""Outcome for one block of a job. `corrupt`: its bytes differ from those written."""

NO_SLOT = -1

Pieces = tuple[memoryview, ...]
"""The bytes of a block of the host tier, in place: the share of each rank of the engine, in rank order."""


def checksum_of(pieces: Iterable[bytes | memoryview]) -> int:
    """The checksum of all of these, one after another: XXH3 of 64 bits, 10 times as fast as CRC-32."""
    found = xxhash.xxh3_64()
    for piece in pieces:
        found.update(piece)
    return found.intdigest()


class TierBlock(NamedTuple):
    """A block that a job moves, or asks for."""

    digest: bytes
    place: int
    """Place of the block in its sequence: 0 for the first block."""
    host: int = -1
    """The block of the host tier that is read or filled; -1: none."""
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


@dataclass(frozen=True, slots=True)
class TierJob:
    """Blocks to be moved together. No other job names the same blocks of the host or the disk meanwhile."""

    number: int
    tier: TierName
    kind: JobKind
    blocks: tuple[TierBlock, ...]


@dataclass(frozen=True, slots=True)
class TierDone:
    """The end of a job."""

    number: int
    outcomes: tuple[Outcome, ...]
    """Outcome for each of its blocks. In a probe, done means that the tier has the block."""
    seconds: float
    """Seconds from its start to its end, without its wait for a thread."""


@dataclass(frozen=True, slots=True)
class LowerShape:
    """The tiers below the host tier, as the engine has them. A value."""

    block_bytes: int
    disk_blocks: int = 0
    """Number of blocks on the disk; 0: no disk tier."""
    stored: tuple[StoredBlock, ...] = ()
    """Blocks that the disk holds at the start, the least recently used first."""
    remote: bool = False
    remote_down: bool = False
    """Whether the remote tier did not answer at the start."""
