"""Matchers: where each row's answer stands in its grammar, which tokens may come next, and which must."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from holdfast.lm.grammar.compiler import GrammarCompiler, mask_threads
from holdfast.lm.grammar.rows import Answer, ConstrainedRow, Forced
from holdfast.lm.grammar.shares import Shares
from holdfast.lm.types import PENDING


class _State:
    """A row's matcher, the number of its lexer, the position of the next token that it reads, and whether it may have
    no choice there."""

    __slots__ = ("failed", "forced", "lexer", "matcher", "position", "slow", "tenant")

    def __init__(self, matcher: LLMatcher, lexer: int, position: int, tenant: str) -> None:
        self.matcher, self.lexer, self.position, self.forced = matcher, lexer, position, True
        self.tenant, self.slow = tenant, 0.0
        self.failed = False
        """Whether the matcher is known to have given up, or was too slow."""


class Matchers:
    """The matchers of an executor's rows.

    One thread calls `masks` and then `read` for each step. Several steps may have been read before `forced` is asked of
    one; it is cheapest once the next step's masks are there.
    """

    def __init__(self, compiler: GrammarCompiler, threads: int | None = None) -> None:
        """`threads` compute masks at the same time; by default half of the machine's cores."""
        self._compiler = compiler
        self._threads = threads or mask_threads()
        self._rows: dict[int, _State] = {}
        self._shares = Shares(self._threads)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._threads)  # begins its threads

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        return self._compiler.words

    def masks(self, rows: Sequence[ConstrainedRow], answers: Sequence[Answer], into: npt.NDArray[np.int32]) -> None:
        """Write which tokens each row of a step may draw, [R, words], a bit each. The lowest bit is the first token.

        `answers` are those of rows that have a new sequence. The tokens that rows drew in earlier steps have been read.
        """
        grammars = {each.row: each.sampling.grammar for each in rows if each.sampling.grammar is not None}
        self._shares.begin()
        for answer in answers:
            begun = self._compiler.begin(grammars[answer.row])
            state = self._rows[answer.row] = _State(*begun, answer.start, answer.tenant)
            self._consume(state, answer.tokens)
        for each in rows:
            state = self._rows[each.row]
            self._consume(state, each.tokens[state.position - each.start :] if state.position < each.stop else ())
            assert state.position == each.stop, f"row {each.row} is at {state.position}, and {each.stop} is drawn"
        into[:] = 0
        states = [self._rows[each.row] for each in rows]
        self._shares.each(
            states,
            lambda part: self._executor.unsafe_compute_mask_ptr(
                [(states[index].matcher, index) for index in part], into.ctypes.data, 4 * self.words, len(rows)
            ),
        )
        for index, each in enumerate(rows):
            shaping = each.sampling.shaping
            if shaping is not None and each.stop - shaping.prompt < shaping.min_tokens and shaping.ends:
                self._forbid(into[index].view(np.uint32), shaping.ends)
        allowed = np.bitwise_count(into).sum(axis=1)
        for index, each in enumerate(rows):
            state = self._rows[each.row]
            state.forced = bool(allowed[index] <= 1)
            if state.forced and not state.failed and state.matcher.is_error():
                state.failed = True
                self._compiler.discard(grammars[each.row], state.lexer)
            if not allowed[index]:  # the matcher has given up
                self._allow(into[index].view(np.uint32), self._compiler.ends)

    def read(self, rows: Sequence[ConstrainedRow], tokens: Sequence[int]) -> None:
        """Read the tokens that a step's rows have drawn."""
        read = []
        for each in rows:
            if (state := self._rows[each.row]).position == each.stop:
                state.position, state.forced = each.stop + 1, True
                if not (state.failed or state.matcher.is_stopped()):
                    read.append((state, tokens[each.at]))
        self._shares.each(
            [state for state, _ in read],
            lambda part: self._executor.consume_token_par([(read[index][0].matcher, read[index][1]) for index in part]),
        )

    def forced(self, rows: Sequence[ConstrainedRow]) -> tuple[Forced, ...]:
        """Tokens that must follow those that a step's rows have drawn, where rows may skip draws.

        Rows that have gone on meanwhile are left out.
        """
        found = []
        for each in rows:
            state = self._rows[each.row]
            if state.forced and not state.failed and state.position == each.stop + 1 and each.sampling.skips:
                follow = tuple(state.matcher.compute_ff_tokens())
                if follow:
                    found.append(Forced(each.place, follow))
        return tuple(found)

    def _consume(self, state: _State, tokens: Sequence[int]) -> None:
        """Advance by tokens. A matcher that has stopped, or has given up, stays as it is."""
        for token in tokens:
            assert token != PENDING
            if not (state.failed or state.matcher.is_stopped()):
                self._shares.one(state, partial(state.matcher.consume_token, token))
            state.position += 1

    def _forbid(self, mask: npt.NDArray[np.uint32], ends: Sequence[int]) -> None:
        """Take end tokens out of a mask, unless nothing else is left."""
        before = mask.copy()
        for token in ends:
            mask[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))
        if not mask.any():
            mask[:] = before

    def _allow(self, mask: npt.NDArray[np.uint32], tokens: Sequence[int]) -> None:
        for token in tokens:
            mask[token >> 5] |= np.uint32(1 << (token & 31))
