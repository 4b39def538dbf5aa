"""StateMoves: recurrent states that go along when a conversation's KV blocks move between engines.

A recurrent state serves only with all KV blocks before it, and they serve only with the state. So a fetch first asks
the other engine which states come after its blocks, and reserves slots of the host for them. Then the blocks come, the
partial block before a state included, and the states last. A move that is cut anywhere leaves blocks without a state:
the tokens are computed again.

The threads of `ChunkService` call this. The memory changes between two steps (`Moves`), by the jobs below.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import inf
from typing import Protocol

from holdfast.engine.process.block_moves import LOOP_SECONDS, Moves
from holdfast.engine.process.chunk_wire import MAX_DIGESTS, ChunkPeer, Kind, PeerError, digests_in
from holdfast.lm.memory.snapshots import NO_SLOT, Snapshot, StateKey
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.tiers import Pieces

MOST_STATES = 2
"""Most states of a move: two answers to one prompt may end in one block."""
KEY_BYTES = struct.Struct("<I")
"""Bytes of each key in a list of keys, before the key."""

Pairs = Sequence[tuple[int, bytes]]
"""Index in its sequence and digest of each block of a move."""


class Start(Protocol):
    """The part of a move that the blocks depend on."""

    pairs: Pairs
    """The blocks to bring."""
    is_whole: bool
    """Whether the blocks are of use only together."""
    reason: str
    """Why nothing is brought, in one line; empty if something is."""

    def found(self) -> float:
        """Most tokens that requests find of those that have come so far."""
        ...

    def finish(self) -> int:
        """Bring the rest, now that all blocks are here. Returns how many states have come."""
        ...


class MovedStates(Protocol):
    """The state that moves besides KV blocks. Used by many threads at once."""

    def begin(self, peer: ChunkPeer, pairs: Pairs) -> AbstractContextManager[Start]:
        """Begin to bring the state that belongs to these blocks. All slots held for the move are free at the end."""
        ...

    def answer(self, peer: ChunkPeer, kind: Kind, payload: bytes) -> bool:
        """Answer a question about such state. Returns False for a frame that is none."""
        ...

    def give_way(self, digests: Sequence[bytes]) -> None:
        """Give up the state that goes with the last of these blocks before others: another engine has it."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Bytes so far, by their names in SchedulerStats."""
        ...


class BlocksAlone:
    """The start of a move of a model whose blocks are all of its state."""

    is_whole = False
    reason = ""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def found(self) -> float:
        """Unlimited: each block serves with those before it."""
        return inf

    def finish(self) -> int:
        """0: nothing is left to bring."""
        return 0


class NoStates:
    """Moves of a model without recurrent layers (`MovedStates`)."""

    def begin(self, peer: ChunkPeer, pairs: Pairs) -> AbstractContextManager[Start]:
        """All of these blocks."""
        return nullcontext(BlocksAlone(pairs))

    def answer(self, peer: ChunkPeer, kind: Kind, payload: bytes) -> bool:
        """False: there are no states to ask for."""
        return False

    def give_way(self, digests: Sequence[bytes]) -> None:
        """Do nothing: there are no states."""

    def stats(self) -> Mapping[str, int]:
        """None."""
        return {"chunk_bytes_in": 0, "chunk_bytes_out": 0}


class Slots(Protocol):
    """The states on the host: `holdfast.lm.execution.host_memory.HostStates`."""

    def __getitem__(self, slot: int, /) -> Pieces:
        """The bytes of the state in a slot, in place."""
        ...


class StateLoan:
    """A state on the host that another engine reads. One that is only on the device is copied there first."""

    def __init__(self, states: StatePool, key: StateKey) -> None:
        """Begin with `Moves.begin`; `end` must follow in any case."""
        self.given: Future[int] = Future()
        """Its slot on the host; NO_SLOT if it is not here, or if the host has no room for it."""
        self._states, self._key = states, key
        self._held: list[Snapshot] = []
        self._mark = 0

    def start(self) -> None:
        self._states.want_on_host(self._key)

    def ready(self) -> bool:
        return not self._states.coming_to_host(self._key) and (not self._held or self._states.is_quiet(self._mark))

    def advance(self) -> bool:
        if self.given.done():
            return True
        if not self._held and not self._states.coming_to_host(self._key):
            self._hold()
        if self._held and self._states.is_quiet(self._mark):
            self.given.set_result(self._held[0].host)
        return self.given.done()

    def _hold(self) -> None:
        self._held, self._mark = self._states.hold(self._key), self._states.mark
        if not self._held:
            self.given.set_result(NO_SLOT)

    def end(self) -> None:
        """Release the state. In the loop's thread, once nothing is read any longer."""
        self.given.cancel()
        held, self._held = self._held, []
        for snapshot in held:
            self._states.release(snapshot)


