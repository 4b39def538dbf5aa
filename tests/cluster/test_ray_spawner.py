"""Replicas on the nodes of a Ray cluster: two nodes on this machine, one of which is lost.

Most of these are skipped without Ray: pip install 'holdfast[ray]', then pytest -m ray.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.cluster.config import ClusterConfig
from holdfast.engine.client.connection import EngineStartError
from tests.cluster.ray_nodes import Nodes, ray_nodes
from tests.served import Serving, make_checkpoint, started

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
STORY = "Once upon a time"


def test_without_ray_the_start_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "holdfast.cluster.ray_spawner", raising=False)
    with pytest.raises(EngineStartError, match=re.escape("pip install 'holdfast[ray]'")):
        importlib.import_module("holdfast.cluster.ray_spawner")


def test_the_address_of_a_cluster_is_a_host_and_a_port() -> None:
    for address in ("auto", "10.0.0.7:6379", "[::1]:6379", "head.example:6379"):
        assert ClusterConfig(ray=address).many
    for address in ("ray://10.0.0.7:10001", "my-model", "", "10.0.0.7"):
        with pytest.raises(ValueError, match="it must be the address of a Ray cluster, host:port, or auto"):
            ClusterConfig(ray=address)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def serving(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("ray")
    checkpoint = make_checkpoint(directory / "model")
    options = ["--load-format", "random", "--cache-gb", "0.02", "--store", str(directory / "store.db")]
    with started(str(checkpoint), *options, "--ray", nodes.address, "--replicas", "2") as serving:
        yield serving


def health(serving: Serving) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{serving.url}/health").json()
    return answer


def wait_until(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.2)


def node_of(replica: dict[str, Any]) -> str:
    found = re.search(r"\((\w+)\)", replica["place"])
    assert found, replica
    return found[1]


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_a_conversation_outlives_the_node_that_it_runs_on(serving: Serving, nodes: Nodes) -> None:
    assert len({node_of(replica) for replica in health(serving)["replicas"]}) == 2

    client = serving.client()
    greedy: Any = {"temperature": 0.0, "max_output_tokens": 1200, "model": client.models.list().data[0].id}
    whole = client.responses.create(input=STORY, **greedy)
    with closing(client.responses.create(input=STORY, stream=True, **greedy)) as stream:
        events = iter(stream)
        for event in events:
            if event.type == "response.output_text.delta":
                break
        (busy,) = [replica for replica in health(serving)["replicas"] if replica["requests"]]
        nodes.kill(node_of(busy))
        last = list(events)[-1]
    assert last.type in {"response.completed", "response.incomplete"}
    assert last.response.output_text == whole.output_text
    (lost,) = [each for each in health(serving)["replicas"] if each["state"] != "ready"]
    assert lost["name"] == busy["name"]
    after = client.responses.create(input="And then?", previous_response_id=last.response.id, **greedy)
    assert after.status in {"completed", "incomplete"} and after.output_text

    assert health(serving)["status"] == "degraded"
    added = nodes.add()
    wait_until(lambda: health(serving)["status"] == "ok")
    assert added[:8] in {node_of(replica) for replica in health(serving)["replicas"]}


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_an_address_without_a_cluster_is_named(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    said = r"there is no Ray cluster at 127\.0\.0\.1:9"
    start = started(str(checkpoint), "--load-format", "random", "--ray", "127.0.0.1:9")
    with pytest.raises(AssertionError, match=said), start:
        pass
