"""The context in which the garbage collector does not run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from holdfast.core.collector import collector_off


class Ring:
    """Garbage that only the collector can free."""

    def __init__(self, freed: list[str]) -> None:
        self.itself, self._freed = self, freed

    def __del__(self) -> None:
        self._freed.append("freed")


@pytest.fixture(autouse=True)
def collector_at_every_allocation() -> Iterator[None]:
    gc.collect()
    before, was_on = gc.get_threshold(), gc.isenabled()
    gc.enable()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)
    if not was_on:
        gc.disable()


def rings() -> list[str]:
    """Make garbage. Returns the part of it that was freed while 100 objects were made."""
    freed: list[str] = []
    Ring(freed)
    kept = [[index] for index in range(100)]
    del kept
    return freed


def test_nothing_is_collected_inside_the_block_and_all_is_after_it() -> None:
    assert rings() == ["freed"]
    with collector_off():
        freed = rings()
        assert freed == []
    kept = [[index] for index in range(100)]
    assert freed == ["freed"] and len(kept) == 100


def test_the_collector_runs_again_after_an_error_in_the_block() -> None:
    with pytest.raises(RuntimeError, match="no capture"), collector_off():
        raise RuntimeError("no capture")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_off():
        pass
    assert not gc.isenabled()
