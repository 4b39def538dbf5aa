"""Agents over HTTP on a real engine with both tiers: what a session waits, by order of eviction, and that of vLLM.

Run: python -m benchmarks.engine.retention_served --systems pauses retention lru vllm --device-gb 16 --host-gb 16

Each client of `--open` keeps one session of a workload open: turns, tools, people, sub-agents that fork, branches that
are replaced. A session starts its next turn when its tool has ended. All state together is larger than both tiers, so a
good order of eviction computes less. Clients say how long they expect tools to take (`--silent`: they do not). The
first `--warm` seconds do not count.

- waited: mean seconds from a request to its last token.
- session: mean seconds in which an open session makes 43 requests, the median number of turns, with its pauses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvloop

from benchmarks.engine.contracts_served import TINY, Salted
from benchmarks.engine.served_pace import SPAWN, checkpoint, served
from benchmarks.lib.invocation import provenance
from benchmarks.lib.vllm_server import vllm_served
from holdfast.lab import workloads
from holdfast.lab.load_client import LoadClient, ask_server
from holdfast.lab.metrics import Record, percentile
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.workloads import Workload, fixed

SYSTEMS = ("pauses", "retention", "lru", "ttl", "hits", "vllm")
CLIENTS = 4
"""Number of processes that send."""
TURNS = 43


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=workloads.SESSIONS, default="agents-short")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["pauses", "lru"])
    parser.add_argument("--open", type=int, default=64, help="sessions that are open at a time")
    parser.add_argument("--seconds", type=float, default=110.0, help="length of a run")
    parser.add_argument("--warm", type=float, default=30.0, help="seconds of it that do not count")
    parser.add_argument("--device-gb", type=float, default=16.0, help="size of the cache on the device")
    parser.add_argument("--host-gb", type=float, default=16.0, help="size of the host tier")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--max-len", type=int, default=32_768, help="max_model_len")
    parser.add_argument("--silent", action="store_true", help="clients say nothing of pauses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", nargs="*", default=[], help="more words for Holdfast's server, as threads=1")
    parser.add_argument("--vllm-site", type=Path, help="directory of vLLM's packages, if it has one of its own")
    parser.add_argument("--tiny", action="store_true", help="serve a tiny shape, to try the script on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = replace(TINY if args.tiny else MODELS[args.model], max_model_len=args.max_len)
    model, rows = checkpoint(shape), list[dict[str, Any]]()
    drawn = workloads.sessions(args.workload, 8 * args.open, args.seed)
    sessions = workloads.fit_context(drawn, args.max_len)
    for system in args.systems:
        with server(system, model, args) as (url, name), ProcessPoolExecutor(CLIENTS, SPAWN) as clients:
            told = system != "vllm" and not args.silent
            play(clients, Sender(url, name, shape.vocab, told, f"{args.seed}/warm"), fixed(128, 2048, 16), 32, 20.0)
            sender = Sender(url, name, shape.vocab, told, str(args.seed))
            records = play(clients, sender, sessions, args.open, args.seconds)
            rows.append({"system": system, "workload": args.workload, "open": args.open} | figures(records, args))
        print(json.dumps(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(provenance() | {"rows": rows}, indent=1) + "\n")


@contextmanager
def server(system: str, model: str, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The address of a running server of this system, and its model's name. All have caches of the same sizes."""
    if system == "vllm":
        options = [f"--max-model-len={args.max_len}", f"--kv-cache-memory-bytes={int(args.device_gb * 1e9)}"]
        options += [f"--kv-offloading-size={args.host_gb * 1e9 / (1 << 30):.3f}", "--enable-prompt-tokens-details"]
        with vllm_served(model, options, args.vllm_site) as url:
            yield url, model
        return
    options = [model, "--load-format", "random", "--max-model-len", str(args.max_len), "--max-waiting", "10000"]
    options += ["--cache-gb", f"{args.device_gb:g}", "--host-cache-gb", f"{args.host_gb:g}", "--eviction", system]
    with served(Path(__file__).parents[2], [*options, *(f"--{word}" for word in args.serve)]) as url:
        yield url, Path(model).name


class Sender(NamedTuple):
    """A client that sends sessions to one server."""

    url: str
    model: str
    vocabulary: int
    told: bool
    """Whether clients say what they know of pauses."""
    salt: str
    """Each salt gives other prompts."""

    def run(self, sessions: Workload, concurrency: int, seconds: float, part: int) -> list[Record]:
        """Play a part of the sessions from this process, with times from the start."""
        return uvloop.run(self.converse(sessions, concurrency, seconds, part))

    async def converse(self, sessions: Workload, concurrency: int, seconds: float, part: int) -> list[Record]:
        """Keep sessions open until time is up. Returns the requests that have ended."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx.Timeout(30, read=None)
        async with httpx.AsyncClient(base_url=f"{self.url}/v1/", limits=limits, timeout=timeout) as http:
            ask = partial(ask_server, http, self.model, tells=False, tells_pauses=self.told)
            client = LoadClient(ask, Salted(self.vocabulary, self.salt, part), lambda ended: None)
            began = time.monotonic()
            with suppress(TimeoutError):
                await asyncio.wait_for(client.run(sessions, concurrency), seconds)
        ended = [record for record in client.records if record.output_tokens is not None or record.error]
        for record in ended:
            record.token_times = [at - began for at in record.token_times]
            record.arrival -= began
        return ended


def play(
    clients: ProcessPoolExecutor, sender: Sender, sessions: Workload, concurrency: int, seconds: float
) -> list[Record]:
    """Keep sessions open for some seconds. Returns the requests."""
    parts = [
        clients.submit(sender.run, sessions[part::CLIENTS], concurrency // CLIENTS, seconds, part)
        for part in range(CLIENTS)
    ]
    return [record for part in parts for record in part.result()]


def figures(records: list[Record], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of the requests that arrived after the warm time."""
    good = [each for each in records if not each.error and each.token_times and each.arrival >= args.warm]
    firsts = sorted(each.token_times[0] - each.arrival for each in good)
    waited = [each.token_times[-1] - each.arrival for each in good]
    prompt = sum(each.prompt_tokens for each in good)
    cached = sum(each.cached_tokens for each in good)
    seconds = args.seconds - args.warm
    return {
        "requests_per_s": len(good) / seconds,
        "failed": sum(1 for each in records if each.error),
        "errors": sorted({each.error for each in records if each.error})[:3],
        "waited_mean_s": sum(waited) / len(waited),
        "session_s": TURNS * args.open * seconds / len(good),
        "ttft_p50_ms": 1e3 * percentile(firsts, 0.5),
        "ttft_p90_ms": 1e3 * percentile(firsts, 0.9),
        "ttft_p99_ms": 1e3 * percentile(firsts, 0.99),
        "prompt_tokens": prompt,
        "computed_tokens": prompt - cached,
        "found_share": cached / prompt,
    }


if __name__ == "__main__":
    main()
