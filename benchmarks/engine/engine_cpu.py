"""Decode throughput on a CPU, in process: a random Llama of 4 layers and hidden size 256, many sequences at once.

Run: python -m benchmarks.engine.engine_cpu [--peer] [--sequences 32] [--threads 1]
With --peer, Transformers' own continuous batching does the same work in the same sitting, and the ratio is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.models.loader import load
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import MemoryMeasurement
from holdfast.loop.loop import Loop

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generated", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--peer", action="store_true", help="run Transformers' continuous batching beside it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    draw = random.Random(0)
    prompts = [[draw.randrange(1, SHAPE["vocab_size"]) for _ in range(args.prompt)] for _ in range(args.sequences)]
    print(
        f"Llama, {SHAPE['num_hidden_layers']} layers, hidden {SHAPE['hidden_size']}, vocabulary {SHAPE['vocab_size']}, "
        f"float32, {args.threads} thread(s), {args.sequences} sequences of {args.prompt} + {args.generated} tokens"
    )
    ours = holdfast(prompts, args.generated, args.steps_in_flight)
    print(f"Holdfast                             {ours:8,.0f} output tok/s")
    if args.peer:
        theirs = transformers_continuous_batching(prompts, args.generated)
        print(f"Transformers continuous batching     {theirs:8,.0f} output tok/s")
        print(f"Holdfast gives {ours / theirs:.2f} times as many")


def holdfast(prompts: list[list[int]], generated: int, steps_in_flight: int) -> float:
    """Output tokens per second of executor, scheduler and loop."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SHAPE}))
        model = load(directory, device="cpu", load_format="random")
    config = EngineConfig(max_sequences=len(prompts))
    device = PagedDevice(model, config)
    blocks = len(prompts) * -(-(len(prompts[0]) + generated) // config.block_size)
    sizes = MemoryMeasurement("cpu", total=0, weights=0, activations=0, cache=blocks, block=1)
    shape, executor = device.allocate(sizes), device.executor
    scheduler = Scheduler(
        StallFree(shape.token_budget),
        PagedKind(BlockPool(blocks, config.block_size)),
        max_sequences=len(prompts),
        max_model_len=model.spec.max_model_len,
        headroom=0.0,
    )
    loop = Loop(scheduler, executor, steps_in_flight, time.monotonic)
    params = SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True)
    began, tokens = time.perf_counter(), 0
    for number, prompt in enumerate(prompts):
        loop.add(Request(str(number), tuple(prompt), params))
    while loop.has_work():
        tokens += sum(len(output.tokens) for output in loop.step() or () or ())
    seconds = time.perf_counter() - began
    executor.close()
    return tokens / seconds


def transformers_continuous_batching(prompts: list[list[int]], generated: int) -> float:
    """Output tokens per second of `generate_batch` for a random model of the same shape."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval()
    began = time.perf_counter()
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(max_new_tokens=generated, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=512, page_size=16),
        progress_bar=False,
    )
    return sum(len(output.generated_tokens) for output in outputs.values()) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
