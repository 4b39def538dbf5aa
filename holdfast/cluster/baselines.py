"""Routing policies to compare with. They do not price replicas, and they move no state."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from holdfast.cluster.turns import Choice, FoundAt, Move, ReplicaState, ReplicaView, RouterName, Turn


def ready(replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
    """Return the replicas that accept turns. Raises ValueError if there are none."""
    able = [replica for replica in replicas if replica.state is ReplicaState.READY]
    if not able:
        raise ValueError(f"none of {len(replicas)} replicas is ready; try again when one is")
    return able


def digest_number(text: str) -> int:
    """Return a 64-bit hash of the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class CountingRouter(ABC):
    """Base class of routers that count each replica's requests in progress."""

    name: RouterName

    def __init__(self) -> None:
        self._at: dict[str, str] = {}
        """Replica of each request, by request id."""
        self._count: dict[str, int] = {}

    def unknown(self, turn: Turn) -> int:
        """See `Router.unknown`."""
        return 0

    def choose(self, turn: Turn, replicas: Sequence[ReplicaView], now: float, found: FoundAt | None = None) -> Choice:
        """See `Router.choose`."""
        return Choice(self.pick(turn, ready(replicas)))

    @abstractmethod
    def pick(self, turn: Turn, replicas: Sequence[ReplicaView]) -> str:
        """Return the name of one of these replicas, which are all ready."""

    def least(self, replicas: Sequence[ReplicaView]) -> str:
        """Return the replica with the fewest requests; the first one if several have equally few."""
        return min(replicas, key=lambda replica: self._count.get(replica.name, 0)).name

    def sent(self, request: str, turn: Turn, choice: Choice, now: float) -> None:
        """See `Router.sent`."""
        if request in self._at:
            raise ValueError(f"request {request} is under way already; give each request an id of its own")
        self._at[request] = choice.replica
        self._count[choice.replica] = self._count.get(choice.replica, 0) + 1

    def started(self, request: str, now: float) -> None:  # noqa: B027  it counts requests, not steps
        """See `Router.started`."""

    def ended(self, request: str, now: float, chain: Sequence[bytes] = ()) -> None:
        """See `Router.ended`."""
        replica = self._at.pop(request, None)
        if replica is not None:
            self._count[replica] -= 1

    def moved(self, move: Move, tokens: int, now: float) -> None:  # noqa: B027  it never moves any
        """See `Router.moved`."""

    def lost(self, replica: str) -> None:
        """See `Router.lost`."""
        self._count.pop(replica, None)
        self._at = {request: at for request, at in self._at.items() if at != replica}

    def rebalance(self, now: float, replicas: Sequence[ReplicaView]) -> list[Move]:
        """Return no moves."""
        return []


class RoundRobin(CountingRouter):
    """Sends turns to the replicas in rotation."""

    name: RouterName = "round-robin"

    def __init__(self) -> None:
        super().__init__()
        self._turns = 0

    def pick(self, turn: Turn, replicas: Sequence[ReplicaView]) -> str:
        self._turns += 1
        return replicas[(self._turns - 1) % len(replicas)].name


class LeastLoaded(CountingRouter):
    """Sends each turn to the replica with the fewest requests in progress."""

    name: RouterName = "least-loaded"

    def pick(self, turn: Turn, replicas: Sequence[ReplicaView]) -> str:
        return self.least(replicas)


class PowerOfTwo(CountingRouter):
    """Draws two replicas at random, and sends the turn to the one with fewer requests (Mitzenmacher 2001).

    Equal seeds give equal choices.
    """

    name: RouterName = "power-of-two"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._seed, self._draws = seed, 0

    def pick(self, turn: Turn, replicas: Sequence[ReplicaView]) -> str:
        drawn = digest_number(f"{self._seed}/{self._draws}")
        self._draws += 1
        high, low = divmod(drawn, 1 << 32)
        first = low % len(replicas)
        second = (first + 1 + high % (len(replicas) - 1)) % len(replicas) if len(replicas) > 1 else first
        return self.least([replicas[first], replicas[second]])


class SessionHash(CountingRouter):
    """Sends all turns of a conversation to the same replica, by rendezvous hashing.

    If a replica is lost, only its own conversations go elsewhere. A turn without a key is hashed by its first block.
    """

    name: RouterName = "session-hash"

    def pick(self, turn: Turn, replicas: Sequence[ReplicaView]) -> str:
        key = turn.key if turn.key is not None else turn.chain[0].hex() if turn.chain else ""
        return max(replicas, key=lambda replica: digest_number(f"{replica.name}/{key}")).name


class PrefixTree(CountingRouter):
    """SGLang's cache-aware policy with its defaults (sgl-model-gateway, `policies/cache_aware.rs`).

    The load is unbalanced if the largest number of requests exceeds the smallest by more than `absolute` and by more
    than the factor `relative`. If so, the turn goes to the replica with the fewest requests. Otherwise, it goes to the
    replica that last received the turn's longest known prefix, if this prefix is more than the share `match` of the
    prompt. If it is not, the turn goes to the replica with the fewest requests. The tree consists of blocks here, and
    of characters or tokens in SGLang.
    """

    name: RouterName = "prefix-tree"

    def __init__(self, most: int = 1 << 20, *, match: float = 0.3, absolute: int = 64, relative: float = 1.5) -> None:
        """The tree has at most `most` blocks. Beyond it, the least recently used blocks are removed."""
        super().__init__()
        self._most, self._match, self._absolute, self._relative = most, match, absolute, relative
        self._last: OrderedDict[bytes, str] = OrderedDict()
        """Replica that received a block last, by the block's digest."""

    def pick(self, turn: Turn, replicas: Sequence[ReplicaView]) -> str:
        counts = [self._count.get(replica.name, 0) for replica in replicas]
        unbalanced = max(counts) - min(counts) > self._absolute and max(counts) > self._relative * min(counts)
        chosen = self.least(replicas) if unbalanced else self._matching(turn, replicas) or self.least(replicas)
        for digest in turn.chain:
            self._last[digest] = chosen
            self._last.move_to_end(digest)
        while len(self._last) > self._most:
            self._last.popitem(last=False)
        return chosen

    def _matching(self, turn: Turn, replicas: Sequence[ReplicaView]) -> str | None:
        """Return the ready replica that last received the longest known prefix; None if that is too short."""
        known, last = 0, None
        for digest in turn.chain:
            replica = self._last.get(digest)
            if replica is None:
                break
            known, last = known + 1, replica
        if not turn.chain or known / len(turn.chain) <= self._match:
            return None
        return last if any(replica.name == last for replica in replicas) else None

    def lost(self, replica: str) -> None:
        """See `Router.lost`."""
        super().lost(replica)
        for digest in [digest for digest, at in self._last.items() if at == replica]:
            del self._last[digest]
