"""Limits and usage of keys: through OpenAI's client, and between servers with one store."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partialmethod
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import WORDS, FakeClient, engine_info
from prometheus_client import CollectorRegistry, generate_latest
from serving import listening as serve
from stored_keys import Stored, bearer

from holdfast.server.conversations.database import MEMORY
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.values import Bounds
from holdfast.server.keys.accounts import EXCHANGE_SECONDS, MOST_LABELS, Accounts, KeyMetrics, month_of
from holdfast.server.keys.usage_table import Slot, UsageTable, Used
from holdfast.server.keys.values import Key, Limits
from holdfast.server.protocol import ApiError
from holdfast.server.routes.access import METERED
from holdfast.server.schema import SCHEMA

Http = Callable[..., httpx.AsyncClient]
Official = Callable[[str, str], openai.AsyncOpenAI]
CHAT = "/v1/chat/completions"
HELLO: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
PROMPT = len("<user>hello")
SPENT = PROMPT + len(WORDS)
"""Tokens of one request with HELLO."""
USAGE = "/v1/organization/usage/completions"


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a server's accounts stands still, so that no limit is refilled while a slow machine runs a test."""
    monkeypatch.setattr(Accounts, "__init__", partialmethod(Accounts.__init__, clock=lambda: 0.0))


async def raw(api: openai.AsyncOpenAI, **more: Any) -> Any:
    return await api.chat.completions.with_raw_response.create(**{**HELLO, **more})


async def until_admitted(api: openai.AsyncOpenAI) -> None:
    """Ask until a place is free."""
    while True:
        try:
            await raw(api)
        except openai.RateLimitError:
            await asyncio.sleep(0.01)
        else:
            return


async def usage(operator: openai.AsyncOpenAI, path: str, requests: int) -> Any:
    """The usage that the store has once it counts this many requests."""
    while True:
        found = (await operator.get(path, cast_to=httpx.Response)).json()
        results = [result for bucket in found["data"] for result in bucket["results"]]
        if sum(each["num_model_requests"] for each in results) == requests:
            return found
        await asyncio.sleep(0.01)


