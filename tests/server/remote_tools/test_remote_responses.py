"""Responses with tools of remote servers, over a scripted model and scripted servers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, Rounds, engine_info
from serving import listening
from sqlalchemy import update

from holdfast.server.conversations import server_tools, service
from holdfast.server.conversations.database import Database, leases
from holdfast.server.remote_tools.hosts import AllowedHosts
from holdfast.server.remote_tools.values import RemoteFault, RemoteServer, Result

SEA = {
    "type": "mcp", "server_label": "sea", "server_url": "https://sea.example/secret-path",
    "authorization": "secret-token", "headers": {"X-Key": "secret-header"}, "require_approval": "never",
}  # fmt: skip
ASKING = SEA | {"require_approval": "always"}
FUNCTION = {"type": "function", "name": "forecast"}
TIDES = {
    "name": "tides", "description": "Tides of a harbour.", "annotations": None,
    "input_schema": {"type": "object", "properties": {"harbour": {"type": "string"}}, "required": ["harbour"]},
}  # fmt: skip
CALLED = '<tool_call>\n{"name": "tides", "arguments": {"harbour": "Dover"}}\n</tool_call>'
"""A call in a prompt."""
Http = Callable[..., httpx.AsyncClient]


@dataclass
class Remote:
    """The state of all scripted servers."""

    tools: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"sea": [TIDES]})
    fault: RemoteFault | None = None
    """Fault of each list; None: lists come."""
    listed: list[str] = field(default_factory=list)
    called: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    closed: int = 0
    together: asyncio.Barrier | None = None
    """Where calls wait for each other; None: they do not."""
    result: Result | RemoteFault = Result("high water at six")  # noqa: RUF009  never changed


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Remote:
    """Replace the module that speaks to servers."""
    made = Remote()

    class Session:
        def __init__(self, server: RemoteServer, allowed: AllowedHosts, seconds: float) -> None:
            self.server = server
            made.headers.append(dict(server.headers))

        async def list_tools(self) -> list[dict[str, Any]]:
            made.listed.append(self.server.label)
            if made.fault is not None:
                raise made.fault
            return made.tools[self.server.label]

        async def call(self, name: str, arguments: dict[str, Any]) -> Result:
            made.called.append((self.server.label, name, arguments))
            if made.together is not None:
                await made.together.wait()
            if isinstance(made.result, RemoteFault):
                raise made.result
            return made.result

        async def close(self) -> None:
            made.closed += 1

        def abort(self) -> None:
            pass

    module = ModuleType("session")
    module.Session = Session  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "holdfast.server.remote_tools.session", module)
    if importlib.util.find_spec("mcp") is None:
        sdk = ModuleType("mcp")
        sdk.__spec__ = ModuleSpec("mcp", None)
        monkeypatch.setitem(sys.modules, "mcp", sdk)
    return made


def call(name: str = "tides", **arguments: Any) -> str:
    return f'<tool_call>|{{"name": "{name}", "arguments": {json.dumps(arguments)}}}|</tool_call>'


@pytest.fixture
def client() -> Rounds:
    client = Rounds(engine_info(max_model_len=8192))
    client.texts = (call(harbour="Dover"), "At| six.")
    return client


@pytest.fixture
def api(http: Http, remote: Remote) -> httpx.AsyncClient:
    return http(mcp_allow=("sea.example", "air.example"))


def prompt(client: FakeClient, number: int) -> str:
    return client.text.decode(client.asked[number].prompt)


async def post(api: httpx.AsyncClient, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await api.post("/v1/responses", json={"model": "tiny", "input": "High water?", "tools": [SEA]} | body)
    assert response.status_code == status, response.text
    return dict(response.json())


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


async def events_of(api: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    asked = {"model": "tiny", "input": "High water?", "tools": [SEA], "stream": True}
    text = (await api.post("/v1/responses", json=asked | body)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_the_model_continues_with_the_result_of_a_call(
    api: httpx.AsyncClient, client: Rounds, remote: Remote
) -> None:
    whole = await post(api)
    listed, called, said = whole["output"]
    assert (listed["type"], listed["server_label"], listed["error"]) == ("mcp_list_tools", "sea", None)
    assert listed["tools"] == [TIDES]
    assert (called["type"], called["name"], called["status"], called["error"]) == (
        "mcp_call",
        "tides",
        "completed",
        None,
    )
    assert (json.loads(called["arguments"]), called["output"]) == ({"harbour": "Dover"}, "high water at six")
    assert (said["content"][0]["text"], whole["status"]) == ("At six.", "completed")
    assert remote.called == [("sea", "tides", {"harbour": "Dover"})]
    assert "tides" in prompt(client, 0)
    assert "high water at six" in prompt(client, 1)
    assert whole["usage"]["input_tokens"] == sum(len(asked.prompt) for asked in client.asked)


async def test_secrets_reach_the_server_and_nobody_else(api: httpx.AsyncClient, client: Rounds, remote: Remote) -> None:
    whole = await post(api)
    stored = (await api.get(f"/v1/responses/{whole['id']}")).text
    assert remote.headers == [{"X-Key": "secret-header", "Authorization": "Bearer secret-token"}]
    assert "secret" not in json.dumps(whole) + stored + prompt(client, 0) + prompt(client, 1)


async def test_a_stream_reports_lists_and_calls(api: httpx.AsyncClient) -> None:
    events = await events_of(api)
    assert [event["type"] for event in events[:12]] == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.mcp_list_tools.in_progress", "response.mcp_list_tools.completed",
        "response.output_item.done",
        "response.output_item.added", "response.mcp_call.in_progress", "response.mcp_call_arguments.delta",
        "response.mcp_call_arguments.done", "response.mcp_call.completed", "response.output_item.done",
    ]  # fmt: skip
    assert events[2]["item"]["tools"] == [] and events[5]["item"]["tools"] == [TIDES]
    assert (events[6]["item"]["arguments"], events[6]["item"]["output"]) == ("", None)
    arguments = "".join(event["delta"] for event in events if event["type"] == "response.mcp_call_arguments.delta")
    assert arguments == events[9]["arguments"] == events[11]["item"]["arguments"]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][:2] == [events[5]["item"], events[11]["item"]]
    assert {event["output_index"] for event in events if event["type"] == "response.output_item.done"} == {0, 1, 2}


async def test_the_next_turn_knows_the_list_and_the_call(
    api: httpx.AsyncClient, client: Rounds, remote: Remote
) -> None:
    first = await post(api)
    again = await post(api, input="And tomorrow?", previous_response_id=first["id"])
    history = [{"role": "user", "content": "High water?"}, *first["output"]]
    await post(api, input=[*history, {"role": "user", "content": "And tomorrow?"}])
    assert (kinds(again), remote.listed) == (["message"], ["sea"])
    ends = [prompt(client, number).partition("high water at six")[2] for number in (2, 3)]
    assert ends[0] == ends[1] != ""
    assert prompt(client, 2).count(CALLED) == 1


async def test_a_server_that_lists_nothing_fails_its_response_only(
    api: httpx.AsyncClient, client: Rounds, remote: Remote
) -> None:
    remote.fault = RemoteFault("Http status code: 401 (Unauthorized)", code=401)
    refused = await post(api, status=424)
    assert refused["error"] == {
        "message": "Error retrieving tool list from MCP server: 'sea'. Http status code: 401 (Unauthorized)",
        "type": "external_connector_error", "param": "tools", "code": "http_error",
    }  # fmt: skip
    events = await events_of(api)
    assert [event["type"] for event in events[3:]] == [
        "response.mcp_list_tools.in_progress", "response.mcp_list_tools.failed", "response.output_item.done",
        "response.failed",
    ]  # fmt: skip
    assert events[5]["item"]["error"] == "Http status code: 401 (Unauthorized)"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert client.asked == []
    assert (await post(api, tools=[]))["status"] == "completed"


@pytest.mark.parametrize(
    ("result", "read"),
    [
        (Result(None, {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "no such port"}]}),
         "no such port"),
        (RemoteFault("the call took more than 60 s", code=504), "The call failed: the call took more than 60 s"),
    ],
)  # fmt: skip
async def test_the_model_reads_that_a_call_failed(
    api: httpx.AsyncClient, client: Rounds, remote: Remote, result: Any, read: str
) -> None:
    remote.result = result
    whole = await post(api)
    _, called, said = whole["output"]
    assert (called["status"], called["output"], said["status"]) == ("failed", None, "completed")
    assert called["error"] == (result.error() if isinstance(result, RemoteFault) else result.error)
    assert read in prompt(client, 1)
    assert read in json.dumps(await post(api, input=whole["output"], status=200)) or read in prompt(client, 2)


async def test_arguments_that_are_not_an_object_call_nothing(
    api: httpx.AsyncClient, client: Rounds, remote: Remote
) -> None:
    client.texts = ('<tool_call>|{"name": "tides", "arguments": [1]}|</tool_call>', "Sorry.")
    whole = await post(api)
    assert whole["output"][1]["error"]["code"] == 400
    assert remote.called == []


async def test_calls_of_one_answer_run_side_by_side(api: httpx.AsyncClient, client: Rounds, remote: Remote) -> None:
    client.texts = (call(harbour="Dover") + "|" + call(harbour="Calais"), "Done.")
    remote.together = asyncio.Barrier(2)
    whole = await post(api)
    assert kinds(whole) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert [given["harbour"] for _, _, given in remote.called] == ["Dover", "Calais"]


async def test_calls_end_at_the_limit(api: httpx.AsyncClient, client: Rounds, remote: Remote) -> None:
    client.texts = (call(harbour="Dover") + "|" + call(harbour="Calais"), "Done.")
    whole = await post(api, max_tool_calls=1)
    statuses = [item.get("status") for item in whole["output"]]
    assert kinds(whole) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert statuses == [None, "completed", "failed", "completed"]
    assert len(remote.called) == 1
    assert "<tools>" in prompt(client, 0) and "<tools>" not in prompt(client, 1)


async def test_calls_without_a_limit_of_the_request_end_at_the_servers(
    api: httpx.AsyncClient, client: Rounds, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tools, "MOST_CALLS", 3)
    client.texts = (*[call(harbour="Dover")] * 5, "Done.")
    await post(api)
    assert len(remote.called) == 3


async def test_a_call_waits_for_the_users_approval(api: httpx.AsyncClient, client: Rounds, remote: Remote) -> None:
    asked = await post(api, tools=[ASKING])
    _, request = asked["output"]
    assert (request["type"], request["name"], request["server_label"]) == ("mcp_approval_request", "tides", "sea")
    assert json.loads(request["arguments"]) == {"harbour": "Dover"}
    assert (asked["status"], remote.called, len(client.asked)) == ("completed", [], 1)
    answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    whole = await post(api, tools=[ASKING], input=[answer], previous_response_id=asked["id"])
    called, said = whole["output"]
    assert (called["type"], called["approval_request_id"]) == ("mcp_call", request["id"])
    assert (called["arguments"], called["output"]) == (request["arguments"], "high water at six")
    assert said["content"][0]["text"] == "At six."
    assert prompt(client, 1).count(CALLED) == 1 and "high water at six" in prompt(client, 1)
    await post(api, tools=[ASKING], input=[answer], previous_response_id=whole["id"])
    assert len(remote.called) == 1, "an approval counts once"


async def test_an_approval_works_without_the_store(api: httpx.AsyncClient, remote: Remote) -> None:
    asked = await post(api, tools=[ASKING], store=False)
    request = asked["output"][1]
    answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    whole = await post(api, tools=[ASKING], store=False, input=[*asked["output"], answer])
    assert kinds(whole) == ["mcp_call", "message"]
    assert remote.listed == ["sea"]


async def test_a_call_that_is_not_approved_is_not_made(api: httpx.AsyncClient, client: Rounds, remote: Remote) -> None:
    asked = await post(api, tools=[ASKING])
    answer = {"type": "mcp_approval_response", "approval_request_id": asked["output"][1]["id"], "approve": False}
    whole = await post(api, tools=[ASKING], input=[answer | {"reason": "too wet"}], previous_response_id=asked["id"])
    assert (kinds(whole), remote.called) == (["message"], [])
    assert "The user has not approved this call. Reason: too wet" in prompt(client, 1)


async def test_an_approval_of_nothing_is_refused(api: httpx.AsyncClient) -> None:
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_none", "approve": True}
    events = await events_of(api, input=[answer])
    assert "input[0].approval_request_id is 'mcpr_none'" in events[-1]["response"]["error"]["message"]


async def test_an_approval_without_its_server_is_refused(api: httpx.AsyncClient) -> None:
    asked = await post(api, tools=[ASKING])
    answer = {"type": "mcp_approval_response", "approval_request_id": asked["output"][1]["id"], "approve": True}
    refused = await post(api, status=400, tools=[], input=[answer], previous_response_id=asked["id"])
    assert refused["error"]["param"] == "input[0]"


async def test_an_approval_request_is_streamed_with_its_arguments_at_its_end(api: httpx.AsyncClient) -> None:
    events = await events_of(api, tools=[ASKING])
    of_request = [event for event in events if event.get("output_index") == 1]
    assert [event["type"] for event in of_request] == ["response.output_item.added", "response.output_item.done"]
    assert of_request[0]["item"]["arguments"] == ""
    assert json.loads(of_request[1]["item"]["arguments"]) == {"harbour": "Dover"}


async def test_a_function_called_next_to_a_remote_tool_is_left_to_the_client(
    api: httpx.AsyncClient, client: Rounds
) -> None:
    client.texts = (call(harbour="Dover") + "|" + call("forecast"),)
    whole = await post(api, tools=[SEA, FUNCTION])
    assert kinds(whole) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert whole["output"][1]["status"] == "completed"
    assert len(client.asked) == 1


async def test_a_cut_answer_calls_nothing(api: httpx.AsyncClient, remote: Remote) -> None:
    whole = await post(api, max_output_tokens=2)
    assert (whole["status"], remote.called) == ("incomplete", [])
    assert whole["output"][1]["status"] == "failed"


@pytest.mark.parametrize("choice", [{"type": "mcp", "server_label": "sea"},
                                    {"type": "mcp", "server_label": "sea", "name": "tides"}])  # fmt: skip
async def test_a_required_remote_tool_is_called_once(
    api: httpx.AsyncClient, client: Rounds, choice: dict[str, str]
) -> None:
    await post(api, tool_choice=choice)
    assert client.asked[0].params.grammar is not None
    assert client.asked[1].params.grammar is None


async def test_a_choice_that_the_server_does_not_have_fails_the_response(api: httpx.AsyncClient) -> None:
    refused = await post(api, status=400, tool_choice={"type": "mcp", "server_label": "sea", "name": "waves"})
    assert (refused["error"]["param"], "sea.waves" in refused["error"]["message"]) == ("tool_choice", True)


async def test_a_background_response_is_replayed_with_its_calls(api: httpx.AsyncClient) -> None:
    begun = await post(api, background=True)
    while (whole := (await api.get(f"/v1/responses/{begun['id']}")).json())["status"] != "completed":
        await asyncio.sleep(0.01)
    replayed = (await api.get(f"/v1/responses/{begun['id']}?stream=true")).text
    assert kinds(whole) == ["mcp_list_tools", "mcp_call", "message"]
    assert replayed.count("event: response.mcp_call.completed") == 1
    assert replayed.count("event: response.mcp_call_arguments.done") == 1


@pytest.mark.parametrize(("error", "listed"), [(None, []), ("gone", ["sea"])])
async def test_a_list_that_the_client_sends_back_is_used_unless_it_failed(
    api: httpx.AsyncClient, client: Rounds, remote: Remote, error: str | None, listed: list[str]
) -> None:
    known = {"type": "mcp_list_tools", "server_label": "sea", "tools": [] if error else [TIDES], "error": error}
    whole = await post(api, input=[known, {"role": "user", "content": "High water?"}])
    assert remote.listed == listed
    assert kinds(whole)[-2:] == ["mcp_call", "message"]


async def test_a_background_response_whose_server_fails_has_failed(api: httpx.AsyncClient, remote: Remote) -> None:
    remote.fault = RemoteFault("gone", code=502)
    begun = await post(api, background=True)
    while (whole := (await api.get(f"/v1/responses/{begun['id']}")).json())["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
    assert (whole["status"], whole["error"]["code"]) == ("failed", "server_error")


async def test_connections_end_with_the_response(api: httpx.AsyncClient, remote: Remote) -> None:
    remote.fault = RemoteFault("gone", code=502)
    await post(api, status=424)
    while not remote.closed:
        await asyncio.sleep(0.002)
    assert remote.closed == 1


async def test_a_stored_call_is_found_by_a_search(api: httpx.AsyncClient, remote: Remote) -> None:
    remote.result = RemoteFault("gone", code=502)
    talk = (await api.post("/v1/conversations", json={})).json()["id"]
    await post(api, conversation=talk)
    found = (await api.get("/v1/conversations?search=Dover")).json()["data"]
    assert [each["id"] for each in found] == [talk]


async def test_a_host_that_is_not_allowed_is_refused_before_anything(api: httpx.AsyncClient, remote: Remote) -> None:
    refused = await post(api, status=400, tools=[SEA | {"server_url": "https://evil.example/mcp"}])
    assert refused["error"]["param"] == "tools[0].server_url"
    assert "--mcp-allow" in refused["error"]["message"]
    assert remote.headers == []


async def test_without_allowed_hosts_the_tool_is_refused(http: Http) -> None:
    async with http() as api:
        refused = await post(api, status=400)
    assert (refused["error"]["param"], "--mcp-allow" in refused["error"]["message"]) == ("tools[0].type", True)


async def test_counting_and_compacting_ask_no_server(api: httpx.AsyncClient, client: Rounds, remote: Remote) -> None:
    body = {"model": "tiny", "input": "High water?", "tools": [SEA]}
    assert (await api.post("/v1/responses/input_tokens", json=body)).status_code == 200
    client.texts = ("A summary.",)
    assert (await api.post("/v1/responses/compact", json=body)).status_code == 200
    assert remote.headers == []


async def test_a_response_whose_server_is_killed_fails_at_another_one_and_its_conversation_goes_on(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RENEW_SECONDS", 3600)
    monkeypatch.setattr(service, "SWEEP_SECONDS", 0.02)
    remote.together = asyncio.Barrier(2)
    engines = [Rounds(engine_info(max_model_len=8192), adopts=True) for _ in range(2)]
    path = str(tmp_path / "s.sqlite")
    async with AsyncExitStack() as held:
        clients = []
        for engine in engines:
            engine.texts = (call(harbour="Dover"), "At| six.")
            server = await held.enter_async_context(listening(engine, mcp_allow=("sea.example",), store=path))
            clients.append(await held.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=60)))
        here, there = clients
        talk = (await there.post("/v1/conversations", json={})).json()["id"]
        begun = (await post(here, background=True, conversation=talk))["id"]
        while not remote.called:
            await asyncio.sleep(0.002)
        with Database(path).write() as db:
            db.execute(update(leases).values(seen=1))  # The server was killed a while ago.
        found = (await there.get(f"/v1/responses/{begun}")).json()
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
        assert "secret" not in json.dumps(found)
        remote.together = None
        later = await post(there, conversation=talk)
        assert kinds(later) == ["mcp_list_tools", "mcp_call", "message"]
        assert len(remote.called) == 2, "another server does not repeat a call that may have done something"
