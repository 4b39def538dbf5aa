"""Processes that tests fork are children of the test's process, as those are that start an interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.engine.spawn import EngineProcess
from tests.long import then_long


def test_an_engine_is_forked_as_our_child_in_a_session_of_its_own_and_ends_with_its_input() -> None:
    with EngineProcess("cpu") as process:
        parent, _, session = (int(word) for word in stat_of(process.pid)[1:4])
        assert (parent, session) == (os.getpid(), process.pid)
        assert b"tests.fork_server" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process._input.close()
        assert process.wait() == 1


def stat_of(pid: int) -> list[str]:
    """The fields of a process's stat file after its name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def test_any_other_command_starts_an_interpreter() -> None:
    printed = "import sys; print('tests.fork_server' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", printed], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_all_but_the_first_cases_of_a_grid_are_long() -> None:
    kept, other = then_long(1, [(1, "a"), (2, "b")])
    assert kept == (1, "a") and other.values == (2, "b") and other.marks[0].name == "long"
    with pytest.raises(ValueError, match="2 of 2 cases"):
        then_long(2, [(1, "a"), (2, "b")])
