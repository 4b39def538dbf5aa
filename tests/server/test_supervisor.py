"""Several API processes on one port: real processes, one engine, one store."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.cluster.config import ClusterConfig
from holdfast.server.address import reserve
from holdfast.server.config import ServerConfig
from holdfast.server.supervisor import check
from tests import served as servers
from tests.forked import API_PROCESS, NAMES
from tests.served import free_port, name_of

ROOT = Path(__file__).parents[2]
SAID = "Hi! My name is Ada, and I like long walks on the beach with my two dogs and my cat."
CACHED = 16
"""Tokens of its prompt that a second request finds: the whole blocks but the last."""
PATIENCE_SECONDS = 200.0
"""Most seconds that a test waits. On a busy machine, a process may take long to start."""


def is_api_process(pid: int) -> bool:
    """Whether a process is an API process that has not ended: a new interpreter, or a forked one, which has a name."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty once it has ended, while its name stays
    except OSError:
        return False
    return API_PROCESS.encode() in command or (bool(command) and name_of(pid) == NAMES[API_PROCESS])


class Served:
    """A server of two API processes over the built-in model."""

    def __init__(self, directory: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.store, self.log = directory / "store.sqlite", directory / "log"
        files = ["--store", str(self.store), "--files", str(directory / "files")]
        sizes = ["--cache-gb", "0.05", "--threads", "1", "--device", "cpu"]
        sizes += ["--drain-seconds", str(PATIENCE_SECONDS)]  # a busy machine may need as long for a stream
        command = [sys.executable, "-m", "holdfast.cli", "serve", "--api-processes", "2", *files, *sizes]
        with self.log.open("w") as log:
            self.process = servers.processes.Popen(
                [*command, "--port", self.url.rpartition(":")[2]],
                env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def workers(self) -> list[int]:
        """Process ids of the API processes."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        found = [int(pid) for each in children for pid in each.read_text().split()]
        return sorted(pid for pid in found if is_api_process(pid))

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request on a connection of its own, so that any API process may get it; again if one is killed."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return httpx.request(method, f"{self.url}{path}", timeout=PATIENCE_SECONDS, **options)
            except httpx.TransportError:
                assert time.monotonic() < end, path
                time.sleep(0.1)

    def chat(self) -> int:
        """Ask the model. Returns the number of prompt tokens found in the cache."""
        body = {"model": "holdfast-tiny", "max_tokens": 4, "messages": [{"role": "user", "content": SAID}]}
        answer = self.ask("POST", "/v1/chat/completions", json=body).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.ask("GET", "/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served"))
    try:
        until(lambda: server.process.poll() is not None or (reached(server) and len(server.workers()) == 2))
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def reached(server: Served) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=PATIENCE_SECONDS).status_code == 200
    except httpx.TransportError:
        return False


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def test_a_killed_api_process_is_replaced_and_the_cache_stays(served: Served) -> None:
    assert [served.chat() for _ in range(6)][1:] == [CACHED] * 5, "all API processes share the engine's cache"
    (killed, kept) = served.workers()
    os.kill(killed, signal.SIGKILL)
    assert served.chat() == CACHED
    until(lambda: len(served.workers()) == 2 and killed not in served.workers())
    assert kept in served.workers()
    route = 'holdfast_requests_total{outcome="ok",route="/v1/chat/completions"}'
    assert served.metric(route) == 7, "a killed process's counts are kept"
    assert served.metric("holdfast_cached_tokens_total") == 6 * CACHED
    assert (
        served.metric('vllm:request_success_total{engine="0",finished_reason="length",model_name="holdfast-tiny"}') == 7
    )


def test_any_api_process_continues_what_another_stored(served: Served) -> None:
    previous = None
    for _ in range(6):
        body = {"model": "holdfast-tiny", "input": "Go on.", "max_output_tokens": 4, "previous_response_id": previous}
        answer = served.ask("POST", "/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]


def test_any_api_process_cancels_a_background_response_of_another(served: Served) -> None:
    body = {"model": "holdfast-tiny", "input": SAID, "background": True, "max_output_tokens": 3000}
    for _ in range(4):
        begun = served.ask("POST", "/v1/responses", json=body).json()
        ended = served.ask("POST", f"/v1/responses/{begun['id']}/cancel").json()
        assert ended["status"] in ("cancelled", "completed", "incomplete")


class Load:
    """Clients on connections of their own and one that keeps its connection, each asking again and again.

    Between its requests a client pauses: the processes that start meanwhile need the cores.
    """

    def __init__(self, url: str, clients: int = 3) -> None:
        self.url, self.answered, self.failures = url, 0, list[str]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number == 0,)) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, keeps: bool) -> None:
        with httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS) as kept:
            while not self._stop.wait(0.02):
                try:
                    answer = (kept if keeps else httpx).get(f"{self.url}/v1/models")
                    answer.raise_for_status()
                    self.answered += 1
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))


def test_sighup_replaces_all_processes_and_refuses_no_request(served: Served) -> None:
    before = served.workers()
    body = {"model": "holdfast-tiny", "max_tokens": 400, "stream": True, "prompt": SAID, "ignore_eos": True}
    with (
        Load(served.url) as load,
        httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGHUP)
        until(lambda: len(served.workers()) == 2 and not set(served.workers()) & set(before))
        assert [line for line in lines if line][-1] == "data: [DONE]", "a stream ends at the process that began it"
    assert load.failures == []
    assert load.answered > 20
    assert served.chat() == CACHED, "the engine went on"


LONG = {"model": "holdfast-tiny", "input": SAID, "temperature": 0, "max_output_tokens": 400, "ignore_eos": True}


def numbered(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


def whole(served: Served) -> str:
    """The answer to LONG, from an undisturbed server."""
    return text_of(served.ask("POST", "/v1/responses", json={**LONG, "store": False}).json())


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def broken_off(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The first events of a stream whose API processes were all killed while the engine computed it.

    400 tokens take half a second. A busy machine may kill too late, and then kills while it computes another one.
    """
    for _ in range(20):
        until(lambda: len(served.workers()) == 2 and reached(served))
        events = list[dict[str, Any]]()
        with suppress(httpx.TransportError), httpx.stream("POST", f"{served.url}/v1/responses", json=body) as reply:
            for event in numbered(reply.iter_lines()):
                events.append(event)
                if len(events) == 6:  # soon after the first text
                    for pid in served.workers():
                        os.kill(pid, signal.SIGKILL)
        if len(events) >= 6 and events[-1]["type"] != "response.incomplete":
            return events
    raise AssertionError("killed too late each time")


@pytest.mark.always("True")
@pytest.mark.parametrize("background", [False, True])
def test_a_stream_goes_on_after_its_last_event_when_all_api_processes_are_killed(
    served: Served, background: bool
) -> None:
    expected = whole(served)
    events = broken_off(served, {**LONG, "stream": True, "background": background})
    response = events[0]["response"]["id"]
    path = f"/v1/responses/{response}?stream=true&starting_after={events[-1]['sequence_number']}"
    events += numbered(iter(served.ask("GET", path).text.splitlines()))
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert "".join(event.get("delta", "") for event in events) == expected
    assert events[-1]["type"] == "response.incomplete" and text_of(events[-1]["response"]) == expected
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {item["id"] for item in events[-1]["response"]["output"]}
    assert text_of(served.ask("GET", f"/v1/responses/{response}").json()) == expected
    late = numbered(iter(served.ask("GET", f"/v1/responses/{response}?stream=true").text.splitlines()))
    assert [event["type"] for event in late] == [event["type"] for event in events]


@pytest.mark.long
def test_another_api_process_finishes_a_background_response_that_nobody_reads(served: Served) -> None:
    expected = whole(served)
    begun = served.ask("POST", "/v1/responses", json={**LONG, "background": True}).json()
    for pid in served.workers():
        os.kill(pid, signal.SIGKILL)
    path = f"/v1/responses/{begun['id']}"
    until(lambda: served.ask("GET", path).json()["status"] not in ("queued", "in_progress"))
    ended = served.ask("GET", path).json()
    assert (ended["status"], text_of(ended)) == ("incomplete", expected)


def test_a_process_whose_successor_cannot_start_goes_on(served: Served) -> None:
    until(lambda: len(served.workers()) == 2)  # API processes that an earlier test replaced may still drain.
    before = served.workers()
    with sqlite3.connect(served.store) as db:
        db.execute("INSERT INTO versions VALUES (99)")  # No API process opens such a store.
    try:
        served.process.send_signal(signal.SIGHUP)
        until(lambda: "could not be replaced and goes on" in served.log.read_text())
    finally:
        with sqlite3.connect(served.store) as db:
            db.execute("DELETE FROM versions WHERE version = 99")
    assert served.workers() == before
    assert served.chat() == CACHED


def test_a_signal_ends_all_processes_and_leaves_no_file(served: Served) -> None:
    workers = served.workers()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(PATIENCE_SECONDS) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_port_with_a_server_is_not_shared_with_it() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="choose another --port"):
            reserve(ServerConfig(port=other.getsockname()[1], api_processes=2))


@pytest.mark.parametrize(
    ("server", "cluster", "name"),
    [
        ({"store": "memory"}, {}, "store is memory"),
        ({}, {"ray": "auto"}, "ray is auto"),
        ({}, {"max_replicas": 2}, "max_replicas is 2"),
    ],
)
def test_options_that_api_processes_cannot_share_are_named(server: Any, cluster: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"api_processes is 2, and {name}: .*; leave it out"):
        check(ServerConfig(api_processes=2, **server), ClusterConfig(**cluster))
