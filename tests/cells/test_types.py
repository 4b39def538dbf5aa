"""The cells that are one type."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from holdfast.cells import applications
from holdfast.cells.cell import Cell, Output, State, Value
from holdfast.cells.gated import Gated
from holdfast.cells.types import fingerprint, number

Tensors = Mapping[str, torch.Tensor]


def step(weights: Tensors, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"h": torch.tanh(x @ weights["w"] + h @ weights["u"])}


def step_in_other_words(weights: Tensors, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
    """The operations of `step`, written differently."""
    total = torch.matmul(x, weights["w"]) + torch.matmul(h, weights["u"])
    return {"h": total.tanh()}


def step_with_other_operations(weights: Tensors, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"h": torch.sigmoid(x @ weights["w"] + h @ weights["u"])}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, 4, generator=made), "u": torch.randn(4, 4, generator=made)}


def cell(given: Tensors, run: Callable[..., Any] = step, **changes: Any) -> Cell:
    fields: dict[str, Any] = dict(inputs={"x": Value((3,)), "h": State((4,))}, outputs={"h": Output((4,))})
    return Cell("step", run, weights=given, **(fields | changes))


def numbers(*cells: Cell) -> list[int]:
    found = number(cells)
    return [found[each] for each in cells]


def test_cells_that_share_weights_and_operations_are_one_type() -> None:
    shared = weights()
    assert numbers(cell(shared), cell(shared, step_in_other_words)) == [0, 0]


def test_equal_copies_of_weights_are_one_type() -> None:
    assert numbers(cell(weights()), cell(weights())) == [0, 0]


def test_equal_graphs_with_other_weights_are_two_types() -> None:
    assert numbers(cell(weights(0)), cell(weights(1)), cell(weights(0))) == [0, 1, 0]


def test_one_changed_byte_of_a_weight_makes_another_type() -> None:
    changed = weights()
    changed["u"][3, 3] = -changed["u"][3, 3]
    assert numbers(cell(weights()), cell(changed)) == [0, 1]


def test_weights_in_each_others_place_make_another_type() -> None:
    square = {"w": torch.eye(4), "u": 2 * torch.eye(4)}
    swapped = {"w": square["u"], "u": square["w"]}
    inputs = {"x": Value((4,)), "h": State((4,))}
    assert numbers(cell(square, inputs=inputs), cell(swapped, inputs=inputs)) == [0, 1]


def test_names_and_order_of_weights_do_not_matter() -> None:
    given = weights()

    def renamed(weights: Tensors, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": torch.tanh(x @ weights["input"] + h @ weights["state"])}

    assert numbers(cell(given), cell({"state": given["u"], "input": given["w"]}, renamed)) == [0, 0]


def test_other_operations_make_another_type() -> None:
    assert numbers(cell(weights()), cell(weights(), step_with_other_operations)) == [0, 1]


def test_other_constants_make_another_type() -> None:
    def scaled(by: float) -> Callable[..., Any]:
        return lambda weights, x, h: {"h": by * (x @ weights["w"] + h)}

    assert numbers(cell(weights(), scaled(2.0)), cell(weights(), scaled(3.0)), cell(weights(), scaled(2.0))) == [
        0,
        1,
        0,
    ]


def test_tensors_that_a_cell_closes_over_count_as_weights() -> None:
    def with_bias(bias: torch.Tensor) -> Callable[..., Any]:
        return lambda weights, x, h: {"h": x @ weights["w"] + h + bias}

    one, other = torch.zeros(4), torch.ones(4)
    cells = [cell(weights(), with_bias(bias)) for bias in (one, other, one.clone())]
    assert numbers(*cells) == [0, 1, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": {"x": Value((3,)), "h": State((4,)), "unused": State((4,))}},
        {"outputs": {"h": Output((4,), returned=True)}},
        {"priority": 1},
        {"sizes": (1, 2)},
    ],
)
def test_priorities_and_sizes_of_a_cell_are_part_of_its_type(changes: dict[str, Any]) -> None:
    def run(weights: Tensors, x: torch.Tensor, h: torch.Tensor, **unused: torch.Tensor) -> dict[str, torch.Tensor]:
        return step(weights, x, h)

    assert numbers(cell(weights(), run), cell(weights(), run, **changes)) == [0, 1]


def test_a_cell_that_branches_by_values_is_refused_if_another_looks_like_it() -> None:
    def branches(weights: Tensors, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": h if x.sum() > 0 else -h}

    with pytest.raises(ValueError, match="cell step cannot be traced"):
        number([cell(weights()), cell(weights(), branches)])


def test_a_cell_named_twice_has_one_number() -> None:
    one, other = cell(weights(0)), cell(weights(1))
    assert number([one, other, one]) == {one: 0, other: 1}


def test_equal_operations_on_other_weights_have_one_fingerprint() -> None:
    prints = {fingerprint(each) for each in (cell(weights(0)), cell(weights(1)), cell(weights(), sizes=(1, 2)))}
    assert len(prints) == 1


def test_other_operations_shapes_and_gated_forms_have_other_fingerprints() -> None:
    wide = {"w": torch.zeros(5, 4), "u": torch.zeros(4, 4)}
    narrow = {name: weight.half() for name, weight in weights().items()}
    halves = {"inputs": {"x": Value((3,), "float16"), "h": State((4,), "float16")}}
    gated = Gated(("x", "h"), "ifuo", ("c",))
    cells = [
        cell(weights()),
        cell(weights(), step_with_other_operations),
        cell(wide, inputs={"x": Value((5,)), "h": State((4,))}),
        cell(narrow, **halves, outputs={"h": Output((4,), "float16")}),
        cell(weights(), gated=gated),
        cell(weights(), outputs={"h": Output((4,), returned=True)}),
    ]
    assert len({fingerprint(each) for each in cells}) == len(cells)


def test_a_cell_that_cannot_be_traced_has_a_fingerprint_of_its_work_on_zeros() -> None:
    def branching(weights: Tensors, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": h.exp() if x.sum() > 0 else -h}

    def other(weights: Tensors, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": h.exp() if x.sum() > 0 else h.sin()}

    assert fingerprint(cell(weights(), branching)) == fingerprint(cell(weights(), branching))
    assert fingerprint(cell(weights(), branching)) != fingerprint(cell(weights(), other))


def test_fingerprints_are_equal_in_every_process() -> None:
    """A fingerprint must hold no address.

    Computing it must not import a compiler, which would take a second at a start.
    """
    code = """
import sys
from holdfast.cells import applications
from holdfast.cells.types import fingerprint
print(*(fingerprint(cell) for name in applications.BUILT_IN for cell in applications.find(name).cells))
assert "triton" not in sys.modules and "torch._dynamo" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = [fingerprint(cell) for name in applications.BUILT_IN for cell in applications.find(name).cells]
    assert ran.stdout.split() == ours != []
