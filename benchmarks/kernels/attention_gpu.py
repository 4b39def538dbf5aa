"""Paged attention alone on a GPU, compared with other kernels on the same work.

    python -m benchmarks.kernels.attention_gpu [--parts prefill decode mixed figure12 options] [--site DIR]
                                               [--contenders NAME ...] [--json OUT.json]
                                               [--plot OUT.png] [--tune] [--budget SECONDS]

Unless a row says otherwise, the shape is Llama-3-8B's (32 query heads, 8 KV heads, size 128, bf16), in blocks of 16
tokens in random order. The contenders:

- holdfast: the paged cache;
- deterministic: the same cache, by the kernels of `--deterministic`;
- low: these kernels with tiles of 64 rows alone;
- cudnn, fa2: PyTorch's SDPA by cuDNN and by FlashAttention-2 over contiguous keys, the ideal;
- copy-out: the blocks gathered into contiguous keys in each launch, then either of these two;
- rounds (Figure 12): one launch of our decode kernel for each query token;
- vllm: `vllm.vllm_flash_attn` (FlashAttention-3) over the same blocks, if `--site DIR` holds it. Its metadata is
  made once and not timed, as ours;
- general (options): our Triton kernel for any device, in place of the one for Hopper.

Results are compared with the first contender's before and after timing. Each contender is a CUDA graph of several
launches over 256 MB of cache, so that decodes find nothing in L2. Graphs are replayed in turns; medians count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.attention.invariant import InvariantAttention
from holdfast.lm.kernels.attention.paged import Launch, PagedAttention
from holdfast.lm.kernels.attention.protocol import Segments

HEADS, KV_HEADS = 32, 8
DTYPE = torch.bfloat16
ROUNDS = 9
LAYERS_BYTES = 1 << 28
LAUNCHES = 4
MOST_ERROR = 2e-2
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}

Call = Callable[[int], list[torch.Tensor]]
"""Function that computes one layer's attention, by layer number.

