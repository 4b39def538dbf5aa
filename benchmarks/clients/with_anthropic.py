"""anthropic: messages, streams, tools and the tool runner, documents, counting, models and batches."""

from __future__ import annotations

import base64
import time
from typing import Any, Literal

import anthropic
from anthropic import beta_async_tool, beta_tool
from harness import KEY, MODEL, URL, case, equal, holds, main
from pydantic import BaseModel

PLACE = URL.removesuffix("/v1")
client = anthropic.Anthropic(base_url=PLACE, api_key=KEY, max_retries=0)
other = anthropic.Anthropic(base_url=PLACE, api_key="bob", max_retries=0)
SUM = "What is 2 plus 2?"
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": SUM}]}
ADD: Any = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
called: list[tuple[int, int]] = []


@beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    called.append((a, b))
    return str(a + b)


@beta_async_tool
async def add_later(a: int, b: int) -> str:
    """Add two numbers."""
    called.append((a, b))
    return str(a + b)


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: Literal[36, 40]


def says(*blocks: Any) -> dict[str, Any]:
    return ASKED | {"messages": [{"role": "user", "content": list(blocks)}]}


def refuses(kind: type[anthropic.APIStatusError], word: str, **asked: Any) -> None:
    try:
        client.messages.create(**ASKED | asked)
    except kind as error:
        holds(error.message, word)
    else:
        raise AssertionError(f"no {kind.__name__}")


@case
def whole() -> None:
    """a message"""
    message = client.messages.create(**ASKED)
    holds(message.content[0].text, "4")
    equal((message.type, message.role, message.stop_reason), ("message", "assistant", "end_turn"))
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 0


@case
def streamed() -> None:
    """a stream of text"""
    with client.messages.stream(**ASKED) as stream:
        holds("".join(stream.text_stream), "4")
        holds(stream.get_final_message().content[0].text, "4")


@case
async def asynchronous() -> None:
    """a stream of events, asynchronously"""
    async with anthropic.AsyncAnthropic(base_url=PLACE, api_key=KEY, max_retries=0) as api:
        kinds = [event.type async for event in await api.messages.create(**ASKED, stream=True)]
    equal((kinds[0], kinds[-1]), ("message_start", "message_stop"))


@case
def system() -> None:
    """a system prompt of blocks, marked for the cache"""
    block: Any = {"type": "text", "text": "You are kind.", "cache_control": {"type": "ephemeral"}}
    holds(client.messages.create(**ASKED, system=[block]).content[0].text, "4")


@case
def remembers() -> None:
    """a conversation, whose answers come back as they are"""
    said: Any = [{"role": "user", "content": "My name is Ada."}]
    message = client.messages.create(**ASKED | {"messages": said})
    said += [message.to_param(), {"role": "user", "content": "What is my name?"}]
    holds(client.messages.create(**ASKED | {"messages": said}).content[0].text, "Ada")


@case
def stops() -> None:
    """a stop sequence"""
    message = client.messages.create(**ASKED, stop_sequences=["4"])
    equal((message.stop_reason, message.stop_sequence), ("stop_sequence", "4"))


@case
def short() -> None:
    """max_tokens"""
    message = client.messages.create(**ASKED | {"max_tokens": 1})
    equal((message.stop_reason, message.usage.output_tokens), ("max_tokens", 1))


@case
def samples() -> None:
    """sampling settings, metadata and a service tier"""
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}  # This version of the client names none of them.
    message = client.messages.create(**ASKED, metadata={"user_id": "ada"}, service_tier="auto", extra_body=settings)
    assert message.content


@case
def prefill() -> None:
    """an answer that the client begins"""
    begun: Any = [*ASKED["messages"], {"role": "assistant", "content": "2 plus 2 is"}]
    message = client.messages.create(**ASKED | {"messages": begun})
    holds(message.content[0].text, "4")
    assert "plus" not in message.content[0].text, message.content[0].text


@case
def prefill_streamed() -> None:
    """a stream that goes on with the client's text"""
    begun: Any = [*ASKED["messages"], {"role": "assistant", "content": [{"type": "text", "text": "2 plus 2 is"}]}]
    with client.messages.stream(**ASKED | {"messages": begun}) as stream:
        holds("".join(stream.text_stream), "4")


@case
def document() -> None:
    """a document of text, with a title and context"""
    source = {"type": "text", "media_type": "text/plain", "data": "My name is Ada."}
    asked: Any = {"type": "document", "source": source, "title": "About me", "context": "A note."}
    message = client.messages.create(**says(asked, {"type": "text", "text": SUM}))
    holds(message.content[0].text, "4")


@case
def document_blocks() -> None:
    """a document of content blocks, and one in base64"""
    blocks = {"type": "content", "content": [{"type": "text", "text": "My name is Ada."}]}
    data = base64.b64encode(b"I like tea.").decode()
    coded = {"type": "base64", "media_type": "text/plain", "data": data}
    asked: Any = [{"type": "document", "source": source} for source in (blocks, coded)]
    holds(client.messages.create(**says(*asked, {"type": "text", "text": SUM})).content[0].text, "4")


@case
def no_pdf() -> None:
    """a PDF is refused by name"""
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    refuses(anthropic.BadRequestError, "PDF", **says({"type": "document", "source": source}))


@case
def counts() -> None:
    """the tokens of a prompt, with a document, a tool and a begun answer"""
    source = {"type": "text", "media_type": "text/plain", "data": "My name is Ada."}
    asked: Any = says({"type": "document", "source": source}, {"type": "text", "text": SUM})["messages"]
    few = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"]).input_tokens
    more = client.messages.count_tokens(model=MODEL, messages=asked).input_tokens
    most = client.messages.count_tokens(model=MODEL, messages=asked, tools=[ADD]).input_tokens
    begun: Any = [*asked, {"role": "assistant", "content": "2 plus 2 is"}]
    assert few < more < most, (few, more, most)
    assert client.messages.count_tokens(model=MODEL, messages=begun).input_tokens > more
    equal(client.beta.messages.count_tokens(model=MODEL, messages=asked).input_tokens, more)


