"""Decode throughput with drafts and without, by turns in one engine, for text that repeats itself and other text.

usage: python -m benchmarks.engine.speculation [WORKLOAD ...] [--batches 1,8,32,128] [--tokens N] [--repeat N]
                                               [--json FILE]
       [any engine flag as --set name=value]

On a GPU: a Llama-3-8B shape with random weights. On a CPU: the built-in model. Random weights write no real text, so a
bias on some tokens makes it repeat itself:

constant   greedy, one token over and over: every guess is right
mostly     temperature 1, one token about four times in five: like text with many repetitions
own        greedy, without a bias, after a pattern that repeats: the model's own continuation
random     temperature 1: no guess is right, so this is the cost of looking for drafts

A run's time begins with the first token of its last sequence, so prompts do not count. Each ratio is of runs in turn.
`equal` is the share of tokens that are the same with drafts and without. They are the same draws, so they differ only
where a step of another size rounds otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.llama8b import LLAMA_3_8B
from benchmarks.lib.invocation import add_engine_options, provenance
from holdfast.core.types import Request, SamplingParams
from holdfast.engine.process.build import build
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.speculation.planner import SpeculationPart
from holdfast.lm.scheduler.part import Hooks
from holdfast.lm.types import LanguageLoop

OFTEN, SELDOM = 300, 301
"""Tokens of the biased workloads."""
WORKLOADS: dict[str, SamplingParams] = {
    "constant": SamplingParams(temperature=0.0, logit_bias=((OFTEN, 100.0),)),
    "mostly": SamplingParams(temperature=1.0, logit_bias=((OFTEN, 100.0), (SELDOM, 98.6))),
    "own": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0),
}
PROMPT = 64
"""Number of tokens of a prompt."""
names = count()


def prompts(workload: str, batch: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Random tokens, or a random pattern of 16 that repeats."""
    rng = random.Random(batch)
    length = 16 if workload == "own" else PROMPT
    return [tuple(rng.randrange(10, vocab_size) for _ in range(length)) * (PROMPT // length) for _ in range(batch)]


def run(loop: LanguageLoop, given: Sequence[tuple[int, ...]], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Tokens per second once every sequence has one, and the tokens of each."""
    gc.collect()
    answers: dict[str, list[int]] = {}
    for index, prompt in enumerate(given):
        name = str(next(names))
        answers[name] = []
        loop.add(Request(name, prompt, replace(params, seed=index), arrival=time.monotonic()))
    began, before = 0.0, 0
    while loop.has_work():
        for output in loop.step() or ():
            answers[output.request_id] += output.tokens
        if not began and all(answers.values()):
            began, before = time.perf_counter(), sum(map(len, answers.values()))
    seconds = time.perf_counter() - began
    return (sum(map(len, answers.values())) - before) / seconds, list(answers.values())


def compare(loop: LanguageLoop, workload: str, batch: int, tokens: int, repeat: int, vocab_size: int) -> dict[str, Any]:
    """Run a workload with drafts and without, in turn."""
    planner: Any = loop.planner
    drafting = planner.part(SpeculationPart)
    with_drafts = planner.queues.hooks
    without = Hooks([part for part in with_drafts.parts if part is not drafting])
    given = prompts(workload, batch, vocab_size)
    params = replace(WORKLOADS[workload], max_tokens=tokens, ignore_eos=True)
    rates: dict[bool, list[float]] = {True: [], False: []}
    answers: dict[bool, list[list[int]]] = {}
    drafted, accepted = drafting.tokens_drafted, drafting.drafts_accepted
    try:
        for turn in range(2 * repeat):
            on = turn % 4 in (1, 2)
            planner.queues.hooks = with_drafts if on else without
            rate, answers[on] = run(loop, given, params)
            rates[on].append(rate)
    finally:
        planner.queues.hooks = with_drafts
    same = [one == other for pair in zip(*answers.values(), strict=True) for one, other in zip(*pair, strict=True)]
    on_rate, off_rate = statistics.median(rates[True]), statistics.median(rates[False])
    return dict(
        workload=workload,
        batch=batch,
        ratio=round(on_rate / off_rate, 3),
        on_tok_s=round(on_rate, 1),
        off_tok_s=round(off_rate, 1),
        on_runs=[round(rate, 1) for rate in rates[True]],
        off_runs=[round(rate, 1) for rate in rates[False]],
        drafted=drafting.tokens_drafted - drafted,
        accepted=drafting.drafts_accepted - accepted,
        equal=round(statistics.fmean(same), 4),
        gap_us=round(1e6 * drafting.account(batch).gap),
        trust=round(drafting.account(batch).trust, 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--batches", default="1,8,32,128", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--tokens", type=int, default=192, help="of each answer")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", default="{}", help="JSON that changes the shape, to try it on a small one")
    add_engine_options(parser)
    arguments = parser.parse_args()
    options: dict[str, Any] = dict(speculation="suffix", prefix_sharing=False, max_sequences=256)
    if torch.cuda.is_available() or arguments.shape != "{}":
        directory = Path(tempfile.mkdtemp(prefix="speculation-"))
        (directory / "config.json").write_text(json.dumps(LLAMA_3_8B | json.loads(arguments.shape)))
        options |= dict(model=str(directory), load_format="random")
    config = EngineConfig(**(options | dict(arguments.set)))
    loop, info = build(config)
    gc.freeze()
    gc.disable()
    about = provenance() | dict(model=info.model, started_in=round(info.started_in, 2), options=dict(arguments.set))
    print("HOLDFAST " + json.dumps(about), flush=True)
    run(loop, prompts("random", 4, info.vocab_size), replace(WORKLOADS["random"], max_tokens=32))
    results = []
    for workload in arguments.workloads or WORKLOADS:
        for batch in arguments.batches:
            compare(loop, workload, batch, 24, 1, info.vocab_size)  # warm-up
            results.append(compare(loop, workload, batch, arguments.tokens, arguments.repeat, info.vocab_size))
            print("HOLDFAST " + json.dumps(results[-1]), flush=True)
    loop.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(dict(about=about, results=results), indent=1))


if __name__ == "__main__":
    main()
