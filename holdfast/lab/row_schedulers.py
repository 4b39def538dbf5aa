"""Schedulers of other systems on padded rows: Baton's baselines, and FineInfer's SimpleReqManager."""

from __future__ import annotations

import hashlib

from holdfast.lab.schedulers import Reservation
from holdfast.lm.scheduler.builder import anyone
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.row_builder import RowBuilder
from holdfast.lm.scheduler.row_policies import RowPolicy


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
    """FineInfer's SimpleReqManager (§3.3.3) and its engine step (§3.3.5, Algorithm 1). A batch is one request.

    New requests are admitted while rows × (longest current length + most new tokens) fit the cache, running ones
    included; the first that does not fit goes back. They are prefilled, and then all rows decode within the same step.
    """

    reserves = unbounded = True

    def plan_rows(self, step: RowBuilder) -> None:
        step.admit(PredictedLength(step), whole=True)
        step.decode(newcomers=True)


class PredictedLength:
    """Allows a request if rows × (longest current length + most new tokens) fit memory, with all running ones."""

    def __init__(self, step: RowBuilder) -> None:
        self._step = step
        self._rows = len(step.running)
        self._longest = max((entry.sequence.length for entry in step.running), default=0)
        self._new = max((new_tokens(entry) for entry in step.running), default=0)

    def __call__(self, entry: Entry) -> bool:
        self._rows += 1
        self._longest = max(self._longest, entry.sequence.length)
        self._new = max(self._new, new_tokens(entry))
        predicted = self._longest + self._new
        return self._step.pool.holds(self._rows, self._rows * predicted, predicted)


def new_tokens(entry: Entry) -> int:
    """Largest number of tokens that a request generates in all."""
    return entry.limit - entry.sequence.request.answer_start
