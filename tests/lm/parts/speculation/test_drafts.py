"""Drafters against a search through the whole text."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.types import Identity
from holdfast.lm.parts.speculation import drafts
from holdfast.lm.parts.speculation.drafts import (
    CANDIDATES,
    IDENTITIES,
    LONGEST,
    NGRAM,
    OWN_TOKENS,
    PAST_TOKENS,
    PENDING_TOKENS,
    Drafter,
    Matcher,
    NgramDrafter,
    SuffixDrafter,
)

NOBODY, SOMEBODY = Identity(), Identity(tenant="somebody")
FEW = st.lists(st.integers(0, 2), max_size=80)


def noted(tokens: list[int], capacity: int = 256) -> Matcher:
    matcher = Matcher(capacity)
    matcher.extend(tokens)
    return matcher


def matches(text: list[int], end: list[int], *, own: bool) -> list[tuple[int, int]]:
    """Length and position of the last CANDIDATES places in a text that match an end, the latest first."""

    def length(at: int) -> int:
        most = min(at + 1, len(end), LONGEST)
        return next((count for count in range(most) if text[at - count] != end[-1 - count]), most)

    places = ((length(at), at) for at in reversed(range(len(text) - own)))
    return list(islice((place for place in places if place[0] >= NGRAM), CANDIDATES))


def repeated(text: list[int], at: int, most: int) -> tuple[int, ...]:
    """The tokens after a place; at the end of the text they repeat."""
    text = list(text)
    for step in range(most):
        text.append(text[at + 1 + step])
    return tuple(text[at + 1 : at + 1 + most])


def propose(drafter: Drafter, tokens: list[int], most: int, identity: Identity = NOBODY) -> tuple[int, ...]:
    own = drafter.begin(1000)
    own.extend(tokens)
    return drafter.propose(own, identity, most)


def indexed(*answers: list[int], identity: Identity = NOBODY) -> SuffixDrafter:
    drafter = SuffixDrafter()
    for answer in answers:
        drafter.end(identity, answer)
    while drafter.index(7):
        pass
    return drafter


@given(FEW, st.integers(1, 12))
def test_an_ngram_is_followed_as_when_it_came_last(tokens: list[int], most: int) -> None:
    found = matches(tokens, tokens, own=True)
    assert propose(NgramDrafter(), tokens, most) == (repeated(tokens, found[0][1], most) if found else ())


@given(FEW, st.integers(1, 12))
def test_a_suffix_is_followed_as_where_most_of_it_matches(tokens: list[int], most: int) -> None:
    found = matches(tokens, tokens, own=True)
    best = max(found, key=lambda place: place[0], default=None)  # the latest of the longest
    assert propose(SuffixDrafter(), tokens, most) == (repeated(tokens, best[1], most) if best else ())


@given(FEW, FEW, st.integers(1, 12))
def test_an_earlier_answer_is_followed_where_it_matches_longer(answer: list[int], tokens: list[int], most: int) -> None:
    own, past = matches(tokens, tokens, own=True), matches(answer, tokens, own=False) if len(answer) > NGRAM else []
    longest, at = max(own, key=lambda place: place[0], default=(0, -1))
    other, place = max(past, key=lambda place: place[0], default=(0, -1))
    expected = repeated(tokens, at, most) if longest else ()
    if other > longest:
        expected = tuple(answer[place + 1 : place + 1 + most])
    assert propose(indexed(answer), tokens, most) == expected


@given(st.lists(st.integers(0, 3), min_size=NGRAM, max_size=300))
def test_a_matcher_finds_only_what_it_still_keeps(tokens: list[int]) -> None:
    matcher = noted(tokens, 32)
    length, at = matcher.find(matcher, longest=True)
    kept = tokens[-32:]
    if at >= 0:
        start = at - (len(tokens) - len(kept))
        assert start - length + 1 >= 0 and kept[start - length + 1 : start + 1] == kept[-length:]
        assert matcher.follow(at, 5) == repeated(kept, start, 5)
    else:
        assert not matches(kept, kept, own=True)


def test_tokens_in_pieces_are_noted_as_all_at_once() -> None:
    tokens = [random.Random(1).randrange(5) for _ in range(200)]
    whole, pieces = noted(tokens, 64), Matcher(64)
    for token in tokens:
        pieces.extend([token])
    assert whole.find(whole, longest=True) == pieces.find(pieces, longest=True)


def test_nobody_is_told_what_others_were_answered() -> None:
    drafter = indexed([1, 2, 3, 4, 5], identity=SOMEBODY)
    assert propose(drafter, [1, 2, 3], 2, SOMEBODY) == (4, 5)
    assert propose(drafter, [1, 2, 3], 2) == ()


def test_answers_are_not_kept_where_nothing_is_shared() -> None:
    drafter = SuffixDrafter(sharing=False)
    drafter.end(NOBODY, [1, 2, 3, 4, 5])
    assert drafter.index(100) == 0
    assert propose(drafter, [1, 2, 3], 2) == ()


def test_a_guess_ends_with_the_answer_that_it_comes_from() -> None:
    assert propose(indexed([1, 2, 3, 4], [5, 6, 7, 8]), [1, 2, 3], 5) == (4,)


def test_a_step_adds_no_more_of_the_answers_than_it_may() -> None:
    drafter = SuffixDrafter()
    drafter.end(NOBODY, list(range(10)))
    drafter.end(NOBODY, list(range(20, 30)))
    assert [drafter.index(8) for _ in range(4)] == [8, 8, 4, 0]
    assert propose(drafter, [22, 23, 24], 2) == (25, 26)
    assert propose(drafter, [5, 6, 7], 3) == (8, 9), "the rest of an answer follows its beginning"


def test_memory_is_bounded_by_tokens_and_by_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "PAST_TOKENS", 64)
    names = [Identity(tenant=str(number)) for number in range(IDENTITIES + 3)]
    drafter = SuffixDrafter()
    for name in names:
        drafter.end(name, [1, 2, 3, 4, 5])
        drafter.index(100)
    assert [bool(propose(drafter, [1, 2, 3], 1, name)) for name in names] == [False] * 3 + [True] * IDENTITIES
    drafter.end(names[-1], [*range(100, 180)])
    drafter.index(1000)
    assert propose(drafter, [1, 2, 3], 1, names[-1]) == ()
    assert propose(drafter, [170, 171, 172], 1, names[-1]) == (173,)


def test_a_drafter_goes_on_learning_after_more_answers_than_may_wait_at_once() -> None:
    drafter = SuffixDrafter()
    for _ in range(3):
        drafter.end(NOBODY, [7] * PENDING_TOKENS)
        while drafter.index(1000):
            pass
    drafter.end(NOBODY, [1, 2, 3, 4, 5])
    assert drafter.index(100) == 5
    assert propose(drafter, [1, 2, 3], 2) == (4, 5)


def test_the_identity_that_was_used_longest_ago_is_forgotten_first() -> None:
    names = [Identity(tenant=str(number)) for number in range(IDENTITIES + 1)]
    drafter = SuffixDrafter()
    for name in (*names[:-1], names[0], names[-1]):
        drafter.end(name, [1, 2, 3, 4, 5])
        drafter.index(100)
    known = [bool(propose(drafter, [1, 2, 3], 1, name)) for name in names]
    assert known == [True, False, *[True] * (IDENTITIES - 1)]


def test_of_a_long_sequence_only_its_last_tokens_are_kept() -> None:
    phrase = [1, 2, 3, 4]
    for filler, found in ((100, True), (OWN_TOKENS, False)):
        tokens = [*phrase, *(10 + number for number in range(filler)), *phrase[:3]]
        own = NgramDrafter().begin(1 << 20)
        own.extend(tokens)
        assert (NgramDrafter().propose(own, NOBODY, 1) == (4,)) == found


def test_answers_that_come_faster_than_they_are_added_are_left_out() -> None:
    drafter = SuffixDrafter()
    for _ in range(3):
        drafter.end(NOBODY, [7] * (PAST_TOKENS // 2))
    assert drafter.index(10 * PAST_TOKENS) == PAST_TOKENS
