"""Contracts in a real engine process: accepted, refused, counted, and greedy answers that are as without one."""

import math

import pytest

from holdfast import LLM, Contract, ContractRefused, SamplingParams
from holdfast.lm.limits import RequestRefused
from tests.engine.conftest import SMALL

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + number] * 40 for number in range(4)]
LOOSE = Contract(ttft=600.0, tbt=60.0, complete=3600.0)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), **SMALL, contracts="on") as llm:
        yield llm


def stats_of(llm):
    return llm._thread.run(llm._client.health())


def test_accepted_contracts_are_kept_and_do_not_change_the_answers(llm):
    plain = llm.generate(PROMPTS, GREEDY, progress=False)
    promised = llm.generate(PROMPTS, GREEDY, contract=LOOSE, progress=False)
    assert [each.token_ids for each in promised] == [each.token_ids for each in plain]
    stats = stats_of(llm)
    assert (stats.contracts_accepted, stats.contracts_kept, stats.contracts_refused) == (4, 4, 0)


def test_a_contract_that_cannot_be_kept_is_refused_and_the_engine_goes_on(llm):
    for contract in (Contract(ttft=1e-7), Contract(tbt=1e-7), Contract(complete=1e-7)):
        with pytest.raises(ContractRefused, match="can never be kept") as refused:
            llm.generate(PROMPTS[0], GREEDY, contract=contract, progress=False)
        assert math.isinf(refused.value.refusal.retry_after)
        assert refused.value.refusal.predicted.ttft > 0
    assert stats_of(llm).contracts_refused == 3
    assert len(llm.generate(PROMPTS, GREEDY, progress=False)) == 4


def test_an_engine_without_contracts_names_the_reason(checkpoint):
    with LLM(str(checkpoint), **SMALL, contracts="off") as llm:
        with pytest.raises(RequestRefused, match="contracts is off") as refused:
            llm.generate(PROMPTS[0], GREEDY, contract=LOOSE, progress=False)
        assert refused.value.param == "ttft_ms"
