"""A request that is sent again with its Idempotency-Key gets the turn of its first attempt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from fake_engine import WORDS, FakeClient

ANSWER = "".join(WORDS)
ASKED: dict[str, Any] = {"model": "tiny", "input": "hello"}
KEYED = {"idempotency-key": "first"}
Http = Callable[..., httpx.AsyncClient]


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def conversation_of(api: httpx.AsyncClient) -> str:
    id: str = (await api.post("/v1/conversations", json={})).json()["id"]
    return id


async def roles(api: httpx.AsyncClient, conversation: str) -> list[str]:
    found = (await api.get(f"/v1/conversations/{conversation}/items?order=asc")).json()["data"]
    return [item["role"] for item in found]


@pytest.mark.parametrize("first", [{}, {"stream": True}, {"background": True}], ids=["whole", "stream", "background"])
async def test_a_repeated_turn_is_answered_from_the_store_and_not_computed_or_appended_again(
    http: Http, client: FakeClient, first: dict[str, Any]
) -> None:
    async with http() as api:
        body = {**ASKED, **first, "conversation": await conversation_of(api)}
        one = await api.post("/v1/responses", json=body, headers=KEYED)
        assert "idempotent-replayed" not in one.headers
        id = events_of(one.text)[0]["response"]["id"] if "stream" in first else one.json()["id"]
        while (await api.get(f"/v1/responses/{id}")).json().get("status") != "completed":
            await asyncio.sleep(0.005)
        two = await api.post("/v1/responses", json=body, headers=KEYED)
        assert two.headers["idempotent-replayed"] == "true"
        again = events_of(two.text)[-1]["response"] if "stream" in first else two.json()
        assert again["id"] == id and again["output"][0]["content"][0]["text"] == ANSWER
        assert len(client.asked) == 1 and await roles(api, body["conversation"]) == ["user", "assistant"]


async def test_a_repeated_stream_has_all_events_in_order(http: Http) -> None:
    async with http() as api:
        for _ in range(2):
            reply = await api.post("/v1/responses", json={**ASKED, "stream": True}, headers=KEYED)
            events = events_of(reply.text)
            assert [event["sequence_number"] for event in events] == [*range(len(events))]
            assert "".join(each["delta"] for each in events if each["type"].endswith("text.delta")) == ANSWER
        assert reply.headers["idempotent-replayed"] == "true"


async def test_another_key_another_body_or_another_tenant_is_another_turn(http: Http, client: FakeClient) -> None:
    async with http(api_key=("one", "two")) as api:
        ids = set()
        for key, tenant, text in (
            ("first", "one", "hello"), ("second", "one", "hello"), ("first", "one", "bye"), ("first", "two", "hello"),
        ):  # fmt: skip
            headers = {"idempotency-key": key, "authorization": f"Bearer {tenant}"}
            ids.add((await api.post("/v1/responses", json={**ASKED, "input": text}, headers=headers)).json()["id"])
        assert len(ids) == 4 and len(client.asked) == 4


async def test_requests_without_a_key_or_without_a_store_are_always_computed(http: Http, client: FakeClient) -> None:
    async with http() as api:
        for headers, body in (({}, ASKED), (KEYED, {**ASKED, "store": False})):
            ids = {(await api.post("/v1/responses", json=body, headers=headers)).json()["id"] for _ in range(2)}
            assert len(ids) == 2
        assert len(client.asked) == 4


async def test_a_repeat_while_the_first_attempt_runs_is_asked_to_wait_and_then_gets_its_turn(
    http: Http, client: FakeClient
) -> None:
    client.hold = asyncio.Event()
    async with http() as api:
        first = asyncio.create_task(api.post("/v1/responses", json=ASKED, headers=KEYED))
        while not client.asked:
            await asyncio.sleep(0.002)
        early = await api.post("/v1/responses", json=ASKED, headers=KEYED)
        assert (early.status_code, early.json()["error"]["code"]) == (409, "response_in_progress")
        assert early.headers["retry-after"] == "1"
        client.hold.set()
        late = await api.post("/v1/responses", json=ASKED, headers=KEYED)
        while late.status_code == 409:
            late = await api.post("/v1/responses", json=ASKED, headers=KEYED)
        assert late.json()["id"] == (await first).json()["id"] and len(client.asked) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeat_of_a_background_response_in_progress_gets_its_state_or_its_events(
    http: Http, client: FakeClient, stream: bool
) -> None:
    client.hold = asyncio.Event()
    body = {**ASKED, "background": True, "stream": stream}
    async with http() as api:
        first = asyncio.create_task(api.post("/v1/responses", json=body, headers=KEYED))
        while not client.asked or not client.asked[0].given:
            await asyncio.sleep(0.002)
        if not stream:
            await first
        await asyncio.sleep(0.05)  # The first request has had its answer's beginning.
        second = asyncio.create_task(api.post("/v1/responses", json=body, headers=KEYED))
        if not stream:
            assert (await second).json()["status"] in ("queued", "in_progress")
        await asyncio.sleep(0.05)
        client.hold.set()
        one, two = await first, await second
        assert two.headers["idempotent-replayed"] == "true" and len(client.asked) == 1
        assert one.text == two.text if stream else one.json()["id"] == two.json()["id"]


async def test_a_repeat_of_a_failed_attempt_is_computed(http: Http, client: FakeClient) -> None:
    async with http() as api:
        client.refuse = openai.OpenAIError("unexpected")
        assert (await api.post("/v1/responses", json=ASKED, headers=KEYED)).status_code == 500
        client.refuse = None
        again = await api.post("/v1/responses", json=ASKED, headers=KEYED)
        assert again.status_code == 200 and "idempotent-replayed" not in again.headers


async def test_a_repeat_of_a_deleted_turn_is_refused_with_the_reason_or_computed(http: Http) -> None:
    async with http() as api:
        id = (await api.post("/v1/responses", json=ASKED, headers=KEYED)).json()["id"]
        assert (await api.delete(f"/v1/responses/{id}")).status_code == 200
        again = await api.post("/v1/responses", json=ASKED, headers=KEYED)
        assert again.status_code == 200 and again.json()["id"] == id


@pytest.mark.parametrize("key", ["", "k" * 256])
async def test_a_key_that_is_empty_or_too_long_is_refused_with_its_length(http: Http, key: str) -> None:
    async with http() as api:
        refused = await api.post("/v1/responses", json=ASKED, headers={"idempotency-key": key})
        assert refused.status_code == 400
        assert f"{len(key)} characters; it must have 1 to 255" in refused.json()["error"]["message"]


async def test_openais_client_sends_the_same_key_when_it_tries_again(http: Http, client: FakeClient) -> None:
    """Its retry after a broken connection must get the turn that the first attempt stored."""
    broken: list[str] = []

    class Breaking(httpx.AsyncBaseTransport):
        """Loses the first answer."""

        def __init__(self, inner: httpx.AsyncClient) -> None:
            self.inner = inner

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            reply = await self.inner.send(
                self.inner.build_request(request.method, request.url, headers=request.headers, content=request.content)
            )
            if not broken:
                broken.append(reply.json()["id"])
                raise httpx.ReadError("the connection broke")
            return reply

    async with http() as inner, httpx.AsyncClient(transport=Breaking(inner)) as transport:
        api = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="one", http_client=transport)
        answer = await api.responses.create(model="tiny", input="hello", extra_headers={"Idempotency-Key": "k1"})
    assert answer.id == broken[0] and answer.output_text == ANSWER and len(client.asked) == 1


async def test_the_description_of_the_api_names_the_header_and_its_longest_value(http: Http) -> None:
    async with http() as api:
        described = (await api.get("/openapi.json")).json()["paths"]["/v1/responses"]["post"]["parameters"]
    (header,) = [each for each in described if each["in"] == "header"]
    assert (header["name"], header["schema"]["maxLength"], header["required"]) == ("Idempotency-Key", 255, False)
