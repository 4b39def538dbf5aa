"""A language model and an application of cells on one device: each alone, and both, with and without a shared budget.

    python -m benchmarks.engine.cells_beside --json cells.json                    # on this device
    python -m benchmarks.engine.cells_beside --shape llama-3-8b --target 25 --requests 256 --chats 32   # on a GPU

The language model has random weights. --chats clients each send a prompt of 64 to 192 tokens, read 24 to 64 tokens, and
pause for half a second. --requests clients of the built-in application `dates` each send one date after the other. Each
set runs for --seconds, of which the first fifth is not counted, --repeats times in turn; a figure is the median.

`bound`: the application takes --app-share of the time while the model has work. `unbound`: a share of 1. Engines are
processes of their own, as in `holdfast serve MODEL --app dates`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.engine.served_pace import give_tokenizer
from benchmarks.engine.who_goes_first import NOT_COUNTED, SHAPES, Chats, medians
from benchmarks.lib.invocation import add_engine_options, provenance
from holdfast.core.config import AppConfig
from holdfast.engine.client.app_client import AppClient
from holdfast.engine.client.client import EngineClient
from holdfast.engine.process.tensors import pack
from holdfast.lm.config import EngineConfig
from holdfast.server.run import shared_page

DATES = ("March 3, 1987", "3.10.2021", "the 1st of May 2005", "Tue 12 Nov 1999", "2008-07-30")


class Dates:
    """Clients of the application, each with one request in progress."""

    def __init__(self, client: AppClient, count: int) -> None:
        self.times: list[tuple[float, float]] = []
        """Start and end of each request."""
        self._open = [asyncio.create_task(self._follow(client, random.Random(number))) for number in range(count)]

    async def _follow(self, client: AppClient, choose: random.Random) -> None:
        (field,) = client.info.inputs
        while True:
            began = time.monotonic()
            await client.infer({field.name: pack(np.array([choose.choice(DATES)], object))})
            self.times.append((began, time.monotonic()))

    def figures(self, begin: float, end: float) -> dict[str, float]:
        counted = sorted(after - before for before, after in self.times if begin <= before and after < end)
        middle = counted[len(counted) // 2] if counted else float("nan")
        return dict(dates_s=len(counted) / (end - begin), dates_p50=1e3 * middle)

    async def end(self) -> None:
        for each in self._open:
            each.cancel()
        for outcome in await asyncio.gather(*self._open, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


async def one(name: str, model: EngineClient | None, app: AppClient | None, args: argparse.Namespace) -> dict[str, Any]:
    loads: list[Chats | Dates] = []
    if model is not None:
        loads.append(Chats(model, f"{name} {time.monotonic_ns()}", args.chats))
    if app is not None:
        loads.append(Dates(app, args.requests))
    await asyncio.sleep(NOT_COUNTED * args.seconds)
    begin = time.monotonic()
    await asyncio.sleep((1 - NOT_COUNTED) * args.seconds)
    end = time.monotonic()
    found: dict[str, Any] = dict(run=name)
    for load in loads:
        found |= load.figures(begin, end)
        await load.end()
    print(json.dumps({key: round(value, 1) if isinstance(value, float) else value for key, value in found.items()}))
    return found


async def really(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    place = scratch / args.shape
    place.mkdir()
    (place / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    give_tokenizer(place)
    apps = AppConfig(app=("dates",), app_share=args.app_share, app_device=("cpu",) if args.cpu else ())
    config = EngineConfig(**{
        "model": str(place), "load_format": "random", "max_sequences": args.chats, "max_model_len": args.max_len,
        "speculation": "off",
        "tbt_target": args.target, "memory_reserved": 0.0 if args.cpu else apps.app_memory_fraction, **dict(args.set),
    })  # fmt: skip
    rows: list[dict[str, Any]] = []
    async with AsyncExitStack() as open_:
        ledger = open_.enter_context(shared_page())
        model, bound, unbound = await asyncio.gather(
            EngineClient.start(config, ledger=ledger),
            AppClient.start("dates", apps, threads=args.threads, ledger=ledger),
            AppClient.start("dates", replace(apps, app_share=1.0), threads=args.threads, ledger=ledger),
        )
        for client in (model, bound, unbound):
            open_.push_async_callback(client.close)
        await one("warm-up", model, bound, args)
        for _ in range(args.repeats):
            for name, *engines in (
                ("chats", model, None), ("dates", None, bound), ("both, unbound", model, unbound),
                ("both, bound", model, bound),
            ):  # fmt: skip
                rows.append(await one(name, *engines, args))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the medians."""
    heads = ("chat_tok_s", "ttft_p50", "tbt_p50", "tbt_p99", "dates_s", "dates_p50")
    lines = [f"| run | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, row in medians(rows).items():
        lines.append(f"| {name} | {' | '.join(f'{row[head]:.0f}' if head in row else '' for head in heads)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--target", type=float, default=400.0, help="ms between tokens")
    parser.add_argument("--app-share", type=float, default=AppConfig.app_share)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=512, help="max_model_len")
    parser.add_argument("--threads", type=int, help="CPU threads of the application")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="both run on the CPU")
    parser.add_argument("--json", type=Path)
    add_engine_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = uvloop.run(really(args, Path(scratch)))
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(provenance() | dict(rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
