"""AnswerLengths: quantiles of answers' lengths, compared with the answers themselves."""

import random
from math import inf

import pytest

from holdfast.lm.parts.contracts.lengths import CERTAIN, EDGES, HALF_LIFE, MOST_CLASSES, AnswerLengths, Lengths, bin_of


def test_each_length_lies_in_the_first_bin_that_reaches_it():
    for length in (*range(1, 3000), 10**5, 10**6):
        index = bin_of(length)
        assert EDGES[index] >= length or index == len(EDGES) - 1
        assert index == 0 or EDGES[index - 1] < length


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("above", [0, 40])
def test_a_quantile_is_that_of_the_answers_within_a_bin(share, above):
    choose = random.Random(1)
    for spread in (0.2, 0.6, 1.2):
        lengths, answers = Lengths(), [max(1, int(choose.lognormvariate(4, spread))) for _ in range(400)]
        for answer in answers:
            lengths.add(answer, cut=False)
        longer = sorted(answer for answer in answers if answer > above)
        exact = longer[min(len(longer) - 1, int(share * len(longer)))]
        found = lengths.quantile(share, above)
        assert found is not None and exact / 1.35 <= found <= exact * 1.35


def test_answers_that_their_maximum_cut_count_as_longer():
    lengths = Lengths()
    for number in range(100):
        lengths.add(100 if number % 2 else 10, cut=bool(number % 2))
    assert lengths.quantile(0.4) == 10
    assert lengths.quantile(0.6) is None  # more than half went on, nobody knows for how long


def test_new_answers_outweigh_old_ones():
    lengths = Lengths()
    for length in (1000, 10):
        for _ in range(4 * HALF_LIFE):
            lengths.add(length, cut=False)
    found = lengths.quantile(0.9)
    assert found is not None and 10 <= found <= 11
    assert 0.9 * HALF_LIFE < lengths.weight < 2 * HALF_LIFE


def test_weights_stay_finite():
    lengths = Lengths()
    for _ in range(60 * HALF_LIFE):
        lengths.add(50, cut=False)
    assert lengths.weight < inf and lengths.quantile(0.99) == EDGES[bin_of(50)]


def test_the_narrowest_class_with_enough_answers_counts():
    answers = AnswerLengths(0.9)
    assert answers.longest("a", 100, 500) == 500
    for _ in range(40):
        answers.add("a", 100, 20, cut=False)
        answers.add("a", 3000, 200, cut=False)
        answers.add("b", 100, 400, cut=False)
    assert answers.longest("a", 110, 500) == EDGES[bin_of(20)]
    assert answers.longest("a", 3000, 500) == EDGES[bin_of(200)]
    assert answers.longest("a", 10, 500) == EDGES[bin_of(200)]  # all of the tenant's
    assert answers.longest("c", 100, 500) == EDGES[bin_of(400)]  # everyone's
    assert answers.longest("b", 100, 50) == 50


def test_an_answer_that_goes_on_is_expected_to_be_longer():
    answers = AnswerLengths(0.5)
    for length in (10, 10, 10, 300) * 20:
        answers.add("a", 100, length, cut=False)
    assert answers.longest("a", 100, 1000) == 10
    assert answers.longest("a", 100, 1000, above=11) == EDGES[bin_of(300)]
    assert answers.longest("a", 100, 1000, above=999) == 1000


def test_classes_are_forgotten_beyond_a_number():
    answers = AnswerLengths(0.9)
    for number in range(MOST_CLASSES):
        answers.add(f"tenant {number}", 100, 20, cut=False)
    assert len(answers._classes) == MOST_CLASSES


def test_answers_that_go_on_count_as_longer():
    answers = AnswerLengths(0.9)
    for _ in range(40):
        answers.add("", 100, 20, cut=False)
    answers.see(())
    short = answers.survival("", 100).chance(0, 30)
    answers.see([("", 100, 200)] * 40)
    assert short < 0.1 < 0.4 < answers.survival("", 100).chance(0, 30) < 0.6
    assert answers.longest("", 100, 500) == 500  # half of all may be longer than any that has ended


def test_nothing_is_learned_where_certainty_is_asked():
    answers = AnswerLengths(1.0)
    for _ in range(100):
        answers.add("", 100, 20, cut=False)
    answers.see(())
    assert answers.longest("", 100, 500) == 500
    assert answers.survival("", 100) is CERTAIN


def test_a_class_of_few_answers_knows_long_ones_from_the_wider_class():
    answers = AnswerLengths(0.99)
    choose = random.Random(0)
    for _ in range(400):
        answers.add("a", 5000, max(1, int(choose.lognormvariate(4.5, 0.8))), cut=False)
    for _ in range(10):
        answers.add("a", 100, 90, cut=False)
    answers.see(())
    wide, narrow = answers.survival("a", 5000), answers.survival("a", 100)
    assert wide.chance(0, 500) == pytest.approx(0.016, abs=0.01)
    assert 0.2 * wide.chance(0, 500) < narrow.chance(0, 500) < wide.chance(0, 500)
    assert narrow.chance(0, 80) > wide.chance(0, 80)
    assert answers.survival("b", 100).chance(0, 200) == pytest.approx(wide.chance(0, 200), abs=0.05)


def test_a_class_of_many_answers_goes_by_its_own():
    answers = AnswerLengths(0.99)
    for number in range(2000):
        answers.add("a", 100, 50, cut=False)
        answers.add("b", 100, 500 if number % 2 else 5, cut=False)
    answers.see(())
    assert answers.survival("a", 100).chance(0, 60) < 0.01
    assert answers.survival("b", 100).chance(0, 100) == pytest.approx(0.5, abs=0.02)


def test_a_cautious_chance_adds_the_error_of_the_estimate():
    errors = []
    for count in (50, 800):
        lengths, choose = Lengths(), random.Random(count)
        for _ in range(count):
            lengths.add(max(1, int(choose.lognormvariate(4, 0.8))), cut=False)
        lengths.see(())
        survival = lengths.survival()
        errors.append(survival.most_chance(150) - survival.chance(0, 150))
        assert survival.most_chance(0) == 1
    assert errors[0] > 2.5 * errors[1] > 0


def test_most_chances_are_as_high_as_those_of_drawn_answers():
    """Answers that a sample of 100 says are too long with 5% are so in nearly no more cases, over many samples."""
    choose, longer, asked = random.Random(9), 0, 0
    for _ in range(60):
        lengths = Lengths()
        for _ in range(100):
            lengths.add(max(1, int(choose.lognormvariate(4, 0.8))), cut=False)
        lengths.see(())
        survival = lengths.survival()
        length = next(length for length in range(1, 5000) if survival.most_chance(length) <= 0.05)
        longer += sum(choose.lognormvariate(4, 0.8) > length for _ in range(200))
        asked += 200
    assert longer <= 0.05 * asked
