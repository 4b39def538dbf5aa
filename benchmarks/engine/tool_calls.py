"""Calls of random tools with `strict`: whether each is well formed, and whether its arguments follow its schema.

    python -m benchmarks.engine.tool_calls [--requests 1000] [--seed 0] [--json FILE]

Each request has one to four tools with random schemas, in one of the formats in turn: with and without reasoning
before the call, one call or several, any tool or a named one. The built-in model, which does not know these tools,
answers at temperature 1 (any engine flag as --set name=value), with a bias to tokens that end strings and lists. An
answer that the model ended is read as the server reads it: it is valid if it calls at least one tool, and every call is
of an allowed tool with arguments that the jsonschema package accepts. An answer that `max_tokens` cut is counted apart.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.engine.structured import judged, random_schema
from benchmarks.lib.invocation import add_engine_options, provenance
from holdfast import LLM, SamplingParams
from holdfast.core.types import FinishReason
from holdfast.engine.client.text import Text, TextStream
from holdfast.server.formats.parts import Arguments, CallBegin
from holdfast.server.formats.registry import THINK, AnswerFormat, Reading
from holdfast.server.formats.toolset import Tool, Toolset

FORMATS = ("hermes", "llama3_json", "mistral", "qwen3_coder")
SIMPLE = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "boolean"},
    {"type": "string", "enum": ["metric", "imperial"]},
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A random request, and how its answer is read."""

    format: str
    reading: Reading
    toolset: Toolset


def random_tool(choose: random.Random, name: str) -> Tool:
    """A tool with up to four arguments, some of them of deep schemas."""
    properties = {
        word: dict(choose.choice(SIMPLE)) if choose.random() < 0.6 else random_schema(choose, 2)
        for word in choose.sample(("city", "unit", "when", "how-many", "note"), choose.randint(0, 4))
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    for word, given in properties.items():  # references begin at the top
        if definitions := given.pop("$defs", None):
            renamed = json.dumps(given).replace("#/$defs/", f"#/$defs/{word}-")
            properties[word] = json.loads(renamed)
            inner = json.loads(json.dumps(definitions).replace("#/$defs/", f"#/$defs/{word}-"))
            schema.setdefault("$defs", {}).update({f"{word}-{key}": value for key, value in inner.items()})
    if choose.random() < 0.8:
        schema |= {"required": [key for key in properties if choose.random() < 0.7], "additionalProperties": False}
    return Tool(name, "", schema, strict=True)


def random_request(choose: random.Random, text: Text, number: int) -> Asked:
    """One of the formats, with random tools and a random choice of them."""
    format = AnswerFormat.find(text, FORMATS[number % len(FORMATS)], "none")
    if choose.random() < 0.3:
        format = replace(format, reasoning=THINK)
    names = [f"{choose.choice(('get', 'set', 'find'))}_{choose.choice(('a', 'b-c', 'x.y'))}_{at}" for at in range(4)]
    tools = tuple(random_tool(choose, name) for name in names[: choose.randint(1, 4)])
    named = frozenset([choose.choice(tools).name]) if choose.random() < 0.3 else None
    toolset = Toolset(tools, "required", choose.random() < 0.2, named)
    return Asked(format.calls.name, Reading(format, toolset, {}), toolset)


def ends_of(text: Text) -> tuple[tuple[int, float], ...]:
    """A bias towards tokens that may end a string, a list, an object or a tag."""
    tokens = [token for token in range(4096) if any(end in text.token_bytes(token) for end in (b'"', b"}", b"]", b"<"))]
    return tuple((token, 12.0) for token in tokens[:1024])


def fault_of(asked: Asked, text: Text, tokens: list[int]) -> str | None:
    """The fault of an answer; None if there is none."""
    written = TextStream(text, shown=asked.reading.shown).push(tokens, last=True)
    calls: list[list[str]] = []
    for part in asked.reading.reader().push(written, last=True):
        if isinstance(part, CallBegin):
            calls.append([part.name, ""])
        elif isinstance(part, Arguments):
            calls[-1][1] += part.text
    schemas = {tool.name: dict(tool.schema) for tool in asked.toolset.callable}
    if not calls or (len(calls) > 1 and not asked.toolset.parallel):
        return f"{len(calls)} calls in {written!r}"
    for name, arguments in calls:
        if name not in schemas:
            return f"{name} is not allowed"
        if fault := judged(schemas[name], arguments):
            return f"{name}({arguments}): {fault}"
    return None


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run this many requests, each answered once, and count them by outcome."""
    choose = random.Random(arguments.seed)
    outcomes, wrong = Counter[str](), list[str]()
    began = time.perf_counter()
    with LLM(**{"device": "cpu", "max_sequences": 32} | dict(arguments.set)) as llm:
        requests = [random_request(choose, llm.text, number) for number in range(arguments.requests)]
        sampling = SamplingParams(temperature=1.0, max_tokens=arguments.max_tokens, logit_bias=ends_of(llm.text))
        params = [asked.reading.constrained(replace(sampling, seed=number)) for number, asked in enumerate(requests)]
        answers = llm.generate(["Call a tool."] * len(requests), params, progress=False)
        for asked, answer in zip(requests, answers, strict=True):
            if answer.finish_reason is not FinishReason.STOP:
                outcomes["cut"] += 1
                continue
            fault = fault_of(asked, llm.text, list(answer.token_ids)[:-1])
            outcomes["valid" if fault is None else "wrong"] += 1
            outcomes[f"valid in {asked.format}"] += fault is None
            if fault is not None:
                wrong.append(f"{asked.format}: {fault}")
    return {
        "requests": arguments.requests,
        **{name: outcomes[name] for name in ("valid", "wrong", "cut", *(f"valid in {each}" for each in FORMATS))},
        "seconds": round(time.perf_counter() - began, 1),
        "not valid": wrong[:20],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=1500)
    parser.add_argument("--json", type=Path)
    add_engine_options(parser)
    arguments = parser.parse_args()
    result = run(arguments)
    packages = {name: version(name) for name in ("llguidance", "jsonschema")}
    report = json.dumps({**provenance(), **packages, **result}, indent=1, ensure_ascii=False)
    if arguments.json is not None:
        arguments.json.write_text(report + "\n")
    print(report)
    if result["wrong"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
