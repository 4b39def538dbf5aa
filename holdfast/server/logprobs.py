"""Log probabilities in answers: a record per token in chats and responses, columns in completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from holdfast.core.types import TokenLogprobs
from holdfast.engine.client.stream import Delta
from holdfast.engine.client.text import Text

LEAST = -9999.0
"""Value that replaces minus infinity, which JSON cannot express. vLLM uses the same value."""


class TokenRecord(NamedTuple):
    """A token with its log probabilities."""

    token: int
    logprobs: TokenLogprobs | None
    """Log probabilities; None for the first token of a prompt."""


def tokens_with_logprobs(delta: Delta) -> list[TokenRecord]:
    """Return the tokens of a delta that have log probabilities."""
    return [TokenRecord(*pair) for pair in zip(delta.tokens, delta.logprobs, strict=False)]


def echoed(prompt: Sequence[int], text: str, of_prompt: Sequence[TokenLogprobs], delta: Delta, most: int) -> Delta:
    """Return an answer's first delta with the prompt in front: its text, tokens and log probabilities.

    `most` is the number of alternatives to report for each prompt token.
    """
    cut = [TokenLogprobs(own, ids[:most], values[:most]) for own, ids, values in of_prompt]
    logprobs = (None, *cut, *delta.logprobs) if cut or delta.logprobs else ()
    return replace(delta, text=text + delta.text, tokens=(*prompt, *delta.tokens), logprobs=logprobs)


def prompt_records(
    text: Text, prompt: Sequence[int], of_prompt: Sequence[TokenLogprobs], ranks: Sequence[int], most: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each prompt token, its record and its alternatives' records, by id.

    The first token has None. `ranks` has the rank of each of the others; 0 if it is not known, which an engine of an
    older version does not give.
    """
    records: list[dict[str, Any] | None] = [None]
    for token, given, rank in zip(prompt[1:], of_prompt, ranks, strict=True):
        likely = list(zip(given.top_ids[:most], given.top_logprobs, strict=False))
        places = {token: rank or None} | {each: place for place, (each, _) in enumerate(likely, 1)}
        records.append(
            {
                str(each): {
                    "logprob": max(value, LEAST),
                    "rank": places[each],
                    "decoded_token": spelled(text.token_bytes(each)),
                }
                for each, value in dict([(token, given.logprob), *likely]).items()
            }
        )
    return records


def spelled(data: bytes) -> str:
    """Return a token as a string, as in OpenAI's API. Bytes that are not whole characters become escapes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def named(text: Text, token: int) -> str:
    """Return a token as vLLM's `return_tokens_as_token_ids` names it."""
    return f"token_id:{token}"


def written(text: Text, token: int) -> str:
    """Return a token as its text."""
    return spelled(text.token_bytes(token))


Spell = Callable[[Text, int], str]
"""Function that returns a token as a string: `written` or `named`."""


def record(text: Text, token: int, logprob: float, spell: Spell = written) -> dict[str, Any]:
    """Return the record of a token: the token, its bytes and its log probability."""
    return {
        "token": spell(text, token), "bytes": list(text.token_bytes(token)), "logprob": max(logprob, LEAST)
    }  # fmt: skip


def records(
    text: Text, tokens: Iterable[TokenRecord], spell: Spell = written, *, with_own: bool = False
) -> list[dict[str, Any]]:
    """Return the records of the tokens of a chat or a response, each with its most probable or its named tokens.

    With `with_own`, these begin with the token itself, unless it is among them.
    """
    if with_own:
        tokens = [TokenRecord(token, _with_own(token, given)) for token, given in tokens]
    return [
        record(text, token, given.logprob, spell)
        | {"top_logprobs": [record(text, *pair, spell) for pair in zip(given.top_ids, given.top_logprobs, strict=True)]}
        for token, given in tokens
        if given is not None
    ]


def _with_own(token: int, given: TokenLogprobs | None) -> TokenLogprobs | None:
    """Return a token's log probabilities with its own in front of the others', unless it is among them."""
    if given is None or token in given.top_ids:
        return given
    own, ids, values = given
    return TokenLogprobs(own, (token, *ids), (own, *values))


class CompletionLogprobs:
    """The log probability columns of one choice of a completion. `text_offset` continues across deltas."""

    def __init__(self, text: Text, spell: Spell = written) -> None:
        self._text, self._spell = text, spell
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def columns(self, new: Iterable[TokenRecord]) -> dict[str, Any]:
        """Return the columns of the next tokens: strings, log probabilities, alternatives, and text offsets."""
        tokens: list[str] = []
        own: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, given in new:
            data = self._text.token_bytes(token)
            tokens.append(self._spell(self._text, token))
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(data))
            if given is None:
                own.append(None)
                top.append(None)
                continue
            own.append(max(given.logprob, LEAST))
            likely = zip(given.top_ids, given.top_logprobs, strict=True)
            best = {self._spell(self._text, each): max(value, LEAST) for each, value in likely}
            top.append({**best, tokens[-1]: max(given.logprob, LEAST)})
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}
