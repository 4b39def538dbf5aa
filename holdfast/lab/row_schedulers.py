"""Schedulers of other systems on padded rows: Baton's baselines, and FineInfer's SimpleReqManager."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from holdfast.lab.schedulers import Reservation
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
        self._begun = set[str]()
        """Ids of the batches of which a part has started and the rest waits."""

    def plan_rows(self, step: RowBuilder) -> None:
        starting = list[Entry]()
        for batch in self._whole_batches(step.waiting, step.now):
            if not self._fits(step, [*starting, *batch]):
                if not step.running and not starting:
                    starting = self._begin(step, batch)
                break
            starting += batch
        step.admit_together(starting)
        step.decode(newcomers=True)

    def most_new(self, entry: Entry) -> int:
        """Largest number of tokens that a request is expected to generate in all."""
        return entry.limit - entry.sequence.request.answer_start

    def _whole_batches(self, waiting: Iterable[Entry], now: float) -> Iterator[list[Entry]]:
        """The waiting requests by batch, of the batches whose requests have all come."""
        seen = set[str]()
        for entry in waiting:
            name = entry.sequence.request.batch.id
            if not name:
                yield [entry]
            elif name not in seen:
                seen.add(name)
                batch = [each for each in waiting if each.sequence.request.batch.id == name]
                if name in self._begun or has_come(batch, now):
                    yield batch
        self._begun &= seen

    def _fits(self, step: RowBuilder, starting: Sequence[Entry]) -> bool:
        """Whether these sequences can start in the step, next to those that run.

        Every sequence is expected to generate as many tokens as it may.
        """
        rows = [*step.running, *starting]
        width = max(entry.sequence.length for entry in rows) + max(map(self.most_new, rows))
        return step.takes(starting) and step.pool.holds(len(rows), len(rows) * width, width)

    def _begin(self, step: RowBuilder, batch: Sequence[Entry]) -> list[Entry]:
        """The first requests of a batch that is too large: as many as can start in the step."""
        starting = list[Entry]()
        for entry in batch:
            if not self._fits(step, [*starting, entry]):
                break
            starting.append(entry)
        self._begun.add(batch[0].sequence.request.batch.id)
        return starting


def has_come(entries: Sequence[Entry], now: float) -> bool:
    """Whether the waiting requests of a batch are all of them.

    Also true if some have run before and wait again, or if the first has waited for PATIENCE.
    """
    if len(entries) >= max(entry.sequence.request.batch.size for entry in entries):
        return True
    started = any(entry.sequence.scheduled_at is not None for entry in entries)
    return started or now - min(entry.sequence.request.arrival for entry in entries) >= PATIENCE
