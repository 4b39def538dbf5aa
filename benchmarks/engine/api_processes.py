"""Stored responses per second, and chunks of streams per second, by the number of API processes.

The engine is a process that costs nothing: it has the real socket and the real clients, and gives each request a token
each step. The servers are real (`holdfast serve --engines ADDRESS --api-processes N`), with a SQLite store. The load
comes from processes of its own, over raw connections. Each figure is the mean over the seconds after a warm-up; the
ratio is to one API process of the same run. On a machine with few cores, load and servers share them: run it on 16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import closing, suppress
from math import inf
from pathlib import Path

import zmq

from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.types import FinishReason
from holdfast.core.version import __version__
from holdfast.engine import messages
from holdfast.engine.link import Parent
from holdfast.engine.process.clients import Clients
from holdfast.engine.process.door import Door
from holdfast.engine.spawn import Link
from holdfast.engine.wire import WIRE
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import MemoryMeasurement, SchedulerStats

SAID = "Tell me more about the sea, please, and about all the ships that you have seen on it."
TOKEN = 100
STATS = SchedulerStats(0, 0, 1, 0, 0, 0, 0, 0, 0)


def engine(directory: str, step_seconds: float) -> None:
    """Give each request that comes one token each step, until this process is killed."""
    info = messages.EngineInfo(
        model=BUILTIN_MODEL, precision="none", memory=MemoryMeasurement("none", 1, 1, 1, 1, 1), num_blocks=1 << 14,
        block_size=16, token_budget=2048, max_model_len=4096, max_sequences=4096, max_waiting=4096, vocab_size=1 << 15,
        started_in=0.0,
    )  # fmt: skip
    with zmq.Context() as context, context.socket(zmq.DEALER) as nobody:
        nobody.bind(f"ipc://{directory}/parent")
        parent = Parent(Link(f"ipc://{directory}/parent"))
        with closing(Door(f"{directory}/engine.sock")) as door:
            clients = Clients(
                parent, door, messages.Attached(EngineConfig(max_waiting=4096), info, version=__version__, wire=WIRE)
            )
            left: dict[str, int] = {}
            while True:
                clients.wait(step_seconds if left else inf)
                for message in clients.waiting():
                    match message:
                        case messages.Submit(request):
                            left[request.id] = request.params.max_tokens
                        case messages.Abort(id):
                            left.pop(id, None)
                        case messages.Ask(number):
                            clients.send(messages.Stats(number, STATS))
                        case messages.Tick():
                            clients.send(messages.Clock(time.monotonic()))
                if left:
                    step(clients, left)
                    time.sleep(step_seconds)


def step(clients: Clients, left: dict[str, int]) -> None:
    """Send one token for each request."""
    ids, count = [*left], len(left)
    for id in ids:
        left[id] -= 1
    reasons = [None if left[id] else FinishReason.LENGTH for id in ids]
    clients.send(
        messages.Outputs(
            ids, [(TOKEN,)] * count, reasons, [0] * count, [time.monotonic()] * count, [0] * count, [()] * count,
            [()] * count, [b""] * count, [(0, 0, 0)] * count,
        )
    )  # fmt: skip
    for id in [id for id in ids if not left[id]]:
        del left[id]


def load(
    port: int, stream: bool, tokens: int, connections: int, seconds: float, counted: multiprocessing.Queue[int]
) -> None:
    """Send requests on several connections for some seconds. Puts the number of responses, or of chunks, of the rest
    after a warm-up of a quarter.
    """
    counted.put(asyncio.run(load_all(port, stream, tokens, connections, seconds)))


async def load_all(port: int, stream: bool, tokens: int, connections: int, seconds: float) -> int:
    """Do the work of `load`."""
    began = time.monotonic()
    body = json.dumps(
        {"model": BUILTIN_MODEL, "input": SAID, "max_output_tokens": tokens, "stream": stream, "store": not stream}
    )
    head = "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
    end = b"0\r\n\r\n" if stream else None

    async def talk() -> int:
        count = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (now := time.monotonic()) < began + seconds:
            writer.write(request)
            header = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in header.partition(b"\r\n")[0], header
            if end is None:
                size = int(header.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                await reader.readexactly(size)
                got = 1
            else:
                whole = await reader.readuntil(end)
                got = whole.count(b"event: response.output_text.delta")
            count += got if now > began + seconds / 4 else 0
        writer.close()
        return count

    return sum(await asyncio.gather(*(talk() for _ in range(connections))))


def measure(directory: str, processes: int, stream: bool, given: argparse.Namespace) -> float:
    """Responses, or chunks, per second with this number of API processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = f"{directory}/{processes}-{stream}"
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--engines", f"{directory}/engine.sock"]
    command += ["--api-processes", str(processes), "--port", str(port), "--store", f"{place}.sqlite", "--files", place]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        ready(port)
        time.sleep(given.settle)
        counted: multiprocessing.Queue[int] = multiprocessing.Queue()
        tokens = given.stream_tokens if stream else given.tokens
        each = [
            multiprocessing.Process(target=load, args=(port, stream, tokens, given.connections, given.seconds, counted))
            for _ in range(given.clients)
        ]
        for client in each:
            client.start()
        total = sum(counted.get(timeout=given.seconds + 60) for _ in each)
        for client in each:
            client.join()
        return total / (given.seconds * 3 / 4)
    finally:
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def ready(port: int) -> None:
    """Wait until the server answers."""
    for _ in range(600):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.1)
    raise TimeoutError("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2,4", help="numbers of API processes")
    parser.add_argument("--clients", type=int, default=4, help="load processes")
    parser.add_argument("--connections", type=int, default=16, help="connections of each load process")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement, a quarter warm-up")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a stored response")
    parser.add_argument("--stream-tokens", type=int, default=64, help="tokens of a stream")
    parser.add_argument("--step-ms", type=float, default=5.0, help="pause between two steps of the engine")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds for all API processes to start")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores; {given.clients} load processes of {given.connections} connections")
    with tempfile.TemporaryDirectory(prefix="api-processes-") as directory:
        process = multiprocessing.Process(target=engine, args=(directory, given.step_ms / 1e3), daemon=True)
        process.start()
        while not Path(f"{directory}/engine.sock").exists():
            time.sleep(0.05)
        first: dict[bool, float] = {}
        for count in map(int, given.processes.split(",")):
            for stream, unit in ((False, "stored responses/s"), (True, "stream chunks/s")):
                rate = measure(directory, count, stream, given)
                first.setdefault(stream, rate)
                print(f"{count} API processes: {rate:9.1f} {unit:18} ({rate / first[stream]:.2f} times)", flush=True)
        process.kill()


if __name__ == "__main__":
    main()
