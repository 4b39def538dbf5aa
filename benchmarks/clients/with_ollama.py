"""ollama: chat, generate, streams, tools, formats, and what is served, by Ollama's own package."""

from __future__ import annotations

import json
import os
from typing import Literal

import ollama
from harness import KEY, MODEL, case, equal, holds, main
from pydantic import BaseModel

HEADERS = {"authorization": f"Bearer {KEY}"}
client = ollama.Client(host=os.environ["SERVER_URL"], headers=HEADERS)
SUM = "What is 2 plus 2?"
SAID = [{"role": "user", "content": SUM}]
GREEDY = {"temperature": 0, "num_predict": 64, "num_ctx": 1024, "seed": 7}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Person(BaseModel, extra="forbid"):
    name: Literal["Ada", "Bob"]
    age: Literal[36, 40]


@case
def chat() -> None:
    """a chat"""
    answer = client.chat(MODEL, SAID, options=GREEDY)
    holds(answer.message.content, "4")
    equal((answer.message.role, answer.done, answer.done_reason), ("assistant", True, "stop"))
    assert answer.prompt_eval_count and answer.eval_count and answer.total_duration


@case
def streamed() -> None:
    """a stream of a chat"""
    pieces = list(client.chat(MODEL, SAID, stream=True, options=GREEDY, keep_alive="5m"))
    holds("".join(piece.message.content or "" for piece in pieces), "4")
    equal([piece.done for piece in pieces[-2:]], [False, True])


@case
async def asynchronous() -> None:
    """a stream of a chat, asynchronously"""
    api = ollama.AsyncClient(host=os.environ["SERVER_URL"], headers=HEADERS)
    pieces = [piece async for piece in await api.chat(MODEL, SAID, stream=True, options=GREEDY)]
    holds("".join(piece.message.content or "" for piece in pieces), "4")


@case
def remembers() -> None:
    """a conversation, whose answers come back as they are"""
    said = [ollama.Message(role="user", content="My name is Ada.")]
    said.append(client.chat(MODEL, said, options=GREEDY).message)
    said.append(ollama.Message(role="user", content="What is my name?"))
    holds(client.chat(MODEL, said, options=GREEDY).message.content, "Ada")


@case
def latest() -> None:
    """a model's name with the tag latest"""
    holds(client.chat(f"{MODEL}:latest", SAID, options=GREEDY).message.content, "4")


@case
def generate() -> None:
    """a text, with a system prompt"""
    answer = client.generate(MODEL, SUM, system="You are kind.", options=GREEDY)
    holds(answer.response, "4")
    assert answer.done and answer.eval_count


@case
def generate_streamed() -> None:
    """a stream of a text"""
    holds("".join(piece.response for piece in client.generate(MODEL, SUM, stream=True, options=GREEDY)), "4")


@case
def raw() -> None:
    """a raw prompt, without the template"""
    assert client.generate(MODEL, "2 + 2 =", raw=True, options=GREEDY).done


@case
def loads() -> None:
    """an empty prompt and an empty chat, which only load the model"""
    equal(client.generate(MODEL, "").done_reason, "load")
    equal(client.chat(MODEL, []).done_reason, "load")


@case
def tool() -> None:
    """a tool given as a function, and an answer to its result"""
    said: list[object] = [{"role": "user", "content": "Add 2 and 2 with the tool add."}]
    answer = client.chat(MODEL, said, tools=[add], options=GREEDY)
    calls = answer.message.tool_calls or []
    said.append(answer.message)
    for call in calls:
        said.append({"role": "tool", "content": str(add(**call.function.arguments)), "tool_name": call.function.name})
    if not calls:
        said.append({"role": "user", "content": SUM})
    assert client.chat(MODEL, said, tools=[add], options=GREEDY).message.content is not None


@case
def structured() -> None:
    """an answer of a schema"""
    said = [{"role": "user", "content": "I am Ada, 36 years old."}]
    answer = client.chat(MODEL, said, format=Person.model_json_schema(), options=GREEDY)
    Person.model_validate_json(answer.message.content or "")


@case
def structured_stream() -> None:
    """a stream of a text of a schema"""
    pieces = client.generate(MODEL, "I am Ada.", format=Person.model_json_schema(), stream=True, options=GREEDY)
    equal(sorted(json.loads("".join(piece.response for piece in pieces))), ["age", "name"])


@case
def thinking() -> None:
    """think off"""
    holds(client.chat(MODEL, SAID, think=False, options=GREEDY).message.content, "4")


@case
def logprobs() -> None:
    """log probabilities"""
    answer = client.chat(MODEL, SAID, logprobs=True, top_logprobs=2, options=GREEDY)
    assert answer.logprobs and len(answer.logprobs[0].top_logprobs or ()) == 2


@case
def listed() -> None:
    """list, ps and show"""
    equal([model.model for model in client.list().models][:1], [MODEL])
    (running,) = client.ps().models
    assert running.context_length and running.size_vram is not None and running.expires_at
    shown = client.show(MODEL)
    assert "completion" in (shown.capabilities or []) and shown.template and shown.modelinfo
    assert shown.details and shown.details.format


@case
def embeds() -> None:
    """embeddings of a model without any are refused by name"""
    for ask in (lambda: client.embed(MODEL, ["a", "b"]), lambda: client.embeddings(MODEL, "a")):
        try:
            ask()
        except ollama.ResponseError as error:
            holds(error.error, "embedding")
            continue
        raise AssertionError("they were not refused")


@case
def refused() -> None:
    """errors: an unknown model, a wrong option, no pulling"""
    for ask, status in (
        (lambda: client.chat("huge", SAID), 404),
        (lambda: client.show("huge"), 404),
        (lambda: client.chat(MODEL, SAID, options={"temperature": 9}), 400),
        (lambda: client.pull("huge"), 404),
    ):
        try:
            ask()
        except ollama.ResponseError as error:
            equal(error.status_code, status)
            assert error.error, "the error says nothing"
            continue
        raise AssertionError("it was taken")


main()
