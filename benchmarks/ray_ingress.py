"""What Ray Serve's proxies cost a stream: the same ASGI application behind either of them, and on uvicorn alone.

usage: python benchmarks/ray_ingress.py [--streams 8] [--chunks 200] [--pace 0.02] [--json FILE]

Needs ray[serve] 2.56 or newer, for its second proxy, HAProxy (RAY_SERVE_ENABLE_HA_PROXY=1).
The application streams events at a steady pace, as an engine does tokens, each with the time at which it was made. The
delay of a chunk is the time until a client on the same machine has read it. `cpu` is the processor time of all
processes involved but the client, for 1,000 chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from invocation import provenance

INVOLVED = re.compile(r"ray::(ServeReplica|ProxyActor|HAProxyManager)|[^\0]*/haproxy\0")
"""Command lines of the processes that requests pass through."""

app = FastAPI()


@app.get("/stream")
async def stream(chunks: int, pace: float) -> StreamingResponse:
    """Events with the time of their making."""

    async def events() -> AsyncIterator[str]:
        begun = time.monotonic()
        for number in range(chunks):
            await asyncio.sleep(max(0.0, begun + number * pace - time.monotonic()))
            yield f"data: {time.monotonic()}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


async def read(url: str, streams: int, chunks: int, pace: float) -> list[float]:
    """The delays of all chunks in milliseconds."""
    delays: list[float] = []

    async def one(http: httpx.AsyncClient) -> None:
        async with http.stream("GET", f"{url}/stream", params=dict(chunks=chunks, pace=pace)) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    delays.append((time.monotonic() - float(line[6:])) * 1e3)

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(one(http) for _ in range(streams)))
    assert len(delays) == streams * chunks
    return delays


def cpu_seconds(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def measure(url: str, pids: list[int], args: argparse.Namespace) -> dict[str, float]:
    asyncio.run(read(url, args.streams, 20, args.pace))  # connections, caches
    before = cpu_seconds(pids)
    delays = sorted(asyncio.run(read(url, args.streams, args.chunks, args.pace)))
    cpu = (cpu_seconds(pids) - before) / len(delays) * 1e6
    return dict(
        p50_ms=round(statistics.median(delays), 2),
        p99_ms=round(delays[int(0.99 * len(delays))], 2),
        cpu_ms_per_1000_chunks=round(cpu),
    )


def alone(args: argparse.Namespace) -> dict[str, float]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "ray_ingress:app", "--port", str(port), "--log-level", "error"]
    with subprocess.Popen(command, cwd=Path(__file__).parent) as process:
        try:
            wait(f"http://127.0.0.1:{port}")
            return measure(f"http://127.0.0.1:{port}", [process.pid], args)
        finally:
            process.terminate()


def wait(url: str) -> None:
    for _ in range(600):
        try:
            httpx.get(f"{url}/stream", params=dict(chunks=1, pace=0)).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise TimeoutError(url)


def behind_serve(args: argparse.Namespace) -> dict[str, float]:
    """Behind the proxy that the environment names when Ray Serve is imported."""
    import ray
    from ray import serve

    port = free_port()
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})

    @serve.deployment(num_replicas=1, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0.1})
    @serve.ingress(app)
    class Ingress:
        def pid(self) -> int:
            return os.getpid()

    serve.run(Ingress.bind())
    url = f"http://127.0.0.1:{port}"
    wait(url)
    try:
        pids = [
            int(each.name)
            for each in Path("/proc").iterdir()
            if each.name.isdigit() and (each / "cmdline").exists()
            and INVOLVED.match((each / "cmdline").read_bytes().decode(errors="replace"))
        ]  # fmt: skip
        return dict(measure(url, pids, args), processes=len(pids))
    finally:
        serve.shutdown()
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds between two chunks of a stream")
    parser.add_argument("--behind-serve", action="store_true", help="measure that alone, with the environment's proxy")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.behind_serve:
        print(json.dumps(behind_serve(args)))
        return
    import ray

    result: dict[str, Any] = dict(provenance(), ray=ray.__version__, cores=os.cpu_count())
    result |= dict(streams=args.streams, chunks=args.chunks, pace=args.pace)
    result["uvicorn"] = alone(args)
    for name, enabled in (("ray_serve", "0"), ("ray_serve_haproxy", "1")):
        environment = {**os.environ, "RAY_SERVE_ENABLE_HA_PROXY": enabled}
        command = [sys.executable, *sys.argv, "--behind-serve"]
        told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
        result[name] = json.loads(told.splitlines()[-1])
    result["load_average"] = os.getloadavg()[0]
    text = json.dumps(result, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
