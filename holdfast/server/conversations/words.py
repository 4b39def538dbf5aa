"""Words of texts, as the index of a search holds them. Knows no database.

Scripts that separate words by spaces are cut into words. Chinese, Japanese, Thai, Lao, Burmese and Khmer are cut into
overlapping pairs of characters, and so are symbols outside ASCII, such as emoji.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct, field
from msgspec.json import decode

MOST_CHARACTERS = 1 << 18
"""Maximum number of characters of one item that are indexed. More would delay the turn that stores the item."""
MOST_WORD = 64
"""Maximum number of characters of a word in the index. Longer words are cut."""
MOST_BEGINNING = 10
"""Maximum number of characters of the beginning of a word that the index finds as fast as a word."""
SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Characters of the scripts that write no spaces between words, as ranges of a regular expression."""
SEPARATORS = r"\s\x00-\x7f\x80-\xbf\u2000-\u206f\u3000-\u303f\ud800-\udfff"
"""Characters that are neither in a word nor a symbol."""
TOKEN = re.compile(
    rf"(?P<word>[^\W{SPACELESS}]+)|[{SPACELESS}]+|[^\w{SEPARATORS}{SPACELESS}]+"  # a word, a run of characters, symbols
)


class Part(Struct):
    """A part of an item's content."""

    text: str = ""


class Said(Struct):
    """Fields of an item that a search reads. Other fields are skipped."""

    role: str = ""
    content: list[Part] = field(default_factory=list)
    output: str | None = None
    arguments: str = ""
    input: str = ""

    def text(self) -> str:
        """Return the whole visible text of the item."""
        return "\n".join(
            [*(part.text for part in self.content), *filter(None, (self.arguments, self.input, self.output))]
        )


def item_text(item: bytes) -> str:
    """Return the visible text of a stored item."""
    return decode(item, type=Said).text()


def title_text(metadata: bytes) -> str:
    """Return the values of a conversation's stored metadata."""
    return "\n".join(decode(metadata, type=dict[str, str]).values())


def words_of(text: str) -> set[str]:
    """Return the words of a text, in lower case."""
    found: set[str] = set()
    for token in TOKEN.finditer(text[:MOST_CHARACTERS].casefold()):
        run = token[0]
        if token["word"]:
            found.add(run[:MOST_WORD])
        else:
            found.update(run[at : at + 2] for at in range(len(run)))
    return found


def query_of(text: str) -> list[str]:
    """Return the words that a text must have to contain `text`. The last one may be the beginning of a longer word.

    The list is empty if `text` has no word.
    """
    tokens = list(TOKEN.finditer(text.casefold()))
    words: list[str] = []
    for token in tokens:
        run = token[0]
        if token["word"]:
            words.append(run[: MOST_BEGINNING if token is tokens[-1] else MOST_WORD])
        else:
            words += [run[at : at + 2] for at in range(max(1, len(run) - (token is tokens[-1])))]
    return list(dict.fromkeys(words[:-1])) + words[-1:]


def joined(words: Iterable[str]) -> str:
    """Return words as one text, for an index that separates words by spaces."""
    return " ".join(sorted(words))
