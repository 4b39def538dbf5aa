"""Shares: how long the grammars of one tenant may hold up a step. Rows that exceed it give up.

A step draws when the masks of all its rows are there, so one slow grammar holds up every stream. The test of a grammar
follows two random answers, and a hostile grammar can be slow where those answers do not come. So the time is watched
here.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

QUICK = 0.001
"""Seconds of a row's mask, or of reading one token, that count for no tenant. A usual one takes 50 us."""
SHARE = 0.03
"""Most seconds beyond QUICK that the rows of one tenant may take of a step, together."""
ROWS_PER_THREAD = 1
"""Rows of each thread between two checks of the clock."""


class Row(Protocol):
    """The state of a row that shares a step's time."""

    tenant: str
    lexer: int
    slow: float
    """Seconds of its last mask or token; 0 if that was quick."""
    failed: bool
    """Whether the row has given up and takes no further time."""


class Shares:
    """The time of each tenant's rows in the current step."""

    def __init__(self, threads: int) -> None:
        """Work on rows is divided among `threads` threads."""
        self._threads = threads
        self._taken: defaultdict[str, float] = defaultdict(float)
        """Seconds beyond QUICK in this step, by tenant."""

    def begin(self) -> None:
        """Begin a step."""
        self._taken.clear()

    def over(self, tenant: str) -> bool:
        """Whether a tenant has used up its share of the step."""
        return self._taken[tenant] > SHARE

    def each(self, rows: Sequence[Row], work: Callable[[list[int]], object]) -> None:
        """Do work for rows, given by their indices, some at a time: rows that were quick first.

        Once their tenant's share is used up, rows fail instead. Rows that were slow come last, so they are the ones
        that fail.
        """
        for part in self._parts(rows):
            left = []
            for index in part:
                if self.over(rows[index].tenant):
                    rows[index].failed = True
                elif not rows[index].failed:
                    left.append(index)
            if left:
                began = now()
                work(left)
                self._count([rows[index] for index in left], elapsed(began))

    def one(self, row: Row, work: Callable[[], object]) -> None:
        """Do work for one row in this thread, or let the row fail."""
        if self.over(row.tenant):
            row.failed = True
        if not row.failed:
            began = now()
            work()
            self._count([row], elapsed(began))

    def _parts(self, rows: Sequence[Row]) -> list[list[int]]:
        """The indices of rows in the order of the work, one part for each check of the clock.

        A part is of one tenant, except that the few quick rows left over by each tenant's whole parts share parts. A
        part takes rows from all over their order by lexer, as rows with one lexer wait for each other.
        """
        quick, slow = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
        for index in sorted(range(len(rows)), key=lambda index: (rows[index].slow, rows[index].lexer)):
            (slow if rows[index].slow else quick)[rows[index].tenant].append(index)
        few, whole, rest, last = self._threads * ROWS_PER_THREAD, list[list[int]](), list[int](), list[list[int]]()
        for known in quick.values():
            count = len(known) // few
            whole += [known[at : few * count : count] for at in range(count)]
            rest += known[few * count :]
        for known in slow.values():
            last += [known[at : at + self._threads] for at in range(0, len(known), self._threads)]
        mixed = [rest[at : at + few] for at in range(0, len(rest), few)]
        return mixed + whole + last

    def _count(self, rows: Sequence[Row], seconds: float) -> None:
        """Count the time that work on these rows has taken. Rows of several tenants are timed apart from now on."""
        rounds = -(-len(rows) // self._threads)
        beyond = seconds - QUICK * rounds
        for row in rows:
            row.slow = seconds / rounds if beyond > 0 else 0.0
        if beyond > 0 and len({row.tenant for row in rows}) == 1:
            self._taken[rows[0].tenant] += beyond


def now() -> tuple[float, float]:
    """The wall clock, and the processor time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def elapsed(since: tuple[float, float]) -> float:
    """Seconds since then in which this process ran. The pauses of a busy machine do not count."""
    wall, processor = now()
    return min(wall - since[0], processor - since[1])
