"""The pace that streams get over HTTP: targets, loads, and which steps took how long.

    python -m benchmarks.engine.served_pace azure_llm_2023_conv.csv --targets 25 15 --speeds 1 2 3 --seconds 40
    python -m benchmarks.engine.served_pace --at-once 128 512 --targets 25 --no-steps --serve max-sequences=512

For each target, `holdfast serve` runs a Llama-3-8B shape with random weights and both tiers. Clients send the trace's
requests with token-id prompts, SPEED times as fast. With `--at-once N`, they keep N requests of equal lengths open
instead, until each of N has been followed by `--rounds` - 1 others. `late_percent` of the times between two
tokens are above the target. All steps of a server are sorted by the prompts in them and by the
blocks that were copied during them; that takes a trace of the engine, which costs some of the pace (`--no-steps` does
without). `--project` names another version's tree to serve with: run both in turn. To find
the cause of a long gap, the last columns give the longest time between the ends of two steps, and the longest time by
which the client's own event loop was late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import uvloop
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.lib.invocation import provenance
from holdfast.lab.http_stream import StreamTransport
from holdfast.lab.load_client import LoadClient, ask_server
from holdfast.lab.metrics import Record, percentile, summary
from holdfast.lab.simulator.shapes import ModelShape
from holdfast.lab.workloads import PromptTokens, Workload, azure_csv, fixed

SPAWN = get_context("spawn")
SHARES = (0.5, 0.9, 0.99, 1.0)
CLIENTS = 8
"""Number of processes that send. A single one would be late if 150 streams get a token each in every step."""
COPIED = (0, 64, 256, 1 << 30)
"""Bounds of the classes of blocks copied during a step."""


def checkpoint(shape: ModelShape | str) -> str:
    """A directory with the shape's config.json and a tokenizer with as many words."""
    from benchmarks.lib.in_real_time import checkpoint_of  # imports torch, which the clients' processes do not need

    directory = checkpoint_of(shape)
    give_tokenizer(Path(directory))
    return directory


def give_tokenizer(directory: Path) -> None:
    """Add a tokenizer of as many words as the config.json says."""
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(told))


@contextmanager
def served(project: Path, options: Sequence[str]) -> Iterator[str]:
    """The address of a running server that is warm. The server has ended when the context ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])}
    place = tempfile.mkdtemp()  # several API processes share a store
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--port", "0", *options]
    command += ["--store", f"{place}/store.sqlite", "--files", f"{place}/files"]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=project) as server:
        assert server.stdout is not None
        try:
            url = next((line.split()[1] for line in server.stdout if line.strip().startswith("address")), "")
            if not url:
                raise RuntimeError("the server did not start")
            print(f"serves after {time.monotonic() - began:.1f} s", flush=True)
            while httpx.get(f"{url}/health/ready").status_code != httpx.codes.OK:
                time.sleep(0.05)
            print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
            yield url
        finally:
            server.terminate()
            server.stdout.read()


async def send(
    url: str, model: str, workload: Workload, vocabulary: int, name: str, concurrency: int | None
) -> tuple[list[Record], float]:
    """The records of one load, and the longest time in seconds by which the client's event loop was late.

    With `concurrency`, arrival times are ignored, and that number of requests is kept open.
    """
    timeout = httpx.Timeout(30, read=None)
    async with httpx.AsyncClient(base_url=f"{url}/v1/", transport=StreamTransport(), timeout=timeout) as http:
        client = LoadClient(partial(ask_server, http, model), PromptTokens(vocabulary, name), lambda ended: None)
        watching = asyncio.create_task(watch(late := [0.0]))
        records = await client.run(workload, concurrency)
        watching.cancel()
    return records, late[0]


async def watch(late: list[float]) -> None:
    """Record the longest time by which this event loop was late."""
    while True:
        wanted = time.monotonic() + 0.005
        await asyncio.sleep(0.005)
        late[0] = max(late[0], time.monotonic() - wanted)


def send_part(*arguments: Any) -> tuple[list[Record], float]:
    """Run `send` in its own process."""
    return uvloop.run(send(*arguments))


def load(
    clients: ProcessPoolExecutor,
    url: str,
    model: str,
    workload: Workload,
    vocabulary: int,
    name: str,
    *,
    target: float,
    at_once: int | None = None,
) -> str:
    """The figures of one load over all clients, as a line. `target` in ms; `at_once` is the number of open requests."""
    counted = times_between_tokens(httpx.get(f"{url}/metrics").text)
    shares = [None] * CLIENTS if at_once is None else [len(range(part, at_once, CLIENTS)) for part in range(CLIENTS)]
    parts = [
        clients.submit(send_part, url, model, workload[part::CLIENTS], vocabulary, f"{name}/{part}", share)
        for part, share in enumerate(shares)
        if share != 0
    ]
    found = [part.result() for part in parts]
    records = [record for seen, _ in found for record in seen]
    gaps = sorted(after - before for record in records for before, after in pairwise(record.token_times))
    seen = summary(records)
    kept = ("completed", "failed", "request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms")
    figures = {key: seen[key] for key in kept} | {f"tbt_{share:g}": 1e3 * percentile(gaps, share) for share in SHARES}
    figures["late_percent"] = 100 * sum(gap > target / 1e3 for gap in gaps) / len(gaps)
    figures["client_late"] = 1e3 * max(late for _, late in found)
    counts = times_between_tokens(httpx.get(f"{url}/metrics").text)
    seen_by_server = late_by(counted, counts, target / 1e3)
    return "  ".join([*(f"{key} {value:.2f}" for key, value in figures.items()), seen_by_server])


def times_between_tokens(metrics: str) -> dict[float, float]:
    """The number of times between two tokens up to each bound in seconds, from the text of a server's /metrics."""
    found = re.findall(r'^holdfast_tbt_seconds_bucket\{.*?le="([^"]+)".*?\} (\S+)', metrics, re.MULTILINE)
    return {float(bound): float(count) for bound, count in found}


