"""Measures the time of tasks of each cell type on a device, by batch size (BatchMaker, Figure 2.3)."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np
import torch

from holdfast.cells.cell import Cell, Spec
from holdfast.cells.executor import CellExecutor
from holdfast.cells.graph import ZEROS
from holdfast.cells.plan import FIRST_ROW, Layout, Round, Task
from holdfast.cells.planner import MAX_TASKS
from holdfast.cells.workers import make_executor, require_device
from holdfast.core.cell_cost import CellCost

MEASURED = 2
"""The version of the measurement. Costs of another version are not used."""
LARGEST = 2048
"""Largest size that is measured by default, as in Figure 2.3."""
MOST = 16384
"""Largest size that may be measured."""
HALVES_FROM = 64
"""Smallest size from which sizes halfway between powers of two are measured, too.

Padding from one power to the next would cost up to half of a large task.
"""
PASSES = 6
"""Number of passes over all sizes, alternately by falling and by rising size.

The result is the fastest pass, which was disturbed least.
"""
POINT_SECONDS = 0.03
"""Seconds for which a pass repeats the rounds of one size, at least LEAST_ROUNDS of them. It takes their median."""
LEAST_ROUNDS = 3
"""Smallest number of rounds of one size in a pass."""
LONG_SECONDS = 0.3
"""Largest number of seconds for which a pass repeats the rounds of one size, even if there were few."""


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """The sizes that are measured. Raises ValueError for a largest size that is out of range."""
    if not 2 <= largest <= MOST:
        raise ValueError(f"largest is {largest}; it must lie between 2 and {MOST}")
    powers = [1 << power for power in range(largest.bit_length())]
    halves = [3 * power // 2 for power in powers if power >= HALVES_FROM]
    return tuple(sorted({largest, *powers, *(size for size in halves if size < largest)}))


def measure_cells(
    cells: Sequence[Cell],
    types: Mapping[Cell, int],
    device: str,
    *,
    largest: int = LARGEST,
    on_progress: Callable[[str], None] = lambda stage: None,
) -> tuple[CellCost, ...]:
    """Time tasks of each type, by its number, on "cpu" or "cuda:N".

    A round of MAX_TASKS tasks is timed as the executor runs it, over rows in random order. On a GPU, the host's work is
    not included. `on_progress` receives each stage as text for people. Raises ValueError for a cell that differs from
    its declaration, or that cannot run at the largest size.
    """
    sizes = sizes_up_to(largest)
    on_progress(f"making cells ready at sizes up to {largest}")
    executor = make_executor(
        cells,
        types,
        device,
        sizes=[sizes] * len(set(types.values())),
        capacity=FIRST_ROW + largest,
        max_tasks=MAX_TASKS,
        rounds_in_flight=1,
    )
    try:
        rounds = {
            (number, size): round_of_zeros(cell, number, executor.arenas.layout, size)
            for cell, number in reversed(dict(types).items())
            for size in sizes
        }
        taken: dict[tuple[int, int], float] = {}
        falling = sorted(rounds, key=lambda point: -point[1])  # so that the device is under load from the start
        for number in range(PASSES):
            on_progress(f"measuring cells, pass {number + 1} of {PASSES}")
            for point in reversed(falling) if number % 2 else falling:
                taken[point] = min(_seconds(executor, rounds[point]), taken.get(point, np.inf))
    finally:
        executor.close()
    return tuple(
        CellCost(sizes, tuple(taken[number, size] for size in sizes)) for number in sorted(set(types.values()))
    )


def device_name(device: str, workers: int = 1) -> str:
    """The name of a worker's device. On a CPU, `workers` workers share the threads that the calling thread may use.

    Raises ValueError if there is no such device.
    """
    require_device(device)
    if device != "cpu":
        return str(torch.cuda.get_device_name(device))
    threads = max(1, torch.get_num_threads() // workers)
    return f"CPU ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"


def round_of_zeros(cell: Cell, number: int, layout: Layout, size: int) -> Round:
    """A round of tasks of zeros. States that a chain carries stay in its row; other states come from random rows."""
    random = np.random.default_rng(size)
    rows = random.permutation(np.arange(FIRST_ROW, FIRST_ROW + size, dtype=np.int32))
    sources = np.empty((len(cell.states), size), np.int32)
    for source, name in zip(sources, cell.states, strict=True):
        if name in cell.carried:
            width, place = layout.within(cell, name)
            source[:] = rows * width + place
        elif Spec(cell.inputs[name].shape, cell.inputs[name].dtype) not in layout.widths:
            source[:] = ZEROS  # no cell has such an output
        else:
            source[:] = random.permutation(rows) * layout.width_of(cell.inputs[name])
    values = tuple(np.zeros((size, *cell.inputs[name].shape), cell.inputs[name].dtype) for name in cell.values)
    return Round(0, number, [Task(rows, sources, values, size)] * MAX_TASKS)


def _seconds(executor: CellExecutor, plan: Round) -> float:
    """Seconds of a task in this round, after one round that does not count unless it took long."""
    began = time.perf_counter()
    rounds = [executor.timed(plan)]
    if rounds[0] < LONG_SECONDS:
        rounds.clear()
    # On a GPU, the host's work for a round can take much longer than the round.
    while (spent := max(sum(rounds), time.perf_counter() - began)) < LONG_SECONDS or not rounds:
        if len(rounds) >= LEAST_ROUNDS and spent >= POINT_SECONDS:
            break
        rounds.append(executor.timed(plan))
    return median(rounds) / len(plan.tasks)
