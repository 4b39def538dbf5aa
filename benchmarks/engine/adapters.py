"""Output tokens per second with LoRA adapters in the batch, and the ratio to the rate without: Llama-3-8B's shape.

usage: python -m benchmarks.engine.adapters [--rank 16] [--batch 32 128] [--adapters 0 1 4 32] [--repeat N]
                                            [--json FILE]
                                            [--without] [any engine flag as --set name=value] [--shape JSON]

Random weights, prompts of 512 tokens and 128 generated ones, all requests at once. Request i has adapter i mod n, each
over all linear layers. Every adapter is in a slot before measuring begins. `--without` builds an engine without slots,
to show that slots cost nothing if no request has an adapter. Prints one JSON line per measurement; `ratio` compares
with the line with 0 adapters of the same batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.llama8b import LLAMA_3_8B, draw, request
from benchmarks.lib.invocation import add_engine_options, provenance, settle
from holdfast.core.types import Identity, Request
from holdfast.engine.process.build import build
from holdfast.lm.config import EngineConfig
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.peft_files import AdapterWeights, LoraPair, write_peft
from holdfast.loop.loop import Loop


def write_adapter(directory: Path, shape: dict[str, Any], rank: int) -> None:
    """A random adapter for all linear layers of a model of this shape."""
    spec = NATIVE[shape["architectures"][0]](shape)
    draws = torch.Generator().manual_seed(0)
    pairs = {}
    for layer in range(spec.num_layers):
        for module, (outputs, inputs) in adapted_modules(spec).shapes().items():
            a, b = (torch.randn(size, generator=draws).bfloat16() * 0.01 for size in ((rank, inputs), (outputs, rank)))
            pairs[layer, module] = LoraPair(a, b, 2.0)
    write_peft(directory, AdapterWeights(pairs), base_model="random")


def run(loop: Loop, lengths: tuple[int, int], batch: int, ids: list[str]) -> dict[str, Any]:
    """Seconds from submitting a batch until its last request ends, with these adapters in turn."""
    rng, produced, steps = random.Random(len(ids)), 0, 0
    prompts = [draw(rng, lengths[0]) for _ in range(batch)]
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        asked = request(f"{len(ids)}-{number}-{begin}", prompt, lengths[1])
        identity = Identity(adapter=ids[number % len(ids)] if ids else "")
        loop.add(Request(asked.id, asked.prompt, asked.params, identity=identity, arrival=asked.arrival))
    while loop.has_work():
        produced += sum(len(output.tokens) for output in loop.step() or ())
        steps += 1
    seconds = time.perf_counter() - begin
    return dict(
        batch=batch,
        adapters=len(ids),
        seconds=round(seconds, 3),
        output_tok_s=round(produced / seconds, 1),
        steps=steps,
        loads=loop.stats().adapter_loads,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 4, 32])
    parser.add_argument("--lengths", type=int, nargs=2, default=[512, 128], help="tokens of a prompt and of its answer")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", default="{}", help="JSON that changes the shape, to try it on a small one")
    parser.add_argument("--without", action="store_true", help="an engine without slots for adapters")
    arguments = parser.parse_args()
    shape = LLAMA_3_8B | json.loads(arguments.shape)
    most = 0 if arguments.without else max(arguments.adapters)
    with tempfile.TemporaryDirectory(prefix="adapters-") as place:
        directory = Path(place)
        (directory / "config.json").write_text(json.dumps(shape))
        options: dict[str, Any] = dict(max_sequences=256, prefix_sharing=False, max_waiting=10_000)
        if most:
            write_adapter(directory / "adapter", shape, arguments.rank)
            # One set of numbers has many names. Every name has its own slot, so each adapter is read from memory.
            options |= dict(
                adapter=tuple(f"a{number}={directory / 'adapter'}" for number in range(most)),
                max_adapters=most,
                max_adapter_rank=arguments.rank,
                adapter_host_gb=16.0,
            )
        options |= dict(arguments.set)
        begin = time.perf_counter()
        loop, info = build(EngineConfig(model=str(directory), load_format="random", **options))
        ids = [adapter.id for adapter in info.adapters]
        gc.collect()
        gc.freeze()
        gc.disable()
        about = provenance() | dict(
            rank=arguments.rank,
            slots=info.adapter_slots,
            slot_gb=round(info.memory.adapters / 1e9, 3),
            blocks=info.num_blocks,
            token_budget=info.token_budget,
            started_in=round(time.perf_counter() - begin, 2),
            stages=[[stage.name, round(stage.begin, 2), round(stage.end, 2)] for stage in info.stages],
        )
        print("HOLDFAST " + json.dumps(about), flush=True)
        settle(loop)
        for names in (ids, []):
            run(loop, (32, 8), max(most, 4), names)
        results: list[dict[str, Any]] = []
        for batch in arguments.batch:
            base = 0.0
            for count in [0] if arguments.without else sorted({0, *arguments.adapters}):
                found = max(
                    (run(loop, tuple(arguments.lengths), batch, ids[:count]) for _ in range(arguments.repeat)),
                    key=lambda each: float(each["output_tok_s"]),
                )
                base = base or found["output_tok_s"]
                results.append(found | dict(ratio=round(found["output_tok_s"] / base, 3)))
                print("HOLDFAST " + json.dumps(results[-1]), flush=True)
        loop.close()
        if arguments.json:
            arguments.json.write_text(json.dumps(dict(about=about, results=results), indent=1))


if __name__ == "__main__":
    main()
