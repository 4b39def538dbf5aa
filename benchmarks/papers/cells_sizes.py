"""BatchMaker's Figure 2.3: the time of an LSTM step with hidden 1,024 by batch size, and the sizes that follow.

Run: python -m benchmarks.papers.cells_sizes measure --device cuda  # as `holdfast profile --app`, in three types
     python -m benchmarks.papers.cells_sizes show                   # table and plot of all devices so far
     python -m benchmarks.papers.cells_sizes pair --device cuda     # Seq2Seq: the decoder's share of the computation

A step is one task as the executor runs it: five in a row, each with the embedding of its word, h and c from and to the
arenas. Types: float32, float32 with products in TF32, bfloat16. A CPU runs only float32. The paper: a V100 and CUDA 9.

`pair` times the encoder and the decoder of Seq2Seq with 30,000 words, in float32, and says which share of a request
the decoder takes with as many steps in as out, and which sizes are best (section 2.7.4: 75%; 512 and 256).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.papers import RESULTS, origin, save
from holdfast.cells.cell import Cell
from holdfast.cells.measure import LARGEST, device_name, measure_cells
from holdfast.cells.nn import LSTMWeights, ReadOut, decoder_cell, encoder_cell, lstm_cell
from holdfast.core.cell_cost import CellCost, choose_sizes
from holdfast.lab.reports import plots

STEM = RESULTS / "cells-sizes"
HIDDEN, WORDS = 1024, 10_000
PAPER = CellCost((64, 512), (185e-6, 784e-6))
"""The two points that the paper states in its text."""
TYPES: Mapping[str, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "highest"),
}
"""For each name, the type of weights and state, and the precision of float32's products."""


def drawing(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """A function that draws random weights of a shape."""
    made = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=made) / shape[-1] ** 0.5).to(dtype)

    return random


def step(hidden: int, dtype: torch.dtype) -> Cell:
    """An LSTM over words, with random weights."""
    random = drawing(dtype)
    weights = LSTMWeights(random(4 * hidden, 2 * hidden), random(4 * hidden))
    return lstm_cell("lstm", weights, embedding=random(WORDS, hidden))


