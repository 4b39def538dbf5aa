"""Tests of the options with which the offline rows of a Llama-3-8B shape run."""

from __future__ import annotations

from benchmarks.engine.llama8b import options_of


def test_offline_rows_take_large_steps_as_offline_generation_does() -> None:
    assert options_of(["bs128", "prefill"], {})["token_budget"] == "large"
    assert options_of(["prefill"], {"token_budget": 1024})["token_budget"] == 1024


def test_rows_that_a_server_is_judged_by_take_its_steps() -> None:
    assert "token_budget" not in options_of(["bs1", "stall"], {})
    assert "token_budget" not in options_of(["first"], {})
    assert "token_budget" not in options_of(["prefill"], {"tbt_target": 0.025})
