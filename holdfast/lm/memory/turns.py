"""Turns: what is known of each sequence that has ended, until another one continues it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple, Protocol

from holdfast.core.pause import NO_PAUSE, Pause
from holdfast.lm.memory.gaps import (
    BINS,
    EDGES,
    LONGEST,
    NO_PACE,
    SHORTEST,
    GapHistogram,
    Kind,
    Kinds,
    Pace,
    bin_of,
)
from holdfast.lm.memory.wishes import Wish

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
REPLACED = "replaced"
"""Kind of the pause of state whose conversation went on from an earlier turn: an answer was given anew, or a branch
ended and nobody said so."""
MOST_ANSWERS = 8
"""Largest number of sequences that go on from one turn. State that more begin with is taken for a prompt of many."""


class Departure(NamedTuple):
    """The words of a sequence's request at the end of the sequence."""

    request: str = ""
    """Id of the request, by which a note may come later."""
    tenant: str = ""
    pause: Pause = NO_PAUSE
    prompt: int = 0
    """Number of tokens of the prompt."""


NOTHING_SAID = Departure()


class Worths(Protocol):
    """The worth of holding idle state by its age, per unit of its cost and of time. Hashable."""

    @property
    def worths(self) -> Sequence[float]:
        """The worth by the bin of the age, as far as known now. A new object once any has changed."""
        ...


class Forecast(NamedTuple):
    """The worth of holding a turn's state."""

    source: Worths
    scale: float = 1.0
    """Seconds in a unit of time of the worths and of the ages that their bins stand for."""

    def worth(self, age: float) -> float:
        """Worth per unit of cost and second, of state that has been idle for `age` seconds."""
        return self.source.worths[bin_of(age / self.scale)] / self.scale


class Constant:
    """Worths that never change."""

    def __init__(self, worths: Sequence[float]) -> None:
        self.worths = worths


NOTHING = Forecast(Constant((0.0,) * BINS))
"""The forecast of state that is not needed again."""
EQUAL = Constant((1.0,) * BINS)
BY_AGE = Constant(tuple(1.0 / max(edge, EDGES[1]) for edge in EDGES))
"""One over the age: the least recently used goes first."""


@dataclass(frozen=True)
class KeptAwhile:
    """Worths of state that is kept for as long as most gaps of its kind last. After that, age decides."""

    gaps: GapHistogram

    @property
    def worths(self) -> Sequence[float]:
        """The worth by the bin of the age."""
        time = self.gaps.rates.quantile(TTL_SHARE)
        return tuple(worth + KEPT * (edge < time) for worth, edge in zip(BY_AGE.worths, EDGES, strict=True))


@dataclass(frozen=True, slots=True)
class Start:
    """The state that a sequence began with. Numbers of blocks count from the beginning of the sequence."""

    hits: int = 0
    """Number of sequences before it in its conversation."""
    common: int = 0
    """Number of blocks that were cached when the conversation began: others have them, too."""
    fork: int = 0
    """Number of blocks before the latest point at which branches began."""
    digest: bytes = b""
    """Digest of the last block that it has in common with the turn that it continues. Empty: it continues none."""
    length: int = 0
    """Number of blocks that it has in common with that turn."""
    kind: str = ""
    """Kind of the pause after that turn."""
    pace: Pace = field(default=NO_PACE, compare=False)
    """Pace of its conversation by the gaps so far."""

    def shared(self, pause: Pause, prompt: int, length: int) -> int:
        """Number of the `length` blocks of a sequence that began so which are not its alone when it ends.

        `prompt` of them are those of its prompt. A finished branch takes with it what came since the fork. Other
        superseded state, such as an answer that is given anew, takes what came after the prompt.
        """
        if not pause.superseded:
            return min(self.common, length)
        before = self.fork if pause.kind == BRANCH else max(self.length, prompt)
        return min(max(self.common, before), length)


NEW = Start()


