"""BlockPool: what the blocks of the KV cache hold, who owns them, and when their state moves between the tiers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Any

from holdfast.lm.memory.ahead import NOTHING_BELOW, Ahead, FromBelow
from holdfast.lm.memory.allocator import Allocator
from holdfast.lm.memory.copy_ledger import CopyLedger
from holdfast.lm.memory.digests import DigestCache
from holdfast.lm.memory.host_pool import HostPool
from holdfast.lm.memory.prefix_index import PrefixIndex
from holdfast.lm.memory.prices import Link, Prices
from holdfast.lm.memory.protocol import Found, SequenceState
from holdfast.lm.memory.retention import MIN_AGE, IdleBlocks, RetentionRule, Use, Victims
from holdfast.lm.types import BlockCopy, BlockMove, TierCopied

TIERS = {
    "u": "on the device, in use",
    "i": "being copied to the device",
    "d": "on the device, idle",
    "o": "being copied to the host",
    "b": "on the device, idle, with a copy on the host",
    "h": "on the host",
    "-": "dropped, or not computed yet",
}
"""The places where a block's state can lie, by letter."""
LOOK = 64
"""Number of reclaimable blocks beyond those needed among which `swap_in_ahead` looks for state that gives way."""
FASTEST = 1e12
"""Rate of copies from the host, in bytes per second, assumed before any was measured: faster than any hardware."""


