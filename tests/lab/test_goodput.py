"""Goodput by rate: the rate at which contracts are kept, and loads beyond it."""

from dataclasses import replace

import pytest

from holdfast.core.contract import Contract
from holdfast.lab import workloads
from holdfast.lab.goodput import MULTIPLES, evaluate_contracts, keeps_contracts
from holdfast.lab.planning import evaluate
from tests.lab.test_planning import PLAIN, QUESTION

CONTRACT = Contract(ttft=0.15, complete=0.5)
ASKED = replace(QUESTION, workload=workloads.promise(QUESTION.workload, lambda turn, history: CONTRACT))


@pytest.mark.parametrize(
    ("kept", "refused", "keeps"), [(1.0, 0.0, True), (0.99, 0.01, True), (0.989, 0.0, False), (1.0, 0.011, False)]
)
def test_contracts_are_kept_at_a_rate_if_nearly_all_are_and_nearly_none_is_refused(kept, refused, keeps):
    assert keeps_contracts({"contracts_kept_share": kept, "contracts_refused_share": refused}) == keeps


def test_beyond_the_rate_at_which_contracts_are_kept_the_engine_refuses_and_still_keeps():
    evaluation = evaluate(ASKED, PLAIN)
    found = evaluate_contracts(ASKED, evaluation)
    assert 0.3 * evaluation.capacity < found.rate < 5 * evaluation.capacity
    assert tuple(run.multiple for run in found.runs) == MULTIPLES
    assert [run.rate for run in found.runs] == pytest.approx([multiple * found.rate for multiple in MULTIPLES])
    shares = [run.figures["contracts_refused_share"] for run in found.runs]
    assert shares[0] <= 0.02 and shares[-1] > 0.3
    assert all(run.figures["contracts_kept_share"] >= 0.99 for run in found.runs)


def test_a_workload_without_contracts_is_refused():
    with pytest.raises(ValueError, match="asks for no contracts; give --contract"):
        evaluate_contracts(QUESTION, evaluate(QUESTION, PLAIN))


def test_contracts_that_no_device_keeps_have_no_rate():
    never = replace(ASKED, workload=workloads.promise(QUESTION.workload, lambda turn, history: Contract(ttft=0.005)))
    found = evaluate_contracts(never, evaluate(never, PLAIN))
    assert (found.rate, found.runs) == (0.0, ())


def test_a_candidate_is_searched_without_refusals():
    """An engine that refuses has short queues at any rate."""
    assert evaluate(ASKED, PLAIN).capacity == evaluate(QUESTION, PLAIN).capacity
