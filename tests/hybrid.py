"""Shared by tests of hybrid models: a device that knows the tokens of each state, and checks of the snapshots."""

from collections import Counter
from itertools import chain

from holdfast.lm.memory.snapshots import NO_SLOT
from holdfast.lm.types import StatePlan
from tests.invariants import check_pool, filled_from_below
from tests.scheduling import FakeDevice, sampled


class HybridDevice(FakeDevice):
    """A `FakeDevice` with recurrent states: each slot holds the tokens that its state has seen, in order.

    A slot holds None until it is written. The copies of a plan run in order before its segments, and those to and from
    the host are complete when they have run. A segment may only begin with the state of all tokens before it.

    A segment that verifies a draft leaves the state as it is, and puts its tokens with their positions into `places`.
    """

    def __init__(self, num_blocks, block_size, slots, host_blocks=0, host_slots=0, choose=None):
        super().__init__(num_blocks, block_size, host_blocks, choose)
        self.seen = [None] * slots
        self.seen_on_host = [None] * host_slots
        self.tails = 0
        """Blocks copied because they are full only in part."""
        self.places = {}
        """Position and token of each kept input, by place."""
        self.verifies = {}
        """The places of the current plan's drafts, by row."""
        self.replayed = 0
        """Tokens by which states were moved on after a draft."""

    def _move_blocks(self, plan):
        super()._move_blocks(plan)
        states = plan.part(StatePlan)
        for copies in (states.saves, states.starts, states.swap_out, states.swap_in):
            targets = [target for _, target in copies]
            assert len(set(targets)) == len(targets), "two copies write to one slot"
        for row, places in states.replays:
            for place in places:
                position, token = self.places.pop(place)
                assert len(self.seen[row]) == position, f"row {row} is moved on by the token at {position}"
                self.seen[row] += (token,)
                self.replayed += 1
        self.verifies = dict(states.verifies)
        assert len(self.verifies) == len(states.verifies) and all(self.verifies.values())
        drafted = {segment.row for segment, most in zip(sampled(plan), plan.samples or (), strict=False) if most > 1}
        assert drafted == {*self.verifies}, "a draft has no places, or a segment without a draft has some"
        self._copy(states.saves, self.seen, self.seen)
        self._copy(states.swap_in, self.seen_on_host, self.seen)
        self._copy(states.starts, self.seen, self.seen)
        self._copy_tails(states.tails, plan)
        self._copy(states.swap_out, self.seen, self.seen_on_host)
        assert len({segment.row for segment in plan.segments}) == len(plan.segments), "a row has two segments"

    @staticmethod
    def _copy(copies, source, target):
        for copy in copies:
            seen = () if copy.source == NO_SLOT else source[copy.source]
            assert seen is not None, f"slot {copy.source} is read, but nothing is there"
            target[copy.target] = seen

    def _copy_tails(self, tails, plan):
        arriving = {target for _, target in plan.copies.swap_in}
        for source, target in tails:
            assert not {source, target} & arriving and source != target
            assert self._untouched(source) and self._untouched(target)
            size = self.block_size
            self.slots[target * size : (target + 1) * size] = self._contents(source)
            self.tails += 1

    def _write(self, segment, states):
        stream = tuple(self.streams[segment.sequence_id])
        assert self.seen[segment.row] == stream[: segment.start], f"{segment} begins with the state of other tokens"
        if places := self.verifies.get(segment.row):
            tokens = (stream[segment.start], *segment.tokens[1:])
            kept = zip(range(segment.start, segment.stop), tokens, strict=True)
            self.places |= dict(zip(places, kept, strict=True))
        else:
            self.seen[segment.row] = stream[: segment.stop]
        return super()._write(segment, states)


def check_hybrid(scheduler):
    """Raise RuntimeError unless every block and every slot for snapshots is in one state, and each owner is known."""
    states = scheduler._kind.states
    tables = [entry.cache.blocks for entry in scheduler._entries.values()]
    check_pool(scheduler.pool, [*tables, *([block] for block in states.tails)], filled_from_below(scheduler))
    check_states(states)


def check_states(states):
    """Raise RuntimeError unless free + kept + used = total, and the copies to come are those that pin snapshots.

    Each place of a draft must be free or verifying.
    """
    snapshots = [snapshot for snapshot in states.snapshots() if snapshot.slot != NO_SLOT]
    rows = min(states._free + [snapshot.slot for snapshot in snapshots])
    slots = sorted([*states._free, *(snapshot.slot for snapshot in snapshots)])
    host = states._host
    kept = [each.host for each in states.snapshots() if each.host != NO_SLOT]
    on_host = sorted([*host.free, *host.reserved, *kept])
    if on_host != list(range(host.total)) or not all(each.is_kept for each in states.snapshots()):
        raise RuntimeError(f"slots of the host are lost or hold two snapshots: {on_host}")
    if slots != list(range(rows, rows + states.total)):
        raise RuntimeError(f"slots are lost or hold two snapshots: {slots}")
    if states.free + states.kept + states.used != states.total:
        raise RuntimeError("free + kept + used is not the total")
    pins = Counter(snapshot for _, snapshot in states._saves) + Counter(
        snapshot for snapshot in states._starts.values() if snapshot.length
    )
    if any(snapshot.pins != pins[snapshot] for snapshot in states.snapshots()) or not {*pins} <= {*states.snapshots()}:
        raise RuntimeError("a snapshot is pinned without a copy to come, or a copy needs one that is not pinned")
    places = [*states._free_places, *chain(*states._verifying.values())]
    if sorted(places) != list(range(states.places)) or not {*chain(*states._accepted.values())} <= {*places}:
        raise RuntimeError(f"places of drafts are lost or have two owners: {places}")
    keys = [(snapshot.key.parent, tuple(snapshot.key.tail)) for snapshot in states.snapshots()]
    if len(set(keys)) != len(keys):
        raise RuntimeError("two snapshots are of the same tokens")


def check_states_below(tiers):
    """Raise RuntimeError unless `StateTiers` accounts for each place of the disk and each hold of a snapshot."""
    places = [state.place for state in tiers._states.values()]
    moving = [job for moving in tiers._moving.values() for job in moving.jobs]
    if len({job.number for job in moving}) != len(moving):
        raise RuntimeError("two jobs have one number")
    if len(places) + len(tiers._free) + len(tiers._writing) != tiers.total or {*places} & {*tiers._free}:
        raise RuntimeError("a place of the disk is lost, or holds two states")
    if sorted(arrival.slot for arrival in tiers._arriving.values()) != sorted(tiers._pool._host.reserved):
        raise RuntimeError("a slot of the host is reserved for no state, or a state comes to a slot that is not")
    if {digest for digest, state in tiers._states.items() if state.pins} != {*tiers._arriving}:
        raise RuntimeError("a state on the disk is pinned that is not being read, or the other way round")
    held = Counter(snapshot for snapshots in tiers._held.values() for snapshot in snapshots)
    writing = sum(moving.kind == "write" for moving in tiers._moving.values())
    holds = sum(snapshot.holds for snapshot in tiers._pool.snapshots())
    if len(tiers._writing) != writing or holds != held.total() + writing:
        raise RuntimeError("a snapshot is held for nobody, or not held for somebody")
