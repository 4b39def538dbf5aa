"""Results of parts whose work every rank does: the results of all ranks as one, once all ranks have given theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from holdfast.lm.parts.adapters.values import AdapterPlan, AdapterResult
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingReport
from holdfast.lm.types import PartResult, StatePlan, StepPlan
from holdfast.lm.types.states import StateResult


class OfRanks(Protocol):
    """The work of one part on all ranks."""

    def submitted(self, plan: StepPlan) -> None:
        """All ranks get this plan."""

    def reported(self, rank: int, step: int, result: PartResult) -> None:
        """A rank gave this result with a step. Results of other parts are ignored."""

    def complete(self, step: int, *, waits: bool) -> bool:
        """Whether all ranks have given what the result of a step needs. A plan that `waits` is one of copies alone."""
        ...

    def result(self, step: int) -> PartResult | None:
        """The part's result for a complete step; None if there is no news. Called once for each step, in order."""
        ...


class LoadsOfRanks(OfRanks):
    """Loads of adapters. A load is complete when every rank has its part of the adapter, or has found it lost."""

    def __init__(self, ranks: int) -> None:
        self._loading: dict[int, frozenset[str]] = {}
        """By the number of a plan, the adapters that it loads, until they are complete on all ranks."""
        self._loaded = [-1] * ranks
        """By rank, `AdapterResult.loaded`."""
        self._lost: set[str] = set()
        """Adapters that some rank could not read, in loads that are not complete on all ranks."""

    def submitted(self, plan: StepPlan) -> None:
        if loads := plan.part(AdapterPlan).loads:
            self._loading[plan.step] = frozenset(load.adapter for load in loads)

    def reported(self, rank: int, step: int, result: PartResult) -> None:
        if isinstance(result, AdapterResult):
            self._loaded[rank] = max(self._loaded[rank], result.loaded)
            self._lost.update(result.lost)

    def complete(self, step: int, *, waits: bool) -> bool:
        return not waits or all(loading > step or loading <= min(self._loaded) for loading in self._loading)

    def result(self, step: int) -> AdapterResult | None:
        least = min(self._loaded)
        done = [loading for loading in self._loading if loading <= least]
        if not done:
            return None
        loaded = frozenset[str]().union(*[self._loading.pop(loading) for loading in done])
        lost = tuple(sorted(loaded & self._lost))
        # A lost adapter's slot is used again, so it is reported only when no rank may still copy to it.
        self._lost -= loaded
        return AdapterResult(max(done), lost)


class SlicesOfRanks(OfRanks):
    """Slices of training. Each rank computes its part of a slice."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._reports: dict[int, dict[int, TrainingReport]] = {}
        """By the number of a plan with a slice: each rank's report."""

    def submitted(self, plan: StepPlan) -> None:
        if plan.part(TrainingPlan).slice:
            self._reports[plan.step] = {}

    def reported(self, rank: int, step: int, result: PartResult) -> None:
        if isinstance(result, TrainingReport):
            self._reports[step][rank] = result

    def complete(self, step: int, *, waits: bool) -> bool:
        return step not in self._reports or len(self._reports[step]) == self._ranks

    def result(self, step: int) -> TrainingReport | None:
        """Rank 0's report, with the time of the slowest rank: the ranks wait for each other within a slice."""
        reports = self._reports.pop(step, None)
        if not reports:
            return None
        return replace(
            reports[0],
            seconds=max(report.seconds for report in reports.values()),
            launch_seconds=max(report.launch_seconds for report in reports.values()),
        )


class StatesOfRanks(OfRanks):
    """Copies of recurrent states to the host and from there. Each rank copies its part of a state.

    A step ends once its copies have ended on all ranks, as threads may use the slots on the host then.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._done: dict[int, set[int]] = {}
        """By the number of a plan with such copies: the ranks that have done them."""

    def submitted(self, plan: StepPlan) -> None:
        if plan.part(StatePlan).uses_host:
            self._done[plan.step] = set()

    def reported(self, rank: int, step: int, result: PartResult) -> None:
        if isinstance(result, StateResult):
            self._done[step].add(rank)

    def complete(self, step: int, *, waits: bool) -> bool:
        return step not in self._done or len(self._done[step]) == self._ranks

    def result(self, step: int) -> StateResult | None:
        return None if self._done.pop(step, None) is None else StateResult()


class PartResults:
    """The results of all such parts."""

    def __init__(self, ranks: int) -> None:
        self._parts: tuple[OfRanks, ...] = (LoadsOfRanks(ranks), SlicesOfRanks(ranks), StatesOfRanks(ranks))

    def submitted(self, plan: StepPlan) -> None:
        """All ranks get this plan."""
        if plan.parts:
            for part in self._parts:
                part.submitted(plan)

    def reported(self, rank: int, step: int, results: Iterable[PartResult]) -> None:
        """A rank gave these results with a step."""
        for result in results:
            for part in self._parts:
                part.reported(rank, step, result)

    def complete(self, step: int, *, waits: bool) -> bool:
        """Whether all ranks have given what the result of a step needs. A plan that `waits` is one of copies alone."""
        return all(part.complete(step, waits=waits) for part in self._parts)

    def results(self, step: int) -> list[PartResult]:
        """The results of all ranks for a complete step. Called once for each step, in order."""
        found = [part.result(step) for part in self._parts]
        return [each for each in found if each is not None]


def split(results: Iterable[PartResult]) -> Mapping[bool, list[PartResult]]:
    """Results that each rank gives (True), and results of one rank alone (False)."""
    found: dict[bool, list[PartResult]] = {True: [], False: []}
    for result in results:
        found[result.of_each_rank].append(result)
    return found
