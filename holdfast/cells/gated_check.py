"""Compares a cell's gated form, as an executor runs it, with the cell's `run`, before any request is served."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from holdfast.cells.executor import CellExecutor, Kind, Tensors
from holdfast.cells.gated import Gated
from holdfast.cells.graph import ZEROS
from holdfast.cells.plan import FIRST_ROW, Round, Task
from holdfast.cells.types import dtype

LIMITS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}
"""The largest difference that rounding may make, relative to 1 + the largest value of an output."""
TF32_LIMIT = 2e-2
ZEROS_SHARE = 0.2
"""Share of the nodes that read zeros instead of a state."""
SEED = 0


@torch.inference_mode()
def check_gated(executor: CellExecutor) -> None:
    """For each gated type, run tasks of random inputs at its smallest and largest size. Leaves zeros in their rows.

    Call it while no round is in flight. Raises ValueError if an output differs from that of `run` by more than rounding
    explains. The error names the cell, the output, the largest difference and the limit.
    """
    for number, (kind, gated) in executor.gated.items():
        for size in sorted({kind.sizes[0], kind.sizes[-1]}):
            _check(executor, number, kind, gated, size)


def _check(executor: CellExecutor, number: int, kind: Kind, gated: Gated, size: int) -> None:
    cell, arenas = kind.cell, executor.arenas
    layout, device = arenas.layout, arenas.device
    random = np.random.default_rng(SEED)
    bounds = {part[0]: len(kind.weights[part[1]]) for part in gated.parts if not isinstance(part, str)}
    word = min(bounds.values(), default=2)
    nodes = max(1, min(size, (arenas.capacity - FIRST_ROW) // 2))
    end = min(arenas.capacity, FIRST_ROW + 2 * nodes)
    rows = random.permutation(np.arange(FIRST_ROW, FIRST_ROW + nodes, dtype=np.int32))
    # No node of a task may read a row that another one writes, so states lie in other rows.
    read = np.arange(FIRST_ROW + nodes, end) if end > FIRST_ROW + nodes else rows
    for spec, items in arenas.items.items():
        used = items[: end * layout.widths.get(spec, 0)]
        used.copy_(_random(random, tuple(used.shape), used.dtype, word))
    sources = np.full((len(cell.states), nodes), ZEROS, np.int32)
    for source, (name, items) in zip(sources, kind.states, strict=True):
        width = layout.width_of(cell.inputs[name])
        if len(items) > width:
            source[:] = random.choice(read, nodes) * width + random.integers(0, width, nodes)
            source[random.random(nodes) < ZEROS_SHARE] = ZEROS
    values = tuple(
        _random(random, (nodes, *cell.inputs[name].shape), dtype(cell.inputs[name]), bounds.get(name, 2)).numpy()
        for name in cell.values
    )
    inputs = {name: torch.from_numpy(value).to(device) for name, value in zip(cell.values, values, strict=True)}
    for source, (name, items) in zip(sources, kind.states, strict=True):
        inputs[name] = items[torch.from_numpy(source.astype(np.int64)).to(device)]  # the last item is zeros
    expected = kind.run(inputs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # rounds run on another stream
    executor.submit(Round(0, number, [Task(rows, sources, values, size)]))
    (returned,) = executor.collect()
    at = torch.from_numpy(rows.astype(np.int64)).to(device)
    found = {name: items[at * width + place] for name, items, width, place in kind.outputs}
    copied = {
        name: torch.from_numpy(array.copy()).to(device) for name, array in zip(kind.returned, returned, strict=True)
    }
    for outputs in (found, copied):
        for name, output in outputs.items():
            _compare(kind, gated, size, name, output, expected)
    for spec, items in arenas.items.items():
        items[: end * layout.widths.get(spec, 0)].zero_()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _random(random: np.random.Generator, shape: tuple[int, ...], kind: torch.dtype, bound: int) -> torch.Tensor:
    """Numbers near 1, or integers below the bound."""
    if kind.is_floating_point:
        return torch.from_numpy(random.standard_normal(shape, np.float32)).to(kind)
    return torch.from_numpy(random.integers(0, bound, shape)).to(kind)


def _compare(
    kind: Kind, gated: Gated, size: int, name: str, found: torch.Tensor, expected: Mapping[str, torch.Tensor]
) -> None:
    """Raise ValueError if an output differs from the expected one. Labels may differ if their scores hardly do."""
    state = expected["h"]
    share = LIMITS[state.dtype]
    if state.dtype == torch.float32 and state.is_cuda and torch.get_float32_matmul_precision() != "highest":
        share = TF32_LIMIT
    wanted = expected[name]
    if gated.read_out is not None and name == gated.read_out[0]:
        found, wanted = (_scores(kind.weights, gated.read_out, state, label) for label in (found, wanted))
    differences = torch.where(found == wanted, 0.0, (found.double() - wanted.double()).abs())
    values = torch.where(wanted.isfinite(), wanted, 0).double().abs()
    largest, limit = float(differences.max()), share * (1 + float(values.max()))
    if not largest <= limit:
        raise ValueError(
            f"cell {kind.cell.name} has a gated form that differs from run: output {name}, in a batch of {size} on "
            f"{found.device}, by up to {largest:.3g}; the limit is {limit:.3g}. Correct the form, or leave gated out"
        )


def _scores(weights: Tensors, read_out: tuple[str, str, str], h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The scores of labels by the gated form's read-out; -inf for a number that is not a label."""
    _, matrix, bias = read_out
    scores = torch.nn.functional.linear(h, weights[matrix], weights[bias]).double()
    inside = (labels >= 0) & (labels < scores.shape[1])
    chosen = scores.gather(1, torch.where(inside, labels, 0).long().unsqueeze(1)).squeeze(1)
    return torch.where(inside, chosen, -torch.inf)
