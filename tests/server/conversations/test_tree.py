"""Conversations as trees through the API: lists, searches, branches, copies and their deletion, over a fake engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, FakeText, engine_info
from serving import listening

from holdfast.server.conversations import list_rows, listing
from holdfast.server.conversations.database import MEMORY
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds

ANSWER = "Ahoy, sailor!"


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(text=FakeText(opening="<assistant>"), ends=True, info=engine_info(max_model_len=5000))


@pytest.fixture
async def api(client: FakeClient) -> AsyncIterator[httpx.AsyncClient]:
    key = {"authorization": "Bearer one"}
    async with (
        listening(client, api_key=("one", "two")) as server,
        httpx.AsyncClient(base_url=f"{server.url}/v1", headers=key) as api,
    ):
        yield api


OTHER = {"authorization": "Bearer two"}


async def sent(api: httpx.AsyncClient, path: str, body: Any = None, status: int = 200) -> Any:
    """Return the answer to a POST with this body."""
    answer = await api.post(path, json=body or {})
    assert answer.status_code == status, answer.text
    return answer.json()


async def got(api: httpx.AsyncClient, path: str, status: int = 200, **query: Any) -> Any:
    answer = await api.get(path, params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


async def begun(api: httpx.AsyncClient, title: str = "a title") -> str:
    return str((await sent(api, "/conversations", {"metadata": {"title": title}}))["id"])


async def said(api: httpx.AsyncClient, conversation: str, text: str, **more: Any) -> str:
    """Return the id of the answer to a message."""
    body = {"model": "tiny", "input": text, "conversation": conversation, **more}
    return str((await sent(api, "/responses", body))["id"])


async def shape(api: httpx.AsyncClient, conversation: str) -> dict[str, str | None]:
    """Return the text of each turn's parent, by the turn's text."""
    turns = (await got(api, f"/conversations/{conversation}/turns"))["turns"]
    texts = {turn["id"]: turn["input"][0]["content"][0]["text"] for turn in turns}
    return {texts[turn["id"]]: texts.get(turn["parent"]) for turn in turns}


def prompt(client: FakeClient) -> str:
    """Return the engine's last prompt, as text."""
    return client.text.decode(client.asked[-1].prompt)


async def test_an_edit_makes_a_sibling_of_the_edited_turn(api: httpx.AsyncClient, client: FakeClient) -> None:
    conversation = await begun(api)
    await said(api, conversation, "first", metadata={"sent": "1"})
    second = await said(api, conversation, "second", metadata={"sent": "2"})
    await sent(api, f"/conversations/{conversation}/head", {"before": second})
    edited = await said(api, conversation, "other", metadata={"sent": "3"})
    assert prompt(client) == f"<user>first<assistant>{ANSWER}<user>other<assistant>"
    assert await shape(api, conversation) == {"first": None, "second": "first", "other": "first"}
    tree = await got(api, f"/conversations/{conversation}/turns")
    assert (tree["head"], tree["turns"][-1]["id"]) == (edited, edited)
    assert tree["turns"][-1]["output"][0]["content"][0]["text"] == ANSWER
    items = await got(api, f"/conversations/{conversation}/items", order="asc")
    assert [item["content"][0]["text"] for item in items["data"]] == ["first", ANSWER, "other", ANSWER]


async def test_an_edit_of_the_first_message_keeps_the_first_items_of_the_conversation(
    api: httpx.AsyncClient, client: FakeClient
) -> None:
    opening = {"items": [{"role": "system", "content": "be kind"}]}
    conversation = (await sent(api, "/conversations", opening))["id"]
    first = await said(api, conversation, "first")
    await said(api, conversation, "second")
    await sent(api, f"/conversations/{conversation}/head", {"before": first})
    await said(api, conversation, "instead")
    assert prompt(client) == "<system>be kind<user>instead<assistant>"
    assert await shape(api, conversation) == {"first": None, "second": "first", "instead": None}


async def test_a_conversation_can_continue_from_an_earlier_branch(api: httpx.AsyncClient, client: FakeClient) -> None:
    conversation = await begun(api)
    first = await said(api, conversation, "first")
    await sent(api, f"/conversations/{conversation}/head", {"before": first})
    await said(api, conversation, "other")
    await sent(api, f"/conversations/{conversation}/head", {"after": first})
    await said(api, conversation, "more")
    assert prompt(client) == f"<user>first<assistant>{ANSWER}<user>more<assistant>"
    assert (await shape(api, conversation))["more"] == "first"


