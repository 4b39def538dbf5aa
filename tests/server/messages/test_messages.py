"""The Messages API by Anthropic's own client, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from fake_engine import FakeClient, FakeText, engine_info
from serving import listening

from holdfast.core.types import FinishReason, ThinkingBudget
from holdfast.server.messages.protocol import MessagesRequest
from tests.served import Serving, make_checkpoint, serve

if TYPE_CHECKING:  # otherwise each process that collects tests would import the SDK, which takes 1.5 s
    import anthropic
    from anthropic.types import Message

HELLO: Any = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def client_that_says(*words: str, **more: Any) -> FakeClient:
    """Return a model with reasoning and tools in its template, which says these words."""
    text = FakeText(template="{{ tools }} <think> <tool_call>")
    return FakeClient(info=engine_info(max_model_len=4096), text=text, words=words, ends=True, **more)


@pytest.fixture
def client() -> FakeClient:
    return client_that_says("Let me ", "see.\n\n", *[CALL[at : at + 7] for at in range(0, len(CALL), 7)])


@pytest.fixture
async def api(client: FakeClient) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    async with (
        listening(client) as server,
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as api,
    ):
        yield api


def prompt(client: FakeClient) -> str:
    return "".join(map(chr, client.asked[-1].prompt))


async def streamed(api: anthropic.AsyncAnthropic, **asked: Any) -> tuple[list[Any], Message]:
    """Return the events of a stream as they are sent, and the message that they add up to."""
    raw = [event async for event in await api.messages.create(**asked, stream=True)]
    async with api.messages.stream(**asked) as stream:
        return raw, await stream.get_final_message()


def same(first: Message, second: Message) -> bool:
    """Whether two messages differ only in ids."""

    def plain(message: Message) -> Any:
        fields: Any = message.to_dict(exclude_none=True)
        for each in (fields, *fields["content"]):
            each.pop("id", None)
        return fields

    return bool(plain(first) == plain(second))


@pytest.mark.parametrize("client", [client_that_says("Ahoy", ", ", "sailor", "!", cached=3)])
async def test_a_message_is_answered_whole_and_as_events(client: FakeClient, api: anthropic.AsyncAnthropic) -> None:
    system: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    asked = HELLO | {"system": system, "metadata": {"user_id": "x"}, "extra_body": {"top_k": 5}}
    message = await api.messages.create(**asked)
    assert prompt(client) == "<system>Be kind.<user>hello" and client.asked[-1].params.top_k == 5
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Ahoy, sailor!"}]
    assert (message.role, message.type, message.model, message.stop_reason) == (
        "assistant",
        "message",
        "tiny",
        "end_turn",
    )
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (len(prompt(client)) - 3, 3, 5)
    events, final = await streamed(api, **asked)
    assert [event.type for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * 4, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert events[0].message.content == [] and events[0].message.stop_reason is None
    assert same(message, final)


async def test_a_tool_is_called_and_the_chat_continues_with_its_result(
    client: FakeClient, api: anthropic.AsyncAnthropic
) -> None:
    asked = HELLO | {"tools": [WEATHER]}
    message = await api.messages.create(**asked)
    text, call = message.content
    assert text.type == "text" and text.text == "Let me see."
    assert call.type == "tool_use" and (call.name, call.input) == ("get_weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use" and call.id.startswith("toolu_")
    events, final = await streamed(api, **asked)
    assert same(message, final)
    starts = [event for event in events if event.type == "content_block_start"]
    assert [(event.index, event.content_block.type) for event in starts] == [(0, "text"), (1, "tool_use")]
    given = [event.delta.partial_json for event in events if event.type == "content_block_delta" and event.index == 1]
    assert "".join(given) == '{"city": "Paris"}' and len(given) > 1
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    more: Any = {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}
    said: Any = [*HELLO["messages"], {"role": "assistant", "content": message.content}, more]
    await api.messages.create(**asked | {"messages": said})
    arguments = {"city": "Paris"}
    assert prompt(client) == (
        f"<tool>get_weather<user>hello<assistant>Let me see.[get_weather {arguments} {call.id}]<tool>rain<user>And now?"
    )


THINKING: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.mark.parametrize("client", [client_that_says("<think>Hm, ", "well.", "</think>\n\n", "Yes.")])
async def test_reasoning_is_a_thinking_block_that_may_come_back(
    client: FakeClient, api: anthropic.AsyncAnthropic
) -> None:
    message = await api.messages.create(**HELLO, **THINKING)
    thinking, text = message.content
    assert thinking.type == "thinking" and thinking.thinking == "Hm, well." and thinking.signature
    assert text.type == "text" and text.text == "Yes."
    assert prompt(client) == "<enable_thinking=True><user>hello"
    events, final = await streamed(api, **HELLO, **THINKING)
    assert same(message, final)
    kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert kinds == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]
    said: Any = [*HELLO["messages"], {"role": "assistant", "content": message.content}, HELLO["messages"][0]]
    await api.messages.create(**HELLO, thinking={"type": "adaptive"})
    assert prompt(client) == "<enable_thinking=True><user>hello"
    await api.messages.create(
        **HELLO, thinking={"type": "adaptive"}, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert prompt(client) == "<enable_thinking=False><user>hello"
    await api.messages.create(**HELLO | {"messages": said}, thinking={"type": "disabled"})
    assert prompt(client) == "<enable_thinking=False><user>hello<assistant>Yes.<user>hello"


def with_tags(**tags: int) -> FakeClient:
    client = client_that_says("Yes.")
    client.text.tags = {"<think>": tags["start"], "</think>": tags["end"]} if tags else {}
    return client


@pytest.mark.parametrize(
    ("client", "limit"), [(with_tags(start=90, end=91), ThinkingBudget(1024, 90, 91)), (with_tags(), None)]
)
async def test_a_budget_limits_thinking_if_the_tags_of_the_model_are_tokens(
    client: FakeClient, api: anthropic.AsyncAnthropic, limit: ThinkingBudget | None
) -> None:
    await api.messages.create(**HELLO, **THINKING)
    assert client.asked[-1].params.thinking == limit


@pytest.mark.parametrize(("kind", "tokens"), [("enabled", 1024), ("adaptive", None), ("disabled", None)])
def test_only_enabled_thinking_has_a_budget(kind: str, tokens: int | None) -> None:
    body = {**HELLO, "thinking": {"type": kind, "budget_tokens": 1024}}
    chat = msgspec.convert(body, MessagesRequest).to_answer()
    assert chat.thinking_token_budget == tokens and chat.may_ignore_budget
    for wrong in (0, "many", 1.5):
        with pytest.raises(msgspec.ValidationError, match="budget_tokens"):
            msgspec.convert({**HELLO, "thinking": {"type": kind, "budget_tokens": wrong}}, MessagesRequest)


async def test_a_message_of_an_engine_that_fell_asleep_may_be_continued(
    client: FakeClient, api: anthropic.AsyncAnthropic
) -> None:
    client.ending = FinishReason.ABORT
    assert (await api.messages.create(**HELLO)).stop_reason == "pause_turn"


async def test_max_tokens_and_the_context_end_a_message(client: FakeClient, api: anthropic.AsyncAnthropic) -> None:
    short = await api.messages.create(**HELLO | {"max_tokens": 1})
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 1
    client.words = ["word "] * 500
    asked = HELLO | {"messages": [{"role": "user", "content": "x" * 3900}], "max_tokens": 8_000}
    message = await api.messages.create(**asked)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens + message.usage.input_tokens == 4096


async def test_the_tokens_of_a_prompt_are_counted_even_past_the_context(
    client: FakeClient, api: anthropic.AsyncAnthropic
) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO["messages"], "system": "Be kind.", "tools": [WEATHER]}
    counted = await api.messages.count_tokens(**asked)
    assert counted.input_tokens == len("<tool>get_weather<system>Be kind.<user>hello")
    asked["messages"] = [{"role": "user", "content": "x" * 5000}]
    assert (await api.messages.count_tokens(**asked)).input_tokens > 5000
    assert client.asked == []


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


def document(**source: Any) -> dict[str, Any]:
    """Return a document of text. `source` changes its source."""
    return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It rains."} | source}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (said(IMAGE), r'messages\[0\].content\[0\].type is "image"; supported here: text, document, tool_result'),
        (said({"type": "text"}), r"messages\[0\].content\[0\].text must be a string"),
        (
            said({"type": "tool_use", "id": "a", "name": "b", "input": {}}, role="assistant"),
            r"messages\[0\] has calls, and their results must follow",
        ),
        (said(document(media_type="application/pdf")), r"source.media_type is .*PDF documents are not read here"),
        (said(document(type="url", url="http://x/y")), r'source.type is "url"; supported: text, base64, content'),
        (said(document(type="base64", data="?")), r"source.data must be UTF-8 text in base64"),
        (said(document(type="base64", data="/w==")), r"source.data must be UTF-8 text in base64"),
        (said(document() | {"citations": {"enabled": True}}), r"citations are not supported; leave them out"),
        (
            said({"type": "document", "source": {"type": "content", "content": [IMAGE]}}),
            r'source.content\[0\].type is "image"; supported here: text',
        ),
        (said(document(data=5)), r"messages\[0\].content\[0\].source.data must be a string"),
        (said({"type": "tool_result"}), r"messages\[0\].content\[0\].tool_use_id must be a string"),
        (said({"type": "tool_use", "id": "a", "name": "b", "input": 3}, role="assistant"), r"input must be an object"),
        ({"messages": [{"role": "critic", "content": "x"}]}, r'messages\[0\].role is "critic"'),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content must be a string or a list"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            r'tools\[0\].type is "web_search_20250305"',
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names x"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must have the type json_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, 'tool_choice.type is "some"'),
        ({"extra_body": {"max_tokens": None}}, "max_tokens is missing"),
        ({"extra_body": {"container": "x"}}, "container is not supported yet"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt is too long: This model's maximum context"),
        ({"messages": [{"role": "user", "content": "mutiny"}]}, "the chat template refuses"),
    ],
)
async def test_a_wrong_request_is_refused_in_anthropics_shape(
    api: anthropic.AsyncAnthropic, asked: Any, reason: str
) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match=reason) as refused:
        await api.messages.create(**HELLO | asked)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


async def test_a_document_is_text_with_its_title_and_context(client: FakeClient, api: anthropic.AsyncAnthropic) -> None:
    titled = document() | {"title": "News", "context": "Today", "citations": {"enabled": False}}
    blocks = document(type="content", content=[{"type": "text", "text": "It"}, {"type": "text", "text": "snows."}])
    del blocks["source"]["media_type"], blocks["source"]["data"]
    coded = document(type="base64", data="SXQgw6luZHMu")
    result: Any = {"type": "tool_result", "tool_use_id": "a", "content": [coded]}
    call: Any = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    turns: Any = [*said(titled, blocks)["messages"], *said(call, role="assistant")["messages"]]
    asked: Any = {"messages": [*turns, *said(result)["messages"]]}
    await api.messages.create(**HELLO | asked)
    begin, end = "<document>\n", "\n</document_content>\n</document>"
    news = f"{begin}<title>News</title>\n<context>Today</context>\n<document_content>\nIt rains.{end}"
    snow = f"{begin}<document_content>\nIt\nsnows.{end}"
    ends = f"{begin}<document_content>\nIt \u00e9nds.{end}"
    assert prompt(client) == f"<user>{news}\n{snow}<assistant>[look {{}} a]<tool>{ends}"
    counted = await api.messages.count_tokens(model="tiny", **asked)
    assert counted.input_tokens == len(prompt(client))


async def test_the_answer_goes_on_where_the_client_has_begun_it(
    client: FakeClient, api: anthropic.AsyncAnthropic
) -> None:
    begun: Any = [*HELLO["messages"], {"role": "assistant", "content": [{"type": "text", "text": "Let us"}]}]
    await api.messages.create(**HELLO | {"messages": begun})
    assert prompt(client) == "<user>hello<assistant>Let us"
    counted = await api.messages.count_tokens(model="tiny", messages=begun)
    assert counted.input_tokens == len("<user>hello<assistant>Let us")


@pytest.mark.parametrize(
    ("thread", "status", "code"),
    [
        ({"type": "create"}, 400, "thread_unsupported_request"),
        ({"type": "continue", "previous_message_id": "msg_1"}, 404, "thread_not_found"),
    ],
)
async def test_threads_are_refused_so_that_clients_send_the_whole_conversation(
    api: anthropic.AsyncAnthropic, thread: Any, status: int, code: str
) -> None:
    import anthropic

    with pytest.raises(anthropic.APIStatusError) as refused:
        await api.messages.create(**HELLO, extra_body={"thread": thread})
    body: Any = refused.value.body
    assert refused.value.status_code == status
    assert body["error"]["details"] == {"error_code": code, "unsupported": ["thread"]}


async def test_models_are_listed_in_anthropics_form_to_its_clients(api: anthropic.AsyncAnthropic) -> None:
    import anthropic

    listed = await api.models.list()
    (model,) = listed.data
    assert (model.id, model.type, model.display_name, listed.has_more) == ("tiny", "model", "tiny", False)
    assert (await api.models.retrieve("tiny")) == model
    assert (await api.models.list(after_id="tiny")).data == []
    for wrong in (api.models.list(after_id="huge"), api.models.retrieve("huge")):
        with pytest.raises(anthropic.NotFoundError):
            await wrong


async def test_other_errors_have_anthropics_types(client: FakeClient) -> None:
    import anthropic

    async with listening(client, api_key=("secret",)) as server:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="wrong", max_retries=0) as api:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await api.messages.create(**HELLO)
            assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="secret", max_retries=0) as api:
            assert (await api.messages.create(**HELLO)).type == "message"
            with pytest.raises(anthropic.NotFoundError):
                await api.messages.create(**HELLO | {"model": "huge"})
        async with httpx.AsyncClient(headers={"authorization": "Bearer secret"}) as http:
            assert (await http.post(f"{server.url}/v1/messages", json=HELLO)).status_code == 200


async def test_an_engine_that_dies_ends_the_stream_with_an_error(
    client: FakeClient, api: anthropic.AsyncAnthropic
) -> None:
    import anthropic

    client.hold = asyncio.Event()
    with pytest.raises(anthropic.APIStatusError) as failed:
        async for event in await api.messages.create(**HELLO, stream=True):
            if event.type == "content_block_delta":
                client.die("gone")
    assert failed.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serve(make_checkpoint(tmp_path_factory.mktemp("models") / "bytes"), "--store", "memory") as serving:
        yield serving


def test_a_real_engine_stops_at_a_stop_sequence_and_names_it(serving: Serving) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=serving.url, api_key="one", max_retries=0) as api:
        asked: Any = {"model": "bytes", "max_tokens": 40, "messages": HELLO["messages"]}
        asked["extra_body"] = {"temperature": 0}
        whole = api.messages.create(**asked)
        (text,) = whole.content
        assert whole.stop_reason == "max_tokens" and text.type == "text" and len(text.text) > 10
        stop = text.text[20:24]
        with api.messages.stream(**asked, stop_sequences=["never", stop]) as stream:
            cut = stream.get_final_message()
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
        said = "".join(block.text for block in cut.content if block.type == "text")
        assert said == text.text[: text.text.index(stop)]
        assert cut.usage.cache_read_input_tokens == len("<user>hello<assistant>") // 16 * 16


async def test_a_schema_and_a_tool_that_must_be_called_bind_the_answer(
    client: FakeClient, api: anthropic.AsyncAnthropic
) -> None:
    schema = {"type": "object", "properties": {"fine": {"type": "boolean"}}}
    await api.messages.create(**HELLO, output_config={"format": {"type": "json_schema", "schema": schema}})
    grammar = client.asked[-1].params.grammar
    assert grammar is not None and "fine" in grammar.text
    await api.messages.create(**HELLO, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"})
    grammar = client.asked[-1].params.grammar
    assert grammar is not None and "get_weather" in grammar.text
    await api.messages.create(**HELLO, tools=[WEATHER], tool_choice={"type": "none"})
    assert client.asked[-1].params.grammar is None
