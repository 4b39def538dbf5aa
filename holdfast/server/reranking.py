"""Scores of a causal reranker, such as Qwen3-Reranker: how much more probable its answer yes is than its answer no."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.server.label_scores import AT_ONCE, asking, label_logprobs, probability
from holdfast.server.protocol import ChatRequest, invalid
from holdfast.server.replies import RequestUsage
from holdfast.server.service import Service

ANSWERS = ("yes", "no")
"""Answers of which one is given. The score is the probability of the first."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction of Qwen3-Reranker's model card, for requests without one."""
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)


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
    fields: Mapping[str, Any],
) -> list[float]:
    """Return the probability of yes against no for each pair of a query and a document. Raises ApiError.

    The first pair runs alone, so that the others find the tokens of the instruction in the cache. `fields` are fields
    of the request of each pair, such as its priority.
    """
    service.check_model(model, tenant)
    labels = answer_ids(service)
    places = asyncio.Semaphore(min(AT_ONCE, service.config.max_choices))

    async def score(query: str, document: str) -> float:
        said = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        wanted = JudgedPair(
            model=model,
            messages=[{"role": "system", "content": JUDGE}, {"role": "user", "content": said}],
            chat_template_kwargs={"enable_thinking": False},
            **{**fields, **asking(labels), "logprobs": True},
        )
        async with places:
            [found] = await label_logprobs(service, wanted, tenant, usage)
        return probability(found, labels)

    first = await score(*pairs[0])
    tasks = [asyncio.create_task(score(*pair)) for pair in pairs[1:]]
    try:
        return [first, *await asyncio.gather(*tasks)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer_ids(service: Service) -> list[int]:
    """Return the tokens of both answers. Raises ApiError if the model spells one of them with several tokens."""
    found = {word: service.client.text.encode(word, add_special_tokens=False) for word in ANSWERS}
    if wrong := [word for word, ids in found.items() if len(ids) != 1]:
        reason = f"this model cannot rank: it spells {wrong[0]!r} with {len(found[wrong[0]])} tokens, not with one"
        raise invalid(reason, "model", "unsupported_parameter")
    return [ids[0] for ids in found.values()]
