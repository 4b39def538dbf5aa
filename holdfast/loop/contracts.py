"""The contracts of the loop: a Planner decides steps, an Executor runs them, an Observer watches, a Device measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Clock = Callable[[], float]
"""Function that returns monotonic seconds. The real clock is CLOCK_MONOTONIC, which processes of one host share."""

Request = TypeVar("Request", contravariant=True)
Plan = TypeVar("Plan")
PlanIn = TypeVar("PlanIn", contravariant=True)
ResultIn = TypeVar("ResultIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)
Outputs = TypeVar("Outputs", covariant=True)
Stats = TypeVar("Stats", covariant=True)
Sizes = TypeVar("Sizes")
Shape = TypeVar("Shape", covariant=True)


class Planner(Protocol[Request, Plan, ResultIn, Outputs, Stats]):
    """Decides what runs next. Pure: no clock, no tensor; time is an argument.

    `schedule` may be called again before the results of earlier plans are known. Plans must run in the order in which
    they were made, and their results come back to `update` in that order.
    """

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, with the reason, if it can never run."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request at once. Ignores a request that has ended."""
        ...

    def schedule(self, now: float) -> Plan | None:
        """Decide the next step, which then counts as submitted.

        None if nothing can run before a step in flight ends.
        """
        ...

    def update(self, plan: Plan, result: ResultIn, now: float) -> Outputs:
        """Apply the result of the oldest plan in flight. Returns its outputs."""
        ...

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        ...

    def stats(self) -> Stats:
        """The current queues and memory."""
        ...


class Executor(Protocol[PlanIn, ResultOut]):
    """Runs plans in the order in which they are submitted; several may be in flight."""

    def submit(self, plan: PlanIn) -> None:
        """Start the step and return without waiting for it."""
        ...

    def collect(self) -> ResultOut:
        """Wait for the oldest step in flight. Raises what that step raised."""
        ...

    def close(self) -> None:
        """Release the device. Steps in flight are abandoned."""
        ...


class Observer(Protocol[PlanIn, ResultIn]):
    """Watches the steps of a loop, in their order, and changes none of them."""

    def planned(self, plan: PlanIn) -> None:
        """Called when a plan has been made. It is submitted next."""
        ...

    def ended(self, result: ResultIn) -> None:
        """Called when the oldest step in flight has ended, before the planner reads its result."""
        ...

    def close(self) -> None:
        """Called when the loop is closed. No further calls come."""
        ...


class Device(Protocol[Sizes, Shape]):
    """Memory that is measured and allocated before the first step."""

    def measure(self) -> Sizes:
        """Measure the memory, and the share of it that a step takes. Raises MemoryError if nothing would fit."""
        ...

    def allocate(self, sizes: Sizes) -> Shape:
        """Allocate state of these sizes, once. Returns the engine's shape. Raises MemoryError."""
        ...
