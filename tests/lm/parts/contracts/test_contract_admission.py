"""ContractAdmission: how likely answers may become too long, and blocks that many answers need together."""

import random
from dataclasses import replace
from math import inf

import pytest

from holdfast.core.contract import Contract
from holdfast.lm.parts.contracts.admission import ContractAdmission, End, Queue
from holdfast.lm.parts.contracts.forecast import Decodes, Forecast, Prices, Prompt
from holdfast.lm.parts.contracts.lateness import Lateness
from holdfast.lm.parts.contracts.lengths import CERTAIN, AnswerLengths
from holdfast.lm.parts.contracts.promises import Promise, Promises
from tests.lm.parts.contracts.world import EXACT, World

MOST = 1500
"""Tokens that each answer may have."""


def learned(count, seed=0):
    """The survival of this many answers, of 90 tokens in the median and of more than 450 in 2%."""
    answers, choose = AnswerLengths(0.99), random.Random(seed)
    for _ in range(count):
        answers.add("", 100, max(1, int(choose.lognormvariate(4.5, 0.8))), cut=False)
    answers.see(())
    return answers.survival("", 100)


def admission(confidence=0.99, promises=None):
    forecast = Forecast(Prices(EXACT.predictor(), tile=32, ceiling=256), max_sequences=64, margin=2.33)
    return ContractAdmission(
        forecast, promises or Promises(), Lateness(), max_sequences=64, confidence=confidence
    )  # fmt: skip


def queue_of(complete, survival, *, contracts=1, count=None):
    """Contracts of answers that must complete by the time `complete`, among `count` open ones."""
    prompt = Prompt(10, 10, MOST, complete=complete, survival=survival, allowed=MOST)
    return Queue([], [prompt] * contracts, Decodes(), inf, (), count or contracts)


def seconds_for(tokens):
    """Seconds in which an idle engine gives an answer of `tokens` tokens, and not one of a tenth more."""
    return 1.05 * tokens * EXACT.step([(1, 10 + tokens)])


def test_a_risk_is_the_chance_of_a_longer_answer_with_its_error():
    survival = learned(400)
    end = End(steps=MOST, by=9.0, most=MOST, so_far=40, survival=survival)
    assert end.risk(MOST) == 0
    assert end.risk(200) == survival.most_chance(240) > survival.chance(0, 240)
    assert End(MOST, 9.0, MOST, -30, survival).risk(20) == 1  # its first token comes after the time


def test_a_length_that_is_certain_leaves_nothing_to_chance():
    end = End(steps=100, by=9.0, most=120, so_far=0, survival=CERTAIN)
    assert (end.risk(99), end.risk(100), end.risk(120)) == (inf, 0, 0)


def test_a_contract_is_accepted_if_a_longer_answer_is_unlikely():
    survival = learned(400)
    for tokens, accepted in ((1200, True), (300, False)):
        found = admission().find_bound(queue_of(seconds_for(tokens), survival), start=0.0, factor=1.0)
        assert (found is not None) is accepted
    assert admission().find_bound(queue_of(seconds_for(1200), CERTAIN), start=0.0, factor=1.0) is None


def test_nothing_is_left_to_chance_with_a_confidence_of_1():
    survival = learned(400)
    assert admission(1.0).find_bound(queue_of(seconds_for(1200), survival), start=0.0, factor=1.0) is None


def test_contracts_without_a_completion_leave_the_others_more_risk():
    survival, answered = learned(400), seconds_for(450)
    assert admission().find_bound(queue_of(answered, survival), start=0.0, factor=1.0) is None
    assert admission().find_bound(queue_of(answered, survival, count=10), start=0.0, factor=1.0) is not None


def test_the_expected_number_of_late_answers_is_below_what_the_confidence_leaves():
    """Answers are drawn. So many of them are too long for their times as the confidence says, or fewer."""
    choose, survival = random.Random(1), learned(400)
    late = asked = 0
    for tokens in range(300, 1200, 50):
        queue = queue_of(seconds_for(tokens), survival, contracts=8)
        if admission(0.95).find_bound(queue, start=0.0, factor=1.0) is None:
            continue
        late += sum(choose.lognormvariate(4.5, 0.8) > tokens for _ in range(8 * 50))
        asked += 8 * 50
    assert asked > 1000 and late <= 0.05 * asked


@pytest.mark.parametrize("survival", ["learned", "certain"])
def test_blocks_are_summed_over_answers_whose_lengths_are_learned(survival):
    """50 answers of up to 1,500 tokens need 95 blocks each at the most, but far fewer all together."""
    promises, known = Promises(), learned(400) if survival == "learned" else CERTAIN
    world = World(max_sequences=64, blocks=8000, budget=512)
    for number in range(50):
        world.add(str(number), 20, MOST)
    world.step()
    entries = [*world.scheduler.queues.running]
    assert len(entries) > 10
    promise = Promise(Contract(complete=900.0), 0.0, MOST, 95, MOST, 20, known)
    for entry in entries[1:]:
        promises.add(entry, replace(promise), inf)
    found = admission(promises=promises)._blocks((entries[0], replace(promise)), 16)
    if survival == "certain":
        assert found == 95 * len(entries)
    else:
        assert 2 * len(entries) <= found < 40 * len(entries)
