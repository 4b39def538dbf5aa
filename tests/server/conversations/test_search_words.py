"""Words of texts and of searches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.server.conversations.words import MOST_BEGINNING, MOST_CHARACTERS, query_of, words_of

ANY = st.text(
    st.one_of(st.sampled_from("abÄß_1 -.\n中国語ไทย🎉\u0301"), st.characters(exclude_categories=["Cs"])), max_size=30
)


def matches(text: str, wanted: str) -> bool:
    """Whether an index that holds the words of `text` finds `wanted`."""
    *whole, last = query_of(wanted)
    words = words_of(text)
    return words.issuperset(whole) and any(word.startswith(last) for word in words)


@given(before=ANY, wanted=ANY, after=ANY)
def test_a_text_matches_whatever_it_contains_from_the_beginning_of_a_word(before: str, wanted: str, after: str) -> None:
    if query_of(wanted):
        assert matches(f"{before} {wanted}{after}", wanted)
        assert matches(f"{before} {wanted}{after}".upper(), wanted)


@pytest.mark.parametrize(
    ("text", "wanted", "found"),
    [
        ("The needle is here", "need", True),
        ("The needle is here", "eedle", False),
        ("The needle is here", "needle i", True),
        ("The needle is here", "need is", False),
        ("naïve Straße", "STRASSE", True),
        ("我在北京", "在北", True),
        ("我在北京", "京", True),
        ("我在北京", "北在", False),
        ("我在北京 today", "北京 to", True),
        ("ok🎉🚀", "🚀", True),
        ("snake_case", "snake_", True),
        ("x" * 200, "x" * 200, True),
    ],
)
def test_a_search_finds_beginnings_of_words_and_pairs_of_characters(text: str, wanted: str, found: bool) -> None:
    assert matches(text, wanted) == found


@pytest.mark.parametrize("wanted", ["", "->", ' " ', "...", "…", "。"])
def test_a_text_of_punctuation_has_no_words(wanted: str) -> None:
    assert query_of(wanted) == [] and words_of(wanted) == set()


def test_the_work_for_a_text_is_limited() -> None:
    text = "a " * (MOST_CHARACTERS // 2) + "late"
    assert words_of(text) == {"a"}
    assert query_of("conversationalist") == ["conversationalist"[:MOST_BEGINNING]]
    assert query_of("在北京") == ["在北", "北京"], "the last character alone would match much more"
