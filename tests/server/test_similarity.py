"""Scores, rankings and pooled vectors over a fake client whose vectors are known."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import FakeClient, FakeText, engine_info

from holdfast.core.types import TokenLogprobs
from holdfast.engine.client.pooling import Pooling
from holdfast.engine.client.stream import Delta

Http = Callable[..., httpx.AsyncClient]
VECTORS = {"north": (0, 2), "east": (3, 0), "northeast": (1, 1), "south": (0, -1), "zero": (0, 0)}


class Embedder(FakeClient):
    """Gives each prompt the vector of its text."""

    async def stream(self, prompt: Any, params: Any, **more: Any) -> AsyncGenerator[Delta, None]:
        vector = np.array(VECTORS["".join(map(chr, prompt))], np.float32).tobytes()
        async for delta in super().stream(prompt, params, **more):
            yield replace(delta, vector=vector)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> FakeClient:
    """Return an embedder, or what a test's parameter makes."""
    made: FakeClient = getattr(request, "param", lambda: Embedder(pooling=Pooling(normalize=True)))()
    return made


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_a_score_is_the_cosine_of_two_texts(http: Http, path: str) -> None:
    async with http() as api:
        one = (await api.post(path, json={"text_1": "north", "text_2": ["northeast", "south", "zero"]})).json()
        pairs = (await api.post(path, json={"text_1": ["north", "east"], "text_2": ["east", "east"]})).json()
    assert [each["score"] for each in one["data"]] == pytest.approx([0.5**0.5, -1, 0])
    assert [each["score"] for each in pairs["data"]] == pytest.approx([0, 1])
    assert [(each["index"], each["object"]) for each in pairs["data"]] == [(0, "score"), (1, "score")]
    assert (one["object"], one["model"]) == ("list", "tiny")
    assert one["usage"] == {"prompt_tokens": 23, "total_tokens": 23}


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
async def test_a_score_takes_vllms_other_names_of_both_sides(http: Http, names: tuple[str, str]) -> None:
    body = dict(zip(names, (["north"], ["northeast", "south"]), strict=True)) | {"encoding_format": "float"}
    async with http() as api:
        scored = (await api.post("/score", json=body)).json()
    assert [each["score"] for each in scored["data"]] == pytest.approx([0.5**0.5, -1])
    assert scored["created"] > 1e9


async def test_queries_and_documents_are_cut_to_their_own_numbers_of_tokens(http: Http) -> None:
    documents = [{"text": "northeast"}, "south"]
    body = {"query": "northwards", "documents": documents, "rank_fields": ["text"], "max_tokens_per_query": 5}
    async with http() as api:
        cut = (await api.post("/rerank", json=body)).json()
        both = (await api.post("/rerank", json=body | {"max_tokens_per_doc": 5})).json()
    assert [each["relevance_score"] for each in cut["results"]] == pytest.approx([0.5**0.5, -1])
    assert [each["relevance_score"] for each in both["results"]] == pytest.approx([1, -1])
    assert [each["document"]["text"] for each in both["results"]] == ["northeast", "south"], "they are shown whole"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_documents_are_ranked_by_their_closeness_to_the_query(http: Http, path: str) -> None:
    documents = ["south", {"text": "northeast"}, "north"]
    async with http() as api:
        ranked = (await api.post(path, json={"query": "north", "documents": documents})).json()
        best = await api.post(
            path, json={"query": "north", "documents": documents, "top_n": 1, "return_documents": False}
        )
    assert [each["index"] for each in ranked["results"]] == [2, 1, 0]
    assert [each["document"]["text"] for each in ranked["results"]] == ["north", "northeast", "south"]
    assert [each["relevance_score"] for each in ranked["results"]] == pytest.approx([1, 0.5**0.5, -1])
    (only,) = best.json()["results"]
    assert only == {"index": 2, "relevance_score": pytest.approx(1)}


