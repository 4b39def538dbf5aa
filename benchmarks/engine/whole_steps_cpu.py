"""Decoding on a CPU: whole steps by the library in C, next to PyTorch's, llama.cpp, and Transformers.

    GOMP_SPINCOUNT=3000 python -m benchmarks.engine.whole_steps_cpu [--llama BUILD/bin] [--streams 1 8 32] [--json FILE]

The model is the Llama of 100 million random parameters of `benchmarks/peers/cpu_peers.py`. A round has each engine
once, one after the other: Holdfast with `--attention-backend auto` and with `torch`, which leaves whole steps out;
llama.cpp by `llama-batched-bench`; and Transformers' continuous batching (`generate_batch`). Holdfast runs its
executor, scheduler and loop. *decode* is output tokens a second after the prompts. *all* is output tokens a second
with the prompts, the only figure that `generate_batch` gives. *processor* is output tokens after the prompts by the
second of processor time: other programs on the machine change it less. Ratios are those of medians. `holdfast serve`
sets GOMP_SPINCOUNT by itself. `benchmarks/engine/gguf_beside.py` says where llama.cpp's program comes from.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.gguf_beside import llama_cpp, loop_of
from benchmarks.lib.invocation import provenance
from benchmarks.peers.cpu_peers import SHAPE, generate_batch, weights, write_checkpoint, write_gguf
from holdfast.core.types import Request, SamplingParams
from holdfast.lm.models.base import Model
from holdfast.lm.models.loader import load

Rates = dict[str, float]
"""Output tokens a second, by what they count."""


def prompts_of(streams: int, length: int) -> list[list[int]]:
    draw = random.Random(streams)
    return [[draw.randrange(300, SHAPE["vocab_size"]) for _ in range(length)] for _ in range(streams)]


def holdfast(model: Model, backend: str, streams: int, args: argparse.Namespace) -> Rates:
    """The rates of executor, scheduler and loop with this attention backend."""
    loop = loop_of(model, streams, args.prompt + args.output, attention_backend=backend)
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
    prompts, heard = prompts_of(streams, args.prompt), set[str]()
    began, after, used, counted, decoded = time.perf_counter(), 0.0, 0.0, 0, 0
    for number, prompt in enumerate(prompts):
        loop.add(Request(str(number), tuple(prompt), params))
    while loop.has_work():
        outputs = loop.step() or ()
        tokens = sum(len(each.tokens) for each in outputs)
        counted, decoded = counted + tokens, decoded + (tokens if after else 0)
        heard |= {each.request_id for each in outputs if each.tokens}
        if not after and len(heard) == streams:
            after, used = time.perf_counter(), time.process_time()
    ended, spent = time.perf_counter(), time.process_time() - used
    return {"decode": decoded / (ended - after), "processor": decoded / spent, "all": counted / (ended - began)}


def transformers(directory: Path, streams: int, args: argparse.Namespace) -> Rates:
    """The rate of continuous batching, after a run that does not count."""
    prompts = prompts_of(streams, args.prompt)
    with generate_batch(directory, streams, args.prompt + args.output + 8) as run:
        run(prompts, 2)
        began = time.perf_counter()
        run(prompts, args.output)
        return {"all": streams * args.output / (time.perf_counter() - began)}


def row_of(streams: int, rates: dict[str, list[Rates]]) -> dict[str, Any]:
    """The figures of one number of streams, and how many times as fast whole steps are."""
    row: dict[str, Any] = {"streams": streams}
    for name, found in rates.items():
        row[name] = {kind: [round(each[kind], 2) for each in found] for kind in found[0]}
        kind = "decode" if "decode" in found[0] else "all"
        ours, theirs = (statistics.median(each[kind] for each in of) for of in (rates["whole steps"], found))
        if name != "whole steps":
            row[f"times {name}"] = round(ours / theirs, 2)
        if name == "PyTorch":
            ours, theirs = (statistics.median(each["processor"] for each in rates[of]) for of in ("whole steps", name))
            row["times PyTorch, by processor time"] = round(ours / theirs, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, metavar="DIRECTORY", help="directory of llama.cpp's programs")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--without", nargs="*", default=[], help="engines to leave out, such as generate_batch")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as place:
        directory, file = Path(place) / "checkpoint", Path(place) / "model.gguf"
        directory.mkdir()
        tensors = weights()
        write_checkpoint(directory, tensors)
        model = load(directory, device="cpu", dtype=args.dtype)
        engines: dict[str, Callable[[int], Rates]] = {
            "whole steps": lambda streams: holdfast(model, "auto", streams, args),
            "PyTorch": lambda streams: holdfast(model, "torch", streams, args),
        }
        if args.llama is not None:
            write_gguf(file, tensors)
            sizes = args.prompt, args.output, args.threads
            more = ("-ctk", "f32", "-ctv", "f32")
            engines["llama.cpp"] = lambda streams: {"decode": llama_cpp(args.llama, file, streams, *sizes, *more)}
        if args.dtype == "float32":
            engines["generate_batch"] = lambda streams: transformers(directory, streams, args)
        del tensors
        rows = []
        for streams in args.streams:
            rates: dict[str, list[Rates]] = {name: [] for name in engines if name not in args.without}
            for _ in range(args.rounds):
                for name, found in rates.items():
                    found.append(engines[name](streams))
                print(streams, {name: found[-1] for name, found in rates.items()}, flush=True)
            rows.append(row_of(streams, rates))
            print(json.dumps(rows[-1]), flush=True)
    if args.json is not None:
        settings = {name: getattr(args, name) for name in ("threads", "prompt", "output", "dtype")}
        args.json.write_text(json.dumps(provenance() | settings | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
