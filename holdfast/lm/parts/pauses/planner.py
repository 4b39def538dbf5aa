"""PausePart: expects the next turns of conversations, and has their state brought back to the device before."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import NamedTuple, cast

from holdfast.core.pause import NO_PAUSE, Pause
from holdfast.lm.memory.ahead import NO_STATES_AHEAD, StatesAhead
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.parts.pauses.observed import Observed, observed
from holdfast.lm.parts.pauses.options import PauseOptions
from holdfast.lm.parts.pauses.values import Upcoming, Upcomings
from holdfast.lm.parts.planning import Planning
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.hybrid import HybridKind
from holdfast.lm.scheduler.part import Part, PartQueues, PartStep
from holdfast.lm.types import BlockCopy, PartPlan, StepPlan, StepResult

WARM_SECONDS = 60.0
"""Seconds for which a turn is expected after a client has announced it."""
MOST_BLOCKS = 1 << 19
"""Largest number of digests of conversations whose next turn is expected, and of those that have ended."""
ALONE_SECONDS = 1e-3
"""Most seconds of copies in a step that computes nothing. A request that arrives meanwhile waits for them."""


class Ended(NamedTuple):
    """A sequence that has ended."""

    at: float
    """Time at which it ended, in seconds."""
    tenant: str
    digests: Sequence[bytes]
    """Digests of its full blocks; at least one."""
    prompt: int
    """Number of full blocks of its prompt."""

    @property
    def key(self) -> bytes:
        """Digest of the last block of its prompt, with which the conversation's next turn begins, too.

        The answer may come back in other tokens: a chat template may render a call in another way than the model.
        """
        return self.digests[min(max(self.prompt, 1), len(self.digests)) - 1]


class PausePart(Part):
    """Remembers what ended sequences left, takes notes of the pauses after them, and expects their next turns."""

    name = "pauses"

    def __init__(self, pool: BlockPool, gaps: Observed) -> None:
        """`gaps` is what is known of the gaps between turns."""
        self._pool, self._gaps = pool, gaps
        self._now = 0.0
        tiers = pool.num_blocks + (pool.host.num_blocks if pool.host is not None else 0) + pool.below.num_blocks
        self._most_blocks = min(2 * tiers, MOST_BLOCKS)
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        """The sequences that have ended, by request id, the oldest first."""
        self._ended_blocks = 0
        """Number of digests in `_ended`."""
        self.turns = Upcomings(self._most_blocks)
        """The conversations whose next turn is expected."""
        self._noted = 0

    def ended(self, entry: Entry) -> None:
        """Remember the blocks of a sequence, for the note that follows."""
        self._gaps.ended(entry, self._now)
        digests = entry.cache.digests
        if not digests:
            return
        request = entry.sequence.request
        prompt = len(request.prompt) // self._pool.block_size
        self._ended[entry.id] = Ended(self._now, request.identity.tenant, digests, prompt)
        self._ended_blocks += len(digests)
        while self._ended_blocks > self._most_blocks and len(self._ended) > 1:
            _, oldest = self._ended.popitem(last=False)
            self._ended_blocks -= len(oldest.digests)
        if request.pause != NO_PAUSE:
            self._take(entry.id, request.pause)

    def note(self, request_id: str, pause: Pause, now: float) -> None:
        """Note what is known of the pause after a sequence that has ended. Unknown sequences are ignored."""
        self._now = max(self._now, now)
        self._gaps.note(request_id, pause, self._now)
        self._take(request_id, pause)

    def _take(self, request_id: str, pause: Pause) -> None:
        found = self._ended.get(request_id)
        if found is None:
            return
        self._noted += 1
        if not pause.superseded:
            self._expect(self._following(found, pause))
        elif len(found.digests) > found.prompt:
            self._expect(self._superseded(found, pause))

    @staticmethod
    def _superseded(ended: Ended, pause: Pause) -> Upcoming:
        """The turn that never comes. Other branches may need the prompt."""
        own = ended.digests[ended.prompt :]
        return Upcoming(ended.digests[-1], own, ended.tenant, pause, -inf, inf, inf, inf)

    def _following(self, ended: Ended, pause: Pause) -> Upcoming:
        """The turn after a sequence that has ended. Copying its state takes time, and may have to wait for steps."""
        window, at = self._gaps.windows.expect(ended.tenant, pause), ended.at
        begin = expected = until = inf
        if window is not None:
            begin = at + window.soonest - self._lead(len(ended.digests))
            expected, until = at + window.expected, at + window.latest
        return Upcoming(ended.key, ended.digests, ended.tenant, pause, at, begin, expected, until)

    def _lead(self, blocks: int) -> float:
        """Seconds that it takes to have this many blocks on the device."""
        return 0.0

    def warm(self, chain: Sequence[bytes], now: float) -> None:
        """Expect a turn at once that begins with these blocks."""
        self._now = max(self._now, now)
        if chain:
            self._expect(Upcoming(chain[-1], chain, "", NO_PAUSE, now, now, now, now + WARM_SECONDS))

    def _expect(self, turn: Upcoming) -> None:
        self.turns.add(turn)
        self.look(self._now)

    def look(self, now: float) -> None:
        """See which turns' state may come back by now."""
        self._now = max(self._now, now)

    @property
    def next_look(self) -> float:
        """Time at which `look` has something to do next; infinity: never."""
        return inf

    def started(self, entry: Entry) -> None:
        """Expect a turn no longer that has come."""
        self._gaps.started(entry, self._now)
        if self.turns:
            for turn in self.turns.begun_by(entry.cache.digests):
                self.turns.forget(turn.key)

    def stats(self) -> Mapping[str, int]:
        return {"pauses_noted": self._noted, "turns_expected": len(self.turns)}


