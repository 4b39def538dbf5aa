"""The Open Inference Protocol over gRPC, by Triton's client and bare calls, at a real server of a fake application."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import serving
from fake_app import FakeApp, asked, called

from holdfast.cli.command import main
from holdfast.core.config import AppConfig
from holdfast.engine.client.app_client import AppFailed
from holdfast.server.address import listen, reserve_grpc
from holdfast.server.config import ServerConfig
from holdfast.server.inference.protobufs import HEALTH, SERVICE, classes, decode
from holdfast.server.run import serve

grpc = pytest.importorskip("grpc")
triton = pytest.importorskip("tritonclient.grpc.aio")

INFER, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"
KEY = (("authorization", "Bearer sesame"),)


@pytest.fixture
def app() -> FakeApp:
    return FakeApp()


@asynccontextmanager
async def server(app: FakeApp, credentials: Any = None, **config: Any) -> AsyncIterator[Any]:
    """A server of one application. Yields its HTTP server, with `channel` and `place` for gRPC."""
    with reserve_grpc(ServerConfig(grpc_port=0)) as held:
        port = held.getsockname()[1]
        async with serving.listening(None, apps=[app], grpc_port=port, **config) as made:
            made.place = f"127.0.0.1:{port}"  # type: ignore[attr-defined]
            options = [("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0)]
            open = grpc.aio.insecure_channel if credentials is None else grpc.aio.secure_channel
            more = () if credentials is None else (credentials,)
            async with open(made.place, *more, options=options) as channel:  # type: ignore[attr-defined]
                made.channel = channel  # type: ignore[attr-defined]
                yield made


async def call(channel: Any, path: str, message: Any = b"", **options: Any) -> bytes:
    """Send one message, and return the answer's bytes."""
    body = message if isinstance(message, bytes) else message.SerializeToString()
    answer: bytes = await channel.unary_unary(path)(body, **options)
    return answer


async def refusal(channel: Any, path: str, message: Any = b"", **options: Any) -> tuple[str, str]:
    """Send a message that is refused. Returns the name of the status code, and the error's message."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(channel, path, message, **options)
    return refused.value.code().name, refused.value.details()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def inputs() -> list[Any]:
    """The inputs of a valid request of Triton's client."""
    arrays = {
        "numbers": ("INT64", np.array([1, 2, 3])),
        "pairs": ("FP32", np.ones((2, 2), np.float32)),
        "flags": ("BOOL", np.array([True, False])),
        "label": ("BYTES", np.array(["ähoy"], object)),
    }
    made = []
    for name, (datatype, array) in arrays.items():
        made.append(triton.InferInput(name, list(array.shape), datatype))
        made[-1].set_data_from_numpy(array)
    return made


