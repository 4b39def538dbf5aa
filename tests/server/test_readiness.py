"""The routes by which a balancer decides: does the process run, and should it get requests?"""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest
from fake_engine import FakeClient
from sqlalchemy.exc import DatabaseError

from holdfast.server.conversations.leases import Leases

Http = Callable[..., httpx.AsyncClient]


def fails(*_: object) -> None:
    raise DatabaseError("SELECT", {}, Exception("the disk is full"))


async def test_a_server_whose_engine_and_store_answer_is_ready(http: Http) -> None:
    async with http(api_key=("sesame",)) as api:
        ready = await api.get("/health/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        assert (await api.head("/health/ready")).status_code == 200


async def test_a_server_whose_engine_ends_is_not_ready_and_still_alive(http: Http, client: FakeClient) -> None:
    async with http(health_seconds=0.05) as api:
        client.hangs = True
        hanging = await api.get("/health/ready")
        client.die("gone")
        dead = await api.get("/health/ready")
        assert (hanging.status_code, hanging.json()["reason"]) == (503, "engine hangs")
        assert (dead.status_code, dead.json()["reason"]) == (503, "engine dead")
        alive = await api.get("/health/live")
        assert (alive.status_code, alive.json()) == (200, {"status": "alive"})


async def test_a_server_is_ready_once_its_engine_is_warm_and_stays_so(http: Http, client: FakeClient) -> None:
    async with http() as api:
        client.warming = 1
        cold = await api.get("/health/ready")
        assert (cold.status_code, cold.json()["reason"]) == (503, "warming up")
        assert (await api.get("/health")).status_code == 200, "it serves"
        client.warming = 0
        assert (await api.get("/health/ready")).status_code == 200
        client.warming = 1
        assert (await api.get("/health/ready")).status_code == 200


async def test_an_engine_that_never_has_a_pause_counts_as_warm_after_a_while(
    http: Http, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.readiness.WARM_SECONDS", 0.0)
    async with http() as api:
        client.warming = 1
        assert (await api.get("/health/ready")).status_code == 200


async def test_a_server_whose_store_cannot_be_read_is_not_ready(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    async with http() as api:
        with monkeypatch.context() as patch:
            patch.setattr(Leases, "elsewhere", fails)
            patch.setattr(Leases, "lock", fails)
            for _ in range(2):
                answer = await api.get("/health/ready")
                assert (answer.status_code, answer.json()["reason"]) == (503, "store fails")
            assert (await api.get("/health/live")).status_code == 200
        assert (await api.get("/health/ready")).status_code == 200


async def test_a_failed_write_makes_a_server_unready_until_the_store_takes_a_write(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with http() as api:
        with monkeypatch.context() as patch:
            patch.setattr("holdfast.server.conversations.conversation_store.ConversationStore.create", fails)
            assert (await api.post("/v1/conversations", json={})).status_code == 503
            patch.setattr(Leases, "lock", fails)
            assert (await api.get("/health/ready")).json()["reason"] == "store fails"
        assert (await api.get("/health/ready")).status_code == 200


async def test_a_store_that_does_not_answer_in_time_makes_a_server_unready(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with http(health_seconds=0.05) as api:
        with monkeypatch.context() as patch:
            goes_on = threading.Event()
            patch.setattr(Leases, "elsewhere", lambda *_: goes_on.wait())
            assert (await api.get("/health/ready")).json()["reason"] == "store hangs"
            goes_on.set()
