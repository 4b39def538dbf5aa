"""Goodput by rate: the load at which contracts are kept, and what is refused and kept beyond it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.lab import workloads
from holdfast.lab.metrics import NoSuccess, Record
from holdfast.lab.planning import FIRST_STEP, CapacityQuestion, Evaluation, search_rate
from holdfast.lab.simulator.run import context_length, simulate
from holdfast.lab.workloads import Workload

KEPT = 0.99
"""Share of the accepted contracts that a sustained rate keeps."""
REFUSED = 0.01
"""Largest share of the contracts that a sustained rate refuses."""
MULTIPLES = (0.8, 1.5, 2.0, 3.0)
"""Loads that are tried, as multiples of the sustained rate."""


def keeps_contracts(figures: Mapping[str, float]) -> bool:
    """Whether a run kept at least KEPT of the contracts that it accepted, and refused at most REFUSED of all."""
    return figures["contracts_kept_share"] >= KEPT and figures["contracts_refused_share"] <= REFUSED


def asks_contracts(workload: Workload) -> bool:
    """Whether any request of a workload asks for a contract."""
    return any(turn.contract for conversation in workload for turn in conversation.requests())


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run at a multiple of the rate at which contracts are kept."""

    multiple: float
    rate: float
    """Conversations per second."""
    figures: Mapping[str, Any]
    """`metrics.contract_figures` of the run."""


@dataclass(frozen=True, slots=True)
class ContractEvaluation:
    """The rate at which one replica keeps contracts, and runs below and above it."""

    rate: float
    """Conversations per second of which contracts are kept (`keeps_contracts`); 0 if there is no such rate."""
    runs: tuple[LoadedRun, ...]
    """Runs at MULTIPLES of the rate; empty without one."""


def evaluate_contracts(question: CapacityQuestion, evaluation: Evaluation) -> ContractEvaluation:
    """Search the rate at which an evaluated candidate keeps the contracts that the workload asks for.

    Deterministic. Raises ValueError for a workload without contracts.
    """
    if not asks_contracts(question.workload):
        raise ValueError("the workload asks for no contracts; give --contract, such as ttft=500ms,tbt=50ms")
    deployment = question.deployment(evaluation.candidate)
    profile, engine = deployment.profile, replace(question.engine, **evaluation.candidate.options())
    base = workloads.fit_context(question.workload, context_length(engine, profile), question.longer)

    def run(arriving: Workload) -> Sequence[Record]:
        return simulate(engine, profile, arriving, pipeline=deployment.pipeline).records

    def good(rate: float) -> bool:
        try:
            return keeps_contracts(question.run_at(base, rate, run, keeps_contracts))
        except NoSuccess:  # all were refused
            return False

    rate = search_rate(good, start=evaluation.capacity or 1.0, step=FIRST_STEP)
    loads = [(multiple, multiple * rate) for multiple in MULTIPLES if rate]
    runs = [LoadedRun(multiple, at, question.run_at(base, at, run, once)) for multiple, at in loads]
    return ContractEvaluation(rate, tuple(runs))


def once(figures: Mapping[str, float]) -> bool:
    """Whether a run of these figures should be repeated for longer: never."""
    return False