class TestTritonsClient:
    """tritonclient[grpc] from PyPI."""

    async def test_tritons_client_sees_a_ready_server_and_its_models(self, app: FakeApp) -> None:
        async with server(app) as made, triton.InferenceServerClient(made.place) as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert await client.is_model_ready("sums") and await client.is_model_ready("sums", "1")
            assert not await client.is_model_ready("other") and not await client.is_model_ready("sums", "2")
            assert (await client.get_server_metadata()).name == "holdfast"
            metadata = await client.get_model_metadata("sums")
            assert [(each.name, each.datatype, list(each.shape)) for each in metadata.inputs] == [
                ("numbers", "INT64", [-1]), ("pairs", "FP32", [-1, 2]), ("flags", "BOOL", [2]), ("label", "BYTES", [1]),
            ]  # fmt: skip
            config = (await client.get_model_config("sums")).config
            assert (config.max_batch_size, config.output[1].data_type) == (0, 13)  # TYPE_STRING
            index = await client.get_model_repository_index()
            assert [(each.name, each.state) for each in index.models] == [("sums", "READY")]

    @pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
    async def test_tritons_client_infers_and_reads_statistics(self, app: FakeApp, compression: str | None) -> None:
        async with server(app) as made, triton.InferenceServerClient(made.place) as client:
            result = await client.infer("sums", inputs(), request_id="x", compression_algorithm=compression)
            assert result.as_numpy("sum").tolist() == [6] and result.get_response().id == "x"
            assert [each.decode() for each in result.as_numpy("label")] == ["ähoy"]
            wanted = [triton.InferRequestedOutput("label")]
            result = await client.infer("sums", inputs(), outputs=wanted, timeout=60_000_000)
            assert [each.name for each in result.get_response().outputs] == ["label"]
            (stats,) = (await client.get_inference_statistics("sums")).model_stats
            assert (stats.inference_count, stats.inference_stats.success.count) == (2, 2)

    async def test_tritons_client_raises_its_own_errors(self, app: FakeApp) -> None:
        async with server(app) as made, triton.InferenceServerClient(made.place) as client:
            with pytest.raises(
                triton.InferenceServerException, match="the model 'other' is not served here"
            ) as refused:
                await client.infer("other", inputs())
            assert refused.value.status() == "StatusCode.NOT_FOUND"

    async def test_a_stream_is_answered_in_order_with_its_errors(self, app: FakeApp) -> None:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number, name in enumerate(("sums", "other", "sums")):
                yield {"model_name": name, "inputs": inputs(), "request_id": str(number)}

        found = []
        async with server(app) as made, triton.InferenceServerClient(made.place) as client:
            async for result, error in client.stream_infer(requests()):
                found.append(result.get_response().id if error is None else str(error))
        assert found == ["0", "the model 'other' is not served here; this server has sums", "2"]


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"model_name": "other"}, "NOT_FOUND", "the model 'other' is not served here; this server has sums"),
        ({"model_version": "2"}, "NOT_FOUND", "the model sums has no version '2'; it has 1"),
        ({"raw_input_contents": [b""]}, "INVALID_ARGUMENT", "raw_input_contents has 1 entries"),
    ],
)
async def test_a_request_at_fault_has_its_status_code(
    app: FakeApp, change: dict[str, Any], code: str, message: str
) -> None:
    given = called()
    for name, value in change.items():
        given.ClearField(name)
        if isinstance(value, list):
            getattr(given, name).extend(value)
        else:
            setattr(given, name, value)
    async with server(app) as made:
        assert (refused := await refusal(made.channel, INFER, given))[0] == code and message in refused[1]
        assert await call(made.channel, INFER, called())


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("numbers[0] is odd"), "INVALID_ARGUMENT", "numbers[0] is odd"),
        (AppFailed("the application sums failed"), "INTERNAL", "the application sums failed"),
        (KeyError("secret"), "INTERNAL", "the server failed on this request"),
    ],
)
async def test_errors_of_the_application_have_their_code_and_are_counted(
    app: FakeApp, error: Exception, code: str, message: str
) -> None:
    app.raises = error
    async with server(app) as made, httpx.AsyncClient(base_url=made.url) as http:
        assert await refusal(made.channel, INFER, called()) == (code, message)
        outcome = "refused" if code == "INVALID_ARGUMENT" else "failed"
        assert f'{{app="sums",outcome="{outcome}"}} 1.0' in (await http.get("/metrics")).text


async def test_a_method_that_is_not_offered_is_unimplemented(app: FakeApp) -> None:
    async with server(app) as made:
        assert (await refusal(made.channel, f"{SERVICE}/RepositoryModelUnload"))[0] == "UNIMPLEMENTED"
        assert (await refusal(made.channel, INFER, b"\xff"))[0] == "INVALID_ARGUMENT"


