"""The router's interface: turns, views of replicas, prices, choices and moves, and the Router protocol."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from holdfast.core.types import Found

RouterName = Literal["priced", "round-robin", "least-loaded", "session-hash", "prefix-tree", "power-of-two"]
"""Policies of routing."""


class ReplicaState(enum.StrEnum):
    """Whether a replica takes turns."""

    READY = "ready"
    DRAINING = "draining"
    """The replica finishes its turns, gets no new ones, and its conversations move away."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as the router sees it."""

    key: str | None
    """Conversation id: of a stored conversation or a chain of responses. None: only the prefix is known."""
    chain: Sequence[bytes]
    """Digests of the prompt's full blocks, as in `lm.memory.digests`. They depend on the tenant."""
    prompt_tokens: int
    output_estimate: int
    """Expected number of tokens of the answer."""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as the caller sees it when a turn comes."""

    name: str
    waiting_ms: float | None = None
    """Milliseconds of queued and running work until a new turn would begin.

    None: the router uses its own estimate, from the turns that it sent.
    """
    free_tokens: int | None = None
    """Number of KV tokens that can be allocated without dropping state. None: unknown."""
    most_tokens: int | None = None
    """Number of KV tokens that its tiers hold together. None: unknown or unlimited."""
    link_ms_per_token: float | None = None
    """Milliseconds per token to copy KV from another replica, as measured. None: nothing is moved to it."""
    host_ms_per_token: float = 0.0
    """Milliseconds per token to copy KV from the replica's host tier to its device."""
    lower_ms_per_token: float = 0.0
    """Milliseconds per token to copy KV from the replica's disk or a remote tier."""
    state: ReplicaState = ReplicaState.READY


@dataclass(frozen=True, slots=True)
class Price:
    """Cost of a turn at one replica, in ms. `total` is the time until the first token."""

    wait: float
    fetch: float
    """Time to copy state there, in ms: from other replicas beyond the wait, and from lower tiers."""
    work: float
    """Time to compute tokens that are neither there nor copied, in ms."""
    found: Found
    """State that the replica holds before anything is copied."""
    fetched: int
    """Number of tokens that are copied from another replica."""
    link: float
    """Time in ms for which the copy occupies the link."""
    displaced: float
    """Expected time in ms to recompute other state that this turn's state displaces."""

    @property
    def total(self) -> float:
        """Milliseconds until the first token."""
        return self.wait + self.fetch + self.work


@dataclass(frozen=True, slots=True)
class Choice:
    """Destination of a turn."""

    replica: str
    move_from: str | None = None
    """Replica from which state is copied before the turn begins. None: missing state is computed again."""
    priced: Mapping[str, Price] | None = None
    """Prices by replica, for logs and metrics; None from a policy that does not price."""


@dataclass(frozen=True, slots=True)
class Move:
    """An idle conversation whose state is to be copied ahead of its next turn. Report the end by `Router.moved`."""

    key: str
    chain: Sequence[bytes]
    tokens: int
    """Number of tokens that the target lacks."""
    source: str
    target: str


FoundAt = Callable[[str], Found | None]
"""Function that returns the state that a replica, given by name, holds of a turn's prompt.

It returns None if the replica did not answer. Then the router's own map is used.
"""


class Router(Protocol):
    """Chooses a replica for each turn, and records the turns. No method waits.

    The calls for a turn are `choose`, `sent`, `started` at its first token, and `ended`. If its replica dies: `lost`,
    and `choose` again. `now` is in seconds and never decreases.
    """

    name: RouterName

    def unknown(self, turn: Turn) -> int:
        """Return the number of prompt tokens that a replica may hold without the router's knowledge.

        It is 0 for a known conversation, and for a policy that ignores state. Otherwise it is the most that asking the
        replicas could find.
        """
        ...

    def choose(self, turn: Turn, replicas: Sequence[ReplicaView], now: float, found: FoundAt | None = None) -> Choice:
        """Choose the replica for this turn. `found` returns what a replica really holds; None: use the router's map.

        Raises ValueError if no replica is ready.
        """
        ...

    def sent(self, request: str, turn: Turn, choice: Choice, now: float) -> None:
        """Record that the turn was sent to the chosen replica as the request of this id."""
        ...

    def started(self, request: str, now: float) -> None:
        """Record the first token of a request."""
        ...

    def ended(self, request: str, now: float, chain: Sequence[bytes] = ()) -> None:
        """Record a request's end. `chain` has the digests of prompt and answer, if known. Ignores unknown requests."""
        ...

    def moved(self, move: Move, tokens: int, now: float) -> None:
        """Record a move's end: the first `tokens` tokens arrived. If any did, the target now has the conversation."""
        ...

    def lost(self, replica: str) -> None:
        """Forget the state and the requests of a replica that died or was removed."""
        ...

    def rebalance(self, now: float, replicas: Sequence[ReplicaView]) -> list[Move]:
        """Return moves of idle conversations away from overloaded or draining replicas. Call about once a second."""
        ...
