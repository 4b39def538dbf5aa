"""AppClient: an asyncio interface to the engine process of one application of cells. Never imports torch."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.core.config import AppConfig
from holdfast.engine import messages
from holdfast.engine.client.connection import EngineConnection, EngineDead, fail_all, settle
from holdfast.engine.spawn import APPS, EngineProcess


class AppFailed(RuntimeError):
    """The application's own code failed on a request. The trace is in the engine's log."""


@dataclass(frozen=True, slots=True)
class Inference:
    """The result of a request, and its timestamps in seconds on the monotonic clock that both processes share."""

    outputs: Mapping[str, messages.Tensor]
    arrival: float
    scheduled: float
    """Time at which the first node of the request was planned."""
    finish: float


class AppClient(EngineConnection[messages.AppInfo, messages.AppStats]):
    """The engine process of one application and its requests. Made by `start`, for one event loop."""

    def __init__(
        self,
        app: str,
        config: AppConfig,
        on_progress: Callable[[str], None] | None = None,
        threads: int | None = None,
        measure: int = 0,
        ledger: str = "",
    ) -> None:
        """Not for callers, who use `start`."""
        self.app, self.config = app, config
        self._threads, self._measure, self._ledger = threads, measure, ledger
        self._running: dict[str, asyncio.Future[messages.AppResult]] = {}
        super().__init__(EngineProcess(config.first_device, APPS), on_progress)

    @classmethod
    async def start(
        cls,
        app: str,
        config: AppConfig,
        on_progress: Callable[[str], None] | None = None,
        threads: int | None = None,
        measure: int = 0,
        ledger: str = "",
    ) -> AppClient:
        """Start the engine process of an application and wait until it takes requests.

        `app` is a built-in application's name, or module:object. `on_progress` is called with the name of each stage,
        `threads` is the number of CPU threads. With `measure` above 0, the engine measures the time of tasks of each
        cell type, of up to `measure` nodes, and writes the times to `info.profile_path`. `ledger` is the page of
        a language model on the same device. Raises EngineStartError with the reason. If the wait ends early, for
        whatever reason, so does the process.
        """
        client = cls(app, config, on_progress, threads, measure, ledger)
        async with client._starting():
            client.info = await client._ready
        return client

    async def infer(self, inputs: dict[str, messages.Tensor]) -> Inference:
        """Run one request, whose inputs fit the application's fields. Cancelling it aborts the request.

        Raises ValueError for inputs that the application refuses, AppFailed, and EngineDead, even while it runs.
        """
        self._check_alive()
        request_id, arrival = uuid.uuid4().hex, time.monotonic()
        ended: asyncio.Future[messages.AppResult] = asyncio.get_running_loop().create_future()
        self._child.send(messages.Infer(request_id, inputs, arrival))
        self._running[request_id] = ended
        try:
            result = await ended
        except asyncio.CancelledError:
            if not self.dead.is_set():
                self._child.send(messages.Abort(request_id))
            raise
        finally:
            del self._running[request_id]
        return Inference(result.outputs, arrival, result.scheduled_at, time.monotonic())

    def _start_message(self) -> messages.StartApp:
        return messages.StartApp(self.app, self.config, self._began, self._threads, self._measure, self._ledger)

    def _take_output(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Results(results):
                for result in results:
                    if result.request_id in self._running:
                        settle(self._running[result.request_id], result)
            case messages.Refused(request_id, reason):
                self._fail(request_id, ValueError(reason))
            case messages.Failed(request_id):
                self._fail(request_id, AppFailed(f"the application {self.info.name} failed on this request"))

    def _fail(self, request_id: str, error: Exception) -> None:
        if request_id in self._running and not (ended := self._running[request_id]).done():
            ended.set_exception(error)

    def _fail_requests(self, reason: str) -> None:
        fail_all(self._running.values(), EngineDead(reason))
