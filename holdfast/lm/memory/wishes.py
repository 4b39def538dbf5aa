"""Wishes: how long clients want state kept, and how much of that each tenant gets."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple, TypeVar

StateT = TypeVar("StateT")


class Wish(NamedTuple):
    """A client's wish for the state of one turn."""

    tenant: str = ""
    until: float = -inf
    """Time in seconds until which the state is to be kept; minus infinity: there is no wish."""


NO_WISH = Wish()


def granted(states: Iterable[tuple[StateT, Wish, float]], now: float) -> set[StateT]:
    """The states of one tier that are kept at `now` because clients want it. Each comes with its wish and its size.

    A tenant keeps no more than an equal share of all of them among the tenants that have state there. Beyond that
    share, the states to be kept for longest are left out.
    """
    wished, total, tenants = dict[str, list[tuple[float, float, StateT]]](), 0.0, set[str]()
    for state, wish, size in states:
        total += size
        tenants.add(wish.tenant)
        if wish.until > now:
            wished.setdefault(wish.tenant, []).append((wish.until, size, state))
    kept, share = set[StateT](), total / max(1, len(tenants))
    for asked in wished.values():
        left = share
        for _, size, state in sorted(asked, key=lambda each: each[:2]):
            left -= size
            if left < 0:
                break
            kept.add(state)
    return kept
