"""`holdfast plan` as a user calls it: its advice, the command that it prints, and messages for wrong calls."""

import json
import re
import shlex
from dataclasses import replace

import pytest
from fake_hub import fake_hub
from served import CONFIG, make_checkpoint

from holdfast.cli.command import main, make_parser
from holdfast.cli.flags import build
from holdfast.cli.plan import PlanConfig, most_devices, question_of, recommend, serve_command, served_model, shape_named
from holdfast.cluster.config import ClusterConfig
from holdfast.lab.planning import Candidate, Evaluation
from holdfast.lab.simulator.deployment import deploy
from holdfast.lab.workloads import WorkloadConfig
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import RowBytes, RowShape
from tests.lab.simulator.simulation import PROFILE
from tests.padded_rows import ABLE

FIGURES = {"p99_itl_ms": 40.0, "p99_ttft_ms": 900.0}


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    return str(path)


def plan(*arguments):
    return main(["plan", "--jobs", "1", *arguments])


def parsed(command, config=EngineConfig):
    """The EngineConfig, or another one, of a `holdfast serve` command line."""
    program, *words = shlex.split(command)
    assert program == "holdfast"
    return build(config, vars(make_parser(words[0]).parse_args(words)))


SMALL = (
    "--prompt-tokens", "60", "--output-tokens", "4", "--seconds", "0.1", "--slo-tbt", "20ms", "--slo-ttft", "100ms",
    "--token-budgets", "64", "--max-sequences", "8",
)  # fmt: skip
"""Limits that a few requests reach. Without a TTFT limit, runs would grow until requests queue for two seconds.

With few rows, a lower rate reaches them, and a run is shorter.
"""


def test_a_plan_ends_with_a_command_that_serve_accepts(profile, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert plan("--profile", profile, *SMALL, "--price", "2", "--json", str(out)) == 0
    shown = capsys.readouterr().out
    command = shown.strip().splitlines()[-1]
    assert "the queue does not grow: conversations arrived for" in shown
    engine = parsed(command)
    assert engine.max_sequences == 8
    rows = json.loads(out.read_text())["candidates"]
    assert [(row["scheduler"], row["token_budget"], row["tbt_target"]) for row in rows] == [
        ("stall-free", None, 18.0),
        ("stall-free", 64, None),
        ("orca", None, None),
        ("prefill-first", None, None),
    ]
    best = max(rows, key=lambda row: row["fleet_capacity"])
    assert (engine.scheduler, engine.token_budget, engine.tbt_target) == (
        best["scheduler"], best["token_budget"], best["tbt_target"],
    )  # fmt: skip
    assert all(row["cost_per_million_output_tokens"] > 0 for row in rows if row["capacity"])


def test_a_plan_simulates_all_replicas_with_a_router(profile, tmp_path, capsys):
    out = tmp_path / "plan.json"
    options = ("--profile", profile, *SMALL, "--schedulers", "stall-free", "--devices", "2", "--routing", "priced")
    assert plan(*options, "--json", str(out)) == 0
    shown, said = capsys.readouterr()
    assert "with a priced router: 2 replicas sustain" in shown
    began, first, next_round, second, together = said.splitlines()
    assert began == "simulating stall-free, 18 ms on 1 device …", "without a terminal, each step has a line"
    assert re.fullmatch(r"1 of 2, after \d+ s: stall-free, 18 ms on 1 device: [\d.]+ conversations .*", first)
    assert next_round == "simulating stall-free, 64 tokens on 1 device …" and second.startswith("2 of 2, after ")
    assert together == "simulating 2 replicas together, with a priced router …"
    parsed(shown.strip().splitlines()[-1])
    written = json.loads(out.read_text())
    best = max(row["fleet_capacity"] for row in written["candidates"])
    assert written["fleet"]["replicas"] == 2 and written["fleet"]["capacity"] > 0.8 * best
    assert written["fleet"]["figures"]["p99_ttft_ms"] <= 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--routing", "random"), "routing 'random' is unknown; there are priced"),
        (("--replica-link", "ethernet-25g"), "give --routing, too"),
        (("--routing", "priced", "--replica-link", "string"), "link string is unknown"),
    ],
)
def test_routing_that_cannot_be_simulated_is_named(profile, capsys, options, message):
    assert plan("--profile", profile, *SMALL, *options) == 2
    assert message in capsys.readouterr().err


