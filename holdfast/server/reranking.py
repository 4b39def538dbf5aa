"""Scores of a causal reranker, such as Qwen3-Reranker: how much more probable its answer yes is than its answer no."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import aclosing

from holdfast.core.types import MAX_LOGPROBS, TokenLogprobs
from holdfast.server.protocol import ChatRequest, invalid
from holdfast.server.replies import RequestUsage
from holdfast.server.service import Service

ANSWERS = ("no", "yes")
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction of Qwen3-Reranker's model card, for requests without one."""
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
AT_ONCE = 64
"""Maximum number of one request's pairs that are in the engine at the same time."""


class JudgedPair(ChatRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A query and a document, converted to a chat whose answer is yes or no."""

    route = "/v1/rerank"
    prompt_param = "documents"


async def judge(
    service: Service,
    model: str,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    tenant: str,
    usage: RequestUsage,
    *,
    kept: int | None = None,
    priority: int = 0,
) -> list[float]:
    """Return the probability of yes against no for each pair of a query and a document. Raises ApiError.

    The first pair runs alone, so that the others find the tokens of the instruction in the cache. `kept` is the number
    of trailing tokens to keep of each prompt; None for all.
    """
    service.check_model(model, tenant)
    ids = answer_ids(service)
    places = asyncio.Semaphore(min(AT_ONCE, service.config.max_choices))

    async def ask(query: str, document: str, allowed: Sequence[int]) -> tuple[dict[int, float], RequestUsage]:
        """Return the log probabilities of some tokens after the prompt, that of the most probable allowed one too."""
        said = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        wanted = JudgedPair(
            model=model,
            messages=[{"role": "system", "content": JUDGE}, {"role": "user", "content": said}],
            max_tokens=1,
            temperature=0.0,
            logprobs=True,
            top_logprobs=MAX_LOGPROBS,
            allowed_token_ids=list(allowed),
            ignore_eos=True,
            truncate_prompt_tokens=kept,
            priority=priority,
            chat_template_kwargs={"enable_thinking": False},
        )
        answer = service.answer(wanted, tenant)
        found: dict[int, float] = {}
        async with aclosing(answer.deltas()) as deltas:
            async for _, delta in deltas:
                for token, logprobs in zip(delta.tokens, delta.logprobs, strict=False):
                    found |= seen(token, logprobs)
        return found, answer.usage

    async def score(query: str, document: str) -> float:
        async with places:
            found, spent = await ask(query, document, [*ids.values()])
            usage.prompt_tokens += spent.prompt_tokens
            usage.cached_tokens += spent.cached_tokens
            if usage.wanted is None:
                usage.wanted, usage.queued = spent.wanted, spent.queued
            for token in ids.values():
                if token not in found:  # It is not among the most probable tokens. The prompt is in the cache.
                    found |= (await ask(query, document, [token]))[0]
        return sigmoid(found[ids["yes"]] - found[ids["no"]])

    first = await score(*pairs[0])
    tasks = [asyncio.create_task(score(*pair)) for pair in pairs[1:]]
    try:
        return [first, *await asyncio.gather(*tasks)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer_ids(service: Service) -> Mapping[str, int]:
    """Return the tokens of both answers. Raises ApiError if the model spells one of them with several tokens."""
    found = {word: service.client.text.encode(word, add_special_tokens=False) for word in ANSWERS}
    if wrong := [word for word, ids in found.items() if len(ids) != 1]:
        reason = f"this model cannot rank: it spells {wrong[0]!r} with {len(found[wrong[0]])} tokens, not with one"
        raise invalid(reason, "model", "unsupported_parameter")
    return {word: ids[0] for word, ids in found.items()}


def seen(token: int, logprobs: TokenLogprobs | None) -> dict[int, float]:
    """Return the log probabilities at a token's place, by token."""
    if logprobs is None:
        return {}
    return dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)) | {token: logprobs.logprob}


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)), also where exp(-x) is too large for a number."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