async def test_branches_are_written_at_once_and_leave_the_end_of_the_conversation(
    api: httpx.AsyncClient, client: FakeClient
) -> None:
    conversation = await begun(api)
    for text, before in (("first", ""), ("second", f"<user>first<assistant>{ANSWER}")):
        client.hold = asyncio.Event()
        body = {"model": "tiny", "input": text, "conversation": {"id": conversation, "branch": True}}
        running = [(await sent(api, "/responses", body | {"background": True}))["id"] for _ in range(3)]
        client.hold.set()
        for branch in running:
            while (await got(api, f"/responses/{branch}"))["status"] != "completed":
                await asyncio.sleep(0.001)
        assert [client.text.decode(asked.prompt) for asked in client.asked[-3:]] == [
            f"{before}<user>{text}<assistant>"
        ] * 3
        tree = await got(api, f"/conversations/{conversation}/turns")
        assert tree["head"] not in running and {turn["id"] for turn in tree["turns"]} >= set(running)
        await sent(api, f"/conversations/{conversation}/head", {"after": running[1]})
        items = (await got(api, f"/conversations/{conversation}/items", order="asc"))["data"]
        assert [item["content"][0]["text"] for item in items][-2:] == [text, ANSWER]


async def test_a_branch_is_not_stored_if_its_conversation_was_deleted(
    api: httpx.AsyncClient, client: FakeClient
) -> None:
    conversation = await begun(api)
    client.hold = asyncio.Event()
    body = {"model": "tiny", "input": "first", "conversation": {"id": conversation, "branch": True}}
    writing = asyncio.create_task(sent(api, "/responses", body, status=409))
    while not client.asked:
        await asyncio.sleep(0.001)
    assert (await api.delete(f"/conversations/{conversation}")).status_code == 200
    client.hold.set()
    assert "deleted" in (await writing)["error"]["message"]


async def test_a_stopped_answer_stays_in_the_tree_and_the_conversation_can_continue_from_it(
    api: httpx.AsyncClient, client: FakeClient
) -> None:
    conversation = await begun(api)
    client.hold = asyncio.Event()
    body = {"model": "tiny", "input": "first", "conversation": conversation, "background": True}
    running = (await sent(api, "/responses", body))["id"]
    (turn,) = (await got(api, f"/conversations/{conversation}/turns"))["turns"]
    assert (turn["running"], turn["status"] in ("queued", "in_progress")) == (True, True)
    while not client.asked or client.asked[0].given == 0:
        await asyncio.sleep(0.001)
    await sent(api, f"/responses/{running}/cancel")
    client.hold = None
    (turn,) = (await got(api, f"/conversations/{conversation}/turns"))["turns"]
    assert (turn["running"], turn["status"]) == (False, "cancelled")
    assert turn["output"][0]["content"][0]["text"] == "Ahoy"
    await sent(api, f"/conversations/{conversation}/head", {"after": running})
    await said(api, conversation, "go on")
    assert prompt(client) == "<user>first<assistant>Ahoy<user>go on<assistant>"


async def test_a_turn_reports_its_times_and_its_parameters(api: httpx.AsyncClient, client: FakeClient) -> None:
    conversation = await begun(api)
    client.cached, client.cached_by_tier = 7, (3, 0, 0)
    await said(api, conversation, "first", instructions="be kind", temperature=0.5, metadata={"sent": "1"})
    (turn,) = (await got(api, f"/conversations/{conversation}/turns"))["turns"]
    assert (turn["instructions"], turn["temperature"], turn["metadata"]) == ("be kind", 0.5, {"sent": "1"})
    assert turn["timings"]["queued_ms"] == 500 and turn["timings"]["first_token_ms"] > 0
    details = turn["usage"]["input_tokens_details"]
    assert details["cached_tokens"] == 7
    assert details["cached_tokens_by_tier"] == {"device": 4, "host": 3, "disk": 0, "remote": 0}
    assert turn["timings"]["tokens_per_second"] == 4, "five tokens, the last four in one second"


async def test_a_head_is_a_turn_of_the_same_conversation(api: httpx.AsyncClient) -> None:
    conversation, other = await begun(api), await begun(api)
    elsewhere = await said(api, other, "hello")
    path = f"/conversations/{conversation}/head"
    assert (await sent(api, path, {"after": elsewhere}, 404))["error"]["code"] == "response_not_found"
    assert (await sent(api, path, {"before": elsewhere}, 404))["error"]["code"] == "response_not_found"
    for body in ({}, {"after": elsewhere, "before": elsewhere}):
        assert (await sent(api, path, body, 400))["error"]["message"] == "give either after or before"