`Contender.arrange` turns its result into [T, H, D].
"""


@dataclass(frozen=True)
class Contender:
    """A contender, ready to launch."""

    call: Call
    arrange: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat


@dataclass(frozen=True, kw_only=True)
class Work:
    """One batch: groups of (sequences, query tokens of each, where they stop)."""

    part: str
    name: str
    groups: tuple[tuple[int, int, int], ...]
    head_dim: int = 128
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def rows(self) -> Iterator[tuple[int, int]]:
        """Query tokens and stop of each sequence."""
        for count, length, stop in self.groups:
            yield from [(length, stop)] * count

    def segments(self) -> Segments:
        lengths, stops = zip(*self.rows(), strict=True)
        return segments_of(list(lengths), list(stops), list(range(len(stops))))

    def flops(self) -> float:
        """Operations of the visible scores, and of their weights times the values."""
        seen = 0
        for length, stop in self.rows():
            positions = np.arange(stop - length, stop) + 1
            seen += int(np.minimum(positions, self.window or stop).sum())
        return 4.0 * seen * HEADS * self.head_dim

    def cache_bytes(self) -> int:
        """Bytes of the visible keys and values, each counted once."""
        keys = sum(min(stop, (self.window or stop) + length - 1) for length, stop in self.rows())
        return 2 * keys * KV_HEADS * self.head_dim * DTYPE.itemsize


WORKS = [
    *(
        Work(part="prefill", name=f"1 x {length:,}", groups=((1, length, length),))
        for length in (2048, 8192, 16384)
    ),
    Work(part="prefill", name="8 x 256", groups=((8, 256, 256),)),
    Work(part="prefill", name="1,024 that end at 8,192", groups=((1, 1024, 8192),)),
    Work(part="prefill", name="1 x 8,192, blocks of 32", groups=((1, 8192, 8192),), block_size=32),
    Work(part="prefill", name="1 x 8,192, head size 64", groups=((1, 8192, 8192),), head_dim=64),
    *(
        Work(part="decode", name=f"{batch} x {context:,}", groups=((batch, 1, context),))
        for batch, context in (
            (1, 640), (1, 8192), (8, 2048), (32, 300), (32, 600), (32, 2048), (128, 300), (128, 600), (128, 2048),
        )
    ),
    Work(part="mixed", name="32 x 2,048 and 1,024 that end at 8,192", groups=((32, 1, 2048), (1, 1024, 8192))),
    Work(part="mixed", name="120 x 300 and 8 x 256", groups=((120, 1, 300), (8, 256, 256))),
    Work(part="mixed", name="64 x 600 and 512 that end at 512", groups=((64, 1, 600), (1, 512, 512))),
    *(
        Work(part="figure12", name=f"32 x 8 at {context:,}", groups=((32, 8, context),))
        for context in (1024, 2048, 4096, 8192)
    ),
    *(
        Work(part="options", name=f"1 x {length:,}{', head size 64' if size == 64 else ''}, {name}",
             groups=((1, length, stop),), head_dim=size, **options)
        for length, stop, size, name, options in (
            (8192, 8192, 128, "window 4,096", {"window": 4096}),
            (8192, 8192, 128, "window 512", {"window": 512}),
            (8192, 8192, 128, "cap 50", {"softcap": 50.0}),
            (8192, 8192, 64, "sinks", {"sinks": True}),
            (8192, 8192, 64, "sinks, window 128", {"sinks": True, "window": 128}),
            (512, 8192, 128, "window 4,096, cap 50, end at 8,192", {"window": 4096, "softcap": 50.0}),
        )
    ),
]  # fmt: skip


class Variant(PagedAttention):
    """The backend for a shape, with its own launch settings or with given ones."""

    def __init__(self, work: Work, settings: dict[str, int] | None = None, *, general: bool = False) -> None:
        properties = torch.cuda.get_device_properties("cuda")
        super().__init__(
            device=torch.device("cuda"),
            num_processors=properties.multi_processor_count,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=work.head_dim,
            block_size=work.block_size,
        )
        self.settings = settings or {}
        if general or "wide_m" in self.settings:
            self.on_hopper, self.tiles.wide_m = False, self.settings.get("wide_m", self.tiles.wide_m)

    def launch(self, block_m: int, item_bytes: int, tokens: int) -> Launch:
        own = super().launch(block_m, item_bytes, tokens)
        return Launch(
            block_n=self.settings.get("block_n", own.block_n),
            num_warps=self.settings.get("warps", own.num_warps),
            num_stages=self.settings.get("stages", own.num_stages),
        )


WIDE_VARIANTS = [
    {"wide_m": m, "block_n": n, "warps": warps, "stages": stages}
    for m, n, warps, stages in ((256, 64, 8, 3), (256, 64, 8, 2), (128, 64, 4, 3), (128, 128, 8, 3))
]
NARROW_VARIANTS = [
    {"block_n": n, "warps": warps, "stages": stages}
    for n, warps, stages in ((32, 4, 4), (64, 2, 3), (64, 4, 2), (64, 4, 4), (128, 4, 2))
]
FIXED_WIDE = [
    {"specialised": 0},
    {"part_keys": 512},
    {"part_keys": 2048},
]
FIXED_NARROW = [
    {"narrow_m": 64},
    {"of": 16, "maxnreg": 0, "STAGES": 3},
    {"of": 16, "maxnreg": 128, "STAGES": 2},
    {"of": 16, "maxnreg": 96, "STAGES": 2},
    {"part_keys": 512},
]


class Batch:
    """The tensors of a piece of work: a paged cache of several layers, and the same keys and values contiguous."""

    def __init__(self, work: Work) -> None:
        self.work = work
        rows = list(work.rows())
        widths = [-(-stop // work.block_size) for _, stop in rows]
        blocks = sum(widths)
        size = (blocks, work.block_size, KV_HEADS, work.head_dim)
        layer_bytes = 2 * int(np.prod(size)) * DTYPE.itemsize
        self.layers = max(2, -(-LAYERS_BYTES // layer_bytes))
        self.cache = torch.empty(self.layers, 2, *size, dtype=DTYPE, device="cuda").normal_()
        self.tables = torch.zeros(len(rows), max(widths), dtype=torch.int32, device="cuda")
        order = torch.randperm(blocks, device="cuda").int()
        for row, table in enumerate(order.split(widths)):
            self.tables[row, : len(table)] = table
        tokens = sum(length for length, _ in rows)
        self.query = torch.randn(tokens, HEADS, work.head_dim, dtype=DTYPE, device="cuda")
        self.sinks = torch.randn(HEADS, dtype=DTYPE, device="cuda") if work.sinks else None
        self.scale = work.head_dim**-0.5
        self.options = {"window": work.window, "softcap": work.softcap, "sinks": self.sinks}

    def groups(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """For each group: queries [B, n, H, D], block tables [B, blocks], n, and the stop position."""
        token = row = 0
        for count, length, stop in self.work.groups:
            query = self.query[token : token + count * length].view(count, length, HEADS, -1)
            yield query, self.tables[row : row + count, : -(-stop // self.work.block_size)], length, stop
            token, row = token + count * length, row + count

    def gather(self, layer: int, tables: torch.Tensor, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, Hkv, stop, D] of these block tables, copied out of the cache."""
        key, value = (
            cache.index_select(0, tables.reshape(-1)).view(len(tables), -1, KV_HEADS, self.work.head_dim)[:, :stop]
            for cache in self.cache[layer]
        )
        return key.transpose(1, 2), value.transpose(1, 2)


