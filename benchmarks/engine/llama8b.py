"""Offline throughput and worst steps of a Llama-3-8B shape with random weights: token ids in, token ids out.

usage: python -m benchmarks.engine.llama8b [ROW ...] [--json FILE] [--repeat N] [any engine flag as --set name=value]
rows:  bs1 bs32 bs128 chat prefill stall   (default: all), bs256 and, alone, start

Prompts use the seeds of the peer's script; greedy, end-of-sequence ignored, one process. So a figure compares with the
peer's of the same name. Without `stall`, steps are as large as those of `holdfast batch` and `LLM`. Prints one JSON
line a measurement; the file also holds each step of `stall`, where `prediction` is measured over predicted time of
mixed steps: 5%, median and 95%.

`start` times new processes until the first token of a first request, imports included: with an empty Triton cache of
its own, and again with the filled one. `--qwen` takes Qwen3-0.6B's shape, where the host has the least time for a step
(`bs256`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from benchmarks.lib.energy import energy_counter, joules_per_token
from benchmarks.lib.invocation import add_engine_options, provenance, settle
from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.cost import CostModel
from holdfast.core.types import Request, SamplingParams
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.client.llm import longest_first, rows_at_once
from holdfast.engine.process.build import Engine, build_engine
from holdfast.engine.profiles import CostProfile
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import StepPlan, StepResult
from holdfast.loop.contracts import Executor
from holdfast.loop.loop import Loop

LLAMA_3_8B = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=16384,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    torch_dtype="bfloat16",
    tie_word_embeddings=False,
)

QWEN3_06B = LLAMA_3_8B | dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    tie_word_embeddings=True,
)

Lengths = list[tuple[int, int]]


def directory_of(shape: dict[str, Any], tokenizer: str = "") -> str:
    """A new directory with a config.json, for random weights, and a tokenizer.json if one is given."""
    directory = tempfile.mkdtemp(prefix="shape-")
    Path(directory, "config.json").write_text(json.dumps(shape))
    if tokenizer:
        Path(directory, "tokenizer.json").write_text(tokenizer)
    return directory


def write_shape(directory: Path, shape: dict[str, Any]) -> None:
    """A checkpoint without weights in `directory`: a config.json, and the built-in model's tokenizer."""
    directory.mkdir(exist_ok=True)
    for file in Checkpoint.find(BUILTIN_MODEL).directory.glob("tokenizer*"):
        shutil.copy(file, directory)
    (directory / "config.json").write_text(json.dumps(shape))


def started(
    shape: dict[str, Any], tokenizer: str = "", *, model: str = "", secret: bytes = b"", **options: Any
) -> tuple[Engine, dict[str, float]]:
    """An engine with random weights of a shape, and the seconds of each stage of its start.

    Blocks move between engines of one `secret` that have the same `model`, a directory of the shape.
    """
    marks = [("starting", time.perf_counter())]
    directory = model or directory_of(shape, tokenizer)
    engine = build_engine(
        EngineConfig(model=directory, load_format="random", **{"max_waiting": 10_000} | options),
        on_progress=lambda stage: marks.append((stage, time.perf_counter())),
        chunk_secret=secret,
    )
    marks.append(("ready", time.perf_counter()))
    return engine, {stage: round(end - start, 2) for (stage, start), (_, end) in pairwise(marks)}


def draw(rng: random.Random, count: int) -> tuple[int, ...]:
    """Token ids far from the special ones."""
    return tuple(rng.randrange(10, 100000) for _ in range(count))


def request(name: str, prompt: tuple[int, ...], output: int, temperature: float = 0.0) -> Request:
    params = SamplingParams(temperature=temperature, max_tokens=output, ignore_eos=True)
    return Request(name, prompt=prompt, params=params, arrival=time.monotonic())


def offline(
    loop: Loop, label: str, lengths: Lengths, temperature: float = 0.0, *, spread: bool = True
) -> dict[str, Any]:
    """Run all requests at once, and return the seconds until the last ends.

    They start in the order in which `LLM.generate` starts them, and as many run at once, or all if not `spread`.

    `distinct_share` is the share of different tokens among those that a step gives, averaged over all steps. Greedy
    text of random weights may end in the same tokens for all, which choose the same experts. With a GPU that counts its
    energy there are joules for each token of the answers and for each token of all.
    """
    rng, energy = random.Random(0), energy_counter()
    prompts = [draw(rng, tokens) for tokens, _ in lengths]
    steps: list[float] = []
    produced = distinct = 0
    before_run = 0.0 if energy is None else energy()
    begin = time.perf_counter()
    outputs_of = [output for _, output in lengths]
    waiting = iter(longest_first(outputs_of))

    def start(count: int) -> None:
        for index in islice(waiting, count):
            loop.add(request(f"{label}-{index}-{begin}", prompts[index], lengths[index][1], temperature))

    start(rows_at_once(outputs_of) if spread else len(lengths))
    while loop.has_work():
        before = time.perf_counter()
        outputs = loop.step() or ()
        steps.append(time.perf_counter() - before)
        start(sum(output.finish_reason is not None for output in outputs))
        tokens = [token for output in outputs for token in output.tokens]
        produced += len(tokens)
        distinct += len({*tokens})
    seconds = time.perf_counter() - begin
    used = None if energy is None else energy() - before_run
    prompt_tokens = sum(tokens for tokens, _ in lengths)
    return dict(
        **joules_per_token(used, produced, produced + prompt_tokens),
        requests=len(lengths),
        seconds=round(seconds, 3),
        output_tok_s=round(produced / seconds, 1),
        total_tok_s=round((produced + prompt_tokens) / seconds, 1),
        steps=len(steps),
        step_ms_p50=round(1e3 * statistics.median(steps), 3),
        distinct_share=round(distinct / produced, 3),
    )