class StateRoom:
    """Slots of the host that are filled from another engine, then held until the move has ended."""

    def __init__(self, moves: Moves, states: StatePool, keys: Sequence[StateKey]) -> None:
        """For the states of these keys that are not here. Begin with `Moves.begin`; `end` must follow."""
        self.given: Future[dict[int, StateKey]] = Future()
        """The key of the state that is to fill each reserved slot. There may be fewer than were asked for."""
        self._moves, self._states, self._keys = moves, states, keys
        self.here = 0
        """Number of these states that were here when the job began."""
        self._places: dict[int, StateKey] = {}
        self._held: list[Snapshot] = []
        self._mark = 0

    def start(self) -> None:
        states, now = self._states, self._moves.now()
        for key in self._keys:
            if states.has(key):
                self.here += 1
            elif (slot := states.reserve_on_host(now)) != NO_SLOT:
                self._places[slot] = key
        self._mark = states.mark

    def ready(self) -> bool:
        return not self.given.done() and self._states.is_quiet(self._mark)

    def advance(self) -> bool:
        if self.ready():
            self.given.set_result(dict(self._places))
        return self.given.done()

    def arrived(self, slot: int) -> None:
        """The slot is filled: let requests find its state. In the loop's thread."""
        self._held += self._states.receive(slot, self._places.pop(slot), self._moves.now())

    def end(self) -> None:
        """Free the slots that were not filled, and release the rest. In the loop's thread, once nothing is written."""
        self.given.cancel()
        for slot in self._places:
            self._states.cancel_on_host(slot)
        for snapshot in self._held:
            self._states.release(snapshot)
        self._places, self._held = {}, []


class StateMoves:
    """Brings the states of a model with recurrent layers, and gives them to other engines (`MovedStates`)."""

    def __init__(self, moves: Moves, states: StatePool, slots: Slots, block_size: int) -> None:
        self._moves, self._states, self._slots, self._size = moves, states, slots, block_size
        self._bytes_in = self._bytes_out = 0

    @contextmanager
    def begin(self, peer: ChunkPeer, pairs: Pairs) -> Iterator[Start]:
        """Reserve slots for the states after these blocks that the other engine has. Raises PeerError, TimeoutError."""
        keys = self._ask(peer, pairs)
        room = StateRoom(self._moves, self._states, keys)
        self._moves.begin(room)
        try:
            yield StatesAfter(self, peer, room, blocks_before(keys, pairs), keys)
        finally:
            self._moves.call(room.end)

    def _ask(self, peer: ChunkPeer, pairs: Pairs) -> list[StateKey]:
        """The keys of the states after these blocks that the other engine has. Raises PeerError for wrong ones."""
        peer.send(Kind.STATES, b"".join(digest for _, digest in pairs[-MAX_DIGESTS:]))
        kind, payload = peer.receive(most=MOST_STATES * (KEY_BYTES.size + StateKey.most_bytes(self._size)))
        if kind is not Kind.KEYS:
            raise PeerError(f"the peer answers with a {kind.name} to a question for states")
        keys = keys_in(payload)
        indices = {digest: index for index, digest in pairs}
        for key in keys:
            if key.parent not in indices or not key.follows(indices[key.parent], self._size):
                raise PeerError(f"the peer names a state of {key.length} tokens that follows none of these blocks")
        return keys

    def fetch(self, peer: ChunkPeer, room: StateRoom, slot: int, key: StateKey) -> bool:
        """Fill a reserved slot. Returns whether the other engine still has the state."""
        target = self._slots[slot]
        peer.send(Kind.STATE, key.packed())
        if not peer.receive_block(target):
            return False
        self._moves.call(partial(room.arrived, slot)).result(LOOP_SECONDS)
        self._bytes_in += sum(map(len, target))
        return True

    def answer(self, peer: ChunkPeer, kind: Kind, payload: bytes) -> bool:
        """Say which states come after blocks, or send one. Raises PeerError, TimeoutError."""
        if kind is Kind.STATES:
            found = self._moves.call(partial(self._states.after, digests_in(payload))).result(LOOP_SECONDS)
            peer.send(Kind.KEYS, written([snapshot.key for snapshot in found[:MOST_STATES]]))
        elif kind is Kind.STATE:
            self._give(peer, key_of(payload))
        return kind in (Kind.STATES, Kind.STATE)

    def give_way(self, digests: Sequence[bytes]) -> None:
        """Give up the states that end in the last of these blocks before others. The loop does so between two steps."""
        self._moves.call(partial(self._states.give_way, digests[-MOST_STATES:]))

    def _give(self, peer: ChunkPeer, key: StateKey) -> None:
        loan = StateLoan(self._states, key)
        self._moves.begin(loan)
        try:
            slot = loan.given.result(LOOP_SECONDS)
            if slot == NO_SLOT:
                peer.send(Kind.MISSING)
            else:
                self._bytes_out += sum(map(len, self._slots[slot]))  # as in ChunkService
                peer.send(Kind.CHUNK, *self._slots[slot])
        finally:
            self._moves.call(loan.end)

    def stats(self) -> Mapping[str, int]:
        """Bytes of states so far."""
        return {"chunk_bytes_in": self._bytes_in, "chunk_bytes_out": self._bytes_out}


