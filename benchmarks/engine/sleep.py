"""Sleep mode: what it frees, how long it takes, and whether answers and kept conversations are the same afterwards.

usage: python -m benchmarks.engine.sleep [--small] [--rounds 2] [--json FILE] [--set NAME=VALUE ...]

The model is a Llama-3-8B shape with random weights (`--small`: a small one, for a CPU). Conversations of 2,000 tokens
are computed. Then the engine sleeps at level 1, at level 2, and with `mode=keep` while answers are under way. After
each sleep the conversations are asked again. Prints a JSON line a sleep: seconds of `sleep` and of `wake_up` by tag,
memory used before, during and after in GB (of the GPU; on a CPU, of the engine's process), whether all answers are
equal, the share of prompt tokens that were found in a tier, and the seconds that the answers took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.llama8b import LLAMA_3_8B, directory_of
from benchmarks.engine.multiturn import SMALL
from benchmarks.lib.invocation import add_engine_options, provenance
from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.types import SamplingParams
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.client.llm import LLM, Completion

GPU_MEMORY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0")
KEPT_SECONDS = 0.5
"""Seconds that answers are under way before the engine is put to sleep with mode `keep`."""


def used(llm: LLM, *, on_gpu: bool) -> float:
    """Memory in use, in GB."""
    if on_gpu:
        return round(int(subprocess.check_output(GPU_MEMORY, text=True).split()[0]) * 1048576 / 1e9, 3)
    status = Path(f"/proc/{llm._client.pid}/status").read_text()
    return round(int(status.partition("VmRSS:")[2].split()[0]) * 1024 / 1e9, 3)


def stats(llm: LLM) -> Any:
    """The engine's figures."""
    return llm._thread.run(llm._client.health())


def answers(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[list[Completion], float]:
    """The answers, and the seconds that they took."""
    began = time.perf_counter()
    found = llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True), progress=False)
    return found, round(time.perf_counter() - began, 3)


def timed(call: Any, *arguments: Any) -> float:
    """The seconds that a call takes."""
    began = time.perf_counter()
    call(*arguments)
    return round(time.perf_counter() - began, 3)


def compared(found: list[Completion], expected: list[Completion]) -> dict[str, Any]:
    """Whether answers are equal, and the share of their prompts that was found."""
    tokens, cached = sum(len(each.prompt_token_ids) for each in found), sum(each.cached_tokens for each in found)
    equal = sum(one.token_ids == other.token_ids for one, other in zip(found, expected, strict=True))
    return {"equal": f"{equal} of {len(found)}", "found": round(cached / tokens, 4)}


def main() -> None:
    """Run all sleeps and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    add_engine_options(parser)
    given = parser.parse_args()
    length, count, tokens = (160, 6, 24) if given.small else (2000, 16, 64)
    tokenizer = (Checkpoint.find(BUILTIN_MODEL).directory / "tokenizer.json").read_text()
    directory = directory_of(LLAMA_3_8B | (SMALL if given.small else {}), tokenizer)
    options = {"enable_sleep_mode": True, "load_format": "random", "host_cache_gb": 0.1 if given.small else 8.0}
    lines: list[dict[str, Any]] = []

    def note(**line: Any) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)
        if given.json:
            given.json.write_text(json.dumps({"provenance": provenance(), "lines": lines}, indent=1))

    began = time.perf_counter()
    with LLM(directory, **(options | dict(given.set))) as llm:
        on_gpu = "CPU" not in llm.info.memory.device
        note(step="start", seconds=round(time.perf_counter() - began, 1), weights_gb=llm.info.memory.weights / 1e9)
        while stats(llm).warming and time.perf_counter() - began < 120:
            time.sleep(0.2)
        limit = llm.info.vocab_size - 1
        prompts = [[1 + (97 * row + 31 * at * at) % limit for at in range(length)] for row in range(count)]
        first, _ = answers(llm, prompts, tokens)
        again, seconds = answers(llm, prompts, tokens)
        note(step="awake", used=used(llm, on_gpu=on_gpu), seconds=seconds, **compared(again, first))
        for level in [1, 2] * given.rounds:
            before = used(llm, on_gpu=on_gpu)
            asleep = timed(llm.sleep, level)
            during = used(llm, on_gpu=on_gpu)
            weights, cache = timed(llm.wake_up, ["weights"]), timed(llm.wake_up, ["kv_cache"])
            found, seconds = answers(llm, prompts, tokens)
            note(
                step=f"level {level}", sleep_s=asleep, wake_weights_s=weights, wake_cache_s=cache, used_before=before,
                used_asleep=during, used_after=used(llm, on_gpu=on_gpu), seconds=seconds, **compared(found, again),
            )  # fmt: skip
        kept: list[tuple[list[Completion], float]] = []
        thread = threading.Thread(target=lambda: kept.append(answers(llm, prompts, 8 * tokens)))
        expected, seconds = answers(llm, prompts, 8 * tokens)
        thread.start()
        time.sleep(min(KEPT_SECONDS, seconds / 2))
        asleep = timed(llm.sleep, 1, "keep")
        running, under_way = stats(llm), thread.is_alive()
        awake = timed(llm.wake_up)
        thread.join()
        note(
            step="keep", sleep_s=asleep, wake_s=awake, under_way=under_way, suspended=running.waiting,
            seconds_unbroken=seconds, seconds=kept[0][1], **compared(kept[0][0], expected),
        )  # fmt: skip


if __name__ == "__main__":
    main()
