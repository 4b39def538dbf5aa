"""A study of the time between kernels on one H200: python -m benchmarks.engine.gap_study layers|engine|gate [...]."""

# mypy: ignore-errors
# ruff: noqa

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import chain

import torch

BEGAN = time.monotonic()


def say(**line):
    print(f"[{time.monotonic() - BEGAN:5.1f}] " + json.dumps(line), flush=True)


def hoist(nodes, graph):
    """Let each memset wait for what came before the kernel before it, and the kernels after it for both."""
    driver = nodes._driver
    raw = driver.CUgraph(graph.raw_cuda_graph())
    moved = 0
    for node in nodes._nodes(raw):
        (kind,) = nodes._call("cuGraphNodeGetType", node)
        if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
            continue
        before = nodes._around("cuGraphNodeGetDependencies", node)
        after = nodes._around("cuGraphNodeGetDependentNodes", node)
        if len(before) != 1:
            continue
        earlier = nodes._around("cuGraphNodeGetDependencies", before[0])
        nodes._call("cuGraphRemoveDependencies", raw, before, [node], None, 1)
        if earlier:
            nodes._call("cuGraphAddDependencies", raw, earlier, [node] * len(earlier), None, len(earlier))
        nodes._call("cuGraphAddDependencies", raw, before * len(after), after, None, len(after))
        moved += 1
    return moved


@torch.inference_mode()
def layers(*kinds):
    """Layers of products with what is between them, by tokens: nodes of the graph, and us a layer in turns under load."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.engine.step_breakdown import watched
    from benchmarks.kernels import gemv_gpu as gemv
    from holdfast.lm.kernels.capture import capture
    from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
    from holdfast.lm.kernels.memset_nodes import MemsetNodes

    nodes = MemsetNodes.of()
    say(bindings=nodes is not None, lt=os.environ.get("CUBLASLT_WORKSPACE_SIZE"), kinds=kinds)
    if "lt" in kinds:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    sizes = [(gemv.QKV, 4096), (4096, 4096), (2 * gemv.INNER, 4096), (4096, gemv.INNER)]
    weights = [[gemv.random(*size, spread=0.01) for size in sizes] for _ in range(8)]
    ops = FusedLayerOps(gemv.shape())
    for tokens in (2048, 640, 8192, 512):
        stream, norm = gemv.random(tokens, 4096), gemv.random(4096)

        def run():
            normed = ops.norm(stream, norm)
            for qkv, o, gate_up, down in weights:
                query = ops.linear(normed, qkv)[:, :4096]
                normed = ops.add_linear_norm(stream, query, o, None, norm)
                normed = ops.add_linear_norm(stream, ops.gated_linear(normed, gate_up), down, None, norm)

        start = stream.clone()
        run()
        graphs, results = {}, {}
        for name in ("memsets", *(() if "lt" in kinds else ("kernels", "hoisted"))):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with capture(graph):
                run()
            if name == "memsets":
                found = []
                raw = nodes._driver.CUgraph(graph.raw_cuda_graph())
                for node in nodes._nodes(raw):
                    (kind,) = nodes._call("cuGraphNodeGetType", node)
                    if "MEMSET" in kind.name:
                        (p,) = nodes._call("cuGraphMemsetNodeGetParams", node)
                        found.append((hex(int(p.dst)), p.value, p.elementSize, p.width, p.height))
                say(tokens=tokens, memsets=len(found), different=sorted({*found})[:6])
            else:
                try:
                    changed = nodes.replace(graph) if name == "kernels" else hoist(nodes, graph)
                except Exception as error:
                    say(tokens=tokens, variant=name, failed=repr(error)[:300])
                    continue
                say(tokens=tokens, variant=name, changed=changed)
            graph.instantiate()
            stream.copy_(start)
            graph.replay()
            torch.cuda.synchronize()
            results[name] = stream.clone()
            graphs[name] = graph
        say(tokens=tokens, equal={name: bool(torch.equal(each, results["memsets"])) for name, each in results.items()})
        times = {name: [] for name in graphs}
        for turn in range(5):
            for name in [*graphs][:: 1 if turn % 2 else -1]:
                stream.copy_(start)
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                count = max(2, 40_000 // tokens)
                events[0].record()
                for _ in range(count):
                    graphs[name].replay()
                events[1].record()
                torch.cuda.synchronize()
                times[name].append(1e3 * events[0].elapsed_time(events[1]) / count / 8)
        say(tokens=tokens, us_a_layer={name: [round(each, 1) for each in taken] for name, taken in times.items()})
        if tokens in (2048, 640):
            for name, graph in graphs.items():
                with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                    graph.replay()
                    torch.cuda.synchronize()
                shown = watched(profiler, per=8)
                say(tokens=tokens, variant=name, kinds=shown["kinds_us"], gaps=[(g["after"][:14], g["before"][:40], g["count"], g["us"]) for g in shown["gaps"][:6]])


def timeline(loop, streams):
    """What the device does between the last kernels of a step and the first of the next one."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.engine.step_breakdown import start

    start(loop, streams)
    for _ in range(5):
        loop.step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(4):
            loop.step()
        torch.cuda.synchronize()
    while loop.has_work():
        loop.step()
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in profiler.events() if e.device_type == DeviceType.CUDA and e.name)
    places = [number for number, span in enumerate(spans) if span[2].startswith("write_step_inputs")]
    for at in places[1:3]:
        base = spans[at][0]
        say(streams=streams, between=[(round(s - base, 1), round(e - s, 1), n[:44]) for s, e, n in spans[at - 14 : at + 3]])


