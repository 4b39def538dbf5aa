"""Snapshot: a recurrent state kept after some tokens, and the key by which it is found."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.lm.memory.digests import block_digests
from holdfast.lm.memory.retention import Use

NO_SLOT = -1
"""Stands for no slot. As the source of a start it stands for the state before the first token."""


class StateKey(NamedTuple):
    """The tokens that a state has seen."""

    length: int
    """Number of these tokens."""
    parent: bytes
    """Digest of the last full block before the tail; the root of the identity if there is none."""
    tail: array[int]
    """The tokens after the last full block; fewer than a block has."""
    tail_digest: bytes
    """Digest under which the KV block of the tail is cached; empty without a tail."""

    @classmethod
    def of(cls, root: bytes, digests: Sequence[bytes], tokens: Sequence[int], length: int, size: int) -> StateKey:
        """The key of the first `length` tokens. `digests` are those of their full blocks of `size` tokens, or more."""
        full = length // size
        parent = digests[full - 1] if full else root
        tail = array("I", tokens[full * size : length])
        return cls(length, parent, tail, block_digests(parent, tail, size)[0] if tail else b"")


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state after some tokens, kept for sequences that begin with them. Only its pool changes it."""

    key: StateKey
    previous: Snapshot
    """The snapshot from which the state was computed; NOTHING_KEPT if it was computed from the first token on."""
    slot: int = NO_SLOT
    """Slot on the device; NO_SLOT if it has none."""
    host: int = NO_SLOT
    """Slot on the host; NO_SLOT if it has none."""
    used: Use = (0.0, 0)
    """When it was last used."""
    pins: int = 0
    """Number of copies of the next plan that read or write its slots."""
    shared: bool = False
    """Whether it stands for a prefix that several sequences have had."""
    starts: int = 0
    """Number of sequences that began with it."""
    is_continued: bool = False
    """Whether a snapshot was made of a sequence that began with it, or that went on after it."""

    @property
    def length(self) -> int:
        """Number of tokens that the state has seen."""
        return self.key.length

    @property
    def is_on_host(self) -> bool:
        """Whether only the host has it."""
        return self.host != NO_SLOT and self.slot == NO_SLOT

    @property
    def is_passed(self) -> bool:
        """Whether its conversation has gone on, and no other sequence has begun with it."""
        return self.is_continued and self.starts < 2 and not self.shared

    @property
    def is_kept(self) -> bool:
        """Whether a tier has it."""
        return self.slot != NO_SLOT or self.host != NO_SLOT


class NothingKept(Snapshot):
    """The state before the first token. It needs no slot, and each state can be computed from it."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(StateKey(0, b"", array("I"), b""), self)


NOTHING_KEPT: Snapshot = NothingKept()
