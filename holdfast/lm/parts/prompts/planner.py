"""PromptPart: which segments report the log probabilities of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.types import Request
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.prompts.values import PromptPlan, PromptReport, PromptResult
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import Part, PartOutputs, PartStep
from holdfast.lm.types import PartPlan, StepPlan, StepResult


class PromptPart(Part):
    """Each token of a prompt but the first is reported once, by the first segment that gives its log probability.

    The prompt is computed from its first token on, even if memory keeps state of it.
    """

    name = "prompts"

    def __init__(self) -> None:
        self.awake = False
        self._reported: dict[Entry, int] = {}
        """For each sequence that asks, the position up to which plans made so far report its prompt."""
        self._in_flight: dict[int, list[Entry]] = {}
        """By the number of a plan in flight, the sequence of each of its reports."""

    def uses_kept(self, request: Request) -> bool:
        return request.params.prompt_logprobs is None

    def added(self, entry: Entry) -> None:
        if entry.sequence.request.params.prompt_logprobs is not None:
            self._reported[entry] = 0
            self.awake = True

    def ended(self, entry: Entry) -> None:
        self._reported.pop(entry, None)
        self.awake = bool(self._reported)

    def finish(self, step: PartStep) -> PartPlan | None:
        found = [
            (entry, report)
            for index, (entry, span) in enumerate(zip(step.planned, step.spans, strict=True))
            if entry in self._reported and (report := self._report(entry, index, *span)).targets
        ]
        if not found:
            return None
        self._in_flight[step.number] = [entry for entry, _ in found]
        return PromptPlan(tuple([report for _, report in found]))

    def sampled(self, plan: StepPlan, result: StepResult, sampling: Sequence[Entry], outputs: PartOutputs) -> None:
        entries = self._in_flight.pop(plan.step, [])
        found = result.part(PromptResult)
        logprobs, ranks = found.logprobs, found.ranks
        if not len(logprobs) == len(ranks) == len(entries):
            raise RuntimeError(f"step {plan.step} reports {len(entries)} prompts; got {len(logprobs)}")
        if entries:
            outputs.add("prompt_logprobs", dict(zip(entries, logprobs, strict=True)))
            outputs.add("prompt_ranks", dict(zip(entries, ranks, strict=True)))

    def _report(self, entry: Entry, index: int, start: int, stop: int) -> PromptReport:
        """The report of this segment, [start, stop): the tokens of the prompt that no earlier plan has reported."""
        request = entry.sequence.request
        first = max(start, self._reported[entry])
        targets = tuple(request.prompt[first + 1 : stop + 1])
        if targets:
            self._reported[entry] = first + len(targets)
        alternatives = request.params.prompt_logprobs
        assert alternatives is not None
        named = request.params.prompt_targets[first : first + len(targets)]
        filled = (*named, *((),) * (len(targets) - len(named))) if any(named) else ()
        return PromptReport(index, first - start, targets, alternatives, filled)


def make_parts(planning: Planning) -> tuple[PromptPart, ...]:
    """The part of a scheduler over a paged cache; padded rows have none."""
    return () if planning.on_rows else (PromptPart(),)
