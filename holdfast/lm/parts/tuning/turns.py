"""Turns: which tenant's job has the device next, by the time that each has used lately."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol, TypeVar

TURN_SECONDS = 30.0
"""Device time that one tenant's jobs get before another's, if several tenants have jobs."""
CALL_SECONDS = 2.0
"""Device time by which a job must have used more than a driven job whose call waits, for the call to be next.

Each turn costs the copies of two jobs' vectors, so it is not much shorter.
"""


class Member(Protocol):
    """A job that takes turns."""

    @property
    def tenant(self) -> str: ...

    @property
    def lane(self) -> str:
        """Jobs of a tenant with the same lane run one after the other; lanes take turns. Empty: jobs over files."""
        ...


M = TypeVar("M", bound=Member)


class Accounts:
    """The time that members of one kind have used, on a common scale. One that was away has at most a turn of credit.

    Without that bound, a member that comes back after an hour would have the device for an hour.
    """

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        """Seconds that each member has used. One that came later began as if it had used as much as the others."""
        self._last: dict[str, int] = {}
        """Number of the turn that each member had last."""
        self._least = 0.0
        """The fewest seconds that any member had used who had something to run."""
        self._present: Set[str] = frozenset()
        """The members that had something to run when `update` was last called."""

    def update(self, now: Set[str], known: Set[str]) -> None:
        """Note which members have something to run now, and forget those that are not `known`."""
        self._least = max(self._least, min((self._used[name] for name in self._present & known), default=0.0))
        for name in now - self._present:
            self._used[name] = max(self._used.get(name, self._least), self._least - TURN_SECONDS)
        self._present = now
        self._used = {name: used for name, used in self._used.items() if name in known}
        self._last = {name: turn for name, turn in self._last.items() if name in known}

    def charge(self, name: str, seconds: float) -> None:
        """Note that a member has used the device."""
        self._used[name] = self._used.get(name, 0.0) + seconds

    def begin_turn(self, name: str) -> None:
        """Note that a member's turn begins."""
        self._last[name] = 1 + max(self._last.values(), default=0)

    def owed(self, name: str, other: str) -> float:
        """Seconds that `name` has used more than `other`."""
        return self._used.get(name, 0.0) - self._used.get(other, 0.0)

    def last(self, name: str) -> int:
        """Number of the turn that a member had last; 0 if it had none."""
        return self._last.get(name, 0)


class Turns:
    """Chooses between jobs that have something to run.

    A turn is over when its job has nothing to run, or between two of its steps: after TURN_SECONDS, or at once for a
    tenant that has used TURN_SECONDS less, or CALL_SECONDS less if a call of its waits. So a job whose calls are short
    and frequent is served between the steps of a long one, as long as it takes less than its share; and a tenant with
    many short calls in a row does not keep out another. Lanes of one tenant share its time by the same rule.
    """

    def __init__(self) -> None:
        self._tenants = Accounts()
        self._lanes: dict[str, Accounts] = {}
        """The accounts of each tenant's lanes."""
        self._turn = 0.0
        """Seconds of the current turn so far."""

    def charge(self, member: Member, seconds: float) -> None:
        """Note that a job is planned to run for this time."""
        self._turn += seconds
        self._tenants.charge(member.tenant, seconds)
        self._lanes[member.tenant].charge(member.lane, seconds)

    def choose(self, ready: Sequence[M], current: M | None, known: Sequence[Member], *, between: bool) -> M | None:
        """The job whose turn it is, out of those that are `ready`, in order of arrival; None if none is.

        `current` had the last turn; None if it is gone. `between` says whether it may be interrupted now. `known` are
        all jobs.
        """
        self._update(ready, known)
        others = [job for job in ready if job is not current]
        if current is not None and any(job is current for job in ready):
            if not (between and any(self._passes(current, other) for other in others)):
                return current
            others = [job for job in others if self._passes(current, job)]
        if current is not None or others:
            self._turn = 0.0
        chosen = min(others, key=self._rank, default=None)
        if chosen is not None:
            self._tenants.begin_turn(chosen.tenant)
            self._lanes[chosen.tenant].begin_turn(chosen.lane)
        return chosen

    def _update(self, ready: Sequence[Member], known: Sequence[Member]) -> None:
        """Note which jobs have something to run now, and forget what is gone."""
        tenants = {job.tenant for job in known}
        self._tenants.update({job.tenant for job in ready}, tenants)
        self._lanes = {tenant: self._lanes.get(tenant) or Accounts() for tenant in tenants}
        for tenant, lanes in self._lanes.items():
            own = ({job.lane for job in jobs if job.tenant == tenant} for jobs in (ready, known))
            lanes.update(*own)

    def _passes(self, current: Member, other: Member) -> bool:
        """Whether the turn passes from a job to another."""
        if other.tenant != current.tenant:
            owed = self._tenants.owed(current.tenant, other.tenant)
        elif other.lane != current.lane:
            owed = self._lanes[other.tenant].owed(current.lane, other.lane)
        else:
            return False
        return max(self._turn, owed) >= TURN_SECONDS or (bool(other.lane) and owed >= CALL_SECONDS)

    def _rank(self, job: Member) -> tuple[int, int]:
        return self._tenants.last(job.tenant), self._lanes[job.tenant].last(job.lane)
