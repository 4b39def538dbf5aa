"""The routes of the Open Inference Protocol over a fake application: errors, keys, shares, bodies, health, metrics."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
import serving
from fake_app import INFO, FakeApp, asked
from fake_engine import FakeClient

from holdfast.core.config import AppConfig
from holdfast.engine.client.app_client import AppFailed
from holdfast.engine.client.app_group import AppGroup
from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig

Http = Callable[..., httpx.AsyncClient]
INFER = "/v2/models/sums/infer"


@pytest.fixture
def app() -> FakeApp:
    return FakeApp()


@pytest.fixture
def http(app: FakeApp) -> Http:
    """A client of the server of one application, in process: `async with http(api_key=...) as api`."""

    def make(headers: dict[str, str] | None = None, **config: Any) -> httpx.AsyncClient:
        made = create_app(None, ServerConfig(**config), None, [app])  # type: ignore[list-item]
        transport = httpx.ASGITransport(made, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)

    return make


def error_of(response: httpx.Response) -> str:
    """Return the message of an error, checked to be the body's only field."""
    body = response.json()
    assert list(body) == ["error"]
    message: str = body["error"]
    return message


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_a_request_is_answered(http: Http) -> None:
    async with http() as api:
        for path in (INFER, "/v2/models/sums/versions/1/infer"):
            answer = await api.post(path, json=asked(id="x"))
            assert answer.status_code == 200 and answer.json()["id"] == "x"
            assert answer.json()["outputs"][0] == {"name": "sum", "datatype": "FP32", "shape": [1], "data": [6]}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models/other"),
        ("GET", "/v2/models/sums/versions/2"),
        ("GET", "/v2/models/other/ready"),
        ("GET", "/v2/models/other/config"),
        ("GET", "/v2/models/other/stats"),
        ("POST", "/v2/models/other/infer"),
        ("POST", "/v2/models/sums/versions/x/infer"),
        ("POST", "/v2/repository/models/sums/unload"),
        ("GET", "/v2/nothing"),
    ],
)
async def test_an_unknown_application_is_a_404_in_the_protocols_shape(http: Http, method: str, path: str) -> None:
    async with http() as api:
        answer = await api.request(method, path, json=asked() if method == "POST" else None)
    assert answer.status_code == 404 and error_of(answer)


async def test_a_wrong_method_is_a_405(http: Http) -> None:
    async with http() as api:
        answer = await api.get(INFER)
    assert answer.status_code == 405 and "does not take GET" in error_of(answer)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("numbers[0] is odd"), 400, "numbers[0] is odd"),
        (AppFailed("the application sums failed on this request"), 500, "the application sums failed"),
    ],
)
async def test_errors_of_the_application_have_their_status(
    http: Http, app: FakeApp, error: Exception, status: int, message: str
) -> None:
    app.raises = error
    async with http() as api:
        answer = await api.post(INFER, json=asked())
        metrics = (await api.get("/metrics")).text
    assert answer.status_code == status and message in error_of(answer)
    outcome = "refused" if status == 400 else "failed"
    assert f'holdfast_app_requests_total{{app="sums",outcome="{outcome}"}} 1.0' in metrics


async def test_an_unexpected_error_is_a_500_without_details(http: Http, app: FakeApp) -> None:
    app.raises = KeyError("secret")
    async with http() as api:
        answer = await api.post(INFER, json=asked())
    assert (answer.status_code, error_of(answer)) == (500, "the server failed on this request")


async def test_a_timeout_aborts_the_request(http: Http, app: FakeApp) -> None:
    app.hold = asyncio.Event()
    async with http() as api:
        answer = await api.post(INFER, json=asked(parameters={"timeout": 20_000}))
    assert answer.status_code == 503 and "within its timeout of 0.02 s" in error_of(answer)
    assert app.aborted == 1


KEY = {"authorization": "Bearer sesame"}


