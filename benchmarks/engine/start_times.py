"""Times of `holdfast serve` by stage, from its command to /health and to the first token: fresh, and with warm caches.

usage: python -m benchmarks.engine.start_times [--repeat 3] [--small] [--json FILE] [--logs DIR]
                                               [-- OPTION ...]

Options after -- are those of `holdfast serve`, such as --tbt-target 25ms --host-cache-gb 32.

A fresh start finds empty directories for the caches of Triton, PyTorch, CUDA and Holdfast; the warm one after it finds
what that left. The model is a Llama-3-8B shape with random weights (`--small`: a small one, for a CPU). The stages are
those that the engine reports; some overlap. `server` is the time before the engine's: the interpreter, the server's
imports and its store. The first token is that of a prompt of 512 tokens, sent as soon as /health says 200. `host tier`
is when all of it can be used, and `ready` when /health/ready says 200 after that; `paces` says how 200 tokens came
before and then, and `first_ms` how long a prompt of 512 tokens took until its first token. The system's own file cache
is as it is: on a new machine the first start also reads PyTorch from the disk. Prints a JSON line for each start, then
a table of medians.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.llama8b import LLAMA_3_8B
from benchmarks.engine.multiturn import SMALL
from benchmarks.lib.invocation import provenance
from holdfast.core.config import BUILTIN_MODEL
from holdfast.engine.checkpoint import Checkpoint

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "triton-home",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "XDG_CACHE_HOME": "xdg",
    "XDG_DATA_HOME": "data",
}
"""Variables that name the places of caches, and the directory of each."""
LIMIT = 300.0
"""Time limit of one start, in seconds."""
STAGE = re.compile(r"([A-Za-z][A-Za-z ]*?) (\d+\.\d+) to (\d+\.\d+)")


def make_checkpoint(directory: Path, shape: dict[str, Any]) -> None:
    """A checkpoint without weights: config.json, and the built-in model's tokenizer."""
    builtin = Checkpoint.find(BUILTIN_MODEL).directory
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(shape))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin / name, directory)


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Status and body of one request; a POST if it has a body. Raises OSError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    with contextlib.closing(connection):
        headers = {"content-type": "application/json"} if body else {}
        connection.request("POST" if body else "GET", path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def gauge(metrics: bytes, name: str) -> float | None:
    """A value in Prometheus' format."""
    found = re.search(rf"^{name} (\S+)$", metrics.decode(), re.MULTILINE)
    return float(found[1]) if found else None


def pace(port: int, model: str) -> dict[str, float]:
    """Generate 200 tokens. Returns the mean time between them, and the shares that took over 10, 25 and 100 ms."""

    def counts() -> tuple[float, ...]:
        metrics = ask(port, "/metrics")[1]
        names = ("sum", "count", *(rf'bucket\{{le="{bound}"\}}' for bound in ("0.01", "0.025", "0.1")))
        return tuple(gauge(metrics, f"holdfast_tbt_seconds_{name}") or 0.0 for name in names)

    before = counts()
    prompt = [10 + index % 80 for index in range(64)]
    ask(port, "/v1/completions", dict(model=model, prompt=prompt, max_tokens=200, ignore_eos=True, temperature=0))
    seconds, count, *within = (after - first for after, first in zip(counts(), before, strict=True))
    over = {f"over_{bound}_ms": round(1 - fit / count, 4) for bound, fit in zip((10, 25, 100), within, strict=True)}
    return dict(mean_ms=round(1e3 * seconds / count, 3)) | over


def first_token(port: int, model: str, number: int) -> float:
    """Milliseconds until the token of a prompt of 512 tokens. Prompts of other numbers have nothing in common.

    Raises RuntimeError.
    """
    prompt = [10 + (number + index) % 90 for index in range(512)]
    began = time.monotonic()
    status, body = ask(port, "/v1/completions", dict(model=model, prompt=prompt, max_tokens=1, temperature=0))
    if status != 200:
        raise RuntimeError(f"the request got {status}: {body!r}")
    return round(1e3 * (time.monotonic() - began), 1)


def start(model: Path, caches: Path, options: list[str], log: Path) -> dict[str, Any]:
    """Start a server, ask for a token, end it. Returns the times, in seconds after the command. Raises RuntimeError."""
    environment = os.environ | {name: str(caches / place) for name, place in CACHES.items()} | {"COLUMNS": "2000"}
    command = [sys.executable, "-u", "-m", "holdfast.cli", "serve", str(model), "--load-format", "random"]
    command += ["--port", "0", "--store", "memory", *options]
    lines: list[tuple[float, str]] = []
    began = time.monotonic()

    def read() -> None:
        with log.open("a") as copy:
            for line in server.stdout or ():
                lines.append((time.monotonic() - began, line))
                copy.write(f"{lines[-1][0]:7.2f} {line}")

    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        reader = threading.Thread(target=read)
        reader.start()
        try:
            while (found := re.search(r"http://127\.0\.0\.1:(\d+)", "".join(line for _, line in lines))) is None:
                if server.poll() is not None or time.monotonic() - began > LIMIT:
                    raise RuntimeError("the server did not start: " + "".join(line for _, line in lines)[-2000:])
                time.sleep(0.005)
            port = int(found[1])
            while ask(port, "/health")[0] != 200:
                time.sleep(0.005)
            health = time.monotonic() - began
            first_ms = [first_token(port, model.name, 0)]
            first = time.monotonic() - began
            paces = [pace(port, model.name)]
            tier = None
            while (metrics := ask(port, "/metrics")[1]) and gauge(metrics, "holdfast_host_blocks"):
                ready, blocks = (gauge(metrics, f"holdfast_host_blocks{which}") for which in ("_ready", ""))
                if ready is None or ready == blocks:
                    tier = time.monotonic() - began
                    break
                if time.monotonic() - began > LIMIT:
                    raise RuntimeError(f"only {ready} of {blocks} host blocks became ready")
                time.sleep(0.05)
            while ask(port, "/health/ready")[0] != 200:
                if time.monotonic() - began > LIMIT:
                    raise RuntimeError("the server did not become ready")
                time.sleep(0.05)
            ready = time.monotonic() - began
            first_ms += [first_token(port, model.name, number) for number in (1, 2)]
            paces.append(pace(port, model.name))
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
            reader.join()
    ended = time.monotonic() - began
    text = "".join(line for _, line in lines)
    report = re.search(r"^ *start +(process .*)$", text, re.MULTILINE)
    announced = re.search(r"ready in (\d+\.\d+) s", text)
    if report is None or announced is None:
        raise RuntimeError(f"no stages in the output: {text[-2000:]}")
    stages = [(name, float(begin), float(end)) for name, begin, end in STAGE.findall(report[1])]
    # The engine reported the first stage when its process had begun.
    told = next(at for at, line in lines if line.startswith("loading PyTorch"))
    return dict(
        server=round(max(0.0, told - next(end for name, _, end in stages if name == "process")), 2),
        stages=stages,
        engine_ready=float(announced[1]),
        health=round(health, 2),
        first_token=round(first, 2),
        host_tier=tier and round(tier, 2),
        ready=round(ready, 2),
        first_ms=first_ms,
        paces=paces,
        ended=round(ended, 2),
    )


def table(runs: list[dict[str, Any]]) -> str:
    """Medians by stage, one column for each kind of start."""
    kinds = list(dict.fromkeys(run["caches"] for run in runs))
    rows: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        named: dict[str, float] = {"server": run["server"]}
        for name, begin, end in sorted(run["stages"], key=lambda stage: stage[1]):
            named[name] = named.get(name, 0.0) + end - begin
        named |= {"engine ready": run["engine_ready"], "/health 200": run["health"], "first token": run["first_token"]}
        if run["host_tier"] is not None:
            named["host tier"] = run["host_tier"]
        named["/health/ready 200"] = run["ready"]
        for name, seconds in named.items():
            rows.setdefault(name, {}).setdefault(run["caches"], []).append(seconds)
    last = ("engine ready", "/health 200", "first token", "host tier", "/health/ready 200")
    ordered = [*(name for name in rows if name not in last), *(name for name in last if name in rows)]
    lines = ["| seconds | " + " | ".join(kinds) + " |", "|---" * (1 + len(kinds)) + "|"]
    for name in ordered:
        cells = (f"{statistics.median(rows[name][kind]):.2f}" if kind in rows[name] else "" for kind in kinds)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--builtin", action="store_true", help="the built-in model's own shape")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="a directory for the servers' output")
    parser.add_argument("options", nargs="*", help="options of holdfast serve")
    arguments = parser.parse_args()
    shape = LLAMA_3_8B | (SMALL if arguments.small else {})
    if arguments.builtin:
        shape = json.loads((Checkpoint.find(BUILTIN_MODEL).directory / "config.json").read_text())
    runs = []
    with tempfile.TemporaryDirectory(prefix="start-") as place:
        make_checkpoint(model := Path(place) / "model", shape)
        logs = arguments.logs or Path(place)
        logs.mkdir(parents=True, exist_ok=True)
        for number in range(arguments.repeat):
            caches = Path(place) / f"caches-{number}"
            for kind in ("fresh", "warm"):
                run = start(model, caches, arguments.options, logs / f"{number}-{kind}.log")
                runs.append(dict(caches=kind) | run)
                print("HOLDFAST " + json.dumps(runs[-1]), flush=True)
    print("\n" + table(runs))
    if arguments.json:
        arguments.json.write_text(json.dumps(provenance() | dict(options=arguments.options, results=runs), indent=1))


if __name__ == "__main__":
    main()
