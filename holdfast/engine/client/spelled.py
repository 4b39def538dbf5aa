"""Keeps text in a chat message that only spells a special token from becoming that token."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, normalizers

BREAK = "\ufdd0\ufdd1"
"""Characters put inside text that only spells a token. Unicode reserves both for internal use.

Tokenizing drops them.
"""
PREFIX = 32
"""Number of characters of a special token that are compared. Text that spells this many gets a BREAK, which is
harmless."""
SLICE = 1 << 16
"""Number of characters that are searched at once. Other threads may run after each slice."""


class Spelled:
    """Escapes special tokens in text that should stay text.

    A tokenizer looks for special tokens first. It finds none that has a BREAK inside. Then its normalizer removes each
    BREAK, so the rest of the tokenizer reads the text as it was written. Special tokens of one character are not
    escaped, nor are added tokens that the tokenizer does not call special.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Build the escapes for a tokenizer. Changes the tokenizer's normalizer."""
        special = {
            token: added
            for token, added in tokenizer.get_added_tokens_decoder().items()
            if added.special and len(added.content) > 1
        }
        self._prefixes = sorted({added.content[:PREFIX] for added in special.values()})
        self._firsts = {prefix[0] for prefix in self._prefixes}
        self._begin = re.compile(
            "|".join(
                f"{re.escape(first)}(?={_any([prefix[1:] for prefix in self._prefixes if prefix[0] == first])})"
                for first in self._firsts
            )
        )
        self._break = BREAK
        if not special:
            return
        own = tokenizer.normalizer
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(BREAK, ""), *([own] if own else [])])
        model = tokenizer.model
        for token, added in special.items():
            if not added.normalized and model.token_to_id(added.content) is None:
                continue
            spelled = self.escape(added.content)
            if token in tokenizer.encode(f"{spelled}a{spelled}\n{spelled}", add_special_tokens=False).ids:
                self._break = " "  # found after normalization, or the model forms it from text
                tokenizer.normalizer = own
                break

    def escape(self, text: str) -> str:
        """The text with a BREAK in each special token, and one at its end if a special token may begin there."""
        if not any(first in text for first in self._firsts):
            return text
        return "".join([self._slice(text[at : at + SLICE]) for at in range(0, len(text), SLICE)])

    def escape_all(self, value: Any) -> Any:
        """A message with all its texts escaped, including those in lists and objects. Raises RecursionError."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, Mapping):
            return {self.escape_all(key): self.escape_all(each) for key, each in value.items()}
        return [self.escape_all(each) for each in value] if isinstance(value, list | tuple) else value

    def _slice(self, text: str) -> str:
        text = self._begin.sub(lambda first: first[0] + self._break, text)
        for end in sorted({len(text), len(text.rstrip())}, reverse=True):  # a template may strip the text
            if any(self._is_prefix(text[begin:end]) for begin in range(max(0, end - PREFIX), end)):
                text = text[:end] + self._break + text[end:]
        return text

    def _is_prefix(self, text: str) -> bool:
        at = bisect_left(self._prefixes, text)
        return at < len(self._prefixes) and self._prefixes[at].startswith(text)


def _any(words: Sequence[str]) -> str:
    """A regular expression for the beginning of any of the words. Its time does not depend on their number."""
    if "" in words:
        return ""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[0], []).append(word[1:])
    return "(?:" + "|".join(re.escape(letter) + _any(rest) for letter, rest in rests.items()) + ")"
