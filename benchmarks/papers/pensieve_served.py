"""Pensieve's Figure 10 over HTTP: both tiers and the device's cache alone, at rising rates.

usage: python -m benchmarks.papers.pensieve_served [--rates 6 8 10 12 14] [--modes device tiers] [--phase 14]
                                                   [--shape opt-13b --context 16384] [--json FILE] [--small]
       python -m benchmarks.papers.pensieve_served --draw FILE ... --png PICTURE

For each mode `holdfast serve` runs a Llama-3-8B shape (or `--shape`) with random weights. Conversations with ShareGPT's
lengths (§6.1, Table 2) arrive by a Poisson process whose rate, in new conversations per second, rises by phases of
`--phase` seconds without a pause between them. A client sends a turn once it has the previous answer and has thought
for `--think` seconds on average, with all earlier tokens (`return_token_ids`). The last part of a phase counts
(`COUNTED`): the requests that end in it per second, and their time from sending to the answer divided by the tokens of
the answer. An answer comes whole: the paper's metric needs no first token, and clients would be late for 15,000 chunks
a second. `--small` runs a small model on a CPU with shorter turns. `--draw` plots the results of earlier runs in one
picture.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import httpx
import uvloop

from benchmarks.engine.served_pace import CLIENTS, SPAWN, checkpoint, served
from benchmarks.lib.invocation import provenance
from benchmarks.lib.multiturn_talks import MODES, draw, shortened, workload
from holdfast.lab.metrics import percentile
from holdfast.lab.reports.plots import Line, Panel, panels, png
from holdfast.lab.simulator.devices import look_up
from holdfast.lab.simulator.shapes import MODELS, ModelShape

COUNTED = 0.7
"""Share of a phase, at its end, that counts."""
SHORTER = 8.0
"""Divisor of the lengths of turns with `--small`."""
SMALL = ModelShape(
    name="small", layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=344, vocab=4096,
    max_model_len=2048,
)  # fmt: skip


class Answered(NamedTuple):
    """A request that was answered. Times are in seconds from the start of the run."""

    sent: float
    ended: float
    tokens: int
    """Number of tokens of the answer."""
    prompt: int
    cached: int
    """Number of tokens of the prompt whose state was found."""


class Setting(NamedTuple):
    """The settings of a process of clients."""

    url: str
    model: str
    vocabulary: int
    longest: int
    """Most tokens of a conversation."""
    start: float
    """Time of the run's start, of `time.time`."""
    until: float
    """Seconds from the start after which no turn is sent."""


def arriving(rates: Sequence[float], phase: float, think: float, seed: int) -> list[dict[str, Any]]:
    """The conversations of all phases, each phase with its own rate."""
    talks = []
    for number, rate in enumerate(rates):
        for talk in workload(rate, phase, think, seed + number):
            talks.append(talk | {"arrival_s": talk["arrival_s"] + number * phase})
    return talks


