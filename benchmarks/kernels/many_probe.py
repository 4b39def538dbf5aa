"""Sums over the GPUs of one host: right or wrong, and their times by size, with those of NCCL and PyTorch.

    torchrun --nproc-per-node 2 -m benchmarks.kernels.many_probe [--seconds 170] [--only check time ...] [--out FILE]

`check` compares sums with float64, and all devices bit by bit, with random delays on some of them, inside CUDA graphs
and outside. `copied` does so for sums in parts, which copy engines carry. `layers` times layers of Llama-3's 8B and
70B shapes without attention, with sums in parts, in kernels, and without, and each product; `load` does so at the
power limit, for several ways to cut the sums. `time` prints microseconds by size: the median over replays of a graph
of calls one after the other. Ends by itself, with status 3, if a kernel waits forever. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm

from holdfast.core.layout import Layout
from holdfast.lm.execution.peer_link import PeerLink
from holdfast.lm.kernels.collectives import copied_sum, symmetric
from holdfast.lm.kernels.collectives.peer_memory import PeerMemory
from holdfast.lm.kernels.collectives.protocol import halves
from holdfast.lm.kernels.collectives.reduce_kernels import (
    BEST_PROGRAMS,
    REGIONS,
    Mailboxes,
    best_rows,
    reduce_rows,
)
from holdfast.lm.kernels.collectives.symmetric import ROOM_BYTES, SymmetricGroup
from holdfast.lm.kernels.compilation import compile_once
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.launch import dependent_launch_options
from holdfast.lm.kernels.linear.fused_kernels import norm_kernel
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps, silu_mul
from holdfast.lm.kernels.linear.layers import LayerShape, NormInParts

BF16, F32 = torch.bfloat16, torch.float32
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WIDTHS = (4096, 8192)
EPS = 1e-5
CALLS = 30


@contextmanager
def copied_from(least: float) -> Iterator[None]:
    """Inside the context, sums of at least this many bytes travel in parts, in graphs and outside."""
    names = ("LEAST_COPIED_BYTES", "LEAST_LAUNCHED_BYTES")
    rules = {name: getattr(symmetric, name) for name in names}
    try:
        for name in names:
            setattr(symmetric, name, least)
        yield
    finally:
        for name, rule in rules.items():
            setattr(symmetric, name, rule)


class Probe:
    def __init__(self, seconds: float, out: Path | None) -> None:
        self.end, self.step, self.out, self.failures = time.monotonic() + seconds, "start", out, 0
        self.rank = int(os.environ["RANK"])
        threading.Thread(target=self._watch, daemon=True).start()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device)
        self.size = dist.get_world_size()
        self.store = dist.distributed_c10d._get_default_store()
        self.world: Any = dist.group.WORLD
        self.step = "peer memory"
        self.group: SymmetricGroup | None = None
        try:
            self.group = SymmetricGroup(self.prefixed("group"), self.rank, self.size, self.device)
            self.box = self.group.mailboxes
        except RuntimeError as error:
            self.tell("no peer memory", error=str(error)[:300])
            self.box = self.symmetric_mailboxes()

    def symmetric_mailboxes(self) -> Mailboxes:
        """Mailboxes in PyTorch's symmetric memory, for drivers that refuse ours, so that there are at least times."""
        own = symm.empty(Mailboxes.num_bytes(self.size, ROOM_BYTES), dtype=torch.uint8, device=self.device)
        addresses = torch.tensor(symm.rendezvous(own, self.world).buffer_ptrs, device=self.device)
        state = torch.zeros(2 * REGIONS + BEST_PROGRAMS + 1, dtype=torch.int32, device=self.device)
        box = Mailboxes(own, addresses, state[:-1], state[-1:], self.rank, self.size)
        box.empty()
        torch.cuda.synchronize()
        dist.barrier()
        return box

    def prefixed(self, name: str) -> Any:
        return dist.distributed_c10d.PrefixStore(name, self.store)

    def _watch(self) -> None:
        time.sleep(max(0.0, self.end - time.monotonic()))
        print(json.dumps({"kind": "ended by the watchdog", "rank": self.rank, "during": self.step}), flush=True)
        os._exit(3)

    def tell(self, kind: str, **values: Any) -> None:
        if self.rank == 0:
            line = json.dumps({"kind": kind, **values})
            print(line, flush=True)
            if self.out is not None:
                with self.out.open("a") as file:
                    file.write(line + "\n")

    def time_left(self, needed: float) -> bool:
        """Whether this many seconds are left. All ranks get the same answer."""
        left = torch.tensor([self.end - time.monotonic()], device=self.device)
        dist.all_reduce(left, dist.ReduceOp.MIN)
        return bool(left.item() > needed)

    def microseconds(self, call: Callable[[], object], calls: int = CALLS, replays: int = 7) -> float:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(replays):
            dist.barrier()
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1e3 / calls)
        return round(sorted(times)[len(times) // 2], 2)

    def draw(self, seed: int, shape: tuple[int, ...], dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
        """Random numbers, equal on all ranks."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return (torch.randn(shape, generator=generator, device=self.device) * scale).to(dtype)

    def delay(self, microseconds: float) -> None:
        torch.cuda._sleep(int(microseconds * 1500))

    def agree(self, *tensors: torch.Tensor) -> bool:
        """Whether these are equal, bit by bit, on all ranks."""
        equal = True
        for tensor in tensors:
            bits = tensor.contiguous().view(torch.uint8)
            everyones = [torch.empty_like(bits) for _ in range(self.size)]
            dist.all_gather(everyones, bits)
            equal &= all(torch.equal(each, everyones[0]) for each in everyones)
        return equal

    def check(self, name: str, right: bool, **values: Any) -> None:
        verdict = torch.tensor([int(right)], device=self.device)
        dist.all_reduce(verdict, dist.ReduceOp.MIN)
        if not verdict.item():
            self.failures += 1
            self.tell("WRONG", name=name, **values)


def stream_after(stream: torch.Tensor, partials: list[torch.Tensor], bias: Any, wire: torch.dtype) -> torch.Tensor:
    """The result that the kernels compute, in the same order: float32 sums over P, rounded for travel, then by rank."""
    total = torch.zeros(stream.shape, device=stream.device)
    for each in partials:
        own = torch.zeros_like(total)
        for part in each:
            own += part.float()
        total += own.to(wire).float()
    if bias is not None:
        total += bias.float()
    return (stream.float() + total).to(stream.dtype)


def check_sums(probe: Probe) -> None:
    """Check every way, size and number of parts once: against the order of sums bit by bit, and against float64."""
    seed, worst = 0, 0.0
    for width in WIDTHS:
        for rows in (1, 3, 8, 64, 129, 300, 1024, 8192):
            for parts in (1, 8) if rows <= 64 else (1,):
                for two_shot in (False, True):
                    for wire in (BF16, F32) if rows <= 300 else (BF16,):
                        if not probe.time_left(40):
                            return
                        seed += 1000
                        probe.step = f"check {rows} x {width}, {parts} parts, two_shot {two_shot}, {wire}"
                        random.seed(seed + probe.rank)
                        dtype = F32 if parts > 1 else BF16
                        everyones = [probe.draw(seed + 1 + r, (parts, rows, width), dtype) for r in range(probe.size)]
                        everyones[0][:, 0, :100] = -0.0
                        stream, norm = probe.draw(seed, (rows, width)), probe.draw(7, (width,)) + 1
                        bias = probe.draw(8, (width,)) if parts == 1 and wire == BF16 and rows % 2 else None
                        expected = stream_after(stream, everyones, bias, wire)
                        exact = stream.double() + sum(each.double().sum(0) for each in everyones)
                        exact = exact if bias is None else exact + bias.double()
                        probe.delay(random.choice((0, 0, 20, 300)))
                        out = reduce_rows(
                            probe.box, everyones[probe.rank], bias, stream, norm, EPS, wire=wire, two_shot=two_shot
                        )
                        torch.cuda.synchronize()
                        probe.check(
                            "stream", torch.equal(stream, expected), rows=rows, width=width, parts=parts,
                            two_shot=two_shot, wire=str(wire), differing=int((stream != expected).sum()),
                        )  # fmt: skip
                        normed = torch.nn.functional.rms_norm(exact, (width,), norm.double(), EPS)
                        error = float((out.double() - normed).abs().max() / normed.abs().max())
                        worst = max(worst, error)
                        probe.check("norm", error < 0.02, rows=rows, width=width, error=error)
                        probe.check("same bits", probe.agree(stream, out), rows=rows, width=width, two_shot=two_shot)
    probe.tell("checked sums", seeds=seed // 1000, worst_norm_error=worst, failures=probe.failures)


def check_chains(probe: Probe) -> None:
    """Check graphs of an odd number of sums of several sizes, replayed in any order with delays, between other sums."""
    width, chains = 4096, []
    norm = torch.ones(width, device=probe.device, dtype=BF16)
    for count, rows in ((3, 1), (7, 8), (5, 200), (3, 700)):
        wire = F32 if rows < 100 else BF16
        stream = torch.zeros(rows, width, device=probe.device, dtype=BF16)
        mine = torch.zeros(8 if rows < 100 else 1, rows, width, device=probe.device, dtype=wire)

        def work(count: int, stream: torch.Tensor, mine: torch.Tensor, wire: torch.dtype) -> None:
            for index in range(count):
                two_shot = index % 2 == 1 and len(stream) > 100
                reduce_rows(probe.box, mine, None, stream, norm, EPS, wire=wire, two_shot=two_shot)

        work(count, stream, mine, wire)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work(count, stream, mine, wire)
        chains.append((count, rows, wire, stream, mine, graph))
    everyone, own = random.Random(2), random.Random(3 + probe.rank)
    probe.step = "chains"
    turns, right = 0, [torch.ones((), dtype=torch.bool, device=probe.device)]
    while turns < 600:
        if turns % 50 == 0 and not probe.time_left(60):
            break
        turns += 1
        count, rows, wire, stream, mine, graph = everyone.choice(chains)
        everyones = [probe.draw(turns * 100 + r, mine.shape, mine.dtype, 0.3) for r in range(probe.size)]
        mine.copy_(everyones[probe.rank])
        before = probe.draw(turns * 100 + 99, (rows, width))
        for _ in range(everyone.choice((1, 1, 3))):
            stream.copy_(before)
            probe.delay(own.choice((0, 0, 0, 5, 50, 500)))
            graph.replay()
        expected = before
        for _ in range(count):
            expected = stream_after(expected, everyones, None, wire)
        right.append((stream == expected).all())
        if everyone.random() < 0.3:
            values = probe.draw(turns, (probe.size, 300), F32).round(decimals=1)
            ids = torch.arange(300 * probe.size, device=probe.device).view(probe.size, 300)
            best = best_rows(probe.box, values[probe.rank].contiguous(), ids[probe.rank].contiguous())
            right.append((best == ids.gather(0, values.argmax(0, keepdim=True))[0]).all())
    wrong = int((~torch.stack(right)).sum())
    probe.check("chains", not wrong, wrong=wrong)
    probe.tell("checked chains", turns=turns, failures=probe.failures)


def check_alone(probe: Probe) -> None:
    """Let one device rehearse while the others begin."""
    probe.step = "alone"
    if probe.group is None:
        return
    x = probe.draw(5 + probe.rank, (4, 4096))[None]
    if probe.rank == 0:
        with probe.group.alone():
            for two_shot in (False, True):
                reduce_rows(probe.box, x, None, None, None, 0.0, wire=BF16, two_shot=two_shot)
            probe.group.best(torch.zeros(3, device=probe.device), torch.arange(3, device=probe.device))
    total = probe.group.all_reduce(x[0])
    expected = torch.stack([probe.draw(5 + r, (4, 4096)).float() for r in range(probe.size)]).sum(0).to(BF16)
    probe.check("alone", torch.equal(total, expected))
    probe.tell("checked alone", failures=probe.failures)


def time_sums(probe: Probe) -> None:
    for width in WIDTHS:
        for rows in ROWS:
            if not probe.time_left(25):
                return
            probe.tell("time", **time_size(probe, rows, width))


def time_size(probe: Probe, rows: int, width: int) -> dict[str, Any]:
    count = rows * width
    calls = CALLS if count < 1 << 22 else 8
    x = probe.draw(1, (1, rows, width), scale=0.01)
    stream, norm, flat = probe.draw(2, (rows, width)), probe.draw(3, (width,)), x[0].clone()

    def ours(
        wire: torch.dtype = BF16, two_shot: bool = False, fused: bool = True, parts: torch.Tensor = x, **launch: int
    ) -> Callable[[], object]:
        into = (stream, norm, EPS) if fused else (None, None, 0.0)
        return lambda: reduce_rows(probe.box, parts, None, *into, wire=wire, two_shot=two_shot, **launch)

    def norm_alone() -> None:
        out = torch.empty_like(stream)
        norm_kernel[(rows,)](
            stream, x, None, norm, out, width, stream.stride(0), out.stride(0), EPS, PARTS=1, BLOCK=width,
            num_warps=16, **dependent_launch_options(probe.device),
        )  # fmt: skip

    def nccl() -> None:
        dist.all_reduce(flat)

    def nccl_fused() -> None:
        dist.all_reduce(flat)
        norm_alone()

    ways: dict[str, Callable[[], object]] = {
        "norm_alone": norm_alone,
        "one_shot": ours(),
        "one_shot_bare": ours(fused=False),
        "two_shot": ours(two_shot=True),
        "two_shot_bare": ours(two_shot=True, fused=False),
        "nccl": nccl,
        "nccl_fused": nccl_fused,
    }
    if rows <= 128:
        ways["one_shot_f32"] = ours(wire=F32)
        ways["one_shot_warps_16"] = ours(num_warps=16)
    if rows <= 64:
        eight = probe.draw(1, (8, rows, width), F32, 0.01)
        ways["one_shot_8_parts"] = ours(parts=eight)
        ways["one_shot_8_parts_f32"] = ours(parts=eight, wire=F32)
        ways["one_shot_8_parts_f32_warps_16"] = ours(parts=eight, wire=F32, num_warps=16)
    if rows >= 256:
        ways["one_shot_programs_64"] = ours(programs=64)
        if width == 4096:
            ways["one_shot_warps_16"] = ours(num_warps=16)
            ways["one_shot_warps_4"] = ours(num_warps=4)
    shared = symm.empty(count, dtype=BF16, device=probe.device)
    out, name = torch.empty(count, dtype=BF16, device=probe.device), probe.world.group_name

    def torch_one_shot() -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", name, out)

    def torch_two_shot() -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)

    probe.step = f"time rendezvous {rows} x {width}"
    try:
        symm.rendezvous(shared, probe.world)
        shared.zero_()
        ways |= {"torch_one_shot": torch_one_shot, "torch_two_shot": torch_two_shot}
    except Exception as error:
        probe.tell("no symmetric memory", error=f"{type(error).__name__}: {str(error)[:200]}")
    row: dict[str, Any] = dict(rows=rows, width=width, kb=count * 2 // 1024)
    for way, call in ways.items():
        probe.step = f"time {way} {rows} x {width}"
        try:
            row[way] = probe.microseconds(call, calls)
        except Exception as error:
            row[way] = f"{type(error).__name__}: {str(error)[:200]}"
    return row


def compile_kernels(probe: Probe) -> None:
    """Compile in processes the kernels that `check_sums` and `time_size` launch. Kernels do not depend on the rows."""
    probe.step = "compile"

    def launch() -> None:
        for width in WIDTHS:
            stream = torch.zeros(2, width, dtype=BF16, device=probe.device)
            norm = torch.zeros(width, dtype=BF16, device=probe.device)
            for two_shot in (False, True):
                for wire in (BF16, F32):
                    for parts in (1, 8):
                        x = torch.zeros(parts, 2, width, dtype=BF16 if parts == 1 else F32, device=probe.device)
                        for warps in (4, 8, 16):
                            if (two_shot and warps != width // 512) or (width == 8192 and warps != 16):
                                continue
                            options: Any = dict(wire=wire, two_shot=two_shot, num_warps=warps)
                            reduce_rows(probe.box, x, None, stream, norm, EPS, **options)
                            if parts == 1 and wire == BF16:
                                reduce_rows(probe.box, x, None, None, None, 0.0, **options)
                                reduce_rows(probe.box, x, norm, stream, norm, EPS, **options)

    compile_once(launch, "many_probe", probe.rank, probe.size, time.time())


def time_best(probe: Probe) -> None:
    row = {}
    for rows in (1, 8, 64, 256):
        values, ids = torch.randn(rows, device=probe.device), torch.arange(rows, device=probe.device)
        probe.step = f"time best {rows}"
        row[f"best_{rows}"] = probe.microseconds(lambda: best_rows(probe.box, values, ids))  # noqa: B023 - run at once
    probe.tell("time best", **row)


def check_link(probe: Probe) -> None:
    """Check steps in a chain of stages, with tokens back to the first. Then time a stream by size."""
    if probe.group is None:
        return
    layout, width, most = Layout(1, probe.size), 8192, 8192
    spec: Any = SimpleNamespace(stream_width=width, dtype=BF16)
    memory = PeerMemory(
        probe.prefixed("link"), probe.rank, probe.size, probe.device, PeerLink.num_bytes(spec, most, 512)
    )
    link = PeerLink(memory, layout, spec, most, 512)
    everyone, own, last = random.Random(4), random.Random(5 + probe.rank), probe.size - 1
    into = torch.empty(most, width, dtype=BF16, device=probe.device)
    tokens: list[torch.Tensor] = []
    probe.step = "link"
    kept = []
    for turn in range(100):
        rows = everyone.choice((1, 7, 64, 1000))
        probe.delay(own.choice((0, 0, 50, 500)))
        if probe.rank == 0:
            stream = probe.draw(turn, (rows, width))
            link.send(stream)
            stream.zero_()
            if turn >= probe.size:
                tokens.append(link.receive_tokens(8))
        else:
            link.receive(into[:rows])
            kept.append((into[:rows] == probe.draw(turn, (rows, width)) + (probe.rank - 1)).all())
            if probe.rank < last:
                link.send(into[:rows] + 1)
            else:
                link.send_tokens(torch.arange(8, device=probe.device) + turn)
    if probe.rank == 0:
        tokens += [link.receive_tokens(8) for _ in range(probe.size)]
        wanted = [torch.arange(8, device=probe.device) + turn for turn in range(100)]
        kept = [(one == two).all() for one, two in zip(tokens, wanted, strict=True)]
    probe.check("link", bool(torch.stack(kept).all()))
    probe.tell("checked link", failures=probe.failures)
    for rows in (1, 64, 512, 2048, 8192):
        probe.step = f"time link {rows}"
        source, count = torch.zeros(rows, width, dtype=BF16, device=probe.device), 20
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for turn in range(count + 1):
            if turn == 1:
                torch.cuda.synchronize()
                begin = time.perf_counter()
            if probe.rank:
                link.receive(into[:rows])
            if probe.rank < last:
                link.send(source if probe.rank == 0 else into[:rows])
        torch.cuda.synchronize()
        spent = (time.perf_counter() - begin) / count * 1e6
        # One stream there and one token back: their latency.
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            if probe.rank:
                link.receive(into[:rows])
            if probe.rank < last:
                link.send(source if probe.rank == 0 else into[:rows])
            else:
                link.send_tokens(torch.zeros(8, dtype=torch.int64, device=probe.device))
            if probe.rank == 0:
                link.receive_tokens(8)
        torch.cuda.synchronize()
        there_and_back = (time.perf_counter() - begin) / count * 1e6
        probe.tell(
            "time link", rows=rows, width=width, mb=rows * width * 2 / 1e6, each_us=round(spent, 1),
            there_and_back_us=round(there_and_back, 1),
        )  # fmt: skip


def check_copied(probe: Probe, rounds: int = 200) -> None:
    """Check sums in parts of random sizes, with random delays, outside of graphs and, from the middle on, in graphs."""
    if probe.group is None:
        return
    copied = probe.group._copied
    width, everyone, own = 8192, random.Random(6), random.Random(7 + probe.rank)
    sizes = [(rows, width) for rows in (300, 512, 1000, 2048, 4096)] + [(2500, 4096), (8192, 4096)]
    stream, norm = probe.draw(1, (8, 4096)), probe.draw(2, (4096,))
    right, graphs, seed = [torch.ones((), dtype=torch.bool, device=probe.device)], {}, 0

    def run(given: list[torch.Tensor], delays: list[int], two_hops: bool) -> list[torch.Tensor]:
        """Two sums with a use of the mailbox in between. Returns the received rows."""
        received = []
        for addends in given:
            sums = copied.begin(*addends.shape, BF16, two_hops=two_hops)
            assert sums is not None
            for part, rows in enumerate(sums.parts):
                sums.room(part).copy_(addends[rows])
                torch.cuda._sleep(delays[part])
                sums.send(part)
            reduce_rows(probe.box, stream[None], None, stream.clone(), norm, EPS, wire=BF16, two_shot=False)
            for part in range(len(sums.parts)):
                torch.cuda._sleep(delays[2 + part])
                received.append(sums.receive(part).clone())
        return received

    for turn in range(rounds):
        if turn % 20 == 0 and not probe.time_left(60):
            break
        probe.step = f"copied {turn}"
        shape, graphed, two_hops = everyone.choice(sizes), turn >= rounds // 2, everyone.random() < 0.5
        seed += 10
        everyones = [[probe.draw(seed + 2 * r + i, shape) for i in range(2)] for r in range(probe.size)]
        delays = [own.choice((0, 0, 0, 10_000, 100_000, 700_000)) for _ in range(4)]
        if not graphed:
            received = run(everyones[probe.rank], delays, two_hops)
        else:
            if (shape, two_hops) not in graphs:
                inputs = [torch.empty(shape, dtype=BF16, device=probe.device) for _ in range(2)]
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    received = run(inputs, delays, two_hops)
                graphs[shape, two_hops] = graph, inputs, received
            graph, inputs, received = graphs[shape, two_hops]
            for place, addends in zip(inputs, everyones[probe.rank], strict=True):
                place.copy_(addends)
            torch.cuda._sleep(own.choice((0, 0, 0, 10_000, 700_000)))
            for _ in range(everyone.choice((1, 1, 3))):
                graph.replay()
        for sum_ in range(2):
            parts, wanted = received[2 * sum_ : 2 * sum_ + 2], [each[sum_] for each in everyones]
            if two_hops:
                wanted = [torch.stack(wanted).sum(0, dtype=F32).to(BF16)]
            for place, expected in enumerate(wanted):
                right.append((torch.cat([part[place] for part in parts]) == expected).all())
        if turn in (0, rounds - 1):
            wrong = int((~torch.stack(right)).sum())
            probe.tell("copied so far", turn=turn, wrong=wrong)
    wrong = int((~torch.stack(right)).sum())
    probe.check("copied", not wrong, wrong=wrong)
    # Through the layer's operations, against float64.
    for rows, hidden, inputs in ((2048, 4096, 1024), (1500, 8192, 512)):
        ops = FusedLayerOps(llama_shape(probe, hidden, 8, 1), probe.group)
        xs = [probe.draw(seed + 100 + r, (rows, inputs)) for r in range(probe.size)]
        weights = [probe.draw(seed + 200 + r, (hidden, inputs), scale=inputs**-0.5) for r in range(probe.size)]
        after, gain = probe.draw(seed + 300, (rows, hidden)), probe.draw(seed + 301, (hidden,)) + 1
        exact = after.double() + sum(x.double() @ w.double().t() for x, w in zip(xs, weights, strict=True))
        for _ in range(2):  # an even number of sums
            stream_, probe.step = after.clone(), f"copied layer {rows}"
            with copied_from(1):
                in_parts = ops.add_linear_norm(stream_, xs[probe.rank], weights[probe.rank], None, gain)
            normed = ops.computed(in_parts)
        expected = torch.nn.functional.rms_norm(exact, (hidden,), gain.double(), EPS)
        error = float((normed.double() - expected).norm() / expected.norm())
        probe.check("copied layer", error < 0.01, rows=rows, error=error)
        probe.check("copied same bits", probe.agree(stream_, normed), rows=rows)
        probe.tell("copied layer", rows=rows, hidden=hidden, error=error)
    probe.tell("checked copied", rounds=turn + 1, failures=probe.failures)


SHAPES = {"8b": (4096, 14336, 32, 8), "70b": (8192, 28672, 64, 8)}
"""Sizes of a layer: hidden, inner, heads, KV heads. A head has 128 numbers."""


def llama_shape(probe: Probe, hidden: int, heads: int, kv_heads: int) -> LayerShape:
    powers = torch.arange(0, 128, 2, dtype=F32, device=probe.device) / 128
    return LayerShape(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=128, eps=EPS, activation="silu", dtype=BF16,
        inverse_frequencies=500000.0**-powers,
    )  # fmt: skip


def time_layers(probe: Probe, layers: int = 3) -> None:
    """Time layers without attention in a graph, and outside of one, where the host launches each kernel."""
    if probe.group is None:
        return
    for name, (hidden, inner, heads, kv_heads) in SHAPES.items():
        shape = llama_shape(probe, hidden, heads // probe.size, kv_heads // probe.size)
        grouped, alone = FusedLayerOps(shape, probe.group), FusedLayerOps(shape)
        weights, width = shard_weights(probe, name), inner // probe.size
        norm = probe.draw(3, (hidden,)) + 1
        for rows in (512, 1024, 1536, 2048, 3072, 4096, 8192):
            if not probe.time_left(20):
                return
            stream, at = probe.draw(2, (rows, hidden)), torch.arange(rows, device=probe.device)
            cache = torch.zeros(2, -(-rows // 16), 16, kv_heads // probe.size, 128, dtype=BF16, device=probe.device)
            rotation = alone.rotation(at)

            def work(ops: FusedLayerOps) -> None:
                layers_without_attention(ops, stream, norm, weights, rotation, cache, at, layers)  # noqa: B023

            row: dict[str, Any] = dict(shape=name, rows=rows)
            for way, ops, least in (
                ("sums in kernels", grouped, float("inf")), ("sums in parts", grouped, 1), ("no sums", alone, 1),
            ):  # fmt: skip
                probe.step = f"layers {name} {rows} {way}"
                with copied_from(least):
                    row[way] = round(probe.microseconds(lambda: work(ops), 1, 9) / layers, 1)  # noqa: B023
                    if rows in (2048, 8192):
                        row[f"{way}, eager, host"], row[f"{way}, eager"] = eager(probe, lambda: work(ops), layers)  # noqa: B023
            probe.tell("layers", **row)
            if rows in (1024, 2048, 4096, 8192):
                time_pieces(probe, name, rows, weights, stream, width)


class WholeReaders(FusedLayerOps):
    """Operations in which the reader of a sum in parts waits for all parts."""

    def _linear_of_parts(self, x: NormInParts, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return self.linear(self.computed(x), weight, bias)


def time_load(probe: Probe, layers: int = 4, seconds: float = 0.3) -> None:
    """Time layers without attention under load, at the power limit: each way for a while, in turn."""
    if probe.group is None:
        return
    for name, (hidden, _, heads, kv_heads) in SHAPES.items():
        shape = llama_shape(probe, hidden, heads // probe.size, kv_heads // probe.size)
        alone, grouped, whole = (
            FusedLayerOps(shape),
            FusedLayerOps(shape, probe.group),
            WholeReaders(shape, probe.group),
        )
        weights, norm = shard_weights(probe, name), probe.draw(3, (hidden,)) + 1
        for rows in (1024, 2048, 4096, 8192):
            if not probe.time_left(20):
                return
            start, at = probe.draw(2, (rows, hidden)), torch.arange(rows, device=probe.device)
            stream = start.clone()
            cache = torch.zeros(2, -(-rows // 16), 16, kv_heads // probe.size, 128, dtype=BF16, device=probe.device)
            rotation = alone.rotation(at)
            graphs = {}
            for way, ops, least, quarters in (
                ("no sums", alone, 1, 2), ("sums in kernels", grouped, float("inf"), 2), ("halves", grouped, 1, 2),
                ("halves, readers whole", whole, 1, 2), ("3:1", grouped, 1, 3), ("3:1, readers whole", whole, 1, 3),
            ):  # fmt: skip
                probe.step = f"load {name} {rows} {way}"
                copied_sum.halves = lambda rows, _, quarters=quarters: (  # type: ignore[assignment, misc]
                    slice(0, rows * quarters // 4), slice(rows * quarters // 4, rows)
                )  # fmt: skip
                arguments = (ops, stream, norm, weights, rotation, cache, at, layers)
                with copied_from(least):
                    layers_without_attention(*arguments)
                    torch.cuda.synchronize()
                    graphs[way] = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graphs[way]):
                        stream.copy_(start)
                        layers_without_attention(*arguments)
            copied_sum.halves = halves
            times: dict[str, list[float]] = {way: [] for way in graphs}
            for _ in range(3):
                for way, graph in graphs.items():
                    probe.step = f"load {name} {rows} {way}"
                    graph.replay()
                    torch.cuda.synchronize()
                    dist.barrier()
                    # Every way and rank runs as many, so that their heat is alike.
                    count = max(1, round(seconds / (8.5e-11 * layers * rows * hidden * (1 if name == "8b" else 1.9))))
                    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    first.record()
                    for _ in range(count):
                        graph.replay()
                    last.record()
                    last.synchronize()
                    times[way].append(first.elapsed_time(last) * 1e3 / count / layers)
            medians = {way: round(sorted(each)[1], 1) for way, each in times.items()}
            probe.tell("load", shape=name, rows=rows, replays=count, **medians)


def shard_weights(probe: Probe, name: str) -> dict[str, torch.Tensor]:
    """The weights of one device's shard of a layer."""
    hidden, inner, heads, kv_heads = SHAPES[name]
    sizes = {
        "qkv": ((heads + 2 * kv_heads) // probe.size * 128, hidden), "o": (hidden, heads // probe.size * 128),
        "gate_up": (2 * inner // probe.size, hidden), "down": (hidden, inner // probe.size),
    }  # fmt: skip
    return {each: probe.draw(11 + at, size, scale=0.01) for at, (each, size) in enumerate(sizes.items())}


def layers_without_attention(
    ops: FusedLayerOps,
    stream: torch.Tensor,
    norm: torch.Tensor,
    weights: dict[str, torch.Tensor],
    rotation: Any,
    cache: torch.Tensor,
    at: torch.Tensor,
    count: int,
) -> None:
    normed = ops.norm(stream, norm)
    for _ in range(count):
        qkv = ops.linear(normed, weights["qkv"])
        query = ops.rotate_and_write(qkv, rotation, None, None, (cache[0], cache[1]), at)
        normed = ops.add_linear_norm(stream, query.flatten(1), weights["o"], None, norm)
        normed = ops.add_linear_norm(stream, ops.gated_linear(normed, weights["gate_up"]), weights["down"], None, norm)
    ops.computed(normed)


def eager(probe: Probe, work: Callable[[], None], layers: int) -> tuple[float, float]:
    """Microseconds per layer until the host has launched the work, and until it is done."""
    spent = []
    for _ in range(3):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        spent.append((launched - begin, time.perf_counter() - begin))
    host, done = min(spent)
    return round(host * 1e6 / layers, 1), round(done * 1e6 / layers, 1)


def time_pieces(
    probe: Probe, name: str, rows: int, weights: dict[str, torch.Tensor], stream: torch.Tensor, width: int
) -> None:
    """Time each product and kernel of a layer alone, for all rows and for half of them."""
    row: dict[str, Any] = dict(shape=name, rows=rows)
    for each, weight in weights.items():
        x, out = probe.draw(5, (rows, weight.shape[1])), stream.new_empty(rows, weight.shape[0])
        tera = 2e-6 * rows * weight.numel()
        calls = 10
        whole = probe.microseconds(lambda: torch.mm(x, weight.t(), out=out), calls, 5)  # noqa: B023
        half = rows // 2

        def in_halves() -> None:
            torch.mm(x[:half], weight.t(), out=out[:half])  # noqa: B023
            torch.mm(x[half:], weight.t(), out=out[half:])  # noqa: B023

        halves = probe.microseconds(in_halves, calls, 5)
        row[each] = whole
        row[f"{each}_tflops"], row[f"{each}_halves_tflops"] = round(tera / whole, 1), round(tera / halves, 1)
    gate_up = probe.draw(6, (rows, 2 * width))
    row["silu_mul"] = probe.microseconds(lambda: silu_mul(gate_up), 10, 5)
    ops = FusedLayerOps(llama_shape(probe, stream.shape[1], 8, 1))
    norm, partials = torch.ones_like(stream[0]), stream.new_zeros(2, *stream.shape)
    row["add_norm_of_two"] = probe.microseconds(lambda: ops._normed(stream, partials, None, norm), 10, 5)
    if probe.group is not None:
        partials = partials[:1]
        row["sum_in_kernel"] = probe.microseconds(
            lambda: probe.group.add_norm(stream, partials, None, norm, EPS), 10, 5  # type: ignore[union-attr]
        )  # fmt: skip

        def in_parts() -> None:
            """A sum in parts with no computation in the meantime."""
            sums = probe.group.begin_sum(*stream.shape, BF16)  # type: ignore[union-attr, call-arg]
            assert sums is not None
            for part in range(2):
                sums.send(part)
            for part in range(2):
                sums.receive(part)

        with copied_from(1):
            row["sum_in_parts"] = probe.microseconds(in_parts, 10, 5)
    probe.tell("pieces", **row)


PARTS = {
    "check": (compile_kernels, check_alone, check_sums, check_chains),
    "copied": (check_copied,),
    "layers": (time_layers,),
    "load": (time_load,),
    "best": (time_best,),
    "link": (check_link,),
    "time": (time_sums,),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=170.0, help="when the watchdog ends the probe")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    probe = Probe(arguments.seconds, arguments.out)
    probe.tell("machine", device=torch.cuda.get_device_name(), devices=probe.size, torch=torch.__version__)
    for name in arguments.only:
        for part in PARTS[name]:
            begin = time.monotonic()
            try:
                part(probe)
            except Exception:
                print(json.dumps({"kind": "error", "rank": probe.rank, "in": probe.step}), flush=True)
                traceback.print_exc()
                os._exit(2)
            probe.tell("took", part=part.__name__, seconds=round(time.monotonic() - begin, 1))
    probe.tell("ended", failures=probe.failures)
    sys.stdout.flush()
    os._exit(1 if probe.failures else 0)


if __name__ == "__main__":
    main()
