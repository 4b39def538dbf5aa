"""/v1/batches over a fake engine: OpenAI's client end to end, refusals, cancelling, expiry, restarts, failing disks."""

from __future__ import annotations

import asyncio
import errno
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy
from batch_lines import CHAT, jsonl, line
from batch_server import Server, server
from fake_engine import FakeClient, engine_info
from looked_after import looked_after

from holdfast.core.types import BATCH_CLASS, FinishReason, UserBatch
from holdfast.engine.client.connection import QueueFull
from holdfast.engine.client.stream import Delta, Usage
from holdfast.lm.config import EngineConfig
from holdfast.server.jobs import batch_runner, feed, lines
from holdfast.server.jobs.batch_runner import Turns
from holdfast.server.jobs.files import Files
from holdfast.server.jobs.locks import Owner
from holdfast.server.jobs.tables import BatchTable
from holdfast.server.jobs.values import Batch
from holdfast.server.protocol import ApiError

Listening = Callable[..., Any]
WINDOW = {"completion_window": "24h"}
ENDED = ("failed", "completed", "expired", "cancelled")


async def created(client: openai.AsyncOpenAI, given: list[Any], endpoint: Any = CHAT) -> openai.types.Batch:
    file = await client.files.create(file=("in.jsonl", jsonl(given)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def ended(client: openai.AsyncOpenAI, id: str) -> openai.types.Batch:
    while (batch := await client.batches.retrieve(id)).status not in ENDED:
        await asyncio.sleep(0.02)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file: str | None) -> dict[str, Any]:
    assert file is not None
    texts = (await client.files.content(file)).text.splitlines()
    return {each["custom_id"]: each for each in map(json.loads, texts)}


async def test_openais_client_runs_a_batch_of_each_endpoint(listening: Listening, client: FakeClient) -> None:
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        "/v1/completions": {"prompt": ["a", "b"], "n": 2},
        "/v1/responses": {"input": "hi"},
    }
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        for endpoint, body in bodies.items():
            given = [
                {"custom_id": f"r{n}", "method": "POST", "url": endpoint, "body": {"model": "tiny", **body}}
                for n in range(3)
            ]
            batch = await created(api, given, endpoint)
            assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", endpoint, "24h")
            assert batch.expires_at == batch.created_at + 86400
            done = await ended(api, batch.id)
            assert done.status == "completed" and done.error_file_id is None
            assert done.request_counts is not None and done.request_counts.completed == done.request_counts.total == 3
            assert done.usage is not None and done.usage.output_tokens == {CHAT: 6, "/v1/completions": 48}.get(
                endpoint, 12
            )
            answers = await lines_of(api, done.output_file_id)
            assert set(answers) == {"r0", "r1", "r2"}
            response = answers["r1"]["response"]
            assert (response["status_code"], answers["r1"]["error"]) == (200, None)
            match endpoint:
                case "/v1/chat/completions":
                    assert response["body"]["choices"][0]["message"]["content"] == "Ahoy, "
                case "/v1/completions":
                    assert [choice["text"] for choice in response["body"]["choices"]] == ["Ahoy, sailor!"] * 4
                case _:
                    assert response["body"]["status"] == "completed"
                    again = await api.responses.retrieve(response["body"]["id"])
                    assert again.output_text == "Ahoy, sailor!"
        listed = [batch.endpoint async for batch in api.batches.list(limit=2)]
        assert listed == [*reversed(bodies)]
    assert {asked.priority for asked in client.asked} == {BATCH_CLASS}
    id, number = str(client.asked[0].request_id).split("/")
    assert id.startswith("batch_") and number in "123"
    assert {asked.batch for asked in client.asked if str(asked.request_id).startswith(id)} == {UserBatch(id)}