def built(**options):
    from benchmarks.engine.llama8b import LLAMA_3_8B, started
    from benchmarks.lib.invocation import settle

    engine, stages = started(LLAMA_3_8B, **{"max_sequences": 512, "prefix_sharing": False, "token_budget": "large", "host_cache_gb": 0.0} | options)
    say(stages=stages)
    return engine.loop


def prefills(loop, budget, tokens=8192, count=2):
    from benchmarks.engine.llama8b import offline
    from benchmarks.engine.step_breakdown import stall_free

    policy = stall_free(loop)
    before, policy.token_budget = policy.token_budget, budget
    found = offline(loop, "prefill", [(tokens, 1)] * count)
    policy.token_budget = before
    return found["total_tok_s"]


class Notes:
    def __init__(self):
        self.steps, self.plans, self.last = [], [], time.perf_counter()

    def planned(self, plan):
        columns = plan.columns
        spans = [*zip(columns.column("start"), columns.column("stop"))]
        decodes = [stop for begin, stop in spans if stop - begin == 1]
        self.plans.append((len(decodes), sum(stop - begin for begin, stop in spans), sum(decodes), len(spans), time.perf_counter()))

    def ended(self, result):
        now = time.perf_counter()
        decodes, tokens, context, segments, planned = self.plans.pop(0)
        self.steps.append((decodes, tokens, context, segments, round(1e3 * result.seconds, 3), round(1e3 * (now - self.last), 3), round(1e3 * (now - planned), 3)))
        self.last = now

    def close(self):
        pass


def engine(out):
    """Steps with memsets and with kernels in their place, in turns; then the chat, step by step."""
    import gc

    from benchmarks.engine.llama8b import chat_lengths, offline
    from benchmarks.lib.invocation import settle
    from holdfast.lm.execution import graphs

    after = built(cache_gb=60.0)
    settle(after)
    own, graphs.memset_nodes = graphs.memset_nodes, lambda device: None
    before = built(cache_gb=12.0)
    graphs.memset_nodes = own
    say(ready=True)
    gc.collect(), gc.freeze(), gc.disable()
    loops = {"memsets": before, "kernels": after}
    for loop in loops.values():
        offline(loop, "warm-up", [(32, 8)] * 4)
        prefills(loop, 2048, count=1)
    for tokens, budget in ((600, 600), (8192, 2048), (8192, 8192)):
        paces = {name: [] for name in loops}
        for turn in range(3):
            for name in [*loops][:: 1 if turn % 2 else -1]:
                paces[name].append(prefills(loops[name], budget, tokens, 8192 * 2 // tokens))
        say(prompt=tokens, budget=budget, tok_s=paces, ratio=round(statistics.median(paces["kernels"]) / statistics.median(paces["memsets"]), 4))
    notes = Notes()
    after.observe(notes)
    found = offline(after, "chat", chat_lengths())
    after.ignore(notes)
    say(chat=found)
    with open(out, "w") as file:
        json.dump(notes.steps, file)
    for streams in (1, 32):
        timeline(after, streams)


def gate():
    """Batch 128 with the gate in the product of up to 128 tokens, and without, in turns."""
    import gc

    from benchmarks.engine.llama8b import offline
    from holdfast.lm.kernels.linear import fused_layers
    from holdfast.lm.kernels.linear.skinny_gemm import SkinnyLaunch

    from benchmarks.kernels.gemv_gpu import random
    from holdfast.lm.kernels.linear.skinny_gemm import skinny_gemm

    for rows in (72, 128):
        x, weight = random(rows, 4096), random(28_672, 4096, spread=0.01)
        out = x.new_empty(1, rows, 14_336)
        skinny_gemm(x, weight, None, out, SkinnyLaunch(256, 64, 8, 4), gated=True)
        first, second = (x.double() @ weight.double().t()).chunk(2, dim=1)
        exact = torch.nn.functional.silu(first) * second
        error = (out[0].double() - exact).abs().max() / exact.abs().max()
        say(rows=rows, error=float(error))
    options = dict(max_sequences=128, cache_gb=13.0)
    before = built(**options)
    own = fused_layers.FusedLayerOps.gated_linear

    def gated_linear(self, x, weight, bias=None):
        plain = isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor) and x.element_size() == 2
        if not plain or not 64 < len(x) <= 128 or weight.shape[0] < 16_384:
            return own(self, x, weight, bias)
        out = x.new_empty(len(x), weight.shape[0] // 2)
        self._run_skinny(x, weight, bias, out[None], SkinnyLaunch(256, 64, 8, 4), gated=True)
        return out

    fused_layers.FusedLayerOps.gated_linear = gated_linear
    after = built(**options)
    fused_layers.FusedLayerOps.gated_linear = own
    gc.collect(), gc.freeze(), gc.disable()
    loops = {"before": before, "after": after}
    for loop in loops.values():
        offline(loop, "warm-up", [(512, 16)] * 128)
    for lengths in ([(512, 128)] * 128,):
        found = {name: [] for name in loops}
        for turn in range(2):
            for name in [*loops][:: 1 if turn % 2 else -1]:
                row = offline(loops[name], "bs", lengths)
                found[name].append((row["output_tok_s"], row["step_ms_p50"], row.get("joules_output_token")))
                say(streams=len(lengths), **{name: found[name][-1]})


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]](*sys.argv[2:])
