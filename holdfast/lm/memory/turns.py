"""Turns: what is known of each sequence that has ended, until another one continues it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple, Protocol

from holdfast.core.pause import NO_PAUSE, Pause
from holdfast.lm.memory.gaps import BINS, EDGES, LONGEST, UNKNOWN, GapHistogram, Kind, Kinds, bin_of

MOST_OPEN = 1 << 16
"""Largest number of ended sequences that are remembered until they are continued."""
LEAST_EXPECTED = 0.05
"""Least pause in seconds that a hint counts as."""
TTL_SHARE = 0.9
"""Share of a tool's calls that end within the time for which `ttl` keeps the state."""
KEPT = 1e9
"""Worth that `ttl` adds while a state is kept: more than that of any other."""
BRANCH = "branch"
"""Kind of pause after which several sequences continue the same state: the branches, and then the trunk."""


class Departure(NamedTuple):
    """What a sequence's request says at the end of the sequence."""

    request: str = ""
    """Id of the request, by which a note may come later."""
    tenant: str = ""
    pause: Pause = NO_PAUSE


NOTHING_SAID = Departure()


class Worths(Protocol):
    """The worth of holding idle state by its age, per unit of its cost and of time. Hashable."""

    @property
    def worths(self) -> Sequence[float]:
        """The worth by bin of the age, as far as known now."""
        ...


class Forecast(NamedTuple):
    """The worth of holding a turn's state."""

    source: Worths
    scale: float = 1.0
    """Seconds in a unit of time of the worths and of the ages that their bins stand for."""

    def worth(self, age: float) -> float:
        """Worth per unit of cost and second, of state that has been idle for `age` seconds."""
        return self.source.worths[bin_of(age / self.scale)] / self.scale


@dataclass(frozen=True)
class Constant:
    """Worths that never change."""

    worths: Sequence[float]


NOTHING = Forecast(Constant((0.0,) * BINS))
"""Of state that is not needed again."""
EQUAL = Constant((1.0,) * BINS)
BY_AGE = Constant(tuple(1.0 / max(edge, EDGES[1]) for edge in EDGES))
"""One over the age: the least recently used goes first."""


@dataclass(frozen=True)
class KeptAwhile:
    """Worths of state that is kept for as long as most gaps of its kind last. After that, age decides."""

    gaps: GapHistogram

    @property
    def worths(self) -> Sequence[float]:
        """The worth by bin of the age."""
        kept = self.gaps.rates.quantile(TTL_SHARE)
        return [worth + KEPT * (edge < kept) for edge, worth in zip(EDGES, BY_AGE.worths, strict=True)]


class Turn:
    """A sequence that has ended, and the open gap until its state is needed again. Only `TurnTracker` changes it."""

    __slots__ = ("at", "common", "gap_open", "hits", "kind", "length", "pause", "ratio_at", "tenant", "time")

    def __init__(self, time: float, departure: Departure, kind: Kind, *, length: int, common: int, hits: int) -> None:
        self.time = time
        """When the sequence ended, in seconds."""
        self.pause = departure.pause
        self.tenant = departure.tenant
        self.kind = kind
        self.length = length
        """Number of its blocks."""
        self.common = common
        """Number of its leading blocks that other conversations have, too."""
        self.hits = hits
        """Number of sequences that continued the state of this conversation so far."""
        self.gap_open = False
        self.at = self.ratio_at = 0
        """The bins that its age has reached, in seconds and in units of the expected pause."""

    @property
    def scale(self) -> float:
        """Expected pause in seconds; 1 without a hint."""
        return 1.0 if self.pause.expected is None else max(self.pause.expected, LEAST_EXPECTED)

    def begin(self) -> None:
        """Open the gap."""
        self.gap_open, self.at, self.ratio_at = True, 0, 0
        self.kind.gaps.begin(self.time)
        if self.pause.expected is not None:
            self.kind.ratios.begin(self.time)

    def advance(self, now: float) -> float:
        """Note how long the gap has lasted. Returns the time at which to note it again; inf after a day."""
        age = now - self.time
        at, ratio_at = max(self.at, bin_of(age)), max(self.ratio_at, bin_of(age / self.scale))
        if at > self.at:
            self.kind.gaps.last(self.time, self.at, at)
        if self.pause.expected is not None and ratio_at > self.ratio_at:
            self.kind.ratios.last(self.time, self.ratio_at, ratio_at)
        self.at, self.ratio_at = at, ratio_at
        return inf if age >= LONGEST else self.time + EDGES[min(at + 1, BINS - 1)]

    def end(self, now: float) -> None:
        """Close the gap: the state is needed now."""
        self.gap_open = False
        gap = max(now - self.time, EDGES[1] / 2)
        if self.pause.expected is not None:
            self.kind.judge(gap, self.scale)
            self.kind.ratios.end(self.time, self.ratio_at, bin_of(gap / self.scale))
        self.kind.gaps.end(self.time, self.at, bin_of(gap))

    def withdraw(self) -> None:
        """Close the gap as if it had never begun."""
        self.gap_open = False
        self.kind.gaps.withdraw(self.time, self.at)
        if self.pause.expected is not None:
            self.kind.ratios.withdraw(self.time, self.ratio_at)


