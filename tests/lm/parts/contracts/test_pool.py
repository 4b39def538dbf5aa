"""Pool: expected sums and their margins, compared with drawn answers."""

import random
from math import sqrt

import pytest

from holdfast.lm.parts.contracts.lengths import CERTAIN, GRID, AnswerLengths, bin_of, cell_of
from holdfast.lm.parts.contracts.pool import NOBODY, Answer, Pool, Sums

MARGIN = 2.33
"""Standard deviations of a probability of 99%."""


def drawn(choose):
    return max(1, int(choose.lognormvariate(4.5, 0.8)))


def learned(choose, count):
    """The survival of this many drawn answers."""
    answers = AnswerLengths(0.99)
    for _ in range(count):
        answers.add("", 100, drawn(choose), cut=False)
    answers.see(())
    return answers.survival("", 100)


def longer_than(choose, so_far):
    while (length := drawn(choose)) <= so_far:
        pass
    return length


def test_cells_begin_where_the_grid_says():
    for cell, first in enumerate(GRID[:12]):
        assert cell_of(first) == cell
        assert cell_of(GRID[cell + 1] - 1) == cell


@pytest.mark.parametrize("known", [40, 1000])
def test_sums_stay_within_the_margin_as_often_as_it_says(known):
    choose, within, trials = random.Random(known), 0, 0
    for _ in range(40):
        survival = learned(choose, known)
        so_far = [choose.choice((0, 0, 20, 60, 150)) for _ in range(120)]
        contexts = [choose.randrange(100, 3000) for _ in so_far]
        pairs = list(zip(so_far, contexts, strict=True))
        pool = Pool(Answer(survival, length, 2000, context) for length, context in pairs)
        ends = [longer_than(choose, length) - length for length in so_far]
        for cell, step in enumerate(GRID[2:8], 2):
            edge = GRID[cell + 1]
            rows, positions = pool.at(step).upper(MARGIN, edge)
            alive = [context for end, context in zip(ends, contexts, strict=True) if end > step]
            within += len(alive) <= rows and sum(alive) + edge * len(alive) <= positions
            trials += 1
    assert within >= 0.97 * trials


def test_a_pool_of_many_answers_counts_far_fewer_than_their_number():
    survival = learned(random.Random(0), 1000)
    pool = Pool(Answer(survival, 0, 2000, 500) for _ in range(200))
    rows, positions = pool.at(128).upper(MARGIN, 128)
    assert 200 * survival.chance(0, 128) < rows < 130
    assert positions == pytest.approx(rows * 628, rel=0.02)


def test_few_known_answers_make_a_wider_margin():
    choose = random.Random(3)
    few, many = learned(choose, 16), learned(choose, 2000)
    widths = []
    for survival in (few, many):
        sums = Pool(Answer(survival, 0, 2000, 500) for _ in range(100)).at(64)
        widths.append(sqrt(sums.variance))
    assert widths[0] > 1.8 * widths[1]


def test_an_answer_ends_with_its_maximum_at_the_latest():
    survival = learned(random.Random(1), 200)
    pool = Pool([Answer(survival, 0, 10, 100), Answer(survival, 0, 20, 100)])
    assert pool.count == 2 and pool.steps == 20
    assert pool.at(8).rows == pytest.approx(2, abs=0.1)
    assert pool.at(16).rows == pytest.approx(1, abs=0.1)
    assert pool.at(20) == NOBODY


def test_answers_of_certain_length_go_on_until_their_maximum():
    sums = Pool(Answer(CERTAIN, 3, 50, 100) for _ in range(7)).at(32)
    assert sums == Sums(7.0, 700.0, 0.0, 0.0)
    assert sums.upper(MARGIN, 10) == (7, 770)


def test_sums_of_two_pools_add_up():
    survival = learned(random.Random(2), 300)
    answers = [Answer(survival, length, 900, 10 * length) for length in range(0, 200, 5)]
    whole, first, second = Pool(answers), Pool(answers[:15], others=25), Pool(answers[15:], others=15)
    for step in (0, 16, 64):
        assert first.at(step).plus(second.at(step)) == pytest.approx(whole.at(step))


def test_a_longer_answer_goes_on_by_what_answers_of_its_length_did():
    survival = learned(random.Random(4), 3000)
    choose = random.Random(5)
    for so_far in (0, 50, 200):
        ends = [longer_than(choose, so_far) for _ in range(2000)]
        share = sum(end > so_far + 64 for end in ends) / len(ends)
        assert survival.chance(so_far, 64) == pytest.approx(share, abs=0.07)
        assert survival.chances(bin_of(so_far + 1))[cell_of(64)][0] >= survival.chance(so_far, 64) - 1e-9


@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks_of_a_pool_suffice_as_often_as_the_margin_says(block_size):
    choose, within, trials = random.Random(block_size), 0, 60
    for _ in range(trials):
        survival = learned(choose, 800)
        so_far = [choose.choice((0, 0, 20, 60, 150)) for _ in range(100)]
        contexts = [choose.randrange(100, 1000) + length for length in so_far]
        pairs = list(zip(so_far, contexts, strict=True))
        pool = Pool(Answer(survival, length, 2000, context) for length, context in pairs)
        ends = [longer_than(choose, length) - length for length in so_far]
        needed = max(
            sum(-(-(context + step) // block_size) for end, context in zip(ends, contexts, strict=True) if end > step)
            for step in range(0, 1200, 8)
        )
        found = pool.most_blocks(MARGIN, block_size)
        within += needed <= found
        assert found < 0.8 * sum(-(-(context + 600) // block_size) for context in contexts)
    assert within >= 0.97 * trials


def test_a_pool_needs_blocks_for_what_its_sequences_grow_by():
    assert Pool([Answer(CERTAIN, 0, 64, 100)]).most_blocks(MARGIN, 16) == 1 + -(-(100 + 64) // 16)


def test_an_empty_pool_needs_no_blocks():
    assert Pool().most_blocks(MARGIN, 16) == 0
