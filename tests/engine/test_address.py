"""Addresses of engines, and the keys that they share with their clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.engine.address import check_address, endpoint, new_key, read_key


def test_an_address_with_a_slash_is_a_path_and_all_others_name_a_port(tmp_path: Path) -> None:
    assert endpoint(f"{tmp_path}/e") == f"ipc://{tmp_path}/e"
    assert endpoint("host:80") == "tcp://host:80"
    assert endpoint("[::1]:65535") == "tcp://[::1]:65535"


@pytest.mark.parametrize("address", ["engine", ":80", "host:", "host:0", "host:65536", "host:x", ""])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ValueError, match="port from 1 to 65535"):
        endpoint(address)


def test_a_path_that_is_too_long_names_the_limit() -> None:
    with pytest.raises(ValueError, match="107 bytes"):
        endpoint("/" + "x" * 107)
    assert endpoint("/" + "x" * 106)


def test_tcp_needs_a_key_and_a_path_does_not() -> None:
    check_address("./engine.sock", None)
    check_address("host:80", "key")
    with pytest.raises(ValueError, match="--engine-key"):
        check_address("host:80", None)


def test_a_key_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    new_key(str(path))
    key = read_key(str(path))
    assert len(key) == 40 and path.stat().st_mode & 0o777 == 0o600
    new_key(str(path))
    assert read_key(str(path)) == key
    path.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        read_key(str(path))
    assert read_key(None) == ""


@pytest.mark.parametrize("content", ["", "short", "\x01" * 40])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(ValueError, match="holds no engine key"):
        read_key(str(path))
