"""Holdfast and vLLM on one machine in one sitting: the same work, one process after the other, and the ratios.

usage: python -m benchmarks.peers.beside_vllm --peer vllm_peer.py --site DIR --out DIR
                                              [--parts offline stall multiturn qwen http]
                                              [--modes tiers device] [--rates 6 16 24 32]
                                              [--repeat 3] [--budget SECONDS]

`--peer` is a driver that runs the engine in its own process and prints `PEER {json}` lines, `--site` the directory that
holds its packages. Every job has its own process, log and time limit. Results are written to `OUT/beside.json` at once;
a later call with the same `--out` continues. No job starts that may exceed the budget. `beside.md` and `beside.png`
show what is there at the end.

If the GPU counts its energy, rows of the offline parts have joules a token of both engines, read by this process while
the others run.

The part `http` is one server after the other, on one device and with the same clients (`http_streams`).

The part `qwen` is a batch of 256 on Qwen3-0.6B's shape, where the host has the least time for a step. The peer's driver
knows one shape and its own rows: it runs as a copy, next to the results, with these replaced.

All copies, and the peer's server, draw the peer's weights as Holdfast's are drawn (`benchmarks.lib.drawn_weights`).
`--dummy-weights` leaves those of the copies as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.engine.llama8b import QWEN3_06B
from benchmarks.lib.drawn_weights import STD, redraw
from benchmarks.lib.energy import EnergyLog, energy_counter, energy_log, joules_per_token
from benchmarks.lib.multiturn_talks import workload

ROOT = Path(__file__).resolve().parents[2]
LLAMA_8B = ("-m", "benchmarks.engine.llama8b")
MULTITURN = ("-m", "benchmarks.engine.multiturn")
HTTP = ("-m", "benchmarks.peers.http_streams")
OFFLINE = {
    "bs1": "bs1 512/256",
    "bs32": "bs32 512/128",
    "bs128": "bs128 512/128",
    "chat": "chat 1000",
    "prefill": "prefill 16x8192",
}
"""For each of our rows, the peer's name for it."""
REDRAW = f"from typing import Any\nSTD = {STD}\n{inspect.getsource(redraw)}\n"
"""Function that the peer's driver applies to its model."""
FIGURES = ("PEER {", "HOLDFAST {")
"""First characters of a line of figures."""
NO_PREFIX_CACHE = ("--extra", json.dumps(dict(enable_prefix_caching=False)))
"""Words for the peer's driver. All its rows draw from one seed, so a prefix cache would find prompts of earlier rows.
Holdfast has none in these parts either.
"""
HTTP_FIGURES = ("req_s", "output_tok_s", "ttft_ms_p50", "ttft_ms_p99", "gap_ms_p50", "gap_ms_p99", "gap_ms_max")
QWEN = {"bs256": "bs256 128/128"}
QWEN_RUNS = 3
CURVE = (
    "req_s",
    "norm_latency_ms_mean",
    "norm_latency_ms_p90",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tbt_ms_p50",
    "tbt_ms_p99",
)


@dataclass(frozen=True)
class Job:
    """One process: name, command, time limit."""

    name: str
    engine: str
    command: list[str]
    limit: float
    about: dict[str, Any] = field(default_factory=dict)
    inside: bool = False
    """Whether the process is the peer's own, which imports the peer's packages."""


def peer_options(mode: str, device_gb: float, host_gb: float) -> dict[str, Any]:
    """Engine arguments of the peer for one mode; its host tier is in GiB."""
    options: dict[str, Any] = dict(kv_cache_memory_bytes=int(device_gb * 1e9))
    if mode == "stateless":
        options["enable_prefix_caching"] = False
    if mode == "tiers":
        options["kv_offloading_size"] = round(host_gb * 1e9 / 2**30, 3)
    return options


def jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """All jobs, part by part, the engines in turn."""
    limit, python = arguments.limit, sys.executable
    ours = [item for pair in arguments.set for item in ("--set", pair)]
    small = arguments.small
    shape = ["--shape", json.dumps(small_shape())] if small else []

    driver = arguments.peer if arguments.dummy_weights else with_weights(arguments.peer, arguments.out)

    def peer(name: str, what: str, about: dict[str, Any], *more: str) -> Job:
        return Job(f"vllm {name}", "vllm", [python, str(driver), what, *more], limit, about, inside=True)

    for part in arguments.parts:
        if part == "offline":
            rows = arguments.rows
            command = [python, *LLAMA_8B, *rows, "--repeat", str(arguments.repeat), *shape, *ours]
            yield Job("holdfast offline", "holdfast", command, limit, dict(part=part))
            for run in range(arguments.repeat):
                yield peer(f"offline {run + 1}", "offline", dict(part=part), *NO_PREFIX_CACHE)
        if part == "stall":
            budget = ["--set", "token_budget=1024"]
            command = [python, *LLAMA_8B, "stall", "--repeat", str(arguments.repeat), *shape]
            yield Job("holdfast stall", "holdfast", [*command, *(ours or budget)], limit, dict(part=part))
            yield peer("stall", "stall", dict(part=part), *NO_PREFIX_CACHE)
        if part == "qwen":
            command = [python, *LLAMA_8B, *QWEN, "--qwen", "--repeat", str(QWEN_RUNS), *shape, *ours]
            yield Job("holdfast qwen", "holdfast", command, limit, dict(part=part))
            copy = with_qwen(driver, arguments.out)
            command = [python, str(copy), "offline", *NO_PREFIX_CACHE]
            yield Job("vllm qwen", "vllm", command, limit, dict(part=part), inside=True)
        if part == "http":
            load = ["--streams", *map(str, arguments.streams), "--requests", *map(str, arguments.requests)]
            load += ["--small", "--lengths", "64", "16"] if small else []
            more = ["--more", *(pair.replace("_", "-") for pair in arguments.set)] if arguments.set else []
            yield Job("holdfast http", "holdfast", [python, *HTTP, "holdfast", *load, *more], limit, dict(part=part))
            site = ["--site", str(arguments.site)] if arguments.site else []
            yield Job("vllm http", "vllm", [python, *HTTP, "vllm", *load, *site], limit, dict(part=part))
        if part == "multiturn":
            for rate in arguments.rates:
                path = arguments.out / f"conversations-{rate:g}.jsonl"
                if not path.exists():
                    lines = workload(rate, arguments.until + 20, arguments.think, 0)
                    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
                for mode in arguments.modes:
                    about = dict(part=part, rate=rate, mode=mode)
                    window = ["--workload", str(path), "--until", str(arguments.until), "--warm", str(arguments.warm)]
                    sizes = ["--device-gb", str(arguments.device_gb), "--host-gb", str(arguments.host_gb)]
                    command = [python, *MULTITURN, "--modes", mode, *window, *sizes, *ours]
                    command += ["--small", "--shorter", "4"] if small else []
                    yield Job(f"holdfast {mode} at {rate:g}", "holdfast", command, limit, about)
                    extra = json.dumps(peer_options(mode, arguments.device_gb, arguments.host_gb))
                    yield peer(f"{mode} at {rate:g}", "multiturn", about, *window, "--extra", extra)


def with_weights(peer: Path, out: Path) -> Path:
    """A copy of the peer's driver that draws the weights again once its engine is there: normal, and norms of 1.

    Raises ValueError if the driver has no place for it.
    """
    text, functions, started = peer.read_text(), "\ndef say(", '    say(name=a.name, what="start"'
    if text.count(functions) != 1 or text.count(started) != 1:
        raise ValueError(f"{peer} is not the driver that is known: no place after the start of its engine")
    text = text.replace(functions, f"\n{REDRAW}{functions}")
    copy = out / "peer_weights.py"
    copy.write_text(text.replace(started, f"    llm.apply_model(redraw)\n{started}"))
    return copy


def with_qwen(peer: Path, out: Path) -> Path:
    """A copy of the peer's driver with Qwen3-0.6B's shape and the rows of that part. Raises ValueError if it has none.

    A new line replaces its dict LLAMA_8B; its rows are those of the offline block.
    """
    text = peer.read_text()
    shape, rows = "\ndef say(", 'if a.what == "offline":\n'
    if "LLAMA_8B = dict(" not in text or text.count(shape) != 1 or text.count(rows) != 1:
        raise ValueError(f"{peer} is not the driver that is known: no place for another shape or other rows")
    calls = "; ".join(f'offline([(128, 128)] * 256, "{label}")' for label in list(QWEN.values()) * QWEN_RUNS)
    text = text.replace(shape, f"\nLLAMA_8B.clear(); LLAMA_8B.update({QWEN3_06B!r})\n{shape}")
    text = text.replace(rows, f'if a.what == "offline":\n        {calls}\n        return\n')
    copy = out / "peer_qwen.py"
    copy.write_text(text.replace('"llama8b")', '"qwen06b")'))
    return copy


