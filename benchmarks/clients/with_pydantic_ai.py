"""pydantic-ai: agents over chat completions and Responses, with tools and typed outputs."""

from __future__ import annotations

from typing import Any

from harness import KEY, MODEL, URL, case, equal, holds, main
from pydantic import BaseModel, Field
from pydantic_ai import (
    Agent,
    CallDeferred,
    DeferredToolRequests,
    DeferredToolResults,
    ModelSettings,
    NativeOutput,
    ToolOutput,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SUM = "What is 2 plus 2?"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


def agent(kind: type, **options: Any) -> Agent[None, Any]:
    model = kind(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    return Agent(model, model_settings=ModelSettings(temperature=0, max_tokens=256), **options)


async def runs(kind: type) -> None:
    holds((await agent(kind).run(SUM)).output, "4")


async def streams(kind: type) -> None:
    async with agent(kind).run_stream(SUM) as result:
        texts = [text async for text in result.stream_text()]
    holds(texts[-1], "4")


async def remembers(kind: type) -> None:
    first = await agent(kind).run("My name is Ada.")
    holds((await agent(kind).run("What is my name?", message_history=first.all_messages())).output, "Ada")


async def native(kind: type) -> None:
    result = await agent(kind, output_type=NativeOutput(Person, strict=True)).run("I am Ada, 36 years old.")
    assert isinstance(result.output, Person)


async def by_tool(kind: type) -> None:
    result = await agent(kind, output_type=ToolOutput(Person, strict=True)).run("I am Ada, 36 years old.")
    assert isinstance(result.output, Person)


async def calls(kind: type) -> None:
    helper = agent(kind, output_type=[str, DeferredToolRequests])

    @helper.tool_plain(strict=True)
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        raise CallDeferred

    first = await helper.run(SUM, model_settings=ModelSettings(extra_body={"tool_choice": "required"}))
    assert isinstance(first.output, DeferredToolRequests), f"no call, but {first.output!r}"
    results = DeferredToolResults()
    for call in first.output.calls:
        equal(call.tool_name, "add")
        results.calls[call.tool_call_id] = 4
    second = await helper.run(
        message_history=first.all_messages(),
        deferred_tool_results=results,
        model_settings=ModelSettings(tool_choice="none"),
    )
    assert isinstance(second.output, str)


for kind, api in ((OpenAIChatModel, "chat completions"), (OpenAIResponsesModel, "Responses")):
    for function, about in (
        (runs, "a run"),
        (streams, "a streamed run"),
        (remembers, "a history of messages"),
        (calls, "a tool, and an answer to its result"),
        (native, "a typed output by JSON schema"),
        (by_tool, "a typed output by a tool"),
    ):

        def run(function: Any = function, kind: type = kind) -> Any:
            return function(kind)

        run.__doc__ = f"{about}, {api}"
        case(run)

main()