async def test_a_batch_with_wrong_lines_fails_and_runs_none(listening: Listening, client: FakeClient) -> None:
    given = [line("a"), line("a"), {**line("b"), "url": "/v1/x"}, line("c", model="other"), line("d", n=65)]
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        done = await ended(api, (await created(api, given)).id)
        assert done.status == "failed" and done.failed_at is not None and done.output_file_id is None
        assert done.errors is not None and done.errors.data is not None
        assert [(each.line, each.code, each.param) for each in done.errors.data] == [
            (2, "duplicate_custom_id", "custom_id"),
            (3, "invalid_url", "url"),
            (4, "model_not_found", "model"),
            (5, "invalid_value", "n"),
        ]
        await api.files.delete(done.input_file_id)
    assert client.asked == []


async def test_a_wrong_batch_is_refused_by_name(listening: Listening) -> None:
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        good = (await api.files.create(file=("x", jsonl([line("a")])), purpose="batch")).id
        tuning = (await api.files.create(file=("x", b"{}"), purpose="fine-tune")).id
        for changes, param in (
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"endpoint": "/v1/moderations"}, "endpoint"),
            ({"completion_window": "48h"}, "completion_window"),
            ({"input_file_id": tuning}, "input_file_id"),
            ({"metadata": {"x": "y" * 513}}, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": True}}, "output_expires_after"),
        ):
            wanted: Any = {"input_file_id": good, "endpoint": CHAT, **WINDOW, **changes}
            with pytest.raises(openai.BadRequestError) as refused:
                await api.batches.create(**wanted)
            assert str(refused.value.param).startswith(param)
        with pytest.raises(openai.NotFoundError) as missing:
            await api.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
        assert missing.value.param == "input_file_id"


async def test_a_line_that_is_refused_goes_to_the_error_file(tmp_path: Path) -> None:
    async with server(tmp_path) as here:
        id = await here.submit([line("long", "x" * 300), line("good"), line("mutiny", "mutiny")])
        batch = await here.ended(id)
        assert (batch.status, batch.completed, batch.failed) == ("completed", 1, 2)
        refused = here.read(batch.error_file)
        assert [(each["custom_id"], each["response"]["status_code"]) for each in refused] == [
            ("long", 400),
            ("mutiny", 400),
        ]
        assert refused[0]["response"]["body"]["error"]["code"] == "context_length_exceeded"
        assert [each["custom_id"] for each in here.read(batch.output_file)] == ["good"]


async def test_another_tenants_batch_is_not_found_and_its_file_cannot_be_used(tmp_path: Path) -> None:
    async with server(tmp_path, api_key=("one", "two")) as here:
        id = await here.submit([line("a")], "one")
        for call in (here.batches.retrieve("two", id), here.batches.cancel("two", id)):
            with pytest.raises(ApiError) as refused:
                await call
            assert (refused.value.status, refused.value.code) == (404, "batch_not_found")
        with pytest.raises(ApiError) as refused:
            await here.submit([], "two", input_file_id=(await here.batches.retrieve("one", id)).input_file)
        assert (refused.value.status, refused.value.param) == (404, "input_file_id")
        with pytest.raises(ApiError):
            await here.batches.page("two", limit=5, after=id)
        assert await here.batches.page("two", limit=5, after=None) == ([], False)
        done = await here.ended(id, "one")
        with pytest.raises(ApiError):
            await here.files.get("two", str(done.output_file))
        assert {asked.tenant for asked in here.client.asked} == {"one"}


async def test_a_file_is_kept_while_a_batch_reads_it(tmp_path: Path) -> None:
    client = FakeClient(hold=asyncio.Event())
    async with server(tmp_path, client) as here:
        id = await here.submit([line("a")])
        file = (await here.batches.retrieve("", id)).input_file
        with pytest.raises(ApiError) as refused:
            await here.files.delete("", file)
        assert refused.value.status == 409
        assert client.hold is not None
        client.hold.set()
        await here.ended(id)
        await here.files.delete("", file)


