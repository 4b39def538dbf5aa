"""Output that several commands share: progress on the terminal, and checks of output files before the work starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


def stage_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a stage of an engine's start."""
    return lambda stage: console.print(Text(f"{stage} …", style="dim"))


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error. Yields a function that sets the number of finished items."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(title, total=total)
        task = bar.tasks[0]

        def update(done: int) -> None:
            if done != task.completed:
                bar.update(task.id, completed=done)

        yield update


class Steps:
    """Reports on a few long steps on standard error: by a bar on a terminal, and elsewhere by a line for each event."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._notes = Console(stderr=True, highlight=False)
        self._clock = time.monotonic
        self._began = self._clock()
        self._on_bar: Callable[[int], None] | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar, on a terminal."""
        if not self._notes.is_terminal:
            yield
            return
        with progress_bar(self._title, self._total) as self._on_bar:
            yield

    def begin(self, what: str) -> None:
        """Report what begins, unless there is a bar."""
        if self._on_bar is None:
            self._say(f"{self._title} {what} …")

    def end(self, result: str) -> None:
        """Report the result of the next step that has ended."""
        self._done += 1
        if self._on_bar is not None:
            self._on_bar(self._done)
        else:
            self._say(f"{self._done} of {self._total}, after {self._clock() - self._began:.0f} s: {result}")

    def _say(self, line: str) -> None:
        self._notes.print(Text(line), soft_wrap=True)


def check_outputs(*files: str | None, report: str | None, plots: str | None) -> None:
    """Raises ValueError if a file or the directory `plots` cannot be written, or if a report cannot be drawn."""
    if (report is not None or plots is not None) and find_spec("matplotlib") is None:
        raise ValueError("reports and plots need matplotlib, which is not installed: pip install 'holdfast[report]'")
    for path in (*files, report):
        require_writable(path)
    if plots is not None:
        place = next(place for place in (Path(plots).absolute(), *Path(plots).absolute().parents) if place.exists())
        if not place.is_dir():
            raise ValueError(f"{plots} cannot be a directory: {place} is a file")


def require_writable(path: str | None) -> None:
    """Raises ValueError if no file can be written at `path`."""
    if path is None:
        return
    if not (directory := Path(path).absolute().parent).is_dir():
        raise ValueError(f"{path} cannot be written: {directory} is not a directory")
    if Path(path).is_dir():
        raise ValueError(f"{path} cannot be written: it is a directory")


def changed_options(config: Any, without: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return the name and value of each option that differs from its default, as text."""
    shown = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in without and value != field.default:
            listed = ", ".join(f"{each:g}" for each in value) if isinstance(value, tuple) else str(value)
            unit = " ms" if field.metadata["unit"] else ""
            shown.append((field.name.replace("_", " "), listed + unit))
    return shown
