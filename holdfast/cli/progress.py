"""A progress bar for work of known size."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from holdfast.lab.workloads import Workload


def turns_of(workload: Workload) -> int:
    """Requests in all."""
    return sum(len(conversation.turns) for conversation in workload)


class Bar:
    """A progress bar on standard error; calling what it gives says how many are done."""

    def __init__(self, title: str, total: int) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=total)
        self._told = 0

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return self._tell

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def _tell(self, done: int) -> None:
        if done != self._told:
            self._told = done
            self._bar.update(self._task, completed=done)
