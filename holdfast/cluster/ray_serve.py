"""Ray Serve application around an HTTP application. Its deployment has one replica, which sees every request."""

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
"""First version of Ray whose Serve asks a deployment for its ASGI application after the start."""
if tuple(map(int, ray.__version__.split(".")[:2])) < LEAST_RAY:
    raise EngineStartError(f"Ray is {ray.__version__}; an application of Ray Serve needs 2.56 or newer")

DEPLOYMENT = "Holdfast"
CHECK_SECONDS = 5.0
"""Seconds between two health checks by Ray Serve. It replaces the replica after three failures."""
CLOSE_SECONDS = 10.0
"""Seconds for ending engines and writing the store, after requests have finished."""
STARTS = 3
"""Maximum number of failed starts in a row. Their usual cause, such as a missing model, does not go away by itself."""


class Served(Protocol):
    """Protocol of the served application: an ASGI application with a start and an end."""

    async def start(self) -> None:
        """Return when requests are accepted. Raises the reason if that is impossible."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer an ASGI request."""

    async def check_health(self) -> None:
        """Raises the reason if the application must be replaced."""

    async def close(self) -> None:
        """End the application, in whatever state it is."""


def application(
    make: Callable[[], Served], *, drain_seconds: float, health_seconds: float, most_requests: int
) -> serve.Application:
    """Return the application of Ray Serve, to be run or deployed.

    `make` is called in the replica, wherever Ray puts that. A replica that ends gets no more requests, and its requests
    in progress have `drain_seconds`. A health check may take `health_seconds`. Requests beyond `most_requests` at a
    time wait in the proxy. The replica itself reserves no CPU, because an API process computes little.
    """
    return serve.deployment(
        Ingress,
        name=DEPLOYMENT,
        num_replicas=1,
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
    """Replica of the deployment. Its methods have the names that Ray Serve looks for."""

    def __init__(self, make: Callable[[], Served]) -> None:
        """Raises ValueError if the deployment has several replicas."""
        self.served = make()
        replicas = serve.get_replica_context().world_size
        if replicas > 1:
            raise ValueError(
                f"num_replicas is {replicas}; it must be 1, since one router has to see every request. The argument "
                "`replicas` says how many engines serve the model"
            )

    async def __serve_build_asgi_app__(self) -> Served:
        await self.served.start()
        return self.served

    async def check_health(self) -> None:
        await self.served.check_health()

    async def __del__(self) -> None:
        await self.served.close()
