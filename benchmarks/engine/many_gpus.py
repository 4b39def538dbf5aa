"""Several GPUs on one model: right or wrong, and where a step's time goes.

    python -m benchmarks.engine.many_gpus [--seconds 110] [--parts group small moved killed served] [--layouts tp2]

`group` checks the exchanges of two GPUs outside of sums, and sampling in shards against whole rows. `small`
compares the tokens of a small float32 model on layouts of two GPUs with those on one: greedy, drawn, filtered, by a
grammar, suspended to the host, in random histories with aborts; `--family olmo2` has norms over all heads, and
`delta-nets` and `mamba` have recurrent layers. `moved` moves conversations between two engines of a layout, and by the
disk to a new one, and compares what these answer with the first one. `killed` kills a rank while steps run. `served`
times decode steps at 1, 32 and 128 rows, the prefill of 8 prompts of 8,192 tokens, and shows the kernels of a decode
step on rank 0. Each part is a process of its own, which is killed when its time is over. If there are fewer GPUs than
ranks, ranks share them, which is slow. Without GPUs the parts `small` and `moved` run on CPU processes. Prints JSON
lines as results come.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

LIMITS = {"group": 40.0, "small": 100.0, "moved": 100.0, "killed": 45.0, "served": 100.0}
"""Time limit of each part, in seconds."""
PIECE_ROWS = 600
"""Number of rows of logits. They go to the other device in several pieces."""
VOCAB = 1000
SMALL_SHAPE = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    torch_dtype="float32",
    tie_word_embeddings=False,
    eos_token_id=256,
    # Wide enough that the likeliest token is clear of the next one, in whatever order sums are taken.
    initializer_range=0.08,
)
DELTA_NETS = dict(
    architectures=["Qwen3_5ForCausalLM"],
    model_type="qwen3_5_text",
    num_hidden_layers=8,
    layer_types=["linear_attention", "full_attention"] * 4,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
MAMBA = dict(
    architectures=["BambaForCausalLM"],
    model_type="bamba",
    num_hidden_layers=8,
    attn_layer_indices=[1, 3, 5, 7],
    mamba_n_heads=16,
    mamba_d_head=64,
    mamba_n_groups=1,
    mamba_d_state=16,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL_SHAPE,
    "olmo2": SMALL_SHAPE | dict(architectures=["Olmo2ForCausalLM"], model_type="olmo2"),
    "delta-nets": SMALL_SHAPE | DELTA_NETS,
    "mamba": SMALL_SHAPE | MAMBA,
}
GRAMMAR = r'(\{"identifier": [0-9]{1,2}, "valid": (true|false)\}, ){20}'
"""A regular expression that forces most of its text."""
BLOCK = 4 * 2 * 16 * 4 * 64 * 4
"""Bytes of one block: layers, keys and values, tokens, heads, head size, bytes of a number."""
LAYOUTS = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp4": {"tp": 4},
    "pp4": {"pp": 4},
    "tp2pp2": {"tp": 2, "pp": 2},
}
PROGRAM = (sys.executable, "-m", "benchmarks.engine.many_gpus")


def tell(kind: str, **values: Any) -> None:
    print(json.dumps({"kind": kind, **values}), flush=True)


def engine_of(layout: str, shape: dict[str, Any], **options: Any) -> Any:
    """An engine on a layout. Prints a JSON line with the cost of its start."""
    from benchmarks.engine.llama8b import started

    engine, stages = started(shape, byte_tokenizer(), **options, **LAYOUTS[layout], **shared_gpus(layout))
    info = engine.info
    device = info.memory.device
    tell("started", layout=layout, device=device, blocks=info.num_blocks, stages=stages, megabytes=memory_used())
    return engine


def shared_gpus(layout: str) -> dict[str, Any]:
    """The option by which the ranks of a layout share the GPUs, if there are fewer GPUs than ranks."""
    import torch

    found, ranks = torch.cuda.device_count(), math.prod(LAYOUTS[layout].values())
    return dict(devices=",".join(str(rank % found) for rank in range(ranks))) if 0 < found < ranks else {}


def byte_tokenizer() -> str:
    """A tokenizer of single bytes, as JSON; the token after them is the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return str(tokenizer.to_str())


# --- group


