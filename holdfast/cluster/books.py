"""A router's books: which replicas have which prefixes, and which requests are under way where. Bounded and pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

STRIDE = 8
"""Of this many blocks of a prompt, one is remembered, and the last one always."""


class Held(NamedTuple):
    """Leading blocks of a chain that a replica has."""

    expected: int
    """There already, or once it has computed what was sent to it."""
    there: int
    """Computed: what others may copy."""


class PrefixMap:
    """Which replicas have which prefixes, by the digest of a prefix's last block. The least recently used goes first.

    A digest identifies all tokens up to the end of its block, so one lookup finds a prefix of any length. One block in
    STRIDE is remembered: what is found may be that much too short, and never too long.
    """

    def __init__(self, most: int, stride: int = STRIDE) -> None:
        """Remembers at most `most` prefixes."""
        self._most, self._stride = most, stride
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        self._bits: dict[str, int] = {}
        """By replica, its bit in the masks: what it is expected to have. The next higher bit is what is there."""

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, chain: Sequence[bytes], replica: str, *, there: bool) -> None:
        """The replica has the blocks of this chain, or is about to compute them."""
        masks, stride, bit = self._masks, self._stride, self._bit(replica)
        bits = bit | bit << 1 if there else bit
        last = len(chain) - 1
        for index in (*range(stride - 1, last, stride), last) if last >= 0 else ():
            digest = chain[index]
            masks[digest] = masks.get(digest, 0) | bits
            masks.move_to_end(digest)
        while len(masks) > self._most:
            masks.popitem(last=False)

    def find(self, chain: Sequence[bytes]) -> dict[str, Held]:
        """By replica, how much of this chain it has; without those that have nothing."""
        masks, bits = self._masks, self._bits
        expected: dict[str, int] = {}
        there: dict[str, int] = {}
        for index in range(len(chain) - 1, -1, -1):
            mask = masks.get(chain[index])
            if mask:
                for replica, bit in bits.items():
                    if mask & bit and replica not in expected:
                        expected[replica] = index + 1
                    if mask & bit << 1 and replica not in there:
                        there[replica] = index + 1
                if len(there) == len(bits):
                    break
        return {replica: Held(blocks, there.get(replica, 0)) for replica, blocks in expected.items()}

    def forget(self, replica: str) -> None:
        """This replica has nothing any more. Takes time in proportion to the whole map."""
        bit = self._bits.pop(replica, 0)
        if bit:
            for digest in [digest for digest, mask in self._masks.items() if mask & bit]:
                self._masks[digest] &= ~(bit | bit << 1)
                if not self._masks[digest]:
                    del self._masks[digest]

    def _bit(self, replica: str) -> int:
        bit = self._bits.get(replica)
        if bit is None:
            taken = {*self._bits.values()}
            bit = next(1 << place for place in range(0, 2 * len(taken) + 1, 2) if 1 << place not in taken)
            self._bits[replica] = bit
        return bit


@dataclass(slots=True)
class Underway:
    """A request that a replica has, in ms of its device."""

    replica: str
    work: float
    """Until the first token."""
    decode: float
    """What its whole answer adds to the steps that it is in."""
    per_token: float
    """What one token of the answer adds."""
    chain: Sequence[bytes] = ()
    """Of its prompt."""
    key: str | None = None
    started: bool = False


@dataclass(slots=True)
class Backlog:
    """The requests of one replica, as their router prices them."""

    waiting: OrderedDict[str, Underway] = field(default_factory=OrderedDict)
    """Those without a first token, by id, in the order in which they were sent."""
    running: dict[str, Underway] = field(default_factory=dict)
    work: float = 0.0
    """Of those that wait, in ms."""
    decode: float = 0.0
    """Of all requests, in ms."""
    per_token: float = 0.0
    """What the next tokens of those that run add to a step, in ms."""
    since: float = 0.0
    """When work on the first of those that wait began, in seconds."""

    def wait(self, now: float, step: float) -> float:
        """Milliseconds until all prompts here are computed. Each step of `step` ms carries the decodes along."""
        if not self.waiting:
            return 0.0
        stretch = 1 + self.per_token / step
        first = next(iter(self.waiting.values())).work * stretch
        return max(0.0, self.work * stretch - min(first, (now - self.since) * 1e3))


class Requests:
    """Every request under way, by replica. What is unknown is ignored: an answer may come after its replica is lost."""

    def __init__(self) -> None:
        self._by_id: dict[str, Underway] = {}
        self._backlogs: dict[str, Backlog] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, replica: str) -> Backlog:
        """The backlog of a replica; empty for an unknown one."""
        return self._backlogs.get(replica) or Backlog()

    def get(self, request: str) -> Underway | None:
        return self._by_id.get(request)

    def count(self, replica: str) -> int:
        """Requests under way at a replica."""
        backlog = self._backlogs.get(replica)
        return len(backlog.waiting) + len(backlog.running) if backlog else 0

    def sent(self, request: str, underway: Underway, now: float) -> None:
        """Raises ValueError if the id is under way already."""
        if request in self._by_id:
            raise ValueError(f"request {request} is under way already; give each request an id of its own")
        backlog = self._backlogs.setdefault(underway.replica, Backlog())
        if not backlog.waiting:
            backlog.since = now
        self._by_id[request] = backlog.waiting[request] = underway
        backlog.work += underway.work
        backlog.decode += underway.decode

    def started(self, request: str, now: float) -> Underway | None:
        """Its prompt is computed. None if that was known, or the request is not."""
        underway = self._by_id.get(request)
        if underway is None or underway.started:
            return None
        backlog = self._backlogs[underway.replica]
        self._leave_queue(request, underway, backlog, now)
        underway.started = True
        backlog.running[request] = underway
        backlog.per_token += underway.per_token
        return underway

    def ended(self, request: str, now: float) -> Underway | None:
        """Remove a request; None if it is unknown."""
        underway = self._by_id.pop(request, None)
        if underway is not None:
            backlog = self._backlogs[underway.replica]
            if underway.started:
                del backlog.running[request]
                backlog.per_token = backlog.per_token - underway.per_token if backlog.running else 0.0
            else:
                self._leave_queue(request, underway, backlog, now)
            backlog.decode = backlog.decode - underway.decode if backlog.waiting or backlog.running else 0.0
        return underway

    def forget(self, replica: str) -> Iterable[Underway]:
        """Remove a replica with all of its requests, which are returned."""
        backlog = self._backlogs.pop(replica, None)
        if backlog is None:
            return ()
        gone = {**backlog.waiting, **backlog.running}
        for request in gone:
            del self._by_id[request]
        return gone.values()

    @staticmethod
    def _leave_queue(request: str, underway: Underway, backlog: Backlog, now: float) -> None:
        del backlog.waiting[request]
        backlog.work = backlog.work - underway.work if backlog.waiting else 0.0
        backlog.since = now