def late_by(before: Mapping[float, float], after: Mapping[float, float], target: float) -> str:
    """The percentage of the times in between that are above the target in seconds and above the next two bounds."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    total = counts[inf]
    bounds = [bound for bound in counts if target <= bound < inf][:3]
    return "  ".join(f"server_above_{1e3 * bound:g} {100 * (1 - counts[bound] / total):.2f}" for bound in bounds)


def steps_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[float]]:
    """Milliseconds of the steps with streams, by the number of prompts in each and the class of blocks copied."""
    copied: dict[int, int] = defaultdict(int)
    for event in events:
        if event["name"] in ("swap-in", "swap-out"):
            copied[event["args"]["step"]] += event["args"]["blocks"]
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["name"].startswith("step ") and event["args"]["decodes"]:
            prompts = min(3, max(0, event["args"]["segments"] - event["args"]["decodes"]))
            blocks = copied[event["args"]["step"]]
            found[prompts, next(bound for bound in COPIED if blocks <= bound)].append(event["dur"] / 1e3)
    return found


def longest_between(events: list[dict[str, Any]]) -> str:
    """The longest times in milliseconds between the ends of two steps with a stream in common, and when they were."""
    ended: dict[str, float] = {}
    found: dict[float, float] = {}
    for event in events:
        if event["ph"] == "X" and event["name"] in ("decode", "prefill"):
            end = event["ts"] + event["dur"]
            if event["name"] == "decode" and event["args"]["sequence"] in ended:
                found[end] = end - ended[event["args"]["sequence"]]
            ended[event["args"]["sequence"]] = end
    begin = min(event["ts"] for event in events if event["ph"] == "X")
    longest = sorted(found, key=found.__getitem__, reverse=True)[:5]
    return ", ".join(f"{found[end] / 1e3:.2f} (at {(end - begin) / 1e6:.1f} s)" for end in longest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", help="an Azure LLM inference trace")
    parser.add_argument("--at-once", type=int, nargs="+", default=[], help="numbers of requests to keep open")
    parser.add_argument("--lengths", type=int, nargs=2, default=[512, 128], help="prompt and answer with --at-once")
    parser.add_argument("--rounds", type=int, default=3, help="requests for each open one")
    parser.add_argument("--no-steps", action="store_true", help="write no trace of the engine's steps")
    parser.add_argument("--targets", type=float, nargs="+", default=[25.0, 15.0])
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 2.0, 3.0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals, for each load")
    parser.add_argument(
        "--skip", type=float, default=25.0, help="seconds of the trace to leave out, as few arrive then"
    )
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--host-gb", type=float, default=32.0)
    parser.add_argument("--project", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--serve", nargs="*", default=[], help="more words for `holdfast serve`, as cache-gb=8")
    args = parser.parse_args()
    if args.trace is None and not args.at_once:
        parser.error("name a trace, or numbers of requests with --at-once")
    model = checkpoint(args.shape)
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    rows = azure_csv(args.trace) if args.trace is not None else []
    print(json.dumps(provenance()))
    for target in args.targets:
        trace = Path(tempfile.mkdtemp()) / "trace.json"
        options = [model, "--load-format", "random", "--tbt-target", f"{target:g}"]
        options += [] if args.no_steps else ["--trace", str(trace)]
        options += ["--host-cache-gb", f"{args.host_gb:g}", "--max-waiting", "10000"]
        options += [f"--{word}" for word in args.serve]
        with served(args.project.resolve(), options) as url, ProcessPoolExecutor(CLIENTS, SPAWN) as clients:
            send_load = partial(load, clients, url, Path(model).name, vocabulary=vocabulary, target=target)
            send_load(fixed(32, 64, 16), name="warm")
            for count in args.at_once:
                seen = send_load(fixed(count * args.rounds, *args.lengths), name=f"{count} at once", at_once=count)
                print(f"target {target:g} at once {count}  {seen}", flush=True)
            for speed in args.speeds if rows else ():
                stop = args.skip + args.seconds * speed
                chosen = [row for row in rows if args.skip <= row.arrival < stop]
                workload = [replace(row, arrival=(row.arrival - args.skip) / speed) for row in chosen]
                seen = send_load(workload, name=f"{speed:g}")
                print(f"target {target:g} speed {speed:g}  {seen}", flush=True)
        if args.no_steps:
            continue
        events = json.loads(trace.read_text())
        print(
            f"target {target:g}: longest between steps of a stream, ms: {longest_between(events)}; steps with streams"
        )
        print("prompts  blocks copied  steps  ms p50    p90    p99    max")
        for (prompts, bound), times in sorted(steps_of(events).items()):
            of = " ".join(f"{percentile(sorted(times), share):6.2f}" for share in SHARES)
            print(f"{prompts:7}  {bound if bound < 1 << 30 else 'more':>13}  {len(times):5}  {of}", flush=True)


if __name__ == "__main__":
    main()
