"""Baton's simulated figures: what is fitted is met, idle tokens are those of the policy, tables name the paper's."""

from dataclasses import replace

import pytest

from benchmarks.papers import baton


@pytest.fixture(scope="module")
def at_two():
    return {name: baton.simulated("target-2", name, 2, "rtx-4090") for name in baton.METHODS}


def test_the_two_fitted_figures_of_table_2_are_met(at_two):
    assert at_two["run-to-completion"].seconds == pytest.approx(161.77, rel=0.01)
    assert at_two["shaping, literal"].seconds == pytest.approx(83.43, rel=0.01)


def test_run_to_completion_at_four_and_six_follows_from_the_fit():
    for batch, seconds in ((4, 92.68), (6, 61.70)):
        assert baton.simulated("target-2", "run-to-completion", batch, "rtx-4090").seconds == pytest.approx(
            seconds, rel=0.15
        )


def test_shaping_computes_idle_tokens_for_each_insertion_and_embedding_next_to_none(at_two):
    prompts = sorted(talk.turns[0].prompt for talk in baton.workload_of("target-2", 2))
    bound = sum(length - 1 for length in prompts)
    assert 0.8 * bound < at_two["shaping"].idle_tokens < 1.1 * bound
    assert at_two["embedding"].idle_tokens < 0.05 * bound


def test_junk_columns_widen_the_batch_and_change_neither_steps_nor_idle_tokens(at_two):
    cut, printed = at_two["shaping"], at_two["shaping, literal"]
    assert printed.widest > 1.3 * cut.widest
    assert (printed.steps, printed.idle_tokens) == (cut.steps, cut.idle_tokens)


def test_curves_end_with_every_query_and_every_token(at_two):
    turns = [talk.turns[0] for talk in baton.workload_of("target-2", 2)]
    for ran in at_two.values():
        assert ran.curves["queries"][-1][1] == 30
        assert ran.curves["tokens"][-1][1] == sum(turn.output for turn in turns)
        assert max(size for _, size in ran.curves["positions"]) <= 2 * ran.widest


def test_the_table_has_the_papers_figures_only_where_the_size_is_the_papers(at_two):
    rows = list(at_two.values())
    same, scaled = (baton.compared("target-2", rows, same_size=size) for size in (True, False))
    assert "| 161.77 | -0% |" in same[2] or "| 161.77 | +0% |" in same[2]
    assert "| 161.77 | – |" in scaled[2]


def test_a_row_that_was_cut_says_so_and_is_compared_with_nothing(at_two):
    whole, shaped = at_two["run-to-completion"], at_two["shaping"]
    cut = replace(whole, cut=True, ended=7)
    lines = baton.compared("target-2", [cut, shaped], same_size=False)
    assert "cut at 162, 7 ended" in lines[2] and "%" not in lines[2].replace("+0.0%", "")
    assert f"| {shaped.seconds:,.1f} |" in lines[3]
    assert baton.ratios([cut, shaped, at_two["embedding"]]) == []


def test_a_cause_changes_the_methods_that_it_is_about(at_two):
    def seconds(name, cause):
        return baton.simulated("target-2", name, 2, "rtx-4090", baton.CAUSES[cause]).seconds

    slower = seconds("embedding", "as generate")
    assert slower > 1.4 * at_two["embedding"].seconds
    assert seconds("run-to-completion", "as generate") == at_two["run-to-completion"].seconds
    assert seconds("run-to-completion", "words") > 1.2 * at_two["run-to-completion"].seconds


def test_the_paper_gives_no_seconds_for_compacted_shaping():
    assert baton.paper_seconds("target-1", 8, "shaping, literal") == 3424
    assert baton.paper_seconds("target-1", 8, "shaping") is None
    assert baton.paper_seconds("target-2", 10, "embedding") is None
