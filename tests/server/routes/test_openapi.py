"""The OpenAPI document is complete, agrees with the routes' answers, and states where keys are needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema_rs
import pytest
from fake_app import FakeApp
from fake_engine import FakeClient

from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.routes.openapi import METHODS, QUERIES, REPLIES, SCHEMAS
from holdfast.server.run import open_store

Http = Callable[..., httpx.AsyncClient]


def documented(**config: Any) -> dict[str, Any]:
    settings = ServerConfig(**{"store": MEMORY, **config})
    app = create_app(FakeClient(), settings, open_store(settings), [FakeApp()])  # type: ignore[arg-type,list-item]
    found: dict[str, Any] = json.loads(json.dumps(app.openapi()))
    return found


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return documented()


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    }


def test_the_document_contains_everything_that_it_refers_to(document: dict[str, Any]) -> None:
    referred = set(re.findall(r'"\$ref": "(.*?)"', json.dumps(document)))
    assert referred == {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}


def test_every_reply_and_query_is_of_a_route_and_every_route_has_a_reply(document: dict[str, Any]) -> None:
    routes = set(operations(document))
    assert set(REPLIES) | set(QUERIES) <= routes
    assert {route for route in routes if "/v2" not in route or route in REPLIES} == set(REPLIES)


def test_refusals_are_documented_with_their_shape_and_never_as_422(document: dict[str, Any]) -> None:
    for route, operation in operations(document).items():
        assert set(operation["responses"]) == {"200", "4XX", "5XX"}
        plain = (" /v2" in route and " /v2/rerank" not in route) or (" /api/" in route and " /api/v1/" not in route)
        error = "InferenceError" if plain else "MessageError" if "/v1/messages" in route else "Error"
        for refusal in ("4XX", "5XX"):
            schema = operation["responses"][refusal]["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{error}"}


def test_operation_ids_are_unique(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for operation in operations(document).values()]
    assert len(set(ids)) == len(ids)


def test_keys_are_required_if_the_server_has_some_except_for_its_health(document: dict[str, Any]) -> None:
    assert "security" not in document
    keyed = documented(api_key=("secret",))
    assert keyed["security"] == [{"key": []}]
    assert keyed["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    free = {route for route, operation in operations(keyed).items() if operation.get("security") == []}
    health = {"GET /health", "GET /health/live", "GET /health/ready", "GET /ping", "POST /ping"}
    assert free == health | {"GET /v2/health/live", "GET /v2/health/ready"}


def test_request_bodies_list_parameters_without_effect(document: dict[str, Any]) -> None:
    body = operations(document)["POST /v1/chat/completions"]["requestBody"]["content"]["application/json"]["schema"]
    for taken in ({"user": "x"}, {"verbosity": "high"}, {"presence_penalty": 0}, {"suffix": None}, {"seed": -1}):
        jsonschema_rs.validate(body, {"model": "tiny", "messages": [{}], **taken})
    for refused in ({"presence_penalty": 3}, {"suffix": "x"}, {"temprature": 1}):
        with pytest.raises(jsonschema_rs.ValidationError):
            jsonschema_rs.validate(body, {"model": "tiny", "messages": [{}], **refused})


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_json_schema(document: dict[str, Any], name: str) -> None:
    jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMAS[name]})


async def test_answers_have_the_documented_fields(http: Http, document: dict[str, Any]) -> None:
    def check(route: str, answer: httpx.Response) -> dict[str, Any]:
        assert answer.status_code == 200
        schema = operations(document)[route]["responses"]["200"]["content"]["application/json"]["schema"]
        body: dict[str, Any] = answer.json()
        jsonschema_rs.validate({**schema, "components": document["components"]}, body)
        return body

    turn = {"model": "tiny", "input": "hello"}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    async with http() as api:
        for path in ("/", "/health", "/v1/models", "/v1/files", "/v1/batches", "/v1/fine_tuning/jobs"):
            check(f"GET {path}", await api.get(path))
        check("GET /v1/models/{model}", await api.get("/v1/models/tiny"))
        check("POST /v1/chat/completions", await api.post("/v1/chat/completions", json=chat))
        check("POST /v1/completions", await api.post("/v1/completions", json={"model": "tiny", "prompt": "a"}))
        check("POST /v1/responses/input_tokens", await api.post("/v1/responses/input_tokens", json=turn))
        answered = check("POST /v1/responses", await api.post("/v1/responses", json=turn))
        path = f"/v1/responses/{answered['id']}"
        check("GET /v1/responses/{response_id}", await api.get(path))
        check("GET /v1/responses/{response_id}/input_items", await api.get(f"{path}/input_items"))
        check("DELETE /v1/responses/{response_id}", await api.delete(path))
        made = check("POST /v1/conversations", await api.post("/v1/conversations", json={}))
        items = f"/v1/conversations/{made['id']}/items"
        check("GET /v1/conversations/{conversation_id}/items", await api.get(items))
        refused = await api.post("/v1/responses", json={})
    schema = {**SCHEMAS["Error"], "components": document["components"]}
    jsonschema_rs.validate(schema, refused.json())
