"""The outermost layer: ids of requests, the prefix of a proxy, the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeClient

from holdfast.engine.logs import JsonFormatter

Http = Callable[..., httpx.AsyncClient]
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


class TestIds:
    """Every answer has an id: the client's own if it is suitable."""

    async def test_the_clients_own_id_comes_back(self, http: Http) -> None:
        async with http() as api:
            answer = await api.post(CHAT, json=HELLO, headers={"x-request-id": "abc-123"})
        assert answer.headers["x-request-id"] == "abc-123"

    @pytest.mark.parametrize("given", [None, "", "a b", "a" * 129, "caf\xe9", "a\tb"])
    async def test_an_unsuitable_id_is_replaced_by_a_new_one(self, http: Http, given: str | None) -> None:
        headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
        async with http() as api:
            ids = [(await api.get("/version", headers=headers)).headers["x-request-id"] for _ in range(2)]
        assert len(set(ids)) == 2 and all(len(id) == 32 and id != given for id in ids)

    async def test_refusals_and_failures_have_an_id(self, http: Http, client: FakeClient) -> None:
        client.refuse = RuntimeError("a bug")
        async with http(api_key=("secret",)) as api:
            refused = await api.post(CHAT, json=HELLO)
            failed = await api.post(CHAT, json=HELLO, headers={"authorization": "Bearer secret"})
            missing = await api.get("/health/none", headers={"authorization": "Bearer secret"})
        assert [answer.status_code for answer in (refused, failed, missing)] == [401, 500, 404]
        assert all(answer.headers["x-request-id"] for answer in (refused, failed, missing))


class TestRootPath:
    """A proxy may keep its prefix or remove it."""

    @pytest.mark.parametrize("prefix", ["", "/llm/v1x"])
    async def test_paths_are_served_with_and_without_the_prefix(self, http: Http, prefix: str) -> None:
        async with http(root_path="/llm/v1x", api_key=("secret",)) as api:
            assert (await api.get(f"{prefix}/health")).status_code == 200, "open without a key"
            assert (await api.post(f"{prefix}{CHAT}", json=HELLO)).status_code == 401
            headers = {"authorization": "Bearer secret"}
            assert (await api.post(f"{prefix}{CHAT}", json=HELLO, headers=headers)).status_code == 200
            document = (await api.get(f"{prefix}/openapi.json", headers=headers)).json()
        assert document["servers"] == [{"url": "/llm/v1x"}]

    async def test_the_prefix_alone_is_the_root_and_a_longer_word_is_not_the_prefix(self, http: Http) -> None:
        async with http(root_path="/llm") as api:
            assert (await api.get("/llm")).json()["name"] == "Holdfast"
            assert "there is no /llmx/health" in (await api.get("/llmx/health")).json()["error"]["message"]


class TestAzure:
    """Clients of Azure's API put the deployment into the path, and the key into a header of its own."""

    @pytest.mark.parametrize("prefix", ["", "/llm"])
    async def test_a_deployment_in_the_path_is_the_model_whatever_the_body_names(self, http: Http, prefix: str) -> None:
        path = f"{prefix}/openai/deployments/{{}}/chat/completions?api-version=2024-10-21"
        async with http({"api-key": "secret"}, root_path=prefix, api_key=("secret",)) as api:
            answers = [
                await api.post(path.format(name), json={**HELLO, "model": model})
                for name, model in (("tiny", "tiny"), ("tiny", "gpt-4"), ("none", "tiny"), ("org/none", ""))
            ]
        assert [each.status_code for each in answers] == [200, 200, 404, 404]
        assert answers[1].json()["model"] == "tiny"
        assert ["org/none" in each.text for each in answers] == [False, False, False, True]

    async def test_azures_own_client_chats_with_its_key_and_deployment(self, http: Http) -> None:
        async with http(api_key=("secret",)) as api:
            given: Any = {"azure_endpoint": "http://localhost", "api_key": "secret", "api_version": "2024-10-21"}
            free = openai.AsyncAzureOpenAI(**given, http_client=api)
            bound = openai.AsyncAzureOpenAI(**given, azure_deployment="tiny", http_client=api)
            answers = [
                await azure.chat.completions.create(model=model, messages=HELLO["messages"])
                for azure, model in ((free, "tiny"), (bound, "gpt-4"))
            ]
            listed = await free.models.list()
        assert [each.choices[0].message.content for each in answers] == ["Ahoy, sailor!"] * 2
        assert [each.id for each in listed.data] == ["tiny"]

    @pytest.mark.parametrize("path", ["/openai/v1/models", "/openai/models", "/openai/v1/models/tiny"])
    async def test_openais_routes_answer_below_azures_path(self, http: Http, path: str) -> None:
        async with http(api_key=("secret",)) as api:
            refused = await api.get(path)
            answer = await api.get(path, headers={"api-key": "secret"})
        assert refused.status_code == 401 and answer.status_code == 200, "the key is checked as for OpenAI's path"
        assert "tiny" in answer.text

    async def test_a_route_that_no_deployment_has_is_named_as_it_was_sent(self, http: Http) -> None:
        path = "/openai/deployments/tiny/audio/speech"
        async with http() as api:
            answer = await api.post(path, json=HELLO)
        assert answer.status_code == 404 and f"there is no {path}" in answer.json()["error"]["message"]


