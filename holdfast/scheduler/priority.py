"""Orders: who goes first among waiting requests, and who loses its blocks last among running ones."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.types import Request

Rank = tuple[float, ...]
"""Lower goes first. No two requests have the same one."""

Order = Callable[[Request, int], Rank]
"""Ranks a request, given how many came before it; the rank stays while the request lives."""


def priority(request: Request, number: int) -> Rank:
    """The request's priority class, then first come, first served."""
    return (request.priority, request.arrival, number)
