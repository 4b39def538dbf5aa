"""Cellular batching against graph batching, in real time, over the same cells and executor.

Run: python -m benchmarks.papers.cells_serve measure --device cuda:0 --out DIR  # all models, 4 to 8 minutes on a GPU
     python -m benchmarks.papers.cells_serve measure --device cuda:0 --only lstm --seconds 1 --out DIR
     python -m benchmarks.papers.cells_serve measure --device cpu --hidden 256 --vocabulary 2000 --out DIR
     python -m benchmarks.papers.cells_serve measure --device cuda:0 cuda:1 --only seq2seq --out DIR
     python -m benchmarks.papers.cells_serve show --out DIR  # the table and DIR/cells-serve.png
     python -m benchmarks.papers.cells_serve peaks --device cuda:0 --only tree --out DIR  # a minute on a GPU
     python -m benchmarks.papers.cells_serve peaks --device host --hidden 8 --vocabulary 100 --only tree --out DIR

Weights are random. Sentences have WMT-like lengths and trees TreeBank-like ones (benchmarks/lib/cells/workloads.py);
Seq2Seq decodes as many words as its sentence has. `equal-lstm` and `equal-tree` have sentences of 24 and complete trees
of 16 leaves, where padding to the exact length is the ideal: a fixed graph. Several devices have a process each, which
unfolds, plans, submits and collects its share of the requests (benchmarks/lib/cells/processes.py); with `--shared`, a
thread each under one planner. Only graphs of operators are built before, as a system made for them builds them faster.
Requests for cellular batching are unfolded together, as many as are due, and their results stay together in arrays. The
device `host` computes nothing, and its results are zeros: what it takes is the host's time, which is then CPU time.
`cuDNN` is torch's nn.LSTM over whole batches, without a planner: padded, in buckets of 10 that take turns, or packed,
first come, first served.

For each model all systems first serve a sample, and their results are compared. Then each serves as many clients as
keep it full: its peak. Then Poisson arrivals at rates that are shares of the best baseline's peak, the same for all,
and of a system's own peak where that is higher. The first fifth of the requests do not count. A p90 is null where more
than a tenth was unanswered. The ratios that `show` prints compare cellular batching with the baseline that is best in
that figure; for cuDNN it says at which rates its p90 is lower.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.lib.cells import models
from benchmarks.lib.cells.baselines import Merging, Padding
from benchmarks.lib.cells.models import Operators
from benchmarks.lib.cells.processes import Engine, Processes, Seconds, SplitEngine
from benchmarks.lib.cells.simulation import ManyWorkers, Served
from benchmarks.lib.cells.workloads import (
    Sample,
    Samples,
    complete_tree,
    poisson_arrivals,
    random_trees,
    sentence_lengths,
    tokens_for,
)
from benchmarks.lib.invocation import provenance
from holdfast.cells import nn
from holdfast.cells.cell import Cell, Output, State, Value
from holdfast.cells.executor import CpuExecutor
from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.measure import round_of_zeros
from holdfast.cells.plan import CellOutput, CellOutputs, CellRequest, CellRequests, EndedGroup, Returned, Round
from holdfast.cells.planner import MAX_TASKS, CellPlanner
from holdfast.cells.planner import prepare as compile_planner
from holdfast.cells.workers import ROUNDS, tasks_of_a_round
from holdfast.loop.loop import Loop

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Rates of the Poisson arrivals, as shares of the best baseline's peak."""
OWN_SHARES = (0.7, 0.9)
"""Further rates, as shares of a system's own peak."""
FILLING = 0.2
BURST = 128
"""Largest number of requests that are unfolded between two steps of an engine, so that a device does not wait for more.
"""
LEAST_TOGETHER = 8
"""Smallest number of requests that are unfolded into one batch."""
LABELS = 5
CAPACITY = 65536
LSTM_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
SWITCH_SECONDS = 1e-4
"""Seconds for which a thread may keep another from running Python, as in an engine process."""


class HostTimes(defaultdict[str, float]):
    """The host's seconds by what they were spent on."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(float)
        self._clock = clock

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls `call` and adds its time to `name`."""

        def run(*arguments: Any) -> Any:
            began = self._clock()
            try:
                return call(*arguments)
            finally:
                self[name] += self._clock() - began

        return run


class Locked:
    """A worker's planner under a lock that all share."""

    def __init__(self, planner: Any, lock: Any) -> None:
        self._planner, self._lock = planner, lock
        self.abort, self.stats, self.has_work = planner.abort, planner.stats, planner.has_work

    def add(self, request: CellRequest | CellRequests) -> None:
        with self._lock:
            self._planner.add(request)

    def schedule(self, now: float) -> Any:
        with self._lock:
            return self._planner.schedule(now)

    def update(self, plan: Any, result: Any, now: float) -> Any:
        with self._lock:
            return self._planner.update(plan, result, now)


Unfold = Callable[[Sequence[str], Sequence[Sample]], Sequence[CellRequest | CellRequests]]
"""Unfolds requests: their ids and contents."""


def singly(unfold: Callable[[Sample], CellGraph]) -> Unfold:
    """Unfold one request after the other."""
    return lambda ids, samples: [CellRequest(id, unfold(sample)) for id, sample in zip(ids, samples, strict=True)]


def together(unfold: Callable[[Sequence[Sample]], GraphBatch], one: Callable[[Sample], CellGraph]) -> Unfold:
    """Unfold requests into one batch, and a few, for which that costs more, one after the other."""
    few = singly(one)
    return lambda ids, samples: few(ids, samples) if len(ids) < LEAST_TOGETHER else [CellRequests(ids, unfold(samples))]