class TestKeys:
    async def test_every_route_but_health_needs_a_key(self, http: Http) -> None:
        async with http(api_key=("sesame",)) as api:
            for path in ("/v2", "/v2/models/sums", "/v2/models/stats"):
                refused = await api.get(path)
                assert refused.status_code == 401 and "a valid API key is needed" in error_of(refused)
                assert (await api.get(path, headers=KEY)).status_code == 200
            assert (await api.post(INFER, json=asked())).status_code == 401
            assert (await api.post(INFER, json=asked(), headers=KEY)).status_code == 200
            for path in ("/v2/health/live", "/v2/health/ready"):
                assert (await api.get(path)).status_code == 200

    async def test_a_key_at_its_share_gets_429(self, http: Http, app: FakeApp) -> None:
        app.hold = asyncio.Event()
        async with http(api_key=("sesame", "other"), tenant_share=0.5) as api:
            running = [asyncio.create_task(api.post(INFER, json=asked(), headers=KEY)) for _ in range(2)]
            await until(lambda: len(app.asked) == 2)
            third = await api.post(INFER, json=asked(), headers=KEY)
            assert third.status_code == 429 and third.headers["retry-after"] == "1"
            assert "this API key has 2 requests in progress and asks for 1 more; at most 2 are taken" in error_of(third)
            other = asyncio.create_task(api.post(INFER, json=asked(), headers={"authorization": "Bearer other"}))
            await until(lambda: len(app.asked) == 3)
            app.hold.set()
            assert {each.status_code for each in await asyncio.gather(*running, other)} == {200}

    async def test_beyond_the_limit_of_requests_the_answer_is_503(self, http: Http, app: FakeApp) -> None:
        app.hold = asyncio.Event()
        async with http() as api:
            running = [asyncio.create_task(api.post(INFER, json=asked())) for _ in range(4)]
            await until(lambda: len(app.asked) == 4)
            fifth = await api.post(INFER, json=asked())
            assert fifth.status_code == 503 and "the queue is full (4 requests)" in error_of(fifth)
            app.hold.set()
            await asyncio.gather(*running)
            assert (await api.post(INFER, json=asked())).status_code == 200


async def test_inputs_in_progress_are_bounded_in_bytes(http: Http, app: FakeApp) -> None:
    app.hold = asyncio.Event()
    request = asked()
    request["inputs"][3]["data"] = ["a" * 940]
    async with http(max_bodies_mb=0.001) as api:
        running = asyncio.create_task(api.post(INFER, json=asked()))
        await until(lambda: len(app.asked) == 1)
        refused = await api.post(INFER, content=gzip.compress(json.dumps(request).encode()), headers=GZIP)
        assert refused.status_code == 503 and "more than 1000 bytes of inputs" in error_of(refused)
        app.hold.set()
        assert (await running).status_code == 200
        assert (await api.post(INFER, json=asked())).status_code == 200


GZIP = {"content-encoding": "gzip"}


class TestBrowsers:
    """A server without keys accepts requests of Triton's clients, and none that a web site can make a browser send."""

    @pytest.mark.parametrize("kind", [None, "application/octet-stream", "application/json"])
    async def test_clients_may_leave_the_content_type_out(self, http: Http, kind: str | None) -> None:
        async with http() as api:
            headers = {} if kind is None else {"content-type": kind}
            assert (await api.post(INFER, content=json.dumps(asked()), headers=headers)).status_code == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {"origin": "http://evil.example"},
            {"content-type": "text/plain"},
            {"content-type": "application/x-www-form-urlencoded"},
        ],
    )
    async def test_a_site_cannot_post(self, http: Http, app: FakeApp, headers: dict[str, str]) -> None:
        async with http() as api:
            refused = await api.post(INFER, content=json.dumps(asked()), headers=headers)
        assert refused.status_code == 415 and error_of(refused) and not app.asked

    async def test_another_host_name_is_refused(self, http: Http) -> None:
        async with http({"host": "evil.example"}) as api:
            refused = await api.get("/v2/models/sums")
        assert refused.status_code == 403 and "not known as evil.example" in error_of(refused)


class TestBodies:
    @pytest.mark.parametrize(
        ("encoding", "body"),
        [
            ("gzip", gzip.compress(json.dumps(asked()).encode())),
            ("deflate", zlib.compress(json.dumps(asked()).encode())),
            ("GZIP", gzip.compress(json.dumps(asked()).encode())),
            ("identity", json.dumps(asked()).encode()),
        ],
    )
    async def test_compressed_bodies_are_read(self, http: Http, encoding: str, body: bytes) -> None:
        async with http() as api:
            assert (await api.post(INFER, content=body, headers={"content-encoding": encoding})).status_code == 200

    @pytest.mark.parametrize(
        ("encoding", "body", "status"),
        [
            ("br", b"x", 415),
            ("gzip, gzip", b"x", 415),
            ("gzip", b"not gzip", 400),
            ("gzip", gzip.compress(json.dumps(asked()).encode())[:-9], 400),
            ("gzip", gzip.compress(json.dumps(asked()).encode()) + b"more", 400),
            ("deflate", b"", 400),
            ("gzip", gzip.compress(bytes(2_000_000)), 413),
        ],
    )
    async def test_bodies_that_cannot_be_decompressed_are_refused(
        self, http: Http, encoding: str, body: bytes, status: int
    ) -> None:
        async with http(max_body_mb=1) as api:
            refused = await api.post(INFER, content=body, headers={"content-encoding": encoding})
        assert refused.status_code == status and error_of(refused)

    async def test_a_body_that_is_too_large_is_refused(self, http: Http) -> None:
        async with http(max_body_mb=0.001) as api:
            refused = await api.post(INFER, content=b"x" * 1001)
        assert refused.status_code == 413 and "larger than 1000 bytes" in error_of(refused)

    @pytest.mark.parametrize(
        ("accepted", "encoding"),
        [
            ("gzip", "gzip"),
            ("deflate", "deflate"),
            ("br, deflate;q=0.5, gzip", "deflate"),
            ("gzip;q=0", None),
            ("gzip;q=0.0, deflate", "deflate"),
            ("identity", None),
        ],
    )
    async def test_large_answers_are_compressed_as_the_client_accepts(
        self, http: Http, accepted: str, encoding: str | None
    ) -> None:
        request = asked()
        request["inputs"][3]["data"] = ["ahoy" * 1000]
        async with http() as api:
            answer = await api.post(INFER, json=request, headers={"accept-encoding": accepted})
            small = await api.post(INFER, json=asked(), headers={"accept-encoding": accepted})
        assert answer.headers.get("content-encoding") == encoding and "content-encoding" not in small.headers
        assert answer.json()["outputs"][1]["data"] == ["ahoy" * 1000]
        assert (int(answer.headers["content-length"]) < 1000) == (encoding is not None)