def ours(batch: Batch, settings: dict[str, int] | None = None, *, general: bool = False) -> Contender:
    return paged(batch, Variant(batch.work, settings, general=general))


class FixedVariant(InvariantAttention):
    """Attention of `--deterministic`, with the settings that an engine would take or with given ones.

    They are launch settings of tiles of the height `of`, heights of tiles, and the keys of a part.
    """

    def __init__(self, work: Work, **changes: int) -> None:
        self.of, self.changes = changes.pop("of", 0), {}
        specialised = changes.pop("specialised", 1)
        heights = {name: changes.pop(name) for name in ("narrow_m", "wide_m") if name in changes}
        super().__init__(
            device=torch.device("cuda"),
            num_processors=torch.cuda.get_device_properties("cuda").multi_processor_count,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=work.head_dim,
            block_size=work.block_size,
            dtype=DTYPE,
            **{name: changes.pop(name) for name in ("part_keys",) if name in changes},
        )
        for name, rows in heights.items():
            setattr(self.tiles, name, rows)
        self.specialised, self.changes = self.specialised and bool(specialised), changes

    def settings(self, block_m: int, tokens: int, *, exact: bool) -> dict[str, int]:
        own = super().settings(block_m, tokens, exact=exact)
        own |= self.changes if block_m == self.of else {}
        return {name: value for name, value in own.items() if value}


def deterministic(batch: Batch, **changes: int) -> Contender:
    return paged(batch, FixedVariant(batch.work, **changes))


def paged(batch: Batch, attention: PagedAttention) -> Contender:
    metadata = attention.make_metadata(batch.work.segments())
    return Contender(
        lambda layer: [
            attention.attend(
                batch.query, *batch.cache[layer], batch.tables, metadata, scale=batch.scale, **batch.options
            )
        ]
    )


