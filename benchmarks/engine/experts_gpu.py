"""A mixture of experts on one GPU: Qwen3-30B-A3B's shape with random weights, its kernels and its steps.

    python -m benchmarks.engine.experts_gpu kernels [--layer NAME] [--tune] [--tokens 1 8 32 ...] [--json FILE]
    python -m benchmarks.engine.experts_gpu rows [bs1 bs32 bs128 prefill8] [--temperature T] [--spread F] [--repeat N]
                                                                [--profile] [--quick] [--json FILE]
    python -m benchmarks.engine.experts_gpu touched [bs32] [--temperature T] [--spread F] [--json FILE]
    python -m benchmarks.engine.experts_gpu peer --peer vllm_peer.py --out DIR [--temperature T]

`kernels` times a layer's experts as one CUDA graph over several inputs, whose tokens choose different experts, and each
of its kernels alone. The bound is the larger of two times: the bytes of the experts that are chosen, and of what is
read and written between, at the rate of a device-to-device copy; and the operations at the rate of a large product.
`--layer gpt-oss-120b-mxfp4` has packed weights. `--tune` times other launches than the rule's. `rows` runs the engine;
the rows are those of llama8b.py. `--profile` shows the kernels of decode steps of 1 and 32 sequences, and `--quick`
captures no more graphs than a start does. `peer` writes a copy of the peer's driver with this shape, to be run as
`python OUT/peer_moe.py short` with its packages. `touched` runs rows without graphs and counts the experts that a
layer's tokens choose in a step, on the device.

Deep layers of random weights make all tokens alike, so that they choose the same few experts. So `rows` and `touched`
draw tokens at temperature 1 and multiply the embedding by `--spread`: choices are independent then, as `touched` shows.
The peer has a setting for the same: run it with VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine.llama8b import LLAMA_3_8B, ROWS, offline
from benchmarks.lib.invocation import add_engine_options, provenance, settle

QWEN3_30B_A3B = LLAMA_3_8B | dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    num_hidden_layers=48,
    num_key_value_heads=4,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    initializer_range=0.02,
)
INPUTS = 6
"""Number of inputs of one graph. Their experts do not fit into L2 together."""
TOKENS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)


FEW_TRIALS = [  # which kernel; rows of weights, inputs at a time, warps, stages
    *((0, settings) for settings in ((1, 2048, 4, 1), (2, 512, 2, 3), (4, 512, 4, 3))),
    *(
        (1, settings)
        for settings in ((8, 512, 4, 3), (8, 256, 2, 4), (16, 256, 2, 4), (16, 512, 4, 3), (16, 512, 8, 3))
    ),
    *((1, settings) for settings in ((32, 256, 4, 3), (32, 256, 8, 4), (16, 256, 4, 6), (32, 128, 4, 5))),
    *((2, settings) for settings in ((8, 128, 8, 3), (8, 256, 8, 2), (8, 128, 4, 4), (16, 128, 8, 3))),
    *((2, settings) for settings in ((4, 256, 4, 3), (16, 128, 4, 2), (4, 128, 2, 4))),
]
GROUPED_TRIALS = [  # for tiles of the rule from and to; pairs of a tile; gate and down: outputs, inputs, warps, stages
    *(
        (16, 16, 16, gate, down)
        for gate, down in (((64, 128, 4, 2), (64, 128, 4, 3)), ((128, 64, 4, 4), (128, 64, 4, 5)))
    ),
    (16, 32, 32, (128, 64, 8, 4), (128, 128, 4, 3)),
    (16, 32, 32, (64, 128, 4, 3), (128, 64, 8, 4)),
    (32, 64, 64, (128, 64, 8, 4), (128, 64, 8, 4)),
    (64, 64, 64, (64, 128, 4, 2), (128, 128, 8, 3)),
    (64, 128, 128, (128, 64, 8, 4), (128, 64, 8, 4)),
    (64, 128, 64, (128, 64, 8, 3), (256, 64, 8, 4)),
    (128, 128, 128, (128, 64, 8, 3), (256, 64, 8, 4)),
    (128, 128, 128, (64, 64, 4, 3), (128, 64, 4, 3)),
    (128, 128, 128, (128, 128, 8, 2), (256, 128, 8, 2)),
    (128, 128, 256, (128, 64, 16, 3), (256, 64, 16, 3)),
    (128, 128, 128, (256, 64, 16, 3), (256, 64, 16, 3)),
    (128, 128, 256, (64, 64, 8, 4), (128, 64, 8, 4)),
]


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer's experts."""

    count: int
    top_k: int
    hidden: int
    inner: int
    clamp: tuple[float, float] | None = None
    """The constants of GPT-OSS's gate, which comes with biases."""
    packed: bool = False
    """Whether weights are MXFP4."""


