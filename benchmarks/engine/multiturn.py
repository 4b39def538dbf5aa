"""Conversations with think time, in real time, over Holdfast's loop in this process.

usage: python -m benchmarks.engine.multiturn [--modes stateless device tiers] (--rates 6 20 | --workload FILE)
                                             [--json FILE]
                                             [--device-gb 16] [--host-gb 32] [any engine option as --set name=value]

The rules are those of the peer's driver. Each request carries the whole conversation as token ids, greedy,
end-of-sequence ignored; the next turn follows the answer by its think time. Seconds from `--warm` to `--until` count. A
mode says what is kept between turns: nothing, blocks on the device, or blocks on device and host. The model is a
Llama-3-8B shape with random weights; `--small` takes a small one for a CPU, `--shape` changes either, `--shorter`
divides lengths. Prints one JSON line for each mode and rate.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.llama8b import LLAMA_3_8B
from benchmarks.lib.in_real_time import StepRecord
from benchmarks.lib.invocation import add_engine_options, provenance, settle
from benchmarks.lib.multiturn_talks import MODES, draw, even_workload, shortened, workload
from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.engine.messages import EngineInfo
from holdfast.engine.process.build import build
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import SchedulerStats
from holdfast.loop.loop import Loop

SMALL = dict(
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    torch_dtype="float32",
)


@dataclass(slots=True)
class Asked:
    """A request in progress."""

    conversation: int
    turn: int
    since: float
    prompt: tuple[int, ...]
    answer: list[int] = field(default_factory=list)
    last: float = 0.0


@dataclass
class Seen:
    """Figures of the clients within the window. Times are in seconds."""

    done: int = 0
    generated: int = 0
    prompt: int = 0
    cached: int = 0
    normalized: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    tbt: list[float] = field(default_factory=list)


def converse(
    loop: Loop,
    conversations: Sequence[dict[str, Any]],
    *,
    warm: float,
    until: float,
    info: EngineInfo,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Play the conversations for `until` seconds; returns the figures after `warm`."""
    rng, seen = random.Random(3), Seen()
    due = [(conversation["arrival_s"], number, 0) for number, conversation in enumerate(conversations)]
    heapq.heapify(due)
    history: dict[int, tuple[int, ...]] = {}
    live: dict[str, Asked] = {}
    run = str(time.monotonic_ns())  # a new tenant, so that state left by another run is not found
    start = clock()
    now, before, waited = 0.0, loop.stats(), 0
    while (due or live) and (now := clock() - start) < until:
        while due and due[0][0] <= now:
            _, number, turn = heapq.heappop(due)
            said = conversations[number]["turns"][turn]
            prompt = history.get(number, ()) + draw(rng, said["input_tokens"], info.vocab_size)
            if len(prompt) + said["output_tokens"] >= info.max_model_len:
                continue
            name = f"{run}.{number}.{turn}"
            live[name] = Asked(number, turn, now, prompt)
            params = SamplingParams(temperature=0.0, max_tokens=said["output_tokens"], ignore_eos=True)
            loop.add(Request(name, prompt, params, identity=Identity(tenant=run), arrival=start + now))
        if not live:
            sleep(max(0.0, min(until, due[0][0]) - (clock() - start)))
            continue
        outputs = loop.step()
        now = clock() - start
        for output in outputs:
            asked = live[output.request_id]
            if now > warm:
                (seen.tbt if asked.answer else seen.ttft).append(now - (asked.last if asked.answer else asked.since))
            asked.last = now
            asked.answer.extend(output.tokens)
            if output.finish_reason is None:
                continue
            del live[output.request_id]
            if now > warm:
                seen.done += 1
                seen.generated += len(asked.answer)
                seen.normalized.append((now - asked.since) / len(asked.answer))
                seen.prompt += len(asked.prompt)
                seen.cached += output.cached_tokens
            history[asked.conversation] = asked.prompt + tuple(asked.answer)
            turns = conversations[asked.conversation]["turns"]
            if asked.turn + 1 < len(turns):
                heapq.heappush(due, (now + turns[asked.turn + 1]["think_s"], asked.conversation, asked.turn + 1))
        waited = max(waited, loop.stats().waiting) if outputs and len(seen.tbt) % 64 == 0 else waited
    seconds = clock() - start - warm
    after = loop.stats()
    for request in live:
        loop.abort(request)
    while loop.has_work():
        loop.step()
    return figures(seen, seconds) | dict(unfinished=len(live), most_waiting=waited, **moved(before, after))


