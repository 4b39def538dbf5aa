"""openai: each resource of OpenAI's package for Python that the server has, and the refusals of those that it lacks."""

from __future__ import annotations

import io
import json
import time
from typing import Any, Literal

import openai
from harness import KEY, MODEL, URL, case, equal, holds, main
from pydantic import BaseModel

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
other = openai.OpenAI(base_url=URL, api_key="bob", max_retries=0)
SUM = "What is 2 plus 2?"
SAID: Any = [{"role": "user", "content": SUM}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": SAID, "temperature": 0, "max_completion_tokens": 64}
TURN: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 64}
JSONL = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": MODEL, "messages": SAID}}


class Person(BaseModel, extra="forbid"):
    name: Literal["Ada", "Bob"]
    age: Literal[36, 40]


class Add(BaseModel, extra="forbid"):
    """Add two numbers."""

    a: Literal[1, 2]
    b: Literal[1, 2]


TOOL = openai.pydantic_function_tool(Add, name="add")


def refused(kind: type[openai.APIStatusError], word: str, ask: Any) -> None:
    try:
        ask()
    except kind as error:
        holds(str(error), word)
    else:
        raise AssertionError(f"no {kind.__name__}")


@case
def models() -> None:
    """models: list and retrieve"""
    equal(next(iter(client.models.list())).id, MODEL)
    equal(client.models.retrieve(MODEL).object, "model")


@case
def chat() -> None:
    """chat: a completion with usage and a fingerprint"""
    answer = client.chat.completions.create(**CHAT)
    holds(answer.choices[0].message.content, "4")
    equal((answer.object, answer.choices[0].finish_reason), ("chat.completion", "stop"))
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint


@case
def chat_streamed() -> None:
    """chat: a stream with usage"""
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    holds("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), "4")
    assert chunks[-1].usage and chunks[-1].choices == []


@case
def chat_helper() -> None:
    """chat: the stream helper"""
    with client.chat.completions.stream(**CHAT) as stream:
        kinds = [event.type for event in stream]
        holds(stream.get_final_completion().choices[0].message.content, "4")
    assert "content.delta" in kinds and "content.done" in kinds, kinds


@case
def chat_parsed() -> None:
    """chat: a typed answer"""
    asked = CHAT | {"messages": [{"role": "user", "content": "I am Ada, 36 years old."}]}
    assert client.chat.completions.parse(**asked, response_format=Person).choices[0].message.parsed


@case
def chat_tool() -> None:
    """chat: a typed call, and an answer to its result"""
    answer = client.chat.completions.parse(**CHAT, tools=[TOOL], tool_choice="required").choices[0]
    equal(answer.finish_reason, "tool_calls")
    (call, *_) = answer.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Add)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    said = [*SAID, answer.message.to_dict(), result]
    assert client.chat.completions.create(**CHAT | {"messages": said}, tools=[TOOL]).choices


@case
def chat_tool_streamed() -> None:
    """chat: a call, streamed"""
    with client.chat.completions.stream(**CHAT, tools=[TOOL], tool_choice="required") as stream:
        kinds = {event.type for event in stream}
    assert "tool_calls.function.arguments.done" in kinds, kinds


@case
def chat_choices() -> None:
    """chat: several choices with log probabilities"""
    asked = CHAT | {"temperature": 1.0}
    answer = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=3, seed=7)
    equal(len(answer.choices), 2)
    assert all(each.logprobs and len(each.logprobs.content[0].top_logprobs) == 3 for each in answer.choices)


@case
def chat_options() -> None:
    """chat: stop, penalties, a bias, a seed and metadata"""
    answer = client.chat.completions.create(
        **CHAT, stop=["4"], frequency_penalty=0.1, presence_penalty=0.1, logit_bias={"5": -1}, seed=1, user="ada"
    )
    assert "4" not in (answer.choices[0].message.content or "")