class HostExecutor:
    """A device that computes nothing: each returned output is zeros, at once."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._returned = [
            [np.zeros((cell.sizes[-1], *cell.outputs[name].shape), cell.outputs[name].dtype) for name in cell.returned]
            for cell in cells
        ]
        self._rounds: deque[Round] = deque()

    def connect(self, executors: Sequence[Any]) -> None:
        pass

    def submit(self, plan: Round) -> None:
        self._rounds.append(plan)

    def collect(self) -> Returned:
        plan = self._rounds.popleft()
        return [tuple([zeros[: len(task.rows)] for zeros in self._returned[plan.type]]) for task in plan.tasks]

    def close(self) -> None:
        self._rounds.clear()


class CellEngine:
    """A planner over executors, one for each device."""

    def __init__(self, planner: ManyWorkers, executors: Sequence[Any], unfold: Unfold) -> None:
        lock: Any = threading.Lock() if len(executors) > 1 else nullcontext()
        workers = [planner.worker(at) for at in range(len(executors))]
        self.loops: list[Loop[Any, Any, Any, Any, Any]] = [
            Loop(Locked(worker, lock) if len(executors) > 1 else worker, executor, ROUNDS, time.perf_counter)
            for worker, executor in zip(workers, executors, strict=True)
        ]
        self._unfold = unfold
        self._added: list[str] = []
        self._ended = 0
        """Number of requests that have ended."""
        self._times = HostTimes()
        self._served: Seconds | None = None
        """The times when requests were last served, before the rest was ended."""

    def add(self, requests: Sequence[str], samples: Sequence[Sample]) -> None:
        self._added += requests
        for each in self._unfold(requests, samples):
            self.loops[0].add(each)

    def step(self, worker: int) -> Sequence[CellOutput] | None:
        outputs = self.loops[worker].step()
        self._ended += len(outputs or ())
        return outputs

    def fill(self) -> None:
        self.loops[0].fill()

    def watch(self, clock: str) -> None:
        """Time the parts of the work from now on, by this clock of the module `time`."""
        times = self._times = HostTimes(getattr(time, clock))
        self._unfold = times.timed("unfold", self._unfold)
        for loop in self.loops:
            planner, executor = loop.planner, loop.executor
            loop.planner = SimpleNamespace(
                add=times.timed("add", planner.add),
                schedule=times.timed("schedule", planner.schedule),
                update=times.timed("update", planner.update),
                abort=planner.abort,
                has_work=planner.has_work,
            )
            loop.executor = SimpleNamespace(
                submit=times.timed("submit", executor.submit),
                collect=times.timed("collect", executor.collect),
                close=executor.close,
            )

    def times(self) -> tuple[Seconds, int]:
        """The host's seconds by what they were spent on until `drain`, and the number of requests that have ended."""
        return self._served or dict(self._times), self._ended

    def drain(self) -> None:
        self._served = dict(self._times)
        for request in self._added:
            self.loops[0].abort(request)
        for loop in self.loops:
            while loop.step() is not None:
                pass


