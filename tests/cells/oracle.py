"""Slow and plain counterparts of the planner of cells and its executor, and random graphs to try them on.

A `Recipe` is a graph written down twice: as the calls that build its CellGraph, and as a list of nodes. Everything here
works on the nodes, one object each, and knows nothing of rows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.cells.cell import Cell, Output, Spec, State, Value
from holdfast.cells.graph import ZEROS, CellGraph
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.plan import Layout, Returned, Round

PAIR, ONE = (2,), ()
SIZES = ((1, 2, 4), (4,), (1,), (2, 3, 7), (1, 2, 4, 8, 16), (3, 5))


# Cells of integer arithmetic.


def integer_cell(
    name: str, states: dict[str, tuple[int, ...]], outputs: dict[str, tuple[tuple[int, ...], bool]], **more: Any
) -> Cell:
    """A cell whose every output depends on all of its inputs. Outputs named y are from 0 to 4, so that chains stop."""
    inputs: dict[str, State | Value] = {"uid": Value((), "int64")}
    inputs |= {state: State(shape, "int64") for state, shape in states.items()}
    if more.pop("wide", False):
        inputs["wide"] = Value((3,), "int32")
    salt = sum(map(ord, name))

    def run(weights: Any, **given: np.ndarray) -> dict[str, np.ndarray]:
        mixed = np.full(len(given["uid"]), salt, np.int64)
        for key in inputs:
            for column in given[key].reshape(len(mixed), -1).T:
                mixed = (mixed * 31 + column) % 1_000_003
        found = {}
        for number, (key, (shape, _)) in enumerate(outputs.items()):
            one = (mixed * (2 * number + 7) + number) % (5 if key == "y" else 1_000_003)
            found[key] = np.stack([one, one * 3 + 1], 1) if shape else one
        return found

    return Cell(
        name, run, inputs, {key: Output(shape, "int64", back) for key, (shape, back) in outputs.items()}, **more
    )


def random_cells(rng: random.Random) -> list[Cell]:
    """An application: a chain's cell, a leaf, an internal node, and one that has everything."""
    kinds: list[tuple[str, dict[str, tuple[int, ...]], dict[str, tuple[tuple[int, ...], bool]]]] = [
        ("lstm", {"h": PAIR, "c": ONE}, {"h": (PAIR, False), "c": (ONE, False), "y": (ONE, True)}),
        ("leaf", {}, {"c": (ONE, False), "h": (PAIR, True)}),
        ("inner", {"left": PAIR, "right": PAIR, "lc": ONE}, {"h": (PAIR, True), "c": (ONE, False)}),
        ("decoder", {"context": PAIR, "h": PAIR}, {"y": (ONE, True), "h": (PAIR, False), "z": (PAIR, True)}),
    ]
    chosen = rng.sample(kinds, rng.randint(1, 4))
    return [
        integer_cell(*kind, priority=rng.randint(0, 2), sizes=rng.choice(SIZES), wide=rng.random() < 0.3)
        for kind in chosen
    ]


# Graphs.


@dataclass(eq=False)
class Node:
    """One cell of one request."""

    uid: int
    cell: Cell
    states: dict[str, tuple[Node, str]]
    """The node and output that each State input reads. A missing input is zeros."""
    wide: np.ndarray
    chain: int = -1
    """The number of the call of `chain` that made the node; -1 if none did."""
    stop: tuple[str, int] | None = None
    read_inside: bool = False
    """Whether its chain is read before its end, so that each of the chain's nodes is a row."""
    request: str = ""
    outputs: dict[str, np.ndarray] = field(default_factory=dict)

    def evaluate(self) -> None:
        """Compute its outputs from those of the nodes before it."""
        given = {"uid": np.array([self.uid]), "wide": self.wide[None]}
        for name in self.cell.states:
            if name in self.states:
                node, output = self.states[name]
                given[name] = node.outputs[output][None]
            else:
                given[name] = np.zeros((1, *self.cell.inputs[name].shape), np.int64)
        found = self.cell.run({}, **{name: given[name] for name in self.cell.inputs})
        self.outputs = {name: value[0] for name, value in found.items()}

    def stops(self) -> bool:
        return self.stop is not None and int(self.outputs[self.stop[0]]) == self.stop[1]