class TestHealth:
    async def test_a_server_with_a_living_engine_is_live_and_ready(self, http: Http) -> None:
        async with http() as api:
            assert (await api.get("/v2/health/live")).json() == {"live": True}
            assert (await api.get("/v2/health/ready")).json() == {"ready": True}
            assert (await api.get("/v2/models/sums/ready")).json() == {"name": "sums", "ready": True}
            assert (await api.get("/health")).json() == {"status": "ok"}

    @pytest.mark.parametrize("trouble", ["engine dead", "engine hangs"])
    async def test_a_dead_or_hanging_engine_is_not_ready(self, http: Http, app: FakeApp, trouble: str) -> None:
        if trouble == "engine dead":
            app.die("killed")
        app.hangs = True
        async with http() as api:
            for path in ("/v2/health/ready", "/v2/models/sums/ready"):
                answer = await api.get(path)
                assert answer.status_code == 503 and answer.json()["ready"] is False
                assert answer.json()["error"] == trouble
            assert (await api.get("/health")).json() == {"status": trouble}
            assert (await api.get("/v2/health/live")).status_code == 200
            assert (await api.get("/v2/models/stats")).status_code == 503
            assert 'holdfast_app_engine_up{app="sums"} 0.0' in (await api.get("/metrics")).text

    async def test_requests_to_a_dead_engine_get_503(self, http: Http, app: FakeApp) -> None:
        app.die("killed")
        async with http() as api:
            answer = await api.post(INFER, json=asked())
            index = await api.post("/v2/repository/index")
        assert answer.status_code == 503 and "the engine has stopped" in error_of(answer)
        assert index.json()[0]["state"] == "UNAVAILABLE"

    async def test_a_language_model_counts_as_well(self, app: FakeApp) -> None:
        client = FakeClient()
        async with serving.listening(client, apps=[app]) as server, httpx.AsyncClient(base_url=server.url) as api:
            assert (await api.get("/v2/health/ready")).status_code == 200
            client.hangs = True
            assert (await api.get("/v2/health/ready")).json() == {"ready": False, "error": "engine hangs"}
            assert (await api.get("/v2/models/sums/ready")).status_code == 200
            assert [each["id"] for each in (await api.get("/v1/models")).json()["data"]] == ["tiny"]
            assert "error" in (await api.get("/v1/nothing")).json()
            assert (await api.get("/v1/nothing")).json()["error"]["code"] == "not_found"

    async def test_an_application_that_dies_ends_the_server(self, app: FakeApp) -> None:
        async with serving.listening(FakeClient(), apps=[app]) as server:
            app.die("out of memory")
            assert await server.code == 1


