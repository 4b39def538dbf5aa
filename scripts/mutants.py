"""Put known bugs into a copy of the tree, one at a time, run the tests that should fail, and list caught and lived.

    python scripts/mutants.py [WORD ...]     only the bugs that hold a WORD in a file's name or in their text

The bugs are in mutants.toml. All of them take over an hour; `holdfast/lm/memory` or `tests/server` names a part. Exit
status 1 if one lived, or if a file no longer holds what its bug replaces.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parent.parent
COPIED = (
    "holdfast",
    "tests",
    "scripts",
    "tools",
    "benchmarks",
    "docs",
    "deploy",
    "docker",
    ".dockerignore",
    "Makefile",
    "pyproject.toml",
    "README.md",
    "hatch_build.py",
)
PROCESSES = 2
"""Number of test runs at a time, each with its own copy of the tree."""
TEST_SECONDS, RUN_SECONDS = 120, 900
"""Seconds after which a test, or a run, has failed: the bug made it hang."""


class Mutant(NamedTuple):
    """A bug: `old` in `file`, which occurs there once, becomes `new`, and one of `tests` should fail."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Test files."""


def read_mutants() -> tuple[Mutant, ...]:
    """The bugs of the list. Each of its tables has a source file, the test files, and pairs of old and new text."""
    return tuple(
        Mutant(table["file"], old, new, tuple(table["tests"]))
        for table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["bugs"]
        for old, new in table["changes"]
    )


def main() -> int:
    """Try the bugs and print a line for each. Returns the exit status."""
    began, chosen = time.monotonic(), choose(read_mutants(), sys.argv[1:])
    if not chosen:
        print(f"no bug holds {' or '.join(sys.argv[1:])}", file=sys.stderr)
        return 1
    print(heading(sys.argv[1:]), flush=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-") as directory:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(PROCESSES):
            trees.put(copy_tree(Path(directory) / str(number)))
        with ThreadPoolExecutor(PROCESSES) as pool:
            catchers: set[str] = set()
            caught = 0
            tried = pool.map(lambda mutant: in_tree(trees, lambda tree: outcome(tree, mutant)), chosen)
            for mutant, (told, test) in zip(chosen, tried, strict=True):
                caught += told == "caught"
                catchers |= {test.partition("[")[0]} if test else set()
                by = f" by {test}" if test else ""
                print(f"{mutant.file}: {mutant.old!r} -> {mutant.new!r}\n    {told}{by}", flush=True)
            parts = [part for number in range(PROCESSES) if (part := sorted(catchers)[number::PROCESSES])]
            failed = [*filter(None, pool.map(lambda part: in_tree(trees, lambda tree: failure(tree, part)), parts))]
    if failed:
        print(f"fails without any bug, and so shows nothing: {' '.join(failed)}")
    print(f"{caught} of {len(chosen)} caught, in {(time.monotonic() - began) / 60:.0f} minutes")
    return 0 if caught == len(chosen) and not failed else 1


def choose(mutants: Iterable[Mutant], words: Collection[str]) -> list[Mutant]:
    """The bugs that have one of these words in a file's name or in their text; without words, all."""
    texts = ((mutant, (*mutant[:3], *mutant.tests)) for mutant in mutants)
    return [mutant for mutant, held in texts if not words or any(word in text for word in words for text in held)]


def heading(arguments: Iterable[str]) -> str:
    """The origin of a list of outcomes: command, date, commit, versions."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    versions = ", ".join(f"{name} {version(name)}" for name in ("pytest", "hypothesis", "torch"))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = " ".join(["python scripts/mutants.py", *arguments])
    return f"`{command}`, {date}, commit {commit}, Python {platform.python_version()}, {versions}\n"


def copy_tree(target: Path) -> Path:
    """Copy everything that the tests read to `target`."""
    target.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


def in_tree(trees: SimpleQueue[Path], work: Callable[[Path], T]) -> T:
    """The result of work in a tree that nothing else uses meanwhile."""
    tree = trees.get()
    try:
        return work(tree)
    finally:
        trees.put(tree)


def outcome(tree: Path, mutant: Mutant) -> tuple[str, str]:
    """The outcome of one bug, and the test that fails: caught, lived, or stale if its old text does not occur once."""
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return "stale", ""
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        failed = failure(tree, mutant.tests)
        return ("caught" if failed else "lived"), failed
    finally:
        path.write_text(text)


def failure(tree: Path, tests: Iterable[str]) -> str:
    """The first of these tests that fails in the tree; empty if none does."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-m", "not gpu and not long", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    limit = f"--timeout={TEST_SECONDS}"
    try:
        run = subprocess.run(
            [*command, limit, *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"taking over {RUN_SECONDS} s"
    if run.returncode == 0:
        return ""
    named = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return named[1] if named else f"pytest's exit status {run.returncode}"


if __name__ == "__main__":
    sys.exit(main())
