"""Results: appends the tokens of steps to their sequences, and makes the outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from holdfast.core.columns import Columns
from holdfast.core.types import FinishReason, SequenceOutput, TokenLogprobs
from holdfast.lm.scheduler.entries import NO_ROW, Entry
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.types import StepPlan, StepResult


class Submitted(NamedTuple):
    """A plan in flight."""

    step: int
    """The plan's number."""
    sampling: list[Entry]
    """The sequence of each sampling segment, in plan order."""
    ended: int
    """Number of sequences that had ended when the plan was made."""


class Results:
    """Appends the tokens of each result to its sequences, and ends those that a token completes.

    Results come in the order of the plans. A plan may be made before the results of earlier ones are known, so some of
    its sequences may have ended by the time that its own result comes.
    """

    def __init__(self, queues: Queues, end: Callable[[Entry, FinishReason], None]) -> None:
        """`end` ends a sequence; it is called at most once for each."""
        self.in_flight: deque[Submitted] = deque()
        """The plans whose results are still to come, the oldest first."""
        self._queues = queues
        self._end = end
        self._next_step = 0
        """Number of the next plan."""
        self._ended = 0
        """Number of sequences that have ended so far."""
        self._known: dict[Entry, int] = {}
        """Sequences for which plans in flight sample a token that is already known.

        The value is the number of the first plan that samples an unknown one.
        """

    def submitted(self, step: int, sampling: list[Entry]) -> None:
        """Note a plan in flight with this number. It samples for these sequences, in plan order."""
        self.in_flight.append(Submitted(step, sampling, self._ended))
        self._next_step = step + 1

    def ended(self, entry: Entry) -> None:
        """Note that a sequence has ended: it gets no further token."""
        self._ended += 1
        self._known.pop(entry, None)

    def take(self, plan: StepPlan, result: StepResult) -> Submitted:
        """Remove the oldest plan in flight, whose result this is.

        Raises RuntimeError if the result is another plan's, or does not hold the tokens that its plan samples.
        """
        submitted = self.in_flight.popleft()
        step, sampling, _ = submitted
        fits = valid_counts(plan, result, sampling) if is_ragged(plan, result) else len(result.tokens) == len(sampling)
        if not (plan.step == result.step == step and fits):
            raise RuntimeError(
                f"step {step} with {len(sampling)} sampled tokens is due; got plan {plan.step}, "
                f"result {result.step} with {len(result.tokens)}"
            )
        return submitted

    def apply(self, submitted: Submitted, plan: StepPlan, result: StepResult) -> Columns[SequenceOutput]:
        """Append the tokens of a result to its sequences; returns these tokens, and which sequences ended."""
        step, sampling, _ = submitted
        before, queues = self._ended, self._queues
        if (stages := queues.stages) > 1:
            for entry in sampling:
                if entry.next_step == step + stages:  # no later step has planned it
                    entry.next_step = 0
        outputs = (self._read_ragged if is_ragged(plan, result) else self._read)(submitted, plan, result)
        if plan.parts or result.parts:
            for part in queues.hooks.sampled:
                part.sampled(plan, result, sampling, outputs)
        self._known = {entry: first for entry, first in self._known.items() if first > step + 1} if self._known else {}
        return outputs.columns(some_ended=self._ended > before)

    def with_ends(self, outputs: Columns[SequenceOutput], ended: Collection[Entry]) -> Columns[SequenceOutput]:
        """The outputs of a step, with the ends of these sequences, to which it may have given a token."""
        given: list[str] = outputs.column("request_id")
        silent = [entry for entry in ended if entry.id not in given]
        more = StepOutputs(self, silent, [()] * len(silent)).columns(some_ended=True)
        columns = {name: [*outputs.column(name), *more.column(name)] for name in outputs.by_name}
        for entry in ended:
            columns["finish_reason"][columns["request_id"].index(entry.id)] = entry.sequence.finish_reason
        return Columns(SequenceOutput, **columns)

    def extend(self, entry: Entry, tokens: Iterable[int]) -> tuple[int, ...]:
        """Append tokens that need no draw to a decoding sequence, up to its end. Returns those that were appended.

        A later step computes them, like tokens of a prompt. Plans in flight also sample the first of them; those
        samples are dropped.
        """
        sequence = entry.sequence
        known, length = len(sequence.tokens), sequence.length
        for token in tokens:
            if not sequence.ended:
                self._append([entry], [token])
        added = tuple(sequence.tokens[known:])
        self._queues.order.sampled([entry] * len(added))
        if not sequence.ended:
            sequence.length = len(sequence.tokens)
            entry.decoding = False
            if length > known:
                self._known[entry] = self._next_step
        return added

    def _read(self, submitted: Submitted, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Apply a result that has one token for each sampling segment."""
        step, sampling, ended = submitted
        self._queues.order.sampled(sampling)
        tokens: Sequence[int] = result.tokens
        records: Sequence[TokenLogprobs | None] = result.logprobs
        if ended < self._ended or self._known:
            kept = [place for place, entry in enumerate(sampling) if self._is_due(entry, step)]
            sampling, tokens = [sampling[place] for place in kept], [tokens[place] for place in kept]
            records = [records[place] for place in kept] if records else records
        self._append(sampling, tokens)
        logprobs = [() if record is None else (record,) for record in records]
        return StepOutputs(self, sampling, list(zip(tokens)), logprobs)

    def _read_ragged(self, submitted: Submitted, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Apply a result that has no, one or several tokens for each sampling segment."""
        sampling = submitted.sampling
        rest, grown = iter(result.tokens), dict[Entry, int]()
        records, logprobs = iter(result.logprobs), dict[Entry, list[TokenLogprobs]]()
        counts, most = given_counts(result, sampling), most_counts(plan, sampling)
        for count, limit, entry in zip(counts, most, sampling, strict=True):
            tokens, of_tokens = tuple(islice(rest, count)), tuple(islice(records, count))
            self._queues.order.sampled([entry] * len(tokens))
            if not self._is_due(entry, plan.step):
                continue
            sequence, cache, known = entry.sequence, entry.cache, len(entry.sequence.tokens)
            if limit > 1:  # of its positions, those in front of the last token that was given are computed
                sequence.rollback(known + len(tokens))
                cache.accept(len(tokens))
                entry.next_step = 0
            for index, token in enumerate(tokens):
                if not sequence.ended:
                    self._append([entry], [token])
                    if of_tokens and (record := of_tokens[index]) is not None:
                        logprobs.setdefault(entry, []).append(record)
            if tokens:
                grown.setdefault(entry, known)
        added = [tuple(entry.sequence.tokens[known:]) for entry, known in grown.items()]
        of_entries = [tuple(logprobs.get(entry, ())) for entry in grown] if logprobs else []
        return StepOutputs(self, [*grown], added, of_entries)

    def _is_due(self, entry: Entry, step: int) -> bool:
        """Whether a sequence still lacks the token that this step gives it."""
        return not entry.sequence.ended and step >= self._known.get(entry, 0)

    def _append(self, entries: list[Entry], tokens: Sequence[int]) -> None:
        """Append one token to each of these sequences, and end each sequence whose last token it is."""
        for entry, token in zip(entries, tokens, strict=True):
            known = entry.sequence.tokens
            known.append(token)
            if len(known) >= entry.next_check:
                entry.cache.cache_blocks(known)
                entry.next_check = min(entry.cache.next_full, entry.limit)
                if len(known) == entry.limit and token not in entry.ends:
                    self._end(entry, FinishReason.LENGTH)
            if token in entry.ends:
                self._end(entry, FinishReason.STOP)


class StepOutputs:
    """The outputs of one step while they are made. Parts add to them (`Part.sampled`)."""

    __slots__ = ("_columns", "_entries", "_logprobs", "_results", "_tokens")

    def __init__(
        self,
        results: Results,
        entries: list[Entry],
        tokens: list[tuple[int, ...]],
        logprobs: Sequence[tuple[TokenLogprobs, ...]] = (),
    ) -> None:
        """The sequences to which a step gave tokens, these tokens, and their log probabilities if any request asks."""
        self._results = results
        self._entries, self._tokens, self._logprobs = entries, tokens, logprobs
        self._columns: dict[str, Mapping[Entry, Any]] = {}

    def extend(self, entry: Entry, tokens: Sequence[int]) -> bool:
        """Append tokens that need no draw to a decoding sequence that the step has given a token.

        Returns whether the sequence lacks their positions now: a part must have them computed (`PartStep.compute`).
        """
        if entry.row == NO_ROW or not entry.decoding or entry not in self._entries:
            return False
        self._tokens[self._entries.index(entry)] += self._results.extend(entry, tokens)
        return not entry.decoding

    def add(self, field: str, values: Mapping[Entry, Any]) -> None:
        """Give a field of `SequenceOutput` these values.

        A sequence without new tokens has an output, too, unless it has ended.
        """
        self._columns[field] = values
        others = [entry for entry in values if entry not in self._entries]
        silent = [entry for entry in others if not entry.sequence.ended]
        if silent:
            self._entries, self._tokens = self._entries + silent, self._tokens + [()] * len(silent)
            self._logprobs = [*self._logprobs, *[()] * len(silent)] if self._logprobs else ()

    def columns(self, *, some_ended: bool) -> Columns[SequenceOutput]:
        """The outputs. `some_ended`: some of the sequences may have ended."""
        entries, count = self._entries, len(self._entries)
        sequences = [entry.sequence for entry in entries]
        columns: dict[str, Sequence[Any]] = dict(
            request_id=[entry.id for entry in entries],
            tokens=self._tokens,
            finish_reason=[sequence.finish_reason for sequence in sequences] if some_ended else [None] * count,
            cached_tokens=[sequence.cached_tokens for sequence in sequences],
            scheduled_at=[sequence.scheduled_at for sequence in sequences],
            preemptions=[sequence.preemptions for sequence in sequences],
            logprobs=self._logprobs or [()] * count,
            cached_by_tier=[sequence.cached_by_tier for sequence in sequences],
        )
        for field, nothing in SequenceOutput._field_defaults.items():
            if field in self._columns:
                values = self._columns[field]
                columns[field] = [values.get(entry, nothing) for entry in entries]
            elif field not in columns:
                columns[field] = [nothing] * count
        return Columns(SequenceOutput, **columns)


def is_ragged(plan: StepPlan, result: StepResult) -> bool:
    """Whether any sampling segment may have given no token or several."""
    return plan.samples is not None or result.counts is not None


def given_counts(result: StepResult, sampling: Sequence[Entry]) -> Sequence[int]:
    """Number of tokens that each sampling segment gave."""
    return [1] * len(sampling) if result.counts is None else result.counts


def most_counts(plan: StepPlan, sampling: Sequence[Entry]) -> Sequence[int]:
    """The most tokens that each sampling segment may give."""
    return [1] * len(sampling) if plan.samples is None else plan.samples


def valid_counts(plan: StepPlan, result: StepResult, sampling: Sequence[Entry]) -> bool:
    """Whether a ragged result gives each sampling segment as many tokens as its plan allows.

    Segments of a sequence whose state was lost may give none.
    """
    counts, most = given_counts(result, sampling), most_counts(plan, sampling)
    return (
        len(counts) == len(most) == len(sampling)
        and sum(counts) == len(result.tokens)
        and all(
            count == 1 or (limit > 1 and 0 <= count <= limit) or (count == 0 and plan.step < entry.lost_before)
            for count, limit, entry in zip(counts, most, sampling, strict=True)
        )
    )
