"""`serve run` of the application for Ray Serve: two nodes on this machine, a killed engine, and the end.

Most of these are skipped without Ray: pip install 'holdfast[ray-serve]', then pytest -m ray.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from holdfast.engine.client.connection import EngineStartError
from tests.cluster.ray_nodes import ray_nodes
from tests.served import environment, make_checkpoint

BUILDER = "holdfast.cli.ray_serve:build"
HAS_SERVE = importlib.util.find_spec("ray") is not None and importlib.util.find_spec("watchfiles") is not None
needs_serve = pytest.mark.skipif(not HAS_SERVE, reason="Ray Serve is not installed")
START_SECONDS = 120.0
OPERATOR = {"authorization": "Bearer op"}


def test_without_ray_serve_the_import_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "holdfast.cluster.ray_serve", raising=False)
    with pytest.raises(EngineStartError, match=re.escape("pip install 'holdfast[ray-serve]'")):
        importlib.import_module("holdfast.cluster.ray_serve")


@needs_serve
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray Serve's own, at its import
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"replicas": "100"}, "replicas is 100; it must lie between 1 and 64"),
        ({"replicas": "many"}, "replicas is 'many': Expected `int`"),
        ({"num_replicas": 2}, "unknown option num_replicas; the nearest is max_replicas"),
        ({"port": 80}, "port is 80, and Ray Serve's proxy listens here"),
        ({"ray": "10.0.0.7:6379"}, "ray is 10.0.0.7:6379; engines run in the cluster of Ray Serve"),
        ({"tuning": True}, "replicas is 1, and tuning is on"),
    ],
)
def test_an_invalid_argument_is_refused_with_its_value(args: dict[str, Any], said: str) -> None:
    from holdfast.cli.ray_serve import OptionError, build

    with pytest.raises(OptionError, match=re.escape(said)):
        build(args)


@contextmanager
def deployed(directory: Path, address: str, **args: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `serve run` with a configuration. Yields its process and the URL of its proxy."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{"name": "llm", "route_prefix": "/llm", "import_path": BUILDER, "args": args}],
    }
    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", "--address", address, str(file)]
    with subprocess.Popen(command, text=True, env=environment(), cwd=directory) as process:
        try:
            yield process, f"http://127.0.0.1:{port}/llm"
        finally:
            process.kill()


def health(url: str) -> dict[str, Any]:
    with suppress(httpx.HTTPError, json.JSONDecodeError):
        answer: dict[str, Any] = httpx.get(f"{url}/health", headers=OPERATOR, timeout=30).json()
        return answer
    return {}


def wait_until_ok(url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while health(url).get("status") != "ok":
        assert time.monotonic() < end, f"there are no two replicas after {START_SECONDS} s: {health(url)}"
        time.sleep(0.2)


def pids(url: str) -> list[int]:
    """Return the process ids of the engines."""
    return [each["pid"] for each in httpx.get(f"{url}/replicas", headers=OPERATOR).json()["data"]]


@needs_serve
@pytest.mark.ray
@pytest.mark.slow
def test_a_conversation_by_ray_serve_outlives_an_engine_and_nothing_outlives_the_application(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    options: dict[str, Any] = {
        "load_format": "random",
        "cache_gb": 0.02,
        "store": str(tmp_path / "store.db"),
        "replicas": "2",
    }
    options["operator_key"] = ["op"]
    with ray_nodes(2) as nodes, deployed(tmp_path, nodes.address, model=str(checkpoint), **options) as (process, url):
        wait_until_ok(url)
        assert len({replica["place"] for replica in health(url)["replicas"]}) == 2
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        greedy: Any = {"temperature": 0.0, "max_output_tokens": 1200, "model": client.models.list().data[0].id}
        kept = client.conversations.create().id
        whole = client.responses.create(input="Once upon a time", **greedy)

        chunks, last = 0, None
        for event in client.responses.create(input="Once upon a time", stream=True, conversation=kept, **greedy):
            if event.type == "response.output_text.delta":
                chunks += 1
                if chunks == 5:
                    replicas = httpx.get(f"{url}/replicas", headers=OPERATOR).json()["data"]
                    (busy,) = [each["pid"] for each in replicas if each["requests"]]
                    os.kill(busy, signal.SIGKILL)
            last = event
        assert last is not None and last.type == "response.incomplete"
        assert last.response.output_text == whole.output_text and chunks > 100
        after = client.responses.create(input="And then?", conversation=kept, **greedy)
        assert after.output_text and len(client.conversations.items.list(kept).data) == 4
        wait_until_ok(url)

        engines = pids(url)
        assert len(engines) == 2 and busy not in engines
        process.send_signal(signal.SIGINT)
        process.wait(60)
        end = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in engines):
            assert time.monotonic() < end, "engines outlive their application"
            time.sleep(0.1)
