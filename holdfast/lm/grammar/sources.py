"""Grammars as llguidance reads them, and the limits for them. For engines and for their test process."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from holdfast.core.types import Grammar
from holdfast.lm.grammar.dialects import ONE_LINE
from holdfast.lm.grammar.references import depth_of, lark_references, schema_references

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # only its stub has it

MOST_SYMBOLS = 30_000
"""Most symbols of a compiled grammar. Compiling this many takes seconds and 100 MB."""
MOST_DEPTH = 64
"""Most brackets and braces of a schema that are open at a time. llguidance bounds other grammars itself."""
MOST_REFERENCES = 500
"""Most definitions on one chain of references. llguidance compiles each inside of the one that refers to it."""
LEXER_FUEL = 1_000_000
"""Bounds the work of compiling regular expressions, to about 20 ms."""
MASK_FUEL, MASK_ITEMS = 200_000, 10_000
"""Bound the work of one mask: of its regular expressions to about 20 ms, of its rules to about 200 ms at worst."""
LEXER_STATES = 100_000
"""Most states of a grammar's lexer. They come as answers are written, and take 500 bytes each."""
NOTHING_FOLLOWS = "NoExtensionBias"
"""Reason of llguidance for a matcher that allows no token, such as one of a rule that always contains itself."""
REASON_LENGTH = 1000
"""Most characters of llguidance's reason that are reported."""


class GrammarError(ValueError):
    """A grammar that cannot be followed. The message is for people."""


def parser_limits() -> LLParserLimits:
    """The limits of each matcher, in an engine as in its test process."""
    return LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL,
        step_lexer_fuel=MASK_FUEL,
        step_max_items=MASK_ITEMS,
        max_lexer_states=LEXER_STATES,
        max_grammar_size=MOST_SYMBOLS,
        verbose_errors=False,
    )


def read_vocabulary(tokenizer: str, vocab_size: int, ends: list[int]) -> LLTokenizer:
    """A tokenizer of Hugging Face's library, as JSON, for a model with `vocab_size` logits. Raises GrammarError."""
    try:
        # Slices speed up masks within strings; they change none.
        return LLTokenizer(
            without_spares(tokenizer, vocab_size),
            n_vocab=32 * mask_words(vocab_size),
            eos_token=ends,
            slices=LLTokenizer.json_slices(),
        )
    except Exception as error:  # llguidance's own types, as it sees fit
        raise GrammarError(f"this model's tokenizer cannot follow a grammar: {in_brief(error)}") from None


def check_references(grammar: Grammar) -> None:
    """Raises GrammarError, with the limit, for a grammar whose definitions nest or refer to each other too deeply."""
    if grammar.kind == "json":
        if (depth := depth_of(grammar.text)) > MOST_DEPTH:
            raise GrammarError(f"the schema nests {depth} levels deep; at most {MOST_DEPTH} are taken")
        try:
            deep = schema_references(json.loads(grammar.text))
        except ValueError:  # llguidance says what is wrong with it
            return
        what = "schema has a chain of $refs through"
    elif grammar.kind == "lark":
        deep, what = lark_references(grammar.text), "lark grammar has a chain of rules through"
    else:
        return
    if deep > MOST_REFERENCES:
        raise GrammarError(f"the {what} {deep} definitions; at most {MOST_REFERENCES} are taken")


def serialized(grammar: Grammar) -> str:
    """A grammar as llguidance reads it. Raises GrammarError for a schema that is not JSON."""
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.text))
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.text))
    try:
        return str(LLMatcher.grammar_from_json_schema(grammar.text, defaults=cast("JsonCompileOptions", ONE_LINE)))
    except ValueError as error:
        raise GrammarError(f"the schema cannot be read: {in_brief(error)}") from None


def begun(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the beginning of an answer. Raises GrammarError with llguidance's reason."""
    matcher = LLMatcher(tokenizer, serialized(grammar), log_level=0, limits=parser_limits())
    check_matcher(grammar, matcher)
    return matcher


def check_matcher(grammar: Grammar, matcher: LLMatcher) -> None:
    """Raises GrammarError for a matcher that has given up, with its reason."""
    if matcher.is_error():
        raise GrammarError(f"the {grammar.kind} grammar cannot be followed: {in_brief(matcher.get_error())}")


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask for this many tokens, an even number."""
    return 2 * -(-vocab_size // 64)


def without_spares(tokenizer: str, vocab_size: int) -> str:
    """A tokenizer without the added tokens that the model has no logits for. Gemma 3 has one."""
    fields = json.loads(tokenizer)
    added = [each for each in fields.get("added_tokens") or () if each["id"] < vocab_size]
    return (
        tokenizer
        if len(added) == len(fields.get("added_tokens") or ())
        else json.dumps({**fields, "added_tokens": added})
    )


def in_brief(reason: object) -> str:
    """A reason on one line, not too long. Its quotes of a grammar are cut, so that the limit after them is reported."""
    text = re.sub(r"\s+", " ", str(reason)).strip()
    if text.startswith(NOTHING_FOLLOWS):
        return "no answer matches it: none can begin, or none can end"
    text = re.sub(r"(\S{40})\S{40,}(\S{10})", r"\1…\2", text)
    half = REASON_LENGTH // 2
    return text if len(text) <= REASON_LENGTH else f"{text[:half]} … {text[-half:]}"
