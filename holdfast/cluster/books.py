"""A router's books: which replicas have which prefixes, and which requests are under way where. Bounded and pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

STRIDE = 8
"""Of this many blocks of a prompt, one is remembered, and the last one always."""


class Held(NamedTuple):
    """Blocks of a chain that a replica has."""

    expected: int
    """There already, or once it has computed what was sent to it."""
    there: int
    """Computed: what others may copy."""


@dataclass(slots=True)
class Shelf:
    """The remembered digests of one replica."""

    bit: int
    """Its bit in the masks: what it is expected to have. The next higher bit is what is there."""
    blocks: OrderedDict[bytes, list[int]] = field(default_factory=OrderedDict)
    """By digest, the blocks that it stands for, and the number of its last use; the least recently used first."""
    uses: int = 0
    """Uses so far."""
    used: int = 0
    """Blocks that all digests stand for."""
    size: int | None = None
    """Blocks for which there is room; None: unknown, or without end."""


class PrefixMap:
    """Which replicas have which blocks of prompts, by the digest of a prefix's last block.

    A digest identifies all tokens up to the end of its block. One block in STRIDE is remembered, and each chain's last
    one: it stands for those before it, back to the last multiple of STRIDE. A replica of known size has the blocks that
    it used last, up to that size. As in an engine, the first blocks of a chain go before its last ones.
    """

    def __init__(self, most: int, stride: int = STRIDE) -> None:
        """Remembers at most `most` digests; the least recently used go first."""
        self.given_up = 0
        """Blocks that replicas gave up of late for want of room: both counts fade as all state is replaced."""
        self.missed = 0
        """Blocks that were given up, and asked for again when no replica had them any more."""
        self._most, self._stride = most, stride
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        """By digest, the bits of those that have it; 0: all have given it up."""
        self._shelves: dict[str, Shelf] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def resize(self, replica: str, blocks: int | None) -> None:
        """A replica has room for so many blocks; None: unknown, or without end."""
        self._shelf(replica).size = blocks

    def room(self, replica: str) -> float:
        """Blocks that a replica can add without giving up others; infinite where its size is not known."""
        shelf = self._shelf(replica)
        return inf if shelf.size is None else max(0, shelf.size - shelf.used)

    def add(self, chain: Sequence[bytes], replica: str, *, there: bool) -> None:
        """The replica has the blocks of this chain, or is about to compute them."""
        masks, stride, shelf = self._masks, self._stride, self._shelf(replica)
        shelf.uses += 1
        bits = shelf.bit | shelf.bit << 1 if there else shelf.bit
        last = len(chain) - 1
        for index in (*range(stride - 1, last, stride), last) if last >= 0 else ():
            digest, held = chain[index], shelf.blocks
            if digest in held:
                held.move_to_end(digest)
                held[digest][1] = shelf.uses
            else:
                start = index - index % stride
                blocks = index + 1 - start - sum(held[each][0] for each in chain[start:index] if each in held)
                held[digest] = [blocks, shelf.uses]
                shelf.used += blocks
                self.missed += blocks if masks.get(digest) == 0 else 0
            masks[digest] = masks.get(digest, 0) | bits
            masks.move_to_end(digest)
        while shelf.size is not None and shelf.used > shelf.size:
            digest, (blocks, _) = shelf.blocks.popitem(last=False)
            shelf.used -= blocks
            self.given_up += blocks
            masks[digest] &= ~(3 * shelf.bit)
        if self.given_up > sum(each.size or 0 for each in self._shelves.values()):
            self.given_up, self.missed = self.given_up // 2, self.missed // 2
        while len(masks) > self._most:
            digest, mask = masks.popitem(last=False)
            for each in self._shelves.values():
                if mask & each.bit:
                    each.used -= each.blocks.pop(digest)[0]

    def give_way(self, chain: Sequence[bytes], replica: str) -> None:
        """Another replica gets this chain: what this one has used for nothing else since goes first."""
        held, latest = self._shelf(replica).blocks, 0
        for digest in reversed(chain):
            if digest in held:
                latest = latest or held[digest][1]
                if held[digest][1] == latest:
                    held.move_to_end(digest, last=False)

    def find(self, chain: Sequence[bytes]) -> dict[str, Held]:
        """By replica, how much of this chain it has; without those that have nothing."""
        masks, stride, counts = self._masks, self._stride, Counter[int]()
        for start in range(0, len(chain), stride):
            seen = 0
            for index in range(min(start + stride, len(chain)) - 1, start - 1, -1):
                new = masks.get(chain[index], 0) & ~seen
                if new:
                    counts[new] += index + 1 - start
                    seen |= new
        found = {}
        for replica, shelf in self._shelves.items():
            expected = sum(blocks for mask, blocks in counts.items() if mask & shelf.bit)
            if expected:
                there = sum(blocks for mask, blocks in counts.items() if mask & shelf.bit << 1)
                found[replica] = Held(expected, there)
        return found

    def forget(self, replica: str) -> None:
        """This replica has nothing any more."""
        shelf = self._shelves.pop(replica, None)
        if shelf is None:
            return
        for digest in shelf.blocks:
            self._masks[digest] &= ~(3 * shelf.bit)
            if not self._masks[digest]:
                del self._masks[digest]

    def _shelf(self, replica: str) -> Shelf:
        shelf = self._shelves.get(replica)
        if shelf is None:
            taken = {each.bit for each in self._shelves.values()}
            bit = next(1 << place for place in range(0, 2 * len(taken) + 1, 2) if 1 << place not in taken)
            shelf = self._shelves[replica] = Shelf(bit)
        return shelf


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
