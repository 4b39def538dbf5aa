"""openai-agents: its runner over chat completions and Responses, with tools."""

from __future__ import annotations

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from harness import KEY, MODEL, URL, case, equal, holds, main
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

SUM = "What is 2 plus 2?"
called: list[tuple[int, int]] = []
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    called.append((a, b))
    return str(a + b)


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


def agent(kind: type, **options: object) -> Agent:
    model = kind(MODEL, AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
    settings = {"temperature": 0, "max_tokens": 256} | options.pop("settings", {})
    return Agent(name="helper", model=model, model_settings=ModelSettings(**settings), **options)


async def runs(kind: type) -> None:
    result = await Runner.run(agent(kind), SUM)
    holds(result.final_output, "4")


async def streams(kind: type) -> None:
    result = Runner.run_streamed(agent(kind), SUM)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    holds("".join(deltas), "4")


async def remembers(kind: type) -> None:
    session = SQLiteSession("test")
    await Runner.run(agent(kind), "My name is Ada.", session=session)
    holds((await Runner.run(agent(kind), "What is my name?", session=session)).final_output, "Ada")


async def calls(kind: type) -> None:
    called.clear()
    result = await Runner.run(agent(kind, tools=[add], settings={"tool_choice": "required"}), SUM, max_turns=3)
    assert called, "the tool was not called"
    assert isinstance(result.final_output, str)


async def calls_streamed(kind: type) -> None:
    called.clear()
    result = Runner.run_streamed(agent(kind, tools=[add], settings={"tool_choice": "required"}), SUM, max_turns=3)
    async for _ in result.stream_events():
        pass
    assert called, "the tool was not called"


async def stops_at_tool(kind: type) -> None:
    called.clear()
    options = {"tools": [add], "settings": {"tool_choice": "add"}, "tool_use_behavior": "stop_on_first_tool"}
    result = await Runner.run(agent(kind, **options), SUM)
    equal(result.final_output, str(sum(called[0])))


async def structured(kind: type) -> None:
    result = await Runner.run(agent(kind, output_type=Person), "I am Ada, 36 years old.")
    assert isinstance(result.final_output, Person)


for kind, api in ((OpenAIChatCompletionsModel, "chat completions"), (OpenAIResponsesModel, "Responses")):
    for function, about in (
        (runs, "a run"),
        (streams, "a streamed run"),
        (remembers, "a session of two runs"),
        (calls, "a tool, and an answer to its result"),
        (calls_streamed, "a tool, streamed"),
        (stops_at_tool, "a named tool, where the run stops"),
        (structured, "a typed output"),
    ):

        def run(function: object = function, kind: type = kind) -> object:
            return function(kind)  # type: ignore[operator]

        run.__doc__ = f"{about}, {api}"
        case(run)

main()
