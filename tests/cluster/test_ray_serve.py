"""API processes by Ray Serve: two nodes on this machine, sessions at any process, an end that leaves the engines.

Without Ray Serve most of these are skipped: pip install 'holdfast[ray-serve]', then pytest -m ray.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from holdfast.engine.client.connection import EngineStartError
from tests.cluster.ray_nodes import ray_nodes
from tests.served import ROOT, environment, make_checkpoint

EXAMPLE = ROOT / "docs" / "ray-serve.yaml"
HAS_SERVE = all(importlib.util.find_spec(name) is not None for name in ("ray", "watchfiles"))
needs_serve = pytest.mark.skipif(not HAS_SERVE, reason="Ray Serve is not installed")
OPERATOR = {"authorization": "Bearer op"}
STORY = "Once upon a time there was a small engine that went on when its server had ended. "


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
        ({"replicas": 1000}, "replicas is 1000; it must lie between 1 and 256"),
        ({"num_replicas": 2}, "unknown option num_replicas; the nearest is max_replicas"),
        ({"port": 80}, "port is 80: Ray Serve's proxy listens; set it by http_options"),
        ({"ray": "10.0.0.7:6379"}, "ray is 10.0.0.7:6379: engines run in the cluster of Ray Serve"),
        ({"max_replicas": 8}, "max_replicas is 8: an API process would not know"),
        ({"api_processes": 2}, "api_processes is 2: num_replicas of the deployment is their number"),
        ({"store": "memory"}, "store is memory: API processes share one"),
        ({"store": None}, "store is not given: API processes share one"),
    ],
)
def test_an_argument_that_has_no_meaning_is_refused_with_its_value(args: dict[str, Any], said: str) -> None:
    from holdfast.cli.ray_serve import OptionError, build

    with pytest.raises(OptionError, match=re.escape(said)):
        build({"store": "/shared/store.sqlite", **args})


@contextmanager
def deployed(directory: Path, address: str, **args: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`serve run` of the example with other arguments and two API processes, and the URL of its proxy."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    config = yaml.safe_load(EXAMPLE.read_text())
    config |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
    (served,) = config["applications"]
    served["args"] |= args
    served["deployments"][0]["autoscaling_config"] |= {
        "min_replicas": 2, "max_replicas": 3, "target_ongoing_requests": 2, "upscale_delay_s": 1,
    }  # fmt: skip
    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", "--address", address, str(file)]
    with subprocess.Popen(command, text=True, env=environment(), cwd=directory) as process:
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def health(url: str) -> dict[str, Any]:
    with suppress(httpx.HTTPError, json.JSONDecodeError):
        answer: dict[str, Any] = httpx.get(f"{url}/health", headers=OPERATOR, timeout=30).json()
        return answer
    return {}


def until(condition: Callable[[], object], seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.2)


def api_processes() -> list[int]:
    """The processes of the deployment, by the title that Ray Serve gives them."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if each.read_bytes().startswith(b"ray::ServeReplica:holdfast:Holdfast"):
                found.append(int(each.parent.name))
    return found


@needs_serve
@pytest.mark.ray
@pytest.mark.slow
def test_any_api_process_continues_a_conversation_and_engines_outlive_all_of_them(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    args: dict[str, Any] = {
        "model": str(checkpoint), "load_format": "random", "cache_gb": 0.02, "replicas": 2, "ray_keep": "kept",
        "store": str(tmp_path / "store.db"), "operator_key": ["op"], "routing": "prefix-tree",
    }  # fmt: skip
    with (
        ray_nodes(2) as nodes,
        deployed(tmp_path, nodes.address, **args) as (process, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3) as client,
    ):
        until(lambda: health(url).get("status") == "ok" and len(api_processes()) == 2)
        model = client.models.list().data[0].id
        greedy: Any = {"temperature": 0.0, "max_output_tokens": 8, "model": model}
        kept = client.conversations.create().id
        for _ in range(12):  # Each turn goes to any of the two processes.
            client.responses.create(input="Go on.", conversation=kept, **greedy)
        assert len(client.conversations.items.list(kept, limit=100).data) == 24

        def ask(number: int) -> str:
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3) as one:
                return one.responses.create(input=STORY, **greedy | {"max_output_tokens": 1500}).output_text

        with ThreadPoolExecutor(8) as pool:
            texts = {*pool.map(ask, range(24))}
        assert len(texts) == 1, "the same answer from every engine and API process"
        until(lambda: len(api_processes()) == 3, 60)

        killed = api_processes()[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(api_processes()) >= 2 and killed not in api_processes())
        after = client.responses.create(input="And then?", conversation=kept, **greedy)
        assert after.output_text

        process.send_signal(signal.SIGINT)
        process.wait(60)
        until(lambda: not api_processes(), 30)
        ray = [sys.executable, "-m", "holdfast.cli", "ray"]
        listed, ended = (
            subprocess.run([*ray, *words, "--ray", nodes.address], env=environment(), capture_output=True, text=True)
            for words in (["list"], ["end", "kept"])
        )
        assert [line.split()[0] for line in listed.stdout.splitlines()] == ["kept-0", "kept-1"], listed
        assert ended.stdout == "ended kept-0, kept-1\n", ended