class Turn:
    """A sequence that has ended, and the open gap until its state is needed again. Only `TurnTracker` changes it."""

    __slots__ = (
        "answers",
        "at",
        "call",
        "follower",
        "gap_open",
        "kind",
        "length",
        "paced_at",
        "pause",
        "prompt",
        "prompt_end",
        "ratio_at",
        "stage",
        "start",
        "tenant",
        "time",
    )

    def __init__(
        self,
        time: float,
        departure: Departure,
        kind: Kind,
        start: Start,
        *,
        length: int,
        prompt: int,
        prompt_end: bytes,
    ) -> None:
        self.time = time
        """When the sequence ended, in seconds."""
        self.pause = departure.pause
        self.tenant = departure.tenant
        self.kind = kind
        self.stage = kind.stage(start.hits)
        self.length = length
        """Number of its blocks."""
        self.prompt = prompt
        """Number of the blocks of its prompt."""
        self.prompt_end = prompt_end
        """Digest of the last of these, if no other prompt had it; empty otherwise."""
        self.start = start
        self.call = 0
        """Number of the call that freed its blocks; 0 until then."""
        self.follower = b""
        """Digest of the last block of the latest turn that continued this one and has ended; empty if none has."""
        self.answers = 0
        """Number of sequences that have continued it."""
        self.gap_open = False
        self.at = self.ratio_at = self.paced_at = 0
        """The bins that its age has reached, in seconds, in units of the expected pause and in those of its pace."""

    @property
    def shared(self) -> int:
        """Number of its blocks, the first, that are not its alone."""
        return self.start.shared(self.pause, self.prompt, self.length)

    @property
    def scale(self) -> float:
        """Expected pause in seconds; 1 without a hint."""
        return 1.0 if self.pause.expected is None else max(self.pause.expected, LEAST_EXPECTED)

    def freed_by(self, call: int) -> None:
        """This call frees its blocks."""
        self.call = call

    def followed_by(self, last: bytes) -> None:
        """The turn that continued it has ended with this block."""
        self.follower = last

    def count_answer(self) -> None:
        """One more sequence continues it."""
        self.answers += 1

    def begin(self) -> None:
        """Open the gap."""
        self.gap_open, self.at, self.ratio_at, self.paced_at = True, 0, 0, 0
        self.stage.begin(self.time)
        self.kind.paced.begin(self.time)
        if self.pause.expected is not None:
            self.kind.ratios.begin(self.time)

    def advance(self, now: float) -> float:
        """Note how long the gap has lasted. Returns the time after `now` at which to note it again; inf after a day."""
        age = now - self.time
        at, ratio_at = max(self.at, bin_of(age)), max(self.ratio_at, bin_of(age / self.scale))
        paced_at = max(self.paced_at, bin_of(age / self.start.pace.factor))
        if at > self.at:
            self.stage.last(self.time, self.at, at)
        if paced_at > self.paced_at:
            self.kind.paced.last(self.time, self.paced_at, paced_at)
        if self.pause.expected is not None and ratio_at > self.ratio_at:
            self.kind.ratios.last(self.time, self.ratio_at, ratio_at)
        self.at, self.ratio_at, self.paced_at = at, ratio_at, paced_at
        # A rounded sum of a large time and a small edge may not lie after `now`.
        return inf if age >= LONGEST else max(self.time + EDGES[min(at + 1, BINS - 1)], now + SHORTEST)

    def end(self, now: float) -> Pace:
        """Close the gap: the state is needed now. Returns the pace of the conversation after it."""
        self.gap_open = False
        gap = max(now - self.time, EDGES[1] / 2)
        if self.pause.expected is not None:
            self.kind.judge(gap, self.scale)
            self.kind.ratios.end(self.time, self.ratio_at, bin_of(gap / self.scale))
        pace = self.start.pace
        after = self.kind.judge_pace(gap, pace, self.stage)
        self.kind.paced.end(self.time, self.paced_at, bin_of(gap / pace.factor))
        self.stage.end(self.time, self.at, bin_of(gap))
        return after

    def abandon(self) -> None:
        """Watch the gap no longer. It counts as one that has lasted until now."""
        self.gap_open = False

    def withdraw(self) -> None:
        """Close the gap as if it had never begun."""
        self.gap_open = False
        self.stage.withdraw(self.time, self.at)
        self.kind.paced.withdraw(self.time, self.paced_at)
        if self.pause.expected is not None:
            self.kind.ratios.withdraw(self.time, self.ratio_at)


Appraisal = Callable[[Turn], Forecast]


def by_pause(turn: Turn) -> Forecast:
    """The worth by what was learned of such pauses, or by the hint if hints of this kind were better so far."""
    if turn.pause.superseded:
        return NOTHING
    if turn.pause.expected is not None and turn.kind.believes_hints:
        return Forecast(turn.kind.ratios, turn.scale)
    if turn.start.pace.seen and turn.kind.believes_paces:
        return Forecast(turn.kind.paced, turn.start.pace.factor)
    return Forecast(turn.stage)


def by_ttl(turn: Turn) -> Forecast:
    """As Continuum: after a tool call the state is kept for a learned time. All else goes by its last use.

    The time is that within which nine of ten calls of the tool that ever ended have ended.
    """
    return Forecast(KeptAwhile(turn.kind.gaps) if turn.pause.kind.startswith("tool") else BY_AGE)


def by_hits(turn: Turn) -> Forecast:
    """Tokens times hits over bytes: tokens and bytes of a block are equal everywhere, so the hits remain."""
    return Forecast(EQUAL, 1.0 / (1 + turn.start.hits))


APPRAISALS: dict[str, Appraisal] = {"pauses": by_pause, "ttl": by_ttl, "hits": by_hits}
"""The appraisal of turns, by the name of the eviction."""