@pytest.mark.usefixtures("always_current")
class TestServed:
    async def test_the_headers_count_down_to_a_refusal_with_the_time_to_wait(
        self, listening: Any, official: Official, store: str, keys: Stored
    ) -> None:
        keys.add("acme", "k", limits=Limits(requests_per_minute=3, tokens_per_minute=1000))
        async with listening(store=store) as server:
            api, left = official(server.url, "k"), []
            for _ in range(3):
                headers = (await raw(api)).headers
                assert headers["x-ratelimit-limit-requests"] == "3"
                left.append(headers["x-ratelimit-remaining-requests"])
            assert left == ["2", "1", "0"]
            # The tokens of the first two requests are exact, the third one's are an estimate from its bytes.
            assert 1000 - 2 * SPENT - 60 < int(headers["x-ratelimit-remaining-tokens"]) < 1000 - 2 * SPENT
            with pytest.raises(openai.RateLimitError) as error:
                await raw(api)
            assert error.value.code == "rate_limit_exceeded"
            answer = error.value.response
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
            assert answer.headers["retry-after"] == "20"

    async def test_an_invocation_is_usage_of_the_kind_of_its_body(
        self, listening: Any, official: Official, store: str, keys: Stored, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(METERED, "/v1/completions", "embeddings")  # This engine embeds nothing.
        keys.add("acme", "k")
        keys.add("ops", "boss", "operator")
        began = int(time.time())
        async with listening(store=store) as server, httpx.AsyncClient(base_url=server.url, headers=bearer("k")) as api:
            assert (await api.post("/invocations", json=HELLO)).status_code == 200
            assert (await api.post("/invocations", json={"prompt": "hello"})).status_code == 200
            operator = official(server.url, "boss")
            for kind, tokens in (("completions", PROMPT), ("embeddings", len("hello"))):
                asked = f"/organization/usage/{kind}?start_time={began}"
                (result,) = (await usage(operator, asked, requests=1))["data"][0]["results"]
                assert result["input_tokens"] == tokens

    async def test_a_prompt_beyond_the_tokens_left_is_refused_at_arrival(
        self, listening: Any, client: FakeClient, official: Official, store: str, keys: Stored
    ) -> None:
        keys.add("acme", "k", limits=Limits(tokens_per_minute=100))
        async with listening(store=store) as server:
            api = official(server.url, "k")
            await raw(api, messages=[{"role": "user", "content": "a" * 120}])
            with pytest.raises(openai.RateLimitError, match="tokens per min"):
                await raw(api, messages=[{"role": "user", "content": "a" * 120}])
        assert len(client.asked) == 1

    async def test_a_refused_request_gives_its_estimate_back(self, http: Http, store: str, keys: Stored) -> None:
        keys.add("acme", "k", limits=Limits(tokens_per_minute=1000))
        async with http(store=store, headers=bearer("k")) as api:
            assert (await api.post(CHAT, json={**HELLO, "model": "none"})).status_code == 404
            answer = await api.post(CHAT, json=HELLO)
        estimate = len(answer.request.content) // 4
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - estimate)

    async def test_a_message_batch_counts_no_tokens_until_its_requests_are_answered(
        self, http: Http, client: FakeClient, store: str, keys: Stored
    ) -> None:
        client.hold = asyncio.Event()
        keys.add("acme", "k", limits=Limits(requests_per_minute=5, tokens_per_minute=100))
        batch = {"requests": [{"custom_id": "a", "params": HELLO | {"max_tokens": 5, "system": "x" * 500}}]}
        async with http(store=store, headers=bearer("k")) as api:
            answer = await api.post("/v1/messages/batches", json=batch)
        assert answer.status_code == 200, answer.text
        headers = answer.headers
        assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]) == ("4", "100")

    async def test_streams_in_progress_are_limited_and_free_their_place(
        self, listening: Any, client: FakeClient, official: Official, store: str, keys: Stored
    ) -> None:
        keys.add("acme", "k", limits=Limits(streams=1))
        client.hold = asyncio.Event()
        async with listening(store=store) as server:
            api = official(server.url, "k")
            stream = await api.chat.completions.create(**HELLO, stream=True)
            with pytest.raises(openai.RateLimitError, match="1 requests in progress"):
                await raw(api)
            client.hold.set()
            assert [chunk async for chunk in stream]
            await raw(api)

    async def test_a_background_response_counts_until_it_ends(
        self, listening: Any, client: FakeClient, official: Official, store: str, keys: Stored
    ) -> None:
        keys.add("acme", "k", limits=Limits(streams=1))
        client.hold = asyncio.Event()
        async with listening(store=store) as server:
            api = official(server.url, "k")
            begun = await api.responses.create(model="tiny", input="hello", background=True)
            with pytest.raises(openai.RateLimitError):
                await raw(api)
            client.hold.set()
            while (await api.responses.retrieve(begun.id)).status != "completed":
                await asyncio.sleep(0.01)
            await until_admitted(api)

    async def test_a_spent_budget_is_refused_until_it_is_raised(
        self, listening: Any, official: Official, store: str, keys: Stored
    ) -> None:
        keys.add("acme", "k", limits=Limits(budget_tokens=SPENT + 1))
        for _ in range(2):  # A restarted server knows what was spent.
            async with listening(store=store) as server:
                api = official(server.url, "k")
                if _ == 0:
                    await raw(api)
                    await raw(api)
                with pytest.raises(openai.RateLimitError) as error:
                    await raw(api)
                assert error.value.code == "insufficient_quota"
                assert error.value.response.headers["x-should-retry"] == "false"
                if _ == 1:
                    keys.table.limit("acme", {"budget_tokens": 10 * SPENT})
                    await raw(api)
            client = FakeClient()
            listening = lambda client=client, **more: serve(client, **more)  # noqa: E731

    async def test_a_thousand_requests_over_a_limit_cost_another_key_nothing(
        self, listening: Any, client: FakeClient, official: Official, store: str, keys: Stored
    ) -> None:
        keys.add("flood", "f", limits=Limits(requests_per_minute=5))
        keys.add("other", "o")
        async with listening(store=store) as server:
            flood, other = official(server.url, "f"), official(server.url, "o")

            async def outcome() -> str:
                try:
                    await raw(flood)
                except openai.RateLimitError:
                    return "refused"
                return "ok"

            async def flooding() -> Counter[str]:
                found: Counter[str] = Counter()
                for _ in range(50):
                    found.update(await asyncio.gather(*(outcome() for _ in range(20))))
                return found

            task, answered = asyncio.create_task(flooding()), 0
            while not task.done() or answered < 20:
                assert (await raw(other)).http_response.status_code == 200
                answered += 1
            found = await task
        assert found["ok"] + found["refused"] == 1000
        assert found["ok"] == 5
        assert len(client.asked) == answered + found["ok"]

    async def test_usage_is_reported_by_key_and_model_to_operators(
        self, listening: Any, client: FakeClient, official: Official, store: str, keys: Stored
    ) -> None:
        keys.add("acme", "k", tenant="company")
        keys.add("ops", "boss", "use", "operator")
        client.cached, client.info = 3, engine_info(max_model_len=2000)
        began = int(time.time())
        async with listening(store=store) as server:
            one, boss = official(server.url, "k"), official(server.url, "boss")
            await raw(one)
            stream = await one.chat.completions.create(**HELLO, stream=True)
            assert [chunk async for chunk in stream]
            await one.responses.compact(model="tiny", input="hello")
            await raw(boss)
            with pytest.raises(openai.PermissionDeniedError):
                await one.get(f"/organization/usage/completions?start_time={began}", cast_to=httpx.Response)
            asked = f"/organization/usage/completions?start_time={began}&group_by=api_key_id&group_by=project_id"
            found = await usage(boss, asked, requests=4)
            exposed = (await boss.get("/../metrics", cast_to=httpx.Response)).text
            hidden = (await one.get("/../metrics", cast_to=httpx.Response)).text
        (bucket,) = found["data"]
        assert (found["object"], found["has_more"], found["next_page"]) == ("page", False, None)
        assert bucket["start_time"] <= began < bucket["end_time"] == bucket["start_time"] + 86400
        acme, ops = bucket["results"]
        assert acme["object"] == "organization.usage.completions.result"
        assert (acme["api_key_id"], acme["project_id"], acme["model"]) == ("acme", "company", None)
        assert acme["num_model_requests"] == 3 and acme["input_cached_tokens"] == 9
        assert (ops["api_key_id"], ops["num_model_requests"]) == ("ops", 1)
        assert (ops["input_tokens"], ops["output_tokens"]) == (PROMPT, len(WORDS))
        assert 'holdfast_key_requests_total{key="acme",model="tiny"} 3.0' in exposed
        assert f'holdfast_key_tokens_total{{key="ops",kind="output",model="tiny"}} {len(WORDS)}.0' in exposed
        assert "holdfast_key" not in hidden

    async def test_a_key_of_the_configuration_has_no_limits_and_is_counted(self, http: Http, store: str) -> None:
        async with http(store=store, api_key=("a",), operator_key=("b",)) as api:
            answer = await api.post(CHAT, json=HELLO, headers=bearer("a"))
            assert not any(name.startswith("x-ratelimit") for name in answer.headers)
            assert "holdfast_key_requests_total{key=" in (await api.get("/metrics", headers=bearer("b"))).text


