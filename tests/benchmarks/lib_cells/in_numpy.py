"""Cells that compute with NumPy, and an executor of rounds over arenas of NumPy arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.lib.cells import models
from benchmarks.lib.cells.models import Operators
from holdfast.cells.cell import Cell, Spec, State
from holdfast.cells.plan import Layout, Returned, Round

HIDDEN, VOCABULARY = 6, 11
Weights = Mapping[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def lstm_product(w: Weights, token: np.ndarray, h: np.ndarray) -> dict[str, np.ndarray]:
    return {"product": np.concatenate([w["embed"][token], h], 1) @ w["w"] + w["b"]}


def lstm_gates(w: Weights, product: np.ndarray, c: np.ndarray) -> dict[str, np.ndarray]:
    i, f, g, o = np.split(product, 4, 1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(c)
    return {"h": h, "c": c, "probe": h[:, 0]}


def lstm(w: Weights, token: np.ndarray, h: np.ndarray, c: np.ndarray) -> dict[str, np.ndarray]:
    return lstm_gates(w, lstm_product(w, token, h)["product"], c)


def encoder(w: Weights, token: np.ndarray, h: np.ndarray, c: np.ndarray) -> dict[str, np.ndarray]:
    made = lstm(w, token, h, c)
    return {"h": made["h"], "c": made["c"]}


def decoder(w: Weights, word: np.ndarray, h: np.ndarray, c: np.ndarray) -> dict[str, np.ndarray]:
    made = lstm(w, word, h, c)
    return {"word": (made["h"] @ w["out"]).argmax(1), "h": made["h"], "c": made["c"]}


def leaf_product(w: Weights, token: np.ndarray) -> dict[str, np.ndarray]:
    return {"product": w["embed"][token] @ w["w"] + w["b"]}


def leaf_gates(w: Weights, product: np.ndarray) -> dict[str, np.ndarray]:
    i, o, u = np.split(product, 3, 1)
    c = sigmoid(i) * np.tanh(u)
    return {"h": sigmoid(o) * np.tanh(c), "c": c}


def leaf(w: Weights, token: np.ndarray) -> dict[str, np.ndarray]:
    return leaf_gates(w, leaf_product(w, token)["product"])


def internal_product(w: Weights, left_h: np.ndarray, right_h: np.ndarray) -> dict[str, np.ndarray]:
    return {"product": np.concatenate([left_h, right_h], 1) @ w["w"] + w["b"]}


def internal_gates(w: Weights, product: np.ndarray, left_c: np.ndarray, right_c: np.ndarray) -> dict[str, np.ndarray]:
    i, left, right, o, u = np.split(product, 5, 1)
    c = sigmoid(i) * np.tanh(u) + sigmoid(left) * left_c + sigmoid(right) * right_c
    h = sigmoid(o) * np.tanh(c)
    return {"h": h, "c": c, "probe": h[:, 0]}


def internal(
    w: Weights, left_h: np.ndarray, left_c: np.ndarray, right_h: np.ndarray, right_c: np.ndarray
) -> dict[str, np.ndarray]:
    return internal_gates(w, internal_product(w, left_h, right_h)["product"], left_c, right_c)


def weights(gates: int, inputs: int, seed: int) -> dict[str, np.ndarray]:
    """Random weights of a matrix product [inputs * HIDDEN, gates * HIDDEN] and an embedding."""
    draw = np.random.default_rng(seed)
    shapes = {
        "embed": (VOCABULARY, HIDDEN),
        "w": (inputs * HIDDEN, gates * HIDDEN),
        "b": (gates * HIDDEN,),
        "out": (HIDDEN, VOCABULARY),
    }
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def lstm_cell(**options: Any) -> Cell:
    return models.lstm_cell(HIDDEN, lstm, weights(4, 2, 1), **options)


def encoder_and_decoder(**options: Any) -> tuple[Cell, Cell]:
    first = models.encoder_cell(HIDDEN, encoder, weights(4, 2, 2), **options)
    return first, models.decoder_cell(HIDDEN, decoder, weights(4, 2, 3), **options)


def tree_cells(**options: Any) -> tuple[Cell, Cell]:
    first = models.leaf_cell(HIDDEN, leaf, weights(3, 1, 4), **options)
    return first, models.internal_cell(HIDDEN, internal, weights(5, 2, 5), **options)


def lstm_operators(**options: Any) -> Operators:
    return models.lstm_operators(HIDDEN, lstm_product, lstm_gates, weights(4, 2, 1), **options)


def tree_operators(**options: Any) -> tuple[Operators, Operators]:
    first = models.leaf_operators(HIDDEN, leaf_product, leaf_gates, weights(3, 1, 4), **options)
    return first, models.internal_operators(HIDDEN, internal_product, internal_gates, weights(5, 2, 5), **options)


class NumpyExecutor:
    """Runs rounds at once; every task through arenas, as a device does. Fails if a task breaks the contract."""

    def __init__(self, cells: Sequence[Cell], rows: int, worker: int = 0, others: Sequence[NumpyExecutor] = ()) -> None:
        self.cells = list(cells)
        self.layout = Layout(cells)
        self.arenas = {
            spec: np.full((rows * width, *spec.shape), np.nan if "float" in spec.dtype else -7, spec.dtype)
            for spec, width in self.layout.widths.items()
        }
        self.worker = worker
        self.others = others or [self]
        self.ran: list[tuple[str, int, int]] = []
        """By task: the cell's name, its nodes, its size."""
        self._done: deque[Returned] = deque()

    def submit(self, plan: Round) -> None:
        assert plan.worker == self.worker
        for move in plan.moves:
            for spec, width in self.layout.widths.items():
                where = (move.rows[:, None] * width + np.arange(width)).ravel()
                self.arenas[spec][where] = self.others[move.worker].arenas[spec][where]
        self._done.append([self._run(self.cells[plan.type], task) for task in plan.tasks])

    def _run(self, cell: Cell, task: Any) -> tuple[np.ndarray, ...]:
        nodes = len(task.rows)
        assert 0 < nodes <= task.size and task.size in cell.sizes
        assert len(np.unique(task.rows)) == nodes and (task.rows > 0).all()
        given: dict[str, np.ndarray] = {}
        for name, source in zip(cell.states, task.sources, strict=True):
            spec = cell.inputs[name]
            assert isinstance(spec, State)
            read = self.arenas[Spec(spec.shape, spec.dtype)][np.maximum(source, 0)]
            read[source < 0] = 0
            given[name] = read
        given.update(zip(cell.values, task.values, strict=True))
        made = cell.run(cell.weights, **given)
        for name, output in made.items():
            spec, place = self.layout.place(cell, name)
            assert not np.isnan(output).any() if "float" in spec.dtype else True
            self.arenas[spec][task.rows * self.layout.widths[spec] + place] = output
        self.ran.append((cell.name, nodes, task.size))
        return tuple(made[name] for name in cell.returned)

    def collect(self) -> Returned:
        return self._done.popleft()

    def close(self) -> None:
        self._done.clear()
