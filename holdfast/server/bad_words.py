"""Words that an answer may not have, as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.types import MAX_BAD_WORD_TOKENS
from holdfast.engine.client.text import Text
from holdfast.server.protocol import invalid


def word_tokens(text: Text, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words: of each at the beginning of a text, and after a space, as in vLLM.

    The second is left out if it is longer or begins with the same token: then a space is a token of its own, and the
    first sequence forbids the word after it, too. Raises ApiError for an empty or a too long word.
    """
    found: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        name, bare = f"bad_words[{index}]", word.lstrip()
        first = tuple(text.encode(bare, add_special_tokens=False)) if bare else ()
        if not first:
            raise invalid(f"{name} is {word[:32]!r}, which has no tokens", name)
        if len(first) > MAX_BAD_WORD_TOKENS:
            raise invalid(f"{name} has {len(first)} tokens; at most {MAX_BAD_WORD_TOKENS} are taken", name)
        spaced = tuple(text.encode(f" {bare}", add_special_tokens=False))
        found.append(first)
        if len(spaced) == len(first) and spaced[0] != first[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(found))
