"""Moves between two engine processes of this machine: how fast, what they cost streams, and against computing again.

usage: python -m benchmarks.engine.moving [--tokens 2048] [--turns 3] [--seconds 5] [--json FILE] [--shape JSON]
       [any engine flag as --set name=value]

Two engines of one shape with random weights, which talk over loopback. Conversations are computed at the first one. For
each, `bring` is the time of a fetch at the second one, `after` the time to the first token of the next turn once it is
there, and `again` that time where all of it is computed. A conversation lies only on the first engine's device before
its move, so that it is copied to that engine's host tier on the way. The default shape is small in its weights and has
the KV of a larger model: 64 KiB a token.

Then a stream runs at each engine, first alone, then while conversations move from the first to the second one, back to
back. Gaps are those between tokens, as the client sees them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks.engine.llama8b import LLAMA_3_8B, write_shape
from benchmarks.lib.invocation import add_engine_options, provenance
from benchmarks.lib.multiturn_talks import draw
from holdfast.core.types import SamplingParams
from holdfast.engine.client.client import EngineClient
from holdfast.lm.config import EngineConfig

SHAPE = dict(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=16384,
    torch_dtype="float32",
)
SECRET = b"a secret for one run"
ASKED = 32
"""Number of tokens of a next turn's question."""


async def turn(client: EngineClient, prompt: Sequence[int], tokens: int = 1) -> tuple[float, int]:
    """Seconds to the first token of an answer, and the number of the prompt's tokens that came from the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    async with aclosing(client.stream(prompt, params)) as deltas:
        async for delta in deltas:
            last = delta
    assert last.timings is not None and last.usage is not None
    return last.timings.ttft, last.usage.cached_tokens


async def bring(source: EngineClient, target: EngineClient, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds and tokens of a move."""
    chain = target.chain(prompt)
    began = time.perf_counter()
    came = await target.fetch(chain, range(len(chain)), source.chunk_address)
    return time.perf_counter() - began, came


async def one(source: EngineClient, target: EngineClient, rng: random.Random, tokens: int) -> dict[str, Any]:
    """One conversation: its move, its next turn after it, and the same turn computed again."""
    vocabulary = source.info.vocab_size
    prompt = draw(rng, tokens, vocabulary)
    await turn(source, prompt)
    found = await source.found(source.chain(prompt))
    seconds, came = await bring(source, target, prompt)
    question = draw(rng, ASKED, vocabulary)
    after, cached = await turn(target, prompt + question)
    again, none = await turn(target, draw(rng, tokens, vocabulary) + question)
    bytes_moved = came // target.info.block_size * target.info.memory.block
    return dict(
        tokens=tokens, came=came, found=found._asdict(), cached=cached, not_cached=none,
        bring_s=seconds, gigabytes_per_s=bytes_moved / seconds / 1e9, after_s=after, again_s=again,
    )  # fmt: skip


async def gaps(client: EngineClient, prompt: Sequence[int], stop: asyncio.Event) -> list[float]:
    """Seconds between the tokens of a stream until `stop`."""
    params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
    found: list[float] = []
    before = None
    async with aclosing(client.stream(prompt, params)) as deltas:
        async for delta in deltas:
            now = time.perf_counter()
            if before is not None:
                found += [(now - before) / max(1, len(delta.tokens))] * len(delta.tokens)
            before = now
            if stop.is_set():
                break
    return found


def summary(values: Sequence[float]) -> dict[str, float]:
    """Figures of these gaps, in milliseconds."""
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return {"tokens": len(ordered)} | {
        name: round(1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))], 2) for name, part in at.items()
    }


async def beside(
    source: EngineClient, target: EngineClient, rng: random.Random, tokens: int, seconds: float
) -> dict[str, Any]:
    """Gaps of a stream at each engine, alone and during moves."""
    vocabulary = source.info.vocab_size
    result: dict[str, Any] = {}
    for name in ("alone", "beside moves"):
        prompts = [draw(rng, tokens, vocabulary) for _ in range(8)] if name != "alone" else []
        for prompt in prompts:
            await turn(source, prompt)
        stop = asyncio.Event()
        streams = [asyncio.create_task(gaps(client, draw(rng, 64, vocabulary), stop)) for client in (source, target)]
        await asyncio.sleep(0.5)
        began, moved, moving = time.perf_counter(), 0, 0.0
        while time.perf_counter() - began < seconds:
            if name == "alone":
                await asyncio.sleep(seconds)
            elif prompts:
                took, came = await bring(source, target, prompts.pop())
                moved, moving = moved + came, moving + took
            else:
                break
        stop.set()
        at_source, at_target = await asyncio.gather(*streams)
        result[name] = dict(source_ms=summary(at_source), target_ms=summary(at_target))
        if moving:
            bytes_moved = moved // target.info.block_size * target.info.memory.block
            result[name] |= dict(moved_tokens=moved, gigabytes_per_s=bytes_moved / moving / 1e9)
    return result


async def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    options = dict(
        model=str(directory), load_format="random", chunk_host="127.0.0.1", cache_gb=3.0, host_cache_gb=2.0, threads=1,
        max_sequences=16, speculation="off",
    ) | dict(arguments.set)  # fmt: skip
    rng = random.Random(0)
    config = EngineConfig(**options)
    source, target = [await EngineClient.start(config, chunk_secret=SECRET) for _ in range(2)]
    try:
        result = provenance() | dict(options=options | dict(model="random"), block=target.info.memory.block)
        await asyncio.gather(*[turn(client, draw(rng, 600, client.info.vocab_size), 20) for client in (source, target)])
        rows = [await one(source, target, rng, arguments.tokens) for _ in range(arguments.turns)]
        for row in rows:
            print(json.dumps(row), flush=True)
        result |= dict(moves=rows)
        for name in ("gigabytes_per_s", "bring_s", "after_s", "again_s"):
            result[f"median_{name}"] = statistics.median(row[name] for row in rows)
        result["again_over_moved"] = result["median_again_s"] / (result["median_bring_s"] + result["median_after_s"])
        result["streams"] = await beside(source, target, rng, arguments.tokens, arguments.seconds)
        print(json.dumps(result["streams"]), flush=True)
        result["chunk_rate"] = (await target.health()).chunk_rate
        return result
    finally:
        for client in (source, target):
            await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of a conversation")
    parser.add_argument("--turns", type=int, default=3, help="conversations of which moves are timed")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the streams at most")
    parser.add_argument("--shape", default="{}", help="changes of the model's config.json")
    parser.add_argument("--json", type=Path)
    add_engine_options(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_shape(directory, LLAMA_3_8B | SHAPE | json.loads(arguments.shape))
        result = asyncio.run(measure(arguments, directory))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
