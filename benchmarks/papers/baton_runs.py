"""Baton's methods on this machine's device: the runs of `benchmarks/papers/baton.py run`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.invocation import provenance
from benchmarks.lib.row_engines import LLAMA_2_7B, TINY, RowEngines, progress, serve, warm
from benchmarks.papers import baton
from holdfast.core.types import Request, SamplingParams
from holdfast.lab.workloads import Conversation, Turn

IN_FLIGHT = 2
SCALED = 220
"""Number of tokens of each answer in `scale`. With its prompt it has more than 256 columns, so a row grows to 512."""
POINTS = 100
"""Largest number of points of a curve that is kept."""


def run_targets(
    targets: Sequence[str],
    batches: Sequence[int] | None,
    names: Sequence[str],
    *,
    divide: float,
    tiny: bool,
    limit: float,
    out: Path,
) -> None:
    """Load the shape once and run the given targets. Each table is kept under the device's name, row by row."""
    import transformers

    engines = RowEngines(TINY if tiny else LLAMA_2_7B)
    about: dict[str, Any] = provenance() | {
        "transformers": transformers.__version__, "model": engines.model.architecture, "limit": limit,
    }  # fmt: skip
    for target in targets:
        stem = out / f"baton-{target}-{'tiny' if tiny else about['device'].replace(' ', '-')}"
        if target in ("preempt", "scale"):
            lines: list[str] = []
            for line in (preempt if target == "preempt" else scale)(engines, limit):
                lines.append(line)
                baton.keep(stem, about, (), lines, curves=False)
                progress(line)
            continue
        smaller = (1.0 if target == "target-2" else 1 / divide) / (4 if tiny else 1)
        rows: list[baton.Ran] = []
        for batch in batches or baton.BATCHES[target]:
            for name in names:
                rows.append(run(engines, target, name, batch, smaller, limit))
                lines = [*baton.compared(target, rows, same_size=False), *baton.ratios(rows)]
                baton.keep(stem, about | {"lengths": f"x {smaller:g}"}, rows, lines, curves=True)
                row = rows[-1]
                progress(f"{target}, {batch} {name}: {'cut at ' * row.cut}{row.seconds:.1f} s, {row.steps} steps")
        print("\n".join(lines), flush=True)


def run(engines: RowEngines, target: str, name: str, batch: int, smaller: float, limit: float) -> baton.Ran:
    """One method at one batch size."""
    work = baton.workload_of(target, batch, smaller)
    longest = max(baton.longest_row(work), 64)
    watched = baton.Watched(lambda: time.monotonic() - begin)
    begin = 0.0

    options = baton.options_of(baton.METHODS[name], batch, len(work))
    with engines.engine(longest, steps_in_flight=IN_FLIGHT, **options) as (loop, _, _):
        loop.observe(watched)
        warm(loop, batch, longest, engines.vocab_size, limit=limit)
        before = loop.stats()
        watched.positions.clear()
        watched.widest = 0
        begin = time.monotonic()
        served = serve(loop, work, engines.vocab_size, limit=limit)
    stats, curves = served.stats, {}
    if not served.cut:
        curves = baton.curves_of(served.records, watched.positions, POINTS)
    return baton.Ran(
        name, batch, served.seconds, served.steps, stats.idle_tokens - before.idle_tokens,
        stats.preemptions - before.preemptions, watched.widest, len(served.records), served.cut, curves,
    )  # fmt: skip


def request(name: str, prompt: int, output: int, vocabulary: int, priority: int = 0) -> Request:
    """A request of random tokens that are equal in every run."""
    tokens = torch.randint(16, vocabulary, (prompt,), generator=torch.Generator().manual_seed(len(name) + prompt))
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return Request(name, tuple(tokens.tolist()), params, priority=priority, arrival=time.monotonic())


def preempt(engines: RowEngines, limit: float) -> Iterator[str]:
    """Let an urgent request arrive while four rows decode (§4.3). Yields its wait, with and without a host tier."""
    yield "| state of the interrupted row | steps until the urgent one's first token | ms | answers in full |"
    yield "|---|---|---|---|"
    for host in (0.0, 4.0):
        with engines.engine(
            1024, scheduler="embedding", max_sequences=4, host_cache_gb=host, prefix_sharing=host > 0,
            steps_in_flight=IN_FLIGHT,
        ) as (loop, _, _):  # fmt: skip
            warm(loop, 4, 512, engines.vocab_size, limit=limit)
            for at in range(4):
                loop.add(request(f"low-{at}", 64 + at, 200, engines.vocab_size, priority=1))
            got: dict[str, list[int]] = {}
            steps = waited = 0
            asked = took = 0.0
            began = time.perf_counter()
            while loop.has_work() and time.perf_counter() - began < limit:
                if steps == 40:
                    asked = time.perf_counter()
                    loop.add(request("urgent", 64, 20, engines.vocab_size, priority=-1))
                for output in loop.step() or ():
                    if output.request_id == "urgent" and "urgent" not in got:
                        waited, took = steps - 40 + 1, time.perf_counter() - asked
                    got.setdefault(output.request_id, []).extend(output.tokens)
                steps += 1
        got.pop("urgent", None)
        where, full = "on the host" if host else "computed again", sum(len(tokens) == 200 for tokens in got.values())
        yield f"| {where} | {waited} | {1e3 * took:.1f} | {full} of 4 |"


def scale(engines: RowEngines, limit: float) -> Iterator[str]:
    """Let sixteen requests grow beyond the memory (§4.3): rows leave and come back, and no request fails."""
    yield "| memory | s | rows that left | of these to the host | answers in full |"
    yield "|---|---|---|---|---|"
    work = [Conversation(0.0, (Turn(64, SCALED),))] * 16
    enough = 0
    for share, host in ((1.0, 0.0), (0.4, 0.0), (0.4, 8.0)):
        sizes = dict(cache_gb=share * enough / 1e9) if share < 1 else {}
        with engines.engine(
            512, scheduler="stall-free", max_sequences=16, host_cache_gb=host, prefix_sharing=host > 0,
            steps_in_flight=IN_FLIGHT, **sizes,
        ) as (loop, shape, _):  # fmt: skip
            if shape.rows is not None:
                enough = enough or int(16 * shape.rows.bytes.of(512) * 1.1)
            served = serve(loop, work, engines.vocab_size, limit=limit)
        full = sum(len(record.token_times) == SCALED for record in served.records)
        memory = "as much as there is" if share == 1 else f"{share:.0%} of 16 rows of 512"
        yield (
            f"| {memory}{f', {host:g} GB of host' if host else ''} | {'cut at ' * served.cut}{served.seconds:.1f} | "
            f"{served.stats.preemptions} | {served.stats.suspensions} | {full} of 16 |"
        )