def test_a_plan_notes_steps_beyond_those_of_its_profile(tmp_path, capsys):
    replace(PROFILE, max_decodes=1, max_step_tokens=48).save(tmp_path / "small.json")
    assert plan("--profile", str(tmp_path / "small.json"), *SMALL, "--schedulers", "stall-free") == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "extrapolated" in line]
    assert "sequences that decode and " in note and note.count("measured with at most 1 and 48") == 1


def test_the_same_seed_gives_the_same_plan(profile, tmp_path):
    tables = []
    for name in ("a.json", "b.json"):
        assert plan("--profile", profile, *SMALL, "--schedulers", "stall-free", "--json", str(tmp_path / name)) == 0
        tables.append((tmp_path / name).read_text())
    assert tables[0] == tables[1]


def test_a_report_shows_the_candidates_and_the_command(profile, tmp_path):
    page, plots = tmp_path / "plan.html", tmp_path / "plots"
    given = ("--schedulers", "stall-free", "--price", "2", "--report", str(page), "--plots", str(plots))
    assert plan("--profile", profile, *SMALL, *given) == 0
    text = page.read_text()
    assert "holdfast serve" in text and "stall-free, 64 tokens" in text
    assert {path.name for path in plots.iterdir()} == {"capacity.png", "cost.png"}


def test_fp8_raises_the_capacity_and_appears_in_the_command(tmp_path, capsys):
    capacities = []
    for options in ((), ("--quantization", "fp8", "--kv-cache-dtype", "fp8")):
        out = tmp_path / "plan.json"
        assert plan("mistral-7b", *SMALL, *options, "--schedulers", "orca", "--json", str(out)) == 0
        capacities += [row["capacity"] for row in json.loads(out.read_text())["candidates"]]
    assert capacities[1] > 1.2 * capacities[0]
    shown = capsys.readouterr().out.strip().splitlines()
    engine = parsed(shown[-1].replace("$MODEL", "m"))
    assert (engine.quantization, engine.kv_cache_dtype) == ("fp8", "fp8")
    assert any("mistral-7b on 1 x h200, bfloat16, fp8 weights and cache, fixed" in line for line in shown)


def test_a_profile_of_another_precision_is_refused(tmp_path, capsys):
    path = tmp_path / "profile.json"
    replace(PROFILE, quantization="fp8").save(path)
    assert plan("--profile", str(path), *SMALL) == 2
    expected = "quantization is none, and the profile of m on d was measured with fp8; give --quantization fp8"
    assert expected in capsys.readouterr().err
    assert plan("--profile", str(path), *SMALL, "--quantization", "fp8", "--schedulers", "orca") == 0
    assert parsed(capsys.readouterr().out.strip().splitlines()[-1]).quantization == "fp8"


def test_a_profile_of_the_built_in_model_gives_a_command_for_it(tmp_path, capsys):
    path = tmp_path / "profile.json"
    replace(PROFILE, cost=replace(PROFILE.cost, model="holdfast-tiny")).save(path)
    assert plan("--profile", str(path), *SMALL, "--schedulers", "orca") == 0
    assert parsed(capsys.readouterr().out.strip().splitlines()[-1]).model == "holdfast-tiny"