class CudnnEngine:
    """torch's nn.LSTM over whole batches: padded in buckets of `width` that take turns, or packed as they come."""

    def __init__(self, weights: Mapping[str, torch.Tensor], device: str, most: int, width: int | None) -> None:
        hidden = weights["h"].shape[1]
        self._lstm = torch.nn.LSTM(hidden, hidden, batch_first=True).to(device, weights["w"].dtype)
        with torch.no_grad():
            for name, given in (("weight_ih_l0", "x"), ("weight_hh_l0", "h"), ("bias_ih_l0", "b")):
                getattr(self._lstm, name).copy_(weights[given])
            self._lstm.bias_hh_l0.zero_()
        self._lstm.flatten_parameters()
        self._weights = {name: tensor.to(device) for name, tensor in weights.items()}
        self._device, self._most, self._width = device, most, width
        self._buckets: dict[int, deque[tuple[str, np.ndarray, float]]] = {}
        self._turn: list[int] = []

    def add(self, requests: Sequence[str], samples: Sequence[Sample]) -> None:
        now = time.perf_counter()
        for request, sample in zip(requests, samples, strict=True):
            key = (len(sample.tokens) - 1) // self._width if self._width else 0
            if key not in self._buckets:
                self._buckets[key] = deque()
                self._turn.append(key)
            self._buckets[key].append((request, sample.tokens, now))

    @torch.inference_mode()
    def step(self, worker: int) -> Sequence[CellOutput] | None:
        for place, key in enumerate(self._turn):
            bucket = self._buckets[key]
            if bucket:
                self._turn = self._turn[place + 1 :] + self._turn[: place + 1]
                now = time.perf_counter()
                batch = [bucket.popleft() for _ in range(min(len(bucket), self._most))]
                longest = max(len(tokens) for _, tokens, _ in batch)
                bound = longest if self._width is None else -(-longest // self._width) * self._width
                labels = self._run([tokens for _, tokens, _ in batch], bound)
                results = {"label": (labels, np.arange(1, len(batch) + 1))}
                return CellOutputs([EndedGroup([id for id, *_ in batch], np.full(len(batch), now), results)])
        return None

    def _run(self, sentences: list[np.ndarray], bound: int) -> np.ndarray:
        lengths = np.array([len(tokens) for tokens in sentences])
        padded = np.zeros((len(sentences), bound), np.int32)
        for row, tokens in zip(padded, sentences, strict=True):
            row[: len(tokens)] = tokens
        words = F.embedding(torch.from_numpy(padded).to(self._device), self._weights["embedding"])
        if self._width is None:
            packed = torch.nn.utils.rnn.pack_padded_sequence(
                words, torch.from_numpy(lengths), batch_first=True, enforce_sorted=False
            )
            _, (last, _) = self._lstm(packed)
            h = last[0]
        else:
            every, _ = self._lstm(words)
            h = every[torch.arange(len(lengths), device=self._device), torch.from_numpy(lengths - 1).to(self._device)]
        scores = F.linear(h, self._weights["label_w"], self._weights["label_b"])
        labels: np.ndarray = scores.argmax(1).to(torch.int32).cpu().numpy()
        return labels

    def drain(self) -> None:
        self._buckets.clear()
        self._turn.clear()


Role = Literal["ours", "baseline", "outside"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass
class System:
    """One line of a plot."""

    name: str
    engine: Callable[[], Engine]
    role: Role = "baseline"
    """Role in the comparison: a baseline runs on the same cells and executor, an outside system does not."""


@dataclass
class Model:
    """Systems that serve the same requests."""

    name: str
    samples: Sequence[Sample]
    """Contents of the requests, one after the other and again from the first."""
    systems: list[System]
    clients: int
    """Number of open requests that keep a system full."""
    ideal: Callable[[], float] | None = None
    """Measures the requests a second of a device that runs nothing but full tasks, back to back; None if unknown."""


@dataclass
class Probe:
    """The result of a run."""

    served: Served
    results: dict[str, Mapping[str, np.ndarray]] = field(default_factory=dict)


def ended_of(outputs: Sequence[CellOutput]) -> tuple[list[str], np.ndarray]:
    """The ids of requests that have ended, and when each was scheduled."""
    if isinstance(outputs, CellOutputs):
        return outputs.ids, outputs.scheduled_at
    return [output.request_id for output in outputs], np.array([output.scheduled_at for output in outputs])


def serve(
    engine: Engine,
    samples: Sequence[Sample],
    *,
    seconds: float,
    arrivals: np.ndarray | None = None,
    clients: int = 0,
    workers: int = 1,
    keep: bool = False,
) -> Probe:
    """Serve for some seconds: requests that arrive at given times, or as many as keep `clients` open.

    Others are dropped.
    """
    count = len(samples)
    arrival, scheduled, finished = (np.full(count, np.inf) for _ in range(3))
    results: dict[str, Mapping[str, np.ndarray]] = {}
    lock = threading.Lock()
    torch_threads = torch.get_num_threads()
    added = ended = 0
    gc.collect()
    gc.disable()  # as in an engine process, which collects in pauses
    begin = time.perf_counter()

    def add_due() -> float:
        """Add due requests. Returns the seconds until the next arrival."""
        nonlocal added
        with lock:
            now = time.perf_counter() - begin
            if arrivals is None:
                due = clients - (added - ended)
            else:
                due = int(np.searchsorted(arrivals, now, side="right")) - added
            end = min(added + max(0, min(due, BURST)), count)
            if end > added:
                arrival[added:end] = now if arrivals is None else arrivals[added:end]
                engine.add([str(number) for number in range(added, end)], samples[added:end])
                added = end
            if due >= BURST:
                return 0.0
            wait = 1e-3 if arrivals is None or added == count else float(arrivals[added]) - now
        return min(max(wait, 0.0), 1e-3)

    def work(worker: int) -> None:
        nonlocal ended
        torch.set_num_threads(torch_threads)  # applies to the calling thread only
        while True:
            wait = add_due()
            outputs = engine.step(worker)
            now = time.perf_counter() - begin
            if outputs:
                ids, started = ended_of(outputs)
                at = np.array(ids, np.int64)
                scheduled[at], finished[at] = started - begin, now
                if keep:
                    results.update((output.request_id, output.results) for output in outputs)
                with lock:
                    ended += len(outputs)
            if now > seconds or ended == count:
                return
            if outputs is None and wait > 2e-4:
                time.sleep(1e-4)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(1, workers)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    engine.drain()
    gc.enable()
    return Probe(Served(arrival[:added], scheduled[:added], finished[:added]), results)


def peak_of(system: System, model: Model, run: argparse.Namespace, engine: Engine | None = None) -> float:
    """Results a second with enough clients, between the results nearest to a third of the window and to its end.

    `engine` is by default a new one of the system.
    """
    samples, engine = Endless(model.samples), engine or system.engine()
    seconds = run.seconds * 1.5
    served = serve(engine, samples, seconds=seconds, clients=model.clients, workers=threads_of(run)).served
    finished = np.sort(served.finished[np.isfinite(served.finished)])
    if not len(finished):
        return 0.0
    before = finished[finished <= seconds / 3]
    first = float(before[-1]) if len(before) else 0.0
    return float((finished > first).sum() / max(finished[-1] - first, 1e-9))


def threads_of(run: argparse.Namespace) -> int:
    """Number of threads that serve: one for each device, but one alone if devices have processes of their own."""
    return len(run.device) if run.shared else 1


class Endless(Sequence[Sample]):
    """The samples repeated without end."""

    def __init__(self, some: Sequence[Sample], count: int = 10_000_000) -> None:
        self._some, self._count = some, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self._some[each % len(self._some)] for each in range(*at.indices(self._count))]
        return self._some[at % len(self._some)]


def row_of(system: System, model: Model, rate: float, run: argparse.Namespace) -> dict[str, Any]:
    """One rate of Poisson arrivals."""
    count = max(20, int(rate * run.seconds))
    arrivals = poisson_arrivals(count, rate, run.seed)
    samples = Endless(model.samples, count)
    seconds = float(arrivals[-1]) + run.patience
    served = serve(system.engine(), samples, seconds=seconds, arrivals=arrivals, workers=threads_of(run)).served
    served = served.after(FILLING)
    shares = np.linspace(0, 1, 101)
    done = np.isfinite(served.finished)
    return dict(
        rate=round(rate, 1),
        answered=round(float(done.mean()), 4),
        throughput=round(served.throughput(), 1),
        p50_ms=ms(served.p(50)),
        p90_ms=ms(served.p(90)),
        p99_ms=ms(served.p(99)),
        queuing_ms=[ms(at) for at in np.quantile(served.queuing[done], shares)] if done.any() else [],
        computation_ms=[ms(at) for at in np.quantile(served.computation[done], shares)] if done.any() else [],
    )


def ms(seconds: float) -> float | None:
    return round(float(seconds) * 1e3, 3) if np.isfinite(seconds) else None


class Weights:
    """Random weights of all models."""

    def __init__(self, run: argparse.Namespace) -> None:
        hidden, words = run.hidden, run.vocabulary
        draw = torch.Generator().manual_seed(run.seed)
        kind = getattr(torch, run.dtype)

        def matrix(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=draw) / shape[-1] ** 0.5).to(kind)

        def lstm() -> nn.LSTMWeights:
            return nn.LSTMWeights(matrix(4 * hidden, 2 * hidden), matrix(4 * hidden))

        self.embedding = torch.randn(words, hidden, generator=draw).to(kind)
        self.lstm, self.encoder, self.decoder = lstm(), lstm(), lstm()
        self.label = nn.ReadOut(matrix(LABELS, hidden), matrix(LABELS))
        self.word = nn.ReadOut(matrix(words, hidden), matrix(words))
        self.tree = nn.TreeWeights(
            matrix(3 * hidden, hidden), matrix(3 * hidden), matrix(5 * hidden, 2 * hidden), matrix(5 * hidden)
        )


