"""Schedulers of other systems on padded rows: Baton's baselines, and FineInfer's SimpleReqManager."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from holdfast.lab.schedulers import Reservation
from holdfast.lm.memory.row_pool import RowPool
from holdfast.lm.scheduler.builder import anyone
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.row_builder import RowBuilder
from holdfast.lm.scheduler.row_policies import RowPolicy

PATIENCE = 1.0
"""Seconds that the first request of a batch waits for the others that were sent with it."""


class RunToCompletion(RowPolicy):
    """Transformers' `generate` in batches (Baton §5.1, "Benchmark"): a batch decodes until its last row has ended.

    When nothing runs, as many waiting requests as rows and memory allow are prefilled together, left-padded.
    """

    to_completion = unbounded = True

    def plan_rows(self, step: RowBuilder) -> None:
        if step.running:
            step.decode()
        else:
            step.shape(Reservation(step) if self.reserves else anyone)


class PaddedRequestLevel(RunToCompletion):
    """FasterTransformer with its padding: run to completion, with memory reserved for each request's longest length."""

    reserves = True


class PrefillApart(RowPolicy):
    """Baton §5.1, "PD": prompts of similar length are prefilled together. Batches of any of them run to completion.

    A batch is formed when nothing runs, once enough prompts are prefilled or no more can be. It takes prompts in the
    order of a digest of their ids: a random order that is equal in every run.
    """

    to_completion = True

    def plan_rows(self, step: RowBuilder) -> None:
        if not step.running:
            step.prefill_ahead()
            if step.num_tokens:
                return
            step.embed(lambda entry: hashlib.sha256(entry.id.encode()).digest())
        step.decode()
        step.prefill_ahead()


class PaddedOrca(RowPolicy):
    """Orca on padded rows: all decodes, and every prompt that may start, in one forward. Memory is reserved."""

    reserves = unbounded = True

    def plan_rows(self, step: RowBuilder) -> None:
        step.shape(Reservation(step))


class PaddedBatches(RowPolicy):
    """FineInfer's SimpleReqManager (§3.3.3) and its engine step (§3.3.5, Algorithm 1).

    The requests that a user sends together are one batch. Batches start in the order of their first requests, each as a
    whole, while rows × (longest current length + most new tokens) fit the cache, running rows included. The first one
    that does not fit goes back as a whole, and later ones wait, too. New prompts are prefilled, and then all rows
    decode within the same step.

    A batch that is too large for an empty cache starts in parts: while nothing runs, as many of its first requests as
    fit. A batch whose requests are still on their way holds up no other, and waits at most PATIENCE for them.
    """

    reserves = unbounded = True

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget)
        self._came = frozenset[str]()
        """Ids of the waiting batches whose requests have all come, also if some of these no longer wait."""

    def plan_rows(self, step: RowBuilder) -> None:
        starting = list[Entry]()
        for batch in self._whole_batches(step.waiting, step.now):
            if not fits(step, [*starting, *batch]):
                if not step.running and not starting:
                    starting = first_that_fit(step, batch)
                break
            starting += batch
        step.admit_together(starting)
        step.decode(newcomers=True)

    def _whole_batches(self, waiting: Iterable[Entry], now: float) -> list[list[Entry]]:
        """The waiting requests by batch, of the batches whose requests have all come."""
        batches: dict[str, list[Entry]] = {}
        for entry in waiting:
            batches.setdefault(entry.sequence.request.batch.id or entry.id, []).append(entry)
        self._came = frozenset(
            name for name, entries in batches.items() if name in self._came or has_come(entries, now)
        )
        return [entries for name, entries in batches.items() if name in self._came]


def has_come(entries: Sequence[Entry], now: float) -> bool:
    """Whether the waiting requests of a batch are all of them.

    Also true if some have run before and wait again, or if the first has waited for PATIENCE.
    """
    if len(entries) >= max(entry.sequence.request.batch.size for entry in entries):
        return True
    started = any(entry.sequence.scheduled_at is not None for entry in entries)
    return started or now - min(entry.sequence.request.arrival for entry in entries) >= PATIENCE


class Predicted(NamedTuple):
    """The largest size of a padded batch, if every request generates as many tokens as it may (FineInfer §3.3.3)."""

    rows: int
    longest: int
    """Length of the longest sequence now, in tokens."""
    new: int
    """Largest number of tokens that a request generates in all."""

    @classmethod
    def of(cls, entries: Collection[Entry]) -> Predicted:
        """The batch of these sequences, of which there is at least one."""
        longest = max(entry.sequence.length for entry in entries)
        return cls(len(entries), longest, max(map(new_tokens, entries)))

    def within(self, pool: RowPool) -> bool:
        """Whether memory holds all rows at their predicted width."""
        width = self.longest + self.new
        return pool.holds(self.rows, self.rows * width, width)


def fits(step: RowBuilder, starting: Sequence[Entry]) -> bool:
    """Whether these sequences can start in the step, next to those that run."""
    return step.takes(starting) and Predicted.of((*step.running, *starting)).within(step.batch.pool)


def first_that_fit(step: RowBuilder, batch: Sequence[Entry]) -> list[Entry]:
    """As many first requests of a batch as can start in the step."""
    starting = list[Entry]()
    for entry in batch:
        if not fits(step, [*starting, entry]):
            break
        starting.append(entry)
    return starting


def new_tokens(entry: Entry) -> int:
    """Largest number of tokens that a request generates in all."""
    return entry.limit - entry.sequence.request.answer_start
