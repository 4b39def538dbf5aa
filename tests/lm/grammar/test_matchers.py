"""Matchers: the masks of rows follow their answers, whatever became of the rows in between."""

from __future__ import annotations

import random
import re
import time

import numpy as np
import numpy.typing as npt
import pytest

from holdfast.core.types import Grammar, SamplingParams
from holdfast.engine.client.text import Text
from holdfast.lm.grammar.compiler import GrammarCompiler
from holdfast.lm.grammar.matchers import Matchers
from holdfast.lm.grammar.rows import Answer, ConstrainedRow, Forced
from holdfast.lm.types import PENDING, Sampling
from tests.lm.grammar.conftest import END, VOCAB
from tests.tokenizers_made import byte_level

PROMPT = 7
AMBIGUOUS = (
    f'start: "{"x" * 120}" a\na: a a | a a a | a a a a | "a" | b | c\nb: a b | b a | "a" | a a a | b a b | c a\n'
    'c: a b a | b b a | "a" | c c | c a b'
)
"""A grammar that is slow after 120 letters, where its test does not come."""


def sampling(grammar: Grammar, **params: object) -> Sampling:
    given = SamplingParams(grammar=grammar, max_tokens=99, **params)  # type: ignore[arg-type]
    return Sampling.of(given, 0, prompt=PROMPT, ends=(END,))


def first(row: int, record: Sampling, at: int = 0) -> tuple[ConstrainedRow, Answer]:
    """A row whose prompt is computed, and whose answer begins."""
    return ConstrainedRow(at, row, 0, PROMPT, (9,) * PROMPT, record, at), Answer(row, PROMPT, ())


def allowed(matchers: Matchers, rows: list[ConstrainedRow], answers: list[Answer]) -> list[list[int]]:
    """The tokens that each row may draw."""
    into: npt.NDArray[np.int32] = np.full((len(rows), matchers.words), 77, np.int32)
    matchers.masks(rows, answers, into)
    bits = np.unpackbits(into.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(each).tolist() for each in bits]


def test_each_row_draws_by_its_own_grammar_to_its_end(compiler: GrammarCompiler, text: Text) -> None:
    matchers, choose = Matchers(compiler, 1), random.Random(0)
    records = [sampling(Grammar("regex", pattern)) for pattern in ("[a-c]{5}", "(foo|bar)-[0-9]+x", "yes|no")]
    begun = [first(row, record, at) for at, (row, record) in enumerate(zip((4, 0, 2), records, strict=True))]
    rows, answers = [row for row, _ in begun], [answer for _, answer in begun]
    drawn: list[list[int]] = [[] for _ in rows]
    for _ in range(60):
        choices = allowed(matchers, rows, answers)
        tokens = [choose.choice(each) for each in choices]
        for own, token in zip(drawn, tokens, strict=True):
            own.append(token)
        matchers.read(rows, tokens)
        rows = [each._replace(start=each.stop, stop=each.stop + 1, tokens=(PENDING,)) for each in rows]
        answers = []
    for own, pattern in zip(drawn, ("[a-c]{5}", "(foo|bar)-[0-9]+x", "yes|no"), strict=True):
        assert END in own or pattern.startswith("(")
        if END in own:
            assert set(own[own.index(END) :]) == {END}, "nothing but ends after the end"
            assert re.fullmatch(pattern, text.decode(own[: own.index(END)]))


def test_what_must_follow_is_told_and_is_all_that_the_mask_allows(compiler: GrammarCompiler, text: Text) -> None:
    matchers = Matchers(compiler, 1)
    row, answer = first(3, sampling(Grammar("regex", "[ab] is the one and only answer")))
    (choices,) = allowed(matchers, [row], [answer])
    token = next(each for each in choices if text.decode([each]) == "a")
    matchers.read([row], [token])
    (forced,) = matchers.forced([row])
    assert forced.at == 0 and text.decode(forced.tokens).endswith("only answer")
    following = row._replace(start=PROMPT, stop=PROMPT + 1, tokens=(PENDING,))
    assert allowed(matchers, [following], []) == [[forced.tokens[0]]]
    assert matchers.forced([row]) == (forced,), "also once the next masks are there"
    matchers.read([following], [forced.tokens[0]])
    assert matchers.forced([following]) == (Forced(0, forced.tokens[1:]),)
    assert matchers.forced([row]) == (), "it has gone on"
    # The scheduler continues after all of them. The segment has the tokens that were not drawn.
    stop = PROMPT + 1 + len(forced.tokens)
    behind = row._replace(start=PROMPT + 1, stop=stop, tokens=forced.tokens)
    assert allowed(matchers, [behind], []) == [[END]]


def test_what_must_follow_is_told_of_the_segment_where_drafts_take_places_before_it(compiler: GrammarCompiler) -> None:
    matchers = Matchers(compiler, 1)
    row, answer = first(3, sampling(Grammar("lark", 'start: "the only answer"')), at=4)
    row = row._replace(place=1)
    allowed(matchers, [row], [answer])
    begin = compiler.tokenizer().tokenize_str("the")
    matchers.read([row], [0, 0, 0, 0, begin[0]])
    assert [each.at for each in matchers.forced([row])] == [1]


def test_nothing_is_told_of_a_row_that_must_draw_each_token(compiler: GrammarCompiler) -> None:
    matchers = Matchers(compiler, 1)
    row, answer = first(0, sampling(Grammar("regex", "the one and only"), logprobs=0))
    ((token,),) = allowed(matchers, [row], [answer])
    matchers.read([row], [token])
    assert matchers.forced([row]) == ()