def group(arguments: argparse.Namespace) -> None:
    """Check the exchanges of a group in two processes.

    This one is rank 0, or rank 1 if it was given a meeting place.
    """
    meeting = arguments.meeting or tempfile.mkdtemp(prefix="many-gpus-")
    if arguments.meeting is None:
        subprocess.Popen([*PROGRAM, "--child", "group", "--meeting", meeting])
    rank = int(arguments.meeting is not None)
    import torch

    from holdfast.core.layout import Layout
    from holdfast.lm.execution.place import Place
    from holdfast.lm.kernels.collectives.protocol import own_rows
    from holdfast.lm.kernels.sampling.sample import sample
    from holdfast.lm.kernels.sampling.sampler import sample_sharded

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    place = Place(Layout(tp=2), rank, device, meeting)
    group = place.group
    assert group is not None
    wrong = []

    def check(name: str, right: Any) -> None:
        everyones = group.gather(torch.tensor([int(bool(right))], device=device))
        if not everyones.all():
            wrong.append(name)

    def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)

    for turn in range(5):
        time.sleep(0.02 * ((turn + rank) % 2))
        for dtype in (torch.int64, torch.float32):
            found = group.gather(torch.tensor([rank, 7 + turn], dtype=dtype, device=device))
            check("gather", found.tolist() == [[0, 7 + turn], [1, 7 + turn]])
    for rows, vocab in ((1, 101), (7, 1001), (PIECE_ROWS, 128256)):
        whole, share = draw(rows, rows, vocab), -(-vocab // 2)
        mine = whole[:, rank * share : (rank + 1) * share]
        own = own_rows(rows, 2, rank)
        for _ in range(3):
            check(f"exchange {rows}", torch.equal(group.exchange_rows(mine, vocab), whole[own.start : own.stop]))
    with group.alone(), group.alone():
        group.all_reduce(draw(1, 3, 512))
        group.gather(torch.zeros(3, device=device))
    if rank == 0:
        with group.alone():
            group.all_reduce(draw(1, 3, 512))
            group.best(torch.zeros(3, device=device), torch.arange(3, device=device))
    x = draw(5 + rank, 9, 512, dtype=torch.float32)
    expected = draw(5, 9, 512, dtype=torch.float32) + draw(6, 9, 512, dtype=torch.float32)
    check("sum after alone", torch.equal(group.all_reduce(x), expected))
    rows, vocab = 64, 128256
    whole, share = 3 * draw(9, rows, vocab), -(-vocab // 2)
    mine = whole[:, rank * share : (rank + 1) * share].contiguous()
    kinds = {"greedy": (0.0, 0, 1.0), "random": (1.0, 0, 1.0), "filtered": (1.0, 40, 0.9)}
    for kind, (heat, top_k, top_p) in kinds.items():
        records = dict(
            temperature=torch.full((rows,), heat, device=device),
            top_k=torch.full((rows,), top_k, device=device),
            top_p=torch.full((rows,), top_p, device=device),
            seed=torch.arange(rows, device=device) * 7919,
            position=torch.arange(rows, device=device),
            any_random=heat > 0,
            any_filtered=top_k > 0,
        )
        expected = sample(whole, **records)
        found = sample_sharded(mine, group, vocab, **records)
        equal = int((found == expected).sum())
        check(f"sampling {kind}", equal == rows)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            sample_sharded(mine, group, vocab, **records)
        torch.cuda.synchronize()
        spent = (time.perf_counter() - began) / 20
        if rank == 0:
            tell("sampling", how=kind, rows=rows, equal=equal, us=round(1e6 * spent, 1))
    if rank == 0:
        tell("group", wrong=wrong)


# --- small


def small_options() -> dict[str, Any]:
    """Engine options with few blocks, so that running sequences are suspended to the host."""
    tiers = dict(cache_gb=40.5 * BLOCK / 1e9, host_cache_gb=100.5 * BLOCK / 1e9, chunk_size=16, headroom=0.0)
    return dict(dtype="float32", max_sequences=8, token_budget=64, **tiers)


def run_to_the_end(loop: Any, tokens: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    tokens = {} if tokens is None else tokens
    while loop.has_work():
        for output in loop.step() or ():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
    return tokens


def history(loop: Any, seed: int, steps: int) -> tuple[dict[str, Any], set[str], dict[str, list[int]]]:
    """Random requests, some of them aborted. Returns the requests, the aborted ones, and the tokens of each."""
    from holdfast.core.types import Grammar, Request, SamplingParams

    grammar = Grammar("regex", GRAMMAR)
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1.5, seed=11, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=7, max_tokens=120, ignore_eos=True, grammar=grammar),
        SamplingParams(temperature=1.0, top_k=9, seed=8, max_tokens=40, logprobs=1, ignore_eos=True, grammar=grammar),
    ]
    choose, requests, aborted = random.Random(seed), dict[str, Any](), set[str]()
    given: dict[str, list[int]] = {}
    for step in range(steps):
        if choose.random() < 0.3:
            known = choose.choice([(), *(request.prompt for request in requests.values())])
            fresh = choose.choices(range(1, VOCAB), k=choose.randint(1, 60))
            prompt = (*known[: choose.randint(0, 60)], *fresh)
            name = f"{seed}-{step}"
            requests[name] = Request(name, prompt, choose.choice(kinds), priority=choose.randint(0, 1))
            loop.add(requests[name])
        if requests and choose.random() < 0.1:
            name = choose.choice([*requests])
            loop.abort(name)
            aborted.add(name)
        for output in loop.step() or ():
            given.setdefault(output.request_id, []).extend(output.tokens)
    return requests, aborted, run_to_the_end(loop, given)


def small(arguments: argparse.Namespace) -> None:
    from dataclasses import replace

    alone: dict[tuple[int, str], list[int]] = {}
    differing: list[tuple[str, str, int, int, Any]] = []
    seeds, steps = arguments.seeds, 150
    for layout in ("one", *arguments.layouts_small):
        engine = engine_of(layout, FAMILIES[arguments.family], **small_options())
        loop, began = engine.loop, time.perf_counter()
        while loop.prepare():
            pass
        tell("captured", layout=layout, seconds=round(time.perf_counter() - began, 2))
        for seed in seeds:
            began = time.perf_counter()
            requests, aborted, given = history(loop, seed, steps)
            if layout == "one":  # the same requests, each alone
                for name, request in requests.items():
                    loop.add(replace(request, id="alone"))
                    alone[seed, name] = run_to_the_end(loop)["alone"]
            wrong = {}
            for name in requests:
                got, expected = given.get(name, []), alone[seed, name]
                if got != (expected[: len(got)] if name in aborted else expected):
                    pairs = zip(got, expected, strict=False)
                    place = next((place for place, (a, b) in enumerate(pairs) if a != b), "short")
                    params = requests[name].params
                    wrong[name] = (place, params.temperature, params.top_k, params.max_tokens)
                    if isinstance(place, int) and params.temperature == 0.0:
                        prompt = (*requests[name].prompt, *expected[:place])
                        differing.append(
                            (layout, name, got[place], expected[place], replace(requests[name], prompt=prompt))
                        )
            stats = loop.stats()
            tell(
                "tokens",
                layout=layout,
                seed=seed,
                requests=len(requests),
                tokens=sum(map(len, given.values())),
                wrong_from=wrong,
                swapped_out=stats.blocks_swapped_out,
                swapped_in=stats.blocks_swapped_in,
                suspended=stats.preemptions,
                seconds=round(time.perf_counter() - began, 2),
            )
        began = time.perf_counter()
        loop.close()
        tell("closed", layout=layout, seconds=round(time.perf_counter() - began, 2))
    if differing:
        print_gaps(FAMILIES[arguments.family], differing)


def print_gaps(shape: dict[str, Any], differing: list[tuple[str, str, int, int, Any]]) -> None:
    """Print how far one GPU puts a wrong greedy token below the right one. Rounding explains 1e-4, not 1e-2."""
    from dataclasses import replace

    engine = engine_of("one", shape, **small_options())
    for layout, name, got, expected, request in differing:
        params = replace(request.params, max_tokens=1, logprobs=20)
        engine.loop.add(replace(request, id="gap", params=params))
        found: dict[int, float] = {}
        while engine.loop.has_work():
            for output in engine.loop.step() or ():
                for told in output.logprobs:
                    found |= dict(zip(told.top_ids, told.top_logprobs, strict=True))
        gap = found.get(expected, float("-inf")) - found.get(got, float("-inf"))
        tell("gap", layout=layout, request=name, got=got, expected=expected, gap=gap)
    engine.loop.close()


# --- moved


def answer(loop: Any, prompt: tuple[int, ...]) -> tuple[list[int], int]:
    """The greedy answer to a prompt, and the number of its tokens that were cached."""
    from holdfast.core.types import Request, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    loop.add(Request("moved", prompt, params, arrival=time.monotonic()))
    tokens, cached = list[int](), 0
    while loop.stats().waiting or loop.stats().running:
        for output in loop.step() or ():
            tokens += output.tokens
            cached = output.cached_tokens
    return tokens, cached


def bring(source: Any, target: Any, prompt: tuple[int, ...]) -> Any:
    """Move a prompt's state between two engines of this process. Returns the target's report."""
    from holdfast.core.types import Identity
    from holdfast.engine.process.parts.moves import MoveHandler
    from holdfast.lm.memory.digests import block_digests
    from holdfast.lm.parts.moves.messages import FetchChunks

    chain = block_digests(Identity().root(), prompt[: len(prompt) // 16 * 16], 16)
    target.handler(MoveHandler).receive(FetchChunks(1, chain, list(range(len(chain))), source.info.chunk_address, 16))
    told: list[Any] = []
    while not told or source.handler(MoveHandler).ready or target.handler(MoveHandler).ready:
        for engine in (source, target):
            told += engine.handler(MoveHandler).answers()
            if engine.loop.has_work():
                engine.loop.step()
    return told[0]


def wait_for_the_host_tier(engine: Any) -> None:
    """Wait until all host memory is pinned, because blocks come back only to memory that is."""
    while engine.loop.stats().host_blocks_ready < engine.info.num_host_blocks:
        time.sleep(0.01)


def moved(arguments: argparse.Namespace) -> None:
    """Compare each answer with that of the engine where the conversation began: the same steps over the same state.

    Nothing is priced, so all state that is there is moved.
    """
    from benchmarks.engine.llama8b import directory_of
    from holdfast.engine.process.parts.tiers import TierHandler

    options = small_options() | dict(cache_gb=200 * BLOCK / 1e9, eviction="lru", chunk_host="127.0.0.1")
    options |= dict(secret=b"moved", model=directory_of(SMALL_SHAPE))
    for layout in arguments.layouts_small:
        kept = dict(disk_cache_dir=tempfile.mkdtemp(prefix="many-gpus-"), disk_cache_gb=400 * BLOCK / 1e9)
        source, target = (engine_of(layout, SMALL_SHAPE, **options, **more) for more in ({}, kept))
        for engine in (source, target):
            wait_for_the_host_tier(engine)
        choose, turns, wrong = random.Random(7), [], []
        for number in range(6):
            first = tuple(choose.choices(range(1, VOCAB), k=choose.randint(100, 300)))
            prompt = (*first, *answer(source.loop, first)[0], *choose.choices(range(1, VOCAB), k=9))
            answer(source.loop, prompt)
            expected, cached = answer(source.loop, prompt)
            came = bring(source, target, prompt)
            if (
                came.reason
                or came.tokens != len(prompt) // 16 * 16
                or answer(target.loop, prompt) != (expected, cached)
            ):
                wrong.append(("moved", number, came.tokens, came.reason))
            turns.append((prompt, expected))
        target.handler(TierHandler).flush(target.loop, 10)
        for engine in (source, target):
            engine.close()
        again = engine_of(layout, SMALL_SHAPE, **options, **kept)
        wait_for_the_host_tier(again)
        for number, (prompt, expected) in enumerate(turns):
            found = answer(again.loop, prompt)
            if found[0] != expected or not found[1]:
                wrong.append(("from the disk", number, found[1]))
        stats = again.loop.stats()
        tell("moved", layout=layout, wrong=wrong, turns=len(turns), on_disk=stats.prefix_hits_on_disk)
        again.close()
        shutil.rmtree(kept["disk_cache_dir"])


# --- killed


def killed(arguments: argparse.Namespace) -> None:
    """Kill a rank while steps run. Prints the time until the loop raises, and the error."""
    from holdfast.core.types import Request, SamplingParams

    engine = engine_of("tp2", SMALL_SHAPE, **small_options())
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    for number in range(2):
        engine.loop.add(Request(str(number), (1, 2, 3), params))
    for _ in range(20):
        engine.loop.step()
    began = time.perf_counter()
    os.kill(engine.ranks.pids[0], signal.SIGKILL)
    try:
        while engine.loop.has_work():
            engine.loop.step()
        tell("killed", WRONG="the loop ended as if nothing had happened")
    except Exception as error:
        raised = time.perf_counter() - began
        engine.loop.close()
        closed = time.perf_counter() - began
        tell("killed", raised_after=round(raised, 3), closed_after=round(closed, 3), error=str(error)[:200])


# --- served


def served(arguments: argparse.Namespace) -> None:
    from benchmarks.engine.llama8b import LLAMA_3_8B, QWEN3_06B, offline
    from benchmarks.engine.step_breakdown import PROMPT, breakdown, finish, start

    shape = {"8b": LLAMA_3_8B, "0.6b": QWEN3_06B, "small": SMALL_SHAPE}[arguments.shape]
    layout = arguments.layout
    options: dict[str, Any] = dict(max_sequences=128, prefix_sharing=False, host_cache_gb=0.0)
    engine = engine_of(layout, shape, **options)
    loop = engine.loop
    offline(loop, "warm-up", [(PROMPT, 8)] * 4)
    for rows in (1, 32, 128):
        start(loop, rows)
        times = []
        for _ in range(60):
            began = time.perf_counter()
            loop.step()
            times.append(1e3 * (time.perf_counter() - began))
        finish(loop)
        times.sort()
        tell("decode", layout=layout, rows=rows, step_ms_p50=round(times[30], 3), step_ms_p90=round(times[54], 3))
    found = breakdown(loop, 32, 10)
    tell("breakdown", layout=layout, **{key: found[key] for key in ("step_ms_p50", "watched_ms", "kinds_us")})
    for kernel in found["kernels"]:
        tell("kernel", **kernel)
    tell("gaps", gaps=found["gaps"][:6])
    for _ in range(2):
        tell("prefill", layout=layout, **offline(loop, "prefill 8x8192", [(8192, 1)] * 8))
    loop.close()


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "group": group,
    "small": small,
    "moved": moved,
    "killed": killed,
    "served": served,
}


def child(arguments: argparse.Namespace) -> None:
    """Run one part, and end without waiting for other threads."""
    status = 0
    try:
        PARTS[arguments.child](arguments)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def memory_used() -> list[str]:
    """Allocated memory of each GPU, in MB."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []


def run_part(name: str, limit: float, options: list[str]) -> None:
    command = [*PROGRAM, "--child", name, *options]
    caches = tempfile.mkdtemp(prefix="many-gpus-")
    environment = os.environ | {"XDG_CACHE_HOME": caches, "HOLDFAST_DEBUG": "1", "PYTHONFAULTHANDLER": "1"}
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.STDOUT, start_new_session=True)
    # SIGABRT first, so that every process shows where its threads are.
    timers = [
        threading.Timer(limit + wait, partial(os.killpg, process.pid, number))
        for wait, number in ((-2.0, signal.SIGABRT), (0.0, signal.SIGKILL))
    ]
    for timer in timers:
        timer.start()
    status = process.wait()
    for timer in timers:
        timer.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # processes that a part may have left
    over = status in (-signal.SIGKILL, -signal.SIGABRT)
    taken = round(time.monotonic() - began, 1)
    tell("part", name=name, status="its time was over" if over else status, seconds=taken, megabytes_left=memory_used())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110.0, help="for all parts together")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=["tp2"], help="of the part `served`")
    parser.add_argument(
        "--layouts-small", nargs="*", choices=LAYOUTS, default=["tp2", "pp2"], help="of the parts `small` and `moved`"
    )
    parser.add_argument("--family", choices=FAMILIES, default="llama", help="of the part `small`")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1], help="of the histories of the part `small`")
    parser.add_argument("--shape", choices=("8b", "0.6b", "small"), default="8b", help="of the part `served`")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--layout", choices=LAYOUTS, default="tp2", help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end = time.monotonic() + arguments.seconds
    for name in arguments.parts:
        options = ["--shape", arguments.shape, "--layouts-small", *arguments.layouts_small]
        options += ["--family", arguments.family, "--seeds", *map(str, arguments.seeds)]
        for layout in arguments.layouts if name == "served" else ["tp2"]:
            left = end - time.monotonic()
            if left < 5:
                tell("part", name=name, status="no time was left for it")
                continue
            run_part(name, min(LIMITS[name], left), [*options, "--layout", layout])


if __name__ == "__main__":
    main()