def test_a_config_file_may_hold_the_options_of_plan_and_no_others(profile, tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text("slo-tbt: 20ms\nslo-ttft: 100ms\nmax-sequences: 8\n")
    given = (*SMALL[:6], "--schedulers", "orca", "--config", str(path))
    assert plan("--profile", profile, *given) == 0
    assert parsed(capsys.readouterr().out.strip().splitlines()[-1]).max_sequences == 8
    path.write_text("tbt_target: 20ms\n")
    assert plan("--profile", profile, *given) == 2
    refused = f"{path}: unknown option tbt_target; it is an option of holdfast serve; holdfast plan --help"
    assert refused in capsys.readouterr().err


def test_limits_that_no_candidate_meets_fail_with_advice(profile, capsys):
    given = (*SMALL, "--slo-tbt", "1ms", "--schedulers", "stall-free")
    assert plan("--profile", profile, *given) == 1
    shown = capsys.readouterr().out
    assert "nothing meets these limits" in shown and "holdfast serve" not in shown


def test_a_profile_of_padded_rows_is_planned_on_them_and_served_so(tmp_path, capsys):
    path, out = tmp_path / "rows.json", tmp_path / "plan.json"
    able = replace(ABLE, shaping=False)
    shape = RowShape(memory=8_192_000, bytes=RowBytes(growing=((1000, None),)), abilities=able)
    replace(PROFILE, token_bytes=1000, rows=shape).save(path)
    assert plan("--profile", str(path), *SMALL, "--schedulers", "stall-free,orca", "--json", str(out)) == 0
    assert parsed(capsys.readouterr().out.strip().splitlines()[-1]).executor == "padded"
    candidates = json.loads(out.read_text())["candidates"]
    refused = [each["reason"] for each in candidates if each["scheduler"] == "orca"]
    assert refused and all("gives wrong tokens there" in reason for reason in refused)


def test_a_model_that_fits_no_layout_fails_with_one_message_and_advice(capsys):
    assert plan("falcon-180b", "--device", "a40", *SMALL) == 1
    shown = capsys.readouterr().out
    assert shown.count("falcon-180b takes 359 GB, and 1 a40 have 48") == 1
    assert "no layout fits these devices" in shown and "--slo-tbt" not in shown


def test_requests_longer_than_the_context_are_not_answered_with_more_devices(capsys):
    assert plan("mistral-7b", "--max-model-len", "50", *SMALL) == 1
    shown = capsys.readouterr().out
    assert "no request fits its context of 50 tokens" in shown
    assert "every request is too long: give shorter --prompt-tokens" in shown and "--devices" not in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [((), "P99 TTFT of any length (--slo-ttft MS limits it)"), (("--slo-ttft", "2s"), "P99 TTFT within 2000 ms")],
)
def test_the_question_says_which_limit_the_first_token_has(given, said, capsys):
    plan("falcon-180b", "--device", "a40", *given)
    assert said in capsys.readouterr().out


def test_a_slower_link_lowers_the_capacity(tmp_path):
    capacities = []
    for link in ("nvlink4", "ethernet-25g"):
        out = tmp_path / f"{link}.json"
        given = (*SMALL, "--devices", "2", "--tp", "2", "--pp", "1", "--schedulers", "orca", "--link", link)
        plan("mistral-7b", *given, "--json", str(out))
        capacities += [row["capacity"] for row in json.loads(out.read_text())["candidates"]]
    assert capacities[0] > 1.2 * capacities[1]


@pytest.mark.parametrize(("longer", "requests", "whole"), [("cut", "25.0%", "0.0%"), ("drop", "75.0%", "50.0%")])
def test_a_plan_shows_the_share_of_the_workload_that_is_longer_than_the_context(
    profile, tmp_path, capsys, longer, requests, whole
):
    """The second of two conversations, of one and three turns, exceeds the context with its last turn."""
    talks = tmp_path / "chats.json"
    turn = [{"from": "human", "value": "four" * 100}, {"from": "gpt", "value": "four" * 20}]
    talks.write_text(json.dumps([{"conversations": turn}, {"conversations": turn * 3}]))
    given = (*SMALL[4:], "--schedulers", "orca", "--workload", str(talks), "--max-model-len", "300", "--longer", longer)
    assert plan("--profile", profile, *given) == 0
    shown = f"left out: {requests} of the requests, {whole} of the conversations whole"
    assert shown in " ".join(capsys.readouterr().out.split())


def evaluation(capacity, **candidate):
    return Evaluation(Candidate(**candidate), capacity, FIGURES, 100.0, 1, None)


def test_advice_has_the_layout_in_its_command():
    evaluations = [evaluation(1.0, tbt_target=45.0), evaluation(3.0, tbt_target=45.0, tp=2, pp=2)]
    lines = recommend(evaluations, EngineConfig(), None)
    assert "TP2 PP2" in lines[0]
    made = parsed(lines[-1])
    assert (made.tp, made.pp, made.tbt_target) == (2, 2, 45.0)