class TestLeaving:
    async def test_a_client_that_leaves_aborts_its_request(self, app: FakeApp) -> None:
        app.hold = asyncio.Event()
        async with server(app) as made, httpx.AsyncClient(base_url=made.url) as http:
            leaving = made.channel.unary_unary(INFER)(called().SerializeToString())
            await until(lambda: bool(app.asked))
            leaving.cancel()
            await until(lambda: app.aborted == 1)
            assert 'outcome="left"' in (await http.get("/metrics")).text

    async def test_a_deadline_aborts_the_request(self, app: FakeApp) -> None:
        app.hold = asyncio.Event()
        async with server(app) as made:
            assert (await refusal(made.channel, INFER, called(), timeout=0.2))[0] == "DEADLINE_EXCEEDED"
            await until(lambda: app.aborted == len(app.asked))

    async def test_a_timeout_of_the_request_ends_it(self, app: FakeApp) -> None:
        app.hold = asyncio.Event()
        given = called()
        given.parameters["timeout"].int64_param = 20_000
        async with server(app) as made:
            code, message = await refusal(made.channel, INFER, given)
        assert code == "DEADLINE_EXCEEDED" and "within its timeout of 0.02 s" in message and app.aborted == 1

    async def test_a_client_that_leaves_its_stream_aborts_all_requests(self, app: FakeApp) -> None:
        app.hold = asyncio.Event()
        async with server(app) as made:
            stream = made.channel.stream_stream(STREAM)()
            for _ in range(3):
                await stream.write(called().SerializeToString())
            await until(lambda: len(app.asked) == 3)
            stream.cancel()
            await until(lambda: app.aborted == 3)


class TestKeys:
    async def test_every_method_but_health_needs_a_key(self, app: FakeApp) -> None:
        async with server(app, api_key=("sesame",)) as made:
            for path in (INFER, f"{SERVICE}/ServerMetadata", f"{SERVICE}/ModelReady", f"{SERVICE}/ModelStatistics"):
                code, message = await refusal(made.channel, path)
                assert code == "UNAUTHENTICATED" and "a valid API key is needed" in message
            for path in (f"{SERVICE}/ServerLive", f"{SERVICE}/ServerReady", f"{HEALTH}/Check"):
                assert await call(made.channel, path) == b"\x08\x01"
            wrong = (("authorization", "Bearer other"),)
            assert (await refusal(made.channel, INFER, called(), metadata=wrong))[0] == "UNAUTHENTICATED"
            assert not app.asked
            for metadata in (KEY, (("x-api-key", "sesame"),)):
                assert await call(made.channel, INFER, called(), metadata=metadata)

    async def test_a_call_without_a_key_is_refused_before_its_message_is_read(self, app: FakeApp) -> None:
        async with server(app, api_key=("sesame",)) as made:
            waiting = made.channel.stream_unary(INFER)()
            assert await waiting.code() == grpc.StatusCode.UNAUTHENTICATED

    async def test_a_stream_needs_a_key(self, app: FakeApp) -> None:
        async with server(app, api_key=("sesame",)) as made:
            assert await made.channel.stream_stream(STREAM)().code() == grpc.StatusCode.UNAUTHENTICATED
            stream = made.channel.stream_stream(STREAM)(metadata=KEY)
            await stream.write(called(id="x").SerializeToString())
            assert decode("ModelStreamInferResponse", await stream.read()).infer_response.id == "x"
            stream.cancel()

    async def test_a_key_at_its_share_is_refused_over_both_protocols(self, app: FakeApp) -> None:
        app.hold = asyncio.Event()
        async with server(app, api_key=("sesame", "other"), tenant_share=0.5) as made:
            running = [asyncio.create_task(call(made.channel, INFER, called(), metadata=KEY)) for _ in range(2)]
            await until(lambda: len(app.asked) == 2)
            code, message = await refusal(made.channel, INFER, called(), metadata=KEY)
            assert code == "RESOURCE_EXHAUSTED" and "this API key has 2 requests in progress" in message
            async with httpx.AsyncClient(base_url=made.url, headers=dict(KEY)) as http:
                third = await http.post("/v2/models/sums/infer", json=asked())
            assert third.status_code == 429
            app.hold.set()
            await asyncio.gather(*running)

    async def test_a_keys_connections_are_counted_over_both_protocols(self, app: FakeApp) -> None:
        app.hold = asyncio.Event()
        async with server(app, api_key=("sesame",), max_connections=2) as made:
            running = [asyncio.create_task(call(made.channel, INFER, called(), metadata=KEY)) for _ in range(2)]
            await until(lambda: len(app.asked) == 2)
            async with httpx.AsyncClient(base_url=made.url, headers=dict(KEY)) as http:
                refused = await http.get("/v2")
            assert refused.status_code == 429 and "has 2 requests in progress" in refused.json()["error"]
            app.hold.set()
            await asyncio.gather(*running)


