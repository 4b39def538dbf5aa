"""The thread that writes to the store. Works that wait at the same time share one transaction."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.server.conversations.database import FAILURES, Database
from holdfast.server.conversations.transactions import FlushFailed

T = TypeVar("T")

MOST_WORKS = 128
"""Maximum number of works that share a transaction."""
GROUP_SECONDS = 0.02
"""Seconds after which a transaction takes no further work. Other processes wait so long for their turn to write."""


@dataclass(slots=True)
class Work:
    """A function that writes, and the place of its result."""

    run: Callable[[], Any]
    shares: bool
    """Whether it may share a transaction with other works."""
    future: Future[Any] = field(default_factory=Future)

    def begin(self) -> bool:
        """Mark the work as running. Returns False if nobody waits for it any more."""
        return self.future.set_running_or_notify_cancel()

    def finish(self) -> None:
        """Run the work outside any shared transaction, and give its result."""
        try:
            self.future.set_result(self.run())
        except BaseException as error:
            self.future.set_exception(error)


@dataclass(slots=True)
class Outcome:
    """The result or the error of a work, within a transaction that is not committed yet."""

    work: Work
    result: Any = None
    error: Exception | None = None

    def give(self) -> None:
        """Give the outcome to whoever waits for it."""
        if self.error is None:
            self.work.future.set_result(self.result)
        else:
            self.work.future.set_exception(self.error)


class GroupWriter:
    """Thread that runs works in the order in which they came.

    A work's result is given after its commit. If the database fails within a group, all changes of the group are taken
    back, and each of its works runs again in a transaction of its own. So only the last run of a work counts.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[Work] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._serve, name="holdfast-store", daemon=True)
        self._thread.start()

    def write(self, work: Callable[[], T]) -> Future[T]:
        """Run a work in a transaction that it may share with others. Raises RuntimeError after `shutdown`."""
        return self._add(Work(work, shares=True))

    def submit(self, work: Callable[..., T], *given: Any) -> Future[T]:
        """Run a work between two transactions. Raises RuntimeError after `shutdown`."""
        return self._add(Work(lambda: work(*given), shares=False))

    def _add(self, work: Work) -> Future[Any]:
        with self._changed:
            if self._ended:
                raise RuntimeError("the store's writing thread was shut down")
            self._waiting.append(work)
            self._changed.notify()
        return work.future

    def shutdown(self) -> None:
        """Run the works that wait, then end the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _serve(self) -> None:
        while self._wait():
            if self._waiting[0].shares:
                self._run_group()
            else:
                work = self._waiting.popleft()
                if work.begin():
                    work.finish()

    def _wait(self) -> bool:
        """Wait for a work. Returns False if there is none and none will come."""
        with self._changed:
            while not (self._waiting or self._ended):
                self._changed.wait()
        return bool(self._waiting)

    def _run_group(self) -> None:
        """Run works that wait in one transaction. They wait on while another process writes."""
        group: list[Outcome] = []
        try:
            with self._database.shared():
                self._fill(group)
        except FlushFailed as error:  # The commit counts, so the works must not run again.
            _fail(group, error)
        except FAILURES as error:
            self._run_again(group, error)
        except Exception as error:
            _fail(group, error)
        else:
            for outcome in group:
                outcome.give()

    def _fill(self, group: list[Outcome]) -> None:
        """Run works within the transaction, and add their outcomes to the group. Raises one of FAILURES."""
        until = time.monotonic() + GROUP_SECONDS
        while self._waiting and self._waiting[0].shares:
            if group and (len(group) >= MOST_WORKS or time.monotonic() >= until):
                return
            work = self._waiting.popleft()
            if not work.begin():
                continue
            outcome = Outcome(work)
            group.append(outcome)
            try:
                outcome.result = work.run()
            except FAILURES:
                raise
            except Exception as error:
                outcome.error = error

    def _run_again(self, group: list[Outcome], error: Exception) -> None:
        """Run each work of a failed group alone. A work that was alone fails, unless there is room on the disk now."""
        if not group:  # The transaction did not even begin.
            group = [Outcome(work) for work in [self._waiting.popleft()] if work.begin()]
        if not self._database.make_room(error) and len(group) <= 1:
            _fail(group, error)
            return
        for outcome in group:
            outcome.work.finish()


def _fail(group: list[Outcome], error: Exception) -> None:
    for outcome in group:
        outcome.work.future.set_exception(error)
