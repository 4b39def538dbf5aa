"""Copies in both directions at once: how much each loses, and what waiting gives (Pensieve §5).

usage: python -m benchmarks.engine.duplex [--seconds 1.5] [--blocks 256] [--json FILE] [--small]
       python -m benchmarks.engine.duplex --weigh FILE [--loads 1 5 10 20 25 30 40]

Blocks of a Llama-3-8B's cache (2 MB) are copied from the host to the device, from the device to the host, and both ways
at once, on a stream each, for `--seconds`. Copies go by the engine's kernel (`copy_blocks`, scattered blocks), by the
copy engine (one long run), and in by the first and out by the second. The paper has 18 to 20% less in each direction,
so its workers, and Holdfast's (`lm.execution.transfer`), let a swap-out wait for the swap-ins that have begun; `waits`
measures that order, one copy of each way after the other. `--small` runs on a CPU, where nothing overlaps and only the
mechanics are exercised.

`--weigh` asks when that rule pays, by a queue of each way with the rates of an earlier FILE: copies arrive by Poisson
processes of `--loads` GB/s each way, one swap-in a returning conversation and swap-outs of at most what a step begins.
A swap-in begins at once in any case; a swap-out begins at once, or after the swap-ins that came before it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.cache.kv_cache import KVCache, copy_blocks
from holdfast.lm.types import COPIES_AHEAD_BYTES

STATED = (0.18, 0.20)
"""Share of its rate that each direction loses while the other one copies, as the paper states it."""
LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
RETURNING_GB = 0.134
"""GB that a swap-in copies: 1,024 tokens of a Llama-3-8B, about a conversation of ShareGPT's lengths."""
LOADS = (1.0, 5.0, 10.0, 20.0, 25.0, 30.0, 40.0)
COPIES = 20_000
"""Number of copies each way of a queue, half of which count."""


class Way(NamedTuple):
    """A direction."""

    name: str
    copy: Callable[[], None]
    """Copies all of `bytes` once on the current stream."""
    bytes: int


class Stream:
    """A stream with a clock: a CUDA stream, or the calling thread on a CPU."""

    def __init__(self, cuda: bool) -> None:
        self._stream = torch.cuda.Stream() if cuda else None
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note the time at which the copies so far are done."""
        if self._stream is None:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append(event)

    def run(self, copy: Callable[[], None]) -> None:
        """Begin a copy after those before it."""
        if self._stream is None:
            copy()
            return
        with torch.cuda.stream(self._stream):
            copy()

    def follow(self, other: Stream) -> None:
        """Let later copies wait for those that `other` has begun."""
        if self._stream is not None and other._stream is not None:
            self._stream.wait_stream(other._stream)

    def seconds(self) -> float:
        """Seconds from the first mark to the last, once all is done."""
        first, last = self._marks[0], self._marks[-1]
        if self._stream is None:
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def rates(ways: tuple[Way, ...], times: int, *, cuda: bool, waits: bool = False) -> dict[str, float]:
    """GB/s of each way while all ways copy at once, `times` copies each.

    With `waits`, a copy of the second way waits for those of the first that have begun; a rate is then over the time
    from the first copy of either to the last.
    """
    streams = [Stream(cuda) for _ in ways]
    for stream in streams:
        stream.mark()
    for _ in range(times):
        for number, (stream, way) in enumerate(zip(streams, ways, strict=True)):
            if waits:
                stream.follow(streams[number - 1])
            stream.run(way.copy)
    for stream in streams:
        stream.mark()
    took = [stream.seconds() for stream in streams]
    if waits:
        took = [max(took)] * len(took)
    return {way.name: times * way.bytes / seconds / 1e9 for way, seconds in zip(ways, took, strict=True)}


def measure(ways: tuple[Way, Way], seconds: float, *, cuda: bool) -> dict[str, Any]:
    """Rates alone, at once and in turn, and the share that each way loses at once."""
    into, out = ways
    for way in ways:  # compiles the kernel, and touches all memory
        rates((way,), 2, cuda=cuda)
    once = rates((into,), 4, cuda=cuda)[into.name]
    times = max(4, round(seconds * once * 1e9 / into.bytes))
    alone = rates((into,), times, cuda=cuda) | rates((out,), times, cuda=cuda)
    together = rates(ways, times, cuda=cuda)
    return {
        "copies": times,
        "alone": alone,
        "together": together,
        "loses": {name: 1 - together[name] / alone[name] for name in alone},
        "waits": rates(ways, times, cuda=cuda, waits=True),
    }


def by_kernel(blocks: int, device: torch.device, *, layers: int) -> tuple[Way, Way]:
    """The two ways through the engine's copies of scattered blocks."""
    sizes: dict[str, Any] = dict(layers=layers, num_kv_heads=HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE)
    sizes |= dict(num_blocks=2 * blocks, dtype=torch.bfloat16)
    here = KVCache.allocate(**sizes, device=device)
    count = 2 * blocks * here.block_bytes
    memory = torch.empty(count, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = KVCache.allocate(**sizes, device="cpu", by_block=True, within=memory)
    scattered = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(0)).to(device)
    first, second = scattered[:blocks], scattered[blocks:]
    size = blocks * here.block_bytes
    return (
        Way("in", lambda: copy_blocks(there, first, here, first), size),
        Way("out", lambda: copy_blocks(here, second, there, second), size),
    )


