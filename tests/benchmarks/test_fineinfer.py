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
        fineinfer, "requests", lambda dataset, count, turns: [Conversation(0.0, (Turn(prompt, output),))] * count
    )


def files(folder, **rows):
    """Write files of lengths, by data set."""
    for dataset, pairs in rows.items():
        lines = ["num_prefill_tokens,num_decode_tokens", *(f"{prompt},{output}" for prompt, output in pairs)]
        (folder / f"{dataset}.csv").write_text("\n".join(lines) + "\n")


def test_requests_have_the_lengths_of_the_data_set_cut_to_1024_each(tmp_path):
    files(tmp_path, ShareGPT=[(1100, 40), (7, 1500), (9, 30), (1500, 900)])
    turns = fineinfer.read_lengths(tmp_path, ["ShareGPT"])["ShareGPT"]
    assert turns == [Turn(1024, 40), Turn(7, 1024), Turn(9, 30)], "above 2,048 in all a request is left out"
    seven = [talk.turns[0] for talk in fineinfer.requests("ShareGPT", 7, turns)]
    assert sorted(seven.count(turn) for turn in turns) == [2, 2, 3]
    assert seven == [talk.turns[0] for talk in fineinfer.requests("ShareGPT", 7, turns)]
    assert len({talk.turns[0] for talk in fineinfer.requests("ShareGPT", 7)}) > 3, "drawn without a file"


def test_a_run_takes_the_lengths_of_the_data_set(tmp_path):
    files(tmp_path, Alpaca=[(100, 20)])
    turns = fineinfer.read_lengths(tmp_path, ["Alpaca"])["Alpaca"]
    row = fineinfer.simulated("Alpaca", "nopad", 4.0, "known", turns)
    assert row["tokens_per_second"] == pytest.approx(20 * row["requests_per_second"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["why", "--data", "."], "No such file or directory: 'ShareGPT.csv'"),
        (["why", "--data", "empty"], "empty/ShareGPT.csv has 0 requests"),
        (
            ["why", "--data", "zero"],
            "zero/ShareGPT.csv has 1 requests; there must be at least 1, each of at least 1 token",
        ),
        (["lengths"], "lengths needs --data FOLDER"),
        (["lengths", "--data", ".", "--alpaca", "a.json"], "--alpaca and --tokenizer need each other"),
        (["lengths", "--data", ".", "--sharegpt", "bad.pkl"], "bad.pkl is not a pickle of lengths"),
    ],
)
def test_lengths_that_cannot_be_read_end_the_program_with_the_reason(monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, rows in (("empty", []), ("zero", [(0, 5)])):
        (tmp_path / name).mkdir()
        files(tmp_path / name, ShareGPT=rows, Alpaca=rows)
    (tmp_path / "bad.pkl").write_bytes(b"no pickle")
    monkeypatch.setattr("sys.argv", ["fineinfer", *arguments, "--out", "out"])
    with pytest.raises(SystemExit) as ended:
        fineinfer.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_lengths_are_described_beside_the_drawn_ones(monkeypatch, tmp_path):
    files(tmp_path, Alpaca=[(2, 1), (4, 2), (8, 4), (1200, 8)])
    monkeypatch.setattr("sys.argv", ["fineinfer", "lengths", "--datasets", "Alpaca", "--data", str(tmp_path), "--out",
                                     str(tmp_path / "out")])  # fmt: skip
    fineinfer.main()
    table = (tmp_path / "out" / "fineinfer-lengths.md").read_text()
    whole, cut, drawn = json.loads((tmp_path / "out" / "fineinfer-lengths.json").read_text())["rows"]
    assert (whole["in"]["mean"], cut["in"]["mean"], whole["out"]["mean"]) == (303.5, 259.5, 3.75)
    assert cut["out"]["sigma"] == pytest.approx(0.775, abs=1e-3) and 0.8 < whole["correlation"] < 1
    assert drawn["out"]["sigma"] == pytest.approx(1.0, abs=0.02) and abs(drawn["correlation"]) < 0.03
    assert "| Alpaca, its own, cut to 1,024 | 4 | 259.50 |" in table
    assert "| Alpaca, the paper | – | 19.31 | – | – | 58.45 |" in table


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

    def simulated(dataset, design, rate, name, turns):
        made.append((dataset, rate, name))
        about = {"dataset": dataset, "design": design, "assumed": name, "rate": rate}
        return about | {"normalized_latency_ms": 100.0 * len(made)}

    monkeypatch.setattr(fineinfer, "simulated", simulated)
    for dataset, name, rate in (("Alpaca", "apart", 1), ("Alpaca", "alone", 1), ("Alpaca", "apart", 2)):
        fineinfer.sweep(tmp_path, [dataset], [name], ["nopad"], [rate], add=True, measured={})
    kept = json.loads((tmp_path / "fineinfer-sweep-some-simulated.json").read_text())["rows"]
    assert [(row["assumed"], row["rate"], row["normalized_latency_ms"]) for row in kept] == [
        ("alone", 1, 200.0), ("apart", 2, 300.0),
    ]  # fmt: skip
    fineinfer.sweep(tmp_path, ["Alpaca"], ["apart"], ["nopad"], [1, 2, 3, 4], add=False, measured={})
    assert [rate for _, rate, _ in made[3:]] == [1, 2, 3], "a design runs no further than where it has broken down"


def test_full_load_that_adds_keeps_other_assumptions_and_measured_lengths_have_a_file_of_their_own(
    monkeypatch, tmp_path
):
    def simulated(dataset, design, rate, name, turns):
        about = {
            "dataset": dataset,
            "design": design,
            "assumed": name,
            "rate": rate,
            "batch": 2.0 + (design == "nopad"),
        }
        return about | {"requests_per_second": float(len(turns) or 7)}

    monkeypatch.setattr(fineinfer, "simulated", simulated)
    measured = {"Alpaca": [Turn(1, 1)] * 5}
    fineinfer.why(tmp_path, ["Alpaca"], ["apart", "known"], add=True, measured={})
    for name in ("alone", "known", "alone"):
        fineinfer.why(tmp_path, ["Alpaca"], [name], add=True, measured=measured)
    *_, known, alone, paper = (tmp_path / "fineinfer-why-data-simulated.md").read_text().splitlines()
    assert known == f"| Alpaca | {fineinfer.ASSUMPTIONS['known'].about} | 5.00 | 5.00 | 1.0 | 2.0 | 3.0 | 1.5 |"
    assert alone.startswith("| Alpaca | one request at a time | 5.00 |") and paper.startswith("| Alpaca | the paper")
    assert len(json.loads((tmp_path / "fineinfer-why-data-simulated.json").read_text())["rows"]) == 4
    drawn = (tmp_path / "fineinfer-why-some-simulated.md").read_text()
    assert drawn.count("| 7.00 | 7.00 |") == 2


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
