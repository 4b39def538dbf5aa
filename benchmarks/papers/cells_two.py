"""What holds two devices back: equal lengths on one and two devices, with one cause turned off at a time.

Run: python -m benchmarks.papers.cells_two --device cuda:0 cuda:1 --seconds 0.9 --out DIR  # about 80 s on two GPUs
     python -m benchmarks.papers.cells_two --device paced paced --task-us 800 --out DIR  # without a GPU

Each device has a process, as in cells_serve. `alone`: each process makes its own requests. `dealt`: this process deals
them out. The device `paced` computes nothing and takes the time of an H200, times `--task-us` / 200.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pickle
import resource
import select
import time
from collections import deque
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.lib.cells.processes import packed_group, packed_requests, unpacked_group, unpacked_requests
from benchmarks.lib.cells.processes import send as send_message
from benchmarks.papers import cells_serve
from benchmarks.papers.cells_serve import Bench, CellEngine, HostExecutor, peak_of, prepare
from holdfast.cells import planner as planner_module
from holdfast.cells.plan import Returned, Round

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


class PacedExecutor(HostExecutor):
    """A device that takes time but computes nothing."""

    def __init__(self, cells: Any, task_us: float) -> None:
        super().__init__(cells)
        self._us = task_us / 200
        self._ends: deque[float] = deque()
        self._busy_until = 0.0
        self._submitted = 0
        self._rounds_of: deque[int] = deque()
        self.idle = 0.0

    def busy(self) -> bool:
        return time.perf_counter() < self._busy_until

    def submit(self, plan: Round) -> None:
        super().submit(plan)
        now = time.perf_counter()
        if self._busy_until and now > self._busy_until:
            self.idle += now - self._busy_until
        self._busy_until = max(now, self._busy_until) + sum(
            1e-6 * self._us * (20 + 180 * len(task.rows) / 512) for task in plan.tasks
        )
        self._ends.append(self._busy_until)

    def collect(self) -> Returned:
        end = self._ends.popleft()
        for _ in range(50):
            if time.perf_counter() >= end:
                break
        while time.perf_counter() < end:
            time.sleep(20e-6)
        return super().collect()


def device_busy(executor: Any) -> bool:
    """Whether a device still has work of rounds that were submitted."""
    if isinstance(executor, PacedExecutor):
        return executor.busy()
    return int(executor._done[0]) < executor._submitted


class Counts:
    """What a process did in a window."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {"wall": {}, "cpu": {}}
        self.rounds = self.tasks = self.nodes = self.drained = self.messages = self.sent = 0
        self.longest: dict[str, float] = {}

    def timed(self, name: str, call: Any) -> Any:
        def run(*arguments: Any) -> Any:
            began = [clock() for clock in CLOCKS.values()]
            try:
                return call(*arguments)
            finally:
                for clock, start in zip(CLOCKS, began, strict=True):
                    took = CLOCKS[clock]() - start
                    of = self.seconds[clock]
                    of[name] = of.get(name, 0.0) + took
                    if clock == "wall":
                        self.longest[name] = max(self.longest.get(name, 0.0), took)

        return run


def usage() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return dict(
        cpu=used.ru_utime + used.ru_stime,
        system=used.ru_stime,
        voluntary=used.ru_nvcsw,
        forced=used.ru_nivcsw,
        faults=used.ru_minflt,
    )


