"""Engines on Ray that outlive their server: found by name, with their cache; ended by command, or when left alone.

Skipped without Ray: pip install 'holdfast[ray]', then pytest -m ray.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.cli import main, ray_engines
from holdfast.cli.flags import CommandError
from holdfast.cluster.config import ClusterConfig
from tests.cluster.ray_nodes import Nodes, ray_nodes
from tests.served import Serving, environment, make_checkpoint, started

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
STORY = "Once upon a time there was a small engine that went on when its server had ended. "
GREEDY: Any = {"temperature": 0.0, "max_tokens": 4}


def test_the_name_of_kept_engines_needs_ray_and_is_checked() -> None:
    assert ClusterConfig(ray="auto", ray_keep="llama-3.1_8b").many
    with pytest.raises(ValueError, match="ray_keep is llama, and ray is not given"):
        ClusterConfig(ray_keep="llama")
    for name in ("", "-llama", "two words", "a/b", "x" * 64):
        with pytest.raises(ValueError, match="it must be a name of up to 63 letters"):
            ClusterConfig(ray="auto", ray_keep=name)
    with pytest.raises(ValueError, match="ray_keep_seconds is 9; it must lie between 10 and 2592000"):
        ClusterConfig(ray="auto", ray_keep="llama", ray_keep_seconds=9)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["ray"], "ACTION is missing; it must be one of list, end"),
        (["ray", "stop"], "ACTION is stop; it must be one of list, end"),
        (["ray", "list", "engine"], "list takes no NAME, and engine is given"),
        (["ray", "end", "two words"], "ray_keep is 'two words'"),
        (["ray", "list", "--ray", "nowhere"], "ray is 'nowhere'; it must be the address of a Ray cluster"),
    ],
)
def test_the_command_names_what_is_wrong(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("kept") / "model")


Serve = Callable[..., AbstractContextManager[Serving]]


@pytest.fixture
def serve(nodes: Nodes, checkpoint: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts a server with two kept engines, which are ended at the end."""

    def serve(*more: str) -> AbstractContextManager[Serving]:
        options = ["--load-format", "random", "--cache-gb", "0.02", "--store", str(tmp_path / "store.db")]
        kept = ["--ray", nodes.address, "--replicas", "2", "--routing", "prefix-tree", "--ray-keep", "story"]
        return started(str(checkpoint), *options, *kept, *more)

    yield serve
    ended = holdfast_ray(nodes, "end", "story")
    assert ended.returncode == 0 or "no engine is named story-0" in ended.stderr, ended


def holdfast_ray(nodes: Nodes, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli", "ray", *arguments, "--ray", nodes.address]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)


def cached(serving: Serving) -> int:
    """Ask for an answer. Returns the number of prompt tokens found in the cache."""
    client = serving.client()
    answer = client.completions.create(model=client.models.list().data[0].id, prompt=STORY, **GREEDY)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.2)


