"""Copies in both directions at once: how much each loses, and what waiting gives (Pensieve §5).

usage: python -m benchmarks.engine.duplex [--seconds 1.5] [--blocks 256] [--json FILE] [--small]

Blocks of a Llama-3-8B's cache (2 MB) are copied from the host to the device, from the device to the host, and both ways
at once, on a stream each, for `--seconds`. Copies go by the engine's kernel (`copy_blocks`, scattered blocks) and by
the copy engine (one long run). The paper has 18 to 20% less in each direction, so its workers, and Holdfast's
(`lm.execution.transfer`), let a swap-out wait for the swap-ins that have begun; `waits` measures that order, one copy
of each way after the other. `--small` runs on a CPU, where nothing overlaps and only the mechanics are exercised.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.cache.kv_cache import KVCache, copy_blocks

STATED = (0.18, 0.20)
"""Share of its rate that each direction loses while the other one copies, as the paper states it."""
LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each of the four measurements, about")
    parser.add_argument("--blocks", type=int, default=256, help="of a copy, 2 MB each")
    parser.add_argument("--small", action="store_true", help="two layers and 8 blocks on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cuda = torch.cuda.is_available() and not args.small
    device, layers = torch.device("cuda" if cuda else "cpu"), 2 if args.small else LAYERS
    blocks, seconds = (8, 0.05) if args.small else (args.blocks, args.seconds)
    kernel = by_kernel(blocks, device, layers=layers)
    rows = {"kernel": measure(kernel, seconds, cuda=cuda)}
    rows["copy engine"] = measure(by_engine(kernel[0].bytes, device), seconds, cuda=cuda)
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
