"""FineInfer's figures on this machine's device: the runs of `benchmarks/papers/fineinfer.py load` and `overhead`."""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.invocation import provenance, settle
from benchmarks.lib.papers import save
from benchmarks.lib.row_engines import GRACE, LLAMA_3_8B, TINY, RowEngines, progress, serve, warm
from benchmarks.papers.fineinfer import LONGEST, MODEL, cache_tokens, figures_of, requests
from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.types import SamplingParams
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.text import TextStream
from holdfast.engine.process.build import build
from holdfast.lab import workloads
from holdfast.lab.load_client import LoadClient, ask_server
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.workloads import PromptTokens, Turn
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.batch import Batch
from holdfast.lm.types import LanguageLoop, StepPlan, StepResult

COPIES = 3
"""Number of requests of a batch (§4.3)."""
DESIGNS = {
    "simple": dict(executor="padded", scheduler="padded-batches"),
    "nopad": dict(executor="paged", scheduler="orca"),
}
TOKENS = 2048
"""Bound of the ids in prompts, so that each is a token of the built-in tokenizer."""
PAPER_OVERHEAD = (
    "Paper, (1024, 1024), seconds beside the GPU's: engine_step 0.682 and 1.035 (Simple, Nopad), with the rest of the "
    "engine 0.788 and 1.061."
)


def load(
    out: Path,
    *,
    datasets: Sequence[str],
    designs: Sequence[str],
    rates: Sequence[float],
    tiny: bool,
    seconds: float,
    limit: float,
    measured: Mapping[str, Sequence[Turn]],
) -> None:
    """Run these rates of each data set on this device, by each design in what 24 GB leave for its cache.

    `measured` has the data sets' own lengths; the others are drawn.
    """
    about = provenance()
    rows: list[dict[str, Any]] = []
    lines = [
        "| design | lengths | rate | normalized latency, ms a token | batch | requests/s | ended |",
        "|---|---|---|---|---|---|---|",
    ]
    name = f"fineinfer-load-{'data-' * bool(measured)}{'tiny' if tiny else about['device'].replace(' ', '-')}"
    for design in designs:
        with within_24_gb(design, tiny=tiny, limit=limit) as (loop, vocab_size):
            for rate in rates:
                for dataset in datasets:
                    count = max(4, int(rate * seconds))
                    work = requests(dataset, count, measured.get(dataset, ()))
                    work = workloads.gamma_arrivals(work, rate, seed=0)
                    served = serve(loop, work, vocab_size, limit=limit)
                    told = f"{design}, {dataset} at {rate:g}/s"
                    if not served.records:
                        progress(f"{told}: nothing ended in {served.seconds:.0f} s")
                        continue
                    row = figures_of(served.records, served.seconds)
                    rows.append(row | {"design": design, "dataset": dataset, "rate": rate, "cut": served.cut})
                    lines.append(
                        f"| {design} | {dataset} | {rate:g}/s | {row['normalized_latency_ms']:,.0f} | "
                        f"{row['batch']:.1f} | {row['requests_per_second']:.2f} | "
                        f"{len(served.records)} of {count}{', cut' * served.cut} |"
                    )
                    progress(f"{told}: {served.seconds:.0f} s")
                    save(out / name, [about, *rows], lines)