Appraisal = Callable[[Turn], Forecast]


def by_pause(turn: Turn) -> Forecast:
    """The worth by what was learned of such pauses, or by the hint if hints of this kind were better so far."""
    if turn.pause.superseded:
        return NOTHING
    if turn.pause.expected is not None and turn.kind.believes_hints:
        return Forecast(turn.kind.ratios, turn.scale)
    return Forecast(turn.kind.gaps)


def by_ttl(turn: Turn) -> Forecast:
    """As Continuum: after a tool call the state is kept for a learned time. All else goes by its last use.

    The time is that within which nine of ten calls of the tool that ever ended have ended.
    """
    return Forecast(KeptAwhile(turn.kind.gaps) if turn.pause.kind.startswith("tool") else BY_AGE)


def by_hits(turn: Turn) -> Forecast:
    """Tokens times hits over bytes: tokens and bytes of a block are equal everywhere, so the hits remain."""
    return Forecast(EQUAL, 1.0 / (1 + turn.hits))


APPRAISALS: dict[str, Appraisal] = {"pauses": by_pause, "ttl": by_ttl, "hits": by_hits}
"""What a turn's state is worth, by the name of the eviction."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a sequence began."""

    hits: int = 0
    """Number of sequences before it in its conversation whose state it or they continued."""
    common: int = 0
    """Number of its leading blocks that other conversations have, too."""
    kind: str = ""
    """Kind of the pause after which the common blocks were found."""


NEW = Start()


class Watcher(Protocol):
    """What holds blocks by the worth of their turns."""

    def turn_changed(self, call: int) -> None:
        """What is known of the turn whose blocks were freed by this call has changed."""
        ...


