"""The write lock of a SQLite file: fair between processes, and free after a kill."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.server.conversations.write_lock import FileLock


def somebody_waits(database: Path) -> bool:
    """Whether a writer holds the line, which it does while it waits for the turn."""
    with Path(f"{database}-line").open() as line:
        with suppress(BlockingIOError):
            fcntl.flock(line, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        return True


def wait_for_a_writer(database: Path) -> None:
    """Wait until a writer waits for the turn."""
    end = time.monotonic() + 200
    while not somebody_waits(database):
        assert time.monotonic() < end, "no writer waits"
        time.sleep(0.001)


def test_a_writer_that_had_the_turn_lets_one_that_waits_go_first(tmp_path: Path) -> None:
    database, order = tmp_path / "store.sqlite", list[str]()
    one, other = FileLock(database), FileLock(database)

    def write() -> None:
        with other.held():
            order.append("other")

    for _ in range(20):
        with one.held():
            thread = threading.Thread(target=write, daemon=True)
            thread.start()
            wait_for_a_writer(database)
            order.append("one")
        with one.held():
            order.append("one again")
        thread.join(200)
    assert order == ["one", "other", "one again"] * 20
    one.close()
    other.close()


def test_threads_of_one_process_do_not_hold_the_lock_at_once(tmp_path: Path) -> None:
    lock, inside, most = FileLock(tmp_path / "store.sqlite"), list[int](), list[int]()

    def write() -> None:
        for _ in range(50):
            with lock.held():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=write, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert most == [1] * 200
    lock.close()


@pytest.mark.parametrize("when", ["it has the turn", "it waits"])
def test_the_lock_of_a_killed_process_is_free(tmp_path: Path, when: str) -> None:
    database = tmp_path / "store.sqlite"
    program = (
        "import sys\nfrom pathlib import Path\nfrom holdfast.server.conversations.write_lock import FileLock\n"
        "print('asks', flush=True)\n"
        "with FileLock(Path(sys.argv[1])).held():\n    print('has it', flush=True)\n    sys.stdin.read()"
    )
    own = FileLock(database)
    command = [sys.executable, "-c", program, str(database)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if when == "it waits":
            with own.held():
                assert process.stdout.readline() == b"asks\n"
                wait_for_a_writer(database)
                process.kill()
                process.wait()
        else:
            assert [process.stdout.readline() for _ in range(2)] == [b"asks\n", b"has it\n"]
            process.kill()
    with own.held():
        pass
    own.close()


def test_the_lock_is_released_after_an_error(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "store.sqlite")
    with pytest.raises(RuntimeError, match="within"), lock.held():
        raise RuntimeError("within")
    other = FileLock(tmp_path / "store.sqlite")
    with other.held():
        pass
    lock.close()
    other.close()


def test_only_the_owner_can_open_the_lock_files(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "store.sqlite")
    before = len([*Path("/proc/self/fd").iterdir()])
    with lock.held():
        files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["store.sqlite-line", "store.sqlite-turn"]
    assert [file.stat().st_mode & 0o077 for file in files] == [0, 0]
    lock.close()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_lock_file_that_is_no_regular_file_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store.sqlite-line")
    with pytest.raises(OSError, match="named pipe"), FileLock(tmp_path / "store.sqlite").held():
        pass
