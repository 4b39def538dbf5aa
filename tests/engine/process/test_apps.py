"""The engine of an application, in a process of its own, used through AppClient."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tiny_apps

from holdfast.cells.cell import Field
from holdfast.core.config import AppConfig
from holdfast.engine import messages
from holdfast.engine.client.app_client import AppClient, AppFailed
from holdfast.engine.client.app_group import start_group
from holdfast.engine.client.connection import EngineDead, EngineStartError
from holdfast.engine.link import Parent
from holdfast.engine.messages import Tensor
from holdfast.engine.process.apps import LEAST_TOGETHER, MOST_TOGETHER, AppEngine, as_declared, devices_of, find
from holdfast.engine.process.tensors import pack, unpack
from tests.engine.conftest import build_app


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines find the modules of tests."""
    monkeypatch.chdir(Path(tiny_apps.__file__).parent)


async def start(app: str = "tiny_apps:adding", **options: Any) -> AppClient:
    config = AppConfig(app=(app,), **{"app_device": ("cpu",), "app_capacity": 64, **options})
    return await AppClient.start(app, config, threads=1)


def inputs(*numbers: int) -> dict[str, Tensor]:
    return {
        "numbers": pack(np.array(numbers)),
        "scale": pack(np.array([1, 2], np.float32)),
        "label": pack(np.array(["a"], object)),
    }


async def test_requests_side_by_side_give_each_its_own() -> None:
    client = await start(app_device=("cpu", "cpu"))
    try:
        done = await asyncio.gather(*(client.infer(inputs(*range(1, n + 1))) for n in range(1, 40)))
        for n, each in enumerate(done, 1):
            assert unpack(each.outputs["totals"])[-1].tolist() == [n * (n + 1) / 2, n * (n + 1)]
            assert unpack(each.outputs["steps"]).tolist() == [n]
            assert each.arrival <= each.scheduled <= each.finish
        stats = await client.health()
        assert (stats.rows_used, stats.running, stats.waiting) == (0, 0, 0)
        (cell,) = stats.cells
        assert sum(size * count for size, count in cell.batches.items()) == sum(range(1, 40))
        assert cell.cell == "adding-cell" and client.info.devices == ("cpu", "cpu")
    finally:
        await client.close()
    with pytest.raises(EngineDead):
        await client.infer(inputs(1))