class StatesAfter:
    """The start of a move of blocks with the states after them (`Start`)."""

    is_whole = True

    def __init__(
        self, moves: StateMoves, peer: ChunkPeer, room: StateRoom, pairs: Pairs, keys: Sequence[StateKey]
    ) -> None:
        """`room` has slots for those of `keys` that are not here. `pairs` are the blocks before these states.

        Waits until the slots may be written. Raises TimeoutError.
        """
        self.pairs = pairs
        self._moves, self._peer, self._room = moves, peer, room
        self._places = room.given.result(LOOP_SECONDS)
        self._length = max((key.length for key in keys), default=0)
        self._came = 0
        self.reason = ""
        if not keys:
            self.reason = "the source keeps no recurrent state after these blocks"
        elif not (self._places or room.here):
            self.reason = "the host tier has no slot for a recurrent state"

    def found(self) -> float:
        """0 until a state is here, then the length of the longest."""
        return self._length if self._came or self._room.here else 0

    def finish(self) -> int:
        """Bring the states."""
        for slot, key in self._places.items():
            self._came += self._moves.fetch(self._peer, self._room, slot, key)
        return self._came


def blocks_before(keys: Sequence[StateKey], pairs: Pairs) -> Pairs:
    """The blocks that states serve with, which all follow one block: those up to it, then a partial one for each."""
    parents = {key.parent for key in keys}
    last = max((index for index, digest in pairs if digest in parents), default=-1)
    tails = [(last + 1, key.tail_digest) for key in keys if key.tail]
    return [*(pair for pair in pairs if pair[0] <= last), *tails]


def written(keys: Sequence[StateKey]) -> bytes:
    """Keys as one payload."""
    packed = [key.packed() for key in keys]
    return b"".join(KEY_BYTES.pack(len(each)) + each for each in packed)


def keys_in(payload: bytes) -> list[StateKey]:
    """The inverse of `written`. Raises PeerError for bytes that it did not give."""
    keys, at = list[StateKey](), 0
    while at < len(payload):
        start = at + KEY_BYTES.size
        if start > len(payload):
            raise PeerError(f"{len(payload)} bytes end within a key")
        at = start + KEY_BYTES.unpack_from(payload, at)[0]
        keys.append(key_of(payload[start:at]))
    return keys


def key_of(payload: bytes) -> StateKey:
    """A key from its bytes. Raises PeerError for bytes that are none."""
    try:
        return StateKey.unpacked(payload)
    except ValueError as error:
        raise PeerError(str(error)) from None
