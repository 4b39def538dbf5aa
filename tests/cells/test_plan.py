"""The places of outputs in the arenas."""

from __future__ import annotations

import itertools

from holdfast.cells.cell import Cell, Output, Spec, Value
from holdfast.cells.plan import Layout


def cell(name: str, **outputs: Output) -> Cell:
    return Cell(name, lambda weights, **inputs: inputs, {"x": Value()}, outputs)


ONE = cell("one", h=Output((4,)), c=Output((4,)), label=Output((), "int32", returned=True))
OTHER = cell("other", c=Output((4,)), half=Output((4,), "float16"))


def test_outputs_of_one_shape_and_type_share_an_arena_as_wide_as_the_cell_with_most_of_them() -> None:
    layout = Layout([ONE, OTHER])
    assert layout.widths == {Spec((4,)): 2, Spec((), "int32"): 1, Spec((4,), "float16"): 1}


def test_two_outputs_of_a_cell_never_have_one_place() -> None:
    layout = Layout([ONE, OTHER])
    for each in (ONE, OTHER):
        for one, other in itertools.combinations(each.outputs, 2):
            assert layout.place(each, one) != layout.place(each, other)
    assert layout.place(ONE, "c") == (Spec((4,)), 1) and layout.within(ONE, "c") == (2, 1)
    assert layout.place(OTHER, "c") == (Spec((4,)), 0) and layout.within(OTHER, "c") == (2, 0)


def test_an_arena_that_no_output_needs_has_width_1() -> None:
    layout = Layout([ONE])
    assert layout.width_of(Spec((4,))) == 2 and layout.width_of(Value((4,))) == 2
    assert layout.width_of(Spec((9,))) == 1
