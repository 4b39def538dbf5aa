"""Responses over a WebSocket, through the official client, against the real server over a fake engine."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeClient, FakeText, engine_info
from serving import Listening, listening

from holdfast.server.routes import sockets

websockets = pytest.importorskip("websockets", reason="websockets is not installed")

ANSWER = "Ahoy, sailor!"


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(text=FakeText(opening="<assistant>"), ends=True, info=engine_info(max_model_len=5000))


@pytest.fixture
async def server(client: FakeClient) -> AsyncIterator[Listening]:
    async with listening(client, api_key=("one", "two"), drain_seconds=60) as server:
        yield server


@asynccontextmanager
async def connected(server: Listening, key: str = "one") -> AsyncIterator[Any]:
    api = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    async with api, api.responses.connect() as connection:
        yield connection


async def events_until(connection: Any, *kinds: str) -> list[Any]:
    """Receive events up to the first of one of these types."""
    events = [await connection.recv()]
    while events[-1].type not in kinds:
        events.append(await connection.recv())
    return events


async def turn(connection: Any, **fields: Any) -> Any:
    """Return the response of a turn, or its error event."""
    await connection.response.create(model="tiny", **fields)
    last = (await events_until(connection, "response.completed", "error", "response.failed"))[-1]
    return last if last.type == "error" else last.response


def prompts(client: FakeClient) -> list[str]:
    return [client.text.decode(asked.prompt) for asked in client.asked]


async def test_a_turn_has_the_events_of_a_stream(server: Listening) -> None:
    async with connected(server) as connection:
        await connection.response.create(model="tiny", input="hello")
        events = await events_until(connection, "response.completed")
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == ANSWER


@pytest.mark.parametrize(("deployment", "model"), [({}, "tiny"), ({"azure_deployment": "tiny"}, "gpt-4")])
async def test_azures_own_client_has_turns_with_its_key_and_deployment(
    server: Listening, deployment: dict[str, str], model: str
) -> None:
    given: Any = {"azure_endpoint": server.url, "api_version": "2025-04-01-preview", "max_retries": 0, **deployment}
    async with openai.AsyncAzureOpenAI(**given, api_key="one") as api, api.responses.connect() as connection:
        await connection.response.create(model=model, input="hello")
        last = (await events_until(connection, "response.completed", "error"))[-1]
        assert (last.response.output_text, last.response.model) == (ANSWER, "tiny")
    with pytest.raises(Exception, match="401"):
        async with openai.AsyncAzureOpenAI(**given, api_key="wrong") as api, api.responses.connect():
            pass


async def test_the_log_shows_a_handshake_and_its_turns(server: Listening, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast.requests"):
        async with connected(server) as connection:
            await turn(connection, input="hello")
        with pytest.raises(Exception, match="401"):
            async with connected(server, "wrong"):
                pass
    found = [line.partition(" id=")[0].split()[:3] for line in caplog.messages if "/v1/responses" in line]
    assert sorted(found) == [
        ["GET", "/v1/responses", "101"],
        ["GET", "/v1/responses", "401"],
        ["POST", "/v1/responses", "200"],
    ]


async def test_turns_that_are_not_stored_go_on_within_their_connection(server: Listening, client: FakeClient) -> None:
    async with connected(server) as connection:
        first = await turn(connection, input="hello", store=False)
        second = await turn(connection, input="again", store=False, previous_response_id=first.id)
        third = await turn(connection, input="more", previous_response_id=second.id)
    async with connected(server) as other:
        lost = await turn(other, input="more", store=False, previous_response_id=second.id)
        stored = await turn(other, input="end", previous_response_id=third.id)
    said = f"<user>hello<assistant>{ANSWER}<user>again<assistant>"
    assert prompts(client)[1] == said
    assert prompts(client)[2] == f"{said}{ANSWER}<user>more<assistant>"
    assert prompts(client)[3] == f"{prompts(client)[2]}{ANSWER}<user>end<assistant>"
    assert (lost.status, lost.error.param) == (400, "previous_response_id")
    assert lost.error.code == "previous_response_not_found"
    assert stored.status == "completed"


async def test_a_turn_that_fails_ends_the_chain_that_is_not_stored(server: Listening) -> None:
    async with connected(server) as connection:
        first = await turn(connection, input="hello", store=False)
        other = await turn(connection, input="hello", store=False)
        stored = await turn(connection, input="hello")
        wrong = [{"type": "function_call_output", "call_id": "call_x", "output": "1"}]
        failed = [
            await turn(connection, input=wrong, store=False, previous_response_id=id) for id in (first.id, stored.id)
        ]
        unread = await turn(connection, input="x", previous_response_id={"not": "an id"})
        gone = await turn(connection, input="again", store=False, previous_response_id=first.id)
        fine = [await turn(connection, input="on", previous_response_id=id) for id in (other.id, stored.id)]
    assert [error.status for error in (*failed, unread)] == [400, 400, 400]
    assert gone.error.code == "previous_response_not_found"
    assert [response.output_text for response in fine] == [ANSWER, ANSWER]


async def test_an_error_is_an_event_and_the_connection_goes_on(server: Listening) -> None:
    async with connected(server) as connection:
        errors = [await turn(connection, input="x", temperature=9), await turn(connection, input="x", background=True)]
        await connection.send({"type": "response.steer", "stream_id": "a"})
        errors.append(await connection.recv())
        await connection.send_raw("no JSON")
        errors.append(await connection.recv())
        fine = await turn(connection, input="hello")
    assert [(error.status, error.error.param) for error in errors[:3]] == [
        (400, "temperature"), (400, "background"), (400, "type"),
    ]  # fmt: skip
    assert (errors[2].stream_id, errors[3].error.code) == ("a", "invalid_json")
    assert fine.output_text == ANSWER


async def test_an_error_of_the_system_is_an_event(server: Listening, client: FakeClient) -> None:
    def encode(*args: Any, **options: Any) -> list[int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with connected(server) as connection:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client.text, "encode", encode)
            failed = await turn(connection, input="x")
        fine = await turn(connection, input="hello")
    assert (failed.status, failed.error.code, fine.output_text) == (500, "internal_error", ANSWER)


async def test_azures_path_has_the_same_turns(server: Listening) -> None:
    azure = f"{server.url.replace('http', 'ws')}/openai/v1/responses?api-version=preview"
    async with websockets.connect(azure, additional_headers={"api-key": "one"}) as connection:
        await connection.send('{"type": "response.create", "model": "tiny", "input": "hello"}')
        first = json.loads(await connection.recv())
    assert first["type"] == "response.created"


async def test_a_long_event_is_taken(server: Listening, client: FakeClient) -> None:
    async with connected(server) as connection:
        long = await turn(connection, input="x" * (sockets.SMALL + 1))
    assert long.status == 400 and long.error.code == "context_length_exceeded"


async def test_lanes_run_side_by_side_and_each_in_order(server: Listening, client: FakeClient) -> None:
    async with connected(server) as connection:
        for number, lane in enumerate(("a", "a", "b")):
            await connection.response.create(model="tiny", input=str(number), stream_id=lane)
        events = []
        while sum(event.type == "response.completed" for event in events) < 3:
            events.append(await connection.recv())
    assert {event.stream_id for event in events} == {"a", "b"}
    in_a = [event.type for event in events if event.stream_id == "a"]
    assert in_a.index("response.completed") < len(in_a) - 1 - in_a[::-1].index("response.created")


async def test_more_lanes_than_the_limit_are_refused(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MOST_LANES", 0)
    async with connected(server) as connection:
        refused = await turn(connection, input="x")
    assert (refused.status, refused.error.code) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize(
    ("key", "path", "status"), [("wrong", "/v1/responses", 401), ("one", "/v1/chat/completions", 404)]
)
async def test_a_handshake_is_checked(server: Listening, key: str, path: str, status: int) -> None:
    url = server.url.replace("http", "ws") + path
    with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
        async with websockets.connect(url, additional_headers={"authorization": f"Bearer {key}"}):
            pass
    assert refused.value.response.status_code == status
    assert "error" in json.loads(refused.value.response.body)


async def test_another_web_site_can_start_no_turn(client: FakeClient) -> None:
    async with listening(client) as server:
        url = server.url.replace("http", "ws") + "/v1/responses"
        async with websockets.connect(url, origin="https://evil.example") as connection:
            await connection.send('{"type": "response.create", "model": "tiny", "input": "x"}')
            refused = json.loads(await connection.recv())
    assert (refused["status"], refused["error"]["code"]) == (403, "origin_not_allowed")
    assert client.asked == []


async def test_a_client_that_leaves_ends_its_turn(server: Listening, client: FakeClient) -> None:
    client.hold = asyncio.Event()
    async with connected(server) as connection:
        await connection.response.create(model="tiny", input="hello")
        await events_until(connection, "response.created")
    async with httpx.AsyncClient(headers={"authorization": "Bearer one"}) as http:
        while client.asked[0].ended == "running":
            await http.get(f"{server.url}/v1/models")


async def test_a_server_that_leaves_ends_the_turn_first(client: FakeClient) -> None:
    client.hold = asyncio.Event()
    async with listening(client, drain_seconds=60) as server:
        async with connected(server) as connection:
            await connection.response.create(model="tiny", input="hello")
            await events_until(connection, "response.created")
            os.kill(os.getpid(), signal.SIGTERM)
            with suppress(httpx.TransportError):  # A server that has closed its listener leaves, too.
                async with httpx.AsyncClient() as http:
                    while (await http.get(f"{server.url}/health/ready")).status_code == 200:
                        pass
            client.hold.set()
            events = await events_until(connection, "response.completed", "response.failed")
            with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
                await connection.recv()
        assert await server.code == 0
    assert events[-1].response.output_text == ANSWER
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
