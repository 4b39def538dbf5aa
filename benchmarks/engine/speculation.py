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
dialogue   greedy answers of the built-in model to dialogues that it was not trained on, each to its own end
chat       the same at temperature 1

A draft head is compared by `--set speculation=eagle3 --set draft_model=PATH`. The last two workloads have ROUNDS
prompts for each stream, and a stream takes the next one as its answer ends.

`--rates 0.8,0.7,0.6,0.5` shows what a trained head would gain. The head has the size and the format of a published
EAGLE-3 head for the shape, and random weights. It makes all its passes. Then this benchmark puts the right token in the
place of the n-th guess with the n-th of these chances, given that the guesses before are right, and a wrong one
otherwise; the last chance is for all later guesses. Published heads begin near 0.8 (EAGLE-3, arXiv 2503.01840).
`--rates 0.8,0.7,0.768,0.674,0.828,0.583,0.571` gives 2.36, 2.79, 3.08, 3.32, 3.46 and 3.54 tokens a step with 2 to 7
guesses, as an EAGLE-3 head gave for Llama 3.1 8B in vLLM (vllm-project/vllm issue 20780). The workload is `constant`,
whose right token is known.

A run's time begins with the first token of its last sequence, so prompts do not count. Each ratio is of runs in turn.
The gaps are the times between two deliveries of tokens to a stream, of all runs.
`on_cpu_s` and `off_cpu_s` are processor seconds of all runs, prompts included. On a shared CPU they say more than
rates.
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
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from benchmarks.engine.llama8b import LLAMA_3_8B
from benchmarks.lib.invocation import add_engine_options, provenance, settle
from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.types import Request, SamplingParams
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.process.build import build
from holdfast.lab.metrics import percentile
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.part import Allocated
from holdfast.lm.parts.speculation.device import HeadDevice, HeadExecutor
from holdfast.lm.parts.speculation.drafting import DraftingPart
from holdfast.lm.parts.speculation.head_planner import Decision
from holdfast.lm.parts.speculation.passes import Last
from holdfast.lm.parts.speculation.values import HeadResult
from holdfast.lm.scheduler.part import Hooks
from holdfast.lm.types import LanguageLoop, StepPlan, StepResult
from tools.tiny.dialogues import write_dialogue
from tools.tiny.tokens import encode_dialogue

OFTEN, SELDOM = 300, 301
"""Tokens of the biased workloads."""
WORKLOADS: dict[str, SamplingParams] = {
    "constant": SamplingParams(temperature=0.0, logit_bias=((OFTEN, 100.0),)),
    "mostly": SamplingParams(temperature=1.0, logit_bias=((OFTEN, 100.0), (SELDOM, 98.6))),
    "own": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0),
    "dialogue": SamplingParams(temperature=0.0),
    "chat": SamplingParams(temperature=1.0),
}
DIALOGUES = ("dialogue", "chat")
"""Workloads of dialogues, which only the built-in model has learned to answer."""
ROUNDS = 8
"""Number of prompts of a dialogue for each stream."""
PROMPT = 64
"""Number of tokens of a prompt."""
names = count()


