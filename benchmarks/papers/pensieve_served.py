"""Pensieve's Figure 10 over HTTP: both tiers, the device's cache alone, or no cache, at rising rates.

usage: python -m benchmarks.papers.pensieve_served [--rates 6 8 10 12 14] [--modes device tiers] [--phase 14]
                                                   [--budget SECONDS] [--shape opt-13b --context 16384]
                                                   [--json FILE] [--small] [--simulate h200]
       python -m benchmarks.papers.pensieve_served --show FILE ... [--png PICTURE]

For each mode `holdfast serve` runs a Llama-3-8B shape (or `--shape`) with random weights. Conversations with ShareGPT's
lengths (§6.1, Table 2) arrive by a Poisson process whose rate, in new conversations per second, rises by phases of
`--phase` seconds without a pause between them. A client sends a turn once it has the previous answer and has thought
for `--think` seconds on average, with all earlier tokens (`return_token_ids`). The last part of a phase counts
(`COUNTED`): the requests that end in it per second, and their time from sending to the answer divided by the tokens of
the answer. An answer comes whole: the paper's metric needs no first token, and clients would be late for 15,000 chunks
a second. The run begins once all clients are ready, and ends with the last phase: open requests are given up. Figures
are printed and written at the end of each phase.

With `--budget`, phases are as long as the whole run allows, once the first server has started. `--small` runs a small
model on a CPU with shorter turns. `--simulate` runs no model: Holdfast's scheduler serves the same conversations on
that device's derived costs, with which rates can be chosen. `--show` compares the modes of each file, and draws them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import httpx
import uvloop

from benchmarks.engine.served_pace import CLIENTS, SPAWN, checkpoint, served
from benchmarks.lib import papers
from benchmarks.lib.invocation import provenance
from benchmarks.lib.multiturn_talks import MODES, draw, shortened, workload
from holdfast.lab import workloads
from holdfast.lab.metrics import percentile
from holdfast.lab.reports.plots import Line, Panel, panels, png
from holdfast.lab.simulator.devices import look_up
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lm.config import EngineConfig

COUNTED = 0.7
"""Share of a phase, at its end, that counts."""
LEAST_PHASE = 3.0
"""Fewest seconds of a phase with `--budget`."""
BEGINS_IN, ARRIVES_IN = 0.5, 0.2
"""Seconds from the last client's word to a run's start, and from a phase's end until its answers are here."""
STOP_SECONDS = 5.0
"""Seconds in which clients, and a server without requests, end."""
OPEN_SECONDS = 30.0
"""Seconds that a simulation goes on, so that no request which is open at the end of the last phase seems ended."""
SHORTER = 8.0
"""Divisor of the lengths of turns with `--small`."""
SMALL: dict[str, Any] = dict(
    layers=2, hidden=128, heads=4, head_dim=32, intermediate=344, vocab=4096, max_model_len=2048
)
"""Sizes of a shape with `--small`. Its family stays, and whether query heads share keys."""


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


Numbered = Sequence[tuple[int, dict[str, Any]]]
"""Conversations, each with its number."""


def arriving(rates: Sequence[float], phase: float, think: float, seed: int) -> list[dict[str, Any]]:
    """The conversations of all phases, each phase with its own rate."""
    talks = []
    for number, rate in enumerate(rates):
        for talk in workload(rate, phase, think, seed + number):
            talks.append(talk | {"arrival_s": talk["arrival_s"] + number * phase})
    return talks