def small_shape() -> dict[str, Any]:
    """A shape for a CPU."""
    from benchmarks.engine.multiturn import SMALL

    return SMALL | dict(vocab_size=100_001, num_hidden_layers=1, hidden_size=64, intermediate_size=128)


def run(job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one job to its end or limit. Returns the printed lines, and how it ended."""
    log = arguments.out / (job.name.replace(" ", "-") + ".log")
    paths = [str(arguments.site)] if job.inside and arguments.site else []
    if not job.inside:
        paths += [str(ROOT), *(path for path in os.environ.get("PYTHONPATH", "").split(":") if path)]
    environment = os.environ | dict(PYTHONUNBUFFERED="1", PYTHONPATH=":".join(paths))
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # its engine runs a function of the driver
    began, lines = time.monotonic(), list[tuple[float, str]]()

    def read() -> None:
        with log.open("w", buffering=1) as copy:
            for line in process.stdout or ():
                lines.append((time.monotonic(), line.rstrip("\n")))
                copy.write(line)
                if line.startswith(FIGURES):
                    print(line, end="", flush=True)  # what is measured is seen, whatever ends this process

    with (
        energy_log(energy_counter()) as energy,
        subprocess.Popen(
            job.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        reader = threading.Thread(target=read)
        reader.start()
        try:
            ended: int | str = process.wait(timeout=job.limit)
        except subprocess.TimeoutExpired:
            ended = f"stopped after {job.limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # a server that it has left would hold the device's memory
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join()
    rows = [
        with_energy(json.loads(line.split(" ", 1)[1]), at, energy) for at, line in lines if line.startswith(FIGURES)
    ]
    return dict(
        name=job.name,
        engine=job.engine,
        **job.about,
        command=" ".join(job.command),
        ended=ended,
        seconds=round(time.monotonic() - began, 1),
        rows=rows,
        last_lines=[line for _, line in lines[-8:]] if ended != 0 else [],
    )


def with_energy(row: dict[str, Any], at: float, energy: EnergyLog) -> dict[str, Any]:
    """A row of throughput that was printed at a time, with the joules that its tokens took. Others stay as they are."""
    if not {"seconds", "output_tok_s", "total_tok_s"} <= row.keys():
        return row
    seconds = row["seconds"]
    used = energy.used(at - seconds, at)
    return row | joules_per_token(used, seconds * row["output_tok_s"], seconds * row["total_tok_s"])


def offline_table(done: list[dict[str, Any]], part: str, rows: dict[str, str]) -> list[dict[str, Any]]:
    """The median of each of a part's rows, by our name and the peer's, of both engines, and the ratio.

    Joules a token follow where both were measured: a token of the answers, or of the prompts in a row of prompts.
    """
    table = []
    for ours, theirs in rows.items():
        figures = ("total_tok_s", "joules_token") if ours == "prefill" else ("output_tok_s", "joules_output_token")
        for key in figures:
            values = {
                engine: [
                    row[key]
                    for job in done
                    if job["engine"] == engine and job["part"] == part
                    for row in job["rows"]
                    if row.get("what") == name and key in row
                ]
                for engine, name in (("holdfast", ours), ("vllm", theirs))
            }
            if any(values.values()):
                what, rate = ours if part == "offline" else f"{part} {ours}", key.endswith("tok_s")
                table.append(compared(what if rate else f"{what}, energy", key, values, higher=rate))
    return table


def stall_table(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Decode and worst step of both engines."""
    return [
        compared(
            f"stall, {key.removesuffix('_ms')} step",
            key,
            {
                engine: [
                    row[key]
                    for job in done
                    if job["engine"] == engine and job["part"] == "stall"
                    for row in job["rows"]
                    if key in row
                ]
                for engine in ("holdfast", "vllm")
            },
            higher=False,
        )
        for key in ("decode_ms", "worst_ms")
    ]


def http_table(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of both servers for each number of streams."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for job in done:
        for row in job["rows"]:
            if job["part"] == "http" and "req_s" in row:
                found.setdefault(row["what"], {"holdfast": [], "vllm": []})[job["engine"]].append(row)
    return [
        compared(
            what,
            key,
            {engine: [row[key] for row in rows if row[key] is not None] for engine, rows in engines.items()},
            higher="_ms_" not in key,
        )
        for what, engines in found.items()
        for key in HTTP_FIGURES
    ]


def compared(what: str, key: str, values: dict[str, list[float]], *, higher: bool) -> dict[str, Any]:
    """Medians and the ratio, which is above 1 if Holdfast is ahead."""
    medians = {engine: statistics.median(found) if found else None for engine, found in values.items()}
    ours, theirs = medians["holdfast"], medians["vllm"]
    ratio = None
    if ours and theirs:
        ratio = round(ours / theirs if higher else theirs / ours, 3)
    return dict(what=what, figure=key, **medians, ratio=ratio, runs={e: len(v) for e, v in values.items()})


def curves(done: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """For each engine and mode, the multi-turn rows by ascending rate."""
    found: dict[str, list[dict[str, Any]]] = {}
    for job in done:
        for row in job["rows"]:
            if job["part"] == "multiturn" and row.get("what") == "multiturn":
                found.setdefault(f"{job['engine']} {job['mode']}", []).append(row | dict(rate=job["rate"]))
    return {name: sorted(rows, key=lambda row: row["rate"]) for name, rows in found.items()}


def throughput_at(rows: list[dict[str, Any]], latency: float) -> float | None:
    """Requests per second at which the curve's p90 normalized latency first reaches `latency`, between its points.

    None if the curve begins above it; the curve's best rate if it never reaches it.
    """
    best = 0.0
    for before, row in zip([None, *rows], rows, strict=False):
        if row["norm_latency_ms_p90"] is None:
            continue
        if row["norm_latency_ms_p90"] > latency:
            if before is None:
                return None
            span = row["norm_latency_ms_p90"] - before["norm_latency_ms_p90"]
            share = (latency - before["norm_latency_ms_p90"]) / span if span > 0 else 0.0
            return max(best, round(before["req_s"] + share * (row["req_s"] - before["req_s"]), 2))
        best = max(best, row["req_s"])
    return best


def equal_latency(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """At each point of the peer's curve, Holdfast's throughput in the same mode at that p90 latency, and the ratio."""
    rows = []
    for name, theirs in found.items():
        engine, mode = name.split(" ", 1)
        ours = found.get(f"holdfast {mode}")
        if engine != "vllm" or not ours:
            continue
        for point in theirs:
            latency = point["norm_latency_ms_p90"]
            served = throughput_at(ours, latency) if latency is not None else None
            ratio = round(served / point["req_s"], 3) if served and point["req_s"] else None
            rows.append(
                dict(mode=mode, rate=point["rate"], p90_ms=latency, vllm=point["req_s"], holdfast=served, ratio=ratio)
            )
    return rows


def report(done: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Write the merged JSON, the table and the plot."""
    asked = {ours: theirs for ours, theirs in OFFLINE.items() if ours in arguments.rows}
    table = offline_table(done, "offline", asked) + offline_table(done, "qwen", QWEN)
    table += [row for row in stall_table(done) if any(row["runs"].values())] + http_table(done)
    found = curves(done)
    equal = equal_latency(found)
    merged = dict(table=table, curves=found, at_equal_latency=equal, jobs=done)
    (arguments.out / "beside.json").write_text(json.dumps(merged, indent=1))
    lines = ["| work | figure | Holdfast | vLLM | ratio |", "|---|---|---|---|---|"]
    lines += [f"| {r['what']} | {r['figure']} | {r['holdfast']} | {r['vllm']} | {r['ratio']} |" for r in table]
    lines += [
        "",
        "| engine, what is kept | rate | " + " | ".join(CURVE) + " | prompt_hit |",
        "|---" * (len(CURVE) + 3) + "|",
    ]
    for name, rows in found.items():
        for row in rows:
            shown = " | ".join(str(row[key]) for key in (*CURVE, "prompt_hit"))
            lines.append(f"| {name} | {row['rate']:g} | {shown} |")
    lines += [
        "",
        "| mode | vLLM's rate | its p90, ms | its req/s | Holdfast's req/s at that p90 | ratio |",
        "|---" * 6 + "|",
    ]
    lines += [
        f"| {r['mode']} | {r['rate']:g} | {r['p90_ms']} | {r['vllm']} | {r['holdfast']} | {r['ratio']} |" for r in equal
    ]
    failed = [job for job in done if job["ended"] != 0]
    lines += ["", *(f"Not complete: {job['name']} ({job['ended']}): {job['last_lines'][-1:]}" for job in failed)]
    (arguments.out / "beside.md").write_text("\n".join(lines) + "\n")
    plot(table, found, arguments.out / "beside.png")


def plot(table: list[dict[str, Any]], found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The ratios as bars, with the multi-turn curves. Does nothing if Matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, lines) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    shown = [row for row in table if row["ratio"]]
    ratios = [row["ratio"] for row in shown]
    drawn = bars.barh([row["what"] for row in shown], [ratio - 1 for ratio in ratios], left=1.0, color="#3b6ea5")
    bars.bar_label(drawn, [f"{ratio:.2f}" for ratio in ratios], padding=4)
    bars.axvline(1.0, color="black", linewidth=0.8)
    bars.set_xscale("log")
    bars.set_xlim(0.6, 1.6 * max(ratios, default=1.0))
    bars.set_xticks([], minor=True)
    bars.set_xticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    bars.spines[["top", "right"]].set_visible(False)
    bars.invert_yaxis()
    bars.set_xlabel("vLLM = 1; to the right Holdfast is ahead")
    for name, rows in sorted(found.items()):
        rows = [row for row in rows if row["norm_latency_ms_p90"] is not None]
        style = dict(color="#3b6ea5" if name.startswith("holdfast") else "#c26a2d", marker="o")
        dashes = {"tiers": "-", "device": "--"}.get(name.split()[-1], ":")
        x, y = [row["req_s"] for row in rows], [row["norm_latency_ms_p90"] for row in rows]
        lines.plot(x, y, dashes, label=name, **style)
    lines.set_xlabel("requests a second")
    lines.set_ylabel("normalized latency, p90, ms a token")
    lines.set_ylim(bottom=0)
    if found:
        lines.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="the peer's driver")
    parser.add_argument("--site", type=Path, help="where the peer's packages lie")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["offline", "stall", "multiturn"])
    parser.add_argument("--engines", nargs="+", default=["holdfast", "vllm"])
    parser.add_argument("--rows", nargs="+", default=list(OFFLINE), choices=list(OFFLINE), help="of the offline part")
    parser.add_argument("--modes", nargs="+", default=["tiers", "device"], choices=["tiers", "device", "stateless"])
    parser.add_argument("--rates", nargs="+", type=float, default=[6, 16, 24, 32], help="new conversations a second")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 128, 512], help="requests kept open, of http")
    parser.add_argument("--requests", nargs="+", type=int, default=[10, 512, 1024], help="all requests, of http")
    parser.add_argument("--think", type=float, default=5.0)
    parser.add_argument("--until", type=float, default=70.0)
    parser.add_argument("--warm", type=float, default=10.0)
    parser.add_argument("--device-gb", type=float, default=16.0)
    parser.add_argument("--host-gb", type=float, default=32.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limit", type=float, default=240.0, help="longest time of one job, s")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all jobs of this call")
    parser.add_argument("--need", type=float, default=60.0, help="a job is begun while so many seconds are left")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an engine option of Holdfast's"
    )
    parser.add_argument("--dummy-weights", action="store_true", help="leave the peer's weights as it draws them")
    parser.add_argument("--small", action="store_true", help="a small model, to try this on a CPU")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    kept = arguments.out / "beside.json"
    done: list[dict[str, Any]] = json.loads(kept.read_text())["jobs"] if kept.exists() else []
    done = [job for job in done if job["ended"] == 0]
    began = time.monotonic()
    for job in jobs(arguments):
        left = arguments.budget - (time.monotonic() - began)
        if job.engine not in arguments.engines or job.name in {other["name"] for other in done}:
            continue
        if left < arguments.need:
            print(f"BESIDE left for later: {job.name}", flush=True)
            continue
        job = replace(job, limit=min(job.limit, left))
        done.append(run(job, arguments))
        print("BESIDE " + json.dumps({key: done[-1][key] for key in ("name", "ended", "seconds")}), flush=True)
        for line in done[-1]["last_lines"]:
            print("   ", line[:300])
        report(done, arguments)
    if done:
        report(done, arguments)
        print((arguments.out / "beside.md").read_text())


if __name__ == "__main__":
    main()
