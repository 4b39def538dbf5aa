"""Notes to systemd: `notify`, and the commands that send them."""

from __future__ import annotations

import socket
import uuid
from pathlib import Path

import pytest

from holdfast.cli.notify import SOCKET_VARIABLE, notify


@pytest.fixture(params=["file", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """A socket like systemd's, which the environment names."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = uuid.uuid4().hex
    listener.bind(str(tmp_path / "notify") if request.param == "file" else f"\0{name}")
    listener.settimeout(5)
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "notify") if request.param == "file" else f"@{name}")
    request.addfinalizer(listener.close)
    return listener


def test_systemd_gets_the_message(systemd: socket.socket) -> None:
    assert notify("READY=1")
    assert systemd.recv(100) == b"READY=1"


@pytest.mark.parametrize("place", ["", "relative", "/nowhere/at/all"])
def test_without_a_listener_nothing_is_sent_and_nothing_fails(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, place)
    assert not notify("READY=1")
