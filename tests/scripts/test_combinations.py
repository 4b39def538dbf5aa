"""docs/combinations.md is what the table of features says."""

from __future__ import annotations

import re

from scripts.combinations import PAGE, ROOT, draw, said
from tests.combinations.table import FEATURES, REFUSED, pairs


def rows() -> dict[str, list[str]]:
    """The cells of the page's first table, by the title of the row."""
    text = PAGE.read_text().partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in cells[1:]}


def test_the_page_is_drawn_from_the_table() -> None:
    assert PAGE.read_text() == draw(), "make combinations draws it"


def test_the_page_has_a_cell_for_each_pair_in_both_orders_and_a_reason_for_each_that_does_not_work() -> None:
    titles, found = [*FEATURES], rows()
    assert [*found] == [feature.title for feature in FEATURES.values()]
    listed = dict(re.findall(r"^(\d+)\. (.*)$", PAGE.read_text(), re.MULTILINE))
    for first, second in pairs():
        cell = found[FEATURES[first].title][titles.index(second)]
        assert cell == found[FEATURES[second].title][titles.index(first)]
        refusal = REFUSED.get(frozenset((first, second)))
        if refusal is None:
            assert cell == "W"
        else:
            assert listed[cell] == said(refusal)


def test_the_results_that_the_page_names_are_those_of_all_combinations() -> None:
    (name,) = re.findall(r"\.\./(benchmarks/engine/results/[\w.-]+)", PAGE.read_text())
    assert (ROOT / name).read_text().rstrip().endswith("60 of 60 combinations give the tokens of a plain engine")
