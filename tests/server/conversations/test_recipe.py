"""Recipe: every kind of request comes back as it was, and its response has the same ids everywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.server.conversations.protocol import ResponseRequest, ResponseShape, new_response
from holdfast.server.conversations.recipe import Recipe
from holdfast.server.formats.parts import Reasoning, Said
from holdfast.server.protocol import parse

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop": ["a", "b"], "seed": 7, "logit_bias": {"5": 1.5}, "min_p": 0.1, "metadata": {"a": "b"}},
        {"stop": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}, "keep_until": "5m"},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
        {"guided_json": {"type": "object"}, "conversation": {"id": "conv_1"}, "reasoning": {"effort": "low"}},
        {"structured_outputs": {"choice": ["yes", "no"]}, "include": ["message.output_text.logprobs"]},
        {"input": [{"role": "user", "content": "hi"}], "previous_response_id": "resp_1", "truncation": "auto"},
    ],
)
def test_a_recipe_gives_the_request_back(more: dict[str, Any]) -> None:
    body = {"model": "tiny", "input": "hello", "background": True, "stream": True, **more}
    wanted = parse(json.dumps(body).encode(), ResponseRequest)
    recipe = Recipe(wanted, "ada", new_response(wanted, "tiny"), wanted.items(), "server")
    read = Recipe.read(recipe.encoded())
    assert read == recipe
    assert read.wanted.grammar == wanted.grammar and read.wanted.toolset == wanted.toolset


def test_what_is_no_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MessagePack|expected|truncated|malformed"):
        Recipe.read(b"\xc1")


def test_the_items_of_one_response_have_the_same_ids_at_each_server_and_others_have_other_ids() -> None:
    def ids(response: dict[str, Any]) -> list[str]:
        shape = ResponseShape(response)
        for part in (Reasoning("hm"), Said("a"), Reasoning("hm"), Said("b")):
            [*shape.part(part)]
        return [item["id"] for item in shape.output]

    wanted = ResponseRequest(model="tiny", input="hello")
    one, other = new_response(wanted, "tiny"), new_response(wanted, "tiny")
    assert ids(one) == ids(dict(one)) and len({*ids(one), *ids(other)}) == 8
    assert [id.partition("_")[0] for id in ids(one)] == ["rs", "msg", "rs", "msg"]
