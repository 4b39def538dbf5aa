"""Routing: chooses the replica for each turn of a conversation, and the idle conversations to move. Pure.

A router follows every turn: `choose` picks a replica, and `sent`, `started` and `ended` update the router's records. So
it knows which replica has the state of each conversation, and how much work each replica has. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from holdfast.cluster.baselines import LeastLoaded, PowerOfTwo, PrefixTree, RoundRobin, SessionHash
from holdfast.cluster.priced import PricedRouter, RoutingRules
from holdfast.cluster.turns import (
    Choice,
    FoundAt,
    Move,
    Price,
    ReplicaState,
    ReplicaView,
    Router,
    RouterName,
    Turn,
)
from holdfast.core.cost import CostModel
from holdfast.core.types import Found

__all__ = [
    "POLICIES", "Choice", "Found", "FoundAt", "Move", "Price", "ReplicaState", "ReplicaView", "Router", "RouterName",
    "RoutingRules", "Turn", "make_router",
]  # fmt: skip

POLICIES: tuple[RouterName, ...] = get_args(RouterName)
"""Names of all policies, the default first."""


def make_router(
    name: RouterName, cost: CostModel | None = None, rules: RoutingRules | None = None, *, seed: int = 0
) -> Router:
    """Create a router for a policy. Only "priced" uses `cost` and `rules`. `seed` is for random choices.

    Raises ValueError for an unknown name, and for "priced" without a cost model.
    """
    makers: dict[RouterName, Callable[[], Router]] = {
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
        "session-hash": SessionHash,
        "prefix-tree": PrefixTree,
        "power-of-two": lambda: PowerOfTwo(seed),
    }
    if name == "priced":
        if cost is None:
            raise ValueError("the priced router needs a cost model; give one, or another policy")
        return PricedRouter(cost, rules)
    if name not in makers:
        raise ValueError(f"router {name!r} is unknown; there are {', '.join(POLICIES)}")
    return makers[name]()