@contextmanager
def within_24_gb(design: str, *, tiny: bool, limit: float) -> Iterator[tuple[LanguageLoop, int]]:
    """A warm engine of a design, with the cache that it would have on the paper's card, and its vocabulary's size."""
    options: dict[str, Any] = {} if tiny else {"cache_gb": cache_tokens(design) * MODELS[MODEL].token_bytes / 1e9}
    if design == "simple":
        engines = RowEngines(TINY if tiny else LLAMA_3_8B)
        sizes = dict(scheduler="padded-batches", max_sequences=64)
        with engines.engine(2 * LONGEST, **sizes, **options) as (loop, _, _):
            warm(loop, 16, LONGEST // 2, engines.vocab_size, limit=limit)
            yield loop, engines.vocab_size
        return
    with checkpoint(tiny) as directory:
        sizes = dict(max_model_len=2 * LONGEST, max_sequences=64, prefix_sharing=False, host_cache_gb=0)
        sizes |= {"device": "cpu", "cache_gb": 0.1} if tiny else {"load_format": "random"}
        loop, info = build(EngineConfig(model=str(directory), **(sizes | options), **DESIGNS[design]))
        try:
            settle(loop)
            vocab_size = min(TOKENS, info.vocab_size)
            serve(loop, workloads.fixed(16, LONGEST // 2, 16), vocab_size, limit=limit)
            yield loop, vocab_size
        finally:
            loop.close()


class Timed:
    """Adds up the seconds that one function of an object or a class takes, while it is wrapped."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        self._owner, self._name, self._inner = owner, name, getattr(owner, name)
        inner, wrapped = self._inner, self

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                wrapped.seconds += time.perf_counter() - begin

        setattr(owner, name, timed)

    def undo(self) -> None:
        setattr(self._owner, self._name, self._inner)


class Forwards:
    """Wraps an executor and adds up the seconds that the device computed."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seconds = 0.0

    def submit(self, plan: StepPlan) -> None:
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        result: StepResult = self._inner.collect()
        self.seconds += result.seconds
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def checkpoint(tiny: bool) -> Iterator[Path]:
    """The built-in model, or a Llama-3-8B shape of random weights with its tokenizer."""
    builtin = Checkpoint.find(BUILTIN_MODEL).directory
    if tiny:
        yield builtin
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / MODEL
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(LLAMA_3_8B))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(builtin / name, directory / name)
        yield directory


def overhead(
    out: Path,
    *,
    lengths: Sequence[tuple[int, int]],
    layers: Sequence[str],
    designs: Sequence[str],
    tiny: bool,
    repeats: int,
    limit: float,
) -> None:
    """Latency of a batch of three copies minus the time of its forwards, by layer (F-46) and by function (F-47)."""
    about = provenance()
    rows: list[dict[str, Any]] = []
    stem = out / ("fineinfer-overhead-tiny" if tiny else f"fineinfer-overhead-{about['device'].replace(' ', '-')}")
    with checkpoint(tiny) as directory:
        # The engine alone runs in this process, and its memory may outlive it: the others, in processes, come first.
        for layer in sorted(layers, key="engine".__eq__):
            for design in designs:
                longest = max(prompt + output for prompt, output in lengths)
                options: dict[str, Any] = dict(
                    max_model_len=longest + 16, max_sequences=4, prefix_sharing=False, host_cache_gb=0,
                    steps_in_flight=1, **({"device": "cpu", "cache_gb": 1.0} if tiny else {"load_format": "random"}),
                    **DESIGNS[design],
                )  # fmt: skip
                run = {"engine": in_engine, "server": in_server, "cli": in_cli}[layer]
                for row in run(directory, options, lengths, repeats, limit):
                    rows.append({"design": design, "layer": layer, **row})
                    save(stem, [about, *rows], overhead_lines(rows))
                progress(f"{design}, {layer}: done")
    draw_overhead(rows, stem.with_suffix(".png"))


def in_engine(
    directory: Path, options: dict[str, Any], lengths: Sequence[tuple[int, int]], repeats: int, limit: float
) -> Iterator[dict[str, Any]]:
    """The loop alone, in this process, by function."""
    loop, info = build(EngineConfig(model=str(directory), **options))
    forwards = Forwards(loop.executor)
    loop.executor = forwards
    try:
        for prompt, output in lengths:
            timed = {"schedule": Timed(loop.planner, "schedule"), "stage": Timed(Batch, "stage"),
                     "submit": Timed(forwards, "submit"), "collect": Timed(forwards, "collect"),
                     "update": Timed(loop.planner, "update")}  # fmt: skip
            for repeat in limited(repeats, limit):
                while loop.prepare():
                    pass
                forwards.seconds = 0.0
                for each in timed.values():
                    each.seconds = 0.0
                begin = time.perf_counter()
                serve(loop, workloads.fixed(COPIES, prompt, output), min(TOKENS, info.vocab_size), limit=limit)
                total = time.perf_counter() - begin
                if repeat:  # the first one loads kernels
                    parts = {name: each.seconds for name, each in timed.items()}
                    # Launches and waiting surround the forwards. Their other time is the host's.
                    parts["launch and wait"] = parts.pop("submit") + parts.pop("collect") - forwards.seconds
                    parts["launch and wait"] -= parts["stage"]
                    named = sum(parts.values())
                    parts["other"] = total - forwards.seconds - named
                    yield {"prompt": prompt, "output": output, "total": total, "forward": forwards.seconds, **parts}
            for each in timed.values():
                each.undo()
    finally:
        loop.close()


def limited(repeats: int, limit: float) -> Iterator[int]:
    """Numbers of repetitions from 0, which does not count. None begins after `limit` seconds, but 1 always does."""
    began = time.perf_counter()
    for repeat in range(repeats + 1):
        if repeat > 1 and time.perf_counter() - began > limit:
            return
        yield repeat


def in_server(
    directory: Path, options: dict[str, Any], lengths: Sequence[tuple[int, int]], repeats: int, limit: float
) -> Iterator[dict[str, Any]]:
    """The server's side of the engine process: messages, and the text of each stream."""

    async def once(client: EngineClient, prompt: int, output: int, salt: str) -> None:
        tokens = PromptTokens(min(TOKENS, client.info.vocab_size), salt)
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)

        async def one(number: int) -> None:
            turn = workloads.Turn(prompt, output)
            async for _ in client.stream(tokens.prompt(number, 0, turn), params):
                pass

        await asyncio.gather(*(one(number) for number in range(COPIES)))

    @asynccontextmanager
    async def started(trace: Path) -> AsyncIterator[Callable[[int, int, str], Any]]:
        client = await EngineClient.start(EngineConfig(model=str(directory), trace=str(trace), **options))
        try:
            yield partial(once, client)
        finally:
            await client.close()

    yield from beside_trace(started, lengths, repeats, limit)


def in_cli(
    directory: Path, options: dict[str, Any], lengths: Sequence[tuple[int, int]], repeats: int, limit: float
) -> Iterator[dict[str, Any]]:
    """The client of `holdfast bench`, over HTTP, with `holdfast serve`."""

    async def once(http: httpx.AsyncClient, prompt: int, output: int, salt: str) -> None:
        ask = partial(ask_server, http, model)
        records = await LoadClient(ask, PromptTokens(TOKENS, salt), lambda done: None).run(
            workloads.fixed(COPIES, prompt, output)
        )
        if errors := [record.error for record in records if record.error]:
            raise RuntimeError(errors[0])

    model = ""

    @asynccontextmanager
    async def started(trace: Path) -> AsyncIterator[Callable[[int, int, str], Any]]:
        nonlocal model
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not False]
        flags += [f"--no-{name.replace('_', '-')}" for name, value in options.items() if value is False]
        command = [sys.executable, "-m", "holdfast.cli", "serve", str(directory), "--port", "0", f"--trace={trace}"]
        store = trace.with_suffix(".sqlite")
        with subprocess.Popen([*command, f"--store={store}", *flags], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                line = next((line for line in process.stdout if "http://" in line), "")
                if not line:
                    raise RuntimeError("holdfast serve ended before it was ready")
                url = next(word for word in line.split() if word.startswith("http://")).rstrip("/")
                async with httpx.AsyncClient(base_url=f"{url}/v1/", timeout=httpx.Timeout(30, read=None)) as http:
                    model = (await http.get("models")).json()["data"][0]["id"]
                    yield partial(once, http)
            finally:
                process.terminate()
                process.wait(30)

    yield from beside_trace(started, lengths, repeats, limit)


def beside_trace(
    started: Callable[[Path], Any], lengths: Sequence[tuple[int, int]], repeats: int, limit: float
) -> Iterator[dict[str, Any]]:
    """Runs of an engine process. The time of forwards comes from its trace."""
    spans: list[tuple[int, int, float, float, float]] = []

    async def all_of(trace: Path) -> None:
        async with started(trace) as once:
            for prompt, output in lengths:
                for repeat in limited(repeats, limit):
                    text = Timed(TextStream, "push")
                    begin = time.monotonic()
                    try:
                        await asyncio.wait_for(once(prompt, output, f"{repeat}/"), GRACE + limit)
                    except TimeoutError:
                        progress(f"{prompt}, {output}: cut after {GRACE + limit:.0f} s")
                        text.undo()
                        break
                    if repeat:
                        spans.append((prompt, output, begin, time.monotonic(), text.seconds))
                    text.undo()
                    await asyncio.sleep(0.2)  # the engine is idle again

    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace.json"
        asyncio.run(all_of(trace))
        steps = steps_of(trace)
    for prompt, output, begin, end, text in spans:
        forward = sum(seconds for at, seconds in steps if begin <= at <= end)
        yield {"prompt": prompt, "output": output, "total": end - begin, "forward": forward, "text": text}


def steps_of(trace: Path) -> list[tuple[float, float]]:
    """Begin and seconds of each step in a trace."""
    found = []
    for line in trace.read_text().splitlines():
        if '"name": "step ' in line:
            event = json.loads(line.rstrip(","))
            found.append((event["ts"] / 1e6, event["dur"] / 1e6))
    return found


def overhead_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Median overhead by layer, and by function of the engine."""
    lines = ["Overhead: latency of a batch of three copies less the time of its forwards, seconds, medians.", ""]
    lines += ["| prompt, answer | design | layer | runs | latency | forwards | overhead | overhead, % |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    functions = ["| prompt, answer | design | " + " | ".join(f"{name}, s" for name in FUNCTIONS) + " |"]
    functions.append("|---|---|" + "---|" * len(FUNCTIONS))
    for prompt, output in {(row["prompt"], row["output"]): None for row in rows}:
        for design in DESIGNS:
            same = [row for row in rows if (row["prompt"], row["output"], row["design"]) == (prompt, output, design)]
            for layer in {row["layer"]: None for row in same}:
                own = [row for row in same if row["layer"] == layer]
                total, forward = (statistics.median(row[name] for row in own) for name in ("total", "forward"))
                over = statistics.median(row["total"] - row["forward"] for row in own)
                lines.append(
                    f"| {prompt}, {output} | {design} | {layer} | {len(own)} | {total:.3f} | {forward:.3f} "
                    f"| {over:.3f} | {over / total:.1%} |"
                )
            if same:
                said = []
                for name in FUNCTIONS:
                    seconds = [row[name] for row in same if name in row]
                    said.append(f"{statistics.median(seconds):.3f}" if seconds else "–")
                functions.append(f"| {prompt}, {output} | {design} | " + " | ".join(said) + " |")
    return [
        *lines,
        "",
        "By function; `text` is the server's, the others are the engine's:",
        "",
        *functions,
        "",
        PAPER_OVERHEAD,
    ]


FUNCTIONS = ("schedule", "stage", "launch and wait", "update", "other", "text")


def draw_overhead(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Figures 3 and 4: a box for each design and layer."""
    try:
        from holdfast.lab.reports import plots
    except ImportError:  # a machine without matplotlib; the JSON has all figures
        return
    lengths = list({(row["prompt"], row["output"]): None for row in rows})

    def boxes(palette: plots.Palette) -> Any:
        figure, all_axes = plots.canvas(palette, 5.6 * len(lengths), 3.4, 1, len(lengths))
        for axes, (prompt, output) in zip(all_axes, lengths, strict=True):
            same = [row for row in rows if (row["prompt"], row["output"]) == (prompt, output)]
            groups = list({(row["design"], row["layer"]): None for row in same})
            values = [
                [1e3 * (row["total"] - row["forward"]) for row in same if (row["design"], row["layer"]) == group]
                for group in groups
            ]
            drawn = axes.boxplot(values, widths=0.5, patch_artist=True, flierprops={"markersize": 3})
            for (design, _), box in zip(groups, drawn["boxes"], strict=True):
                box.set(facecolor=palette.accent if design == "simple" else palette.second, alpha=0.55)
            for line in drawn["medians"]:
                line.set_color(palette.ink)
            axes.set_xticks(range(1, len(groups) + 1), [f"{design}\n{layer}" for design, layer in groups])
            axes.set_ylim(bottom=0)
            plots.heading(axes, palette, f"{prompt} in, {output} out", "ms of overhead")
        return figure

    plots.png(boxes, path)
