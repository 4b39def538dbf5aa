"""AutoGen: its client of models, and an agent."""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelFamily,
    ModelInfo,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from harness import KEY, MODEL, URL, case, equal, holds, main
from pydantic import BaseModel, Field

ABOUT = ModelInfo(
    vision=False, function_calling=True, json_output=True, family=ModelFamily.UNKNOWN, structured_output=True
)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


def said(text: str) -> UserMessage:
    return UserMessage(content=text, source="user")


SUM = said("What is 2 plus 2?")


async def get_weather(city: str) -> str:
    """Weather of a city."""
    return "sunny, 21 degrees"


def model(**options: Any) -> OpenAIChatCompletionClient:
    given = {"temperature": 0, "max_tokens": 128, "max_retries": 0} | options
    return OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, model_info=ABOUT, **given)


@case
async def creates() -> None:
    """create, with usage"""
    result = await model().create([SUM])
    assert isinstance(result.content, str) and result.usage.completion_tokens > 0
    holds(result.content, "4")
    equal(result.finish_reason, "stop")


@case
async def streams() -> None:
    """create_stream"""
    *pieces, result = [piece async for piece in model().create_stream([SUM])]
    assert isinstance(result, CreateResult)
    equal("".join(str(piece) for piece in pieces), result.content)


@case
async def remembers() -> None:
    """create with a history"""
    before = [said("My name is Ada."), AssistantMessage(content="Nice to meet you, Ada.", source="assistant")]
    holds(str((await model().create([*before, said("What is my name?")])).content), "Ada")


@case
async def typed() -> None:
    """create with a typed answer"""
    result = await model().create([said("I am Ada, 36 years old.")], json_output=Person)
    Person.model_validate_json(str(result.content))


@case
async def calls() -> None:
    """create with a tool, and with its result"""
    weather = FunctionTool(get_weather, "Weather of a city.", strict=True)
    asked = said("What is the weather in Paris?")
    first = await model().create([asked], tools=[weather], tool_choice="required")
    assert isinstance(first.content, list) and isinstance(first.content[0], FunctionCall), f"{first.content!r}"
    equal(first.content[0].name, "get_weather")
    results = [
        FunctionExecutionResult(content="sunny, 21 degrees", name=call.name, call_id=call.id, is_error=False)
        for call in first.content
    ]
    called = AssistantMessage(content=first.content, source="assistant")
    second = await model().create([asked, called, FunctionExecutionResultMessage(content=results)], tools=[weather])
    holds(str(second.content), "sunny")


@case
async def agent() -> None:
    """an agent's runs, with a memory of the first"""
    helper = AssistantAgent("helper", model(), system_message=None)
    await helper.run(task="My name is Ada.")
    result = await helper.run(task="What is my name?")
    holds(result.messages[-1].to_text(), "Ada")


@case
async def agent_with_tool() -> None:
    """an agent with a tool"""
    helper = AssistantAgent("helper", model(), tools=[get_weather], system_message=None, reflect_on_tool_use=True)
    result = await helper.run(task="What is the weather in Paris?")
    holds(result.messages[-1].to_text(), "sunny")


main()
