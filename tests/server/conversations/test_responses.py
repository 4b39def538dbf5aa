"""Responses and Conversations through the official client, against the real server over a fake engine."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
from fake_engine import FakeClient, FakeText, engine_info
from openai.types.responses import CompactedResponse
from serving import listening

from holdfast.engine.client.connection import EngineDead
from holdfast.server.conversations import service
from holdfast.server.conversations.items import OPENING, SUMMARIZE, Compacted, encode_compacted
from holdfast.server.conversations.service import Background
from holdfast.server.conversations.turn_store import TurnStore
from holdfast.server.conversations.values import Turn
from holdfast.server.protocol import MAX_CONTAINERS, MAX_MESSAGES, MAX_STRINGS

ANSWER = "Ahoy, sailor!"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def caught_up(api: openai.AsyncOpenAI) -> None:
    """Wait until everything sent before has arrived in both directions: later requests have been answered."""
    for _ in range(3):
        await api.models.list()


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(text=FakeText(opening="<assistant>"), ends=True, info=engine_info(max_model_len=5000))


@pytest.fixture
async def api(client: FakeClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with listening(client, api_key=("one", "two")) as server, official(server.url) as api:
        yield api


def official(url: str, key: str = "one") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def other(api: openai.AsyncOpenAI) -> openai.AsyncOpenAI:
    """Return the same server with another tenant's key."""
    return api.with_options(api_key="two")


def prompts(client: FakeClient) -> list[str]:
    """Return the prompts that the engine received, as text."""
    return [client.text.decode(asked.prompt) for asked in client.asked]


async def test_a_response_has_openais_shape(api: openai.AsyncOpenAI, client: FakeClient) -> None:
    client.cached = 3
    response = await api.responses.create(model="tiny", input="hello", instructions="be kind", metadata={"a": "b"})
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", "tiny")
    assert response.output_text == ANSWER
    (message,) = response.output
    assert message.type == "message" and message.role == "assistant" and message.status == "completed"
    assert prompts(client) == ["<system>be kind<user>hello<assistant>"]
    assert response.usage is not None
    assert response.usage.input_tokens == len("<system>be kind<user>hello<assistant>")
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens == 5, "with the token that ends the answer"
    assert response.usage.total_tokens == response.usage.input_tokens + 5
    assert (response.metadata, response.instructions) == ({"a": "b"}, "be kind")
    assert await api.responses.retrieve(response.id) == response


async def test_a_response_repeats_parameters_that_have_no_effect(api: openai.AsyncOpenAI) -> None:
    sent: dict[str, Any] = {
        "user": "somebody",
        "safety_identifier": "abc",
        "prompt_cache_key": "def",
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "high", "format": {"type": "text"}},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "include": ["reasoning.encrypted_content", "file_search_call.results", "message.input_image.image_url"],
        "service_tier": "flex",
        "prompt_cache_retention": "24h",
    }
    response = await api.responses.with_raw_response.create(model="tiny", input="hello", extra_body=sent)
    sent_back = response.http_response.json()
    del sent["include"]
    assert {name: sent_back[name] for name in sent} == sent
    plain = (await api.responses.with_raw_response.create(model="tiny", input="hello")).http_response.json()
    assert {name: plain[name] for name in sent} == {
        "user": None,
        "safety_identifier": None,
        "prompt_cache_key": None,
        "max_tool_calls": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "reasoning": {"effort": None, "summary": None},
        "text": {"verbosity": "medium", "format": {"type": "text"}},
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "service_tier": "default",
        "prompt_cache_retention": None,
    }


async def test_fields_of_openai_and_vllm_are_taken_with_the_values_that_change_nothing(api: openai.AsyncOpenAI) -> None:
    neutral: dict[str, Any] = {
        "reasoning": {"context": "auto", "mode": "standard"}, "image": {}, "access_programs": {},
        "prompt_cache_options": {"mode": "explicit", "prewarm": False, "comparison_response_id": "resp_1"},
        "enable_response_messages": False, "vllm_xargs": {}, "mm_processor_kwargs": {}, "previous_input_messages": None,
    }  # fmt: skip
    assert (await api.responses.create(model="tiny", input="hello", extra_body=neutral)).output_text == "Ahoy, sailor!"


async def test_the_tokens_of_a_turn_are_counted_with_its_context(api: openai.AsyncOpenAI, client: FakeClient) -> None:
    first = await api.responses.create(model="tiny", input="hello")
    counted = await api.responses.input_tokens.count(model="tiny", input="on", previous_response_id=first.id)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == len("<user>hello<assistant>") + 4 + len("<user>on<assistant>"), "4 of the answer"
    assert len(client.asked) == 1, "nothing is answered"
    nameless = await api.responses.input_tokens.count(input="a" * 9000)
    assert nameless.input_tokens == 9000 + len("<user><assistant>"), "also beyond the context"
    with pytest.raises(openai.NotFoundError):
        await api.responses.input_tokens.count(model="other", input="on")


