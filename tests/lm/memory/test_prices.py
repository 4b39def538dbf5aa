"""Copying blocks back, compared with computing them again."""

import pytest

from holdfast.lm.memory.prices import LARGE, Link, Prices


def prices(cost=lambda position: position / 1000):
    """A block of 10 tokens takes 10 ms to compute for every 10 positions before it."""
    return Prices(cost, block_size=10, block_bytes=1000)


def test_blocks_are_brought_where_that_is_faster_and_those_are_the_last_ones():
    found = prices().worth(range(64), Link(latency=0.0, rate=5000.0))  # 200 ms a block
    assert found and found == list(range(found[0], 64)) and found[0] > 0


def test_nothing_is_brought_if_the_bytes_ahead_take_longer_than_all_that_it_saves():
    link = Link(latency=0.0, rate=1e6)
    assert prices().worth(range(10), link)
    assert not prices().worth(range(10), link, ahead=10_000_000)


def test_a_latency_is_worth_it_for_many_blocks_only():
    assert not prices(lambda position: 0.01).worth(range(2), Link(latency=0.05, rate=1e9))
    assert len(prices(lambda position: 0.01).worth(range(20), Link(latency=0.05, rate=1e9))) == 20


def test_without_a_cost_model_everything_is_brought():
    assert prices(None).worth(range(5), Link(latency=9.0, rate=1.0)) == [*range(5)]


def test_a_link_learns_its_rate_from_large_transfers_and_its_latency_from_small_ones():
    link = Link(latency=0.5, rate=1e9)
    for _ in range(60):
        link.observe(10 * LARGE, 0.01 + 10 * LARGE / 1e8)
        link.observe(1000, 0.01)
    assert link.seconds_per_byte == pytest.approx(1e-8, rel=0.1)
    assert link.latency == pytest.approx(0.01, rel=0.01)


def test_a_link_that_was_measured_slow_once_is_tried_again_after_some_refusals():
    link, asked = Link(latency=0.0, rate=1e9), prices(lambda position: 0.01)
    link.observe(LARGE, 1e4)
    assert not asked.worth(range(10), link) and asked.refused == 10
    assert any(asked.worth(range(10), link) for _ in range(400))


def test_a_transfer_of_nothing_teaches_nothing_and_small_ones_leave_the_rate():
    link = Link(latency=0.5, rate=1e6)
    link.observe(0, 9.0)
    assert (link.latency, link.seconds_per_byte) == (0.5, 1e-6)
    link.observe(LARGE - 1, 9.0)
    assert link.seconds_per_byte == 1e-6 and link.latency > 0.5
    latency = link.latency
    link.observe(LARGE, 9.0)
    assert link.latency == latency and link.seconds_per_byte > 1e-6


def test_a_transfer_faster_than_its_bytes_or_its_latency_alone_makes_neither_negative():
    link = Link(latency=0.5, rate=1e3)
    for _ in range(200):
        link.observe(1000, 0.0)
        link.observe(LARGE, 0.0)
    assert 0 <= link.latency < 1e-6 and 0 <= link.seconds_per_byte < 1e-6


def test_a_refused_link_looks_faster_and_the_seconds_are_latency_plus_bytes_over_rate():
    link = Link(latency=0.5, rate=100.0)
    assert link.seconds(300) == pytest.approx(3.5)
    link.refuse()
    assert 3.0 < link.seconds(300) < 3.5


def test_the_cost_of_computing_grows_with_the_place_and_is_unknown_without_a_model():
    asked = prices()
    assert prices(None).computing([0, 1]) is None
    assert asked.computing([]) == 0
    whole = asked.computing(range(64))
    assert whole == pytest.approx(asked.computing(range(32)) + asked.computing(range(32, 64)))
    assert asked.computing([0]) == pytest.approx(0.01), "the first block ends at position 10"
    for at in range(64):
        exact = (at + 1) * 10 / 1000
        assert exact - 0.15 - 1e-9 <= asked.computing([at]) <= exact + 1e-9, "looked up every 16 blocks, downwards"


def test_what_is_computed_again_is_counted_block_by_block():
    asked = prices()
    link = Link(latency=0.0, rate=5000.0)
    kept = asked.worth(range(64), link)
    assert asked.refused == 64 - len(kept) > 0
    assert asked.worth([], link) == [] and asked.refused == 64 - len(kept)


def test_only_the_blocks_that_are_copied_have_to_pay_for_the_latency():
    asked = prices()
    slow = Link(latency=1.0, rate=2500.0)  # 0.4 s a block, which only the last 16 take longer to compute
    assert asked.worth(range(64), slow) == [*range(48, 64)]
    saved = asked.computing(range(48, 64)) - 16 * 0.4
    assert asked.worth(range(64), Link(latency=0.9 * saved, rate=2500.0))
    assert not asked.worth(range(64), Link(latency=1.1 * saved, rate=2500.0))