class Recipe:
    """A graph, as calls of CellGraph and as nodes."""

    def __init__(self, first_uid: int, rng: random.Random) -> None:
        self.graph = CellGraph()
        self.nodes: list[Node] = []
        self.results: dict[str, tuple[list[Node], str]] = {}
        self.results_expected: dict[str, np.ndarray] = {}
        self._first_uid, self._rng, self._chains = first_uid, rng, 0
        self._closed: set[Node] = set()
        self.last: set[str] = set()
        """Names of results of which only the last is asked for."""
        self.known: dict[str, np.ndarray] = {}
        """Results that are known without running any node."""

    def add(self, cell: Cell, count: int, states: dict[str, tuple[list[int], str]]) -> list[int]:
        made = self._nodes(cell, count)
        self.graph.add(cell, count, **self._values(cell, made), **{k: self._given(v) for k, v in states.items()})
        for index, node in enumerate(made):
            for name, (nodes, output) in states.items():
                if nodes[index] != ZEROS:
                    node.states[name] = self._read(self.nodes[nodes[index]]), output
        return list(range(len(self.nodes) - count, len(self.nodes)))

    def chain(
        self, cell: Cell, steps: int, states: dict[str, tuple[int, str]], stop: tuple[str, int] | None = None
    ) -> list[int]:
        first = len(self.nodes)
        made = self._nodes(cell, steps)
        self.graph.chain(cell, steps, stop=stop, **self._values(cell, made), **states)
        for index, node in enumerate(made):
            node.chain, node.stop = self._chains, stop
            for name, (given, output) in states.items():
                if given != ZEROS and (index == 0 or name not in cell.outputs):
                    node.states[name] = self._read(self.nodes[given]), output
            if index:
                node.states |= {name: (made[index - 1], name) for name in cell.states if name in cell.outputs}
        self._chains += 1
        if stop:
            self._closed.update(made)
        return list(range(first, first + steps))

    def result(self, name: str, nodes: list[int], output: str) -> None:
        self.graph.result(name, self._rng.choice([nodes, np.array(nodes)]), output)
        self.results[name] = [self.nodes[node] for node in nodes], output

    def readable(self, spec: Spec) -> list[tuple[int, str]]:
        """Outputs of this shape that another node may read."""
        return [
            (number, name)
            for number, node in enumerate(self.nodes)
            if node not in self._closed
            for name, output in node.cell.outputs.items()
            if (output.shape, output.dtype) == (spec.shape, spec.dtype)
        ]

    def expected(self) -> dict[str, np.ndarray]:
        """The results, by evaluating the nodes one by one."""
        for node in self.nodes:
            node.evaluate()
        found = {}
        for name, (nodes, output) in self.results.items():
            ended: set[int] = set()
            kept = []
            for node in nodes:
                if node.chain not in ended:
                    kept.append(node.outputs[output])
                    if node.stops():
                        ended.add(node.chain)
            found[name] = np.stack(kept)[-1:] if name in self.last else np.stack(kept)
        return found | self.known

    def rows(self) -> int:
        """Number of rows of the graph: one for a chain that is not read inside, else one for each node."""
        inside = {node.chain for node in self.nodes if node.read_inside}
        chains = {node.chain for node in self.nodes if node.chain != -1} - inside
        return len(chains) + sum(node.chain == -1 or node.chain in inside for node in self.nodes)

    def _nodes(self, cell: Cell, count: int) -> list[Node]:
        first = self._first_uid + len(self.nodes)
        wide = np.array([[self._rng.randrange(100) for _ in range(3)] for _ in range(count)], np.int32)
        made = [Node(first + index, cell, {}, wide[index]) for index in range(count)]
        self.nodes += made
        return made

    def _values(self, cell: Cell, made: list[Node]) -> dict[str, Any]:
        given: dict[str, Any] = {"uid": [node.uid for node in made]}
        if "wide" in cell.inputs:
            given["wide"] = np.stack([node.wide for node in made])
        return given

    def _given(self, state: tuple[list[int], str]) -> tuple[Sequence[int] | np.ndarray, str]:
        nodes, output = state
        return self._rng.choice([nodes, np.array(nodes), np.array(nodes, np.int32)]), output

    def _read(self, node: Node) -> Node:
        last = max(other.uid for other in self.nodes if other.chain == node.chain)
        if node.chain != -1 and node.uid != last:
            node.read_inside = True
        return node


