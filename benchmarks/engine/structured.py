"""Structured output: whether answers by random schemas are valid, and what schemas cost.

    python -m benchmarks.engine.structured valid [--schemas 1000] [--seed 0] [--json FILE]
    python -m benchmarks.engine.structured speed [--streams 64] [--output 512] [--runs 2] [--json FILE]
                                           [--set name=value]

`valid` draws random schemas, lets the built-in model answer each once at temperature 1 (any engine flag as --set
name=value), and checks every answer that the model ended with the jsonschema package. An answer that `max_tokens` cut
is counted apart.

`speed` needs a GPU: a Llama-3-8B shape with random weights and a made vocabulary of 128,256 tokens. All streams run at
once at temperature 1, in turn without a grammar and with a schema of a long list of objects, a schema of its own for
each stream; then with one schema for all. Prints tokens a second from the first request's submission to the last
token, and the ratio to those without.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.lib.invocation import add_engine_options, provenance
from holdfast import LLM, SamplingParams
from holdfast.core.types import FinishReason, Grammar
from holdfast.lm.grammar.dialects import schema_grammar

WORDS = ("red", "green", "on", "off", "kettle", "Ada", "north", "x-1", "été", "日本")
FORMATS = ("date", "uuid", "ipv4")
PATTERNS = ("^[a-z]{1,6}$", "^[A-Z][a-z]{1,9}-[0-9]{2,4}$", "^(yes|no|maybe)$", "^[0-9]{4}$", "^a?b{0,3}c$")


def random_schema(choose: random.Random, depth: int = 3) -> dict[str, Any]:
    """A random JSON schema with short answers. Every instance of it can be written in the order of its properties."""
    schema = _any(choose, depth)
    if choose.random() < 0.2:  # the same by reference, twice
        inner = {"$ref": "#/$defs/part"}
        return {
            "type": "object",
            "properties": {"first": inner, "rest": {"type": "array", "items": inner, "maxItems": 2}},
            "required": ["first"],
            "additionalProperties": False,
            "$defs": {"part": schema},
        }
    return schema


def _any(choose: random.Random, depth: int) -> dict[str, Any]:
    deep = (_object, _object, _array, _tuple, _any_of, _recursive) if depth else ()
    make = choose.choice((*deep, _string, _string, _integer, _number, _plain, _one_of))
    return make(choose, depth)


def _object(choose: random.Random, depth: int) -> dict[str, Any]:
    names = choose.sample(("name", "age", "tags", "a b", "id", "größe", "on", "z", 'q"uote'), choose.randint(0, 5))
    properties = {name: _any(choose, depth - 1) for name in names}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    schema["required"] = [name for name in names if choose.random() < 0.7]
    if not names:
        schema["patternProperties"] = {"^[a-c]{1,3}$": {"type": "integer", "minimum": 0, "maximum": 9}}
        schema["maxProperties"] = 2
        del schema["required"]
    return schema


def _array(choose: random.Random, depth: int) -> dict[str, Any]:
    least = choose.randint(0, 3)
    items = _any(choose, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + choose.randint(0, 2)}


def _tuple(choose: random.Random, depth: int) -> dict[str, Any]:
    items = [_any(choose, depth - 1) for _ in range(choose.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(choose: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(choose, depth - 1) for _ in range(choose.randint(2, 3))]}


def _recursive(choose: random.Random, depth: int) -> dict[str, Any]:
    """A chain: one more level of nesting at each end that the model does not choose."""
    value = _any(choose, 0)
    inner = {"anyOf": [{"type": "null"}, value]}
    return {"type": "object", "properties": {"value": value, "next": inner}, "required": ["value", "next"]} | {
        "additionalProperties": False
    }


def _string(choose: random.Random, depth: int) -> dict[str, Any]:
    kind = choose.randrange(3)
    if kind == 0:
        least = choose.randint(0, 5)
        return {"type": "string", "minLength": least, "maxLength": least + choose.randint(0, 12)}
    if kind == 1:
        return {"type": "string", "pattern": choose.choice(PATTERNS)}
    return {"type": "string", "format": choose.choice(FORMATS)}


def _integer(choose: random.Random, depth: int) -> dict[str, Any]:
    low = choose.randint(-1000, 1000)
    schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + choose.randint(0, 500)}
    if choose.random() < 0.3:
        schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + choose.randint(2, 99)}
    return schema


def _number(choose: random.Random, depth: int) -> dict[str, Any]:
    low = choose.choice((-2.5, 0, 0.125, 10))
    # A number without a step may have any number of digits.
    return {"type": "number", "minimum": low, "maximum": low + choose.choice((0.5, 3, 100)), "multipleOf": 0.125}


def _plain(choose: random.Random, depth: int) -> dict[str, Any]:
    return choose.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}))


def _one_of(choose: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = [*WORDS, 0, 1, -3, 2.5, True, None, [], {"a": [1]}]
    return (
        {"enum": choose.sample(values, choose.randint(1, 4))}
        if choose.random() < 0.8
        else {"const": choose.choice(values)}
    )


CHECKED = jsonschema.FormatChecker(("uuid", "ipv4"))


@CHECKED.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    """A date of RFC 3339. The package uses Python's dates, which have no year 0; that was a leap year, like 2000."""
    if isinstance(value, str):
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", value):
            return False
        datetime.date.fromisoformat(re.sub("^0000", "2000", value))
    return True


