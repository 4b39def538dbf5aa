"""Contracts over HTTP on a real engine, at loads below and above the capacity, next to other orders and vLLM.

Run: python -m benchmarks.engine.contracts_served azure mooncake --traces DIR --capacity azure=22.6 mooncake=5
     python -m benchmarks.engine.contracts_served azure --traces DIR --capacity azure=22.6 --systems vllm --loads 3

The loads, contracts and systems are those of `contracts_sim`, which also finds the capacity. No system knows the length
of an answer: every token may be one of STOPS that ends it, as likely as the trace's length demands, so lengths are
geometric and the trace's are their means. A run ends `--after` seconds after the last arrival, and what has not ended
by then has failed. The client measures which contracts were kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.engine.contracts_sim import FIGURES, FILES, TARGET, TERMS, Study, changed
from benchmarks.engine.contracts_sim import SYSTEMS as SIMULATED
from benchmarks.engine.served_pace import CLIENTS, SPAWN, checkpoint, served, watch
from benchmarks.lib.invocation import provenance
from benchmarks.lib.vllm_server import vllm_served
from holdfast.core.contract import Contract
from holdfast.lab import workloads
from holdfast.lab.load_client import LoadClient, Said, ask_server
from holdfast.lab.metrics import Record, contract_figures, percentile
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.workloads import PromptTokens, Workload, fixed

SYSTEMS = (*(name for name in SIMULATED if name != "exact"), "vllm")
STOPS = tuple(range(1000, 1064))
"""Token ids that end an answer: as many as a request may name."""

TINY = replace(MODELS["llama-3-8b"], layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=64, vocab=2000)

SKIPPED = 100
"""Conversations of a trace's slow beginning, which are left out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads_of", nargs="+", choices=(*FILES, *workloads.SESSIONS), metavar="workload")
    parser.add_argument("--traces", type=Path, help=f"directory of {', '.join(FILES.values())}")
    parser.add_argument("--capacity", nargs="+", required=True, metavar="WORKLOAD=RATE", help="conversations a second")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["contracts"])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.5, 2.0, 3.0], help="multiples of it")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of arrivals in a run")
    parser.add_argument("--least", type=int, default=60, help="least conversations in a run, which then takes longer")
    parser.add_argument("--after", type=float, default=22.0, help="seconds from the last arrival to the run's end")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--device", default="h200", help="device whose costs give long prompts more time")
    parser.add_argument("--max-len", type=int, default=32_768, help="max_model_len")
    parser.add_argument("--host-gb", type=float, default=32.0, help="size of the host tier; vLLM has none")
    parser.add_argument("--allowed", type=int, default=1024, help="longest answer that a client allows")
    parser.add_argument("--requests", type=int, default=6000, help="most conversations of a trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", nargs="*", default=[], help="more words for the server, as cache-gb=8")
    parser.add_argument("--vllm-site", type=Path, help="directory of vLLM's packages, if it has one of its own")
    parser.add_argument("--tiny", action="store_true", help="serve a tiny shape, to try the script on a CPU")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(skip=0, known=0, turns=4)
    args = parser.parse_args()
    capacities = {name: float(rate) for name, rate in (word.split("=") for word in args.capacity)}
    shape = replace(TINY if args.tiny else MODELS[args.model], max_model_len=args.max_len)
    model, rows = checkpoint(shape), list[dict[str, Any]]()
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    studies = {name: Study(name, args) for name in args.loads_of}
    print(
        "| workload | load | system | asked | kept | refused | broken: ttft, tbt, complete, failed | kept of accepted |"
    )
    print("|---" * 8 + "|", flush=True)
    for system in args.systems:
        with server(system, model, args) as (url, name), ProcessPoolExecutor(CLIENTS, SPAWN) as clients:
            send = partial(load, clients, url, name, vocabulary, system, args)
            for tokens in (16, 4096):  # opens the clients' modules and connections, and each kind of step
                send(fixed(4 * CLIENTS, tokens, 32), f"warm/{tokens}", args.after)
            for of, study in studies.items():
                for multiple in args.loads:
                    rate = multiple * capacities[of]
                    row = {"workload": of, "load": multiple, "system": system, "rate": rate}
                    seconds = max(args.seconds, args.least / rate)
                    arrive = changed(arriving(study.base, rate, seconds), system)
                    row |= send(arrive, f"{of}/{multiple}/{system}", seconds + args.after)
                    print(line(row), flush=True)
                    rows.append(row)
                    if args.json:  # after each run, as a study may be cut short
                        args.json.write_text(json.dumps(provenance() | {"rows": rows}, indent=1) + "\n")


def arriving(base: Workload, rate: float, seconds: float) -> Workload:
    """The conversations after the first SKIPPED, as many as arrive at this rate in `seconds`, with their bursts."""
    chosen = base[SKIPPED : SKIPPED + max(2, round(rate * seconds))]
    first = chosen[0].arrival
    lasts = chosen[-1].arrival - first
    return [replace(each, arrival=(each.arrival - first) * seconds / lasts) for each in chosen]