async def test_cancelling_aborts_lines_and_keeps_finished_answers(tmp_path: Path) -> None:
    client = FakeClient()
    async with server(tmp_path, client) as here:
        stream = client.stream

        async def some(prompt: Any, params: Any, **more: Any) -> AsyncGenerator[Delta, None]:
            client.hold = asyncio.Event() if len(client.asked) >= 3 else None
            async for delta in stream(prompt, params, **more):
                yield delta

        client.stream = some  # type: ignore[method-assign]
        id = await here.submit([line(f"r{n}") for n in range(50)])
        while (await here.batches.retrieve("", id)).completed < 3:
            await asyncio.sleep(0.01)
        shown = (await here.batches.cancel("", id)).shown()
        assert shown["status"] == "cancelling" and shown["cancelling_at"] is not None
        batch = await here.ended(id)
        assert (batch.status, batch.completed, batch.failed, batch.total) == ("cancelled", 3, 0, 50)
        assert len(here.read(batch.output_file)) == 3 and batch.error_file is None
        assert {asked.ended for asked in client.asked[3:]} == {"aborted"}
        assert here.service.batch_lane.admission.in_progress == 0
        with pytest.raises(ApiError) as refused:
            await here.batches.cancel("", id)
        assert refused.value.status == 409


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [(CHAT, {"messages": [{"role": "user", "content": "hi"}]}), ("/v1/responses", {"input": "hi"})],
)
async def test_a_line_that_the_engines_sleep_cuts_is_asked_for_again(
    tmp_path: Path, endpoint: str, body: dict[str, Any]
) -> None:
    client = FakeClient(ending=FinishReason.ABORT)
    async with server(tmp_path, client) as here:
        given = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "tiny", **body}}
        id = await here.submit([given], endpoint=endpoint)
        while len(client.asked) < 2:
            await asyncio.sleep(0.01)
        assert (await here.batches.retrieve("", id)).status == "in_progress"
        client.ending = None
        batch = await here.ended(id)
        (answer,) = here.read(batch.output_file)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 1, 0)
    whole = answer["response"]["body"]
    assert "Ahoy, sailor!" in json.dumps(whole) and whole.get("status", "completed") == "completed"
    assert whole.get("choices", [{"finish_reason": "stop"}])[0]["finish_reason"] == "stop"


