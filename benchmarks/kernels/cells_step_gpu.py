"""Time cells on a GPU: a bare LSTM step against a task of the executor, and the whole loop against an ideal graph.

    python -m benchmarks.kernels.cells_step_gpu [--hidden 1024] [--sizes 2 64 256 512 1024 2048] [--out results.jsonl]

Steps, by type of numbers and batch size, in microseconds:
- matmul: the product of the step's gates alone, in a CUDA graph.
- bare: the whole step in PyTorch, in a CUDA graph that feeds each step to the next.
- plain and fused: tasks of the executor, back to back: gather, step, scatter and the signal. Plain runs the cell as it
  is written, fused in its gated form.
- loop: planner, executor and loop in one thread, over as many chains as the batch size; wall time for each task.
  `ratio` is loop over bare (BatchMaker, section 2.7.1: 250 us against 185 at 64).

Equal lengths, at one batch size: requests of equal length through the loop, against a hard-coded graph of all steps at
that size, in requests a second (BatchMaker, section 2.7.3: 0.87 of the ideal). `host` is the loop's time for each
request on a device that takes none. Prints tables, writes JSON lines.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.invocation import provenance
from holdfast.cells.cell import Cell
from holdfast.cells.executor_cuda import CudaExecutor
from holdfast.cells.graph import CellGraph
from holdfast.cells.nn import LSTMWeights, lstm_cell
from holdfast.cells.plan import CellOutput, CellRequest, Returned, Round, Task
from holdfast.cells.planner import CellPlanner, CellStats
from holdfast.loop.loop import Loop

VOCABULARY = 10_000
STEPS = 24
"""The mean length of the paper's sentences."""
KINDS = {"float32": (torch.float32, False), "tf32": (torch.float32, True), "bfloat16": (torch.bfloat16, False)}
"""The type of the weights, and whether products may use TF32."""
CellLoop = Loop[CellRequest, Round, Returned, list[CellOutput], CellStats]


class NoDevice:
    """An executor that computes nothing, to measure the host's part of the loop's time."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._rounds: deque[Round] = deque()

    def submit(self, plan: Round) -> None:
        self._rounds.append(plan)

    def collect(self) -> Returned:
        outputs = [self._cell.outputs[name] for name in self._cell.returned]
        return [
            tuple(np.zeros((len(task.rows), *output.shape), output.dtype) for output in outputs)
            for task in self._rounds.popleft().tasks
        ]

    def close(self) -> None:
        self._rounds.clear()


def make_cell(hidden: int, dtype: torch.dtype, sizes: tuple[int, ...], *, fused: bool) -> Cell:
    """An LSTM over words, with random weights on the GPU."""
    made = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=made, device="cuda") / shape[-1] ** 0.5).to(dtype)

    weights = LSTMWeights(random(4 * hidden, 2 * hidden), random(4 * hidden))
    cell = lstm_cell("lstm", weights, embedding=random(VOCABULARY, hidden), sizes=sizes)
    if not fused:
        object.__setattr__(cell, "gated", None)
    return cell


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Median time of one call over several tries, each of which starts `calls` of them at once."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return float(np.median(times))


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """The work as a CUDA graph, after a run that warms it up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def bare_steps(cell: Cell, hidden: int, size: int, steps: int) -> Callable[[], object]:
    """A graph of steps of the cell, each fed to the next."""
    dtype = cell.weights["w"].dtype
    tokens = torch.randint(0, VOCABULARY, (steps, size), device="cuda", dtype=torch.int32)
    first = torch.zeros(size, hidden, dtype=dtype, device="cuda")

    def run() -> torch.Tensor:
        state = {"h": first, "c": first}
        for token in tokens:
            outputs = cell.run(cell.weights, token=token, **state)
            state = {name: outputs[name] for name in state}
        return state["h"]

    return captured(run)


def matmul(cell: Cell, hidden: int, size: int) -> float:
    """The step's product alone, in microseconds."""
    joined = torch.randn(size, 2 * hidden, device="cuda").to(cell.weights["w"].dtype)
    out = torch.empty(size, 4 * hidden, device="cuda", dtype=joined.dtype)
    weight = cell.weights["w"].t()

    def run() -> None:
        for _ in range(10):
            torch.mm(joined, weight, out=out)

    return microseconds(captured(run), 20) / 10