def pair(device: str, hidden: int, words: int, largest: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The times of Seq2Seq's two cells, and a table with the decoder's share by batch size."""
    random = drawing(torch.float32)
    embedding = random(words, hidden)
    weights = [LSTMWeights(random(4 * hidden, 2 * hidden), random(4 * hidden)) for _ in range(2)]
    cells = (
        encoder_cell("encoder", weights[0], embedding),
        decoder_cell("decoder", weights[1], embedding, ReadOut(random(words, hidden), random(words))),
    )
    costs = measure_cells(cells, {cell: number for number, cell in enumerate(cells)}, device, largest=largest)
    lines = ["| nodes | encoder, us | decoder, us | decoder's share |", "|---|---|---|---|"]
    for size in costs[0].sizes:
        encoder, decoder = (cost.at(size) * 1e6 for cost in costs)
        lines.append(f"| {size:,} | {encoder:,.1f} | {decoder:,.1f} | {decoder / (encoder + decoder):.0%} |")
    chosen = [choose_sizes(cost) for cost in costs]
    spent = [cost.at(sizes[-1]) / sizes[-1] for cost, sizes in zip(costs, chosen, strict=True)]
    lines.append(f"| largest size | {chosen[0][-1]} | {chosen[1][-1]} | {spent[1] / sum(spent):.0%} |")
    lines.append("| the paper | 512 | 256 | 75% |")
    rows = [
        {"device": device_name(device), "cell": cell.name, "sizes": cost.sizes, "seconds": cost.seconds}
        for cell, cost in zip(cells, costs, strict=True)
    ]
    return rows, lines


def measure(device: str, hidden: int, largest: int) -> list[dict[str, Any]]:
    """One row for each type."""
    rows = []
    for name, (dtype, precision) in TYPES.items():
        if device == "cpu" and name != "float32":
            continue
        torch.set_float32_matmul_precision(precision)
        cell = step(hidden, dtype)
        (cost,) = measure_cells((cell,), {cell: 0}, device, largest=largest)
        rows.append({"device": device_name(device), "type": name, "sizes": cost.sizes, "seconds": cost.seconds})
        print(f"{rows[-1]['device']}, {name}: {choose_sizes(cost)}", file=sys.stderr, flush=True)
    return rows


def show(stem: Path, kept: Mapping[str, Any]) -> None:
    """Print the table and write it, and draw time and throughput."""
    costs = {
        f"{row['device']}, {row['type']}": CellCost(tuple(row["sizes"]), tuple(row["seconds"])) for row in kept["rows"]
    }
    every = sorted({size for cost in costs.values() for size in cost.sizes})
    lines = [f"| nodes | {' | '.join(costs)} | the paper's V100 |", "|---" * (len(costs) + 2) + "|"]
    for size in every:
        times = [f"{cost.at(size) * 1e6:,.1f}" if size in cost.sizes else "" for cost in (*costs.values(), PAPER)]
        lines.append(f"| {size:,} | {' | '.join(times)} |")
    chosen = [choose_sizes(cost) for cost in costs.values()]
    lines.append(f"| most nodes/s | {' | '.join(f'{best(cost):,.0f}' for cost in (*costs.values(), PAPER))} |")
    lines.append(f"| largest size | {' | '.join(str(sizes[-1]) for sizes in chosen)} | 512 |")
    lines.append(f"| sizes | {' | '.join(', '.join(map(str, sizes)) for sizes in chosen)} | |")
    print("\n".join(lines))
    head = f"`{kept['command']}`, {kept['date']}. Microseconds of one step; hidden {kept['hidden']}.\n\n"
    stem.with_suffix(".md").write_text(head + "\n".join(lines) + "\n")
    panels = [
        plots.Panel(title, f"{unit}, over nodes of a task", [
            plots.Line(name, list(cost.sizes), [of(cost, size) for size in cost.sizes], accent="float32" in name)
            for name, cost in (*costs.items(), ("V100 (paper)", PAPER))
        ], log=True, log_x=True)
        for title, unit, of in (
            ("2.3 time of a step", "us", lambda cost, size: cost.at(size) * 1e6),
            ("2.3 throughput", "1,000 nodes/s", lambda cost, size: cost.throughput(size) / 1e3),
        )
    ]  # fmt: skip
    plots.png(lambda palette: plots.panels(panels, 2, palette), stem.with_suffix(".png"))


def best(cost: CellCost) -> float:
    """Largest number of nodes per second."""
    return max(map(cost.throughput, cost.sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "show", "pair"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--words", type=int, default=30_000, help="of `pair`")
    parser.add_argument("--largest", type=int, default=LARGEST)
    parser.add_argument("--out", type=Path, default=STEM, help="files to write, without their suffix")
    arguments = parser.parse_args()
    device = "cuda:0" if arguments.device == "cuda" else "cpu"
    if arguments.what == "pair":
        torch.set_float32_matmul_precision("highest")
        rows, lines = pair(device, arguments.hidden, arguments.words, arguments.largest)
        stem = arguments.out.with_name(f"cells-pair-{arguments.device}")
        save(stem, rows, [f"{rows[0]['device']}, hidden {arguments.hidden}, {arguments.words:,} words.", "", *lines])
        return
    path = arguments.out.with_suffix(".json")
    kept = json.loads(path.read_text()) if path.exists() else {"rows": []}
    if arguments.what == "measure":
        rows = measure(device, arguments.hidden, arguments.largest)
        others = [row for row in kept["rows"] if row["device"] != rows[0]["device"]]
        kept = origin(arguments.out.parent) | {"hidden": arguments.hidden, "rows": [*others, *rows]}
        path.write_text(json.dumps(kept, indent=1) + "\n")
    if not kept["rows"]:
        parser.error(f"there is no {path}; measure first")
    show(arguments.out, kept)


if __name__ == "__main__":
    main()