def test_a_row_with_another_sequence_begins_where_that_one_stands(compiler: GrammarCompiler, text: Text) -> None:
    matchers = Matchers(compiler, 1)
    record = sampling(Grammar("lark", 'start: "one two three"'))
    row, answer = first(1, record)
    allowed(matchers, [row], [answer])
    known = tuple(compiler.tokenizer().tokenize_str("one two"))
    stop = PROMPT + len(known)
    resumed = ConstrainedRow(0, 1, 0, stop, (9,) * PROMPT + known, record, 0)
    (choices,) = allowed(matchers, [resumed], [Answer(1, PROMPT, known)])
    assert all(text.decode([each]).startswith(" ") for each in choices)
    matchers.read([row], [5])  # a late result of the sequence before
    assert matchers.forced([row]) == ()
    assert allowed(matchers, [resumed], []) == [choices]


def test_min_tokens_puts_the_end_off_unless_nothing_else_is_left(compiler: GrammarCompiler) -> None:
    matchers = Matchers(compiler, 1)
    rows, answers = [], []
    for at, (pattern, least) in enumerate((("a*", 0), ("a*", 5), ("", 5))):
        grammar = Grammar("lark", 'start: ""') if not pattern else Grammar("regex", pattern)
        row, answer = first(at, sampling(grammar, min_tokens=least), at)
        rows.append(row)
        answers.append(answer)
    plain, later, empty = allowed(matchers, rows, answers)
    assert END in plain and END not in later and set(plain) - {END} == set(later)
    assert empty == [END]


def test_min_tokens_counts_the_tokens_of_the_answer_alone(compiler: GrammarCompiler) -> None:
    least = 3
    record = sampling(Grammar("regex", "a*"), min_tokens=least)
    a = compiler.tokenizer().tokenize_str("a")[0]
    for written in range(least + 2):
        known = (a,) * written
        row = ConstrainedRow(0, 0, 0, PROMPT + written, (9,) * PROMPT + known, record, 0)
        (choices,) = allowed(Matchers(compiler, 1), [row], [Answer(0, PROMPT, known)])
        # The token that is drawn is number `written` + 1, and as the end it would not count.
        assert (END in choices) == (written >= least), f"{written} tokens are written"


def test_min_tokens_of_one_row_is_not_that_of_its_neighbours(compiler: GrammarCompiler) -> None:
    matchers, grammar = Matchers(compiler, 1), Grammar("regex", "a*")
    begun = [first(at, sampling(grammar, min_tokens=least), at) for at, least in enumerate((2, 0, 1))]
    choices = allowed(matchers, [row for row, _ in begun], [answer for _, answer in begun])
    assert [END in each for each in choices] == [False, True, False]


def test_a_request_that_wears_out_its_lexer_spoils_no_later_one(monkeypatch: pytest.MonkeyPatch, text: Text) -> None:
    monkeypatch.setattr("holdfast.lm.grammar.sources.LEXER_STATES", 60)
    compiler = GrammarCompiler(byte_level().to_str, 330, (END,), tested=True)
    grammar, letters = Grammar("regex", "[ab]*a[ab]{20}"), compiler.tokenizer().tokenize_str("ab")
    record, choose = sampling(grammar), random.Random(0)

    def answered(matchers: Matchers, most: int) -> int:
        """Tokens until the matcher gives up."""
        row, answer = first(0, record)
        answers = [answer]
        for at in range(most):
            (choices,) = allowed(matchers, [row], answers)
            if choices == [END]:
                return at
            token = choose.choice(letters)
            matchers.read([row], [token])
            row, answers = row._replace(start=row.stop, stop=row.stop + 1, tokens=(PENDING,)), []
        return most

    matchers = Matchers(compiler, 1)
    assert 1 < answered(matchers, 500) < 500
    assert answered(matchers, 3) == 3


def test_a_matcher_that_has_given_up_ends_the_answer(compiler: GrammarCompiler) -> None:
    matchers = Matchers(compiler, 1)
    row, answer = first(0, sampling(Grammar("regex", "abc")))
    allowed(matchers, [row], [answer])
    matchers.read([row], [VOCAB - 1])  # not allowed
    following = row._replace(start=PROMPT, stop=PROMPT + 1, tokens=(PENDING,))
    assert allowed(matchers, [following], []) == [[END]]


def test_slow_answers_of_a_tenant_end_before_they_hold_up_a_step_and_another_goes_on(
    compiler: GrammarCompiler, text: Text
) -> None:
    slow, quick = sampling(Grammar("lark", AMBIGUOUS)), sampling(Grammar("regex", "[a-z]+"))
    matchers, longest = Matchers(compiler, 1), 0.0
    begun = [first(at, slow, at) for at in range(24)] + [first(24, quick, 24)]
    rows, answers = [row for row, _ in begun], [a._replace(tenant=str(a.row < 24)) for _, a in begun]
    (x,), (letter,) = compiler.tokenizer().tokenize_str("x"), compiler.tokenizer().tokenize_str("a")
    for at in range(150):
        before = time.process_time()
        choices = allowed(matchers, rows, answers)
        matchers.read(rows, [x if at < 120 else letter] * len(rows))
        longest = max(longest, time.process_time() - before)
        assert letter in choices[24]
        rows, answers = [row._replace(start=row.stop, stop=row.stop + 1, tokens=(PENDING,)) for row in rows], []
    assert choices[:24].count([END]) > 12
    assert longest < 1.0  # and seconds if every mask is written
