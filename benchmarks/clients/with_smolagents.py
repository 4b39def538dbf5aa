"""smolagents: OpenAIModel, and an agent that calls tools."""

from __future__ import annotations

from typing import Any

from harness import KEY, MODEL, URL, case, equal, holds, main
from smolagents import ChatMessage, MessageRole, OpenAIModel, ToolCallingAgent, tool

SUM = "What is 2 plus 2?"


@tool
def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: Name of the city.
    """
    return "sunny, 21 degrees"


def model(**options: Any) -> OpenAIModel:
    given = {"temperature": 0, "max_tokens": 128, "client_kwargs": {"max_retries": 0}} | options
    return OpenAIModel(MODEL, api_base=URL, api_key=KEY, **given)


def said(*texts: str) -> list[ChatMessage]:
    roles = (MessageRole.USER, MessageRole.ASSISTANT)
    return [ChatMessage(roles[number % 2], [{"type": "text", "text": text}]) for number, text in enumerate(texts)]


@case
def generates() -> None:
    """generate, with usage"""
    answer = model().generate(said(SUM))
    holds(str(answer.content), "4")
    assert answer.token_usage is not None and answer.token_usage.output_tokens > 0


@case
def streams() -> None:
    """generate_stream"""
    holds("".join(delta.content or "" for delta in model().generate_stream(said(SUM))), "4")


@case
def remembers() -> None:
    """generate with a history"""
    asked = said("My name is Ada.", "Nice to meet you, Ada.", "What is my name?")
    holds(str(model().generate(asked).content), "Ada")


@case
def typed() -> None:
    """generate with a JSON schema"""
    schema = {"type": "object", "properties": {"sum": {"enum": [3, 4]}}, "required": ["sum"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    holds(str(model().generate(said(SUM), response_format=form).content), '"sum"')


@case
def stops() -> None:
    """generate with stop sequences"""
    assert "4" not in str(model().generate(said(SUM), stop_sequences=["4"]).content)


@case
def calls() -> None:
    """generate with a tool"""
    answer = model().generate(said("What is the weather in Paris?"), tools_to_call_from=[get_weather])
    assert answer.tool_calls, f"no call, but {answer.content!r}"
    equal(answer.tool_calls[0].function.name, "get_weather")


@case
def agent() -> None:
    """an agent's step: a tool that is called and run"""
    helper = ToolCallingAgent([get_weather], model(), max_steps=1, instructions="", verbosity_level=0)
    helper.prompt_templates["system_prompt"] = ""
    helper.run("What is the weather in Paris?")
    holds(str(helper.memory.steps), "sunny")


main()
