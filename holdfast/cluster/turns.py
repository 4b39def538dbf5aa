"""What routing is asked and what it answers: turns, views of replicas, prices, choices, moves; and the Router."""

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
    """It finishes what it has, gets no new turn, and its conversations move away."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request, as far as routing looks at it."""

    key: str | None
    """The conversation: a stored one, or the chain of responses. None: known by its prefix alone."""
    chain: Sequence[bytes]
    """Digests of the prompt's full blocks, as in `lm.memory.digests`. They hold the tenant."""
    prompt_tokens: int
    output_estimate: int
    """Tokens that the answer is expected to have."""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as the caller sees it when a turn comes."""

    name: str
    waiting_ms: float | None = None
    """Work queued and running there, in ms until a new turn would begin. None: the router's own estimate, from the
    turns that it sent."""
    free_tokens: int | None = None
    """Tokens of KV that can be allocated without dropping state. None: unknown."""
    most_tokens: int | None = None
    """Tokens of KV that its tiers hold together. None: unknown, or without end."""
    link_ms_per_token: float | None = None
    """Time to bring one token's KV from another replica, at the measured rate. None: nothing is moved to it."""
    host_ms_per_token: float = 0.0
    """Time to bring one token's KV from its own host tier to its device."""
    lower_ms_per_token: float = 0.0
    """The same from its disk or a remote tier."""
    state: ReplicaState = ReplicaState.READY


@dataclass(frozen=True, slots=True)
class Price:
    """What a turn costs at one replica, in ms. The first token comes after their sum."""

    wait: float
    fetch: float
    """What copying state there adds: from other replicas as far as it outlasts the wait, and from lower tiers."""
    work: float
    """Computing what is neither there nor brought."""
    found: Found
    """What the replica holds before anything is brought."""
    fetched: int
    """Tokens that come from another replica."""
    link: float
    """How long their copy takes the link, in ms."""
    displaced: float
    """Work to come, as other state has to go there for this turn's: what computing it again will probably cost."""

    @property
    def total(self) -> float:
        """Milliseconds until the first token."""
        return self.wait + self.fetch + self.work


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a turn goes."""

    replica: str
    move_from: str | None = None
    """The replica that state is brought from before the turn begins; None: what is missing is computed again."""
    priced: Mapping[str, Price] | None = None
    """By replica, for logs and metrics; None from a policy that does not price."""


@dataclass(frozen=True, slots=True)
class Move:
    """An idle conversation whose state is to be copied ahead of its next turn. Report the end by `Router.moved`."""

    key: str
    chain: Sequence[bytes]
    tokens: int
    """What the target lacks of it."""
    source: str
    target: str


FoundAt = Callable[[str], Found | None]
"""What the replica of this name really holds of a turn's prompt. None: it did not say; then the router's map counts."""


class Router(Protocol):
    """Chooses a replica for each turn, and knows what it sent where. No method waits.

    A turn's life: `choose`, `sent`, `started` at its first token, `ended`. If its replica dies: `lost`, and `choose`
    again. `now` is in seconds and never decreases.
    """

    name: RouterName

    def unknown(self, turn: Turn) -> int:
        """Tokens of a prompt that may lie at some replica without the router's knowledge: what asking could find.

        0 for a conversation that it knows, and from a policy that does not look at state.
        """
        ...

    def choose(self, turn: Turn, replicas: Sequence[ReplicaView], now: float, found: FoundAt | None = None) -> Choice:
        """The replica for this turn. `found` tells what a replica really holds; None: by the router's own map.

        Raises ValueError if no replica is ready.
        """
        ...

    def sent(self, request: str, turn: Turn, choice: Choice, now: float) -> None:
        """The turn went to the chosen replica as the request of this id."""
        ...

    def started(self, request: str, now: float) -> None:
        """The first token of a request came."""
        ...

    def ended(self, request: str, now: float, chain: Sequence[bytes] = ()) -> None:
        """A request ended; `chain` has the digests of prompt and answer, if known. Ignores an unknown request."""
        ...

    def moved(self, move: Move, tokens: int, now: float) -> None:
        """A move ended: `tokens` tokens from the start arrived. The target has the conversation then, if any did."""
        ...

    def lost(self, replica: str) -> None:
        """A replica died or was removed: forget what it held, and the requests that it had."""
        ...

    def rebalance(self, now: float, replicas: Sequence[ReplicaView]) -> list[Move]:
        """Moves of idle conversations away from overloaded or draining replicas. Call about once a second."""
        ...