GPT_OSS_120B = Layer(count=128, top_k=4, hidden=2880, inner=2880, clamp=(1.702, 7.0))
LAYERS = {
    "qwen3-30b-a3b": Layer(count=128, top_k=8, hidden=2048, inner=768),
    "gpt-oss-120b": GPT_OSS_120B,
    "gpt-oss-120b-mxfp4": replace(GPT_OSS_120B, packed=True),
}


@dataclass(frozen=True)
class Rates:
    """Rates that the device reaches: bytes per second of a copy, and operations per second of a product."""

    copy: float
    product: float


def milliseconds(work: Callable[[], object], repeat: int = 10, *, graph: bool = True) -> float:
    """Median time of one call.

    It runs as a CUDA graph unless it is a large copy, which a graph gives to a slower engine.
    """
    import torch

    work()
    torch.cuda.synchronize()
    call = work
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        call = captured.replay
    times = []
    for _ in range(repeat + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def measured_rates() -> Rates:
    import torch

    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / milliseconds(partial(target.copy_, source), graph=False) * 1e3
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = 2 * 8192**3 / milliseconds(lambda: torch.mm(a, a)) * 1e3
    return Rates(copy, product)


def random_experts(name: str, device: str = "cuda") -> Any:
    """A layer of LAYERS with random weights."""
    import torch

    from holdfast.lm.kernels.linear.experts.experts import ExpertRule, Experts
    from holdfast.lm.kernels.mxfp4 import BIAS, BLOCK, Mxfp4Matrices

    layer = LAYERS[name]
    count, hidden, inner = layer.count, layer.hidden, layer.inner
    torch.manual_seed(0)

    def random(*size: Any) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16).mul_(0.02)

    def weights(*size: int) -> Any:
        if not layer.packed:
            return random(*size)
        data = torch.randint(256, (*size[:2], size[2] // 2), device=device, dtype=torch.uint8)
        scale = torch.full((*size[:2], size[2] // BLOCK), BIAS - 7, device=device, dtype=torch.uint8)
        return Mxfp4Matrices(data, scale)

    biases = {"gate_up_bias": random(count, 2 * inner), "down_bias": random(count, hidden)} if layer.clamp else {}
    return Experts(
        rule=ExpertRule(top_k=layer.top_k, clamp=layer.clamp),
        router=random(count, hidden),
        gate_up=weights(count, 2 * inner, hidden),
        down=weights(count, hidden, inner),
        **biases,
    )


def bound_us(tokens: int, touched: float, experts: Any, rates: Rates) -> float:
    """Lower bound for the time of a layer's experts, in microseconds."""
    count, hidden, inner = experts.down.shape
    pairs = tokens * experts.rule.top_k
    between = experts.router.numel() + pairs * (inner * 2 + hidden * 2) + tokens * hidden * 2
    moved = touched * (experts.gate_up.nbytes + experts.down.nbytes) / count + 2 * between
    return 1e6 * max(moved / rates.copy, 2 * pairs * 3 * hidden * inner / rates.product)


def kernels(tokens: Sequence[int], rates: Rates, tune: bool, layer: str) -> list[dict[str, Any]]:
    """Microseconds of a layer's experts, for each token count; with `tune`, also of other launches."""
    import torch
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources

    from holdfast.lm.kernels.compilation import list_and_compile
    from holdfast.lm.kernels.linear.experts import launches
    from holdfast.lm.kernels.linear.experts.experts import choose

    experts = random_experts(layer)
    hidden = experts.down.shape[1]
    lines: list[dict[str, Any]] = []
    work: list[tuple[int, str, Callable[[Any, Any], object], Any]] = []

    def few(x: Any, out: Any, chosen: Any = None) -> None:
        given = {} if chosen is None else {"launches": chosen}
        launches.experts_of_few(x, experts, out, added=True, **given)

    sortings: dict[tuple[int, int], Any] = {}

    def sorting(x: Any, block_m: int) -> Any:
        """The sorted pairs of an input, made once for all launches with tiles of this size."""
        key = x.data_ptr(), block_m
        if key not in sortings:
            sortings[key] = launches.sort_pairs(x, experts, block_m)
        return sortings[key]

    for count in tokens:
        inputs = [torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(INPUTS)]
        if count <= 16:
            work.append((count, "few", few, inputs))
            for name, trial in few_trials(launches) if tune and count in (1, 4) else ():
                work.append((count, name, lambda x, out, trial=trial: few(x, out, trial), inputs))
        if count >= 4:
            launch = launches.grouped_launch_for(count, experts)
            work.append(
                (
                    count,
                    f"grouped {launch.block_m}",
                    lambda x, out, it=launch: launches.grouped_experts(x, experts, it),
                    inputs,
                )
            )
            work.append(
                (count, "  sorting", lambda x, out, it=launch: launches.sort_pairs(x, experts, it.block_m), inputs)
            )
            work += grouped_parts(launches, experts, count, launch, inputs, sorting)
            for trial in grouped_trials(launches, launch) if tune else ():
                work += grouped_parts(launches, experts, count, trial, inputs, sorting)
    target = driver.active.get_current_target()
    out = torch.zeros(max(tokens), hidden, device="cuda", dtype=torch.bfloat16)
    list_and_compile(lambda: [attempt(call, inputs[0], out[: len(inputs[0])]) for _, _, call, inputs in work], target)
    sortings.clear()  # nothing was computed
    print(f"{'tokens':>6} {'us':>8} {'bound':>8} {'share':>6}  what", flush=True)
    for count, name, call, inputs in work:
        touched = statistics.fmean(float(choose(x, experts)[0].unique().numel()) for x in inputs[:3])
        bound = bound_us(count, touched, experts, rates)

        def all_inputs(call: Any = call, inputs: Any = inputs, count: int = count) -> None:
            for x in inputs:
                call(x, out[:count])

        try:
            taken = 1e3 * milliseconds(all_inputs) / len(inputs)
        except (OutOfResources, RuntimeError) as refused:
            print(f"{count:6} {name}: {str(refused)[:80]}", flush=True)
            continue
        lines.append(
            dict(tokens=count, what=name.strip(), us=round(taken, 2), bound_us=round(bound, 2), touched=touched)
        )
        share = f"{bound / taken:6.2f}" if not name.startswith("  ") else " " * 6
        print(f"{count:6} {taken:8.1f} {bound:8.1f} {share}  {name}", flush=True)
    return lines


def attempt(call: Any, x: Any, out: Any) -> None:
    """Launch, to list the kernels that it compiles. An error shows when the launch is timed."""
    import contextlib

    with contextlib.suppress(Exception):
        call(x, out)


def few_trials(launches: Any) -> list[tuple[str, Any]]:
    """Other launches for a few tokens: each changes one of the three kernels."""
    own = (launches.ROUTER, launches.GATE_FEW, launches.DOWN_FEW)
    found = []
    for index, settings in FEW_TRIALS:
        changed = list(own)
        changed[index] = launches.ExpertLaunch(*settings)
        found.append((f"few, {('router', 'gate', 'down')[index]} {'/'.join(map(str, settings))}", tuple(changed)))
    return found


def grouped_trials(launches: Any, own: Any) -> list[Any]:
    """Other launches of the grouped products, for tiles like the rule's."""
    return [
        launches.GroupedLaunch(block_m, launches.ExpertLaunch(*gate), launches.ExpertLaunch(*down), halved)
        for low, high, block_m, gate, down in GROUPED_TRIALS
        for halved in ((True, False) if block_m >= 128 else (False,))
        if low <= own.block_m <= high
    ]


def grouped_parts(
    launches: Any, experts: Any, count: int, launch: Any, inputs: list[Any], sorting: Callable[[Any, int], Any]
) -> list[tuple[int, str, Callable[[Any, Any], object], Any]]:
    """The two products, each timed alone."""
    size, name = launch.block_m, f"{launch.block_m}{' halved' if launch.halved else ''}"
    inner = inputs[0].new_empty(count * experts.rule.top_k, experts.down.shape[2]).normal_()
    room = inputs[0].new_empty(experts.rule.top_k, *inputs[0].shape)
    return [
        (
            count,
            f"  gate {name}: {shown(launch.gate)}",
            lambda x, out: launches.grouped_gate(x, experts, sorting(x, size), launch),
            inputs,
        ),
        (
            count,
            f"  down {name}: {shown(launch.down)}",
            lambda x, out: launches.grouped_down(inner, experts, sorting(x, size), launch, room),
            inputs,
        ),
    ]


def shown(launch: Any) -> str:
    """A launch in a few characters."""
    return f"{launch.block_n}/{launch.block_k}/{launch.num_warps}/{launch.num_stages}"


def touched(names: Sequence[str], options: dict[str, Any], shape: dict[str, Any], **how: float) -> Any:
    """Mean number of experts that a layer reads in a step, and that for independent choices, by tokens of the step."""
    import torch

    from holdfast.lm.kernels.linear import fused_layers, layers
    from holdfast.lm.kernels.linear.experts.experts import choose

    counts: dict[int, list[torch.Tensor]] = {}

    def counted(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, experts: Any, *rest: Any) -> Any:
            counts.setdefault(len(x), []).append((torch.bincount(choose(x, experts)[0].flatten()) > 0).sum())
            return own(x, experts, *rest)

        return call

    fused_layers.grouped_experts = counted(fused_layers.grouped_experts)
    layers.apply_experts = counted(layers.apply_experts)
    found = rows(names, options | dict(cuda_graphs=False), shape, **how)
    full = QWEN3_30B_A3B | shape
    count, chosen = full["num_experts"], full["num_experts_per_tok"]
    lines = []
    for tokens, seen in sorted(counts.items()):
        mean = torch.stack(seen).float().mean().item()
        independent = count * (1 - (1 - chosen / count) ** tokens)
        lines.append(dict(tokens=tokens, layers=len(seen), touched=round(mean, 1), independent=round(independent, 1)))
        print("HOLDFAST " + json.dumps(lines[-1]), flush=True)
    return found | dict(touched=lines)


def rows(
    names: Sequence[str],
    options: dict[str, Any],
    shape: dict[str, Any],
    *,
    temperature: float,
    spread: float,
    repeat: int = 1,
    profile: bool = False,
    quick: bool = True,
) -> Any:
    """Build the engine and run the rows. With `profile`, also time the kernels of decode steps."""
    from holdfast.engine.process.build import build
    from holdfast.lm.config import EngineConfig

    directory = Path(tempfile.mkdtemp(prefix="qwen3-30b-a3b-"))
    (directory / "config.json").write_text(json.dumps(QWEN3_30B_A3B | shape))
    given = dict(max_sequences=512, prefix_sharing=False, max_waiting=10_000) | options
    begin = time.perf_counter()
    loop, info = build(EngineConfig(model=str(directory), load_format="random", **given))
    loop.executor._model.embedding.mul_(spread)
    gc.collect()
    gc.freeze()
    gc.disable()
    started = round(time.perf_counter() - begin, 1)
    print(
        "HOLDFAST " + json.dumps(dict(blocks=info.num_blocks, budget=info.token_budget, started_in=started)), flush=True
    )
    if not quick:
        settle(loop)
    offline(loop, "warm-up", [(32, 8)] * 4)
    results = []
    for name in names:
        for _ in range(repeat):
            results.append(dict(what=name, **ROWS[name](loop, temperature)))
            print("HOLDFAST " + json.dumps(results[-1]), flush=True)
    if profile:
        from benchmarks.engine.step_breakdown import breakdown

        for batch in (1, 32):
            found = breakdown(loop, batch, 20)
            results.append(dict(what=f"profile {batch}", **found))
            print("HOLDFAST " + json.dumps(results[-1]), flush=True)
    return dict(started_in=started, results=results)


def peer_copy(peer: Path, out: Path, temperature: float) -> Path:
    """A copy of the driver with this shape and temperature. Raises ValueError for an unknown driver."""
    text, place, greedy = peer.read_text(), "\ndef say(", "SamplingParams(temperature=0,"
    if "LLAMA_8B = dict(" not in text or text.count(place) != 1 or text.count(greedy) != 1:
        raise ValueError(f"{peer} is not the driver that is known: no place for another shape or temperature")
    text = text.replace(greedy, f"SamplingParams(temperature={temperature},")
    text = text.replace(place, f"\nLLAMA_8B.clear(); LLAMA_8B.update({QWEN3_30B_A3B!r})\n{place}")
    copy = out / "peer_moe.py"
    copy.write_text(text.replace('"llama8b")', '"qwen3moe")'))
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("kernels", "rows", "touched", "peer"))
    parser.add_argument("names", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    add_engine_options(parser)
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--layer", choices=(*LAYERS,), default="qwen3-30b-a3b", help="layer of `kernels`")
    parser.add_argument("--tune", action="store_true", help="time other launches than the rule's too")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--spread", type=float, default=1000.0, help="factor on the embedding")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="show the kernels of decode steps")
    parser.add_argument("--quick", action="store_true", help="do not capture the graphs that a start leaves out")
    parser.add_argument("--shape", default="{}", help="JSON that changes the shape, to try it on a small one")
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.part == "peer":
        print(peer_copy(arguments.peer, arguments.out, arguments.temperature))
        return
    found: Any
    if arguments.part == "kernels":
        import torch

        with torch.inference_mode():
            rates = measured_rates()
            print(f"copy {rates.copy / 1e12:.2f} TB/s, product {rates.product / 1e12:.0f} TFLOP/s", flush=True)
            found = dict(
                rates=rates.__dict__, kernels=kernels(arguments.tokens, rates, arguments.tune, arguments.layer)
            )
    elif arguments.part == "touched":
        shape = json.loads(arguments.shape)
        how = dict(temperature=arguments.temperature, spread=arguments.spread)
        found = touched(arguments.names or ["bs32"], dict(arguments.set), shape, **how)
    else:
        names = arguments.names or ["bs1", "bs32", "bs128", "prefill8"]
        found = rows(
            names,
            dict(arguments.set),
            json.loads(arguments.shape),
            temperature=arguments.temperature,
            spread=arguments.spread,
            repeat=arguments.repeat,
            profile=arguments.profile,
            quick=arguments.quick,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(provenance() | found, indent=1))


if __name__ == "__main__":
    main()
