"""BlockPool: who owns each block of the KV cache, which idle ones still hold state, and when they go to the host."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence

from holdfast.lm.memory.digests import Chains
from holdfast.lm.memory.host_pool import HostPool
from holdfast.lm.memory.retention import Retention, RetentionRule, Victims
from holdfast.lm.types import BlockCopy


class BlockPool:
    """The blocks 0 to `num_blocks - 1` of the device, and the host tier behind; every operation is O(1) a block.

    A block is free, owned (by one sequence; by several once it is sealed), or idle: sealed, and nobody's.

        free ──take──▶ owned ──release──▶ free, or if it is sealed:
          ▲              ▲                kept ──relieve──▶ leaving ──landed──▶ reclaimable ──take──▶ free
          │              │                  │                  │                     │
          │              └───── share ──────┴──────────────────┴─────────────────────┘
          └── take, in order of value, where there is no host tier

    A sealed block is full and never written again, and is found by the SHA-256 digest of its contents and of all that
    came before them, wherever it is. With a host tier a block leaves the device in two steps (Pensieve §4.3.2): ahead
    of need, when few blocks are free, its contents are copied while it stays where it is, and is pinned; once they have
    landed, it is reclaimable: still found and shared again, until somebody takes it. What is not worth a place on the
    host is reclaimable at once. Raises RuntimeError when it is asked for what would break these states.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        rule: RetentionRule | None = None,
        host_blocks: int = 0,
        low_water: float = 0.25,
    ) -> None:
        """Below the share `low_water` of blocks that can be had at once, swapping out begins."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens; both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.rule = rule or RetentionRule(block_size=block_size)
        self.host = HostPool(host_blocks, self.rule) if host_blocks else None
        self.chains = Chains(block_size, 2 * (num_blocks + host_blocks))
        self.now = 0.0
        """Time of what happens next, in seconds; the scheduler's to set."""
        self.swapped_in = 0
        self.swapped_out = 0
        """Blocks copied so far."""
        self.dropped = 0
        """Blocks whose state was given up so far: neither tier has it any more."""
        self._owners = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._indices = [0] * num_blocks
        self._last: list[tuple[float, int]] = [(0.0, 0)] * num_blocks
        self._sealed: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept = Retention(self.rule)
        self._swapping_out: dict[int, int] = {}
        self._swapping_out_idle = 0
        self._reclaimable: OrderedDict[int, None] = OrderedDict()
        self._copies: deque[tuple[int, tuple[BlockCopy, ...]]] = deque()
        self._swapping_in: dict[int, int] = {}
        """Blocks that copies from the host are under way to and that no plan awaits yet, with their plan's number."""
        self._releases = 0
        self._low_water = max(1, int(num_blocks * low_water))
        self._demand = 0
        self.max_copies = max(self.rule.chunk_blocks, num_blocks // 16)
        """The most blocks that one plan copies in either direction, unless a single sequence brings in more."""

    @property
    def available(self) -> int:
        """Blocks that can be taken, now or once they were copied: all but those in use and those being copied."""
        return len(self._free) + len(self._reclaimable) + len(self._kept)

    @property
    def allocatable(self) -> int:
        """Blocks that can be taken now."""
        ready = len(self._free) + len(self._reclaimable)
        return ready if self.host is not None else ready + len(self._kept)

    @property
    def swapping_out(self) -> bool:
        """Whether copies to the host are under way."""
        return bool(self._swapping_out)

    @property
    def can_swap_out(self) -> bool:
        """Whether more blocks become ready without anybody losing any: copies are under way, or can begin."""
        return self.host is not None and bool(self._swapping_out_idle or self._kept)

    @property
    def cached(self) -> int:
        """Unowned blocks that still hold reusable state."""
        return len(self._kept) + self._swapping_out_idle + len(self._reclaimable)

    @property
    def used(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - len(self._free) - self.cached

    def blocks_for(self, positions: int) -> int:
        """Blocks that hold this many positions."""
        return -(-positions // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Give `count` blocks to one owner; free ones first, then the idle ones of the lowest value are given up."""
        free = self._free
        if count > len(free):
            self._reclaim(count - len(free))
        taken = free[: -count - 1 : -1]
        del free[len(free) - count :]
        for block in taken:
            self._owners[block] = 1
        return taken

    def find(self, digest: bytes) -> int | None:
        """The sealed block with this digest on the device, owned or not."""
        return self._sealed.get(digest)

    def find_all(self, digests: Iterable[bytes]) -> list[int | None]:
        """`find` for each."""
        return list(map(self._sealed.get, digests))

    def find_on_host(self, digest: bytes) -> int | None:
        """The place of the block with this digest on the host."""
        return self.host.find(digest) if self.host is not None else None

    def pinned_by(self, blocks: Iterable[int]) -> int:
        """How many of these sealed blocks sharing makes unavailable that were available."""
        owners, leaving = self._owners, self._swapping_out
        idle = [block for block in blocks if not owners[block]]
        return len(idle) - sum(map(leaving.__contains__, idle)) if leaving else len(idle)

    def fits(self, fresh: int, shared: Iterable[int]) -> bool:
        """Whether `fresh` blocks are ready beside those to be shared. If not, the next `relieve` sees to it."""
        if self.host is None:
            return True
        needed = fresh + sum(map(self._reclaimable.__contains__, shared))
        if needed > self.allocatable:
            self._demand = max(self._demand, needed)
        return needed <= self.allocatable

    def share(self, blocks: Collection[int]) -> None:
        """Add an owner to each of these sealed blocks, no block twice."""
        owners, digests = self._owners, self._digests
        if not all(map(digests.__getitem__, blocks)):
            unsealed = next(block for block in blocks if digests[block] is None)
            raise RuntimeError(f"block {unsealed} is shared, but it is not sealed")
        idle = [block for block in blocks if not owners[block]]
        for block in blocks:
            owners[block] += 1
        if self.host is not None:
            self.host.hold_all([digest for block in idle if (digest := digests[block])])
        for block in self._kept.discard_all(idle):
            if block in self._swapping_out:
                self._swapping_out_idle -= 1
            else:
                del self._reclaimable[block]

    def cache_block(self, block: int, digest: bytes, index: int) -> None:
        """Make an owned, full block sharable, the `index`-th of its sequence. The first block of a digest stays so."""
        if not self._owners[block]:
            raise RuntimeError(f"block {block} is sealed, but nobody owns it")
        if digest not in self._sealed:
            if self._digests[block] is not None:
                raise RuntimeError(f"block {block} is sealed twice, with different contents")
            self._sealed[digest] = block
            self._digests[block] = digest
            self._indices[block] = index
            if self.host is not None:
                self.host.hold(digest)

    def swap_in(self, block: int, digest: bytes, index: int) -> BlockCopy:
        """Seal an owned block that the plan in the making fills from the host; the copy to do."""
        assert self.host is not None
        place = self.host.find(digest)
        if place is None:
            raise RuntimeError(f"block {block} is to be filled from the host, which does not have its contents")
        self.cache_block(block, digest, index)
        self.swapped_in += 1
        return BlockCopy(place, block)

    def free(self, blocks: Iterable[int]) -> None:
        """Take one owner from each block. Sealed ones without any are idle from now on, earlier ones a bit longer."""
        self._releases += 1
        owned, digests, last, used = self._owners, self._digests, self._last, (self.now, self._releases)
        idle: list[int] = []
        for block in blocks:
            owners = owned[block] - 1
            if owners < 0:
                raise RuntimeError(f"block {block} is released, but nobody owns it")
            owned[block] = owners
            if not owners:
                if digests[block] is None:
                    self._free.append(block)
                else:
                    last[block] = used
                    idle.append(block)
        if self._swapping_out:
            staying = [block for block in idle if block not in self._swapping_out]
            self._swapping_out_idle += len(idle) - len(staying)
            idle = staying
        self._kept.add_all(idle, map(self._indices.__getitem__, idle), *used)
        if self.host is not None:
            self.host.rest_all([digest for block in idle if (digest := digests[block])], *used)

    def touch(self, blocks: Iterable[int], digests: Iterable[bytes]) -> None:
        """Count idle blocks on the device, and those of these digests on the host, as used now."""
        self._releases += 1
        for block in blocks:
            digest = self._digests[block]
            assert digest is not None
            if not self._owners[block]:
                self._last[block] = self.now, self._releases
                if block in self._kept:
                    self._kept.renew(block, self.now, self._releases)
                elif block in self._reclaimable:
                    self._reclaimable.move_to_end(block)
                if self.host is not None:
                    self.host.touch(digest, self.now, self._releases)
        if self.host is not None:
            for digest in digests:
                self.host.touch(digest, self.now, self._releases)

    def swap_out(self, step: int) -> tuple[BlockCopy, ...]:
        """Begin to swap out the chunks of the lowest value, as far as more blocks should be ready; for plan `step`.

        The copies read the device as it is before the plan's segments run, and their blocks stay as they are until
        `landed` says that they are done.
        """
        host = self.host
        if host is None:
            return ()
        demand, self._demand = max(self._low_water, self._demand), 0
        wanted = min(demand - self.allocatable - self._swapping_out_idle, self.max_copies)
        if wanted <= 0 or not self._kept:
            return ()
        copies: list[BlockCopy] = []
        victims, theirs = self._kept.victims(self.now), host.victims(self.now)
        while wanted > 0 and (chunk := victims.take()) is not None:
            value, blocks = chunk
            wanted -= len(blocks)
            for block in blocks:
                digest = self._digests[block]
                assert digest is not None
                place = None if host.find(digest) is not None else self._place_for(value, theirs)
                if place is None:
                    self._reclaimable[block] = None
                else:
                    self._swapping_out[block] = place
                    copies.append(BlockCopy(block, place))
        self._swapping_out_idle += len(copies)
        self.swapped_out += len(copies)
        if copies:
            self._copies.append((step, tuple(copies)))
        return tuple(copies)

    def _place_for(self, value: float, victims: Victims) -> int | None:
        """A place on the host for a block of this value, in which others may have been given up."""
        assert self.host is not None
        place, lost = self.host.reserve(value, victims)
        self.dropped += sum(digest not in self._sealed for digest in lost)
        return place

    def finish_swap_out(self, step: int) -> None:
        """The copies to the host that plan `step` and those before it began are complete."""
        while self._copies and self._copies[0][0] <= step:
            for block, place in self._copies.popleft()[1]:
                digest, host = self._digests[block], self.host
                assert digest is not None and host is not None
                del self._swapping_out[block]
                host.arrived(place, digest, self._indices[block])
                if not self._owners[block]:
                    self._swapping_out_idle -= 1
                    self._reclaimable[block] = None
                    host.rest(digest, *self._last[block])

    def start_swap_in(self, blocks: Iterable[int], step: int) -> None:
        """What `bring` fills in these blocks comes beside plan `step`, which does not wait for it."""
        self._swapping_in.update(dict.fromkeys(blocks, step))

    def swap_in_step(self, blocks: Iterable[int]) -> int:
        """The plan whose copies must be complete before these blocks are read; -1 if all are there."""
        arriving = self._swapping_in
        return max((arriving.get(block, -1) for block in blocks), default=-1) if arriving else -1

    def finish_swap_in(self, step: int) -> None:
        """The copies from the host that plan `step` and those before it began are complete, or will be awaited."""
        if self._swapping_in:
            self._swapping_in = {block: number for block, number in self._swapping_in.items() if number > step}

    def _reclaim(self, count: int) -> None:
        """Free `count` idle blocks."""
        if count + len(self._free) > self.allocatable:
            raise RuntimeError(
                f"{count + len(self._free) - self.allocatable} blocks more are asked for than are available"
            )
        if count > len(self._reclaimable):
            # Only without a host tier. More than is needed may be chosen; it is shared again until it is taken.
            wanted = max(count - len(self._reclaimable), self.max_copies)
            victims = self._kept.victims(self.now)
            while wanted > 0 and (chunk := victims.take()) is not None:
                wanted -= len(chunk[1])
                self._reclaimable.update(dict.fromkeys(chunk[1]))
        for _ in range(count):
            block, _ = self._reclaimable.popitem(last=False)
            digest = self._digests[block]
            assert digest is not None
            del self._sealed[digest]
            self.dropped += self.find_on_host(digest) is None
            self._digests[block] = None
            self._free.append(block)

    def check(self, tables: Collection[Sequence[int]]) -> None:
        """Raise RuntimeError unless these block tables, and they alone, account for every block that is used."""
        owners = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise RuntimeError(f"a block stands twice in one table: {table}")
            for block in table:
                owners[block] += 1
        idle_swapping_out = [block for block in self._swapping_out if not self._owners[block]]
        idle = [*self._kept, *idle_swapping_out, *self._reclaimable]
        unowned = {*self._free, *idle}
        if len(unowned) != len(self._free) + len(idle) or len(idle) != self.cached:
            raise RuntimeError("a block is free twice, or free and cached at once")
        for block, count in enumerate(owners):
            if count != self._owners[block]:
                raise RuntimeError(f"block {block} stands in {count} tables, but counts {self._owners[block]} owners")
            if (count == 0) != (block in unowned):
                raise RuntimeError(f"block {block} has {count} owners, and is {'' if count else 'not '}free or cached")
            digest = self._digests[block]
            if count > 1 and digest is None:
                raise RuntimeError(f"block {block} has {count} owners, but was never sealed")
            if digest is not None and self._sealed.get(digest) != block:
                raise RuntimeError(f"block {block} is cached without being found by its digest")
        if any(self._digests[block] is None for block in (*idle, *self._swapping_out)):
            raise RuntimeError("a block is cached or being copied, but was never sealed")
        if len(self._sealed) != sum(digest is not None for digest in self._digests):
            raise RuntimeError("a digest leads to a block that does not bear it")
        if {(b, p) for _, copies in self._copies for b, p in copies} != set(self._swapping_out.items()):
            raise RuntimeError("a block is pinned without a copy under way")
        if self.host is not None:
            self.host.check(self._swapping_out.values())
