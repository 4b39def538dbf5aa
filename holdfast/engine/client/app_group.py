"""AppGroup: one application on several devices, with an engine process for each. Never imports torch.

Each engine has its own planner, so that none waits for another. A request runs on one device: that with the fewest
requests when it comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from holdfast.core.config import AppConfig
from holdfast.engine import messages
from holdfast.engine.client.app_client import AppClient, Inference
from holdfast.engine.client.connection import HEALTH_SECONDS


class AppGroup:
    """The engines of one application, with the interface of one AppClient. Made by `start_app`, for one event loop."""

    def __init__(self, config: AppConfig, clients: Sequence[AppClient]) -> None:
        """`clients` are ready. The group closes them."""
        self.config, self.info = config, combined([client.info for client in clients])
        self.dead = asyncio.Event()
        """Set when one of the engines has ended. Requests on the others go on until these are closed."""
        self.reason = ""
        """The device and the reason of the first engine that ended."""
        self._clients = clients
        self._open = [0] * len(clients)
        """Number of requests in progress on each engine."""
        self._watching = [asyncio.create_task(self._watch(client)) for client in clients]

    async def infer(self, inputs: dict[str, messages.Tensor]) -> Inference:
        """Run one request on the device with the fewest. Cancelling it aborts the request. Raises like an AppClient."""
        at = self._open.index(min(self._open))
        self._open[at] += 1
        try:
            return await self._clients[at].infer(inputs)
        finally:
            self._open[at] -= 1

    async def health(self, timeout: float = HEALTH_SECONDS) -> messages.AppStats:
        """Queues and memory of all engines, by a round trip through each. Raises EngineDead, TimeoutError."""
        return total(await asyncio.gather(*(client.health(timeout) for client in self._clients)))

    async def close(self) -> None:
        """End the engines. Requests that still run raise EngineDead. May be called more than once."""
        for task in self._watching:
            task.cancel()
        self._end("the engines were closed")
        await asyncio.gather(*(client.close() for client in self._clients))

    def kill(self) -> None:
        """End the engines at once, in whatever state they are."""
        for client in self._clients:
            client.kill()

    async def _watch(self, client: AppClient) -> None:
        await client.dead.wait()
        self._end(f"{', '.join(client.info.devices)}: {client.reason}")

    def _end(self, reason: str) -> None:
        if not self.dead.is_set():
            self.reason = reason
            self.dead.set()


AnyApp = AppClient | AppGroup
"""The client of an application, on one device or several."""


async def start_app(
    app: str,
    config: AppConfig,
    on_progress: Callable[[str], None] = lambda stage: None,
    threads: int | None = None,
    ledger: str = "",
) -> AnyApp:
    """Start an application's engine, or one for each of its devices, and wait until all take requests.

    The arguments are those of `AppClient.start`. If one engine cannot start, none is left. Raises EngineStartError.
    """
    configs = by_process(config)
    if len(configs) == 1:
        return await AppClient.start(app, config, on_progress, threads, ledger=ledger)
    return await start_group(app, config, configs, on_progress, threads, ledger)


async def start_group(
    app: str,
    config: AppConfig,
    configs: Sequence[AppConfig],
    on_progress: Callable[[str], None] = lambda stage: None,
    threads: int | None = None,
    ledger: str = "",
) -> AppGroup:
    """Start an engine for each of `configs`, side by side. Raises EngineStartError; then none is left."""
    starts = []
    for each in configs:
        starts.append(
            asyncio.create_task(AppClient.start(app, each, _stages(on_progress, each), threads, ledger=ledger))
        )
    try:
        clients = await asyncio.gather(*starts)
    except BaseException:
        for task in starts:
            task.cancel()
        for ended in await asyncio.gather(*starts, return_exceptions=True):
            if not isinstance(ended, BaseException):
                await ended.close()
        raise
    return AppGroup(config, clients)


def by_process(config: AppConfig) -> list[AppConfig]:
    """The configuration of each engine process of an application: one for each device, or one for all devices.

    Workers on the same device share one process and planner.
    """
    devices = dict.fromkeys(config.devices)
    if config.app_planner == "shared" or len(devices) < 2:
        return [config]
    return [
        replace(config, app_device=tuple([each for each in config.devices if each == device])) for device in devices
    ]


def combined(infos: Sequence[messages.AppInfo]) -> messages.AppInfo:
    """The description of an application that has these engines. Names, sizes and profile are those of the first."""
    slowest = max(infos, key=lambda info: info.started_in)
    return replace(
        infos[0],
        devices=tuple([device for info in infos for device in info.devices]),
        started_in=slowest.started_in,
        stages=slowest.stages,
    )


def total(stats: Sequence[messages.AppStats]) -> messages.AppStats:
    """The sums of what the engines of one application report. All have the same cell types."""
    cells = []
    for same in zip(*(each.cells for each in stats), strict=True):
        batches: Counter[int] = Counter()
        for cell in same:
            batches.update(cell.batches)
        cells.append(
            messages.CellTypeStats(
                same[0].cell, sum(cell.ready for cell in same), sum(cell.tasks for cell in same), dict(batches)
            )
        )
    return messages.AppStats(
        waiting=sum(each.waiting for each in stats),
        running=sum(each.running for each in stats),
        rows_used=sum(each.rows_used for each in stats),
        rows_total=sum(each.rows_total for each in stats),
        cells=tuple(cells),
    )


def _stages(on_progress: Callable[[str], None], config: AppConfig) -> Callable[[str], None]:
    """A function that reports a stage together with the engine's device."""
    return lambda stage: on_progress(f"{stage} ({', '.join(config.devices)})")
