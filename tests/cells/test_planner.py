"""The planner of cells, against Algorithm 1 line by line and a recursive evaluation of each graph."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import pytest

from holdfast.cells import algorithm
from holdfast.cells import planner as planner_module
from holdfast.cells.cell import Cell
from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.plan import CellOutput, CellRequest, CellRequests, Returned, Round
from holdfast.cells.planner import CellPlanner
from tests.cells.oracle import (
    ONE,
    PAIR,
    Node,
    Oracle,
    Recipe,
    ReferenceExecutor,
    integer_cell,
    random_batch,
    random_cells,
    random_recipe,
    split,
)
from tests.long import then_long


class Watch:
    """The conditions that hold for every node in any schedule."""

    def __init__(self, cells: Sequence[Cell], workers: int) -> None:
        self.cells = cells
        self.in_flight: list[deque[tuple[Round, list[list[Node]]]]] = [deque() for _ in range(workers)]
        self.submitted = 0
        self._node: dict[int, Node] = {}
        self._worker: dict[Node, int] = {}
        self._completed: set[Node] = set()
        self._subgraph: dict[Node, int] = {}
        self._pinned: dict[int, Counter[int]] = {}

    def add(self, recipe: Recipe) -> None:
        for nodes in split(recipe.nodes):
            self._pinned[nodes[0].uid] = Counter()
            self._subgraph |= dict.fromkeys(nodes, nodes[0].uid)
        self._node |= {node.uid: node for node in recipe.nodes}

    def submit(self, plan: Round) -> list[list[Node]]:
        """Check a round. Returns its nodes."""
        cell, worker = self.cells[plan.type], plan.worker
        tasks = []
        for task in plan.tasks:
            nodes = [self._node[uid] for uid in task.values[cell.values.index("uid")].tolist()]
            assert 0 < len(nodes) <= task.size == min(size for size in cell.sizes if size >= len(nodes))
            assert len(set(task.rows.tolist())) == len(nodes) and task.rows.min() > 0
            assert task.rows.dtype == task.sources.dtype == np.int32 and task.sources.shape == (
                len(cell.states),
                len(nodes),
            )
            if "wide" in cell.values:
                wide = task.values[cell.values.index("wide")]
                np.testing.assert_array_equal(wide, np.stack([node.wide for node in nodes]))
            for node in nodes:
                assert node.cell is cell
                assert node not in self._worker, "a node runs twice"
                for given, _ in node.states.values():
                    assert given in self._completed or self._worker.get(given) == worker, "a node runs before its input"
                pinned = self._pinned[self._subgraph[node]]
                assert not pinned.total() or set(+pinned) == {worker}, "a subgraph runs on two workers"
            for node in nodes:
                self._worker[node] = worker
                self._pinned[self._subgraph[node]][worker] += 1
            self.submitted += len(nodes)
            tasks.append(nodes)
        for move in plan.moves:
            assert move.worker != worker and move.rows.dtype == np.int32
        self.in_flight[worker].append((plan, tasks))
        return tasks

    def complete(self, worker: int) -> Round:
        """The worker's oldest round, which has completed."""
        plan, tasks = self.in_flight[worker].popleft()
        for node in [node for task in tasks for node in task]:
            self._completed.add(node)
            self._pinned[self._subgraph[node]][worker] -= 1
        return plan