async def test_devices_with_an_engine_each_share_the_requests_and_the_end_of_one_is_seen() -> None:
    config = AppConfig(app=("tiny_apps:adding",), app_device=("cpu", "cpu"), app_capacity=64)
    group = await start_group(config.app[0], config, [replace(config, app_device=("cpu",))] * 2, threads=1)
    try:
        done = await asyncio.gather(*(group.infer(inputs(*range(1, n + 1))) for n in range(1, 40)))
        for n, each in enumerate(done, 1):
            assert unpack(each.outputs["totals"])[-1].tolist() == [n * (n + 1) / 2, n * (n + 1)]
        (cell,) = (await group.health()).cells
        assert sum(size * count for size, count in cell.batches.items()) == sum(range(1, 40))
        nodes = []
        for client in group._clients:
            (cell,) = (await client.health()).cells
            nodes.append(sum(size * count for size, count in cell.batches.items()))
        assert nodes == [sum(range(1, 40, 2)), sum(range(2, 40, 2))], "requests were not dealt in turn"
        os.kill(group._clients[1].pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await group.dead.wait()
        assert group.reason.startswith("cpu: ") and "SIGKILL" in group.reason
    finally:
        await group.close()
    with pytest.raises(EngineDead):
        await group.infer(inputs(1))


async def test_refusals_and_failures_concern_their_request_alone(capfd: pytest.CaptureFixture[str]) -> None:
    client = await start()
    try:
        good, refused, failed = await asyncio.gather(
            client.infer(inputs(1, 2)), client.infer(inputs(tiny_apps.BAD)), client.infer(inputs(tiny_apps.BROKEN)),
            return_exceptions=True,
        )  # fmt: skip
        assert unpack(good.outputs["steps"]).tolist() == [2]
        assert isinstance(refused, ValueError) and str(refused) == "numbers[0] is -1; it must be at least 0"
        assert isinstance(failed, AppFailed) and "adding" in str(failed)
        assert "this application is broken" in capfd.readouterr().err
    finally:
        await client.close()


async def test_a_cancelled_request_leaves_no_rows() -> None:
    client = await start("tiny_apps:slow")
    try:
        running = [asyncio.create_task(client.infer(inputs(*[1] * 4000))) for _ in range(3)]
        while (await client.health()).running < 3:
            await asyncio.sleep(0.01)
        for task in running[:2]:
            task.cancel()
        while (await client.health()).running > 1:
            await asyncio.sleep(0.01)
        running[2].cancel()
        while (await client.health()).rows_used:
            await asyncio.sleep(0.01)
        assert not client._running
    finally:
        await client.close()


@pytest.mark.parametrize(("ending", "reason"), [("kill", "killed by SIGKILL"), ("cell", "a deadly number")])
async def test_an_engine_that_ends_fails_what_runs_with_its_reason(ending: str, reason: str) -> None:
    client = await start("tiny_apps:slow")
    try:
        running = asyncio.create_task(client.infer(inputs(*[1] * 4000)))
        while not (await client.health()).running:
            await asyncio.sleep(0.01)
        if ending == "kill":
            os.kill(client.pid, signal.SIGKILL)
        else:
            with pytest.raises(EngineDead, match=reason):
                await client.infer(inputs(tiny_apps.DEADLY))
        with pytest.raises(EngineDead, match=reason):
            await running
        with pytest.raises(EngineDead, match=reason):
            await client.health()
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("app", "reason"),
    [
        ("nobody", "nobody"),
        ("tiny_apps:nobody", "nobody"),
        ("no_such_module:app", "no_such_module"),
        ("tiny_apps:nothing", "has no"),
        ("tiny_apps:two_alike", "two inputs named x"),
        ("tiny_apps:unrunnable", "unrunnable-cell"),
    ],
)
def test_an_application_that_cannot_be_served_is_refused_with_the_reason(app: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build_app(AppConfig(app=(app,), app_device=("cpu",), app_capacity=64))


async def test_a_device_that_is_not_there_ends_the_start() -> None:
    with pytest.raises(EngineStartError, match=r"device is cuda:99; this machine has \d CUDA devices"):
        await start(app_device=("cuda:99",))


class Told:
    """A parent in this process: it gives its messages at once, and ends the engine when all requests are answered."""

    def __init__(self, *given: messages.ToEngine) -> None:
        self.sent: list[Any] = []
        self._given = list(given)
        self._asked = {message.request_id for message in given if isinstance(message, messages.Infer)}
        self._woken = threading.Event()

    def send(self, message: messages.FromEngine) -> None:
        self.sent.append(message)
        self._woken.set()

    def wake(self) -> None:
        self._woken.set()

    def wait(self) -> None:
        assert self._given or self._woken.wait(60), f"no answer: {self.sent}"
        self._woken.clear()

    def waiting(self) -> Iterator[messages.ToEngine]:
        given, self._given = self._given, []
        yield from given
        if self._asked == self.results().keys() | {
            each.request_id for each in self.sent if hasattr(each, "request_id")
        }:
            yield messages.Shutdown()

    def results(self) -> dict[str, list[float]]:
        """The first totals of each request that has ended."""
        ended = [result for message in self.sent if isinstance(message, messages.Results) for result in message.results]
        return {result.request_id: unpack(result.outputs["totals"])[:, 0].tolist() for result in ended}


def serve_here(told: Told) -> list[int]:
    """Serve these messages. Returns the number of requests of each call of `unfold_many`."""
    application = tiny_apps.together()
    config = AppConfig(app=("tiny_apps:together",), app_device=("cpu",), app_capacity=64)
    start_message = messages.StartApp("tiny_apps:together", config, 0.0, threads=1)
    engine = AppEngine(start_message, application, cast(Parent, told))
    try:
        engine.serve()
    finally:
        engine.close()
    return application.sizes


def asked(id: str, *numbers: int) -> messages.Infer:
    return messages.Infer(id, inputs(*numbers), 0.0)


def sums(*numbers: int) -> dict[str, list[int]]:
    """The totals of requests that add 1, 2 and so on up to each of these numbers."""
    return {str(n): np.cumsum(range(1, n + 1)).tolist() for n in numbers}


def test_requests_that_wait_together_are_unfolded_together_up_to_a_limit() -> None:
    numbers = range(1, MOST_TOGETHER + LEAST_TOGETHER + 1)
    told = Told(*(asked(str(n), *range(1, n + 1)) for n in numbers))
    assert serve_here(told) == [MOST_TOGETHER, LEAST_TOGETHER]
    assert told.results() == sums(*numbers)


def test_an_abort_comes_after_the_requests_before_it_and_few_requests_are_unfolded_alone() -> None:
    requests = [asked(str(n), *range(1, n + 1)) for n in range(1, 2 * LEAST_TOGETHER)]
    told = Told(*requests[:LEAST_TOGETHER], messages.Abort("nobody"), *requests[LEAST_TOGETHER:])
    assert serve_here(told) == [LEAST_TOGETHER]
    assert told.results() == sums(*range(1, 2 * LEAST_TOGETHER))


@pytest.mark.parametrize("also", [[asked("bad", tiny_apps.BAD)], []])
def test_a_request_that_cannot_be_unfolded_fails_alone_although_it_came_with_others(
    also: list[messages.Infer], caplog: pytest.LogCaptureFixture
) -> None:
    numbers = range(1, LEAST_TOGETHER + 1)
    told = Told(*also, *(asked(str(n), *range(1, n + 1)) for n in numbers), asked("broken", tiny_apps.BROKEN))
    assert serve_here(told) == [LEAST_TOGETHER + 1 + len(also)]
    assert told.results() == sums(*numbers) and messages.Failed("broken") in told.sent
    refused = messages.Refused("bad", "numbers[0] is -1; it must be at least 0")
    assert (refused in told.sent) == bool(also)
    assert ("unfold_many of together failed" in caplog.text) == (not also)


def test_workers_run_where_the_options_say() -> None:
    assert devices_of(AppConfig(app_device=("cuda", "cuda:1", "cpu"))) == ["cuda:0", "cuda:1", "cpu"]
    assert len(devices_of(AppConfig())) == 1


def test_the_thread_that_makes_cells_ready_uses_their_gpu_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def make_ready(application: object, devices: list[str], **options: object) -> None:
        calls.append(f"workers on {devices[0]}")
        raise MemoryError("no room")

    monkeypatch.setattr("holdfast.engine.process.apps.use_device", calls.append)
    monkeypatch.setattr("holdfast.engine.process.apps.Workers", make_ready)
    config = AppConfig(app=("tiny_apps:adding",), app_device=("cuda:1",), app_profile="off")
    with pytest.raises(MemoryError, match="no room"):
        AppEngine(messages.StartApp(config.app[0], config, 0.0, 1), find(config.app[0]), cast(Parent, Told()))
    assert calls == ["cuda:1", "workers on cuda:1"]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        (Field("x", "float32", (2,)), {}),
        (Field("x", "float32", (2,)), {"x": np.zeros(3, np.float32)}),
        (Field("x", "float32", (2,)), {"x": np.zeros(2)}),
        (Field("x", "float32", (-1,)), {"x": np.zeros((2, 2), np.float32)}),
        (Field("x", "string", (1,)), {"x": np.zeros(1)}),
        (Field("x", "float32", (1,)), {"x": np.array(["a"])}),
    ],
)
def test_outputs_that_are_not_as_declared_are_an_error_of_the_application(field: Field, given: Any) -> None:
    with pytest.raises(TypeError, match="x"):
        as_declared(field, given)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Field("x", "float32", (-1, 2)), np.zeros((3, 2), np.float32)),
        (Field("x", "string", (1,)), ["a"]),
        (Field("x", "string", (1,)), np.array(["a"])),
        (Field("x", "int64", (2,)), [1, 2]),
    ],
)
def test_outputs_as_declared_pass(field: Field, value: Any) -> None:
    assert as_declared(field, {"x": value}).tolist() == np.asarray(value).tolist()
