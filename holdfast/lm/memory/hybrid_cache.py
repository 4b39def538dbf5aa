"""HybridCache: the KV blocks of one sequence of a hybrid model, and the snapshot that it starts from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.sequence_cache import Found, SequenceCache
from holdfast.lm.memory.snapshots import NOTHING_KEPT, Snapshot, StateKey
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.memory.turns import NOTHING_SAID, Departure
from holdfast.lm.types import BlockCopy, BlockMove

LONG = 1024
"""Tokens of a prompt that lack state, from which on the state at its last block boundary is worth a free slot."""
LEAST_GAIN = 16
"""Fewest tokens that a state from below the host must save: so few are computed within a step that runs anyway."""
NO_ROW = -1
"""The row of a sequence that waits."""


@dataclass(frozen=True, slots=True)
class FoundState:
    """The snapshot with which a sequence can start, and the KV blocks of the tokens that it has seen."""

    snapshot: Snapshot = NOTHING_KEPT
    blocks: Found = field(default_factory=Found)
    """The full blocks, all before the snapshot's position."""
    tail: Mapping[int, int] = field(default_factory=dict)
    """The block on the device with the tokens after the full blocks, by index. The sequence gets a copy of it."""
    tail_on_host: Mapping[int, bytes] = field(default_factory=dict)
    """Digest of this block if only the host has it, by index."""
    known: int = 0
    """Number of leading positions whose KV blocks are kept. Beyond the snapshot they must be computed again."""
    coming: bytes = b""
    """Digest of the last block before a state that another sequence will save, and that would serve this one better.

    It is empty if there is none.
    """

    def __len__(self) -> int:
        """Number of full blocks that need not be computed."""
        return len(self.blocks)

    def positions(self, block_size: int) -> int:
        """Number of positions that need not be computed."""
        return self.snapshot.length

    @property
    def shared(self) -> Collection[int]:
        """The full blocks on the device."""
        return self.blocks.shared

    @property
    def copied(self) -> Collection[int]:
        """The block on the device that is copied."""
        return self.tail.values()

    @property
    def host(self) -> Sized:
        """The blocks that only the host has."""
        return {**self.blocks.host, **self.tail_on_host}


