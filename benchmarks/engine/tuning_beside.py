"""Tuning during inference: pace, throughput and training speed under a recorded trace, by the rule that shares a GPU.

    python -m benchmarks.engine.tuning_beside simulate --trace azure_llm_2023_conv.csv # 300 virtual seconds each
    python -m benchmarks.engine.tuning_beside run --trace azure_llm_2023_conv.csv      # --tiny --seconds 10: a trial
    python -m benchmarks.engine.tuning_beside losses --tiny --trace azure_llm_2023_conv.csv --rates 2 --seconds 10
    python -m benchmarks.engine.tuning_beside draw tuning-beside-simulated.json

Requests of the trace arrive at --rates a second (its own gaps, scaled). One LoRA job of rank 16 over all linear layers
trains without an end, a micro-batch of --micro-batch tokens a step. Rules: `without` no job; `slices` a target of
--target ms between tokens, and training in what each step leaves; `bound B` FineInfer's deferral bound of B seconds,
without a target (0: inference first; inf: training to its end, so its job takes half of the time when alone). Output
tokens are counted in the window from 40% of the arrivals to the last one. `alone` is training without requests, of
whose speed the others are shares.

Really, the rule `batch` is also run: instead of a job, BATCH_LINES lines of a batch are open all the time, of 512 and
128 tokens and of the class that fills what streams leave. `busy`: the share of the time in which the device computes.

`simulate` runs the scheduler and tuner that serve over a virtual clock, with the measured profile of an H200. `run`
does it in an engine process on this device: `without` and `slices` in one engine, and each bound of --bounds in one of
its own; --trace-out keeps the trace of the first. With --no-slices the bounds run alone, `without` in the first one's
engine. With --driven a user's own loop trains in place of the job: each step is a call for gradients and one for the
update, and two steps are sent ahead.

`losses` trains the first --steps steps alone and again next to the requests of each rate, once by each rule, each time
in an engine of its own, and compares the losses bit by bit.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.engine.llama8b import LLAMA_3_8B
from benchmarks.engine.served_pace import give_tokenizer
from benchmarks.lib.invocation import provenance
from holdfast.cli.targets import ask_engine
from holdfast.core.types import BATCH_CLASS, SamplingParams
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.tuning import (
    EXAMPLES_FILE,
    Adam,
    Call,
    CallDone,
    Datum,
    DrivenRun,
    DrivenStart,
    JobStart,
    JobStep,
    Loss,
    TuningRun,
    write_call,
    write_examples,
)
from holdfast.engine.process.trace import DEVICE, STEPS, TRAINING
from holdfast.lab.load_client import LoadClient
from holdfast.lab.metrics import Record, percentile
from holdfast.lab.reports.plots import Line, Panel, panels, png
from holdfast.lab.simulator.deployment import deploy
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.simulator.training import Tuning, job_of, training_shape
from holdfast.lab.workloads import PromptTokens, Workload, azure_csv, fit_context, speed_up
from holdfast.lm.config import EngineConfig

RESULTS = Path(__file__).parent / "results"
SHAPE = "llama-3-8b"
TINY = LLAMA_3_8B | dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=512, torch_dtype="float32",
)  # fmt: skip
WINDOW = 0.4
"""Start of the window of the throughput, as a share of the arrivals."""
RANK = 16
EXAMPLES = 512
"""Number of the job's examples. An epoch writes one checkpoint."""
STEPS_AHEAD = 2
"""Most steps of a loop that are sent and not done."""
BATCH_LINES, BATCH_PROMPT, BATCH_OUTPUT = 64, 512, 128


def load_of(trace: Path, rate: float, seconds: float, longest: int) -> Workload:
    """The beginning of a trace, of this many seconds, at this many requests per second."""
    rows = fit_context(azure_csv(trace), longest)
    count = min(len(rows), max(2, round(rate * seconds)))
    chosen = [replace(row, arrival=row.arrival - rows[0].arrival) for row in rows[:count]]
    return speed_up(chosen, chosen[-1].arrival / (count / rate))


