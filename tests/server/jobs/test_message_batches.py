"""Message batches over a fake engine: Anthropic's client end to end, wrong requests, cancelling, expiry, restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from batch_lines import line
from batch_server import Server, server
from fake_engine import FakeClient

from holdfast.server.jobs.message_batches import MessageBatches, read_batch, shown
from holdfast.server.jobs.tables import BatchTable
from holdfast.server.jobs.values import Batch
from holdfast.server.protocol import ApiError

if TYPE_CHECKING:  # otherwise each process that collects tests would import the SDK, which takes 1.5 s
    import anthropic

Http = Callable[..., httpx.AsyncClient]
Listening = Callable[..., Any]
PARAMS: Any = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def body(*ids: str, **params: Any) -> bytes:
    return json.dumps({"requests": [{"custom_id": id, "params": PARAMS | params} for id in ids]}).encode()


def batches_of(here: Server) -> MessageBatches:
    return MessageBatches(here.batches, 100_000)


async def ended(here: Server, id: str) -> Batch:
    while not (batch := await batches_of(here).retrieve("", id)).ended:
        await asyncio.sleep(0.01)
    return batch


async def results(here: Server, id: str, tenant: str = "") -> dict[str, Any]:
    opened, size = await batches_of(here).results(tenant, id)
    texts = [file.read() for file in opened]
    for file in opened:
        file.close()
    assert sum(map(len, texts)) == size
    return {each["custom_id"]: each["result"] for each in map(json.loads, b"".join(texts).splitlines())}


@pytest.fixture
async def api(listening: Listening) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    async with (
        listening() as server,
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as api,
    ):
        yield api


async def test_a_wrong_request_is_an_errored_result_and_the_others_are_answered(
    api: anthropic.AsyncAnthropic, client: FakeClient
) -> None:
    wrong = {
        "model": PARAMS | {"model": "huge"}, "stream": PARAMS | {"stream": True}, "field": PARAMS | {"colour": "red"},
        "nothing": [], "begun": PARAMS | {"thread": {"type": "create"}},
    }  # fmt: skip
    given: Any = {"good": PARAMS, "short": PARAMS | {"max_tokens": 1}} | wrong
    made = await api.messages.batches.create(requests=[{"custom_id": id, "params": each} for id, each in given.items()])
    assert made.id.startswith("msgbatch_") and made.processing_status == "in_progress" and made.results_url is None
    assert (made.request_counts.processing, made.request_counts.succeeded) == (7, 0)
    while (batch := await api.messages.batches.retrieve(made.id)).processing_status != "ended":
        await asyncio.sleep(0.02)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.expired) == (0, 2, 5, 0)
    found = {each.custom_id: each.result async for each in await api.messages.batches.results(made.id)}
    assert {id: result.type for id, result in found.items()} == dict.fromkeys(given, "errored") | dict.fromkeys(
        ("good", "short"), "succeeded"
    )
    good: Any = found["good"]
    assert good.message.type == "message" and good.message.content[0].text
    assert found["short"].message.stop_reason == "max_tokens"  # type: ignore[union-attr]
    errors: Any = {id: found[id].error.error for id in wrong}  # type: ignore[union-attr]
    assert errors["model"].type == "not_found_error" and errors["field"].type == "invalid_request_error"
    assert "colour" in errors["field"].message and "stream" in errors["stream"].message
    assert "params must be a JSON object" in errors["nothing"].message
    assert len(client.asked) == 2


async def test_the_url_of_results_leads_through_the_proxy(http: Http) -> None:
    async with http(root_path="/llm") as api:
        headers = {"x-forwarded-proto": "https", "host": "localhost"}
        id = (await api.post("/llm/v1/messages/batches", content=body("a"))).json()["id"]
        while not (told := (await api.get(f"/llm/v1/messages/batches/{id}", headers=headers)).json())["results_url"]:
            await asyncio.sleep(0.01)
        assert told["results_url"] == f"https://localhost/llm/v1/messages/batches/{id}/results"
        odd = (await api.get(f"/llm/v1/messages/batches/{id}", headers=headers | {"x-forwarded-proto": "x"})).json()
        assert odd["results_url"].startswith("http://localhost/llm/")
        found = await api.get(told["results_url"].removeprefix("https://localhost"))
    assert found.headers["content-type"] == "application/x-jsonl"
    assert [json.loads(each)["custom_id"] for each in found.text.splitlines()] == ["a"]


async def test_batches_are_listed_by_page_and_apart_from_openais(api: anthropic.AsyncAnthropic) -> None:
    import anthropic

    request: Any = {"custom_id": "a", "params": PARAMS}
    ids = [(await api.messages.batches.create(requests=[request])).id for _ in range(5)][::-1]
    assert [each.id async for each in api.messages.batches.list(limit=2)] == ids
    before = await api.messages.batches.list(limit=2, before_id=ids[3])
    assert [each.id for each in before.data] == ids[1:3] and before.has_more
    with pytest.raises(anthropic.NotFoundError):
        await api.messages.batches.list(after_id="msgbatch_none")
    async with httpx.AsyncClient(base_url=str(api.base_url)) as http:
        assert (await http.get("/v1/batches")).json()["data"] == []
        assert (await http.get("/v1/files")).json()["data"] == []
        assert (await http.get(f"/v1/batches/{ids[0]}")).status_code == 404
        wrong = await http.get("/v1/messages/batches", params={"limit": "1001"})
        assert wrong.status_code == 400 and "between 1 and 1000" in wrong.json()["error"]["message"]


async def test_a_cancelled_batch_says_which_requests_were_not_answered(tmp_path: Path) -> None:
    client = FakeClient(hold=asyncio.Event())
    async with server(tmp_path, client) as here:
        batches = batches_of(here)
        id = (await batches.create(body("a", "b"), "", "")).id
        while len(client.asked) < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="in progress") as early:
            await batches.results("", id)
        assert early.value.status == 409
        with pytest.raises(ApiError, match="only one that has ended can be deleted"):
            await batches.delete("", id)
        assert shown(await batches.cancel("", id), "")["processing_status"] == "canceling"
        told = shown(await ended(here, id), "http://h/v1")
        assert told["request_counts"] == {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 2, "expired": 0}
        assert told["cancel_initiated_at"] is not None and told["results_url"] == f"http://h/v1/{id}/results"
        assert await results(here, id) == {"a": {"type": "canceled"}, "b": {"type": "canceled"}}


async def test_an_expired_batch_says_which_requests_were_not_answered(tmp_path: Path) -> None:
    client = FakeClient(hold=asyncio.Event())
    async with server(tmp_path, client) as here:
        id = (await batches_of(here).create(body("a"), "", "")).id
        while not client.asked:
            await asyncio.sleep(0.01)
        here.now += 86400
        counts = shown(await ended(here, id), "")["request_counts"]
        assert counts == {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 1}
        assert await results(here, id) == {"a": {"type": "expired"}}


async def test_a_restart_continues_a_batch_and_another_tenant_never_finds_it(tmp_path: Path) -> None:
    async with server(tmp_path, FakeClient(hold=asyncio.Event())) as here:
        id = (await batches_of(here).create(body("a", "b"), "ada", "")).id
    async with server(tmp_path) as here:
        batches = batches_of(here)
        while not (batch := await batches.retrieve("ada", id)).ended:
            await asyncio.sleep(0.01)
        assert (batch.completed, batch.total) == (2, 2)
        assert {each["type"] for each in (await results(here, id, "ada")).values()} == {"succeeded"}
        for stranger in (batches.retrieve, batches.cancel, batches.delete, batches.results):
            with pytest.raises(ApiError) as refused:
                await stranger("bob", id)
            assert refused.value.status == 404


async def test_a_deleted_batch_leaves_no_file_and_no_answer(tmp_path: Path) -> None:
    async with server(tmp_path) as here:
        batches = batches_of(here)
        id = (await batches.create(body("a", "b", temperature=7), "", "")).id
        other = await here.submit([line("a")])
        await ended(here, id)
        await here.ended(other)
        await batches.delete("", id)
        kept = {path.name for path in here.files.directory.iterdir() if path.name.startswith("file-")}
        openai = await here.batches.retrieve("", other)
        assert kept == {openai.input_file, openai.output_file}
        assert not await here.store.read(lambda store: BatchTable(store.database).answered(id))
        with pytest.raises(ApiError):
            await batches.retrieve("", id)
        with pytest.raises(ApiError):
            await batches.retrieve("", other)


async def test_a_batch_that_cannot_be_taken_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with server(tmp_path) as here:
        monkeypatch.setattr(here.files, "limit", 100)
        with pytest.raises(ApiError, match="keeps at most"):
            await batches_of(here).create(body(*map(str, range(20))), "", "")
        monkeypatch.undo()
        monkeypatch.setattr("holdfast.server.jobs.batches.MOST_OPEN", 0)
        with pytest.raises(ApiError, match="have not ended"):
            await batches_of(here).create(body("a"), "", "")
        assert not list(here.files.directory.glob("file-*"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (b"{", "not JSON that can be read"),
        (b"[" * 100_000, "nests too deeply|requests"),
        (b"[]", "expected `object`"),
        (b"{}", "missing required field `requests`"),
        (b'{"requests": []}', "requests: expected `array` of length >= 1"),
        (b'{"requests": [{"custom_id": "a"}]}', r"requests\[0\]: object missing required field `params`"),
        (b'{"requests": [{"custom_id": "a b", "params": {}}]}', r"requests\[0\].custom_id: expected `str` matching"),
        (b'{"requests": [{"custom_id": "a", "params": {}, "url": "x"}]}', "unknown field `url`"),
        (body("a", "b", "a"), r"requests\[2\].custom_id 'a' is that of requests\[0\], too"),
        (body("a", system="x" * 400), r"requests\[0\] has more than 300 bytes"),
    ],
)
def test_a_wrong_batch_is_refused_and_names_the_request(given: bytes, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        read_batch(given, 300)


def test_a_request_of_many_lines_becomes_one() -> None:
    written = json.dumps({"requests": [{"custom_id": "a", "params": PARAMS | {"system": "x\ny"}}]}, indent=1)
    lines, count = read_batch(written.replace("\n", "\r\n").encode(), 1000)
    assert count == 1 and lines.count(b"\n") == 1 and b"\r" not in lines
    assert json.loads(lines) == {"custom_id": "a", "params": PARAMS | {"system": "x\ny"}}
