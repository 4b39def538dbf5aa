"""TurnQueue: idle blocks by the worth of the turns that they belong to, and those of the lowest value first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf

from holdfast.lm.memory.gaps import BINS, EDGES, Kind, bin_of
from holdfast.lm.memory.parked import Parked, stays_above
from holdfast.lm.memory.prefix_index import PrefixIndex
from holdfast.lm.memory.retention import UNTRACKED, Chunk, RetentionRule, Turns, Use
from holdfast.lm.memory.turns import APPRAISALS, NOTHING, Turn, TurnTracker, Worths

TICK = 0.01
"""Least time in seconds after which a group's bucket is looked at again."""
SHARES_CHECKED = 1.0
"""Seconds after which it is checked again whether tenants keep more than their shares."""
MARGIN = 1.5
"""Groups are looked at whose value is at most this many times the highest that was given up lately."""
SHARE_LOOKED_AT, SAMPLE = 8, 512
"""When more must be given up, one of SHARE_LOOKED_AT parked groups is looked at, too: the lowest by a sample."""
LEVEL_KEPT = 10.0
"""Seconds after which the level up to which groups are looked at may fall."""


Entry = tuple[float, Use, int, "Group", float]
"""A group's place in a bucket: its weight, last use, a number, the group, and a scale. The lowest goes first.

The scale is that of the forecast by which the group has its place, and the weight is the cost of the group's cheapest
chunk over the scale. The number orders entries that are equal otherwise.
"""


class Group:
    """The idle blocks that were last used together: those of one turn."""

    def __init__(self, use: Use, turn: Turn) -> None:
        self.use = use
        self.turn = turn
        self.is_released = False
        """Whether its blocks are no longer kept for the client, because the tenant kept more than its share."""
        self.blocks: dict[int, int] = {}
        """Chunk of each block."""
        self._added: dict[int, list[int]] = {}
        """Blocks that were added, by chunk. Some may have been removed since."""
        self._order: list[tuple[float, int, int]] = []
        """Heap of the chunks by cost and rank. Some may have no block left."""
        self._is_whole = True
        """Whether no block was removed of a chunk that is here."""
        self._cost: float | None = None
        """Cost of the chunk that goes first; None: it has to be looked up."""

    def learn(self, turn: Turn) -> None:
        """More is known of the turn. It is of the same tenant."""
        self.turn = turn

    def release(self) -> None:
        """No longer keep its blocks for the client."""
        self.is_released = True

    @property
    def kept_until(self) -> float:
        """Time until which its blocks are kept for the client; minus infinity if they are not."""
        pause = self.turn.pause
        return -inf if pause.keep_until is None or self.is_released or pause.superseded else pause.keep_until

    def add(self, block: int, chunk: int, cost: float, rank: int) -> bool:
        """Add a block of a chunk with this cost and rank. Returns whether the chunk is now the first of the group."""
        self.blocks[block] = chunk
        if (added := self._added.get(chunk)) is not None:
            added.append(block)
            return False
        self._added[chunk] = [block]
        heappush(self._order, (cost, rank, chunk))
        if self._order[0][2] != chunk:
            return False
        self._cost = cost
        return True

    def discard(self, block: int) -> bool:
        """Remove a block. Returns whether any is left."""
        del self.blocks[block]
        self._cost, self._is_whole = None, False
        return bool(self.blocks)

    def cost(self) -> float:
        """Cost of the chunk that goes first. The group must not be empty."""
        if self._cost is None:
            self._cost = self._look_up()
        return self._cost

    def _look_up(self) -> float:
        """The cost of the first chunk that has a block left. Chunks without one are forgotten."""
        here = self.blocks
        while True:
            cost, _, chunk = self._order[0]
            if self._is_whole:
                return cost
            for block in self._added[chunk]:
                if here.get(block) == chunk:
                    return cost
            heappop(self._order)
            del self._added[chunk]

    def pop(self) -> list[int]:
        """Remove the chunk that goes first, as `cost` has found it. Returns its blocks."""
        here = self.blocks
        _, _, chunk = heappop(self._order)
        blocks = self._added.pop(chunk)
        if not self._is_whole:
            blocks = [block for block in dict.fromkeys(blocks) if here.get(block) == chunk]
        for block in blocks:
            del here[block]
        self._cost = None
        return blocks


