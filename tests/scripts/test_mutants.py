"""The list of known bugs: each still applies to the code, and its outcome is told right."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutants import ROOT, Mutant, outcome, read_mutants


@pytest.mark.parametrize("mutant", read_mutants(), ids=lambda mutant: f"{mutant.file}: {mutant.new}")
def test_every_bug_replaces_text_that_its_file_holds_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert mutant.tests and all((ROOT / test).is_file() for test in mutant.tests)


def test_a_bug_is_caught_or_lives_or_is_stale_and_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.py"
    path.write_text("a = 1\n")
    monkeypatch.setattr(mutants, "failure", lambda tree, tests: "test_a" * (path.read_text() == "a = 2\n"))
    told = [outcome(tmp_path, Mutant("file.py", old, new, ())) for old, new in (("1", "2"), ("1", "3"), ("4", "5"))]
    assert told == [("caught", "test_a"), ("lived", ""), ("stale", "")]
    assert path.read_text() == "a = 1\n"
