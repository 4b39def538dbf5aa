"""What passes between the books of the tiers behind the host tier and the threads that move their bytes. Values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import xxhash

TierName = Literal["disk", "remote"]
"""The disk is this engine's alone. The remote tier is a service that engines share."""

JobKind = Literal["write", "read", "probe", "check"]
"""Copy blocks of the host to a tier; copy blocks of a tier to the host; ask the remote tier what it has; wait for
REMOTE_PAUSE, and see whether the remote tier works again. A check names no blocks, and has one outcome, which is
missing if the tier works and has lost what it held."""

REMOTE_PAUSE = 10.0
"""Seconds for which a remote tier that has failed is left alone, before each check."""

Outcome = Literal["done", "missing", "corrupt", "failed"]
"""Of one block of a job. `corrupt`: its bytes are not what was written."""

NO_SLOT = -1

Pieces = tuple[memoryview, ...]
"""The bytes of a block of the host tier, in place: what each rank of the engine keeps of it, in rank order."""


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
    """Its place in its sequence: 0 for the first block."""
    host: int = -1
    """The block of the host tier that is read or filled."""
    slot: int = NO_SLOT
    """Its place on the disk."""
    last_use: float = 0.0
    """When it was last used, in seconds on the engine's clock. Of a write."""


class StoredBlock(NamedTuple):
    """A block that the disk holds when the engine starts."""

    slot: int
    digest: bytes
    place: int
    age: float
    """Seconds since it was last used."""


@dataclass(frozen=True, slots=True)
class TierJob:
    """Blocks to be moved together. No other job names the same blocks of the host or the disk meanwhile."""

    number: int
    tier: TierName
    kind: JobKind
    blocks: tuple[TierBlock, ...]


@dataclass(frozen=True, slots=True)
class TierDone:
    """What became of a job."""

    number: int
    outcomes: tuple[Outcome, ...]
    """Of each of its blocks. Of a probe: done means that the tier has it."""
    seconds: float
    """From its start to its end, without its wait for a thread."""


@dataclass(frozen=True, slots=True)
class LowerShape:
    """The tiers behind the host tier, as the engine has them. A value."""

    block_bytes: int
    disk_blocks: int = 0
    """0: no disk tier."""
    stored: tuple[StoredBlock, ...] = ()
    """What the disk holds at the start, the least recently used first."""
    remote: bool = False
    remote_down: bool = False
    """Whether the remote tier did not answer at the start."""
