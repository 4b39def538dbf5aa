"""Web searches that the server runs for the model: the search engine's side, and responses with several answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from fake_engine import FakeClient, Rounds, engine_info

from holdfast.server import search
from holdfast.server.config import ServerConfig
from holdfast.server.search import SearchFailed, WebSearch, read_query

PAGES = [{"url": f"https://sea.example/{n}", "title": f"Page {n}", "content": f"tides of day {n}"} for n in range(12)]
TOOLS = [{"type": "web_search"}]
FUNCTION = {"type": "function", "name": "forecast"}


@dataclass
class Engine:
    """A search engine like SearXNG."""

    url: str = ""
    body: bytes = json.dumps({"results": PAGES, "query": "tides"}).encode()
    status: int = 200
    asked: list[dict[str, list[str]]] = field(default_factory=list)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            made.asked.append({"path": [parts.path], **parse_qs(parts.query)})
            self.send_response(made.status)
            self.send_header("content-length", str(len(made.body)))
            self.end_headers()
            self.wfile.write(made.body)

        def log_message(self, *said: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}/"
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def call(**arguments: Any) -> str:
    return f'<tool_call>|{{"name": "web_search", "arguments": {json.dumps(arguments)}}}|</tool_call>'


@pytest.fixture
def client() -> Rounds:
    client = Rounds(engine_info(max_model_len=8192))
    client.texts = (call(query="tides in Dover"), "High| water at six.")
    return client


def prompt(client: FakeClient, number: int) -> str:
    return client.text.decode(client.asked[number].prompt)


Http = Callable[..., httpx.AsyncClient]


async def post(api: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "input": "When is high water?", "tools": TOOLS}
    response = await api.post("/v1/responses", json=asked | body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_the_first_results_are_shortened(engine: Engine) -> None:
    engine.body = json.dumps({"results": [{"url": "u", "title": "t" * 999, "content": "c" * 9999}, *PAGES]}).encode()
    web = WebSearch(engine.url)
    first, second = await web.ask("high water & more", 2)
    await web.close()
    assert (len(first["title"]), len(first["text"])) == (search.MOST_TITLE, search.MOST_TEXT)
    assert second == {"title": "Page 0", "url": "https://sea.example/0", "text": "tides of day 0"}
    assert engine.asked == [{"path": ["/search"], "q": ["high water & more"], "format": ["json"]}]


@pytest.mark.parametrize(
    ("status", "body"), [(403, b"{}"), (200, b"<html>"), (200, b'{"results": 3}'), (200, b" " * 99)]
)
async def test_a_reply_that_cannot_be_read_is_a_failed_search(
    engine: Engine, status: int, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MOST_BYTES", 50)
    engine.status, engine.body = status, body
    web = WebSearch(engine.url)
    with pytest.raises(SearchFailed):
        await web.ask("tides", 2)
    await web.close()


async def test_a_search_engine_that_is_gone_is_a_failed_search() -> None:
    web = WebSearch("http://127.0.0.1:9")
    with pytest.raises(SearchFailed):
        await web.ask("tides", 2)
    await web.close()


@pytest.mark.parametrize("arguments", ['{"query": "tides", "days": 3}', '{"q": "tides"}', '"tides"'])
def test_the_query_is_found_under_its_name_or_as_the_only_argument(arguments: str) -> None:
    assert read_query(arguments) == "tides"


@pytest.mark.parametrize(
    "arguments", ["", "{", "[]", '{"a": "b", "c": "d"}', '{"query": 3}', '{"query": "  "}', "[" * 9999]
)
def test_arguments_without_a_query_are_a_failed_search(arguments: str) -> None:
    with pytest.raises(SearchFailed):
        read_query(arguments)


def test_the_address_of_the_search_engine_is_checked() -> None:
    with pytest.raises(ValueError, match=r"web_search is sea\.example; it must look like http"):
        ServerConfig(web_search="sea.example")


async def test_the_model_continues_with_the_results_of_a_search(http: Http, client: Rounds, engine: Engine) -> None:
    async with http(web_search=engine.url) as api:
        whole = await post(api)
    found, said = whole["output"]
    assert (found["type"], found["status"], found["action"]["query"]) == (
        "web_search_call", "completed", "tides in Dover",
    )  # fmt: skip
    assert [page["url"] for page in found["results"]] == [page["url"] for page in PAGES[:5]]
    assert found["action"]["sources"][0] == {"type": "url", "url": "https://sea.example/0"}
    assert (said["content"][0]["text"], whole["status"]) == ("High water at six.", "completed")
    assert whole["tools"] == TOOLS
    assert "tides of day 4" in prompt(client, 1) and "tides of day 5" not in prompt(client, 1)
    usage, first, second = whole["usage"], *client.asked
    assert usage["input_tokens"] == len(first.prompt) + len(second.prompt)
    assert usage["output_tokens"] == 3 + 2


async def test_a_stream_reports_the_progress_of_a_search(http: Http, engine: Engine) -> None:
    async with http(web_search=engine.url) as api:
        body = {"model": "tiny", "input": "Tides?", "tools": TOOLS, "stream": True}
        text = (await api.post("/v1/responses", json=body)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    kinds = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds[2:8] == [
        "response.output_item.added", "response.web_search_call.in_progress", "response.web_search_call.searching",
        "response.web_search_call.completed", "response.output_item.done", "response.output_item.added",
    ]  # fmt: skip
    searching = [event for event in events if ".web_search_call." in event["type"]]
    assert {(event["item_id"][:3], event["output_index"]) for event in searching} == {("ws_", 0)}
    assert kinds[-1] == "response.completed"
    assert events[-1]["response"]["output"][0] == events[6]["item"]
    added = {event["output_index"] for event in events if event["type"] == "response.output_item.added"}
    done = {event["output_index"] for event in events if event["type"] == "response.output_item.done"}
    assert added == done == {0, 1}


async def test_the_next_turn_knows_the_search_results(http: Http, client: Rounds, engine: Engine) -> None:
    async with http(web_search=engine.url) as api:
        first = await post(api)
        await post(api, input="And tomorrow?", previous_response_id=first["id"], tools=[])
        history = [{"role": "user", "content": "When is high water?"}, *first["output"]]
        await post(api, input=[*history, {"role": "user", "content": "And tomorrow?"}], tools=[])
    ends = [prompt(client, number).partition("tides of day 0")[2].partition("High water")[2] for number in (2, 3)]
    assert ends[0] == ends[1] != ""


async def test_the_model_reads_that_a_search_failed(http: Http, client: Rounds, engine: Engine) -> None:
    engine.status = 500
    async with http(web_search=engine.url) as api:
        whole = await post(api)
    assert [item["status"] for item in whole["output"]] == ["failed", "completed"]
    assert "The search failed." in prompt(client, 1)


async def test_searches_end_at_the_limit_of_calls(http: Http, client: Rounds, engine: Engine) -> None:
    client.texts = (call(query="tides"),)
    async with http(web_search=engine.url) as api:
        whole = await post(api, max_tool_calls=2)
    assert len(engine.asked) == 2
    assert len(client.asked) == 3  # The third prompt has no tools.
    assert "web_search" in prompt(client, 1) and "web_search" not in prompt(client, 2).partition("When")[0]
    assert [item["type"] for item in whole["output"]] == ["web_search_call", "web_search_call", "message"]


async def test_a_cut_answer_searches_nothing(http: Http, client: Rounds, engine: Engine) -> None:
    async with http(web_search=engine.url) as api:
        whole = await post(api, max_output_tokens=2)
    assert (whole["status"], [item["status"] for item in whole["output"]]) == ("incomplete", ["failed"])
    assert not engine.asked


async def test_tokens_of_all_answers_count_toward_the_limit(http: Http, client: Rounds, engine: Engine) -> None:
    async with http(web_search=engine.url) as api:
        whole = await post(api, max_output_tokens=4)
    assert (whole["status"], whole["usage"]["output_tokens"]) == ("incomplete", 4)
    assert whole["output"][-1]["content"][0]["text"] == "High"


async def test_tokens_of_each_answer_count_once(http: Http, client: Rounds, engine: Engine) -> None:
    client.texts = (*[call(query="tides")] * 3, "High| water| at| six.")
    async with http(web_search=engine.url) as api:
        whole = await post(api, max_output_tokens=12)
    assert (whole["status"], whole["usage"]["output_tokens"]) == ("incomplete", 12)


async def test_a_function_called_together_with_a_search_is_left_to_the_client(
    http: Http, client: Rounds, engine: Engine
) -> None:
    client.texts = (call(query="tides") + '|<tool_call>{"name": "forecast", "arguments": {}}</tool_call>',)
    async with http(web_search=engine.url) as api:
        whole = await post(api, tools=[*TOOLS, FUNCTION])
    assert [(item["type"], item["status"]) for item in whole["output"]] == [
        ("web_search_call", "completed"), ("function_call", "completed"),
    ]  # fmt: skip
    assert len(client.asked) == 1


async def test_a_required_search_runs_once(http: Http, client: Rounds, engine: Engine) -> None:
    async with http(web_search=engine.url) as api:
        await post(api, tool_choice={"type": "web_search"})
    assert client.asked[0].params.grammar is not None
    assert client.asked[1].params.grammar is None


async def test_a_background_response_is_replayed_with_its_search(http: Http, client: Rounds, engine: Engine) -> None:
    async with http(web_search=engine.url) as api:
        begun = await post(api, background=True)
        while (whole := (await api.get(f"/v1/responses/{begun['id']}")).json())["status"] != "completed":
            await asyncio.sleep(0.01)
        replayed = (await api.get(f"/v1/responses/{begun['id']}?stream=true")).text
    assert [item["type"] for item in whole["output"]] == ["web_search_call", "message"]
    assert replayed.count("event: response.web_search_call.completed") == 1


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "web_search", "search_context_size": "huge"}, "tools[0].search_context_size"),
        ({"type": "web_search", "filters": {}}, "tools[0].filters"),
        ({"type": "web_search", "user_location": "Dover"}, "tools[0].user_location"),
    ],
)
async def test_other_options_of_a_search_are_refused_by_name(
    http: Http, engine: Engine, tool: dict[str, Any], param: str
) -> None:
    async with http(web_search=engine.url) as api:
        response = await api.post("/v1/responses", json={"model": "tiny", "input": "Hello", "tools": [tool]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_server_without_a_search_engine_refuses_the_tool(http: Http) -> None:
    async with http() as api:
        response = await api.post("/v1/responses", json={"model": "tiny", "input": "Hello", "tools": TOOLS})
    assert response.status_code == 400
    assert "--web-search" in response.json()["error"]["message"]