class Share:
    """One process: its engine, and the knobs that turn causes off."""

    def __init__(self, run: argparse.Namespace) -> None:
        prepare(run)
        self.run = run
        device = run.device[0]
        if device == "paced":
            inner = Bench(argparse.Namespace(**vars(run) | dict(device=["host"], only=["equal-lstm"], roles=["ours"])))
            inner.executors = lambda cells: [PacedExecutor(cells, run.task_us)]  # type: ignore[method-assign]
        else:
            inner = Bench(argparse.Namespace(**vars(run) | dict(only=["equal-lstm"], roles=["ours"])))
        (self.model,) = inner.models()
        (self.system,) = self.model.systems
        self.affinity = os.sched_getaffinity(0)
        gc.collect()
        gc.freeze()
        gc.disable()
        self.counts = Counts()
        self.knobs: dict[str, Any] = {}
        self.engine: CellEngine | None = None

    def begin(self, knobs: dict[str, Any]) -> None:
        """A new engine, with these causes turned off."""
        self.knobs = knobs
        for thread in os.listdir("/proc/self/task"):
            cores = knobs.get("cores") or self.affinity
            try:
                os.sched_setaffinity(int(thread), cores)
            except OSError:
                pass
        if knobs.get("malloc"):
            libc = ctypes.CDLL(None)
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        if knobs.get("arena"):
            ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX
        if self.run.device[0] != "paced":
            from holdfast.cells import executor_cuda

            executor_cuda.SPINS = 1 << 30 if knobs.get("spin") else 50
        planner_module.ADMITTED = 128 if knobs.get("few") else 1 << 30
        self.model.clients = knobs.get("clients", 4096)
        engine = self.system.engine()
        assert isinstance(engine, CellEngine)
        self.engine, self.counts, self.drain = engine, Counts(), engine.drain
        counts = self.counts
        (loop,) = engine.loops
        planner, executor = loop.planner, loop.executor
        submit = executor.submit

        def counted(plan: Round) -> None:
            counts.rounds += 1
            counts.tasks += len(plan.tasks)
            counts.nodes += sum(len(task.rows) for task in plan.tasks)
            counts.drained += not device_busy(executor)
            submit(plan)

        engine._unfold = counts.timed("unfold", engine._unfold)
        loop.planner = SimpleNamespace(
            add=counts.timed("add", planner.add),
            schedule=counts.timed("schedule", planner.schedule),
            update=counts.timed("update", planner.update),
            abort=planner.abort,
            has_work=planner.has_work,
        )
        loop.executor = SimpleNamespace(
            submit=counts.timed("submit", counted), collect=counts.timed("collect", executor.collect)
        )
        self.used, self.began, self.idle = usage(), time.perf_counter(), getattr(executor, "idle", 0.0)
        self.executor = executor
        if isinstance(executor, PacedExecutor):
            executor._busy_until = 0.0

    def end(self) -> dict[str, Any]:
        """What was counted since `begin`."""
        assert self.engine is not None
        used, seconds, ended = usage(), time.perf_counter() - self.began, max(1, self.engine._ended)
        counts = self.counts
        found: dict[str, Any] = dict(ended=ended, seconds=round(seconds, 3))
        for clock, of in counts.seconds.items():
            found[clock] = {name: round(each / ended * 1e6, 2) for name, each in sorted(of.items())}
        found["longest_ms"] = {name: round(each * 1e3, 2) for name, each in sorted(counts.longest.items())}
        found["rounds"] = counts.rounds
        found["tasks_a_round"] = round(counts.tasks / max(1, counts.rounds), 2)
        found["nodes_a_task"] = round(counts.nodes / max(1, counts.tasks), 1)
        found["drained"] = round(counts.drained / max(1, counts.rounds), 3)
        found["used"] = {name: round(used[name] - self.used[name], 4) for name in used}
        if isinstance(self.executor, PacedExecutor):
            found["idle"] = round((self.executor.idle - self.idle) / seconds, 3)
        self.counts = Counts()
        self.drain()
        return found

    def alone(self, knobs: dict[str, Any]) -> dict[str, Any]:
        """Serve requests that this process makes."""
        self.begin(knobs)
        assert self.engine is not None
        found: dict[str, Any] = {}
        self.drain, self.engine.drain = self.engine.drain, lambda: found.update(self.end())  # type: ignore[method-assign]
        peak = peak_of(self.system, self.model, self.run, self.engine)
        gc.disable()
        return found | dict(peak=round(peak))

    def spin(self, core: int, seconds: float) -> float:
        """Steps a second of a plain loop on one core."""
        os.sched_setaffinity(0, {core})
        steps, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            steps += 1
        os.sched_setaffinity(0, self.affinity)
        return round(steps / seconds / 1e6, 3)

    def ideal(self) -> float:
        """The requests a second of the bare device."""
        assert self.model.ideal is not None
        return self.model.ideal()