def one_token_rounds(batch: Batch) -> Contender:
    """A launch for the first query token of each sequence, one for the second, and so on."""
    attention = Variant(batch.work)
    ((count, length, stop),) = batch.work.groups
    query = batch.query.view(count, length, HEADS, -1)
    rounds = [
        (
            query[:, index].contiguous(),
            attention.make_metadata(segments_of([1] * count, [stop - length + index + 1] * count, list(range(count)))),
        )
        for index in range(length)
    ]

    def call(layer: int) -> list[torch.Tensor]:
        return [
            attention.attend(tokens, *batch.cache[layer], batch.tables, metadata, scale=batch.scale)
            for tokens, metadata in rounds
        ]

    return Contender(call, lambda done: torch.stack(done, 1).flatten(0, 1))


def dense(batch: Batch, backend: SDPBackend, *, copied: bool) -> Contender:
    """SDPA, one call for each group, over contiguous keys or over keys copied out of the cache in each call."""
    groups = []
    for query, tables, length, stop in batch.groups():
        mask = None
        if 1 < length < stop:
            if backend == SDPBackend.FLASH_ATTENTION:
                mask = causal_lower_right(length, stop)
            else:
                mask = torch.full((length, stop), -torch.inf, dtype=DTYPE, device="cuda").triu(stop - length + 1)
        kept = None
        if not copied:
            kept = [
                tuple(each.contiguous() for each in batch.gather(layer, tables, stop)) for layer in range(batch.layers)
            ]
        groups.append((query.transpose(1, 2).contiguous(), tables, stop, mask, length == stop, kept))

    def call(layer: int) -> list[torch.Tensor]:
        done = []
        with sdpa_kernel(backend):
            for query, tables, stop, mask, causal, kept in groups:
                key, value = kept[layer] if kept else batch.gather(layer, tables, stop)
                attended = functional.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=causal, scale=batch.scale, enable_gqa=True
                )
                done.append(attended)  # [B, H, n, D]
        return done

    return Contender(call, lambda done: torch.cat([part.transpose(1, 2).flatten(0, 1) for part in done]))


def vllm(batch: Batch, module: Any) -> Contender:
    """FlashAttention-3 as vLLM calls it, its metadata made ahead as in vLLM's own steps."""
    segments, work = batch.work.segments(), batch.work
    starts = torch.from_numpy(segments.query_start).cuda()
    used = torch.from_numpy(segments.context_stop).cuda()
    longest, furthest = int(segments.query_length.max()), int(segments.context_stop.max())
    window = (-1, -1) if work.window is None else (work.window - 1, 0)
    metadata = module.get_scheduler_metadata(
        batch_size=len(used),
        max_seqlen_q=longest,
        max_seqlen_k=furthest,
        num_heads_q=HEADS,
        num_heads_kv=KV_HEADS,
        headdim=work.head_dim,
        cache_seqlens=used,
        qkv_dtype=DTYPE,
        cu_seqlens_q=starts,
        page_size=work.block_size,
        causal=True,
        window_size=window,
        has_softcap=work.softcap is not None,
    )

    def call(layer: int) -> list[torch.Tensor]:
        attended = module.flash_attn_varlen_func(
            batch.query,
            *batch.cache[layer],
            max_seqlen_q=longest,
            cu_seqlens_q=starts,
            max_seqlen_k=furthest,
            seqused_k=used,
            softmax_scale=batch.scale,
            causal=True,
            window_size=list(window),
            softcap=work.softcap or 0.0,
            block_table=batch.tables,
            scheduler_metadata=metadata,
            fa_version=3,
            s_aux=batch.sinks,
        )
        return [attended]

    return Contender(call)


def segments_of(lengths: list[int], stops: list[int], rows: list[int]) -> Segments:
    return Segments(
        query_start=np.cumsum([0, *lengths]).astype(np.int32),
        context_stop=np.array(stops, np.int32),
        row=np.array(rows, np.int32),
    )


