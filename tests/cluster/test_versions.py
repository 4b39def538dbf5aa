"""A server and an engine of two versions: the one before, from this repository's history, and this one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from version_before import ROOT, unpack

from holdfast.cluster.attach_spawner import AttachSpawner
from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.replicas import Replicas
from holdfast.core.types import SamplingParams
from tests import served
from tests.forked import COMMAND

PROMPT = list(range(40, 104))
SERVER = """\
import asyncio, sys
import holdfast
from holdfast.cluster.attach_spawner import AttachSpawner
from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.replicas import Replicas
from holdfast.core.types import SamplingParams

async def main():
    config = ClusterConfig(engines=(sys.argv[1],))
    server = await Replicas.start(config, AttachSpawner(config.addresses))
    async for delta in server.stream(list(range(40, 104)), SamplingParams(max_tokens=4, temperature=0)):
        usage = delta.usage
    stats = await server.health()
    await server.close()
    print(holdfast.__file__, usage.completion_tokens, stats.blocks_total > 0)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the version before."""
    return unpack(tmp_path_factory.mktemp("before"))


@contextmanager
def engine_of(code: Path, address: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that runs this code. One of this version is forked."""
    options = ["--cache-gb", "0.02", "--threads", "1", "--device", "cpu", *more]
    arguments = ["-m", COMMAND, "engine", "--listen", address, *options]
    started: Any
    if code == ROOT:
        command = [sys.executable, *arguments]
        started = served.processes.Popen(command, env=environment(code), stdout=subprocess.DEVNULL)
    else:
        command = [sys.executable, "-P", *arguments]
        started = subprocess.Popen(command, env=environment(code), stdout=subprocess.DEVNULL)
    with started as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def engine() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts engines, which are killed at the end."""
    with ExitStack() as held:
        yield lambda code, address, *more: held.enter_context(engine_of(code, address, *more))


def environment(code: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(code)}


async def test_a_server_works_with_an_engine_of_the_version_before_until_that_is_upgraded(
    before: Path, engine: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    address = f"{tmp_path}/engine.sock"
    old = engine(before, address)
    config = ClusterConfig(engines=(address,))
    server = await Replicas.start(config, AttachSpawner(config.addresses))
    assert await answer(server) == 4
    attached = server.members[0].engine
    assert attached is not None and attached.version == ""
    old.terminate()
    assert await asyncio.to_thread(old.wait, 200) == 0
    engine(ROOT, address)
    assert await answer(server) == 4, "it waits for the new engine"
    attached = server.members[0].engine
    assert attached is not None and attached.version
    await server.close()


def test_an_engine_works_with_a_server_of_the_version_before_and_ends_once_it_has_left(
    before: Path, engine: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    address = f"{tmp_path}/engine.sock"
    new = engine(ROOT, address, "--drain-seconds", "3600")
    command = [sys.executable, "-P", "-c", SERVER, address]
    done = subprocess.run(command, env=environment(before), capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    code, tokens, has_blocks = done.stdout.split()
    assert code.startswith(str(before)) and (tokens, has_blocks) == ("4", "True")
    new.send_signal(signal.SIGTERM)
    assert new.wait(200) == 0, "nobody is attached, so it ends at once"


async def answer(server: Replicas) -> int:
    """Ask for four tokens. Returns how many came."""
    count = 0
    async for delta in server.stream(PROMPT, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)):
        count += len(delta.tokens)
    return count