def seen(records: Sequence[Record], began: float) -> dict[str, Any]:
    """Figures of the clients, in ms, and the output tokens per second in the window. `began` is when arrivals began."""
    answered = [record for record in records if record.token_times]
    gaps = sorted(after - before for record in answered for before, after in pairwise(record.token_times))
    firsts = sorted(record.token_times[0] - record.arrival for record in answered)
    last = max(record.arrival for record in records)
    start = began + WINDOW * (last - began)
    inside = sum(start <= at < last for record in answered for at in record.token_times)
    figures = {f"tbt_p{round(100 * share)}": 1e3 * percentile(gaps, share) for share in (0.5, 0.99)}
    figures |= {f"ttft_p{round(100 * share)}": 1e3 * percentile(firsts, share) for share in (0.5, 0.99)}
    wholes = sorted(record.token_times[-1] - record.arrival for record in answered)
    figures |= {f"latency_p{round(100 * share)}": 1e3 * percentile(wholes, share) for share in (0.5, 0.99)}
    return {name: round(value, 1) for name, value in figures.items()} | dict(
        output_tok_s=round(inside / (last - start), 1), requests=len(records), failed=len(records) - len(answered)
    )


def rule_name(bound: float | None) -> str:
    return "slices" if bound is None else f"bound {bound:g}"


# Simulated