class HybridCache:
    """The state of one sequence in a model with attention and recurrent layers (`protocol.SequenceState`).

    A recurrent state cannot be computed from the middle of a sequence. So the sequence starts at the position of a
    snapshot whose KV blocks are all kept, and computes everything after it. There are no holes.

    When the sequence ends or must wait, its state is saved at the last position that a plan computes, if all tokens
    before it are known. Kept KV blocks beyond the snapshot show that another sequence has computed this prefix before.
    With `forks` the prefill ends a segment where they end, and saves the state there for the next such sequence. It
    does the same at the last block boundary of a long prompt while slots are free, for another answer to this prompt.
    """

    __slots__ = ("_cache", "_cuts", "_forks", "_name", "_pool", "_root", "_row", "_source", "_states", "_tail")

    def __init__(
        self, pool: BlockPool, states: StatePool, root: bytes | None, *, forks: bool = True, name: str = ""
    ) -> None:
        """`root` starts the chain of digests (`Identity.root`). None: the sequence keeps and finds nothing.

        `forks`: the prefill may be cut where a state is saved. `name` is the id of the sequence.
        """
        self._pool = pool
        self._states = states
        self._root = root
        self._cuts = forks
        self._name = name
        self._cache = SequenceCache(pool, root)
        self._row = NO_ROW
        self._source = NOTHING_KEPT
        """The snapshot before which nothing of the sequence needs to be computed again."""
        self._forks: tuple[Snapshot, ...] = ()
        """The states that are saved while the prompt is computed, in the order of their positions."""
        self._tail: tuple[BlockMove, ...] = ()
        """The copy of the snapshot's last KV block, until the sequence has a row."""

    @property
    def planned(self) -> int:
        """Positions [0, planned) are resident, or a plan already made computes them."""
        return self._cache.planned

    @planned.setter
    def planned(self, stop: int) -> None:
        self._cache.plan(self._cache.planned, stop)

    @property
    def capacity(self) -> int:
        """Number of positions that the blocks can hold."""
        return self._cache.capacity

    @property
    def next_full(self) -> int:
        """`cache_blocks` has nothing to do while fewer tokens than this are known."""
        return self._cache.next_full

    @property
    def blocks(self) -> list[int]:
        """The block table. Callers must not change it."""
        return self._cache.blocks

    @property
    def digests(self) -> list[bytes]:
        """The digests of its first blocks, as far as they were needed. Callers must not change them."""
        return self._cache.digests

    def missing(self, length: int) -> tuple[tuple[int, int], ...]:
        """The range of [0, length) that no plan computes yet. It ends where the state is to be saved."""
        stop = min([length, *(fork.length for fork in self._forks if fork.length > self.planned)])
        return ((self.planned, stop),) if self.planned < stop else ()

    def most_cuts(self, length: int) -> int:
        """Most steps that end early in a prompt of this length. A waiting sequence may also wait for another's state.

        See `protocol.SequenceState.most_cuts`.
        """
        if self._root is None or not self._cuts:
            return 0
        if self._row == NO_ROW:
            return 3 if length >= LONG else 2
        return sum(fork.length > self.planned for fork in self._forks)

    def plan(self, start: int, stop: int) -> None:
        """Record that a plan computes [start, stop). The state at a fork is saved by the plan after it."""
        self._cache.plan(start, stop)
        for fork in self._forks:
            if fork.length == stop:
                self._states.save_after(self._row, fork)
                self._source = fork

    def draft(self, start: int, stop: int) -> int:
        """Have the current plan verify a draft at [start + 1, stop), as far as blocks and places have room for it.

        See `protocol.SequenceState.draft`. The state of the row stays the one before `start`.
        """
        stop = self._cache.draft(start, min(stop, start + self._states.free_places))
        if stop > start + 1:
            self._states.verify(self._row, stop - start)
        return stop

    def accept(self, count: int) -> None:
        """Have the next plan move the state on by the first `count` positions of the verified draft."""
        self._cache.accept(count)
        self._states.accept(self._row, count)

    def match(self, tokens: Sequence[int]) -> FoundState:
        """Find the longest snapshot of these tokens whose KV blocks are all kept. The last token never counts."""
        if self._root is None:
            return FoundState()
        pool, size = self._pool, self._pool.block_size
        digests = self._cache.usable_digests(tokens)
        leading = self._leading(digests)
        snapshot = self._states.find(self._root, digests[: len(leading)], tokens)
        full = snapshot.length // size
        blocks = leading.first(full)
        tail, on_host = dict[int, int](), dict[int, bytes]()
        if (digest := snapshot.key.tail_digest) and self._fits(len(tokens)):
            block = pool.find_all((digest,))[0]
            if block is None:
                on_host[full] = digest
            else:
                tail[full] = block
        elif digest:
            snapshot, blocks, full = NOTHING_KEPT, Found(), 0
        announced = self._states.coming
        coming = next((each for each in reversed(digests[full:]) if each in announced), b"") if announced else b""
        return FoundState(snapshot, blocks, tail, on_host, known=len(leading) * size, coming=coming)

    def _fits(self, length: int) -> bool:
        """Whether the pool can hold a sequence of this length and a second copy of a block."""
        return self._pool.blocks_for(length) < self._pool.num_blocks - self._pool.lent

    def _leading(self, digests: Sequence[bytes]) -> Found:
        """The kept blocks of these digests, up to the first that is not kept."""
        device, host = dict[int, int](), dict[int, bytes]()
        for index, block in enumerate(self._pool.find_all(digests)):
            if block is not None:
                device[index] = block
            elif self._pool.find_on_host(digests[index]) is not None:
                host[index] = digests[index]
            else:
                break
        return Found(device, host)

    def lacking(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """The missing part of the longest start that the tiers below have; empty if they have none.

        Digests of KV blocks by place, that of the last, partial one included, as all of them are needed. Under minus
        the number of tokens that the start saves: the digest of its state (`StateKey.digest`), or empty bytes if the
        memory has the state. Only a start that saves LEAST_GAIN tokens counts.
        """
        if self._root is None:
            return {}
        states, size = self._states, self._pool.block_size
        digests = self._cache.usable_digests(tokens)
        key = self._find_anywhere(self._root, digests, tokens)
        saved = key.length - self.match(tokens).snapshot.length
        if saved < LEAST_GAIN or (key.tail and not self._fits(len(tokens))):
            return {}
        needed = [*digests[: key.length // size], *([key.tail_digest] if key.tail else ())]
        lacking = {index: digest for index, digest in enumerate(needed) if not states.has_block(digest)}
        return {**lacking, -saved: b"" if states.has(key) else key.digest}

    def candidates(self, tokens: Sequence[int]) -> Sequence[bytes]:
        """The digests of the full blocks after the longest known start, unless that saves all but LEAST_GAIN tokens."""
        if self._root is None:
            return ()
        digests = self._cache.usable_digests(tokens)
        saved = self._find_anywhere(self._root, digests, tokens).length
        return digests[saved // self._pool.block_size :] if len(tokens) - saved > LEAST_GAIN else ()

    def _find_anywhere(self, root: bytes, digests: Sequence[bytes], tokens: Sequence[int]) -> StateKey:
        """The key of the longest state of a prefix of these tokens that a tier is known to have with all its blocks."""
        pool, states = self._pool, self._states
        known = next(
            (at for at, each in enumerate(digests) if not (states.has_block(each) or pool.is_below(each))), None
        )
        return states.find_anywhere(root, digests[:known], tokens)

    def touch(self, tokens: Sequence[int], now: float) -> None:
        """Count the snapshot and the blocks of a waiting sequence as used now."""
        found = self.match(tokens)
        if found.positions(self._pool.block_size):
            on_host = (*found.blocks.host.values(), *found.tail_on_host.values())
            self._pool.touch((*found.shared, *found.copied), on_host, now)
            self._states.touch(found.snapshot, now)

    def allocate(self, found: FoundState, length: int, now: float) -> tuple[BlockCopy, ...]:
        """Share the blocks found and allocate blocks for the rest of `length` positions. The table must be empty.

        The next plan copies the snapshot's last, partial block to a block of the sequence's own. Returns the copies
        from the host that the current plan must do.
        """
        pool, cache = self._pool, self._cache
        pool.share(found.copied)
        copies = cache.allocate(found.blocks, length, now)
        self._tail = tuple([BlockMove(source, cache.blocks[index]) for index, source in found.tail.items()])
        copies += pool.fill([(cache.blocks[index], digest) for index, digest in found.tail_on_host.items()])
        self._source = found.snapshot
        self._forks = tuple(self._choose_forks(self._root, found, length)) if self._root is not None else ()
        for fork in self._forks:
            self._states.announce(fork, self._name)
        if found.snapshot.length > cache.planned:
            cache.plan(cache.planned, found.snapshot.length)
        if found.snapshot is not NOTHING_KEPT:
            self._states.touch(found.snapshot, now)
        return copies

    def _choose_forks(self, root: bytes, found: FoundState, length: int) -> Iterator[Snapshot]:
        """The states to save while a prompt of this length is computed, in the order of their positions."""
        size, previous = self._pool.block_size, found.snapshot
        last = min((length - 1) // size, len(self.digests)) * size
        if not self._cuts:
            return
        if found.known > previous.length:
            key = StateKey.of(root, self.digests, (), found.known, size)
            previous = Snapshot(key, previous, shared=True)
            yield previous
        if length - previous.length >= LONG and last > previous.length and self._states.free > 0:
            yield Snapshot(StateKey.of(root, self.digests, (), last, size), previous)

    def occupy(self, row: int) -> None:
        """Have the next plan fill this row with the state that the sequence starts from."""
        self._row = row
        self._states.start(row, self._source)
        for move in self._tail:
            self._states.copy_tail(row, move)
        self._tail = ()

    def grow(self, now: float) -> None:
        """Add a block at the end of the table."""
        self._cache.grow(now)

    def move(self, places: Mapping[int, int]) -> None:
        """Replace blocks whose contents moved, in the table and in the copy of a tail that is still to be made."""
        self._cache.move(places)
        self._states.move_tail(self._row, places)

    def cache_blocks(self, tokens: Sequence[int]) -> None:
        """Cache every block whose tokens are all known and whose positions are all planned."""
        self._cache.cache_blocks(tokens)

    def end(self, tokens: Sequence[int], now: float, departure: Departure = NOTHING_SAID) -> bool:
        """Save the state, and free all blocks, because the sequence has ended with these tokens. Its row is free."""
        self._leave(tokens, now)
        return self._cache.end(tokens, now, departure)

    def suspend(self, tokens: Sequence[int], now: float) -> bool:
        """Save the state, and free all blocks, because the sequence must wait. Returns whether there is a host tier."""
        self._leave(tokens, now)
        return self._cache.suspend(tokens, now)

    def _leave(self, tokens: Sequence[int], now: float) -> None:
        """Give up the row. Its state is saved unless no plan has changed it since the last snapshot."""
        row, self._row = self._row, NO_ROW
        for fork in self._forks:
            if fork.length > self.planned:
                self._states.withdraw(fork)
        self._forks = ()
        if row == NO_ROW:
            return
        if self._states.begins(row):
            self._states.cancel(row, now)
            return
        beyond = self.planned - len(tokens)
        if beyond > 0 and self._states.take_back(row, beyond):  # a token in the middle of the draft ended the sequence
            self._cache.rollback(len(tokens))
        saved = self._root is not None and self._source.length < self.planned <= len(tokens)
        self._states.leave(row, saved=saved)
        if self._root is not None and saved:
            self._save(self._root, row, tokens, now)

    def _save(self, root: bytes, row: int, tokens: Sequence[int], now: float) -> None:
        """Save the state of the row, and cache the last block for it if that is not full."""
        length, size = self.planned, self._pool.block_size
        self._cache.cache_blocks(tokens)
        key = StateKey.of(root, self.digests, tokens, length, size)
        if self._states.save(row, Snapshot(key, self._source), now) and key.tail:
            self._pool.cache_block(self.blocks[length // size], key.tail_digest, length // size)
