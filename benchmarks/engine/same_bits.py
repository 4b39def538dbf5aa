"""Whether a deterministic engine gives each request the same bits in any crowd.

    python -m benchmarks.engine.same_bits [--model DIRECTORY] [--requests 400] [--distinct 40] [--set device=cpu]
    python -m benchmarks.engine.same_bits --shape dense --adapters 3 --set quantization=fp8
    python -m benchmarks.engine.same_bits --ranks 2 --set device=cpu
    python -m benchmarks.engine.same_bits --shape dense --requests 10000 --distinct 200

A request of `--distinct` is first computed alone: one sequence at a time, each prompt in one step, without shared
state. Then `--requests` of them, drawn at random, come as crowds to engines with other chunks, batches and tiers
(`crowds`). An answer is its tokens and the log probabilities of each and of three alternatives; it is equal if all
bits are. A last crowd on an engine without `--deterministic` shows how many answers differ there. Half of the requests
are greedy; the others draw with seeds of their own. A third of the prompts begin alike. `--shape` takes random weights
of a small shape of that kind in place of a checkpoint. With `--adapters N`, requests have none or one of N random LoRA
adapters. With `--ranks N` and `--stages N`, the crowds run on that many devices, and the requests alone on one (on a
CPU, where stages compute token by token, on as many stages). One engine exists at a time, and lines come as it goes on.

The cost is measured by benchmarks/engine/same_bits_cost.py.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.lib.invocation import add_engine_options, provenance, settle
from holdfast.core.types import Identity, Request, SamplingParams, SequenceOutput
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.messages import EngineInfo
from holdfast.engine.process.build import build
from holdfast.lm.config import EngineConfig
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.loader import decoder_spec
from holdfast.lm.models.peft_files import AdapterWeights, LoraPair, write_peft
from holdfast.lm.types import LanguageLoop

ALONE: dict[str, Any] = {
    "max_sequences": 1, "prefix_sharing": False, "host_cache_gb": 0.0, "speculation": "off", "cache_gb": 1.0,
}  # fmt: skip
CACHE_GB = {"cuda": 8.0, "cpu": 0.5}
"""Cache of each other engine, in GB. A cache that fills the device would leave others nothing, and takes long to make.
"""
HOST_GB = 1.0
"""Host tier of engines that have one, in GB."""
LINE_EVERY = 10.0
"""Seconds between lines about a crowd's progress."""
BLOCK = 16
"""Tokens of a block."""
RANK = 16
"""Rank of the random adapters."""
_SIZES: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
    "eos_token_id": 1, "initializer_range": 0.05, "dtype": "bfloat16",
}  # fmt: skip
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "norm_topk_prob": True}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": _SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mixture": _SIZES | _EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "hybrid": _SIZES | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
}
"""The config.json of each kind of `--shape`."""


class Crowd(NamedTuple):
    """An engine for some of the requests."""

    weight: int
    """Number of requests in proportion to those of other crowds. Engines that compute few at once have fewer."""
    options: dict[str, Any]