@contextmanager
def server(system: str, model: str, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The address of a running server of this system, and its model's name."""
    more = [f"--{word}" for word in args.serve]
    if system == "vllm":
        with vllm_served(model, [f"--max-model-len={args.max_len}", *more], args.vllm_site) as url:
            yield url, model
        return
    options = [model, "--load-format", "random", "--max-model-len", str(args.max_len), "--max-waiting", "10000"]
    options += ["--host-cache-gb", f"{args.host_gb:g}"]
    if system == "contracts":
        options += ["--contracts", "on"]
    else:
        order = {"edf": "deadline"}.get(system, system)
        options += ["--order", order, "--tbt-target", f"{TARGET * TERMS['tbt'] * 1e3:g}"]
    with served(Path(__file__).parents[2], [*options, *more]) as url:
        yield url, Path(model).name


def load(
    clients: ProcessPoolExecutor,
    url: str,
    model: str,
    vocabulary: int,
    system: str,
    args: argparse.Namespace,
    workload: Workload,
    salt: str,
    lasts: float,
) -> dict[str, Any]:
    """The figures of one load, sent by all clients. It is cut off after `lasts` seconds."""
    asks = partial(send, url, model, vocabulary, system, args.allowed, lasts)
    parts = [clients.submit(run, asks, workload[part::CLIENTS], salt, part) for part in range(CLIENTS)]
    ended = [part.result() for part in parts]
    records = [record for seen, _ in ended for record in seen]
    answered = [record for record in records if record.token_times]
    lasted = max((record.token_times[-1] for record in answered), default=0.0) - min(each.arrival for each in records)
    found, counted = contract_figures(records, lasted), outcomes(url) if system == "contracts" else {}
    gaps = sorted(b - a for each in answered for a, b in zip(each.token_times, each.token_times[1:], strict=False))
    firsts = sorted(each.token_times[0] - each.arrival for each in answered)
    errors = {each.error for each in records if each.error}
    return {name: found[name] for name in (*FIGURES, "contracts_broken_failed") if name in found} | {
        "seconds": lasted,
        "sent": len(records),
        "tokens": sum(each.generated for each in answered),
        "median_ttft_ms": 1e3 * percentile(firsts, 0.5) if firsts else None,
        "p99_ttft_ms": 1e3 * percentile(firsts, 0.99) if firsts else None,
        "p99_tbt_ms": 1e3 * percentile(gaps, 0.99) if gaps else None,
        "client_late_ms": 1e3 * max(late for _, late in ended),
        "errors": sorted(errors)[:3],
        "engine": counted,
    }


def outcomes(url: str) -> dict[str, float]:
    """The engine's own counts of contracts since its start, by outcome and broken term."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pairs = [each.rpartition(" ") for each in lines if each.startswith("holdfast_contracts_total{")]
    return {name.partition("{")[2]: float(value) for name, _, value in pairs}


def run(asks: Any, workload: Workload, salt: str, part: int) -> tuple[list[Record], float]:
    """Send a part of a load from this process."""
    return uvloop.run(asks(workload, salt, part))


async def send(
    url: str, model: str, vocabulary: int, system: str, allowed: int, lasts: float, workload: Workload, salt: str,
    part: int,
) -> tuple[list[Record], float]:  # fmt: skip
    """The records of one load, which is cut off after `lasts` seconds, and how late the client's event loop was."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(base_url=f"{url}/v1/", limits=limits, timeout=httpx.Timeout(30, read=None)) as http:

        async def ask(prompt: tuple[int, ...], output: int, record: Record, said: Said) -> str:
            more = fields(output, allowed, vocabulary, record.contract, system, random.Random(f"{salt}/{prompt[-12:]}"))
            tells = system == "contracts"
            id = await ask_server(http, model, prompt, output, record, said, tells=tells, tells_pauses=tells, more=more)
            if not record.error and not record.refused and not record.token_times:
                record.error = "no token came"
            return id

        client = LoadClient(ask, Salted(vocabulary, salt, part), lambda ended: None)
        watching = asyncio.create_task(watch(late := [0.0]))
        try:
            await asyncio.wait_for(client.run(workload), lasts)
        except TimeoutError:
            for record in client.records:
                if record.output_tokens is None and not record.error and not record.refused:
                    record.error = "did not end in the run"
        watching.cancel()
    return client.records, late[0]


class Salted(PromptTokens):
    """Prompts of one client. Hash ids and common beginnings give equal tokens at all clients."""

    def __init__(self, vocabulary: int, salt: str, part: int) -> None:
        super().__init__(vocabulary, salt)
        self._part = part

    def prompt(self, conversation: int | str, index: int, turn: workloads.Turn) -> tuple[int, ...]:
        return super().prompt(f"{self._part}/{conversation}", index, turn)

    def answer(self, conversation: int | str, index: int, turn: workloads.Turn) -> tuple[int, ...]:
        return super().answer(f"{self._part}/{conversation}", index, turn)


def fields(
    output: int, allowed: int, vocabulary: int, contract: Contract, system: str, draw: random.Random
) -> dict[str, Any]:
    """Fields of a body by which an answer ends after `output` tokens on average, at most `allowed`."""
    end = min(0.9, 1 / max(1, output))  # probability that the next token ends the answer
    bias = math.log(end / (1 - end) * (vocabulary - len(STOPS)) / len(STOPS))
    asked: dict[str, Any] = {
        "max_tokens": max(allowed, output),
        "temperature": 1.0,
        "ignore_eos": False,
        "seed": draw.randrange(1 << 31),
        "stop_token_ids": STOPS,
        "logit_bias": dict.fromkeys(map(str, STOPS), bias),
    }
    first, end_by = contract.ttft, contract.complete
    if system in ("priority", "deadline", "edf"):
        asked["priority"] = 0 if first else 1
    due = {"deadline": first, "edf": first or end_by}.get(system)
    return asked | ({"deadline_ms": 1e3 * due} if due else {})


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    broken = ", ".join(str(row[f"contracts_broken_{term}"]) for term in (*TERMS, "failed"))
    return (
        f"| {row['workload']} | {row['load']:g} | {row['system']} | {row['contracts']} | {row['contracts_kept']} | "
        f"{row['contracts_refused']} | {broken} | {row['contracts_kept_share']:.1%} |"
    )


if __name__ == "__main__":
    main()
