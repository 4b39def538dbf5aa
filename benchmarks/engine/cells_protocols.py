"""An application of cells over HTTP and over gRPC, by as many clients at once as given, in turns.

    python -m benchmarks.engine.cells_protocols --json cells-protocols.json   # some 4 minutes on two cores

`dates` is the built-in application: some 40 nodes a request, and a few bytes. `sum` has one node, so that its requests
show the protocols alone, with 16 or 16,384 numbers in float32 each. HTTP sends JSON, or binary tensors after it; gRPC
sends raw contents. A client of HTTP has a connection of its own; those of gRPC share one channel. Each run lasts
--seconds, of which the first fifth is not counted, --repeats times in turn; a figure is the median over the repeats.

Clients are in this process and as light as they can be: prepared bodies, of whose answers only the status is checked.
`cpu_us` is the CPU time of the server's API process for each request, which other load on the machine changes little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import httpx
import numpy as np
import torch
import uvloop

from benchmarks.lib.invocation import provenance
from holdfast.cells.cell import Arrays, Cell, Field, Output, Value
from holdfast.cells.graph import CellGraph
from holdfast.server.inference.protobufs import SERVICE, classes

DATES = ("March 3, 1987", "3.10.2021", "the 1st of May 2005", "Tue 12 Nov 1999", "2008-07-30")
NOT_COUNTED = 0.2
CASES = (("dates", 0), ("sum", 16), ("sum", 16384))
"""Application and the number of numbers in each request; 0 for text."""
PROTOCOLS = ("HTTP, JSON", "HTTP, binary", "gRPC, raw")
HEADERS = ("run", "at once", "requests/s", "p50 ms", "p99 ms", "API process, us CPU a request")

Send = Callable[[bytes], Awaitable[None]]


def keep(weights: Any, total: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"kept": total}


class Sum:
    """Adds numbers while the request is unfolded. Its one node hands the sum on."""

    name = "sum"
    inputs = (Field("numbers", "float32", (-1,), limit=1 << 16),)
    outputs = (Field("sum", "float32", (1,)),)
    cell = Cell("sum-cell", keep, {"total": Value((1,))}, {"kept": Output((1,), returned=True)}, sizes=(1, 8, 64, 512))
    cells = (cell,)

    def unfold(self, inputs: Arrays) -> CellGraph:
        graph = CellGraph()
        step = graph.add(self.cell, 1, total=inputs["numbers"].sum(keepdims=True)[None])
        graph.result("sum", step, "kept")
        return graph

    def finish(self, results: Arrays) -> Arrays:
        return {"sum": results["sum"][0]}


def make_sum() -> Sum:
    return Sum()


def bodies(protocol: str, app: str, numbers: int) -> list[tuple[bytes, int]]:
    """Requests of a case: the body, and the number of bytes of the JSON at its beginning, or 0 for gRPC."""
    made = []
    for text in DATES:
        if app == "dates":
            name, datatype, shape, data = "text", "BYTES", [1], [text]
            raw = len(text).to_bytes(4, "little") + text.encode()
        else:
            values = np.random.default_rng(len(text)).random(numbers, np.float32)
            name, datatype, shape, data, raw = "numbers", "FP32", [numbers], values.tolist(), values.tobytes()
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if protocol == "gRPC, raw":
            message = classes()["ModelInferRequest"](model_name=app, raw_input_contents=[raw])
            message.inputs.add(**tensor)
            made.append((message.SerializeToString(), 0))
        elif protocol == "HTTP, binary":
            tensor["parameters"] = {"binary_data_size": len(raw)}
            head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
            made.append((head + raw, len(head)))
        else:
            head = json.dumps({"inputs": [tensor | {"data": data}]}).encode()
            made.append((head, len(head)))
    return made


async def http_client(port: int) -> tuple[asyncio.StreamWriter, Send]:
    """A client on a connection of its own. It sends prepared requests and reads their answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)

    async def send(request: bytes) -> None:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        await reader.readexactly(int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]))

    return writer, send