async def test_another_tenant_finds_no_conversation_turn_or_match(api: httpx.AsyncClient) -> None:
    conversation = await begun(api, "treasure")
    turn = await said(api, conversation, "treasure")
    api.headers.update(OTHER)
    assert (await got(api, "/conversations"))["data"] == []
    assert (await got(api, "/conversations", search="treasure"))["data"] == []
    await got(api, "/conversations", 404, after=conversation)
    await got(api, f"/conversations/{conversation}/turns", 404)
    await sent(api, f"/conversations/{conversation}/head", {"before": turn}, 404)
    assert (await api.delete(f"/conversations/{conversation}?responses=true")).status_code == 404
    api.headers.update({"authorization": "Bearer one"})
    assert [each["id"] for each in (await got(api, "/conversations"))["data"]] == [conversation]


async def test_conversations_are_listed_by_their_latest_turn_in_pages(api: httpx.AsyncClient) -> None:
    made = [await begun(api, f"number {number}") for number in range(5)]
    await said(api, made[1], "the latest")
    wanted = [made[1], *(made[number] for number in (4, 3, 2, 0))]
    found: list[str] = []
    more, after = True, {}
    while more:
        page = await got(api, "/conversations", limit=2, **after)
        found += [each["id"] for each in page["data"]]
        more, after = page["has_more"], {"after": page["last_id"]}
    assert found == wanted
    (first, *_) = (await got(api, "/conversations"))["data"]
    assert (first["metadata"], first["preview"]) == ({"title": "number 1"}, "the latest")


async def test_a_search_finds_titles_and_texts_in_any_case(api: httpx.AsyncClient) -> None:
    title, text, _ = [await begun(api, name) for name in ("Der Ärger", "plain", "other")]
    await said(api, text, 'He said: "ÄRGER" \\ and left')
    for wanted, found in {"ärger": {title, text}, '"ärger" \\': {text}, "sailor": {text}, "output_text": set()}.items():
        page = await got(api, "/conversations", search=wanted)
        assert {each["id"] for each in page["data"]} == found, wanted
    (match,) = (await got(api, "/conversations", search="left"))["data"]
    assert match["match"] == 'He said: "ÄRGER" \\ and left'
    assert "200" in (await got(api, "/conversations", 400, search="a" * 201))["error"]["message"]


@pytest.mark.parametrize(
    ("limit", "most", "pages"), [("SCANNED", 4, 3), ("SCANNED_BYTES", 150, 3), ("SCANNED_BYTES", 1, 5)]
)
async def test_a_search_reads_a_limited_amount_and_continues_where_its_last_page_ended(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, pages: int
) -> None:
    monkeypatch.setattr(listing, "BATCH", 2)
    monkeypatch.setattr(listing, limit, most)
    wanted = await begun(api, "needle in hay")
    for _ in range(4):
        await begun(api, "hay" + " with no" * 10 + " needle in")  # It has the words, and in another order.
    found, read, more, after = list[str](), list[str](), True, {}
    while more:
        page = await got(api, "/conversations", search="needle in hay", **after)
        found += [each["id"] for each in page["data"]]
        read.append(page["last_id"])
        more, after = page["has_more"], {"after": page["last_id"]}
    assert found == [wanted] and len(set(read)) == len(read)
    assert len(read) == pages


async def test_a_search_finds_beginnings_of_words_and_any_characters_of_chinese(api: httpx.AsyncClient) -> None:
    titles = "Holdfast keeps", "我们在北京大学学习", "well done 🎉🚀"
    latin, chinese, emoji = [await begun(api, title) for title in titles]
    for wanted, found in {
        "holdf": latin, "HOLDFAST KEE": latin, "oldfast": None, "holdfast eeps": None, "k": latin, "fast": None,
        "北京": chinese, "京大学": chinese, "学": chinese, "大北": None, "🚀": emoji, "done 🎉": emoji, "done 🚀": None,
    }.items():  # fmt: skip
        page = await got(api, "/conversations", search=wanted)
        assert [each["id"] for each in page["data"]] == ([] if found is None else [found]), wanted
        assert (page["has_more"], page["incomplete"]) == (False, False)
    refused = (await got(api, "/conversations", 400, search='"->"'))["error"]
    assert refused["param"] == "search" and '"->"' in refused["message"]