def task_time(cell: Cell, size: int) -> float:
    """Microseconds of a task in the executor: wall time of rounds that are in flight together."""
    executor = CudaExecutor([cell], {cell: 0}, "cuda:0", capacity=size + 2, rounds_in_flight=4)
    rows = np.random.default_rng(0).permutation(np.arange(1, size + 1)).astype(np.int32)
    task = Task(rows, np.stack([2 * rows, 2 * rows + 1]), (np.zeros(size, np.int32),), size)
    plan = Round(0, 0, [task] * 5)
    for _ in range(4):
        executor.submit(plan)
    rounds, times = 60, []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(rounds):
            executor.collect()
            executor.submit(plan)
        times.append((time.perf_counter() - started) / rounds / 5 * 1e6)
    for _ in range(4):
        executor.collect()
    executor.close()
    return float(np.median(times))


def make_loop(cell: Cell, capacity: int, *, device: bool = True, in_flight: int = 2) -> CellLoop:
    planner = CellPlanner([cell], {cell: 0}, capacity=capacity)
    executor: Any = NoDevice(cell)
    if device:
        executor = CudaExecutor([cell], {cell: 0}, "cuda:0", capacity=capacity, rounds_in_flight=in_flight)
    return Loop(planner.worker(0), executor, in_flight, time.monotonic)


def chains(cell: Cell, count: int, steps: int) -> list[CellRequest]:
    random = np.random.default_rng(0)
    requests = []
    for number in range(count):
        graph = CellGraph()
        graph.chain(cell, steps, token=random.integers(0, VOCABULARY, steps))
        requests.append(CellRequest(str(number), graph))
    return requests


def run_through(loop: CellLoop, requests: Sequence[CellRequest]) -> tuple[float, float]:
    """Seconds to add the requests, and seconds from then until all have ended."""
    started = time.perf_counter()
    for request in requests:
        loop.add(request)
    added = time.perf_counter()
    ended = 0
    while ended < len(requests):
        ended += len(loop.step() or ())
    return added - started, time.perf_counter() - added


def loop_time(cell: Cell, size: int, steps: int = 400) -> float:
    """Wall time of a task in the whole loop, in microseconds, over `size` chains."""
    loop = make_loop(cell, size + 2)
    run_through(loop, chains(cell, size, 20))
    times = [run_through(loop, chains(cell, size, steps))[1] / steps * 1e6 for _ in range(3)]
    loop.close()
    return float(np.median(times))


def equal_lengths(name: str, hidden: int, size: int, waves: int = 20) -> dict[str, object]:
    """Requests of equal length through the loop, against the hard-coded graph."""
    dtype, tf32 = KINDS[name]
    torch.backends.cuda.matmul.allow_tf32 = tf32
    cell = make_cell(hidden, dtype, (size,), fused=True)
    ideal = size / microseconds(bare_steps(cell, hidden, size, STEPS), 20) * 1e6
    loop = make_loop(cell, 4 * size)
    run_through(loop, chains(cell, 4 * size - 1, STEPS))
    _, seconds = run_through(loop, chains(cell, waves * size, STEPS))
    loop.close()
    idle = make_loop(cell, 4 * size, device=False)
    run_through(idle, chains(cell, size, STEPS))
    add, host = run_through(idle, chains(cell, waves * size, STEPS))
    found = waves * size / seconds
    return dict(
        numbers=name,
        size=size,
        steps=STEPS,
        ideal=round(ideal),
        found=round(found),
        share=round(found / ideal, 3),
        host_us=round(host / waves / size * 1e6, 1),
        add_us=round(add / waves / size * 1e6, 1),
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sizes", nargs="*", type=int, default=[2, 64, 256, 512, 1024, 2048])
    parser.add_argument("--numbers", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--equal", type=int, default=512, help="batch size of the requests of equal length")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines: list[dict[str, object]] = [provenance()]
    print(f"{'numbers':9} {'size':>5} {'matmul':>8} {'bare':>8} {'plain':>8} {'fused':>8} {'loop':>8} {'ratio':>6}  us")
    for name in arguments.numbers:
        dtype, tf32 = KINDS[name]
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for size in arguments.sizes:
            plain = make_cell(arguments.hidden, dtype, (size,), fused=False)
            fused = make_cell(arguments.hidden, dtype, (size,), fused=True)
            times = dict(
                matmul=matmul(plain, arguments.hidden, size),
                bare=microseconds(bare_steps(plain, arguments.hidden, size, 10), 20) / 10,
                plain=task_time(plain, size),
                fused=task_time(fused, size),
                loop=loop_time(fused, size),
            )
            times = {key: round(value, 1) for key, value in times.items()}
            times["ratio"] = round(times["loop"] / times["bare"], 2)
            print(f"{name:9} {size:5} " + " ".join(f"{value:8}" for value in times.values()), flush=True)
            lines.append(dict(numbers=name, size=size, **times))
    print("\nrequests of equal length, a second")
    for name in arguments.numbers:
        line = equal_lengths(name, arguments.hidden, arguments.equal)
        print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
        lines.append(line)
    if arguments.out is not None:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