async def test_an_expired_batch_reports_its_unanswered_lines(tmp_path: Path) -> None:
    client = FakeClient(hold=asyncio.Event())
    async with server(tmp_path, client) as here:
        id = await here.submit([line("a"), line("b")])
        while len(client.asked) < 2:
            await asyncio.sleep(0.01)
        here.now += 86400
        batch = await here.ended(id)
        assert (batch.status, batch.completed, batch.failed) == ("expired", 0, 2)
        assert batch.output_file is None
        assert [(each["custom_id"], each["error"]["code"]) for each in here.read(batch.error_file)] == [
            ("a", "batch_expired"),
            ("b", "batch_expired"),
        ]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_a_restart_continues_with_the_unanswered_lines(
    tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    config = {} if database == "sqlite" else {"store": request.getfixturevalue("postgresql_schema")}
    first = FakeClient()
    stream = first.stream

    async def five(prompt: Any, params: Any, **more: Any) -> AsyncGenerator[Delta, None]:
        first.hold = asyncio.Event() if len(first.asked) >= 5 else None
        async for delta in stream(prompt, params, **more):
            yield delta

    first.stream = five  # type: ignore[method-assign]
    async with server(tmp_path, first, **config) as here:
        id = await here.submit([line(f"r{n}", f"say {n}") for n in range(20)])
        while (await here.batches.retrieve("", id)).completed < 5:
            await asyncio.sleep(0.01)
    async with server(tmp_path, **config) as here:
        batch = await here.ended(id)
        assert (batch.status, batch.completed) == ("completed", 20)
        answers = here.read(batch.output_file)
        assert [each["custom_id"] for each in answers] == [f"r{n}" for n in range(20)]
        assert len(here.client.asked) == 15
        while await here.store.read(lambda store: BatchTable(store.database).answered(id)):
            await asyncio.sleep(0.01)
        await here.batches._clean()
        with pytest.raises(ApiError):
            await here.files.delete("", "file-nul\0")
        await here.files.delete("", batch.input_file)


async def test_batches_of_an_earlier_server_continue_in_their_order(tmp_path: Path) -> None:
    async with server(tmp_path, FakeClient(hold=asyncio.Event())) as here:
        ids = []
        for number in range(6):
            here.now += 1
            ids.append(await here.submit([line(f"r{number}")]))
    async with server(tmp_path, FakeClient(hold=asyncio.Event())) as here:
        await looked_after(here.batches)
        assert [*here.batches.runner.running] == ids


async def test_a_server_takes_over_no_batch_of_a_running_server_or_of_another_model(tmp_path: Path) -> None:
    client = FakeClient(hold=asyncio.Event())
    async with server(tmp_path, client) as first:
        id = await first.submit([line("a")])
        async with server(tmp_path) as second:
            await looked_after(second.batches)
            assert second.client.asked == [] and not second.batches.runner.running
            await second.batches.cancel("", id)  # Any server may request it.
            assert (await first.ended(id)).status == "cancelled"
        id = await first.submit([line("b")])
    async with server(tmp_path, FakeClient(info=engine_info(model="other"))) as third:
        await looked_after(third.batches)
        assert not third.batches.runner.running
        await third.batches.cancel("", id)
        assert (await third.ended(id)).status == "cancelled"
        assert third.client.asked == []


async def test_a_batch_of_another_model_whose_server_has_ended_expires_in_time(tmp_path: Path) -> None:
    client = FakeClient(hold=asyncio.Event())
    async with server(tmp_path, client) as first:
        id = await first.submit([line("a")])
        while not client.asked:
            await asyncio.sleep(0.01)
    late = Server(tmp_path, FakeClient(info=engine_info(model="other")))
    late.now += 86400
    await late.batches.start()
    batch = await asyncio.wait_for(late.ended(id), 60)
    await late.close()
    assert (batch.status, batch.failed) == ("expired", 1)


def test_an_owner_is_gone_once_its_lock_is(tmp_path: Path) -> None:
    one, two = Owner(tmp_path), Owner(tmp_path)
    assert not one.gone(two.id) and not two.gone(one.id)
    two.close()
    assert one.gone(two.id) and one.gone("owner-unknown")
    one.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_repeated_answer_is_stored_once(tmp_path: Path) -> None:
    async with server(tmp_path, FakeClient(hold=asyncio.Event())) as here:
        id = await here.submit([line("a"), line("b")])
        batch = await here.batches.retrieve("", id)

        def answer(text: bytes, *numbers: int) -> list[bytes]:
            given = [
                batch_runner.AnsweredLine(batch=id, number=number, completed=True, text=text) for number in numbers
            ]
            return [each.text for each in BatchTable(store.database).answer(batch.id, given)[1]]

        store = here.store._store
        assert answer(b"first", 1) == [b"first"]
        assert answer(b"again", 1, 2, 2) == [b"again"]
        assert BatchTable(store.database).answers(id, completed=True, after=0, limit=9) == [
            (1, b"first"),
            (2, b"again"),
        ]
        assert (await here.batches.retrieve("", id)).completed == 2


async def test_a_line_without_a_place_waits_and_an_internal_error_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.jobs.files.RETRY_SECONDS", (0.01, 0.02))
    client = FakeClient()
    busy = ApiError("too many requests of this key", status=429, code="rate_limit_exceeded")
    stream, refusals = client.stream, iter([QueueFull("full"), busy, QueueFull("full"), ZeroDivisionError()])

    async def refusing(prompt: Any, params: Any, **more: Any) -> AsyncGenerator[Delta, None]:
        if (error := next(refusals, None)) is not None:
            raise error
        async for delta in stream(prompt, params, **more):
            yield delta

    client.stream = refusing  # type: ignore[method-assign]
    async with server(tmp_path, client) as here:
        batch = await here.ended(await here.submit([line("a"), line("b"), line("c")]))
        assert (batch.completed, batch.failed) == (2, 1)
        (failed,) = here.read(batch.error_file)
        assert failed["response"]["status_code"] == 500
        assert "ZeroDivision" not in json.dumps(failed)


async def test_a_full_disk_delays_a_batch_and_loses_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.server.jobs.files.RETRY_SECONDS", (0.01, 0.02))
    failures = Counter[str]()
    whole, settle = BatchTable.answer, Files.settle

    def full_database(table: BatchTable, *arguments: Any) -> Any:
        failures["database"] += 1
        if failures["database"] <= 3:
            raise sqlalchemy.exc.OperationalError("INSERT", {}, Exception("database or disk is full"))
        return whole(table, *arguments)

    def full_directory(files: Files, *arguments: Any) -> Any:
        failures["directory"] += 1
        if failures["directory"] in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        return settle(files, *arguments)

    monkeypatch.setattr(BatchTable, "answer", full_database)
    monkeypatch.setattr(Files, "settle", full_directory)
    async with server(tmp_path) as here:
        batch = await here.ended(await here.submit([line(f"r{n}") for n in range(30)]))
        assert (batch.status, batch.completed) == ("completed", 30)
        assert len(here.read(batch.output_file)) == 30
        assert len(here.client.asked) == 30
        names = [path.name for path in here.files.directory.iterdir() if not path.name.startswith("owner")]
        assert sorted(names) == sorted([batch.input_file, str(batch.output_file)])


async def test_a_server_killed_while_it_writes_the_output_writes_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = asyncio.Event()
    with monkeypatch.context() as patch:

        async def stops(*arguments: Any) -> Any:
            stopped.set()
            await asyncio.sleep(60)

        async with server(tmp_path) as here:
            patch.setattr(here.batches.runner, "_write_output", stops)
            id = await here.submit([line(f"r{n}") for n in range(4)])
            await stopped.wait()
            assert (await here.batches.retrieve("", id)).status == "finalizing"
    async with server(tmp_path) as here:
        batch = await here.ended(id)
        assert batch.status == "completed" and here.client.asked == []
        assert [each["custom_id"] for each in here.read(batch.output_file)] == ["r0", "r1", "r2", "r3"]
        while await here.store.read(lambda store: BatchTable(store.database).answered(id)):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("when", ["validating", "in_progress"])
async def test_a_batch_whose_input_is_gone_fails(tmp_path: Path, when: str) -> None:
    client = FakeClient(hold=asyncio.Event())
    async with server(tmp_path, client) as here:
        if when == "validating":
            copy = here.files.copy

            async def without_bytes(*arguments: Any) -> Any:
                file = await copy(*arguments)
                here.files.path(file.id).unlink()
                return file

            here.files.copy = without_bytes  # type: ignore[method-assign]
            id = await here.submit([line("a")])
        else:
            id = await here.submit([line("a")])
            while not client.asked:
                await asyncio.sleep(0.01)
            here.files.path((await here.batches.retrieve("", id)).input_file).unlink()
            here.now += 86400
        batch = await here.ended(id)
        assert batch.status == "failed" and batch.faults[0].code == "input_file_missing"


async def test_a_batch_completes_though_few_answers_may_wait_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "MOST_UNSTORED", 2)
    async with server(tmp_path, FakeClient(info=engine_info(max_sequences=2)), max_choices=4) as here:
        id = await here.submit([line(f"r{n}") for n in range(9)])
        assert (await asyncio.wait_for(here.ended(id), 60)).completed == 9


