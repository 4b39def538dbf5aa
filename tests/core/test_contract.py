"""Contracts of requests: what they allow, and which answers break them."""

from __future__ import annotations

import math

import pytest

from holdfast.core.contract import MAX_CONTRACT, NO_CONTRACT, TERMS, Contract, Term


@pytest.mark.whole_product
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, MAX_CONTRACT * 1.001, 1e18])
def test_a_time_out_of_range_is_refused_by_name(term: Term, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{term}_ms is .*above 0 and be at most 86400000"):
        Contract(**{term: value})


def test_a_contract_that_promises_nothing_is_false_and_never_broken() -> None:
    assert not NO_CONTRACT
    assert NO_CONTRACT.broken([1e9, 2e9]) is None
    assert all(Contract(**{term: MAX_CONTRACT}) for term in TERMS)


@pytest.mark.parametrize(
    ("deliveries", "broken"),
    [
        ([0.5, 0.6, 0.7], None),
        ([0.5], None),
        ([0.501], "ttft"),
        ([0.5, 0.601 + 0.5, 1.2], "tbt"),
        ([0.5, 1.0, 1.5, 2.0, 2.001], "complete"),
        ([0.6, 5.0], "ttft"),
    ],
)
def test_the_first_term_that_an_answer_broke_is_named(deliveries: list[float], broken: Term | None) -> None:
    assert Contract(ttft=0.5, tbt=0.5, complete=2.0).broken(deliveries) == broken


def test_the_rest_of_a_contract_is_due_from_the_latest_token_on() -> None:
    contract = Contract(ttft=0.5, tbt=0.25, complete=2.0)
    assert contract.rest(None) == contract
    assert contract.rest(0.75) == Contract(ttft=1.0, tbt=0.25, complete=2.0)
    assert Contract(ttft=0.5).rest(0.75) == NO_CONTRACT
    assert Contract(tbt=MAX_CONTRACT).rest(5.0).ttft == MAX_CONTRACT


def test_a_contract_has_expired_once_a_token_is_late() -> None:
    assert not Contract(ttft=0.5, complete=2.0).expired(0.5)
    assert Contract(ttft=0.5).expired(0.51) and Contract(complete=0.5).expired(0.51)
    assert not Contract(tbt=0.1).expired(1e9)
