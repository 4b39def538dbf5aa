"""The ring of keys, and requests with stored keys through OpenAI's client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeClient
from stored_keys import Stored, bearer

from holdfast.server import app
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds
from holdfast.server.keys.ring import CACHE_SECONDS, WAIT_SECONDS, KeyRing
from holdfast.server.keys.tables import NO_KEYS, Snapshot
from holdfast.server.keys.values import Key, Limits, Scope, Secret, digest_of
from holdfast.server.protocol import ApiError

Http = Callable[..., httpx.AsyncClient]
CHAT = "/v1/chat/completions"
HELLO: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


Official = Callable[[str, str], openai.AsyncOpenAI]


def snapshot(version: int, **secrets: Secret) -> Snapshot:
    return Snapshot(version, {digest_of(name.encode()): secret for name, secret in secrets.items()})


KEY = Key(name="acme", tenant="t", scopes=("use",), created=0.0)


class Clock:
    """A clock that the test sets."""

    time = 0.0

    def __call__(self) -> float:
        return self.time


class TestRing:
    def test_a_stored_entry_overrides_the_same_secret_of_the_configuration(self) -> None:
        config = ServerConfig(api_key=("sesame", "other"))
        revoked = Key(name="acme", tenant="t", scopes=("use",), created=0.0, revoked=1.0)
        ring = KeyRing(config, snapshot(1, sesame=Secret(revoked)), _unchanged)
        assert ring.find(b"sesame") is None
        assert ring.find(b"other") is not None
        assert ring.find(b"") is None and ring.find(b"\xff") is None

    def test_keys_are_asked_for_even_when_all_stored_ones_are_revoked(self) -> None:
        revoked = Key(name="acme", tenant="t", scopes=("use",), created=0.0, revoked=1.0)
        assert KeyRing(ServerConfig(), snapshot(1, one=Secret(revoked)), _unchanged).keyed
        assert not KeyRing(ServerConfig(operator_key=("boss",)), NO_KEYS, _unchanged).keyed

    async def test_the_store_is_looked_at_once_per_cache_time(self) -> None:
        looks = []

        async def load(version: int) -> Snapshot | None:
            looks.append(version)
            return snapshot(version + 1, one=Secret(KEY))

        clock = Clock()
        ring = KeyRing(ServerConfig(), NO_KEYS, load, clock, clock)
        await ring.refresh()
        assert looks == []
        clock.time = CACHE_SECONDS
        await asyncio.gather(*(ring.refresh() for _ in range(5)))
        assert looks == [0] and ring.find(b"one") == KEY
        clock.time = 1.9 * CACHE_SECONDS
        await ring.refresh()
        assert looks == [0]
        clock.time = 2 * CACHE_SECONDS
        await ring.refresh()
        assert looks == [0, 1]

    async def test_the_keys_read_last_stay_while_the_store_fails(self) -> None:
        async def load(version: int) -> Snapshot | None:
            raise ApiError("the store fails", status=503)

        clock = Clock()
        ring = KeyRing(ServerConfig(), snapshot(1, one=Secret(KEY)), load, clock, clock)
        clock.time = CACHE_SECONDS
        await ring.refresh()
        assert ring.find(b"one") == KEY

    async def test_a_store_that_hangs_delays_requests_by_a_bounded_time(self) -> None:
        async def load(version: int) -> Snapshot | None:
            await asyncio.Event().wait()
            return None

        clock = Clock()
        ring = KeyRing(ServerConfig(), snapshot(1, one=Secret(KEY)), load, clock, clock)
        clock.time = CACHE_SECONDS
        began = time.monotonic()
        await ring.refresh()
        assert WAIT_SECONDS * 0.9 < time.monotonic() - began < WAIT_SECONDS + 60
        assert ring.find(b"one") == KEY

    def test_a_secret_ends_between_two_looks(self) -> None:
        clock = Clock()
        ring = KeyRing(ServerConfig(), snapshot(1, one=Secret(KEY, 10.0)), _unchanged, clock, clock)
        clock.time = 9.9
        assert ring.find(b"one") == KEY
        clock.time = 10.0
        assert ring.find(b"one") is None


async def _unchanged(version: int) -> None:
    return None


@pytest.mark.usefixtures("always_current")
class TestServed:
    """Keys that change while the server runs."""

    async def test_rotation_keeps_conversations(
        self, listening: Any, official: Official, store: str, keys: Stored
    ) -> None:
        keys.add("acme", "first", limits=Limits(streams=2))
        async with listening(store=store) as server:
            one = official(server.url, "first")
            answer = await one.responses.create(model="tiny", input="hello")
            keys.rotate("acme", "second", overlap=60.0)
            two = official(server.url, "second")
            going_on = await two.responses.create(model="tiny", input="more", previous_response_id=answer.id)
            assert going_on.previous_response_id == answer.id
            assert (await one.responses.retrieve(answer.id)).id == answer.id  # The first key overlaps.

    async def test_a_revoked_key_is_refused(self, listening: Any, official: Official, store: str, keys: Stored) -> None:
        keys.add("acme", "first")
        async with listening(store=store) as server:
            api = official(server.url, "first")
            await api.chat.completions.create(**HELLO)
            keys.table.revoke("acme")
            with pytest.raises(openai.AuthenticationError) as error:
                await api.chat.completions.create(**HELLO)
            assert error.value.code == "invalid_api_key"

    async def test_an_old_key_keeps_its_conversations_when_it_moves_to_the_store(
        self, listening: Any, official: Official, store: str, keys: Stored
    ) -> None:
        async with listening(store=store, api_key=("old", "other")) as server:
            api = official(server.url, "old")
            answer = await api.responses.create(model="tiny", input="hello")
            keys.add("acme", "old")
            keys.rotate("acme", "new")
            found = await official(server.url, "new").responses.retrieve(answer.id)
            assert found.id == answer.id
            with pytest.raises(openai.AuthenticationError):  # The store overrides the configuration.
                await api.responses.retrieve(answer.id)
            with pytest.raises(openai.NotFoundError):
                await official(server.url, "other").responses.retrieve(answer.id)

    async def test_two_keys_of_one_tenant_find_the_same_conversations(
        self, listening: Any, official: Official, store: str, keys: Stored
    ) -> None:
        keys.add("one", "1", tenant="acme")
        keys.add("two", "2", tenant="acme")
        keys.add("three", "3")
        async with listening(store=store) as server:
            answer = await official(server.url, "1").responses.create(model="tiny", input="hello")
            assert (await official(server.url, "2").responses.retrieve(answer.id)).id == answer.id
            with pytest.raises(openai.NotFoundError):
                await official(server.url, "3").responses.retrieve(answer.id)

    async def test_the_first_key_in_the_store_closes_an_open_server(self, http: Http, store: str, keys: Stored) -> None:
        async with http(store=store) as api:
            assert (await api.post(CHAT, json=HELLO)).status_code == 200
            keys.add("acme", "first")
            refused = await api.post(CHAT, json=HELLO)
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
            assert (await api.post(CHAT, json=HELLO, headers=bearer("first"))).status_code == 200
            assert "security" in (await api.get("/openapi.json", headers=bearer("first"))).json()
            assert (await api.get("/health")).status_code == 200
            keys.table.revoke("acme")
            assert (await api.post(CHAT, json=HELLO)).status_code == 401

    async def test_stored_keys_share_the_places(self, http: Http, store: str, keys: Stored) -> None:
        keys.add("one", "1")
        keys.add("two", "2")
        async with http(store=store, tenant_share=0) as api:
            found = await api.post(CHAT, json={**HELLO, "n": 5}, headers=bearer("1"))
            assert found.status_code == 400  # Only the 4 running sequences are one key's, no waiting place.
        keys.table.revoke("two")
        async with http(store=store, tenant_share=0) as api:
            assert (await api.post(CHAT, json={**HELLO, "n": 5}, headers=bearer("1"))).status_code == 200


class TestScopes:
    async def test_a_key_without_use_cannot_generate_or_store(
        self, http: Http, client: FakeClient, store: str, keys: Stored
    ) -> None:
        keys.add("ops", "boss", "operator")
        async with http(store=store, headers=bearer("boss")) as api:
            for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/conversations", "/tokenize",
                         "/v1/batches", "/v1/files"):  # fmt: skip
                refused = await api.post(path, json=HELLO)
                assert refused.status_code == 403, path
                error = refused.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["code"] == "insufficient_permissions" and "scope use" in error["message"]
            message = await api.post("/v1/messages", json=HELLO)
            assert (message.status_code, message.json()["error"]["type"]) == (403, "permission_error")
            assert (await api.get("/v1/models")).status_code == 200
            assert (await api.get("/metrics")).status_code == 200
        assert client.asked == []

    async def test_operators_paths_need_the_scope_operator(self, http: Http, store: str, keys: Stored) -> None:
        keys.add("acme", "user", "use", "adapters")
        async with http(store=store, headers=bearer("user")) as api:
            refused = await api.get("/v1/engine/events")
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "operator_only"

    @pytest.mark.parametrize(("scopes", "status"), [
        (("use",), 403), (("adapters",), 400), (("operator",), 400), (("use", "adapters"), 400),
    ])  # fmt: skip
    async def test_changing_adapters_needs_a_scope(
        self, http: Http, store: str, keys: Stored, scopes: tuple[Scope, ...], status: int
    ) -> None:
        keys.add("acme", "user", *scopes)
        async with http(store=store, headers=bearer("user")) as api:
            for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
                answer = await api.post(path, json={})
                assert answer.status_code == status, answer.text  # 400: this server serves no adapters.


class ThreadsBegun(Exception):
    """Raised where the store's threads would begin."""


def test_keys_are_read_before_any_other_thread_uses_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object) -> None:
        raise ThreadsBegun

    read: list[Store] = []
    monkeypatch.setattr(app, "AsyncStore", begin)
    monkeypatch.setattr(app, "read_keys", read.append)
    with closing(Store.open("memory", Bounds(seconds=3600.0, threads=10, bytes=1 << 20))) as store:
        with pytest.raises(ThreadsBegun):
            app.create_app(None, ServerConfig(), store)
        assert read == [store]