def chat_lengths() -> Lengths:
    rng = random.Random(1)

    def clip(value: float, high: int) -> int:
        return max(4, min(high, int(value)))

    return [(clip(rng.lognormvariate(4.8, 1.1), 4096), clip(rng.lognormvariate(4.9, 0.95), 2048)) for _ in range(1000)]


class Recorder:
    """Wraps a loop's executor and notes each step's content and time."""

    def __init__(self, executor: Executor, cost: CostModel | None) -> None:
        self._executor, self._cost = executor, cost
        self._plans: deque[tuple[StepPlan, float]] = deque()
        self.steps: list[dict[str, Any]] = []

    def submit(self, plan: StepPlan) -> None:
        before = time.perf_counter()
        self._executor.submit(plan)
        self._plans.append((plan, time.perf_counter() - before))

    def collect(self) -> StepResult:
        result = self._executor.collect()
        plan, submitting = self._plans.popleft()
        segments = [(segment.stop - segment.start, segment.stop) for segment in plan.segments]
        self.steps.append(
            dict(
                at=time.perf_counter(),
                sequences=len(plan.segments),
                tokens=plan.num_tokens,
                longest_context=max((segment.stop for segment in plan.segments), default=0),
                device_ms=round(1e3 * result.seconds, 3),
                submit_ms=round(1e3 * submitting, 3),
                segments=segments,
            )
        )
        return result

    def predict(self) -> None:
        """Add the cost model's prediction to each step. This comes after the run, because it takes time."""
        for step in self.steps:
            segments = step.pop("segments")
            if self._cost is not None:
                step["predicted_ms"] = round(1e3 * self._cost.step(segments), 3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def stall(loop: Loop, cost: CostModel | None = None) -> dict[str, Any]:
    """Let four 8,000-token prompts join 32 decodes. Returns how long a decode waits, and what the prefill loses.

    `gap_ms` is the time between two tokens of the streams: from the end of one step to that of the next.
    """
    rng = random.Random(2)
    stamp = time.monotonic()
    prompts = {f"p{index}-{stamp}": draw(rng, 8000) for index in range(4)}
    executor = loop.executor
    loop.executor = recorder = Recorder(executor, cost)
    waiting: set[str] = set()
    first, last = 0, 0
    for index in range(32):
        loop.add(request(f"d{index}-{stamp}", draw(rng, 256), 400))
    while loop.has_work():
        if len(recorder.steps) == 100 and not first:
            for name, prompt in prompts.items():
                loop.add(request(name, prompt, 4))
            waiting.update(prompts)
            first = len(recorder.steps)
        for output in loop.step() or ():
            if output.request_id in waiting:
                waiting.remove(output.request_id)
                last = len(recorder.steps)
    loop.executor = executor
    recorder.predict()
    steps = recorder.steps
    for before, step in pairwise(steps):
        step["gap_ms"] = round(1e3 * (step["at"] - before["at"]), 3)
    joined = steps[first:last]
    gaps = sorted(step["gap_ms"] for step in joined)
    mixed = [step for step in joined if step["tokens"] > step["sequences"]]
    return dict(
        decode_ms=round(statistics.median(step["gap_ms"] for step in steps[40:99]), 2),
        worst_ms=round(gaps[-1], 2),
        p99_ms=round(gaps[int(0.99 * (len(gaps) - 1))], 2),
        prefill_tok_s=round(32_000 / (joined[-1]["at"] - steps[first - 1]["at"])),
        mixed_steps=len(mixed),
        worst_submit_ms=max(step["submit_ms"] for step in mixed),
        prediction=[
            round(quantile, 3)
            for quantile in statistics.quantiles((step["device_ms"] / step["predicted_ms"] for step in mixed), n=20)[
                ::9
            ]
        ]
        if cost is not None
        else None,
        steps=[{key: value for key, value in step.items() if key != "at"} for step in steps],
    )


ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "bs1": lambda loop, temperature=0.0: offline(loop, "bs1 512/256", [(512, 256)], temperature),
    "bs32": lambda loop, temperature=0.0: offline(loop, "bs32 512/128", [(512, 128)] * 32, temperature),
    "bs128": lambda loop, temperature=0.0: offline(loop, "bs128 512/128", [(512, 128)] * 128, temperature),
    "chat": lambda loop, temperature=0.0: offline(loop, "chat 1000", chat_lengths(), temperature),
    "prefill": lambda loop, temperature=0.0: offline(loop, "prefill 16x8192", [(8192, 16)] * 16, temperature),
    "prefill8": lambda loop, temperature=0.0: offline(loop, "prefill 8x8192", [(8192, 16)] * 8, temperature),
    "bs256": lambda loop, temperature=0.0: offline(loop, "bs256 128/128", [(128, 128)] * 256, temperature),
    "first": lambda loop, temperature=0.0: first_token(loop),
}
DEFAULT = ("bs1", "bs32", "bs128", "chat", "prefill", "stall")