KEY = Key(name="acme", tenant="t", scopes=("use",), created=0.0)


class Clock:
    """A clock that the test sets."""

    time = 1_000_000_000.0

    def __call__(self) -> float:
        return self.time


class Server:
    """The accounts of one server process over a store."""

    def __init__(self, where: str, clock: Clock) -> None:
        bounds = Bounds(seconds=1e9, threads=100, bytes=1 << 30)
        self.store = AsyncStore(Store.open(where, bounds, more=SCHEMA))
        self.accounts = Accounts(self.store, KeyMetrics(CollectorRegistry()), clock, clock=clock)

    async def close(self) -> None:
        await asyncio.to_thread(self.store.close)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_servers_with_one_store_admit_their_buckets_once_and_then_the_rate_together(
    store: str, database: str, request: pytest.FixtureRequest
) -> None:
    where = store if database == "sqlite" else request.getfixturevalue("postgresql_schema")
    clock, limit, admitted = Clock(), 60, 0
    key = Key(name="acme", tenant="t", scopes=("use",), created=0.0, limits=Limits(requests_per_minute=limit))
    async with AsyncExitStack() as held:
        servers = [Server(where, clock) for _ in range(3)]
        for each in servers:
            held.push_async_callback(each.close)
            await each.accounts.exchange()
        for second in range(60):
            for each in servers:
                for _ in range(3):  # Three times the limit, and nine times for all.
                    try:
                        charge = each.accounts.account(key).admit(0, clock())
                    except ApiError:
                        break
                    each.accounts.settle(charge, "completions", "tiny", Used())
                    admitted += 1
            for each in [*servers, *servers][: 3 + second % 2]:
                await each.accounts.exchange()
            clock.time += EXCHANGE_SECONDS
    # A minute's amount in the bucket, the minute's rate, and the slack: what two servers admit within one exchange.
    assert 2 * limit - 3 <= admitted <= 2 * limit + 2 * 3 * 3