class TestLog:
    """A line for each request, without its text."""

    @pytest.fixture
    def lines(self, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
        caplog.set_level(logging.INFO, "holdfast.requests")
        return lambda: [record.message for record in caplog.records if record.name == "holdfast.requests"]

    async def test_a_log_line_has_status_time_tokens_key_and_id(
        self, http: Http, client: FakeClient, lines: Callable[[], list[str]]
    ) -> None:
        client.cached = 3
        headers = {"authorization": "Bearer secret", "x-request-id": "abc"}
        turn = {"model": "tiny", "input": "hello"}
        async with http(headers, api_key=("secret",)) as api:
            await api.post(CHAT, json=HELLO)
            await api.post(CHAT, json={**HELLO, "stream": True})
            await api.post("/v1/responses", json=turn)
            await api.post(CHAT, json={**HELLO, "model": "other"})
        assert [each.split()[:3] for each in lines()] == [
            ["POST", CHAT, "200"],
            ["POST", CHAT, "200"],
            ["POST", "/v1/responses", "200"],
            ["POST", CHAT, "404"],
        ]
        assert all("in=11 cached=3 out=4" in each for each in lines()[:3])
        assert all("key=" in each and each.endswith("id=abc") for each in lines())
        assert not any("hello" in each or "secret" in each or "Ahoy" in each for each in lines())

    async def test_json_has_a_field_for_each_value_and_the_route_without_ids(
        self, http: Http, client: FakeClient, lines: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
    ) -> None:
        client.cached = 3
        headers = {"authorization": "Bearer secret", "x-request-id": "abc"}
        async with http(headers, api_key=("secret",)) as api:
            made = (await api.post("/v1/responses", json={"model": "tiny", "input": "hello"})).json()
            await api.get(f"/v1/responses/{made['id']}")
            await api.get("/v1/models", headers={"authorization": "Bearer wrong"})
        form = JsonFormatter()
        created, read, refused = (
            json.loads(form.format(each)) for each in caplog.records if each.name == "holdfast.requests"
        )
        assert len(lines()) == 3
        times = {"seconds": created["seconds"], "ttft_seconds": created["ttft_seconds"], "time": created["time"]}
        tenant = created["tenant"]
        assert created == times | {
            "level": "info", "logger": "holdfast.requests", "message": "POST /v1/responses 200", "request": "abc",
            "method": "POST", "route": "/v1/responses", "path": "/v1/responses", "status": 200,
            "bytes": created["bytes"], "client": "127.0.0.1", "key": tenant[:8], "tenant": tenant, "model": "tiny",
            "prompt_tokens": 11, "cached_tokens": 3, "completion_tokens": 4, "queue_seconds": 0.5,
        }  # fmt: skip
        assert len(tenant) == 16
        assert read["route"] == "/v1/responses/{response_id}" and "model" not in read and "prompt_tokens" not in read
        assert refused["status"] == 401 and "key" not in refused and "tenant" not in refused

    async def test_health_checks_are_logged_only_for_debugging(
        self, http: Http, lines: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
    ) -> None:
        async with http() as api:
            await api.get("/health")
            await api.get("/metrics")
            assert lines() == []
            caplog.set_level(logging.DEBUG, "holdfast.requests")
            await api.get("/health")
        assert [each.split()[:3] for each in lines()] == [["GET", "/health", "200"]]

    async def test_a_path_cannot_write_lines_of_its_own(self, http: Http, lines: Callable[[], list[str]]) -> None:
        async with http() as api:
            await api.get("/a%0A%1b[31mb c" + "x" * 999)
        (one,) = lines()
        assert one.startswith("GET /a??[31mb?c") and one.count("x") < 260 and one.isprintable()

    async def test_nothing_is_logged_by_default(self, http: Http, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING, "holdfast.requests")
        async with http() as api:
            await api.post(CHAT, json=HELLO)
        assert not caplog.records