def judged(schema: dict[str, Any], text: str) -> str | None:
    """The fault of an answer; None if there is none."""
    try:
        jsonschema.Draft202012Validator(schema, format_checker=CHECKED).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def valid(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answers of the built-in model to this many random schemas, each at temperature 1, counted by outcome."""
    choose = random.Random(arguments.seed)
    schemas = [random_schema(choose) for _ in range(arguments.schemas)]
    params = [
        SamplingParams(temperature=1.0, seed=number, max_tokens=arguments.max_tokens, grammar=schema_grammar(schema))
        for number, schema in enumerate(schemas)
    ]
    outcomes, wrong, tokens = Counter[str](), list[dict[str, Any]](), 0
    began = time.perf_counter()
    with LLM(**{"device": "cpu", "max_sequences": 32} | dict(arguments.set)) as llm:
        answers = llm.generate(["Tell me something."] * len(schemas), params, progress=False)
    for schema, answer in zip(schemas, answers, strict=True):
        tokens += len(answer.token_ids)
        fault = judged(schema, answer.text) if answer.finish_reason is FinishReason.STOP else None
        outcome = "wrong" if fault else "valid" if answer.finish_reason is FinishReason.STOP else "cut"
        outcomes[outcome] += 1
        if outcome != "valid":
            wrong.append({"schema": schema, "text": answer.text[:300], "fault": fault or "max_tokens"})
    return {
        "schemas": len(schemas),
        **{name: outcomes[name] for name in ("valid", "wrong", "cut")},
        "tokens": tokens,
        "seconds": round(time.perf_counter() - began, 1),
        "not valid": wrong,
    }


def made_tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE vocabulary of this many tokens: syllables of two letters, and pairs of syllables.

    It is as wide and about as deep as those of large models, and takes a second to make.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary: dict[str, int] = {}
    for token in ("<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())):
        vocabulary[token] = len(vocabulary)
    merges: list[tuple[str, str]] = []

    def merge(first: str, second: str) -> None:
        if first + second not in vocabulary and len(vocabulary) < size:
            vocabulary[first + second] = len(vocabulary)
            merges.append((first, second))

    syllables = [first + second for first in letters for second in letters]
    for syllable in syllables:
        merge(*syllable)
    for syllable in syllables:
        merge("Ġ", syllable)
    choose = random.Random(0)
    while len(vocabulary) < size:
        merge(choose.choice(("", "Ġ")) + choose.choice(syllables), choose.choice(syllables))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return tokenizer


def list_schema(number: int) -> dict[str, Any]:
    """A list of objects that does not end within a run. Each number has its own names."""
    item = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string", "maxLength": 60},
            f"count_{number}": {"type": "integer", "minimum": 0, "maximum": 100_000},
            f"kind_{number}": {"enum": ["alpha", "beta", "gamma"]},
            f"notes_{number}": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 4},
        },
        "additionalProperties": False,
    }
    item["required"] = list(item["properties"])  # type: ignore[call-overload]
    return {"type": "array", "items": item, "minItems": 100_000}


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Output tokens per second of this many streams, without a grammar and with one."""
    from benchmarks.engine.llama8b import LLAMA_3_8B  # it imports PyTorch

    shape = LLAMA_3_8B | ({} if arguments.layers is None else {"num_hidden_layers": arguments.layers})
    choose = random.Random(0)
    plain = SamplingParams(temperature=1.0, max_tokens=arguments.output, ignore_eos=True)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape | {"eos_token_id": 1, "bos_token_id": 0}))
        made_tokenizer(LLAMA_3_8B["vocab_size"]).save(str(Path(directory) / "tokenizer.json"))
        options = {"load_format": "random", "max_sequences": arguments.streams, "prefix_sharing": False}
        with LLM(directory, **options | dict(arguments.set)) as llm:

            def run(grammars: list[Grammar | None]) -> float:
                prompts = [[choose.randrange(300, 100_000) for _ in range(arguments.prompt)] for _ in grammars]
                params = [replace(plain, seed=at, grammar=grammar) for at, grammar in enumerate(grammars)]
                began = time.perf_counter()
                answers = llm.generate(prompts, params, progress=False)
                seconds = time.perf_counter() - began
                assert all(len(answer.token_ids) == arguments.output for answer in answers)
                return len(answers) * arguments.output / seconds

            nothing: list[Grammar | None] = [None] * arguments.streams
            one: list[Grammar | None] = [schema_grammar(list_schema(0))] * arguments.streams
            own: list[Grammar | None] = [schema_grammar(list_schema(at)) for at in range(arguments.streams)]
            kinds = {"without": nothing, "own schemas": own, "one schema": one, "half with": [*nothing, *own][::2]}
            began = time.perf_counter()
            run(own)  # reads the tokenizer and compiles
            first = time.perf_counter() - began
            run(nothing)
            found: dict[str, list[float]] = {name: [] for name in kinds}
            for _ in range(arguments.runs):
                for name, grammars in kinds.items():
                    found[name].append(run(grammars))
    rates = {name: statistics.median(each) for name, each in found.items()}
    return {
        "streams": arguments.streams,
        "output": arguments.output,
        "first run with schemas, s": round(first, 2),
        "tokens/s": {name: [round(each, 1) for each in rates] for name, rates in found.items()},
        "ratio to without": {name: round(rate / rates["without"], 3) for name, rate in rates.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    of_valid, of_speed = parts.add_parser("valid"), parts.add_parser("speed")
    of_valid.add_argument("--schemas", type=int, default=1000)
    of_valid.add_argument("--seed", type=int, default=0)
    of_valid.add_argument("--max-tokens", type=int, default=700)
    of_valid.set_defaults(run=valid)
    of_speed.add_argument("--streams", type=int, default=64)
    of_speed.add_argument("--prompt", type=int, default=64)
    of_speed.add_argument("--output", type=int, default=512)
    of_speed.add_argument("--runs", type=int, default=2)
    of_speed.add_argument("--layers", type=int, help="fewer than the 8B shape has, for a try")
    of_speed.set_defaults(run=speed)
    for each in (of_valid, of_speed):
        each.add_argument("--json", type=Path)
        add_engine_options(each)
    arguments = parser.parse_args()
    result = arguments.run(arguments)
    packages = {name: version(name) for name in ("llguidance", "jsonschema", "tokenizers")}
    report = json.dumps({**provenance(), **packages, **result}, indent=1, ensure_ascii=False)
    if arguments.json is not None:
        arguments.json.write_text(report + "\n")
    print(report)
    if result.get("wrong"):
        sys.exit(1)


if __name__ == "__main__":
    main()