async def test_events_of_a_part_name_its_response(api: openai.AsyncOpenAI) -> None:
    async with api.responses.stream(model="tiny", input="hello") as stream:
        events: list[Any] = [event async for event in stream]
    parts = [event.response_id for event in events if event.type.startswith("response.content_part.")]
    assert parts == [events[-1].response.id] * 2


async def test_an_invalid_conversation_id_is_refused_by_name(api: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="begins with conv_"):
        await api.responses.create(model="tiny", input="hello", conversation="resp_1")


async def test_stream_events_arrive_in_openais_order(api: openai.AsyncOpenAI) -> None:
    async with api.responses.stream(model="tiny", input="hello") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == ANSWER
    assert (await api.responses.retrieve(final.id)).output_text == ANSWER


async def test_each_events_name_equals_its_type(api: openai.AsyncOpenAI) -> None:
    async with httpx.AsyncClient(headers={"authorization": "Bearer one"}) as plain:
        body = {"model": "tiny", "input": "hello", "stream": True}
        text = (await plain.post(f"{api.base_url}responses", json=body)).text
    for chunk in text.strip().split("\n\n"):
        name, data = chunk.split("\n")
        assert f'"type":"{name.removeprefix("event: ")}"' in data


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_cut_by_its_length_is_incomplete_and_can_be_continued(
    api: openai.AsyncOpenAI, client: FakeClient, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 2}
    if stream:
        response = [event async for event in await api.responses.create(**asked, stream=True)][-1].response
    else:
        response = await api.responses.create(**asked)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    await api.responses.create(model="tiny", input="more", previous_response_id=response.id)
    assert prompts(client)[-1] == "<user>hello<assistant>Ahoy, <user>more<assistant>"


async def test_each_of_twenty_turns_tokenizes_only_its_new_text(api: openai.AsyncOpenAI, client: FakeClient) -> None:
    previous: str | None = None
    history = ""
    for number in range(20):
        before = client.text.encoded
        said = f"turn {number}"
        response = await api.responses.create(model="tiny", input=said, previous_response_id=previous)
        history += f"<user>{said}<assistant>"
        assert prompts(client)[-1] == history
        assert client.text.encoded - before == len(f"<user>{said}<assistant>")
        if previous is not None:  # The raw tokens of the last turn are the beginning of this turn's tokens.
            last = [*client.asked[-2].prompt, 0, 1, 2, 3]
            assert client.asked[-1].prompt[: len(last)] == last
        history += ANSWER
        previous = response.id


async def test_twenty_turns_of_a_conversation_append_their_items(api: openai.AsyncOpenAI, client: FakeClient) -> None:
    conversation = await api.conversations.create(metadata={"topic": "sea"})
    for number in range(20):
        response = await api.responses.create(model="tiny", input=f"turn {number}", conversation=conversation.id)
        assert response.conversation is not None and response.conversation.id == conversation.id
    history = "".join(f"<user>turn {number}<assistant>{ANSWER}" for number in range(19))
    assert prompts(client)[-1] == f"{history}<user>turn 19<assistant>"
    assert client.text.encoded == sum(len(f"<user>turn {number}<assistant>") for number in range(20))
    items = [item async for item in api.conversations.items.list(conversation.id, order="asc", limit=7)]
    assert [item.content[0].text for item in items] == [  # type: ignore[union-attr]
        text for number in range(20) for text in (f"turn {number}", ANSWER)
    ]


async def test_two_branches_of_one_parent_do_not_see_each_other(api: openai.AsyncOpenAI, client: FakeClient) -> None:
    parent = await api.responses.create(model="tiny", input="hello")
    for said in ("left", "right"):
        child = await api.responses.create(model="tiny", input=said, previous_response_id=parent.id)
        await api.responses.create(model="tiny", input="on", previous_response_id=child.id)
        assert prompts(client)[-1] == (
            f"<user>hello<assistant>{ANSWER}<user>{said}<assistant>{ANSWER}<user>on<assistant>"
        )


async def test_instructions_are_not_carried_over(api: openai.AsyncOpenAI, client: FakeClient) -> None:
    parent = await api.responses.create(model="tiny", input="hello", instructions="be kind")
    await api.responses.create(model="tiny", input="again", previous_response_id=parent.id)
    assert prompts(client)[-1] == f"<user>hello<assistant>{ANSWER}<user>again<assistant>"


