"""The engine process as a child: it ends with its client, and the client does not import torch."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import zmq

from holdfast.engine.link import Parent, remove_stale_sockets
from holdfast.engine.messages import Abort, encode
from holdfast.engine.spawn import EngineProcess, Link
from tests.engine.conftest import wait_for_end

pytestmark = pytest.mark.usefixtures("started_engines")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

PARENT = """\
import asyncio, sys
from holdfast.lm.config import EngineConfig
from holdfast.engine.client.client import EngineClient

async def main():
    client = await EngineClient.start(EngineConfig(model=sys.argv[1], cache_gb=0.01, threads=1, max_sequences=8))
    print(client.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_the_engine_ends_when_its_client_is_killed(checkpoint, tmp_path):
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PARENT, str(checkpoint)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        engine = int(parent.stdout.readline())
        parent.kill()
    wait_for_end(engine)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_never_receives_an_address_ends_with_its_client():
    program = "from holdfast.engine.spawn import EngineProcess\nprint(EngineProcess('cpu').pid, flush=True)\ninput()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        engine = int(parent.stdout.readline())
        parent.kill()
    wait_for_end(engine)


def test_an_engine_process_ends_with_its_block():
    with EngineProcess("cpu") as process:
        pass
    assert not Path(f"/proc/{process.pid}").exists()


def test_the_end_of_a_process_runs_exit_handlers_and_writes_printed_text():
    program = (
        "import atexit, sys\n"
        "from holdfast.engine.link import end_process\n"
        "atexit.register(print, 'registered')\n"
        "print('printed')\n"
        "end_process(7)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("printed\nregistered\n", "", 7)


def test_a_start_removes_the_socket_of_one_that_was_killed_an_hour_ago(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def leave(name, file="engine"):
        directory = tmp_path / name
        directory.mkdir()
        monkeypatch.chdir(directory)  # a socket's whole path must be short
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(file)
        os.utime(directory, (0, 0))
        return directory

    stale, fresh, others, used = (
        leave("holdfast-stale"),
        leave("holdfast-fresh"),
        leave("others"),
        leave("holdfast-x", "mine"),
    )
    os.utime(fresh)
    remove_stale_sockets()
    assert not stale.exists()
    assert fresh.exists() and others.exists() and used.exists()


def test_the_engine_does_not_inherit_the_api_key(monkeypatch):
    monkeypatch.setenv("HOLDFAST_API_KEY", "sesame")
    with EngineProcess("cpu") as process:
        while not (inherited := Path(f"/proc/{process.pid}/environ").read_bytes()):
            pass  # a program's start is known a moment before the kernel shows its environment
    assert b"PYTHONPATH" in inherited and b"sesame" not in inherited


def test_neither_torch_nor_transformers_is_loaded_by_the_client():
    code = (
        "import sys, holdfast, holdfast.engine.client.client, holdfast.engine.client.llm\n"
        "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_wait_ends_with_a_message_or_a_wake_of_another_thread(tmp_path):
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.bind(f"ipc://{tmp_path}/engine")
    parent = Parent(Link(f"ipc://{tmp_path}/engine"))
    waits = []
    thread = threading.Thread(target=lambda: [waits.append(parent.wait()) for _ in range(2)])
    thread.start()
    parent.wake()
    while not waits:
        time.sleep(0.001)
    assert not select.select([parent._woken], [], [], 0)[0], "a wake ends one wait"
    client.send(encode(Abort("a")))
    thread.join()
    assert [message.request_id for message in parent.waiting()] == ["a"]
    for _ in range(100_000):
        parent.wake()  # a pipe that is full does not block
    parent.wait()
    parent.close()
    client.close(0)
    context.term()
