"""Our padded rows, `generate` in static batches, `generate_batch`, and our paged engine: one process, one model.

Run: python -m benchmarks.peers.beside_transformers [--streams 8 32] [--prompt 512] [--output 128] [--tiny]

A Llama-3-8B shape in bfloat16 with random weights; all requests at once, each with its own prompt and --output forced
tokens. `generate` gets them as one batch of equal lengths, its best case. With --unequal, answers have 1/4 to 7/4 of
--output tokens; `generate` then runs until the longest has ended, and only the tokens asked for count. The padded
engine runs captured decodes where the model allows it. The paged engine has the model to itself: it loads its own.

The host's share is measured on the padded engine: the part of the run in which the thread that plans and launches was
not waiting for the device.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.invocation import provenance, settle
from benchmarks.lib.row_engines import GRACE, LLAMA_3_8B, TINY, RowEngines, directory_of, progress, serve
from holdfast.engine.process.build import build
from holdfast.lab.workloads import Conversation, Turn, Workload
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import StepPlan, StepResult

RESULTS = Path(__file__).parent / "results"


class Waiting:
    """Wraps an executor and adds up the seconds in which the host waits for the device."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.seconds = 0.0

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        begin = time.perf_counter()
        result: StepResult = self._executor.collect()
        self.seconds += time.perf_counter() - begin
        return result

    def close(self) -> None:
        self._executor.close()


def work_of(streams: int, prompt: int, output: int, unequal: bool) -> Workload:
    choose = random.Random(streams)
    outputs = [choose.randint(output // 4, 7 * output // 4) if unequal else output for _ in range(streams)]
    return [Conversation(0.0, (Turn(prompt, each),)) for each in outputs]


def rate(tokens: int, seconds: Sequence[float]) -> dict[str, Any]:
    """Tokens per second at the median of these times."""
    middle = statistics.median(seconds)
    return {"seconds": [round(each, 3) for each in seconds], "tokens_per_second": round(tokens / middle, 1)}


def generated(model: Any, work: Workload, repeats: int, batch: bool, limit: float) -> dict[str, Any]:
    """Transformers' `generate`, or its `generate_batch`, of random prompts of these lengths."""
    turns = [talk.turns[0] for talk in work]
    longest, tokens = max(turn.output for turn in turns), sum(turn.output for turn in turns)
    ids = torch.randint(16, model.vocab_size, (len(turns), turns[0].prompt), device=model.device)

    if batch and model.device.type != "cuda":
        raise ValueError("generate_batch is for a GPU")

    def once() -> float:
        begin = time.perf_counter()
        if batch:
            from transformers import GenerationConfig

            config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1)
            model.module.generate_batch(ids.tolist(), generation_config=config, progress_bar=False)
        else:
            model.module.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=longest,
                max_new_tokens=longest, pad_token_id=0,
            )  # fmt: skip
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    once()  # the first run loads kernels
    return rate(tokens, repeated(once, repeats, limit))


def repeated(once: Callable[[], float], repeats: int, limit: float) -> list[float]:
    """Seconds of up to `repeats` runs. No new run begins after `limit` seconds."""
    begin, took = time.perf_counter(), [once()]
    while len(took) < repeats and time.perf_counter() - begin + took[-1] < limit:
        took.append(once())
    return took


def measured(loop: Any, work: Workload, vocab_size: int, repeats: int, limit: float) -> dict[str, Any]:
    """Our engine at this workload, after one run that does not count."""
    while loop.prepare():
        pass
    first = serve(loop, work, vocab_size, limit=limit)
    while loop.prepare():
        pass
    tokens = sum(turn.output for talk in work for turn in talk.turns)
    if first.cut:
        return {"cut_after_seconds": round(first.seconds, 1), "ended": len(first.records)}
    return rate(tokens, repeated(lambda: serve(loop, work, vocab_size, limit=limit).seconds, repeats, limit))


def tried(run: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any]:
    """The figures, or the reason why there are none. A call that does not return ends the process."""
    faulthandler.dump_traceback_later(limit + GRACE, exit=True)
    try:
        return run()
    except Exception as error:  # Transformers may raise any exception
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--unequal", action="store_true", help="answers of unequal length")
    parser.add_argument("--limit", type=float, default=120.0, help="most seconds of a row")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers: a trial on a CPU")
    parser.add_argument("--without", nargs="+", default=[], choices=("generate", "generate_batch", "padded", "paged"))
    parser.add_argument("--json", type=Path, help="file for the results; default: by device, beside the others")
    args = parser.parse_args()
    workloads_of = {at: work_of(at, args.prompt, args.output, args.unequal) for at in args.streams}
    about = provenance() | {"transformers": transformers.__version__}
    rows: dict[str, dict[str, Any]] = {}
    length, most = args.prompt + 2 * args.output, max(args.streams)
    shape = TINY if args.tiny else LLAMA_3_8B

    device_name = "tiny" if args.tiny else about["device"].replace(" ", "-")
    file = args.json or RESULTS / f"beside-transformers-{device_name}.json"

    def keep(name: str, row: dict[str, Any]) -> None:
        rows[name] = row
        file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        progress(json.dumps({name: row}))

    engines = RowEngines(shape)
    if "padded" not in args.without:
        waiting: list[Waiting] = []

        def watch(executor: Any) -> Any:
            waiting.append(Waiting(executor))
            return waiting[0]

        with engines.engine(length, wrap=watch, max_sequences=most) as (loop, _, device):
            for streams, work in workloads_of.items():
                row = measured(loop, work, engines.vocab_size, args.repeats, args.limit)
                waiting[0].seconds = 0.0
                last = serve(loop, work, engines.vocab_size, limit=args.limit)
                row["host_share"] = round(1 - waiting[0].seconds / last.seconds, 3)
                keep(f"padded, {streams}", row | {"captured": device.captures, "steps": last.steps})
            del device
    for name, batch in (("generate", False), ("generate_batch", True)):
        for streams, work in workloads_of.items() if name not in args.without else ():
            run = partial(generated, engines.model, work, args.repeats, batch, args.limit)
            keep(f"{name}, {streams}", tried(run, args.limit * args.repeats))
    del engines
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if "paged" not in args.without:
        with directory_of(shape) as directory:
            config = EngineConfig(
                model=str(directory), load_format="random", max_sequences=most, max_model_len=length,
                prefix_sharing=False, host_cache_gb=0,
            )  # fmt: skip
            paged, info = build(config)
            settle(paged)
            for streams, work in workloads_of.items():
                keep(f"paged, {streams}", measured(paged, work, info.vocab_size, args.repeats, args.limit))
            paged.close()


if __name__ == "__main__":
    main()