def random_recipe(cells: Sequence[Cell], first_uid: int, rng: random.Random) -> Recipe:
    """A chain, a chain that stops, a tree, stacked chains, or any graph at all, as far as the cells allow it."""
    recipe = Recipe(first_uid, rng)
    by_name = {cell.name: cell for cell in cells}
    makers: list[Callable[[], None]] = [lambda: _any_graph(recipe, cells, rng)] * 3
    chained = [cell for cell in cells if cell.carried]
    if chained:
        makers += [lambda: _one_chain(recipe, rng.choice(chained), rng)] * 2
        makers.append(lambda: _stacked(recipe, chained, rng))
    if {"leaf", "inner"} <= by_name.keys():
        makers += [lambda: _tree(recipe, by_name["leaf"], by_name["inner"], rng)] * 3
    rng.choice(makers)()
    _name_results(recipe, rng)
    return recipe


def _one_chain(recipe: Recipe, cell: Cell, rng: random.Random) -> None:
    stop = ("y", rng.randrange(5)) if rng.random() < 0.4 else None
    recipe.chain(cell, rng.randint(1, 9), {}, stop)


def _stacked(recipe: Recipe, cells: Sequence[Cell], rng: random.Random) -> None:
    """Layers: each step reads the step before it, and the same step of the layer below where its cell can."""
    steps = rng.randint(1, 6)
    below: list[int] | None = None
    for _ in range(rng.randint(1, 3)):
        cell = rng.choice(cells)
        first = len(recipe.nodes)
        states = {name: ([ZEROS, *range(first, first + steps - 1)], name) for name in cell.carried}
        if below is not None and "context" in cell.states:
            states["context"] = below, "h"
        below = recipe.add(cell, steps, states)


def _tree(recipe: Recipe, leaf: Cell, inner: Cell, rng: random.Random) -> None:
    """A random binary tree; its internal nodes in one call, or one call for each."""
    ids = recipe.add(leaf, rng.randint(1, 9), {})
    pairs = []
    following = len(ids)
    while len(ids) > 1:
        at = rng.randrange(len(ids) - 1)
        pairs.append((ids[at], ids[at + 1]))
        ids[at : at + 2] = [following]
        following += 1
    left, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if rng.random() < 0.7 and pairs:
        recipe.add(inner, len(pairs), {"left": (left, "h"), "right": (right, "h"), "lc": (left, "c")})
    else:
        for one, other in pairs:
            recipe.add(inner, 1, {"left": ([one], "h"), "right": ([other], "h"), "lc": ([other], "c")})


def _any_graph(recipe: Recipe, cells: Sequence[Cell], rng: random.Random) -> None:
    for _ in range(rng.randint(1, 6)):
        cell = rng.choice(cells)
        count = rng.randint(1, 4)
        states: dict[str, Any] = {}
        as_chain = bool(cell.carried) and rng.random() < 0.5
        # The nodes of one call all read the same output: choose it first, then nodes that have it.
        for name in cell.states:
            readable = recipe.readable(cell.inputs[name])
            outputs = sorted({output for _, output in readable})
            if not outputs or rng.random() < 0.25:
                continue
            output = rng.choice(outputs)
            nodes = [node for node, given in readable if given == output]
            if as_chain:
                states[name] = (rng.choice([ZEROS, *nodes[-6:]]), output)
            else:
                first = len(recipe.nodes)
                own = cell.outputs.get(output)
                fits = own is not None and own.shape == cell.inputs[name].shape
                reach = [nodes[-6:] + (list(range(first, first + index)) if fits else []) for index in range(count)]
                states[name] = ([rng.choice([ZEROS, *each]) for each in reach], output)
        if as_chain:
            stop = ("y", rng.randrange(5)) if "y" in cell.outputs and rng.random() < 0.3 else None
            recipe.chain(cell, count, states, stop)
        else:
            recipe.add(cell, count, states)


