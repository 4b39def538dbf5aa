"""vLLM's own server as a peer, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.lib.drawn_weights import STD

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 400.0
"""Longest start. The first one on a machine compiles for three minutes."""
STOP_SECONDS = 15.0
"""Longest wait for a server that was asked to stop."""
DRAW_SECONDS = 60.0
"""Longest time of drawing the weights."""
QUIET = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def vllm_served(model: str, options: Sequence[str], site: Path | None = None, *, drawn: bool = False) -> Iterator[str]:
    """The address of a running server of a checkpoint without weights. It has ended when the context ends.

    `site` is the directory of vLLM's packages, if it has one of its own. With `drawn`, the server draws its weights as
    Holdfast does (`drawn_weights`) before it is used. Raises RuntimeError if it does not start, or has other weights.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--load-format", "dummy"]
    command += ["--dtype", "bfloat16", "--port", str(port), "--disable-uvicorn-access-log", *options]
    url, began = f"http://127.0.0.1:{port}", time.monotonic()
    environment = {**os.environ, **QUIET}
    places = [] if site is None else [str(site)]
    if drawn:
        command += ["--worker-extension-cls", "benchmarks.lib.drawn_weights.DrawsWeights"]
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # it has the route `/collective_rpc` only then
        places += [str(ROOT)]
    if places:
        own = [] if site is not None else [os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, own)])
    with subprocess.Popen(command, env=environment) as server:
        try:
            while not answers(url):
                if server.poll() is not None or time.monotonic() - began > START_SECONDS:
                    raise RuntimeError(f"vLLM did not start in {time.monotonic() - began:.0f} s")
                time.sleep(0.5)
            if drawn:
                draw_weights(url)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()


def draw_weights(url: str) -> None:
    """Have a server draw its weights again. Raises RuntimeError if they are not as Holdfast's afterwards."""
    response = httpx.post(f"{url}/collective_rpc", json={"method": "draw_weights_again"}, timeout=DRAW_SECONDS)
    if response.status_code != httpx.codes.OK:
        raise RuntimeError(f"vLLM did not draw its weights: {response.status_code} {response.text[:300]}")
    for found in response.json()["results"]:
        if not 0.95 * STD < found["least"] <= found["most"] < 1.05 * STD:
            raise RuntimeError(f"vLLM's weights have deviations of {found['least']} to {found['most']}, not {STD}")


def answers(url: str) -> bool:
    """Whether the server is ready."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
