"""Decode throughput on a CPU, in process: a random Llama of 4 layers and hidden size 256, 32 sequences, one thread.

Run: python benchmarks/engine_cpu.py [--sequences 32] [--threads 1] [--profile]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch

from holdfast.core.config import EngineConfig
from holdfast.core.types import Request, SamplingParams
from holdfast.engine.loop import Loop
from holdfast.execution.runner import PagedExecutor
from holdfast.memory.blocks import BlockPool
from holdfast.models.loader import load
from holdfast.scheduler.base import Scheduler
from holdfast.scheduler.policies import StallFree

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generated", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print where the device thread spends its time")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPE))
        model = load(directory, device="cpu", load_format="random")
    config = EngineConfig(max_sequences=args.sequences)
    executor = PagedExecutor(model, config)
    blocks = args.sequences * -(-(args.prompt + args.generated) // config.block_size) + 8
    executor.allocate(blocks)
    scheduler = Scheduler(
        StallFree(executor.token_budget),
        BlockPool(blocks, config.block_size),
        max_sequences=args.sequences,
        max_model_len=model.spec.max_model_len,
        headroom=0.0,
    )
    loop = Loop(scheduler, executor, args.steps_in_flight, time.monotonic)
    draw = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=args.generated, ignore_eos=True)
    for number in range(args.sequences):
        prompt = tuple(draw.randrange(SHAPE["vocab_size"]) for _ in range(args.prompt))
        loop.add(Request(str(number), prompt, params))
    began, tokens, decoding, decoded = time.perf_counter(), 0, 0.0, 0
    while loop.has_work():
        at = time.perf_counter()
        given = sum(len(output.tokens) for output in loop.step())
        if given == args.sequences:  # a step of decodes alone
            decoding += time.perf_counter() - at
            decoded += given
        tokens += given
    seconds = time.perf_counter() - began
    print(
        f"Holdfast, Llama {SHAPE['num_hidden_layers']} x {SHAPE['hidden_size']}, float32, {args.threads} thread(s), "
        f"{args.sequences} sequences of {args.prompt} + {args.generated} tokens: "
        f"{tokens / seconds:,.0f} output tok/s in all, {decoded / decoding:,.0f} in decode steps "
        f"({decoding / decoded * args.sequences * 1000:.2f} ms each)"
    )
    executor.close()


if __name__ == "__main__":
    main()
