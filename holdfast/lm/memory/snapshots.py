"""Snapshot: a recurrent state kept after some tokens, and the key by which it is found."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from holdfast.lm.memory.digests import block_digests
from holdfast.lm.memory.retention import Use

NO_SLOT = -1
"""Stands for no slot. As the source of a start it stands for the state before the first token."""
HEAD = struct.Struct("<QII32s32s")
"""Head of a packed key: its length, the number of tokens in its tail, the bytes of the tail's digest, and two digests.

These are its parent's and its tail's.
"""
TOKEN_BYTES = array("I").itemsize


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

    @property
    def digest(self) -> bytes:
        """The digest of all these tokens: that of the last KV block, full or not. It names the state."""
        return self.tail_digest or self.parent

    def follows(self, index: int, size: int) -> bool:
        """Whether this is the key of a state after block `index` of its sequence, with blocks of `size` tokens."""
        tail = self.tail
        digest = block_digests(self.parent, tail, size)[0] if tail else b""
        return len(tail) < size and self.length == (index + 1) * size + len(tail) and self.tail_digest == digest

    def packed(self) -> bytes:
        """The key as bytes, for a tier that outlives the engine. Numbers of the tail are in the machine's order."""
        head = HEAD.pack(self.length, len(self.tail), len(self.tail_digest), self.parent, self.tail_digest)
        return head + self.tail.tobytes()

    @staticmethod
    def most_bytes(size: int) -> int:
        """The most bytes of a packed key with blocks of `size` tokens."""
        return HEAD.size + (size - 1) * TOKEN_BYTES

    @classmethod
    def unpacked(cls, data: bytes) -> StateKey:
        """The key of these bytes. Raises ValueError for bytes that `packed` did not give."""
        if len(data) >= HEAD.size:
            length, count, width, parent, digest = HEAD.unpack_from(data)
            tail = array("I")
            if (
                len(data) == HEAD.size + count * TOKEN_BYTES
                and length >= count
                and width == (len(digest) if count else 0)
            ):
                tail.frombytes(data[HEAD.size :])
                return cls(length, parent, tail, digest[:width])
        raise ValueError(f"{len(data)} bytes are no key of a recurrent state")


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
    holds: int = 0
    """Number of others that need its slot on the host to stay: a write to a lower tier, or a sequence that waits."""
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


class StatesBelow(Protocol):
    """The recurrent states on a tier below the host."""

    def has(self, digest: bytes) -> bool:
        """Whether the tier has the state of this digest (`StateKey.digest`), or is being given it."""
        ...

    def keys(self, parent: bytes) -> Iterable[StateKey]:
        """The keys with this parent of the states that the tier has."""
        ...

    def offer(self, snapshot: Snapshot) -> None:
        """Take note that the copy of a snapshot to the host is complete, so that it can be written."""
        ...

    def read_ahead(self, digest: bytes, now: float) -> bool:
        """Begin to read the state of this digest to a free slot of the host, though no sequence has asked for it.

        Returns whether it is being read.
        """
        ...


class NoStatesBelow:
    """No tier below the host (`StatesBelow`)."""

    def has(self, digest: bytes) -> bool:
        """False: there is no such tier."""
        return False

    def keys(self, parent: bytes) -> Iterable[StateKey]:
        """Empty: there is no such tier."""
        return ()

    def offer(self, snapshot: Snapshot) -> None:
        """Do nothing: there is no such tier."""

    def read_ahead(self, digest: bytes, now: float) -> bool:
        """False: there is no such tier."""
        return False


NO_STATES_BELOW: StatesBelow = NoStatesBelow()
