"""WorkerView: one worker's view of the planner that all workers share. Pure."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from holdfast.cells.plan import CellOutput, CellRequest, Returned, Round

Stats = TypeVar("Stats")
StatsGiven = TypeVar("StatsGiven", covariant=True)


class SharedPlanner(Protocol[StatsGiven]):
    """A planner of rounds for several workers."""

    def add(self, request: CellRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def schedule(self, worker: int, now: float) -> Round | None: ...

    def update(self, plan: Round, result: Returned) -> list[CellOutput]: ...

    def has_work(self) -> bool: ...

    def stats(self) -> StatsGiven: ...


class WorkerView(Generic[Stats]):
    """One worker's Planner. Its rounds come from the planner that all workers share."""

    def __init__(self, planner: SharedPlanner[Stats], number: int) -> None:
        self._planner = planner
        self._number = number

    def add(self, request: CellRequest) -> None:
        """Queue a request. Raises ValueError, with the reason, if it can never run."""
        self._planner.add(request)

    def abort(self, request_id: str) -> None:
        """End a request at once. Ignores a request that has ended."""
        self._planner.abort(request_id)

    def schedule(self, now: float) -> Round | None:
        """The next round of this worker. None if nothing can be formed before a round in flight ends."""
        return self._planner.schedule(self._number, now)

    def update(self, plan: Round, result: Returned, now: float) -> list[CellOutput]:
        """Apply the result of the oldest round in flight. Returns the requests that it ends."""
        return self._planner.update(plan, result)

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return self._planner.has_work()

    def stats(self) -> Stats:
        """The current queues and rows."""
        return self._planner.stats()
