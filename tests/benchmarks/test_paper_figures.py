"""Figures that are computed from costs alone, and rates between stored runs."""

from __future__ import annotations

import pytest

from benchmarks.papers import pensieve_figures, sarathi_figures
from benchmarks.papers.pensieve import CUT, LATENCY, MANY_TURNS, chosen_share, steady


def test_small_steps_of_linear_layers_do_as_many_operations_a_byte_as_they_have_tokens() -> None:
    rows = {row["tokens"]: row for row in sarathi_figures.intensity()}
    assert rows[1]["intensity"] == pytest.approx(1.0, rel=0.01)
    assert rows[32]["intensity"] == pytest.approx(32.0, rel=0.03)
    assert rows[64]["intensity"] < rows[1]["ridge"] < rows[256]["intensity"]
    shares = [(row["of_arithmetic"], row["of_bandwidth"]) for row in rows.values()]
    assert all(0 < share < 1 for pair in shares for share in pair)
    assert [arithmetic for arithmetic, _ in shares] == sorted(arithmetic for arithmetic, _ in shares)


def test_decodes_gain_from_batches_and_prefills_do_not() -> None:
    rows = {(row["device"], row["batch"]): row for row in sarathi_figures.phases()}
    for device in ("a100-80gb", "h200"):
        one, many = rows[device, 1], rows[device, 32]
        assert many["decode"] / one["decode"] > 20 and many["prefill"] / one["prefill"] < 1.1


def test_a_history_costs_its_prefill_only_if_it_is_computed_again() -> None:
    rows = [row for row in pensieve_figures.history() if row["device"] == "a100-80gb"]
    assert rows[0]["computed_s"] == rows[0]["kept_s"]
    assert rows[-1]["computed_s"] > rows[-1]["generation_s"] > 10 * rows[-1]["kept_s"]


def test_a_latency_is_read_off_the_line_between_two_runs_and_never_outside() -> None:
    runs = [{"asked_rate": rate, LATENCY: latency} for rate, latency in ((1.0, 10.0), (2.0, 30.0), (4.0, 40.0))]
    found = [pensieve_figures.at_rate(runs, rate) for rate in (0.5, 1.0, 1.5, 2.0, 3.0, 4.5)]
    assert found == [None, 10.0, 20.0, 30.0, 35.0, None]


def test_conversations_of_many_turns_arrive_at_the_rate_of_requests_that_is_asked() -> None:
    share, turns = chosen_share(MANY_TURNS)
    assert 0.4 < share < 0.5 and 9 < turns < 10
    found, _ = steady(MANY_TURNS, 10.0, 4.0, 400.0, CUT)
    asked = sum(len(talk.turns) for talk in found)
    assert asked == pytest.approx(4.0 * 400.0, rel=0.15)
