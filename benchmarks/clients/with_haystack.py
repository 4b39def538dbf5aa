"""Haystack: its generators for OpenAI's chat completions and Responses, and a pipeline."""

from __future__ import annotations

from typing import Any

from harness import KEY, MODEL, URL, case, equal, holds, main
from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel, Field

SUM = [ChatMessage.from_user("What is 2 plus 2?")]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def generator(kind: type, most: str, **options: Any) -> Any:
    given = {"temperature": 0, most: 256} | options.pop("generation_kwargs", {})
    return kind(
        api_key=Secret.from_token(KEY), model=MODEL, api_base_url=URL, generation_kwargs=given, max_retries=0, **options
    )


def runs(kind: type, most: str) -> None:
    (reply,) = generator(kind, most).run(SUM)["replies"]
    holds(reply.text, "4")
    equal(reply.meta["finish_reason"], "stop")


def streams(kind: type, most: str) -> None:
    pieces: list[StreamingChunk] = []
    (reply,) = generator(kind, most, streaming_callback=pieces.append).run(SUM)["replies"]
    holds(reply.text, "4")
    equal("".join(piece.content for piece in pieces), reply.text)


async def asynchronously(kind: type, most: str) -> None:
    holds((await generator(kind, most).run_async(SUM))["replies"][0].text, "4")


def remembers(kind: type, most: str) -> None:
    said = [ChatMessage.from_user("My name is Ada."), ChatMessage.from_assistant("Nice to meet you, Ada.")]
    holds(generator(kind, most).run([*said, ChatMessage.from_user("What is my name?")])["replies"][0].text, "Ada")


def calls(kind: type, most: str) -> None:
    asked = generator(kind, most, tools=[add], tools_strict=True)
    (call,) = asked.run(SUM, generation_kwargs={"tool_choice": "required", "parallel_tool_calls": False})["replies"]
    equal([made.tool_name for made in call.tool_calls], ["add"])
    results = [ChatMessage.from_tool(str(add.invoke(**made.arguments)), made) for made in call.tool_calls]
    (reply,) = asked.run([*SUM, call, *results], generation_kwargs={"tool_choice": "none"})["replies"]
    assert reply.text


def typed(kind: type, most: str) -> None:
    name = "response_format" if kind is OpenAIChatGenerator else "text_format"
    asked = generator(kind, most, generation_kwargs={name: Person})
    Person.model_validate_json(asked.run([ChatMessage.from_user("I am Ada, 36 years old.")])["replies"][0].text)


KINDS = (
    (OpenAIChatGenerator, "max_completion_tokens", "chat completions"),
    (OpenAIResponsesChatGenerator, "max_output_tokens", "Responses"),
)
for kind, most, api in KINDS:
    for function, about in (
        (runs, "a run"),
        (streams, "a streamed run"),
        (asynchronously, "an asynchronous run"),
        (remembers, "a history of messages"),
        (calls, "a tool, and an answer to its result"),
        (typed, "a typed answer"),
    ):

        def run(function: Any = function, kind: type = kind, most: str = most) -> Any:
            return function(kind, most)

        run.__doc__ = f"{about}, {api}"
        case(run)


@case
def pipeline() -> None:
    """a pipeline with a template"""
    pipe = Pipeline()
    pipe.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("What is {{a}} plus {{b}}?")]))
    pipe.add_component("model", generator(OpenAIChatGenerator, "max_completion_tokens"))
    pipe.connect("prompt.prompt", "model.messages")
    holds(pipe.run({"prompt": {"a": 2, "b": 2}})["model"]["replies"][0].text, "4")


main()