@pytest.mark.parametrize(
    ("replicas", "hosts", "ray", "times"),
    [(4, "the 8 devices of one host", None, 1), (6, "the 12 devices of the hosts of a Ray cluster", "auto", 1),
     (400, "the 800 devices of the hosts of a Ray cluster", "auto", 2)],
)  # fmt: skip
def test_advice_serves_replicas_with_holdfasts_own_router(replicas, hosts, ray, times):
    many = Evaluation(Candidate(tp=2), 3.0, FIGURES, 100.0, replicas, None)
    *_, where, command = recommend([many], EngineConfig(), None, router="prefix-tree")
    assert f"{replicas} replicas on {hosts}, behind one address" in where
    assert ("run it 2 times" in where) == (times == 2)
    served = parsed(command, ClusterConfig)
    assert (served.replicas, served.routing, served.ray) == (min(replicas, 256), "prefix-tree", ray)
    assert parsed(command).tp == 2


@pytest.mark.parametrize(("most", "within"), [(8, "8 devices of a host"), (1, "one device")])
def test_advice_names_a_layout_that_cannot_be_served_and_the_best_that_can(most, within):
    evaluations = [evaluation(1.0, tbt_target=45.0), evaluation(3.0, tbt_target=45.0, tp=8, pp=2)]
    lines = recommend(evaluations, EngineConfig(), None, most)
    assert "TP8 PP2" in lines[0] and f"on at most {within}, so this cannot be served" in lines[1]
    assert "1 device" in lines[2] and parsed(lines[-1]).tbt_target == 45.0


def test_advice_has_no_command_if_nothing_that_can_be_served_meets_the_limits():
    lines = recommend([evaluation(0.0), evaluation(3.0, tp=2)], EngineConfig(), None, 1)
    assert not any("holdfast serve " in line and "runs this model" not in line for line in lines)


def test_a_model_without_a_native_decoder_is_served_on_one_device():
    question = question_of(PlanConfig(devices=8), WorkloadConfig(), EngineConfig(), "bloom-176b")
    assert most_devices(question) == 1
    assert most_devices(replace(question, model="llama-2-70b")) == 8


def test_a_profile_of_two_devices_is_planned_on_its_own_layout(tmp_path):
    found = deploy("mistral-7b", "h200", pp=2).profile
    found.save(tmp_path / "p.json")
    plan(
        "--profile",
        str(tmp_path / "p.json"),
        "--devices",
        "2",
        *SMALL,
        "--schedulers",
        "orca",
        "--json",
        str(tmp_path / "a.json"),
    )
    (row,) = json.loads((tmp_path / "a.json").read_text())["candidates"]
    assert (row["tp"], row["pp"], row["replicas"]) == (1, 2, 1) and row["capacity"] > 0


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(),
        Candidate(token_budget=512, host_cache_gb=64.5),
        Candidate(scheduler="prefill-first"),
        Candidate(scheduler="chunked-only", token_budget=2048),
        Candidate(tbt_target=22.5),
        Candidate(tp=4, pp=2),
    ],
)
def test_every_command_is_accepted_by_serve(candidate):
    sharing = candidate.host_cache_gb > 0  # a host tier needs it
    engine = EngineConfig(max_sequences=64, memory_fraction=0.85, prefix_sharing=sharing, max_model_len=8192, seed=3)
    made = parsed(serve_command(candidate, engine, "a model's/directory"))
    assert made == replace(engine, model="a model's/directory", **candidate.options())


def test_a_model_may_be_a_name_a_directory_or_a_config(tmp_path):
    assert shape_named("mistral-7b") == "mistral-7b"
    directory = make_checkpoint(tmp_path / "mine")
    shapes = [shape_named(str(path)) for path in (directory, directory / "config.json")]
    assert shapes[0] == shapes[1]
    assert (shapes[0].name, shapes[0].layers, shapes[0].hidden) == ("mine", 2, CONFIG["hidden_size"])
    assert shape_named("holdfast-tiny").layers > 0