class Watcher(Protocol):
    """An order of blocks by the worth of their turns."""

    def turn_changed(self, call: int) -> None:
        """More is known of the turn whose blocks were freed by this call.

        If it is superseded now, those of its blocks that others share are from now on of the call of the number's
        negative.
        """
        ...


class TurnTracker:
    """The sequences that have ended, by what another one would find of them. Every operation is O(log n) amortised.

    It teaches the kinds of pauses how long gaps take: also of state that was evicted long before it was needed.
    """

    by_age = False

    def __init__(self, appraise: Appraisal = by_pause) -> None:
        self._appraise = appraise
        self.kinds = Kinds()
        self._unknown = Turn(-inf, NOTHING_SAID, Kind(), NEW, length=0, prompt=0, prompt_end=b"")
        """Stands for state of which nothing is known."""
        self._open: OrderedDict[bytes, Turn] = OrderedDict()
        """Turns by the digest of their last full block."""
        self._requests: OrderedDict[str, tuple[bytes, int]] = OrderedDict()
        """The digest of each turn's last block and the call that freed its blocks, by request."""
        self._prompts: dict[bytes, bytes] = {}
        """The digest of each open turn's last block, by that of the last block of its prompt."""
        self._prompt_ends: OrderedDict[bytes, None] = OrderedDict()
        """Digests of the last blocks of recent prompts."""
        self._calls: OrderedDict[int, Turn] = OrderedDict()
        """Turns by the number of the call that freed their blocks."""
        self._passed: OrderedDict[bytes, Turn] = OrderedDict()
        """Turns that were continued, by the digest of their last full block."""
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
        """A sequence with these blocks begins, the first `found` of which are cached: it may continue a turn.

        It continues a turn if it has all of its blocks, or those of its prompt: a client may render an answer in other
        tokens than the model gave. If another sequence has continued that turn before, this one goes on in its place.
        """
        self.advance(now)
        for at in range(len(digests) - 1, -1, -1):
            last = self._prompts.get(digests[at], digests[at])
            if last in self._open:
                return self._continue(last, digests[at], at + 1, now)
            if last in self._passed and self._passed[last].answers < MOST_ANSWERS:
                return self._continue_again(last, at + 1)
        return Start(common=found)

    def _continue(self, last: bytes, digest: bytes, length: int, now: float) -> Start:
        """A sequence continues the turn of this last block, of which it has the first blocks, `length` of them."""
        turn = self._forget(last)
        pace = turn.end(now)
        start = replace(turn.start, hits=turn.start.hits + 1, pace=pace)
        if turn.pause.kind != BRANCH:
            self._pass(last, turn)
            return Start(start.hits, start.common, start.fork, digest, length, turn.pause.kind, pace)
        # Further branches begin here, and then the trunk goes on.
        departure = Departure(tenant=turn.tenant, pause=Pause(BRANCH))
        trunk = self._renewed(turn, departure, now, start)
        self._open_turn(last, trunk)
        return Start(start.hits, start.common, length, digest, length, BRANCH, pace)

    def _pass(self, last: bytes, turn: Turn) -> None:
        """Remember a turn that is continued: others may go on from it, too."""
        turn.count_answer()
        self._passed[last] = turn
        if len(self._passed) > MOST_OPEN:
            self._passed.popitem(last=False)

    def _continue_again(self, last: bytes, length: int) -> Start:
        """A sequence goes on from a turn that another has continued. State after it is likely of no more use."""
        turn = self._passed[last]
        turn.count_answer()
        self._replace_after(last)
        start = turn.start
        return Start(start.hits + 1, start.common, start.fork, last, length, turn.pause.kind, start.pace)

    def _replace_after(self, last: bytes) -> None:
        """Count the open turn that leads on from a passed one as replaced. How often such state returns is learned."""
        for _ in range(MOST_OPEN):
            passed = self._passed.get(last)
            if passed is None:
                break
            last = passed.follower
        old = self._open.get(last)
        if old is None or old.pause.superseded or old.pause.kind in (BRANCH, REPLACED):
            return
        self._forget(last)
        departure = Departure(tenant=old.tenant, pause=replace(old.pause, kind=REPLACED, expected=None))
        new = self._renewed(old, departure, old.time, old.start)
        self._open_turn(last, new)
        self._free_as(old.call, new)

    def left(
        self, digests: Sequence[bytes], departure: Departure, start: Start, call: int, now: float, *, prompt: int = 0
    ) -> int:
        """A sequence with these full blocks has ended, the first `prompt` of which are those of its prompt.

        Returns how many of them, the first, are not its alone. The call of number `call` is about to free its own
        blocks, and the call after it the others, if there are any.
        """
        self.advance(now)
        prompt = min(prompt, len(digests))
        prompt_end = self._tell_apart(digests[prompt - 1]) if prompt else b""
        turn = self._turn(departure, start, now, length=len(digests), prompt=prompt, prompt_end=prompt_end)
        self._bind(call, turn)
        if turn.shared:
            self._bind(call + 1, self._leave_shared(turn))
        self._requests.pop(departure.request, None)
        self._requests[departure.request] = digests[-1], call
        if len(self._requests) > MOST_OPEN:
            self._requests.popitem(last=False)
        if not departure.pause.superseded:
            if start.digest in self._passed and start.digest != digests[-1]:
                self._passed[start.digest].followed_by(digests[-1])
            self._open_turn(digests[-1], turn)
        return turn.shared

    def _tell_apart(self, prompt_end: bytes) -> bytes:
        """The digest, or none if another prompt had it: short prompts end within the block of a system prompt."""
        if prompt_end in self._prompt_ends:
            return b""
        self._prompt_ends[prompt_end] = None
        if len(self._prompt_ends) > MOST_OPEN:
            self._prompt_ends.popitem(last=False)
        return prompt_end

    def _leave_shared(self, turn: Turn) -> Turn:
        """The turn of the blocks that `turn` leaves to others. If it is superseded, the turn before is open again."""
        start, pause = turn.start, turn.pause
        kind = "" if not pause.superseded else BRANCH if pause.kind == BRANCH else start.kind
        departure = Departure(tenant=turn.tenant, pause=Pause(kind))
        shared = self._turn(departure, start, turn.time, length=start.length, prompt=start.length, prompt_end=b"")
        if pause.superseded and start.digest and kind != BRANCH and start.digest not in self._open:
            self._open_turn(start.digest, shared)
        return shared

    def _open_turn(self, last: bytes, turn: Turn) -> None:
        """Open a turn whose last block has this digest, in place of one that is open there."""
        if last in self._open:
            self._forget(last).withdraw()
        elif len(self._open) >= MOST_OPEN:
            self._forget(next(iter(self._open)))
        self._open[last] = turn
        if turn.prompt_end:
            self._prompts[turn.prompt_end] = last
        self._begin(turn)

    def _turn(
        self, departure: Departure, start: Start, now: float, *, length: int, prompt: int, prompt_end: bytes
    ) -> Turn:
        kind = self.kinds.find(departure.tenant, departure.pause.kind)
        return Turn(now, departure, kind, start, length=length, prompt=prompt, prompt_end=prompt_end)

    def _renewed(self, turn: Turn, departure: Departure, time: float, start: Start) -> Turn:
        """A turn with the blocks of `turn`."""
        return self._turn(departure, start, time, length=turn.length, prompt=turn.prompt, prompt_end=turn.prompt_end)

    def _bind(self, call: int, turn: Turn) -> None:
        turn.freed_by(call)
        self._calls[call] = turn
        if len(self._calls) > MOST_OPEN:
            self._calls.popitem(last=False)

    def note(self, request: str, pause: Pause, now: float) -> bool:
        """Take note of what is known now of the pause after a request. Returns False if that is of no use any more.

        That is so once another request has continued its turn, unless what the turn alone has is superseded. The gap
        counts from the end of the request's sequence, and so does `expected`.
        """
        self.advance(now)
        last, call = self._requests.get(request, (b"", 0))
        old = self._calls.get(call)
        if old is None or not (old.gap_open or pause.superseded) or old.pause.superseded:
            return False
        departure = Departure(request, old.tenant, pause)
        new = self._renewed(old, departure, old.time, old.start)
        if old.gap_open:
            old.withdraw()
            self._forget(last)
        if pause.superseded:
            self._bind(-call, self._leave_shared(new))
        else:
            self._open_turn(last, new)
        self.advance(now)
        self._free_as(call, new)
        return True

    def _free_as(self, call: int, turn: Turn) -> None:
        """The blocks that this call freed are those of `turn` now, of which more is known than before."""
        turn.freed_by(call)
        if call in self._calls:
            self._calls[call] = turn
            for watcher in self._watchers:
                watcher.turn_changed(call)

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

    def worth_at(self, digest: bytes, last: float, now: float) -> float:
        """`worth` of state that ends with the block of this digest."""
        return self.forecast(self._open.get(digest, self._unknown)).worth(now - last)

    def wish_at(self, digest: bytes) -> Wish:
        """The client's wish for state that ends with the block of this digest, and whose it is."""
        turn = self._open.get(digest, self._unknown)
        until = turn.pause.keep_until
        return Wish(turn.tenant, -inf if until is None else until)

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

    def _forget(self, last: bytes) -> Turn:
        """Remove an open turn. Its blocks keep the worth that they have."""
        turn = self._open.pop(last)
        turn.abandon()
        if self._prompts.get(turn.prompt_end) == last:
            del self._prompts[turn.prompt_end]
        return turn
