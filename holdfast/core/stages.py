"""Stages: what a start spends its time on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Stage(NamedTuple):
    """One stage; seconds after the beginning of the start."""

    name: str
    begin: float
    end: float


class Stages:
    """The stages of a start, and when each began and ended. They may overlap, and threads may note theirs."""

    def __init__(self, began: float, clock: Callable[[], float]) -> None:
        """`began` is the time on `clock` that stages are counted from, in seconds."""
        self._began, self._clock = began, clock
        self.done: list[Stage] = []
        """In the order of their ends."""

    def elapsed(self) -> float:
        """Seconds since the start began."""
        return self._clock() - self._began

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note what runs inside as a stage, also if it fails."""
        begin = self.elapsed()
        try:
            yield
        finally:
            self.done.append(Stage(name, begin, self.elapsed()))


def in_words(stages: Iterable[Stage]) -> str:
    """The stages on one line, by their beginnings."""
    ordered = sorted(stages, key=lambda stage: stage.begin)
    return ", ".join(f"{stage.name} {stage.begin:.1f} to {stage.end:.1f}" for stage in ordered) + " s"
