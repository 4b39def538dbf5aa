"""Small applications of cells for the server's tests. `holdfast serve --app tiny_apps:adding` finds them from here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from holdfast.cells.cell import Arrays, Cell, Field, Output, State, Value
from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch

BAD, BROKEN, DEADLY = -1, -(1 << 40), -(1 << 41)
"""Numbers that the application refuses, that its unfold fails on, and that its cell fails on."""
STEP_SECONDS = 0.005
"""How long a step of `slow` takes."""


def add(weights: Any, total: torch.Tensor, number: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    if (number == DEADLY).any():
        raise RuntimeError("a deadly number")
    return {"total": total + number.to(torch.float32).unsqueeze(1) * scale}


def wait(weights: Any, total: torch.Tensor, number: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    time.sleep(STEP_SECONDS)
    return add(weights, total, number, scale)


class Adding:
    """Adds numbers one by one, each times `scale`: a chain. With the label "apart", it multiplies each alone."""

    inputs = (
        Field("numbers", "int64", (-1,), limit=4096, help="What is added."),
        Field("scale", "float32", (2,), help="Two factors."),
        Field("label", "string", (1,)),
    )
    outputs = (
        Field("totals", "float32", (-1, 2), help="The sums after each number."),
        Field("words", "string", (1,)),
        Field("steps", "int64", (1,)),
    )

    def __init__(self, name: str = "adding", run: Any = add) -> None:
        self.name = name
        self.cell = Cell(
            f"{name}-cell",
            run,
            {"total": State((2,)), "number": Value((), "int64"), "scale": Value((2,))},
            {"total": Output((2,), returned=True)},
            sizes=(1, 2, 4, 8, 16),
        )
        self.cells = (self.cell,)

    def unfold(self, inputs: Arrays) -> CellGraph:
        numbers = inputs["numbers"]
        if (numbers == BAD).any():
            raise ValueError(f"numbers[{int(np.argmax(numbers == BAD))}] is {BAD}; it must be at least 0")
        if (numbers == BROKEN).any():
            raise RuntimeError("this application is broken")
        graph = CellGraph()
        scale = np.repeat(inputs["scale"][None], len(numbers), 0)
        make = graph.add if inputs["label"][0] == "apart" else graph.chain
        steps = make(self.cell, len(numbers), number=numbers, scale=scale)
        graph.result("totals", steps, "total")
        return graph

    def finish(self, results: Arrays) -> Arrays:
        totals = results["totals"]
        return {
            "totals": totals,
            "words": np.array([f"sum {totals[-1].tolist()}"], dtype=object),
            "steps": np.array([len(totals)]),
        }


def adding() -> Adding:
    return Adding()


def slow() -> Adding:
    return Adding("slow", wait)


class Together(Adding):
    """Unfolds many requests at once, and notes how many."""

    def __init__(self) -> None:
        super().__init__("together")
        self.sizes: list[int] = []
        """Number of requests of each call."""

    def unfold_many(self, inputs: Sequence[Arrays]) -> GraphBatch:
        self.sizes.append(len(inputs))
        numbers = [each["numbers"] for each in inputs]
        if any((each == BAD).any() for each in numbers):
            raise ValueError("a number is bad")
        if any((each == BROKEN).any() for each in numbers):
            raise RuntimeError("this application is broken")
        lengths = np.array([len(each) for each in numbers])
        scale = np.stack([each["scale"] for each in inputs]).repeat(lengths, 0)
        batch = GraphBatch(len(inputs))
        steps = batch.chain(self.cell, lengths, number=np.concatenate(numbers), scale=scale)
        batch.result("totals", steps, "total")
        return batch


def together() -> Together:
    return Together()


nothing = object()


class TwoAlike(Adding):
    """Has two inputs of one name."""

    inputs = (Field("x", "int64", (1,)), Field("x", "int64", (1,)))


def two_alike() -> Adding:
    return TwoAlike()


def unrunnable() -> Adding:
    return Adding("unrunnable", lambda weights, **inputs: {})
