"""Words that an answer may not have, as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.types import MAX_BAD_WORD_TOKENS
from holdfast.engine.client.text import Text
from holdfast.server.protocol import invalid


def word_tokens(text: Text, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words: of each at the beginning of a text, and after a space.

    The second is left out if it ends with the first, which then forbids the word after a space, too. vLLM leaves it out
    whenever the two have different lengths, so a common word is not forbidden there. Raises ApiError for an empty or a
    too long word.
    """
    found: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        name, bare = f"bad_words[{index}]", word.lstrip()
        first = tuple(text.encode(bare, add_special_tokens=False)) if bare else ()
        if not first:
            raise invalid(f"{name} is {word[:32]!r}, which has no tokens", name)
        spaced = tuple(text.encode(f" {bare}", add_special_tokens=False))
        sequences = [first] if spaced[-len(first) :] == first else [first, spaced]
        longest = max(map(len, sequences))
        if longest > MAX_BAD_WORD_TOKENS:
            raise invalid(f"{name} has {longest} tokens; at most {MAX_BAD_WORD_TOKENS} are taken", name)
        found += sequences
    return tuple(dict.fromkeys(found))