async def test_a_failing_store_loses_no_usage(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    server = Server(store, clock)
    charge = server.accounts.account(KEY).admit(10, clock())
    server.accounts.settle(charge, "completions", "tiny", Used(1, 20, 5, 7))

    def fail(*given: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(UsageTable, "write", fail)
        with pytest.raises(ApiError):
            await server.accounts.exchange()
    charge = server.accounts.account(KEY).admit(10, clock())
    server.accounts.settle(charge, "completions", "tiny", Used(1, 1, 1, 1))
    await server.accounts.exchange()
    await server.accounts.exchange()
    (found,) = await server.store.read(lambda held: UsageTable(held.database).buckets("completions", 60, 0, 1 << 40))
    assert found.used == Used(2, 21, 6, 8)
    assert server.accounts.account(KEY).spent == 29
    await server.close()


async def test_a_new_server_knows_the_months_usage_before_its_first_answer(store: str) -> None:
    clock = Clock()
    month = month_of(clock())
    first = Server(store, clock)
    used = {Slot("completions", "acme", "tiny", 0, month): Used(1, 90, 0, 10)}
    await first.store.run(lambda held: UsageTable(held.database).write("x", used, {}, clock(), month))
    await first.close()
    second = Server(store, clock)
    key = Key(name="acme", tenant="t", scopes=("use",), created=0.0, limits=Limits(budget_tokens=100))
    with pytest.raises(ApiError) as error:
        await second.accounts.admit(key, 1)
    assert error.value.code == "insufficient_quota"
    await second.accounts.close()
    await second.close()


async def test_closing_writes_what_is_unwritten_once(store: str) -> None:
    clock = Clock()
    server = Server(store, clock)
    charge = await server.accounts.admit(KEY, 1)
    server.accounts.settle(charge, "completions", "tiny", Used(1, 20, 5, 7))
    await server.accounts.close()
    (found,) = await server.store.read(lambda held: UsageTable(held.database).buckets("completions", 86400, 0, 1 << 40))
    assert found.used == Used(1, 20, 5, 7)
    await server.close()


def test_the_number_of_labels_is_bounded() -> None:
    registry = CollectorRegistry()
    metrics = KeyMetrics(registry)
    for number in range(2 * MOST_LABELS):
        metrics.used(f"key{number}", "tiny", Used(1, 1))
    exposed = generate_latest(registry).decode()
    assert exposed.count("holdfast_key_requests_total{") == MOST_LABELS + 1
    assert f'holdfast_key_requests_total{{key="other",model="other"}} {MOST_LABELS}.0' in exposed


class TestUsageRoute:
    async def test_pages_follow_each_other_without_gaps(self, http: Http) -> None:
        async with http(store=MEMORY) as api:
            path, starts = f"{USAGE}?start_time=60&end_time=400&bucket_width=1m&limit=2", []
            page: str | None = ""
            while page is not None:
                found = (await api.get(f"{path}&page={page}" if page else path)).json()
                starts += [bucket["start_time"] for bucket in found["data"]]
                page = found["next_page"]
                assert found["has_more"] == (page is not None)
            assert starts == [60, 120, 180, 240, 300, 360]

    @pytest.mark.parametrize(
        ("query", "param"),
        [
            ("", "start_time"),
            ("start_time=x", "start_time"),
            ("start_time=9&end_time=9", "start_time"),
            ("start_time=1&bucket_width=2d", "bucket_width"),
            ("start_time=1&group_by=user_id", "group_by"),
            ("start_time=1&limit=32", "limit"),
            ("start_time=1&page=x", "page"),
        ],
    )
    async def test_an_invalid_query_names_its_parameter(self, http: Http, query: str, param: str) -> None:
        async with http(store=MEMORY) as api:
            refused = await api.get(f"{USAGE}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)

    async def test_results_are_filtered_by_key_model_and_project(self, http: Http, store: str, keys: Stored) -> None:
        keys.add("a", "1", tenant="one")
        keys.add("b", "2", tenant="two")
        keys.add("ops", "boss", "operator")
        used = {Slot("completions", key, model, 600, "m"): Used(1, len(key + model)) for key, model in
                [("a", "x"), ("b", "x"), ("b", "yy")]}  # fmt: skip
        UsageTable(keys.table._database).write("s", used, {}, 600, "m")
        async with http(store=store, headers=bearer("boss")) as api:
            for query, expected in (
                ("", [7]), ("&models=x", [4]), ("&api_key_ids=b&group_by=model", [2, 3]), ("&project_ids[]=one", [2]),
                ("&group_by[]=api_key_id", [2, 5]), ("&api_key_ids=a,b", [7]), ("&models=z", []),
            ):  # fmt: skip
                found = (await api.get(f"{USAGE}?start_time=600&end_time=601&bucket_width=1m{query}")).json()
                assert [each["input_tokens"] for each in found["data"][0]["results"]] == expected, query


@pytest.mark.usefixtures("always_current")
async def test_a_batch_counts_for_the_budget_of_its_key_and_not_for_its_rate(
    listening: Any, client: FakeClient, official: Official, store: str, keys: Stored, tmp_path: Path
) -> None:
    keys.add("acme", "k", limits=Limits(budget_tokens=3 * SPENT, requests_per_minute=100))
    keys.add("ops", "boss", "operator")
    began = int(time.time())
    lines = [{"custom_id": str(number), "method": "POST", "url": CHAT, "body": HELLO} for number in range(3)]
    content = "\n".join(map(json.dumps, lines)).encode()
    async with listening(store=store, files=str(tmp_path / "files")) as server:
        api = official(server.url, "k")
        file = await api.files.create(file=("lines.jsonl", content), purpose="batch")
        wanted: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        batch = await api.batches.create(**wanted)
        while (await api.batches.retrieve(batch.id)).status != "completed":
            await asyncio.sleep(0.02)
        with pytest.raises(openai.RateLimitError) as error:
            await api.batches.create(**wanted)
        assert error.value.code == "insufficient_quota"
        assert error.value.response.headers["x-ratelimit-remaining-requests"] == "99"
        asked = f"/organization/usage/completions?start_time={began}"
        found = await usage(official(server.url, "boss"), asked, requests=3)
    (result,) = found["data"][0]["results"]
    assert (result["num_model_requests"], result["input_tokens"]) == (3, 3 * PROMPT)