def simulated(args: argparse.Namespace) -> list[dict[str, Any]]:
    profile = deploy(SHAPE, "h200").profile
    shape, lengths = MODELS[SHAPE], (args.micro_batch // 2,) * 2
    rows: list[dict[str, Any]] = []

    def row(rate: float, rule: str, config: EngineConfig, tuning: Tuning | None, workload: Workload) -> None:
        outcome = simulate(config, profile, workload, tuning=tuning, host_seconds=args.host_us * 1e-6)
        found = dict(rate=rate, rule=rule) | (seen(outcome.records, 0.0) if rate else {})
        found["busy"] = round((outcome.busy + outcome.trained) / outcome.seconds, 3)
        if tuning is not None:
            found["tuning_tok_s"] = round(outcome.trained_tokens / outcome.seconds)
            found["slices"] = outcome.slices
        rows.append(found)
        print(json.dumps(found), flush=True)

    def tuned(bound: float | None) -> Tuning:
        count = 1 << 40
        if bound == inf:
            count = round(0.5 * max(args.seconds.values()) * rows[0]["tuning_tok_s"] / sum(lengths))
        return Tuning([job_of(shape, lengths, rank=RANK, count=count)], training_shape(shape), deferral_bound=bound)

    plain = EngineConfig(model=SHAPE, max_sequences=args.max_sequences)
    with_target = replace(plain, tbt_target=args.target)
    # One request comes late. Until then, training is alone.
    late = [
        replace(each, arrival=max(args.seconds.values()))
        for each in load_of(args.trace, 1.0, 2.0, profile.max_model_len)[:1]
    ]
    row(0, "alone", with_target, tuned(None), late)
    for rate in args.rates:
        workload = load_of(args.trace, rate, args.seconds[rate], profile.max_model_len)
        row(rate, "without", with_target, None, workload)
        row(rate, "slices", with_target, tuned(None), workload)
        row(rate, "without, no target", plain, None, workload)
        for bound in args.bounds:
            row(rate, rule_name(bound), plain, tuned(bound), workload)
    return rows


# Really


class Job:
    """An endless tuning job of random tokens, and the times at which its steps were stored."""

    def __init__(self, run: TuningRun) -> None:
        self.run = run
        self.steps: list[tuple[float, int]] = []
        """(time, tokens) of each step."""
        self.losses: list[float] = []
        self._following = asyncio.create_task(self._follow())

    @staticmethod
    async def start(client: EngineClient, directory: Path, length: int, batch: int) -> Job:
        directory.mkdir()
        choose = random.Random(0)
        words = range(3, client.info.vocab_size)
        examples = [(choose.choices(words, k=length), [1.0] * length) for _ in range(EXAMPLES)]
        digest = write_examples(directory / EXAMPLES_FILE, examples)
        wanted = JobStart(
            id="job", directory=str(directory), name="tuned", data_digest=digest, epochs=1000, batch_size=batch,
            rank=RANK, micro_batch=length * batch,
        )  # fmt: skip
        assert client.tuning is not None
        return Job(await client.tuning.start(wanted))

    async def _follow(self) -> None:
        async for event in self.run.events():
            if isinstance(event, JobStep):
                self.steps.append((time.monotonic(), event.tokens))
                self.losses.append(event.loss)

    def speed(self, begin: float, end: float) -> float:
        """Tokens per second of the steps in between, from the first one's end to the last one's."""
        inside = [(at, tokens) for at, tokens in self.steps if begin <= at < end]
        if len(inside) < 2:
            return 0.0
        return sum(tokens for _, tokens in inside[1:]) / (inside[-1][0] - inside[0][0])

    async def end(self) -> None:
        await self.run.cancel()
        await self._following


class Loop:
    """An endless loop of a user's own training over a driven job: gradients and an update, two steps ahead."""

    def __init__(self, run: DrivenRun, directory: Path, data: Sequence[Datum]) -> None:
        self.run, self._directory, self._data = run, directory, data
        self.steps: list[tuple[float, int]] = []
        """(time, tokens) of each update."""
        self._updates = asyncio.Semaphore(STEPS_AHEAD)
        self._running = [asyncio.create_task(self._follow()), asyncio.create_task(self._send())]

    @staticmethod
    async def start(client: EngineClient, directory: Path, length: int, batch: int) -> Loop:
        directory.mkdir()
        choose = random.Random(0)
        words = range(3, client.info.vocab_size)
        data = []
        for _ in range(batch):
            ids = choose.choices(words, k=length + 1)
            data.append(Datum(ids[:-1], ids[1:]))
        assert client.tuning is not None
        start = DrivenStart(id=directory.name, directory=str(directory), rank=RANK, micro_batch=length * batch)
        return Loop(await client.tuning.drive(start), directory, data)

    async def _send(self) -> None:
        tokens = Loss(name="cross_entropy")
        for number in itertools.count(step=2):
            await self._updates.acquire()
            gradients = Call(number=number, kind="forward_backward", loss=tokens)
            await asyncio.to_thread(write_call, self._directory, gradients, self._data)
            await self.run.call(number)
            update = Call(number=number + 1, kind="optimize", adam=Adam(learning_rate=1e-4))
            await asyncio.to_thread(write_call, self._directory, update)
            await self.run.call(number + 1)

    async def _follow(self) -> None:
        async for event in self.run.events():
            if isinstance(event, CallDone) and event.number % 2:
                self.steps.append((time.monotonic(), sum(len(datum.tokens) for datum in self._data)))
                self._updates.release()

    def speed(self, begin: float, end: float) -> float:
        """Tokens per second of the steps in between, from the first one's end to the last one's."""
        inside = [(at, tokens) for at, tokens in self.steps if begin <= at < end]
        if len(inside) < 2:
            return 0.0
        return sum(tokens for _, tokens in inside[1:]) / (inside[-1][0] - inside[0][0])

    async def end(self) -> None:
        self._running[1].cancel()
        await self.run.cancel()
        await self._running[0]


class Lines:
    """An endless batch, and the times at which its tokens came."""

    def __init__(self, client: EngineClient, name: str) -> None:
        self.times: list[float] = []
        choose = random.Random(name)
        self._open = [
            asyncio.create_task(self._send(client, random.Random(choose.random()))) for _ in range(BATCH_LINES)
        ]

    async def _send(self, client: EngineClient, choose: random.Random) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=BATCH_OUTPUT, ignore_eos=True)
        while True:
            prompt = tuple(choose.choices(range(3, client.info.vocab_size), k=BATCH_PROMPT))
            async for delta in client.stream(prompt, params, priority=BATCH_CLASS):
                self.times += [time.monotonic()] * len(delta.tokens)

    def speed(self, begin: float, end: float) -> float:
        """Output tokens per second."""
        return sum(begin <= at < end for at in self.times) / (end - begin)

    async def end(self) -> None:
        for each in self._open:
            each.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


