"""Several processes that write to one store: none is refused, and what was answered survives a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import storing
from sqlalchemy import text
from storing import AMPLE, BUSY, CLIENTS

from holdfast.server.conversations.leases import conversation_key
from holdfast.server.conversations.store import Store

PROCESSES = 4


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "s.sqlite" if request.param == "sqlite" else request.getfixturevalue("postgresql_schema"))


@pytest.fixture
def processes(where: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that wait for a line to begin. Another server has locked BUSY, for longer than they take to start."""
    store = Store.open(where, AMPLE, lambda: time.time() + 3600)
    store.leases.lock(conversation_key("a", BUSY))
    with ExitStack() as stack:
        yield [stack.enter_context(started(where, number)) for number in range(PROCESSES)]
    store.close()


def started(where: str, number: int) -> subprocess.Popen[str]:
    program = f"import sys\nsys.path[:0] = {[str(Path(storing.__file__).parent), *sys.path]!r}\nimport asyncio\n"
    program += f"import storing\nasyncio.run(storing.serve({where!r}, '{number}'))"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def begin(processes: list[subprocess.Popen[str]], turns: int) -> None:
    """Let each client store a number of turns."""
    for process in processes:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write(f"{turns}\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]


def stored(where: str) -> set[str]:
    """Return the ids of the stored turns, after a check that the last ones are their conversations' heads."""
    store = Store.open(where, AMPLE)
    with store.database.read() as db:
        found = {*db.execute(text("SELECT id FROM turns")).scalars()}
        last = "SELECT id FROM turns WHERE id NOT IN (SELECT parent FROM turns WHERE parent IS NOT NULL)"
        ends = {*db.execute(text(last)).scalars()}
        heads = {*db.execute(text("SELECT head FROM conversations WHERE head IS NOT NULL")).scalars()}
    store.close()
    assert ends == heads, "a turn and its conversation's head are stored together"
    return found


@pytest.mark.always("sqlite")
def test_256_turns_at_once_from_four_processes_are_all_stored(
    where: str, processes: list[subprocess.Popen[str]]
) -> None:
    begin(processes, 1)
    ended = [process.communicate(timeout=200) for process in processes]
    assert [(process.returncode, errors) for process, (_, errors) in zip(processes, ended, strict=True)] == [
        (0, "")
    ] * PROCESSES
    answered = [line for output, _ in ended for line in output.splitlines()]
    assert len(answered) == PROCESSES * CLIENTS and {*answered} == stored(where)


@pytest.mark.always("postgresql")
def test_every_answered_turn_survives_the_kill_of_all_processes(
    where: str, processes: list[subprocess.Popen[str]]
) -> None:
    begin(processes, 1000)
    answered = list[str]()
    for process in processes:
        assert process.stdout is not None
        answered += [process.stdout.readline().strip() for _ in range(3)]
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        output, errors = process.communicate(timeout=200)
        assert process.returncode == -signal.SIGKILL and errors == ""
        answered += [line for line in output.splitlines(keepends=True) if line.endswith("\n")]
    answered = [line.strip() for line in answered]
    found = stored(where)
    assert len(answered) >= 3 * PROCESSES and {*answered} <= found