@case
def chat_stored() -> None:
    """chat: stored, listed, read, labelled and deleted"""
    made = client.chat.completions.create(**CHAT, store=True, metadata={"kind": "sum"})
    listed = [each.id for each in client.chat.completions.list(metadata={"kind": "sum"})]
    assert made.id in listed
    equal(client.chat.completions.retrieve(made.id).id, made.id)
    equal(client.chat.completions.messages.list(made.id).data[0].content, SUM)
    equal(client.chat.completions.update(made.id, metadata={"kind": "b"}).metadata, {"kind": "b"})
    refused(openai.NotFoundError, made.id, lambda: other.chat.completions.retrieve(made.id))
    assert client.chat.completions.delete(made.id).deleted


@case
async def asynchronous() -> None:
    """chat: asynchronously, whole and streamed"""
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as api:
        holds((await api.chat.completions.create(**CHAT)).choices[0].message.content, "4")
        chunks = [chunk async for chunk in await api.chat.completions.create(**CHAT, stream=True)]
    holds("".join(chunk.choices[0].delta.content or "" for chunk in chunks), "4")


@case
def raw() -> None:
    """raw and streamed responses, with the request's id"""
    answer = client.chat.completions.with_raw_response.create(**CHAT)
    assert answer.headers["x-request-id"] and answer.parse().choices
    with client.chat.completions.with_streaming_response.create(**CHAT) as streamed:
        assert json.loads(b"".join(streamed.iter_bytes()))["choices"]


@case
def completions() -> None:
    """completions: prompts as text and tokens, an echo, a stream"""
    equal(len(client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2).choices), 2)
    equal(len(client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=2).choices), 1)
    holds(client.completions.create(model=MODEL, prompt="Hello", max_tokens=1, echo=True).choices[0].text, "Hello")
    assert list(client.completions.create(model=MODEL, prompt="Hello", max_tokens=3, stream=True))


@case
def responses() -> None:
    """responses: a turn, and the next one after it"""
    first = client.responses.create(**TURN, input="My name is Ada.")
    equal(first.status, "completed")
    second = client.responses.create(**TURN, input="What is my name?", previous_response_id=first.id)
    holds(second.output_text, "Ada")


@case
def responses_streamed() -> None:
    """responses: the stream helper"""
    with client.responses.stream(**TURN, input=SUM) as stream:
        numbers = [event.sequence_number for event in stream]
        holds(stream.get_final_response().output_text, "4")
    equal(numbers, list(range(len(numbers))))


