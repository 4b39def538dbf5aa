"""`holdfast bench` as a user calls it: simulated runs, sweeps, capacity, and messages for wrong calls."""

import asyncio
import json
from dataclasses import replace
from itertools import chain

import httpx
import pytest
from rich.console import Console

from holdfast.cli.bench import BenchConfig, describe_capacity, target_of, without_key
from holdfast.cli.command import main
from holdfast.cli.targets import sender, served
from holdfast.lab import workloads
from holdfast.lab.metrics import Record, summary
from holdfast.lab.reports.tables import show_figures
from holdfast.lab.workloads import Conversation, Turn
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import RowBytes, RowShape
from tests.lab.simulator.simulation import PROFILE
from tests.padded_rows import ABLE

SHAPED = ("--scheduler", "shaping")


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    return str(path)


@pytest.fixture
def rows(tmp_path):
    """The file of a profile of padded rows."""
    path = tmp_path / "rows.json"
    shape = RowShape(memory=8_192_000, bytes=RowBytes(growing=((1000, None),)), abilities=ABLE)
    replace(PROFILE, token_bytes=1000, rows=shape).save(path)
    return str(path)


def bench(*arguments):
    return main(["bench", *arguments])


def test_a_simulation_prints_metrics_and_writes_them_with_vllms_names(profile, tmp_path, capsys):
    out = tmp_path / "figures.json"
    assert bench("--simulate", profile, "--requests", "20", "--rates", "5", "--json", str(out)) == 0
    figures = json.loads(out.read_text())
    assert (figures["completed"], figures["request_rate"]) == (20, 5.0)
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert figures[f"p99_{name}_ms"] >= figures[f"median_{name}_ms"] > 0
    shown = capsys.readouterr().out
    assert "throughput" in shown and "TBT" in shown


def test_steps_beyond_the_measured_ones_are_noted_once_with_both_sizes(profile, tmp_path, capsys):
    burst = ("--requests", "8", "--rates", "1,1000", "--prompt-tokens", "32", "--output-tokens", "9")
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    replace(PROFILE, max_decodes=2, max_step_tokens=4096).save(small)
    replace(PROFILE, max_decodes=8, max_step_tokens=4096).save(large)
    notes = {}
    for path in (str(small), str(large), profile):
        assert bench("--simulate", path, *burst, "--max-sequences", "4") == 0
        notes[path] = [line for line in capsys.readouterr().out.splitlines() if "extrapolated" in line]
    assert notes == {
        str(small): [
            "steps held up to 4 sequences that decode, and the profile was measured with at most 2: longer times are "
            "extrapolated; measure it with a larger --max-sequences or --token-budget"
        ],
        str(large): [],
        profile: [],
    }


def test_a_profile_of_padded_rows_is_simulated_on_them_with_a_target_and_any_policy(rows, profile, tmp_path, capsys):
    out, common = tmp_path / "figures.json", ("--requests", "20", "--rates", "5", "--max-sequences", "16")
    for options in (("--tbt-target", "20ms"), ("--tbt-target", "20ms", "--token-budget", "auto"), SHAPED):
        assert bench("--simulate", rows, *common, *options, "--json", str(out)) == 0
        assert json.loads(out.read_text())["completed"] == 20
    assert bench("--simulate", profile, *common, *SHAPED) == 2
    assert "which plans padded rows" in capsys.readouterr().err


def test_a_sweep_has_a_run_for_each_rate(profile, tmp_path):
    out = tmp_path / "figures.json"
    given = ("--requests", "60", "--rates", "40,2", "--slo-ttft", "0.03s")
    assert bench("--simulate", profile, *given, "--json", str(out)) == 0
    slow, fast = json.loads(out.read_text())["runs"]
    assert slow["request_rate"] < fast["request_rate"]
    assert slow["median_ttft_ms"] < fast["median_ttft_ms"]
    assert slow["request_goodput"] <= slow["request_throughput"]


