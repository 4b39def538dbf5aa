"""Copies both ways at once: queues with and without the rule that a swap-out waits for earlier swap-ins."""

import pytest

from benchmarks.engine.duplex import RETURNING_GB, queued, weigh

LOSES = {"alone": {"in": 50.0, "out": 50.0}, "together": {"in": 30.0, "out": 45.0}}
KEEPS = {"alone": {"in": 50.0, "out": 50.0}, "together": {"in": 50.0, "out": 50.0}}


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_that_meets_no_other_takes_its_time_alone(waits: bool) -> None:
    took = queued(LOSES, 0.01, waits=waits, copies=400)
    assert took["in"] == pytest.approx(RETURNING_GB / 50, rel=0.01)
    assert took["out"] == pytest.approx(0.134 / 50, rel=0.01)


def test_the_rule_shortens_swap_ins_and_delays_swap_outs_where_both_ways_lose() -> None:
    rule, none = (queued(LOSES, 20.0, waits=waits, copies=2000) for waits in (True, False))
    assert rule["in"] < 0.97 * none["in"]
    assert rule["out"] > 1.1 * none["out"]


def test_the_rule_only_delays_swap_outs_where_neither_way_loses() -> None:
    rule, none = (queued(KEEPS, 20.0, waits=waits, copies=2000) for waits in (True, False))
    assert rule["in"] == pytest.approx(none["in"], rel=1e-9)
    assert rule["out"] > 1.1 * none["out"]


def test_a_load_beyond_the_link_makes_copies_wait_ever_longer() -> None:
    few, many = (queued(LOSES, 45.0, waits=False, copies=copies)["in"] for copies in (500, 2000))
    assert many > 2 * few


def test_the_table_has_a_row_for_each_load_and_way_to_copy() -> None:
    lines = weigh({"kernel": LOSES, "copy engine": KEEPS}, [0.01])
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| 0.01", "kernel"], ["| 0.01", "copy engine"]]
    assert lines[3].endswith("| 2.7, 2.7 | 2.7, 2.7 |")
