"""Processes that tests fork: they are what was ordered, and they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.version import __version__
from holdfast.engine import spawn
from tests.forked import Forked, Forking
from tests.served import eventually, make_checkpoint, serve

ENGINE = "holdfast.engine.process.serve"


@pytest.fixture
def forking(forked_engines: Forking) -> Forking:
    """The template of all tests, as another one would import PyTorch and the engine again."""
    return forked_engines


def engine(forking: Forking, **options: Any) -> Forked:
    """An engine that waits for the address of its client's socket. It ends, with status 1, with its input."""
    command = [sys.executable, "-P", "-m", ENGINE, str(os.getpid()), "cpu", "holdfast.engine.process.build"]
    found = forking.Popen(command, **{"stdin": subprocess.PIPE, "stdout": 2, "env": dict(os.environ)} | options)
    assert isinstance(found, Forked)
    return found


def of(process: Any, name: str) -> Path:
    return Path(f"/proc/{process.pid}/{name}")


def test_a_forked_process_has_the_descriptors_the_directory_and_the_session_that_were_ordered(
    forking: Forking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    passed = tmp_path / "passed"
    with (
        passed.open("w") as file,
        engine(forking, pass_fds=[file.fileno()], start_new_session=True) as process,
    ):
        while of(process, "cwd").resolve() != tmp_path:
            time.sleep(0.001)
        assert of(process, f"fd/{file.fileno()}").resolve() == passed
        assert of(process, "fd/1").resolve() == of(process, "fd/2").resolve()
        assert os.getsid(process.pid) == process.pid


def test_a_forked_process_ends_with_its_input(forking: Forking) -> None:
    process = engine(forking)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(60) == process.poll() == process.returncode == 1


def test_a_killed_process_has_the_signals_number_as_its_status(forking: Forking) -> None:
    with engine(forking) as one, engine(forking) as other:
        one.kill()
        assert one.wait(60) == -signal.SIGKILL
        one.kill()
        assert other.poll() is None


def test_forked_processes_end_with_their_template() -> None:
    forking = Forking()
    process = engine(forking)
    forking.close()
    assert process.wait(60) == -signal.SIGKILL
    process.stdin.close()


def test_the_template_has_one_thread_when_it_forks(forking: Forking) -> None:
    """A lock that another thread holds would stay locked in the new process."""
    with engine(forking) as process:
        template = of(process, "stat").read_text().split()[3]
        assert len([*Path(f"/proc/{template}/task").iterdir()]) == 1


def command(forking: Forking, *arguments: str, **options: Any) -> Forked:
    """The `holdfast` command, as `served` starts it."""
    pipe, given = subprocess.PIPE, {"env": dict(os.environ), "cwd": Path.cwd()} | options
    found = forking.Popen(
        [sys.executable, "-m", "holdfast.cli", *arguments], stdout=pipe, stderr=pipe, text=True, **given
    )
    assert isinstance(found, Forked)
    return found


def test_a_forked_command_has_its_own_output_errors_and_status(forking: Forking) -> None:
    with command(forking, "--version") as process:
        assert process.communicate(60) == (f"holdfast {__version__}\n", "")
        assert process.returncode == 0
    with command(forking, "serve", "--port", "70000") as process:
        output, errors = process.communicate(60)
        assert (process.returncode, output) == (2, "") and "70000" in errors


def test_a_forked_command_writes_where_it_is_told_to_in_a_session_of_its_own(forking: Forking, tmp_path: Path) -> None:
    words, options = [sys.executable, "-m", "holdfast.cli"], {"env": dict(os.environ), "stdin": subprocess.DEVNULL}
    quiet = {"stdout": subprocess.DEVNULL, "start_new_session": True}
    output, errors = tmp_path / "output", tmp_path / "errors"
    with output.open("w") as file, forking.Popen([*words, "--version"], stdout=file, stderr=file, **options) as process:
        assert process.wait(60) == 0 and process.stdout is process.stderr is None
    assert output.read_text() == f"holdfast {__version__}\n"
    refused = ["serve", "--port", "70000"]
    with errors.open("w") as file, forking.Popen([*words, *refused], stderr=file, **quiet, **options) as process:
        assert process.wait(60) == 2 and "70000" in errors.read_text()
    with forking.Popen([*words, "engine", "--listen", str(tmp_path / "socket")], **quiet, **options) as process:
        session, wanted = os.getsid(process.pid), [Path(os.devnull)] * 2 + [Path("/proc/self/fd/2").readlink()]
        try:
            while [of(process, f"fd/{number}").readlink() for number in range(3)] != wanted and process.poll() is None:
                time.sleep(0.001)
        finally:
            process.kill()
        assert (session, process.wait(60)) == (process.pid, -signal.SIGKILL)


def test_a_forked_server_finds_the_modules_of_its_directory_and_prints_warnings_where_asked_to(
    forking: Forking, tmp_path: Path
) -> None:
    (tmp_path / "local_apps.py").write_text("import warnings\nwarnings.warn('an app', DeprecationWarning)\n")
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    asked = ("serve", "--app", "local_apps:none", "--port", "0")
    with command(forking, *asked, cwd=tmp_path, env=environment) as process:
        _, errors = process.communicate(60)
        assert process.returncode == 2, errors
        assert "an app" in errors and "none" in errors


def test_a_forked_server_has_forked_engines_of_its_own_and_ends_at_a_signal(tmp_path: Path) -> None:
    """The second engine starts when the server has several threads."""
    with serve(make_checkpoint(tmp_path / "bytes"), "--store", "memory", "--replicas", "2") as serving:
        assert isinstance(serving.process, Forked)
        engines = serving.engine_pids()
        assert len(engines) == 2
        for engine in [SimpleNamespace(pid=pid) for pid in engines]:
            assert b"tests.forked" in of(engine, "cmdline").read_bytes()
            assert len([*of(engine, "task").iterdir()]) > 1, "it is an engine"
            of_engine, of_server = (
                {name for each in of(process, "fd").iterdir() if (name := str(each.readlink())).startswith("socket")}
                for process in (engine, serving.process)
            )
            assert of_server and not of_engine & of_server, "the engine keeps no port open"
        serving.process.send_signal(signal.SIGINT)
        assert serving.process.wait(60) == 0
        assert not any(Path(f"/proc/{engine}").exists() for engine in engines)


def test_all_that_a_forked_command_has_forked_ends_when_it_is_killed(tmp_path: Path) -> None:
    with serve(make_checkpoint(tmp_path / "bytes"), "--store", "memory") as serving:
        children = [int(pid) for pid in of(serving.process, f"task/{serving.process.pid}/children").read_text().split()]
        assert len(children) == 2, "its engine, and the process that forked this one"
        serving.process.kill()
        serving.process.wait(60)
        eventually(lambda: not any(runs(pid) for pid in children))


def runs(pid: int) -> bool:
    """Whether a process has not ended. One that nobody has waited for counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_other_processes_start_as_usual(forking: Forking) -> None:
    with forking.Popen([sys.executable, "-c", "print(5)"], stdout=subprocess.PIPE) as process:
        assert isinstance(process, subprocess.Popen) and process.communicate()[0] == b"5\n"


def test_the_engines_of_a_test_may_start_in_new_processes(started_engines: None) -> None:
    with spawn.EngineProcess("cpu") as process:
        assert Path(f"/proc/{process.pid}/stat").read_text().split()[3] == str(os.getpid()), "it is our own child"