def contenders(batch: Batch, module: Any, tune: bool) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """The contenders for this work, ours first."""
    work = batch.work
    yield "holdfast", partial(ours, batch)
    yield "deterministic", partial(deterministic, batch)
    if max(length for length, _ in work.rows()) > 1:
        yield "low", partial(deterministic, batch, wide_m=64, narrow_m=64)
    if work.part == "options":
        yield "general", partial(ours, batch, general=True)
    else:
        for name, backend in BACKENDS.items():
            yield name, partial(dense, batch, backend, copied=False)
            yield f"copy-out, {name}", partial(dense, batch, backend, copied=True)
    if work.part == "figure12":
        yield "rounds", partial(one_token_rounds, batch)
    if module is not None:
        yield "vllm", partial(vllm, batch, module)
    if tune and work.part in ("prefill", "decode"):
        for settings in WIDE_VARIANTS if work.part == "prefill" else NARROW_VARIANTS:
            yield f"holdfast {settings}", partial(ours, batch, settings)
        for settings in FIXED_WIDE if work.part == "prefill" else FIXED_NARROW:
            yield f"deterministic {settings}", partial(deterministic, batch, **settings)


@dataclass(frozen=True)
class Captured:
    """A graph of several launches, its last result, and the contender, which owns the tensors it reads."""

    contender: Contender
    graph: torch.cuda.CUDAGraph
    launches: int
    out: list[torch.Tensor]

    def error(self, expected: torch.Tensor) -> float:
        """Error of the last replay against the expected result of the first layer."""
        return error_of(self.contender.arrange(self.out), expected)

    def milliseconds(self) -> float:
        """The time of one launch, in one replay."""
        return milliseconds(self.graph.replay) / self.launches