def prompts(workload: str, batch: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Random tokens, or a random pattern of 16 that repeats; or dialogues up to a turn of the assistant."""
    rng = random.Random(batch)
    if workload in DIALOGUES:
        tokenizer = Tokenizer.from_file(str(Checkpoint.find(BUILTIN_MODEL).directory / "tokenizer.json"))
        found: list[tuple[int, ...]] = []
        while len(found) < ROUNDS * batch:
            ids, said = encode_dialogue(tokenizer, write_dialogue(rng, "heldout"))
            turns = [at for at in range(1, len(ids)) if said[at] and not said[at - 1]]
            found.append(tuple(ids[: rng.choice(turns)]))
        return found
    length = 16 if workload == "own" else PROMPT
    return [tuple(rng.randrange(10, vocab_size) for _ in range(length)) * (PROMPT // length) for _ in range(batch)]


def random_head(shape: dict[str, Any], directory: Path) -> None:
    """Write a draft head of random weights for a shape, in the format of published EAGLE-3 checkpoints."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries, keys = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    drafted = min(32_000, shape["vocab_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
    }
    made = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(size, generator=made) * 0.02 if len(size) > 1 else torch.ones(size)).to(torch.bfloat16)
        for name, size in shapes.items()
    }
    tensors["d2t"] = torch.zeros(drafted, dtype=torch.int64)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    layers = shape["num_hidden_layers"]
    changed = dict(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=drafted,
        eagle_aux_hidden_state_layer_ids=[min(2, layers - 3), layers // 2, layers - 1],
    )
    (directory / "config.json").write_text(json.dumps(shape | changed))


def agree(rates: Sequence[float]) -> None:
    """Have all heads that are built from now on guess OFTEN with these chances, by place, in place of their guesses."""

    class Agreeing(HeadExecutor):
        """A head that does all its work. Its guesses are then replaced."""

        def __init__(self, *arguments: Any, **more: Any) -> None:
            self._chances: torch.Tensor | None = None
            super().__init__(*arguments, **more)

        def _guess(self, last: Last, drafts: int) -> torch.Tensor:
            guesses = super()._guess(last, drafts)
            if self._chances is None:  # kept, because a new copy for each step would wait for pinned memory
                every = [rates[min(place, len(rates) - 1)] for place in range(self._most)]
                self._chances = torch.tensor(every, device=guesses.device)
            right = torch.rand(guesses.shape, device=guesses.device) < self._chances[:drafts]
            return torch.where(right, OFTEN, SELDOM).to(guesses.dtype)

    def executor(device: HeadDevice, allocated: Allocated) -> HeadExecutor:
        memory = allocated.memory
        return Agreeing(device.layer, device.memory, memory.batch.drawn, captured=bool(memory.graphs))

    HeadDevice.executor = executor  # type: ignore[method-assign]


def run(
    loop: LanguageLoop, given: Sequence[tuple[int, ...]], params: SamplingParams, streams: int
) -> tuple[float, list[list[int]], list[float]]:
    """Tokens per second once every stream has one, the tokens of each answer, and the gaps of all streams in seconds.

    At most `streams` run at once.
    """
    gc.collect()
    gaps: list[float] = []
    latest: dict[str, float] = {}
    answers: dict[str, list[int]] = {}
    waiting = deque(enumerate(given))

    def add() -> None:
        index, prompt = waiting.popleft()
        name = str(next(names))
        answers[name] = []
        loop.add(Request(name, prompt, replace(params, seed=index), arrival=time.monotonic()))

    for _ in range(streams):
        add()
    began, before = 0.0, 0
    while loop.has_work():
        outputs = loop.step() or ()
        now = time.perf_counter()
        for output in outputs:
            answers[output.request_id] += output.tokens
            if output.tokens:
                if began and output.request_id in latest:
                    gaps.append(now - latest[output.request_id])
                latest[output.request_id] = now
            if output.finish_reason is not None and waiting:
                add()
        if not began and all(answers.values()):
            began, before = time.perf_counter(), sum(map(len, answers.values()))
    seconds = time.perf_counter() - began
    return (sum(map(len, answers.values())) - before) / seconds, list(answers.values()), gaps


def drafting_part(loop: LanguageLoop) -> DraftingPart:
    """The part of the loop's scheduler that lets decodes verify guesses."""
    planner: Any = loop.planner
    return next(part for part in planner.parts if isinstance(part, DraftingPart))


def verify_all(drafting: Any) -> None:
    """Have all guesses verified, and as many made as `draft_tokens` allows, without a look at costs."""
    drafting._best = lambda running: Decision(running, drafting._most)
    drafting._shares = lambda uses, *rest, **more: (list(map(len, uses)), 1.0)


def compare(loop: LanguageLoop, workload: str, batch: int, tokens: int, repeat: int, vocab_size: int) -> dict[str, Any]:
    """Run a workload with drafts and without, in turn."""
    planner: Any = loop.planner
    drafting = drafting_part(loop)
    with_drafts = planner.queues.hooks
    without = Hooks([part for part in with_drafts.parts if part is not drafting])
    given = prompts(workload, batch, vocab_size)
    params = replace(WORKLOADS[workload], max_tokens=tokens, ignore_eos=workload not in DIALOGUES)
    rates: dict[bool, list[float]] = {True: [], False: []}
    work = {True: 0.0, False: 0.0}
    answers: dict[bool, list[list[int]]] = {}
    gaps: dict[bool, list[float]] = {True: [], False: []}
    drafted, accepted = drafting.tokens_drafted, drafting.drafts_accepted
    try:
        for turn in range(2 * repeat):
            on = turn % 4 in (1, 2)
            planner.queues.hooks = with_drafts if on else without
            began = time.process_time()
            rate, answers[on], between = run(loop, given, params, batch)
            gaps[on] += between
            work[on] += time.process_time() - began
            rates[on].append(rate)
    finally:
        planner.queues.hooks = with_drafts
    pairs = list(zip(*answers.values(), strict=True))
    same = [one == other for pair in pairs for one, other in zip_longest(*pair)]
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
        on_gap_ms=gap_figures(gaps[True]),
        off_gap_ms=gap_figures(gaps[False]),
        on_cpu_s=round(work[True], 3),
        off_cpu_s=round(work[False], 3),
        gap_us=round(1e6 * drafting.account(batch).gap),
        trust=round(drafting.account(batch).trust, 3),
    )


