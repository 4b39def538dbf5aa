"""Policies of padded rows: Baton's two, the systems it is compared with, and FineInfer's SimpleReqManager."""

from __future__ import annotations

import hashlib

from holdfast.lm.scheduler.admission import NO_LIMIT
from holdfast.lm.scheduler.baselines import Reservation
from holdfast.lm.scheduler.builder import Policy, StepBuilder, anyone
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.policies import checked
from holdfast.lm.scheduler.row_builder import RowBuilder


class RowPolicy(Policy):
    """A policy that knows rows and their forwards. Steps have the token budget of `policies.FixedBudget`."""

    to_completion = False
    """Whether the rows of ended sequences stay in the batch until all of it have ended."""

    def __init__(self, token_budget: int) -> None:
        self.token_budget = checked("token_budget", token_budget)

    def plan(self, step: StepBuilder) -> None:
        """Plan a step. Raises TypeError for a builder of packed steps."""
        if not isinstance(step, RowBuilder):
            raise TypeError(f"{type(self).__name__} plans padded rows, and {type(step).__name__} has none")
        step.budget = self.token_budget
        self.plan_rows(step)

    def plan_rows(self, step: RowBuilder) -> None:
        """Plan a step of padded rows, whose budget is set."""
        raise NotImplementedError


class RunToCompletion(RowPolicy):
    """Transformers' `generate` in batches (Baton §5.1, "Benchmark"): a batch decodes until its last row has ended.

    When nothing runs, as many waiting requests as rows and memory allow are prefilled together, left-padded.
    """

    to_completion = True
    reserving = False

    def plan_rows(self, step: RowBuilder) -> None:
        if step.running:
            step.decode()
        else:
            step.shape(Reservation(step) if self.reserving else anyone)


class PaddedRequestLevel(RunToCompletion):
    """FasterTransformer with its padding: run to completion, with memory reserved for each request's longest length."""

    reserving = True


class PrefillApart(RowPolicy):
    """Baton §5.1, "PD": prompts of similar length are prefilled together, and batches of any of them run to completion.

    A batch is formed when nothing runs, once enough prompts are prefilled or no more can be. It takes them in the order
    of a digest of their ids: at random, and alike in every run.
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


class Shaping(RowPolicy):
    """Baton without prefill apart (§4.1): a whole prompt joins the running batch in one forward with its decodes.

    One joins in each step, while a row is free. Where nothing runs, as many as rows and memory allow.
    """

    def plan_rows(self, step: RowBuilder) -> None:
        step.displace()
        step.shape(most=1 if step.running else NO_LIMIT)


class Embedding(RowPolicy):
    """Baton-PD (§4.2): prompts are prefilled apart, in groups of similar length, ahead of a free row.

    What is prefilled joins as soon as a row is free, and at once if it is of a higher class than a running request.
    """

    def plan_rows(self, step: RowBuilder) -> None:
        step.embed()
        step.decode()
        step.prefill_ahead()


class PaddedOrca(RowPolicy):
    """Orca on padded rows: all decodes and every prompt that may start, in one forward, with memory reserved."""

    def plan_rows(self, step: RowBuilder) -> None:
        step.shape(Reservation(step))


class PaddedBatches(RowPolicy):
    """FineInfer's SimpleReqManager (§3.3.3) and its engine step (§3.3.5, Algorithm 1). A batch is one request.

    New requests are admitted while rows × (longest current length + most new tokens) fit the cache, running ones
    included; the first that does not fit goes back. They are prefilled, and then all rows decode within the same step.
    """

    def plan_rows(self, step: RowBuilder) -> None:
        step.admit(PredictedLength(step), whole=True)
        step.decode(newcomers=True)


class PredictedLength:
    """Allows a request if rows × (longest current length + most new tokens) of it and all running ones fit memory."""

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
    """Most tokens that a request generates in all."""
    return entry.limit - entry.sequence.request.answer_start
