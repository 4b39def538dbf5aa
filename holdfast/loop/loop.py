"""Loop: plan, submit, collect, update. It knows neither a plan's contents nor the source of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Generic, TypeVar

from holdfast.loop.contracts import Clock, Executor, Observer, Planner

Request = TypeVar("Request")
Plan = TypeVar("Plan")
Result = TypeVar("Result")
Outputs = TypeVar("Outputs")
Stats = TypeVar("Stats")


class Loop(Generic[Request, Plan, Result, Outputs, Stats]):
    """Keeps up to `steps_in_flight` steps on the executor: 1 waits for each, 2 plans while the device computes.

    An executor's exception passes through. The device's state is then unknown: do not use the loop again.
    """

    def __init__(
        self,
        planner: Planner[Request, Plan, Result, Outputs, Stats],
        executor: Executor[Plan, Result],
        steps_in_flight: int,
        clock: Clock,
        refresh: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
        prepare: Callable[[], bool] = lambda: False,
        gap: Callable[[], bool] = lambda: False,
        observers: Iterable[Observer[Plan, Result]] = (),
        halted: Callable[[], bool] = lambda: False,
    ) -> None:
        """`refresh` is called before the planner plans or gives its stats, to pass it the latest changes.

        `on_close` is called when the loop is closed, before the executor is released. `Loop.prepare` calls `prepare`.

        `gap` is asked in each step whether something to prepare is worth a pause, and whether the work may wait for it.
        If so, the steps in flight end first, and `prepare` is called before the next plan if `gap` still says so.

        `observers` see every step, in this order; `observe` adds one to them.

        While `halted` says so, nothing is planned or prepared, and there is no work but that of the steps in flight.
        """
        if steps_in_flight < 1:
            raise ValueError(f"steps_in_flight is {steps_in_flight}; it must be at least 1")
        self.planner = planner
        self.executor = executor
        self._steps_in_flight = steps_in_flight
        self._clock = clock
        self._refresh, self._on_close, self._prepare, self._gap = refresh, on_close, prepare, gap
        self._halted = halted
        self._observers = [*observers]
        self._plans: deque[Plan] = deque()
        self.prepared = False
        """Whether a pause has found nothing left to prepare."""

    def observe(self, observer: Observer[Plan, Result]) -> None:
        """Show this observer the plans and results from now on, including results of steps in flight."""
        self._observers.append(observer)

    def ignore(self, observer: Observer[Plan, Result]) -> None:
        """Show this observer nothing from now on. The caller that added it closes it."""
        self._observers.remove(observer)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, with the reason, if it can never run."""
        self.planner.add(request)

    def abort(self, request_id: str) -> None:
        """End a request and free its memory at once."""
        self.planner.abort(request_id)

    def step(self) -> Outputs | None:
        """Submit plans until enough are in flight, then wait for the oldest step. Returns its outputs.

        Returns None, at once, if nothing is in flight.
        """
        self.fill()
        if not self._plans:
            return None
        result = self.executor.collect()
        for observer in self._observers:
            observer.ended(result)
        return self.planner.update(self._plans.popleft(), result, self._clock())

    def fill(self) -> None:
        """Submit plans until enough are in flight.

        `step` begins with it. Call it before other work, so that the executor computes meanwhile.
        """
        self._refresh()
        if self._halted():
            return
        if not self._gap():
            self._submit()
        elif not self._plans:
            self.prepare()
            self._submit()

    def _submit(self) -> None:
        while len(self._plans) < self._steps_in_flight:
            plan = self.planner.schedule(self._clock())
            if plan is None:
                break
            for observer in self._observers:
                observer.planned(plan)
            self.executor.submit(plan)
            self._plans.append(plan)

    def has_work(self) -> bool:
        """Whether a further step would do anything: a request has not ended, or a step is in flight."""
        return bool(self._plans) or (not self._halted() and self.planner.has_work())

    def prepare(self) -> bool:
        """Use a pause without work to prepare something that makes later steps faster. False if nothing is left."""
        if self._halted():
            return False
        more = self._prepare()
        self.prepared = self.prepared or not (more or self._plans)
        return more

    def stats(self) -> Stats:
        """The current queues and memory."""
        self._refresh()
        return self.planner.stats()

    def close(self) -> None:
        """Release the executor, and close the observers. Steps in flight are abandoned."""
        with ExitStack() as closing:
            for observer in self._observers:
                closing.callback(observer.close)
            closing.callback(self.executor.close)
            closing.callback(self._on_close)