class AheadPart(PausePart):
    """Brings state of the tiers below the device back before the turn that needs it, where that costs nobody anything.

    Blocks that only the disk or the remote tier has are read to the host first (`FromBelow`).

    A step brings blocks only if no copy from the host is under way or begins in it, no request waits, and no idle state
    leaves the device to make room. It brings as many as the link copies while its segments run, at least one. The
    blocks go where nobody needs the room, and are the first to go (`BlockPool.swap_in_ahead`). So no request finds
    fewer blocks than without this part. A request that needs the link waits at most for the copies of one step.
    """

    def __init__(
        self, pool: BlockPool, gaps: Observed, *, block_bytes: int, states: StatesAhead = NO_STATES_AHEAD
    ) -> None:
        """`block_bytes` is the size of a block; 0: unknown. `states` are those that are not in blocks."""
        super().__init__(pool, gaps)
        self._block_bytes, self._states = block_bytes, states
        self._queues: PartQueues
        self._due: list[Upcoming] = []
        """The turns whose state may come back now, the next turn first."""
        self._others: dict[bytes, Iterator[bytes]] = {}
        """Blocks that were not considered yet to give way on the host, by the key of the turn that is due."""
        self._can_swap_in = False
        """Whether an idle engine could bring something, as far as is known since the last result."""
        self.awake = False

    def attach(self, queues: PartQueues) -> None:
        self._queues = queues

    def look(self, now: float) -> None:
        super().look(now)
        due = self.turns.due(self._now)
        for turn in due:
            insort(self._due, turn, key=EXPECTED)
            self._others[turn.key] = self.turns.latest(self._now)
        self.awake = bool(self._due)
        if self._bring_from_below() or due:
            self._reconsider()

    def _bring_from_below(self) -> bool:
        """Have a read begun of blocks that the host lacks, if nobody needs the link. Returns whether any may be there.

        Turns get their blocks one after the other, so the device gets those of a turn that have come to the host.
        """
        below, news = self._pool.below, False
        for turn in self._due if not self._queues.num_waiting and self._pool.is_calm else ():
            if below.is_reading:
                break
            before, turn.on_host = turn.on_host, turn.below
            turn.below = below.read_ahead(turn.digests, turn.below, self._others[turn.key], self._gives_way(turn))
            if not below.is_reading:
                turn.on_host = turn.below
            news |= turn.on_host > before
            if turn.on_host == len(turn.digests):
                was_read, gives_way = turn.reads_state, self._gives_way(turn)
                turn.reads_state = self._states.read_ahead(turn.digests, gives_way, self._now)
                news |= was_read and not turn.reads_state
        return news

    def _reconsider(self) -> None:
        """See whether an idle engine could bring something."""
        self._can_swap_in = self._pool.is_calm and any(map(self._can_bring, self._due))

    def _can_bring(self, turn: Upcoming) -> bool:
        """Whether blocks or the state of a turn could come to the device now."""
        places, gives_way = range(turn.place, turn.on_host), self._gives_way(turn)
        return self._pool.can_swap_in_ahead(turn.digests, places, gives_way) or self._states.can_swap_in_ahead(
            turn.digests, gives_way
        )

    def _gives_way(self, turn: Upcoming) -> Callable[[bytes], bool]:
        """Whether a block is needed later than the state of a turn."""
        return partial(self.turns.is_needed_after, turn.at, self._now, tenant=turn.tenant)

    @property
    def next_look(self) -> float:
        return self.turns.next_begin

    def advance(self, now: float) -> None:
        self.look(now)

    def finish(self, step: PartStep) -> PartPlan | None:
        """Bring blocks of the turns that are due back, as far as that delays nobody."""
        self._settle(step.now)
        may_swap_in = self._may_swap_in(step)
        copies = self._swap_in_some(step) if may_swap_in else ()
        if copies:
            step.swap_in_ahead(copies)
            if not step.planned:
                step.keep()
        elif may_swap_in and not step.planned:  # the segments of a plan wait for its copies of states
            self._bring_state(step)
        self._can_swap_in = False
        return None

    def _settle(self, now: float) -> None:
        """Leave out the turns that have come, did not come, or have all their blocks."""
        for turn in [turn for turn in self._due if turn in self.turns and turn.until <= now]:
            self.turns.add(replace(turn, begin=inf, at=inf, until=inf))
        self._due = [turn for turn in self._due if turn in self.turns and self._lacks(turn)]
        self._others = {turn.key: self._others[turn.key] for turn in self._due}
        self.awake = bool(self._due)

    def _lacks(self, turn: Upcoming) -> bool:
        """Whether the device may lack state of a turn."""
        may_come = turn.place < len(turn.digests) or turn.reads_state
        return may_come or self._states.can_swap_in_ahead(turn.digests, self._gives_way(turn))

    def _may_swap_in(self, step: PartStep) -> bool:
        """Whether the link, blocks and the device have something to spare in this step."""
        pool = self._pool
        if step.swaps_in or pool.copies.swapping_in or self._queues.num_waiting or not pool.is_calm:
            return False
        return not pool.makes_room if step.planned else not (step.busy or step.in_flight)

    def _swap_in_some(self, step: PartStep) -> Sequence[BlockCopy]:
        """The copies of the first due turn that lacks any, as many as the step's time has room for."""
        most = self._most(step.predicted if step.planned else ALONE_SECONDS)
        for turn in self._due:
            places = range(turn.place, turn.on_host)
            copies, turn.place = self._pool.swap_in_ahead(turn.digests, places, most, self._gives_way(turn))
            if copies:
                return copies
        return ()

    def _bring_state(self, step: PartStep) -> None:
        """Bring the state of the first due turn that lacks it."""
        for turn in self._due:
            gives_way = self._gives_way(turn)
            if self._states.can_swap_in_ahead(turn.digests, gives_way):
                self._states.swap_in_ahead(turn.digests, gives_way)
                step.keep()
                return

    def _most(self, seconds: float) -> int:
        """Number of blocks that the link copies in this time, at least one; 0 s: the time is unknown."""
        each = self._copying(1) - self._pool.host_link.latency
        if each <= 0.0:
            return 1
        room = (seconds or ALONE_SECONDS) - self._pool.host_link.latency
        return max(1, min(int(room / each), self._pool.max_copies))

    def _lead(self, blocks: int) -> float:
        """Copying and reading may have to wait for steps, so they count twice."""
        return 2 * (self._copying(blocks) + self._pool.below.lead(blocks))

    def _copying(self, blocks: int) -> float:
        """Seconds that the link takes for this many blocks."""
        return self._pool.host_link.seconds(blocks * self._block_bytes)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        self._now = max(self._now, now)
        if self._due:
            self._bring_from_below()
            self._reconsider()
        return ()

    @property
    def has_work(self) -> bool:
        """Whether an idle engine could bring blocks back now."""
        return self._can_swap_in


EXPECTED = attrgetter("at")


def make_parts(planning: Planning) -> tuple[PausePart, ...]:
    """The part of a scheduler over one pool of blocks. Without a host tier nothing can come back."""
    config, shape = planning.config, planning.shape
    ahead = config.part(PauseOptions).swap_in_ahead and shape.num_host_blocks > 0
    states: StatesAhead = cast(HybridKind, planning.kind).states if shape.states else NO_STATES_AHEAD

    def make_part(pool: BlockPool) -> PausePart:
        gaps = observed(config.eviction, pool.rule.turns, config.block_size)
        return AheadPart(pool, gaps, block_bytes=shape.block_bytes, states=states) if ahead else PausePart(pool, gaps)

    return tuple(map(make_part, planning.kind.block_pools))
