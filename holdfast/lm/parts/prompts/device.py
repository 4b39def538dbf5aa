"""Log probabilities of prompt tokens on a device: computed from the hidden states of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt
import torch

from holdfast.core.types import TokenLogprobs
from holdfast.lm.execution.batch import StagedStep
from holdfast.lm.execution.part import Allocated, DevicePart, HiddenWork, PartExecutor
from holdfast.lm.kernels.sampling.logprobs import Logprobs, filled
from holdfast.lm.kernels.sampling.sampler import Sampler, ToLogits
from holdfast.lm.kernels.upload import upload
from holdfast.lm.models.base import HiddenModel
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.parts.prompts.values import PromptPlan, PromptReport, PromptResult


@dataclass(frozen=True, slots=True)
class FoundLogprobs:
    """The log probabilities of one step's prompt tokens."""

    reports: Sequence[PromptReport]
    logprobs: Logprobs
    """Log probabilities of the targets of all `reports`, one after the other.

    The most probable tokens are followed by those that the reports name.
    """

    def on_host(self) -> FoundLogprobs:
        return FoundLogprobs(self.reports, self.logprobs.on_host())

    def result(self) -> PromptResult:
        return PromptResult(records_of(self.logprobs, self.reports), ranks_of(self.logprobs, self.reports))


class PromptExecutor(PartExecutor):
    """Computes the log probabilities of prompt tokens that plans report."""

    plans = (PromptPlan,)

    def __init__(self, sampler: Sampler, to_logits: ToLogits, device: torch.device) -> None:
        """`to_logits` gives the logits of hidden states."""
        self._sampler, self._to_logits, self._device = sampler, to_logits, device

    def hidden(self, staged: StagedStep) -> Sequence[HiddenWork]:
        reports = staged.plan.part(PromptPlan).reports
        if not reports:
            return ()

        def work(hidden: torch.Tensor, rows: torch.Tensor) -> FoundLogprobs:
            at, targets = (upload(numbers, self._device) for numbers in targets_of(staged, reports))
            most = max(each.alternatives for each in reports)
            found, some = named_of(reports), hidden.index_select(0, at)
            named = upload(found, self._device) if found.size else targets.new_empty(found.shape)
            return FoundLogprobs(reports, self._sampler.tell_targets(some, self._to_logits, targets, most, named))

        return (work,)


class PromptDevice(DevicePart):
    """The log probabilities of prompts for a model."""

    def __init__(self, model: HiddenModel) -> None:
        self._model = model

    def executor(self, allocated: Allocated) -> PromptExecutor:
        model, spec = self._model, self._model.spec
        group = model.group if isinstance(model, Decoder) else None
        return PromptExecutor(Sampler(group, spec.vocab_size, alone=bool(spec.arithmetic)), model.logits, spec.device)


def targets_of(
    staged: StagedStep, reports: Sequence[PromptReport]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The step's tokens whose following token is reported, and those following tokens."""
    starts = staged.segments.query_start
    spans = [(int(starts[each.segment]) + each.first, each.targets) for each in reports]
    at = [np.arange(first, first + len(targets)) for first, targets in spans]
    return np.concatenate(at), np.fromiter(chain.from_iterable(targets for _, targets in spans), np.int64)


def named_of(reports: Sequence[PromptReport]) -> npt.NDArray[np.int64]:
    """The further tokens of all targets, [T, most of any target]; 0 in places without one."""
    return filled([row for each in reports for row in (each.named or ((),) * len(each.targets))])


def records_of(logprobs: Logprobs, reports: Sequence[PromptReport]) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """The records of each of the `reports`, once the log probabilities of all their targets are on the host."""
    wanted = [each.alternatives for each in reports for _ in each.targets]
    named = [len(row) for each in reports for row in (each.named or ((),) * len(each.targets))]
    records = iter(logprobs.records(wanted, named))
    return tuple(tuple(islice(records, len(each.targets))) for each in reports)


def ranks_of(logprobs: Logprobs, reports: Sequence[PromptReport]) -> tuple[tuple[int, ...], ...]:
    """The ranks of the targets of each of the `reports`, once they are on the host."""
    assert logprobs.rank is not None, "log probabilities of prompts have ranks"
    ranks = iter(logprobs.rank.tolist())
    return tuple(tuple(islice(ranks, len(each.targets))) for each in reports)