async def test_items_that_the_server_returned_are_accepted_as_input(
    api: openai.AsyncOpenAI, client: FakeClient
) -> None:
    first = await api.responses.create(model="tiny", input="hello", store=False)
    said: list[Any] = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *[item.model_dump() for item in first.output],
        {"type": "message", "role": "user", "content": "again"},
    ]
    response = await api.responses.create(model="tiny", input=said)
    assert prompts(client)[-1] == f"<system>be kind<user>hello<assistant>{ANSWER}<user>again<assistant>"
    listed = await api.responses.input_items.list(response.id, order="asc")
    assert [item.role for item in listed.data] == ["developer", "user", "assistant", "user"]  # type: ignore[union-attr]
    newest = await api.responses.input_items.list(response.id, limit=1)
    assert newest.data[0].content[0].text == "again"  # type: ignore[union-attr]
    assert newest.has_more


@pytest.mark.parametrize("background", [False, True])
async def test_completed_is_sent_only_after_the_commit(
    api: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    storing, allowed, commit = threading.Event(), threading.Event(), TurnStore.commit

    def held(store: TurnStore, turn: Turn, *, begun: bool = False) -> None:
        if turn.response["status"] == "completed":
            storing.set()
            assert allowed.wait(60)
        commit(store, turn, begun=begun)

    monkeypatch.setattr(TurnStore, "commit", held)
    stream = await api.responses.create(model="tiny", input="hello", stream=True, background=background)
    events: list[Any] = []

    async def read() -> None:
        async for event in stream:
            events.append(event)

    reading = asyncio.create_task(read())
    await until(lambda: [event.type for event in events].count("response.output_text.delta") == 4)
    await until(storing.is_set)
    await caught_up(api)
    assert events[-1].type == "response.output_text.delta"
    allowed.set()
    await reading
    assert events[-1].type == "response.completed"
    assert (await api.responses.retrieve(events[-1].response.id)).status == "completed"


async def test_a_conflict_at_the_commit_ends_the_stream_as_failed_and_never_as_completed(
    api: openai.AsyncOpenAI, client: FakeClient
) -> None:
    parent = await api.responses.create(model="tiny", input="hello")
    client.hold = asyncio.Event()
    stream = await api.responses.create(model="tiny", input="on", previous_response_id=parent.id, stream=True)
    events: list[Any] = [await anext(aiter(stream))]
    await api.responses.delete(parent.id)
    client.hold.set()
    events += [event async for event in stream]
    assert events[-1].type == "response.failed" and "response.completed" not in [event.type for event in events]
    with pytest.raises(openai.NotFoundError):
        await api.responses.retrieve(events[0].response.id)


class TestCompaction:
    """A long conversation is replaced by the user's messages and a summary."""

    async def test_a_compacted_conversation_is_the_users_messages_and_a_summary(
        self, api: openai.AsyncOpenAI, client: FakeClient
    ) -> None:
        first = await api.responses.create(model="tiny", input="hello")
        raw = await api.responses.with_raw_response.compact(model="tiny", input="and on", previous_response_id=first.id)
        made = raw.http_response.json()
        assert prompts(client)[-1] == (f"<user>hello<assistant>{ANSWER}<user>and on<user>{SUMMARIZE}<assistant>")
        assert made["object"] == "response.compaction" and made["usage"]["output_tokens"] == 5
        *said, sealed = made["output"]
        assert [(item["role"], item["content"][0]["text"]) for item in said] == [("user", "hello"), ("user", "and on")]
        CompactedResponse.model_validate(made | {"output": [sealed]}, strict=True)
        given: Any = [*said, sealed, {"role": "user", "content": "go"}]
        await api.responses.create(model="tiny", input=given)
        assert prompts(client)[-1] == f"<user>hello<user>and on<assistant>{OPENING}{ANSWER}<user>go<assistant>"

    async def test_a_turn_can_continue_from_a_stored_compaction(
        self, api: openai.AsyncOpenAI, client: FakeClient
    ) -> None:
        first = await api.responses.create(model="tiny", input="hello")
        made = await api.responses.compact(model="tiny", previous_response_id=first.id)
        found = await api.responses.retrieve(made.id)
        assert (found.status, [item.type for item in found.output]) == ("completed", ["compaction"])
        await api.responses.create(model="tiny", input="go", previous_response_id=made.id)
        assert prompts(client)[-1] == f"<user>hello<assistant>{OPENING}{ANSWER}<user>go<assistant>"
        other = await api.responses.compact(model="tiny", input="hello", extra_body={"store": False})
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(other.id)

    async def test_the_length_of_a_summary_is_limited_by_the_context_or_the_client(
        self, api: openai.AsyncOpenAI, client: FakeClient
    ) -> None:
        await api.responses.compact(model="tiny", input="hello")
        await api.responses.compact(model="tiny", input="hello", extra_body={"max_output_tokens": 2})
        assert [asked.params.max_tokens for asked in client.asked] == [1024, 2]

    @pytest.mark.parametrize(
        ("given", "param"),
        [({}, "input"), ({"conversation": "conv_x", "input": "a"}, "conversation"), ({"stream": True}, "stream")],
    )
    async def test_a_compaction_that_is_impossible_is_refused_by_name(
        self, api: openai.AsyncOpenAI, given: dict[str, Any], param: str
    ) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.compact(model="tiny", extra_body=given)
        assert refused.value.param == param

    @pytest.mark.parametrize("sealed", ["", "x", "bnVsbA==", "²", 5, None])
    async def test_a_summary_that_no_server_made_is_refused(self, api: openai.AsyncOpenAI, sealed: Any) -> None:
        given: Any = [{"type": "compaction", "encrypted_content": sealed}]
        with pytest.raises(openai.BadRequestError, match="was not made by") as refused:
            await api.responses.create(model="tiny", input=given)
        assert refused.value.param == "input[0].encrypted_content"

    @pytest.mark.parametrize(
        ("summary", "said", "reason"),
        [
            ('""', ['""'] * (MAX_STRINGS + 1), f"strings; at most {MAX_STRINGS}"),
            ('""', ["[]"] * (MAX_CONTAINERS + 1), f"braces; at most {MAX_CONTAINERS}"),
            ('""', ['""'] * MAX_MESSAGES, f"stand for {MAX_MESSAGES + 1} messages or more; at most {MAX_MESSAGES}"),
            ('"\\ud800"', [], "was not made by"),
            ('""', ['"\\udc00"'], "was not made by"),
        ],
        ids=["strings", "lists", "messages", "a half character", "a half character that was said"],
    )
    @pytest.mark.parametrize("path", ["/v1/responses", "/v1/conversations"])
    async def test_the_content_of_a_compaction_is_limited_like_a_body(
        self, http: Callable[..., httpx.AsyncClient], path: str, summary: str, said: list[str], reason: str
    ) -> None:
        sealed = base64.urlsafe_b64encode(f'{{"summary":{summary},"said":[{",".join(said)}]}}'.encode()).decode()
        item = {"type": "compaction", "encrypted_content": sealed}
        body = {"model": "tiny", "input": [item]} if path == "/v1/responses" else {"items": [item]}
        async with http() as server:
            answer = await server.post(path, json=body)
        assert answer.status_code == 400 and reason in answer.json()["error"]["message"]

    async def test_several_compactions_are_counted_together(self, http: Callable[..., httpx.AsyncClient]) -> None:
        sealed = encode_compacted(Compacted("so far", ["a"] * (MAX_MESSAGES // 2)))
        item = {"type": "compaction", "encrypted_content": sealed}
        async with http() as server:
            answers = [await server.post("/v1/conversations", json={"items": [item] * count}) for count in (1, 2)]
        assert [answer.status_code for answer in answers] == [200, 400]


class TestWhatIsNotStored:
    """Nothing is stored for store=false, a client that leaves, or an engine that dies. Conversations stay unchanged."""

    async def test_without_store_a_response_cannot_be_found(self, api: openai.AsyncOpenAI) -> None:
        response = await api.responses.create(model="tiny", input="hello", store=False)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="not found") as refused:
            await api.responses.create(model="tiny", input="on", previous_response_id=response.id)
        assert refused.value.param == "previous_response_id"

    async def test_a_client_that_leaves_during_a_turn_rolls_back_to_the_last_completed_turn(
        self, api: openai.AsyncOpenAI, client: FakeClient
    ) -> None:
        conversation = await api.conversations.create()
        await api.responses.create(model="tiny", input="hello", conversation=conversation.id)
        client.hold = asyncio.Event()
        stream = await api.responses.create(model="tiny", input="lost", conversation=conversation.id, stream=True)
        assert (await anext(aiter(stream))).type == "response.created"
        with pytest.raises(openai.ConflictError) as busy:
            await api.responses.create(model="tiny", input="too soon", conversation=conversation.id)
        assert busy.value.code == "conversation_busy"
        await stream.close()
        await until(lambda: client.asked[-1].ended == "aborted")
        client.hold.set()
        await api.responses.create(model="tiny", input="again", conversation=conversation.id)
        assert prompts(client)[-1] == f"<user>hello<assistant>{ANSWER}<user>again<assistant>"
        items = [item async for item in api.conversations.items.list(conversation.id)]
        assert len(items) == 4

    async def test_an_engine_that_dies_ends_the_stream_as_failed(
        self, api: openai.AsyncOpenAI, client: FakeClient
    ) -> None:
        client.hold = asyncio.Event()
        stream = await api.responses.create(model="tiny", input="hello", stream=True)
        events = [await anext(aiter(stream))]
        client.die("gone")
        events += [event async for event in stream]
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.error is not None and last.response.error.code == "server_error"
        assert [event.sequence_number for event in events] == list(range(len(events)))

    async def test_a_refused_stream_has_an_error_status(self, api: openai.AsyncOpenAI, client: FakeClient) -> None:
        client.refuse = EngineDead("gone")
        with pytest.raises(openai.InternalServerError):
            await api.responses.create(model="tiny", input="hello", stream=True)


async def held_after_event_5(api: openai.AsyncOpenAI, client: FakeClient) -> str:
    """Return the id of a background response that waits after its first delta, event 5."""
    client.hold = asyncio.Event()
    stream = await api.responses.create(model="tiny", input="hello", background=True, stream=True)
    async for event in stream:
        if event.type == "response.created":
            id = event.response.id
        if event.sequence_number == 5:
            break
    await stream.close()
    return id


async def endless() -> AsyncGenerator[Any, None]:
    """Events of a response that has none yet."""
    await asyncio.Event().wait()
    yield None


class TestBackground:
    """A background response runs without a reader. Only a background response can be cancelled."""

    async def test_polling_shows_a_background_response_until_it_is_completed(
        self, api: openai.AsyncOpenAI, client: FakeClient
    ) -> None:
        client.hold = asyncio.Event()
        queued = await api.responses.create(model="tiny", input="hello", background=True)
        assert queued.status in ("queued", "in_progress") and queued.background
        await until(lambda: bool(client.asked))
        client.hold.set()
        while (found := await api.responses.retrieve(queued.id)).status != "completed":
            assert found.status in ("queued", "in_progress")
        assert found.output_text == ANSWER
        await api.responses.create(model="tiny", input="on", previous_response_id=queued.id)
        assert prompts(client)[-1] == f"<user>hello<assistant>{ANSWER}<user>on<assistant>"

    async def test_a_background_stream_can_be_resumed_after_a_sequence_number(
        self, api: openai.AsyncOpenAI, client: FakeClient
    ) -> None:
        client.hold = asyncio.Event()
        stream = await api.responses.create(model="tiny", input="hello", background=True, stream=True)
        created = await anext(aiter(stream))
        assert created.type == "response.created"
        await stream.close()
        again = await api.responses.retrieve(created.response.id, stream=True, starting_after=1)
        client.hold.set()
        events = [event async for event in again]
        assert [event.sequence_number for event in events] == list(range(2, 2 + len(events)))
        assert events[-1].type == "response.completed"

    @pytest.mark.parametrize("after", ["-4", "-1", "²", "٣", "", "+1", "1.5", "1_0", "6", "1000000", "1" + "0" * 5000])
    async def test_a_resumed_stream_starts_after_an_event_that_exists(
        self, api: openai.AsyncOpenAI, client: FakeClient, after: str
    ) -> None:
        response = await held_after_event_5(api, client)
        with pytest.raises(openai.BadRequestError, match=r"starting_after is .* between 0 and 5") as refused:
            await api.responses.retrieve(response, stream=True, extra_query={"starting_after": after})
        assert (refused.value.param, refused.value.code) == ("starting_after", "invalid_value")

    async def test_a_cancelled_stream_ends_with_an_event_that_has_the_text_so_far(
        self, api: openai.AsyncOpenAI, client: FakeClient
    ) -> None:
        response = await held_after_event_5(api, client)
        rest = asyncio.create_task(api.responses.retrieve(response, stream=True, starting_after=5))
        await caught_up(api)  # Now it waits for event 6.
        cancelled = await api.responses.cancel(response)
        events = [event async for event in await rest]
        assert [event.type for event in events] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
        assert [event.sequence_number for event in events] == [6, 7, 8, 9]
        assert events[-1].response == cancelled == await api.responses.retrieve(response)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "Ahoy")
        assert cancelled.output[0].status == "incomplete"

    async def test_a_reader_that_leaves_a_background_response_leaves_nothing_that_waits(self) -> None:
        background = Background(cast(Any, SimpleNamespace(events=endless, begun=False)))
        before = asyncio.all_tasks()
        reader = asyncio.create_task(anext(background.follow()))
        while len(asyncio.all_tasks()) < len(before) + 2:
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        background.task.cancel()
        await asyncio.gather(background.task, return_exceptions=True)

    async def test_a_background_response_is_queued_before_it_is_in_progress(self, api: openai.AsyncOpenAI) -> None:
        stream = await api.responses.create(model="tiny", input="hello", background=True, stream=True)
        events = [event async for event in stream]
        assert [(event.type, event.response.status) for event in events if hasattr(event, "response")] == [
            ("response.created", "queued"),
            ("response.queued", "queued"),
            ("response.in_progress", "in_progress"),
            ("response.completed", "completed"),
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))

    async def test_a_background_stream_can_be_read_again_after_its_end(self, api: openai.AsyncOpenAI) -> None:
        stream = await api.responses.create(model="tiny", input="hello", background=True, stream=True)
        events = [event async for event in stream]
        id = events[-1].response.id
        for after in (0, 5, len(events) - 2, len(events) - 1):
            again = [event async for event in await api.responses.retrieve(id, stream=True, starting_after=after)]
            assert again == events[after + 1 :]
        with pytest.raises(openai.BadRequestError, match=f"between 0 and {len(events) - 1}"):
            await api.responses.retrieve(id, stream=True, starting_after=len(events))

    @pytest.mark.parametrize("limit", ["KEPT_EVENTS", "KEPT_BYTES"])
    async def test_a_background_stream_is_rebuilt_from_the_store_once_its_events_are_gone(
        self, api: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, limit: str
    ) -> None:
        monkeypatch.setattr(service, limit, 0)
        stream = await api.responses.create(model="tiny", input="hello", background=True, stream=True)
        events = [event async for event in stream]
        id = events[-1].response.id
        again = [event async for event in await api.responses.retrieve(id, stream=True)]
        assert [event.type for event in again] == [
            "response.created",
            "response.queued",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in again] == list(range(10))
        assert again[5].delta == ANSWER and again[-1].response == events[-1].response
        last = [event async for event in await api.responses.retrieve(id, stream=True, starting_after=99)]
        assert [(event.type, event.sequence_number) for event in last] == [("response.completed", 100)]

    async def test_only_a_background_response_can_be_streamed_again(self, api: openai.AsyncOpenAI) -> None:
        response = await api.responses.create(model="tiny", input="hello")
        with pytest.raises(openai.BadRequestError, match="background: true"):
            await api.responses.retrieve(response.id, stream=True)

    async def test_a_background_response_can_be_cancelled(self, api: openai.AsyncOpenAI, client: FakeClient) -> None:
        client.hold = asyncio.Event()
        conversation = await api.conversations.create()
        queued = await api.responses.create(model="tiny", input="hello", background=True, conversation=conversation.id)
        cancelled = await api.responses.cancel(queued.id)
        assert cancelled.status == "cancelled" and cancelled.output_text in ("", "Ahoy")
        assert (await api.responses.retrieve(queued.id)).status == "cancelled"
        assert [asked.ended for asked in client.asked] in ([], ["aborted"])
        with pytest.raises(openai.BadRequestError, match="is cancelled"):
            await api.responses.create(model="tiny", input="on", previous_response_id=queued.id)
        assert [item async for item in api.conversations.items.list(conversation.id)] == []

    @pytest.mark.parametrize("end", ["completed", "cancelled"])
    async def test_a_cancellation_while_the_end_is_stored_answers_with_that_end(
        self, client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
    ) -> None:
        storing, allowed, commit = threading.Event(), threading.Event(), TurnStore.commit

        def held(store: TurnStore, turn: Turn, *, begun: bool = False) -> None:
            if turn.response["status"] == end:
                storing.set()
                assert allowed.wait(60)
            commit(store, turn, begun=begun)

        monkeypatch.setattr(TurnStore, "commit", held)
        client.hold = asyncio.Event() if end == "cancelled" else None
        async with listening(client, store=str(tmp_path / "store.sqlite")) as server, official(server.url) as api:
            queued = await api.responses.create(model="tiny", input="hello", background=True)
            first = [asyncio.create_task(api.responses.cancel(queued.id))] if end == "cancelled" else []
            await until(storing.is_set)
            second = asyncio.create_task(api.responses.cancel(queued.id))
            await caught_up(api)
            allowed.set()
            assert {(await answer).status for answer in (*first, second)} == {end}

    async def test_a_foreground_response_cannot_be_cancelled(self, api: openai.AsyncOpenAI) -> None:
        response = await api.responses.create(model="tiny", input="hello")
        with pytest.raises(openai.BadRequestError, match="background: true"):
            await api.responses.cancel(response.id)

    async def test_a_background_response_that_cannot_be_served_is_refused_at_once(
        self, api: openai.AsyncOpenAI
    ) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(model="tiny", input="a" * 6000, background=True)
        assert refused.value.code == "context_length_exceeded"

    async def test_a_background_response_that_fails_has_status_failed(
        self, api: openai.AsyncOpenAI, client: FakeClient
    ) -> None:
        client.refuse = RuntimeError("a bug")
        queued = await api.responses.create(model="tiny", input="hello", background=True)
        while (found := await api.responses.retrieve(queued.id)).status != "failed":
            pass
        assert found.error is not None and found.error.message == "the server failed on this request"

    async def test_deleting_a_background_response_stops_it(self, api: openai.AsyncOpenAI, client: FakeClient) -> None:
        client.hold = asyncio.Event()
        queued = await api.responses.create(model="tiny", input="hello", background=True)
        await until(lambda: bool(client.asked))
        await api.responses.delete(queued.id)
        assert client.asked[0].ended == "aborted"
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(queued.id)


class TestDeleting:
    """Deleted objects are not found. Turns that build on them still work."""

    async def test_a_deleted_response_is_not_found(self, api: openai.AsyncOpenAI, client: FakeClient) -> None:
        parent = await api.responses.create(model="tiny", input="hello")
        child = await api.responses.create(model="tiny", input="on", previous_response_id=parent.id)
        await api.responses.delete(parent.id)
        for call in (
            api.responses.retrieve,
            api.responses.delete,
            api.responses.cancel,
            api.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError) as missing:
                await call(parent.id)  # type: ignore[operator]
            assert missing.value.code == "response_not_found"
        await api.responses.create(model="tiny", input="and on", previous_response_id=child.id)
        assert prompts(client)[-1] == (
            f"<user>hello<assistant>{ANSWER}<user>on<assistant>{ANSWER}<user>and on<assistant>"
        )

    async def test_a_deleted_conversation_is_not_found_but_its_responses_are(self, api: openai.AsyncOpenAI) -> None:
        conversation = await api.conversations.create()
        response = await api.responses.create(model="tiny", input="hello", conversation=conversation.id)
        deleted = await api.conversations.delete(conversation.id)
        assert deleted.deleted and deleted.object == "conversation.deleted"
        with pytest.raises(openai.NotFoundError):
            await api.conversations.retrieve(conversation.id)
        assert (await api.responses.retrieve(response.id)).output_text == ANSWER


class TestConversations:
    """Conversations and their items."""

    async def test_conversations_are_created_read_and_updated(self, api: openai.AsyncOpenAI) -> None:
        made = await api.conversations.create(metadata={"a": "1"}, items=[{"role": "user", "content": "hello"}])
        assert made.id.startswith("conv_") and made.object == "conversation"
        assert await api.conversations.retrieve(made.id) == made
        changed = await api.conversations.update(made.id, metadata={"a": "2"})
        assert changed.metadata == {"a": "2"}
        (item,) = (await api.conversations.items.list(made.id)).data
        assert await api.conversations.items.retrieve(item.id, conversation_id=made.id) == item  # type: ignore[arg-type]

    async def test_the_next_turn_sees_items_that_a_client_edited(
        self, api: openai.AsyncOpenAI, client: FakeClient
    ) -> None:
        made = await api.conversations.create(items=[{"role": "system", "content": "be kind"}])
        await api.responses.create(model="tiny", input="hello", conversation=made.id)
        added = await api.conversations.items.create(made.id, items=[{"role": "user", "content": "by hand"}])
        assert added.object == "list" and len(added.data) == 1
        await api.responses.create(model="tiny", input="on", conversation=made.id)
        assert prompts(client)[-1] == (f"<system>be kind<user>hello<assistant>{ANSWER}<user>by hand<user>on<assistant>")
        await api.conversations.items.delete(added.data[0].id, conversation_id=made.id)  # type: ignore[arg-type]
        last = await api.responses.create(model="tiny", input="end", conversation=made.id)
        expected = f"<system>be kind<user>hello<assistant>{ANSWER}<user>on<assistant>{ANSWER}<user>end<assistant>"
        assert prompts(client)[-1] == expected
        # A branch from a turn of a conversation has that turn's context.
        await api.responses.create(model="tiny", input="aside", previous_response_id=last.id)
        assert prompts(client)[-1] == f"{expected}{ANSWER}<user>aside<assistant>"

    async def test_a_page_continues_after_a_given_item(self, api: openai.AsyncOpenAI) -> None:
        items: list[Any] = [{"role": "user", "content": str(number)} for number in range(5)]
        made = await api.conversations.create(items=items)
        first = await api.conversations.items.list(made.id, limit=2)
        assert [item.content[0].text for item in first.data] == ["4", "3"]  # type: ignore[union-attr]
        assert first.has_more and first.last_id == first.data[-1].id
        rest = await api.conversations.items.list(made.id, after=first.last_id)
        assert [item.content[0].text for item in rest.data] == ["2", "1", "0"]  # type: ignore[union-attr]
        assert not rest.has_more

    @pytest.mark.parametrize(
        "limit", ["000000100999", "0" * 5000 + "1", "0", "101", "-1", "+1", "²", "٣", "1_0", "1.0", " 1", ""]
    )
    async def test_a_page_limit_other_than_a_number_from_1_to_100_is_refused(
        self, api: openai.AsyncOpenAI, limit: str
    ) -> None:
        made = await api.conversations.create(items=[{"role": "user", "content": "hello"}])
        response = await api.responses.create(model="tiny", input="hello")
        for page in (
            api.conversations.items.list(made.id, extra_query={"limit": limit}),
            api.responses.input_items.list(response.id, extra_query={"limit": limit}),
        ):
            with pytest.raises(openai.BadRequestError, match=r"limit is .* between 1 and 100") as refused:
                await page
            assert (refused.value.param, refused.value.code) == ("limit", "invalid_value")


class TestTenants:
    """Ids of another tenant are not found."""

    async def test_another_tenants_ids_are_not_found(self, api: openai.AsyncOpenAI, client: FakeClient) -> None:
        response = await api.responses.create(model="tiny", input="hello")
        made = await api.conversations.create(items=[{"role": "user", "content": "hello"}])
        (item,) = (await api.conversations.items.list(made.id)).data
        foreign = other(api)
        asked: dict[str, Any] = {"model": "tiny", "input": "on"}
        for call in (
            foreign.responses.retrieve(response.id),
            foreign.responses.delete(response.id),
            foreign.responses.cancel(response.id),
            foreign.responses.input_items.list(response.id),
            foreign.responses.create(**asked, conversation=made.id),
            foreign.conversations.retrieve(made.id),
            foreign.conversations.update(made.id, metadata={}),
            foreign.conversations.delete(made.id),
            foreign.conversations.items.list(made.id),
            foreign.conversations.items.create(made.id, items=[{"role": "user", "content": "mine"}]),
            foreign.conversations.items.retrieve(item.id, conversation_id=made.id),  # type: ignore[arg-type]
            foreign.conversations.items.delete(item.id, conversation_id=made.id),  # type: ignore[arg-type]
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        for id in (response.id, "resp_never"):
            with pytest.raises(openai.BadRequestError, match=f"Previous response with id '{id}' not found") as refused:
                await foreign.responses.create(**asked, previous_response_id=id)
            assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
        assert (await api.responses.retrieve(response.id)).id == response.id
        assert len((await api.conversations.items.list(made.id)).data) == 1

    async def test_a_background_response_is_found_by_its_tenant_only(
        self, api: openai.AsyncOpenAI, client: FakeClient
    ) -> None:
        client.hold = asyncio.Event()
        queued = await api.responses.create(model="tiny", input="hello", background=True)
        with pytest.raises(openai.NotFoundError):
            await other(api).responses.cancel(queued.id)
        assert (await api.responses.retrieve(queued.id)).status != "cancelled"


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"type": "file_search_call", "output": "x"}]}, "input[0].type", "unsupported_content"),
        ({"input": [{"type": "web_search_call", "action": {}}]}, "input[0].action.query", "invalid_value"),
        ({"input": [{"type": "web_search_call", "action": {"query": "x"}, "results": [{"url": 3}]}]},
         "input[0].results[0].title", "invalid_value"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "invalid_value"),
        ({"input": [{"type": "function_call_output", "call_id": "call_x", "output": "x"}]}, "input", "invalid_value"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "a", "output": "x"}]}, "input", "invalid_value"),
        ({"input": [{"role": "pirate", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type",
         "unsupported_content"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name", "unsupported_parameter"),
        ({"input": "mutiny"}, "input", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "invalid_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"include": ["file_search_call.queries"]}, "include[0]", "invalid_value"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "invalid_value"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "invalid_value"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "invalid_value"),
        ({"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl", "invalid_value"),
        ({"request_id": "mine"}, "request_id", "unsupported_parameter"),
        ({"enable_response_messages": True}, "enable_response_messages", "unsupported_parameter"),
        ({"image": {"detail": "low"}}, "image", "unsupported_parameter"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"messages": []}, "messages", "unknown_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": 4999}, "max_output_tokens", "context_length_exceeded"),
        ({"metadata": {"k": 1}}, "metadata.k", "invalid_value"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"previous_response_id": "resp_x", "conversation": "conv_x"}, "previous_response_id",
         "mutually_exclusive_parameters"),
    ],
)  # fmt: skip
async def test_invalid_or_unsupported_response_parameters_are_refused_by_name(
    api: openai.AsyncOpenAI, changes: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await api.responses.create(model="tiny", input="hello", extra_body=changes)
    assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_nowhere"}])
async def test_an_invalid_page_parameter_is_refused_by_name(api: openai.AsyncOpenAI, query: dict[str, Any]) -> None:
    made = await api.conversations.create()
    response = await api.responses.create(model="tiny", input="hello", conversation=made.id)
    for listing in (
        api.conversations.items.list(made.id, **query),
        api.responses.input_items.list(response.id, **query),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            await listing
        assert refused.value.status_code in (400, 404)
        assert refused.value.param == next(iter(query))


async def test_at_most_twenty_items_are_added_at_once(api: openai.AsyncOpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "x"}] * 21
    with pytest.raises(openai.BadRequestError) as refused:
        await api.conversations.create(items=items)
    assert refused.value.param == "items"


async def test_metrics_count_responses_without_labels_for_ids(api: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        await api.responses.create(model="tiny", input="on", previous_response_id="resp_nowhere")
    with pytest.raises(openai.NotFoundError):
        await api.conversations.update("conv_nowhere", metadata={})
    await api.responses.create(model="tiny", input="hello")
    async with httpx.AsyncClient(headers={"authorization": "Bearer one"}) as plain:
        text = (await plain.get(f"{api.base_url.scheme}://{api.base_url.netloc.decode()}/metrics")).text
    assert 'holdfast_requests_total{outcome="ok",route="/v1/responses"} 1.0' in text
    assert 'holdfast_requests_total{outcome="refused",route="/v1/responses"} 1.0' in text
    assert "nowhere" not in text