def options_of(rows: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an engine that runs these rows, with those that are given.

    Nobody watches offline rows, so steps are large in them, as in `holdfast batch` and `LLM`. For `stall` and `first`
    they are those of a server.
    """
    watched = "stall" in rows or "first" in rows or "tbt_target" in given
    large = {} if watched else {"token_budget": "large"}
    return {"max_sequences": 512, "prefix_sharing": False} | large | dict(given)


def first_token(loop: Loop) -> dict[str, Any]:
    """The monotonic clock at the first token of a request."""
    loop.add(request("first", draw(random.Random(4), 512), 4))
    while not any(len(output.tokens) for output in loop.step() or ()):
        pass
    return dict(at=time.monotonic())


def starts(options: list[str], repeat: int) -> dict[str, Any]:
    """Start new processes. Returns their times to the first token with an empty and a filled cache, and the stages."""
    runs = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="triton-") as cache:
            for found in ("nothing", "all kernels"):
                command = [sys.executable, "-m", "benchmarks.engine.llama8b", "first", *options]
                environment = os.environ | dict(TRITON_CACHE_DIR=cache)
                began = time.monotonic()  # one clock for all processes
                ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                lines = [json.loads(line[9:]) for line in ended.stdout.splitlines() if line.startswith("HOLDFAST {")]
                if ended.returncode or len(lines) != 2:
                    raise RuntimeError(f"the start ended with {ended.returncode}: {ended.stderr[-2000:]}")
                about, first = lines
                seconds = round(first["at"] - began, 2)
                runs.append(dict(compiled=found, seconds=seconds, stages=about["stages"], about=about))
                print("HOLDFAST " + json.dumps(dict(what="start") | runs[-1] | dict(about=None)), flush=True)
    return dict(results=runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}, stall, start")
    add_engine_options(parser)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", default="{}", help="JSON that changes the shape, to try it on a small one")
    parser.add_argument("--qwen", action="store_true", help="Qwen3-0.6B's shape in place of Llama-3-8B's")
    arguments = parser.parse_args()
    if arguments.rows == ["start"]:
        settings = [part for name, value in arguments.set for part in ("--set", f"{name}={json.dumps(value)}")]
        settings += ["--shape", arguments.shape]
        found = starts([*settings, *(["--qwen"] if arguments.qwen else [])], arguments.repeat)
        if arguments.json:
            arguments.json.write_text(json.dumps(provenance() | found, indent=1))
        return
    options = options_of(arguments.rows or DEFAULT, dict(arguments.set))
    shape = (QWEN3_06B if arguments.qwen else LLAMA_3_8B) | json.loads(arguments.shape)
    begin = time.perf_counter()
    engine, stages = started(shape, **options)
    loop, info = engine.loop, engine.info
    # As the engine's process does: objects that exist now stay, and no collection falls into a step.
    gc.collect()
    gc.freeze()
    gc.disable()
    cost = CostProfile.load(Path(info.profile_path)).cost if info.profile_path else None
    about = provenance() | dict(
        options=options,
        blocks=info.num_blocks,
        token_budget=info.token_budget,
        started_in=round(time.perf_counter() - begin, 2),
        stages=stages,
    )
    print("HOLDFAST " + json.dumps(about), flush=True)
    if arguments.rows != ["first"]:
        settle(loop)
        offline(loop, "warm-up", [(32, 8)] * 4)
    results = []
    for row in arguments.rows or DEFAULT:
        if row == "stall":
            stall(loop)  # warm-up
        for _ in range(arguments.repeat):
            results.append(dict(what=row, **(stall(loop, cost) if row == "stall" else ROWS[row](loop))))
            shown = {key: value for key, value in results[-1].items() if key != "steps"}
            print("HOLDFAST " + json.dumps(shown), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(dict(about=about, results=results), indent=1))


if __name__ == "__main__":
    main()
