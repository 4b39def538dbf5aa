"""Baton's methods on this machine's device: the runs of `benchmarks/baton.py run`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import baton
import torch
from invocation import provenance
from row_engines import LLAMA_2_7B, TINY, load_rows, row_engine, serve

from holdfast.core.types import Request, SamplingParams
from holdfast.lab.workloads import Conversation, Turn, fixed, num_requests
from holdfast.lm.padded.loading import UnmodifiedModel
from holdfast.lm.types import EngineShape, LanguageLoop

IN_FLIGHT = 2
WARM = fixed(8, 40, 8)
"""Served before each measurement: kernels are loaded and graphs captured when they first run."""


def run_target(
    target: str, batches: Sequence[int], names: Sequence[str], *, divide: float, tiny: bool, out: Path
) -> None:
    """Load the shape once, run what was asked, and keep the table under the device's name."""
    import transformers

    model = load_rows(TINY if tiny else LLAMA_2_7B)
    about: dict[str, Any] = provenance() | {"transformers": transformers.__version__, "model": model.architecture}
    stem = out / f"baton-{target}-{'tiny' if tiny else about['device'].replace(' ', '-')}"
    if target == "preempt":
        save_lines(stem, about, preempt(model))
        return
    if target == "scale":
        save_lines(stem, about, scale(model))
        return
    smaller = 1.0 if target == "target-2" else 1 / divide
    if tiny:
        smaller /= 4
    rows = []
    for batch in batches:
        for name in names:
            if baton.METHODS[name].junk:
                continue  # this engine cuts the junk
            rows.append(run(model, target, name, batch, smaller))
            print(f"{batch} {name}: {rows[-1].seconds:.1f} s", flush=True)
    lines = [*baton.compared(target, rows, same_size=False), *baton.ratios(rows)]
    baton.keep(stem, about | {"lengths": f"x {smaller:g}"}, rows, lines, curves=True)


def run(model: UnmodifiedModel, target: str, name: str, batch: int, smaller: float) -> baton.Ran:
    """One method at one batch size."""
    work = baton.workload_of(target, batch, smaller)
    longest = baton.longest_row(work)
    watched: list[baton.Watched] = []
    begin = 0.0

    def watch(executor: Any) -> Any:
        watched.append(baton.Watched(executor, lambda: time.monotonic() - begin))
        return watched[0]

    options = baton.options_of(baton.METHODS[name], batch, len(work))
    capped = replace(model, max_model_len=max(longest, 64))
    with row_engine(capped, wrap=watch, steps_in_flight=IN_FLIGHT, **options) as (loop, _, _):
        serve(loop, WARM, model.vocab_size)
        before = loop.stats()
        watched[0].positions.clear()
        watched[0].widest = 0
        begin = time.monotonic()
        served = serve(loop, work, model.vocab_size)
    assert len(served.records) == num_requests(work)
    return baton.Ran(
        name, batch, served.seconds, served.steps, served.stats.idle_tokens - before.idle_tokens,
        served.stats.preemptions, watched[0].widest, baton.curves_of(served.records, watched[0].positions),
    )  # fmt: skip


def request(name: str, prompt: int, output: int, vocabulary: int, priority: int = 0) -> Request:
    """A request of random tokens that are the same in every run."""
    tokens = torch.randint(16, vocabulary, (prompt,), generator=torch.Generator().manual_seed(len(name) + prompt))
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return Request(name, tuple(tokens.tolist()), params, priority=priority, arrival=time.monotonic())


def finish(loop: LanguageLoop) -> dict[str, list[int]]:
    """Run until nothing is left; by request, the tokens."""
    answers: dict[str, list[int]] = {}
    while loop.has_work():
        for output in loop.step() or ():
            answers.setdefault(output.request_id, []).extend(output.tokens)
    return answers


def preempt(model: UnmodifiedModel) -> list[str]:
    """Four rows decode and an urgent request arrives (§4.3): how long it waits, with and without a host tier."""
    lines = ["| state of the interrupted row | steps until the urgent one's first token | ms | same answers |"]
    lines.append("|---|---|---|---|")
    for host in (0.0, 4.0):
        answers = []
        for urgent in (False, True):
            with row_engine(
                model, scheduler="embedding", max_sequences=4, host_cache_gb=host, prefix_sharing=host > 0,
                max_model_len=1024, steps_in_flight=IN_FLIGHT,
            ) as (loop, _, _):  # fmt: skip
                for at in range(4):
                    loop.add(request(f"low-{at}", 64 + at, 200, model.vocab_size, priority=1))
                got: dict[str, list[int]] = {}
                steps = waited = 0
                begin = took = 0.0
                while loop.has_work():
                    if steps == 40 and urgent:
                        begin = time.perf_counter()
                        loop.add(request("urgent", 64, 20, model.vocab_size, priority=-1))
                    for output in loop.step() or ():
                        if output.request_id == "urgent" and "urgent" not in got:
                            waited, took = steps - 40 + 1, time.perf_counter() - begin
                        got.setdefault(output.request_id, []).extend(output.tokens)
                    steps += 1
                got.pop("urgent", None)
                answers.append(got)
        same = sum(answers[0][name] == answers[1][name] for name in answers[0])
        lines.append(f"| {'on the host' if host else 'computed again'} | {waited} | {1e3 * took:.1f} | {same} of 4 |")
    return lines


def scale(model: UnmodifiedModel) -> list[str]:
    """Sixteen requests grow beyond the memory: rows leave and come back, and nobody fails (§4.3)."""
    lines = ["| memory | s | rows that left | of these to the host | answers in full |", "|---|---|---|---|---|"]
    work = [Conversation(0.0, (Turn(64, 400),))] * 16
    for share, host in ((1.0, 0.0), (0.4, 0.0), (0.4, 8.0)):

        def options(shape: EngineShape | None, share: float = share, host: float = host) -> dict[str, Any]:
            sizes = {} if shape is None or shape.rows is None else dict(
                cache_gb=share * 16 * shape.rows.bytes.of(512) * 1.1 / 1e9
            )  # fmt: skip
            return dict(
                scheduler="stall-free", max_sequences=16, max_model_len=512, host_cache_gb=host,
                prefix_sharing=host > 0, steps_in_flight=IN_FLIGHT, **sizes,
            )  # fmt: skip

        with row_engine(model, **options(None)) as (_, shape, _):
            pass
        with row_engine(model, **options(shape)) as (loop, _, _):
            served = serve(loop, work, model.vocab_size)
        full = sum(len(record.token_times) == 400 for record in served.records)
        stats = served.stats
        lines.append(
            f"| {share:.0%}{f', {host:g} GB of host' if host else ''} | {served.seconds:.1f} | {stats.preemptions} | "
            f"{stats.suspensions} | {full} of 16 |"
        )
    return lines


def save_lines(stem: Path, about: dict[str, Any], lines: Sequence[str]) -> None:
    """Print the table and write it with where it came from."""
    baton.keep(stem, about, (), lines, curves=False)