def serve_share(connection: Any, run: argparse.Namespace) -> None:
    share = Share(run)
    connection.send("ready")
    busy = False
    most: float = 1 << 30
    receive, send, load = connection.recv_bytes, send_message, pickle.loads
    came: deque[bytes] = deque()
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    while True:
        while poller.poll(0 if busy or came else None):
            came.append(receive())
        taken = 0
        while came and taken < most:
            kind, *rest = load(came.popleft())
            if kind == "requests":
                assert share.engine is not None
                share.engine.add(*share.counts.timed("unpack", unpacked_requests)(*rest))
                busy = True
                taken += 1
                continue
            if kind == "close":
                return
            busy = False
            connection.send(("answer", getattr(share, kind)(*rest)))
            most = share.knobs.get("most") or 1 << 30
            receive = share.counts.timed("receive", connection.recv_bytes)
            load = share.counts.timed("load", pickle.loads)
            send = share.counts.timed("send", send_message)
        outputs = None if share.engine is None or not busy else share.engine.step(0)
        busy = outputs is not None
        if outputs and share.knobs.get("fill"):
            share.engine.fill()
        if outputs:
            send(connection, "outputs", [packed_group(group) for group in outputs.groups])


class Dealer:
    """An engine of cells_serve over processes."""

    def __init__(self, connections: list[Any]) -> None:
        self.connections, self.open = connections, [0] * len(connections)
        self.seconds: dict[str, float] = dict.fromkeys(("deal", "receive"), 0.0)

    def add(self, requests: Any, samples: Any) -> None:
        began = time.perf_counter()
        number = self.open.index(min(self.open))
        send_message(self.connections[number], "requests", *packed_requests(requests, samples))
        self.open[number] += len(requests)
        self.seconds["deal"] += time.perf_counter() - began

    def step(self, worker: int) -> Any:
        began = time.perf_counter()
        groups: list[Any] = []
        for number, connection in enumerate(self.connections):
            if connection.poll(0):
                _, some = connection.recv()
                some = [unpacked_group(*each) for each in some]
                self.open[number] -= sum(len(each.ids) for each in some)
                groups += some
        if not groups:
            return None
        self.seconds["receive"] += time.perf_counter() - began
        return cells_serve.CellOutputs(groups)

    def drain(self) -> None:
        pass


