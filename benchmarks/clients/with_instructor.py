"""instructor: typed answers in its modes."""

from __future__ import annotations

from typing import Any

import instructor
from harness import KEY, MODEL, URL, case, main
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "My name is Ada. I am 36 years old."}],
    "temperature": 0,
    "max_tokens": 256,
    "max_retries": 0,
}


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)


@case
def json_schema() -> None:
    """JSON_SCHEMA"""
    assert isinstance(client(instructor.Mode.JSON_SCHEMA).create(response_model=Person, **ASKED), Person)


@case
def tools_strict() -> None:
    """TOOLS_STRICT"""
    assert isinstance(client(instructor.Mode.TOOLS_STRICT).create(response_model=Person, **ASKED), Person)


@case
def tools() -> None:
    """TOOLS"""
    assert isinstance(client(instructor.Mode.TOOLS).create(response_model=Person, **ASKED), Person)


@case
def partial() -> None:
    """JSON_SCHEMA, streamed as partial objects"""
    *_, last = client(instructor.Mode.JSON_SCHEMA).create_partial(response_model=Person, **ASKED)
    Person.model_validate(last.model_dump())


main()