class Bucket:
    """Groups of which a unit of cost is worth the same. Entries of groups that have changed stay until they come up."""

    def __init__(self, worths: Worths, at: int) -> None:
        self._worths, self._at = worths, at
        self.entries: dict[Use, Entry] = {}
        """The valid entry of each group."""
        self._heap: list[Entry] = []

    @property
    def level(self) -> float:
        """Value of a unit of weight."""
        return self._worths.worths[self._at]

    def push(self, entry: Entry) -> None:
        """Add the entry of a group, or a newer one in place of the one it has. O(log n) amortised."""
        self.entries[entry[1]] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self.entries) + 64:
            self._heap = [*self.entries.values()]
            heapify(self._heap)

    def renew(self, group: Group) -> Entry | None:
        """The lowest entry after the first chunk of the lowest entry's group was removed, or None if there is none."""
        entries, heap = self.entries, self._heap
        if not group.blocks:
            heappop(heap)
            return self.first()
        _, use, number, _, scale = heap[0]
        entries[use] = entry = group.cost() / scale, use, number, group, scale
        heapreplace(heap, entry)
        return entry if heap[0] is entry else self.first()

    def first(self) -> Entry | None:
        """The lowest entry, or None if there is none. An entry may be lower than its group, and is then renewed."""
        heap, entries = self._heap, self.entries
        while heap:
            entry = heap[0]
            before, use, number, group, scale = entry
            if entries.get(use) is not entry:
                heappop(heap)
            elif (weight := group.cost() / scale) > before:
                entries[use] = renewed = weight, use, number, group, scale
                heapreplace(heap, renewed)
            else:
                return entry
        return None


Head = tuple[float, Use, int, float, Bucket, Group]
"""Value of a bucket's first chunk, its last use, a number, the bucket's level, the bucket, and the chunk's group."""


class KeptBucket(Bucket):
    """Groups that a client wants kept: they go after all others."""

    def __init__(self) -> None:
        super().__init__(NOTHING.source, 0)

    @property
    def level(self) -> float:
        """More than any value."""
        return inf

    def latest_first(self) -> list[Group]:
        """Its groups, first the one to be kept for longest."""
        groups = [entry[3] for entry in self.entries.values()]
        return sorted(groups, key=lambda group: -group.kept_until)


