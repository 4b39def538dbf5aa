"""The cost of `--deterministic`: output tokens per second with it and without, in turn, and the kernels of both.

    python -m benchmarks.engine.same_bits_cost [--shapes 1b 8b] [--streams 32 128] [--rounds 5] [--json FILE]

Two engines with random weights of a shape are on the device at once, one of each kind. In each round both serve the
same crowd, in another order than in the round before: prompts of `--prompt` tokens, all at once, and `--output` tokens
for each, greedy. `decode` is the pace of steps in which all streams decode; `all` counts the prompts' time as well.
Prints the median of each, and the median, the least and the largest ratio of a round's two paces. Then, for decode
steps and for steps of prompts, the kernels of both kinds that take the longest. Lines come as they are measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.engine.llama8b import LLAMA_3_8B, draw, request, started
from benchmarks.engine.step_breakdown import watched
from benchmarks.lib.invocation import add_engine_options, provenance, settle
from holdfast.lm.types import LanguageLoop

SHAPES: dict[str, dict[str, Any]] = {
    "small": LLAMA_3_8B | dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
                               num_key_value_heads=4, head_dim=64, vocab_size=100_000),
    "1b": LLAMA_3_8B | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64,
                            tie_word_embeddings=True),
    "8b": LLAMA_3_8B,
}  # fmt: skip
"""Shapes of Llama-3.2-1B and Llama-3-8B, and a small one."""
KINDS = {"default": False, "deterministic": True}
DEEPEST = 12
"""Number of kernels that are printed."""
WATCHED = 10
"""Steps of which kernels are printed, as a mean."""


class Crowd:
    """Streams that are served together, and how fast."""

    def __init__(self, loop: LanguageLoop, args: argparse.Namespace, streams: int) -> None:
        """Serve them until all have ended."""
        add(loop, args, streams)
        began, decoding, tokens = time.perf_counter(), [], 0
        before = began
        while loop.has_work():
            given = sum(len(output.tokens) for output in loop.step() or ())
            now = time.perf_counter()
            tokens += given
            if given == streams:
                decoding.append(now - before)
            before = now
        self.all = tokens / (before - began)
        """Output tokens per second from the first request on."""
        self.decode = streams / statistics.median(decoding)
        """Output tokens per second in steps in which all streams decode."""


def add(loop: LanguageLoop, args: argparse.Namespace, streams: int) -> None:
    rng, stamp = random.Random(streams), time.monotonic()
    for number in range(streams):
        loop.add(request(f"{stamp}-{number}", draw(rng, args.prompt), args.output))


def kernels_of(loop: LanguageLoop, args: argparse.Namespace, streams: int) -> dict[str, dict[str, Any]]:
    """The kernels of the steps with prompts, and of WATCHED steps in which all streams decode."""
    activities, found = [ProfilerActivity.CUDA, ProfilerActivity.CPU], {}
    add(loop, args, streams)
    with torch_profile(activities=activities) as profiler:
        steps, decoding = 0, 0
        while decoding < streams:
            decoding += sum(len(output.tokens) > 0 for output in loop.step() or ())
            steps += 1
        torch.cuda.synchronize()
    found["prompts"] = watched(profiler, per=steps)
    for _ in range(3):
        loop.step()
    with torch_profile(activities=activities) as profiler:
        for _ in range(WATCHED):
            loop.step()
        torch.cuda.synchronize()
    found["decodes"] = watched(profiler, per=WATCHED)
    while loop.has_work():
        loop.step()
    return found


def lines_of(kernels: Mapping[str, Any]) -> list[str]:
    """A line for each of the kernels that take the longest."""
    total = {each["name"]: each["calls"] * each["us_each"] for each in kernels["kernels"]}
    top = sorted(kernels["kernels"], key=lambda each: -total[each["name"]])[:DEEPEST]
    lines = [f"    {total[each['name']]:9.1f} us  {each['calls']:6.1f} x {each['us_each']:7.1f}  {each['name'][:76]}"
             for each in top]  # fmt: skip
    return [f"    {1e3 * kernels['watched_ms']:9.1f} us  a step; by kind {kernels['kinds_us']}", *lines]


def measure(args: argparse.Namespace, shape: str) -> list[dict[str, Any]]:
    """Compare both kinds of engine at each number of streams, and print what each has found."""
    most = max(args.streams)
    config = SHAPES[shape]
    position = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    blocks = most * (-(-(args.prompt + args.output + 1) // 16) + 1)
    options: dict[str, Any] = {"max_sequences": most, "prefix_sharing": False, "host_cache_gb": 0.0}
    options |= {"cache_gb": 16 * blocks * position / 1e9 + 0.1} | dict(args.set)
    loops: dict[str, LanguageLoop] = {}
    found = []
    try:
        for kind, on in KINDS.items():
            began = time.perf_counter()
            engine, _ = started(config, deterministic=on, **options)
            loops[kind] = engine.loop
            settle(engine.loop)
            print(f"{shape}, {kind}: ready in {time.perf_counter() - began:.0f} s", flush=True)
        for streams in args.streams:
            found.append(compared(args, shape, streams, loops))
    finally:
        for loop in loops.values():
            loop.close()
    return found


def compared(args: argparse.Namespace, shape: str, streams: int, loops: Mapping[str, LanguageLoop]) -> dict[str, Any]:
    """The rounds of both kinds with this number of streams."""
    for loop in loops.values():
        Crowd(loop, args, streams)
    rounds: dict[str, list[Crowd]] = {kind: [] for kind in loops}
    for number in range(args.rounds):
        for kind in [*loops][:: 1 if number % 2 else -1]:
            rounds[kind].append(Crowd(loops[kind], args, streams))
    row: dict[str, Any] = {"shape": shape, "streams": streams}
    for figure in ("decode", "all"):
        paces = {kind: [getattr(each, figure) for each in crowds] for kind, crowds in rounds.items()}
        ratios = [one / other for one, other in zip(paces["deterministic"], paces["default"], strict=True)]
        row[figure] = {kind: round(statistics.median(pace), 1) for kind, pace in paces.items()}
        row[figure] |= {"ratio": round(statistics.median(ratios), 3), "ratios": [round(each, 3) for each in ratios]}
        print(f"{shape}, {streams} streams, {figure}: {row[figure]['default']} tokens/s by default, "
              f"{row[figure]['deterministic']} deterministic, {row[figure]['ratio']} of it "
              f"({min(ratios):.3f} to {max(ratios):.3f})", flush=True)  # fmt: skip
    if torch.cuda.is_available() and args.kernels:
        row["kernels"] = {kind: kernels_of(loop, args, streams) for kind, loop in loops.items()}
        for steps in ("decodes", "prompts"):
            for kind in loops:
                print(f"  {steps}, {kind}:", *lines_of(row["kernels"][kind][steps]), sep="\n", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1b", "8b"])
    parser.add_argument("--streams", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=True, help="print kernels")
    parser.add_argument("--json", type=Path, help="file for the results")
    add_engine_options(parser)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for shape in args.shapes:
        results += measure(args, shape)
        gc.collect()
        if args.json is not None:
            args.json.write_text(json.dumps({**provenance(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
