"""GrammarCompiler: from a request's grammar to a matcher over the model's vocabulary, within limits, in any thread."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from holdfast.core.types import Grammar
from holdfast.lm.grammar.dialects import ONE_LINE

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # its stub alone has it

KEPT = 256
"""Compiled grammars that are kept for further requests, each as often as it is compiled."""
MOST_THREADS = 16
"""Threads that compute masks, at most. 64 masks of 50 us each take a millisecond on four of them."""
SHORT = 0.05
"""Seconds within which a grammar is compiled that is worth compiling once for each of these threads."""
MOST_SYMBOLS = 30_000
"""Most symbols of a compiled grammar. So many take seconds and 100 MB."""
MOST_DEPTH = 64
"""Most brackets and braces of a schema that are open at a time. llguidance bounds those of other grammars."""
MOST_SECONDS = 10.0
"""Time that compiling one grammar may take."""
LEXER_FUEL = 1_000_000
"""Bounds the work of compiling regular expressions, to about 20 ms."""
MASK_FUEL, MASK_ITEMS = 200_000, 50_000
"""Bound the work of one mask, to about 20 ms."""
REASON_LENGTH = 1000
"""Most characters of llguidance's reason that are told."""


class GrammarError(ValueError):
    """A grammar that cannot be followed. The message is for people."""


def mask_threads() -> int:
    """Threads that compute masks: half of the machine's cores."""
    return min(MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))


class Compiled:
    """A grammar's matchers at the beginning of an answer.

    All copies of one share its lexer, behind a lock, so their masks are computed one after another. Therefore a grammar
    that several requests have is compiled several times.
    """

    def __init__(self, first: LLMatcher, lexer: int, seconds: float) -> None:
        """`lexer` is a number of its own. It took so many `seconds` to compile."""
        self.matchers, self.seconds = [(first, lexer)], seconds
        self._given = 0

    def copy(self) -> tuple[LLMatcher, int]:
        """A copy of one of them, in turn, and the number of its lexer."""
        matcher, lexer = self.matchers[self._given % len(self.matchers)]
        self._given += 1
        return matcher.deep_copy(), lexer