def random_batch(cells: Sequence[Cell], first_uid: int, rng: random.Random) -> tuple[list[Recipe], GraphBatch]:
    """Requests with the same blocks, of their own numbers of nodes and with their own edges, and the batch of them."""
    recipes = [Recipe(first_uid + 100 * number, rng) for number in range(rng.randint(1, 6))]
    batch = GraphBatch(len(recipes))
    blocks: list[tuple[Cell, list[list[int]]]] = []
    for _ in range(rng.randint(1, 4)):
        cell = rng.choice(cells)
        as_chain = bool(cell.carried) and rng.random() < 0.5
        stop = ("y", rng.randrange(5)) if as_chain and "y" in cell.outputs and rng.random() < 0.4 else None
        least = 1 if as_chain or not blocks else rng.choice([0, 1])
        counts = [rng.randint(least, 4) for _ in recipes]
        chosen: dict[str, str] = {}
        for name in cell.states:
            outputs = sorted({output for _, output in _ends(recipes[0], cell.inputs[name])})
            if outputs and rng.random() < 0.75:
                chosen[name] = rng.choice(outputs)
        read: dict[str, list[int]] = {name: [] for name in chosen}
        made: list[list[int]] = []
        for recipe, count in zip(recipes, counts, strict=True):
            states: dict[str, Any] = {}
            for name, output in chosen.items():
                nodes = [node for node, given in _ends(recipe, cell.inputs[name]) if given == output]
                if as_chain:
                    states[name] = rng.choice([ZEROS, *nodes]), output
                    read[name].append(states[name][0])
                else:
                    first, own = len(recipe.nodes), cell.outputs.get(output)
                    fits = own is not None and own.shape == cell.inputs[name].shape
                    reach = [nodes + (list(range(first, first + at)) if fits else []) for at in range(count)]
                    states[name] = [rng.choice([ZEROS, *each]) for each in reach], output
                    read[name] += states[name][0]
            if as_chain:
                made.append(recipe.chain(cell, count, states, stop))
            else:
                made.append(recipe.add(cell, count, states) if count else [])
        nodes_made = [recipe.nodes[at] for recipe, each in zip(recipes, made, strict=True) for at in each]
        given: dict[str, Any] = {"uid": [node.uid for node in nodes_made]}
        if "wide" in cell.inputs:
            given["wide"] = np.array([node.wide for node in nodes_made], np.int32).reshape(-1, 3)
        given |= {name: (np.array(nodes), chosen[name]) for name, nodes in read.items()}
        if as_chain:
            batch.chain(cell, counts, stop=stop, **given)
        else:
            batch.add(cell, counts, **given)
        blocks.append((cell, made))
    for name in "pqr"[: rng.randint(0, 3)]:
        number = rng.choice([at for at, (_, made) in enumerate(blocks) if all(made)])
        cell, made = blocks[number]
        output, last = rng.choice(cell.returned), rng.random() < 0.4
        batch.result(name, number, output, last=last)
        for recipe, each in zip(recipes, made, strict=True):
            recipe.result(name, each, output)
            recipe.last |= {name} if last else set()
    if rng.random() < 0.3:
        batch.constant("known", [np.array([recipe.nodes[0].uid]) for recipe in recipes])
        for recipe in recipes:
            recipe.known = {"known": np.array([recipe.nodes[0].uid])}
    return recipes, batch


def _ends(recipe: Recipe, spec: Spec) -> list[tuple[int, str]]:
    """Outputs of this shape that another node may read without cutting a chain."""
    nodes = recipe.nodes
    return [
        (at, output)
        for at, output in recipe.readable(spec)
        if nodes[at].chain == -1 or at + 1 == len(nodes) or nodes[at + 1].chain != nodes[at].chain
    ]


