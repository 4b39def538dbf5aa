"""ListOps: held-out expressions have the values that arithmetic gives, as plain PyTorch computes them."""

from __future__ import annotations

import re
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

from holdfast.cells.applications import listops
from holdfast.cells.partition import Splitter
from scripts import cell_data
from scripts.train_cells import answers, run_together
from tests.cells.applications.references import ListOpsReference, returning_h, text_of


@cache
def cases() -> list[cell_data.Case]:
    """The cases that the application must solve."""
    return cell_data.cases_of_test("listops", 1000)


def value(text: str) -> int:
    """The value of an expression, by Python."""
    functions = {
        "MAX": lambda *values: max(values),
        "MIN": lambda *values: min(values),
        "MED": lambda *values: int(np.median(values)),
        "SM": lambda *values: sum(values) % 10,
    }
    code = text
    for operator in functions:
        code = code.replace(f"[{operator} ", f"{operator}(")
    return int(eval(code.replace(" ]", ")").replace(" ", ","), {"__builtins__": {}}, functions))


def test_at_least_97_of_100_held_out_expressions_are_right() -> None:
    given = answers(listops.load(), [case.text for case in cases()])
    assert sum(found == case.answer for found, case in zip(given, cases(), strict=True)) >= 970


def test_values_and_states_equal_plain_pytorch() -> None:
    application, reference = listops.load(), ListOpsReference()
    application.internal = returning_h(application.internal)
    application.cells = (application.leaf, application.internal, application.read)
    graphs = [application.unfold(text_of(case.text)) for case in cases()[:60]]
    for graph in graphs:
        graph.result("h", graph.nodes - 2, "h")
    for case, results in zip(cases(), run_together(application, graphs), strict=False):
        found, h = reference.run(case.text)
        assert results["value"].tolist() == found
        np.testing.assert_allclose(results["h"], h.numpy(), atol=1e-5, rtol=0)


def test_the_answers_of_the_data_are_those_of_arithmetic() -> None:
    assert len({case.text for case in cases()}) > 900
    for case in cases():
        assert case.answer == [value(case.text)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[MAX 2 9 4 ]", 9), ("[MIN 2 9 4 ]", 2), ("[SM 9 9 4 ]", 2), ("[MED 9 1 4 ]", 4), ("[MED 1 2 7 9 ]", 4),
        ("[MED 3 4 ]", 3), ("[SM 8 [MAX 1 5 ] [MIN 7 [MED 0 9 6 ] ] ]", 9),
    ],
)  # fmt: skip
def test_a_median_between_two_values_is_rounded_down_and_a_sum_is_taken_modulo_ten(text: str, answer: int) -> None:
    assert cell_data.values_of(listops.parse(text))[-1][0] == answer == value(text)


def test_expressions_reach_the_depth_and_the_length_that_the_docs_state() -> None:
    stated = " ".join((Path(__file__).parents[3] / "docs" / "cells.md").read_text().split())
    found = re.search(r"nested at most (\d+) deep \(20 in their data\) and have at most (\d+) tokens", stated)
    assert found is not None, "the docs state both"
    deepest, most = map(int, found.groups())
    tokens = [len(case.text.split()) for case in cases()]
    depths = [max(np.cumsum([(word[0] == "[") - (word == "]") for word in case.text.split()])) for case in cases()]
    assert max(depths) == deepest
    assert 0.8 * most < max(tokens) <= most


def test_a_list_is_joined_from_the_left() -> None:
    tree = listops.parse("[MAX 2 [SM 4 7] 0]")
    assert tree.tokens == [10, 2, 13, 4, 7, 14, 0, 14]
    # ((((MAX 2) (((SM 4) 7) ])) 0) ]): nodes 8 to 14
    assert tree.left == [0, 2, 9, 10, 8, 12, 13]
    assert tree.right == [1, 3, 4, 5, 11, 6, 7]
    assert tree.root == 14


def test_a_digit_is_an_expression_of_one_leaf() -> None:
    application = listops.load()
    graph = application.unfold(text_of("7"))
    assert graph.nodes == 2
    assert answers(application, [str(digit) for digit in range(10)]) == [[digit] for digit in range(10)]


def test_internal_nodes_are_one_subgraph_and_each_leaf_is_its_own() -> None:
    application = listops.load()
    graph = application.unfold(text_of("[MAX 2 9 [MIN 4 7 ] 0 ]"))
    partition = Splitter({cell: place for place, cell in enumerate(application.cells)}).split([graph])
    _, sizes = np.unique(partition.subgraph, return_counts=True)
    assert sorted(sizes.tolist()) == [1] * 9 + [1, 8]
    assert application.leaf.priority < application.internal.priority < application.read.priority


def test_blanks_do_not_matter() -> None:
    assert listops.parse(" [MAX 1\n2]\t") == listops.parse("[ MAX 1 2 ]")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the expression is empty; it needs at least a digit"),
        (" ", "the expression is empty; it needs at least a digit"),
        ("[MAX 1 2", "1 lists are not closed; each [ needs a ]"),
        ("[MAX 1 2 ] ]", "']' follows the end of the expression; one list or digit is allowed"),
        ("] 1", "token 1 is a ] that closes no list"),
        ("1 2", "'2' follows the end of the expression; one list or digit is allowed"),
        ("[AVG 1 2 ]", "operator is 'AVG'; it must be one of MAX, MIN, MED, SM"),
        ("[ 1 2 ]", "operator is '1'; it must be one of MAX, MIN, MED, SM"),
        ("[MAX 1 12 ]", "12 is not a digit; values are 0 to 9"),
        ("[MAX 1 -2 ]", "'-' is not a token; there are digits, ], and [ with one of MAX, MIN, MED, SM"),
        ("[MAX ٣ 2 ]", "'٣' is not a token; there are digits, ], and [ with one of MAX, MIN, MED, SM"),
        ("[MAX 1 ]", "the list that ends at token 3 has 1 values; 2 to 5 are allowed"),
        ("[MAX 1 2 3 4 5 6 ]", "the list that ends at token 8 has 6 values; 2 to 5 are allowed"),
        ("[MAX 1 " * 9 + "2" + " ]" * 9, "lists are nested 9 deep; at most 8 are allowed"),
        ("[SM " + "[SM 1 2 3 4 5 ] " * 29 + "]", "the expression has 205 tokens; at most 200 are allowed"),
    ],
)
def test_an_invalid_expression_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        listops.load().unfold(text_of(text))
    assert str(caught.value) == reason


def test_expressions_of_training_and_test_differ() -> None:
    trained = {case.text for case in islice(cell_data.expressions(Random(5), test=False), 3000)}
    assert not trained & {case.text for case in cases()}
