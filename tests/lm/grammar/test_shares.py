"""Shares: a tenant's slow rows give up before they hold up a step for long, and no other tenant's rows do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from holdfast.lm.grammar import shares
from holdfast.lm.grammar.shares import QUICK, SHARE, Shares


@dataclass
class Row:
    tenant: str
    takes: float = 0.0
    """Seconds of the row's work."""
    lexer: int = 0
    slow: float = 0.0
    failed: bool = False


class Clock:
    """A clock that only work moves. The processor has `idle` seconds less."""

    def __init__(self) -> None:
        self.time = self.idle = 0.0

    def now(self) -> tuple[float, float]:
        return self.time, self.time - self.idle

    def work(self, rows: list[Row], done: list[int]) -> Callable[[list[int]], None]:
        def work(part: list[int]) -> None:
            done.extend(part)
            self.time += max(rows[index].takes for index in part)

        return work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shares, "now", clock.now)
    return clock


def step(clock: Clock, of: Shares, rows: list[Row]) -> list[int]:
    """Do the work of one step. Returns the rows that were worked on."""
    done: list[int] = []
    of.begin()
    of.each(rows, clock.work(rows, done))
    return done


@pytest.mark.parametrize("threads", [1, 4])
def test_a_tenants_slow_rows_give_up_and_those_of_others_do_not(clock: Clock, threads: int) -> None:
    rows = [Row("slow", 0.03, lexer=at) for at in range(81)] + [Row(f"q{at}", 0.0005) for at in range(40)]
    of = Shares(threads)
    for _ in range(5):
        began = clock.time
        step(clock, of, rows)
        # A part may begin just before the share is used up; one part has rows of several tenants.
        assert clock.time - began < SHARE + 2 * 0.03 + 121 * QUICK
    assert sum(row.failed for row in rows[:81]) > 60
    assert not any(row.failed for row in rows[81:])


def test_a_quick_row_next_to_a_slow_one_is_timed_apart_afterwards(clock: Clock) -> None:
    rows = [Row("slow", 0.03), Row("quick", 0.0005)]
    of = Shares(2)
    step(clock, of, rows)
    assert rows[1].slow
    step(clock, of, rows)
    assert rows[0].slow == pytest.approx(0.03) and not rows[1].slow


def test_every_row_gets_its_work_once_where_all_are_quick(clock: Clock) -> None:
    rows = [Row("one", QUICK / 2, lexer=at % 3) for at in range(23)]
    for threads in (1, 2, 16):
        assert sorted(step(clock, Shares(threads), rows)) == list(range(23))
    assert not any(row.failed for row in rows)


def test_rows_that_were_slow_come_last_so_that_they_give_up_first(clock: Clock) -> None:
    rows = [Row("one", 0.04, slow=0.04) for _ in range(6)] + [Row("one", QUICK) for _ in range(6)]
    step(clock, Shares(1), rows)
    assert [row.failed for row in rows] == [False] + [True] * 5 + [False] * 6


def test_a_share_is_that_of_one_step(clock: Clock) -> None:
    rows = [Row("one", SHARE / 2)]
    of = Shares(1)
    for _ in range(9):
        assert step(clock, of, rows) == [0]


def test_time_in_which_the_process_did_not_run_counts_for_nobody(clock: Clock) -> None:
    rows = [Row("one", 0.5) for _ in range(8)]

    def work(part: list[int]) -> None:
        clock.time += 0.5
        clock.idle += 0.5

    of = Shares(1)
    of.each(rows, work)
    assert not any(row.failed or row.slow for row in rows)


def test_tokens_that_are_read_one_after_another_count_too(clock: Clock) -> None:
    row, read = Row("one"), list[float]()

    def read_one() -> None:
        clock.time += 0.02
        read.append(clock.time)

    of = Shares(1)
    for _ in range(100):
        of.one(row, read_one)
    assert row.failed and len(read) == 2