def _name_results(recipe: Recipe, rng: random.Random) -> None:
    inside = {node.chain for node in recipe.nodes if node.read_inside}
    runs: list[list[int]] = []
    for number, node in enumerate(recipe.nodes):
        if runs and node.chain != -1 and node.chain not in inside and recipe.nodes[runs[-1][0]].chain == node.chain:
            runs[-1].append(number)
        else:
            runs.append([number])
    for name in "pqr"[: rng.randint(0, 3)]:
        output = rng.choice(["y", "h", "z"])
        chosen = [
            run
            for run in rng.sample(runs, rng.randint(1, len(runs)))
            if output in recipe.nodes[run[0]].cell.returned
            and recipe.nodes[run[0]].cell.outputs[output].shape == (() if output == "y" else (2,))
        ]
        if chosen:
            recipe.result(name, [node for run in chosen for node in run], output)


# Algorithm 1, line by line.


@dataclass(eq=False)
class CellType:
    number: int
    priority: int
    sizes: tuple[int, ...]
    subgraphs: list[Subgraph] = field(default_factory=list)
    running_tasks: int = 0

    def num_ready_nodes(self) -> int:
        return sum(len(subgraph.ready()) for subgraph in self.subgraphs)


@dataclass(eq=False)
class Subgraph:
    type: CellType
    request: Request
    nodes: list[Node]
    needs: set[Subgraph] = field(default_factory=set)
    pinned: int | None = None
    in_flight: int = 0
    submitted: set[Node] = field(default_factory=set)
    completed: set[Node] = field(default_factory=set)
    dropped: set[Node] = field(default_factory=set)
    """Steps of a chain after the one at which it stopped."""

    def ended(self) -> bool:
        return len(self.completed | self.dropped) == len(self.nodes)

    def ready(self) -> list[Node]:
        """Nodes that are not submitted but whose inputs are, in the order of the graph."""
        own = set(self.nodes)
        return [
            node
            for node in self.nodes
            if node not in self.submitted
            and node not in self.dropped
            and all(given in self.submitted for given, _ in node.states.values() if given in own)
        ]


@dataclass(eq=False)
class Request:
    id: str
    recipe: Recipe
    subgraphs: list[Subgraph] = field(default_factory=list)


@dataclass(eq=False)
class Submitted:
    """A round in flight."""

    type: CellType
    tasks: list[list[Node]]


