"""A gated form whose results differ from those of `run` is refused at the start, on the device that would use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from holdfast.cells import workers
from holdfast.cells.cell import Cell, Output
from holdfast.cells.executor_cuda import CudaExecutor
from holdfast.cells.gated_check import check_gated
from holdfast.cells.nn import LSTMWeights, ReadOut, lstm_cell
from tests.cells.models import MODELS, Seq2Seq, Tagger, Tree
from tests.cells.test_workers import running

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def executor(cells: tuple[Cell, ...], device: str = "cpu", capacity: int = 20, **options: Any) -> CudaExecutor:
    """An executor whose gated forms were checked."""
    types = {cell: number for number, cell in enumerate(cells)}
    made = CudaExecutor(cells, types, device, capacity=capacity, **options)
    check_gated(made)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capacity", [2, 3, 40])
@pytest.mark.parametrize("name", MODELS)
def test_right_forms_pass_and_leave_no_trace(name: str, capacity: int, device: str) -> None:
    cells = MODELS[name](sizes=(1, 3, 8)).cells
    made = executor(cells, device, capacity)
    assert all(not items.any() for items in made.arenas.items.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_no_difference(kind: torch.dtype, device: str) -> None:
    made = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return (3 * torch.randn(*shape, generator=made) / shape[-1] ** 0.5).to(kind)

    hidden = 64
    weights = LSTMWeights(random(4 * hidden, hidden + 16), random(4 * hidden))
    cell = lstm_cell("lstm", weights, embedding=random(50, 16), read_out=ReadOut(random(90, hidden), random(90)))
    executor((replace(cell, sizes=(1, 32)),), device, capacity=100)


def wrong(cell: Cell, **changes: Any) -> Cell:
    """The cell with another gated form."""
    assert cell.gated is not None
    return replace(cell, gated=replace(cell.gated, **changes))


def without_bias(cell: Cell) -> Cell:
    """The cell with a `run` whose read-out has no bias."""

    def run(weights: Mapping[str, torch.Tensor], **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = cell.run(weights, **inputs)
        scores = functional.linear(outputs["h"], weights["label_w"])
        return {**outputs, "label": scores.argmax(1).to(torch.int32)}

    weights = {**cell.weights, "label_b": 5 * torch.arange(len(cell.weights["label_b"]), dtype=torch.float32)}
    return replace(cell, run=run, weights=weights)


def scaled(cell: Cell) -> Cell:
    """The cell with a `run` that gives a slightly larger c."""

    def run(weights: Mapping[str, torch.Tensor], **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = cell.run(weights, **inputs)
        return {**outputs, "c": 1.01 * outputs["c"]}

    return replace(cell, run=run)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("cell", "output"),
    [
        (wrong(Tagger(sizes=(4,)).cell, gates="fiuo"), "h"),
        (wrong(Tagger(sizes=(4,)).cell, gates="ifou"), "h"),
        (wrong(Tree(sizes=(4,)).cells[1], children=("right_c", "left_c")), "h"),
        (wrong(Tree(sizes=(4,)).cells[1], parts=("right_h", "left_h")), "h"),
        (wrong(Seq2Seq(sizes=(4,)).cells[1], read_out=None), "word"),
        (without_bias(Tagger(sizes=(4,)).cell), "label"),
        (scaled(Tree(sizes=(4,)).cells[1]), "c"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_refused_with_cell_output_difference_and_limit(cell: Cell, output: str, device: str) -> None:
    where = rf"cell {cell.name} has a gated form that differs from run: output {output}, in a batch of 4 on {device}, "
    with pytest.raises(ValueError, match=where + r"by up to (inf|[\d.e+-]+); the limit is [\d.e-]+"):
        executor((cell,), device)


def test_a_form_that_ignores_an_input_is_refused() -> None:
    right = Tagger(sizes=(4,)).cell
    shifted = replace(right, run=lambda weights, h, **inputs: right.run(weights, h=h + 0.01, **inputs))
    with pytest.raises(ValueError, match="cell tagger has a gated form that differs from run: output h"):
        executor((shifted,))


def test_a_form_that_is_not_used_is_not_checked() -> None:
    cell = wrong(Tagger(sizes=(4,)).cell, gates="fiuo")
    outputs = {name: Output(spec.shape, spec.dtype, returned=True) for name, spec in cell.outputs.items()}
    executor((replace(cell, outputs=outputs),))


def test_sizes_given_by_type_are_those_that_are_checked() -> None:
    cell = wrong(Tagger(sizes=(4,)).cell, gates="fiuo")
    with pytest.raises(ValueError, match="in a batch of 3 on cpu"):
        executor((cell,), sizes=((3, 5),))


def test_words_of_the_check_lie_within_the_smallest_embedding() -> None:
    seen: list[int] = []
    encoder, decoder = Seq2Seq(sizes=(8,)).cells

    def note(cell: Cell, name: str) -> Cell:
        def run(weights: Mapping[str, torch.Tensor], **inputs: torch.Tensor) -> Any:
            seen.extend(inputs[name].tolist())
            return cell.run(weights, **inputs)

        return replace(cell, run=run)

    executor((note(encoder, "token"), note(decoder, "word")), capacity=40)
    assert min(seen) == 0 and max(seen) < 20 and len(set(seen)) > 5


def test_workers_do_not_start_with_a_wrong_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "make_executor", CudaExecutor)
    model = Tree(sizes=(4,))
    model.cells = (model.cells[0], wrong(model.cells[1], parts=("right_h", "left_h")))
    with pytest.raises(ValueError, match="cell internal has a gated form that differs from run"), running(model):
        pass
