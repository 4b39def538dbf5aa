"""CaptureQueue: the graphs that are not captured yet, and which of them a busy engine should capture next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

MARGIN = 1.5
"""Multiply the time that a graph of the next larger size took by this: the host may be slower the next time. On an H200
the slowest of ten halves took 1.3 times as long."""


class GraphSize(NamedTuple):
    """The size of one graph."""

    kind: Literal["decode", "head", "body"]
    """`decode`: a whole step that samples after each token. Other steps have a body and a head."""
    size: int
    """Number of tokens; of a head, number of rows."""
    segments: int | None = None
    """Number of segments of a body; None for the other kinds."""

    def holds(self, other: GraphSize) -> bool:
        """Whether a step of the other size could run as a graph of this one."""
        more = self.size >= other.size and (self.segments or 0) >= (other.segments or 0)
        return self.kind == other.kind and more


class Missed(NamedTuple):
    """A step ran as a larger graph than it needed, because its own was not captured yet."""

    size: GraphSize
    """The size of its own graph."""
    share: float
    """Share of the tokens of the larger graph that its own would not have had."""


class CaptureQueue:
    """The sizes that are left to capture, in two halves each: a rehearsal, then the capture.

    A half takes 10 to 40 ms in which no step may run. While nothing runs, that costs nothing. A busy engine pays with a
    pause of all streams, so a size is due only when steps have computed padding for lack of it for longer than both
    halves take. So pauses never take longer than the padding did (the rule of the ski rental: Karlin and others,
    Competitive Snoopy Caching, 1988). Padding costs less than its share of a step where the step reads weights most of
    the time, so this rule is early rather than late; each size pays once.

    The size that comes next depends on plans alone, not on times. So all devices of a group choose the same one.
    """

    def __init__(self) -> None:
        self.rehearsed: GraphSize | None = None
        """The size that is rehearsed and is captured next."""
        self._left: dict[GraphSize, int] = {}
        """The sizes, in the order in which idle time captures them, and the padding in tokens that each would save."""
        self._lost: defaultdict[GraphSize, float] = defaultdict(float)
        """Seconds for which steps have computed this padding."""
        self._took: dict[GraphSize, tuple[float, float]] = {}
        """Seconds of both halves, for each size that is captured."""
        self._expected: dict[GraphSize, tuple[float, float]] = {}
        """Results of `expected` since the last capture."""
        self._due = False

    def __len__(self) -> int:
        return len(self._left)

    def add(self, sizes: Iterable[GraphSize]) -> None:
        """Let these sizes be captured later."""
        self._left |= dict.fromkeys(sizes, 0)

    def clear(self) -> None:
        """Capture no further size."""
        self._left.clear()
        self._lost.clear()
        self.rehearsed, self._due = None, False

    @property
    def next(self) -> GraphSize:
        """The size to rehearse or to capture next: the one that would have saved most padding, else the first one."""
        return self.rehearsed or max(self._left, key=self._left.__getitem__)

    @property
    def padding(self) -> int:
        """Number of tokens of padding that the next size would have saved."""
        return self._left[self.next] if self._left else 0

    @property
    def due(self) -> float:
        """Seconds of the next half if it is worth a pause of all streams, else 0."""
        if self.rehearsed is not None:
            return self.expected(self.rehearsed)[1]
        return self.expected(self.next)[0] if self._due and self._left else 0.0

    def expected(self, size: GraphSize) -> tuple[float, float]:
        """Seconds that each half takes at most: MARGIN times those of the next larger size, which the start captured.

        No larger size, no time: then (0, 0).
        """
        if size not in self._expected:
            larger = min((each for each in self._took if each.holds(size)), default=None)
            rehearsal, capture = self._took[larger] if larger else (0.0, 0.0)
            self._expected[size] = MARGIN * rehearsal, MARGIN * capture
        return self._expected[size]

    def captured(self, size: GraphSize, rehearsal: float, capture: float) -> None:
        """Note that a size is captured, and how many seconds each half took."""
        self._took[size] = rehearsal, capture
        self._expected.clear()
        self._left.pop(size, None)
        self.rehearsed, self._due = None, False

    def missed(self, wanted: GraphSize, ran: GraphSize) -> Missed | None:
        """Note that a step ran as one graph and would have run as another. None if that would not have been better."""
        if wanted not in self._left:
            return None
        self._left[wanted] += ran.size - wanted.size
        return Missed(wanted, 1 - wanted.size / ran.size) if wanted.size < ran.size else None

    def lost(self, missed: Missed, seconds: float) -> None:
        """Note how many seconds a step took that missed a graph."""
        if missed.size in self._left:
            self._lost[missed.size] += missed.share * seconds
            self._due = self._due or self._lost[missed.size] >= sum(self.expected(missed.size))
