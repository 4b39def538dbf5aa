"""The sampling that the model's files recommend applies to requests of every kind that leave it open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient

from holdfast.engine.client.generation import GenerationDefaults

Http = Callable[..., httpx.AsyncClient]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100},
    "/v1/completions": {"prompt": "hello", "max_tokens": 100},
    "/v1/responses": {"input": "hello", "max_output_tokens": 100},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100},
}
RECOMMENDED = GenerationDefaults(
    temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1, max_new_tokens=32
)


@pytest.mark.parametrize("path", REQUESTS)
async def test_the_models_defaults_apply_to_fields_that_a_request_leaves_out(
    http: Http, client: FakeClient, path: str
) -> None:
    client.generation = RECOMMENDED
    async with http() as api:
        for more in ({}, {"temperature": 0.0, "top_k": -1}):
            assert (await api.post(path, json={"model": "tiny", **REQUESTS[path], **more})).status_code == 200
    params, said = (asked.params for asked in client.asked)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 20)
    assert (params.min_p, params.repetition_penalty, params.max_tokens) == (0.05, 1.1, 32)
    assert (said.temperature, said.top_p, said.top_k) == (0.0, 0.95, 0)


async def test_a_response_reports_the_sampling_that_was_used(http: Http, client: FakeClient) -> None:
    async with http() as api:
        wanted = {"model": "tiny", "input": "hello"}
        shown = (await api.post("/v1/responses", json=wanted)).json()
        assert (shown["temperature"], shown["top_p"]) == (1.0, 1.0)
        client.generation = RECOMMENDED
        shown = (await api.post("/v1/responses", json=wanted)).json()
        assert (shown["temperature"], shown["top_p"]) == (0.6, 0.95)