class TestMetrics:
    async def test_metrics_count_requests_times_and_tasks(self, http: Http) -> None:
        async with http() as api:
            await api.post(INFER, json=asked())
            await api.post(INFER, json={})
            text = (await api.get("/metrics")).text
        values = dict(re.findall(r"^(holdfast_app_\S+) (\S+)$", text, re.MULTILINE))
        expected = {
            'requests_total{app="sums",outcome="ok"}': 1,
            'requests_total{app="sums",outcome="refused"}': 1,
            'queue_seconds_count{app="sums"}': 1,
            'queue_seconds_sum{app="sums"}': 0.25,
            'compute_seconds_sum{app="sums"}': 0.25,
            'requests_waiting{app="sums"}': 1,
            'requests_running{app="sums"}': 2,
            'rows{app="sums"}': 63,
            'rows_used{app="sums"}': 7,
            'nodes_ready{app="sums",cell="sums-cell"}': 3,
            'tasks_in_flight{app="sums",cell="sums-cell"}': 1,
            'batch_size_bucket{app="sums",cell="sums-cell",le="1.0"}': 4,
            'batch_size_bucket{app="sums",cell="sums-cell",le="2.0"}': 4,
            'batch_size_bucket{app="sums",cell="sums-cell",le="4.0"}': 6,
            'batch_size_bucket{app="sums",cell="sums-cell",le="+Inf"}': 6,
            'batch_size_sum{app="sums",cell="sums-cell"}': 10,
        }
        assert {name: float(values[f"holdfast_app_{name}"]) for name in expected} == pytest.approx(expected)

    async def test_the_protocols_statistics_agree_with_the_metrics(self, http: Http) -> None:
        async with http() as api:
            await api.post(INFER, json=asked())
            await api.post(INFER, json={})
            (stats,) = (await api.get("/v2/models/stats")).json()["model_stats"]
            assert (await api.get("/v2/models/sums/versions/1/stats")).json()["model_stats"] == [stats]
        assert (stats["name"], stats["inference_count"], stats["execution_count"]) == ("sums", 1, 6)
        times = stats["inference_stats"]
        assert times["queue"] == {"count": 1, "ns": pytest.approx(250_000_000)}
        assert times["compute_infer"] == {"count": 1, "ns": pytest.approx(250_000_000)}
        assert times["success"]["count"] == times["fail"]["count"] == 1
        assert [(each["batch_size"], each["compute_infer"]["count"]) for each in stats["batch_stats"]] == [
            (1, 4),
            (3, 2),
        ]


async def test_several_applications_are_listed_and_do_not_mix(app: FakeApp) -> None:
    other = FakeApp(info=replace(INFO, name="others"), config=AppConfig(app=("others",)), answer=7)
    made = create_app(None, ServerConfig(), None, [app, other])  # type: ignore[list-item]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://localhost") as api:
        index = (await api.post("/v2/repository/index", json={"ready": True})).json()
        assert [(each["name"], each["version"], each["state"]) for each in index] == [
            ("sums", "1", "READY"), ("others", "1", "READY"),
        ]  # fmt: skip
        assert (await api.post("/v2/models/others/infer", json=asked())).json()["outputs"][0]["data"] == [7]
        assert (len(app.asked), len(other.asked)) == (0, 1)
        assert (await api.post("/v2/repository/index", content=b"[")).status_code == 400
        assert (await api.get("/")).json()["applications"] == ["sums", "others"]


async def test_an_application_with_an_engine_for_each_device_is_served_as_one() -> None:
    one, other = FakeApp(hold=asyncio.Event()), FakeApp(hold=asyncio.Event())
    group = AppGroup(one.config, [one, other])  # type: ignore[list-item]
    made = create_app(None, ServerConfig(), None, [group])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://localhost") as api:
        running = [asyncio.create_task(api.post(INFER, json=asked())) for _ in range(2)]
        await until(lambda: (len(one.asked), len(other.asked)) == (1, 1))
        for each in (one, other):
            assert each.hold is not None
            each.hold.set()
        assert [answer.json()["outputs"][0]["data"] for answer in await asyncio.gather(*running)] == [[6.0]] * 2
        (stats,) = (await api.get("/v2/models/sums/stats")).json()["model_stats"]
        assert (stats["inference_count"], stats["execution_count"]) == (2, 12)
        assert 'holdfast_app_rows{app="sums"} 126.0' in (await api.get("/metrics")).text
        other.die("killed")
        assert (await api.get("/v2/health/ready")).status_code == 503
    await group.close()


@pytest.fixture
async def connected(app: FakeApp) -> AsyncIterator[httpx.AsyncClient]:
    async with serving.listening(None, apps=[app]) as server, httpx.AsyncClient(base_url=server.url) as api:
        yield api


async def test_a_client_that_leaves_aborts_its_request(connected: httpx.AsyncClient, app: FakeApp) -> None:
    app.hold = asyncio.Event()
    leaving = asyncio.create_task(connected.post(INFER, json=asked()))
    await until(lambda: bool(app.asked))
    leaving.cancel()
    await until(lambda: app.aborted == 1)
    assert 'outcome="left"' in (await connected.get("/metrics")).text


async def test_a_body_that_does_not_arrive_is_refused_in_the_protocols_shape(app: FakeApp) -> None:
    async with serving.listening(None, apps=[app], body_seconds=0.05) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{" % INFER.encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert b" 408 " in head and "has not arrived" in json.loads(body)["error"]
