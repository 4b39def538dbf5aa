"""EngineHost: what runs on a Ray node beside an engine process: it starts it, tells of it, and waits for its end."""

from __future__ import annotations

import platform
from typing import NamedTuple

import ray
import zmq

from holdfast.cluster.local_spawner import free_gb
from holdfast.core.version import __version__
from holdfast.engine.spawn import EngineProcess, Link
from holdfast.files.regular import open_file

PROFILE_LIMIT = 16 << 20
"""Most bytes of a cost profile."""


class About(NamedTuple):
    """What an API process needs to know of an engine process on a Ray node before there is a connection."""

    address: str
    """The node's IP address."""
    node: str
    """The node's id."""
    pid: int
    key: str
    """The engine's public CURVE key."""
    version: str
    """Of Holdfast and of Python there."""
    free_gb: float
    """The node's free memory in GB."""

    @property
    def place(self) -> str:
        """The node, for people. Several may have one address."""
        return f"Ray node {self.address} ({self.node[:8]})"


class EngineHost:
    """An actor with one engine process, which ends with it, in whatever way that ends."""

    def __init__(self, device: str) -> None:
        self._process = EngineProcess(device)
        public, secret = zmq.curve_keypair()
        self._public, self._secret = public.decode(), secret.decode()  # the secret one never leaves the node

    def about(self) -> About:
        """What is known from the beginning."""
        address, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return About(address, node, self._process.pid, self._public, version(), free_gb())

    def connect(self, address: str, client_key: str) -> None:
        """Tell the engine where its client's socket is, and give it the keys."""
        self._process.connect(Link(address, client_key, self._public, self._secret))

    def wait(self) -> int:
        """Wait until the engine process has ended. Returns its exit status."""
        return self._process.wait()

    def profile(self, path: str) -> bytes:
        """The cost profile that the engine has found or measured. Raises OSError."""
        with open_file(path) as file:
            return file.read(PROFILE_LIMIT)


def version() -> str:
    """The versions that all hosts must share."""
    return f"Holdfast {__version__} on Python {'.'.join(platform.python_version_tuple()[:2])}"
