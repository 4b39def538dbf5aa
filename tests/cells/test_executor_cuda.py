"""The executor for CUDA gives the results of plain PyTorch: on a GPU with graphs, else under Triton's interpreter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.cells import workers as workers_module
from holdfast.cells.cell import Cell, Output, State, Value
from holdfast.cells.executor_cuda import CudaExecutor, TaskWords, run_lengths
from holdfast.cells.graph import CellGraph
from holdfast.cells.nn import LSTMWeights, lstm_cell
from holdfast.cells.plan import Move, Round, Task
from tests.cells.models import MODELS, Asked, Tagger, differences
from tests.cells.test_workers import ask, run_all, running

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
INTERPRETER = threading.Lock()
"""Triton's interpreter runs one kernel at a time."""


class Interpreted(CudaExecutor):
    def submit(self, plan: Round) -> None:
        with INTERPRETER:
            super().submit(plan)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device whose workers have executors for CUDA."""

    if request.param == "cpu":
        monkeypatch.setattr(workers_module, "make_executor", Interpreted)
    return str(request.param)


def plain(model: Any) -> Any:
    """The model with cells that have no gated form."""
    for cell in model.cells:
        object.__setattr__(cell, "gated", None)
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("form", ["gated", "plain"])
@pytest.mark.parametrize("name", MODELS)
def test_requests_that_share_tasks_have_the_results_of_each_alone(name: str, form: str, device: str) -> None:
    model = MODELS[name]() if form == "gated" else plain(MODELS[name]())
    assert all((cell.gated is None) == (form == "plain") for cell in model.cells)
    with running(model, devices=[device], steps_in_flight=2) as (workers, outcomes):
        run_all(workers, outcomes, ask(model, 8))


@pytest.mark.parametrize("name", MODELS)
def test_workers_take_rows_from_each_other(name: str, device: str) -> None:
    model = MODELS[name](sizes=(1, 2))
    with running(model, devices=[device] * 2, steps_in_flight=2, max_tasks=2) as (workers, outcomes):
        run_all(workers, outcomes, ask(model, 8, seed=6))
        if name == "tree":
            assert sum(copies.moved for copies in workers.copies()) > 0


def test_requests_that_are_aborted_leave_others_right(device: str) -> None:
    model = MODELS["seq2seq"]()
    asked: dict[str, Asked] = ask(model, 12, seed=7)
    with running(model, devices=[device], steps_in_flight=2, capacity=12) as (workers, outcomes):
        for name, each in asked.items():
            workers.submit(workers_module.CellRequest(name, each.graph))
        gone = [name for name in asked if int(name) % 3 == 0]
        for name in gone:
            workers.abort(name)
        outcomes.wait_for(lambda: set(asked) - set(gone) <= set(outcomes.results))
        assert not outcomes.failures
        for name, results in outcomes.results.items():
            assert differences(results, asked[name].expected) == []


def everything(
    weights: Any, x: torch.Tensor, n: torch.Tensor, b: torch.Tensor, h: torch.Tensor, s: torch.Tensor
) -> Any:
    """One of each kind of input and output."""
    return {
        "h": h + x.to(torch.float16),
        "s": s + n,
        "b": b,
        "wide": torch.cat([h.float(), x], 1),
        "odd": torch.stack([b, ~b, b], 1),
        "count": n * 2,
    }


INPUTS = {
    "x": Value((3,)),
    "n": Value((), "int64"),
    "b": Value((), "bool"),
    "h": State((3,), "float16"),
    "s": State((), "int64"),
}
OUTPUTS = {
    "h": Output((3,), "float16", returned=True),
    "s": Output((), "int64"),
    "b": Output((), "bool", returned=True),
    "wide": Output((6,), returned=True),
    "odd": Output((3,), "bool", returned=True),
    "count": Output((), "int64", returned=True),
}


def everything_cell(**changes: Any) -> Cell:
    return Cell("everything", everything, **{"inputs": INPUTS, "outputs": OUTPUTS, "sizes": (1, 2, 5)} | changes)


def task(words: list[int], h: list[int], s: list[int], size: int = 5) -> Task:
    """A task of that cell over these rows. The arenas for h have one place in a row, those for s two."""
    nodes = len(words)
    random = np.random.default_rng(sum(words))
    values = (
        random.normal(size=(nodes, 3)).astype(np.float32),
        random.integers(-(1 << 40), 1 << 40, nodes),
        random.random(nodes) < 0.5,
    )
    sources = [h, [2 * row if row >= 0 else -1 for row in s]]
    return Task(np.array(words, np.int32), np.array(sources, np.int32), values, size)


def executor(cell: Cell, on: str, **options: Any) -> CudaExecutor:
    return CudaExecutor([cell], {cell: 0}, on, capacity=10, **options)


@pytest.mark.parametrize("on", DEVICES)
def test_inputs_and_outputs_of_every_type_come_and_go(on: str) -> None:
    run = executor(everything_cell(), on)
    first, second = task([3, 1, 4], [-1] * 3, [-1] * 3), task([2, 3], [4, 3], [-1, 1], size=2)
    run.submit(Round(0, 0, [first, second]))
    (h, b, wide, odd, count), (h2, _, wide2, _, _) = run.collect()
    x, n, flags = first.values
    assert h.dtype == np.float16 and h.tolist() == x.astype(np.float16).tolist()
    assert b.tolist() == flags.tolist()
    assert wide.tolist() == np.concatenate([np.zeros((3, 3), np.float32), x], 1).tolist()
    assert odd.tolist() == [[flag, not flag, flag] for flag in flags.tolist()]
    assert count.tolist() == (2 * n).tolist()
    before = h[[2, 0]]
    assert wide2[:, :3].tolist() == before.astype(np.float32).tolist()
    assert h2.tolist() == (before + second.values[0].astype(np.float16)).tolist()
    arena = run.arenas.of(INPUTS["s"])
    assert arena[[2 * 3, 2 * 1, 2 * 4, 2 * 2]].tolist() == [
        int(n[1] + second.values[1][1]),
        int(n[1]),
        int(n[2]),
        int(second.values[1][0]),
    ]


@pytest.mark.parametrize("on", DEVICES)
def test_rounds_beyond_the_ring_reuse_it_and_come_back_in_order(on: str) -> None:
    run = executor(everything_cell(), on, rounds_in_flight=2, max_tasks=2)
    tasks = [task([1 + at % 9], [-1], [-1], size=1 + at % 2) for at in range(40)]
    waiting: list[Task] = []
    for at in range(0, 40, 2):
        run.submit(Round(0, 0, tasks[at : at + 2]))
        waiting += tasks[at : at + 2]
        if len(waiting) == 4:
            for found, expected in zip(run.collect(), waiting[:2], strict=True):
                assert found[4].tolist() == (2 * expected.values[1]).tolist()
            waiting = waiting[2:]
    assert 38 <= run._signals.done.item() <= 40  # the last round may be running yet


@pytest.mark.parametrize("on", DEVICES)
def test_runs_of_tasks_of_one_size_share_launches_and_run_in_order(on: str) -> None:
    run = executor(everything_cell(), on, rounds_in_flight=1, max_tasks=5)
    launched: list[int] = []

    def noting(length: int, replay: Callable[[], None]) -> Callable[[], None]:
        def play() -> None:
            launched.append(length)
            replay()

        return play

    for number, runs in enumerate(run._runs):
        for size, some in runs.items():
            run._runs[number][size] = [(length, noting(length, replay)) for length, replay in some]
    for sizes, launches in (
        ([2] * 5, [5]),
        ([5, 2, 2, 2, 2], [1, 2, 2]),
        ([1, 1, 1, 2, 5], [2, 1, 1, 1]),
        ([1, 2, 1, 2, 1], [1] * 5),
    ):
        launched.clear()
        # Each task reads the state that the task before it wrote to row 3.
        tasks = [task([3], [3 if at else -1], [-1], size=size) for at, size in enumerate(sizes)]
        run.submit(Round(0, 0, tasks))
        h, x = np.zeros(3, np.float16), tasks[0].values[0][0].astype(np.float16)
        for found in run.collect():
            h = h + x
            assert found[0].tolist() == [h.tolist()]
        assert launched == launches


@pytest.mark.parametrize(("max_tasks", "lengths"), [(1, (1,)), (2, (2, 1)), (5, (5, 2, 1)), (20, (20, 10, 5, 2, 1))])
def test_whole_rounds_and_their_halves_have_graphs(max_tasks: int, lengths: tuple[int, ...]) -> None:
    assert run_lengths(max_tasks) == lengths


def test_more_rounds_or_tasks_than_there_is_room_for_are_refused() -> None:
    run = executor(everything_cell(), "cpu", rounds_in_flight=1, max_tasks=1)
    each = task([1], [-1], [-1], size=1)
    with pytest.raises(ValueError, match="the round has 2 tasks; at most 1 fit"):
        run.submit(Round(0, 0, [each, each]))
    run.submit(Round(0, 0, [each]))
    with pytest.raises(RuntimeError, match="1 rounds are in flight; at most 1 may be"):
        run.submit(Round(0, 0, [each]))


@pytest.mark.parametrize("on", DEVICES)
def test_padding_changes_no_row_of_a_node(on: str) -> None:
    run = executor(everything_cell(), on)
    run.submit(Round(0, 0, [task([1, 2, 3, 4, 5], [-1] * 5, [-1] * 5)]))
    run.collect()
    before = {spec: arena.clone() for spec, arena in run.arenas.items.items()}
    run.submit(Round(0, 0, [task([9], [1], [1])]))
    run.collect()
    for spec, arena in before.items():
        width = run.arenas.layout.widths[spec]
        changed = {
            row // width for row in range(len(arena)) if not torch.equal(arena[row], run.arenas.items[spec][row])
        }
        assert changed <= {0, 9}


@pytest.mark.parametrize("on", DEVICES)
def test_a_move_copies_whole_rows_before_the_tasks_read_them(on: str) -> None:
    here, there = executor(everything_cell(), on), executor(everything_cell(), on)
    here.connect([here, there])
    given = task([1, 2, 7], [-1] * 3, [-1] * 3)
    there.submit(Round(1, 0, [given]))
    there.collect()
    here.submit(Round(0, 0, [task([3, 4], [7, 1], [7, 2])], [Move(1, np.array([7, 1], np.int32))]))
    ((_, _, wide, _, _),) = here.collect()
    assert wide[:, :3].tolist() == given.values[0][[2, 0]].astype(np.float16).astype(np.float32).tolist()
    for spec in here.arenas.items:
        mine, theirs = here.arenas.by_row(spec), there.arenas.by_row(spec)
        assert torch.equal(mine[[1, 7]], theirs[[1, 7]])
        assert not mine[2].any()
    assert here.copies().moved == 2


def test_a_token_outside_the_embedding_reads_zeros_and_nothing_else() -> None:
    model = Tagger()
    run = executor(model.cell, "cpu")
    values = (np.array([20, 10**6], np.int32),)
    run.submit(Round(0, 0, [Task(np.array([1, 2], np.int32), np.full((2, 2), -1, np.int32), values, 2)]))
    ((h, _),) = run.collect()
    with torch.no_grad():
        expected, _ = model.lstm(torch.zeros(1, 1, 7))
    assert np.allclose(h, expected[0].numpy().repeat(2, 0), rtol=0, atol=1e-6)


def test_values_may_be_vectors_and_layers_may_be_stacked(device: str) -> None:
    torch.manual_seed(0)
    module = nn.LSTM(6, 6, num_layers=2, batch_first=True)
    lower = lstm_cell("lower", LSTMWeights.of_module(module, 0), sizes=(1, 4))
    upper = lstm_cell("upper", LSTMWeights.of_module(module, 1), x="state", returns_h=True, priority=1, sizes=(1, 4))
    random = np.random.default_rng(0)

    class Stack(Tagger):
        def __init__(self) -> None:
            self.cells = (lower, upper)

    asked = {}
    for number in range(5):
        x = random.normal(size=(int(random.integers(1, 6)), 6)).astype(np.float32)
        graph = CellGraph()
        steps = graph.chain(lower, len(x), x=x)
        above: list[int] = []
        for step in steps:
            states: dict[str, Any] = {"x": (step, "h")}
            if above:
                states |= {"h": (above[-1], "h"), "c": (above[-1], "c")}
            above += graph.add(upper, 1, **states)
        graph.result("h", above, "h")
        with torch.no_grad():
            asked[str(number)] = Asked(graph, {"h": module(torch.from_numpy(x)[None])[0][0].numpy()})
    with running(Stack(), devices=[device], steps_in_flight=2) as (workers, outcomes):
        run_all(workers, outcomes, asked)


def test_words_of_a_task_do_not_overlap() -> None:
    words = TaskWords(everything_cell(), 5)
    spans = [(4, 9), *((first, first + 5) for first in words.sources.values())]
    spans += [(first, first + items * dtype.itemsize // 4) for first, items, _, dtype in words.values.values()]
    assert spans == sorted(spans)
    assert all(end <= first for (_, end), (first, _) in pairwise(spans))
    assert spans[-1][1] <= words.words
    spans = [(first, first + 5 * item) for first, item, _, _ in words.returned.values()]
    assert all(end <= first for (_, end), (first, _) in pairwise(spans))
    assert spans[-1][1] <= words.returned_bytes


@pytest.mark.gpu
def test_a_round_waits_for_nothing_on_the_host() -> None:
    """Submitting rounds while the device is busy takes less than the device needs (BatchMaker, section 2.5)."""
    model = Tagger(hidden=1024, sizes=(512,))
    run = CudaExecutor(model.cells, {model.cell: 0}, "cuda:0", capacity=1024, rounds_in_flight=8)
    rows = np.arange(1, 513, dtype=np.int32)
    given = Task(rows, np.stack([2 * rows, 2 * rows + 1]), (np.zeros(512, np.int32),), 512)
    started = time.perf_counter()
    for _ in range(8):
        run.submit(Round(0, 0, [given] * 5))
    submitted = time.perf_counter() - started
    for _ in range(8):
        run.collect()
    assert submitted < (time.perf_counter() - started) / 2


@pytest.mark.gpu
def test_steady_state_allocates_nothing() -> None:
    model = Tagger(hidden=64)
    run = CudaExecutor(model.cells, {model.cell: 0}, "cuda:0", capacity=100)
    rows = np.arange(1, 9, dtype=np.int32)
    given = Task(rows, np.stack([2 * rows, 2 * rows + 1]), (np.zeros(8, np.int32),), 8)

    def play() -> None:
        run.submit(Round(0, 0, [given] * 5))
        run.collect()

    play()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(20):
        play()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
