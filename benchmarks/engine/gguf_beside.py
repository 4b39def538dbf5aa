"""One GGUF file in Q4_K_M on a CPU, at several numbers of streams: Holdfast and llama.cpp.

    python -m benchmarks.engine.gguf_beside --llama BUILD/bin [--threads 2] [--streams 1 8] [--rounds 3] [--json FILE]

The file has random weights in the shape of Llama-3.2-1B. This script writes them in 16 bits, and llama.cpp's own
program (`llama-quantize`) makes a Q4_K_M file of them. Both engines read that file, each in a process of its own:
llama.cpp by `llama-batched-bench`, Holdfast by its executor, scheduler and loop, with `--dtype bfloat16`. A round lets
both compute --output tokens for each stream after a prompt of --prompt tokens, one engine after the other. The figures
are output tokens a second after the prompts, the median of the rounds, and the ratio is that of the medians.

llama.cpp's programs come with the sources in llama-cpp-python's sdist on PyPI: unpack it, and in vendor/llama.cpp run
`cmake -B build -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_UI=OFF` and
`cmake --build build --target llama-quantize llama-batched-bench`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.invocation import provenance
from holdfast.core.types import Request, SamplingParams
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.models.base import Model
from holdfast.lm.models.gguf_metadata import write
from holdfast.lm.models.loader import load
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import MemoryMeasurement
from holdfast.loop.loop import Loop

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 128_256, 2048, 8192, 16, 32, 8, 64
MATRICES = {
    "attn_q": (HEADS * HEAD, HIDDEN),
    "attn_k": (KV_HEADS * HEAD, HIDDEN),
    "attn_v": (KV_HEADS * HEAD, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
LONGEST = 4096


def write_halves(file: Path) -> None:
    """Write the model in float16, without a tokenizer."""
    import gguf

    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama", use_temp_file=True)
    writer.add_context_length(LONGEST)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("no_vocab")
    shapes = {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in MATRICES.items()}
    for name, shape in {"token_embd": (VOCABULARY, HIDDEN), **shapes}.items():
        numbers = draw.standard_normal(shape, np.float32) * np.float32(0.02)
        writer.add_tensor(f"{name}.weight", numbers.astype(np.float16))
    norms = [f"blk.{layer}.{kind}_norm" for layer in range(LAYERS) for kind in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(programs: Path, place: Path, threads: int) -> Path:
    """A Q4_K_M file of the model in a directory; the one that is there, if there is one."""
    file, halves = place / "model-q4_k_m.gguf", place / "model-f16.gguf"
    if not file.exists():
        write_halves(halves)
        command = [str(programs / "llama-quantize"), str(halves), str(file), "Q4_K_M", str(threads)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        halves.unlink()
    return file


def llama_cpp(programs: Path, file: Path, streams: int, prompt: int, output: int, threads: int, *more: str) -> float:
    """Output tokens per second of llama.cpp, with `more` options."""
    command = [str(programs / "llama-batched-bench"), "-m", str(file), "-t", str(threads), "-tb", str(threads)]
    command += ["-c", str(streams * (prompt + output + 8)), "-npp", str(prompt), "-ntg", str(output)]
    command += ["-npl", str(streams), "--output-format", "jsonl", *more]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    return float(rows[-1]["speed_tg"])


def loop_of(model: Model, streams: int, length: int, **options: Any) -> Loop[Any, Any, Any]:
    """An engine with room for this many streams of a model. `options` are its configuration's."""
    config = EngineConfig(max_sequences=streams, **options)
    device = PagedDevice(model, config)
    blocks = streams * -(-length // config.block_size)
    shape = device.allocate(MemoryMeasurement("cpu", total=0, weights=0, activations=0, cache=blocks, block=1))
    scheduler = Scheduler(
        StallFree(shape.token_budget),
        PagedKind(BlockPool(blocks, config.block_size)),
        max_sequences=streams,
        max_model_len=model.spec.max_model_len,
        headroom=0.0,
    )
    return Loop(scheduler, device.executor, config.steps_in_flight, time.monotonic)


def holdfast(directory: Path, streams: int, prompt: int, output: int) -> float:
    """Output tokens per second from the first token of the last stream on."""
    model = load(directory, device="cpu", dtype="bfloat16")
    loop, draw = loop_of(model, streams, prompt + output), random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for number in range(streams):
        loop.add(Request(str(number), tuple(draw.randrange(VOCABULARY) for _ in range(prompt)), params))
    began, counted, heard = 0.0, 0, set[str]()
    while loop.has_work():
        outputs = loop.step() or ()
        if len(heard) == streams:
            counted += sum(len(each.tokens) for each in outputs)
        heard |= {each.request_id for each in outputs if each.tokens}
        if not began and len(heard) == streams:
            began = time.perf_counter()
    return counted / (time.perf_counter() - began)


def ours(file: Path, streams: int, args: argparse.Namespace) -> float:
    """`holdfast` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine.gguf_beside", "--own", str(file), "--streams", str(streams)]
    command += ["--prompt", str(args.prompt), "--output", str(args.output), "--threads", str(args.threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def run_own(args: argparse.Namespace) -> None:
    """Print Holdfast's figure for the file `args.own`."""
    import os

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = place
        from holdfast.files.cache import gguf_cache

        directory = gguf_cache() / "model"
        directory.mkdir(parents=True)
        write(args.own, directory)
        print(holdfast(directory, args.streams[0], args.prompt, args.output))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, metavar="DIRECTORY", help="directory of llama.cpp's programs")
    parser.add_argument("--place", type=Path, help="directory for the model, which is kept; default: a temporary one")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--own", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own is not None:
        run_own(args)
        return
    if args.llama is None:
        parser.error("--llama is missing: the directory of llama-quantize and llama-batched-bench")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        file = quantized(args.llama, args.place or Path(temporary), args.threads)
        for streams in args.streams:
            rates: dict[str, list[float]] = {"holdfast": [], "llama.cpp": []}
            for _ in range(args.rounds):
                rates["holdfast"].append(ours(file, streams, args))
                rates["llama.cpp"].append(llama_cpp(args.llama, file, streams, args.prompt, args.output, args.threads))
            one, other = (statistics.median(each) for each in rates.values())
            row = {name: [round(rate, 2) for rate in each] for name, each in rates.items()}
            found.append({"streams": streams, **row, "ratio": round(one / other, 2)})
            print(f"{streams} streams: Holdfast {one:.1f}, llama.cpp {other:.1f} tok/s: {one / other:.2f} times")
    if args.json is not None:
        settings = {"threads": args.threads, "prompt": args.prompt, "output": args.output}
        args.json.write_text(json.dumps(provenance() | settings | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
