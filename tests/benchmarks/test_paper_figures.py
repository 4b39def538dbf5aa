"""Figures that are computed from costs alone, and rates between stored runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.papers import pensieve_figures, sarathi, sarathi_figures
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


def test_lengths_of_a_sharegpt_file_are_counted_next_to_the_drawn_ones(tmp_path) -> None:
    path = tmp_path / "sharegpt.json"
    said = [{"from": who, "value": "four words of text"} for who in ("human", "gpt", "human", "gpt")]
    path.write_text(json.dumps([{"id": "a", "conversations": said}, {"id": "b", "conversations": said[:2]}]))
    rows = [row for row in pensieve_figures.lengths(path) if row["origin"] == "the file"]
    turns = {row["at"]: row["share"] for row in rows if row["what"] == "turns"}
    assert turns[2] == 0.5 and all(share == 0 for at, share in turns.items() if at > 2)


def test_launches_move_the_knee_of_recorded_products_up_with_the_degree() -> None:
    rows = {(row["what"], row["tp"]): row for row in sarathi.knee(())}
    (alone,) = {what for what, _ in rows if what.endswith("recorded by Vidur")}
    (launched,) = {what for what, _ in rows if what.endswith("layer by layer")}
    assert rows[alone, 1]["knee"] == rows[launched, 1]["knee"]  # a layer of one device takes longer than its launch
    assert rows[alone, 8]["knee"] < 100 and 500 < rows[launched, 8]["knee"] < 700
    knees = [rows[launched, tp]["level"] for tp in sarathi.DEGREES]
    assert knees == sorted(knees)


def test_a_level_ends_between_the_points_around_its_limit() -> None:
    assert sarathi.level_until({1: 10.0, 100: 14.0, 200: 18.0}) == pytest.approx(125.0)
    assert sarathi.level_until({1: 10.0, 100: 14.0}) == 100


def test_operators_of_a_step_add_up_to_its_cost() -> None:
    segments = [(512, 1024), (1, 2048)]
    found = sarathi_figures.by_operator("yi-34b", {"tp": 2}, segments)
    assert sum(found.values()) == pytest.approx(sarathi.deployed("Yi-34B").profile.cost.step(segments))
    assert min(found.values()) > 0


def test_smaller_chunks_cost_more_and_reductions_the_most() -> None:
    rows = [row for row in sarathi_figures.chunks() if "recorded" in row and row["prompt"] == 8191]
    totals = [row["over"]["total"] for row in rows]
    assert [row["chunk"] for row in rows] == [512, 1024, 2048] and totals == sorted(totals, reverse=True)
    assert all(row["over"]["all-reduce"] > row["over"]["linear"] >= 1 for row in rows)


def test_a_whole_prompt_beside_decodes_weighs_less_if_launches_make_them_slow() -> None:
    rows = sarathi.joining()
    assert max(row["launched_whole"] for row in rows) < 28.3 < max(row["whole"] for row in rows)


def test_a_search_that_ran_for_one_system_completes_the_row_of_its_set_up() -> None:
    row = {"setting": "Yi-34B/relaxed", "vary": [], "lengths": "authors'", "requests": 8, "seed": 0}
    old = row | {"command": "first", "capacity": {"vllm": 1.0, "sarathi": 2.0}}
    new = row | {"command": "second", "capacity": {"vllm": 1.5}, "replay": False}
    (kept,) = sarathi.latest([old, new])
    assert kept["capacity"] == {"vllm": 1.5, "sarathi": 2.0}
    assert (kept["command"], kept["earlier"]) == ("second", "first")
    assert len(sarathi.latest([old, new | {"replay": True}])) == 2
    assert "1.33 [2.7; later 1.65]" in sarathi.show_varied_capacity([kept])[-1]
    assert "| - | - [at most 2.8]" in sarathi.show_varied_capacity([row | {"capacity": {"vllm": 1.0}}])[-1]


def test_a_gain_is_compared_with_the_paper_and_with_what_its_authors_measured_later() -> None:
    assert sarathi.stated_ratio("Yi-34B", "relaxed", "vllm") == "2.7; later 1.65"
    assert sarathi.stated_ratio("Falcon-180B", "relaxed", "vllm") == "at most 6.9; later 1.48"
    assert sarathi.stated_ratio("LLaMA2-70B", "strict", "orca") == "-"


def test_replayed_requests_need_the_authors_lengths(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["sarathi", "vary-ablation", "--replay"])
    with pytest.raises(SystemExit) as ended:
        sarathi.main()
    assert ended.value.code == 2 and "needs --lengths" in capsys.readouterr().err


def lengths_file(folder: Path) -> Path:
    path = folder / "lengths.csv"
    lines = [f"{100 + number},{10 + number % 7}" for number in range(200)]
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *lines]) + "\n")
    return path


def test_replayed_requests_have_one_order_whatever_the_seed(tmp_path) -> None:
    path = lengths_file(tmp_path)
    work = sarathi.requests(sarathi.SHAREGPT, 5, 3, path, replay=True)
    assert work == sarathi.requests(sarathi.SHAREGPT, 5, 4, path, replay=True)
    assert work != sarathi.requests(sarathi.SHAREGPT, 5, 3, path)


def test_a_replayed_ablation_runs_every_scheduler_at_the_rates_of_the_authors_script(monkeypatch, tmp_path) -> None:
    runs: list[tuple[str, int, float, bool]] = []
    flights: set[int] = set()

    def served(deployment, config, work, rate, seed, make_policy=None, *, replay=False):
        runs.append((config.scheduler, config.token_budget, rate, replay))
        flights.add(config.steps_in_flight)
        return {"median_ttft_ms": 1.0, "p99_itl_ms": 1.0}

    monkeypatch.setattr(sarathi, "served", served)
    path = lengths_file(tmp_path)
    found = sarathi.ablation(("rate", "whole", "arxiv-0.4"), 0, path, replay=True)
    assert found["rates"] == {sarathi.SHAREGPT: 1.0, sarathi.ARXIV: 0.4}
    assert set(runs) == {
        *(("stall-free", budget, 1.0, True) for budget in (512, 8193)), ("chunked-only", 512, 1.0, True),
        *(("stall-free", budget, 0.4, True) for budget in (512, 16385)), ("chunked-only", 512, 0.4, True),
    }  # fmt: skip
    runs.clear()
    flights.clear()
    sarathi.ablation(("8192", "synchronous"), 0, path, replay=True)
    assert flights == {1}
    assert {budget for scheduler, budget, rate, _ in runs if rate == 0.5} == {1024, 8192}


def test_a_replayed_search_ends_each_run_after_the_authors_time(monkeypatch, tmp_path) -> None:
    ends = []

    def served(deployment, config, work, rate, seed, make_policy=None, *, replay=False, until):
        ends.append((replay, until))
        return {"median_queued_ms": 0.0, "p99_itl_ms": 0.0 if rate < 1 else 1e6}

    monkeypatch.setattr(sarathi, "served", served)
    search = sarathi.Search("Yi-34B", sarathi.SHAREGPT, "relaxed", "vllm", 5, lengths=lengths_file(tmp_path))
    for replay, until in ((True, 1800.0), (False, float("inf"))):
        sarathi.capacity_of(search._replace(replay=replay))
        assert set(ends) == {(replay, until)}
        ends.clear()
