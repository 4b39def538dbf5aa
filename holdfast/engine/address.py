"""The address of an engine that its clients attach to: a Unix socket's path, or HOST:PORT with a shared key."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from holdfast.files.regular import read_text

PATH_LIMIT = 107
"""Most bytes of a Unix socket's path."""
KEY_LENGTH = 40
"""Number of characters of a key in Z85, which encodes 32 bytes."""


def endpoint(address: str) -> str:
    """The address in ZeroMQ's form. An address with a slash is a path. Raises ValueError for one that is neither."""
    if "/" in address:
        path = Path(address).absolute()
        if len(os.fsencode(path)) > PATH_LIMIT:
            raise ValueError(f"the engine's address {path} is too long: a Unix socket's path has {PATH_LIMIT} bytes")
        return f"ipc://{path}"
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(
            f"the engine's address is {address!r}; give the path of a Unix socket, with a slash, or HOST:PORT with a "
            "port from 1 to 65535"
        )
    return f"tcp://{address}"


def is_local(address: str) -> bool:
    """Whether an address is a Unix socket, which needs no key: its file's mode keeps other users out."""
    return "/" in address


def check_address(address: str, key_file: str | None) -> None:
    """Raises ValueError for an invalid address, and for one of TCP without a key."""
    endpoint(address)
    if not is_local(address) and key_file is None:
        raise ValueError(
            f"the engine's address is {address}, which other machines can reach; give --engine-key FILE, or the path "
            "of a Unix socket"
        )


def new_key(path: str) -> None:
    """Create a key file that only this user can read, unless it exists. Raises OSError."""
    import zmq  # an engine starts before this is loaded

    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "wb") as file:
        file.write(zmq.curve_keypair()[1] + b"\n")


def read_key(path: str | None) -> str:
    """The secret key in a file; empty without a file. Raises ValueError for one that cannot be a key, and OSError.

    Whoever has the key can attach to the engine, and can pretend to be the engine.
    """
    import zmq  # an engine starts before this is loaded

    if path is None:
        return ""
    if stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
        raise ValueError(f"the engine key {path} can be read by other users; chmod 600 {path}")
    key = read_text(path).strip()
    try:
        zmq.curve_public(key.encode())
    except (ValueError, zmq.ZMQError):
        raise ValueError(f"{path} holds no engine key: {KEY_LENGTH} characters in Z85") from None
    return key