async def test_lines_are_bounded_and_chats_find_their_places_free(tmp_path: Path) -> None:
    """With more lines than the server has places for, a chat is still admitted, and does not queue after them."""
    client = FakeClient(hold=asyncio.Event(), info=engine_info(max_sequences=2, max_waiting=4))
    async with server(tmp_path, client, max_choices=3) as here:
        await here.submit([line(f"r{n}") for n in range(40)])
        while len(client.asked) < 4:
            await asyncio.sleep(0.01)
        later = await here.submit([line(f"s{n}", n=3) for n in range(40)], "two")
        while not here.batches.runner.running[later].waiting:
            await asyncio.sleep(0.01)
        await looked_after(here.batches)
        assert here.service.batch_lane.admission.in_progress <= 4
        assert len(client.asked) <= 4
        assert here.service.admission.in_progress == 0
        request = here.service.answer(
            lines.read_line(1, json.dumps(line("x")).encode(), CHAT).wanted,  # type: ignore[arg-type]
            "",
        )
        first = await asyncio.wait_for(anext(request.deltas()), 60)
        assert first[1].text == "Ahoy"


async def test_lines_that_the_engine_has_not_begun_leave_half_of_its_queue_to_others(tmp_path: Path) -> None:
    client = FakeClient(info=engine_info(max_sequences=8, max_waiting=6))
    begun, go = [], asyncio.Event()

    async def queued(prompt: Any, params: Any, **more: Any) -> AsyncGenerator[Delta, None]:
        begun.append(more["priority"])
        await go.wait()
        usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
        yield Delta("x", (1,), FinishReason.STOP, usage)

    client.stream = queued  # type: ignore[method-assign]
    async with server(tmp_path, client) as here:
        id = await here.submit([line(f"r{n}") for n in range(40)])
        while len(begun) < 3:
            await asyncio.sleep(0.01)
        wanted: Any = lines.read_line(1, json.dumps(line("x")).encode(), CHAT).wanted
        chats = [asyncio.ensure_future(anext(here.service.answer(wanted, "").deltas())) for _ in range(3)]
        while len(begun) < 6:
            await asyncio.sleep(0.01)
        await looked_after(here.batches)
        assert Counter(begun) == {BATCH_CLASS: 3, 0: 3}
        go.set()
        await asyncio.gather(*chats)
        assert (await here.ended(id)).completed == 40


