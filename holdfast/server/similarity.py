"""Scores of pairs of texts and rankings of documents: cosines of embeddings, or the answers of a causal reranker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from holdfast.server.embeddings import EmbeddingRequest, VectorRequest, compute, vectors_of, written
from holdfast.server.protocol import MAX_PROMPTS, RequestBody, RequestId, Salt, invalid
from holdfast.server.replies import Reply, RequestUsage
from holdfast.server.reranking import judge
from holdfast.server.service import Service

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
Truncation = Annotated[int, Meta(ge=-1, le=1 << 24)]
Priority = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
TextTokens = Annotated[int, Meta(ge=0, le=1 << 24)]
QUERIES = ("text_1", "queries", "data_1")
DOCUMENTS = ("text_2", "documents", "items", "data_2")


class PairsRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Fields of every request that compares queries with documents."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_activation": (True,), "softmax": (True,), "activation": (True,), "mm_processor_kwargs": ({},),
        "chat_template": (), "chat_template_kwargs": ({},), "padding": ("do_not_pad",),
    }  # fmt: skip
    harmless: ClassVar[tuple[str, ...]] = ("user", "encoding_format")

    model: str = ""
    max_tokens_per_query: TextTokens = 0
    """Number of tokens of each query to keep, the first ones; 0: all."""
    max_tokens_per_doc: TextTokens = 0
    """Number of tokens of each document to keep, the first ones; 0: all."""
    instruction: str | None = None
    """Rule by which a causal reranker judges documents. Other models take none."""
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    """Side on which `truncate_prompt_tokens` drops tokens; None: on the left, so the last tokens stay."""
    priority: Priority = 0
    cache_salt: Salt | None = None
    request_id: RequestId | None = None
    """End of the answer's id; None: it is random."""


