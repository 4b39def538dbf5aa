"""Scores from the probabilities that a model gives named tokens, its labels, as the token after a prompt."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from holdfast.core.types import MAX_LOGPROB_TOKEN_IDS
from holdfast.server.protocol import (
    MAX_PROMPTS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    RequestBody,
    RequestId,
    Salt,
    TokenId,
    invalid,
)  # fmt: skip
from holdfast.server.replies import Reply, RequestUsage
from holdfast.server.service import Service

AT_ONCE = 64
"""Maximum number of one request's prompts that are in the engine at the same time."""

Prompt = str | Annotated[list[TokenId], Meta(min_length=1)]


class LabelledItems(CompletionRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A completion of one token that stands for some items of a scoring request."""

    route = "/generative_scoring"
    prompt_param = "items"


class ScoringRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /generative_scoring: items that are scored for a query."""

    harmless: ClassVar[tuple[str, ...]] = ("user",)

    model: str = ""
    query: Prompt
    items: Annotated[list[Prompt], Meta(min_length=1, max_length=MAX_PROMPTS)]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)]
    """Tokens whose probabilities after each prompt are compared. The score is that of the first one."""
    apply_softmax: bool = True
    """Whether the labels' probabilities are scaled to a sum of 1; otherwise they are those among all tokens."""
    item_first: bool = False
    """Whether each item comes before the query."""
    add_special_tokens: bool = True
    """Whether to add the tokenizer's special tokens to a query that is text."""
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    cache_salt: Salt | None = None
    request_id: RequestId | None = None
    """End of the answer's id; None: it is random."""


async def score_items(
    service: Service, wanted: ScoringRequest, tenant: str, usage: RequestUsage, id: str = ""
) -> Reply:
    """Return the score of each item: the probability of the first label after the query and the item. Raises ApiError.

    The first item runs alone, so that the others find the query's tokens in the cache. `id` is the end of the answer's
    id; empty: it is random.
    """
    service.check_model(wanted.model, tenant)
    largest, known = max(wanted.label_token_ids), service.client.info.vocab_size
    if largest >= known:
        raise invalid(f"label_token_ids holds {largest}; the model's ids are below {known}", "label_token_ids")
    prompts = await _prompts(service, wanted, tenant)
    size, scores = min(AT_ONCE, service.config.max_choices), list[float]()
    starts = [0, *range(1, len(prompts), size)]
    for start, stop in zip(starts, [*starts[1:], len(prompts)], strict=True):
        asked = LabelledItems(
            model=wanted.model,
            prompt=prompts[start:stop],
            priority=wanted.priority,
            cache_salt=wanted.cache_salt,
            **asking(wanted.label_token_ids),
        )
        for found in await label_logprobs(service, asked, tenant, usage):
            scores.append(probability(found, wanted.label_token_ids, among_all=not wanted.apply_softmax))
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    id = f"generative-scoring-{id or uuid.uuid4().hex}"
    head = {"id": id, "object": "list", "created": int(time.time()), "model": wanted.model}
    return head | {"data": data, "usage": usage.counts()}


async def _prompts(service: Service, wanted: ScoringRequest, tenant: str) -> list[list[int]]:
    """Return the tokens of the query with each item. Raises ApiError."""
    text, query = service.client.text, wanted.query

    def work() -> list[list[int]]:
        def encode(given: str | list[int], *, special: bool) -> list[int]:
            return given if isinstance(given, list) else list(text.encode(given, add_special_tokens=special))

        asked = encode(query, special=wanted.add_special_tokens)
        items = [encode(item, special=False) for item in wanted.items]
        return [item + asked if wanted.item_first else asked + item for item in items]

    try:
        with service.lane.admission.admit(1, tenant):
            return await service.off_loop(sum(map(len, (query, *wanted.items))), work)
    except ValueError as error:  # A text is not Unicode.
        raise invalid(str(error), "items") from None


def asking(labels: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a request that generates one token, and reports the log probabilities of labels with it."""
    return {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "logprobs": 0, "logprob_token_ids": [*labels]}


async def label_logprobs(
    service: Service, wanted: ChatRequest | CompletionRequest, tenant: str, usage: RequestUsage
) -> list[Mapping[int, float]]:
    """Return the log probabilities of the labels of `asking` after each prompt, by token. Raises ApiError."""
    answer = service.answer(wanted, tenant)
    found: dict[int, Mapping[int, float]] = {}
    async with aclosing(answer.deltas()) as deltas:
        async for choice, delta in deltas:
            for told in delta.logprobs:
                if told is not None:
                    found[choice] = dict(zip(told.top_ids, told.top_logprobs, strict=True))
    usage.include(answer.usage)
    usage.queued = answer.usage.queued if usage.queued is None else usage.queued
    if len(found) < answer.num_choices:
        reason = "the engine has an older version, which does not report log probabilities of named tokens"
        raise ApiError(reason, status=503, code="overloaded", retry_after=10)
    return [found[choice] for choice in range(answer.num_choices)]


def probability(logprobs: Mapping[int, float], labels: Sequence[int], *, among_all: bool = False) -> float:
    """Return the probability of the first label: among the labels, which need not be likely, or `among_all` tokens."""
    if among_all:
        return math.exp(logprobs[labels[0]])
    most = max(logprobs[label] for label in labels)
    if most == -math.inf:  # The labels are all impossible.
        return 1 / len(set(labels))
    weights = {label: math.exp(logprobs[label] - most) for label in labels}
    return weights[labels[0]] / sum(weights.values())
