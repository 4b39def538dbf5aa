"""Gaps: what is learned of pauses, against the empirical distribution and a search through all horizons."""

import math
import random

import pytest

from holdfast.lm.memory import gaps
from holdfast.lm.memory.gaps import (
    BINS,
    EDGES,
    MAX_KINDS,
    MAX_TENANTS,
    NO_PACE,
    UNKNOWN,
    WIDTHS,
    GapHistogram,
    Kind,
    Kinds,
    Rates,
    bin_of,
    spread,
)

NEVER = math.inf


def observe(histogram, gap, time=0.0, now=1e5):
    """One gap from its beginning to its end, or one that is open at `now`."""
    histogram.begin(time)
    if gap < now - time:
        histogram.end(time, 0, bin_of(gap))
    else:
        histogram.last(time, 0, bin_of(now - time))


def learned(drawn, now=1e5):
    histogram = GapHistogram(UNKNOWN)
    for gap in drawn:
        observe(histogram, gap, now=now)
    return histogram


def log_normal(median, sigma, count, never=0.0, seed=1):
    draw = random.Random(seed)
    return [NEVER if draw.random() < never else median * math.exp(draw.gauss(0, sigma)) for _ in range(count)]


def brute_worth(chances, at):
    """The largest ratio of probability to expected time over all horizons that end with a bin."""
    best = needed = held = 0.0
    lasts = 1.0
    for chance, width in zip(chances[at:], WIDTHS[at:], strict=True):
        rate = -math.log1p(-chance) / width
        held += lasts * (chance / rate if rate else width)
        needed += lasts * chance
        lasts *= 1 - chance
        best = max(best, needed / held)
    return best


def test_bins_hold_their_starts_and_not_their_ends():
    assert [bin_of(edge) for edge in EDGES] == list(range(BINS))
    assert bin_of(-5.0) == 0 and bin_of(math.inf) == BINS - 1
    assert all(bin_of(math.nextafter(edge, 0)) == at for at, edge in enumerate(EDGES[1:]))


@pytest.mark.parametrize("never", [0.0, 0.4])
def test_survival_follows_the_gaps_that_were_observed(never):
    drawn = log_normal(8.0, 0.8, 20_000, never)
    rates = learned(drawn).rates
    for edge in EDGES[bin_of(0.1) : bin_of(1000.0)]:
        assert rates.survival(edge) == pytest.approx(sum(gap > edge for gap in drawn) / len(drawn), abs=0.01)


def test_the_chance_of_a_return_is_that_of_the_gaps_that_lasted_as_long():
    drawn = log_normal(8.0, 0.8, 20_000, never=0.3)
    rates = learned(drawn).rates
    for idle, wait in ((0.0, 5.0), (4.0, 2.0), (10.0, 20.0), (60.0, 600.0)):
        lasted = [gap for gap in drawn if gap > idle]
        share = sum(gap <= idle + wait for gap in lasted) / len(lasted)
        assert rates.needed_within(idle, wait) == pytest.approx(share, abs=0.02), (idle, wait)


def test_the_expected_wait_is_the_mean_time_until_a_return_or_the_horizon():
    drawn = log_normal(8.0, 0.8, 20_000, never=0.3)
    rates = learned(drawn).rates
    for idle, horizon in ((0.0, 5.0), (4.0, 100.0), (10.0, 20.0), (30.0, 1000.0)):
        waits = [min(gap - idle, horizon) for gap in drawn if gap > idle]
        assert rates.expected_wait(idle, horizon) == pytest.approx(sum(waits) / len(waits), rel=0.05), (idle, horizon)


def test_the_worth_is_the_best_ratio_over_all_horizons():
    draw = random.Random(5)
    for _ in range(30):
        chances = [draw.choice((1e-6, 0.01, 0.3, 0.9)) * draw.random() for _ in range(BINS)]
        worth = Rates(chances).worth
        assert worth == pytest.approx([brute_worth(chances, at) for at in range(BINS)])


def test_with_a_rate_over_age_the_worth_is_one_over_age():
    """So the order is Pensieve's cost over idle time before anything is learned."""
    worth = UNKNOWN.rates.worth
    products = [worth[at] * EDGES[at] for at in range(1, BINS - 1)]
    assert max(products) / min(products) < 1.01


def test_states_that_nobody_needs_again_lower_the_worth_without_a_deadline():
    never, soon = learned([NEVER] * 50, now=600.0), learned([3.0] * 50, now=600.0)
    assert never.rates.needed_within(60.0, 60.0) < 0.1 < soon.rates.needed_within(1.0, 3.0)
    assert never.rates.survival(300.0) > 0.8


def test_a_return_is_worth_most_just_before_it_is_due():
    rates = learned([10.0] * 500 + [NEVER] * 20).rates
    worth = [rates.worth[bin_of(age)] for age in (1.0, 4.0, 8.0, 20.0)]
    assert worth[0] < worth[1] < worth[2] > 20 * worth[3]


