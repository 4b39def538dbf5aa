"""Tokenizing and detokenizing over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient
from tokenizers_made import byte_level

from holdfast.engine.client.text import Text

Http = Callable[..., httpx.AsyncClient]


async def test_a_prompt_becomes_the_tokens_that_a_completion_would_have(http: Http, client: FakeClient) -> None:
    async with http() as api:
        answer = (await api.post("/tokenize", json={"model": "tiny", "prompt": "ab"})).json()
        await api.post("/v1/completions", json={"model": "tiny", "prompt": "ab"})
    assert answer == {"count": 2, "max_model_len": 200, "tokens": [97, 98], "token_strs": None}
    assert client.asked[0].prompt == answer["tokens"]


async def test_messages_become_the_tokens_that_a_chat_would_have(http: Http, client: FakeClient) -> None:
    messages = [{"role": "user", "content": "hello"}]
    async with http() as api:
        answer = (await api.post("/tokenize", json={"messages": messages})).json()
        await api.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    assert client.asked[0].prompt == answer["tokens"]
    assert answer["count"] == len(answer["tokens"])


async def test_tools_and_options_of_the_template_count_as_in_a_chat(http: Http, client: FakeClient) -> None:
    client.text.template = "{{ tools }}"
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    async with http() as api:
        answer = (await api.post("/tokenize", json=chat)).json()
        await api.post("/v1/chat/completions", json=chat)
        refused = await api.post("/tokenize", json=chat | {"tools": [{"type": "web_search"}]})
    assert client.asked[0].prompt == answer["tokens"]
    assert "".join(map(chr, answer["tokens"])).startswith("<tool>f<enable_thinking=False>")
    assert refused.json()["error"]["param"] == "tools[0].type"


async def test_a_real_tokenizer_gives_tokens_their_spelling_and_the_text_back(http: Http, client: FakeClient) -> None:
    client.text = Text(byte_level())  # type: ignore[assignment]
    async with http() as api:
        answer = (await api.post("/tokenize", json={"prompt": "a é", "return_token_strs": True})).json()
        text = (await api.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert len(answer["token_strs"]) == answer["count"] and answer["token_strs"][0] == "a"
    assert text == {"prompt": "a é"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "mutiny"}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_a_wrong_parameter_is_refused_by_name(http: Http, path: str, body: dict[str, Any], param: str) -> None:
    async with http() as api:
        answer = await api.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
async def test_another_model_is_not_found(http: Http, path: str, body: dict[str, Any]) -> None:
    async with http() as api:
        assert (await api.post(path, json={**body, "model": "other"})).status_code == 404
