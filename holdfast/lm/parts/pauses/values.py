"""Upcoming: a conversation whose next turn is expected, and Upcomings: all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from holdfast.core.pause import Pause

MOST_TURNS = 4096
"""Largest number of conversations whose next turn is expected. Beyond it the one noted first is forgotten."""


@dataclass(eq=False, slots=True)
class Upcoming:
    """A conversation whose next turn is expected. Times are in seconds on the scheduler's clock."""

    key: bytes
    """Digest of the last block of its prompt, with which the next turn begins, too."""
    digests: Sequence[bytes]
    """Digests of all its full blocks. Must not be changed."""
    tenant: str
    pause: Pause
    """The pause before it, as far as it is known. A turn that was announced without one has `NO_PAUSE`."""
    paused_at: float
    """Time at which the pause began; minus infinity: there is no next turn, as the conversation was superseded."""
    begin: float
    """Time from which its state may come back; infinity: never."""
    at: float
    """Time at which the next turn is expected; infinity: nothing is known of it."""
    until: float
    """Time from which the turn is not expected any longer."""
    place: int = 0
    """Number of leading blocks that were brought back, or need not be."""
    below: int = 0
    """Number of leading blocks that were asked of the tiers below the host, or need not be."""
    on_host: int = 0
    """Number of these that have come to the host, or will not."""
    reads_state: bool = False
    """Whether its recurrent state was being read to the host when that was last looked at."""

    def needed_at(self, now: float) -> float:
        """Time at which its state is expected to be needed, as far as is known `now`.

        If nothing is known, the longer a pause has lasted, the longer it is expected to last: at a rate of return of
        0.5 / t, half of all pauses that have lasted t end before 4 t.
        """
        return self.at if self.at < inf else now + 3.0 * (now - self.paused_at)


class Upcomings:
    """The conversations whose next turn is expected, by key. At most `most_blocks` digests are kept in all."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._turns: OrderedDict[bytes, Upcoming] = OrderedDict()
        self._begins: list[tuple[float, int, Upcoming]] = []
        """Heap of turns by `begin`. A turn that was forgotten stays until it comes up."""
        self._count = 0
        self._blocks = 0
        """Number of digests of all turns."""
        self._needed: dict[bytes, Upcoming] = {}
        """The first turn that is expected to need a block's state, by digest."""

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn: Upcoming) -> bool:
        return self._turns.get(turn.key) is turn

    def add(self, turn: Upcoming) -> None:
        """Expect a turn, in place of one with the same key."""
        if turn.key in self._turns:
            self.forget(turn.key)
        self._turns[turn.key] = turn
        self._blocks += len(turn.digests)
        needed = self._needed
        for digest in turn.digests:
            if turn.at <= needed.setdefault(digest, turn).at:
                needed[digest] = turn
        if turn.begin < inf:
            self._count += 1
            heappush(self._begins, (turn.begin, self._count, turn))
        while len(self._turns) > MOST_TURNS or (self._blocks > self._most_blocks and len(self._turns) > 1):
            self.forget(next(iter(self._turns)))

    def forget(self, key: bytes) -> Upcoming:
        """Expect a turn no longer. Raises KeyError if none has this key."""
        turn = self._turns.pop(key)
        self._blocks -= len(turn.digests)
        for digest in turn.digests:
            if self._needed.get(digest) is turn:
                del self._needed[digest]
        return turn

    def begun_by(self, digests: Collection[bytes]) -> list[Upcoming]:
        """The expected turns that a sequence with these digests is, or follows."""
        return [self._turns[key] for key in self._turns.keys() & digests]

    def due(self, now: float) -> list[Upcoming]:
        """Remove from the schedule the turns whose state may come back by now. Returns them."""
        found: list[Upcoming] = []
        while self._begins and self._begins[0][0] <= now:
            turn = heappop(self._begins)[2]
            if turn in self:
                found.append(turn)
        return found

    @property
    def next_begin(self) -> float:
        """Earliest time at which `due` may give a turn; infinity if there is none."""
        while self._begins and self._begins[0][2] not in self:
            heappop(self._begins)
        return self._begins[0][0] if self._begins else inf

    def latest(self, now: float) -> Iterator[bytes]:
        """The blocks of these conversations, those expected to be needed last first, and of each from its end on."""
        for turn in sorted(self._turns.values(), key=lambda turn: -turn.needed_at(now)):
            yield from reversed(turn.digests)

    def is_needed_after(self, time: float, now: float, digest: bytes, tenant: str = "") -> bool:
        """Whether a block's state is expected to be needed later than `time`, as far as is known `now`.

        False if nobody has said anything of the block, and for the state of another tenant than `tenant`, unless that
        is superseded: so a client's wrong hints cost only its own tenant.
        """
        turn = self._needed.get(digest)
        is_own = turn is not None and (turn.tenant == tenant or turn.paused_at == -inf)
        return turn is not None and is_own and turn.needed_at(now) > time
