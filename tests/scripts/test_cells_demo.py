"""The demo of cells: its table is what the planner did, and its results are the application's."""

from __future__ import annotations

import pytest

from holdfast.cells.applications import find
from scripts.cells_demo import SAMPLES, main, steps


@pytest.mark.parametrize("app", sorted(SAMPLES))
def test_every_request_joins_once_and_leaves_once_with_its_result(app: str) -> None:
    texts = SAMPLES[app]
    made = list(steps(find(app), texts, every=2, max_tasks=2))
    names = [chr(ord("A") + number) for number in range(len(texts))]
    assert sorted(name for step in made for name in step.joined) == names
    assert sorted(name for step in made for name in step.left) == names
    assert all(step.nodes.total() <= step.size for step in made)
    assert [step.number for step in made] == sorted(step.number for step in made)
    joined, left = ({name: step.number for step in made for name in getattr(step, way)} for way in ("joined", "left"))
    for step in made:
        for name in step.nodes:
            assert joined[name] <= step.number <= left[name]


def test_requests_join_a_batch_that_others_have_begun() -> None:
    made = list(steps(find("tagger"), SAMPLES["tagger"], every=2, max_tasks=1))
    assert any(step.joined and set(step.nodes) - set(step.joined) for step in made)
    assert any(step.left and set(step.nodes) - set(step.left) for step in made)


def test_the_table_ends_with_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--app", "listops", "[MAX 2 9 ]", "7"]) == 0
    shown = capsys.readouterr().out
    assert "joined" in shown and shown.endswith("A  value 9\nB  value 7\n")


@pytest.mark.parametrize("words", [["--app", "nobody"], ["--app", "listops", "[MAX"]])
def test_bad_usage_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