class Oracle:
    """The planner as objects: Algorithm 1, and the decisions that the planner's docstring states."""

    def __init__(self, cells: Sequence[Cell], workers: int, max_tasks: int, capacity: int) -> None:
        self.types = {cell: CellType(number, cell.priority, cell.sizes) for number, cell in enumerate(cells)}
        self.workers, self.max_tasks = workers, max_tasks
        self.free_rows = capacity - 1
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.in_flight: list[deque[Submitted]] = [deque() for _ in range(workers)]
        self.holding: list[tuple[int, set[Submitted]]] = []
        """Numbers of rows, each with the rounds that must complete before the rows are free."""
        self.subgraph: dict[Node, Subgraph] = {}

    def add(self, id: str, recipe: Recipe) -> None:
        self.waiting.append(Request(id, recipe))

    def abort(self, id: str) -> None:
        self.waiting = [request for request in self.waiting if request.id != id]
        for request in [request for request in self.running if request.id == id]:
            self.running.remove(request)
            for subgraph in request.subgraphs:
                if subgraph in subgraph.type.subgraphs:
                    subgraph.type.subgraphs.remove(subgraph)
            self._hold(request)

    def schedule(self, worker: int) -> tuple[CellType, list[list[Node]]] | None:
        """Lines 4 to 11. If nothing can be formed of the chosen type, the next best one is tried."""
        self._admit()
        types = [ct for ct in self.types.values() if ct.num_ready_nodes() > 0]
        s = [ct for ct in types if ct.num_ready_nodes() >= max(ct.sizes)]
        if not s:
            s = [ct for ct in types if ct.running_tasks == 0]
        if not s:
            s = types
        others = [ct for ct in types if ct not in s]
        for ct in sorted(s, key=lambda ct: -ct.priority) + sorted(others, key=lambda ct: -ct.priority):
            tasks = self._batch(ct, worker)
            if tasks:
                self.in_flight[worker].append(Submitted(ct, tasks))
                return ct, tasks
        return None

    def _batch(self, ct: CellType, worker: int) -> list[list[Node]]:
        """Lines 12 to 23."""
        tasks: list[list[Node]] = []
        while len(tasks) < self.max_tasks:
            batch = self._form_batched_task(ct, worker)
            if batch and (len(batch) >= min(ct.sizes) or not tasks):
                tasks.append(batch)
                ct.running_tasks += 1
                for node in batch:
                    subgraph = self.subgraph[node]
                    subgraph.submitted.add(node)
                    subgraph.in_flight += 1
                    subgraph.pinned = worker
            else:
                break
        return tasks

    def _form_batched_task(self, ct: CellType, worker: int) -> list[Node]:
        """Lines 24 to 32."""
        batch: list[Node] = []
        for subgraph in ct.subgraphs:
            if subgraph.pinned in (None, worker):
                for node in subgraph.ready():
                    batch.append(node)
                    if len(batch) == max(ct.sizes):
                        return batch
        return batch

    def update(self, worker: int) -> list[str]:
        """Complete the worker's oldest round. Returns the requests that end."""
        done = self.in_flight[worker].popleft()
        ended = []
        for batch in done.tasks:
            done.type.running_tasks -= 1
            for node in batch:
                subgraph = self.subgraph[node]
                subgraph.in_flight -= 1
                if subgraph.in_flight == 0:
                    subgraph.pinned = None
                if subgraph.request in self.running and node not in subgraph.dropped:
                    subgraph.completed.add(node)
                    if node.stops():
                        subgraph.dropped |= {n for n in subgraph.nodes if n.chain == node.chain and n.uid > node.uid}
        released = []
        for request in list(self.running):
            for subgraph in request.subgraphs:
                if subgraph in subgraph.type.subgraphs and subgraph.ended():
                    subgraph.type.subgraphs.remove(subgraph)
                    for other in request.subgraphs:
                        if subgraph in other.needs:
                            other.needs.remove(subgraph)
                            if not other.needs:
                                released.append(other)
            if all(subgraph.ended() for subgraph in request.subgraphs):
                self.running.remove(request)
                ended.append(request.id)
                self._hold(request)
        for request in self.running:
            for subgraph in request.subgraphs:
                if subgraph in released:
                    subgraph.type.subgraphs.append(subgraph)
        for holding in self.holding:
            holding[1].discard(done)
        self._free()
        return ended

    def _admit(self) -> None:
        while self.waiting and self.waiting[0].recipe.rows() <= self.free_rows:
            request = self.waiting.pop(0)
            self.free_rows -= request.recipe.rows()
            self.running.append(request)
            request.subgraphs = self._split(request)
            for subgraph in request.subgraphs:
                if not subgraph.needs:
                    subgraph.type.subgraphs.append(subgraph)

    def _hold(self, request: Request) -> None:
        """Free the request's rows, but not while dropped steps may be in flight."""
        early = any(subgraph.dropped or not subgraph.ended() for subgraph in request.subgraphs)
        rounds = {submitted for queue in self.in_flight for submitted in queue} if early else set()
        self.holding.append((request.recipe.rows(), rounds))
        self._free()

    def _free(self) -> None:
        self.free_rows += sum(rows for rows, rounds in self.holding if not rounds)
        self.holding = [(rows, rounds) for rows, rounds in self.holding if rounds]

    def _split(self, request: Request) -> list[Subgraph]:
        subgraphs = []
        for nodes in split(request.recipe.nodes):
            subgraphs.append(Subgraph(self.types[nodes[0].cell], request, nodes))
            self.subgraph |= dict.fromkeys(nodes, subgraphs[-1])
        for node in request.recipe.nodes:
            own = self.subgraph[node]
            own.needs |= {self.subgraph[producer] for producer, _ in node.states.values()} - {own}
        return subgraphs