class BlockPool:
    """The blocks 0 to `num_blocks - 1` of the device, and the host tier below them. Each operation is O(1) per block.

        free ──allocate──▶ owned ──free──▶ free, or if it is cached:
                             ▲                retained ──swap_out──▶ swapping out ──finish_swap_out──▶ reclaimable
                             └──── share ────────┴─────────────────────────┴───────────────────────────────┘

    An idle block is cached and has no owner. `allocate` takes free blocks first and reclaimable ones next. Without a
    host tier it then evicts retained blocks, the lowest value first.

    `cache_block` caches a full block: it is never written again, it may have several owners, and it is found by the
    SHA-256 digest of its tokens and of all tokens before them.

    With a host tier a block leaves the device in two steps (Pensieve §4.3.2). Ahead of need, when few blocks are free,
    its contents are copied; the block is pinned until the copy is complete. It is then reclaimable: still found, and
    shared again, until it is allocated. A block worth less than everything on a full host is reclaimable at once.

    `lend` gives the highest blocks to a part, and `reclaim` takes them back. A lent block is in no other state:
    free + cached + used + lent = total.

    Methods raise RuntimeError for a call that would break these states. `now` is in seconds and never decreases.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        rule: RetentionRule | None = None,
        host_blocks: int = 0,
        host_ready: int | None = None,
        low_water: float = 0.25,
        copies_ahead: int | None = None,
        copies_for_others: int | None = None,
        prices: Prices | None = None,
    ) -> None:
        """Swapping out begins when the share of blocks that are free or reclaimable falls below `low_water`.

        `host_ready` of the `host_blocks` can be used from the start (None: all), others once `host.resize` says so. A
        plan swaps out `copies_ahead` blocks ahead of need, or as many as it computes if those are more. A plan that
        computes anything copies `copies_for_others` of the blocks that others want. `prices` say whether a block of the
        host is worth its copy; None: each is.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens; both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.rule = rule or RetentionRule(block_size=block_size)
        self.host = HostPool(host_blocks, self.rule, ready=host_ready) if host_blocks else None
        self.digest_cache = DigestCache(block_size, 2 * (num_blocks + host_blocks))
        self.copies = CopyLedger()
        """Copies under way between the tiers."""
        self.ahead = Ahead()
        """Blocks copied from the host before any sequence asked for them."""
        self.swapped_in = 0
        self.swapped_out = 0
        """Number of blocks copied to the host so far."""
        self.dropped = 0
        """Number of blocks whose state was lost so far: no tier has it."""
        self.max_copies = max(self.rule.chunk_blocks, num_blocks // 16)
        """The most blocks that one plan copies in either direction, unless a single sequence brings in more."""
        self._copies_ahead = self.max_copies if copies_ahead is None else copies_ahead
        self._copies_for_others = self.max_copies if copies_for_others is None else copies_for_others
        self._allocator = Allocator(num_blocks)
        self._index = PrefixIndex(num_blocks)
        self._idle = IdleBlocks(self.rule, num_blocks)
        self._free, self._owners = self._allocator.free, self._allocator.owners
        self._cached, self._digests = self._index.blocks, self._index.digests
        self.uses = 0
        """Number of uses of blocks so far. It orders uses of equal time."""
        self._low_water = max(1, int(num_blocks * low_water))
        self._demand = 0
        """Most blocks that a failed call of `fits` asked for since the last `swap_out`."""
        self.lent = 0
        """Blocks that are lent to a part, the highest ones."""
        self.can_lend = True
        self.kept_below: Callable[[bytes], bool] | None = None
        """Whether a tier below the host has the block of this digest. None: there is no lower tier."""
        self.below = NOTHING_BELOW
        """Brings blocks from the tiers below the host ahead of need."""
        self.prices = prices
        """Decides whether a block of the host is worth its copy. None: every block is."""
        self.host_link = Link(latency=0.0, rate=FASTEST)
        """Latency and rate of copies from the host to the device, as measured."""
        self._flushing = False
        """Whether the next plan copies idle blocks to the host however many are free: nobody needs the device."""

    def serve_below(self, has: Callable[[bytes], bool], below: FromBelow = NOTHING_BELOW) -> None:
        """There are tiers below the host from now on: `has` says whether they have the block of a digest.

        `below` brings blocks from them ahead of need.
        """
        self.kept_below, self.below = has, below

    def is_below(self, digest: bytes) -> bool:
        """Whether a tier below the host has the block of this digest."""
        return self.kept_below is not None and self.kept_below(digest)

    def flush(self, on: bool) -> None:
        """Let the next plans copy idle blocks to the host however many are free, as nobody needs the device; or not."""
        self._flushing = on

    @property
    def available(self) -> int:
        """Blocks that can be allocated now or once they are swapped out: all but those owned or being swapped out."""
        return len(self._free) + len(self._idle.reclaimable) + len(self._idle.retained.blocks)

    @property
    def allocatable(self) -> int:
        """Number of blocks that can be allocated now."""
        ready = len(self._free) + len(self._idle.reclaimable)
        return ready if self.host is not None else ready + len(self._idle.retained.blocks)

    @property
    def can_swap_out(self) -> bool:
        """Whether copies to the host are under way, or could begin, that make blocks allocatable."""
        return self.host is not None and bool(self.copies.idle or self._idle.retained.blocks)

    @property
    def cached(self) -> int:
        """Number of idle blocks: cached, without an owner."""
        return len(self._idle.retained.blocks) + self.copies.idle + len(self._idle.reclaimable)

    @property
    def used(self) -> int:
        """Number of blocks with an owner."""
        return self.num_blocks - len(self._free) - self.cached - self.lent

    def blocks_for(self, positions: int) -> int:
        """Number of blocks that hold this many positions."""
        return -(-positions // self.block_size)

    def longest(self, limit: int) -> int:
        """The most positions of a sequence that has all blocks to itself."""
        return self.num_blocks * self.block_size

    def holds(self, count: int, blocks: int, longest: int) -> bool:
        """Whether sequences that take `blocks` in all fit the pool. Their number and lengths do not matter."""
        return blocks <= self.num_blocks

    def allocate(self, count: int, now: float) -> list[int]:
        """Give `count` blocks to one owner. Cached state in them is dropped."""
        missing = count - len(self._free)
        if missing > 0:
            if count > self.allocatable:
                raise RuntimeError(f"{count - self.allocatable} blocks more are asked for than are available")
            self._free.extend(self._evict(missing, now))
        return self._allocator.allocate(count)

    def _evict(self, count: int, now: float) -> list[int]:
        """Drop the state of `count` idle blocks, which must be allocatable. They are then in no state."""
        evicted = self._idle.reclaim(count, now, self.max_copies)
        self.copies.overwrite(evicted)
        if self.ahead:
            self.ahead.give_up(evicted)
        lost = self._index.remove(evicted)
        for digest in lost if self.copies.wanted else ():
            self.copies.wanted.pop(digest, None)
        host, below = self.host, self.kept_below
        if below is not None:
            self.dropped += sum([self.find_on_host(digest) is None and not below(digest) for digest in lost])
        else:
            self.dropped += len(lost) - (len(host.find_all(lost)) if host is not None else 0)
        return evicted

    def drop_idle(self, now: float) -> None:
        """Drop the state of all idle blocks of the device, which are free then: the device's memory is lost.

        State on the host stays, and is found there. Raises RuntimeError while a block is owned, lent or being copied.
        """
        if self.used or self.lent or self.copies.under_way:
            raise RuntimeError(f"{self.used} blocks are in use, {self.lent} lent and some may be being copied")
        self._free.extend(self._evict(self.cached, now))

    def evicted_from_host(self, lost: Iterable[bytes]) -> None:
        """Add to `dropped` the blocks in `lost`, which the host evicted, that no other tier has."""
        cached, below = self._cached, self.kept_below
        self.dropped += sum([digest not in cached and not (below and below(digest)) for digest in lost])

    def lend(self, count: int, now: float, *, most_moves: int) -> tuple[BlockMove, ...]:
        """Lend up to `count` more blocks to a part, the highest that are not lent yet. `lent` says how many in all.

        The idle blocks of the lowest value make room. Other blocks in the lent range that hold state, owned or idle,
        are moved below it, at most `most_moves` of them. The plan must do the moves before anything else, and every
        block table must name the new places at once. A block that is being copied between the tiers is not lent, nor
        are the blocks below it.

        If idle state is still to be copied to the host before `count` blocks can be had, the next `swap_out` makes room
        and fewer are lent. O(`num_blocks`).
        """
        if not self.fits(count, ()) or self.allocatable < count:
            count = min(count, self.allocatable)
        top = self.num_blocks - self.lent
        taken, moving, copied = bytearray(b"\1") * top, 0, self.copies.under_way
        for block in self._free:
            taken[block] = 0
        for block in range(top - 1, top - count - 1, -1):
            if block in copied or moving + taken[block] > most_moves:
                count = top - 1 - block
                break
            moving += taken[block]
        if not count:
            return ()
        missing = count - len(self._free)
        if missing > 0:
            self._free.extend(self._evict(missing, now))
        line = top - count
        # Allocate low blocks first from now on, so that later loans have few blocks to move.
        self._free.sort(reverse=True)
        above = next((at for at, block in enumerate(self._free) if block < line), len(self._free))
        free = {*self._free[:above]}
        del self._free[:above]
        self.lent += count
        return self._move([block for block in range(line, top) if block not in free])

    def _move(self, blocks: list[int]) -> tuple[BlockMove, ...]:
        """Move the contents of these blocks to free ones. Returns the moves; the old blocks are then in no state."""
        owners, places = self._owners, dict[int, int]()
        for block in blocks:
            target = places[block] = self._free.pop()
            owners[target], owners[block] = owners[block], 0
            if self._digests[block] is not None:
                self._index.move(block, target)
                if not owners[target]:
                    self._idle.move(block, target)
        self.ahead.move(places)
        return tuple([BlockMove(*pair) for pair in places.items()])

    def reclaim(self, count: int) -> None:
        """Take `count` of the lent blocks back, the lowest of them. They are free at once.

        Raises RuntimeError if fewer are lent.
        """
        if not 0 <= count <= self.lent:
            raise RuntimeError(f"{count} blocks are to be reclaimed, and {self.lent} are lent")
        first = self.num_blocks - self.lent
        self._free[:0] = range(first + count - 1, first - 1, -1)
        self.lent -= count

    def find_all(self, digests: Iterable[bytes]) -> list[int | None]:
        """The cached device block of each digest, owned or not; None if there is none."""
        return list(map(self._cached.get, digests))

    def find_on_host(self, digest: bytes) -> int | None:
        """The host block of this digest; None if there is none."""
        return self.host.find(digest) if self.host is not None else None

    def tiers(self, digests: Sequence[bytes]) -> str:
        """The tier of each of these digests: a letter of TIERS for each."""
        cached, owners = self._cached, self._owners
        leaving, arriving = self.copies.swapping_out, self.copies.swapping_in
        on_host: Mapping[bytes, int] = {} if self.host is None else self.host.by_digest
        pairs = zip(map(cached.get, digests), map(on_host.__contains__, digests), strict=True)
        if not (leaving or arriving):  # the usual case
            return "".join(
                [
                    ("h" if copied else "-") if block is None else "u" if owners[block] else "b" if copied else "d"
                    for block, copied in pairs
                ]
            )
        letters = []
        for block, copied in pairs:
            if block is None:
                letters.append("h" if copied else "-")
            elif owners[block]:
                letters.append("i" if block in arriving else "u")
            else:
                letters.append("o" if block in leaving else "b" if copied else "d")
        return "".join(letters)

    def idle_blocks(self, start: int, stop: int) -> list[tuple[Use, int, bytes]]:
        """The last use, place in its sequence, and digest of each retained block among blocks [start, stop)."""
        return self._idle.retained.among(start, stop, self._index)

    def pinned_by(self, blocks: Iterable[int]) -> int:
        """How many available blocks sharing these cached blocks would pin."""
        owners, swapping_out = self._owners, self.copies.swapping_out
        idle = [block for block in blocks if not owners[block]]
        return len(idle) - sum(map(swapping_out.__contains__, idle)) if swapping_out else len(idle)

    def fits(self, fresh: int, shared: Iterable[int]) -> bool:
        """Whether `fresh` blocks can be allocated after `shared` are shared. If not, the next `swap_out` makes room."""
        if self.host is None:
            return True
        needed = fresh + sum(map(self._idle.reclaimable.__contains__, shared))
        if needed > self.allocatable:
            self._demand = max(self._demand, needed)
        return needed <= self.allocatable

    def admits(self, found: Found, length: int, reserved: int) -> bool:
        """Whether a sequence of `length` positions, with `found` cached, can start and leave `reserved` blocks."""
        kept = (*found.shared, *found.copied)
        fresh = self.blocks_for(length) - len(found.shared)
        return fresh + self.pinned_by(kept) <= self.available - reserved and self.fits(fresh, kept)

    def needed(self, found: Found, length: int) -> int:
        """Available blocks that starting a sequence of `length` positions takes: new ones, and cached ones it pins."""
        kept = (*found.shared, *found.copied)
        return self.blocks_for(length) - len(found.shared) + self.pinned_by(kept)

    def freed_by(self, victim: SequenceState[Any], after: Collection[SequenceState[Any]]) -> int:
        """Number of blocks that preempting `victim` makes available, if it shares none. `after` does not matter."""
        return len(victim.blocks)

    def can_grow(self, state: SequenceState[Any]) -> bool:
        """Whether a block can be allocated now."""
        return self.allocatable > 0

    def share(self, blocks: Collection[int]) -> None:
        """Add an owner to each of these cached blocks, no block twice."""
        digests = self._digests
        if not all(map(digests.__getitem__, blocks)):
            block = next(block for block in blocks if digests[block] is None)
            raise RuntimeError(f"block {block} is shared, but it is not cached")
        idle = self._allocator.add_owner(blocks)
        if idle:
            if self.ahead:
                self.ahead.use(idle)
            if self.host is not None:
                self.host.mark_in_use([digest for block in idle if (digest := digests[block])])
            for block in self._idle.retained.remove(idle):
                if block in self.copies.swapping_out:
                    self.copies.idle -= 1
                else:
                    del self._idle.reclaimable[block]

    def cache_block(self, block: int, digest: bytes, index: int) -> None:
        """Cache an owned, full block, the `index`-th of its sequence. Does nothing if the digest is cached already."""
        if not self._owners[block]:
            raise RuntimeError(f"block {block} is cached, but nobody owns it")
        if digest not in self._cached:
            self._index.add(block, digest, index)
            if self.host is not None:
                self.host.mark_in_use((digest,))

    def free(self, blocks: Iterable[int], now: float) -> None:
        """Remove an owner from each block. Blocks left without one are then free, or idle if they are cached."""
        self.uses += 1
        digests, use = self._digests, (now, self.uses)
        unowned = self._allocator.remove_owner(blocks)
        idle = [block for block in unowned if digests[block] is not None]
        if len(idle) < len(unowned):
            self._free.extend([block for block in unowned if digests[block] is None])
        if self.host is not None:
            self.host.mark_idle([digest for block in idle if (digest := digests[block])], use)
        if self.copies.swapping_out:
            idle = self.copies.add_idle(idle, use)
        self._idle.retained.add_all(idle, map(self._index.indices.__getitem__, idle), use)

    def touch(self, blocks: Iterable[int], digests: Iterable[bytes], now: float) -> None:
        """Count these cached blocks, and the host's blocks of these digests, as used at `now`."""
        self.uses += 1
        use = now, self.uses
        for block in blocks:
            if not self._owners[block]:
                (self.copies if block in self.copies.swapping_out else self._idle).touch(block, use)
                digest = self._digests[block]
                if self.host is not None and digest is not None:
                    self.host.touch(digest, use)
        if self.host is not None:
            for digest in digests:
                self.host.touch(digest, use)

    def give_way(self, digests: Sequence[bytes]) -> None:
        """Evict the blocks of these digests before all others, because another engine now has them.

        Only blocks used as recently as the last of them: a block used later belongs to another sequence, too.
        """
        self.uses += 1
        idle, host, first = self._idle, self.host, (-inf, self.uses)
        latest: Use | None = None
        for digest in reversed(digests):
            block, on_host = self._cached.get(digest), self.find_on_host(digest)
            use = None if block is None else idle.retained.last_use(block)
            if use is None and host is not None and on_host is not None:
                use = host.last_use(on_host)
            if use is None:  # in use, on its way to the host, or not here
                continue
            latest = latest or use
            if use == latest:
                if block is not None:
                    idle.put_first(block, first)
                if host is not None:
                    host.touch(digest, first)

    def swap_in(self, blocks: Iterable[tuple[int, bytes, int]]) -> tuple[BlockCopy, ...]:
        """Cache owned blocks that the current plan fills from the host. Returns the copies to do.

        Each block comes with its digest and its place in its sequence.
        """
        copies, fresh = list[BlockCopy](), list[bytes]()
        on_host: Mapping[bytes, int] = {} if self.host is None else self.host.by_digest
        cached, owners, add = self._cached, self._owners, self._index.add
        for block, digest, index in blocks:
            source = on_host.get(digest)
            if source is None:
                raise RuntimeError(f"block {block} is to be filled from the host, which does not have its contents")
            if not owners[block]:
                raise RuntimeError(f"block {block} is cached, but nobody owns it")
            if digest not in cached:
                add(block, digest, index)
                fresh.append(digest)
            copies.append(BlockCopy(source, block))
        if self.host is not None:
            self.host.mark_in_use(fresh)
        self.swapped_in += len(copies)
        return tuple(copies)

    @property
    def is_calm(self) -> bool:
        """Whether nobody waits for a block, and no state is on its way to the host, asked for there, or flushed."""
        flushes = self._flushing and self._idle.retained.blocks
        return not (self._demand or self.copies.swapping_out or self.copies.wanted or flushes)

    @property
    def makes_room(self) -> bool:
        """Whether the next plan copies idle state to the host ahead of need."""
        return self._short() > 0 and bool(self._idle.retained.blocks)

    def can_swap_in_ahead(self, digests: Sequence[bytes], places: range, gives_way: Callable[[bytes], bool]) -> bool:
        """Whether `swap_in_ahead` with these arguments would find a block to copy, and room for it."""
        missing = (digests[place] for place in places if digests[place] not in self._cached)
        if not any(self.find_on_host(digest) is not None for digest in missing):
            return False
        return bool(self._free) or any(self._may_replace(block, gives_way) for block in self._first_to_go(1))

    def swap_in_ahead(
        self, digests: Sequence[bytes], places: range, most: int, gives_way: Callable[[bytes], bool]
    ) -> tuple[tuple[BlockCopy, ...], int]:
        """Begin to copy up to `most` blocks of a sequence from the host, which no request has asked for.

        `digests` are those of the whole sequence, and `places` are those to look at. Blocks that the device has, or
        that the host lacks, are left out. The copies go to free blocks, then to reclaimable ones with a copy on
        the host whose digest `gives_way`. The blocks get no owner, and are the first to be allocated: `available` and
        `allocatable` stay as they are.

        Returns the copies to do, and the place at which the next call goes on.
        """
        copies, room, stop = list[BlockCopy](), self._room_ahead(most, gives_way), places.stop
        for place in places:
            digest = digests[place]
            source = None if digest in self._cached else self.find_on_host(digest)
            if source is None:
                continue
            target = next(room, None)
            if target is None:
                stop = place
                break
            self._index.add(target, digest, place)
            copies.append(BlockCopy(source, target))
        for copy in copies:  # the last block of a sequence is the first to go
            self._idle.reclaimable[copy.target] = None
            self._idle.reclaimable.move_to_end(copy.target, last=False)
        self.ahead.add([copy.target for copy in copies])
        self.swapped_in += len(copies)
        return tuple(copies), stop

    def _room_ahead(self, most: int, gives_way: Callable[[bytes], bool]) -> Iterator[int]:
        """Up to `most` blocks without state that anybody needs. They are in no state."""
        others = self._first_to_go(most)
        for _ in range(min(most, len(self._free))):
            most -= 1
            yield self._free.pop()
        for block in others if most else ():
            if not self._may_replace(block, gives_way):
                continue
            del self._idle.reclaimable[block]
            self._index.remove([block])
            self.ahead.give_up([block])
            yield block
            most -= 1
            if not most:
                return

    def _first_to_go(self, most: int) -> list[int]:
        """The reclaimable blocks among which `most` may be replaced by state that is brought ahead."""
        return list(islice(self._idle.reclaimable, most + LOOK))

    def _may_replace(self, block: int, gives_way: Callable[[bytes], bool]) -> bool:
        """Whether a reclaimable block's state is on the host, too, and gives way to state that is brought ahead."""
        digest = self._digests[block]
        if digest is None or block in self.copies.swapping_in or self.find_on_host(digest) is None:
            return False
        return gives_way(digest)

    def fill(self, blocks: Iterable[tuple[int, bytes]]) -> tuple[BlockCopy, ...]:
        """Copies from the host to owned blocks that are not cached, each with the digest of its contents.

        The sequence writes more to these blocks, so no other can share them. Raises RuntimeError for a digest that the
        host does not have.
        """
        copies = list[BlockCopy]()
        for block, digest in blocks:
            source = self.find_on_host(digest)
            if source is None:
                raise RuntimeError(f"block {block} is to be filled from the host, which does not have its contents")
            copies.append(BlockCopy(source, block))
        self.swapped_in += len(copies)
        return tuple(copies)

    def reserve_on_host(self, index: int, now: float, victims: Victims | None = None) -> int | None:
        """Reserve a host block for state from elsewhere, the `index`-th block of a sequence that is active at `now`.

        Returns None if everything on the host is worth at least as much, or if there is no host tier. To reserve
        several blocks in a row, pass one `host.victims` for all. `HostPool.reserve` says when the block may be written
        to. `cache_on_host` or `HostPool.free` ends the reservation.
        """
        if self.host is None:
            return None
        value = self.rule.class_cost(self.rule.cost_class(index)) / MIN_AGE
        block, lost = self.host.reserve(value, victims or self.host.victims(now))
        self.evicted_from_host(lost)
        return block

    def cache_on_host(self, blocks: Iterable[tuple[int, bytes, int]], now: float, *, asked: bool = True) -> int:
        """Cache reserved host blocks whose state is complete, each with its digest and place in its sequence.

        State that nobody has `asked` for is the first to leave the host. Returns the number of digests that the host
        did not have yet. The blocks of the others are freed.
        """
        host, cached, owners = self.host, self._cached, self._owners
        assert host is not None
        self.uses += 1
        used, idle = list[tuple[int, bytes, int]](), list[tuple[int, bytes, int]]()
        for each in blocks:
            block, digest, _ = each
            if host.find(digest) is not None:
                host.free(block)
            elif (on_device := cached.get(digest)) is not None and owners[on_device]:
                used.append(each)
            else:
                idle.append(each)
        host.cache_all(used, None)
        if asked:
            host.cache_all(idle, (now, self.uses))
        else:
            host.cache_first(idle, self.uses)
        return len(used) + len(idle)

    def copy_seconds(self, blocks: int) -> float | None:
        """Predicted seconds to copy this many blocks from the host, by the slower of the mean and the latest copy.

        None if none was measured.
        """
        link = self.host_link
        if self.prices is None or link.measured is None:
            return None
        size = blocks * self.prices.block_bytes
        return max(link.seconds(size), link.latency + size * link.measured)

    def swap_out(self, step: int, num_tokens: int, now: float) -> tuple[BlockCopy, ...]:
        """Begin to swap out chunks in plan `step`, the lowest value first, as many as needed. Returns the copies to do.

        The copies read the device before the plan's segments run, and slow them down. So a plan of `num_tokens` makes
        room for about as many positions as it fills, or an eighth of what is short if that is more. Only blocks that
        `fits` asked for in vain are copied at once. Blocks are pinned until `finish_swap_out`. After `flush(True)` a
        plan copies as many as it may.
        """
        host, idle = self.host, self._idle
        if host is None:
            return ()
        most = self._copies_for_others if num_tokens else self.max_copies
        asked = self._copy_wanted(step, now, most) if self.copies.wanted else ()
        ready, short = self.allocatable + self.copies.idle, self._short()
        ahead = min(short, max(self._copies_ahead, self.blocks_for(num_tokens), short // 8))
        wanted = self.max_copies if self._flushing else min(max(self._demand - ready, ahead), self.max_copies)
        self._demand = 0
        if wanted <= 0 or not idle.retained.blocks:
            return asked
        copies: list[BlockCopy] = []
        last_use: dict[int, Use] = {}
        victims, host_victims = idle.retained.victims(now), host.victims(now)
        while wanted > 0 and (chunk := victims.pop()) is not None:
            wanted -= len(chunk.blocks)
            for block in chunk.blocks:
                digest, target = self._digests[block], None
                assert digest is not None
                if host.find(digest) is None:
                    value = chunk.value if self.kept_below is None else inf  # lower tiers keep what the host evicts
                    target, evicted = host.reserve(value, host_victims)
                    self.evicted_from_host(evicted)
                if target is None:
                    idle.reclaimable[block] = None
                else:
                    copies.append(BlockCopy(block, target))
                    last_use[block] = chunk.use
        self.swapped_out += len(copies)
        self.copies.start_swap_out(copies, last_use, step)
        return (*asked, *copies)

    def _short(self) -> int:
        """Number of allocatable blocks that lack up to the low-water mark; negative if there are more."""
        return self._low_water * (self.num_blocks - self.lent) // self.num_blocks - self.allocatable - self.copies.idle

    def want_on_host(self, digests: Iterable[bytes]) -> None:
        """Ask for copies on the host of the device blocks with these digests. The next plans begin them.

        Call it between plans: a plan must not copy blocks that it computes. `coming_to_host` reports which copies are
        still to come. A copy does not come if the host is too full, or if the block is evicted first.
        """
        host = self.host
        if host is not None:
            missing = [digest for digest in digests if digest in self._cached and host.find(digest) is None]
            self.copies.wanted.update(dict.fromkeys(missing))

    def coming_to_host(self, digest: bytes) -> bool:
        """Whether a copy of the block with this digest is asked for or under way. It may still fail to come."""
        return digest in self.copies.wanted or self._cached.get(digest) in self.copies.swapping_out

    def _copy_wanted(self, step: int, now: float, most: int) -> tuple[BlockCopy, ...]:
        """Begin at most `most` of the copies asked for, valued as if in use at `now`."""
        host, wanted, swapping_out = self.host, self.copies.wanted, self.copies.swapping_out
        assert host is not None
        room, arriving, victims = most - len(swapping_out), self.copies.under_way, host.victims(now)
        copies: list[BlockCopy] = []
        last_use: dict[int, Use] = {}
        owned = 0
        while room > len(copies) and wanted:
            digest = next(iter(wanted))
            del wanted[digest]
            block = self._cached.get(digest)
            if block is None or block in arriving or block in last_use or host.find(digest) is not None:
                continue
            target = self.reserve_on_host(self._index.indices[block], now, victims)
            if target is None:
                wanted.clear()
                break
            copies.append(BlockCopy(block, target))
            if self._owners[block]:
                owned += 1
                last_use[block] = now, self.uses
            elif block in self._idle.reclaimable:
                del self._idle.reclaimable[block]
                last_use[block] = now, self.uses
            else:
                last_use[block] = self._idle.retained.take(block)
        self.swapped_out += len(copies)
        self.copies.start_swap_out(copies, last_use, step, owned)
        return tuple(copies)

    def shortage(self, found: Found, length: int, reserved: int) -> str:
        """Why a waiting sequence may not start: see `SequenceMemory.shortage`."""
        needed = self.needed(found, length)
        if needed > self.available - reserved:
            return "no blocks"
        return "copies under way" if needed > self.allocatable else ""

    def stats(self) -> Mapping[str, int]:
        """The fields of SchedulerStats that say how full both tiers are, and what moved between them."""
        host = self.host
        tier = {} if host is None else {
            "host_blocks_total": host.num_blocks,
            "host_blocks_ready": host.ready,
            "host_blocks_cached": host.cached,
            "host_blocks_dropped": host.dropped,
        }  # fmt: skip
        return {
            "blocks_total": self.num_blocks,
            "blocks_used": self.used,
            "blocks_cached": self.cached,
            "blocks_swapped_in": self.swapped_in,
            "blocks_swapped_out": self.swapped_out,
            "tokens_dropped": self.dropped * self.block_size,
            **self.ahead.stats(),
            **tier,
        }

    def copied(self, copied: TierCopied) -> None:
        """Finish the copies that are complete, and learn from the time that those from the host took."""
        self.finish_swap_out(copied.swapped_out)
        self.copies.finish_swap_in(copied.swapped_in)
        for copy in copied.times:
            if copy.inward:
                self.host_link.observe(copy.bytes, copy.seconds)

    def finish_swap_out(self, step: int) -> None:
        """Finish the copies to the host that plan `step` and earlier plans began."""
        host = self.host
        if host is None:
            return
        for (block, target), use in self.copies.finish_swap_out(step):
            digest = self._digests[block]
            assert digest is not None
            in_use = self._owners[block] > 0
            if host.find(digest) is not None:  # the state came from elsewhere meanwhile
                host.free(target)
            else:
                host.cache_block(target, digest, self._index.indices[block], None if in_use else use)
            if not in_use:
                self.copies.idle -= 1
                self._idle.reclaimable[block] = None
