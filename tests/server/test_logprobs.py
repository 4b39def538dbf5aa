"""Log probabilities in answers, read by the openai client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from fake_engine import FakeClient

from holdfast.server.logprobs import CompletionLogprobs, TokenRecord, spelled

Listening = Callable[..., Any]
HELLO: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 2}


async def test_a_chat_reports_each_token_with_the_most_probable_ones_whole_and_streamed(listening: Listening) -> None:
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        answer = await api.chat.completions.create(**HELLO)
        chunks = [chunk async for chunk in await api.chat.completions.create(**HELLO, stream=True)]
        alone = await api.chat.completions.create(**HELLO | {"top_logprobs": 0})
    given = answer.choices[0].logprobs
    assert given is not None and given.content is not None
    assert [each.token for each in given.content] == ["Ahoy", ", ", "sailor", "!"]
    first = given.content[0]
    assert (first.logprob, bytes(first.bytes or [])) == (-2.0, b"Ahoy")
    assert [(each.token, each.logprob) for each in first.top_logprobs] == [("?", -0.25), ("Ahoy", -2.0)]
    streamed = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert streamed == given.content
    assert chunks[0].choices[0].logprobs is None, "the chunk with the role tells nothing"
    assert [each.top_logprobs for each in alone.choices[0].logprobs.content] == [[]] * 4


async def test_completions_report_columns_whole_and_streamed(listening: Listening) -> None:
    asked: Any = {"model": "tiny", "prompt": "hello", "logprobs": 1}
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        answer = await api.completions.create(**asked)
        chunks = [chunk async for chunk in await api.completions.create(**asked, stream=True)]
        with pytest.raises(openai.BadRequestError, match="a number from 0 to 20"):
            await api.completions.create(**asked | {"logprobs": True})
    given = answer.choices[0].logprobs
    assert given is not None
    assert given.tokens == ["Ahoy", ", ", "sailor", "!"]
    assert given.token_logprobs == [-2.0] * 4
    assert given.top_logprobs == [{"?": -0.25, token: -2.0} for token in given.tokens]
    assert given.text_offset == [0, 4, 6, 12]
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in getattr(part, name)] == getattr(given, name)


async def test_a_response_reports_its_tokens_on_request(listening: Listening) -> None:
    asked: Any = {"model": "tiny", "input": "hello", "top_logprobs": 2}
    included: Any = asked | {"include": ["message.output_text.logprobs"]}
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        plain = await api.responses.create(**asked)
        answer = await api.responses.create(**included)
        events = [event async for event in await api.responses.create(**included, stream=True)]
    assert plain.top_logprobs == answer.top_logprobs == 2
    assert plain.output[0].content[0].logprobs == []
    given = answer.output[0].content[0].logprobs
    assert [each.token for each in given] == ["Ahoy", ", ", "sailor", "!"]
    assert [(each.token, each.logprob) for each in given[0].top_logprobs] == [("?", -0.25), ("Ahoy", -2.0)]
    deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [(each.token, each.logprob) for each in deltas] == [(each.token, each.logprob) for each in given]
    assert [each.token for each in done.logprobs] == [each.token for each in given]


NAMED: Any = {"logprob_token_ids": [120, 1, 120, 31]}


async def test_a_chat_reports_named_tokens_in_place_of_the_most_probable_at_each_position_and_the_end(
    listening: Listening, client: FakeClient
) -> None:
    client.ends = True
    asked: Any = HELLO | {"extra_body": NAMED}
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        answer = await api.chat.completions.create(**asked)
        chunks = [chunk async for chunk in await api.chat.completions.create(**asked, stream=True)]
        with pytest.raises(openai.BadRequestError, match="needs logprobs") as refusal:
            await api.chat.completions.create(**asked | {"logprobs": False, "top_logprobs": 0})
    assert refusal.value.param == "logprob_token_ids"
    assert client.asked[0].params.logprob_token_ids == (120, 1, 31) and client.asked[0].params.logprobs is None
    given = answer.choices[0].logprobs
    assert given is not None and given.content is not None
    assert [each.token for each in given.content] == ["Ahoy", ", ", "sailor", "!", chr(31)]
    tops = [[each.token for each in told.top_logprobs] for told in given.content]
    names = ["x", ", ", chr(31)]
    assert tops == [["Ahoy", *names], names, ["sailor", *names], ["!", *names], names]
    assert all(
        top.logprob == -ord(top.token) for told in given.content for top in told.top_logprobs if top.token == "x"
    )
    streamed = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert streamed == given.content


async def test_completions_report_named_tokens_whole_and_streamed(listening: Listening, client: FakeClient) -> None:
    client.ends = True
    asked: Any = {"model": "tiny", "prompt": "hello", "logprobs": 0, "extra_body": NAMED}
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        answer = await api.completions.create(**asked)
        chunks = [chunk async for chunk in await api.completions.create(**asked, stream=True)]
        for wrong, reason in (({"logprobs": None}, "needs logprobs"), ({"max_tokens": 0, "echo": True}, "is 0")):
            with pytest.raises(openai.BadRequestError, match=reason) as refusal:
                await api.completions.create(**asked | wrong)
            assert refusal.value.param == "logprob_token_ids"
    given = answer.choices[0].logprobs
    assert given is not None and given.tokens == ["Ahoy", ", ", "sailor", "!", chr(31)]
    named = {"x": -120.0, ", ": -1.0, chr(31): -31.0}
    assert given.top_logprobs == [
        named | {token: own} for token, own in zip(given.tokens, given.token_logprobs, strict=True)
    ]
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in getattr(part, name)] == getattr(given, name)


def test_bytes_of_an_incomplete_character_are_escaped_and_count_once_complete(client: FakeClient) -> None:
    client.text.token_bytes = lambda token: bytes([token])  # type: ignore[method-assign]
    columns = CompletionLogprobs(client.text).columns([TokenRecord(byte, None) for byte in "aé!".encode()])  # type: ignore[arg-type]
    assert columns["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert columns["text_offset"] == [0, 1, 1, 2]
    assert columns["token_logprobs"] == columns["top_logprobs"] == [None] * 4
    assert spelled("né".encode()) == "né"
