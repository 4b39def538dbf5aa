"""StatePool: the snapshots of recurrent states in both tiers, and the copies of states that the next plan does."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.host_slots import HostSlots
from holdfast.lm.memory.lowest_first import LowestFirst, Rank
from holdfast.lm.memory.retention import RetentionRule, Use
from holdfast.lm.memory.snapshots import NO_SLOT, NO_STATES_BELOW, NOTHING_KEPT, Snapshot, StateKey, StatesBelow
from holdfast.lm.memory.wishes import granted
from holdfast.lm.types import COPIES_AHEAD_BYTES, BlockMove, KeptInputs, StateCopy, StatePlan, StateShape


class StatePool:
    """The snapshots of both tiers: which tokens each stands for, and which is given up first. Pure.

    The slots below `rows` hold the states of running sequences, one for each row of the plans. The slots above hold
    snapshots: free + kept + used = total, where used ones are read or written by the next plan.

    A sequence that ends leaves its state in the slot of its row. `save` notes that the next plan copies it to a
    snapshot, before anything else. So the state is right even if the plan gives the row to another sequence. A
    snapshot that is noted can be found at once, as starts come after saves in a plan.

    A snapshot is of use only with the KV blocks of all its tokens, which `pool` holds. A last block that is not full
    is cached under a digest of its own (`StateKey.tail_digest`).

    With slots on the host, a snapshot leaves the device in two steps. Ahead of need, when few slots are free, a plan
    copies the snapshots of the lowest value to the host. Their slots on the device are given up first when a slot is
    needed. A sequence that starts with a snapshot of the host has it copied to its row.

    A plan that verifies a draft leaves the state of the row as it is, because only its result says which tokens count.
    The recurrent layers keep the inputs of these tokens in `places`: free + verifying = all places. The plan after the
    result moves the state on by the accepted tokens, before it saves any state and before its segments run. So a place
    is free once the result is known: what the plan writes there comes later.

    With a tier below the host (`serve_below`), each snapshot whose copy on the host is complete is offered to it. While
    nobody needs the device, `flush` has all snapshots copied that only the device has. A state that comes back gets a
    slot of the host (`reserve_on_host`, `cache_on_host`).

    Another engine may read a snapshot from the host: `want_on_host` has it copied there, and `hold` keeps it there.
    """

    def __init__(
        self, shape: StateShape, rows: int, pool: BlockPool, rule: RetentionRule, *, low_water: float = 0.25
    ) -> None:
        """`rows` is the number of rows of the plans. `rule` ranks the snapshots when a slot is needed.

        Copies to the host begin when the share of slots on the device that can be had at once falls below `low_water`.

        Raises ValueError for fewer than one row, and without snapshots.
        """
        if rows < 1 or shape.snapshots < 1:
            raise ValueError(f"{rows} rows and {shape.snapshots} snapshots of states; each must be at least 1")
        self.total = shape.snapshots
        self.host_total = shape.host_snapshots
        self.places = shape.places
        self.slot_bytes = shape.slot_bytes
        self.rule = rule
        """Ranks the snapshots when a slot is needed."""
        self._copies_ahead = max(1, COPIES_AHEAD_BYTES // shape.slot_bytes)
        self._least_ready = max(1, int(shape.snapshots * low_water))
        self._pool = pool
        self._free = list(range(rows + shape.snapshots - 1, rows - 1, -1))
        self._host = HostSlots(shape.host_snapshots)
        self._alone = LowestFirst(lambda each: each.slot != NO_SLOT and each.host == NO_SLOT, self._rank, self.total)
        """The snapshots that only the device has."""
        self._on_both = LowestFirst(lambda each: each.slot != NO_SLOT and each.host != NO_SLOT, self._rank, self.total)
        self._on_host = LowestFirst(lambda each: each.is_on_host and not each.holds, self._rank, self._host.total)
        self._count = 0
        """Number of snapshots in `_kept`."""
        self._kept: dict[bytes, list[Snapshot]] = {}
        """The snapshots by the parent of their keys."""
        self._saves: list[tuple[int, Snapshot]] = []
        """Rows that the next plan saves, with the snapshots."""
        self._later: list[tuple[int, Snapshot]] = []
        """Rows that the plan after the next one saves, with snapshots that have no slot yet."""
        self._coming: dict[bytes, str] = {}
        """The mapping that `coming` returns."""
        self._starts: dict[int, Snapshot] = {}
        """Snapshots with which the next plan fills rows, by row."""
        self._tails: dict[int, BlockMove] = {}
        """Copies of tails that the next plan does, by row. The pool counts an owner more for each source."""
        self._free_places = list(range(shape.places - 1, -1, -1))
        self._drafts: list[KeptInputs] = []
        """The drafts that the next plan verifies."""
        self._verifying: dict[int, tuple[int, ...]] = {}
        """The places of drafts whose results are to come, by row."""
        self._accepted: dict[int, tuple[int, ...]] = {}
        """The places of the tokens by which the next plan moves states on, by row."""
        self._may_swap_out = False
        """Whether the last plan may have left snapshots to copy to the host."""
        self._wanted: dict[Snapshot, None] = {}
        """Snapshots that others want to have on the host, in order."""
        self._ahead: list[Snapshot] = []
        """Snapshots of the host that the next plan copies to free slots, before any sequence asks for them."""
        self._below = NO_STATES_BELOW
        self._flushing = False
        """Whether the next plan copies snapshots to the host however many slots are free: nobody needs the device."""
        self._kept_for_clients: tuple[float, set[Snapshot]] = -inf, set()
        """The snapshots kept for clients, with the time at which they were chosen."""
        self._uses = 0
        self.saved = 0
        """Number of snapshots made so far."""
        self.dropped = 0
        """Number of snapshots that no tier has any more."""
        self.swapped_out = 0
        """Number of snapshots copied to the host so far."""
        self.swapped_in = 0
        """Number of sequences so far whose state came from the host."""
        self.hits = 0
        """Number of sequences that began with a snapshot so far."""
        self.tokens_found = 0
        """Number of tokens that these sequences did not have to compute."""

    def snapshots(self) -> Iterable[Snapshot]:
        """All snapshots that can be found."""
        return [snapshot for snapshots in self._kept.values() for snapshot in snapshots]

    @property
    def free(self) -> int:
        """Number of slots for snapshots that hold none."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of snapshots on the device that the next plan reads or writes."""
        needed = {*self._starts.values(), *(snapshot for _, snapshot in self._saves)}
        return sum(snapshot.slot != NO_SLOT for snapshot in needed)

    @property
    def kept(self) -> int:
        """Number of snapshots on the device that no copy of the next plan needs."""
        return self.total - self.free - self.used

    def stats(self) -> Mapping[str, int]:
        """The fields of SchedulerStats that say how full the slots are, and what they were good for."""
        return {
            "snapshots_total": self.total,
            "snapshots_used": self.used,
            "snapshots_kept": self.kept,
            "snapshots_saved": self.saved,
            "snapshots_dropped": self.dropped,
            "snapshots_swapped_out": self.swapped_out,
            "snapshots_swapped_in": self.swapped_in,
            "host_snapshots_total": self._host.total,
            "host_snapshots_kept": self._host.kept,
            "snapshot_hits": self.hits,
            "snapshot_tokens": self.tokens_found,
        }

    @property
    def tails(self) -> list[int]:
        """The KV blocks that have an owner more until the next plan has copied them."""
        return [move.source for move in self._tails.values()]

    def find(self, root: bytes, digests: Sequence[bytes], tokens: Sequence[int]) -> Snapshot:
        """The longest snapshot of a prefix of these tokens; NOTHING_KEPT if there is none.

        `digests` are those of the leading full blocks whose KV is kept. The last token never counts: it must be
        computed to give logits.
        """
        for count in range(len(digests), -1, -1):
            here = self._kept.get(digests[count - 1] if count else root, ())
            serving = [snapshot for snapshot in here if self._serves(snapshot.key, tokens)]
            if serving:
                return max(serving, key=lambda snapshot: snapshot.length)
        return NOTHING_KEPT

    def find_anywhere(self, root: bytes, digests: Sequence[bytes], tokens: Sequence[int]) -> StateKey:
        """The key of the longest state of a prefix of these tokens that any tier has, also one below the host.

        `digests` are those of the leading full blocks whose KV any tier has. The last token never counts.
        """
        for count in range(len(digests), -1, -1):
            parent = digests[count - 1] if count else root
            here = [*self._below.keys(parent), *(snapshot.key for snapshot in self._kept.get(parent, ()))]
            serving = [key for key in here if self._begins(key, tokens) and self._has_tail_anywhere(key)]
            if serving:
                return max(serving, key=lambda key: key.length)
        return NOTHING_KEPT.key

    def _serves(self, key: StateKey, tokens: Sequence[int]) -> bool:
        """Whether the tail of a key is that of these tokens, and its block is kept."""
        return self._begins(key, tokens) and (not key.tail or self.has_block(key.tail_digest))

    @staticmethod
    def _begins(key: StateKey, tokens: Sequence[int]) -> bool:
        """Whether the tail of a key is that of these tokens, and a token follows it."""
        return key.length < len(tokens) and key.tail == array("I", tokens[key.length - len(key.tail) : key.length])

    def _has_tail_anywhere(self, key: StateKey) -> bool:
        """Whether any tier has the KV block of a key's tail, if it has a tail."""
        return not key.tail or self.has_block(key.tail_digest) or self._pool.is_below(key.tail_digest)

    def has_block(self, digest: bytes) -> bool:
        """Whether the device or the host has the KV block of this digest."""
        pool = self._pool
        return pool.find_all((digest,)) != [None] or pool.find_on_host(digest) is not None

    def _same(self, key: StateKey) -> list[Snapshot]:
        """The snapshot of the same tokens, if the device or the host has one."""
        return [other for other in self._kept.get(key.parent, ()) if other.key.tail == key.tail]

    def has(self, key: StateKey) -> bool:
        """Whether the device or the host has a snapshot of these tokens."""
        return bool(self._same(key))

    def touch(self, snapshot: Snapshot, now: float) -> None:
        """Count a snapshot as used now."""
        self._uses += 1
        snapshot.used = now, self._uses

    def save(self, row: int, snapshot: Snapshot, now: float) -> bool:
        """Have the next plan save the state of a row, as the plans made so far leave it.

        A snapshot of the same tokens counts as used instead. Returns whether there is one of these tokens now: there is
        none if the next plan needs all slots.
        """
        key = snapshot.key
        same = self._same(key)
        for other in same:
            self.touch(other, now)
        if same or not self._find_room(now):
            return bool(same)
        snapshot.slot = self._free.pop()
        snapshot.pins += 1
        self.touch(snapshot, now)
        if self._length_before(snapshot):
            snapshot.previous.is_continued = True
        self._keep(snapshot)
        self._saves.append((row, snapshot))
        self.saved += 1
        self._may_swap_out = self._host.total > 0
        return True

    def _keep(self, snapshot: Snapshot) -> None:
        """Let a snapshot be found."""
        self._kept.setdefault(snapshot.key.parent, []).append(snapshot)
        self._count += 1

    def announce(self, snapshot: Snapshot, name: str) -> None:
        """Say that the sequence with this id will save this state on the way (`save_after`)."""
        self._coming[snapshot.key.parent] = name

    def withdraw(self, snapshot: Snapshot) -> None:
        """Say that an announced state does not come, because its sequence stops. Does nothing once it has come."""
        self._coming.pop(snapshot.key.parent, None)

    @property
    def coming(self) -> Mapping[bytes, str]:
        """Ids of the sequences that will save a state on the way, by the digest of the last block before it."""
        return self._coming

    def save_after(self, row: int, snapshot: Snapshot) -> None:
        """Have the plan after the next one save the state of a row, as the next one leaves it."""
        self._later.append((row, snapshot))

    def start(self, row: int, snapshot: Snapshot) -> None:
        """Have the next plan fill a row with a snapshot. Other sequences may start with it, too."""
        self._starts[row] = snapshot
        if snapshot is not NOTHING_KEPT:
            snapshot.pins += 1
            snapshot.starts += 1
            if snapshot.slot != NO_SLOT and snapshot.host != NO_SLOT and not (self._host.free or snapshot.holds):
                self._leave_host(snapshot)  # it will stay on the device for some time
                self._may_swap_out = True
            self.hits += 1
            self.tokens_found += snapshot.length

    def copy_tail(self, row: int, move: BlockMove) -> None:
        """Have the next plan copy a KV block for the sequence that starts in a row.

        The caller has added an owner to the source (`BlockPool.share`), which the pool removes after the copy.
        """
        self._tails[row] = move

    def move_tail(self, row: int, places: Mapping[int, int]) -> None:
        """Let the copy that the next plan does for a row, if any, be between the new places of blocks that moved."""
        if row in self._tails:
            source, target = self._tails[row]
            self._tails[row] = BlockMove(places.get(source, source), places.get(target, target))

    def begins(self, row: int) -> bool:
        """Whether the next plan is the first that fills the row for its sequence."""
        return row in self._starts

    def cancel(self, row: int, now: float) -> None:
        """Do not fill the row: its sequence has ended before a plan was made."""
        self._unpin(self._starts.pop(row))
        if row in self._tails:
            self._pool.free([self._tails.pop(row).source], now)

    @property
    def free_places(self) -> int:
        """Number of drafted tokens whose inputs can be kept now."""
        return len(self._free_places)

    def verify(self, row: int, count: int) -> None:
        """Have the next plan verify a draft of a row, and keep the inputs of its `count` tokens.

        As many places must be free. The result is due (`accept`) unless the row's sequence leaves before (`leave`).
        """
        places = tuple([self._free_places.pop() for _ in range(count)])
        self._verifying[row] = places
        self._drafts.append(KeptInputs(row, places))

    def accept(self, row: int, count: int) -> None:
        """Have the next plan move the state of a row on by the first `count` tokens that were verified."""
        places = self._verifying.pop(row)
        self._free_places += places
        self._accepted[row] = places[:count]

    def take_back(self, row: int, count: int) -> bool:
        """Accept the last `count` tokens of a row no more. Returns False if no plan is to move its state on."""
        places = self._accepted.get(row, ())
        if not places:
            return False
        self._accepted[row] = places[:-count]
        return True

    def leave(self, row: int, *, saved: bool) -> None:
        """Forget the draft of a row, because its sequence leaves. Accepted tokens count if its state is `saved`."""
        self._free_places += self._verifying.pop(row, ())
        if not saved:
            self._accepted.pop(row, None)

    def plan(self, now: float) -> tuple[StatePlan, ...]:
        """The copies of the plan that is being made, none or one value. They count as done from now on."""
        waits = self._later or self._may_swap_out or self._flushing or self._wanted
        copies = self._saves or self._starts or self._ahead
        if not (copies or waits or self._drafts or self._accepted):
            return ()
        leaving = self._leaving(now)
        self.swapped_out += len(leaving)
        plan = StatePlan(
            replays=tuple([KeptInputs(row, places) for row, places in self._accepted.items() if places]),
            verifies=tuple(self._drafts),
            saves=tuple([StateCopy(row, snapshot.slot) for row, snapshot in self._saves]),
            starts=tuple([StateCopy(each.slot, row) for row, each in self._starts.items() if not each.is_on_host]),
            tails=tuple(self._tails.values()),
            swap_out=tuple([StateCopy(each.slot, each.host) for each in leaving]),
            swap_in=tuple([StateCopy(each.host, row) for row, each in self._starts.items() if each.is_on_host]),
        )
        self.swapped_in += len(plan.swap_in)
        if self._ahead:
            plan = replace(plan, swap_in=(*plan.swap_in, *self._copy_ahead()))
        if plan.swap_out or plan.swap_in:
            self._host.begin([(each, each.host) for each in leaving])
        for snapshot in (*(snapshot for _, snapshot in self._saves), *self._starts.values()):
            self._unpin(snapshot)
        for move in self._tails.values():
            self._pool.free([move.source], now)
        self._saves, self._starts, self._tails, self._drafts, self._accepted = [], {}, {}, [], {}
        later, self._later = self._later, []
        for row, snapshot in later:
            self.save(row, snapshot, now)
            self.withdraw(snapshot)
        return (plan,) if plan.computes or plan.verifies else ()

    def _leaving(self, now: float) -> list[Snapshot]:
        """The snapshots that the plan being made copies to the host.

        They are of one kind, as a flush or a wanted copy may take slots that a swap-out of the same plan would fill.
        """
        if self._wanted and (wanted := self._copy_wanted(now)):
            return wanted
        return self._flush(now) if self._flushing else self._swap_out(now)

    def _unpin(self, snapshot: Snapshot) -> None:
        if snapshot is not NOTHING_KEPT:
            snapshot.pins -= 1

    def _find_room(self, now: float) -> bool:
        """Make a slot free, if need be that of the snapshot of the lowest value. Returns whether one is free.

        Snapshots that the host has, too, give up their slots first.
        """
        if not self._free:
            both = self._on_both.first(self.snapshots, now) if self._num_on_both else ()
            for victim in both or self._alone.first(self.snapshots, now):
                self._leave_device(victim)
        return bool(self._free)

    @property
    def _num_on_both(self) -> int:
        """Number of snapshots that have a slot in both tiers."""
        return self.total - len(self._free) + self._host.kept - self._count

    def _swap_out(self, now: float) -> list[Snapshot]:
        """Give slots of the host to snapshots, the lowest value first, if too few slots can be had at once."""
        leaving = list[Snapshot]()
        while self._may_swap_out and len(leaving) < self._copies_ahead:
            if len(self._free) + self._num_on_both >= self._least_ready:
                break
            found = [each for each in self._alone.first(self.snapshots, now) if self._find_room_on_host(each, now)]
            if not found:
                break
            leaving += self._to_host(found)
        self._may_swap_out = bool(leaving or self._saves or self._starts)
        return leaving

    def _to_host(self, snapshots: list[Snapshot]) -> list[Snapshot]:
        for snapshot in snapshots:
            snapshot.host = self._host.free.pop()
        return snapshots

    def _find_room_on_host(self, snapshot: Snapshot, now: float) -> bool:
        """Make a slot of the host free for a snapshot, unless all that only the host has is worth at least as much."""
        if not self._host.free:
            for victim in self._on_host.first(self.snapshots, now):
                if self._rank(victim, now) < self._rank(snapshot, now):
                    self._leave_host(victim)
        return bool(self._host.free)

    # Ahead of need (`ahead.StatesAhead`).

    def read_ahead(self, digests: Sequence[bytes], gives_way: Callable[[bytes], bool], now: float) -> bool:
        """Begin to read the longest state right after these full blocks, if only a tier below the host has it."""
        below = [*self._below.keys(digests[-1])] if digests else []
        here = self._kept.get(digests[-1], ()) if below else ()
        longest = max(below, key=lambda key: key.length, default=None)
        if longest is None or any(each.length >= longest.length for each in here):
            return False
        if not self._host.reserved:
            self._free_on_host(2, gives_way)
        return self._below.read_ahead(longest.digest, now)

    def _free_on_host(self, count: int, gives_way: Callable[[bytes], bool]) -> None:
        """Free up to `count` slots of the host, of states that a tier below has, too, and nobody needs soon."""
        for each in [*self._safe_on_host()]:
            if len(self._host.free) >= count:
                break
            if gives_way(each.key.parent):
                self._leave_host(each)

    def can_swap_in_ahead(self, digests: Sequence[bytes], gives_way: Callable[[bytes], bool]) -> bool:
        """Whether `swap_in_ahead` with these arguments would find a snapshot to copy, and room for it."""
        return bool(self._to_bring(digests) and (self._free or any(True for _ in self._giving_way(gives_way))))

    def swap_in_ahead(self, digests: Sequence[bytes], gives_way: Callable[[bytes], bool]) -> None:
        """Have the next plan copy the snapshot that comes right after these full blocks from the host."""
        self._ahead = self._to_bring(digests)
        if self._ahead and not self._free:
            for other in islice(self._giving_way(gives_way), 1):
                self._leave_device(other)

    def _to_bring(self, digests: Sequence[bytes]) -> list[Snapshot]:
        """The longest snapshot right after these full blocks, if only the host has it."""
        here = self._kept.get(digests[-1], ()) if digests else ()
        longest = max(here, key=lambda each: each.length, default=NOTHING_KEPT)
        return [longest] if longest.is_on_host else []

    def _giving_way(self, gives_way: Callable[[bytes], bool]) -> Iterator[Snapshot]:
        """The snapshots that both tiers have, and whose slots on the device nobody needs soon."""
        for each in self.snapshots():
            if NO_SLOT not in (each.slot, each.host) and not each.pins and gives_way(each.key.parent):
                yield each

    def _copy_ahead(self) -> Iterator[StateCopy]:
        """The copies of snapshots that are brought ahead of need. A snapshot without a free slot is left out."""
        for each in self._ahead:
            if self._free and each.is_on_host:
                each.slot = self._free.pop()
                yield StateCopy(each.host, each.slot)
        self._ahead = []

    # Other engines.

    def after(self, digests: Sequence[bytes]) -> list[Snapshot]:
        """The snapshots that come right after the last of these full blocks that has any, the one used last first.

        Only those count whose last KV blocks the device or the host has.
        """
        for digest in reversed(digests):
            here = [each for each in self._kept.get(digest, ()) if self._has_blocks(each.key)]
            if here:
                return sorted(here, key=lambda each: each.used, reverse=True)
        return []

    def reach(self, digests: Sequence[bytes]) -> int:
        """Number of these leading full blocks up to the last one after which any tier has a state."""
        for count in range(len(digests), 0, -1):
            if digests[count - 1] in self._kept or any(True for _ in self._below.keys(digests[count - 1])):
                return count
        return 0

    def _has_blocks(self, key: StateKey) -> bool:
        """Whether the device or the host has the last KV blocks before a state."""
        return self.has_block(key.parent) and (not key.tail or self.has_block(key.tail_digest))

    def want_on_host(self, key: StateKey) -> None:
        """Ask for a copy on the host of the snapshot with this key, if only the device has it.

        The next plans begin it. It does not come if all on the host is worth more (`coming_to_host`).
        """
        self._wanted.update((each, None) for each in self._same(key) if each.host == NO_SLOT)

    @property
    def wants_copies(self) -> bool:
        """Whether the next plan is to copy snapshots to the host because others want them there."""
        return bool(self._wanted)

    def coming_to_host(self, key: StateKey) -> bool:
        """Whether a copy of the snapshot with this key is asked for, and no plan has begun it."""
        return any(each in self._wanted for each in self._same(key))

    def hold(self, key: StateKey) -> list[Snapshot]:
        """Let the snapshot with this key stay on the host until `release`. Returns it; empty if it is not there.

        Its slot may be read once `is_quiet(mark)`, where `mark` is what it is now.
        """
        held = [each for each in self._same(key) if each.host != NO_SLOT]
        for snapshot in held:
            snapshot.holds += 1
        return held

    def receive(self, slot: int, key: StateKey, now: float) -> list[Snapshot]:
        """Let a state from another engine be found, hold it, and offer it to the tier below. Returns it as `hold` does.

        Empty if only the device has it meanwhile: the slot is free then.
        """
        snapshot = self.cache_on_host(slot, key, now)
        if snapshot.host == slot:
            self._below.offer(snapshot)
        return self.hold(key)

    def release(self, snapshot: Snapshot) -> None:
        """End a hold of a snapshot."""
        snapshot.holds -= 1

    def give_way(self, digests: Collection[bytes]) -> None:
        """Give up the states of these digests before those that conversations need: another engine has them now."""
        for snapshot in self.snapshots():
            if snapshot.key.digest in digests:
                snapshot.is_continued = True

    def _copy_wanted(self, now: float) -> list[Snapshot]:
        """Give a slot of the host to the first snapshot that others want, unless the next plan needs it.

        A plan copies one of them, since a slot just given is no spare for the next one.
        """
        for snapshot in [each for each in self._wanted if not each.pins]:
            del self._wanted[snapshot]
            if snapshot.slot != NO_SLOT and snapshot.host == NO_SLOT and self._find_room_to_lend(snapshot, now):
                return self._to_host([snapshot])
        return []

    def _find_room_to_lend(self, snapshot: Snapshot, now: float) -> bool:
        """Make a slot of the host free, first that of a snapshot that the device has, too."""
        if not self._host.free:
            for spare in self._spare_on_host():
                self._leave_host(spare)
                break
        return self._find_room_on_host(snapshot, now)

    def _spare_on_host(self) -> Iterator[Snapshot]:
        """The snapshots that both tiers have, and that nobody needs on the host."""
        for each in self.snapshots():
            if NO_SLOT not in (each.slot, each.host) and not (each.holds or each.pins):
                yield each

    # Tiers below the host.

    def serve_below(self, below: StatesBelow) -> None:
        """There is a tier below the host from now on."""
        self._below = below

    def flush(self, on: bool) -> None:
        """Let the next plans copy snapshots to the host however many slots are free, as the device is idle; or not."""
        self._flushing = on

    @property
    def unflushed(self) -> bool:
        """Whether the device has a snapshot, or a state that is to be saved, that no other tier has."""
        return bool(self._saves) or any(True for _ in self._unflushed())

    @property
    def can_flush(self) -> bool:
        """Whether a plan could save a state, or copy a snapshot to the host that no other tier has."""
        room = self._host.free or any(True for _ in self._safe_on_host())
        return bool(self._saves) or (bool(room) and any(True for _ in self._unflushed()))

    @property
    def is_flushing(self) -> bool:
        """Whether the next plan is to be made for `flush`."""
        return self._flushing and self.can_flush

    def _flush(self, now: float) -> list[Snapshot]:
        """Give slots of the host to snapshots that only the device has, the highest value first."""
        leaving = list[Snapshot]()
        ranked = sorted(self._unflushed(), key=lambda each: self._rank(each, now), reverse=True)
        for snapshot in ranked[: self._copies_ahead]:
            if not self._find_room_to_flush(now):
                break
            leaving += self._to_host([snapshot])
        return leaving

    def _unflushed(self) -> Iterator[Snapshot]:
        """The snapshots that only the device has."""
        for each in self.snapshots():
            if (
                each.host == NO_SLOT
                and not each.pins
                and not self._below.has(each.key.digest)
                and self._is_of_use(each.key)
            ):
                yield each

    def _safe_on_host(self) -> Iterator[Snapshot]:
        """The snapshots on the host that the tier below has, too."""
        for each in self.snapshots():
            if each.host != NO_SLOT and not each.pins and not each.holds and self._below.has(each.key.digest):
                yield each

    def _find_room_to_flush(self, now: float) -> bool:
        """Make a slot of the host free, if need be that of a snapshot that the tier below has, too."""
        if not self._host.free:
            safe = [*self._safe_on_host()]
            if safe:
                self._leave_host(min(safe, key=lambda each: (each.is_on_host, self._rank(each, now))))
        return bool(self._host.free)

    def end_copies(self) -> None:
        """Note that the oldest plan in flight that copies snapshots to the host or from there has ended."""
        for snapshot in self._host.end():
            self._below.offer(snapshot)

    def reserve_on_host(self, now: float) -> int:
        """Reserve a slot of the host for a state from below; NO_SLOT if half of the slots are needed for such states.

        It may be filled once `is_quiet(mark)`, where `mark` is what it is now. `cache_on_host` or `cancel_on_host` ends
        the reservation.
        """
        held = sum(each.holds > 0 and each.is_on_host for each in self.snapshots())
        if held + len(self._host.reserved) >= max(1, self._host.total // 2):
            return NO_SLOT
        if not self._host.free:
            spare = next(self._spare_on_host(), None)
            for victim in self._on_host.first(self.snapshots, now) if spare is None else (spare,):
                self._leave_host(victim)
        return self._host.reserve() if self._host.free else NO_SLOT

    def reserve_spare_on_host(self) -> int:
        """Reserve a free slot of the host for a state that nobody has asked for; NO_SLOT if no other is left free.

        It may be filled as one of `reserve_on_host`.
        """
        return self._host.reserve() if len(self._host.free) > 1 and not self._host.reserved else NO_SLOT

    @property
    def host_slots(self) -> int:
        """Number of slots for snapshots on the host."""
        return self._host.total

    @property
    def mark(self) -> int:
        """Number of plans so far that copy snapshots to the host or from there."""
        return self._host.mark

    def is_quiet(self, mark: int) -> bool:
        """Whether no plan in flight reads or writes a slot of the host that was free when `mark` was taken."""
        return self._host.is_quiet(mark)

    def cache_on_host(self, slot: int, key: StateKey, now: float) -> Snapshot:
        """Let the state in a reserved slot be found. Returns the snapshot of its tokens, which may be another one."""
        for same in self._same(key):
            self._host.cancel(slot)
            return same
        self._host.fill(slot)
        snapshot = Snapshot(key, NOTHING_KEPT, host=slot)
        self.touch(snapshot, now)
        self._keep(snapshot)
        return snapshot

    def cache_first_on_host(self, slot: int, key: StateKey) -> Snapshot:
        """`cache_on_host` for a state that nobody has asked for: it is the first to leave until it is used."""
        return self.cache_on_host(slot, key, -inf)

    def cancel_on_host(self, slot: int) -> None:
        """Free a reserved slot: its state does not come."""
        self._host.cancel(slot)

    # Ranks.

    def _rank(self, snapshot: Snapshot, now: float) -> Rank:
        """The snapshot of the lowest rank goes first.

        Snapshots of no use go before all others. Next come the ones that their conversations have gone on from, as
        the next turn needs the latest. The snapshots that clients want kept go last.
        """
        value = self.value(snapshot, now)
        is_needed = value > 0 and not snapshot.is_passed
        return is_needed + (is_needed and snapshot in self._granted(now)), value, snapshot.used

    def _granted(self, now: float) -> set[Snapshot]:
        """The snapshots that are kept because clients want it. Each tier is shared by itself."""
        turns = self.rule.turns
        if turns.by_age:
            return self._kept_for_clients[1]
        if self._kept_for_clients[0] != now:
            wishes = [(each, turns.wish_at(each.key.parent), 1.0) for each in self.snapshots()]
            on_device = granted((each for each in wishes if not each[0].is_on_host), now)
            self._kept_for_clients = now, on_device | granted((each for each in wishes if each[0].is_on_host), now)
        return self._kept_for_clients[1]

    def value(self, snapshot: Snapshot, now: float) -> float:
        """Cost of computing the state again from the snapshot before it, per second since its last use.

        That is the retention value of Pensieve §4.3.1, or what the pauses of its kind make of it (`Turns.worth_at`). A
        rule that does not go by cost takes each cost as 1. The value is 0 for a snapshot whose KV blocks are not kept.
        """
        return self.value_of(snapshot.key, self._length_before(snapshot), snapshot.used, now)

    def value_of(self, key: StateKey, first: int, used: Use, now: float) -> float:
        """The value of a state of any tier that could be computed again from position `first` on."""
        rule, cost = self.rule, 1.0
        if not self._is_of_use(key):
            return 0.0
        if rule.eviction.by_cost:
            cost = rule.cost((first + key.length) // 2) * (key.length - first)
        return cost * rule.turns.worth_at(key.parent, used[0], now)

    def _is_of_use(self, key: StateKey) -> bool:
        """Whether the last KV blocks before a state are kept, by a lower tier at least."""
        full, pool = key.length - len(key.tail), self._pool
        last = not full or self.has_block(key.parent) or pool.is_below(key.parent)
        return last and self._has_tail_anywhere(key)

    def _length_before(self, snapshot: Snapshot) -> int:
        """Length of the snapshot from which this one could be computed again."""
        while snapshot.previous.length and not snapshot.previous.is_kept:
            snapshot.previous = snapshot.previous.previous
        return snapshot.previous.length

    def _leave_device(self, snapshot: Snapshot) -> None:
        """Free the slot on the device of a snapshot that the next plan does not need."""
        self._free.append(snapshot.slot)
        snapshot.slot = NO_SLOT
        self._forget(snapshot)

    def _leave_host(self, snapshot: Snapshot) -> None:
        """Free the slot on the host of a snapshot that the next plan does not need."""
        self._host.free.append(snapshot.host)
        snapshot.host = NO_SLOT
        self._forget(snapshot)

    def _forget(self, snapshot: Snapshot) -> None:
        """Give up a snapshot if no tier has it. The KV block of its tail then goes first."""
        if snapshot.is_kept:
            return
        here = self._kept[snapshot.key.parent]
        here.remove(snapshot)
        self._count -= 1
        if not here:
            del self._kept[snapshot.key.parent]
        if self._below.has(snapshot.key.digest):
            return
        self.dropped += 1
        if snapshot.key.tail:
            self._pool.give_way([snapshot.key.tail_digest])