def answer(connection: Any) -> Any:
    while True:
        kind, value = connection.recv()
        if kind == "answer":
            return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--task-us", type=float, default=200.0)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=30_000)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    began = time.perf_counter()
    base = vars(given) | dict(
        shared=True, dtype="float32", tf32=False, max_tasks=cells_serve.MAX_TASKS, seed=1, clients=None, repeats=1
    )
    base |= dict(threads=max(1, torch.get_num_threads() // 2), tree_sizes=[64])
    context = get_context("spawn")
    connections, processes = [], []
    for device in given.device:
        ours, theirs = context.Pipe()
        share = argparse.Namespace(**base | dict(device=[device]))
        processes.append(context.Process(target=serve_share, args=(theirs, share), daemon=True))
        processes[-1].start()
        connections.append(ours)
    run = argparse.Namespace(**base | dict(device=["host"], only=["equal-lstm"], roles=["ours"]))
    prepare(run)
    (model,) = Bench(run).models()
    os.system("lscpu | grep -iE 'model name|thread|core|socket|numa|L2|L3|mhz|hypervisor'")
    every = sorted(os.sched_getaffinity(0))
    for connection in connections:
        assert connection.recv() == "ready"
    print(f"ready after {time.perf_counter() - began:.1f} s; cores {len(every)}", flush=True)
    gc.collect()
    gc.freeze()
    lines: list[dict[str, Any]] = []

    def show(name: str, peak: float, found: list[dict[str, Any]], more: Any = None) -> None:
        lines.append(dict(name=name, peak=round(peak), processes=found, more=more))
        print(f"\n{name}: {peak:.0f} /s ({time.perf_counter() - began:.1f} s) {more or ''}", flush=True)
        for each in found:
            print("   ", json.dumps(each), flush=True)
        (given.out / "two.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def ask(used: list[int], name: str, *arguments: Any) -> list[Any]:
        for number in used:
            connections[number].send((name, *arguments))
        return [answer(connections[number]) for number in used]

    def alone(name: str, used: list[int], **knobs: Any) -> None:
        if given.only and name not in given.only:
            return
        for number in used:
            connections[number].send(("alone", knobs | dict(cores=cores_of(number, knobs))))
        found = [answer(connections[number]) for number in used]
        show("alone " + name, sum(each["peak"] for each in found), found)

    def cores_of(number: int, knobs: dict[str, Any]) -> Any:
        width = knobs.get("pinned")
        if not width:
            return None
        half = len(every) // 2
        return set(every[number * half : number * half + width]) if number >= 0 else set(every[-width:])

    def dealt(name: str, used: list[int], **knobs: Any) -> None:
        if given.only and name not in given.only:
            return
        for number in used:
            connections[number].send(("begin", knobs | dict(cores=cores_of(number, knobs))))
        for number in used:
            answer(connections[number])
        os.sched_setaffinity(0, cores_of(-1, knobs) or set(every))
        dealer = Dealer([connections[number] for number in used])
        model.clients = knobs.get("clients", 4096)
        cells_serve.BURST = knobs.get("burst", 128)
        before, started = usage(), time.perf_counter()
        peak = peak_of(SimpleNamespace(), model, run, dealer)  # type: ignore[arg-type]
        seconds = time.perf_counter() - started
        cells_serve.BURST = 128
        used_by = {key: round(each - before[key], 4) for key, each in usage().items()}
        found = ask(used, "end")
        total = sum(each["ended"] for each in found)
        mine = {key: round(each / total * 1e6, 2) for key, each in dealer.seconds.items()}
        show("dealt " + name, peak, found, dict(us=mine, seconds=round(seconds, 2), used=used_by))

    both, one = [0, 1], [0]
    if "paced" not in given.device:
        alone_ideal = ask(one, "ideal")[0]
        show("ideal", alone_ideal, [], dict(both_at_once=ask(both, "ideal")))
    good = dict(few=True, fill=True, most=1)
    each_core = [ask(one, "spin", core, 0.01)[0] for core in every]
    show("spin of each core alone, million steps a second", 0, [], each_core)
    pairs = []
    for core in every[1:]:
        connections[1].send(("spin", core, 0.01))
        connections[0].send(("spin", every[0], 0.01))
        pairs.append(answer(connections[0]))
        answer(connections[1])
    show("spin of the first core, with each other one busy", 0, [], pairs)
    for _ in range(3):
        alone("one, few", one, few=True)
        alone("two, few", both, few=True)
        dealt("two, few, fill and most", both, **good)
        dealt("two, few, fill and most, 8192 clients", both, clients=8192, **good)
        dealt("one, few, fill and most", one, **good)
    dealt("two", both)
    dealt("two, few", both, few=True)
    dealt("two, fill and most", both, fill=True, most=1)
    for connection in connections:
        connection.send(("close",))
    for process in processes:
        process.join(20)
        process.kill()
    print(f"\nmedian peak of dealt two: {median(l['peak'] for l in lines if l['name'].startswith('dealt two')):.0f}")


if __name__ == "__main__":
    main()
