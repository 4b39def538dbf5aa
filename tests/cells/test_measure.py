"""Measured times of tasks: which sizes, which tasks, and how noise is kept out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.cells import measure
from holdfast.cells.cell import Cell, Output, State, Value
from holdfast.cells.measure import device_name, measure_cells, sizes_up_to
from holdfast.cells.plan import Returned, Round
from holdfast.cells.types import number
from tests.cells.models import MODELS

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def test_powers_of_two_are_measured_and_from_64_on_sizes_halfway_too() -> None:
    assert sizes_up_to(2048) == (
        *(1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048),
    )  # fmt: skip
    assert sizes_up_to(100) == (1, 2, 4, 8, 16, 32, 64, 96, 100)
    assert sizes_up_to(2) == (1, 2)


@pytest.mark.parametrize("largest", [1, 0, -5, 16385])
def test_a_largest_size_out_of_range_is_refused(largest: int) -> None:
    with pytest.raises(ValueError, match=f"largest is {largest}; it must lie between 2 and 16384"):
        sizes_up_to(largest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_every_type_of_the_models_is_measured_at_every_size(name: str, device: str) -> None:
    model = MODELS[name]()
    costs = measure_cells(model.cells, number(model.cells), device, largest=8)
    assert [cost.sizes for cost in costs] == [(1, 2, 4, 8)] * len(model.cells)
    assert all(0 < seconds < 1 for cost in costs for seconds in cost.seconds)


def test_a_cell_that_takes_longer_is_measured_to_take_longer() -> None:
    def multiply(weights: Any, h: torch.Tensor) -> dict[str, torch.Tensor]:
        for _ in range(int(weights["times"])):
            h = h @ weights["w"]
        return {"h": h}

    def cell(times: int) -> Cell:
        weights = {"w": torch.eye(256), "times": torch.tensor(times)}
        return Cell(f"times-{times}", multiply, {"h": State((256,))}, {"h": Output((256,))}, weights)

    cells = cell(1), cell(20)
    short, long = measure_cells(cells, {each: at for at, each in enumerate(cells)}, "cpu", largest=64)
    assert all(slow > 3 * quick for quick, slow in zip(short.seconds, long.seconds, strict=True))
    assert long.at(64) > long.at(1)


def test_equal_cells_are_one_type_and_measured_once() -> None:
    one, other = (MODELS["tagger"](sizes=(1, 2)).cell for _ in range(2))
    costs = measure_cells((one, other), {one: 0, other: 0}, "cpu", largest=2)
    assert len(costs) == 1


def test_a_state_that_no_cell_gives_is_zeros() -> None:
    def run(weights: Any, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not h.any()
        return {"y": x + h[:, 0]}

    cell = Cell("no state", run, {"x": Value(()), "h": State((3,))}, {"y": Output(())})
    assert measure_cells((cell,), {cell: 0}, "cpu", largest=2)[0].sizes == (1, 2)


class Disturbed:
    """An executor whose rounds take as long as a script says, for one size after the other."""

    def __init__(self, cells: Any, types: Any, device: str, **options: Any) -> None:
        from holdfast.cells.executor import Arenas

        self.arenas = Arenas(cells, torch.device("cpu"), options["capacity"])
        self.rounds: list[Round] = []
        self.closed = False

    def timed(self, plan: Round) -> float:
        self.rounds.append(plan)
        slow = 10.0 if len(self.rounds) % 3 == 0 or len(self.rounds) < 14 else 1.0
        return 5e-3 * slow * plan.tasks[0].size

    def submit(self, plan: Round) -> None:
        raise AssertionError("a round that is timed is submitted by the executor itself")

    def collect(self) -> Returned:
        raise AssertionError("see submit")

    def close(self) -> None:
        self.closed = True


def test_slow_rounds_and_a_slow_pass_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Disturbed] = []

    def make(*given: Any, **options: Any) -> Disturbed:
        made.append(Disturbed(*given, **options))
        return made[-1]

    monkeypatch.setattr(measure, "make_executor", make)
    model = MODELS["tagger"]()
    (cost,) = measure_cells(model.cells, {model.cell: 0}, "cpu", largest=4)
    assert cost.seconds == pytest.approx((1e-3, 2e-3, 4e-3))
    (executor,) = made
    assert executor.closed and all(len(plan.tasks) == 5 for plan in executor.rounds)


def test_rounds_are_made_as_a_chain_would_and_name_no_row_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Disturbed] = []

    def make(*given: Any, **options: Any) -> Disturbed:
        made.append(Disturbed(*given, **options))
        return made[-1]

    monkeypatch.setattr(measure, "make_executor", make)
    model = MODELS["seq2seq"]()
    measure_cells(model.cells, number(model.cells), "cpu", largest=8)
    for plan in made[0].rounds:
        for task in plan.tasks:
            assert sorted(task.rows) == list(range(1, task.size + 1))
            cell = model.cells[plan.type]
            for name, source in zip(cell.states, task.sources, strict=True):
                width, place = made[0].arenas.layout.within(cell, name)
                assert (source == task.rows * width + place).all()


def test_a_device_is_named_with_the_threads_of_one_worker() -> None:
    threads = torch.get_num_threads()
    assert device_name("cpu").startswith("CPU (") and f", {threads} thread" in device_name("cpu")
    assert device_name("cpu", 100).endswith(", 1 thread)")