class TurnTracker:
    """The sequences that have ended, by what another one would find of them. Every operation is O(log n) amortised.

    It teaches the kinds of pauses how long gaps take: also of state that was evicted long before it was needed.
    """

    def __init__(self, appraise: Appraisal = by_pause) -> None:
        self._appraise = appraise
        self.kinds = Kinds()
        self._unknown = Turn(-inf, NOTHING_SAID, Kind(UNKNOWN), length=0, common=0, hits=0)
        """Stands for state of which nothing is known."""
        self._open: OrderedDict[bytes, Turn] = OrderedDict()
        """Turns by the digest of their last full block."""
        self._requests: dict[str, tuple[bytes, int]] = {}
        """The digest of each open turn's last block and the call that freed its blocks, by request."""
        self._calls: OrderedDict[int, Turn] = OrderedDict()
        """Turns by the number of the call that freed their blocks."""
        self._names: dict[bytes, str] = {}
        """The request of each open turn."""
        self._due: list[tuple[float, int, Turn]] = []
        self._numbers = count()
        self._watchers: list[Watcher] = []

    def __len__(self) -> int:
        """Number of open turns."""
        return len(self._open)

    def watch(self, watcher: Watcher) -> None:
        """Let `watcher` know whenever something new is known of a turn whose blocks were freed."""
        self._watchers.append(watcher)

    def begin(self, digests: Sequence[bytes], found: int, now: float) -> Start:
        """A sequence with these blocks begins, the first `found` of which are cached: it may continue a turn."""
        self.advance(now)
        for digest in reversed(digests):
            turn = self._open.get(digest)
            if turn is None:
                continue
            turn.end(now)
            if turn.pause.kind != BRANCH:
                self._forget(digest)
                return Start(turn.hits + 1, turn.common)
            # Further branches begin here, and then the trunk goes on.
            trunk = Turn(
                now,
                Departure(tenant=turn.tenant, pause=Pause(BRANCH)),
                turn.kind,
                length=turn.length,
                common=turn.common,
                hits=turn.hits + 1,
            )
            self._open[digest] = trunk
            self._begin(trunk)
            return Start(trunk.hits, trunk.length, BRANCH)
        return Start(0, found)

    def left(self, digests: Sequence[bytes], departure: Departure, start: Start, call: int, now: float) -> None:
        """A sequence with these full blocks has ended.

        Call `call` is about to free its own blocks, and the call after it those in common, if there are any.
        """
        self.advance(now)
        if start.common:
            shared = Departure(tenant=departure.tenant, pause=Pause(start.kind))
            self._bind(call + 1, self._turn(shared, start.common, start, now))
        turn = self._turn(departure, len(digests), start, now)
        self._bind(call, turn)
        digest = digests[-1]
        if digest in self._open:
            self._forget(digest).withdraw()
        if departure.pause.superseded:
            return
        if len(self._open) >= MOST_OPEN:
            self._forget(next(iter(self._open)))
        self._open[digest] = turn
        self._requests[departure.request] = digest, call
        self._names[digest] = departure.request
        self._begin(turn)

    def _turn(self, departure: Departure, length: int, start: Start, now: float) -> Turn:
        kind = self.kinds.find(departure.tenant, departure.pause.kind)
        return Turn(now, departure, kind, length=length, common=start.common, hits=start.hits)

    def _bind(self, call: int, turn: Turn) -> None:
        self._calls[call] = turn
        if len(self._calls) > MOST_OPEN:
            self._calls.popitem(last=False)

    def note(self, request: str, pause: Pause, now: float) -> bool:
        """What is known of the pause after a request has changed. Returns False if its turn is not open.

        The gap counts from the end of the request's sequence, and so does `expected`.
        """
        self.advance(now)
        if request not in self._requests:
            return False
        digest, call = self._requests[request]
        old = self._open[digest]
        old.withdraw()
        kind = self.kinds.find(old.tenant, pause.kind)
        new = Turn(
            old.time, Departure(request, old.tenant, pause), kind, length=old.length, common=old.common, hits=old.hits
        )
        if pause.superseded:
            self._forget(digest)
        else:
            self._open[digest] = new
            self._begin(new)
            self.advance(now)
        if call in self._calls:
            self._calls[call] = new
            for watcher in self._watchers:
                watcher.turn_changed(call)
        return True

    def turn(self, last: float, call: int) -> Turn:
        """The turn whose blocks were freed at `last` by this call, or one of which nothing is known."""
        turn = self._calls.get(call, self._unknown)
        return turn if turn.time == last else self._unknown

    def forecast(self, turn: Turn) -> Forecast:
        """The worth of this turn's state by age, as far as known now."""
        return self._appraise(turn)

    def worth(self, last: float, call: int, now: float) -> float:
        """Worth, per unit of cost and second, of state that was last used at `last` by this call."""
        return self.forecast(self.turn(last, call)).worth(now - last)

    def advance(self, now: float) -> None:
        """Note how long the open gaps have lasted."""
        while self._due and self._due[0][0] <= now:
            _, _, turn = heappop(self._due)
            if turn.gap_open:
                self._push(turn, turn.advance(now))

    def _begin(self, turn: Turn) -> None:
        turn.begin()
        self._push(turn, turn.time + EDGES[1])

    def _push(self, turn: Turn, due: float) -> None:
        if due < inf:
            heappush(self._due, (due, next(self._numbers), turn))
        if len(self._due) > 2 * len(self._open) + 64:
            self._due = [each for each in self._due if each[2].gap_open]
            heapify(self._due)

    def _forget(self, digest: bytes) -> Turn:
        """Remove an open turn. Its blocks keep the worth that they have."""
        request = self._names.pop(digest)
        if self._requests.get(request, (b"", 0))[0] == digest:
            del self._requests[request]
        return self._open.pop(digest)
