"""Chat completions with `store: true`: listed, read, labelled and deleted, each by its tenant alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

Http = Callable[..., httpx.AsyncClient]
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "store": True}


async def test_a_stored_completion_is_read_labelled_and_deleted(http: Http) -> None:
    async with http() as api:
        made = (await api.post(CHAT, json={**HELLO, "metadata": {"run": "1"}, "request_id": "mine"})).json()
        assert not made["id"].endswith("mine")
        place = f"{CHAT}/{made['id']}"
        assert (await api.get(place)).json() == {**made, "metadata": {"run": "1"}}
        assert (await api.post(place, json={"metadata": {"run": "2"}})).json()["metadata"] == {"run": "2"}
        assert (await api.get(place)).json()["metadata"] == {"run": "2"}
        (message,) = (await api.get(f"{place}/messages")).json()["data"]
        assert message == {"role": "user", "content": "hello", "id": f"{made['id']}-0"}
        assert (await api.post(place, json={"metadata": 5})).status_code == 400
        assert (await api.get(f"/v1/responses/{made['id']}")).status_code == 404
        assert (await api.delete(place)).json() == {
            "object": "chat.completion.deleted", "id": made["id"], "deleted": True,
        }  # fmt: skip
        for response in (await api.get(place), await api.delete(place), await api.get(f"{place}/messages")):
            assert (response.status_code, response.json()["error"]["code"]) == (404, "completion_not_found")


async def test_only_completions_that_ask_for_it_are_stored(http: Http) -> None:
    async with http() as api:
        await api.post(CHAT, json={**HELLO, "store": False})
        await api.post(CHAT, json={"messages": HELLO["messages"], "metadata": {"a": "b"}})
        assert (await api.get(CHAT)).json()["data"] == []


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_is_stored_as_the_whole_answer_would_be(http: Http, n: int) -> None:
    asked = {**HELLO, "n": n, "logprobs": True, "return_token_ids": True, "seed": 1}
    async with http() as api:
        whole = (await api.post(CHAT, json=asked)).json()
        text = (await api.post(CHAT, json={**asked, "stream": True})).text
        id = json.loads(text.split("\n\n")[0].removeprefix("data: "))["id"]
        stored = (await api.get(f"{CHAT}/{id}")).json()
    assert stored.pop("metadata") == {}
    assert stored | {"id": whole["id"], "created": whole["created"]} == whole


async def test_the_list_has_pages_and_filters(http: Http) -> None:
    async with http() as api:
        ids = [
            (await api.post(CHAT, json={**HELLO, "metadata": {"half": str(number % 2)}})).json()["id"]
            for number in range(5)
        ]
        listed = (await api.get(CHAT)).json()
        order = [each["id"] for each in listed["data"]]
        assert order == ids and not listed["has_more"], "completions of one second are in the order of their creation"
        first = (await api.get(CHAT, params={"limit": 2})).json()
        assert [each["id"] for each in first["data"]] == order[:2] and first["has_more"]
        second = (await api.get(CHAT, params={"limit": 3, "after": first["last_id"]})).json()
        assert [each["id"] for each in second["data"]] == order[2:] and not second["has_more"]
        newest = (await api.get(CHAT, params={"order": "desc", "after": order[3]})).json()
        assert [each["id"] for each in newest["data"]] == order[2::-1]
        odd = (await api.get(CHAT, params={"metadata[half]": "1"})).json()
        assert {each["id"] for each in odd["data"]} == {ids[1], ids[3]}
        assert (await api.get(CHAT, params={"model": "other"})).json()["data"] == []
        assert len((await api.get(CHAT, params={"model": "tiny"})).json()["data"]) == 5
        assert (await api.get(CHAT, params={"limit": 0})).status_code == 400
        assert (await api.get(CHAT, params={"after": "chatcmpl-x"})).status_code == 404


async def test_a_completion_of_another_key_is_not_found(http: Http) -> None:
    keys = {"api_key": ("k" * 16, "l" * 16)}
    async with http(**keys) as api:
        mine, other = ({"authorization": f"Bearer {letter * 16}"} for letter in "kl")
        id = (await api.post(CHAT, json=HELLO, headers=mine)).json()["id"]
        assert (await api.get(f"{CHAT}/{id}", headers=mine)).status_code == 200
        assert (await api.get(CHAT, headers=other)).json()["data"] == []
        for verb, place in (("GET", ""), ("DELETE", ""), ("GET", "/messages")):
            assert (await api.request(verb, f"{CHAT}/{id}{place}", headers=other)).status_code == 404
        assert (await api.post(f"{CHAT}/{id}", json={"metadata": {}}, headers=other)).status_code == 404


async def test_the_stores_bound_on_conversations_drops_the_oldest_completion(http: Http) -> None:
    async with http(store_conversations=2) as api:
        ids = [(await api.post(CHAT, json=HELLO)).json()["id"] for _ in range(3)]
        assert {each["id"] for each in (await api.get(CHAT)).json()["data"]} == set(ids[1:])
        assert (await api.get(f"{CHAT}/{ids[0]}")).status_code == 404
