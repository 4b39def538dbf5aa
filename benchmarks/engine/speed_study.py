"""A study of prefills and of 128 decodes on one H200.

python -m benchmarks.engine.speed_study engine BLOCK_SIZE [ATTENTION] | gate
"""

from __future__ import annotations

import json
import sys
import time

import torch

from benchmarks.lib.energy import energy_counter

BEGAN = time.monotonic()


def say(**line):
    print(f"[{time.monotonic() - BEGAN:5.1f}] " + json.dumps(line), flush=True)


def engine(block="16", attention="auto", budgets=(2048, 8192, 16384)):
    from benchmarks.engine import step_breakdown as sb
    from benchmarks.engine.llama8b import LLAMA_3_8B, offline, started
    from benchmarks.lib.invocation import settle

    more = {} if attention == "auto" else dict(attention_backend=attention)
    shown = dict(max_sequences=256, prefix_sharing=False, host_cache_gb=0, block_size=int(block))
    built, stages = started(LLAMA_3_8B, token_budget=max(budgets), **shown, **more)
    loop = built.loop
    say(block=block, attention=attention, stages=stages, blocks=built.info.num_blocks)
    settle(loop)
    say(captured=True)
    offline(loop, "warm-up", [(32, 8)] * 4)
    policy = sb.stall_free(loop)

    def prefills(budget, **about):
        policy.token_budget = budget
        found = offline(loop, "prefill", [(8192, 1)] * 8)
        say(row="prefill8", budget=budget, tok_s=found["total_tok_s"], steps=found["steps"], j=found.get("joules_token"), **about)

    def batch(budget, **about):
        policy.token_budget = budget
        found = offline(loop, "bs128", [(512, 128)] * 128)
        say(row="bs128", budget=budget, tok_s=found["output_tok_s"], j=found.get("joules_output_token"), **about)

    plain = block == "16" and attention == "auto"
    sizes = budgets if plain else budgets[1:2]
    for size in (*sizes, *sizes[::-1]):
        prefills(size)
    for size in budgets[:2] if plain else budgets[1:2] * 2:
        batch(size)
    if plain:
        for kind in ("dummy", "normal", "dummy", "normal"):
            redraw(kind)
            prefills(budgets[1], weights=kind)
        for kind in ("dummy", "normal"):
            redraw(kind)
            batch(budgets[1], weights=kind)
    for budget in (8192,):
        found = sb.prefill(loop, budget, 1)
        say(**{key: found[key] for key in ("token_budget", "prompt_ms", "clocks", "watched_ms", "kinds_us")})
        for kernel in found["kernels"][:9]:
            say(**kernel)


@torch.inference_mode()
def redraw(kind):
    """Draw the decoder's weights again: as vLLM's dummy format does, norms too, or as load_format=random does."""
    import gc

    from holdfast.lm.models.decoder import Decoder

    (decoder,) = [each for each in gc.get_objects() if type(each) is Decoder]
    fields = [vars(layer) if hasattr(layer, "__dict__") else {n: getattr(layer, n) for n in layer.__slots__} for layer in decoder.layers]
    found = [value for each in fields for value in each.values() if isinstance(value, torch.Tensor) and value.numel()]
    for weight in {each.data_ptr(): each for each in (*found, decoder.embedding, decoder.lm_head, decoder.norm)}.values():
        if kind == "dummy":
            weight.uniform_(-1e-3, 1e-3)
        elif weight.ndim == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, 0.02)
    torch.cuda.synchronize()


@torch.inference_mode()
def gate(seconds="0.7"):
    """Layers without attention of 72 to 128 tokens with the gate by cuBLAS and a kernel, and by one kernel, under load."""
    from benchmarks.kernels import gemv_gpu as gemv
    from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps

    class Before(FusedLayerOps):
        def launch(self, x, weight, *, cut=False, gated=False):
            return super().launch(x, weight, cut=cut)

    joules = energy_counter()
    sizes = [(gemv.QKV, 4096), (4096, 4096), (2 * gemv.INNER, 4096), (4096, gemv.INNER)]
    weights = [[gemv.random(*size, spread=0.01) for size in sizes] for _ in range(4)]
    for tokens in (128, 96, 72):
        stream, norm = gemv.random(tokens, 4096), gemv.random(4096)
        graphs = {}
        for name, ops in (("before", Before(gemv.shape())), ("after", FusedLayerOps(gemv.shape()))):

            def run(ops=ops):
                normed = ops.norm(stream, norm)
                for qkv, o, gate_up, down in weights:
                    query = ops.linear(normed, qkv)[:, :4096]
                    normed = ops.add_linear_norm(stream, query.contiguous(), o, None, norm)
                    normed = ops.add_linear_norm(stream, ops.gated_linear(normed, gate_up), down, None, norm)

            graphs[name] = gemv.captured(run)
        found = {name: [0.0, 0.0, 0] for name in graphs}
        for number in range(4):
            for name in list(graphs)[:: 1 if number % 2 == 0 else -1]:
                torch.cuda.synchronize()
                used, begin, count = joules() if joules else 0.0, time.perf_counter(), 0
                while time.perf_counter() - begin < float(seconds):
                    for _ in range(50):
                        graphs[name]()
                    torch.cuda.synchronize()
                    count += 200
                each = found[name]
                each[0] += time.perf_counter() - begin
                each[1] += (joules() if joules else 0.0) - used
                each[2] += count
        shown = {
            name: [round(1e6 * spent / count, 2), round(1e3 * used / count, 3), round(used / spent)]
            for name, (spent, used, count) in found.items()
        }
        say(tokens=tokens, us_and_mj_a_layer_and_watts=shown)


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]](*sys.argv[2:])