def busy_share(trace: Path, windows: Sequence[tuple[float, float]]) -> list[float]:
    """Share of each window in which the device computed a step or a slice, from a trace on the same clock."""
    computed = [0.0] * len(windows)
    for line in trace.read_text().splitlines():
        event = json.loads(line.strip().strip(",")) if line.startswith("{") else {}
        if event.get("ph") == "X" and event["pid"] == DEVICE and event["tid"] in (STEPS, TRAINING):
            at = event["ts"] / 1e6
            for index, (begin, end) in enumerate(windows):
                computed[index] += event["dur"] / 1e6 * (begin <= at < end)
    return [round(seconds / (end - begin), 3) for seconds, (begin, end) in zip(computed, windows, strict=True)]


async def served(
    client: EngineClient, workload: Workload, name: str, beside: Job | Loop | Lines | None, rate: float, rule: str
) -> dict[str, Any]:
    """One load as its clients see it, and the speed of the work that runs with it."""
    tokens = PromptTokens(client.info.vocab_size, name)
    began = time.monotonic()
    records = await LoadClient(partial(ask_engine, client), tokens, lambda ended: None).run(workload)
    last = max(record.arrival for record in records)
    found = dict(rate=rate, rule=rule) | seen(records, began)
    if beside is not None:
        found["batch_tok_s" if isinstance(beside, Lines) else "tuning_tok_s"] = round(beside.speed(began, last))
    print(json.dumps(found), flush=True)
    return found | dict(window=(began, last))


def model_in(scratch: Path, *, tiny: bool) -> Path:
    """A new directory with the model's config and a tokenizer, for random weights."""
    model = scratch / SHAPE
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY if tiny else LLAMA_3_8B))
    give_tokenizer(model)
    return model


