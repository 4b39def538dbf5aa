"""Swap-in under load: the cost for running decodes when conversations come back from the host.

usage: python -m benchmarks.engine.swap_in [--contexts 700 2000 8000] [--turns 12] [--json FILE] [--small]
                                           [--set name=value]

For each context length the same turns run twice during 32 decodes: with their conversations on the device, and with all
of them on the host. Hidden is 1 - (seconds of the second run - seconds of the first) / seconds of all copies, including
those that make room. Copy times come from events on the copy stream, in the engine's trace. A Llama-3-8B shape with
random weights; `--small` runs on a CPU, where copies do not overlap and only the mechanics are exercised.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.llama8b import LLAMA_3_8B
from benchmarks.engine.multiturn import SMALL
from benchmarks.lib.in_real_time import StepRecord
from benchmarks.lib.invocation import add_engine_options, provenance, settle
from benchmarks.lib.multiturn_talks import draw
from holdfast.core.types import Request, SamplingParams
from holdfast.engine.messages import EngineInfo
from holdfast.engine.process.build import build
from holdfast.lm.config import EngineConfig
from holdfast.loop.loop import Loop

DECODES, EVERY = 32, 6
"""Number of sequences that decode all the time, and number of steps between two turns."""
names = itertools.count()


def request(prompt: tuple[int, ...], output: int, name: str = "") -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return Request(name or f"r{next(names)}", prompt, params, arrival=time.monotonic())


def run_all(loop: Loop, *requests: Request) -> None:
    for each in requests:
        loop.add(each)
    while loop.has_work():
        loop.step()


def displace(loop: Loop, info: EngineInfo, rng: random.Random) -> None:
    """Fill the device with other work, so that idle blocks are only on the host."""
    length = min(info.max_model_len // 2, 4096)
    count = int(0.97 * info.num_blocks * info.block_size / length)
    run_all(loop, *(request(draw(rng, length, info.vocab_size), 1) for _ in range(count)))


def under_load(
    loop: Loop, info: EngineInfo, rng: random.Random, histories: list[tuple[int, ...]], decoded: int
) -> dict[str, Any]:
    """The next turn of each conversation, some steps apart, during decodes that end together."""
    for _ in range(DECODES):
        loop.add(request(draw(rng, 64, info.vocab_size), decoded))
    for _ in range(8):
        loop.step()
    turns = [request((*history, *draw(rng, 38, info.vocab_size)), 4, f"turn{next(names)}") for history in histories]
    asked = {turn.id: 0.0 for turn in turns}
    first: dict[str, float] = {}
    steps, before = [], loop.stats()
    start = time.perf_counter()
    for number in itertools.count():
        if number % EVERY == 0 and turns:
            turn = turns.pop(0)
            asked[turn.id] = time.perf_counter()
            loop.add(turn)
        began = time.perf_counter()
        for output in loop.step() or ():
            if output.request_id in asked:
                first.setdefault(output.request_id, time.perf_counter() - asked[output.request_id])
        steps.append(time.perf_counter() - began)
        if not loop.has_work():
            break
    after = loop.stats()
    return dict(
        seconds=time.perf_counter() - start,
        steps=len(steps),
        step_ms_p50=round(1e3 * statistics.median(steps), 2),
        step_ms_p99=round(1e3 * sorted(steps)[int(0.99 * len(steps))], 2),
        step_ms_max=round(1e3 * max(steps), 2),
        ttft_ms_p50=round(1e3 * statistics.median(first.values()), 1),
        blocks_in=after.blocks_swapped_in - before.blocks_swapped_in,
        computed=after.tokens_computed - before.tokens_computed,
    )


def add_copies(row: dict[str, Any], trace: list[dict[str, Any]]) -> None:
    """Add the copies of one context, from the trace, and the derived figures to its row."""
    began, ended = row.pop("between")
    inside = [event for event in trace if event["ph"] == "X" and began < event["ts"] / 1e6 < ended]
    copies = [event for event in inside if event["name"] == "swap-in"]
    out = [event for event in inside if event["name"] == "swap-out"]
    seconds, size = sum(c["dur"] / 1e6 for c in copies), sum(c["args"]["bytes"] for c in copies)
    longer = row["host"]["seconds"] - row["device"]["seconds"]
    row |= dict(copies=len(copies), copied_gb=round(size / 1e9, 3), copy_seconds=round(seconds, 4))
    row |= dict(gb_s=round(size / seconds / 1e9, 1), longer_seconds=round(longer, 4))
    seconds_out, size_out = sum(c["dur"] / 1e6 for c in out), sum(c["args"]["bytes"] for c in out)
    row |= dict(out_gb=round(size_out / 1e9, 3), out_seconds=round(seconds_out, 4))
    row |= dict(hidden=round(1 - longer / (seconds + seconds_out), 3))
    print("HOLDFAST " + json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[700, 2000, 8000])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--device-gb", type=float, default=18.0)
    parser.add_argument("--host-gb", type=float, default=30.0)
    parser.add_argument("--small", action="store_true")
    add_engine_options(parser)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=Path, help="write a record of every step there")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="swap-in-"))
    (directory / "config.json").write_text(json.dumps(LLAMA_3_8B | (SMALL if arguments.small else {})))
    trace = directory / "trace.json"
    options: dict[str, Any] = dict(max_sequences=128, eviction="lru", trace=str(trace))
    options |= dict(arguments.set)
    config = EngineConfig(
        model=str(directory),
        load_format="random",
        cache_gb=arguments.device_gb,
        host_cache_gb=arguments.host_gb,
        **options,
    )
    loop, info = build(config)
    settle(loop)
    rng = random.Random(5)
    run_all(loop, *(request(draw(rng, length, info.vocab_size), 8) for length in (4, 40, 200, 38) for _ in range(8)))
    record = StepRecord(loop) if arguments.steps else None
    gc.collect()
    gc.freeze()
    gc.disable()
    results = []
    for context in arguments.contexts:
        histories = [draw(rng, context, info.vocab_size) for _ in range(arguments.turns)]
        run_all(loop, *(request(history, 1) for history in histories))
        decoded = EVERY * arguments.turns + 40
        under_load(loop, info, rng, histories, decoded)
        row: dict[str, Any] = dict(context=context, turns=arguments.turns)
        row["device"] = under_load(loop, info, rng, histories, decoded)
        displace(loop, info, rng)
        began = time.monotonic()
        row["host"] = under_load(loop, info, rng, histories, decoded)
        results.append(row | dict(between=(began, time.monotonic())))
    loop.close()
    if record is not None:
        record.write(arguments.steps)
    events = json.loads(trace.read_text())
    for row in results:
        add_copies(row, events)
    if arguments.json:
        arguments.json.write_text(json.dumps(dict(about=provenance(), results=results), indent=1))


if __name__ == "__main__":
    main()
