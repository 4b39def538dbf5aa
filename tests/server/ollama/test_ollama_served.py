"""Ollama's Python client against a server process and the built-in model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.served import Serving, started

MODEL = "holdfast-tiny"
ASKED = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with started("--device", "cpu", "--cache-gb", "0.1", "--store", "memory") as serving:
        yield serving


@pytest.fixture(scope="module")
def client(serving: Serving) -> Iterator[Any]:
    ollama = pytest.importorskip("ollama", reason="the ollama client is not installed")
    with ollama.Client(host=serving.url) as client:
        yield client


def test_a_chat_is_the_same_whole_and_streamed(client: Any) -> None:
    options = {"temperature": 0, "num_predict": 8}
    whole = client.chat(model=MODEL, messages=ASKED, options=options)
    pieces = list(client.chat(model=MODEL, messages=ASKED, options=options, stream=True))
    assert whole.message.content and whole.eval_count == 8 and whole.done_reason == "length"
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert pieces[-1].done and pieces[-1].eval_duration > 0 and pieces[-1].total_duration >= pieces[-1].eval_duration


def test_a_generated_text_follows_a_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = client.generate(model=MODEL, prompt="A number, please", format=schema, options={"num_predict": 60})
    assert json.loads(answer.response)["n"] in (1, 2)


def test_the_client_lists_and_shows_the_model(client: Any) -> None:
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    assert "completion" in client.show(MODEL).capabilities


def test_an_unknown_model_is_the_clients_error(client: Any) -> None:
    import ollama

    with pytest.raises(ollama.ResponseError, match="other") as refused:
        client.chat(model="other", messages=ASKED)
    assert refused.value.status_code == 404