class Bench:
    """Makes the models' systems; planners over the same cells share the executors."""

    def __init__(self, run: argparse.Namespace, processes: Processes | None = None) -> None:
        """`processes` are those of the devices. By default all run in this process."""
        self.run, self.weights, self.processes = run, Weights(run), processes
        self.max_tasks = tasks_of_a_round(run.max_tasks, run.device, ROUNDS)

    def executors(self, cells: Sequence[Cell]) -> list[Any]:
        """One executor for each device of this process, with every cell ready at every size."""
        types = {cell: number for number, cell in enumerate(cells)}
        made: list[Any] = []
        for device in self.run.device if self.processes is None else ():
            if device == "host":
                made.append(HostExecutor(cells))
            elif device == "cpu":
                made.append(CpuExecutor(cells, types, capacity=CAPACITY))
            else:
                from holdfast.cells.executor_cuda import CudaExecutor  # needs Triton

                made.append(
                    CudaExecutor(
                        cells,
                        types,
                        device,
                        capacity=CAPACITY if self.run.hidden <= 1024 else CAPACITY // 4,
                        max_tasks=self.max_tasks,
                        rounds_in_flight=ROUNDS,
                    )
                )
        if len(made) > 1:
            for executor in made:
                executor.connect(made)
        return made

    def system(
        self,
        name: str,
        cells: Sequence[Cell],
        executors: Sequence[Any],
        unfold: Unfold,
        plan: Callable[..., ManyWorkers],
        role: Literal["ours", "baseline"] = "baseline",
    ) -> System:
        workers = len(executors)

        def engine() -> Engine:
            if self.processes is not None:
                return SplitEngine(self.processes, name)
            planner = plan(cells, workers=workers, capacity=CAPACITY, max_tasks=self.max_tasks)
            return CellEngine(planner, executors, unfold)

        return System(name, engine, role)

    def models(self) -> Iterator[Model]:
        """The models that were asked for, each made when its turn comes."""
        makers = {
            "lstm": lambda: self.lstm("lstm", self.sentences()),
            "equal-lstm": lambda: self.lstm("equal-lstm", self.sentences(fixed=24)),
            "seq2seq": self.seq2seq,
            "tree": lambda: self.tree("tree", self.trees()),
            "equal-tree": lambda: self.tree("equal-tree", self.trees(equal=True)),
        }
        for name in self.run.only:
            if self.processes is not None:
                self.processes.ask("choose", name)
            model = makers[name]()
            model.systems = [system for system in model.systems if system.role in self.run.roles]
            yield model

    def sentences(self, **options: Any) -> list[Sample]:
        lengths = sentence_lengths(4000, self.run.seed, **options)
        return [Sample(each) for each in tokens_for(lengths, self.run.vocabulary, self.run.seed)]

    def trees(self, equal: bool = False) -> list[Sample]:
        drawn = [complete_tree(16)] * 1000 if equal else random_trees(1000, self.run.seed)
        tokens = tokens_for([tree.leaves for tree in drawn], self.run.vocabulary, self.run.seed)
        return [Sample(each, tree) for each, tree in zip(tokens, drawn, strict=True)]

    def lstm(self, name: str, samples: Sequence[Sample]) -> Model:
        w = self.weights
        cell = nn.lstm_cell("lstm", w.lstm, embedding=w.embedding, read_out=w.label, sizes=LSTM_SIZES)
        cells = [cell]
        executors = self.executors(cells)

        def unfold_all(samples: Sequence[Sample]) -> GraphBatch:
            some = Samples.of(samples)
            return models.sentences(cell, some.lengths, some.tokens)

        def unfold_one(sample: Sample) -> CellGraph:
            return models.sentence(cell, sample.tokens)

        unfold, both = singly(unfold_one), together(unfold_all, unfold_one)
        systems = [self.system("cellular, 512", cells, executors, both, CellPlanner, "ours")]
        for width in (1, 10, 40) if name == "lstm" else (24,):
            systems.append(
                self.system(f"padding, width {width}", cells, executors, unfold, bound(Padding, width=width, most=512))
            )
        if name == "lstm":
            systems.append(self.system("by depth, 512", cells, executors, unfold, bound(Merging, by="depth", most=512)))
        if self.run.device[0] not in ("cpu", "host") and len(self.run.device) == 1:
            given = {
                "x": w.lstm.w[:, : w.embedding.shape[1]],
                "h": w.lstm.w[:, w.embedding.shape[1] :],
                "w": w.lstm.w,
                "b": w.lstm.b,
                "embedding": w.embedding,
                "label_w": w.label.w,
                "label_b": w.label.b,
            }
            width = 10 if name == "lstm" else 24
            for title, bucket in ((f"cuDNN padded, width {width}", width), ("cuDNN packed", None)):
                systems.append(System(title, partial(CudnnEngine, given, self.run.device[0], 512, bucket), "outside"))
        steps = len(samples[0].tokens)

        def ideal() -> float:
            if self.processes is not None:
                return self.processes.ideal()
            most = cell.sizes[-1]
            plan = round_of_zeros(cell, 0, executors[0].arenas.layout, most)
            seconds = median(executors[0].timed(plan) for _ in range(21)) / len(plan.tasks)
            return most / (steps * seconds)

        equal = all(len(sample.tokens) == steps for sample in samples)
        measured = equal and "host" not in self.run.device
        return Model(name, samples, systems, self.run.clients or 4096, ideal if measured else None)

    def seq2seq(self) -> Model:
        w = self.weights
        encoder = nn.encoder_cell("encoder", w.encoder, w.embedding, sizes=LSTM_SIZES)
        decoder = nn.decoder_cell("decoder", w.decoder, w.embedding, w.word, sizes=LSTM_SIZES[:-2])
        cells = [encoder, decoder]
        executors = self.executors(cells)

        def unfold_all(samples: Sequence[Sample]) -> GraphBatch:
            some = Samples.of(samples)
            return models.sentence_pairs(encoder, decoder, some.lengths, some.tokens, some.lengths)

        def unfold_one(sample: Sample) -> CellGraph:
            return models.sentence_pair(encoder, decoder, sample.tokens, len(sample.tokens))

        unfold, both = singly(unfold_one), together(unfold_all, unfold_one)
        systems = [self.system("cellular, 512,256", cells, executors, both, CellPlanner, "ours")]
        plan = bound(CellPlanner, sizes=(decoder.sizes, decoder.sizes))
        systems.append(self.system("cellular, 256,256", cells, executors, both, plan, "ours"))
        for width in (1, 10, 40):
            plan = bound(Padding, width=width, most=256)
            systems.append(self.system(f"padding, width {width}", cells, executors, unfold, plan))
        return Model("seq2seq", self.sentences(), systems, self.run.clients or 2048)

    def tree(self, name: str, samples: Sequence[Sample]) -> Model:
        w = self.weights
        systems: list[System] = []
        for most in self.run.tree_sizes:
            cells, executors, both, unfold = self._trees_up_to(most)
            systems.append(self.system(f"cellular, {most}", cells, executors, both, CellPlanner, "ours"))
            if name == "equal-tree":
                plan = bound(Padding, width=1, most=most)
                systems.append(self.system(f"ideal, {most}", cells, executors, unfold, plan))
        wide = self._tree_cells((*LSTM_SIZES, 768, 1024))
        leaf, internal = tree_operators(w, (*LSTM_SIZES, 768, 1024))
        parts = [leaf.linear, leaf.gates, internal.linear, internal.gates]
        by_cell, by_part = self.executors(wide), self.executors(parts)

        def unfold_wide(sample: Sample) -> CellGraph:
            assert sample.tree is not None
            return models.parse_tree(*wide, sample.tree, sample.tokens)

        graphs = {
            (sample.tree, sample.tokens.tobytes()): models.tree_of_operators(leaf, internal, sample.tree, sample.tokens)
            for sample in samples
            if sample.tree is not None
        }

        def unfold_parts(sample: Sample) -> CellGraph:
            return graphs[sample.tree, sample.tokens.tobytes()]

        for most in self.run.tree_sizes:
            plan = bound(Merging, by="depth", most=most)
            systems.append(self.system(f"by depth, {most}", wide, by_cell, singly(unfold_wide), plan))
            plan = bound(Merging, by="agenda", most=most)
            systems.append(self.system(f"by operator, {most}", parts, by_part, singly(unfold_parts), plan))
        return Model(name, samples, systems, self.run.clients or 1024)

    def cellular_trees(self, most: int) -> System:
        """Cellular batching of trees alone, with tasks of at most `most` cells."""
        cells, executors, unfold, _ = self._trees_up_to(most)
        return self.system(f"cellular, {most}", cells, executors, unfold, CellPlanner, "ours")

    def _trees_up_to(self, most: int) -> tuple[Sequence[Cell], list[Any], Unfold, Unfold]:
        """Cells of trees, executors, and what unfolds trees together and singly."""
        cells = self._tree_cells(tuple(size for size in LSTM_SIZES if size <= most))

        def unfold_all(samples: Sequence[Sample]) -> GraphBatch:
            trees = [sample.tree for sample in samples if sample.tree is not None]
            return models.parse_trees(*cells, trees, [sample.tokens for sample in samples])

        def unfold_one(sample: Sample) -> CellGraph:
            assert sample.tree is not None
            return models.parse_tree(*cells, sample.tree, sample.tokens)

        return cells, self.executors(cells), together(unfold_all, unfold_one), singly(unfold_one)

    def _tree_cells(self, sizes: tuple[int, ...]) -> tuple[Cell, Cell]:
        w = self.weights
        leaf = nn.tree_leaf_cell("leaf", w.tree, w.embedding, sizes=sizes)
        return leaf, nn.tree_internal_cell("internal", w.tree, read_out=w.label, sizes=sizes)