def test_contracts_are_asked_for_and_what_became_of_them_is_shown_and_written(profile, tmp_path, capsys):
    out, plots = tmp_path / "figures.json", tmp_path / "plots"
    given = ("--requests", "60", "--rates", "400,5", "--output-tokens", "16", "--contract", "ttft=0.1s,tbt=30")
    drawn = ("--report", str(tmp_path / "r.html"), "--plots", str(plots))
    assert bench("--simulate", profile, *given, "--json", str(out), *drawn) == 0
    slow, fast = json.loads(out.read_text())["runs"]
    assert (slow["contracts"], slow["contracts_kept"]) == (60, 60)
    assert fast["contracts_refused"] > 20 and fast["contracts_kept"] + fast["contracts_refused"] == 60
    assert fast["failed"] == 0 and fast["completed"] == fast["contracts_kept"]
    shown = capsys.readouterr().out
    assert "contracts: refused, kept, or broken by term" in shown and "requests failed" not in shown
    assert (plots / "contracts.png").exists()
    assert "Contracts kept" in (tmp_path / "r.html").read_text()


def test_contracts_are_measured_where_the_engine_is_not_told_of_them(profile, tmp_path):
    out = tmp_path / "figures.json"
    given = ("--requests", "60", "--rates", "400", "--output-tokens", "16", "--contract", "ttft=100")
    plots = ("--plots", str(tmp_path / "plots"))
    for untold in (("--contracts", "off"), ("--no-tell-contracts",), ("--scheduler", "orca", *plots)):
        assert bench("--simulate", profile, *given, *untold, "--json", str(out)) == 0
        figures = json.loads(out.read_text())
        assert figures["contracts_refused"] == 0 < figures["contracts_broken_ttft"]


def test_agents_with_forks_are_simulated_within_their_context(profile, tmp_path, capsys):
    out = tmp_path / "figures.json"
    given = ("--workload", "agents-short", "--requests", "5", "--rates", "1", "--seed", "3", "--json", str(out))
    longest = ("--cache-tokens", "40000", "--max-model-len", "9000")
    assert bench("--simulate", profile, *given, *longest) == 0
    figures = json.loads(out.read_text())
    assert figures["contracts"] == figures["num_prompts"] > 20
    assert "longer than the context" in capsys.readouterr().out


def test_capacity_is_the_highest_rate_within_the_limits(profile, tmp_path, capsys):
    out = tmp_path / "figures.json"
    given = ("--requests", "60", "--output-tokens", "20", "--capacity", "12", "--max-sequences", "16")
    assert bench("--simulate", profile, *given, "--json", str(out)) == 0
    found = json.loads(out.read_text())
    assert found["capacity"] > 0
    for figures in found["runs"]:
        kept = figures["p99_itl_ms"] <= 12 and figures["median_queued_ms"] <= 2000
        kept = kept and figures["queue_growth"] <= 0.05
        assert kept == (figures["request_rate"] <= found["capacity"])
    assert f"capacity: {found['capacity']:.3g} a second" in capsys.readouterr().out


def figures_of(profile, tmp_path, *arguments):
    out = tmp_path / "figures.json"
    assert bench("--simulate", profile, *arguments, "--json", str(out)) == 0
    return json.loads(out.read_text())


def test_goodput_counts_the_requests_within_each_limit_and_within_all(profile, tmp_path):
    given = ("--requests", "30", "--rates", "20", "--output-tokens", "16")
    plain = figures_of(profile, tmp_path, *given)
    assert "request_goodput" not in plain

    def kept(**limits):
        """The share of requests within these limits, in ms."""
        flags = [word for name, ms in limits.items() for word in (f"--slo-{name}", f"{ms:.6f}ms")]
        goodput = figures_of(profile, tmp_path, *given, *flags)["request_goodput"]
        return goodput * plain["duration"] / plain["completed"]

    for name, of, share in (("ttft", "median", 0.5), ("tpot", "p90", 0.9), ("e2el", "median", 0.5)):
        assert kept(**{name: plain[f"{of}_{name}_ms"]}) == pytest.approx(share, abs=0.05)
    assert kept(ttft=1e9, tpot=1e9, e2el=1e9) == pytest.approx(1.0)
    assert kept(ttft=1e9, tpot=1e9, e2el=0.001) == 0.0


