"""Stages: which steps the start of an engine consists of, and how long each takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Stage(NamedTuple):
    """One stage of a start. `begin` and `end` are in seconds after the start began."""

    name: str
    begin: float
    end: float


class Stages:
    """The stages of one start, and when each began and ended. Stages may overlap, and threads may record theirs."""

    def __init__(self, began: float, clock: Callable[[], float]) -> None:
        """`began` is the time on `clock`, in seconds, from which all stages are counted."""
        self._began, self._clock = began, clock
        self.done: list[Stage] = []
        """Finished stages, in the order of their ends."""

    def elapsed(self) -> float:
        """Seconds since the start began."""
        return self._clock() - self._began

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record what runs inside the block as a stage, even if it fails."""
        begin = self.elapsed()
        try:
            yield
        finally:
            self.done.append(Stage(name, begin, self.elapsed()))


def in_words(stages: Iterable[Stage]) -> str:
    """The stages on one line, in the order of their beginnings."""
    ordered = sorted(stages, key=lambda stage: stage.begin)
    return ", ".join(f"{stage.name} {stage.begin:.1f} to {stage.end:.1f}" for stage in ordered) + " s"
