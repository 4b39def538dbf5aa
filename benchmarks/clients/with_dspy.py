"""dspy: calls of a model, and typed predictions."""

from __future__ import annotations

from typing import Any, Literal

import dspy
from harness import KEY, MODEL, URL, case, equal, holds, main

SUM = "What is 2 plus 2?"


class Who(dspy.Signature):
    """Find the person."""

    text: str = dspy.InputField()
    name: Literal["Ada", "Bob"] = dspy.OutputField()


class Served(dspy.LM):
    """A model that answers by a JSON schema, which DSPy does not expect of models that it does not know."""

    supports_response_schema = True

    @property
    def supported_params(self) -> set[str]:
        return {*super().supported_params, "response_format"}


def model(**options: Any) -> dspy.LM:
    given = {"temperature": 0, "max_tokens": 128, "cache": False, "num_retries": 0} | options
    return Served(f"openai/{MODEL}", api_base=URL, api_key=KEY, **given)


@case
def call() -> None:
    """a call"""
    holds(model()(SUM)[0], "4")


@case
async def asynchronous() -> None:
    """a call, asynchronously"""
    holds((await model().acall(SUM))[0], "4")


@case
def turns() -> None:
    """a call with messages"""
    said = [("user", "My name is Ada."), ("assistant", "Nice to meet you, Ada."), ("user", "What is my name?")]
    holds(model()(messages=[{"role": role, "content": text} for role, text in said])[0], "Ada")


@case
def choices() -> None:
    """several answers"""
    equal(len(model(temperature=1.0, n=3)(SUM)), 3)


@case
def usage() -> None:
    """usage in the history"""
    asked = model()
    asked(SUM)
    assert asked.history[-1]["usage"]["completion_tokens"] > 0


@case
def responses() -> None:
    """a call, Responses"""
    found = model(model_type="responses")(SUM)[0]
    holds(found["text"] if isinstance(found, dict) else found, "4")


@case
def predicts() -> None:
    """a typed prediction, by JSON schema"""
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Who)(text="My name is Ada.").name in ("Ada", "Bob")


@case
async def predicts_asynchronously() -> None:
    """a typed prediction, asynchronously"""
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        assert (await dspy.Predict(Who).acall(text="My name is Ada.")).name in ("Ada", "Bob")


main()
