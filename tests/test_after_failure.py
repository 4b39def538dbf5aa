"""A failed test fails alone; one that passes may leave nothing open."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEAKS = """
import gc, socket, asyncio, pytest

class Holder:
    def __init__(self):
        self.me, self.socket = self, socket.socket()

async def never():
    pass

@pytest.fixture
def holder():
    yield Holder()

def test_fails_with_an_open_socket():
    held = Holder()
    assert not held

def test_passes_after_it():
    gc.collect()

def test_fails_with_a_socket_of_a_fixture_and_a_coroutine(holder):
    waiting = never()
    assert not holder

def test_passes_after_that():
    gc.collect()
"""
SLOPPY = """
import gc, socket

def test_passes_with_an_open_socket():
    socket.socket()
    gc.collect()
"""


def outcomes(directory: Path, tests: str) -> tuple[str, str]:
    """What pytest prints of these tests, with warnings as errors, and its closing line."""
    (directory / "pytest.ini").write_text(
        "[pytest]\nfilterwarnings = error\naddopts = -q -p no:cacheprovider -p no:asyncio\n"
    )
    (directory / "conftest.py").write_text(
        "from tests.after_failure import pytest_runtest_makereport, pytest_runtest_teardown\n"
    )
    path = directory / "test_them.py"
    path.write_text(tests)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", str(path)]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.stdout, re.sub(r" in .*", "", done.stdout.splitlines()[-1])


def test_what_a_failed_test_leaves_open_fails_no_other_test(tmp_path: Path) -> None:
    shown, end = outcomes(tmp_path, LEAKS)
    assert end == "2 failed, 2 passed", shown


def test_a_passing_test_that_leaves_a_socket_open_still_fails(tmp_path: Path) -> None:
    shown, end = outcomes(tmp_path, SLOPPY)
    assert end == "1 failed" and "unclosed" in shown, shown