def children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task").glob("*/children")
    return [int(pid) for each in found for pid in each.read_text().split()]


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_a_server_after_a_killed_one_finds_the_engines_with_their_cache(serve: Serve, nodes: Nodes) -> None:
    with serve() as first:
        assert cached(first) == 0
        assert cached(first) == 80, "the whole blocks of the prompt but the last token"
        first.process.kill()
    listed = holdfast_ray(nodes, "list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["story-0", "story-1"], listed.stderr
    began = time.monotonic()
    with serve() as second:
        assert time.monotonic() - began < 30
        assert cached(second) == 80
        refused = holdfast_ray(nodes, "end", "story")
        assert refused.returncode == 1 and "1 server is attached to these engines" in refused.stderr
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(20) == 0
    ended = holdfast_ray(nodes, "end", "story")
    assert ended.stdout == "ended story-0, story-1\n", ended.stderr
    assert holdfast_ray(nodes, "list").stdout == ""
    again = holdfast_ray(nodes, "end", "story")
    assert again.returncode == 1 and "no engine is named story-0 or so" in again.stderr


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_engine_starts_again_in_its_place_and_a_drained_one_ends(serve: Serve, nodes: Nodes) -> None:
    with serve("--max-replicas", "3", "--scale-up-ms", "3600000") as serving:
        places = replicas(serving)
        keeper = actor(nodes, "story-1")
        (engine,) = children(keeper)
        os.kill(engine, signal.SIGKILL)
        until(lambda: replicas(serving).get("1", {}).get("state") != "ready", 20)
        until(lambda: [each["state"] for each in replicas(serving).values()] == ["ready", "ready"])
        assert replicas(serving)["1"]["place"] == places["1"]["place"]
        assert actor(nodes, "story-1") == keeper, "the actor keeps the room for its next engine"

        assert httpx.post(f"{serving.url}/replicas/1/drain").status_code == 200
        until(lambda: "1" not in replicas(serving))
        until(lambda: "story-1" not in holdfast_ray(nodes, "list").stdout)
        assert cached(serving) == 0
        assert httpx.post(f"{serving.url}/replicas").status_code == 200, "its room is free again"
        until(lambda: replicas(serving).get("1", {}).get("state") == "ready")


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_a_stream_and_a_background_response_go_on_at_another_server(serve: Serve) -> None:
    asked: Any = {"model": "model", "input": STORY, "max_output_tokens": 1500, "temperature": 0.0}
    with serve("--served-model-name", "model") as first, serve("--served-model-name", "model") as second:
        background = httpx.post(f"{first.url}/v1/responses", json={**asked, "background": True}).json()["id"]
        with httpx.stream("POST", f"{first.url}/v1/responses", json={**asked, "stream": True}) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
            seen = [json.loads(next(lines)[6:]) for _ in range(8)]
            first.process.kill()
        id, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
        url = f"{second.url}/v1/responses/{id}"
        until(lambda: httpx.get(url).status_code == 200, 20)
        rest = httpx.get(f"{url}?stream=true&starting_after={last}", timeout=200).text.splitlines()
        events = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
        assert [each["sequence_number"] for each in events] == [*range(last + 1, last + 1 + len(events))]
        text = "".join(each["delta"] for each in seen + events if each["type"] == "response.output_text.delta")
        whole = events[-1]["response"]
        assert whole["output"][0]["content"][0]["text"] == text and whole["usage"]["output_tokens"] == 1500
        other = f"{second.url}/v1/responses/{background}"
        until(lambda: httpx.get(other).json()["status"] not in ("queued", "in_progress"))
        assert httpx.get(other).json()["output"][0]["content"][0]["text"] == text, "the same greedy answer"


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_the_room_of_a_killed_actor_is_free_once_its_name_is_ended(serve: Serve, nodes: Nodes) -> None:
    with serve() as serving:
        until(lambda: [each["state"] for each in replicas(serving).values()] == ["ready", "ready"])
        killed = actor(nodes, "story-1")
        serving.process.kill()
    os.kill(killed, signal.SIGKILL)
    until(lambda: "story-1" not in holdfast_ray(nodes, "list").stdout)
    assert free_cpus(nodes) == 0
    ended = holdfast_ray(nodes, "end", "story")
    assert ended.stdout == "ended story-0, story-1\n", ended.stderr
    until(lambda: free_cpus(nodes) == 2, 20)


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_a_server_with_other_options_than_the_engines_is_told_the_first_one(serve: Serve) -> None:
    with serve():
        said = r"Ray node .*: the engine that runs has max_sequences None, and this server asks for 3; end the engines"
        with pytest.raises(AssertionError, match=said), serve("--max-sequences", "3"):
            pass


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_engines_without_any_server_end_after_their_time(serve: Serve, nodes: Nodes) -> None:
    with serve("--ray-keep-seconds", "10") as serving:
        processes = [child for each in ("story-0", "story-1") for child in children(actor(nodes, each))]
        assert len(processes) == 2
        time.sleep(12)
        assert all(Path(f"/proc/{pid}").exists() for pid in processes), "a server is attached"
        serving.process.kill()
        began = time.monotonic()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), 40)
        assert time.monotonic() - began > 4
    until(lambda: holdfast_ray(nodes, "list").stdout == "")
    with serve() as serving:
        assert cached(serving) == 0, "their room is free for new ones"


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_the_engine_of_a_lost_node_starts_on_another_one(serve: Serve, nodes: Nodes) -> None:
    with serve() as serving:
        lost = replicas(serving)["0"]["place"].partition("(")[2].rstrip(")")
        nodes.kill(lost)
        until(lambda: replicas(serving)["0"]["state"] != "ready", 20)
        assert replicas(serving)["1"]["state"] == "ready" and cached(serving) == 0
        added = nodes.add()
        until(lambda: [each["state"] for each in replicas(serving).values()] == ["ready", "ready"], 90)
        assert added[:8] in replicas(serving)["0"]["place"]


def replicas(serving: Serving) -> dict[str, dict[str, Any]]:
    """The replicas by name."""
    return {each["name"]: each for each in httpx.get(f"{serving.url}/replicas").json()["data"]}


def free_cpus(nodes: Nodes) -> float:
    """CPUs of the cluster that nothing has reserved."""
    code = (
        "import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR')\n"
        "print(ray.available_resources().get('CPU', 0.0))"
    )
    command = [sys.executable, "-c", code, nodes.address]
    return float(subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200).stdout)


def actor(nodes: Nodes, name: str) -> int:
    """Process of an actor, by Ray's own list."""
    code = (
        "import ray, sys; ray.init(address=sys.argv[1], namespace='holdfast', logging_level='ERROR')\n"
        "print(ray.get(ray.get_actor(sys.argv[2]).about.remote()).pid)"
    )
    command = [sys.executable, "-c", code, nodes.address, name]
    return int(subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200).stdout)


async def test_engines_are_ended_once_the_last_server_is_gone_and_not_while_one_stays() -> None:
    counts = [2, 1, 0]

    async def fewer() -> int:
        return counts.pop(0)

    async def one() -> int:
        return 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_engines, "WAIT_SECONDS", 0.01)
        await ray_engines.no_servers(fewer)
        assert counts == []
        patch.setattr(ray_engines, "NOTICE_SECONDS", 0.05)
        with pytest.raises(CommandError, match="1 server is attached to these engines"):
            await ray_engines.no_servers(one)