class History:
    """A random history of one planner, compared with the oracle."""

    def __init__(self, seed: int, *, with_oracle: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.workers = rng.randint(1, 3)
        self.max_tasks = rng.choice([1, 2, 5])
        self.capacity = rng.choice([40, 200, 4000])
        self.cells = random_cells(rng)
        self.planner = CellPlanner(self.cells, workers=self.workers, max_tasks=self.max_tasks, capacity=self.capacity)
        self.oracle = Oracle(self.cells, self.workers, self.max_tasks, self.capacity) if with_oracle else None
        self.executor = ReferenceExecutor(self.cells, self.workers, self.capacity, rng)
        self.watch = Watch(self.cells, self.workers)
        self.recipes: dict[str, Recipe] = {}
        self.ended = self.aborted = self.uids = 0

    def play(self, requests: int) -> None:
        rng, depth, busy, lost = self.rng, self.rng.randint(1, 3), self.rng.random(), self.rng.choice([0, 0.1, 0.5])
        added = 0
        while added < requests or self.planner.has_work() or any(self.watch.in_flight):
            if added < requests and rng.random() < busy:
                for _ in range(rng.choice([1, 1, 2, 8])):
                    added += self.add()
            if self.recipes and rng.random() < lost:
                self.abort(rng.choice(list(self.recipes)))
            worker = rng.randrange(self.workers)
            if len(self.watch.in_flight[worker]) < depth and rng.random() < 0.7:
                self.schedule(worker)
            elif self.watch.in_flight[worker]:
                self.update(worker)
        assert not self.recipes and self.ended + self.aborted == added
        check_nothing_is_held(self.planner)

    def add(self) -> int:
        if self.rng.random() < 0.3:
            return self.add_batch()
        recipe = random_recipe(self.cells, self.uids, self.rng)
        self.uids += len(recipe.nodes)
        id = self.new_id([])
        if recipe.rows() >= self.capacity:
            with pytest.raises(ValueError, match=f"at most {self.capacity - 1} fit"):
                self.planner.add(CellRequest(id, recipe.graph))
            return 0
        self.planner.add(CellRequest(id, recipe.graph))
        self.note(id, recipe)
        return 1

    def add_batch(self) -> int:
        recipes, batch = random_batch(self.cells, self.uids, self.rng)
        self.uids += 100 * len(recipes)
        ids: list[str] = []
        for _ in recipes:
            ids.append(self.new_id(ids))
        if max(recipe.rows() for recipe in recipes) >= self.capacity:
            with pytest.raises(ValueError, match=f"at most {self.capacity - 1} fit"):
                self.planner.add(CellRequests(ids, batch))
            return 0
        self.planner.add(CellRequests(ids, batch))
        for id, recipe in zip(ids, recipes, strict=True):
            self.note(id, recipe)
        return len(ids)

    def new_id(self, taken: list[str]) -> str:
        """An id that no request has. Ids of ended requests are used again, also while their nodes are in flight."""
        first = self.rng.choice([0, 1000])
        return next(str(n) for n in range(first, 9999) if str(n) not in self.recipes and str(n) not in taken)

    def note(self, id: str, recipe: Recipe) -> None:
        if self.oracle:
            self.oracle.add(id, recipe)
        self.watch.add(recipe)
        self.recipes[id] = recipe
        recipe.results_expected = recipe.expected()

    def abort(self, id: str) -> None:
        self.planner.abort(id)
        if self.oracle:
            self.oracle.abort(id)
        del self.recipes[id]
        self.aborted += 1

    def schedule(self, worker: int) -> None:
        plan = self.planner.worker(worker).schedule(0.0)
        tasks = []
        if plan is not None:
            assert plan.worker == worker and 0 < len(plan.tasks) <= self.max_tasks
            tasks = self.watch.submit(plan)
            alive = {node for recipe in self.recipes.values() for node in recipe.nodes}
            assert alive.issuperset(node for task in tasks for node in task), "a node of an aborted request runs"
            self.executor.submit(plan)
        if self.oracle:
            wanted = self.oracle.schedule(worker)
            assert (plan and plan.type) == (wanted and wanted[0].number)
            assert [[node.uid for node in task] for task in tasks] == [
                [node.uid for node in task] for task in (wanted[1] if wanted else [])
            ]

    def update(self, worker: int) -> None:
        plan = self.watch.complete(worker)
        outputs = self.planner.worker(worker).update(plan, self.executor.collect(worker), 0.0)
        if self.oracle:
            assert [output.request_id for output in outputs] == self.oracle.update(worker)
        for output in outputs:
            results = self.recipes.pop(output.request_id).results_expected
            assert output.results.keys() == results.keys()
            for name, value in results.items():
                np.testing.assert_array_equal(output.results[name], value)
            self.ended += 1


def check_nothing_is_held(planner: CellPlanner) -> None:
    stats = planner.stats()
    assert stats.waiting == stats.running == stats.rows_used == 0
    assert set(stats.ready) == set(stats.tasks) == {0}
    table, numbers = planner._table, planner._numbers
    assert sorted(numbers.take(numbers.free).tolist()) == list(range(1, planner._capacity))
    memory = planner._memory
    assert [ranges.held for ranges in (*memory.ranges, memory.links)] == [0] * (len(planner._kinds) + 1)
    assert not planner._where and not planner._lots and not memory._batches and not memory.left.any()
    assert sorted(memory._free) == list(range(planner._capacity))
    assert not any(held[:].any() for held in (planner._results._ids, planner._results._own))
    assert not planner._retired and not any(planner._sent)
    assert not table["lost"].any() and (table["pinned"] == -1).all()


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_plans_are_those_of_algorithm_1_and_results_those_of_an_evaluation(first: int) -> None:
    for seed in range(first, first + 20):
        history = History(seed, with_oracle=True)
        history.play(12)
        assert history.watch.submitted


@pytest.mark.slow
@pytest.mark.parametrize("first", then_long(1, range(10_000, 10_850, 85)))
def test_nothing_runs_too_early_or_twice_and_all_is_freed_over_10_000_graphs(first: int) -> None:
    for seed in range(first, first + 85):
        History(seed, with_oracle=False).play(12)


# Statements and figures of the paper.

LSTM = ("lstm", {"h": PAIR}, {"h": (PAIR, False), "y": (ONE, True)})
LEAF = ("leaf", {}, {"h": (PAIR, True)})
INNER = ("inner", {"left": PAIR, "right": PAIR}, {"h": (PAIR, True)})


class Driver:
    """One planner, and a worker that completes each round when `update` is called."""

    def __init__(self, cells: list[Cell], **more: int) -> None:
        self.cells = cells
        self.planner = CellPlanner(cells, **more)
        self.executor = ReferenceExecutor(cells, more.get("workers", 1), 4000, random.Random(0))
        self.rounds: list[deque[Round]] = [deque() for _ in range(more.get("workers", 1))]

    def add(self, id: str, graph: CellGraph) -> None:
        self.planner.add(CellRequest(id, graph))

    def schedule(self, worker: int = 0, now: float = 0.0) -> list[list[int]] | None:
        """Plan a round. Returns the uids of its tasks' nodes."""
        plan = self.planner.schedule(worker, now)
        if plan is None:
            return None
        self.rounds[worker].append(plan)
        self.executor.submit(plan)
        self.type = self.cells[plan.type].name
        return [task.values[0].tolist() for task in plan.tasks]

    def update(self, worker: int = 0) -> list[str]:
        return [output.request_id for output in self.outputs(worker)]

    def outputs(self, worker: int = 0) -> list[CellOutput]:
        return self.planner.update(self.rounds[worker].popleft(), self.executor.collect(worker))


def chain(cell: Cell, first: int, steps: int, **more: object) -> CellGraph:
    graph = CellGraph()
    ids = graph.chain(cell, steps, uid=np.arange(first, first + steps), **more)  # type: ignore[arg-type]
    graph.result("y", ids, "y")
    return graph


def complete_tree(leaf: Cell, inner: Cell, leaves: int) -> CellGraph:
    graph = CellGraph()
    level = list(graph.add(leaf, leaves, uid=np.arange(leaves)))
    while len(level) > 1:
        left, right = level[::2], level[1::2]
        uids = np.arange(graph.nodes, graph.nodes + len(left))
        level = list(graph.add(inner, len(left), uid=uids, left=(left, "h"), right=(right, "h")))
    graph.result("root", level, "h")
    return graph


def test_requests_join_and_leave_at_each_step_as_in_figure_2_5() -> None:
    lstm = integer_cell(*LSTM, sizes=(1, 2, 4))
    driver = Driver([lstm], max_tasks=1)
    for number, steps in ((1, 2), (2, 3), (3, 3), (4, 5)):
        driver.add(f"req{number}", chain(lstm, 100 * number, steps))
    assert driver.schedule() == [[100, 200, 300, 400]]
    assert driver.update() == []
    driver.add("req5", chain(lstm, 500, 7))
    assert driver.schedule() == [[101, 201, 301, 401]]
    assert driver.update() == ["req1"], "at 2"
    assert driver.schedule() == [[202, 302, 402, 500]], "req5 joins the third task"
    driver.add("req6", chain(lstm, 600, 3))
    driver.add("req7", chain(lstm, 700, 2))
    driver.add("req8", chain(lstm, 800, 1))
    assert driver.update() == ["req2", "req3"], "at 3"
    assert driver.schedule() == [[403, 501, 600, 700]], "req6 and req7 join the fourth"
    assert driver.update() == []
    assert driver.schedule() == [[404, 502, 601, 701]]
    assert driver.update() == ["req4", "req7"], "at 5, when graph batching ends its first batch"
    assert driver.schedule() == [[503, 602, 800]]
    assert driver.update() == ["req6", "req8"]
    for step in range(4, 7):
        assert driver.schedule() == [[500 + step]]
        assert driver.update() == (["req5"] if step == 6 else []), "at 9, where graph batching takes until 12"


def test_a_tree_of_16_leaves_runs_level_by_level_in_successive_tasks() -> None:
    leaf, inner = integer_cell(*LEAF, sizes=(1, 64)), integer_cell(*INNER, sizes=(1, 64), priority=1)
    driver = Driver([leaf, inner])
    driver.add("tree", complete_tree(leaf, inner, 16))
    assert driver.schedule() == [list(range(16))]
    assert driver.schedule() is None, "the internal nodes wait for all leaves"
    assert driver.update() == []
    levels = [list(range(16, 24)), list(range(24, 28)), [28, 29], [30]]
    assert driver.schedule() == levels
    assert driver.update() == ["tree"]


def test_leaves_of_several_trees_share_a_task() -> None:
    leaf, inner = integer_cell(*LEAF, sizes=(4,)), integer_cell(*INNER, sizes=(4,))
    driver = Driver([leaf, inner])
    driver.add("one", complete_tree(leaf, inner, 2))
    driver.add("other", complete_tree(leaf, inner, 2))
    assert driver.schedule() == [[0, 1, 0, 1]]


def test_five_steps_of_a_chain_are_planned_in_one_call() -> None:
    lstm = integer_cell(*LSTM)
    driver = Driver([lstm])
    driver.add("a", chain(lstm, 0, 7))
    assert driver.schedule() == [[0], [1], [2], [3], [4]]
    assert driver.schedule() == [[5], [6]]
    assert driver.update() == [] and driver.update() == ["a"]


def test_a_type_with_a_full_batch_runs_before_one_of_higher_priority() -> None:
    lstm, leaf = integer_cell(*LSTM, sizes=(1, 2)), integer_cell(*LEAF, sizes=(1, 2), priority=1)
    driver = Driver([lstm, leaf], max_tasks=1)
    graph = CellGraph()
    graph.add(leaf, 1, uid=[7])
    driver.add("leaf", graph)
    for number in range(3):
        driver.add(f"chain{number}", chain(lstm, 10 * number, 1))
    assert driver.schedule() == [[0, 10]], "(a): 3 nodes of lstm are at least its largest size"
    assert driver.schedule() == [[7]], "(b): 1 node each; leaf has no task running"
    assert driver.schedule() == [[20]], "(c): only lstm has a ready node, though it has a task running"


def test_the_type_of_highest_priority_runs_first_when_both_have_full_batches() -> None:
    lstm, leaf = integer_cell(*LSTM, sizes=(1, 2)), integer_cell(*LEAF, sizes=(1, 2), priority=1)
    driver = Driver([lstm, leaf], max_tasks=1)
    for number in range(2):
        driver.add(f"chain{number}", chain(lstm, 10 * number, 1))
    graph = CellGraph()
    graph.add(leaf, 2, uid=[7, 8])
    driver.add("leaf", graph)
    assert driver.schedule() == [[7, 8]]


def test_a_type_without_running_tasks_goes_before_one_of_higher_priority_that_has_some() -> None:
    lstm, leaf = integer_cell(*LSTM, sizes=(1, 2)), integer_cell(*LEAF, sizes=(1, 2), priority=1)
    driver = Driver([lstm, leaf], max_tasks=1)
    graph = CellGraph()
    graph.add(leaf, 3, uid=[7, 8, 9])
    driver.add("leaf", graph)
    driver.add("chain", chain(lstm, 0, 1))
    assert driver.schedule() == [[7, 8]]
    assert driver.schedule() == [[0]]
    assert driver.schedule() == [[9]]


def test_a_task_below_the_smallest_size_is_submitted_only_first() -> None:
    lstm = integer_cell(*LSTM, sizes=(2, 4))
    driver = Driver([lstm])
    for number, steps in enumerate((4, 2, 1)):
        driver.add(str(number), chain(lstm, 10 * number, steps))
    assert driver.schedule() == [[0, 10, 20], [1, 11]], "the third task would have one node"
    assert [task.size for task in driver.rounds[0][0].tasks] == [4, 2]
    assert driver.schedule() == [[2]], "alone, but the first"
    assert driver.rounds[0][1].tasks[0].size == 2


def test_sizes_given_by_type_win_over_those_of_the_cells() -> None:
    lstm = integer_cell(*LSTM, sizes=(1, 2))
    planner = CellPlanner([lstm], sizes=((2, 3, 8),))
    for number, steps in enumerate((3, 1, 1, 1)):
        planner.add(CellRequest(str(number), chain(lstm, 10 * number, steps)))
    plan = planner.schedule(0, 0.0)
    assert plan is not None and [(len(task.rows), task.size) for task in plan.tasks] == [(4, 8)], "the next has one"
    with pytest.raises(ValueError, match="sizes are given for 2 types of cell; there are 1"):
        CellPlanner([lstm], sizes=((1,), (1,)))


def test_a_subgraph_stays_on_its_worker_while_it_is_in_flight_and_may_move_then() -> None:
    lstm = integer_cell(*LSTM)
    driver = Driver([lstm], workers=2, max_tasks=2)
    driver.add("a", chain(lstm, 0, 6))
    assert driver.schedule(0) == [[0], [1]]
    assert driver.schedule(1) is None
    assert driver.schedule(0) == [[2], [3]]
    assert driver.update(0) == [] and driver.schedule(1) is None, "its second round is in flight"
    assert driver.update(0) == []
    assert driver.schedule(1) == [[4], [5]]
    [move] = driver.rounds[1][0].moves
    assert move.worker == 0 and move.rows.tolist() == driver.rounds[1][0].tasks[0].rows.tolist()
    assert driver.update(1) == ["a"]


def test_state_is_copied_to_a_worker_once() -> None:
    leaf, inner = integer_cell(*LEAF), integer_cell(*INNER)
    driver = Driver([leaf, inner], workers=2)
    graph = CellGraph()
    leaves = graph.add(leaf, 2, uid=[0, 1])
    # Both internal nodes read the first leaf; one of them with both inputs.
    first = graph.add(inner, 1, uid=[2], left=(leaves[:1], "h"), right=(leaves[:1], "h"))
    between = graph.add(leaf, 1, uid=[3])
    graph.add(inner, 1, uid=[4], left=(leaves[:1], "h"), right=(between, "h"))
    graph.result("all", [*leaves, *first, *between], "h")
    driver.add("a", graph)
    assert driver.schedule(0) == [[0, 1, 3]] and driver.update(0) == []
    assert driver.schedule(1) == [[2, 4]]
    [move] = driver.rounds[1][0].moves
    read, _, other = algorithm.rows_of(driver.planner._table, np.array([driver.planner._where["a"]]))[
        [0, 1, 3]
    ].tolist()
    assert move.worker == 0 and sorted(move.rows.tolist()) == sorted([read, other])
    assert driver.update(1) == ["a"]


def test_another_type_runs_when_all_ready_nodes_of_the_best_are_pinned_elsewhere() -> None:
    lstm, leaf = integer_cell(*LSTM, priority=1), integer_cell(*LEAF)
    driver = Driver([lstm, leaf], workers=2, max_tasks=1)
    driver.add("chain", chain(lstm, 0, 3))
    assert driver.schedule(0) == [[0]]
    graph = CellGraph()
    graph.add(leaf, 1, uid=[9])
    graph.chain(lstm, 1, uid=[10])
    driver.add("both", graph)
    assert driver.schedule(0) == [[9]]
    assert driver.schedule(1) == [[10]]
    assert driver.schedule(1) is None


def test_a_chain_that_stops_ends_there_and_steps_run_ahead_are_dropped() -> None:
    lstm = integer_cell(*LSTM)
    expected = Recipe(0, random.Random(0))
    expected.chain(lstm, 40, {})
    expected.result("y", list(range(40)), "y")
    values = expected.expected()["y"].tolist()
    stop = values[7]
    at = values.index(stop)
    driver = Driver([lstm])
    driver.add("a", chain(lstm, 0, 40, stop=("y", stop)))
    ended: list[CellOutput] = []
    while not ended:
        driver.schedule()
        driver.schedule()
        ended = driver.outputs()
    assert ended[0].results["y"].tolist() == values[: at + 1]
    assert driver.planner.stats().rows_used == 1, "its row is held: steps beyond the stop are in flight"
    while driver.rounds[0]:
        assert driver.update() == []
    check_nothing_is_held(driver.planner)


def test_an_aborted_request_gives_its_rows_back_when_its_rounds_have_completed() -> None:
    lstm = integer_cell(*LSTM)
    driver = Driver([lstm], max_tasks=2)
    driver.add("a", chain(lstm, 0, 9))
    driver.add("waiting", chain(lstm, 50, 9))
    driver.planner.abort("waiting")
    driver.planner.abort("nobody")
    assert driver.schedule() == [[0], [1]]
    driver.planner.abort("a")
    assert not driver.planner.has_work() and driver.planner.stats().rows_used == 1
    driver.add("a", chain(lstm, 100, 2))
    assert driver.schedule() == [[100], [101]]
    assert driver.update() == [] and driver.planner.stats().rows_used == 1
    assert driver.update() == ["a"]
    check_nothing_is_held(driver.planner)


def test_requests_wait_in_order_while_there_are_no_rows_for_a_whole_graph() -> None:
    leaf, inner = integer_cell(*LEAF), integer_cell(*INNER)
    driver = Driver([leaf, inner], capacity=11)
    driver.add("a", complete_tree(leaf, inner, 4))
    driver.add("b", complete_tree(leaf, inner, 4))
    driver.add("c", complete_tree(leaf, inner, 1))
    assert driver.schedule() == [[0, 1, 2, 3]]
    assert driver.planner.stats().waiting == 2, "c would fit, but b comes first"


def test_requests_beyond_a_full_round_get_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "ADMITTED", 3)
    lstm = integer_cell(*LSTM, sizes=(1, 2))
    driver = Driver([lstm], max_tasks=2)
    for number in range(9):
        driver.add(f"{number}", chain(lstm, 100 * number, 3))
    assert driver.schedule() == [[0, 100], [1, 101]]
    assert driver.planner.stats().waiting == 6
    assert driver.schedule() == [[2, 102], [200, 300]]
    assert driver.planner.stats().waiting == 3
    driver.planner.abort("7")
    assert driver.update() == [] and driver.update() == ["0", "1"]
    assert driver.schedule() == [[201, 301], [202, 302]]
    assert driver.planner.stats().waiting == 0


