"""A router's records: the prefixes that each replica has, and its requests in progress. Bounded and pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

STRIDE = 8
"""Distance in blocks between two remembered blocks of a chain. The last block is also remembered."""


class Held(NamedTuple):
    """Numbers of a chain's blocks that a replica has."""

    expected: int
    """Number of blocks that the replica has now or will have after its current requests."""
    computed: int
    """Number of computed blocks, which other replicas may copy."""


@dataclass(slots=True)
class ReplicaDigests:
    """The remembered digests of one replica."""

    bit: int
    """The replica's bit for expected blocks in the masks. The next higher bit is for computed blocks."""
    blocks: OrderedDict[bytes, list[int]] = field(default_factory=OrderedDict)
    """Blocks that each digest represents, and the number of its last use. The least recently used is first."""
    uses: int = 0
    """Number of uses so far, which numbers the next use."""
    used: int = 0
    """Number of blocks that all digests represent."""
    size: int | None = None
    """Number of blocks that the replica has room for; None if it is unknown or unlimited."""


class PrefixMap:
    """Map from a prefix, by the digest of its last block, to the replicas that have it.

    A digest identifies all tokens up to the end of its block. Only every STRIDE-th block and the last block of a chain
    are remembered. A remembered block represents the blocks before it, too, back to the previous multiple of STRIDE. A
    replica of known size has the blocks that it used last. As in an engine, the first blocks of a chain are dropped
    before its last blocks.
    """

    def __init__(self, most: int, stride: int = STRIDE) -> None:
        """The map holds at most `most` digests. The least recently used are removed first."""
        self.dropped = 0
        """Number of blocks that replicas dropped for lack of room. Halved with `missed`, to follow recent use."""
        self.missed = 0
        """Number of dropped blocks that were needed again when no replica had them."""
        self._most, self._stride = most, stride
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        """Bits of the replicas that have a digest, by digest; 0 if all have dropped it."""
        self._replicas: dict[str, ReplicaDigests] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def resize(self, replica: str, blocks: int | None) -> None:
        """Set the number of blocks that a replica has room for; None if it is unknown or unlimited."""
        self._digests_of(replica).size = blocks

    def room(self, replica: str) -> float:
        """Return the number of blocks that a replica can add without dropping others; infinite if it is unknown."""
        digests = self._digests_of(replica)
        return inf if digests.size is None else max(0, digests.size - digests.used)

    def add(self, chain: Sequence[bytes], replica: str, *, computed: bool) -> None:
        """Record that a replica has the blocks of this chain, or will compute them."""
        masks, stride, digests = self._masks, self._stride, self._digests_of(replica)
        digests.uses += 1
        bits = digests.bit | digests.bit << 1 if computed else digests.bit
        last = len(chain) - 1
        for index in (*range(stride - 1, last, stride), last) if last >= 0 else ():
            digest, held = chain[index], digests.blocks
            if digest in held:
                held.move_to_end(digest)
                held[digest][1] = digests.uses
            else:
                start = index - index % stride
                blocks = index + 1 - start - sum(held[each][0] for each in chain[start:index] if each in held)
                held[digest] = [blocks, digests.uses]
                digests.used += blocks
                self.missed += blocks if masks.get(digest) == 0 else 0
            masks[digest] = masks.get(digest, 0) | bits
            masks.move_to_end(digest)
        while digests.size is not None and digests.used > digests.size:
            digest, (blocks, _) = digests.blocks.popitem(last=False)
            digests.used -= blocks
            self.dropped += blocks
            masks[digest] &= ~(3 * digests.bit)  # Both bits of the replica: expected and computed.
        # Halving both counts makes them follow recent use.
        if self.dropped > sum(each.size or 0 for each in self._replicas.values()):
            self.dropped, self.missed = self.dropped // 2, self.missed // 2
        while len(masks) > self._most:
            digest, mask = masks.popitem(last=False)
            for each in self._replicas.values():
                if mask & each.bit:
                    each.used -= each.blocks.pop(digest)[0]

    def drop_first(self, chain: Sequence[bytes], replica: str) -> None:
        """Make a replica drop this chain before other blocks, because another replica gets it.

        Blocks that the replica has used for another chain in the meantime are not affected.
        """
        held, latest = self._digests_of(replica).blocks, 0
        for digest in reversed(chain):
            if digest in held:
                latest = latest or held[digest][1]
                if held[digest][1] == latest:
                    held.move_to_end(digest, last=False)

    def find(self, chain: Sequence[bytes]) -> dict[str, Held]:
        """Return how much of this chain each replica has. Replicas without any of its blocks are left out."""
        masks, stride, counts = self._masks, self._stride, Counter[int]()
        for start in range(0, len(chain), stride):
            seen = 0
            for index in range(min(start + stride, len(chain)) - 1, start - 1, -1):
                new = masks.get(chain[index], 0) & ~seen
                if new:
                    counts[new] += index + 1 - start
                    seen |= new
        found = {}
        for replica, digests in self._replicas.items():
            expected = sum(blocks for mask, blocks in counts.items() if mask & digests.bit)
            if expected:
                computed = sum(blocks for mask, blocks in counts.items() if mask & digests.bit << 1)
                found[replica] = Held(expected, computed)
        return found

    def forget(self, replica: str) -> None:
        """Remove all blocks of a replica."""
        digests = self._replicas.pop(replica, None)
        if digests is None:
            return
        for digest in digests.blocks:
            self._masks[digest] &= ~(3 * digests.bit)
            if not self._masks[digest]:
                del self._masks[digest]

    def _digests_of(self, replica: str) -> ReplicaDigests:
        digests = self._replicas.get(replica)
        if digests is None:
            taken = {each.bit for each in self._replicas.values()}
            # A replica has two adjacent bits, so its first bit is at an even position.
            bit = next(1 << place for place in range(0, 2 * len(taken) + 1, 2) if 1 << place not in taken)
            digests = self._replicas[replica] = ReplicaDigests(bit)
        return digests


