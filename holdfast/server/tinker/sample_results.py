"""Sampled sequences as they are collected from an answer, and the protobuf message that clients get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.types import FinishReason, TokenLogprobs
from holdfast.engine.client.stream import Delta
from holdfast.server.tinker.protos import FLOAT32, LENGTH, STOP, messages
from holdfast.server.tinker.sample_requests import PromptTargets

NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""Numbers in a place without an alternative. The SDK knows them."""


@dataclass
class Sampled:
    """One sampled sequence, with the log probability of each of its tokens under the model's own distribution.

    A token that ends the sequence belongs to it, as do the tokens of a stop string.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt's tokens from the second one on, if they are asked for."""
    reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """Add the next part of the answer."""
        self.tokens += delta.tokens
        self.logprobs += [each for each in delta.logprobs if each is not None]
        self.prompt += delta.prompt_logprobs
        if delta.end_logprobs is not None:
            self.logprobs.append(delta.end_logprobs)
        self.reason = delta.finish_reason or self.reason


def sample_response(
    sampled: Sequence[Sampled],
    *,
    prompt_tokens: int,
    cached_tokens: int,
    alternatives: int,
    prompt_alternatives: int | None,
    last: int | None,
    targets: PromptTargets | None = None,
) -> bytes:
    """Return a SampleResponse.

    `alternatives` and `prompt_alternatives` are the numbers of alternatives of sampled and of prompt tokens. The
    prompt's log probabilities are left out if the latter is None. `last` is the number of prompt tokens at the end that
    they are wanted for; None: all but the first, which follows nothing. `targets` are the tokens that were named for
    places of the prompt.
    """
    import numpy as np  # imported where it is needed, because the server starts without it

    response = messages()["SampleResponse"](prompt_cache_hit_tokens=cached_tokens)
    for each in sampled:
        sequence = response.sequences.add(stop_reason=STOP if each.reason is FinishReason.STOP else LENGTH)
        sequence.tokens = np.array(each.tokens, "<i4").tobytes()
        sequence.logprobs = np.array([one.logprob for one in each.logprobs], "<f4").tobytes()
        if alternatives:
            _set_top(sequence.topk_sampled_logprobs, each.logprobs, alternatives)
    if prompt_alternatives is not None:
        scored = [None, *sampled[0].prompt]
        skipped = prompt_tokens - (prompt_tokens - 1 if last is None else last)
        rows = [None if place < skipped else one for place, one in enumerate(scored)]
        numbers = [np.nan if one is None else one.logprob for one in rows]
        response.prompt_logprobs = np.array(numbers, "<f4").tobytes()
        if prompt_alternatives:
            _set_top(response.topk_prompt_logprobs, rows, prompt_alternatives)
    if targets is not None:
        _set_targets(response.target_prompt_logprobs, targets, sampled[0].prompt)
    return bytes(response.SerializeToString())


def _set_targets(message: Any, targets: PromptTargets, scored: Sequence[TokenLogprobs]) -> None:
    """Fill a Tensor in the layout of `targets`. A record's named tokens follow its alternatives."""
    import numpy as np

    ids = np.array(targets.data, np.int64)
    found = np.zeros(len(ids), "<f4")
    pairs = zip(targets.rows, scored, strict=True)
    named = [logprob for row, each in pairs for logprob in each.top_logprobs[len(each.top_logprobs) - len(row) :]]
    found[ids >= 0] = named
    message.dtype = FLOAT32
    message.shape.extend(targets.shape or ())
    if targets.sparse_crow_indices is None:
        message.dense = found.tobytes()
        return
    message.sparse_csr.values = found.tobytes()
    message.sparse_csr.crow_indices = np.array(targets.sparse_crow_indices, "<i8").tobytes()
    message.sparse_csr.col_indices = np.array(targets.sparse_col_indices, "<i8").tobytes()


def _set_top(message: Any, rows: Sequence[TokenLogprobs | None], most: int) -> None:
    """Fill a TopkLogprobs: two matrices of `most` columns, with a row for each token."""
    import numpy as np

    ids = np.full((len(rows), most), NO_TOKEN, "<i4")
    logprobs = np.full((len(rows), most), NO_LOGPROB, "<f4")
    for number, row in enumerate(rows):
        if row is not None:
            count = len(row.top_ids[:most])
            ids[number, :count], logprobs[number, :count] = row.top_ids[:most], row.top_logprobs[:most]
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.k, message.length = most, len(rows)
