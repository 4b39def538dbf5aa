"""EngineHost: the actor on a Ray node that starts an engine process, describes it, and waits for its end."""

from __future__ import annotations

import platform
from typing import NamedTuple

import ray
import zmq

from holdfast.cluster.local_spawner import free_gb
from holdfast.cluster.shared_directory import read_mark
from holdfast.core.version import __version__
from holdfast.engine.spawn import EngineProcess, Link
from holdfast.files.regular import open_file

PROFILE_LIMIT = 16 << 20
"""Maximum number of bytes of a cost profile."""


class About(NamedTuple):
    """Properties of an engine process on a Ray node, which the API process needs to connect."""

    address: str
    """IP address of the node."""
    node: str
    """Id of the node."""
    pid: int
    key: str
    """Public CURVE key of the engine."""
    version: str
    """Versions of Holdfast and of Python on the node."""
    free_gb: float
    """Free memory of the node in GB."""

    @property
    def host(self) -> str:
        """IP address as the first part of HOST:PORT."""
        return f"[{self.address}]" if ":" in self.address else self.address

    @property
    def place(self) -> str:
        """Name of the node for display. Nodes may share an address, so it includes part of the id."""
        return f"Ray node {self.address} ({self.node[:8]})"


class EngineHost:
    """Actor with one engine process. The process ends whenever the actor ends."""

    def __init__(self, device: str) -> None:
        self._process = EngineProcess(device)
        public, secret = zmq.curve_keypair()
        self._public, self._secret = public.decode(), secret.decode()  # The secret key never leaves the node.

    def about(self) -> About:
        """Return the properties that are known before the engine loads."""
        return about_this_node(self._process.pid, self._public)

    def mark(self, path: str) -> str:
        """Return the mark of a shared directory as this node sees it; empty if there is none."""
        return read_mark(path)

    def connect(self, address: str, client_key: str) -> None:
        """Send the engine the address of its client's socket, and the keys."""
        self._process.connect(Link(address, client_key, self._public, self._secret))

    def wait(self) -> int:
        """Wait until the engine process has ended. Returns its exit status."""
        return self._process.wait()

    def profile(self, path: str) -> bytes:
        """Return the cost profile that the engine found or measured. Raises OSError."""
        with open_file(path) as file:
            return file.read(PROFILE_LIMIT)


def about_this_node(pid: int, key: str) -> About:
    """Return the properties of an engine, or of its actor, on the node of this process."""
    address, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
    return About(address, node, pid, key, version(), free_gb())


def version() -> str:
    """Return the versions of Holdfast and Python, which must be equal on all hosts."""
    return f"Holdfast {__version__} on Python {'.'.join(platform.python_version_tuple()[:2])}"
