"""Which clients may watch the engine, the events that viewers get, and that a slow or absent one costs nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient
from httpx import ASGITransport

from holdfast.engine.activity import ChunkRecord, StepRecord
from holdfast.engine.messages import Activity
from holdfast.lm.memory.block_map import ConversationBlocks
from holdfast.lm.scheduler.queue_report import QueueReport, RunningRequest, WaitingRequest
from holdfast.server import viewers as viewing
from holdfast.server.protocol import ApiError
from holdfast.server.viewers import LEASE_SECONDS, MOST_UNSENT, Viewers, short

Http = Callable[..., httpx.AsyncClient]
EVENTS = "/v1/engine/events"


def step(number: int, **fields: Any) -> StepRecord:
    numbers: dict[str, Any] = {"at": 1.0 * number, "seconds": 0.01, "tokens": 9, "decodes": 1, "prefill": 8}
    return StepRecord(step=number, segments=2, preempted=["resp_3"], **numbers | fields)


def activity(number: int = 0, *, begins: bool = False) -> Activity:
    queues = QueueReport(1, 1, 3, (WaitingRequest("resp_1", "no row", 9, 0.5),), (RunningRequest("resp_2", 4, 9, 8),))
    row = ConversationBlocks(number, "resp_2", "running", 0.0, 0.0, (("u", 3), ("-", 1)))
    chunks = [ChunkRecord("resp_2", 0, 8)]
    return Activity(1.0 * number, begins, [step(number, chunks=chunks)], [row], queues, costs=[(0, 1.0)])


async def next_event(events: AsyncGenerator[bytes, None]) -> tuple[str, Any]:
    kind, data = (await asyncio.wait_for(anext(events), 60)).decode().rstrip("\n").split("\n", 1)
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def viewers_of(client: FakeClient) -> Viewers:
    return Viewers(client)  # type: ignore[arg-type]


async def test_the_engine_reports_from_the_first_viewer_to_the_last(client: FakeClient) -> None:
    viewers = viewers_of(client)
    one, other = viewers.events(named=False), viewers.events(named=False)
    assert client.watched == []
    kind, about = await next_event(one)
    assert kind == "engine" and about["model"] == "tiny" and about["blocks"] == 100
    await next_event(other)
    assert client.watched == [LEASE_SECONDS]
    client.on_activity(activity(begins=True))
    assert (await next_event(one))[0] == (await next_event(other))[0] == "activity"
    await one.aclose()
    assert client.watched == [LEASE_SECONDS]
    await other.aclose()
    assert client.watched == [LEASE_SECONDS, 0]


async def test_the_lease_is_renewed_while_anybody_watches(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewing, "LEASE_SECONDS", 0.03)
    events = viewers_of(client).events(named=False)
    await next_event(events)
    waiting = asyncio.create_task(anext(events))
    while len(client.watched) < 3:
        await asyncio.sleep(0.005)
    started = asyncio.all_tasks() - {asyncio.current_task(), waiting}
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await events.aclose()
    await asyncio.wait(started, timeout=200)
    assert all(each.done() for each in started), "nobody is left to renew it"
    assert client.watched[-1] == 0


async def begun(viewers: Viewers, client: FakeClient, *, named: bool) -> AsyncGenerator[bytes, None]:
    """Begin a viewer that has received its first event and waits for the next one."""
    events = viewers.events(named=named)
    await next_event(events)
    client.on_activity(activity(begins=True))
    await next_event(events)
    return events


async def test_requests_have_their_ids_for_operators_and_short_digests_for_others(client: FakeClient) -> None:
    viewers = viewers_of(client)
    plain = await begun(viewers, client, named=False)
    named = viewers.events(named=True)
    await next_event(named)
    await next_event(named)
    client.on_activity(activity(1))
    for events, name in ((plain, short), (named, str)):
        _, data = await next_event(events)
        assert data["steps"][0]["chunks"] == [[name("resp_2"), 0, 8]]
        assert data["steps"][0]["preempted"] == [name("resp_3")]
        assert data["blocks"] == [[1, name("resp_2"), "running", 0.0, 0.0, [["u", 3], ["-", 1]], -1.0]]
        assert data["queues"]["first"] == [[name("resp_1"), "no row", 9, 0.5]]
        assert data["queues"]["rows"] == [[name("resp_2"), 4, 9, 8]]
        await events.aclose()
    assert short("resp_2") != short("resp_3") and len(short("resp_2")) == 8


async def test_a_later_viewer_gets_the_state_that_the_others_know(client: FakeClient) -> None:
    viewers = viewers_of(client)
    first = await begun(viewers, client, named=False)
    for number in (1, 2):
        client.on_activity(activity(number))
    gone = activity(3)
    client.on_activity(replace_blocks(gone, [ConversationBlocks(1, "", "gone", 0.0, 0.0, ())]))
    later = viewers.events(named=False)
    await next_event(later)
    _, data = await next_event(later)
    assert data["begins"] and [each["step"] for each in data["steps"]] == [0, 1, 2, 3]
    assert [row[0] for row in data["blocks"]] == [0, 2] and data["costs"] == [[0, 1.0]]
    await first.aclose()
    await later.aclose()


def replace_blocks(message: Activity, blocks: list[ConversationBlocks]) -> Activity:
    message.blocks = blocks
    return message


async def test_a_slow_viewer_is_disconnected_and_others_are_not(client: FakeClient) -> None:
    viewers = viewers_of(client)
    slow = await begun(viewers, client, named=False)
    quick = viewers.events(named=False)
    await next_event(quick)
    await next_event(quick)
    for number in range(1, MOST_UNSENT + 2):
        client.on_activity(activity(number))
        assert (await next_event(quick))[1]["steps"][0]["step"] == number
    kind, data = await next_event(slow)
    assert kind == "error" and "too slow" in data["message"]
    assert [event async for event in slow] == []
    client.on_activity(activity(99))
    assert (await next_event(quick))[1]["at"] == 99.0
    await quick.aclose()
    assert client.watched[-1] == 0


async def test_viewers_are_limited_in_number(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewing, "MOST_VIEWERS", 1)
    viewers = viewers_of(client)
    first = viewers.events(named=False)
    await next_event(first)
    with pytest.raises(ApiError, match="1 pages watch the engine already"):
        await anext(viewers.events(named=False))
    await first.aclose()


async def test_viewers_are_notified_when_the_engine_ends(client: FakeClient) -> None:
    viewers = viewers_of(client)
    events = await begun(viewers, client, named=False)
    client.die("it was killed")
    assert await next_event(events) == ("error", {"message": "it was killed"})
    assert [event async for event in events] == []


@pytest.mark.parametrize(
    ("config", "headers", "address", "status"),
    [
        ({}, {}, "127.0.0.1", 200),
        ({}, {}, "::1", 200),
        ({}, {}, "192.168.1.7", 403),
        ({}, {"x-forwarded-for": "192.168.1.7"}, "127.0.0.1", 403),
        ({"root_path": "/llm"}, {}, "127.0.0.1", 403),
        ({"api_key": ("one",)}, {"authorization": "Bearer one"}, "127.0.0.1", 403),
        ({"api_key": ("one",), "operator_key": ("boss",)}, {"authorization": "Bearer one"}, "127.0.0.1", 403),
        ({"api_key": ("one",), "operator_key": ("boss",)}, {"authorization": "Bearer boss"}, "192.168.1.7", 200),
        ({"api_key": ("one",), "operator_key": ("boss",)}, {"x-api-key": "boss"}, "127.0.0.1", 200),
        ({"api_key": ("one",), "operator_key": ("boss",)}, {}, "127.0.0.1", 401),
        ({"operator_key": ("boss",)}, {}, "127.0.0.1", 401),
        ({"operator_key": ("boss",)}, {"authorization": "Bearer bos"}, "127.0.0.1", 401),
        ({"operator_key": ("boss",)}, {"authorization": "Bearer boss"}, "192.168.1.7", 200),
    ],
)
async def test_the_engine_is_shown_only_to_operators_and_on_loopback(
    http: Http, config: dict[str, Any], headers: dict[str, str], address: str, status: int, client: FakeClient
) -> None:
    async with http(headers, **config) as api:
        transport = api._transport
        assert isinstance(transport, ASGITransport)
        transport.client = (address, 1234)
        if status == 200:
            asyncio.get_running_loop().call_later(0.05, client.die, "so that the stream ends")
            async with api.stream("GET", EVENTS) as response:
                assert response.status_code == 200
                assert (await response.aread()).startswith(b"event: engine\n")
        else:
            response = await api.get(EVENTS)
            assert response.status_code == status
            assert response.json()["error"]["code"] in ("operator_only", "invalid_api_key")


async def test_an_operators_key_is_also_a_tenants_own(http: Http, client: FakeClient) -> None:
    hello = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    async with http(api_key=("one",), operator_key=("boss",)) as api:
        for key in ("one", "boss"):
            answer = await api.post("/v1/chat/completions", json=hello, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
    assert client.asked[0].tenant != client.asked[1].tenant


def test_a_key_cannot_be_both() -> None:
    from holdfast.server.config import ServerConfig

    with pytest.raises(ValueError, match="operator_key is among the API keys"):
        ServerConfig(api_key=("one",), operator_key=("one",))
    with pytest.raises(ValueError, match="operator_key is empty"):
        replace(ServerConfig(), operator_key=("",))