class GrammarCompiler:
    """Compiles grammars for one vocabulary and keeps the last ones. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        most: int = KEPT,
        lexers: int | None = None,
        most_seconds: float = MOST_SECONDS,
    ) -> None:
        """`tokenizer` reads the tokenizer of Hugging Face's library, as JSON, when it is first needed.

        `vocab_size` is the number of a token's logits. `most` matchers are kept, at most so many `lexers` of a grammar:
        by default as many as threads compute masks. Compiling one may take `most_seconds`.
        """
        self._read, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._reading, self._keeping = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._compiling: dict[Grammar, Future[Compiled]] = {}
        """Those that one thread compiles for the first time, while others that need them wait."""
        self._most, self._lexers, self._most_seconds = most, lexers or mask_threads(), most_seconds
        self._numbers = itertools.count()
        self._limits = LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL,
            step_lexer_fuel=MASK_FUEL,
            step_max_items=MASK_ITEMS,
            max_grammar_size=MOST_SYMBOLS,
            verbose_errors=False,
        )

    @property
    def words(self) -> int:
        """32-bit words of a mask, an even number: one bit for each token."""
        return mask_words(self._vocab_size)

    @property
    def ends(self) -> list[int]:
        """The end-of-sequence tokens."""
        return self._ends

    def prepare(self, grammar: Grammar) -> None:
        """Compile the grammar of a request. Raises as `begin` does.

        Compiling takes a millisecond for a usual schema; other threads run meanwhile.
        """
        with self._keeping:
            kept = self._find(grammar)
            if kept is not None and (kept.seconds > SHORT or len(kept.matchers) >= self._lexers):
                return
        if kept is None:
            self._get(grammar)
        else:
            self._compile(grammar)

    def begin(self, grammar: Grammar) -> tuple[LLMatcher, int]:
        """A matcher at the beginning of an answer, and the number of its lexer, which others may share.

        Compiles the grammar where `prepare` has not, or not lately. Raises GrammarError with the reason, where it has a
        mistake, exceeds a limit, or matches nothing.
        """
        compiled = self._get(grammar)
        with self._keeping:
            return compiled.copy()

    def _get(self, grammar: Grammar) -> Compiled:
        """A grammar that is kept, or else is compiled, by one thread for all that wait for it."""
        with self._keeping:
            if (kept := self._find(grammar)) is not None:
                return kept
            if (running := self._compiling.get(grammar)) is None:
                compiling = self._compiling[grammar] = Future[Compiled]()
        if running is not None:
            return running.result()
        try:
            compiling.set_result(self._compile(grammar))
        except BaseException as error:
            compiling.set_exception(error)
        with self._keeping:
            del self._compiling[grammar]
        return compiling.result()

    def _find(self, grammar: Grammar) -> Compiled | None:
        """A grammar that is kept. The caller has the lock."""
        if (kept := self._kept.get(grammar)) is not None:
            self._kept.move_to_end(grammar)
        return kept

    def _compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar, once more if it is kept, and keep it."""
        began = time.perf_counter()
        made = LLMatcher(self.tokenizer(), serialized(grammar), log_level=0, limits=self._limits)
        self._check(grammar, made)
        # The first mask is the largest part of the work for some grammars, and shows one that nothing matches.
        first = made.deep_copy()
        mask = np.zeros(self.words, np.int32)
        if not first.is_error():
            first.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check(grammar, first)
        if (seconds := time.perf_counter() - began) > self._most_seconds:
            raise GrammarError(
                f"the {grammar.kind} grammar took {seconds:.1f} s to compile; "
                f"at most {self._most_seconds:g} s may be taken"
            )
        with self._keeping:
            lexer = next(self._numbers)
            if (kept := self._find(grammar)) is None:
                kept = self._kept[grammar] = Compiled(made, lexer, seconds)
            else:
                kept.matchers.append((made, lexer))
            while len(self._kept) > 1 and sum(len(each.matchers) for each in self._kept.values()) > self._most:
                self._kept.popitem(last=False)
            return kept

    def tokenizer(self) -> LLTokenizer:
        """The vocabulary as llguidance has it. Raises GrammarError for a tokenizer that it cannot read."""
        with self._reading:
            if self._tokenizer is None:
                if not self._ends:
                    raise GrammarError("this model names no end-of-sequence token, which an answer by a grammar needs")
                try:
                    text, size = without_spares(self._read(), self._vocab_size), 32 * self.words
                    # Slices speed up masks within strings; they change none.
                    slices = LLTokenizer.json_slices()
                    self._tokenizer = LLTokenizer(text, n_vocab=size, eos_token=self._ends, slices=slices)
                except Exception as error:  # llguidance's own types, as it sees fit
                    raise GrammarError(f"this model's tokenizer cannot follow a grammar: {in_brief(error)}") from None
            return self._tokenizer

    def _check(self, grammar: Grammar, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise GrammarError(f"the {grammar.kind} grammar cannot be followed: {in_brief(matcher.get_error())}")


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask for so many tokens, an even number."""
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


def serialized(grammar: Grammar) -> str:
    """A grammar as llguidance reads it. Raises GrammarError for a schema that is not JSON."""
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.text))
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if (depth := depth_of(grammar.text)) > MOST_DEPTH:
        raise GrammarError(f"the schema nests {depth} levels deep; at most {MOST_DEPTH} are taken")
    try:
        return str(LLMatcher.grammar_from_json_schema(grammar.text, defaults=cast("JsonCompileOptions", ONE_LINE)))
    except ValueError as error:
        raise GrammarError(f"the schema cannot be read: {in_brief(error)}") from None


def depth_of(text: str) -> int:
    """The most brackets and braces of a JSON text that are open at a time."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[{}\]]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def in_brief(reason: object) -> str:
    """A reason on one line, and not too long."""
    text = re.sub(r"\s+", " ", str(reason)).strip()
    return text if len(text) <= REASON_LENGTH else text[:REASON_LENGTH] + " …"
