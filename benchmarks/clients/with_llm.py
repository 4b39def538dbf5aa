"""llm: the library of the llm command, over chat completions and Responses."""

from __future__ import annotations

from typing import Any, Literal

import openai
from harness import KEY, MODEL, URL, case, equal, holds, main
from llm.default_plugins.openai_models import AsyncChat, Chat, Completion, Responses
from pydantic import BaseModel

SUM = "What is 2 plus 2?"
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 256}


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: Literal["Ada", "Bob"]
    age: Literal[36, 40]


def model(kind: type, **options: Any) -> Any:
    return kind(MODEL, key=KEY, model_name=MODEL, api_base=URL, **options)


@case
def prompt() -> None:
    """a prompt, with usage"""
    response = model(Chat).prompt(SUM, stream=False, **OPTIONS)
    holds(response.text(), "4")
    assert response.usage().output > 0


@case
def streamed() -> None:
    """a stream"""
    pieces = list(model(Chat).prompt(SUM, **OPTIONS))
    holds("".join(pieces), "4")
    assert len(pieces) > 2


@case
async def asynchronous() -> None:
    """a stream, asynchronously"""
    holds("".join([piece async for piece in model(AsyncChat).prompt(SUM, **OPTIONS)]), "4")


@case
def conversation() -> None:
    """a conversation"""
    talk = model(Chat).conversation()
    talk.prompt("My name is Ada.", **OPTIONS).text()
    holds(talk.prompt("What is my name?", **OPTIONS).text(), "Ada")


@case
def schema() -> None:
    """a typed answer"""
    answer = model(Chat, supports_schema=True).prompt("I am Ada, 36 years old.", schema=Person, stream=False, **OPTIONS)
    Person.model_validate_json(answer.text())


@case
def tool_result() -> None:
    """a tool's result"""

    def get_weather(city: str) -> str:
        """Weather of a city."""
        return "sunny, 21 degrees"

    asked = model(Chat, supports_tools=True).prompt("What is the weather in Paris?", tools=[get_weather], **OPTIONS)
    (call,) = asked.tool_calls()
    equal(call.name, "get_weather")
    (result,) = asked.execute_tool_calls()
    equal(result.output, "sunny, 21 degrees")
    holds(asked.reply(tool_results=[result], **OPTIONS).text(), "sunny")


@case
def completion() -> None:
    """a completion"""
    assert model(Completion, default_max_tokens=8).prompt("2 + 2 =", stream=False).text()


@case
def responses() -> None:
    """a prompt, Responses"""
    holds(model(Responses).prompt(SUM, stream=False).text(), "4")


@case
def responses_streamed() -> None:
    """a conversation, streamed, Responses"""
    talk = model(Responses).conversation()
    list(talk.prompt("My name is Ada."))
    holds("".join(talk.prompt("What is my name?")), "Ada")


@case
def wrong() -> None:
    """the error of a model that is not served"""
    try:
        Chat("other", key=KEY, model_name="other", api_base=URL).prompt(SUM, stream=False).text()
    except openai.NotFoundError as error:
        holds(str(error), "not served here")
    else:
        raise AssertionError("no error")


main()
