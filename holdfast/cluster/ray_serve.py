"""An application of Ray Serve around one that answers HTTP: a deployment with one replica, which sees every request."""

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
    raise EngineStartError(f"Ray is {ray.__version__}; an application of Ray Serve needs 2.56 or newer")

DEPLOYMENT = "Holdfast"
CHECK_SECONDS = 5.0
"""Ray Serve asks so often whether the replica is well, and replaces it after the third time that it is not."""
CLOSE_SECONDS = 10.0
"""Time to end engines and to write the store, after requests have finished."""
STARTS = 3
"""Starts that may fail one after another. What they fail for, such as a missing model, rarely mends itself."""


class Served(Protocol):
    """What answers the requests: an ASGI application that is started and ended."""

    async def start(self) -> None:
        """Return when requests can be taken. Raises the reason if that will not be."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As ASGI defines it."""

    async def check_health(self) -> None:
        """Raises the reason if another one should be started in its place."""

    async def close(self) -> None:
        """End it, in whatever state it is."""


def application(
    make: Callable[[], Served], *, drain_seconds: float, health_seconds: float, most_requests: int
) -> serve.Application:
    """The application of Ray Serve, to be run or deployed.

    `make` is called in the replica, wherever Ray puts that. A replica that ends gets no more requests, and those in
    progress have `drain_seconds`. A check of its health may take `health_seconds`. Of more than `most_requests` at a
    time, the rest wait in the proxy. The replica itself asks for no CPU: as an API process, it computes little.
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
    """The replica of the deployment. Its methods have the names that Ray Serve looks for."""

    def __init__(self, make: Callable[[], Served]) -> None:
        """Raises ValueError if there would be several replicas."""
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
