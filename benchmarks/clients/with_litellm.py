"""litellm: its calls, and the errors into which it turns a server's."""

from __future__ import annotations

from typing import Any

import litellm
from harness import KEY, MODEL, URL, case, equal, holds, main
from pydantic import BaseModel, Field

SUM = [{"role": "user", "content": "What is 2 plus 2?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


def asked(**options: Any) -> dict[str, Any]:
    given = {"model": f"hosted_vllm/{MODEL}", "api_base": URL, "api_key": KEY, "messages": SUM}
    return given | {"temperature": 0, "max_tokens": 256, "num_retries": 0} | options


@case
def completion() -> None:
    """completion"""
    holds(litellm.completion(**asked()).choices[0].message.content, "4")


@case
def stream() -> None:
    """completion, streamed"""
    holds("".join(piece.choices[0].delta.content or "" for piece in litellm.completion(**asked(stream=True))), "4")


@case
async def acompletion() -> None:
    """acompletion"""
    holds((await litellm.acompletion(**asked())).choices[0].message.content, "4")


@case
def text() -> None:
    """text_completion"""
    given = {"model": f"text-completion-openai/{MODEL}", "api_base": URL, "api_key": KEY}
    assert litellm.text_completion(**given, prompt="Hello", max_tokens=8).choices[0].text


@case
def responses() -> None:
    """responses"""
    answer = litellm.responses(model=f"openai/{MODEL}", api_base=URL, api_key=KEY, input="What is 2 plus 2?")
    holds(answer.output[-1].content[0].text, "4")


@case
def too_long() -> None:
    """ContextWindowExceededError for a prompt that is too long"""
    for provider in ("openai", "hosted_vllm"):
        try:
            litellm.completion(
                **asked(model=f"{provider}/{MODEL}", messages=[{"role": "user", "content": "word " * 9000}])
            )
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(f"{provider}: answered")


@case
def not_found() -> None:
    """NotFoundError for a model that is not served"""
    try:
        litellm.completion(**asked(model="hosted_vllm/other"))
    except litellm.NotFoundError:
        return
    raise AssertionError("answered")


@case
def schema() -> None:
    """response_format by JSON schema"""
    answer = litellm.completion(**asked(response_format=Person)).choices[0].message.content
    Person.model_validate_json(answer)


@case
def tools() -> None:
    """tools"""
    answer = litellm.completion(**asked(tools=[ADD], tool_choice="required")).choices[0].message
    equal(answer.tool_calls[0].function.name, "add")


main()