def by_engine(size: int, device: torch.device) -> tuple[Way, Way]:
    """The two ways through the copy engine, in one long run."""
    pinned = device.type == "cuda"
    near = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    far = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    return (
        Way("in", lambda: void(near[0].copy_(far[0], non_blocking=True)), size),
        Way("out", lambda: void(far[1].copy_(near[1], non_blocking=True)), size),
    )


def void(_: torch.Tensor) -> None:
    """Nothing: a copy's result is its target."""


class Waiting(NamedTuple):
    """A copy that waits or runs."""

    came: float
    size: float
    """GB."""
    behind: int
    """Number of swap-ins that must have ended before it begins."""


def queued(row: Mapping[str, Any], load: float, *, waits: bool, copies: int = COPIES) -> dict[str, float]:
    """Mean seconds from when a copy could begin to its end, by way, at `load` GB/s each way.

    Copies of a way run one after the other, at the rate of `row` for one way alone or for both at once. With `waits`, a
    swap-out begins after the swap-ins that came before it. Only the second half of the copies counts. A load that the
    link cannot carry shows as seconds that grow with `copies`.
    """
    choose = random.Random(0)
    sizes = {"in": RETURNING_GB, "out": COPIES_AHEAD_BYTES / 1e9}
    to_come: list[tuple[float, str]] = []
    for name, size in sizes.items():
        at = 0.0
        for _ in range(copies):
            at += choose.expovariate(load / size)
            to_come.append((at, name))
    to_come.sort(reverse=True)
    queues: dict[str, deque[Waiting]] = {"in": deque(), "out": deque()}
    left, came, ended = dict(sizes), {"in": 0, "out": 0}, {"in": 0, "out": 0}
    took: dict[str, list[float]] = {"in": [], "out": []}
    now = 0.0
    while to_come or queues["in"] or queues["out"]:
        busy = [name for name, queue in queues.items() if queue and queue[0].behind <= ended["in"]]
        rates_now = {name: row["together" if len(busy) == 2 else "alone"][name] for name in busy}
        ends = {name: now + left[name] / rates_now[name] for name in busy}
        first = min(ends, key=lambda name: ends[name]) if ends else None
        if first is None or (to_come and to_come[-1][0] < ends[first]):
            at, name = to_come.pop()
            left |= {each: left[each] - (at - now) * rates_now[each] for each in busy}
            came[name] += 1
            behind = came["in"] if waits and name == "out" else 0
            queues[name].append(Waiting(at, sizes[name], behind))
        else:
            at = ends[first]
            left |= {each: left[each] - (at - now) * rates_now[each] for each in busy}
            left[first] = sizes[first]
            took[first].append(at - queues[first].popleft().came)
            ended[first] += 1
        now = at
    return {name: fmean(seconds[len(seconds) // 2 :]) for name, seconds in took.items()}


def weigh(rows: Mapping[str, Any], loads: Sequence[float]) -> list[str]:
    """A table of mean milliseconds of a swap-in and a swap-out with and without the rule, by load and way to copy."""
    lines = [
        "| GB/s each way | copies by | swap-in, ms: rule, none | swap-out, ms: rule, none |",
        "|---|---|---|---|",
    ]
    for load in loads:
        for name, row in rows.items():
            rule, none = (queued(row, load, waits=waits) for waits in (True, False))
            cells = [f"{1e3 * rule[way]:,.1f}, {1e3 * none[way]:,.1f}" for way in ("in", "out")]
            lines.append(f"| {load:g} | {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each of the four measurements, about")
    parser.add_argument("--blocks", type=int, default=256, help="of a copy, 2 MB each")
    parser.add_argument("--small", action="store_true", help="two layers and 8 blocks on a CPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--weigh", type=Path, metavar="FILE", help="JSON of an earlier run")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="of --weigh, GB/s each way")
    args = parser.parse_args()
    if args.weigh is not None:
        print("\n".join(weigh(json.loads(args.weigh.read_text())["rows"], args.loads)))
        return
    cuda = torch.cuda.is_available() and not args.small
    device, layers = torch.device("cuda" if cuda else "cpu"), 2 if args.small else LAYERS
    blocks, seconds = (8, 0.05) if args.small else (args.blocks, args.seconds)
    kernel = by_kernel(blocks, device, layers=layers)
    rows = {"kernel": measure(kernel, seconds, cuda=cuda)}
    engine = by_engine(kernel[0].bytes, device)
    rows["copy engine"] = measure(engine, seconds, cuda=cuda)
    rows["kernel in, copy engine out"] = measure((kernel[0], engine[1]), seconds, cuda=cuda)
    for name, row in rows.items():
        told = []
        for way, alone in row["alone"].items():
            at_once = f"together {row['together'][way]:.1f} ({-row['loses'][way]:+.0%})"
            told.append(f"{way}: alone {alone:.1f} GB/s, {at_once}, in turn {row['waits'][way]:.1f}")
        print(f"{name}, {row['copies']} copies of {kernel[0].bytes / 1e6:.0f} MB: {'; '.join(told)}", flush=True)
    print(f"The paper: {STATED[0]:.0%} to {STATED[1]:.0%} less in each direction together.")
    if args.json:
        args.json.write_text(json.dumps(dict(about=provenance(), rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