def test_tenants_take_turns_and_a_tenants_batches_go_in_their_order() -> None:
    def running(tenant: str, id: str) -> Any:
        batch = Batch(
            id=id, tenant=tenant, endpoint=CHAT, input_file="f", model="m", created=0, expires=None, output_seconds=1
        )
        return batch_runner.RunningBatch(batch)

    async def run() -> list[str]:
        turns = Turns()
        each = [running("a", "a1"), running("a", "a2"), running("b", "b1"), running("c", "c1")]
        for one in each:
            turns.add(one)
        found = []
        for number in range(10):
            if number == 5:
                turns.remove(each[0])
                turns.remove(each[3])
            chosen = turns.next()
            assert chosen is not None
            found.append(chosen.batch.id)
        turns.remove(each[1])
        turns.remove(each[2])
        assert turns.next() is None
        return found

    assert asyncio.run(run()) == ["a1", "b1", "c1", "a1", "b1", "a2", "b1", "a2", "b1", "a2"]


async def test_open_batches_are_bounded_in_all_and_by_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.server.jobs.batches.MOST_OPEN", 4)
    async with server(tmp_path, FakeClient(hold=asyncio.Event()), api_key=("one", "two", "three")) as here:
        await here.submit([line("a")], "one")
        await here.submit([line("a")], "one")
        for tenant, word in (("one", "this API key has 2"), ("two", ""), ("two", ""), ("three", "4 batches")):
            try:
                await here.submit([line("a")], tenant)
                assert not word
            except ApiError as error:
                assert (error.status, error.code) == (429, "too_many_batches")
                assert word and word in error.message


async def events(api: httpx.AsyncClient, found: list[Any], connected: asyncio.Event) -> None:
    async with api.stream("GET", "/v1/batches/events") as response:
        async for text in response.aiter_lines():
            if text.startswith("data:"):
                found.append(json.loads(text[5:]))
            connected.set()


def reported(found: list[Any], id: str) -> bool:
    """Whether the events report this batch as completed."""
    updates = [each["batch"] for each in found if each["type"] == "batch.updated"]
    return any((each["id"], each["status"]) == (id, "completed") for each in updates)


