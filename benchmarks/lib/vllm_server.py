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

START_SECONDS = 400.0
"""Longest start. The first one on a machine compiles for three minutes."""
QUIET = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def vllm_served(model: str, options: Sequence[str], site: Path | None = None) -> Iterator[str]:
    """The address of a running server of a checkpoint without weights. It has ended when the context ends.

    `site` is the directory of vLLM's packages, if it has one of its own. Raises RuntimeError if it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--load-format", "dummy"]
    command += ["--dtype", "bfloat16", "--port", str(port), "--disable-uvicorn-access-log", *options]
    url, began = f"http://127.0.0.1:{port}", time.monotonic()
    own = {} if site is None else {"PYTHONPATH": str(site)}
    with subprocess.Popen(command, env={**os.environ, **QUIET, **own}) as server:
        try:
            while not answers(url):
                if server.poll() is not None or time.monotonic() - began > START_SECONDS:
                    raise RuntimeError(f"vLLM did not start in {time.monotonic() - began:.0f} s")
                time.sleep(0.5)
            yield url
        finally:
            server.terminate()


def answers(url: str) -> bool:
    """Whether the server is ready."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