def test_all_requests_get_rows_while_a_round_is_not_full_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "ADMITTED", 3)
    lstm = integer_cell(*LSTM, sizes=(1, 2))
    driver = Driver([lstm], max_tasks=5)
    for number in range(9):
        driver.add(f"{number}", chain(lstm, 100 * number, 1))
    assert driver.schedule() == [[0, 100], [200, 300], [400, 500], [600, 700], [800]]
    assert driver.planner.stats().waiting == 0


@pytest.mark.parametrize("together", [False, True])
def test_giving_rows_in_parts_changes_no_round(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    lstm = integer_cell(*LSTM, sizes=(1, 4))
    for seed in range(20):
        served = []
        for admitted in (1, 3, 1 << 30):
            monkeypatch.setattr(planner_module, "ADMITTED", admitted)
            source, driver, rounds = random.Random(seed), Driver([lstm], max_tasks=1 + seed % 5), []
            uid = 0
            for step in range(40):
                lengths = [source.choice((1, 1, 2, 3, 9)) for _ in range(source.choice((0, 0, 2, 25)))]
                ids = [f"{step}.{number}" for number in range(len(lengths))]
                if lengths and together:
                    batch = GraphBatch(len(lengths))
                    batch.result("y", batch.chain(lstm, lengths, uid=np.arange(uid, uid + sum(lengths))), "y")
                    driver.planner.add(CellRequests(ids, batch))
                else:
                    first = uid
                    for id, length in zip(ids, lengths, strict=True):
                        driver.add(id, chain(lstm, first, length))
                        first += length
                uid += sum(lengths)
                rounds.append(driver.schedule())
                if len(driver.rounds[0]) == 2 or (driver.rounds[0] and rounds[-1] is None):
                    driver.update()
            served.append(rounds)
        assert served[0] == served[1] == served[2]


def test_the_first_planned_node_says_when_a_request_started() -> None:
    lstm = integer_cell(*LSTM, sizes=(1,))
    driver = Driver([lstm], max_tasks=1)
    driver.add("a", chain(lstm, 0, 2))
    driver.add("b", chain(lstm, 10, 1))
    started = {}
    for now in range(3, 6):
        driver.schedule(now=float(now))
        started |= {output.request_id: output.scheduled_at for output in driver.outputs()}
    assert started == {"a": 3.0, "b": 5.0}


def test_results_do_not_change_when_later_requests_run() -> None:
    lstm = integer_cell(*LSTM)
    driver = Driver([lstm])
    kept: list[CellOutput] = []
    for number in range(20):
        driver.add(str(number), chain(lstm, 100 * number, 5))
        driver.schedule()
        kept += driver.outputs()
    for number, output in enumerate(kept):
        recipe = Recipe(100 * number, random.Random(0))
        recipe.chain(lstm, 5, {})
        recipe.result("y", list(range(5)), "y")
        assert output.results["y"].tolist() == recipe.expected()["y"].tolist()


def test_equal_cells_share_tasks() -> None:
    one, other = integer_cell(*LSTM), integer_cell(*LSTM)
    planner = CellPlanner([one, other], {one: 0, other: 0})
    planner.add(CellRequest("a", chain(one, 0, 1)))
    planner.add(CellRequest("b", chain(other, 10, 1)))
    plan = planner.schedule(0, 0.0)
    assert plan is not None and [task.values[0].tolist() for task in plan.tasks] == [[0, 10]]


def test_a_worker_has_the_loop_s_interface() -> None:
    lstm = integer_cell(*LSTM)
    worker = CellPlanner([lstm]).worker(0)
    assert not worker.has_work() and worker.schedule(0.0) is None
    worker.add(CellRequest("a", chain(lstm, 0, 1)))
    assert worker.has_work() and worker.stats().waiting == 1
    plan = worker.schedule(2.0)
    assert plan is not None
    returned: Returned = [(np.array([3]),)]
    [output] = worker.update(plan, returned, 3.0)
    assert output.results["y"].tolist() == [3] and output.scheduled_at == 2.0
    worker.abort("a")


def test_bad_arguments_and_requests_are_refused() -> None:
    lstm, leaf = integer_cell(*LSTM), integer_cell(*LEAF)
    for name, value in (("workers", 0), ("workers", 63), ("max_tasks", 0), ("capacity", 1)):
        with pytest.raises(ValueError, match=f"{name} is {value}; it must be at"):
            CellPlanner([lstm], **{name: value})
    planner = CellPlanner([lstm], capacity=4)
    with pytest.raises(ValueError, match="no nodes"):
        planner.add(CellRequest("a", CellGraph()))
    graph = CellGraph()
    graph.add(leaf, uid=[0])
    with pytest.raises(ValueError, match="leaf is not one of the application's cells"):
        planner.add(CellRequest("a", graph))
    graph = CellGraph()
    graph.add(lstm, 4, uid=range(4))
    with pytest.raises(ValueError, match="the graph has 4 nodes, where a chain counts as one; at most 3 fit"):
        planner.add(CellRequest("a", graph))
    planner.add(CellRequest("a", chain(lstm, 0, 4)))
    for _ in range(2):
        with pytest.raises(ValueError, match="request id a is already in use"):
            planner.add(CellRequest("a", chain(lstm, 0, 4)))
        planner.schedule(0, 0.0)


COMPILED_ONCE = """
from holdfast.cells import algorithm, graph, graph_batch, partition
from holdfast.cells.planner import prepare

rooms = (algorithm, graph, graph_batch, partition)
functions = [each for room in rooms for each in vars(room).values() if hasattr(each, "signatures")]
prepare()
before = [len(each.signatures) for each in functions]
from tests.cells.test_planner import History
for seed in range(6):
    History(seed, with_oracle=False).play(6)
assert sum(before) >= 8 and [len(each.signatures) for each in functions] == before
"""


def test_nothing_is_compiled_once_requests_run() -> None:
    subprocess.run([sys.executable, "-c", COMPILED_ONCE], check=True, timeout=120)
