"""Sampling: the part of a request's parameters that reaches the device."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.core.types import Grammar, SamplingParams, ThinkingBudget


@dataclass(frozen=True, slots=True)
class Shaping:
    """How a sequence's logits are changed before a draw. Fields with names of SamplingParams have the same meaning."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and the number that is added to the logit of each."""
    prompt: int = 0
    """Number of tokens of the prompt."""
    ends: tuple[int, ...] = ()
    """Tokens that may not be drawn before the answer has `min_tokens`."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer may not have, the longest first."""
    allowed: tuple[int, ...] = ()
    """The only tokens that may be drawn; empty: all."""
    thinking: ThinkingBudget | None = None

    @property
    def penalises(self) -> bool:
        """Whether it has a penalty."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def counts(self) -> bool:
        """Whether it depends on the tokens so far."""
        return self.penalises or self.thinking is not None or any(len(word) > 1 for word in self.bad_words[:1])

    @property
    def history_start(self) -> int:
        """The position of the first token that the device keeps for it. Only penalties read the prompt.

        The prompt's last token is kept as well, so that a history is never empty.
        """
        return 0 if self.penalises else max(0, self.prompt - 1)

    @property
    def is_neutral(self) -> bool:
        """Whether it changes nothing."""
        banned = self.bad_words or self.allowed or (self.min_tokens and self.ends)
        return not (self.counts or self.min_p > 0 or self.bias or banned)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are drawn: the part of SamplingParams that reaches the device.

    The fields of SAMPLING_COLUMNS are columns of every step's inputs there. The other fields are used by fewer
    requests, and reach the device only in the steps that need them.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    logprobs: int | None = None
    """Number of alternatives to report with the log probability of each token; None: report nothing."""
    shaping: Shaping | None = None
    """Changes to the logits; None: none."""
    grammar: Grammar | None = None
    """Grammar that the answer must match; None: any answer."""
    embed: bool = False
    """Whether to give the hidden state that the logits come from."""
    named: tuple[int, ...] = ()
    """Tokens to report with the log probability of each token, after the alternatives; `logprobs` is then a number."""

    @classmethod
    def of(cls, params: SamplingParams, seed: int, *, prompt: int = 0, ends: abc.Collection[int] = ()) -> Sampling:
        """The record of one request, with its number of prompt tokens, and the tokens that end it.

        `seed` is the request's own, or one drawn for it.
        """
        shaping = Shaping(
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            min_p=params.min_p,
            min_tokens=params.min_tokens,
            bias=params.logit_bias,
            prompt=prompt,
            ends=tuple(sorted(ends)),
            bad_words=tuple(sorted(params.bad_words, key=len, reverse=True)),
            allowed=params.allowed_token_ids,
            thinking=params.thinking,
        )
        told = None if shaping.is_neutral else shaping
        drawn = params.temperature, params.top_k, params.top_p
        named = params.logprob_token_ids
        return cls(*drawn, seed, 0 if named else params.logprobs, told, params.grammar, params.embed, named)

    @property
    def asks(self) -> bool:
        """Whether it asks for more than a token drawn from the model's logits."""
        wishes = self.logprobs is not None or self.shaping is not None
        return wishes or self.grammar is not None or self.embed

    @property
    def counts(self) -> bool:
        """Whether the draw depends on the tokens so far."""
        return self.shaping is not None and self.shaping.counts

    @property
    def skips(self) -> bool:
        """Whether tokens that its grammar forces may be appended without a draw: nothing else is reported of them."""
        return self.grammar is not None and self.logprobs is None and not self.counts

    @property
    def columns(self) -> tuple[float, int, float, int]:
        """The values of SAMPLING_COLUMNS."""
        return self.temperature, self.top_k, self.top_p, self.seed


SAMPLING_COLUMNS: dict[str, type[float] | type[int]] = {"temperature": float, "top_k": int, "top_p": float, "seed": int}
"""The columns of a step's sampled rows, in the order of `Sampling.columns`: float32 for a float, int64 for an int."""


class History(NamedTuple):
    """The known tokens of a row whose draw depends on them (`Shaping.counts`), from `Shaping.history_start` on."""

    row: int
    tokens: tuple[int, ...]
