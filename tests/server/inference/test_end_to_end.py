"""`holdfast serve --app` in its own process, with unmodified tritonclient, bad requests, aborts and deaths."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny_apps
from served import Serving, eventually, make_checkpoint, started

OPTIONS = ("--app-device", "cpu", "--app-capacity", "64")
ADDING = "/v2/models/adding/infer"


@pytest.fixture(scope="module")
def grpc_port() -> int:
    """A free port for gRPC; 0 if it is not installed."""
    if find_spec("grpc") is None:
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def serving(grpc_port: int) -> Iterator[Serving]:
    more = ("--grpc-port", str(grpc_port)) if grpc_port else ()
    with started("--app", "tiny_apps:adding", "--app", "tiny_apps:slow", *OPTIONS, *more) as process:
        yield process


@pytest.fixture
def api(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, timeout=60) as client:
        yield client


def asked(numbers: list[int], **more: Any) -> dict[str, Any]:
    inputs = [
        {"name": "numbers", "datatype": "INT64", "shape": [len(numbers)], "data": numbers},
        {"name": "scale", "datatype": "FP32", "shape": [2], "data": [1, 0.5]},
        {"name": "label", "datatype": "BYTES", "shape": [1], "data": ["ahoy"]},
    ]
    return {"inputs": inputs, **more}


def metric(api: httpx.Client, name: str, app: str) -> float:
    text = api.get("/metrics").text
    found = [line for line in text.splitlines() if line.startswith(f'holdfast_app_{name}{{app="{app}"')]
    assert len(found) == 1, text
    return float(found[0].split()[-1])


def everything_is_free(api: httpx.Client, app: str) -> bool:
    return not any(metric(api, name, app) for name in ("rows_used", "requests_running", "requests_waiting"))


def test_a_request_gives_the_sums_of_its_numbers(api: httpx.Client) -> None:
    answer = api.post(ADDING, json=asked([1, 2, 3], id="seven"))
    assert answer.json() == {
        "model_name": "adding",
        "model_version": "1",
        "id": "seven",
        "outputs": [
            {"name": "totals", "datatype": "FP32", "shape": [3, 2], "data": [1, 0.5, 3, 1.5, 6, 3]},
            {"name": "words", "datatype": "BYTES", "shape": [1], "data": ["sum [6.0, 3.0]"]},
            {"name": "steps", "datatype": "INT64", "shape": [1], "data": [3]},
        ],
    }


def test_an_applications_refusal_is_a_400_with_its_message(api: httpx.Client) -> None:
    refused = api.post(ADDING, json=asked([5, tiny_apps.BAD]))
    assert (refused.status_code, refused.json()) == (400, {"error": "numbers[1] is -1; it must be at least 0"})


def test_an_application_that_fails_answers_500_and_serves_on(api: httpx.Client) -> None:
    failed = api.post(ADDING, json=asked([tiny_apps.BROKEN]))
    assert (failed.status_code, failed.json()) == (500, {"error": "the application adding failed on this request"})
    assert api.post(ADDING, json=asked([1])).status_code == 200


def test_a_long_chain_takes_one_place(api: httpx.Client) -> None:
    long = api.post(ADDING, json=asked([1] * 4096))
    assert long.status_code == 200 and len(long.json()["outputs"][0]["data"]) == 8192


def test_a_graph_that_can_never_fit_is_refused(api: httpx.Client) -> None:
    wide = asked([1] * 64)
    wide["inputs"][2]["data"] = ["apart"]
    refused = api.post(ADDING, json=wide)
    assert refused.status_code == 400 and "at most 63 fit" in refused.json()["error"]


def test_tritons_client_infers_over_grpc(serving: Serving, api: httpx.Client, grpc_port: int) -> None:
    pytest.importorskip("grpc")
    triton = pytest.importorskip("tritonclient.grpc")
    arrays = {
        "numbers": ("INT64", np.array([4, 5])),
        "scale": ("FP32", np.array([1, 0.5], np.float32)),
        "label": ("BYTES", np.array(["ähoy"], object)),
    }
    inputs = []
    for name, (datatype, array) in arrays.items():
        inputs.append(triton.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    before = metric(api, "compute_seconds_count", "adding")
    with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        result = client.infer("adding", inputs)
        assert result.as_numpy("totals").tolist() == [[4, 2], [9, 4.5]] and result.as_numpy("steps").tolist() == [2]
        inputs[0].set_data_from_numpy(np.array([5, tiny_apps.BAD]))
        with pytest.raises(triton.InferenceServerException, match="must be at least 0") as refused:
            client.infer("adding", inputs)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert metric(api, "compute_seconds_count", "adding") == before + 1


class TestTritonsClient:
    """tritonclient[http] from PyPI."""

    @pytest.fixture
    def triton(self, serving: Serving) -> Iterator[Any]:
        http = pytest.importorskip("tritonclient.http")
        client = http.InferenceServerClient(serving.url.removeprefix("http://"))
        yield client
        client.close()

    def inputs(self, *, binary: bool, scale: tuple[float, float] = (1, 0.5)) -> list[Any]:
        http = pytest.importorskip("tritonclient.http")
        arrays = {
            "numbers": ("INT64", np.array([4, 5])),
            "scale": ("FP32", np.array(scale, np.float32)),
            "label": ("BYTES", np.array(["ähoy"], object)),
        }
        made = []
        for name, (datatype, array) in arrays.items():
            made.append(http.InferInput(name, list(array.shape), datatype))
            made[-1].set_data_from_numpy(array, binary_data=binary)
        return made

    def test_tritons_client_sees_a_live_and_ready_server(self, triton: Any) -> None:
        assert triton.is_server_live() and triton.is_server_ready()
        assert triton.is_model_ready("adding") and triton.is_model_ready("slow", "1")
        assert not triton.is_model_ready("other")
        assert triton.get_server_metadata()["name"] == "holdfast"
        assert [each["state"] for each in triton.get_model_repository_index()] == ["READY", "READY"]

    def test_tritons_client_reads_metadata_and_configuration(self, triton: Any) -> None:
        metadata = triton.get_model_metadata("adding")
        assert [(each["name"], each["datatype"], each["shape"]) for each in metadata["inputs"]] == [
            ("numbers", "INT64", [-1]), ("scale", "FP32", [2]), ("label", "BYTES", [1]),
        ]  # fmt: skip
        config = triton.get_model_config("adding", "1")
        assert config["max_batch_size"] == 0
        assert [each["data_type"] for each in config["output"]] == ["TYPE_FP32", "TYPE_STRING", "TYPE_INT64"]

    @pytest.mark.parametrize("binary", [True, False])
    @pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
    @pytest.mark.parametrize("back", [None, "gzip", "deflate"])
    def test_tritons_client_infers_with_every_encoding(self, triton: Any, binary: bool, sent: Any, back: Any) -> None:
        given = self.inputs(binary=binary)
        result = triton.infer(
            "adding", given, request_id="a", request_compression_algorithm=sent, response_compression_algorithm=back
        )
        assert result.as_numpy("totals").tolist() == [[4, 2], [9, 4.5]]
        assert result.as_numpy("words").tolist() == [b"sum [9.0, 4.5]"]
        assert result.as_numpy("steps").dtype == np.int64
        assert result.get_response()["id"] == "a"

    def test_tritons_client_chooses_outputs_and_their_form(self, triton: Any) -> None:
        http = pytest.importorskip("tritonclient.http")
        wanted = [
            http.InferRequestedOutput("steps", binary_data=False),
            http.InferRequestedOutput("totals", binary_data=True),
        ]
        result = triton.infer("adding", self.inputs(binary=True), outputs=wanted)
        assert [each["name"] for each in result.get_response()["outputs"]] == ["steps", "totals"]
        assert result.get_output("steps")["data"] == [2]
        assert result.as_numpy("totals").shape == (2, 2) and result.as_numpy("words") is None

    @pytest.mark.parametrize("binary", [True, False])
    def test_nan_and_infinities_are_sent_and_received(self, triton: Any, binary: bool) -> None:
        http = pytest.importorskip("tritonclient.http")
        wanted = [http.InferRequestedOutput("totals", binary_data=binary)]
        given = self.inputs(binary=binary, scale=(float("nan"), float("-inf")))
        totals = triton.infer("adding", given, outputs=wanted).as_numpy("totals")
        assert np.isnan(totals[:, 0]).all() and np.isneginf(totals[:, 1]).all()

    def test_tritons_client_raises_refusals_as_its_own_errors(self, triton: Any) -> None:
        from tritonclient.utils import InferenceServerException

        with pytest.raises(InferenceServerException, match=r"\[404\] the model 'other' is not served here"):
            triton.infer("other", self.inputs(binary=True))
        with pytest.raises(InferenceServerException, match=r"\[400\] input label is missing"):
            triton.infer("adding", self.inputs(binary=True)[:2])
        with pytest.raises(InferenceServerException, match=r"\[400\] parameters.sequence_id is not supported"):
            triton.infer("adding", self.inputs(binary=True), sequence_id=3, sequence_start=True)

    def test_concurrent_requests_each_get_their_own_result(self, triton: Any) -> None:
        running = [triton.async_infer("adding", self.inputs(binary=True, scale=(n, 0))) for n in range(20)]
        sums = [each.get_result().as_numpy("totals")[-1, 0] for each in running]
        assert sums == [9 * n for n in range(20)]

    def test_statistics_count_its_requests(self, triton: Any) -> None:
        def done() -> int:
            (stats,) = triton.get_inference_statistics("adding")["model_stats"]
            count: int = stats["inference_stats"]["success"]["count"]
            assert stats["inference_count"] == count <= stats["execution_count"]
            return count

        before = done()
        triton.infer("adding", self.inputs(binary=True))
        assert done() == before + 1


def packed(numbers: list[int]) -> tuple[dict[str, Any], bytes]:
    """Return a request with binary tensors: its JSON, and the bytes that follow."""
    parts = [
        struct.pack(f"<{len(numbers)}q", *numbers), struct.pack("<2f", 1, 0.5), struct.pack("<I", 4) + b"ahoy",
    ]  # fmt: skip
    request = asked(numbers)
    for tensor, part in zip(request["inputs"], parts, strict=True):
        del tensor["data"]
        tensor["parameters"] = {"binary_data_size": len(part)}
    return {**request, "parameters": {"binary_data_output": True}}, b"".join(parts)


STRANGE: list[Any] = [
    None, True, -1, 0, 1, 1.5, 2**31, 2**63, 2**64, 10**30, "", "x", "INT32", "BYTES", "\x00", "ä" * 300, [], [[]], {},
    [1, [2]], {"a": {}}, [None], ["x"], [1e39], [-(2**63) - 1], [[[[[1]]]]], float("nan"), [float("inf")],
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every key of every container within a value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *places(value[key]))]


def mutated(choose: random.Random) -> tuple[bytes, dict[str, str]]:
    """Return a valid request, in JSON or with binary tensors, with a few faults."""
    headers = {"content-type": "application/octet-stream"}
    request, binary = packed([1, 2, 3]) if choose.random() < 0.5 else (asked([1, 2, 3]), b"")
    for _ in range(choose.randint(0, 3)):
        container, key = choose.choice(places(request))
        match choose.randrange(4):
            case 0:
                container[key] = choose.choice(STRANGE)
            case 1 if isinstance(container, dict):
                del container[key]
            case 2 if isinstance(container, list):
                container.insert(key, choose.choice([container[key], *STRANGE]))
            case _ if isinstance(container, dict):
                container[choose.choice(["data", "shape", "x", "parameters", "binary_data_size"])] = choose.choice(
                    STRANGE
                )
    head = json.dumps(request).encode()
    if binary or choose.random() < 0.3:
        size = len(head) + choose.choice([0, 0, 0, 1, -1, 1000, -len(head)])
        headers["inference-header-content-length"] = choose.choice([str(size)] * 6 + ["x", "-1", "1e3", "9" * 40])
    body = bytearray(head + binary)
    for _ in range(choose.choice([0, 0, 1, 2, 5])):
        at = choose.randrange(len(body))
        match choose.randrange(4):
            case 0:
                body[at] = choose.randrange(256)
            case 1:
                del body[at:]
                body += b"{"
            case 2:
                body[at:at] = choose.randbytes(choose.randint(1, 9))
            case 3:
                del body[at : at + choose.randint(1, 9)]
                body += b"}"
    if choose.random() < 0.2:
        headers["content-encoding"] = choose.choice(["gzip", "deflate", "br", "gzip, gzip"])
        if choose.random() < 0.5:
            body = bytearray(gzip.compress(bytes(body)))
    return bytes(body), headers


def test_malformed_requests_are_refused_and_free_all_their_places() -> None:
    choose, seen = random.Random(7), []
    with started("--app", "tiny_apps:adding", *OPTIONS) as serving, httpx.Client(base_url=serving.url) as api:
        for _ in range(300):
            body, headers = mutated(choose)
            answer = api.post(ADDING, content=body, headers=headers)
            seen.append(answer.status_code)
            if answer.status_code != 200:
                assert 400 <= answer.status_code < 500, (answer.text, body, headers)
                error = answer.json()
                assert list(error) == ["error"] and isinstance(error["error"], str) and len(error["error"]) < 1000
        assert len([status for status in seen if status != 200]) >= 200
        assert seen.count(200) > 10
        assert everything_is_free(api, "adding")
        assert api.post(ADDING, json=asked([1])).status_code == 200
        serving.process.send_signal(signal.SIGTERM)
        _, log = serving.process.communicate()
    assert serving.process.returncode == 0
    assert log == "", "a refusal is no event for the log"


def test_a_client_that_leaves_frees_its_places_at_once(api: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        api.post("/v2/models/slow/infer", json=asked([1] * 4096), timeout=0.5)
    began = time.monotonic()
    eventually(lambda: everything_is_free(api, "slow"))
    assert time.monotonic() - began < 4096 * tiny_apps.STEP_SECONDS / 2
    assert 'holdfast_app_requests_total{app="slow",outcome="left"} 1.0' in api.get("/metrics").text


def test_a_request_that_outlives_its_timeout_is_ended(api: httpx.Client) -> None:
    late = api.post("/v2/models/slow/infer", json=asked([1] * 4096, parameters={"timeout": 300_000}))
    assert (late.status_code, late.json()) == (503, {"error": "the request has not ended within its timeout of 0.3 s"})
    eventually(lambda: everything_is_free(api, "slow"))


def test_requests_join_a_batch_that_runs(api: httpx.Client, serving: Serving) -> None:
    codes: list[int] = []

    def ask(steps: int) -> None:
        codes.append(httpx.post(f"{serving.url}/v2/models/slow/infer", json=asked([1] * steps), timeout=60).status_code)

    def sizes() -> set[int]:
        (stats,) = api.get("/v2/models/slow/stats").json()["model_stats"]
        return {each["batch_size"] for each in stats["batch_stats"] if each["compute_infer"]["count"]}

    for _ in range(10):  # on a busy machine a request may come only after another one has ended
        threads = [threading.Thread(target=ask, args=(steps,)) for steps in (100, 60, 30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if {2, 3} <= sizes():
            break
    assert {2, 3} <= sizes()
    assert set(codes) == {200}


def test_a_killed_engine_answers_503_and_ends_the_server_with_1() -> None:
    with started("--app", "tiny_apps:slow", *OPTIONS) as serving:
        answers: list[httpx.Response] = []
        ask = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{serving.url}/v2/models/slow/infer", json=asked([1] * 4096), timeout=60)
            )
        )
        ask.start()
        with httpx.Client(base_url=serving.url) as api:
            eventually(lambda: metric(api, "rows_used", "slow") > 0)
        os.kill(serving.engine_pid(), signal.SIGKILL)
        ask.join()
        assert answers[0].status_code == 503 and "engine has stopped" in answers[0].json()["error"]
        _, log = serving.process.communicate()
    assert serving.process.returncode == 1
    assert "killed by SIGKILL" in log and "Traceback" not in log


def test_a_cell_that_fails_ends_the_server_with_its_reason() -> None:
    with started("--app", "tiny_apps:adding", *OPTIONS) as serving:
        failed = httpx.post(f"{serving.url}{ADDING}", json=asked([tiny_apps.DEADLY]))
        assert failed.status_code == 503
        _, log = serving.process.communicate()
    assert serving.process.returncode == 1
    assert "a deadly number" in log and "Traceback" not in log


def refuses(url: str) -> bool:
    """Whether a server takes no connections."""
    try:
        httpx.get(f"{url}/v2/health/live", timeout=60)
    except httpx.TransportError:
        return True
    return False


def test_after_sigterm_health_checks_fail_while_requests_are_served() -> None:
    with (
        started("--app", "tiny_apps:adding", "--lame-duck-seconds", "600", *OPTIONS) as serving,
        httpx.Client(base_url=serving.url, timeout=60) as api,
    ):
        serving.process.send_signal(signal.SIGTERM)
        eventually(lambda: api.get("/v2/health/ready").status_code == 503)
        assert api.get("/v2/models/adding/ready").status_code == 503
        assert api.post(ADDING, json=asked([1])).status_code == 200


def test_sigterm_lets_requests_finish_and_takes_no_new_ones() -> None:
    with started("--app", "tiny_apps:slow", *OPTIONS) as serving:
        answers: list[httpx.Response] = []
        ask = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{serving.url}/v2/models/slow/infer", json=asked([1] * 300), timeout=60)
            )
        )
        ask.start()
        with httpx.Client(base_url=serving.url) as api:
            eventually(lambda: metric(api, "rows_used", "slow") > 0)
        serving.process.send_signal(signal.SIGTERM)
        eventually(lambda: refuses(serving.url))
        ask.join()
        serving.process.communicate()
    assert answers[0].status_code == 200 and serving.process.returncode == 0


def test_a_language_model_and_an_application_are_served_together(tmp_path: Path) -> None:
    checkpoint = str(make_checkpoint(tmp_path / "small"))
    options = ("--load-format", "random", "--cache-gb", "0.02", "--store", "memory", "--app", "tiny_apps:adding")
    with (
        started(checkpoint, *options, *OPTIONS) as serving,
        serving.client() as model,
        httpx.Client(base_url=serving.url) as api,
    ):
        assert [each.id for each in model.models.list()] == ["small"]
        hello: Any = [{"role": "user", "content": "hello"}]
        answer = model.chat.completions.create(model="small", messages=hello, max_tokens=3)
        assert answer.usage is not None and answer.usage.completion_tokens == 3
        assert api.post(ADDING, json=asked([1])).status_code == 200
        assert [each["name"] for each in api.post("/v2/repository/index").json()] == ["adding"]
        metrics = api.get("/metrics").text
        assert "holdfast_engine_up 1.0" in metrics and 'holdfast_app_engine_up{app="adding"} 1.0' in metrics
        assert api.get("/health").json() == {"status": "ok"}
        served = api.get("/").json()
        assert (served["model"], served["applications"]) == ("small", ["adding"])
        assert len(serving.engine_pids()) == 2
        assert api.get("/openapi.json").status_code == 200


def test_without_a_model_there_is_no_language_model(api: httpx.Client) -> None:
    assert api.get("/v1/models").status_code == 404
    assert "model" not in api.get("/").json()
    assert "/v2/models/{name}/infer" in api.get("/openapi.json").json()["paths"]
