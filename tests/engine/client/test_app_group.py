"""An application on several devices: who gets a request, what all report together, and how one engine's end is seen."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.config import AppConfig
from holdfast.engine.client.app_client import AppClient
from holdfast.engine.client.app_group import AppGroup, by_process, combined, start_app, total
from holdfast.engine.client.connection import EngineDead, EngineStartError
from holdfast.engine.messages import AppStats, CellTypeStats, Tensor
from tests.fake_app import INFO, FakeApp

CONFIG = AppConfig(app=("sums",), app_device=("cuda:0", "cuda:1"))
INPUTS = {"numbers": Tensor("int64", (1,), struct.pack("<q", 5)), "label": Tensor("string", (1,), b"")}


def on(device: str, **changed: Any) -> FakeApp:
    return FakeApp(info=replace(INFO, devices=(device,), **changed), hold=asyncio.Event())


@asynccontextmanager
async def grouped() -> AsyncIterator[tuple[AppGroup, FakeApp, FakeApp]]:
    """A group of two engines that hold their requests."""
    first, second = on("cuda:0"), on("cuda:1")
    group = AppGroup(CONFIG, [first, second])  # type: ignore[list-item]
    try:
        yield group, first, second
    finally:
        await group.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_requests_go_to_the_device_with_the_fewest_in_progress() -> None:
    async with grouped() as (group, first, second):
        running = []
        for _ in range(4):
            running.append(asyncio.create_task(group.infer(INPUTS)))
            await until(lambda: len(first.asked) + len(second.asked) == len(running))
        assert (len(first.asked), len(second.asked)) == (2, 2)
        assert second.hold is not None
        second.hold.set()
        await until(lambda: sum(task.done() for task in running) == 2)
        second.hold.clear()
        running += [asyncio.create_task(group.infer(INPUTS)) for _ in range(2)]
        await until(lambda: len(second.asked) == 4)
        assert len(first.asked) == 2, "the second device was idle"
        for each in (first, second):
            assert each.hold is not None
            each.hold.set()
        assert [struct.unpack("<f", done.outputs["sum"].data) for done in await asyncio.gather(*running)] == [
            (5.0,)
        ] * 6


@pytest.mark.parametrize("error", [None, ValueError("numbers[0] is 5")])
async def test_a_request_that_is_cancelled_or_refused_no_longer_counts_for_its_device(error: Exception | None) -> None:
    async with grouped() as (group, first, second):
        first.raises = error
        running = asyncio.create_task(group.infer(INPUTS))
        await until(lambda: len(first.asked) == 1)
        if error is None:
            running.cancel()
        (ended,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError) if error is None else ended is error
        assert first.aborted == (error is None)
        again = asyncio.create_task(group.infer(INPUTS))
        await until(lambda: len(first.asked) == 2)
        assert not second.asked
        again.cancel()


async def test_the_end_of_one_engine_ends_the_group_and_names_its_device() -> None:
    async with grouped() as (group, first, second):
        second.die("killed by SIGKILL")
        await until(group.dead.is_set)
        assert group.reason == "cuda:1: killed by SIGKILL"
        assert not first.dead.is_set()
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            await group.health()
    assert first.dead.is_set() and group.reason == "cuda:1: killed by SIGKILL"


async def test_a_group_is_healthy_only_if_all_engines_answer() -> None:
    async with grouped() as (group, first, _):
        assert (await group.health()).rows_total == 126
        first.hangs = True
        with pytest.raises(TimeoutError):
            await group.health()


def test_the_state_of_a_group_is_the_sum_over_its_engines() -> None:
    one = AppStats(1, 2, 7, 63, (CellTypeStats("a", 3, 1, {1: 4, 3: 2}), CellTypeStats("b", 0, 0, {})))
    other = AppStats(0, 5, 9, 63, (CellTypeStats("a", 1, 2, {3: 5, 8: 1}), CellTypeStats("b", 6, 1, {2: 2})))
    cells = (CellTypeStats("a", 4, 3, {1: 4, 3: 7, 8: 1}), CellTypeStats("b", 6, 1, {2: 2}))
    assert total([one, other]) == AppStats(1, 7, 16, 126, cells)


def test_a_group_is_described_with_all_devices_and_the_slowest_start() -> None:
    infos = [
        replace(INFO, devices=("cuda:0",), started_in=2.0),
        replace(INFO, devices=("cpu", "cpu"), started_in=3.5),
    ]
    assert combined(infos) == replace(INFO, devices=("cuda:0", "cpu", "cpu"), started_in=3.5)


@pytest.mark.parametrize(
    ("devices", "planner", "expected"),
    [
        ((), "device", [()]),
        (("cpu", "cpu"), "device", [("cpu", "cpu")]),
        (("cuda", "cuda:0"), "device", [("cuda", "cuda:0")]),
        (("cuda:0", "cuda:1"), "device", [("cuda:0",), ("cuda:1",)]),
        (("cuda", "cpu", "cuda:0", "cpu"), "device", [("cuda:0", "cuda:0"), ("cpu", "cpu")]),
        (("cuda:0", "cuda:1"), "shared", [("cuda:0", "cuda:1")]),
    ],
)
def test_each_device_has_a_process_unless_one_planner_is_asked_for(
    devices: tuple[str, ...], planner: Any, expected: list[tuple[str, ...]]
) -> None:
    config = AppConfig(app=("sums",), app_device=devices, app_planner=planner, app_capacity=99)
    assert by_process(config) == [replace(config, app_device=each) for each in expected]


async def test_an_engine_that_cannot_start_closes_those_that_could(monkeypatch: pytest.MonkeyPatch) -> None:
    made, stages = on("cuda:0"), []

    async def start(app: str, config: AppConfig, on_progress: Any, *_: Any, **__: Any) -> Any:
        on_progress("cells")
        if config.app_device == ("cuda:1",):
            await asyncio.sleep(0)  # the other one is ready first
            raise EngineStartError("this machine has 1 CUDA devices")
        return made

    monkeypatch.setattr(AppClient, "start", start)
    with pytest.raises(EngineStartError, match="this machine has 1"):
        await start_app("sums", CONFIG, stages.append)
    assert made.dead.is_set()
    assert stages == ["cells (cuda:0)", "cells (cuda:1)"]