@dataclass(slots=True)
class PricedRequest:
    """A request in progress at a replica, priced in ms of the device's time."""

    replica: str
    work: float
    """Work in ms until the first token."""
    decode: float
    """Time in ms that the whole answer adds to the replica's steps."""
    per_token: float
    """Time in ms that each token of the answer adds to a step."""
    chain: Sequence[bytes] = ()
    """Digests of the prompt's blocks."""
    key: str | None = None
    started: bool = False


@dataclass(slots=True)
class Backlog:
    """The priced requests in progress at one replica."""

    waiting: OrderedDict[str, PricedRequest] = field(default_factory=OrderedDict)
    """Requests that have no first token yet, by id, in the order in which they were sent."""
    running: dict[str, PricedRequest] = field(default_factory=dict)
    work: float = 0.0
    """Work in ms of the waiting requests."""
    decode: float = 0.0
    """Decode time in ms of all requests."""
    per_token: float = 0.0
    """Time in ms that one token of each running request adds to a step."""
    since: float = 0.0
    """Time in seconds at which work on the first waiting request began."""

    def wait(self, now: float, step: float) -> float:
        """Return the ms until all waiting prompts are computed. Each step of `step` ms also includes the decodes."""
        if not self.waiting:
            return 0.0
        stretch = 1 + self.per_token / step
        first = next(iter(self.waiting.values())).work * stretch
        return max(0.0, self.work * stretch - min(first, (now - self.since) * 1e3))


class Requests:
    """All requests in progress, by replica.

    Reports about unknown requests are ignored, because a request may end after its replica was lost.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, PricedRequest] = {}
        self._backlogs: dict[str, Backlog] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, replica: str) -> Backlog:
        """Return the backlog of a replica; an empty one for an unknown replica."""
        return self._backlogs.get(replica) or Backlog()

    def get(self, request: str) -> PricedRequest | None:
        return self._by_id.get(request)

    def count(self, replica: str) -> int:
        """Return the number of requests in progress at a replica."""
        backlog = self._backlogs.get(replica)
        return len(backlog.waiting) + len(backlog.running) if backlog else 0

    def sent(self, request: str, underway: PricedRequest, now: float) -> None:
        """Add a request. Raises ValueError if a request with this id is in progress."""
        if request in self._by_id:
            raise ValueError(f"request {request} is under way already; give each request an id of its own")
        backlog = self._backlogs.setdefault(underway.replica, Backlog())
        if not backlog.waiting:
            backlog.since = now
        self._by_id[request] = backlog.waiting[request] = underway
        backlog.work += underway.work
        backlog.decode += underway.decode

    def started(self, request: str, now: float) -> PricedRequest | None:
        """Record a request's first token, and return the request; None if it is unknown or has started before."""
        underway = self._by_id.get(request)
        if underway is None or underway.started:
            return None
        backlog = self._backlogs[underway.replica]
        self._leave_queue(request, underway, backlog, now)
        underway.started = True
        backlog.running[request] = underway
        backlog.per_token += underway.per_token
        return underway

    def ended(self, request: str, now: float) -> PricedRequest | None:
        """Remove a request and return it; None if it is unknown."""
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

    def forget(self, replica: str) -> Iterable[PricedRequest]:
        """Remove a replica, and return the requests that it had."""
        backlog = self._backlogs.pop(replica, None)
        if backlog is None:
            return ()
        gone = {**backlog.waiting, **backlog.running}
        for request in gone:
            del self._by_id[request]
        return gone.values()

    @staticmethod
    def _leave_queue(request: str, underway: PricedRequest, backlog: Backlog, now: float) -> None:
        del backlog.waiting[request]
        backlog.work = backlog.work - underway.work if backlog.waiting else 0.0
        backlog.since = now