class Passes:
    """Notes the time of each pass through a draft head, and of each step that verifies guesses."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.steps: list[float] = []

    def planned(self, plan: StepPlan) -> None:
        """Only results count."""

    def ended(self, result: StepResult) -> None:
        """Note the passes of a step, and its time if it verifies guesses."""
        found = result.part(HeadResult)
        if result.counts is not None:
            self.steps.append(result.seconds)
        if found.passes:
            self.seconds.append(found.seconds / found.passes)

    def close(self) -> None:
        """Nothing is left to do."""

    def figures(self) -> dict[str, Any]:
        """Number of the steps with guesses since the last call; medians and most, in ms, of passes and of such steps.

        A step that verifies guesses takes `verify_ms`. On a CPU the head's passes are part of it.
        """
        found, steps, self.seconds, self.steps = sorted(self.seconds), sorted(self.steps), [], []
        if not found:
            return dict(head_steps=0)
        times = {name: [round(1e3 * percentile(each, share), 3) for share in (0.5, 1.0)]
                 for name, each in (("pass_ms", found), ("verify_ms", steps)) if each}  # fmt: skip
        return dict(head_steps=len(found)) | times


def gap_figures(gaps: Sequence[float]) -> list[float]:
    """Median, P99 and longest gap in milliseconds."""
    return [round(1e3 * percentile(sorted(gaps), share), 2) for share in (0.5, 0.99, 1.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = f"of {', '.join(WORKLOADS)}; default: all but dialogues"
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=what)
    parser.add_argument("--batches", default="1,8,32,128", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--tokens", type=int, default=192, help="of each answer")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--always", action="store_true", help="verify each guess, whatever it costs: shares of right ones"
    )
    parser.add_argument(
        "--rates",
        type=lambda text: [float(part) for part in text.split(",")],
        help="a random draft head whose guesses are right with these chances, by place",
    )
    parser.add_argument("--shape", default="{}", help="JSON that changes the shape, to try it on a small one")
    add_engine_options(parser)
    arguments = parser.parse_args()
    options: dict[str, Any] = dict(speculation="suffix", prefix_sharing=False, max_sequences=256)
    if torch.cuda.is_available() or arguments.shape != "{}":
        directory = Path(tempfile.mkdtemp(prefix="speculation-"))
        (directory / "config.json").write_text(json.dumps(LLAMA_3_8B | json.loads(arguments.shape)))
        options |= dict(model=str(directory), load_format="random")
    if arguments.rates:
        random_head(LLAMA_3_8B | json.loads(arguments.shape), head := Path(tempfile.mkdtemp(prefix="head-")) / "head")
        options |= dict(speculation="eagle3", draft_model=str(head))
        agree(arguments.rates)
    config = EngineConfig(**(options | dict(arguments.set)))
    loop, info = build(config)
    if arguments.always:
        verify_all(drafting_part(loop))
    gc.freeze()
    gc.disable()
    about = provenance() | dict(model=info.model, started_in=round(info.started_in, 2), options=dict(arguments.set))
    about |= dict(rates=arguments.rates)
    print("HOLDFAST " + json.dumps(about), flush=True)
    settle(loop)
    loop.observe(passes := Passes())
    results = []
    usual = ["constant"] if arguments.rates else [name for name in WORKLOADS if name not in DIALOGUES]
    first = "constant" if arguments.rates else "random"  # the given rates say nothing of other text
    run(loop, prompts(first, 4, info.vocab_size), replace(WORKLOADS[first], max_tokens=32), 4)
    for workload in arguments.workloads or usual:
        for batch in arguments.batches:
            compare(loop, workload, batch, 24, 1, info.vocab_size)  # warm-up
            passes.figures()
            found = compare(loop, workload, batch, arguments.tokens, arguments.repeat, info.vocab_size)
            results.append(found | passes.figures())
            print("HOLDFAST " + json.dumps(results[-1]), flush=True)
    loop.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(dict(about=about, results=results), indent=1))


if __name__ == "__main__":
    main()
