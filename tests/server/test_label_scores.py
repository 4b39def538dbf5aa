"""Scores from the probabilities of labels after a prompt, over a fake client whose log probabilities are known."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, engine_info

from holdfast.core.types import TokenLogprobs
from holdfast.engine.client.stream import Delta
from holdfast.server.label_scores import probability

Http = Callable[..., httpx.AsyncClient]
PATH = "/generative_scoring"
ASKED: dict[str, Any] = {"query": "wet: ", "items": ["rain rain", "sun", "rain"], "label_token_ids": [121, 110]}
RAIN = -1.0, -2.0, -3.0
"""Log probability of y for a number of rains. That of any other token is -2.5."""


class Judge(FakeClient):
    """Gives each prompt log probabilities by how often it says rain. It draws a token that ends its answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.running: list[int] = []
        """Numbers of prompts in the engine, noted as each one comes."""
        self._now = 0

    reports = True
    """Whether it reports named tokens, which an engine of an older version does not."""

    async def stream(self, prompt: Any, params: Any, **more: Any) -> AsyncGenerator[Delta, None]:
        rain = "".join(map(chr, prompt)).count("rain")
        values = tuple(RAIN[rain] if each == ord("y") else -2.5 for each in params.logprob_token_ids)
        told = (TokenLogprobs(-0.2, params.logprob_token_ids, values),) if self.reports else ()
        self._now += 1
        self.running.append(self._now)
        await asyncio.sleep(0)  # The others that are sent with it come.
        async for delta in super().stream(prompt, params, **more):
            yield replace(delta, logprobs=told) if delta.tokens else delta
        self._now -= 1


@pytest.fixture
def client() -> Judge:
    return Judge(words=("?",), ends=True, info=engine_info(max_model_len=64))


def among(rain: int) -> float:
    return math.exp(RAIN[rain]) / (math.exp(RAIN[rain]) + math.exp(-2.5))


async def scored(http: Http, **fields: Any) -> Any:
    async with http() as api:
        response = await api.post(PATH, json={**ASKED, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_an_item_has_the_probability_of_the_first_label_among_the_labels(http: Http, client: Judge) -> None:
    answer = await scored(http, request_id="mine")
    assert [each["score"] for each in answer["data"]] == pytest.approx([among(2), among(0), among(1)])
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(at, "score") for at in range(3)]
    assert (answer["id"], answer["object"], answer["model"]) == ("generative-scoring-mine", "list", "tiny")
    prompts = ["".join(map(chr, each.prompt)) for each in client.asked]
    assert prompts == ["wet: rain rain", "wet: sun", "wet: rain"]
    tokens = sum(map(len, prompts))
    counts = {"prompt_tokens": tokens, "completion_tokens": 6, "total_tokens": tokens + 6}
    assert answer["usage"] == counts, "the fake client draws two tokens for each prompt"
    params = client.asked[0].params
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (1, 0, True)
    assert params.logprob_token_ids == (121, 110) and all(each.params == params for each in client.asked)


async def test_without_a_softmax_it_is_the_probability_among_all_tokens(http: Http) -> None:
    answer = await scored(http, apply_softmax=False)
    assert [each["score"] for each in answer["data"]] == pytest.approx([math.exp(RAIN[at]) for at in (2, 0, 1)])


async def test_prompts_may_be_tokens_and_an_item_may_come_first(http: Http, client: Judge) -> None:
    await scored(http, query=[5, 6], items=[[7], "x"], item_first=True, label_token_ids=[110, 110])
    assert [list(each.prompt) for each in client.asked] == [[7, 5, 6], [120, 5, 6]]


async def test_more_items_than_may_be_in_the_engine_are_asked_in_turn(http: Http, client: Judge) -> None:
    items = ["rain" if at % 3 else "sun" for at in range(20)]
    async with http(max_choices=4) as api:
        answer = (await api.post(PATH, json={**ASKED, "items": items})).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx([among(int(at % 3 > 0)) for at in range(20)])
    assert client.running[:2] == [1, 1] and max(client.running) == 4, "the first one runs alone"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": []}, "items"),
        ({"items": "rain"}, "items"),
        ({"items": [[]]}, "items"),
        ({"items": ["x"] * 1025}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [256]}, "label_token_ids"),
        ({"label_token_ids": list(range(129))}, "label_token_ids"),
        ({"query": None}, "query"),
        ({"query": "", "items": [""]}, "items"),
        ({"softmax": True}, "softmax"),
        ({"model": "other"}, "model"),
        ({"items": ["x" * 64]}, None),
    ],
)
async def test_a_bad_value_is_refused_by_name(http: Http, fields: dict[str, Any], param: str | None) -> None:
    async with http() as api:
        response = await api.post(PATH, json={**ASKED, **fields})
    assert response.status_code == (404 if param == "model" else 400), response.text
    found = response.json()["error"]["param"]
    assert found == param or str(found).startswith(f"{param}[")


async def test_an_engine_that_reports_no_named_tokens_is_named_as_the_reason(http: Http, client: Judge) -> None:
    client.reports = False
    async with http() as api:
        response = await api.post(PATH, json=ASKED)
    assert response.status_code == 503 and "older version" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "10"


@pytest.mark.parametrize(
    ("values", "first"), [((-1000.0, -1001.0), 0.7310585786300049), ((-math.inf, -3.0), 0.0), ((-math.inf,) * 2, 0.5)]
)
def test_labels_that_are_hardly_possible_have_probabilities_too(values: tuple[float, float], first: float) -> None:
    assert probability(dict(zip((5, 6), values, strict=True)), [5, 6, 5]) == pytest.approx(first)
    assert probability({5: -2.0}, [5]) == 1.0