class TestLimits:
    async def test_a_message_that_is_too_large_is_refused(self, app: FakeApp) -> None:
        large = called()
        large.raw_input_contents[3] = b"x" * 2000
        async with server(app, max_body_mb=0.001) as made:
            code, message = await refusal(made.channel, INFER, large)
            assert code == "RESOURCE_EXHAUSTED" and "1000" in message
            assert await call(made.channel, INFER, called())
        assert len(app.asked) == 1

    async def test_a_message_that_is_too_large_once_decompressed_is_refused(self, app: FakeApp) -> None:
        assert len(gzip.compress(bytes(200_000))) < 1000
        async with server(app, max_body_mb=0.001) as made:
            code, message = await refusal(made.channel, INFER, bytes(200_000), compression=grpc.Compression.Gzip)
            assert code == "RESOURCE_EXHAUSTED" and "larger than max" in message
            assert await call(made.channel, INFER, called(), compression=grpc.Compression.Gzip)

    async def test_a_message_that_does_not_arrive_is_refused(self, app: FakeApp) -> None:
        async with server(app, body_seconds=0.05) as made:
            waiting = made.channel.stream_unary(INFER)()
            assert await waiting.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert await waiting.details() == "the message has not arrived within 0.05 s (--body-seconds)"
            while True:
                try:
                    assert await call(made.channel, INFER, called())
                    break
                except grpc.aio.AioRpcError as late:  # on a busy machine, this one may be late, too
                    assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    async def test_a_call_without_a_message_is_refused(self, app: FakeApp) -> None:
        async with server(app) as made:
            empty = made.channel.stream_unary(INFER)()
            await empty.done_writing()
            assert await empty.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert await empty.details() == "the call has no message"

    async def test_beyond_the_limit_of_requests_the_application_is_unavailable(self, app: FakeApp) -> None:
        app.hold = asyncio.Event()
        async with server(app) as made:
            running = [asyncio.create_task(call(made.channel, INFER, called())) for _ in range(4)]
            await until(lambda: len(app.asked) == 4)
            with pytest.raises(grpc.aio.AioRpcError, match="the queue is full") as refused:
                await call(made.channel, INFER, called())
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            assert dict(refused.value.trailing_metadata())["retry-after"]
            app.hold.set()
            await asyncio.gather(*running)

    async def test_a_stream_reads_no_further_than_its_answers_allow(
        self, app: FakeApp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("holdfast.server.routes.calls.MOST_OF_STREAM", 1)
        app.hold = asyncio.Event()
        async with server(app) as made:
            stream = made.channel.stream_stream(STREAM)()
            for number in range(4):
                await stream.write(called(id=str(number)).SerializeToString())
            await stream.done_writing()
            await until(lambda: len(app.asked) == 3)  # One is being written, one waits, one waits for its place.
            app.hold.set()
            answers = [decode("ModelStreamInferResponse", each) async for each in stream]
        assert [each.infer_response.id for each in answers] == ["0", "1", "2", "3"]


class TestHealth:
    async def test_a_dead_engine_is_not_ready_and_unavailable(self, app: FakeApp) -> None:
        app.hangs = True
        async with server(app) as made:
            assert await call(made.channel, f"{SERVICE}/ServerReady") == b""
            assert await call(made.channel, f"{SERVICE}/ModelReady", asked_name("sums")) == b""
            assert await call(made.channel, f"{SERVICE}/ServerLive") == b"\x08\x01"
            status = decode("HealthCheckResponse", await call(made.channel, f"{HEALTH}/Check"))
            assert status.status == 2
            assert (await refusal(made.channel, f"{SERVICE}/ModelStatistics"))[0] == "UNAVAILABLE"

    async def test_health_of_another_service_is_not_found(self, app: FakeApp) -> None:
        request = classes()["HealthCheckRequest"]
        async with server(app) as made:
            assert await call(made.channel, f"{HEALTH}/Check", request(service=SERVICE[1:])) == b"\x08\x01"
            assert (await refusal(made.channel, f"{HEALTH}/Check", request(service="other")))[0] == "NOT_FOUND"


def asked_name(name: str) -> Any:
    return classes()["ModelReadyRequest"](name=name)


async def test_draining_ends_running_calls_and_refuses_new_ones(app: FakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    received: asyncio.Queue[int] = asyncio.Queue()
    monkeypatch.setattr("holdfast.server.run.signals", lambda kinds=(): nullcontext(received))
    app.hold, app.config = asyncio.Event(), AppConfig(app=("sums",), app_max_requests=1)
    async with server(app, drain_seconds=3600) as made:
        idle = made.channel.stream_stream(STREAM)()
        await idle.write(b"")
        assert decode("ModelStreamInferResponse", await idle.read()).error_message  # The stream is open.
        running = asyncio.create_task(call(made.channel, INFER, called()))
        await until(lambda: bool(app.asked))
        received.put_nowait(signal.SIGTERM)
        while await call(made.channel, f"{SERVICE}/ServerReady"):
            await asyncio.sleep(0.001)
        while "the queue is full" in (refused := await refusal(made.channel, INFER, called()))[1]:
            await asyncio.sleep(0.001)  # New requests are still admitted, up to the limit.
        assert refused[0] == "UNAVAILABLE" and "the server is shutting down" in refused[1]
        assert not running.done()
        app.hold.set()
        assert await running
        assert await made.code == 0
        assert (await refusal(made.channel, f"{SERVICE}/ServerLive"))[0] == "UNAVAILABLE"


async def test_the_servers_certificate_serves_grpc(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *names]
    subprocess.run([*command, "-keyout", "key.pem", "-out", "cert.pem"], cwd=tmp_path, check=True, capture_output=True)
    chain, key = (tmp_path / name for name in ("cert.pem", "key.pem"))
    (tmp_path / "both.pem").write_bytes(key.read_bytes() + chain.read_bytes())
    credentials = grpc.ssl_channel_credentials(chain.read_bytes())
    for files in (
        {"ssl_certfile": str(chain), "ssl_keyfile": str(key)},
        {"ssl_certfile": str(tmp_path / "both.pem")},
    ):
        async with server(FakeApp(), credentials, **files) as made:
            assert await call(made.channel, INFER, called())
            async with grpc.aio.insecure_channel(made.place) as plain:
                assert (await refusal(plain, INFER, called()))[0] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grpc-port", "8001"], "--grpc-port is for applications; name one with --app"),
        (["--app", "x", "--grpc-port", "8001", "--port", "8001"], "grpc_port is 8001, and so is port"),
    ],
)
def test_a_port_of_grpc_needs_an_application_and_a_port_of_its_own(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    assert message in capsys.readouterr().err


async def test_a_port_of_grpc_that_is_taken_fails_before_anything_starts(app: FakeApp) -> None:
    async with server(app) as made:
        port = int(made.place.rpartition(":")[2])
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*; choose another --grpc-port"):
            reserve_grpc(ServerConfig(grpc_port=port))
        config = ServerConfig(port=0, grpc_port=port)
        with (
            listen(config) as listener,
            pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}; choose another --grpc-port"),
        ):
            await serve(None, config, None, listener, apps=[FakeApp()], on_ready=lambda *ready: None)  # type: ignore[list-item]