async def converse(
    http: httpx.AsyncClient, setting: Setting, number: int, talk: dict[str, Any], answered: list[Answered]
) -> str:
    """Play one conversation. Returns the failure that ended it; empty if none did."""
    choose, history = random.Random(number), list[int]()
    await asyncio.sleep(max(0.0, setting.start + talk["arrival_s"] - time.time()))
    for turn in talk["turns"]:
        await asyncio.sleep(turn["think_s"])
        sent = time.time() - setting.start
        prompt = [*history, *draw(choose, turn["input_tokens"], setting.vocabulary)]
        if sent > setting.until or len(prompt) + turn["output_tokens"] >= setting.longest:
            return ""
        body = {"model": setting.model, "prompt": prompt, "max_tokens": turn["output_tokens"], "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        try:
            response = await http.post("completions", json=body)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if response.status_code != httpx.codes.OK:
            return f"{response.status_code}: {response.text[:200]}"
        found = response.json()
        tokens, usage = found["choices"][0]["token_ids"], found["usage"]
        details = usage.get("prompt_tokens_details") or {}
        answered.append(
            Answered(
                sent, time.time() - setting.start, len(tokens), len(prompt), int(details.get("cached_tokens") or 0)
            )
        )
        history = [*prompt, *tokens]
    return ""


async def play(setting: Setting, numbered: Sequence[tuple[int, dict[str, Any]]]) -> tuple[list[Answered], list[str]]:
    """Play these conversations. Returns the answers and the failures."""
    answered = list[Answered]()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(
        base_url=f"{setting.url}/v1/", limits=limits, timeout=httpx.Timeout(30, read=None)
    ) as http:
        ended = await asyncio.gather(*(converse(http, setting, number, talk, answered) for number, talk in numbered))
    return answered, [failure for failure in ended if failure]


def play_part(setting: Setting, numbered: Sequence[tuple[int, dict[str, Any]]]) -> tuple[list[Answered], list[str]]:
    """Run `play` in its own process."""
    return uvloop.run(play(setting, numbered))


def figures(answered: Sequence[Answered], rate: float, start: float, stop: float) -> dict[str, Any]:
    """Figures of the requests that ended in [start, stop) of a phase with this rate. Latencies are in ms a token."""
    counted = [one for one in answered if start <= one.ended < stop]
    latencies = sorted(1e3 * (one.ended - one.sent) / one.tokens for one in counted)
    prompts = sum(one.prompt for one in counted)
    return {
        "rate": rate,
        "requests": len(counted),
        "req_s": len(counted) / (stop - start),
        "norm_latency_ms_mean": mean(latencies) if latencies else None,
        "norm_latency_ms_p90": percentile(latencies, 0.9) if latencies else None,
        "prompt_hit": sum(one.cached for one in counted) / prompts if prompts else None,
    }


def measure(args: argparse.Namespace, mode: str, model: str) -> list[dict[str, Any]]:
    """Serve in one mode, and return the figures of each phase."""
    fields = json.loads((Path(model) / "config.json").read_text())
    host = 0.0 if MODES[mode].get("host_cache_gb") == 0.0 else args.host_gb
    options = [model, "--load-format", "random", "--max-waiting", "10000", "--max-sequences", "512"]
    options += ["--cache-gb", f"{args.device_gb:g}", "--host-cache-gb", f"{host:g}"]
    talks = arriving([args.rates[0], *args.rates], args.phase, args.think, args.seed)
    if args.small:
        talks = shortened(talks, SHORTER)
    until = args.phase * (1 + len(args.rates))
    numbered = list(enumerate(talks))
    with served(Path(__file__).resolve().parents[2], options) as url, ProcessPoolExecutor(CLIENTS, SPAWN) as clients:
        setting = Setting(
            url, Path(model).name, fields["vocab_size"], fields["max_position_embeddings"], time.time() + 3.0, until
        )
        parts = [clients.submit(play_part, setting, numbered[part::CLIENTS]) for part in range(CLIENTS)]
        found = [part.result() for part in parts]
    answered = [one for answers, _ in found for one in answers]
    failures = [failure for _, failed in found for failure in failed]
    rows = []
    for number, rate in enumerate(args.rates, start=1):  # the phase before the first one only fills the cache
        stop = (number + 1) * args.phase
        row = {"mode": mode, **figures(answered, rate, stop - COUNTED * args.phase, stop), "failed": len(failures)}
        rows.append(row)
        print("HOLDFAST " + json.dumps(row), flush=True)
    if failures:
        print(f"{mode}: {len(failures)} conversations failed, the first with {failures[0]}", flush=True)
    return rows


NAMES = {"device": "the device's cache alone", "tiers": "device and host", "stateless": "no cache"}
"""Modes in words."""


def draw_served(rows: Sequence[dict[str, Any]], picture: Path) -> None:
    """Mean and p90 of the normalized latency over the requests per second, a curve for each mode."""

    def lines(name: str) -> list[Line]:
        found = []
        for mode in dict.fromkeys(row["mode"] for row in rows):
            points = sorted((row["rate"], row["req_s"], row[name]) for row in rows if row["mode"] == mode)
            _, x, y = zip(*points, strict=True)
            found.append(Line(NAMES[mode], x, y, accent=mode == "tiers"))
        return found

    shown = [
        Panel("Mean normalized latency", "ms a token, by requests a second", lines("norm_latency_ms_mean")),
        Panel("P90", "ms a token, by requests a second", lines("norm_latency_ms_p90")),
    ]
    png(partial(panels, shown, 2), picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[6.0, 8.0, 10.0, 12.0, 14.0])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["device", "tiers"])
    parser.add_argument("--phase", type=float, default=14.0, help="seconds of each rate")
    parser.add_argument("--think", type=float, default=2.0, help="mean think time in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device-gb", type=float, default=16.0)
    parser.add_argument("--host-gb", type=float, default=32.0)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument(
        "--context", type=int, help="most tokens of a conversation, 16384 in the paper; the shape's own"
    )
    parser.add_argument("--small", action="store_true", help="a small model and turns an eighth as long, for a CPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path, nargs="+", metavar="FILE", help="JSON of earlier runs to plot")
    parser.add_argument("--png", type=Path, help="picture of --draw")
    args = parser.parse_args()
    if args.draw:
        if args.png is None:
            parser.error("--draw takes --png, the picture to write")
        draw_served([row for file in args.draw for row in json.loads(file.read_text())["results"]], args.png)
        return
    shape = SMALL if args.small else look_up("model shape", MODELS, args.shape)
    model = checkpoint(replace(shape, max_model_len=args.context) if args.context else shape)
    if args.small:
        args.device_gb, args.host_gb = 0.002, 0.02
    about, rows = provenance(), list[dict[str, Any]]()
    for mode in args.modes:
        rows += measure(args, mode, model)
        if args.json:
            args.json.write_text(json.dumps(dict(about=about, results=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
