"""FineInfer's managers by simulation: what they reserve bounds the batch. Overhead is latency less forwards."""

import json

import pytest

from benchmarks.papers import fineinfer, fineinfer_runs
from holdfast.lab.metrics import Record
from holdfast.lab.workloads import Conversation, Turn


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(fineinfer, "MINUTES", 0.5)
    monkeypatch.setattr(fineinfer, "FULL", 120)


def equal(monkeypatch, prompt, output):
    monkeypatch.setattr(
        fineinfer, "requests", lambda dataset, count: [Conversation(0.0, (Turn(prompt, output),))] * count
    )


def test_padded_designs_hold_fewer_tokens_the_more_prompts_are_computed_at_once():
    nopad = fineinfer.cache_tokens("nopad")
    assert nopad > fineinfer.cache_tokens("simple") > fineinfer.cache_tokens("simple", 4) > 0


def test_a_manager_without_lengths_runs_as_many_as_fit_with_1024_tokens_each(monkeypatch):
    equal(monkeypatch, 100, 20)
    rows = fineinfer.cache_tokens("simple") // (119 + 1024)
    reserved = fineinfer.simulated("Alpaca", "simple", None, "reserve")
    assert rows - 2 <= reserved["batch"] <= fineinfer.cache_tokens("simple") // (100 + 1024)
    assert fineinfer.simulated("Alpaca", "simple", None, "known")["batch"] > 3 * rows
    most = fineinfer.cache_tokens("nopad") / (100 + 1023)
    assert most - 2 <= fineinfer.simulated("Alpaca", "nopad", None, "reserve")["batch"] <= most


def test_answers_that_are_computed_to_the_end_serve_fewer_requests_and_one_at_a_time_the_fewest(monkeypatch):
    equal(monkeypatch, 100, 200)
    served = {
        name: fineinfer.simulated("Alpaca", "simple", None, name)["requests_per_second"]
        for name in ("reserve", "longest", "alone")
    }
    assert served["reserve"] > 2.5 * served["longest"]
    assert served["alone"] == pytest.approx(1 / (201 * fineinfer.FORWARD), rel=0.15)


def test_the_batch_is_counted_until_the_last_request_starts():
    early, late = Record(0.0, 5), Record(0.0, 5)
    early.token_times, late.token_times = [1.0, 2.0, 3.0, 4.0], [2.0]
    assert fineinfer.figures_of([early, late], 4.0)["batch"] == pytest.approx(3 / 2)


def test_a_design_breaks_down_at_the_first_rate_above_the_limit():
    rows = [{"rate": rate, "normalized_latency_ms": value} for rate, value in ((1, 30), (2, 501), (3, 900))]
    assert fineinfer.broken_at(rows) == "2/s"
    assert fineinfer.broken_at(rows[:1]) == "above 1/s"


def test_a_latency_starts_to_increase_between_the_rates_around_its_limit():
    rows = [{"rate": rate, "normalized_latency_ms": value} for rate, value in ((1, 100), (2, 110), (4, 130), (6, 400))]
    assert fineinfer.starts_at(rows) == "3/s"
    assert fineinfer.starts_at(rows[:2]) == "above 2/s"


def test_a_sweep_compares_each_design_with_what_the_paper_says_of_it():
    rows = [
        {"dataset": "Alpaca", "design": design, "assumed": "apart", "rate": rate, "normalized_latency_ms": latency}
        for design, latencies in (("simple", (100, 900)), ("nopad", (60, 61, 90)))
        for rate, latency in zip((0.5, 1, 2), latencies, strict=False)
    ]
    *_, simple, nopad = fineinfer.sweep_lines(rows)
    assert simple.startswith("| simple | ") and simple.endswith(
        "| 100 | 900 | – | 0.51/s | 1/s | breaks down at 0.3/s |"
    )
    assert nopad.endswith("| 60 | 61 | 90 | 1.4/s | above 2/s | starts at 4/s |")


def test_a_sweep_that_adds_keeps_other_curves_and_replaces_its_own(monkeypatch, tmp_path):
    made = []

    def simulated(dataset, design, rate, name):
        made.append((dataset, rate, name))
        about = {"dataset": dataset, "design": design, "assumed": name, "rate": rate}
        return about | {"normalized_latency_ms": 100.0 * len(made)}

    monkeypatch.setattr(fineinfer, "simulated", simulated)
    for dataset, name, rate in (("Alpaca", "apart", 1), ("Alpaca", "alone", 1), ("Alpaca", "apart", 2)):
        fineinfer.sweep(tmp_path, [dataset], [name], ["nopad"], [rate], add=True)
    kept = json.loads((tmp_path / "fineinfer-sweep-some-simulated.json").read_text())["rows"]
    assert [(row["assumed"], row["rate"], row["normalized_latency_ms"]) for row in kept] == [
        ("alone", 1, 200.0), ("apart", 2, 300.0),
    ]  # fmt: skip
    fineinfer.sweep(tmp_path, ["Alpaca"], ["apart"], ["nopad"], [1, 2, 3, 4], add=False)
    assert [rate for _, rate, _ in made[3:]] == [1, 2, 3], "a design runs no further than where it has broken down"


def test_overhead_is_the_median_of_latency_less_forwards():
    rows = [
        {"design": "simple", "layer": "engine", "prompt": 8, "output": 4, "total": 2.0 + extra, "forward": 1.5,
         "schedule": 0.1}
        for extra in (0.0, 0.2, 0.1)
    ]  # fmt: skip
    text = "\n".join(fineinfer_runs.overhead_lines(rows))
    assert "| 8, 4 | simple | engine | 3 | 2.100 | 1.500 | 0.600 | 28.6% |" in text
    assert "| 8, 4 | simple | 0.100 | – |" in text


def test_steps_are_read_from_a_trace_that_is_not_finished(tmp_path):
    trace = tmp_path / "trace.json"
    step = '{"ph": "X", "pid": 0, "tid": 0, "ts": 2000000.0, "dur": 500.0, "name": "step 3", "args": {}}'
    trace.write_text(f'[\n{{"ph": "M", "pid": 0, "tid": 0, "ts": 0.0, "name": "process_name"}},\n{step}')
    assert fineinfer_runs.steps_of(trace) == [(2.0, 0.0005)]