def crowds(args: argparse.Namespace, block_bytes: float) -> dict[str, Crowd]:
    """Each crowd by a name for people. Blocks take `block_bytes`."""
    longest = -(-(args.prompt + args.output + 1) // BLOCK)
    sizes = {"cache_gb": 4.5 * longest, "host_cache_gb": 12.5 * longest}
    few_blocks = {name: blocks * block_bytes / 1e9 for name, blocks in sizes.items()}
    if decoder_spec(Checkpoint.find(args.model).directory).recurrence is not None:
        few_blocks = {}  # a state takes as much as many blocks
    return {
        "as it is": Crowd(6, {}),
        "chunks of 48 tokens": Crowd(2, {"token_budget": 48, "max_sequences": 12}),
        "few blocks and a host tier": Crowd(2, {**few_blocks, "max_sequences": 24, "eviction": "lru"}),
        "no shared state": Crowd(5, {"prefix_sharing": False, "host_cache_gb": 0.0, "max_sequences": 64}),
        "drafts": Crowd(5, {"speculation": "suffix"}),
    }


def shares(requests: int, found: Mapping[str, Crowd]) -> dict[str, int]:
    """The number of requests of each crowd, at least one. Together they are `requests`, or one for each crowd."""
    counts = {name: max(1, requests * crowd.weight // sum(each.weight for each in found.values()))
              for name, crowd in found.items()}  # fmt: skip
    most = max(counts, key=lambda name: counts[name])
    counts[most] = max(1, counts[most] + requests - sum(counts.values()))
    return counts


class Asked(NamedTuple):
    """A request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str
    """The id of its adapter; empty for none."""


def write_adapters(args: argparse.Namespace, place: Path) -> tuple[str, ...]:
    """Write random adapters of all layers of the model; the values of the engine's option `adapter`."""
    spec, found = decoder_spec(Checkpoint.find(args.model).directory), []
    for number in range(args.adapters):
        draw, base, pairs = torch.Generator().manual_seed(number), adapted_modules(spec), {}
        for layer in range(base.num_layers):
            for module in (name for name in base.modules if base.has(layer, name)):
                own = base.of_layer(layer)[module]
                a = torch.randn(RANK, own.inputs, generator=draw) * own.inputs**-0.5
                pairs[layer, module] = LoraPair(a, torch.randn(own.outputs, RANK, generator=draw) * 0.05, 2.0)
        write_peft(place / f"a{number}", AdapterWeights(pairs, base.names), base_model="base")
        found.append(f"a{number}={place / f'a{number}'}")
    return tuple(found)


def drawn(args: argparse.Namespace, vocabulary: int, adapters: Sequence[str]) -> list[Asked]:
    """The distinct requests. One after the other has no adapter, or the next one of `adapters`, which are ids."""
    draw = random.Random(args.seed)
    shared = draw.choices(range(vocabulary), k=args.prompt // 2)
    found = []
    for number in range(args.distinct):
        own = draw.choices(range(vocabulary), k=draw.randint(1, args.prompt // 2))
        more = shared if number % 3 == 0 else draw.choices(range(vocabulary), k=draw.randint(0, args.prompt // 2))
        ways: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number % 2 else {"temperature": 0}
        params = SamplingParams(max_tokens=args.output, ignore_eos=True, logprobs=3, **ways)
        found.append(Asked((*more, *own), params, ["", *adapters][number % (1 + len(adapters))]))
    return found


def on_cpu(args: argparse.Namespace) -> bool:
    """Whether the engines run on a CPU."""
    return dict(args.set).get("device") == "cpu" or not torch.cuda.is_available()


@contextmanager
def engine(args: argparse.Namespace, **options: Any) -> Iterator[tuple[LanguageLoop, EngineInfo]]:
    """A running engine in this process, once the memory of the one before has been freed.

    The caller keeps no engine's loop when it starts the next one.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    common: dict[str, Any] = {"model": args.model, "cache_gb": CACHE_GB["cpu" if on_cpu(args) else "cuda"]}
    common |= {"host_cache_gb": HOST_GB, "max_waiting": max(4096, args.requests)}
    common |= {"load_format": "random"} if args.shape else {}
    common |= {"adapter": args.adapter, "max_adapter_rank": RANK} if args.adapter else {}
    common |= {"deterministic_ranks": args.ranks} if args.ranks > 1 and options["deterministic"] else {}
    loop, info = build(EngineConfig(**{**common, **dict(args.set), **options}))
    try:
        settle(loop)
        yield loop, info
    finally:
        loop.close()


class Told:
    """The answers of requests, as digests, and what the engine found of them in its tiers."""

    def __init__(self, loop: LanguageLoop, requests: Mapping[str, Asked]) -> None:
        """Run the requests together until all have ended."""
        self._parts: dict[str, Any] = {name: hashlib.sha256() for name in requests}
        began = said = time.perf_counter()
        for name, (prompt, params, adapter) in requests.items():
            loop.add(Request(name, prompt, params, identity=Identity(adapter=adapter), arrival=time.monotonic()))
        self.preemptions = self.cached = self._ended = 0
        while loop.has_work():
            for output in loop.step() or ():
                self._take(output)
            if time.perf_counter() - said > LINE_EVERY:
                said = time.perf_counter()
                print(f"  {said - began:.0f} s: {self._ended} of {len(requests)} have ended", flush=True)
        self.seconds = time.perf_counter() - began
        """Seconds from the first request to the last token."""
        self.answers = {name: part.hexdigest() for name, part in self._parts.items()}

    def _take(self, output: SequenceOutput) -> None:
        for token, told in zip(output.tokens, output.logprobs, strict=True):  # a step may give several, or none
            self._parts[output.request_id].update(msgspec.msgpack.encode((token, told)))
        if output.finish_reason is not None:
            self._ended += 1
            self.preemptions += output.preemptions
            self.cached += output.cached_tokens


def differing(told: Told, alone: Sequence[str]) -> int:
    """Number of answers with other bits than alone. The number of a request follows the last dash of its name."""
    return sum(answer != alone[int(name.rpartition("-")[2])] for name, answer in told.answers.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="holdfast-tiny", help="the built-in model, or a checkpoint's directory")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this kind of model, in place of --model")
    parser.add_argument("--adapters", type=int, default=0, help="random LoRA adapters; requests have none or one")
    parser.add_argument("--ranks", type=int, default=1, help="tp of the crowds' engines; alone: one device")
    parser.add_argument("--stages", type=int, default=1, help="pp of the crowds' engines; alone: one device")
    parser.add_argument("--requests", type=int, default=400, help="requests of all crowds together")
    parser.add_argument("--distinct", type=int, default=40, help="different requests, each computed alone once")
    parser.add_argument("--prompt", type=int, default=200, help="longest prompt, in tokens")
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the results")
    add_engine_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-bits-") as place:
        if args.shape:
            args.model = place
            Path(place, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        args.adapter = write_adapters(args, Path(place)) if args.adapters else ()
        compare(args)


def told_alone(args: argparse.Namespace) -> tuple[list[Asked], list[str], EngineInfo]:
    """The distinct requests, the digest of each one's answer alone, and the engine that gave them."""
    stages = args.stages if on_cpu(args) else 1  # a CPU computes stages by other instructions than the whole model
    with engine(args, deterministic=True, pp=stages, **ALONE) as (loop, info):
        requests = drawn(args, info.vocab_size, [each.id for each in info.adapters])
        crowd = {str(number): each for number, each in enumerate(requests)}
        answers = Told(loop, crowd).answers  # one sequence runs at a time
    return requests, [answers[name] for name in crowd], info


def told_by(args: argparse.Namespace, crowd: Mapping[str, Asked], **options: Any) -> Told:
    """The answers of an engine with these options."""
    with engine(args, tp=args.ranks, pp=args.stages, **options) as (loop, _):
        return Told(loop, crowd)


def compare(args: argparse.Namespace) -> None:
    """Run the requests alone and in crowds, and print what differs.

    Raises SystemExit if a deterministic engine gave other bits.
    """
    draw, report, began = random.Random(args.seed + 1), dict[str, Any](provenance()), time.perf_counter()
    requests, alone, info = told_alone(args)
    report["precision"] = info.precision
    print(f"{args.shape or args.model}, {info.precision}: {len(alone)} requests computed alone", end=", ")
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    kinds = crowds(args, 1e9 * ALONE["cache_gb"] / info.num_blocks)
    counts, report["crowds"], wrong = shares(args.requests, kinds), [], 0
    for name, count in [*counts.items(), ("not deterministic", min(counts.values()))]:
        crowd = {}
        for at in range(count):
            number = draw.randrange(args.distinct)
            crowd[f"{at}-{number}"] = requests[number]
        own = kinds[name].options if name in kinds else {}
        told = told_by(args, crowd, deterministic=name in kinds, **own)
        other = differing(told, alone)
        wrong += other * (name in kinds)
        row = {"engine": name, "requests": count, "with other bits": other, "preemptions": told.preemptions}
        report["crowds"].append(row | {"tokens found": told.cached, "seconds": round(told.seconds, 1)})
        print(", ".join(f"{key} {value}" for key, value in report["crowds"][-1].items()), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if wrong:
        raise SystemExit(f"{wrong} answers had other bits than alone")
    print(f"{sum(counts.values())} answers had the bits that they have alone")


if __name__ == "__main__":
    main()
