"""Tools from end to end: the openai client, a server process, and the built-in model with an enforced call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.served import Serving, started

MODEL = "holdfast-tiny"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST = {"name": "forecast", "description": "The weather of some days", "parameters": SCHEMA, "strict": True}
CHAT_TOOLS: Any = [{"type": "function", "function": FORECAST}]
RESPONSE_TOOLS: Any = [{"type": "function", **FORECAST}]
ASKED: Any = [{"role": "user", "content": "How will the weather be in Rome?"}]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with started("--device", "cpu", "--cache-gb", "0.1", "--store", "memory") as serving:
        yield serving


def test_a_chat_calls_a_tool_and_continues_with_its_result(serving: Serving) -> None:
    with serving.client() as client:
        chat: dict[str, Any] = {"model": MODEL, "tools": CHAT_TOOLS, "max_tokens": 200, "temperature": 0}
        first = client.chat.completions.create(
            messages=ASKED, tool_choice="required", parallel_tool_calls=False, **chat
        )
        (call,) = first.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert first.choices[0].finish_reason == "tool_calls"
        assert call.function.name == "forecast"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        history = [*ASKED, first.choices[0].message, result]
        second = client.chat.completions.create(messages=history, tool_choice="none", **chat)
        assert second.choices[0].message.tool_calls is None
        assert second.choices[0].message.content
        assert second.usage is not None and first.usage is not None
        assert second.usage.prompt_tokens > 40


def test_a_streamed_chat_gives_the_same_call(serving: Serving) -> None:
    named: Any = {"type": "function", "function": {"name": "forecast"}}
    with serving.client() as client:
        chat: dict[str, Any] = {"model": MODEL, "tools": CHAT_TOOLS, "tool_choice": named, "temperature": 0}
        chat |= {"parallel_tool_calls": False, "max_tokens": 200}
        whole = client.chat.completions.create(messages=ASKED, **chat).choices[0].message.tool_calls
        with client.chat.completions.stream(messages=ASKED, **chat) as stream:
            final = stream.get_final_completion().choices[0]
    assert whole is not None and final.message.tool_calls is not None
    assert final.finish_reason == "tool_calls"
    assert [call.function.arguments for call in final.message.tool_calls] == [
        call.function.arguments for call in whole if call.type == "function"
    ]


def test_responses_call_a_tool_in_a_conversation_whole_and_streamed(serving: Serving) -> None:
    with serving.client() as client:
        conversation = client.conversations.create().id
        turn: dict[str, Any] = {"model": MODEL, "tools": RESPONSE_TOOLS, "conversation": conversation}
        turn |= {"max_output_tokens": 200, "parallel_tool_calls": False, "temperature": 0}
        first = client.responses.create(input=ASKED, tool_choice="required", **turn)
        (call,) = [item for item in first.output if item.type == "function_call"]
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        assert client.responses.create(input=result, tool_choice="none", **turn).output_text
        with client.responses.stream(input=ASKED, tool_choice="required", **turn) as stream:
            events: list[Any] = [*stream]
            last = stream.get_final_response().output[-1]
        items = client.conversations.items.list(conversation, order="asc").data
    assert last.type == "function_call"
    jsonschema.validate(json.loads(last.arguments), SCHEMA)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas and "".join(deltas) == last.arguments  # on a busy machine one may hold them all
    assert [event.type for event in events].count("response.function_call_arguments.done") == 1
    assert [item.type for item in items].count("function_call_output") == 1
