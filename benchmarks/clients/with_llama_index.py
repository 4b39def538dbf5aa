"""llama-index: chats, streams, tools, typed answers and an agent, over OpenAI's and Ollama's protocols."""

from __future__ import annotations

from typing import Any, Literal

from harness import KEY, MODEL, URL, case, equal, holds, main
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SUM = [ChatMessage("What is 2 plus 2?")]
called: list[tuple[int, int]] = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    called.append((a, b))
    return a + b


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: Literal["Ada", "Bob"]
    age: Literal[36, 40]


def openai(**options: Any) -> OpenAILike:
    given = {"context_window": 1024, "max_tokens": 64, "temperature": 0, "max_retries": 0} | options
    return OpenAILike(MODEL, api_base=URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True, **given)


@case
def chat() -> None:
    """a chat"""
    holds(openai().chat(SUM).message.content, "4")


@case
def streamed() -> None:
    """a stream of a chat"""
    holds("".join(piece.delta or "" for piece in openai().stream_chat(SUM)), "4")


@case
async def asynchronous() -> None:
    """a stream of a chat, asynchronously"""
    holds("".join([piece.delta or "" async for piece in await openai().astream_chat(SUM)]), "4")


@case
def completes() -> None:
    """a completion of a text"""
    model = OpenAILike(MODEL, api_base=URL, api_key=KEY, is_chat_model=False, context_window=1024, max_tokens=4)
    assert model.complete("2 + 2 =").raw.usage.completion_tokens


@case
def remembers() -> None:
    """a chat engine of two turns"""
    engine = SimpleChatEngine.from_defaults(llm=openai())
    engine.chat("My name is Ada.")
    holds(engine.chat("What is my name?").response, "Ada")


@case
def tool() -> None:
    """a tool that must be called"""
    called.clear()
    model = openai()
    answer = model.chat_with_tools([FunctionTool.from_defaults(add)], SUM[0], tool_required=True)
    (call, *_) = model.get_tool_calls_from_response(answer)
    equal(call.tool_name, "add")
    equal(FunctionTool.from_defaults(add).call(**call.tool_kwargs).raw_output, sum(called[0]))


@case
def typed() -> None:
    """a typed answer"""
    model = openai(should_use_structured_outputs=True).as_structured_llm(Person)
    assert isinstance(model.chat([ChatMessage("I am Ada, 36 years old.")]).raw, Person)


@case
async def agent() -> None:
    """an agent with a tool"""
    helper = FunctionAgent(tools=[add], llm=openai())
    assert isinstance(str(await helper.run("What is 2 plus 2?")), str)


@case
def ollama() -> None:
    """a chat and a stream over Ollama's protocol"""
    headers = {"authorization": f"Bearer {KEY}"}
    model = Ollama(MODEL, base_url=URL.removesuffix("/v1"), context_window=1024, temperature=0, headers=headers)
    holds(model.chat(SUM).message.content, "4")
    holds("".join(piece.delta or "" for piece in model.stream_chat(SUM)), "4")


main()
