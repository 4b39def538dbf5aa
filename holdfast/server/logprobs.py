"""Log probabilities on the wire: one record for each token in chats and responses, columns in completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from holdfast.core.types import TokenLogprobs
from holdfast.engine.client.client import Delta
from holdfast.engine.client.text import Text

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have. The same as in vLLM."""


class ToldToken(NamedTuple):
    """A token with its log probabilities."""

    token: int
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt."""


def told_tokens(delta: Delta) -> list[ToldToken]:
    """The tokens of a delta whose log probabilities are told."""
    return [ToldToken(*pair) for pair in zip(delta.tokens, delta.logprobs, strict=False)]


def echoed(prompt: Sequence[int], text: str, of_prompt: Sequence[TokenLogprobs], delta: Delta, most: int) -> Delta:
    """The first delta of an answer that begins with its prompt: the prompt's text, tokens and what is told of them.

    `most` is the number of alternatives to tell.
    """
    cut = [TokenLogprobs(own, ids[:most], values[:most]) for own, ids, values in of_prompt]
    logprobs = (None, *cut, *delta.logprobs) if cut or delta.logprobs else ()
    return replace(delta, text=text + delta.text, tokens=(*prompt, *delta.tokens), logprobs=logprobs)


def prompt_records(
    text: Text, prompt: Sequence[int], told: Sequence[TokenLogprobs], most: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt, it and the most probable ones by id; None for the first.

    The rank of a token that is not among those is not known.
    """
    records: list[dict[str, Any] | None] = [None]
    for token, given in zip(prompt[1:], told, strict=True):
        likely = list(zip(given.top_ids[:most], given.top_logprobs, strict=False))
        ranks = {each: rank for rank, (each, _) in enumerate(likely, 1)}
        records.append(
            {
                str(each): {
                    "logprob": max(value, LEAST),
                    "rank": ranks.get(each),
                    "decoded_token": spelled(text.token_bytes(each)),
                }
                for each, value in dict([(token, given.logprob), *likely]).items()
            }
        )
    return records


def spelled(data: bytes) -> str:
    """A token as a string, as in OpenAI's API: bytes that are no whole characters are written out."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def record(text: Text, token: int, logprob: float) -> dict[str, Any]:
    """A token, its bytes and its log probability."""
    data = text.token_bytes(token)
    return {"token": spelled(data), "bytes": list(data), "logprob": max(logprob, LEAST)}


def records(text: Text, told: Iterable[ToldToken]) -> list[dict[str, Any]]:
    """The tokens of a chat or a response, each with the most probable ones at its place."""
    return [
        record(text, token, given.logprob)
        | {"top_logprobs": [record(text, *pair) for pair in zip(given.top_ids, given.top_logprobs, strict=True)]}
        for token, given in told
        if given is not None
    ]


class CompletionLogprobs:
    """The columns of one choice of completions: `text_offset` goes on from what was written before."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def columns(self, told: Iterable[ToldToken]) -> dict[str, Any]:
        """The next tokens: their strings, log probabilities, most probable alternatives, and places in the text."""
        tokens: list[str] = []
        own: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, given in told:
            data = self._text.token_bytes(token)
            tokens.append(spelled(data))
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(data))
            if given is None:
                own.append(None)
                top.append(None)
                continue
            own.append(max(given.logprob, LEAST))
            likely = zip(given.top_ids, given.top_logprobs, strict=True)
            best = {spelled(self._text.token_bytes(each)): max(value, LEAST) for each, value in likely}
            top.append({**best, tokens[-1]: max(given.logprob, LEAST)})
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}
