"""LangChain's ChatOpenAI: 26 basic calls."""

from __future__ import annotations

from typing import Any

from harness import KEY, MODEL, URL, case, equal, holds, main
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

SUM = "What is 2 plus 2?"


def chat(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=URL, api_key=KEY, **{"temperature": 0, "max_tokens": 256, "max_retries": 0} | options
    )


class Person(BaseModel):
    """A person."""

    name: str = Field(description="the first name", max_length=12)
    age: int = Field(description="age in years", ge=0, le=150)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@case
def invoke() -> None:
    """invoke"""
    holds(chat().invoke(SUM).text, "4")


@case
def system() -> None:
    """invoke with a system message"""
    assert chat().invoke([SystemMessage("You are friendly."), HumanMessage("Hello!")]).text


@case
def turns() -> None:
    """invoke with a conversation of turns"""
    said = [HumanMessage("My name is Ada."), AIMessage("Nice to meet you, Ada."), HumanMessage("What is my name?")]
    holds(chat().invoke(said).text, "Ada")


@case
def usage() -> None:
    """usage of an answer"""
    used = chat().invoke(SUM).usage_metadata
    assert used is not None and used["input_tokens"] > 0 and used["output_tokens"] > 0


@case
def stream() -> None:
    """stream"""
    pieces = [piece.text for piece in chat().stream(SUM)]
    holds("".join(pieces), "4")
    assert len(pieces) > 2


@case
def stream_usage() -> None:
    """stream with usage"""
    used = [piece.usage_metadata for piece in chat(stream_usage=True).stream(SUM) if piece.usage_metadata]
    assert used and used[-1]["output_tokens"] > 0


@case
async def ainvoke() -> None:
    """ainvoke"""
    holds((await chat().ainvoke(SUM)).text, "4")


@case
async def astream() -> None:
    """astream"""
    holds("".join([piece.text async for piece in chat().astream(SUM)]), "4")


@case
def batch() -> None:
    """batch"""
    equal([("4" in answer.text) for answer in chat().batch([SUM] * 4)], [True] * 4)


@case
async def abatch() -> None:
    """abatch"""
    equal([("4" in answer.text) for answer in await chat().abatch([SUM] * 4)], [True] * 4)


@case
def stop() -> None:
    """stop words"""
    answer = chat(stop=["4"]).invoke(SUM)
    assert "4" not in answer.text
    equal(answer.response_metadata["finish_reason"], "stop")


@case
def length() -> None:
    """finish reason of a cut answer"""
    equal(chat(max_tokens=2).invoke(SUM).response_metadata["finish_reason"], "length")


@case
def seed() -> None:
    """same seed, same text"""
    model = chat(temperature=1, seed=7)
    equal(model.invoke("Tell me a story.").text, model.invoke("Tell me a story.").text)


@case
def choices() -> None:
    """generate with n"""
    equal(len(chat(n=3, temperature=1).generate([[HumanMessage(SUM)]]).generations[0]), 3)


@case
def logprobs() -> None:
    """log probabilities"""
    told = chat(logprobs=True, top_logprobs=3).invoke(SUM).response_metadata["logprobs"]["content"]
    assert told and all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 3 for token in told)


@case
def stream_logprobs() -> None:
    """log probabilities, streamed"""
    pieces = [piece.response_metadata.get("logprobs") for piece in chat(logprobs=True).stream(SUM)]
    assert sum(len(piece["content"]) for piece in pieces if piece) > 2


@case
def penalties() -> None:
    """penalties and logit bias"""
    given = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "model_kwargs": {"logit_bias": {"5": -100}}}
    assert chat(**given).invoke(SUM).text


@case
def json_schema() -> None:
    """structured output by JSON schema"""
    model = chat().with_structured_output(Person, method="json_schema")
    assert isinstance(model.invoke("My name is Ada. I am 36 years old."), Person)


@case
def json_mode() -> None:
    """structured output by JSON mode"""
    model = chat().with_structured_output(None, method="json_mode")
    assert isinstance(model.invoke("Tell me about Ada as JSON."), dict)


@case
def function_calling() -> None:
    """structured output by function calling"""
    model = chat().with_structured_output(Person, method="function_calling")
    assert isinstance(model.invoke("My name is Ada. I am 36 years old."), Person)


@case
def tools_required() -> None:
    """bound tools, any of them required"""
    answer = chat().bind_tools([add], tool_choice="any", strict=True).invoke(SUM)
    equal([call["name"] for call in answer.tool_calls][:1], ["add"])
    assert isinstance(add.invoke(answer.tool_calls[0]["args"]), int)


@case
def tools_named() -> None:
    """bound tools, one of them named"""
    answer = chat().bind_tools([add, Person], tool_choice="Person", strict=True).invoke("I am Ada, 36 years old.")
    equal({call["name"] for call in answer.tool_calls}, {"Person"})


@case
def tools_streamed() -> None:
    """bound tools, streamed"""
    whole: Any = None
    for piece in chat().bind_tools([add], tool_choice="any", strict=True).stream(SUM):
        whole = piece if whole is None else whole + piece
    equal([call["name"] for call in whole.tool_calls][:1], ["add"])


@case
def tool_results() -> None:
    """a tool's result in the history"""
    called = AIMessage("", tool_calls=[{"name": "add", "args": {"a": 2, "b": 2}, "id": "call_1"}])
    said = [HumanMessage(SUM), called, ToolMessage("4", tool_call_id="call_1")]
    assert chat().bind_tools([add]).invoke(said).text


@case
def responses() -> None:
    """Responses, continued by the id of the last one"""
    model = chat(use_responses_api=True)
    first = model.invoke("My name is Ada.")
    second = model.invoke("What is my name?", previous_response_id=first.response_metadata["id"])
    holds(second.text, "Ada")


@case
def responses_stream() -> None:
    """Responses, streamed"""
    holds("".join(piece.text for piece in chat(use_responses_api=True).stream(SUM)), "4")


main()