def captured(contender: Contender, layers: int) -> Captured:
    """A graph of at least LAUNCHES calls, layer after layer, the first layer last."""
    count = max(LAUNCHES, layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in reversed(range(count)):
            out = contender.call(launch % layers)
    return Captured(contender, graph, count, out)


def milliseconds(work: Callable[[], object]) -> float:
    """The time of one run by CUDA events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


def measure(work: Work, module: Any, *, tune: bool, only: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """For each contender, milliseconds of a launch (median, least, most), or the reason why it cannot do the work.

    With `only`, contenders other than holdfast and these are left out.
    """
    batch = Batch(work)
    found: dict[str, dict[str, Any]] = {}
    graphs = {}
    expected: torch.Tensor | None = None
    fixed: torch.Tensor | None = None
    same: dict[str, dict[str, bool]] = {}
    for name, make in contenders(batch, module, tune):
        if only and name != "holdfast" and name.partition(" {")[0] not in only:
            continue
        try:
            contender = make()
            out = contender.arrange(contender.call(0)).float()
            expected = out if expected is None else expected
            if not (error := error_of(out, expected)) < MOST_ERROR:
                raise ValueError(f"differs from holdfast by {error:.2g}")
            if name.startswith("deterministic"):
                fixed = out if fixed is None else fixed
                same[name] = {"same bits": torch.equal(out, fixed)}
            graphs[name] = captured(contender, batch.layers)
        except (RuntimeError, ValueError) as reason:
            if name == "holdfast":
                raise
            found[name] = {"not_run": str(reason).splitlines()[0]}
    for each in graphs.values():
        each.graph.replay()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, each in graphs.items():
            times[name].append(each.milliseconds())
    for name, taken in times.items():
        if not (error := graphs[name].error(expected)) < MOST_ERROR:
            raise ValueError(f"{work.part} {work.name}: replays of {name} differ from holdfast by {error:.2g}")
        found[name] = {"ms": float(np.median(taken)), "least": min(taken), "most": max(taken), **same.get(name, {})}
    return found


def copy_rate() -> float:
    """Rate of a device-to-device copy in TB/s, bytes read and written."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    times = [milliseconds(lambda: target.copy_(source)) for _ in range(ROUNDS)]
    return 2 * source.nbytes / float(np.median(times)) / 1e9


def judged(work: Work, ms: float, copy: float) -> tuple[float, str]:
    """The figure of a row: TFLOP/s if arithmetic is the bound, else the share of the copy rate."""
    if work.part in ("decode", "figure12"):
        return work.cache_bytes() / ms / 1e9 / copy, "of copy"
    return work.flops() / ms / 1e9, "TFLOP/s"


def kernels_of_vllm(site: Path | None) -> Any:
    """vLLM's attention kernels; None, with a printed reason, if they are missing."""
    if site is None:
        print("no --site: rows without vLLM's kernels", flush=True)
        return None
    sys.path.insert(0, str(site))
    try:
        from vllm import vllm_flash_attn
    except ImportError as error:
        print(f"{site} has no vLLM whose kernels could be loaded ({error}): rows without them", flush=True)
        return None
    return vllm_flash_attn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = list(dict.fromkeys(work.part for work in WORKS))
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="the rows to run, in this order")
    parser.add_argument("--site", type=Path, help="a directory that holds vLLM's packages")
    parser.add_argument("--contenders", nargs="+", default=[], help="those to run next to holdfast, by default all")
    parser.add_argument("--json", type=Path, help="write the results here, row by row")
    parser.add_argument("--plot", type=Path, help="draw them here")
    parser.add_argument("--tune", action="store_true", help="time other launch settings of ours too")
    parser.add_argument("--budget", type=float, default=float("inf"), help="begin no row after so many seconds")
    arguments = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    module = kernels_of_vllm(arguments.site)
    results: dict[str, Any] = provenance() | {
        "copy_TB_per_s": round(copy_rate(), 3),
        "rounds": ROUNDS,
        "rows": [],
    }
    print(json.dumps({key: value for key, value in results.items() if key != "rows"}), flush=True)
    for work in sorted(WORKS, key=lambda work: [*arguments.parts, *parts].index(work.part)):
        if work.part not in arguments.parts:
            continue
        if time.monotonic() - began > arguments.budget:
            print(f"left out for want of time: {work.part} {work.name}", flush=True)
            continue
        found = measure(work, module, tune=arguments.tune, only=arguments.contenders)
        torch.cuda.empty_cache()
        for line in found.values():
            if "ms" in line:
                value, unit = judged(work, line["ms"], results["copy_TB_per_s"])
                line.update({unit: round(value, 3)}, **{key: round(line[key], 5) for key in ("ms", "least", "most")})
        results["rows"].append({"part": work.part, "work": work.name, "by": found})
        print(f"{work.part} {work.name}: {json.dumps(found)}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.plot:
        draw(results, arguments.plot)


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel for each part: the rows' figures, a bar for each contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = list(dict.fromkeys(row["part"] for row in results["rows"]))
    names = list(
        dict.fromkeys(name for row in results["rows"] for name in row["by"] if not name.startswith("holdfast "))
    )
    colors = {name: f"C{index}" for index, name in enumerate(names)}
    figure, axes = pyplot.subplots(len(parts), 1, figsize=(11, 3.2 * len(parts)), squeeze=False)
    for axis, part in zip(axes[:, 0], parts, strict=True):
        rows = [row for row in results["rows"] if row["part"] == part]
        unit = next(unit for unit in ("TFLOP/s", "of copy") if unit in rows[0]["by"]["holdfast"])
        shown = [name for name in names if any(unit in row["by"].get(name, {}) for row in rows)]
        for index, name in enumerate(shown):
            at = [place + (index - (len(shown) - 1) / 2) * 0.8 / len(shown) for place in range(len(rows))]
            heights = [row["by"].get(name, {}).get(unit, 0.0) for row in rows]
            axis.bar(at, heights, 0.8 / len(shown), label=name, color=colors[name])
        axis.set_xticks(range(len(rows)), [row["work"].replace(", ", ",\n") for row in rows], fontsize=7)
        axis.set_ylabel(f"{part}: {unit}")
        axis.legend(fontsize=7, bbox_to_anchor=(1.0, 1.0), loc="upper left")
    figure.suptitle(f"Attention alone, {results['device']}, torch {results['torch']}, {results['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
