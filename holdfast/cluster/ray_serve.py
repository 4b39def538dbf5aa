"""Ray Serve: a deployment of API processes over engines that outlive them. Any of them can answer any request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from holdfast.engine.client.connection import EngineStartError

try:
    import ray
    from ray import serve
except ImportError as error:
    raise EngineStartError(
        f"Ray Serve cannot be imported ({error}); install it: pip install 'holdfast[ray-serve]'"
    ) from error

LEAST_RAY = (2, 56)
"""From this version on, Ray Serve asks a deployment for its ASGI application after the start."""
if tuple(map(int, ray.__version__.split(".")[:2])) < LEAST_RAY:
    raise EngineStartError(f"Ray is {ray.__version__}; the application of Ray Serve needs 2.56 or newer")

DEPLOYMENT = "Holdfast"
CHECK_SECONDS = 5.0
"""Seconds between two health checks by Ray Serve. It replaces an API process after the third failure."""
CLOSE_SECONDS = 10.0
"""Seconds to leave the engines and to close the store, after requests have finished."""
STARTS = 3
"""Number of starts of an API process that may fail before the deployment fails."""


class Served(Protocol):
    """An ASGI application that is started and ended."""

    async def start(self) -> None:
        """Return when requests are accepted. Raises the reason if that cannot be."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, as ASGI defines it."""

    async def check_health(self) -> None:
        """Raises the reason if another application should take this one's place."""

    async def close(self) -> None:
        """End the application, in whatever state it is."""


def application(
    make: Callable[[], Served], *, drain_seconds: float, health_seconds: float, most_requests: int
) -> serve.Application:
    """Return the application of Ray Serve, to be run or deployed.

    `make` is called in each API process. A process that ends gets no new requests, and its running ones have
    `drain_seconds`. A health check may take `health_seconds`. A process has at most `most_requests` at a time; others
    wait in the proxy. A process reserves no CPU.
    """
    return serve.deployment(
        Ingress,
        name=DEPLOYMENT,
        max_ongoing_requests=most_requests,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=CHECK_SECONDS,
        health_check_timeout_s=health_seconds + CHECK_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=drain_seconds + CLOSE_SECONDS,
        max_constructor_retry_count=STARTS,
    ).bind(make)


@serve.ingress()
class Ingress:
    """An API process of the deployment. Ray Serve looks for methods of these names."""

    def __init__(self, make: Callable[[], Served]) -> None:
        self._served = make()

    async def __serve_build_asgi_app__(self) -> Served:
        await self._served.start()
        return self._served

    async def check_health(self) -> None:
        """See `Served.check_health`."""
        await self._served.check_health()

    async def __del__(self) -> None:
        await self._served.close()
