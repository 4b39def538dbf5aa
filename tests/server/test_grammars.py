"""Structured output over HTTP: requests reach the engine as a grammar, and refusals name the fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import FakeClient

from holdfast.core.types import Grammar
from holdfast.lm.grammar.dialects import ONE_LINE
from holdfast.lm.grammar.structural_tags import structural_grammar
from holdfast.lm.limits import RequestRefused
from holdfast.server import grammars

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
    TEXT: {"model": "tiny", "prompt": "hello"},
    RESPONSES: {"model": "tiny", "input": "hello"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_CLOSED = {**SCHEMA, "additionalProperties": False}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


def schema(given: dict[str, Any] = SCHEMA, **guidance: Any) -> Grammar:
    return Grammar("json", json.dumps({**given, "x-guidance": {**ONE_LINE, **guidance}}))


def any_object() -> Grammar:
    return Grammar("json", json.dumps({"type": "object", "x-guidance": ONE_LINE}))


async def grammar_of(http: Any, client: FakeClient, path: str, given: dict[str, Any]) -> Grammar | None:
    async with http() as api:
        response = await api.post(path, json=BODIES[path] | given)
    assert response.status_code == 200, response.text
    (asked,) = client.asked
    return asked.params.grammar


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, any_object()),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, schema()),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, schema(lenient=True)),
    ],
)
async def test_a_response_format_becomes_a_grammar(
    http: Any, client: FakeClient, path: str, wanted: dict[str, Any], grammar: Grammar | None
) -> None:
    assert await grammar_of(http, client, path, {"response_format": wanted}) == grammar


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, any_object()),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}, schema()),
    ],
)
async def test_a_text_format_becomes_a_grammar_and_is_repeated_in_the_response(
    http: Any, client: FakeClient, wanted: dict[str, Any], grammar: Grammar | None
) -> None:
    async with http() as api:
        response = await api.post(RESPONSES, json=BODIES[RESPONSES] | {"text": {"format": wanted}})
    assert response.json()["text"]["format"] == wanted
    assert client.asked[0].params.grammar == grammar


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, schema()),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, schema()),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
         schema(item_separator=",", key_separator=":")),
        ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}}, schema(SCHEMA_CLOSED)),
        ({"structured_outputs": {"regex": "[a-z]+"}}, Grammar("regex", "[a-z]+")),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, Grammar("lark", 'start: "yes" | "n\\"o"')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"json_object": True}}, any_object()),
        ({"guided_json": SCHEMA}, schema()),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar("lark", 'start: "a" | "b"')),
        ({"guided_grammar": 'start: "a"', "guided_decoding_backend": "guidance"}, Grammar("lark", 'start: "a"')),
    ],
)  # fmt: skip
async def test_vllms_parameter_names_are_accepted_on_every_route(
    http: Any, client: FakeClient, path: str, given: dict[str, Any], grammar: Grammar
) -> None:
    assert await grammar_of(http, client, path, given) == grammar


async def test_structural_tags_are_accepted_as_a_format_and_as_a_parameter(http: Any, client: FakeClient) -> None:
    async with http() as api:
        for given in (
            {"response_format": {"type": "structural_tag", **TAGS}},
            {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
        ):
            assert (await api.post(CHAT, json=BODIES[CHAT] | given)).status_code == 200
    first, second = (asked.params.grammar for asked in client.asked)
    assert first == second and first is not None and '"<f"' in first.text


async def test_the_format_of_a_structural_tag_is_accepted_in_both_places_and_its_faults_have_its_path(
    http: Any, client: FakeClient
) -> None:
    wanted = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
    wrong = {"type": "structural_tag", "format": {**wanted, "content": {"type": "xml"}}}
    async with http() as api:
        for given in (
            {"response_format": {"type": "structural_tag", "format": wanted}},
            {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": wanted})}},
        ):
            assert (await api.post(CHAT, json=BODIES[CHAT] | given)).status_code == 200
        refused = await api.post(CHAT, json=BODIES[CHAT] | {"response_format": wrong})
        twofold = await api.post(CHAT, json=BODIES[CHAT] | {"response_format": wrong | TAGS})
    assert [asked.params.grammar for asked in client.asked] == [structural_grammar(wanted, "format")] * 2
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.format")
    assert refused.json()["error"]["message"].startswith('response_format.format.content.type is "xml"; supported: ')
    assert twofold.json()["error"]["message"] == "unknown parameter: response_format.structures"


async def test_a_response_is_told_that_its_format_lacks_a_schema(http: Any) -> None:
    async with http() as api:
        reply = await api.post(RESPONSES, json=BODIES[RESPONSES] | {"text": {"format": {"type": "json_schema"}}})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "text.format.schema is missing")


async def test_every_choice_has_the_grammar(http: Any, client: FakeClient) -> None:
    async with http() as api:
        await api.post(CHAT, json=BODIES[CHAT] | {"n": 3, "guided_regex": "a"})
    assert [asked.params.grammar for asked in client.asked] == [Grammar("regex", "a")] * 3


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (TEXT, {"guided_regex": "("}, "guided_regex"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
        (RESPONSES, {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engines_refusal_is_400_before_any_token_and_names_the_clients_parameter(
    http: Any, client: FakeClient, path: str, given: dict[str, Any], param: str, stream: bool
) -> None:
    client.refuse = RequestRefused("the regex grammar cannot be followed: unclosed group", "grammar")
    async with http() as api:
        response = await api.post(path, json=BODIES[path] | given | {"stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert "unclosed group" in error["message"]


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"response_format": {}}, "response_format.type", "supported: text, json_object"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "unknown parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format.json_schema", "an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
         "response_format.json_schema.strict", "true or false"),
        ({"structured_outputs": {}}, "structured_outputs", "is empty; give one of json"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "must be a JSON object"),
        ({"structured_outputs": {"structural_tag": {"structures": [], "triggers": []}}},
         "structured_outputs.structural_tag", "1 to 256 structures"),
        ({"structured_outputs": {"structural_tag": {**TAGS, "triggers": ["<g"]}}},
         "structured_outputs.structural_tag", "no trigger begins"),
        ({"structured_outputs": {"structural_tag": {"format": {}}}},
         "structured_outputs.structural_tag.format", "format.type is missing; supported: const_string"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        ({"guided_grammar": "root ::= ["}, "guided_grammar", "cannot be read"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "exclude each other"),
        ({"guided_json": json.dumps({"enum": ["x" * 300_000]})}, "guided_json", "262144"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json", "300"),
    ],
)  # fmt: skip
async def test_a_mistake_is_reported_with_its_place(
    http: Any, client: FakeClient, given: dict[str, Any], param: str, words: str
) -> None:
    async with http() as api:
        response = await api.post(CHAT, json=BODIES[CHAT] | given)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert not client.asked


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_grammar_is_built_once_per_request_for_any_number_of_choices(
    http: Any, client: FakeClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = list[object](), grammars.schema_grammar

    def noted(schema: Any, **options: Any) -> Grammar:
        written.append(schema)
        return write(schema, **options)

    monkeypatch.setattr(grammars, "schema_grammar", noted)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    async with http() as api:
        response = await api.post(path, json=BODIES[path] | {"response_format": form, "n": 8, "service_tier": "auto"})
    assert response.status_code == 200, response.text
    assert len(client.asked) == 8 and written == [SCHEMA]
    assert len({id(each.params.grammar) for each in client.asked}) == 1
