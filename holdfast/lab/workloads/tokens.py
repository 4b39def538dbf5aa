"""Prompt tokens of a workload: the same in every run, and equal only where a workload says so."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import chain

from holdfast.lab.workloads.values import HASH_BLOCK, Turn


@lru_cache(maxsize=4)
def _base_tokens(vocab_size: int, length: int) -> tuple[int, ...]:
    """`length` random tokens, then the same again. Texts are cut from them. Cached for capacity searches."""
    return tuple(random.Random(0).choices(range(16, vocab_size), k=length)) * 2


class PromptTokens:
    """Token ids for prompts, equal in every run.

    No two turns have equal tokens, except for equal hash ids and for what they have in common.
    """

    BASE = 1 << 16

    def __init__(self, vocab_size: int, salt: str = "") -> None:
        """Tokens lie in [16, vocab_size), because many models use the first ids for control.

        Each `salt` gives other tokens.
        """
        if vocab_size < 64:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 64")
        self._salt = salt
        self._vocabulary = range(16, vocab_size)
        self._base = _base_tokens(vocab_size, self.BASE)
        self._block = lru_cache(maxsize=1 << 14)(lambda block: self._text(f"#{block}", HASH_BLOCK))
        """The tokens of a hash id. Cached, because prefixes occur again and again."""

    def prompt(self, conversation: int | str, index: int, turn: Turn) -> tuple[int, ...]:
        """The new prompt tokens of turn number `index` of a conversation, by its number or a fork's name."""
        if turn.hashes:
            return tuple(chain.from_iterable(map(self._block, turn.hashes)))[: turn.prompt]
        common = self._text(f"common/{turn.common.name}", min(turn.common.tokens, turn.prompt))
        return common + self._text(f"{conversation}/{index}", turn.prompt - len(common))

    def answer(self, conversation: int | str, index: int, turn: Turn) -> tuple[int, ...]:
        """Tokens in place of an answer whose ids are unknown."""
        return self._text(f"{conversation}/{index}/answer", turn.output)

    def _text(self, name: str, length: int) -> tuple[int, ...]:
        """Tokens determined by `name`. The first 12 are drawn from it alone, so that different names differ at once."""
        choose = random.Random(self._salt + name)
        start = choose.randrange(self.BASE)
        first = tuple(choose.choices(self._vocabulary, k=min(length, 12)))
        whole, rest = divmod(length - len(first), self.BASE)
        repeated = self._base[start : start + self.BASE] * whole if whole else ()  # copying the base takes longest
        return first + repeated + self._base[start : start + rest]


class History:
    """The tokens so far of one conversation. They end earlier where a turn replaces the ones before it."""

    def __init__(self, tokens: tuple[int, ...] = ()) -> None:
        """`tokens` come before the first turn."""
        self.tokens = tokens
        self._begins: list[int] = []
        """Number of tokens before each turn that has not been replaced."""

    def ask(self, turn: Turn, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Append a turn's new prompt tokens. Returns its whole prompt."""
        if turn.replaces:
            self.tokens = self.tokens[: self._begins[-turn.replaces]]
            del self._begins[-turn.replaces :]
        self._begins.append(len(self.tokens))
        self.tokens += prompt
        return self.tokens

    def answer(self, tokens: tuple[int, ...]) -> None:
        """Append the answer to the last prompt."""
        self.tokens += tokens
