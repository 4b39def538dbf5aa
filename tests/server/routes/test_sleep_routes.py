"""POST /sleep, POST /wake_up and GET /is_sleeping over a fake engine, and what other routes say of a sleeping one."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from fake_engine import FakeClient

from holdfast.core.types import FinishReason
from holdfast.engine.client.connection import SleepError
from holdfast.engine.client.pooling import Pooling
from holdfast.lm.config import EngineConfig

Http = Callable[..., httpx.AsyncClient]
ASKED = {"model": "tiny", "prompt": "Ahoy"}
USER = {"role": "user", "content": "Ahoy"}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(config=EngineConfig(enable_sleep_mode=True))


async def test_orders_reach_the_engine_with_their_levels_modes_and_tags(http: Http, client: FakeClient) -> None:
    async with http() as api:
        for path in ("/sleep", "/sleep?level=2&mode=keep", "/wake_up", "/wake_up?tags=kv_cache&tags=weights"):
            answer = await api.post(path)
            assert (answer.status_code, answer.content) == (200, b"")
    assert client.ordered == [
        ("sleep", 1, "abort"), ("sleep", 2, "keep"), ("wake_up",), ("wake_up", "kv_cache", "weights"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "param", "words"),
    [
        ("/sleep?level=0", "level", "'0'; it must be an integer between 1 and 2"),
        ("/sleep?level=high", "level", "'high'"),
        ("/sleep?mode=drain", "mode", "'drain'; it must be one of abort, wait, keep"),
        ("/wake_up?tags=weights&tags=adapters", "tags", "'adapters'; it may have weights and kv_cache"),
    ],
)
async def test_other_values_are_refused_by_name(
    http: Http, client: FakeClient, path: str, param: str, words: str
) -> None:
    async with http() as api:
        answer = await api.post(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"]
    assert client.ordered == []


async def test_a_sleeping_server_is_alive_and_not_ready_and_asks_clients_to_come_back(
    http: Http, client: FakeClient
) -> None:
    async with http() as api:
        assert (await api.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await api.get("/health/ready")).status_code == 200
        await api.post("/sleep")
        assert (await api.get("/is_sleeping")).json() == {"is_sleeping": True}
        ready, health = await api.get("/health/ready"), await api.get("/health")
        assert (ready.status_code, ready.json()["reason"]) == (503, "asleep")
        assert (health.status_code, health.json()["status"]) == (200, "asleep")
        assert (await api.get("/health/live")).status_code == 200
        assert "holdfast_sleep_level 1.0" in (await api.get("/metrics")).text
        refused = await api.post("/v1/completions", json=ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_asleep")
        assert refused.headers["retry-after"] == "5"
        await api.post("/wake_up")
        assert (await api.post("/v1/completions", json=ASKED)).status_code == 200
        assert (await api.get("/health/ready")).status_code == 200


async def test_a_background_response_is_refused_at_once_and_not_accepted_to_fail(
    http: Http, client: FakeClient
) -> None:
    asked = {"model": "tiny", "input": "Ahoy", "background": True}
    async with http() as api:
        await api.post("/sleep")
        refused = await api.post("/v1/responses", json=asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_asleep")
        await api.post("/wake_up")
        assert (await api.post("/v1/responses", json=asked)).status_code == 200


async def test_the_reason_of_an_engine_that_stays_as_it_is_reaches_the_operator(http: Http, client: FakeClient) -> None:
    async with http() as api:
        client.sleep_error = SleepError("the weights take 16 GB and 3 are free")
        for path in ("/sleep", "/wake_up"):
            answer = await api.post(path)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (409, "sleep_refused")
            assert error["message"] == "the weights take 16 GB and 3 are free"
        client.die("gone")
        assert (await api.post("/sleep")).json()["error"]["code"] == "engine_dead"
        assert (await api.get("/is_sleeping")).status_code == 503


async def test_without_the_option_nobody_sleeps_and_the_error_names_it(http: Http, client: FakeClient) -> None:
    client.config = EngineConfig()
    async with http() as api:
        for path in ("/sleep", "/wake_up"):
            answer = await api.post(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "sleep_mode_off")
            assert "--enable-sleep-mode" in answer.json()["error"]["message"]
        assert (await api.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert client.ordered == []


async def test_only_operators_give_orders_and_any_key_may_ask(http: Http, client: FakeClient) -> None:
    users = {"authorization": "Bearer sesame"}
    async with http(headers=users, api_key=("sesame",), operator_key=("boss",)) as api:
        for path in ("/sleep", "/wake_up"):
            assert (await api.post(path)).status_code == 403
            assert (await api.post(path, headers={"authorization": "Bearer boss"})).status_code == 200
        assert (await api.get("/is_sleeping")).status_code == 200
        assert (await api.get("/is_sleeping", headers={"authorization": "Bearer wrong"})).status_code == 401


async def test_an_answer_that_the_sleep_cuts_is_shown_where_its_form_has_a_reason_for_that(
    http: Http, client: FakeClient
) -> None:
    client.ending = FinishReason.ABORT
    async with http() as api:
        chat = await api.post("/v1/chat/completions", json={"model": "tiny", "messages": [USER]})
        text = await api.post("/v1/completions", json=ASKED)
        message = await api.post("/v1/messages", json={"model": "tiny", "max_tokens": 9, "messages": [USER]})
    for answer in (chat, text):
        assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "abort")
    assert message.json()["stop_reason"] == "pause_turn"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/responses", {"input": "Ahoy"}),
        ("/v1/embeddings", {"input": "Ahoy"}),
        ("/generative_scoring", {"query": "Ahoy", "items": [" yes"], "label_token_ids": [3, 4]}),
    ],
)
async def test_a_result_that_the_sleep_cuts_is_an_error_where_a_part_would_pass_for_the_whole(
    http: Http, client: FakeClient, path: str, asked: dict[str, object]
) -> None:
    client.ending, client.pooling = FinishReason.ABORT, Pooling()
    async with http() as api:
        answer = await api.post(path, json={"model": "tiny", **asked})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_asleep")
    assert answer.headers["retry-after"] == "5" and len(client.asked) == 1


async def test_a_response_that_the_sleep_cuts_fails_and_is_no_turn_of_its_conversation(
    http: Http, client: FakeClient
) -> None:
    async with http() as api:
        thread = (await api.post("/v1/conversations", json={})).json()["id"]
        client.ending = FinishReason.ABORT
        asked = {"model": "tiny", "input": "Ahoy", "conversation": thread}
        assert (await api.post("/v1/responses", json=asked)).status_code == 503
        stream = await api.post("/v1/responses", json={**asked, "stream": True})
        assert "event: response.failed" in stream.text and "the engine sleeps" in stream.text
        assert "response.incomplete" not in stream.text
        assert (await api.get(f"/v1/conversations/{thread}/items")).json()["data"] == []
        client.ending = None
        assert (await api.post("/v1/responses", json=asked)).json()["status"] == "completed"
