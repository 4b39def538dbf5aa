"""The router's interface: turns, views of replicas, prices, choices and moves, and the Router protocol."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from holdfast.core.types import Found

RouterName = Literal["priced", "round-robin", "least-loaded", "session-hash", "prefix-tree", "power-of-two"]
"""Names of the routing policies."""


class ReplicaState(enum.StrEnum):
    """Whether a replica accepts turns."""

    READY = "ready"
    DRAINING = "draining"
    """The replica finishes its turns and gets no new ones. Its conversations move away."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as the router sees it."""

    key: str | None
    """Conversation id: of a stored conversation or of a chain of responses. If None, only the prefix is known."""
    chain: Sequence[bytes]
    """Digests of the prompt's full blocks, as in `lm.memory.digests`. They depend on the tenant."""
    prompt_tokens: int
    output_estimate: int
    """Expected number of tokens of the answer."""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica's state when a turn arrives."""

    name: str
    waiting_ms: float | None = None
    """Milliseconds until a new turn could begin, because of queued and running work.

    If None, the router uses its own estimate, based on the turns that it has sent.
    """
    free_tokens: int | None = None
    """Number of KV tokens that can be allocated without dropping state; None if it is unknown."""
    most_tokens: int | None = None
    """Number of KV tokens that all its tiers can hold; None if it is unknown or unlimited."""
    link_ms_per_token: float | None = None
    """Measured milliseconds per token to copy KV from another replica; None if nothing can be copied here."""
    host_ms_per_token: float = 0.0
    """Milliseconds per token to copy KV from the replica's host tier to its device."""
    lower_ms_per_token: float = 0.0
    """Milliseconds per token to copy KV from the replica's disk or a remote tier."""
    state: ReplicaState = ReplicaState.READY


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a turn at one replica, in ms. `total` is the expected time until the first token."""

    wait: float
    fetch: float
    """Time in ms to copy state: from other replicas, as far as it exceeds the wait, and from lower tiers."""
    work: float
    """Time in ms to compute the tokens that are neither found nor copied."""
    found: Found
    """State that the replica has before any copy."""
    fetched: int
    """Number of tokens to copy from another replica."""
    link: float
    """Time in ms for which the copy occupies the link."""
    displaced: float
    """Expected time in ms to recompute state that this turn displaces."""

    @property
    def total(self) -> float:
        """Milliseconds until the first token."""
        return self.wait + self.fetch + self.work


@dataclass(frozen=True, slots=True)
class Choice:
    """The router's decision for a turn."""

    replica: str
    move_from: str | None = None
    """Replica from which state is copied before the turn begins; None if missing state is computed instead."""
    priced: Mapping[str, Price] | None = None
    """Prices by replica, for logs and metrics; None if the policy has no prices."""


@dataclass(frozen=True, slots=True)
class Move:
    """An idle conversation whose state should be copied before its next turn. Report the end to `Router.moved`."""

    key: str
    chain: Sequence[bytes]
    tokens: int
    """Number of tokens that the target lacks."""
    source: str
    target: str


FoundAt = Callable[[str], Found | None]
"""Function that returns how much of a turn's prompt a replica has, by the replica's name.

It returns None if the replica did not answer. The router then uses its own map.
"""


class Router(Protocol):
    """Chooses a replica for each turn, and keeps records of the turns. No method waits.

    The calls for a turn are `choose`, `sent`, `started` at the first token, and `ended`. If its replica dies, `lost` is
    called, and then `choose` again. `now` is in seconds and never decreases.
    """

    name: RouterName

    def unknown(self, turn: Turn) -> int:
        """Return the number of prompt tokens that a replica may have without the router knowing.

        It is 0 for a known conversation, and for a policy that ignores state. Otherwise it is the largest number that
        asking the replicas could find.
        """
        ...

    def choose(self, turn: Turn, replicas: Sequence[ReplicaView], now: float, found: FoundAt | None = None) -> Choice:
        """Choose the replica for a turn. `found` returns what a replica has; None: the router uses its own map.

        Raises ValueError if no replica is ready.
        """
        ...

    def sent(self, request: str, turn: Turn, choice: Choice, now: float) -> None:
        """Record that a turn was sent to the chosen replica, as the request with this id."""
        ...

    def started(self, request: str, now: float) -> None:
        """Record the first token of a request."""
        ...

    def ended(self, request: str, now: float, chain: Sequence[bytes] = ()) -> None:
        """Record a request's end. `chain`, if known, has its blocks' digests. Unknown requests are ignored."""
        ...

    def moved(self, move: Move, tokens: int, now: float) -> None:
        """Record the end of a move: `tokens` tokens arrived. If any did, the target has the conversation."""
        ...

    def lost(self, replica: str) -> None:
        """Forget the state and the requests of a replica that has died or was removed."""
        ...

    def rebalance(self, now: float, replicas: Sequence[ReplicaView]) -> list[Move]:
        """Return moves of idle conversations from overloaded or draining replicas. Call it about once a second."""
        ...
