"""GrammarCompiler: from a request's grammar to a matcher over the model's vocabulary, within limits, in any thread."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from holdfast.core.types import Grammar
from holdfast.lm.grammar.sources import GrammarError, begun, check_matcher, in_brief, mask_words, read_vocabulary
from holdfast.lm.grammar.trial import ENGINE_STACK, NICENESS, Vocabulary, on_stack
from holdfast.lm.grammar.trials import Trials

KEPT = 256
"""Number of compiled grammars that are kept for further requests. Each copy counts."""
KEPT_BYTES = 256 << 20
"""Most bytes of the compiled grammars that are kept. The last one is kept whatever its size."""
BYTES_PER_CHARACTER = 400
"""Bytes of a compiled grammar that was not tested here. A regular expression of 250 KB takes 370 a character."""
MOST_THREADS = 16
"""Most threads that compute masks. 64 masks of 50 us each take a millisecond on four of them."""
SHORT = 0.05
"""Most seconds of compilation for a grammar that is worth compiling once for each of these threads."""
MOST_SECONDS = 10.0
"""Most processor time that testing one grammar may take."""


def mask_threads() -> int:
    """Threads that compute masks: half of the machine's cores."""
    return min(MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))


class Compiled:
    """A grammar's matchers at the beginning of an answer.

    All copies of one matcher share its lexer and the lexer's lock, so their masks are computed one after another.
    Therefore a grammar of several requests is compiled several times.
    """

    def __init__(self, first: LLMatcher, lexer: int, seconds: float, size: int) -> None:
        """`lexer` numbers the lexer. Compiling it took `seconds`, and it takes `size` bytes."""
        self.matchers, self.seconds, self.size = [(first, lexer)], seconds, size
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
        most_bytes: int = KEPT_BYTES,
        lexers: int | None = None,
        most_seconds: float = MOST_SECONDS,
        tested: bool = False,
    ) -> None:
        """`tokenizer` reads the tokenizer of Hugging Face's library, as JSON, when it is first needed.

        `vocab_size` is the number of a token's logits. At most `most` matchers of at most `most_bytes` are kept, and at
        most `lexers` of one grammar: by default as many as threads compute masks. Testing one may take `most_seconds`.
        `tested` says that another compiler has tested all grammars that come.
        """
        self._read, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._reading, self._keeping = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._compiling: dict[Grammar, Future[Compiled]] = {}
        """Grammars that one thread compiles for the first time, while others that need them wait."""
        self._most, self._most_bytes, self._lexers = most, most_bytes, lexers or mask_threads()
        self._numbers = itertools.count()
        self._trials = None if tested else Trials(lambda: self._vocabulary(self._text()), most_seconds)

    @property
    def words(self) -> int:
        """32-bit words of a mask, an even number: one bit for each token."""
        return mask_words(self._vocab_size)

    @property
    def ends(self) -> list[int]:
        """The end-of-sequence tokens."""
        return self._ends

    def test(self, grammar: Grammar) -> None:
        """Find out in another process whether a grammar can be compiled here. Raises GrammarError as `begin` does.

        It takes a few milliseconds for a usual schema, once, and at most `most_seconds`.
        """
        self._size(grammar)

    def prepare(self, grammar: Grammar) -> None:
        """Compile the grammar of a request, once it has been tested. Raises as `begin` does.

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

        Compiles the grammar if `prepare` has not, or not lately. Raises GrammarError, with the reason, for a grammar
        that has a mistake, exceeds a limit, or matches nothing.
        """
        compiled = self._get(grammar)
        with self._keeping:
            return compiled.copy()

    def discard(self, grammar: Grammar, lexer: int) -> None:
        """Drop a lexer that has exceeded a limit: all further copies of its matcher would fail with it."""
        with self._keeping:
            if (kept := self._kept.get(grammar)) is not None:
                kept.matchers = [each for each in kept.matchers if each[1] != lexer]
                if not kept.matchers:
                    del self._kept[grammar]

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
        size = self._size(grammar)
        began = time.perf_counter()
        made = self._made(grammar)
        seconds = time.perf_counter() - began
        with self._keeping:
            lexer = next(self._numbers)
            if (kept := self._find(grammar)) is None:
                kept = self._kept[grammar] = Compiled(made, lexer, seconds, size)
            else:
                kept.matchers.append((made, lexer))
            while len(self._kept) > 1 and self._too_many():
                self._kept.popitem(last=False)
            return kept

    def _too_many(self) -> bool:
        """Whether the kept grammars are beyond a limit. The caller has the lock."""
        counts = [(len(each.matchers), each.size) for each in self._kept.values()]
        return sum(n for n, _ in counts) > self._most or sum(n * size for n, size in counts) > self._most_bytes

    def _size(self, grammar: Grammar) -> int:
        """The bytes that a compiled grammar takes, from its test. Raises GrammarError."""
        if self._trials is None:
            return BYTES_PER_CHARACTER * len(grammar.text)
        self.tokenizer()
        return self._trials.test(grammar)

    def _made(self, grammar: Grammar) -> LLMatcher:
        """A matcher, made in a thread with more stack than its test had, and with a lower priority than others."""
        tokenizer, made = self.tokenizer(), list[LLMatcher]()

        def make() -> None:
            with contextlib.suppress(AttributeError, OSError):  # only Linux has it for a thread
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            matcher = begun(tokenizer, grammar)
            # The first mask is the largest part of the work for some grammars, and shows one that nothing matches.
            # Copies have it: 64 answers begin at once without a pause.
            mask = np.zeros(self.words, np.int32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            check_matcher(grammar, matcher)
            made.append(matcher)

        try:
            on_stack(ENGINE_STACK, make)
        except Exception:
            raise
        except BaseException as error:  # llguidance's panics are no Exceptions
            raise GrammarError(f"the {grammar.kind} grammar cannot be followed: {in_brief(error)}") from None
        return made[0]

    def _text(self) -> str:
        """The tokenizer as JSON. Raises GrammarError for one that cannot be read."""
        try:
            return self._read()
        except Exception as error:  # the library's own types, as it sees fit
            raise GrammarError(f"this model's tokenizer cannot follow a grammar: {in_brief(error)}") from None

    def _vocabulary(self, text: str) -> Vocabulary:
        return Vocabulary(text, self._vocab_size, self._ends)

    def close(self) -> None:
        """End the test process. Grammars that were not tested are refused from now on."""
        if self._trials is not None:
            self._trials.close()

    def tokenizer(self) -> LLTokenizer:
        """The vocabulary as llguidance has it. Raises GrammarError for a tokenizer that it cannot read."""
        with self._reading:
            if self._tokenizer is None:
                if not self._ends:
                    raise GrammarError("this model names no end-of-sequence token, which an answer by a grammar needs")
                text = self._text()
                if self._trials is not None:
                    with contextlib.suppress(OSError):  # its first test reports it
                        self._trials.begin(self._vocabulary(text))  # it reads the text while we do
                self._tokenizer = read_vocabulary(text, self._vocab_size, self._ends)
            return self._tokenizer