@pytest.mark.always("given0")
@pytest.mark.parametrize(
    "given", [("--rates", "20"), ("--workload", "multi-turn"), ("--workload", "arxiv_summarization")]
)
def test_the_seed_draws_arrivals_and_conversations(profile, tmp_path, given):
    given = ("--requests", "20", "--max-model-len", "16384", *given)
    first, same, other = (figures_of(profile, tmp_path, *given, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == same != other


def test_prompts_of_a_server_and_of_a_model_here_are_drawn_from_the_seed():
    def prompts(seed):
        sent = []

        async def ask(prompt, output, record, said):
            sent.append(prompt)

        with asyncio.Runner() as loop:
            sender(loop, ask, 256, None, seed)([Conversation(0.0, (Turn(20, 1),))], "")
        return sent

    assert prompts(1) == prompts(1) != prompts(2)


def test_each_run_of_a_target_sends_other_prompts():
    """Equal prompts would come from the previous run's cache, and make it look faster."""
    sent = []

    async def ask(prompt, output, record, said):
        sent.append(tuple(prompt))

    with asyncio.Runner() as loop:
        run = sender(loop, ask, 256, None, 1)
        for _ in range(3):
            run([Conversation(0.0, (Turn(20, 1),)), Conversation(0.0, (Turn(20, 1, hashes=(7,)),))], "")
    assert len({*sent}) == len(sent) == 6


def test_the_seed_reaches_a_server(monkeypatch):
    monkeypatch.setattr("holdfast.cli.bench.server", lambda url, **options: options["seed"])
    assert target_of(BenchConfig(url="http://localhost:1"), EngineConfig(seed=5), Console()) == 5


@pytest.mark.parametrize("rates", [(), (1.0, 2.0)])
def test_the_tables_of_latencies_show_mean_p50_p90_and_p99_under_their_heads(capsys, rates):
    records = [Record(0.0, 1, token_times=[0.1 * at, 0.3 * at], output_tokens=3) for at in range(1, 12)]
    figures = summary(records)
    show_figures(Console(width=200), [{**figures, "request_rate": rate} for rate in rates] or [figures])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    if not rates:
        assert ["mean", "p50", "p90", "p99"] in shown
        assert ["TTFT", "600.00", "600.00", "1,000.00", "1,090.00"] in shown
        assert ["TBT", "1,200.00", "1,200.00", "2,000.00", "2,180.00"] in shown
        assert ["TPOT", "600.00", "600.00", "1,000.00", "1,090.00"] in shown
        assert ["end", "to", "end", "1,800.00", "1,800.00", "3,000.00", "3,270.00"] in shown
        assert ["normalized", "600.00", "600.00", "1,000.00", "1,090.00"] in shown
    else:
        cells = [
            "600",
            "/",
            "1,090",
            "1,200",
            "/",
            "2,180",
            "600",
            "/",
            "1,090",
            "1,800",
            "/",
            "3,270",
            "600",
            "/",
            "1,090",
        ]
        assert all([f"{rate:.2f}", *cells] in shown for rate in rates)


@pytest.mark.parametrize(("longer", "left", "whole"), [("cut", 1, 0.0), ("drop", 3, 0.5)])
def test_the_share_longer_than_the_context_is_printed_and_in_the_metrics(
    profile, tmp_path, capsys, longer, left, whole
):
    """The second of two conversations, of one and three turns, exceeds the context with its last turn."""
    talks, out = tmp_path / "chats.json", tmp_path / "figures.json"
    turn = [{"from": "human", "value": "four" * 100}, {"from": "gpt", "value": "four" * 100}]
    talks.write_text(json.dumps([{"conversations": turn}, {"conversations": turn * 3}]))
    given = ("--workload", str(talks), "--max-model-len", "500", "--longer", longer, "--json", str(out))
    assert bench("--simulate", profile, *given) == 0
    figures = json.loads(out.read_text())
    assert figures["left_out_requests_share"] == left / 4 and figures["num_prompts"] == 4 - left
    assert figures["left_out_conversations_share"] == whole
    assert f"longer than the context, and left out: {left} of 4 requests" in capsys.readouterr().out


def test_a_simulated_pipeline_reports_the_idle_share_of_each_stage(tmp_path, capsys):
    out = tmp_path / "figures.json"
    given = (
        "--tp",
        "4",
        "--pp",
        "2",
        "--link",
        "nvlink3",
        "--requests",
        "30",
        "--concurrency",
        "8",
        "--json",
        str(out),
    )
    assert bench("--simulate", "llama-2-70b@a100-80gb", *given) == 0
    first, last = json.loads(out.read_text())["stages_idle"]
    assert 0 < first < 0.6 and 0 < last < 0.6
    assert f"{first:.0%} {last:.0%}" in " ".join(capsys.readouterr().out.split())


def test_a_capacity_from_too_few_arrivals_gives_a_warning(profile, capsys):
    assert bench("--simulate", profile, "--requests", "30", "--output-tokens", "10", "--capacity", "30") == 0
    assert "too few to tell a lasting load from a burst" in " ".join(capsys.readouterr().out.split())


def test_the_queue_does_not_grow_at_the_capacity(profile, tmp_path, capsys):
    """A rate is too high if 200 requests outrun it, even before any of them has waited for two seconds."""
    out = tmp_path / "figures.json"
    given = ("--requests", "200", "--output-tokens", "20", "--capacity", "1s", "--max-sequences", "16")
    assert bench("--simulate", profile, *given, "--json", str(out)) == 0
    found = json.loads(out.read_text())
    fastest = max(found["runs"], key=lambda figures: figures["request_rate"])
    assert fastest["median_queued_ms"] < 2000 and fastest["queue_growth"] > 0.05
    assert found["capacity"] < 1.2 * fastest["request_throughput"] < fastest["request_rate"]


@pytest.mark.parametrize(
    ("requests", "lifetime", "wanted"),
    [(50, 1.0, ""), (38, 1.0, "give --requests 120"), (50, 10.0, "give --requests 120"), (50, 100.0, "--requests 660")],
    ids=["lasted", "20 seconds", "2.5 lifetimes", "a quarter of a lifetime"],
)
def test_a_capacity_of_arrivals_that_lasted_has_no_warning(requests, lifetime, wanted):
    """The conversations arrive at two per second."""
    found = {"request_rate": 2.0, "arrival_window": requests / 2, "mean_lifetime": lifetime}
    slower = {"request_rate": 1.0, "arrival_window": requests, "mean_lifetime": 1.0}
    described = describe_capacity(BenchConfig(capacity=50.0), 2.0, workloads.fixed(requests, 8, 8), [slower, found])
    assert ("the queue does not grow" in described) == (not wanted)
    assert wanted in described and "capacity: 2 a second with P99 TBT within 50 ms" in described
    assert "too few" not in describe_capacity(BenchConfig(capacity=50.0), 0.0, workloads.fixed(1, 8, 8), [found])


KEYS = (("--api-key", "secret"), ("--api-key=secret",), ("--api-key=a\nsecret",))


@pytest.mark.parametrize("key", KEYS)
def test_a_command_is_shown_without_the_api_key(key):
    shown = without_key(("--rates", "5,10", *key, "--seed", "3"))
    assert "secret" not in " ".join(shown) and "…" in " ".join(shown)
    assert (shown[:2], shown[-2:]) == (["--rates", "5,10"], ["--seed", "3"])


def test_a_report_shows_the_command_without_the_api_key(profile, tmp_path, capsys):
    page, plots = tmp_path / "report.html", tmp_path / "plots"
    given = ("--requests", "20", "--rates", "5,10", *chain(*KEYS), "--slo-ttft", "30ms")
    assert bench("--simulate", profile, *given, "--report", str(page), "--plots", str(plots)) == 0
    text = page.read_text()
    assert "m on d, float32, simulated" in text and "--rates 5,10" in text
    assert "secret" not in text
    assert {path.name for path in plots.iterdir()} == {"rates.png", "ttft.png", "tbt.png", "timeline.png"}
    assert str(page) in capsys.readouterr().out


def test_without_matplotlib_a_report_is_refused_before_the_run(profile, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("holdfast.cli.output.find_spec", lambda name: None)
    assert bench("--simulate", profile, "--report", str(tmp_path / "a.html")) == 2
    assert "pip install 'holdfast[report]'" in capsys.readouterr().err


def test_a_model_runs_here_and_its_steps_are_traced(checkpoint, tmp_path):
    out, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    given = ("--requests", "3", "--prompt-tokens", "20", "--output-tokens", "4", "--load-format", "random")
    assert bench(str(checkpoint), *given, "--json", str(out), "--trace", str(trace)) == 0
    figures = json.loads(out.read_text())
    assert (figures["completed"], figures["total_output_tokens"], figures["model_id"]) == (3, 12, "bytes")
    assert figures["median_queued_ms"] <= figures["median_ttft_ms"]
    assert {event["pid"] for event in json.loads(trace.read_text())} == {0, 1, 2, 3}


def test_engine_options_apply_to_a_simulation_and_its_steps_are_traced(profile, tmp_path):
    trace = tmp_path / "trace.json"
    given = ("--requests", "2", "--prompt-tokens", "40", "--token-budget", "16", "--trace", str(trace))
    assert bench("--simulate", profile, *given) == 0
    counted = [event["args"] for event in json.loads(trace.read_text()) if event["ph"] == "C"]
    assert max(args["decodes"] + args["prefill"] for args in counted) == 16


def test_a_trace_is_run_whole_unless_requests_is_given(profile, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{at // 10:02}.{at % 10}000000,20,2" for at in range(130)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    for given, completed in (((), 130), (("--requests", "7"), 7)):
        out = tmp_path / "figures.json"
        assert bench("--simulate", profile, "--workload", str(trace), *given, "--json", str(out)) == 0
        assert json.loads(out.read_text())["completed"] == completed


def test_a_model_on_devices_is_simulated_by_name(tmp_path, capsys):
    out = tmp_path / "figures.json"
    layout = ("--tp", "2", "--pp", "2", "--link", "pcie4", "--stage-link", "ethernet-100g")
    assert bench("--simulate", "yi-34b@a100-80gb", *layout, "--requests", "4", "--json", str(out)) == 0
    assert json.loads(out.read_text())["completed"] == 4
    assert "yi-34b on 2 stages of 2 a100-80gb, bfloat16, derived from data sheets" in capsys.readouterr().out


def test_a_simulation_with_fp8_is_faster_and_names_its_precision(tmp_path, capsys):
    figures = []
    for options in ((), ("--quantization", "fp8", "--kv-cache-dtype", "fp8")):
        out = tmp_path / "figures.json"
        assert bench("--simulate", "mistral-7b@h200", *options, "--requests", "20", "--json", str(out)) == 0
        figures.append(json.loads(out.read_text())["output_throughput"])
    assert figures[1] > 1.2 * figures[0]
    shown = capsys.readouterr().out
    assert "mistral-7b on h200, bfloat16, derived" in shown
    assert "mistral-7b on h200, bfloat16, fp8 weights and cache, derived" in shown


def test_a_host_tier_is_simulated(capsys):
    given = ("--workload", "multi-turn", "--requests", "30", "--think", "20", "--cache-tokens", "6000", "--rates", "2")
    for tier in ((), ("--host-cache-gb", "20", "--copy-gbs", "10")):
        assert bench("--simulate", "opt-13b@a100-80gb", *given, *tier) == 0
        assert "6,000 tokens of KV cache" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("holdfast-tiny", "--url", "http://localhost:1"), "MODEL is for a model that runs here"),
        (("--simulate", "PROFILE", "--dtype", "float32"), "--dtype is for a real engine"),
        (("--simulate", "PROFILE", "--rates", "1,2", "--trace", "t.json"), "trace is the timeline of one run"),
        (("--simulate", "PROFILE", "--rates", "1", "--capacity", "50ms"), "drop --rates or --capacity"),
        (("--simulate", "PROFILE", "--slo-ttft", "soon"), "'soon' is not a time"),
        (("--simulate", "PROFILE", "--slo-ttft=-1s"), "slo_ttft is -1000"),
        (("--simulate", "PROFILE", "--report", "/no/such/place/a.html"), "/no/such/place is not a directory"),
        (("--url", "http://localhost:1", "--simulate", "x"), "one of them"),
        (("--simulate", "PROFILE", "--speed", "2"), "speed is 2, which replays a trace's own times"),
        (("--url", "nowhere"), "must look like"),
        (("--url", "http://localhost:1", "--scheduler", "orca"), "--scheduler is for a model that runs here"),
        (("--simulate", "nowhere.json"), "holdfast: nowhere.json cannot be read: No such file or directory"),
        (("--simulate", "PROFILE", "--workload", "no.csv"), "workload no.csv cannot be read: No such file"),
        (("--simulate", "mistral-7b"), "simulate is mistral-7b, which needs a device: mistral-7b@DEVICE, DEVICE"),
        (("--simulate", "gpt-9@h200"), "model shape gpt-9 is unknown"),
        (("--simulate", "mistral-7b@tpu"), "device tpu is unknown"),
        (("--simulate", "mistral-7b@h200", "--link", "pcie5"), "link is pcie5, which joins devices; give --tp or --pp"),
        (("--simulate", "mistral-7b@h200", "--tp", "2", "--stage-link", "pcie5"), "joins stages; give --pp above 1"),
        (("--simulate", "llama-2-70b@a40"), "take more devices"),
        (("--simulate", "PROFILE", "--tp", "2"), "tp and pp are for --simulate MODEL@DEVICE"),
        (("--simulate", "PROFILE", "--host-cache-gb", "1"), "give the rate with --copy-gbs"),
        (("--simulate", "PROFILE", "--copy-gbs", "0"), "copy_gbs is 0;"),
        (("--simulate", "PROFILE", "--workload", "poems"), "workload poems is unknown"),
        (("--simulate", "PROFILE", "--rates", "1,0"), "must be above 0"),
        (("--simulate", "PROFILE", "--rates", "fast"), "'fast' is not numbers between commas"),
        (("--simulate", "PROFILE", "--rates", "1", "--concurrency", "2"), "closed loop"),
        (("--simulate", "PROFILE", "--requests", "0"), "requests is 0"),
        (("--simulate", "PROFILE", "--think", "0"), "think is 0.0"),
        (("--simulate", "PROFILE", "--prompt-tokens", "5000"), "all 100 conversations are longer than the context of"),
        (("--simulate", "PROFILE", "--host-us", "inf"), "host_us is inf; it must be at least 0 and finite"),
        (("--simulate", "PROFILE", "--contract", "tbt=0"), "contract is 'tbt=0': tbt_ms is 0; it must lie above 0"),
        (("--simulate", "PROFILE", "--contract", "ttft=nan"), "contract is 'ttft=nan': ttft_ms is nan"),
        (("--simulate", "PROFILE", "--contract", "ttft"), "contract is 'ttft': '' is not a time"),
        (("--simulate", "PROFILE", "--contract", "end=5"), "contract is 'end=5'; it must look like ttft=500ms"),
        (("--simulate", "PROFILE", "--variation", "1e-200"), "variation is 1e-200; it must lie between 0.01 and 100"),
        (("--simulate", "PROFILE", "--workload", "nowhere.csv"), "nowhere.csv cannot be read: No such file"),
        (("--simulate", "PROFILE", "--json", "/"), "/ cannot be written: it is a directory"),
        (("--simulate", "PROFILE", "--trace", "/no/such/place/t.json"), "/no/such/place is not a directory"),
        (("--simulate", "PROFILE", "--plots", "PROFILE"), "is a file"),
        (("--simulate", "PROFILE", "--plots", "PROFILE/plots"), "is a file"),
        (
            ("--simulate", "PROFILE", "--quantization", "fp8"),
            "quantization is fp8, and the profile of m on d was",
        ),
        (
            ("--simulate", "mistral-7b@a40", "--kv-cache-dtype", "fp8"),
            "kv_cache_dtype is fp8, which takes a Hopper",
        ),
        (("--simulate", "bloom-176b@h100", "--quantization", "fp8"), "bloom-176b runs on Transformers' code"),
        (("--simulate", "PROFILE", "--slo-ttft", "-1s"), "slo_ttft is -1000; it must be above 0"),
        (("--simulate", "PROFILE", "--rates", "-1,2"), "rates is -1; it must be above 0"),
        (("--simulate", "PROFILE", "--tbt-target", "-3ms"), "tbt_target is -3.0; it must be above 0"),
        (("--simulate", "PROFILE", "--host-us", "-inf"), "host_us is -inf; it must be at least 0"),
        (("--url", "http://[::1"), "url is http://[::1; it must look like"),
        (("--url", "http://localhost:99999"), "must look like"),
    ],
)
def test_a_wrong_call_gives_a_one_line_message(profile, capsys, arguments, message):
    assert bench(*(argument.replace("PROFILE", profile) for argument in arguments)) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_an_unreachable_server_gives_a_message_with_the_address_of_its_api(capsys, path):
    assert bench("--url", f"http://127.0.0.1:9{path}") == 1
    assert "http://127.0.0.1:9/v1/models does not list a model" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("body", "model", "found"),
    [
        ({"data": [{"id": "a", "max_model_len": 4096}, {"id": "b"}]}, None, ("a", 4096)),
        ({"data": [{"id": "a", "max_model_len": 4096}, {"id": "b"}]}, "b", ("b", None)),
        ({"data": [{"id": "a", "max_model_len": "many"}]}, None, ("a", None)),
        ({"data": [{"id": "a", "max_model_len": 4096}]}, "not listed", ("not listed", None)),
        ({"data": []}, "a", ("a", None)),
        ({"data": ["a"]}, "a", ("a", None)),
        (None, "a", ("a", None)),
    ],
)
async def test_a_server_lists_its_context_so_that_longer_conversations_are_left_out(body, model, found):
    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404) if body is None else httpx.Response(200, json=body)

    async with httpx.AsyncClient(base_url="http://there/v1", transport=httpx.MockTransport(reply)) as http:
        assert await served(http, model) == found


@pytest.mark.parametrize(("status", "said"), [(401, "give the key with --api-key"), (200, "the list is empty")])
async def test_a_server_without_a_model_to_ask_for_is_named(status, said):
    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"data": []})

    async with httpx.AsyncClient(base_url="http://there/v1", transport=httpx.MockTransport(reply)) as http:
        with pytest.raises(OSError, match=f"http://there/v1/models .*{said}"):
            await served(http, None)


def test_clients_may_say_their_pauses_and_lie_about_them(profile, tmp_path, capsys):
    given = ("--workload", "multi-turn", "--requests", "30", "--rates", "5", "--think", "2")
    quiet = figures_of(profile, tmp_path, *given)
    told = figures_of(profile, tmp_path, *given, "--pause-noise", "0.2", "--pause-liars", "0.3")
    assert told["completed"] == quiet["completed"] > 30
    assert figures_of(profile, tmp_path, *given, "--pause-noise", "0.2", "--no-tell-pauses")["completed"] > 30
    assert bench("--simulate", profile, *given, "--pause-liars", "0.3") == 2
    assert "set pause_noise" in capsys.readouterr().err
