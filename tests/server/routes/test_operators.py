"""Routes for operators only, and refusals of other web sites, over replicas of scripted engines."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.replicas import Replicas
from holdfast.engine.client.client import EngineClient
from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.run import open_store
from tests.cluster.test_replicas import Scripted, Scripts
from tests.fake_app import FakeApp

SITE = {"origin": "https://evil.example"}
Served = Callable[..., httpx.AsyncClient]


class Numbered(Scripted):
    """A scripted engine that has a process id."""

    pid = 1 << 22


class Engines(Scripts):
    """A spawner of scripted engines with process ids."""

    async def start(self, number: int, on_progress: Callable[[str], None]) -> EngineClient:
        return Numbered(number)


@pytest.fixture
async def replicas() -> AsyncGenerator[Replicas, None]:
    config = ClusterConfig(replicas=2, max_replicas=3, routing="least-loaded")
    started = await Replicas.start(config, Engines())
    yield started
    await started.close()


@pytest.fixture
async def served(replicas: Replicas, tmp_path: Path) -> AsyncGenerator[Served, None]:
    """A client of a server over the replicas and an application, with all existing routes."""
    opened: list[Any] = []

    def make(headers: dict[str, str] | None = None, **fields: Any) -> httpx.AsyncClient:
        config = ServerConfig(store=MEMORY, files=str(tmp_path), **fields)
        app = create_app(replicas, config, open_store(config), apps=[FakeApp()])  # type: ignore[list-item]
        opened.append(app.state)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)

    yield make
    for state in opened:
        for job in reversed(state.jobs):
            await job.close()
        await state.responses.close()


def changing(api: httpx.AsyncClient) -> list[tuple[str, str]]:
    """Return method and path of every route that may change something, with a value for each parameter of its path."""
    app = api._transport.app  # type: ignore[attr-defined]
    routes = [route for route in app.routes if isinstance(route, Route) and route.path != "/ping"]  # it changes nothing
    return [
        (method, re.sub(r"{[^}]*}", "0", route.path))
        for route in routes
        for method in sorted(set(route.methods or ()) - {"GET", "HEAD", "OPTIONS"})
    ]


async def test_without_keys_another_web_site_changes_nothing_by_any_route(served: Served, replicas: Replicas) -> None:
    async with served(SITE) as api:
        walked = changing(api)
        answers = {each: await api.request(*each) for each in walked}
    some = ("POST", "/replicas"), ("DELETE", "/v1/files/0"), ("POST", "/v1/messages"), ("POST", "/v2/models/0/infer")
    assert {*some} <= {*answers}
    taken = {each for each, answer in answers.items() if answer.status_code != 403 or "web site" not in answer.text}
    assert taken == set()
    assert [replica.name for replica in replicas.serving] == ["0", "1"] == [each.name for each in replicas.members]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "origin": "null"},
    ],
)
async def test_an_origin_that_is_not_this_server_is_refused(
    served: Served, replicas: Replicas, headers: dict[str, str]
) -> None:
    async with served(headers) as api:
        refused = await api.post("/replicas")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "--allowed-origin" in refused.json()["error"]["message"] and len(replicas.members) == 2


async def test_one_of_two_origins_that_is_another_site_is_refused(served: Served, replicas: Replicas) -> None:
    async with served() as api:
        both = [("origin", "https://evil.example"), ("origin", "http://localhost")]
        assert (await api.post("/replicas", headers=both)).status_code == 403
    assert len(replicas.members) == 2


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({}, {}),
        ({"origin": "http://localhost"}, {}),
        ({"origin": "http://192.0.2.1:8000", "host": "192.0.2.1:8000"}, {}),
        ({"origin": "https://app.example"}, {"allowed_origin": ("https://app.example",)}),
        ({"origin": "https://app.example"}, {"allowed_origin": ("*",)}),
        ({"origin": "https://llm.example"}, {"allowed_host": ("llm.example",)}),
        ({"origin": "https://proxy.example", "sec-fetch-site": "same-origin"}, {}),
        ({"sec-fetch-site": "none"}, {}),
    ],
)
async def test_programs_the_page_and_allowed_sites_may_add_a_replica(
    served: Served, replicas: Replicas, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    async with served(headers, **fields) as api:
        assert (await api.post("/replicas")).json()["name"] == "2"
    assert len(replicas.members) == 3


async def test_a_site_with_a_rebound_name_changes_nothing_by_any_route(served: Served, replicas: Replicas) -> None:
    """A browser takes a site with this name for the server itself, and says so."""
    rebound = {"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"}
    async with served(rebound) as api:
        answers = {each: await api.request(*each) for each in changing(api)}
    served_here = {each for each, answer in answers.items() if "not known as evil.example" not in answer.text}
    assert served_here == set() and {answer.status_code for answer in answers.values()} == {403}
    assert [each.name for each in replicas.members] == ["0", "1"]


async def test_requests_that_change_nothing_are_allowed_from_another_site(served: Served) -> None:
    async with served(SITE) as api:
        assert (await api.get("/v1/models")).status_code == 200
        assert (await api.post("/health")).status_code == 405


async def test_only_operators_see_the_replicas(served: Served) -> None:
    async with served(api_key=("one", "two"), operator_key=("op",)) as api:
        answers = {}
        for key in ("one", "op"):
            bearer = {"authorization": f"Bearer {key}"}
            answers[key] = await api.get("/replicas", headers=bearer), await api.get("/health", headers=bearer)
            metrics = (await api.get("/metrics", headers=bearer)).text
            assert ('holdfast_replica_up{replica="0"}' in metrics) == (key == "op")
            assert "holdfast_requests_running" in metrics
        anybody = await api.get("/health")
    assert (answers["one"][0].status_code, answers["one"][0].json()["error"]["code"]) == (403, "operator_only")
    assert [(each["name"], each["pid"]) for each in answers["op"][0].json()["data"]] == [("0", 1 << 22), ("1", 1 << 22)]
    assert anybody.json() == answers["one"][1].json() == {"status": "ok"}
    assert [each["name"] for each in answers["op"][1].json()["replicas"]] == ["0", "1"]


async def test_without_keys_programs_on_this_machine_see_the_replicas_and_others_do_not(served: Served) -> None:
    async with served() as api:
        assert (
            len((await api.get("/replicas")).json()["data"]) == len((await api.get("/health")).json()["replicas"]) == 2
        )
        elsewhere = {"x-forwarded-for": "203.0.113.9"}
        assert (await api.get("/replicas", headers=elsewhere)).status_code == 403
        assert (await api.get("/health", headers=elsewhere)).json() == {"status": "ok"}
