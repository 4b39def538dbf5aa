"""The page of routes, the check for load balancers of SageMaker, and bodies for routes that do not exist."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest
from fake_engine import FakeClient

Http = Callable[..., httpx.AsyncClient]


@pytest.mark.parametrize("keys", [(), ("k" * 16,)])
async def test_the_page_of_routes_needs_no_key_and_loads_nothing(http: Http, keys: tuple[str, ...]) -> None:
    async with http(api_key=keys) as api:
        page = await api.get("/docs")
        paths = (await api.get("/openapi.json", headers={"authorization": f"Bearer {'k' * 16}"})).json()["paths"]
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert "<script" not in page.text and "src=" not in page.text and "http" not in page.text.split("<h2>")[0][:2000]
    assert all(f"<code>{path}</code>" in page.text for path in paths)
    assert "<code>/openapi.json</code> is the same for programs." in page.text and "name=viewport" in page.text
    assert ("Bearer KEY" in page.text) is bool(keys)


async def test_the_page_of_routes_begins_with_openais_and_has_each_once_below_a_heading(http: Http) -> None:
    async with http() as api:
        page = (await api.get("/docs")).text
        paths = (await api.get("/openapi.json")).json()["paths"]
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert [heading.split()[0] for heading in headings] == ["Models,", "Training", "Ollama&#x27;s", "The", "Schemas"]
    _, models, training, ollama, server, _ = page.split("<h2>")
    assert "<code>/v1/chat/completions</code>" in models and "<code>/v2/rerank</code>" in models
    assert "<code>/api/v1/optim_step</code>" in training and "<code>/api/chat</code>" in ollama
    assert "<code>/health</code>" in server and "<code>/</code>" in server
    shown = [f"<b>{method.upper()}</b> <code>{path}</code>" for path, item in paths.items() for method in item]
    assert all(page.count(each) == 1 for each in shown)


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
async def test_ping_answers_as_health_does_without_a_key(http: Http, client: FakeClient, method: str) -> None:
    async with http(api_key=("k" * 16,)) as api:
        assert (await api.request(method, "/ping")).status_code == 200
        client.die("it ended")
        assert (await api.request(method, "/ping")).status_code == 503


async def test_a_form_for_a_missing_route_is_not_found(http: Http) -> None:
    async with http({"content-type": "multipart/form-data; boundary=x"}) as api:
        assert (await api.post("/v1/audio/transcriptions", content=b"--x--")).status_code == 404
        assert (await api.post("/v1/models", content=b"--x--")).status_code == 405
        assert (await api.post("/v1/completions", content=b"--x--")).status_code == 415