def split(nodes: Sequence[Node]) -> list[list[Node]]:
    """Sets of connected nodes of one type.

    If types read one another in a circle, the nodes of a set must also have equally many changes of type before them.
    """
    circle = _in_a_circle(nodes)
    changes: dict[Node, int] = {}
    neighbours: dict[Node, set[Node]] = {node: set() for node in nodes}
    for node in nodes:
        given = [producer for producer, _ in node.states.values()]
        changes[node] = max((changes[each] + (each.cell is not node.cell) for each in given), default=0)
        for each in given:
            if each.cell is node.cell and (changes[each] == changes[node] or not circle):
                neighbours[node].add(each)
                neighbours[each].add(node)
    groups: list[list[Node]] = []
    seen: set[Node] = set()
    for node in nodes:
        if node not in seen:
            groups.append([])
            reached = [node]
            while reached:
                each = reached.pop()
                if each not in seen:
                    seen.add(each)
                    groups[-1].append(each)
                    reached += neighbours[each]
            groups[-1].sort(key=lambda each: each.uid)
    return groups


def _in_a_circle(nodes: Sequence[Node]) -> bool:
    reads: dict[Cell, set[Cell]] = {node.cell: set() for node in nodes}
    for node in nodes:
        reads[node.cell] |= {given.cell for given, _ in node.states.values()} - {node.cell}
    for cell in reads:
        reached, left = set(), list(reads[cell])
        while left:
            if (other := left.pop()) not in reached:
                reached.add(other)
                left += reads[other]
        if cell in reached:
            return True
    return False


# An executor over NumPy arrays.


class ReferenceExecutor:
    """Runs rounds over arenas, as a device would: in order for each worker, at any time before they are collected."""

    def __init__(self, cells: Sequence[Cell], workers: int, capacity: int, rng: random.Random) -> None:
        self._cells, self._layout, self._rng = cells, Layout(cells), rng
        # Memory starts with numbers that are not zero, so that reading a row that nobody wrote gives a wrong result.
        self._arenas = [
            {spec: np.full((capacity * width, *spec.shape), -777, spec.dtype) for spec, width in self._widths.items()}
            for _ in range(workers)
        ]
        self._queues: list[deque[Round]] = [deque() for _ in range(workers)]
        self._results: list[deque[Returned]] = [deque() for _ in range(workers)]

    @property
    def _widths(self) -> dict[Spec, int]:
        return self._layout.widths

    def submit(self, plan: Round) -> None:
        self._queues[plan.worker].append(plan)
        if self._rng.random() < 0.5:
            self._run_all(plan.worker)

    def collect(self, worker: int) -> Returned:
        self._run_all(worker)
        return self._results[worker].popleft()

    def _run_all(self, worker: int) -> None:
        while self._queues[worker]:
            self._results[worker].append(self._run(self._queues[worker].popleft()))

    def _run(self, plan: Round) -> Returned:
        arenas, cell = self._arenas[plan.worker], self._cells[plan.type]
        for move in plan.moves:
            for spec, width in self._widths.items():
                at = (move.rows[:, None] * width + np.arange(width)).reshape(-1)
                arenas[spec][at] = self._arenas[move.worker][spec][at]
        found: Returned = []
        for task in plan.tasks:
            given = dict(zip(cell.values, task.values, strict=True))
            for name, source in zip(cell.states, task.sources, strict=True):
                spec = Spec(cell.inputs[name].shape, cell.inputs[name].dtype)
                empty = (source < 0).reshape(-1, *[1] * len(spec.shape))
                arena = arenas.get(spec, np.zeros((1, *spec.shape), spec.dtype))
                given[name] = np.where(empty, 0, arena[np.maximum(source, 0)])
            outputs = cell.run({}, **given)
            for name, output in outputs.items():
                spec, place = self._layout.place(cell, name)
                arenas[spec][task.rows * self._widths[spec] + place] = output
            found.append(tuple(outputs[name] for name in cell.returned))
        return found