async def load(protocol: str, app: str, numbers: int, at_once: int, places: dict[str, int], seconds: float) -> Any:
    """Send requests, `at_once` at a time. Returns the times and durations of those that ended."""
    requests, open_ = bodies(protocol, app, numbers), []
    senders: list[Send] = []
    if protocol == "gRPC, raw":
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{places['grpc']}")
        infer = channel.unary_unary(f"{SERVICE}/ModelInfer")

        async def send(request: bytes) -> None:
            await infer(request)

        senders, prepared = [send] * at_once, [body for body, _ in requests]
    else:
        kind = "application/json" if protocol == "HTTP, JSON" else "application/octet-stream"
        prepared = [
            f"POST /v2/models/{app}/infer HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n"
            f"inference-header-content-length: {head}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
            for body, head in requests
        ]
        for _ in range(at_once):
            writer, one = await http_client(places["http"])
            open_.append(writer)
            senders.append(one)
    ended: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds

    async def client(send: Send) -> None:
        for request in cycle(prepared):
            began = time.perf_counter()
            if began > end:
                return
            await send(request)
            now = time.perf_counter()
            ended.append((now, now - began))

    await asyncio.gather(*(client(send) for send in senders))
    for each in open_:
        each.close()
    if protocol == "gRPC, raw":
        await channel.close()
    return ended


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(places: dict[str, int], pid: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for repeat in range(args.repeats + 1):  # The first one warms up, and does not count.
        for app, numbers in CASES:
            for at_once in args.at_once:
                for protocol in PROTOCOLS:
                    seconds = args.seconds if repeat else 0.5
                    before, began = cpu_seconds(pid), time.perf_counter()
                    ended = await load(protocol, app, numbers, at_once, places, seconds)
                    cpu = cpu_seconds(pid) - before
                    counted = sorted(took for now, took in ended if now - began > NOT_COUNTED * seconds)
                    if not repeat:
                        continue
                    row = {
                        "app": app if app == "dates" else f"{app} of {numbers}", "protocol": protocol,
                        "at_once": at_once, "per_second": len(counted) / (seconds * (1 - NOT_COUNTED)),
                        "p50_ms": 1e3 * counted[len(counted) // 2], "p99_ms": 1e3 * counted[len(counted) * 99 // 100],
                        "cpu_us": 1e6 * cpu / len(ended),
                    }  # fmt: skip
                    print(json.dumps(row), flush=True)
                    rows.append(row)
    return rows


@contextmanager
def served(args: argparse.Namespace) -> Iterator[tuple[dict[str, int], int]]:
    """A server of both applications. Yields its ports and the process id of its API process."""
    places = {}
    for name in ("http", "grpc"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            places[name] = free.getsockname()[1]
    command = [
        sys.executable, "-m", "holdfast", "serve", "--app", "dates", "--app", f"{__spec__.name}:make_sum",
        "--app-device", "cpu", "--threads", "1", "--port", str(places["http"]), "--grpc-port", str(places["grpc"]),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{places['http']}/health/ready").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None, "the server has ended"
            time.sleep(0.2)
        yield places, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the medians."""
    lines = [f"| {' | '.join(HEADERS)} |", "|---" * len(HEADERS) + "|"]
    keys = dict.fromkeys((row["app"], row["at_once"], row["protocol"]) for row in rows)
    for app, at_once, protocol in keys:
        same = [row for row in rows if (row["app"], row["at_once"], row["protocol"]) == (app, at_once, protocol)]
        middle = {name: median(row[name] for row in same) for name in ("per_second", "p50_ms", "p99_ms", "cpu_us")}
        lines.append(
            f"| {app}, {protocol} | {at_once} | {middle['per_second']:,.0f} | {middle['p50_ms']:.2f} | "
            f"{middle['p99_ms']:.2f} | {middle['cpu_us']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 64], help="requests in progress")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with served(args) as (places, pid):
        rows = uvloop.run(measure(places, pid, args))
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(provenance() | dict(grpcio=grpc.__version__, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