async def converse(
    http: httpx.AsyncClient,
    setting: Setting,
    number: int,
    talk: dict[str, Any],
    send: Callable[[Answered | str], None],
) -> None:
    """Play one conversation. `send` gets each answer, and the failure that ends it."""
    choose, history = random.Random(number), list[int]()
    await asyncio.sleep(max(0.0, setting.start + talk["arrival_s"] - time.time()))
    for turn in talk["turns"]:
        await asyncio.sleep(turn["think_s"])
        sent = time.time() - setting.start
        prompt = [*history, *draw(choose, turn["input_tokens"], setting.vocabulary)]
        if sent > setting.until or len(prompt) + turn["output_tokens"] >= setting.longest:
            return
        body = {"model": setting.model, "prompt": prompt, "max_tokens": turn["output_tokens"], "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        try:
            response = await http.post("completions", json=body)
        except httpx.HTTPError as error:
            return send(f"{type(error).__name__}: {error}")
        if response.status_code != httpx.codes.OK:
            return send(f"{response.status_code}: {response.text[:200]}")
        found = response.json()
        tokens, usage = found["choices"][0]["token_ids"], found["usage"]
        details = usage.get("prompt_tokens_details") or {}
        ended, cached = time.time() - setting.start, int(details.get("cached_tokens") or 0)
        send(Answered(sent, ended, len(tokens), len(prompt), cached))
        history = [*prompt, *tokens]


async def play(setting: Setting, numbered: Numbered, send: Callable[[Answered | str], None]) -> None:
    """Play these conversations until the run's end. `send` gets each answer, and each failure."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(
        base_url=f"{setting.url}/v1/", limits=limits, timeout=httpx.Timeout(30, read=None)
    ) as http:
        talks = [asyncio.create_task(converse(http, setting, number, talk, send)) for number, talk in numbered]
        await asyncio.sleep(setting.start + setting.until - time.time())
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)


def play_part(parent: Connection) -> None:
    """Run `play` in its own process: say that it is ready, receive its part, send what happens, then None."""
    parent.send(None)
    setting, numbered = parent.recv()
    uvloop.run(play(setting, numbered, parent.send))
    parent.send(None)


@contextmanager
def clients() -> Iterator[list[Connection]]:
    """Connections to processes of clients. Each sends None as soon as it is ready. They end when the context ends."""
    pipes = [SPAWN.Pipe() for _ in range(CLIENTS)]
    processes = [SPAWN.Process(target=play_part, args=(theirs,), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()  # so that the end of a process is the end of its connection
    try:
        yield [ours for ours, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for ours, _ in pipes:
            ours.close()


def receive(playing: list[Connection], until: float, answered: list[Answered], failures: list[str]) -> None:
    """Add what clients send until this time of `time.time`. One that has ended is taken from `playing`."""
    while playing and (left := until - time.time()) > 0:
        for connection in wait(playing, left):
            assert isinstance(connection, Connection)
            try:
                said = connection.recv()
            except EOFError:
                said = None
                failures.append("a process of clients ended before the run")
            if said is None:
                playing.remove(connection)
            elif isinstance(said, str):
                failures.append(said)
            else:
                answered.append(said)


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


def talks_of(args: argparse.Namespace, phase: float) -> list[dict[str, Any]]:
    """All conversations of a run. The phase before the first one only fills the cache."""
    talks = arriving([args.rates[0], *args.rates], phase, args.think, args.seed)
    return shortened(talks, SHORTER) if args.small else talks


def phase_of(args: argparse.Namespace, started: float) -> float:
    """Seconds of a phase: `--phase`, or what the budget leaves if each server starts in `started` seconds.

    Exits if that is too short.
    """
    if args.budget is None:
        return float(args.phase)
    modes = len(args.modes)
    left = args.budget - modes * (started + STOP_SECONDS)
    phase = float(left / modes / (1 + len(args.rates)))
    if phase < LEAST_PHASE:
        raise SystemExit(
            f"--budget {args.budget:g} leaves {phase:.1f} s for each rate; it takes {LEAST_PHASE:g} or more"
        )
    return phase


def serve(args: argparse.Namespace, mode: str, model: str, phase: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Serve in one mode, and yield the figures of each phase as soon as it has ended.

    `phase` gives the seconds of a phase once a server has started.
    """
    fields = json.loads((Path(model) / "config.json").read_text())
    host = 0.0 if MODES[mode].get("host_cache_gb") == 0.0 else args.host_gb
    options = [model, "--load-format", "random", "--max-waiting", "10000", "--max-sequences", "512"]
    options += ["--cache-gb", f"{args.device_gb:g}", "--host-cache-gb", f"{host:g}", "--drain-seconds", "1"]
    options += [] if MODES[mode]["prefix_sharing"] else ["--no-prefix-sharing"]
    with clients() as playing, served(Path(__file__).resolve().parents[2], options) as url:
        for connection in playing:
            connection.recv()  # a run that begins without its clients has no requests in its first phases
        length = phase()
        talks, until = list(enumerate(talks_of(args, length))), length * (1 + len(args.rates))
        limits = fields["vocab_size"], fields["max_position_embeddings"]
        setting = Setting(url, Path(model).name, *limits, time.time() + BEGINS_IN, until)
        for part, connection in enumerate(playing):
            connection.send((setting, talks[part::CLIENTS]))
        answered, failures, left = list[Answered](), list[str](), list(playing)
        for number, rate in enumerate(args.rates, start=1):
            stop = (number + 1) * length
            receive(left, setting.start + stop + ARRIVES_IN, answered, failures)
            found = figures(answered, rate, stop - COUNTED * length, stop)
            yield {"mode": mode, **found, "phase": round(length, 2), "failed": len(failures)}
        receive(left, time.time() + STOP_SECONDS, answered, failures)  # the clients close their requests
    if failures:
        print(f"{mode}: {len(failures)} conversations failed, the first with {failures[0]}", flush=True)


def simulated(args: argparse.Namespace, mode: str) -> Iterator[dict[str, Any]]:
    """The figures of each phase as the scheduler's simulation expects them on `--simulate`."""
    profile = papers.deployed(args.shape, device=args.simulate, tp=1, fused=True).profile
    profile = replace(profile, cache_tokens=int(args.device_gb * 1e9 / profile.token_bytes))
    longest = args.context or MODELS[args.shape].max_model_len
    sizes: dict[str, Any] = dict(max_model_len=longest, max_sequences=512, max_waiting=10_000)
    config = EngineConfig(**sizes, **({"host_cache_gb": args.host_gb} | MODES[mode]))
    talks = [
        workloads.Conversation(
            talk["arrival_s"],
            tuple(
                workloads.Turn(turn["input_tokens"], turn["output_tokens"], turn["think_s"]) for turn in talk["turns"]
            ),
        )
        for talk in talks_of(args, args.phase)
    ]
    until = args.phase * (1 + len(args.rates)) + OPEN_SECONDS
    outcome = simulate(config, profile, workloads.fit_context(talks, longest, "cut"), until=until)
    answered = [
        Answered(record.arrival, record.token_times[-1], record.generated, record.prompt_tokens, record.cached_tokens)
        for record in outcome.records
        if record.token_times
    ]
    for number, rate in enumerate(args.rates, start=1):
        stop = (number + 1) * args.phase
        found = figures(answered, rate, stop - COUNTED * args.phase, stop)
        yield {"mode": mode, **found, "phase": args.phase, "simulated": args.simulate}


NAMES = {"device": "the device's cache alone", "tiers": "device and host", "stateless": "no cache"}
"""Modes in words."""


def at_latency(rows: Sequence[dict[str, Any]], mode: str, latency: float) -> float | None:
    """Requests per second of a mode where its mean latency first passes `latency` in ms a token, between two phases.

    None if no phase is below it, or none above.
    """
    key = "norm_latency_ms_mean"
    points = [(row[key], row["req_s"]) for row in rows if row["mode"] == mode and row[key] is not None]
    for (below, least), (above, most) in pairwise(points):
        if below <= latency < above:
            return float(least + (most - least) * (latency - below) / (above - below))
    return None


def compared(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of the phases, and the requests of the first mode over those of each other one: at equal latencies, and
    at most.
    """
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    lines = [
        "| mode | new conversations/s | requests/s | ms a token, mean | p90 | from the cache | counted | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = (row["req_s"], row["norm_latency_ms_mean"], row["norm_latency_ms_p90"], row["prompt_hit"])
        cells = ["-" if value is None else f"{value:.3g}" for value in shown]
        last = (row["requests"], row.get("failed", "-"))
        lines.append(f"| {NAMES[row['mode']]} | {row['rate']:g} | {' | '.join(map(str, (*cells, *last)))} |")
    for other in modes[1:]:
        best = [max(row["req_s"] for row in rows if row["mode"] == mode) for mode in (modes[0], other)]
        gains = [f"{best[0] / best[1]:.2f} at most" if best[1] else "- at most"]
        for row in rows:
            latency = row["norm_latency_ms_mean"]
            if row["mode"] == other and latency is not None:
                served = at_latency(rows, modes[0], latency)
                if served is not None:
                    gains.append(f"{served / row['req_s']:.2f} at {latency:.1f} ms a token")
        lines += ["", f"{NAMES[modes[0]]}, over {NAMES[other]}: {', '.join(gains)}"]
    return lines


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
    parser.add_argument("--budget", type=float, help="seconds of the whole run; phases are as long as it allows")
    parser.add_argument("--simulate", metavar="DEVICE", help="simulate it on a device's derived costs, as h200")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="JSON of earlier runs to compare")
    parser.add_argument("--png", type=Path, help="picture of --show")
    args = parser.parse_args()
    if args.show:
        rows = [row for file in args.show for row in json.loads(file.read_text())["results"]]
        print("\n".join(compared(rows)))
        if args.png:
            draw_served(rows, args.png)
        return
    if args.small and args.simulate:
        parser.error("--simulate is for --shape, not for --small")
    shape = look_up("model shape", MODELS, args.shape)
    if args.small:
        shape = replace(shape, **SMALL, kv_heads=4 if shape.kv_heads == shape.heads else 2)
        args.device_gb, args.host_gb = 0.002, 0.02
    began, about, rows = time.monotonic(), provenance(), list[dict[str, Any]]()
    phase = cache(lambda: phase_of(args, time.monotonic() - began))  # asked when the first server has started
    model = "" if args.simulate else checkpoint(replace(shape, max_model_len=args.context) if args.context else shape)
    for mode in args.modes:
        for row in simulated(args, mode) if args.simulate else serve(args, mode, model, phase):
            rows.append(row)
            print("HOLDFAST " + json.dumps(row), flush=True)
            if args.json:
                args.json.write_text(json.dumps(dict(about=about, results=rows), indent=1) + "\n")
    print("\n".join(compared(rows)))


if __name__ == "__main__":
    main()