async def test_pooled_vectors_are_normalized_as_the_model_or_the_client_says(http: Http) -> None:
    async with http() as api:
        scaled = (await api.post("/pooling", json={"input": ["north", "east"]})).json()
        plain = (await api.post("/pooling", json={"input": "east", "normalize": False})).json()
    assert [each["data"] for each in scaled["data"]] == [[0, 1], [1, 0]]
    assert plain["data"] == [{"index": 0, "object": "pooling", "data": [3, 0]}]


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/v1/embeddings", {"input": "north"}, "embd"),
        ("/pooling", {"input": "north"}, "pool"),
        ("/score", {"text_1": "north", "text_2": "north"}, "score"),
        ("/rerank", {"query": "north", "documents": ["north"]}, "rerank"),
    ],
)
async def test_the_id_and_the_salt_of_a_request_are_taken(
    http: Http, client: Any, path: str, body: dict[str, Any], prefix: str
) -> None:
    async with http() as api:
        own = await api.post(path, json={**body, "request_id": "mine", "cache_salt": "salt", "padding": "do_not_pad"})
        header = await api.post(path, json={**body, "request_id": "mine"}, headers={"x-request-id": "theirs"})
        plain = await api.post(path, json=body)
    assert (own.json()["id"], own.headers["x-request-id"]) == (f"{prefix}-mine", "mine")
    assert header.json()["id"] == f"{prefix}-theirs"
    assert plain.json()["id"].startswith(f"{prefix}-") and len(plain.json()["id"]) > 20
    salts = [asked.salt for asked in client.asked]
    each = len(salts) // 3
    assert salts == ["salt"] * each + [""] * 2 * each