def figures(seen: Seen, seconds: float) -> dict[str, Any]:
    """The peer's figures, under its names."""

    def at(values: list[float], share: float) -> float | None:
        ascending = sorted(values)
        return round(1e3 * ascending[min(len(values) - 1, int(share * len(values)))], 2) if values else None

    return dict(
        requests=seen.done,
        seconds=round(seconds, 1),
        req_s=round(seen.done / seconds, 2),
        output_tok_s=round(seen.generated / seconds, 1),
        norm_latency_ms_mean=round(1e3 * statistics.mean(seen.normalized), 2) if seen.normalized else None,
        norm_latency_ms_p90=at(seen.normalized, 0.9),
        ttft_ms_p50=at(seen.ttft, 0.5),
        ttft_ms_p99=at(seen.ttft, 0.99),
        tbt_ms_p50=at(seen.tbt, 0.5),
        tbt_ms_p99=at(seen.tbt, 0.99),
        prompt_hit=round(seen.cached / max(1, seen.prompt), 4),
    )


def moved(before: SchedulerStats, after: SchedulerStats) -> dict[str, int]:
    """Scheduler counters between two readings."""
    names = (
        "tokens_computed",
        "tokens_recovered",
        "blocks_swapped_in",
        "blocks_swapped_out",
        "host_blocks_dropped",
        "preemptions",
    )
    return {name: getattr(after, name) - getattr(before, name) for name in names}


def options_of(arguments: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Engine options of a mode."""
    options: dict[str, Any] = dict(max_sequences=512, max_waiting=100_000, cache_gb=arguments.device_gb)
    return options | dict(host_cache_gb=arguments.host_gb) | MODES[mode] | dict(arguments.set)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="new conversations a second")
    parser.add_argument("--workload", nargs="+", type=Path, default=[], help="files of conversations, JSON lines")
    parser.add_argument("--seconds", type=float, default=90.0, help="conversations arrive for so long")
    parser.add_argument("--think", type=float, default=5.0, help="mean think time in seconds")
    parser.add_argument(
        "--even", nargs=3, type=int, metavar=("TURNS", "IN", "OUT"), help="all conversations have this shape, in tokens"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", type=float, default=10.0)
    parser.add_argument("--until", type=float, default=70.0)
    parser.add_argument("--device-gb", type=float, default=16.0)
    parser.add_argument("--host-gb", type=float, default=32.0)
    add_engine_options(parser)
    parser.add_argument("--small", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--shape", default="{}", help="JSON that changes the model's shape")
    parser.add_argument("--shorter", type=float, default=1.0, help="divide the lengths of turns by this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=Path, help="write a record of every step there; of the last mode, all loads")
    arguments = parser.parse_args()
    arriving = partial(even_workload, shape=arguments.even) if arguments.even else workload
    loads: dict[str, list[dict[str, Any]]] = {
        f"{rate:g}/s": list(arriving(rate, arguments.seconds, arguments.think, arguments.seed))
        for rate in arguments.rates
    }
    loads |= {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in arguments.workload}
    if not loads:
        parser.error("give --rates or --workload")
    directory = Path(tempfile.mkdtemp(prefix="llama8b-"))
    (directory / "config.json").write_text(
        json.dumps(LLAMA_3_8B | (SMALL if arguments.small else {}) | json.loads(arguments.shape))
    )
    results: list[dict[str, Any]] = []
    about = provenance()
    for mode in arguments.modes:
        options = options_of(arguments, mode)
        begin = time.perf_counter()
        loop, info = build(EngineConfig(model=str(directory), load_format="random", **options))
        started = dict(blocks=info.num_blocks, host_blocks=info.num_host_blocks, token_budget=info.token_budget)
        about |= dict(options=options)
        print(
            "HOLDFAST " + json.dumps(about | started | dict(start_s=round(time.perf_counter() - begin, 1))), flush=True
        )
        settle(loop)
        warm_up(loop, info)
        record = StepRecord(loop) if arguments.steps else None
        gc.collect()
        gc.freeze()
        gc.disable()
        for name, conversations in loads.items():
            row = converse(
                loop,
                shortened(conversations, arguments.shorter) if arguments.shorter != 1 else conversations,
                warm=arguments.warm,
                until=arguments.until,
                info=info,
            )
            results.append(dict(name=f"holdfast {mode}", mode=mode, what="multiturn", load=name, **row, **started))
            print("HOLDFAST " + json.dumps(results[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(dict(about=about, results=results), indent=1))
        loop.close()
        if record is not None:
            record.write(arguments.steps)
        del loop, record
        gc.enable()
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def warm_up(loop: Loop, info: EngineInfo) -> None:
    """Run steps of several widths, so that no kernel is compiled within the window."""
    rng = random.Random(9)
    for count, length in ((1, 4), (4, 32), (16, 200), (64, 40)):
        for index in range(count):
            params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
            loop.add(
                Request(f"warm.{count}.{index}", draw(rng, length, info.vocab_size), params, arrival=time.monotonic())
            )
        while loop.has_work():
            loop.step()


if __name__ == "__main__":
    main()
