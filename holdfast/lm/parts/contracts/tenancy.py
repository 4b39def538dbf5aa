"""Tenancy: whether several tenants use the engine, so that the contracts of one must leave room for the others."""

from __future__ import annotations

from math import inf

from holdfast.core.types import WARMING

RECENT = 60.0
"""Seconds after its latest request in which a tenant counts as present."""


class Tenancy:
    """The tenants that have sent requests of late.

    A tenant that has sent none for a while is gone: the others may use its share then.
    """

    def __init__(self) -> None:
        self._latest: tuple[str, float] | None = None
        """The tenant of the latest request and the time of that request; None: there was no request."""
        self._other = -inf
        """Time of the latest request of any other tenant."""

    def note(self, tenant: str, now: float) -> None:
        """Note a request of this tenant at `now`, which is in seconds."""
        if tenant == WARMING:
            return
        if self._latest is not None and self._latest[0] != tenant:
            self._other = self._latest[1]
        self._latest = tenant, now

    def is_shared(self, now: float) -> bool:
        """Whether anyone but the tenant of the latest request has sent one within the last RECENT seconds."""
        return now - self._other <= RECENT