@case
def tool() -> None:
    """a tool that must be called, and an answer to its result"""
    message = client.messages.create(**ASKED, tools=[ADD], tool_choice={"type": "any"})
    equal(message.stop_reason, "tool_use")
    call = next(block for block in message.content if block.type == "tool_use")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "4"}
    said: Any = [*ASKED["messages"], message.to_param(), {"role": "user", "content": [result]}]
    assert client.messages.create(**ASKED | {"messages": said}, tools=[ADD]).content


@case
def tool_streamed() -> None:
    """a named tool, streamed"""
    with client.messages.stream(**ASKED, tools=[ADD], tool_choice={"type": "tool", "name": "add"}) as stream:
        call = stream.get_final_message().content[-1]
    equal(sorted(call.input), ["a", "b"])


@case
def runner() -> None:
    """beta.messages.tool_runner: a call, and the answer to its result"""
    called.clear()
    run = client.beta.messages.tool_runner(**ASKED, tools=[add], tool_choice={"type": "any"}, max_iterations=2)
    messages = list(run)
    assert called, "the tool was not called"
    equal(messages[0].stop_reason, "tool_use")
    equal(len(messages), 2)


@case
def runner_streamed() -> None:
    """beta.messages.tool_runner, streamed"""
    called.clear()
    run = client.beta.messages.tool_runner(
        **ASKED, tools=[add], tool_choice={"type": "any"}, max_iterations=2, stream=True
    )
    for stream in run:
        for _ in stream:
            pass
    assert called, "the tool was not called"


@case
async def runner_asynchronous() -> None:
    """beta.messages.tool_runner, asynchronously, until it is done"""
    called.clear()
    async with anthropic.AsyncAnthropic(base_url=PLACE, api_key=KEY, max_retries=0) as api:
        run = api.beta.messages.tool_runner(**ASKED, tools=[add_later])
        message = await run.until_done()
    assert message.stop_reason in ("end_turn", "tool_use"), message.stop_reason


@case
def parses() -> None:
    """messages.parse: a typed output"""
    said: Any = [{"role": "user", "content": "I am Ada, 36 years old."}]
    found = client.messages.parse(**ASKED | {"messages": said}, output_format=Person).parsed_output
    assert isinstance(found, Person), found


@case
def models() -> None:
    """the models, listed and read"""
    listed = list(client.models.list())
    equal(listed[0].id, MODEL)
    found = client.models.retrieve(MODEL)
    equal((found.id, found.type), (MODEL, "model"))
    assert found.display_name and found.created_at.year > 2000
    assert found.max_input_tokens and found.max_input_tokens >= 512
    assert list(client.beta.models.list())


@case
def unknown() -> None:
    """errors: an unknown model, a wrong key, a missing user"""
    refuses(anthropic.NotFoundError, "huge", model="huge")
    refuses(anthropic.BadRequestError, "messages", messages=[])
    with anthropic.Anthropic(base_url=PLACE, api_key="wrong", max_retries=0) as stranger:
        try:
            stranger.messages.create(**ASKED)
        except anthropic.AuthenticationError:
            return
    raise AssertionError("a wrong key was taken")


def ended(id: str) -> Any:
    while (batch := client.messages.batches.retrieve(id)).processing_status != "ended":
        time.sleep(0.1)
    return batch


@case
def batch() -> None:
    """a batch: two answers and an error, by their custom ids"""
    bad = ASKED | {"model": "huge"}
    params = {"sum": ASKED, "begun": ASKED | {"system": "You are kind."}, "bad": bad}
    made = client.messages.batches.create(requests=[{"custom_id": id, "params": each} for id, each in params.items()])
    equal((made.type, made.processing_status, made.request_counts.processing), ("message_batch", "in_progress", 3))
    batch = ended(made.id)
    equal((batch.request_counts.succeeded, batch.request_counts.errored, batch.request_counts.processing), (2, 1, 0))
    results = {each.custom_id: each.result for each in client.messages.batches.results(made.id)}
    equal(
        {id: result.type for id, result in results.items()},
        {"sum": "succeeded", "begun": "succeeded", "bad": "errored"},
    )
    holds(results["sum"].message.content[0].text, "4")
    equal(results["bad"].error.error.type, "not_found_error")


@case
def batch_listed() -> None:
    """batches: listed by page, cancelled, deleted, and not another key's"""
    request: Any = {"custom_id": "a", "params": ASKED}
    ids = [client.messages.batches.create(requests=[request]).id for _ in range(3)]
    listed = [each.id for each in client.messages.batches.list(limit=2)]
    equal(listed[:3], ids[::-1])
    canceled = client.messages.batches.cancel(ids[2])
    assert canceled.processing_status in ("canceling", "ended")
    for id in ids:
        ended(id)
    equal(client.messages.batches.delete(ids[0]).type, "message_batch_deleted")
    for api, id in ((client, ids[0]), (other, ids[1])):
        try:
            api.messages.batches.retrieve(id)
        except anthropic.NotFoundError:
            continue
        raise AssertionError(f"{id} was found")


@case
def batch_refused() -> None:
    """a batch with a custom id given twice is refused"""
    request: Any = {"custom_id": "a", "params": ASKED}
    try:
        client.messages.batches.create(requests=[request, request])
    except anthropic.BadRequestError as error:
        holds(error.message, "custom_id")
    else:
        raise AssertionError("it was taken")


main()