def test_a_withdrawn_gap_leaves_no_trace():
    histogram = learned([3.0] * 40)
    before = histogram.rates.chances
    histogram.begin(0.0)
    histogram.last(0.0, 0, bin_of(50.0))
    assert histogram._compute().chances != pytest.approx(before)
    histogram.withdraw(0.0, bin_of(50.0))
    assert histogram._compute().chances == pytest.approx(before)


def test_recent_gaps_count_more_than_old_ones_over_weeks():
    histogram = GapHistogram(UNKNOWN)
    for day in range(30):
        for _ in range(20):
            observe(histogram, 5.0, time=day * 86_400.0, now=NEVER)
    for _ in range(20):
        observe(histogram, 500.0, time=30 * 86_400.0, now=NEVER)
    assert histogram.rates.survival(50.0) > 0.8
    assert all(math.isfinite(chance) for chance in histogram.rates.chances)


def test_counts_that_are_rescaled_stay_those_of_the_same_gaps():
    histogram, late = GapHistogram(UNKNOWN), gaps.HALF_LIFE * math.log2(gaps.RESCALED)
    for _ in range(10):
        histogram.begin(late - 1.0)
    histogram.begin(late + 1.0)
    assert histogram._weight(late + 1.0) == 1.0, "rescaled"
    assert histogram._total == pytest.approx(sum(histogram._open)) == pytest.approx(11.0, rel=1e-3)
    for _ in range(10):
        histogram.end(late - 1.0, 0, bin_of(3.0))
    assert sum(histogram._open) == pytest.approx(1.0) and sum(histogram._ended) == pytest.approx(10.0, rel=1e-3)


def test_rates_are_computed_again_when_enough_has_changed(monkeypatch):
    histogram, computed = learned([3.0] * 1000), []
    histogram.rates  # noqa: B018
    compute = histogram._compute
    monkeypatch.setattr(histogram, "_compute", lambda: computed.append(1) or compute())
    for _ in range(1000):
        observe(histogram, 4.0)
        histogram.rates  # noqa: B018
    assert 10 <= len(computed) <= 60


def test_a_kind_begins_as_its_parent_kind_and_then_follows_its_own_gaps():
    kinds = Kinds()
    for _ in range(200):
        observe(kinds.find("a", "tool:search").gaps, 2.0)
    new = kinds.find("a", "tool:build").gaps
    assert new.rates.needed_within(1.0, 3.0) > 0.9
    for _ in range(200):
        observe(new, 300.0)
    assert new.rates.needed_within(1.0, 3.0) < 0.1 < 0.9 < kinds.find("a", "tool:search").gaps.rates.needed_within(1, 3)


def test_gaps_of_one_tenant_change_nothing_for_another():
    kinds = Kinds()
    for _ in range(100):
        observe(kinds.find("honest", "tool:search").gaps, 2.0)
    before = kinds.find("honest", "tool:search").gaps.rates.chances
    for number in range(1000):
        observe(kinds.find("liar", f"tool:{number % 7}").gaps, 0.001)
        observe(kinds.find("liar", "tool:search").gaps, NEVER)
    assert kinds.find("honest", "tool:search").gaps.rates.chances == before
    assert kinds.find("new", "tool:search").gaps.rates.chances == pytest.approx(UNKNOWN.rates.chances)


def test_hostile_names_do_not_grow_the_memory():
    kinds = Kinds()
    for number in range(3 * MAX_KINDS):
        kinds.find("hostile", f"tool:{number}")
        kinds.find("hostile", f"{number}:x")
    assert len(kinds) <= MAX_KINDS
    kept = kinds.find("busy", "person")
    for number in range(2 * MAX_TENANTS):
        kinds.find(f"tenant {number}", "person")
        assert kinds.find("busy", "person") is kept
    assert len(kinds) <= 2 * MAX_TENANTS + MAX_KINDS


def hint(kind, expected, gap):
    kind.gaps.begin(0.0)
    kind.ratios.begin(0.0)
    kind.judge(gap, expected)
    kind.gaps.end(0.0, 0, bin_of(gap))
    kind.ratios.end(0.0, 0, bin_of(gap / expected))


def test_hints_are_believed_at_first_and_for_as_long_as_they_are_right():
    kind, draw = Kind(), random.Random(3)
    assert kind.believes_hints
    for _ in range(50):
        expected = 10 ** draw.uniform(0, 3)
        hint(kind, expected, expected * math.exp(draw.gauss(0, 0.2)))
    assert kind.believes_hints


def test_a_client_whose_hints_say_nothing_loses_their_weight():
    kind, draw = Kind(), random.Random(3)
    for _ in range(50):
        hint(kind, 10 ** draw.uniform(-1, 3), 20.0 * math.exp(draw.gauss(0, 0.3)))
    assert not kind.believes_hints
    kind = Kind()
    for _ in range(50):
        hint(kind, 10 ** draw.uniform(2, 4), 20.0 * math.exp(draw.gauss(0, 0.3)))
    assert not kind.believes_hints, "densities are per second, whatever the unit of the hints"


