"""Whether a deterministic engine gives each request the same bits in any crowd, and what that costs.

    python -m benchmarks.engine.same_bits [--model DIRECTORY] [--requests 400] [--distinct 40] [--set device=cpu]
    python -m benchmarks.engine.same_bits --shape dense --adapters 3 --set quantization=fp8
    python -m benchmarks.engine.same_bits --ranks 2 --set device=cpu

A request of `--distinct` is first computed alone: one sequence at a time, each prompt in one step, without shared
state. Then `--requests` of them, drawn at random, come as crowds to engines with other chunks, batches and tiers
(`CROWDS`). An answer is its tokens and the log probabilities of each and of three alternatives; it is equal if all
bits are. A crowd on an engine without `--deterministic` shows how many answers differ there. Last, rounds of a crowd
on an engine of each kind, one after the other, give the cost. Half of the requests are greedy; the others draw
with seeds of their own. A third of the prompts begin alike. `--shape` takes random weights of a small shape of that
kind in place of a checkpoint. With `--adapters N`, requests have none or one of N random LoRA adapters. With
`--ranks N`, the crowds run on N ranks, and the requests alone on one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
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

ALONE: dict[str, Any] = {"max_sequences": 1, "prefix_sharing": False, "host_cache_gb": 0.0, "speculation": "off"}
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


def crowds(args: argparse.Namespace, block_bytes: float) -> dict[str, dict[str, Any]]:
    """The options of each crowd's engine, by a name for people. Blocks take `block_bytes`."""
    longest = -(-(args.prompt + args.output + 1) // BLOCK)
    sizes = {"cache_gb": 4.5 * longest, "host_cache_gb": 12.5 * longest}
    few_blocks = {name: blocks * block_bytes / 1e9 for name, blocks in sizes.items()}
    if decoder_spec(Checkpoint.find(args.model).directory).recurrence is not None:
        few_blocks = {}  # a state takes as much as many blocks
    return {
        "as it is": {},
        "chunks of 48 tokens": {"token_budget": 48, "max_sequences": 12},
        "few blocks and a host tier": {**few_blocks, "max_sequences": 24, "eviction": "lru"},
        "no shared state": {"prefix_sharing": False, "host_cache_gb": 0.0, "max_sequences": 64},
        "drafts": {"speculation": "suffix"},
    }


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


@contextmanager
def engine(args: argparse.Namespace, **options: Any) -> Iterator[tuple[LanguageLoop, EngineInfo]]:
    """A running engine in this process."""
    common: dict[str, Any] = {"model": args.model} | ({"load_format": "random"} if args.shape else {})
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
        began = time.perf_counter()
        for name, (prompt, params, adapter) in requests.items():
            loop.add(Request(name, prompt, params, identity=Identity(adapter=adapter), arrival=time.monotonic()))
        self.preemptions = self.cached = self.tokens = 0
        while loop.has_work():
            for output in loop.step() or ():
                self._take(output)
        self.seconds = time.perf_counter() - began
        """Seconds from the first request to the last token."""
        self.answers = {name: part.hexdigest() for name, part in self._parts.items()}

    def _take(self, output: SequenceOutput) -> None:
        for token, told in zip(output.tokens, output.logprobs, strict=True):  # a step may give several, or none
            self._parts[output.request_id].update(msgspec.msgpack.encode((token, told)))
        self.tokens += len(output.tokens)
        if output.finish_reason is not None:
            self.preemptions += output.preemptions
            self.cached += output.cached_tokens


def differing(told: Told, alone: Sequence[str], distinct: int) -> int:
    """Number of answers with other bits than alone. The number of a request follows the last dash of its name."""
    return sum(answer != alone[int(name.rpartition("-")[2]) % distinct] for name, answer in told.answers.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="holdfast-tiny", help="the built-in model, or a checkpoint's directory")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this kind of model, in place of --model")
    parser.add_argument("--adapters", type=int, default=0, help="random LoRA adapters; requests have none or one")
    parser.add_argument("--ranks", type=int, default=1, help="tp of the crowds' engines; alone: one device")
    parser.add_argument("--requests", type=int, default=400, help="requests of all crowds together")
    parser.add_argument("--distinct", type=int, default=40, help="different requests, each computed alone once")
    parser.add_argument("--prompt", type=int, default=200, help="longest prompt, in tokens")
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that measure the cost; 0: none")
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


def compare(args: argparse.Namespace) -> None:
    """Run the requests alone and in crowds, print what differs, and measure the cost.

    Raises SystemExit if a deterministic engine gave other bits.
    """
    draw, report = random.Random(args.seed + 1), dict[str, Any](provenance())
    with engine(args, deterministic=True, cache_gb=1.0, **ALONE) as (loop, info):
        block_bytes, requests = 1e9 / info.num_blocks, drawn(args, info.vocab_size, [each.id for each in info.adapters])
        report["precision"] = info.precision
        alone = [Told(loop, {"0": each}).answers["0"] for each in requests]
    print(f"{args.shape or args.model}, {info.precision}: {len(alone)} requests computed alone", flush=True)
    kinds = crowds(args, block_bytes)
    share, report["crowds"], wrong = -(-args.requests // len(kinds)), [], 0
    for name, options in [*kinds.items(), ("not deterministic", {})]:
        numbers = [draw.randrange(args.distinct) for _ in range(share)]
        crowd = {f"{at}-{number}": requests[number] for at, number in enumerate(numbers)}
        options = {"deterministic": name != "not deterministic", "tp": args.ranks, **options}
        with engine(args, **options) as (loop, _):
            told = Told(loop, crowd)
        other = differing(told, alone, args.distinct)
        wrong += other * (name != "not deterministic")
        row = {"engine": name, "requests": share, "with other bits": other, "preemptions": told.preemptions}
        report["crowds"].append(row | {"tokens found": told.cached})
        print(", ".join(f"{key} {value}" for key, value in report["crowds"][-1].items()), flush=True)
    rates: dict[bool, list[float]] = {False: [], True: []}
    crowd = {str(at): requests[at % args.distinct] for at in range(share)}
    for _ in range(args.rounds):
        for deterministic in rates:
            cold = {"prefix_sharing": False, "host_cache_gb": 0.0}
            with engine(args, deterministic=deterministic, tp=args.ranks, **cold) as (loop, _):
                Told(loop, {"warm": requests[0]})
                told = Told(loop, crowd)
            rates[deterministic].append(told.tokens / told.seconds)
    if args.rounds:
        usual, own = (statistics.median(rates[kind]) for kind in (False, True))
        ratios = [one / other for one, other in zip(rates[True], rates[False], strict=True)]
        report["tokens a second"] = {"default": rates[False], "deterministic": rates[True]}
        print(f"output tokens a second: {usual:.1f} by default, {own:.1f} deterministic, {own / usual:.3f} of it")
        print(f"rounds: {min(ratios):.3f} to {max(ratios):.3f} of it")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if wrong:
        raise SystemExit(f"{wrong} answers had other bits than alone")
    print(f"{share * len(kinds)} answers had the bits that they have alone")


if __name__ == "__main__":
    main()