def test_a_model_of_the_hub_is_planned_by_its_config_alone(tmp_path, monkeypatch):
    directory = make_checkpoint(tmp_path / "mine")
    with fake_hub(mine=directory) as hub:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        shape = shape_named("made/mine")
    assert (shape.name, shape.layers, shape.hidden) == ("made/mine", 2, CONFIG["hidden_size"])
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    assert served_model("made/mine") == "made/mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "plan takes a MODEL or --profile FILE"),
        (("mistral-7b", "--profile", "p.json"), "one of them"),
        (("gpt-9",), "model gpt-9 is unknown; give a checkpoint's directory, a config.json, an id of the hub"),
        (("mistral-7b", "--device", "abacus"), "device abacus is unknown; there are"),
        (("mistral-7b", "--devices", "0"), "devices is 0; it must be at least 1"),
        (("mistral-7b", "--devices", "100000"), "devices is 100000; it must be at most 1,024"),
        (("mistral-7b", "--link", "pcie5"), "link is pcie5, which joins devices; give --devices above 1"),
        (("mistral-7b", "--stage-link", "pcie5"), "stage_link is pcie5, which joins devices; give --devices above 1"),
        (("mistral-7b", "--price", "0"), "price is 0; it must be above 0"),
        (("mistral-7b", "--slo-tbt", "never"), "'never' is not a time"),
        (("mistral-7b", "--schedulers", "stall-free,fifo"), "scheduler 'fifo' is unknown"),
        (("mistral-7b", "--tp", "1.5"), "tp holds 1.5"),
        (("mistral-7b", "--token-budgets", "nan"), "token_budgets holds nan; each must be a whole number"),
        (("mistral-7b", "--workload", "nowhere.jsonl"), "nowhere.jsonl cannot be read: No such file"),
        (("mistral-7b", "--plots", __file__), "is a file"),
        (("mistral-7b", "--tp", "4"), "no tp x pp of those given fits on 1 devices"),
        (("mistral-7b", "--link", "string"), "link string is unknown; there are"),
        (("--profile", "p.json", "--device", "h200"), "device is h200, and a profile has its own device; drop it"),
        (("--profile", "p.json", "--devices", "2", "--tp", "1,2"), "tp holds 2, and a profile has a layout of its own"),
        (("--profile", "p.json", "--devices", "4", "--pp", "4"), "pp holds 4, and a profile has a layout of its own"),
        (("--profile", "p.json", "--stage-link", "pcie4"), "stage_link joins devices, and a profile has links of its"),
        (("mistral-7b", "--host-gb", "4,-1"), "host_gb holds -1; each must be at least 0"),
        (("mistral-7b", "--host-gb", "-1,4"), "host_gb holds -1; each must be at least 0"),
        (("mistral-7b", "--host-gb", "0,inf"), "host_gb holds inf; each must be at least 0 and finite"),
        (("mistral-7b", "--slo-tbt", "-30ms"), "slo_tbt is -30; it must be above 0"),
        (("mistral-7b", "--device", "a100-80gb", "--quantization", "fp8"), "quantization is fp8, which takes a Hopper"),
        (("bloom-176b", "--quantization", "fp8"), "bloom-176b runs on Transformers' code"),
        (("mistral-7b", "--host-gb=-1"), "host_gb holds -1; each must be at least 0"),
        (("mistral-7b", "--tbt-target", "50"), "unknown option --tbt-target"),
        (("mistral-7b", "--json", "/no/such/place/a.json"), "is not a directory"),
        (("--profile", "nowhere.json"), "nowhere.json cannot be read"),
    ],
)
def test_a_wrong_call_gives_a_one_line_message(capsys, arguments, message):
    assert plan(*arguments) == 2
    out, error = capsys.readouterr()
    assert message in error and error.count("\n") == 1 and not out


def test_a_plan_with_contracts_says_up_to_which_rate_they_are_kept(profile, tmp_path, capsys):
    out, report = tmp_path / "plan.json", tmp_path / "plan.html"
    wanted = ("--contract", "ttft=100,complete=400", "--schedulers", "stall-free", "--json", str(out))
    assert plan("--profile", profile, *SMALL, *wanted, "--report", str(report)) == 0
    shown = capsys.readouterr().out
    assert "contracts of one replica, by load" in shown
    assert "contracts: up to" in shown and "are kept and at most 1% refused" in shown
    contracts = json.loads(out.read_text())["contracts"]
    assert [run["multiple"] for run in contracts["runs"]] == [0.8, 1.5, 2.0, 3.0]
    assert contracts["runs"][-1]["figures"]["contracts_refused_share"] > 0.2
    assert "Contracts by load" in report.read_text()


def test_a_plan_of_contracts_that_cannot_be_kept_says_so(profile, capsys):
    wanted = ("--contract", "ttft=1", "--schedulers", "stall-free")
    assert plan("--profile", profile, *SMALL, *wanted) == 0
    assert "no rate keeps the contracts: give longer times with --contract" in capsys.readouterr().out
