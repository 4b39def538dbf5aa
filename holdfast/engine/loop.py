"""Loop: plan, submit, collect, update; the engine in four words. Knows nothing of sockets."""

from __future__ import annotations

from collections import deque

from holdfast.core.protocols import Clock, Executor
from holdfast.core.types import Columns, Request, SchedulerStats, SequenceOutput, StepPlan
from holdfast.scheduler.base import Scheduler


class Loop:
    """Keeps up to `steps_in_flight` steps on the executor: 1 waits for each, 2 plans while the device computes.

    What the executor raises goes through: after it the state of the device is unknown, and the loop is of no more use.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, steps_in_flight: int, clock: Clock) -> None:
        if steps_in_flight < 1:
            raise ValueError(f"steps_in_flight is {steps_in_flight}; it must be at least 1")
        self._scheduler = scheduler
        self._executor = executor
        self._steps_in_flight = steps_in_flight
        self._clock = clock
        self._plans: deque[StepPlan] = deque()

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, with the reason, if it can never run."""
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Let go of a request and its blocks at once."""
        self._scheduler.abort(request_id)

    def step(self) -> Columns[SequenceOutput]:
        """Fill the pipeline, wait for its oldest step and say what that gave; nothing at once if there is none."""
        while len(self._plans) < self._steps_in_flight:
            plan = self._scheduler.schedule(self._clock())
            if plan is None:
                break
            self._executor.submit(plan)
            self._plans.append(plan)
        if not self._plans:
            return Columns.of(SequenceOutput, ())
        result = self._executor.collect()
        return self._scheduler.update(self._plans.popleft(), result, self._clock())

    def has_work(self) -> bool:
        """Whether a further step would do anything: a request has not ended, or a step is in flight."""
        return bool(self._plans) or self._scheduler.has_work()

    def stats(self) -> SchedulerStats:
        """Queues and memory as they stand."""
        return self._scheduler.stats()

    def close(self) -> None:
        """Let go of the executor. Steps in flight are abandoned."""
        self._executor.close()
