"""Pensieve's evaluation by simulation: which conversations a run holds."""

from statistics import mean

import pytest

from benchmarks.papers import pensieve
from benchmarks.papers.pensieve import LATENCY, TAIL, Context, Job, Task, chosen_share, curve, long_tailed, steady


@pytest.mark.parametrize("longer", ["cut", "drop"])
def test_no_conversation_under_way_is_longer_than_the_context(longer: str) -> None:
    talks, _ = steady("ShareGPT", 60.0, 2.0, 120.0, Context(1024, longer))
    assert talks and max(sum(turn.prompt + turn.output for turn in talk.turns) for talk in talks) <= 1024


def test_dropping_leaves_out_whole_conversations_and_cutting_their_last_turns() -> None:
    dropped, cut = (steady("ShareGPT", 60.0, 2.0, 120.0, Context(1024, longer))[1] for longer in ("drop", "cut"))
    assert dropped.conversations > cut.conversations and dropped.requests > cut.requests > 0


def test_the_papers_context_leaves_out_nothing_of_lengths_drawn_by_its_means() -> None:
    _, left_out = steady("ShareGPT", 60.0, 2.0, 120.0, Context(longer="drop"))
    assert (left_out.requests, left_out.conversations) == (0, 0)


def test_the_long_tail_has_the_shares_that_the_paper_and_the_thesis_state() -> None:
    talks = long_tailed(20_000, 60.0, seed=1)
    turns = [len(talk.turns) for talk in talks]
    sizes = [sum(turn.prompt + turn.output for turn in talk.turns) for talk in talks]
    assert mean(turns) == pytest.approx(5.56, rel=0.03)
    assert mean(count >= 5 for count in turns) == pytest.approx(0.36, abs=0.01)
    assert mean(size > 16_384 for size in sizes) == pytest.approx(0.0057, abs=0.0015)
    asked = [turn for talk in talks for turn in talk.turns]
    assert mean(turn.prompt for turn in asked) == pytest.approx(37.77, rel=0.1)
    assert mean(turn.output for turn in asked) == pytest.approx(204.58, rel=0.1)


def test_requests_of_the_long_tail_come_at_the_rate_that_is_asked_although_some_are_dropped() -> None:
    context = Context(longer="drop")
    talks, left_out = steady(TAIL, 20.0, 4.0, 400.0, context)
    assert left_out.conversations > 0 and chosen_share(TAIL, context)[0] < 1
    assert sum(len(talk.turns) for talk in talks) == pytest.approx(4.0 * 400.0, rel=0.15)


def test_a_curve_that_was_interrupted_runs_only_the_rates_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[float] = []

    def run(task: Task, rate: float, *rest: object) -> dict[str, float]:
        ran.append(rate)
        return {"asked_rate": rate, LATENCY: 40.0 * rate, "cached_share": 0.0}

    monkeypatch.setattr(pensieve, "served", run)
    task = Task("opt-13b", 1, "ShareGPT", "vLLM", 60.0)
    kept: list[list[float]] = []
    whole = curve(Job(task, 1.0, (), (), Context()), lambda _, runs: kept.append([each["rate"] for each in runs]))
    assert [len(rates) for rates in kept] == list(range(1, 1 + len(ran))) and kept[-1] == sorted(ran)
    known = [run for run in whole[1] if run["rate"] in ran[:2]]
    rest = ran[2:]
    ran.clear()
    again = curve(Job(task, 1.0, (), (), Context(), known))
    assert ran == rest
    assert [run["rate"] for run in again[1]] == [run["rate"] for run in whole[1]]


def test_tokens_are_computed_again_where_no_state_is_kept_and_hardly_where_all_of_it_is() -> None:
    runs = {
        system: pensieve.served(Task("opt-13b", 1, "ShareGPT", system, 10.0), 1.0, 60.0)
        for system in ("vLLM", "TensorRT-LLM", "Pensieve")
    }
    again = {system: run["recomputed_tokens_whole_run"] for system, run in runs.items()}
    assert again["vLLM"] == again["TensorRT-LLM"] > 10_000
    assert 0 <= again["Pensieve"] < 0.05 * again["vLLM"]
    assert runs["TensorRT-LLM"][LATENCY] < runs["vLLM"][LATENCY]
