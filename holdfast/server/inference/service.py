"""The applications of a server: runs requests, with admission limits, timeouts and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from holdfast.engine.client.app_client import AppFailed
from holdfast.engine.client.app_group import AnyApp
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.messages import AppStats, Tensor
from holdfast.server.config import ServerConfig
from holdfast.server.inference.metrics import AppMetrics
from holdfast.server.inference.protocol import VERSION, Wanted
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.service import LARGE, Admission, engine_dead

T = TypeVar("T")


class App:
    """One application: its engine, and the admission of its requests."""

    def __init__(self, client: AnyApp, config: ServerConfig) -> None:
        self.client = client
        self.info = client.info
        most = client.config.app_max_requests
        self.admission = Admission(most, max(1, int(config.share * most)), unit="requests")


class Applications:
    """All applications of one server."""

    def __init__(self, clients: Sequence[AnyApp], config: ServerConfig, registry: CollectorRegistry) -> None:
        self.config = config
        self.metrics = AppMetrics(registry)
        self.apps = {client.info.name: App(client, config) for client in clients}
        self.held = 0
        """Number of input bytes of all requests in progress."""
        self._large = ThreadPoolExecutor(1, "holdfast-large-tensors")

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the server is shutting down."""
        return any(app.admission.draining for app in self.apps.values())

    def find(self, name: str, version: str | None = None) -> App:
        """Return an application by its name. Raises ApiError 404."""
        if name not in self.apps:
            reason = f"the model {name[:128]!r} is not served here; this server has {', '.join(self.apps)}"
            raise ApiError(reason, status=404, code="model_not_found")
        if version not in (None, VERSION):
            reason = f"the model {name} has no version {str(version)[:32]!r}; it has {VERSION}"
            raise ApiError(reason, status=404, code="model_not_found")
        return self.apps[name]

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run work on a body of `size` bytes. Work on a large body runs in a thread outside the event loop."""
        if size < LARGE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._large, work)

    @contextmanager
    def counted(self, app: App, left: type[Exception]) -> Iterator[None]:
        """Count how the request in this context ends. `left` is the exception for a client that disconnects."""
        began, outcome = time.monotonic(), "failed"
        try:
            yield
            outcome = "ok"
        except ApiError as error:
            outcome = "refused" if error.status < 500 else "unavailable" if error.status == 503 else "failed"
            raise
        except (asyncio.CancelledError, left):
            outcome = "left"
            raise
        finally:
            self.metrics.ended(app.info.name, outcome, time.monotonic() - began)

    async def infer(self, app: App, wanted: Wanted, tenant: str) -> Mapping[str, Tensor]:
        """Run a request. Cancelling this call aborts the request. Raises ApiError."""
        with app.admission.admit(1, tenant), self._held(wanted):
            try:
                async with asyncio.timeout(wanted.timeout):
                    done = await app.client.infer(wanted.inputs)
            except ValueError as error:
                raise invalid(str(error)) from None
            except AppFailed as error:
                raise ApiError(str(error), status=500, code="internal_error") from None
            except EngineDead:
                raise engine_dead() from None
            except TimeoutError:
                reason = f"the request has not ended within its timeout of {wanted.timeout:g} s"
                raise ApiError(reason, status=503, code="timeout") from None
        self.metrics.computed(app.info.name, done)
        return done.outputs

    @contextmanager
    def _held(self, wanted: Wanted) -> Iterator[None]:
        """Count the bytes of a request's inputs within the context. Raises ApiError 503 beyond the limit."""
        size, limit = sum(len(tensor.data) for tensor in wanted.inputs.values()), self.config.max_bodies_bytes
        if self.held + size > limit:
            reason = f"more than {limit} bytes of inputs are in progress; try again"
            raise ApiError(reason, status=503, code="overloaded", retry_after=1)
        self.held += size
        try:
            yield
        finally:
            self.held -= size

    def index(self) -> list[dict[str, str]]:
        """Return all applications, with their states, in the form of the protocol's index."""
        states = {name: "UNAVAILABLE" if app.client.dead.is_set() else "READY" for name, app in self.apps.items()}
        return [{"name": name, "version": VERSION, "state": state, "reason": ""} for name, state in states.items()]

    async def statistics(self, app: App) -> dict[str, Any]:
        """Return an application's statistics in the protocol's form. Raises ApiError if its engine does not answer."""
        stats = await self.stats(app)
        if stats is None:
            raise engine_dead()
        return self.metrics.statistics(app.info.name, VERSION, stats)

    async def scrape(self) -> None:
        """Get the state of all engines' planners, for the metrics."""
        names, answers = list(self.apps), [self.stats(app) for app in self.apps.values()]
        self.metrics.stats = dict(zip(names, await asyncio.gather(*answers), strict=True))

    async def stats(self, app: App) -> AppStats | None:
        """Return the planner's state; None if the engine does not answer in time."""
        try:
            return await app.client.health(timeout=self.config.health_seconds)
        except (EngineDead, TimeoutError):
            return None