class DeviceBench:
    """The systems of one device, in a process of its own."""

    def __init__(self, run: argparse.Namespace) -> None:
        prepare(run)
        self._run = run
        self._model: Model | None = None

    def choose(self, model: str) -> None:
        """Make the systems of a model ready, in place of those of the model before."""
        self._model = None
        gc.collect()
        (self._model,) = Bench(argparse.Namespace(**vars(self._run) | {"only": [model]})).models()

    def engine(self, system: str) -> CellEngine:
        """A new engine of a system of the chosen model."""
        engine = next(each for each in self.model.systems if each.name == system).engine()
        assert isinstance(engine, CellEngine)
        return engine

    def ideal(self) -> float:
        """The requests a second of the device, if it runs nothing but full tasks."""
        assert self.model.ideal is not None
        return self.model.ideal()

    def peak(self, system: str) -> float:
        """The peak of a system, of requests that this process makes."""
        return peak_of(next(each for each in self.model.systems if each.name == system), self.model, self._run)

    @property
    def model(self) -> Model:
        """The chosen model."""
        assert self._model is not None, "no model was chosen"
        return self._model


@contextmanager
def bench_of(run: argparse.Namespace) -> Iterator[Bench]:
    """The benchmark: in this process, or with a process for each of several devices."""
    prepare(run)
    if run.shared or len(run.device) == 1:
        yield Bench(run)
        return
    threads = max(1, run.threads // len(run.device))
    shares = [
        argparse.Namespace(**vars(run) | dict(device=[device], shared=True, threads=threads)) for device in run.device
    ]
    processes = Processes([partial(DeviceBench, share) for share in shares])
    try:
        yield Bench(run, processes)
    finally:
        processes.close()


def bound(make: Any, **options: Any) -> Callable[..., ManyWorkers]:
    """A planner's constructor with these options."""
    return lambda cells, **more: make(cells, **options, **more)


def tree_operators(w: Weights, sizes: tuple[int, ...]) -> tuple[Operators, Operators]:
    """The TreeLSTM of `nn.tree_leaf_cell` and `nn.tree_internal_cell`, operator by operator."""
    hidden, kind = w.tree.hidden, str(w.tree.w.dtype).removeprefix("torch.")
    state, label = State((hidden,), kind), Output((), "int32", returned=True)
    last = {"h": Output((hidden,), kind), "c": Output((hidden,), kind)}

    def leaf_linear(weights: Any, token: Any) -> Any:
        return {"product": F.linear(F.embedding(token, weights["embedding"]), weights["w"], weights["b"])}

    def leaf_gates(weights: Any, product: Any) -> Any:
        i, o, u = product.chunk(3, 1)
        c = torch.sigmoid(i) * torch.tanh(u)
        return {"h": torch.sigmoid(o) * torch.tanh(c), "c": c}

    def internal_linear(weights: Any, left_h: Any, right_h: Any) -> Any:
        return {"product": F.linear(torch.cat([left_h, right_h], 1), weights["w"], weights["b"])}

    def internal_gates(weights: Any, product: Any, left_c: Any, right_c: Any) -> Any:
        i, o, u, left, right = product.chunk(5, 1)
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(left) * left_c + torch.sigmoid(right) * right_c
        h = torch.sigmoid(o) * torch.tanh(c)
        label = F.linear(h, weights["label_w"], weights["label_b"]).argmax(1).to(torch.int32)
        return {"h": h, "c": c, "label": label}

    products = [{"product": Output((gates * hidden,), kind)} for gates in (3, 5)]
    reads = [{"product": State((gates * hidden,), kind)} for gates in (3, 5)]
    token = {"token": Value((), "int32")}
    leaf_weights = {"w": w.tree.leaf_w, "b": w.tree.leaf_b, "embedding": w.embedding}
    label_weights = {"label_w": w.label.w, "label_b": w.label.b}
    leaf = Operators(
        Cell("leaf_linear", leaf_linear, token, products[0], leaf_weights, sizes=sizes),
        Cell("leaf_gates", leaf_gates, reads[0], last, sizes=sizes),
    )
    children = {"left_h": state, "right_h": state}
    cells = {"left_c": state, "right_c": state}
    internal = Operators(
        Cell("internal_linear", internal_linear, children, products[1], {"w": w.tree.w, "b": w.tree.b}, sizes=sizes),
        Cell(
            "internal_gates",
            internal_gates,
            {**reads[1], **cells},
            {**last, "label": label},
            label_weights,
            sizes=sizes,
        ),
    )
    return leaf, internal


def compare(model: Model, run: argparse.Namespace) -> dict[str, float]:
    """For each system, the share of a sample's last results that equal those of the first system."""
    samples = model.samples[-64:]
    found = {}
    for system in model.systems:
        results = serve(
            system.engine(), samples, seconds=60.0, arrivals=np.zeros(64), workers=threads_of(run), keep=True
        ).results
        found[system.name] = {request: next(iter(each.values()))[-1] for request, each in results.items()}
    first = found[model.systems[0].name]
    return {
        name: round(sum(each.get(request) == value for request, value in first.items()) / len(samples), 4)
        for name, each in found.items()
    }


def measure(run: argparse.Namespace) -> None:
    """Run every system of every model."""
    with bench_of(run) as bench:
        measure_with(bench, run)


def measure_with(bench: Bench, run: argparse.Namespace) -> None:
    """Run every system of every model of `bench`."""
    path = run.out / "cells-serve.json"
    every = json.loads(path.read_text()) if path.exists() else {}
    started = time.perf_counter()
    for model in bench.models():
        name = model.name + ("" if len(run.device) == 1 else f", {len(run.device)} devices")
        print(f"{name} ({time.perf_counter() - started:.0f} s)", flush=True)
        equal = compare(model, run)
        peaks = {system.name: peak_of(system, model, run) for system in model.systems}
        for title, peak in peaks.items():
            print(f"  {title:24} {peak:9.0f} /s, {equal[title]:.1%} of a sample's results equal", flush=True)
        best = max(peaks[system.name] for system in model.systems if system.role == "baseline")
        systems = []
        for system in model.systems:
            own = [share * peaks[system.name] for share in OWN_SHARES]
            shared = [share * best for share in SHARES]
            rates = sorted({*shared, *(rate for rate in own if rate > shared[-1])})
            rows = []
            for rate in rates:
                rows.append(row_of(system, model, rate, run))
                if rows[-1]["p90_ms"] is None:
                    break
            print(f"  {system.name:24} p90 " + ", ".join(f"{row['p90_ms']} at {row['rate']:.0f}" for row in rows), flush=True)  # fmt: skip # noqa: E501
            peak = round(peaks[system.name], 1)
            systems.append(dict(system=system.name, role=system.role, peak=peak, rows=rows))
        options = {key: value for key, value in vars(run).items() if key not in ("what", "out")}
        every[name] = provenance() | dict(options=options, equal=equal, clients=model.clients, systems=systems)
        path.write_text(json.dumps(every, indent=1) + "\n")
        del model
        gc.collect()


def measure_peaks(run: argparse.Namespace) -> None:
    """Measure the peaks of every system of every model, and the host's time of a request."""
    with bench_of(run) as bench:
        measure_peaks_with(bench, run)


def measure_peaks_with(bench: Bench, run: argparse.Namespace) -> None:
    """Measure the peaks of every system of every model of `bench`."""
    lines: list[dict[str, Any]] = []
    started = time.perf_counter()
    for model in bench.models():
        print(f"{model.name} on {len(run.device)} devices ({time.perf_counter() - started:.0f} s)", flush=True)
        line: dict[str, Any] = provenance() | dict(model=model.name, devices=len(run.device), clients=model.clients)
        line["equal"] = compare(model, run)
        if model.ideal is not None:
            line["ideal"] = round(model.ideal(), 1)
        peaks: dict[str, list[float]] = {system.name: [] for system in model.systems}
        for _ in range(run.repeats):
            for system in model.systems:
                if run.alone and bench.processes is not None:
                    peaks[system.name].append(round(sum(bench.processes.ask("peak", system.name)), 1))
                else:
                    peaks[system.name].append(round(peak_of(system, model, run), 1))
        line["peaks"] = peaks
        best = max((median(peaks[system.name]) for system in model.systems if system.role != "ours"), default=0.0)
        for system in model.systems:
            peak = median(peaks[system.name])
            text = f"  {system.name:24} {peak:9.0f} /s"
            if best:
                text += f", {peak / best:.2f} of the best other"
            if model.ideal is not None:
                text += f", {peak / line['ideal']:.3f} of the ideal {line['ideal']:.0f}"
            text += f" {peaks[system.name]}, {line['equal'][system.name]:.1%} equal"
            engine = None if run.alone else system.engine()
            if isinstance(engine, (CellEngine, SplitEngine)):
                engine.watch("thread_time" if "host" in run.device else "perf_counter")
                watched = peak_of(system, model, run, engine)
                times, ended = engine.times()
                host = {name: round(seconds / max(1, ended) * 1e6, 2) for name, seconds in sorted(times.items())}
                line.setdefault("host_us", {})[system.name] = host | dict(watched_peak=round(watched, 1))
                text += "\n" + " " * 27 + "us a request: " + ", ".join(f"{name} {us}" for name, us in host.items())
            print(text, flush=True)
        lines.append(line)
        del model
        gc.collect()
    (run.out / "cells-peaks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def prepare(run: argparse.Namespace) -> None:
    """Set up torch, the interpreter, the planner and the folder of results."""
    torch.set_num_threads(run.threads)
    compile_planner()
    sys.setswitchinterval(SWITCH_SECONDS)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = run.tf32
    run.out.mkdir(parents=True, exist_ok=True)


def at_rate(system: Mapping[str, Any], rate: float) -> float | None:
    """The p90 in milliseconds at one of the shared rates."""
    return next((row["p90_ms"] for row in system["rows"] if abs(row["rate"] - rate) < 0.5), None)


def of_role(systems: Sequence[Mapping[str, Any]], role: str) -> list[Mapping[str, Any]]:
    return [system for system in systems if system["role"] == role]


def ratios(systems: Sequence[Mapping[str, Any]]) -> str:
    """Our peak divided by the best other one, and p90 at half of the best baseline's peak: ours and the lowest other.

    Baselines compute the same cell; outside systems bring a faster one, and count as well. Only the rates up to the
    baselines' peak are shared by all, so the baselines determine the rate of the p90.
    """
    ours, theirs = of_role(systems, "ours"), of_role(systems, "baseline")
    same_cell = max(theirs, key=lambda system: system["peak"])
    half = min((row["rate"] for row in theirs[0]["rows"]), key=lambda rate: abs(rate - same_cell["peak"] / 2))
    theirs = [*theirs, *of_role(systems, "outside")]
    best = max(theirs, key=lambda system: system["peak"])
    own = min((at for system in ours if (at := at_rate(system, half)) is not None), default=None)
    other = min((at for system in theirs if (at := at_rate(system, half)) is not None), default=None)
    peak = max(system["peak"] for system in ours)
    text = f"Peak {peak / best['peak']:.2f} times that of the best other, {best['system']}"
    if best is not same_cell:
        text += f", {peak / same_cell['peak']:.2f} times that of the best of the same cell, {same_cell['system']}"
    text += "."
    if own is not None and other is not None:
        text += f" p90 at {half:.0f}/s: {own:.1f} ms, the lowest other {other:.1f} ms ({own / other - 1:+.0%})."
    return text


def crossing(ours: Mapping[str, Any], outside: Mapping[str, Any]) -> str:
    """The rate, of those that both ran, from which an outside system has the lower p90."""
    rates = sorted({row["rate"] for row in ours["rows"]} & {row["rate"] for row in outside["rows"]})
    both = [(rate, at_rate(ours, rate), at_rate(outside, rate)) for rate in rates]
    lower = [rate for rate, own, other in both if other is not None and (own is None or other < own)]
    text = f"{outside['system']}: peak {ours['peak'] / outside['peak']:.2f} times its own; "
    if not lower:
        return text + f"our p90 is lower at all {len(both)} rates."
    higher = [rate for rate, *_ in both if rate not in lower]
    return (
        text
        + f"its p90 is lower at {', '.join(f'{rate:.0f}' for rate in lower)}/s"
        + (f", ours at {', '.join(f'{rate:.0f}' for rate in higher)}/s." if higher else ", which is everywhere.")
    )


def show(run: argparse.Namespace) -> None:
    """Print the table, and draw the plot."""
    from holdfast.lab.reports import plots

    every = json.loads((run.out / "cells-serve.json").read_text())
    lines = []
    panels = []
    for name, made in every.items():
        lines += [f"## {name}", "", f"`{made['command']}`, {made['date']}, {made['device']}, torch {made['torch']}", ""]
        rates = sorted({row["rate"] for system in of_role(made["systems"], "baseline") for row in system["rows"]})
        lines += [
            "| system | peak /s | equal | " + " | ".join(f"p90 ms at {rate:.0f}/s" for rate in rates) + " |",
            "|" + "---|" * (3 + len(rates)),
        ]
        for system in made["systems"]:
            cells = [at_rate(system, rate) for rate in rates]
            shown = " | ".join("–" if at is None else f"{at:.1f}" for at in cells)
            lines.append(f"| {system['system']} | {system['peak']:.0f} | {made['equal'][system['system']]:.1%} | {shown} |")  # fmt: skip # noqa: E501
        lines += ["", ratios(made["systems"])]
        best = max(of_role(made["systems"], "ours"), key=lambda system: system["peak"])
        lines += [crossing(best, outside) for outside in of_role(made["systems"], "outside")]
        lines.append("")
        curves = [
            plots.Line(
                system["system"],
                [row["rate"] for row in system["rows"] if row["p90_ms"] is not None],
                [row["p90_ms"] for row in system["rows"] if row["p90_ms"] is not None],
                accent=system["role"] == "ours",
            )
            for system in made["systems"]
        ]
        panels.append(plots.Panel(name, "p90 ms, over requests a second", curves, log=True))
        for key, title in (("queuing_ms", "queuing"), ("computation_ms", "computation")):
            lines_of = []
            for system in made["systems"]:
                row = system["rows"][min(1, len(system["rows"]) - 1)]
                lines_of.append(
                    plots.Line(
                        system["system"],
                        row[key],
                        np.linspace(0, 100, len(row[key])).tolist(),
                        system["role"] == "ours",
                    )
                )
            panels.append(plots.Panel(f"{name}: {title}", "cumulative %, over ms", lines_of, log_x=True))
    print("\n".join(lines))
    (run.out / "cells-serve.md").write_text("\n".join(lines))
    plots.png(lambda palette: plots.panels(panels, 3, palette), run.out / "cells-serve.png")


def main() -> None:
    names = ("lstm", "equal-lstm", "seq2seq", "tree", "equal-tree")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("measure", "show", "peaks"))
    parser.add_argument("--device", nargs="+", default=["cpu"], help="cpu, cuda:N or host; several for several workers")
    parser.add_argument("--shared", action="store_true", help="one process and one planner for several devices")
    parser.add_argument(
        "--alone", action="store_true", help="for `peaks`: each device's process makes its own requests"
    )
    parser.add_argument("--only", nargs="+", default=list(names), choices=names)
    parser.add_argument("--roles", nargs="+", default=list(ROLES), choices=ROLES, help="for `peaks`: systems to run")
    parser.add_argument("--seconds", type=float, default=1.0, help="of arrivals at each rate")
    parser.add_argument("--repeats", type=int, default=3, help="of each peak, for `peaks`")
    parser.add_argument("--patience", type=float, default=0.3, help="seconds after the last arrival")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=30_000)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--tree-sizes", nargs="+", type=int, default=[64, 256], help="most cells or trees of a batch")
    parser.add_argument("--clients", type=int, help="open requests for peaks; default: 4096, 2048, 1024 by model")
    parser.add_argument("--max-tasks", type=int, default=MAX_TASKS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    run = parser.parse_args()
    if "measure" in run.what:
        measure(run)
    if "peaks" in run.what:
        measure_peaks(run)
    if "show" in run.what:
        show(run)


if __name__ == "__main__":
    main()