def test_a_liar_does_not_win_trust_back_by_new_names_for_its_pauses():
    kinds = Kinds()
    for number in range(60):
        hint(kinds.find("liar", f"tool:{number}"), 0.5 + number % 3, 400.0)
    assert not kinds.find("liar", "tool:new").believes_hints
    assert not kinds.find("liar", "other").believes_hints
    assert kinds.find("honest", "tool:new").believes_hints


def test_what_the_hints_of_a_client_are_worth_is_learned():
    """Always half of the true gap: the ratio is learned, so the hints are as good as true ones."""
    kind, draw = Kind(), random.Random(4)
    for _ in range(200):
        gap = 10 ** draw.uniform(0, 3)
        hint(kind, gap / 2, gap)
    assert kind.believes_hints
    assert kind.ratios.rates.needed_within(1.5, 1.0) > 0.8


def test_the_quantile_counts_only_gaps_that_ended():
    rates = learned([2.0] * 90 + [30.0] * 10 + [NEVER] * 200).rates
    assert 2.0 <= rates.quantile(0.8) < 3.0
    assert 30.0 <= rates.quantile(0.95) < 60.0
    assert rates.quantile(1.0) <= gaps.LONGEST


def test_a_stage_follows_its_own_gaps_and_teaches_its_kind():
    kind = Kind()
    for gap in log_normal(2.0, 0.3, 400):
        observe(kind.stage(0), gap)
    for _ in range(100):
        observe(kind.stage(9), NEVER)
    assert kind.stage(0).rates.needed_within(0.0, 10.0) > 0.95
    assert kind.stage(8).rates.needed_within(0.0, 10.0) < 0.2, "8 and 9 turns are one stage"
    assert 0.7 < kind.gaps.rates.needed_within(0.0, 10.0) < 0.85


def test_a_stage_that_was_rarely_seen_is_like_its_kind():
    kind = Kind()
    for gap in log_normal(2.0, 0.3, 400):
        observe(kind.stage(0), gap)
    observe(kind.stage(20), NEVER)
    assert kind.stage(20).rates.needed_within(0.0, 10.0) > 0.8


def paced(deviation, conversations=60, turns=10):
    kind, draw = Kind(), random.Random(3)
    for _ in range(conversations):
        pace, own = NO_PACE, math.exp(draw.gauss(0.0, deviation))
        for _ in range(turns):
            gap = 2.0 * own * math.exp(draw.gauss(0.0, 0.2))
            factor = pace.factor
            kind.stage(0).begin(0.0)
            kind.paced.begin(0.0)
            after = kind.judge_pace(gap, pace, kind.stage(0))
            kind.stage(0).end(0.0, 0, bin_of(gap))
            kind.paced.end(0.0, 0, bin_of(gap / factor))
            pace = after
    return kind


def test_paces_are_believed_where_conversations_differ_and_not_where_they_are_alike():
    assert paced(1.2).believes_paces
    assert not paced(0.0).believes_paces


def test_a_pace_is_that_of_the_gaps_so_far_and_one_outlier_counts_little():
    pace = NO_PACE
    assert pace.factor == 1.0
    for _ in range(30):
        pace = pace.after(math.log(4.0))
    assert pace.factor == pytest.approx(4.0, rel=0.1)
    assert pace.after(50.0).factor < 4.5
    assert pace.after(-50.0).factor > 3.3


def test_gaps_by_pace_begin_with_those_of_the_kind_and_do_not_teach_it():
    kind = Kind()
    for gap in log_normal(2.0, 0.3, 400):
        observe(kind.gaps, gap)
    assert kind.paced.rates.needed_within(0.0, 10.0) > 0.9
    before = kind.gaps._total
    observe(kind.paced, 5.0)
    assert kind.gaps._total == before


def test_half_of_each_observation_counts_in_the_bins_next_to_its_own_and_none_is_lost():
    counts = [0.0] * BINS
    counts[0], counts[40], counts[-1] = 2.0, 8.0, 4.0
    found = spread(counts)
    assert found[:2] == [1.5, 0.5] and found[39:42] == [2.0, 4.0, 2.0] and found[-2:] == [1.0, 3.0]
    assert sum(found) == sum(counts)


def test_a_kind_that_was_rarely_seen_is_likely_to_return_near_the_times_that_were_seen():
    kind = Kind()
    for gap in (9.0, 11.5, 15.0):
        kind.gaps.begin(0.0)
        kind.gaps.end(0.0, 0, bin_of(gap))
    near, far = bin_of(11.5) + 2, bin_of(60.0)
    assert kind.gaps.rates.chances[near] > 0.3 > kind.gaps.rates.chances[far] > 0.0
    assert kind.gaps.ended.chances[bin_of(9.0) - 1] < 0.03, "no turn is expected before any was seen"
