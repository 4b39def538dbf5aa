"""A progress bar for work of known size."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """A progress bar on standard error. Entering it returns a function that sets how many items are done."""

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
        self._done = 0

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return self._update

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def _update(self, done: int) -> None:
        if done != self._done:
            self._done = done
            self._bar.update(self._task, completed=done)