@case
def responses_parsed() -> None:
    """responses: a typed answer and a typed call"""
    assert client.responses.parse(**TURN, input="I am Ada, 36.", text_format=Person).output_parsed
    tool = openai.pydantic_function_tool(Add, name="add")["function"]
    flat: Any = {"type": "function", **tool}
    answer = client.responses.create(**TURN, input=SUM, tools=[flat], tool_choice="required")
    (call, *_) = [item for item in answer.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    assert client.responses.create(**TURN, input=[result], previous_response_id=answer.id, tools=[flat]).id


@case
def responses_kept() -> None:
    """responses: read, their input, counted, deleted"""
    made = client.responses.create(**TURN, input=SUM)
    equal(client.responses.retrieve(made.id).output_text, made.output_text)
    equal([item.type for item in client.responses.input_items.list(made.id)], ["message"])
    assert client.responses.input_tokens.count(model=MODEL, input=SUM).input_tokens > 0
    refused(openai.NotFoundError, made.id, lambda: other.responses.retrieve(made.id))
    client.responses.delete(made.id)
    refused(openai.NotFoundError, made.id, lambda: client.responses.retrieve(made.id))


@case
def responses_background() -> None:
    """responses: in the background, followed and cancelled"""
    made = client.responses.create(**TURN, input=SUM, background=True)
    while (found := client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        time.sleep(0.05)
    holds(found.output_text, "4")
    assert list(client.responses.retrieve(made.id, stream=True))
    equal(client.responses.cancel(made.id).status, "completed")


@case
def conversations() -> None:
    """conversations: items, a turn, and their end"""
    made = client.conversations.create(metadata={"kind": "test"}, items=[{"role": "user", "content": "I am Ada."}])
    client.responses.create(**TURN, input=SUM, conversation=made.id)
    items = list(client.conversations.items.list(made.id, order="asc"))
    equal([item.type for item in items], ["message"] * 3)
    equal(client.conversations.items.retrieve(items[0].id, conversation_id=made.id).id, items[0].id)
    client.conversations.items.delete(items[0].id, conversation_id=made.id)
    equal(client.conversations.update(made.id, metadata={"kind": "b"}).metadata, {"kind": "b"})
    assert client.conversations.delete(made.id).deleted


@case
def files() -> None:
    """files: upload, list, read, delete"""
    made = client.files.create(file=("in.jsonl", io.BytesIO(json.dumps(JSONL).encode())), purpose="batch")
    assert made.id in [each.id for each in client.files.list(purpose="batch")]
    equal(client.files.retrieve(made.id).filename, "in.jsonl")
    equal(json.loads(client.files.content(made.id).text), JSONL)
    assert client.files.delete(made.id).deleted


@case
def batches() -> None:
    """batches: run to their end, listed, and too late to cancel"""
    file = client.files.create(file=("in.jsonl", json.dumps(JSONL).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while (found := client.batches.retrieve(made.id)).status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.05)
    equal((found.status, found.request_counts.completed), ("completed", 1))
    line = json.loads(client.files.content(found.output_file_id or "").text)
    holds(line["response"]["body"]["choices"][0]["message"]["content"], "4")
    assert made.id in [each.id for each in client.batches.list()]
    refused(openai.ConflictError, "completed", lambda: client.batches.cancel(made.id))


@case
def tuning() -> None:
    """fine_tuning: listed, and refused by name without --tuning"""
    equal(list(client.fine_tuning.jobs.list()), [])
    file = client.files.create(file=("in.jsonl", b'{"messages": []}'), purpose="fine-tune")
    ask = {"model": MODEL, "training_file": file.id}
    refused(openai.APIStatusError, "tuning", lambda: client.fine_tuning.jobs.create(**ask))


@case
def wrong() -> None:
    """errors: a wrong key, an unknown model, a wrong value, an unknown parameter, too long a prompt"""
    with openai.OpenAI(base_url=URL, api_key="wrong", max_retries=0) as stranger:
        refused(openai.AuthenticationError, "key", lambda: stranger.models.list())
    create = client.chat.completions.create
    refused(openai.NotFoundError, "huge", lambda: create(**CHAT | {"model": "huge"}))
    refused(openai.BadRequestError, "temperature", lambda: create(**CHAT | {"temperature": 9}))
    refused(openai.BadRequestError, "colour", lambda: create(**CHAT, extra_body={"colour": 1}))
    long = CHAT | {"messages": [{"role": "user", "content": "word " * 5000}]}
    refused(openai.BadRequestError, "maximum context length", lambda: create(**long))


@case
def lacking() -> None:
    """what the server lacks is refused by name: embeddings of this model, images, speech, moderation"""
    refused(openai.BadRequestError, "embedding", lambda: client.embeddings.create(model=MODEL, input="a"))
    refused(openai.NotFoundError, "/v1/images", lambda: client.images.generate(prompt="a ship", model=MODEL))
    speech = ("a.wav", b"RIFF")
    refused(openai.NotFoundError, "/v1/audio", lambda: client.audio.transcriptions.create(file=speech, model=MODEL))
    refused(openai.NotFoundError, "/v1/moderations", lambda: client.moderations.create(input="a"))
    picture: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    asked = CHAT | {"messages": [{"role": "user", "content": picture}]}
    refused(openai.BadRequestError, "image_url", lambda: client.chat.completions.create(**asked))


main()
