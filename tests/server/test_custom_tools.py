"""Custom tools through both APIs, and as the official client reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, Rounds, engine_info
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

TOOL = {"type": "custom", "name": "run", "description": "Runs Python."}
CHAT_TOOL = {"type": "custom", "custom": {"name": "run", "description": "Runs Python."}}
CODE = 'print("hi")\n'
CALL = '<tool_call>|{"name": "run", "arguments": {"inp|ut": "print(\\"|hi\\")\\n"}}|</tool_call>'
Http = Callable[..., httpx.AsyncClient]


@pytest.fixture
def client() -> Rounds:
    client = Rounds(engine_info(max_model_len=8192))
    client.texts = (CALL, "It says| hi.")
    return client


def prompt(client: FakeClient, number: int) -> str:
    return client.text.decode(client.asked[number].prompt)


async def respond(http: Http, **body: Any) -> dict[str, Any]:
    async with http() as api:
        asked = {"model": "tiny", "input": "Say hi.", "tools": [TOOL]}
        response = await api.post("/v1/responses", json=asked | body)
        assert response.status_code == 200, response.text
        return dict(response.json())


async def chat(http: Http, **body: Any) -> httpx.Response:
    async with http() as api:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi."}], "tools": [CHAT_TOOL]}
        response = await api.post("/v1/chat/completions", json=asked | body)
        assert response.status_code == 200, response.text
        return response


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


async def test_a_response_has_the_input_as_text(http: Http) -> None:
    response = Response.model_validate(await respond(http))
    (call,) = response.output
    assert call.type == "custom_tool_call" and (call.name, call.input) == ("run", CODE)
    assert response.tools[0].type == "custom"


async def test_the_events_of_an_input(http: Http) -> None:
    async with http() as api:
        body = {"model": "tiny", "input": "Say hi.", "tools": [TOOL], "stream": True}
        found = events((await api.post("/v1/responses", json=body)).text)
    kinds = [event["type"] for event in found]
    deltas = [event["delta"] for event in found if event["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 1 and "".join(deltas) == CODE
    assert kinds[-3:] == ["response.custom_tool_call_input.done", "response.output_item.done", "response.completed"]
    assert (found[2]["item"]["input"], found[-3]["input"], found[-2]["item"]["input"]) == ("", CODE, CODE)


async def test_the_next_turn_has_the_call_and_its_output(http: Http, client: Rounds) -> None:
    async with http() as api:
        body = {"model": "tiny", "input": "Say hi.", "tools": [TOOL]}
        first = (await api.post("/v1/responses", json=body)).json()
        (call,) = first["output"]
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "hi"}
        body |= {"input": [result], "previous_response_id": first["id"]}
        assert (await api.post("/v1/responses", json=body)).json()["status"] == "completed"
        body |= {"input": [{"role": "user", "content": "Say hi."}, call, result], "previous_response_id": None}
        assert (await api.post("/v1/responses", json=body)).json()["status"] == "completed"
        listed = (await api.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    assert prompt(client, 1) == prompt(client, 2)
    assert json.dumps({"name": "run", "arguments": {"input": CODE}}) in prompt(client, 1)
    assert "hi" in prompt(client, 1).partition("<tool_response>")[2]
    assert listed[0]["role"] == "user"


async def test_a_chat_has_the_input_as_text(http: Http, client: Rounds) -> None:
    reply = (await chat(http)).json()
    (choice,) = ChatCompletion.model_validate(reply).choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "custom" and (call.custom.name, call.custom.input) == ("run", CODE)
    said = [reply["choices"][0]["message"], {"role": "tool", "tool_call_id": call.id, "content": "hi"}]
    await chat(http, messages=[{"role": "user", "content": "Say hi."}, *said])
    assert json.dumps({"name": "run", "arguments": {"input": CODE}}) in prompt(client, 1)


async def test_a_chat_streams_the_input(http: Http) -> None:
    chunks = events((await chat(http, stream=True)).text)
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert (calls[0]["type"], calls[0]["custom"], calls[0]["index"]) == ("custom", {"name": "run", "input": ""}, 0)
    assert "".join(call["custom"]["input"] for call in calls) == CODE
    assert all("function" not in call for call in calls)


async def test_a_stored_chat_keeps_the_input(http: Http) -> None:
    async with http() as api:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [CHAT_TOOL]}
        text = (await api.post("/v1/chat/completions", json=body | {"stream": True, "store": True})).text
        stored = (await api.get(f"/v1/chat/completions/{events(text)[0]['id']}")).json()
    (call,) = stored["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "run", "input": CODE})


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "run"}, "required"])
async def test_a_required_custom_tool_is_enforced(http: Http, client: Rounds, choice: Any) -> None:
    await respond(http, tool_choice=choice)
    grammar = client.asked[0].params.grammar
    assert grammar is not None and '"input"' in grammar.text


async def test_a_regular_expression_is_a_pattern_of_the_grammar(http: Http, client: Rounds) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    await respond(http, tools=[TOOL | {"format": form}])
    grammar = client.asked[0].params.grammar
    assert grammar is not None and "^(?:[a-z]+)$" in grammar.text


async def test_a_grammar_is_enforced_as_it_is_written_in_json(http: Http, client: Rounds) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "say" /"[a-z]+"/ "\\n"'}
    response = await respond(http, tools=[TOOL | {"format": form}])
    grammar = client.asked[0].params.grammar
    assert grammar is not None and "%lark" in grammar.text and r"\\\"" in grammar.text
    assert form["definition"] in json.loads(json.dumps(response["tools"][0]["format"]["definition"]))
    assert "say" in prompt(client, 0)
    nested = {"type": "grammar", "grammar": {"syntax": "lark", "definition": form["definition"]}}
    await chat(http, tools=[{"type": "custom", "custom": CHAT_TOOL["custom"] | {"format": nested}}])
    assert client.asked[-1].params.grammar == grammar


async def test_grammars_that_are_too_long_together_are_refused(http: Http) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /a/ //" + 6000 * "-"}
    async with http() as api:
        tools = [TOOL | {"name": f"run{number}", "format": form} for number in range(3)]
        response = await api.post("/v1/responses", json={"model": "tiny", "input": "Hello", "tools": tools})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[2]") and "at most 16384" in error["message"]


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "grammar", "syntax": "lark", "definition": "start: ~/a/"}, "tools[0].format.definition"),
        ({"type": "grammar", "syntax": "ebnf", "definition": "a"}, "tools[0].format.syntax"),
        ({"type": "grammar", "syntax": "regex", "definition": ""}, "tools[0].format.definition"),
        ({"type": "json"}, "tools[0].format.type"),
    ],
)
async def test_other_formats_are_refused_by_name(http: Http, form: dict[str, str], param: str) -> None:
    async with http() as api:
        body = {"model": "tiny", "input": "Hello", "tools": [TOOL | {"format": form}]}
        response = await api.post("/v1/responses", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