class ScoreRequest(PairsRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /score: one text against several, or as many against as many, in pairs.

    Both sides have several names in vLLM: one of QUERIES and one of DOCUMENTS.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def pairs(self) -> tuple[list[str], list[tuple[int, int]]]:
        """Return all texts, and the places of each pair's two texts in them. Raises ApiError."""
        (one, left), (other, right) = self._side(QUERIES), self._side(DOCUMENTS)
        if len(left) > 1 and len(left) != len(right):
            reason = f"{one} holds {len(left)} texts and {other} {len(right)}; give one in {one}, or as many in both"
            raise invalid(reason, one)
        both = [(0 if len(left) == 1 else at, len(left) + at) for at in range(len(right))]
        return [*left, *right], both

    def _side(self, names: Sequence[str]) -> tuple[str, list[str]]:
        """Return the texts of one side, and the name under which they came. Raises ApiError."""
        given = [(name, texts) for name in names if (texts := getattr(self, name)) is not None]
        if not given:
            raise invalid(f"{names[0]} is missing", names[0], "missing_required_parameter")
        if len(given) > 1:
            raise invalid(f"give {given[0][0]} or {given[1][0]}, one of them", given[1][0])
        [(name, texts)] = given
        return name, _listed(texts)


class RerankRequest(PairsRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /rerank: documents to be ranked for a query, as in the APIs of Jina and Cohere."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = PairsRequest.unsupported | {"rank_fields": (["text"],)}
    harmless: ClassVar[tuple[str, ...]] = (*PairsRequest.harmless, "max_chunks_per_doc")

    query: str
    documents: Annotated[list[str | dict[str, Any]], Meta(min_length=1, max_length=MAX_PROMPTS)]
    """Documents, each a text or an object with a `text`."""
    top_n: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Number of documents to return, the best first; 0: all."""
    return_documents: bool = True

    def texts(self) -> list[str]:
        """Return the documents' texts. Raises ApiError."""
        return [_text(document, f"documents[{index}]") for index, document in enumerate(self.documents)]


class PoolingRequest(VectorRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /pooling: inputs whose vectors are returned, or the messages of one chat."""

    task: Literal["embed"] = "embed"


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _text(document: str | dict[str, Any], name: str) -> str:
    match document:
        case str(text) | {"text": str(text)}:
            return text
    raise invalid(f"{name} must be a text, or an object with a text", name)


async def score(service: Service, wanted: ScoreRequest, tenant: str, usage: RequestUsage, id: str = "") -> Reply:
    """Return the score of each pair of texts. `id` is the end of the answer's id, here and below. Raises ApiError."""
    texts, pairs = wanted.pairs()
    scores = await similar(service, wanted, texts, pairs, tenant, usage)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    head = {"id": f"score-{id or uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
    return head | {"model": wanted.model, "data": data} | _usage(usage)


async def rerank(service: Service, wanted: RerankRequest, tenant: str, usage: RequestUsage, id: str = "") -> Reply:
    """Return the documents in the order of their scores with the query, the best first. Raises ApiError."""
    texts = wanted.texts()
    pairs = [(0, 1 + index) for index in range(len(texts))]
    scores = await similar(service, wanted, [wanted.query, *texts], pairs, tenant, usage)
    results: list[Reply] = [
        {"index": index, "relevance_score": score} | ({"document": {"text": text}} if wanted.return_documents else {})
        for index, (text, score) in enumerate(zip(texts, scores, strict=True))
    ]
    results.sort(key=lambda result: -result["relevance_score"])
    best = results[: wanted.top_n or None]
    return {"id": f"rerank-{id or uuid.uuid4().hex}", "model": wanted.model, "results": best} | _usage(usage)


async def similar(
    service: Service,
    wanted: ScoreRequest | RerankRequest,
    texts: Sequence[str],
    pairs: Sequence[tuple[int, int]],
    tenant: str,
    usage: RequestUsage,
) -> list[float]:
    """Return the score of each pair, given by the places of its texts. Raises ApiError."""
    if len(texts) > MAX_PROMPTS:
        raise invalid(f"the request has {len(texts)} texts; at most {MAX_PROMPTS} are taken", "documents")
    texts = await _cut(service, wanted, texts, {left for left, _ in pairs}, tenant)
    if service.client.pooling.judges:
        both = [(texts[left], texts[right]) for left, right in pairs]
        fields = _kept(wanted)
        return await judge(service, wanted.model, both, wanted.instruction, tenant, usage, fields)
    if wanted.instruction is not None:
        raise invalid("instruction is for rerankers, served with --convert rerank; leave it out", "instruction")
    vectors = await compute(service, _embedding(wanted, texts), tenant, usage)
    return [cosine(vectors[left], vectors[right]) for left, right in pairs]


async def _cut(
    service: Service, wanted: PairsRequest, texts: Sequence[str], queries: Set[int], tenant: str
) -> Sequence[str]:
    """Return the texts with the tokens that the request keeps. `queries` has the places of queries. Raises ApiError."""
    most = [wanted.max_tokens_per_query if at in queries else wanted.max_tokens_per_doc for at in range(len(texts))]
    if not any(most):
        return texts
    spelling = service.client.text

    def cut(text: str, limit: int) -> str:
        tokens = spelling.encode(text, add_special_tokens=False) if limit else ()
        return spelling.decode(tokens[:limit]).rstrip("\ufffd") if len(tokens) > limit else text

    def work() -> list[str]:
        return [cut(text, limit) for text, limit in zip(texts, most, strict=True)]

    try:
        with service.lane.admission.admit(1, tenant):
            return await service.off_loop(sum(map(len, texts)), work)
    except ValueError as error:  # A text is not Unicode.
        raise invalid(str(error), "documents") from None


async def pool(service: Service, wanted: PoolingRequest, tenant: str, usage: RequestUsage, id: str = "") -> Reply:
    """Return the vectors of all inputs, or of a chat. Raises ApiError."""
    vectors, normalize = await vectors_of(service, wanted, tenant, usage)
    data = [
        {"index": index, "object": "pooling", "data": vector}
        for index, vector in enumerate(written(vectors, wanted, normalize=normalize))
    ]
    head = {"id": f"pool-{id or uuid.uuid4().hex}", "object": "list", "model": wanted.model}
    return head | {"data": data} | _usage(usage)


def cosine(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Return the cosine of two vectors [hidden]; 0 if one is zero."""
    import numpy as np  # Imported here, because few servers need it.

    length = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(one @ other) / length if length else 0.0


def _embedding(wanted: ScoreRequest | RerankRequest, texts: Sequence[str]) -> EmbeddingRequest:
    """Return the embedding request for these texts."""
    return EmbeddingRequest(model=wanted.model, input=list(texts), **_kept(wanted))


def _kept(wanted: PairsRequest) -> dict[str, Any]:
    """Return the fields of the request that its prompts have, too."""
    names = ("truncate_prompt_tokens", "truncation_side", "priority", "cache_salt")
    return {name: getattr(wanted, name) for name in names}


def _usage(usage: RequestUsage) -> Reply:
    return {"usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}}
