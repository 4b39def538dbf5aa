"""`holdfast engine` and `holdfast serve --engines`: usage, and an engine that a signal ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from served import command

from holdfast.cli import main
from holdfast.cli.engine import ListenConfig, key_of, local_key
from holdfast.cli.flags import UsageError
from holdfast.engine import messages
from holdfast.engine.client.attachment import Attachment

SIZES = ("--cache-gb", "0.05", "--threads", "1", "--device", "cpu")


def test_an_engine_says_where_it_listens_and_a_signal_ends_it_without_a_trace(tmp_path: Path) -> None:
    address = f"{tmp_path}/an engine.sock"
    with command("engine", "--listen", address, *SIZES, anew=True) as engine:
        assert engine.stdout is not None
        said = ""
        while "serves it" not in said:
            line = engine.stdout.readline()
            assert line, said
            said += line
        assert f"holdfast serve --engines '{address}' serves it" in said
        assert Path(address).is_socket()
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(60) == 0
    assert not Path(address).exists()


@contextmanager
def running_engine(address: str, *more: str) -> Iterator[Any]:
    """An engine that is ready at an address."""
    with command("engine", "--listen", address, *SIZES, *more) as engine:
        try:
            assert engine.stdout is not None
            while "serves it" not in (line := engine.stdout.readline()):
                assert line, engine.stderr and engine.stderr.read()
            yield engine
        finally:
            engine.kill()


async def test_an_engine_waits_for_its_servers_up_to_its_time_to_drain(tmp_path: Path) -> None:
    address = f"{tmp_path}/engine.sock"
    with running_engine(address, "--drain-seconds", "0.5") as engine:
        staying, _ = await Attachment.open(address)
        began = time.monotonic()
        engine.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(engine.wait, 60) == 0
        assert time.monotonic() - began > 0.5
        assert engine.stderr is not None and "still attached after 0.5 s" in engine.stderr.read()
        await staying.close()


async def test_a_second_signal_ends_an_engine_that_drains(tmp_path: Path) -> None:
    address = f"{tmp_path}/engine.sock"
    with running_engine(address, "--drain-seconds", "3600") as engine:
        staying, _ = await Attachment.open(address)
        engine.send_signal(signal.SIGTERM)
        assert isinstance(await staying.receive(), messages.Draining)
        engine.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(engine.wait, 60) == 128 + signal.SIGTERM
        await staying.close()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["engine", "--listen", "host:80"], "--engine-key"),
        (["engine", "--listen", "here"], "port from 1 to 65535"),
        (["engine", "--end-unattended", "0"], "end_unattended is 0; it must lie between 1 and 2.592e+06 seconds"),
        (["engine", "--drain-seconds", "-1"], "drain_seconds is -1.0; it must lie between 0 and 86400"),
        (["serve", "--lame-duck-seconds", "3601"], "lame_duck_seconds is 3601.0; it must lie between 0 and 3600"),
        (["serve", "--engines", "./a", "some-model"], "MODEL is for an engine that is started here"),
        (["serve", "--engines", "./a", "--max-sequences", "4"], "--max-sequences is for an engine"),
        (["serve", "--api-processes", "0"], "api_processes is 0; it must lie between 1 and 64"),
        (["serve", "--api-processes", "2", "--store", "memory"], "store is memory"),
        (["serve", "--api-processes", "2", "--app", "dates"], "--api-processes"),
    ],
)
def test_options_that_contradict_each_other_are_named(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_the_key_of_an_engine_on_tcp_is_made_and_a_path_needs_none(tmp_path: Path) -> None:
    file = tmp_path / "key"
    assert len(key_of(ListenConfig(listen="host:80", engine_key=str(file)))) == 40
    assert key_of(ListenConfig(listen="./engine.sock")) == ""


def test_an_engine_that_no_server_attaches_to_ends_after_the_given_time(tmp_path: Path) -> None:
    with command("engine", "--listen", f"{tmp_path}/engine.sock", *SIZES, "--end-unattended", "1") as engine:
        _, errors = engine.communicate()
    assert engine.returncode == 0
    assert "no server was attached for 1 s, so the engine ends" in errors


def test_engines_of_one_user_share_a_key_that_only_the_user_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert local_key() == local_key()
    file = tmp_path / "holdfast" / "engines.key"
    assert file.stat().st_mode & 0o077 == 0
    file.chmod(0o644)
    with pytest.raises(UsageError, match=r"engines\.key can be read by other users"):
        local_key()