def options_of(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Engine options that all rules share."""
    return dict(
        model=str(model), load_format="random", tuning=True, max_sequences=args.max_sequences,
        max_model_len=8192, max_waiting=100_000,
    )  # fmt: skip


async def compare_losses(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The losses of the first steps, alone and next to requests by each rule."""
    rules = {"slices": dict(tbt_target=args.target)} if args.slices else {}
    rules |= {rule_name(bound): dict(deferral_bound=bound) for bound in args.bounds}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        common = options_of(args, model_in(Path(scratch), tiny=args.tiny))

        async def run(rule: str, rate: float, **options: Any) -> list[float]:
            client = await EngineClient.start(EngineConfig(**common, **options))
            try:
                job = await Job.start(client, Path(scratch) / f"job-{rule}-{rate}", args.micro_batch // 2, 2)
                found: dict[str, Any] = dict(rate=rate, rule=rule)
                if rate:
                    load = load_of(args.trace, rate, args.seconds[rate], client.info.max_model_len)
                    found = await served(client, load, f"{rule} {rate:g}", job, rate, rule)
                    found["steps_beside"] = len(job.losses)
                while len(job.losses) < args.steps:
                    await asyncio.sleep(0.05)
                losses = job.losses[: args.steps]
                await job.end()
            finally:
                await client.close()
            rows.append({name: value for name, value in found.items() if name != "window"} | dict(losses=losses))
            return losses

        alone = await run("alone", 0)
        for rate in args.rates:
            for rule, options in rules.items():
                losses = await run(rule, rate, **options)
                rows[-1]["equal"] = sum(map(float.__eq__, alone, losses))
    return rows


def losses_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: steps done while requests ran, and steps with the loss that they have alone."""
    lines = [
        "| requests/s | rule | requests | steps while they ran | steps with the same loss | first, last loss |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        beside = (row["requests"], row["steps_beside"]) if row["rate"] else ("", "")
        same = f"{row['equal']} of {len(row['losses'])}" if row["rate"] else ""
        cells = [f"{row['rate']:g}", row["rule"], *beside, same, f"{row['losses'][0]!r}, {row['losses'][-1]!r}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


async def really(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    length, batch = args.micro_batch // 2, 2
    with tempfile.TemporaryDirectory() as scratch:
        model = model_in(Path(scratch), tiny=args.tiny)
        common = options_of(args, model)

        async def engine(rules: Sequence[str], **options: Any) -> None:
            client = await EngineClient.start(EngineConfig(**common, **options))
            longest = client.info.max_model_len
            try:
                await served(client, load_of(args.trace, 4.0, 4.0, longest), "warm", None, 4.0, "warm-up")
                for rate in args.rates if "without" in rules else ():
                    load = load_of(args.trace, rate, args.seconds[rate], longest)
                    rows.append(await served(client, load, f"{rate:g}", None, rate, "without"))
                for rate in args.rates if "batch" in rules else ():
                    lines = Lines(client, f"lines {rate:g}")
                    load = load_of(args.trace, rate, args.seconds[rate], longest)
                    rows.append(await served(client, load, f"batch {rate:g}", lines, rate, "batch"))
                    await lines.end()
                begun: Any = Loop if args.driven else Job
                job = await begun.start(client, Path(scratch) / f"job-{len(rows)}", length, batch)
                begin = time.monotonic()
                await asyncio.sleep(args.alone)
                middle = begin + 0.3 * args.alone
                alone = dict(rate=0, rule=f"alone, {rules[-1]}", tuning_tok_s=round(job.speed(middle, inf)))
                print(json.dumps(alone), flush=True)
                rows.append(alone)
                for rate in args.rates:
                    load = load_of(args.trace, rate, args.seconds[rate], longest)
                    rows.append(await served(client, load, f"{rules[-1]} {rate:g}", job, rate, rules[-1]))
                await job.end()
            finally:
                await client.close()

        if args.slices:
            trace = args.trace_out or Path(scratch) / "trace.json"
            await engine(["without", "batch", "slices"], tbt_target=args.target, trace=str(trace))
            windows = [row.pop("window") for row in rows if row["rate"]]
            for row, share in zip([row for row in rows if row["rate"]], busy_share(trace, windows), strict=True):
                row["busy"] = share
        for number, bound in enumerate(args.bounds):
            first = [] if args.slices or number else ["without"]
            await engine([*first, rule_name(bound)], deferral_bound=bound)
    return [{name: value for name, value in row.items() if name != "window"} for row in rows]


# Results


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: tuning as a share of its speed alone, output as a share of that without tuning."""
    alone = {row["rule"].removeprefix("alone").strip(", "): row["tuning_tok_s"] for row in rows if not row["rate"]}
    whole = alone.get("slices") or alone.get("") or max(alone.values())
    without = {(row["rate"], row["rule"]): row["output_tok_s"] for row in rows if row["rule"].startswith("without")}
    said = ", ".join(f"{speed:,} tok/s" + (f" ({rule})" if rule else "") for rule, speed in alone.items())
    heads: tuple[str, ...] = (
        "requests/s",
        "rule",
        "TBT P50, P99, ms",
        "TTFT P50, P99, ms",
        "latency P50, P99, ms",
        "output tok/s",
    )
    heads += ("of without", "batch tok/s", "tuning tok/s", "of alone", "busy")
    lines = [f"Training alone: {said}.", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        if not row["rate"]:
            continue
        rate, rule, trained = row["rate"], row["rule"], row.get("tuning_tok_s")
        own = (rate, "without, no target" if rule.startswith("bound") else "without")
        cells = [
            f"{rate:g}",
            rule,
            f"{row['tbt_p50']}, {row['tbt_p99']}",
            f"{row['ttft_p50']:,.0f}, {row['ttft_p99']:,.0f}",
            f"{row['latency_p50']:,.0f}, {row['latency_p99']:,.0f}",
            f"{row['output_tok_s']:,.0f}",
            f"{row['output_tok_s'] / without.get(own, without[rate, 'without']):.3f}",
            f"{row['batch_tok_s']:,}" if "batch_tok_s" in row else "",
            "" if trained is None else f"{trained:,}",
            "" if trained is None else f"{trained / whole:.2f}",
            str(row.get("busy", "")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Curves by load, one for each rule."""
    rules = [*dict.fromkeys(row["rule"] for row in rows if row["rate"] and row["rule"] != "without, no target")]

    def lines(name: str) -> list[Line]:
        found = []
        for rule in rules:
            points = [(row["rate"], row[name]) for row in rows if row["rate"] and row["rule"] == rule and name in row]
            if points:
                x, y = zip(*points, strict=True)
                found.append(Line(rule, x, y, accent=rule == "slices"))
        return found

    shown = [
        Panel("P99 time between tokens", "ms, by requests a second", lines("tbt_p99"), log=True),
        Panel("P99 time to the first token", "ms, by requests a second", lines("ttft_p99"), log=True),
        Panel("Tuning", "tokens a second", lines("tuning_tok_s")),
        Panel("Output in the window", "tokens a second", lines("output_tok_s")),
    ]
    png(partial(panels, shown, 2), file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulate", "run", "losses", "draw"))
    parser.add_argument("file", type=Path, nargs="?", help="of draw: the JSON of a run")
    parser.add_argument("--trace", type=Path, help="an Azure LLM inference trace")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 9.0, 13.0], help="requests a second")
    parser.add_argument("--bounds", type=float, nargs="*", default=None, help="deferral bounds, s")
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=None,
        help="of arrivals, one number for all rates or one for each; simulated 300, really 40",
    )  # fmt: skip
    parser.add_argument("--target", type=float, default=25.0, help="ms between tokens")
    parser.add_argument("--micro-batch", type=int, default=2048)
    parser.add_argument("--max-sequences", type=int, default=256)
    parser.add_argument("--host-us", type=float, default=0.0, help="host time of a simulated step")
    parser.add_argument("--alone", type=float, default=10.0, help="seconds of training without requests")
    parser.add_argument("--trace-out", type=Path, help="file for the trace of the engine with slices")
    parser.add_argument("--steps", type=int, default=12, help="of losses: steps to compare")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers: a trial on a CPU")
    parser.add_argument("--driven", action="store_true", help="really: train by calls of a user's own loop")
    parser.add_argument("--no-slices", dest="slices", action="store_false", help="run the bounds alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.what == "draw":
        if args.file is None:
            parser.error("draw takes the JSON of a run")
        draw(json.loads(args.file.read_text())["rows"], args.file.with_suffix(".png"))
        return
    if args.trace is None:
        parser.error("--trace is needed: an Azure LLM inference trace")
    if args.bounds is None:
        args.bounds = {"simulate": [0.0, 0.5, 2.0, inf], "losses": [0.0, 0.5]}.get(args.what, [])
    given = args.seconds or [300.0 if args.what == "simulate" else 40.0]
    if len(given) not in (1, len(args.rates)):
        parser.error(f"--seconds has {len(given)} numbers for {len(args.rates)} rates: give one, or one for each")
    args.seconds = dict(zip(args.rates, given * len(args.rates) if len(given) == 1 else given, strict=True))
    about = provenance()
    if args.what == "losses":
        rows = uvloop.run(compare_losses(args))
        args.out.mkdir(parents=True, exist_ok=True)
        file = args.out / f"tuning-losses-{'tiny' if args.tiny else about['device'].replace(' ', '-')}.json"
        file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        print(losses_table(rows))
        return
    rows = simulated(args) if args.what == "simulate" else uvloop.run(really(args))
    name = "simulated" if args.what == "simulate" else about["device"].replace(" ", "-")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"{'training-loop' if args.driven else 'tuning'}-beside-{name}.json"
    file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    said = f"`{about['command']}`, {about['date'][:10]}"
    file.with_suffix(".md").write_text(f"{said}\n\n{table(rows)}\n")
    draw(rows, file.with_suffix(".png"))
    print(table(rows))


if __name__ == "__main__":
    main()