class TurnQueue:
    """Idle blocks by value: the cost of computing a chunk again, times the worth of holding its turn's state.

    The worth depends on the kind of the pause and on its age (`Rates.worth`). Both are equal for all blocks that were
    last used together, so these are a group, in which the chunk of least cost goes first. Groups of one kind and one
    bin of ages have a bucket, in which the group of least cost goes first. A group changes its bucket when its age
    passes into the next bin. That is looked up when victims are asked for, so it costs O(log n) for each group and bin,
    whatever its number of blocks.

    Most groups are worth much more than what is given up. Groups of more than MARGIN times that value are parked: they
    have no bucket, and nobody looks at them until their age may bring their value down to that level. The order is the
    same as if all groups had buckets. Parked groups are looked at before only if more must be given up than there are
    groups below the level, or if what is known of a kind has changed much.

    State that a client wants kept goes last, as far as its tenant keeps no more than an equal share of this tier.
    """

    def __init__(self, rule: RetentionRule, tracker: TurnTracker, capacity: int) -> None:
        """`capacity` is the number of blocks of the tier."""
        self._rule, self._tracker, self._capacity = rule, tracker, capacity
        self.blocks: dict[int, Group] = {}
        """Group of each block."""
        self._groups: dict[Use, Group] = {}
        self._calls: dict[int, Use] = {}
        """Last use of the groups, by the number of the call."""
        self._buckets: dict[tuple[Worths, int], Bucket] = {}
        self._kept: dict[str, KeptBucket] = {}
        """Groups that clients want kept, by tenant."""
        self._parked: dict[tuple[Kind, Worths], Parked] = {}
        """Groups whose value is above `level`."""
        self.level = 0.0
        """Value above which groups are parked."""
        self._highest, self._check_level = 0.0, -inf
        """Highest value that was given up since the level was checked, and the time to check it again."""
        self._places: dict[Use, tuple[Bucket | Parked, float]] = {}
        """The place of each group, and the time at which it leaves it."""
        self._due: list[tuple[float, Use]] = []
        self._tenants: Counter[str] = Counter()
        """Number of groups of each tenant."""
        self._check_shares = -inf
        self._numbers = count()
        self._chunks: dict[int, tuple[float, int]] = {}
        """Cost and rank among the chunks freed together, by chunk index in a sequence."""
        self._now = -inf
        """Latest time of which anything is known."""
        tracker.watch(self)

    # Blocks come and go.

    def add_all(self, blocks: Iterable[int], indices: Iterable[int], use: Use) -> None:
        """Add blocks that were last used together. `indices` are their places in their sequence, 0 for the first."""
        size, at, here, chunks, group, is_first = self._rule.chunk_blocks, -1, self.blocks, self._chunks, None, False
        for block, index in zip(blocks, indices, strict=True):
            if group is None:
                group = self._group(use)
            if index // size != at:
                at = index // size
                cost, rank = chunks.get(at) or self._classify(at)
            here[block] = group
            is_first |= group.add(block, at, cost, rank)
        if group is not None and (is_first or use not in self._places):
            self._place(group, max(self._now, use[0]))

    def _group(self, use: Use) -> Group:
        group = self._groups.get(use)
        if group is None:
            group = self._groups[use] = Group(use, self._tracker.turn(*use))
            self._calls[use[1]] = use
            self._tenants[group.turn.tenant] += 1
        return group

    def _classify(self, chunk: int) -> tuple[float, int]:
        rule = self._rule
        cost = rule.class_cost(rule.cost_class(chunk * rule.chunk_blocks))
        found = self._chunks[chunk] = cost, -chunk if rule.eviction.trailing_first else chunk
        return found

    def among(self, start: int, stop: int, index: PrefixIndex) -> list[tuple[Use, int, bytes]]:
        """For each idle block in [start, stop): its last use, its place in its sequence, and its digest."""
        found = []
        for block in range(start, stop):
            if (group := self.blocks.get(block)) is not None and (digest := index.digests[block]) is not None:
                found.append((group.use, index.indices[block], digest))
        return found

    def renew(self, block: int, use: Use) -> None:
        """Count a block as used again."""
        chunk = self.blocks[block].blocks[block]
        self.take(block)
        self.add_all((block,), (chunk * self._rule.chunk_blocks,), use)

    def last_use(self, block: int) -> Use | None:
        """Return the last use of a block; None if `blocks` does not contain the block."""
        group = self.blocks.get(block)
        return None if group is None else group.use

    def take(self, block: int) -> Use:
        """Remove a block. Returns its last use."""
        group = self.blocks.pop(block)
        if not group.discard(block):
            self._end(group)
        return group.use

    def move(self, block: int, target: int) -> None:
        """Move the entry of a block to block `target`. Its value stays."""
        use, chunk = self.blocks[block].use, self.blocks[block].blocks[block]
        self.take(block)
        self.add_all((target,), (chunk * self._rule.chunk_blocks,), use)

    def remove(self, blocks: Sequence[int]) -> list[int]:
        """Remove those of these blocks that are here. Returns the others."""
        others, here = list[int](), self.blocks
        for block in blocks:
            group = here.pop(block, None)
            if group is None:
                others.append(block)
                continue
            if not group.discard(block):
                self._end(group)
        return others

    def _end(self, group: Group) -> None:
        """Forget a group that has no block left."""
        use = group.use
        bucket, _ = self._places.pop(use)
        del bucket.entries[use]
        del self._groups[use]
        if self._calls.get(use[1]) == use:
            del self._calls[use[1]]
        self._tenants[group.turn.tenant] -= 1
        if not self._tenants[group.turn.tenant]:
            del self._tenants[group.turn.tenant]

    # Groups by value.

    def turn_changed(self, call: int) -> None:
        """Place the blocks that this call freed again, because more is known of their turn (`Watcher`)."""
        use, size = self._calls.get(call), self._rule.chunk_blocks
        if use is None:
            return
        group, turn = self._groups[use], self._tracker.turn(*use)
        group.learn(turn)
        shared = turn.shared if turn.pause.superseded else 0
        blocks = [block for block, chunk in group.blocks.items() if chunk * size < shared]
        indices = [group.blocks[block] * size for block in blocks]
        self.remove(blocks)
        self.add_all(blocks, indices, (use[0], -call))
        if group.blocks:
            self._place(group, max(self._now, use[0]))

    def _place(self, group: Group, now: float) -> None:
        """Put a group into the bucket that it has at `now`, or park it."""
        use = group.use
        old = self._places.get(use)
        if old is not None:
            old[0].entries.pop(use, None)
        if (until := group.kept_until) > now:
            bucket: Bucket = self._kept.setdefault(group.turn.tenant, KeptBucket())
            scale, due = 1.0, until
        else:
            source, scale = NOTHING if use[0] == -inf else self._tracker.forecast(group.turn)
            at = bin_of((now - use[0]) / scale) if source is not NOTHING.source else 0
            end = stays_above(source.worths, at, self.level * scale / group.cost())
            if end > at:
                self._park(group, source, scale, inf if end == BINS else use[0] + EDGES[end] * scale)
                return
            bucket = self._bucket(source, at)
            lasts = source is NOTHING.source or at + 1 == BINS
            due = inf if lasts else max(use[0] + EDGES[at + 1] * scale, now + TICK)
        bucket.push((group.cost() / scale, use, next(self._numbers), group, scale))
        self._stay(use, bucket, due)

    def _bucket(self, source: Worths, at: int) -> Bucket:
        key = source, at
        if (bucket := self._buckets.get(key)) is None:
            bucket = self._buckets[key] = Bucket(source, at)
        return bucket

    def _park(self, group: Group, source: Worths, scale: float, due: float) -> None:
        """Park a group until a time."""
        key = group.turn.kind, source
        if (parked := self._parked.get(key)) is None:
            parked = self._parked[key] = Parked(*key)
        parked.add(group.use, scale)
        self._stay(group.use, parked, due)

    def _stay(self, use: Use, place: Bucket | Parked, due: float) -> None:
        """Note the place of a group, and the time at which it leaves it."""
        self._places[use] = place, due
        if due < inf:
            heappush(self._due, (due, use))
        if len(self._due) > 2 * len(self._places) + 64:
            self._due = [(due, use) for use, (_, due) in self._places.items() if due < inf]
            heapify(self._due)

    def _settle(self, now: float) -> None:
        """Put each group into the bucket that it has at `now`, unless it is parked."""
        self._now = now
        if now >= self._check_level:
            self._lower_level(now)
        for key in [key for key, parked in self._parked.items() if not parked.entries or self._is_broken(parked)]:
            for use in [*self._parked.pop(key).entries]:
                self._place(self._groups[use], now)
        while self._due and self._due[0][0] <= now:
            due, use = heappop(self._due)
            if self._places.get(use, (None, inf))[1] == due:
                self._place(self._groups[use], now)
        if now >= self._check_shares:
            self._check_shares = now + SHARES_CHECKED
            for bucket in [*self._kept.values()]:
                self._release(bucket, now)

    def _is_broken(self, parked: Parked) -> bool:
        """Whether parked groups may be worth no more than the level. No worth is ever below 0, whatever is learned."""
        return self.level > 0.0 and not parked.holds

    def _lower_level(self, now: float) -> None:
        """Park more groups from now on, if less was given up lately. Nothing was: the level stays."""
        if self._highest > 0.0:
            self.level = min(self.level, MARGIN * self._highest)
        self._highest, self._check_level = 0.0, now + LEVEL_KEPT

    def look_at_more(self) -> bool:
        """Raise the level, as all groups below it are given up. Returns whether any was parked."""
        uses = [use for parked in self._parked.values() for use in parked.entries]
        if not uses:
            return False
        values = sorted(self._value(self._groups[use]) for use in uses[:: 1 + len(uses) // SAMPLE])
        self.level = max(MARGIN * self.level, values[len(values) // SHARE_LOOKED_AT])
        for use in [use for parked in self._parked.values() for use in self._park_again(parked)]:
            self._place(self._groups[use], self._now)
        heapify(self._due)
        return True

    def _park_again(self, parked: Parked) -> list[Use]:
        """Note until when groups stay parked by the level as it is now. Returns the last uses of those that do not."""
        if not parked.begin_again():
            return [*parked.entries]
        leaving, worths, groups, places = list[Use](), parked.worths, self._groups, self._places
        for use, scale in parked.entries.items():
            at = bin_of((self._now - use[0]) / scale)
            end = stays_above(worths, at, self.level * scale / groups[use].cost())
            if end == at:
                leaving.append(use)
                continue
            due = inf if end == BINS else use[0] + EDGES[end] * scale
            places[use] = parked, due
            if due < inf:
                self._due.append((due, use))
        return leaving

    def _value(self, group: Group) -> float:
        """Value of the first chunk of a group that nobody wants kept."""
        return group.cost() * self._tracker.forecast(group.turn).worth(self._now - group.use[0])

    def _release(self, bucket: KeptBucket, now: float) -> None:
        """No longer keep what a tenant has kept beyond its share, first what it wants kept for longest."""
        most = self._capacity // max(1, len(self._tenants))
        excess = sum(len(group.blocks) for group in bucket.latest_first()) - most
        for group in bucket.latest_first() if excess > 0 else ():
            if excess <= 0:
                break
            excess -= len(group.blocks)
            group.release()
            self._place(group, now)

    def victims(self, now: float) -> TurnVictims:
        """All chunks, the lowest value first. Until the last is popped, nothing else may add or remove blocks."""
        self._settle(now)
        for key in [key for key, bucket in self._buckets.items() if not bucket.entries]:
            del self._buckets[key]
        for tenant in [tenant for tenant, bucket in self._kept.items() if not bucket.entries]:
            del self._kept[tenant]
        return TurnVictims(self)

    def buckets(self) -> Iterator[Bucket]:
        """All groups that are not parked."""
        yield from self._buckets.values()
        yield from self._kept.values()

    def pop(self, group: Group, value: float) -> list[int]:
        """Remove the first chunk of a group, which has this value. Returns its blocks."""
        if self._highest < value < inf:
            self._highest = value
        blocks = group.pop()
        for block in blocks:
            del self.blocks[block]
        if not group.blocks:
            self._end(group)
        return blocks


class TurnVictims:
    """Evicts chunks by ascending value. O(buckets) to begin with, O(log n) for each chunk."""

    def __init__(self, queue: TurnQueue) -> None:
        self._queue = queue
        self._numbers = count()
        self._heads: list[Head] = []
        self._begin()

    def _begin(self) -> None:
        self._heads.clear()
        for bucket in self._queue.buckets():
            if (entry := bucket.first()) is not None:
                self._heads.append(self._head(entry, bucket.level, bucket))
        heapify(self._heads)

    def _head(self, entry: Entry, level: float, bucket: Bucket) -> Head:
        weight, use, _, group, _ = entry
        return level * weight, use, next(self._numbers), level, bucket, group

    def pop(self, below: float = inf) -> Chunk | None:
        """Remove the chunk of the lowest value. Returns None if there is none, or if its value is not `below` this."""
        queue, heads = self._queue, self._heads
        while not heads or heads[0][0] > queue.level:  # a parked group may be of a lower value
            if below <= queue.level or not queue.look_at_more():
                break
            self._begin()
        if not heads or (heads[0][0] >= below and below < inf):
            return None
        value, use, _, level, bucket, group = heads[0]
        chunk = Chunk(value, queue.pop(group, value), use)
        entry = bucket.renew(group)
        if entry is None:
            heappop(heads)
        else:
            heapreplace(heads, self._head(entry, level, bucket))
        return chunk


class RankedTurns(TurnTracker):
    """Turns by which idle blocks are ordered."""

    def order(self, rule: RetentionRule, capacity: int) -> TurnQueue:
        """An order of the idle blocks of a tier with `capacity` blocks."""
        return TurnQueue(rule, self, capacity)


def make_turns(eviction: str) -> Turns:
    """The knowledge of turns by which the eviction of this name goes."""
    return RankedTurns(APPRAISALS[eviction]) if eviction in APPRAISALS else UNTRACKED