@pytest.mark.parametrize("character", ["a", "é", "😀", '"', "\\", "\n", "\x00"])
async def test_the_beginning_of_a_large_message_is_shown_without_reading_it_whole(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, character: str
) -> None:
    given = [{"role": "system", "content": "s" * 900}, {"role": "user", "content": character * 900}]
    for bytes in range(300, 312):  # At every place where it may be cut.
        monkeypatch.setattr(list_rows, "BEGINNING", bytes)
        conversation = await begun(api)
        await sent(api, f"/conversations/{conversation}/items", {"items": given})
        (shown,) = (each for each in (await got(api, "/conversations"))["data"] if each["id"] == conversation)
        assert set(shown["preview"]) == {character} and 24 <= len(shown["preview"]) <= listing.PREVIEW


async def test_a_copy_has_all_branches_and_continues_from_its_head(api: httpx.AsyncClient, client: FakeClient) -> None:
    conversation = await begun(api)
    first = await said(api, conversation, "first", metadata={"sent": "1"})
    await said(api, conversation, "second", metadata={"sent": "2"})
    await sent(api, f"/conversations/{conversation}/head", {"after": first})
    await said(api, conversation, "other", metadata={"sent": "3"})
    tree = await got(api, f"/conversations/{conversation}/turns")
    taken = ("id", "parent", "input", "output", "status", "created_at", "model", "metadata")
    turns = [{name: turn[name] for name in taken} for turn in tree["turns"]]
    copied = {"metadata": {"title": "again"}, "turns": turns, "head": tree["head"]}
    copy = (await sent(api, "/conversations/copies", copied))["id"]
    assert await shape(api, copy) == await shape(api, conversation)
    await said(api, copy, "more")
    assert prompt(client) == f"<user>first<assistant>{ANSWER}<user>other<assistant>{ANSWER}<user>more<assistant>"
    ids = {turn["id"] for turn in (await got(api, f"/conversations/{copy}/turns"))["turns"]}
    assert not ids & {turn["id"] for turn in turns}


@pytest.mark.parametrize(
    ("copied", "reason"),
    [
        ({"turns": [{"id": "a", "parent": "b"}]}, "turns[0].parent is 'b'"),
        ({"turns": [{"id": "a"}, {"id": "a"}]}, "turns[1].id is another turn's"),
        ({"turns": [{"id": "a"}], "head": "b"}, "head is 'b'"),
        ({"turns": [{"id": "a", "input": [{"type": "image"}]}]}, "turns[0].input[0].type is"),
    ],
)
async def test_a_copy_that_is_not_a_tree_is_refused(
    api: httpx.AsyncClient, copied: dict[str, Any], reason: str
) -> None:
    assert reason in (await sent(api, "/conversations/copies", copied, 400))["error"]["message"]
    assert (await got(api, "/conversations"))["data"] == []


async def test_a_conversation_is_deleted_with_its_responses_on_request(api: httpx.AsyncClient) -> None:
    kept, gone = await begun(api), await begun(api)
    of_kept, of_gone = await said(api, kept, "hello"), await said(api, gone, "hello")
    await api.delete(f"/conversations/{kept}")
    await api.delete(f"/conversations/{gone}", params={"responses": "true"})
    await got(api, f"/responses/{of_kept}")
    await got(api, f"/responses/{of_gone}", 404)
    await sent(api, "/responses", {"model": "tiny", "input": "on", "previous_response_id": of_gone}, 400)


def test_a_thousand_conversations_are_listed_and_searched_in_a_fraction_of_a_second() -> None:
    store = Store.open(MEMORY, Bounds(seconds=1e6, threads=10_000, bytes=1 << 30))
    text = "All work and no play makes Jack a dull boy. " * 10
    for number in range(1000):
        first = [
            {"id": f"i{number}_{at}", "type": "message", "role": "user", "content": [{"type": "text", "text": text}]}
            for at in range(10)
        ]
        store.conversations.create("", f"conv_{number}", {"title": f"number {number}"}, first)
    began = time.thread_time()
    page, more = store.listing.page("", limit=100)
    listed = time.thread_time() - began
    assert (len(page), more) == (100, True)
    began = time.thread_time()
    found, _, more = store.listing.search("", "number 17", limit=100)
    searched = time.thread_time() - began
    assert (len(found), more) == (11, False)
    store.close()
    assert listed < 0.5 and searched < 2, "on any machine; some 5 and 60 ms here"