async def test_special_tokens_are_left_out_of_an_input_on_request(
    http: Http, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, asked = client.text.encode, []

    def encode(text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        asked.append(add_special_tokens)
        return list(plain(text))

    monkeypatch.setattr(client.text, "encode", encode)
    async with http() as api:
        for given in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            assert (await api.post("/v1/embeddings", json={"input": "north", **given})).status_code == 200
    assert asked == [True, True, False]


async def test_vllms_newer_name_says_whether_vectors_are_normalized(http: Http) -> None:
    async with http() as api:
        plain = (await api.post("/v1/embeddings", json={"input": "east", "use_activation": False})).json()
        both = {"input": "east", "normalize": True}
        scaled = (await api.post("/v1/embeddings", json={**both, "use_activation": True})).json()
        refused = await api.post("/v1/embeddings", json={**both, "use_activation": False})
    assert [each["data"][0]["embedding"] for each in (plain, scaled)] == [[3, 0], [1, 0]]
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "use_activation"


async def test_both_texts_of_a_score_are_cut_on_the_side_that_the_client_says(http: Http) -> None:
    body = {"text_1": "northeast", "text_2": "northeast", "truncate_prompt_tokens": 5, "truncation_side": "right"}
    async with http() as api:
        scored = await api.post("/score", json=body)
    assert scored.status_code == 200 and scored.json()["usage"]["prompt_tokens"] == 10, scored.text


async def test_an_input_is_cut_on_the_side_that_the_client_says(http: Http) -> None:
    body = {"input": "northeast", "encoding_format": "float", "truncate_prompt_tokens": 5}
    async with http() as api:
        first = (await api.post("/v1/embeddings", json=body | {"truncation_side": "right"})).json()
        last = (await api.post("/v1/embeddings", json=body | {"truncate_prompt_tokens": 4})).json()
    assert [first["data"][0]["embedding"], last["data"][0]["embedding"]] == [[0, 1], [1, 0]]
    assert (first["usage"]["prompt_tokens"], last["usage"]["prompt_tokens"]) == (5, 4)


@pytest.mark.parametrize(("path", "key"), [("/pooling", "data"), ("/v1/embeddings", "embedding")])
async def test_a_chat_has_the_vector_of_its_prompt(
    http: Http, client: Any, monkeypatch: pytest.MonkeyPatch, path: str, key: str
) -> None:
    client.text.opening = "<assistant>"
    monkeypatch.setitem(VECTORS, "<user>north", (0, 2))
    monkeypatch.setitem(VECTORS, "<user>north<assistant>", (3, 4))
    body = {"messages": [{"role": "user", "content": "north"}]}
    async with http() as api:
        plain = (await api.post(path, json=body)).json()
        begun = (await api.post(path, json=body | {"add_generation_prompt": True, "normalize": False})).json()
    assert [each[key] for each in (*plain["data"], *begun["data"])] == [[0, 1], [3, 4]]
    assert plain["usage"]["prompt_tokens"] == len("<user>north")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pooling", {}, "input"),
        ("/pooling", {"input": "north", "messages": [{"role": "user", "content": "north"}]}, "input"),
        ("/pooling", {"messages": []}, "messages"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": "north", "messages": [{"role": "user", "content": "north"}]}, "input"),
        ("/v1/embeddings", {"input": "north", "embed_dtype": "float16"}, "embed_dtype"),
        ("/v1/embeddings", {"input": "north", "task": "embed"}, "task"),
        ("/pooling", {"messages": [{"role": "sailor", "content": "north"}]}, "messages[0].role"),
        ("/pooling", {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ x }}"}, "chat_template"),
        ("/score", {"text_1": ["north", "east"], "text_2": ["north"]}, "text_1"),
        ("/score", {"text_1": [], "text_2": "north"}, "text_1"),
        ("/score", {"text_1": "north"}, "text_2"),
        ("/score", {"queries": "north", "text_1": "north", "text_2": "east"}, "queries"),
        ("/score", {"queries": ["north", "east"], "documents": ["north"]}, "queries"),
        ("/score", {"text_1": "north", "text_2": "east", "use_activation": False}, "use_activation"),
        ("/rerank", {"query": "north", "documents": ["east"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/rerank", {"query": "north", "documents": []}, "documents"),
        ("/rerank", {"query": "north", "documents": ["east", {"picture": "x"}]}, "documents[1]"),
        ("/rerank", {"query": "north", "documents": ["east"] * 1024}, "documents"),
        ("/rerank", {"query": "north", "documents": ["east"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "north", "documents": ["east"], "rank_fields": ["title"]}, "rank_fields"),
        ("/pooling", {"input": "north", "task": "classify"}, "task"),
        ("/pooling", {"input": "north", "model": "other"}, "model"),
    ],
)
async def test_a_bad_value_is_refused(http: Http, path: str, body: Any, param: str) -> None:
    async with http() as api:
        response = await api.post(path, json=body)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param


async def test_a_model_that_gives_no_embeddings_refuses_scores(http: Http, client: FakeClient) -> None:
    client.pooling = Pooling(refused="this model is not made for embeddings")
    async with http() as api:
        response = await api.post("/score", json={"text_1": "north", "text_2": "east"})
    assert response.status_code == 400 and "not made for embeddings" in response.json()["error"]["message"]


class Reranker(FakeClient):
    """Answers yes or no. The more often a document says wet, the more probable is yes."""

    async def stream(self, prompt: Any, params: Any, **more: Any) -> AsyncGenerator[Delta, None]:
        logprob = {ord("y"): -1.0 - "".join(map(chr, prompt)).count("wet"), ord("n"): -2.0}
        names = params.logprob_token_ids
        told = TokenLogprobs(-0.1, names, tuple(logprob[each] for each in names))
        async for delta in super().stream(prompt, params, **more):
            yield replace(delta, tokens=(ord("?"),), logprobs=(told,)) if delta.tokens else delta


class Spelled(FakeText):
    """Spells each answer with one token."""

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(text[0])] if text in ("yes", "no") else super().encode(text, **options)


JUDGES = Pooling(refused="it ranks", judges=True)


def reranker() -> Reranker:
    return Reranker(pooling=JUDGES, text=Spelled(), words=("yes",), info=engine_info(max_model_len=4096))


@pytest.mark.parametrize("client", [reranker], indirect=True)
async def test_a_reranker_scores_by_its_answers_yes_and_no(http: Http, client: Any) -> None:
    async with http() as api:
        documents = ["wet wet", "dry", "wet"]
        ranked = (await api.post("/v2/rerank", json={"query": "rain", "documents": documents})).json()
        asked = {"text_1": "rain", "text_2": "dry", "instruction": "Be strict", "cache_salt": "salt"}
        scores = await api.post("/score", json=asked)
        refused = await api.post("/pooling", json={"input": "rain"})
    assert [each["index"] for each in ranked["results"]] == [1, 2, 0]
    expected = [1 / (1 + math.exp(wet - 1)) for wet in (0, 1, 2)]
    assert [each["relevance_score"] for each in ranked["results"]] == pytest.approx(expected)
    assert scores.json()["data"][0]["score"] == pytest.approx(expected[0])
    prompts = ["".join(map(chr, asked.prompt)) for asked in client.asked]
    assert [asked.salt for asked in client.asked] == ["", "", "", "salt"]
    assert "<Instruct>: Be strict\n<Query>: rain\n<Document>: dry" in prompts[-1]
    assert "<Instruct>: Given a web search query" in prompts[0] and "<enable_thinking=False>" in prompts[0]
    counted = [len(prompt) for prompt in prompts if "Given a web" in prompt]
    assert len(counted) == 3 and ranked["usage"]["prompt_tokens"] == sum(counted)
    assert "it ranks" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "client", [lambda: Reranker(pooling=JUDGES, info=engine_info(max_model_len=4096))], indirect=True
)
async def test_a_model_that_spells_its_answers_with_several_tokens_cannot_rank(http: Http) -> None:
    async with http() as api:
        response = await api.post("/rerank", json={"query": "rain", "documents": ["wet"]})
    assert response.status_code == 400 and "spells 'yes' with 3 tokens" in response.json()["error"]["message"]


async def test_an_instruction_for_a_model_without_one_is_refused(http: Http) -> None:
    async with http() as api:
        response = await api.post("/rerank", json={"query": "north", "documents": ["east"], "instruction": "x"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "instruction"
