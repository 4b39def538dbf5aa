"""Replicas on the nodes of a Ray cluster: two nodes on this machine, one of which is lost.

Most of these are skipped without Ray: pip install 'holdfast[ray]', then pytest -m ray.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.replicas import Replicas
from holdfast.cluster.spawner import make_spawner
from holdfast.engine.client.connection import EngineStartError
from holdfast.engine.client.tuning import JobEnded, JobStep
from holdfast.lm.config import EngineConfig
from tests.checkpoints import make
from tests.cluster.ray_nodes import Nodes, ray_nodes
from tests.engine.conftest import SMALL
from tests.engine.test_tuning import TUNING, Bench, new_job
from tests.served import Serving, make_checkpoint, started
from tests.tokenizers_made import byte_level

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
STORY = "Once upon a time"


def test_without_ray_the_start_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "holdfast.cluster.ray_cluster", raising=False)
    with pytest.raises(EngineStartError, match=re.escape("pip install 'holdfast[ray]'")):
        importlib.import_module("holdfast.cluster.ray_cluster")


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


@asynccontextmanager
async def replicas_on(nodes: Nodes, config: EngineConfig, shared: Path) -> AsyncGenerator[Replicas, None]:
    """Two replicas, whose tuning jobs lie below `shared`."""
    cluster = ClusterConfig(replicas=2, ray=nodes.address, routing="least-loaded")
    replicas = await Replicas.start(cluster, make_spawner(config, cluster, tuning_state=str(shared)))
    try:
        yield replicas
    finally:
        await replicas.close()


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
async def test_a_tuning_job_outlives_its_node_and_another_one_serves_its_adapter(tmp_path: Path) -> None:
    make(tmp_path / "model", "Llama", max_position_embeddings=4096, eos_token_id=1)
    byte_level().save(str(tmp_path / "model" / "tokenizer.json"))
    options = SMALL | TUNING | {"cache_gb": 0.05, "tuning_mirror": "auto", "threads": 1}
    config = EngineConfig(**{"model": str(tmp_path / "model"), **options})
    alone = Bench(config)
    alone.start(new_job(tmp_path / "alone", epochs=8))
    await asyncio.to_thread(alone.finish, "job")
    expected = alone.result("job")[0]
    alone.close()
    with ray_nodes(2) as nodes:
        async with replicas_on(nodes, config, tmp_path / "jobs") as replicas:
            run, steps, ended = await replicas.tuning.start(new_job(tmp_path / "jobs", epochs=8)), [], None
            first = replicas.tuning._jobs["job"].replica
            async for event in run.events():
                if isinstance(event, JobStep):
                    steps.append(event)
                    if len(steps) == 5:
                        nodes.kill(node_of({"place": first.place}))
                elif isinstance(event, JobEnded):
                    ended = event
            assert ended is not None and ended.outcome == "succeeded" and ended.adapter is not None
            assert [step.step for step in steps] == [*range(1, 25)], "each once and in order"
            assert [step.loss for step in steps] == expected, "bit for bit as without the loss"
            assert {*replicas.adapters} == {"tuned-job"}


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
async def test_a_node_that_does_not_see_the_directory_of_jobs_is_named(tmp_path: Path) -> None:
    """A path below an open descriptor leads somewhere in this process alone."""
    make_checkpoint(tmp_path / "model")
    config = EngineConfig(model=str(tmp_path / "model"), load_format="random", tuning=True, device="cpu")
    here = os.open(tmp_path, os.O_RDONLY)
    try:
        with ray_nodes(1) as nodes, pytest.raises(EngineStartError, match=r"Ray node .* does not see /proc/self/fd"):
            async with replicas_on(nodes, config, Path(f"/proc/self/fd/{here}/jobs")):
                pass
    finally:
        os.close(here)
