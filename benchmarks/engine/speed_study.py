"""A study of prefills and of 128 decodes on one H200: token budgets, kernels, products by their pieces, merges.

python -m benchmarks.engine.speed_study engine | products | decode
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from benchmarks.lib.energy import energy_counter

BEGAN = time.monotonic()


def say(**line):
    print(f"[{time.monotonic() - BEGAN:5.1f}] " + json.dumps(line), flush=True)


def engine(budgets=(2048, 8192, 16384), rounds=2):
    from benchmarks.engine import step_breakdown as sb
    from benchmarks.engine.llama8b import LLAMA_3_8B, offline, started
    from benchmarks.lib.invocation import settle

    built, stages = started(LLAMA_3_8B, max_sequences=512, prefix_sharing=False, host_cache_gb=0, token_budget=max(budgets))
    loop = built.loop
    say(stages=stages, blocks=built.info.num_blocks)
    settle(loop)
    while loop.prepare():
        pass
    say(captured=True)
    offline(loop, "warm-up", [(32, 8)] * 4)
    policy = loop.planner._policy
    for number in range(rounds):
        for budget in budgets[:: 1 if number % 2 == 0 else -1]:
            policy.token_budget = budget
            found = offline(loop, "prefill", [(8192, 16)] * 8)
            say(row="prefill8", budget=budget, total_tok_s=found["total_tok_s"], joules=found.get("joules_token"))
        for budget in (2048, 8192):
            policy.token_budget = budget
            found = offline(loop, "bs128", [(512, 128)] * 128)
            say(row="bs128", budget=budget, output_tok_s=found["output_tok_s"], joules=found.get("joules_token"))
    policy.token_budget = 2048
    for batch in (128, 256):
        found = sb.breakdown(loop, batch, 20)
        say(decodes=batch, step_ms=found["step_ms_p50"], watched_ms=found["watched_ms"], kinds=found["kinds_us"])
        for kernel in found["kernels"][:16]:
            say(**kernel)
        for gap in found["gaps"][:6]:
            say(**gap)
    for budget in (2048, 8192):
        found = sb.prefill(loop, budget, 2)
        say(**{key: found[key] for key in ("token_budget", "prompt_ms", "clocks", "watched_ms", "kinds_us")})
        for kernel in found["kernels"][:14]:
            say(**kernel)
        for gap in found["gaps"][:6]:
            say(**gap)


def products(seconds=0.45):
    """Energy and time of each product whole, and cut over tokens or outputs, under load."""
    joules = energy_counter()
    from benchmarks.kernels.products_gpu import ADDED, LAYERS, SHAPES, Products

    made = Products(8192)

    def cut(total, parts):
        return [slice(*ends) for ends in pairwise(accumulate([total // parts] * parts, initial=0))]

    def run(name, tokens, by_tokens, by_outputs):
        for layer in range(LAYERS):
            weight = made.weights[name][layer]
            outputs, inputs = weight.shape
            for rows in cut(tokens, by_tokens):
                for columns in cut(outputs, by_outputs):
                    x, out = made.inputs[inputs][rows], made.outputs[outputs][rows, columns]
                    part = weight[columns]
                    if name in ADDED:
                        out.addmm_(x, part.t(), beta=0.5)
                    else:
                        torch.mm(x, part.t(), out=out)

    def graph(*arguments):
        run(*arguments)
        torch.cuda.synchronize()
        made_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made_graph):
            run(*arguments)
        return made_graph

    for tokens in (8192, 2048, 16384 // 4):
        for name, (outputs, inputs) in SHAPES.items():
            ways = [(1, 1), (1, 2), (2, 1), (4, 1)] if tokens == 8192 else [(1, 1), (1, 2), (2, 1)]
            graphs = {way: graph(name, tokens, *way) for way in ways}
            totals = {way: [0.0, 0.0, 0] for way in ways}
            for number in range(2):
                for way in ways[:: 1 if number == 0 else -1]:
                    torch.cuda.synchronize()
                    before, begin, count = joules() if joules else 0.0, time.perf_counter(), 0
                    while time.perf_counter() - begin < seconds / 2:
                        for _ in range(4):
                            graphs[way].replay()
                        count += 4
                        torch.cuda.synchronize()
                    total = totals[way]
                    total[0] += time.perf_counter() - begin
                    total[1] += (joules() if joules else 0.0) - before
                    total[2] += count
            shown = {}
            for way, (spent, used, count) in totals.items():
                work = 2.0 * tokens * outputs * inputs * LAYERS * count
                shown[str(way)] = [round(work / spent / 1e12, 1), round(used / work * 1e12, 3)]
            say(tokens=tokens, product=name, tflop_s_and_pj=shown)


def decode():
    """Layers of 128 and 256 decodes with and without merges, and products of 96 to 128 tokens by launch."""
    from benchmarks.kernels import decode_layer_gpu as layers_of
    from benchmarks.kernels import gemv_gpu as gemv

    rate = gemv.copy_rate()
    say(copy=round(rate, 3))
    sizes = ((gemv.QKV, gemv.HIDDEN), (gemv.HIDDEN, gemv.HIDDEN), (2 * gemv.INNER, gemv.HIDDEN))
    sizes = (*sizes, (gemv.HIDDEN, gemv.INNER))
    weights = [gemv.random(*size, spread=0.01) for size in sizes]
    launches = [gemv.SkinnyLaunch(*each) for each in ((256, 64, 8, 4), (128, 64, 8, 4), (128, 64, 4, 4), (128, 128, 8, 3))]
    small = [gemv.SkinnyLaunch(64, 64, 4, 6), gemv.SkinnyLaunch(64, 128, 4, 4)]

    with torch.inference_mode():
        tried = {
            "qkv": [*small, *launches[1:3]],
            "o": [replace(one, parts=parts) for one in (*small, launches[1]) for parts in (2, 4)],
            "gate_up": launches,
            "down": [replace(one, parts=parts) for one in launches for parts in (4, 8)],
        }
        rings = {}
        for name, own in zip(gemv.SHAPES["8b"], weights, strict=True):
            count = max(1, -(-gemv.RING_BYTES // own.nbytes))
            rings[name] = [own, *(gemv.random(*own.shape, spread=0.01) for _ in range(count - 1))]

        def compile_one(item):
            name, launch = item
            with torch.inference_mode():
                ops, kind = gemv.Fixed(launch), gemv.KINDS[name]
                weight = rings[name][0]
                x, stream, norm = gemv.random(128, weight.shape[1]), gemv.random(128, weight.shape[0]), None
                norm = gemv.random(weight.shape[0])
                try:
                    if kind == "linear":
                        ops.linear(x, weight)
                    elif kind == "gated":
                        ops.gated_linear(x, weight)
                    else:
                        ops.add_linear_norm(stream, x, weight, None, norm)
                    torch.cuda.synchronize()
                except Exception as failed:  # noqa: BLE001
                    return repr(failed)[:120]
            return None

        pairs = [(name, launch) for name, several in tried.items() for launch in several]
        with ThreadPoolExecutor(12) as pool:
            failed = dict(zip(pairs, pool.map(compile_one, pairs), strict=True))
        say(compiled=len(pairs), failed=[gemv.brief(pair[1]) + " " + why for pair, why in failed.items() if why])
        for tokens in (128, 96, 80):
            for name, several in tried.items():
                found = {}
                for launch in (None, *several):
                    if launch is not None and failed[name, launch]:
                        continue
                    taken = gemv.product_time(gemv.Fixed(launch), gemv.KINDS[name], rings[name], tokens)
                    found[gemv.brief(launch)] = round(taken, 2)
                best = dict(sorted(found.items(), key=lambda item: item[1])[:4])
                say(tokens=tokens, product=name, cublas=found["PyTorch"], best=best)
        del rings
        for batch, context in ((128, 600), (256, 600), (128, 1200)):
            layers = layers_of.Layers(weights, batch, context, 1)

            def timed(merging):
                attention = layers_of.Variant({}, 1)
                metadata = attention.reserve(batch)
                attention.refill(metadata, layers.segments)
                if not merging:
                    metadata = tuple(replace(each, merges=each.merges[:0]) for each in metadata)
                key, value = layers.cache
                qkv, o, gate_up, down = weights

                def run():
                    normed = layers.ops.norm(layers.stream, layers.norm)
                    for _ in range(4):
                        query = layers.ops.rotate_and_write(
                            layers.ops.linear(normed, qkv), layers.rotation, None, None, (key, value), layers.slots
                        )
                        query = attention.attend(query, key, value, layers.tables, metadata, scale=128**-0.5)
                        normed = layers.ops.add_linear_norm(layers.stream, query.flatten(1), o, None, layers.norm)
                        inner = layers.ops.gated_linear(normed, gate_up)
                        normed = layers.ops.add_linear_norm(layers.stream, inner, down, None, layers.norm)

                return gemv.milliseconds(gemv.captured(run)) / 4 * 1e3

            found = {merging: [round(timed(merging), 2) for _ in range(2)] for merging in (True, False)}
            alone = layers.microseconds(None)
            say(batch=batch, context=context, merging=found[True], none=found[False], no_attention=round(alone, 2))
            del layers


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
