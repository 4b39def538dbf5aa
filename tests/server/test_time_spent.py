"""The parts of a request's time, and the log of slow requests."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import sqlalchemy
from fake_engine import FakeClient

from holdfast.engine.client.stream import Timings
from holdfast.engine.logs import JsonFormatter
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.run import open_store
from holdfast.server.time_spent import TimeSpent, current, spending, watched

Http = Callable[..., httpx.AsyncClient]
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "private words"}]}
TIMES = Timings(arrival=1.0, scheduled=3.0, first_token=3.5, finish=7.5, tokens=9, preemptions=2)


class TestParts:
    """Adding up the parts of one request."""

    def test_the_engines_time_is_queue_prefill_and_decode(self) -> None:
        spent = TimeSpent()
        spent.add_engine(TIMES, before=0.5)
        assert dict(spent.seconds) == {"queue": 1.5, "prefill": 0.5, "decode": 4.0}
        assert spent.preemptions == 2
        assert spent.rest(7.0) == 1.0

    def test_the_longest_part_is_named_in_words(self) -> None:
        spent = TimeSpent()
        spent.add("store", 2.0)
        spent.add("queue", 3.0)
        assert spent.longest(6.0) == "waiting in the engine's queue"
        assert spent.longest(60.0) == "the client, or other work of the server"

    def test_clocks_that_differ_make_no_part_negative(self) -> None:
        spent = TimeSpent()
        spent.add("queue", -1.0)
        assert spent.seconds["queue"] == 0.0 and spent.rest(0.0) == 0.0

    async def test_tasks_of_a_request_add_to_it_and_those_of_others_do_not(self) -> None:
        async def work(seconds: float) -> None:
            await asyncio.sleep(0)
            current().add("store", seconds)

        with watched() as one:
            first = asyncio.create_task(work(1.0))
        with watched() as other:
            second = asyncio.create_task(work(2.0))
        await asyncio.gather(first, second, work(4.0))
        assert (one.seconds["store"], other.seconds["store"]) == (1.0, 2.0)

    async def test_time_counts_also_if_the_work_fails(self) -> None:
        with watched() as spent, pytest.raises(ValueError), spending("search"):
            await asyncio.sleep(0.01)
            raise ValueError
        assert spent.seconds["search"] >= 0.01

    async def test_time_of_the_store_within_another_part_counts_once(self) -> None:
        began = time.monotonic()
        with watched() as spent, spending("text"):
            await asyncio.sleep(0.02)
            current().add("store", 0.015)
        assert spent.seconds["store"] == 0.015
        assert 0.004 <= spent.seconds["text"] <= time.monotonic() - began - 0.015


class TestSlowLog:
    """One line for each request that takes longer than --slow-ms."""

    @pytest.fixture
    def lines(self, caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
        form = JsonFormatter()
        return lambda: [json.loads(form.format(each)) for each in caplog.records if each.name == "holdfast.slow"]

    async def test_a_slow_request_has_a_line_with_the_parts_of_its_time(
        self, http: Http, client: FakeClient, lines: Callable[[], list[dict[str, Any]]]
    ) -> None:
        client.cached, client.cached_by_tier = 5, (3, 1, 0)
        async with http({"x-request-id": "abc"}, slow_ms=0.001) as api:
            await api.post("/v1/responses", json={"model": "tiny", "input": "private words"})
        (line,) = lines()
        assert line["level"] == "warning" and line["request"] == "abc" and line["model"] == "tiny"
        assert {"read", "text", "place", "queue", "prefill", "decode", "store", "rest"} == set(line["parts"])
        assert (line["parts"]["queue"], line["parts"]["prefill"], line["parts"]["decode"]) == (0.5, 0.5, 1.0)
        assert line["held_by"] == "generating the answer"
        assert (line["tokens_from_host"], line["tokens_from_disk"], line["tokens_from_remote"]) == (3, 1, 0)

    async def test_the_longest_choice_counts_and_not_the_sum(
        self, http: Http, lines: Callable[[], list[dict[str, Any]]]
    ) -> None:
        async with http(slow_ms=0.001) as api:
            await api.post(CHAT, json={**HELLO, "n": 3})
        (line,) = lines()
        assert line["parts"]["decode"] == 1.0

    async def test_a_stream_and_a_refusal_have_a_line_too(
        self, http: Http, lines: Callable[[], list[dict[str, Any]]]
    ) -> None:
        async with http(slow_ms=0.001) as api:
            await api.post(CHAT, json={**HELLO, "stream": True})
            await api.post(CHAT, json={**HELLO, "model": "other"})
        assert [each["status"] for each in lines()] == [200, 404]
        assert "decode" in lines()[0]["parts"] and "decode" not in lines()[1]["parts"]

    async def test_time_in_the_queue_before_the_engine_is_its_own_part(
        self, http: Http, client: FakeClient, lines: Callable[[], list[dict[str, Any]]]
    ) -> None:
        client.hold = asyncio.Event()
        async with http(slow_ms=20) as api:
            running = asyncio.create_task(api.post(CHAT, json=HELLO))
            await asyncio.sleep(0.05)
            client.hold.set()
            await running
        (line,) = lines()
        assert line["seconds"] > 0.04  # clocks are rounded

    async def test_there_is_no_line_for_a_faster_request_or_without_the_option(
        self, http: Http, lines: Callable[[], list[dict[str, Any]]]
    ) -> None:
        async with http(slow_ms=60000.0) as api:
            await api.post(CHAT, json=HELLO)
        async with http() as api:
            await api.post(CHAT, json=HELLO)
        assert lines() == []

    async def test_the_text_form_names_the_parts_and_what_held_the_request(
        self, http: Http, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with http(slow_ms=0.001) as api:
            await api.post(CHAT, json=HELLO)
        (line,) = [each.getMessage() for each in caplog.records if each.name == "holdfast.slow"]
        assert line.startswith(f"slow request: POST {CHAT} 200 ")
        assert "decode=1.000s" in line and line.endswith("preemptions=0; most: generating the answer")

    @pytest.mark.parametrize("given", [-1.0, float("nan"), 1e9])
    def test_an_impossible_limit_is_refused_with_the_value_and_the_range(self, given: float) -> None:
        with pytest.raises(ValueError, match=r"slow_ms is .*; it must lie between 0 and 86400000"):
            ServerConfig(slow_ms=given)


SECRET = "very-secret-key"
TEXT = "sapphire"
"""A word of every prompt, which no log may have."""


async def test_no_log_of_any_level_has_a_text_or_a_key(
    http: Http, client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    message = [{"role": "user", "content": TEXT}]
    calls: list[tuple[str, Any]] = [
        (CHAT, {"model": "tiny", "messages": message}),
        (CHAT, {"model": "tiny", "messages": message, "stream": True}),
        (CHAT, {"model": TEXT, "messages": message}),
        (CHAT, {"model": "tiny", "messages": message, "tools": [{"type": "function", "function": {"name": TEXT}}]}),
        (CHAT, {"model": "tiny", "messages": message, "temperature": TEXT}),
        (CHAT, {"model": "tiny", "messages": message, "response_format": {"type": "json_schema", TEXT: TEXT}}),
        ("/v1/completions", {"model": "tiny", "prompt": TEXT, "stop": [TEXT]}),
        ("/v1/responses", {"model": "tiny", "input": TEXT, "instructions": TEXT, "metadata": {TEXT: TEXT}}),
        ("/v1/responses", {"model": "tiny", "input": TEXT, "previous_response_id": TEXT}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 4, "messages": message, "system": TEXT}),
        ("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": TEXT}]}),
        ("/tokenize", {"model": "tiny", "prompt": TEXT}),
        (f"/v1/conversations?after={TEXT}", {}),
    ]
    headers = {"authorization": f"Bearer {SECRET}"}
    async with http(api_key=(SECRET, "another"), slow_ms=0.001) as api:
        for path, body in calls:
            await api.post(path, json=body, headers=headers)
            await api.post(path, json=body, headers={"x-api-key": f"{SECRET}x"})
        await api.post(CHAT, content=f'{{"{TEXT}":', headers=headers)
        client.refuse = RuntimeError("a bug")
        assert (await api.post(CHAT, json=calls[0][1], headers=headers)).status_code == 500
    form = JsonFormatter()
    own = [each for each in caplog.records if each.name.startswith("holdfast")]
    shown = [form.format(each) for each in own] + [each.getMessage() for each in own]
    assert len(own) > 2 * len(calls), "requests and slow requests are logged"
    assert any("a bug" in each for each in shown), "a failure is logged with its traceback"
    for line in shown:
        assert TEXT not in line and SECRET not in line


def test_a_databases_error_does_not_show_what_was_to_be_stored() -> None:
    store = open_store(ServerConfig(store=MEMORY))
    with pytest.raises(sqlalchemy.exc.OperationalError) as caught, store.database.write() as connection:
        connection.execute(sqlalchemy.text("INSERT INTO nothing VALUES (:text)"), {"text": TEXT})
    assert TEXT not in str(caught.value)
    store.close()
