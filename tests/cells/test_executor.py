"""One executor: inputs that it reads in place or gathers, and its errors for cells that break their declaration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.cells.cell import Cell, Output, State, Value
from holdfast.cells.executor import Arenas, Copies, CpuExecutor, _Linear
from holdfast.cells.nn import LSTMWeights, ReadOut, lstm_cell
from holdfast.cells.plan import Move, Round, Task

Tensors = dict[str, torch.Tensor]


def add(weights: Tensors, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Tensors:
    """A cell that shows the origin of each input: h in thousands, c in ones."""
    return {"h": h + x[:, None], "c": c + 1, "seen": 1000 * h[:, 0] + c[:, 0]}


INPUTS = {"x": Value(()), "h": State((3,)), "c": State((3,))}
OUTPUTS = {"h": Output((3,)), "c": Output((3,)), "seen": Output((), returned=True)}


def cell(run: Callable[..., Any] = add, **changes: Any) -> Cell:
    return Cell("adder", run, **{"inputs": INPUTS, "outputs": OUTPUTS, "sizes": (1, 2, 4, 8)} | changes)


def executor(*cells: Cell, capacity: int = 20) -> CpuExecutor:
    return CpuExecutor(cells, {each: number for number, each in enumerate(cells)}, capacity=capacity)


def task(rows: list[int], h: list[int], c: list[int], x: float = 10) -> Task:
    """A task of the adder. h and c name rows, or -1 for zeros; a row of that arena is h and c of one node."""
    sources = [[2 * row + place if row >= 0 else -1 for row in given] for place, given in enumerate((h, c))]
    values = (np.full(len(rows), x, np.float32),)
    return Task(np.array(rows, np.int32), np.array(sources, np.int32), values, 8)


def run(on: CpuExecutor, *tasks: Task, moves: list[Move] | None = None) -> list[list[float]]:
    on.submit(Round(0, 0, list(tasks), moves or []))
    return [returned[0].tolist() for returned in on.collect()]


def test_state_is_read_from_the_rows_that_sources_name() -> None:
    on = executor(cell())
    assert run(on, task([1, 2, 3], [-1] * 3, [-1] * 3, x=10), task([4], [-1], [-1], x=20)) == [[0, 0, 0], [0]]
    assert run(on, task([5, 6, 7], [4, 1, -1], [1, -1, 2])) == [[20001, 10000, 1]]


def test_sizes_given_by_type_are_tried_and_have_buffers() -> None:
    tried = []

    def note(weights: Tensors, x: torch.Tensor, **states: torch.Tensor) -> Tensors:
        tried.append(len(x))
        return add(weights, x, **states)

    noted = cell(note)
    on = CpuExecutor((noted,), {noted: 0}, capacity=20, sizes=((3, 16),))
    assert set(tried) == {3, 16}
    rows = list(range(1, 16))
    assert run(on, task(rows, [-1] * 15, [-1] * 15), task(rows, rows[::-1], rows)) == [[0] * 15, [10001] * 15]


def test_a_chain_writes_its_row_in_place() -> None:
    on = executor(cell())
    first = task([3, 9, 4], [-1] * 3, [-1] * 3)
    later = task([3, 9, 4], [3, 9, 4], [3, 9, 4])
    assert run(on, first, later, later) == [[0] * 3, [10001] * 3, [20002] * 3]


def test_rows_may_be_exchanged_within_a_task() -> None:
    on = executor(cell())
    run(on, task([1], [-1], [-1], x=10), task([2], [-1], [-1], x=30))
    assert run(on, task([1, 2], [2, 1], [1, 2], x=0), task([5, 6], [1, 2], [-1, -1])) == [
        [30001, 10001],
        [30000, 10000],
    ]


def test_inputs_that_lie_in_order_are_read_in_place() -> None:
    on = executor(cell())
    run(on, task([3, 4, 5], [-1] * 3, [-1] * 3))
    assert on.copies() == Copies(gathered=0, in_place=0), "zeros are no copies"
    run(on, task([10, 11], [4, 5], [3, 4]))
    assert on.copies() == Copies(gathered=0, in_place=2)
    run(on, task([1], [5], [3]))
    assert on.copies() == Copies(gathered=0, in_place=4)


@pytest.mark.parametrize("rows", [[4, 3, 5], [3, 4, 6], [3, 5, 4]])
def test_inputs_out_of_order_or_with_gaps_are_gathered(rows: list[int]) -> None:
    on = executor(cell())
    run(on, task([3, 4, 5, 6], [-1] * 4, [-1] * 4))
    run(on, task([10, 11, 12], rows, [3, 4, 5]))
    assert on.copies() == Copies(gathered=1, in_place=1)


def test_the_same_requests_in_the_same_order_are_not_gathered_wherever_their_rows_are() -> None:
    on = executor(cell())
    rows = [7, 3, 9, 4]
    first, later = task(rows, [-1] * 4, [-1] * 4), task(rows, rows, rows)
    assert run(on, first, later, later) == [[0] * 4, [10001] * 4, [20002] * 4]
    assert on.copies() == Copies(gathered=0, in_place=4)
    run(on, task(rows[::-1], rows[::-1], rows[::-1]))
    assert on.copies() == Copies(gathered=2, in_place=4)
    run(on, task(rows[1:], rows[1:], rows[1:]))
    assert on.copies() == Copies(gathered=4, in_place=4), "one left, so inputs are gathered"


def test_outputs_of_the_previous_task_are_not_read_in_place_after_a_move() -> None:
    here, there = executor(cell()), executor(cell())
    here.connect([here, there])
    rows = [7, 3]
    run(here, task(rows, [-1] * 2, [-1] * 2, x=10))
    run(there, task(rows, [-1] * 2, [-1] * 2, x=50))
    moves = [Move(1, np.array(rows, np.int32))]
    assert run(here, task(rows, rows, rows), moves=moves) == [[50001, 50001]]
    assert here.copies() == Copies(gathered=2, in_place=0, moved=2)


def test_a_move_brings_all_arenas_and_leaves_other_rows() -> None:
    number = Cell(
        "number", lambda weights, x: {"n": x.to(torch.int64)}, {"x": Value(())}, {"n": Output((), "int64")}, sizes=(4,)
    )
    here, there = executor(cell(), number), executor(cell(), number)
    here.connect([here, there])
    for each, x in ((here, 1.0), (there, 2.0)):
        run(each, task([1, 2, 3], [-1] * 3, [-1] * 3, x=x))
        no_state = np.zeros((0, 3), np.int32)
        each.submit(Round(0, 1, [Task(np.array([1, 2, 3], np.int32), no_state, (np.full(3, x, np.float32),), 4)]))
        each.collect()
    run(here, task([9], [-1], [-1]), moves=[Move(1, np.array([2], np.int32))])
    for spec, values in here.arenas.items.items():
        found = here.arenas.by_row(spec)[1:4].reshape(3, -1) == there.arenas.by_row(spec)[1:4].reshape(3, -1)
        assert spec.shape == (3,) or found[:, 0].tolist() == [spec.dtype == "float32", True, spec.dtype == "float32"]
        assert values.dtype == getattr(torch, spec.dtype)
    h = here.arenas.by_row(next(spec for spec in here.arenas.items if spec.shape == (3,)))[:, 0, 0]
    assert h[1:4].tolist() == [1, 2, 1]


def test_rounds_come_back_in_order() -> None:
    on = executor(cell())
    for x in (1.0, 2.0, 3.0):
        on.submit(Round(0, 0, [task([1], [1], [-1], x=x)]))
    assert [on.collect()[0][0].tolist() for _ in range(3)] == [[0], [1000], [3000]]


def test_outputs_that_are_inputs_do_not_change_when_rows_are_exchanged() -> None:
    def keep(weights: Tensors, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Tensors:
        return {"h": h, "c": c, "seen": h[:, 0]}

    on = executor(cell(), cell(keep))
    run(on, task([1, 2, 3, 4], [-1] * 4, [-1] * 4, x=1), task([1, 2], [1, 2], [1, 2], x=1))
    on.submit(Round(0, 1, [task([2, 3, 4], [1, 2, 3], [1, 2, 3]), task([1], [4], [4])]))
    (first,), (second,) = on.collect()
    assert (first.tolist(), second.tolist()) == ([2, 2, 1], [1])
    arena = next(arena for spec, arena in on.arenas.items.items() if spec.shape == (3,))
    assert arena[2:10:2, 0].tolist() == [1, 2, 2, 1]


def test_buffers_and_arenas_stay_where_they_are() -> None:
    on = executor(cell())

    def addresses() -> list[int]:
        buffers = [buffer for kind in on._buffers for buffer in kind]
        return [tensor.data_ptr() for tensor in (*buffers, *on.arenas.items.values(), *on._zeros.values())]

    before = addresses()
    for nodes in (1, 8, 3, 8, 5):
        rows = list(range(1, nodes + 1))
        run(on, task(rows, rows[::-1], [-1] * nodes))
    assert addresses() == before


def lstm(sizes: tuple[int, ...] = (1, 64), words: int = 9) -> Cell:
    weights = LSTMWeights.of_module(torch.nn.LSTMCell(6, 40))
    out = ReadOut.of_module(torch.nn.Linear(40, 150))
    return lstm_cell("lstm", weights, embedding=torch.randn(words, 6), read_out=out, returns_h=True, sizes=sizes)


def lstm_task(rows: list[int], sources: list[int], tokens: list[int]) -> Task:
    """A task of the LSTM, whose h and c come from these rows; -1 for zeros."""
    place = [[2 * row + which if row >= 0 else -1 for row in sources] for which in (0, 1)]
    return Task(np.array(rows, np.int32), np.array(place, np.int32), (np.array(tokens, np.int32),), 64)


@pytest.mark.parametrize("nodes", [1, 7, 33, 50, 64])
def test_a_gated_cell_equals_its_run(nodes: int) -> None:
    torch.manual_seed(0)
    gated = lstm()
    on, plain = executor(gated, capacity=80), executor(replace(gated, gated=None), capacity=80)
    random = np.random.default_rng(nodes)
    rows = random.permutation(np.arange(1, 80))[:nodes].tolist()
    for sources in ([-1] * nodes, rows, rows[::-1], [-1, *rows[:-1]]):
        task = lstm_task(rows, sources, random.integers(0, 9, nodes).tolist())
        for each in (on, plain):
            each.submit(Round(0, 0, [task, task]))
        for found, expected in zip(on.collect(), plain.collect(), strict=True):
            np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
            assert found[1].tolist() == expected[1].tolist()
    for spec, arena in plain.arenas.items.items():
        width = plain.arenas.layout.widths[spec]
        torch.testing.assert_close(on.arenas.items[spec][width:], arena[width:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("token", [-1, 9])
def test_a_token_without_an_embedding_is_refused(token: int) -> None:
    on = executor(lstm())
    on.submit(Round(0, 0, [lstm_task([1, 2], [-1, -1], [8, token])]))
    with pytest.raises(IndexError, match=f"token of cell lstm is {token}; it must be below 9"):
        on.collect()


def test_the_parts_of_a_gated_cell_that_are_zeros_are_not_counted_as_gathered() -> None:
    on = executor(lstm())
    on.submit(Round(0, 0, [lstm_task([1, 2], [-1, -1], [8, 0]), lstm_task([1, 2], [1, 2], [8, 0])]))
    on.collect()
    assert on.copies() == Copies(gathered=1)


@pytest.mark.parametrize("largest", [1, 64, 512, 1000])
def test_a_product_has_at_most_a_sixteenth_more_rows_than_nodes(largest: int) -> None:
    rows = [_Linear.rows(nodes) for nodes in range(1, largest + 1)]
    assert all(nodes <= each <= max(nodes, nodes * 17 / 16) for nodes, each in enumerate(rows, start=1))
    assert len(set(rows)) <= 112


def test_weights_that_cells_share_are_copied_once_and_keep_their_memory_on_a_cpu() -> None:
    shared = torch.ones(3)
    one = cell(weights={"a": shared}, outputs={"h": Output((3,))}, run=lambda weights, x, h, c: {"h": h + weights["a"]})
    on = executor(one)
    assert on._kinds[0].weights["a"].data_ptr() == shared.data_ptr()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda w, x, h, c: {"h": h, "c": c}, "gives h, c; it declares h, c, seen"),
        (lambda w, x, h, c: (h, c), "cell adder gives tuple; it must give outputs by name"),
        (
            lambda w, x, h, c: {"h": h, "c": c, "seen": h},
            r"output seen of cell adder is float32\[1, 3\] for a batch of 1; it is declared as float32\[1\]",
        ),
        (
            lambda w, x, h, c: {"h": h, "c": c, "seen": h[:, 0].double()},
            r"output seen of cell adder is float64\[1\] for a batch of 1; it is declared as float32\[1\]",
        ),
        (
            lambda w, x, h, c: {"h": h, "c": c, "seen": h[:, 0].sum()[None]},
            r"output seen of cell adder is float32\[1\] for a batch of 2; it is declared as float32\[2\]",
        ),
        (lambda w, x, h, c: {"h": h.add_(1), "c": c, "seen": x + 1}, "cell adder changes its input h"),
        (lambda w, x, h, c: {"h": h @ h, "c": c, "seen": x}, "cell adder cannot run on a batch of 1: .*cannot be mult"),
        (lambda w, x, h, c: {"h": h, "c": c, "seen": 1.0}, "output seen of cell adder is float for a batch of 1"),
    ],
)
def test_a_cell_that_differs_from_its_declaration_is_refused_at_the_start(
    run: Callable[..., Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        executor(cell(run))


def test_an_arena_has_a_place_for_each_output_of_its_shape_and_type() -> None:
    arenas = Arenas([cell()], torch.device("cpu"), 5)
    assert sorted((spec.shape, tuple(arena.shape)) for spec, arena in arenas.items.items()) == [
        ((), (6,)),
        ((3,), (11, 3)),
    ]
