"""One engine over several devices, part by part: throughput, latency targets, layouts, pipelines, kernels, tiers.

    python -m benchmarks.engine.many_served PART ... --shape 8b|34b|70b|tiny --layout tp2|pp2|tp2pp2|one --out FILE
                                            [--repeat 3] [--limit SECONDS] [--set NAME=VALUE]

parts:  `beside`  batch 1 512/256, batches 32 and 128 512/128, prefill of 8 x 8,192: the peer's rows of the same names
        target    four 8,000-token prompts join 32 streams: gaps between tokens and prefill rate, under `--target`
                  milliseconds, with whole prompts (prefill-first), and of the prompts alone
        layouts   work that is mostly prefill, and work that is mostly decodes
        pipeline  throughput and idle share of each stage under orca, prefill-first, stall-free, stall-free with the
                  target, and that without balanced steps
        kernels   time by kernel of decode steps of 1 and of 32 rows, on rank 0
        chunking  time of prompts in chunks over that of whole ones (Sarathi-Serve, Figure 11), on a GPU also by kind of
                  kernel on rank 0: products, attention, between devices
        pensieve  conversations past saturation: both tiers, the device alone, stateless
        accuracy  the simulator against the engine (simulator_accuracy.py)

Weights are random, greedy, end-of-sequence is ignored; the engine runs in this process and its children. Parts share
one engine, each run with a scheduler and an empty cache of its own. A part that exceeds `--limit` seconds is ended with
its engine, and the parts after it get a new one. Each figure is appended to FILE as a JSON line as soon as it is known,
with where it came from. `--shape tiny` tries all of it on a CPU, with shorter work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.engine.llama8b import LLAMA_3_8B, draw, offline, request
from benchmarks.engine.multiturn import converse
from benchmarks.engine.step_breakdown import breakdown, watched
from benchmarks.lib.in_real_time import RealEngine, Recorder, Stepped
from benchmarks.lib.invocation import add_engine_options, provenance
from benchmarks.lib.multiturn_talks import MODES, shortened, workload
from benchmarks.papers.sarathi import Unbalanced
from holdfast.lab.metrics import percentile, summary
from holdfast.lab.workloads import Conversation, Turn
from holdfast.lm.config import EngineConfig
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.policies import whole_tiles
from holdfast.lm.types import EngineShape
from holdfast.loop.loop import Loop

PARTS = ("beside", "target", "layouts", "pipeline", "kernels", "chunking", "pensieve", "accuracy")
SHAPES: dict[str, dict[str, Any]] = {
    "8b": LLAMA_3_8B,
    "70b": LLAMA_3_8B | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
    "34b": LLAMA_3_8B
    | dict(
        hidden_size=7168,
        intermediate_size=20480,
        num_hidden_layers=60,
        num_attention_heads=56,
        vocab_size=101_000,
    ),
    "tiny": LLAMA_3_8B
    | dict(
        vocab_size=100_001,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        torch_dtype="float32",
    ),
}
SIMULATED = {"8b": "llama-3-8b", "34b": "yi-34b", "70b": "llama-2-70b"}
"""Names of the shapes for `accuracy`."""
SHORTER = 32
"""Factor by which tiny work has fewer tokens."""
WIDEST = 16_640
"""Largest number of tokens in a step, in which Orca computes two of the longest prompts whole."""
ROWS = {
    "bs1 512/256": [(512, 256)],
    "bs32 512/128": [(512, 128)] * 32,
    "bs128 512/128": [(512, 128)] * 128,
    "prefill 8x8192": [(8192, 16)] * 8,
}
"""Rows of `beside`: prompt and output of each request."""
LAYOUTS = {"prefill-heavy 64x 4096/8": [(4096, 8)] * 64, "decode-heavy 256x 128/256": [(128, 256)] * 256}
PROMPTS, CHUNKS = (2048, 4096, 8192, 16_000), (512, 1024, 2048)
"""Prompts and chunks of `chunking`, in tokens."""
STREAMS, JOINING, JOINED = 32, 4, 8000
"""Sizes of `target`: number of streams, number of prompts that join them, and tokens of each prompt."""


class Bench:
    """The engine of a child process, and the file for its figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tiny = args.shape == "tiny"
        self.shorter = SHORTER if self.tiny else 1
        tp, pp = layout_of(args.layout)
        directory = Path(tempfile.mkdtemp(prefix="many-")) / args.shape
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        options: dict[str, Any] = dict(
            model=str(directory),
            load_format="random",
            max_sequences=512,
            max_waiting=100_000,
            max_model_len=16_384,
            tp=tp,
            pp=pp,
            # With a host tier the engine estimates its cost profile, which the targets need.
            host_cache_gb=args.host_gb if "pensieve" in args.parts else 1.0,
        )
        if self.tiny:
            options |= dict(device="cpu", cache_gb=0.1, host_cache_gb=0.1, max_sequences=64, threads=2)
        self.options = options | dict(args.set)
        begin = time.perf_counter()
        widest = WIDEST // self.shorter
        self.engine = RealEngine(EngineConfig(**self.options | dict(token_budget=widest)), measure=args.measure)
        info = self.engine.info
        self.about = provenance() | dict(
            shape=args.shape, layout=args.layout, devices=info.memory.device, options=dict(args.set),
            blocks=info.num_blocks, host_blocks=info.num_host_blocks, measured=args.measure,
            stage_shares=self.engine.profile.cost.stage_shares,
        )  # fmt: skip
        self.say("start", "start", seconds=round(time.perf_counter() - begin, 1), stages=list(info.stages))
        with self.loop() as loop:
            for count in (1, 32, 64):
                offline(loop, f"warm-up {count}", [(32, 8)] * count)

    def say(self, part: str, what: str, **figures: Any) -> None:
        """Append a figure to the results, and print it."""
        line = dict(part=part, what=what, **figures)
        print("MANY " + json.dumps(line), flush=True)
        if self.args.out:
            with self.args.out.open("a") as file:
                file.write(json.dumps(line | dict(about=self.about)) + "\n")

    def config(self, **changes: Any) -> EngineConfig:
        """The engine's options without its host tier and shared prefixes, changed."""
        plain = dict(host_cache_gb=0.0, prefix_sharing=False)
        return EngineConfig(**self.options | plain | changes)

    def loop(self, **changes: Any) -> Any:
        """Context with its own loop and an empty cache."""
        from contextlib import contextmanager

        @contextmanager
        def entered() -> Iterator[Loop]:
            with self.engine.serving(self.config(**changes)) as (loop, recorder):
                self.recorder: Recorder = recorder
                yield loop

        return entered()

    def short(self, tokens: int) -> int:
        """The number of tokens, reduced for a tiny model."""
        return max(2, tokens // self.shorter)

    def lengths(self, rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Prompts and outputs, or shorter and fewer ones for a tiny model."""
        return [(self.short(prompt), self.short(output)) for prompt, output in rows[: 32 if self.tiny else None]]


def beside(bench: Bench) -> None:
    """The peer's rows."""
    chosen = {what: rows for what, rows in ROWS.items() if what.split()[0] in bench.args.rows}
    for _ in range(bench.args.repeat):
        for what, rows in chosen.items():
            with bench.loop() as loop:
                bench.say("beside", what, **offline(loop, what, bench.lengths(rows)))


def layouts(bench: Bench) -> None:
    """Two kinds of work on this layout."""
    for _ in range(bench.args.repeat):
        for what, rows in LAYOUTS.items():
            with bench.loop() as loop:
                figures = offline(loop, what, bench.lengths(rows))
                bench.say("layouts", what, **figures, **busy(bench.recorder.steps()))


def target(bench: Bench) -> None:
    """Let prompts join streams, and measure the streams' gaps and the prefill rate."""
    for _ in range(bench.args.repeat):
        prompts = [(JOINED, 1)] * JOINING
        with bench.loop(token_budget=whole_tiles(WIDEST // bench.shorter, 64)) as loop:
            alone = offline(loop, "alone", bench.lengths(prompts))
        tokens = sum(prompt for prompt, _ in bench.lengths(prompts))
        bench.say("target", "prompts alone", prefill_tok_s=round(tokens / alone["seconds"]), target_ms=None)
        kinds: dict[str, dict[str, Any]] = {
            f"target {bench.args.target:g} ms": dict(tbt_target=bench.args.target),
            "prefill-first": dict(scheduler="prefill-first"),
        }
        for what, changes in kinds.items():
            with bench.loop(**changes) as loop:
                joined(bench, loop)  # the first run corrects the estimates
                bench.say("target", what, target_ms=bench.args.target, **joined(bench, loop))


def joined(bench: Bench, loop: Loop) -> dict[str, Any]:
    """Let prompts join running streams. Gaps are between two tokens of one stream, while there are prompts."""
    rng, stamp = random.Random(2), time.monotonic()
    streams = {f"d{index}-{stamp}": list[float]() for index in range(STREAMS)}
    prompts = {f"p{index}-{stamp}" for index in range(JOINING)}
    before, output = (20, 400) if bench.tiny else (60, 600)
    for name in streams:
        loop.add(request(name, draw(rng, bench.short(256)), output))
    began = ended = 0.0
    tokens = JOINING * bench.short(JOINED)
    waiting = set[str]()
    while loop.has_work():
        if not began and min(map(len, streams.values())) >= before:
            began = time.perf_counter()
            for name in sorted(prompts):
                loop.add(request(name, draw(rng, bench.short(JOINED)), 2))
            waiting = set(prompts)
        outputs = loop.step() or ()
        now = time.perf_counter()
        for given in outputs:
            if given.request_id in streams:
                streams[given.request_id].append(now)
            elif given.request_id in waiting:
                waiting.discard(given.request_id)
                ended = now
        if ended and not waiting and all(each[-1] > ended for each in streams.values()):
            for name in streams:
                loop.abort(name)
    times = [pairwise(each) for each in streams.values()]
    gaps = sorted(1e3 * (then - first) for each in times for first, then in each if began <= then and first <= ended)
    plain = [1e3 * (then - first) for each in streams.values() for first, then in pairwise(each) if then < began]
    return dict(
        decode_ms=round(statistics.median(plain), 2),
        tbt_ms_p50=round(percentile(gaps, 0.5), 2),
        tbt_ms_p99=round(percentile(gaps, 0.99), 2),
        tbt_ms_worst=round(gaps[-1], 2),
        prefill_tok_s=round(tokens / (ended - began)),
        seconds=round(ended - began, 3),
        gaps=len(gaps),
    )


def busy(steps: list[Stepped]) -> dict[str, Any]:
    """Share of time that each stage is idle, from the first step to the last; for one stage, that of the device."""
    if not steps:
        return {}
    seconds = max(step.ended for step in steps) - min(step.planned for step in steps)
    stages = zip(*(step.stages or (step.seconds,) for step in steps), strict=True)
    return dict(idle_share=[round(1 - sum(stage) / seconds, 4) for stage in stages])


def pipeline(bench: Bench) -> None:
    """Policies on closed-loop work, with the idle time of each stage."""
    kinds: dict[str, tuple[dict[str, Any], Callable[[EngineShape], Policy] | None]] = {
        "orca": (dict(scheduler="orca", token_budget=WIDEST // bench.shorter), None),
        "prefill-first": (dict(scheduler="prefill-first"), None),
        "stall-free": ({}, None),
        "stall-free, target": (dict(tbt_target=bench.args.pipeline_target), None),
    }
    stages = layout_of(bench.args.layout)[1]
    if stages > 1:
        unbalanced = partial(Unbalanced.of, bench.engine.profile.cost, bench.args.pipeline_target / 1e3, stages)
        kinds["stall-free, target, not balanced"] = (dict(tbt_target=bench.args.pipeline_target), unbalanced)
    choose = random.Random(5)
    count, concurrency = (24, 8) if bench.tiny else (96, 48)
    work = [
        Conversation(0.0, (Turn(bench.short(choose.randint(500, 4000)), bench.short(choose.randint(64, 256))),))
        for _ in range(count)
    ]
    for _ in range(bench.args.repeat):
        for what, (changes, make_policy) in kinds.items():
            records, steps = bench.engine.serve(
                bench.config(**changes), work, concurrency=concurrency, make_policy=make_policy
            )
            seen = summary(records)
            tokens = sum(turn.prompt + turn.output for one in work for turn in one.turns)
            took = max(step.ended for step in steps) - min(step.planned for step in steps)
            bench.say(
                "pipeline", what, seconds=round(took, 3), total_tok_s=round(tokens / took, 1),
                **{key: round(seen[key], 2) for key in ("median_ttft_ms", "median_itl_ms", "p99_itl_ms")},
                **busy(steps),
            )  # fmt: skip


def kernels(bench: Bench) -> None:
    """Time by kernel of decode steps on rank 0."""
    if not torch.cuda.is_available():
        bench.say("kernels", "none: there is no GPU")
        return
    for rows in (32, 1):
        with bench.loop() as loop:
            found = breakdown(loop, rows, 20)
        bench.say("kernels", f"decode step of {rows} rows", **found)


def chunking(bench: Bench) -> None:
    """Time one prompt at a time, whole and in chunks."""
    for prompt in PROMPTS:
        tokens, whole = bench.short(prompt), dict[str, float]()
        for chunk in (prompt, *(size for size in CHUNKS if size < prompt)):
            with bench.loop(token_budget=bench.short(chunk)) as loop:
                lengths, taken = [(tokens, 1)], []
                for _ in range(1 + bench.args.repeat):
                    before = len(bench.recorder.steps())
                    offline(loop, f"{prompt} in {chunk}", lengths)
                    taken.append(sum(step.seconds for step in bench.recorder.steps()[before:]))
                times = {"total": 1e3 * statistics.median(taken[1:])}
                if torch.cuda.is_available():
                    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                        offline(loop, "watched", lengths)
                        torch.cuda.synchronize()
                    times |= {kind: us / 1e3 for kind, us in watched(profiler, per=1)["kinds_us"].items()}
            whole = whole or times
            over = {kind: round(ms / whole[kind], 3) for kind, ms in times.items() if whole.get(kind)}
            ms = {kind: round(each, 3) for kind, each in times.items()}
            bench.say("chunking", f"{prompt} in chunks of {chunk}", prompt=prompt, chunk=chunk, ms=ms, over_whole=over)


def pensieve(bench: Bench) -> None:
    """Conversations of several turns at rates above what the engine can serve."""
    args = bench.args
    for rate in args.rates:
        conversations = list(workload(rate, args.until + 20, args.think, 0))
        if bench.tiny:
            conversations = shortened(conversations, SHORTER)
        for mode in ("tiers", "device", "stateless"):
            changes = dict(MODES[mode]) | dict(cache_gb=bench.options["cache_gb"] if bench.tiny else args.device_gb)
            if mode == "tiers":
                changes["host_cache_gb"] = bench.options["host_cache_gb"]
            with bench.loop(**changes) as loop:
                figures = converse(loop, conversations, warm=args.warm, until=args.until, info=bench.engine.info)
            bench.say("pensieve", f"{mode} at {rate:g}/s", mode=mode, rate=rate, **figures)


def child(args: argparse.Namespace) -> None:
    """Run the parts on one engine. Prints when each begins."""
    bench = Bench(args)
    for part in args.parts:
        print(f"PART {part}", flush=True)
        began = time.perf_counter()
        globals()[part](bench)
        bench.say(part, "end of the part", seconds=round(time.perf_counter() - began, 1))
    print("PART close", flush=True)
    bench.engine.close()


def accuracy_command(args: argparse.Namespace) -> list[str]:
    """simulator_accuracy.py with this layout."""
    tp, pp = layout_of(args.layout)
    tiny = args.shape == "tiny"
    about = ["--device", "cpu", "--requests", "20"] if tiny else ["--device", "cuda", "--shape", SIMULATED[args.shape]]
    found = (
        [] if args.out is None else ["--json", str(args.out.with_suffix(f".accuracy-{args.shape}-{args.layout}.json"))]
    )
    settings = [f"tp={tp}", f"pp={pp}", *(f"{name}={json.dumps(value)}" for name, value in args.set)]
    options = [word for setting in settings for word in ("--set", setting)]
    script = ["-m", "benchmarks.engine.simulator_accuracy"]
    return [sys.executable, *script, *about, "--seconds", "15", "--schedulers", "stall-free", *found, *options]


def layout_of(name: str) -> tuple[int, int]:
    """tp and pp of a layout's name. Raises ArgumentTypeError."""
    found = re.fullmatch(r"one|(?:tp(\d+))?(?:pp(\d+))?", name)
    if not found or not name:
        raise argparse.ArgumentTypeError(f"{name!r} is not a layout, as tp2, pp2, tp2pp2 or one")
    return int(found[1] or 1), int(found[2] or 1)


def run(command: list[str], limit: float) -> tuple[str, str]:
    """Run a child; end it if a part, or its start, takes longer than the limit.

    Returns its last part, and how it ended.
    """
    environment = os.environ | dict(PYTHONUNBUFFERED="1")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    part, since, rest, ended = "start", time.monotonic(), b"", ""
    try:
        while not ended:
            ready, _, _ = select.select([process.stdout], [], [], 1.0)
            data = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if ready and not data:
                ended = f"exit status {process.wait()}"
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                if text.startswith("PART "):
                    part, since = text[5:], time.monotonic()
                else:
                    print(text, flush=True)
            if time.monotonic() - since > limit:
                ended = f"ended after {limit:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return part, ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--out", type=Path, help="append the figures here, as JSON lines")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limit", type=float, default=240.0, help="longest time of a part, and of the start, s")
    names = [what.split()[0] for what in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, help="of `beside`")
    parser.add_argument("--target", type=float, default=25.0, help="TBT target of `target`, ms")
    parser.add_argument("--pipeline-target", type=float, default=100.0, help="TBT target of `pipeline`, ms")
    parser.add_argument("--measure", action="store_true", help="measure the cost profile in full at the start")
    parser.add_argument("--rates", nargs="+", type=float, default=[32.0], help="of `pensieve`, conversations a second")
    parser.add_argument("--think", type=float, default=5.0)
    parser.add_argument("--until", type=float, default=50.0)
    parser.add_argument("--warm", type=float, default=10.0)
    parser.add_argument("--device-gb", type=float, default=16.0, help="of `pensieve`, on all devices")
    parser.add_argument("--host-gb", type=float, default=32.0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    add_engine_options(parser)
    args = parser.parse_args()
    layout_of(args.layout)
    if args.child:
        child(args)
        return
    words = [word for word in sys.argv[1:] if word not in PARTS]
    program = [sys.executable, "-m", "benchmarks.engine.many_served"]
    left = [part for part in args.parts if part != "accuracy"]
    failed = False
    while left:
        part, ended = run([*program, *left, *words, "--child"], args.limit)
        if ended == "exit status 0" and part == "close":
            break
        failed = True
        print(f"MANY {json.dumps(dict(part=part, what='failed', ended=ended))}", flush=True)
        left = left[left.index(part) + 1 :] if part in left else []
    if "accuracy" in args.parts:
        _, ended = run(accuracy_command(args), args.limit)
        failed |= ended != "exit status 0"
        print(f"accuracy: {ended}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
