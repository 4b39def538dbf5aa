"""Tools and reasoning over HTTP: the prompts, and the answers, whole and in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, FakeText, engine_info
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from holdfast.lm.grammar.sources import serialized
from holdfast.server import protocol

Http = Callable[..., httpx.AsyncClient]

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
ASKED = [{"role": "user", "content": "Weather in Paris?"}]
BODY = {"model": "tiny", "messages": ASKED, "tools": TOOLS}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def pieces(text: str, size: int = 5) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def prompt_of(client: FakeClient, at: int = -1) -> str:
    return "".join(map(chr, client.asked[at].prompt))


def knows_tools(client: FakeClient, *tags: str) -> None:
    client.text = FakeText(template=f"{{{{ tools }}}} <tool_call> {' '.join(tags)}")


@pytest.fixture(autouse=True)
def roomy(client: FakeClient) -> None:
    """Make room for tools in the prompt."""
    client.info = engine_info(max_model_len=4000)


async def chat(http: Http, **more: Any) -> dict[str, Any]:
    async with http() as api:
        response = await api.post(CHAT, json={**BODY, **more})
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json(), strict=True)
    found: dict[str, Any] = response.json()["choices"][0]
    return found


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_function_may_say_that_it_is_known_at_once_and_called_directly(http: Http, path: str) -> None:
    def body(**more: Any) -> dict[str, Any]:
        if path == CHAT:
            return {**BODY, "tools": [{"type": "function", "function": {**WEATHER, **more}}]}
        return {"model": "tiny", "input": "hello", "tools": [{"type": "function", **WEATHER, **more}]}

    async with http() as api:
        known = await api.post(path, json=body(defer_loading=False, allowed_callers=["direct"]))
        refused = [
            await api.post(path, json=body(**more))
            for more in ({"defer_loading": True}, {"allowed_callers": ["programmatic"]})
        ]
    assert known.status_code == 200, known.text
    where = "tools[0].function" if path == CHAT else "tools[0]"
    params = [each.json()["error"]["param"] for each in refused]
    assert params == [f"{where}.defer_loading", f"{where}.allowed_callers"]


async def streamed(http: Http, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with http() as api:
        response = await api.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


async def test_a_call_becomes_tool_calls_and_its_finish_reason(http: Http, client: FakeClient) -> None:
    client.words = pieces(f"I look.\n\n{CALL}\n{NOW}")
    choice = await chat(http)
    first, second = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "I look."
    assert first == {
        "id": first["id"], "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }  # fmt: skip
    assert second["function"] == {"name": "now", "arguments": "{}"}
    assert first["id"] != second["id"]
    assert choice["finish_reason"] == "tool_calls"


async def test_a_call_without_text_has_null_as_content(http: Http, client: FakeClient) -> None:
    client.words = [CALL]
    assert (await chat(http))["message"]["content"] is None


async def test_calls_are_streamed_in_pieces_that_make_the_whole(http: Http, client: FakeClient) -> None:
    client.words = pieces(f"{CALL}\n{NOW}")
    chunks = await streamed(http, CHAT, BODY)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    first = [call for call in deltas if call["index"] == 0]
    assert first[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert first[0]["type"] == "function" and first[0]["id"]
    assert len(first) > 3
    assert "".join(call["function"]["arguments"] for call in first) == '{"city": "Paris"}'
    assert all(set(call) == {"index", "function"} for call in first[1:])
    assert next(call["function"] for call in deltas if call["index"] == 1)["name"] == "now"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"


async def test_an_answer_cut_within_a_call_ends_for_its_length(http: Http, client: FakeClient) -> None:
    client.words = pieces(CALL)
    choice = await chat(http, max_tokens=len(client.words) - 8)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_without_tools_or_with_none_to_call_tags_stay_text(http: Http, client: FakeClient) -> None:
    client.words = [CALL]
    for more in ({"tools": []}, {"tool_choice": "none"}):
        choice = await chat(http, **more)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "get_weather" not in prompt_of(client)


async def test_one_call_at_most_without_parallel_calls(http: Http, client: FakeClient) -> None:
    client.words = [CALL, NOW]
    assert len((await chat(http, parallel_tool_calls=False))["message"]["tool_calls"]) == 1


async def test_functions_by_their_former_name_give_a_call_by_its_former_name(http: Http, client: FakeClient) -> None:
    client.words = pieces(CALL)
    body = {"model": "tiny", "messages": ASKED, "functions": [WEATHER], "function_call": "auto"}
    choice = await chat(http, **body, tools=[])
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert choice["finish_reason"] == "function_call"
    chunks = await streamed(http, CHAT, body)
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    assert "".join(delta.get("arguments", "") for delta in deltas) == '{"city": "Paris"}'


async def test_past_calls_and_results_reach_a_template_that_knows_tools(http: Http, client: FakeClient) -> None:
    knows_tools(client)
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    past = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
    ]
    await chat(http, messages=past)
    expected = "<tool>get_weather<tool>now<user>Weather in Paris?<assistant>[get_weather {'city': 'Paris'} c1]<tool>21"
    assert prompt_of(client) == expected


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('"",' * 600, "strings; at most"),
        ("[" * 600, "brackets and braces; at most"),
        ("5," * 600, "commas; at most"),
    ],
    ids=["strings", "lists", "numbers"],
)
@pytest.mark.parametrize("kind", ["tool_calls", "function_call", "responses"])
async def test_arguments_of_past_calls_hold_no_more_json_than_a_body(
    http: Http, monkeypatch: pytest.MonkeyPatch, kind: str, arguments: str, reason: str
) -> None:
    for limit in ("MAX_STRINGS", "MAX_CONTAINERS", "MAX_VALUES"):
        monkeypatch.setattr(protocol, limit, 1000)
    called = {"name": "now", "arguments": arguments}
    two = {
        "tool_calls": {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": called}] * 2}]},
        "function_call": {"messages": [{"role": "assistant", "function_call": called}] * 2},
        "responses": {"input": [{"type": "function_call", "call_id": "a", **called}] * 2},
    }[kind]
    async with http() as api:
        written = json.dumps(arguments)
        # In this form, the body's own check does not see the brackets.
        body = json.dumps({"model": "tiny", **two}).replace(written, written.replace("[", "\\u005b"))
        answer = await api.post(RESPONSES if kind == "responses" else CHAT, content=body)
    replayed = answer.json()["error"]["message"]
    assert answer.status_code == 400 and replayed.startswith("the text of all arguments in") and reason in replayed


async def test_a_template_that_knows_no_tools_gets_a_description_of_them(http: Http, client: FakeClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": ""}}
    past = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]
    await chat(http, messages=past)
    prompt = prompt_of(client)
    assert prompt.startswith("<system>Be brief.\n\nYou may call these functions")
    assert '{"name": "get_weather", "description": "Get the weather", "parameters": {"type": "object"' in prompt
    assert prompt.endswith(f"<user>Weather in Paris?<assistant>{NOW}<user><tool_response>\nnoon\n</tool_response>")


@pytest.mark.parametrize(
    ("more", "mode"),
    [
        ({"tool_choice": "required"}, "required"),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "named"),
        ({"tools": [{"type": "function", "function": {**WEATHER, "strict": True}}]}, "auto"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}}}, "auto"),
    ],
)  # fmt: skip
async def test_calls_that_must_fit_get_a_grammar(
    http: Http, client: FakeClient, more: dict[str, Any], mode: str
) -> None:
    client.words = [NOW]
    await chat(http, **more)
    grammar = client.asked[0].params.grammar
    assert grammar is not None and serialized(grammar)
    assert ("get_weather" in grammar.text) is ("now" not in str(more))
    assert ("TEXT)" in grammar.text.splitlines()[1]) is (mode == "auto")


async def test_tools_that_may_be_called_freely_get_no_grammar(http: Http, client: FakeClient) -> None:
    await chat(http, tool_choice="auto")
    assert client.asked[0].params.grammar is None


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"tools": [{"type": "computer"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
         "tools[0].function.parameters", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": f"f{at}"}} for at in range(129)]}, "tools",
         "invalid_value"),
        ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "now"}}, "tool_choice.function.name", "invalid_value"),
        ({"tool_choice": {"type": "custom", "custom": {}}}, "tool_choice.custom.name", "invalid_value"),
        ({"functions": [WEATHER]}, "functions", "mutually_exclusive_parameters"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "invalid_value"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]",
         "invalid_value"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls",
         "unsupported_parameter"),
    ],
)  # fmt: skip
async def test_a_fault_in_tools_is_reported_with_its_place(
    http: Http, more: dict[str, Any], param: str, code: str
) -> None:
    async with http() as api:
        response = await api.post(CHAT, json={**BODY, **more})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)


async def test_reasoning_is_separated_whole_and_streamed(http: Http, client: FakeClient) -> None:
    knows_tools(client, "<think>")
    client.words = pieces(f"<think>\nParis, I think.\n</think>\n\n{CALL}", 3)
    choice = await chat(http)
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Paris, I think."
    assert message["content"] is None and len(message["tool_calls"]) == 1
    chunks = await streamed(http, CHAT, {**BODY, "stream_options": {"include_usage": True}})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Paris, I think."
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    assert 0 < chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] < len(client.words)


async def test_a_prompt_that_opens_the_reasoning_begins_the_answer_with_it(http: Http, client: FakeClient) -> None:
    knows_tools(client, "<think>")
    client.text.opening = "<assistant><think>\n"
    client.words = pieces("Easy.\n</think>\n\nHello.")
    message = (await chat(http, tools=[]))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Easy.", "Hello.")
    message = (await chat(http, tools=[], include_reasoning=False))["message"]
    assert "reasoning_content" not in message and message["content"] == "Hello."


async def test_reasoning_of_past_turns_is_kept_out_of_the_prompt(http: Http, client: FakeClient) -> None:
    knows_tools(client, "<think>")
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    past = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "old"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "", "reasoning": "new", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "d"},
    ]
    await chat(http, messages=past, tools=[])
    assert prompt_of(client) == "<user>a<assistant>b<user>c<assistant>(new)[now {} c]<tool>d"


async def test_template_options_reach_the_template(http: Http, client: FakeClient) -> None:
    await chat(http, tools=[], chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert prompt_of(client).startswith("<reasoning_effort=low><enable_thinking=False><user>")
    await chat(http, tools=[], reasoning_effort="low")
    assert prompt_of(client).startswith("<reasoning_effort=low><enable_thinking=True><user>")
    await chat(http, tools=[], reasoning_effort="none")
    assert prompt_of(client).startswith("<enable_thinking=False><user>")


async def test_a_parser_can_be_named_and_turned_off(http: Http, client: FakeClient) -> None:
    client.words = ['[TOOL_CALLS][{"name": "now", "arguments": {}}]']
    async with http(tool_call_parser="mistral") as api:
        call = (await api.post(CHAT, json=BODY)).json()["choices"][0]["message"]["tool_calls"][0]
    assert call["function"]["name"] == "now" and len(call["id"]) == 9
    knows_tools(client, "<think>")
    client.words = ["<think>a</think>b"]
    async with http(reasoning_parser="none") as api:
        message = (await api.post(CHAT, json=BODY)).json()["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"


RESPONSE_TOOLS = [{"type": "function", **WEATHER, "strict": None}]
TURN = {"model": "tiny", "input": "Weather in Paris?", "tools": RESPONSE_TOOLS}


async def test_a_response_has_reasoning_text_and_calls_as_items(http: Http, client: FakeClient) -> None:
    knows_tools(client, "<think>")
    client.words = pieces(f"<think>\nHm.\n</think>\n\nI look.\n\n{CALL}", 4)
    async with http() as api:
        given = (await api.post(RESPONSES, json=TURN)).json()
        events = [
            json.loads(line[6:])
            for line in (await api.post(RESPONSES, json={**TURN, "stream": True})).text.splitlines()
            if line.startswith("data: {")
        ]
    Response.model_validate(given, strict=True)
    reasoning, message, call = given["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I look."
    assert (call["name"], call["arguments"], call["status"]) == ("get_weather", '{"city": "Paris"}', "completed")
    assert given["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert given["tools"] == [{"description": None, **RESPONSE_TOOLS[0]}]
    for event in events:
        EVENTS.validate_python(event)
    kinds = list(dict.fromkeys(event["type"] for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    arguments = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(arguments) == '{"city": "Paris"}' and len(arguments) > 2


async def test_a_call_and_its_result_are_kept_in_a_conversation(http: Http, client: FakeClient) -> None:
    knows_tools(client, "<think>")
    async with http() as api:
        conversation = (await api.post("/v1/conversations", json={})).json()["id"]
        client.words = pieces(f"<think>Hm.</think>{CALL}")
        first = (await api.post(RESPONSES, json={**TURN, "conversation": conversation})).json()
        call = first["output"][-1]
        client.words = ["It is ", "21."]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
        second = await api.post(RESPONSES, json={**TURN, "input": [result], "conversation": conversation})
        assert second.status_code == 200, second.text
        within = prompt_of(client)
        await api.post(RESPONSES, json={**TURN, "input": "Thanks.", "conversation": conversation})
        items = (await api.get(f"/v1/conversations/{conversation}/items?order=asc")).json()["data"]
    called = f"[get_weather {{'city': 'Paris'}} {call['call_id']}]"
    assert within == f"<tool>get_weather<user>Weather in Paris?<assistant>(Hm.){called}<tool>21"
    later = f"<tool>get_weather<user>Weather in Paris?<assistant>{called}<tool>21<assistant>It is 21.<user>Thanks."
    assert prompt_of(client) == later
    kinds = ["message", "reasoning", "function_call", "function_call_output", "message", "message", "message"]
    assert [item["type"] for item in items] == kinds


async def test_a_background_response_with_a_call_is_replayed(http: Http, client: FakeClient) -> None:
    client.words = pieces(f"I look. {CALL}")
    async with http() as api:
        begun = (await api.post(RESPONSES, json={**TURN, "background": True})).json()
        while (given := (await api.get(f"{RESPONSES}/{begun['id']}")).json())["status"] != "completed":
            await asyncio.sleep(0.01)
        transport: Any = api._transport
        transport.app.state.responses._ended.clear()  # This simulates a restart.
        replayed = (await api.get(f"{RESPONSES}/{begun['id']}?stream=true")).text
    events = [json.loads(line[6:]) for line in replayed.splitlines() if line.startswith("data: {")]
    for event in events:
        EVENTS.validate_python(event)
    assert events[-1]["response"] == given
    assert [e["item"]["type"] for e in events if e["type"] == "response.output_item.done"] == [
        "message",
        "function_call",
    ]
