"""The list of known bugs: each still applies to the code, and its outcome is reported right."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutants import ROOT, Mutant, choose, outcome, read_mutants


def faults(mutant: Mutant) -> list[str]:
    """Why a bug shows nothing; empty if it applies to its file, changes it, and names tests that are there."""
    path = ROOT / mutant.file
    held = path.read_text().count(mutant.old) if path.is_file() else 0
    return [
        *([] if held == 1 else [f"its file holds the old text {held} times"]),
        *([] if mutant.new != mutant.old else ["it changes nothing"]),
        *([] if mutant.tests else ["it names no tests"]),
        *(f"there is no {test}" for test in mutant.tests if not (ROOT / test).is_file()),
    ]


def test_every_bug_replaces_text_that_its_file_holds_once_and_names_tests_that_exist() -> None:
    bugs = read_mutants()
    assert len(bugs) > 400
    wrong = {f"{bug.file}: {bug.old!r} -> {bug.new!r}": found for bug in bugs if (found := faults(bug))}
    assert wrong == {}


def test_a_bug_that_shows_nothing_is_listed_with_all_its_faults() -> None:
    assert faults(Mutant("pyproject.toml", "[project]\n", "[project]\n", ("tests/none.py",))) == [
        "it changes nothing",
        "there is no tests/none.py",
    ]
    assert faults(Mutant("none.py", "1", "2", ())) == ["its file holds the old text 0 times", "it names no tests"]


def test_a_bug_is_caught_or_lives_or_is_stale_and_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.py"
    path.write_text("a = 1\n")
    monkeypatch.setattr(mutants, "failure", lambda tree, tests: "test_a" * (path.read_text() == "a = 2\n"))
    told = [outcome(tmp_path, Mutant("file.py", old, new, ())) for old, new in (("1", "2"), ("1", "3"), ("4", "5"))]
    assert told == [("caught", "test_a"), ("lived", ""), ("stale", "")]
    assert path.read_text() == "a = 1\n"


def test_words_choose_the_bugs_that_hold_one_of_them_in_a_file_or_in_their_text() -> None:
    one = Mutant("holdfast/one.py", "first", "b", ("tests/test_x.py",))
    two = Mutant("holdfast/two.py", "last", "changed", ("tests/test_y.py",))
    assert choose([one, two], []) == [one, two]
    assert choose([one, two], ["one.py", "nothing"]) == choose([one, two], ["first", "test_x"]) == [one]
    assert choose([one, two], ["test_x", "changed"]) == [one, two]
    assert choose([one, two], ["nothing"]) == []