async def test_one_stream_serves_all_batches_of_a_key(listening: Listening, client: FakeClient) -> None:
    async with listening(api_key=("one", "two")) as server:
        found: dict[str, list[Any]] = {"one": [], "two": []}
        async with (
            httpx.AsyncClient(base_url=server.url, headers={"authorization": "Bearer one"}) as one,
            httpx.AsyncClient(base_url=server.url, headers={"authorization": "Bearer two"}) as two,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="one") as api,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="two") as api_of_two,
        ):
            client.hold = asyncio.Event()
            early = (await created(api, [line("early")])).id
            waits = [asyncio.Event(), asyncio.Event()]
            following = [
                asyncio.create_task(events(each, found[name], wait))
                for each, name, wait in zip((one, two), found, waits, strict=True)
            ]
            for wait in waits:
                await wait.wait()
            ids = [(await created(api, [line(f"{n}/{m}") for m in range(3)])).id for n in range(2)]
            client.hold.set()
            client.hold = None
            for id in (early, *ids):
                await ended(api, id)
            own = (await created(api_of_two, [line("own")])).id
            while not all(reported(found["one"], id) for id in (early, *ids)) or not reported(found["two"], own):
                await asyncio.sleep(0.01)
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
    assert found["two"][0] == {"type": "batch.listening"}
    assert {each["batch"]["id"] if "batch" in each else each["batch_id"] for each in found["two"][1:]} == {own}
    assert found["one"][1]["batch"]["id"] == early
    answers = [each for each in found["one"] if each["type"] == "batch.line"]
    assert Counter(each["batch_id"] for each in answers) == {early: 1, ids[0]: 3, ids[1]: 3}
    assert sorted(each["line"]["custom_id"] for each in answers if each["batch_id"] == ids[1]) == ["1/0", "1/1", "1/2"]
    states = [each["batch"]["status"] for each in found["one"] if each["type"] == "batch.updated"]
    assert states.count("completed") == 3 and "validating" in states and "finalizing" in states


async def test_a_slow_listener_is_dropped_and_an_idle_one_gets_a_comment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(feed, "MOST_UNREAD", 200)
    monkeypatch.setattr(feed, "MOST_LISTENERS", 1)
    it = feed.Feed()
    stream = it.listen("a")
    assert await anext(stream) == b'event: batch.listening\ndata: {"type":"batch.listening"}\n\n'
    with pytest.raises(ApiError) as refused:
        await anext(it.listen("a"))
    assert refused.value.status == 429
    assert await anext(stream) == b": still here\n\n"
    it.publish("a", {"type": "x"})
    it.publish("b", {"type": "y"})
    assert await anext(stream) == b'event: x\ndata: {"type":"x"}\n\n'
    for _ in range(20):
        it.publish("a", {"type": "x"})
        assert await anext(stream) == b'event: x\ndata: {"type":"x"}\n\n', "whoever reads is not behind"
    for _ in range(20):
        it.publish("a", {"type": "x"})
    assert await anext(stream, None) is None
    other = it.listen("a")
    await anext(other)
    it.close()
    assert await anext(other, None) is None


async def test_metrics_count_lines_and_latencies_count_requests_alone(listening: Listening, client: FakeClient) -> None:
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        client.hold = asyncio.Event()
        id = (await created(api, [line(f"r{n}") for n in range(100)])).id
        while len(client.asked) < 4:
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient(base_url=server.url) as plain:
            text = (await plain.get("/metrics")).text
            assert 'holdfast_batch_lines{state="running"} 64.0' in text
            assert 'holdfast_batch_lines{state="waiting"} 36.0' in text
            client.hold.set()
            await ended(api, id)
            text = (await plain.get("/metrics")).text
        assert 'holdfast_batch_lines{state="running"} 0.0' in text
        assert 'holdfast_batch_lines_answered_total{outcome="completed"} 100.0' in text
        assert "holdfast_ttft_seconds_count 0.0" in text and "holdfast_requests_total{" not in text
        assert "holdfast_generated_tokens_total 400.0" in text


async def test_an_order_without_classes_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient(config=EngineConfig(order="fcfs"))
    async with server(tmp_path, client) as here:
        for _ in range(2):
            await here.ended(await here.submit([line("a")]))
    assert caplog.text.count("do not wait for other requests") == 1
