"""ClusterConfig: the number of the engine's replicas, and how requests reach them. Flags are generated from it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.cluster.routing import RouterName
from holdfast.core.config import option
from holdfast.engine.address import check_address
from holdfast.lm.config import EngineConfig

MOST_REPLICAS = 256
"""Most replicas of a server. Choosing one of 256 for a turn takes 1.5 ms of a core."""
AUTO = "auto"
KEPT = "engine"
"""Name of engines that outlive the server, unless one is given."""
KEPT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Options for the replicas of a server. Raises ValueError with the value and the limit for an invalid option."""

    replicas: int = option(
        1, "engines that serve the model in parallel, each on its own GPU (or tp times pp GPUs) if the machine has any"
    )
    max_replicas: int | None = option(
        None,
        "add replicas while requests queue, up to this number, and remove them again; default: the value of replicas",
    )
    ray: str | None = option(
        None,
        "run the replicas on the nodes of the Ray cluster at this address, host:port; without one: on the cluster that "
        "runs on this host, else on a new one of this host alone",
        bare=AUTO,
    )
    engines: tuple[str, ...] = option(
        (),
        "attach to the engine that listens at this address (holdfast engine --listen) instead of starting one; repeat "
        "it, or put commas between addresses, for several, which are the replicas",
    )
    engine_key: str | None = option(
        None, "with engines at HOST:PORT: the file with the key that they share with their clients"
    )
    ray_cpus: float = option(1.0, "with ray: CPUs of a node for each replica; it also gets tp times pp GPUs")
    ray_keep: str | None = option(
        None,
        "with ray: keep the engines when the server ends. They are actors with this name and a number; a server with "
        "the same name attaches to them; holdfast ray end NAME ends them",
        bare=KEPT,
    )
    ray_keep_seconds: float = option(600.0, "with ray_keep: time without any server after which an engine ends itself")
    routing: RouterName = option(  # noqa: RUF009  a string
        "priced",
        "which replica a request goes to; priced: where its first token comes soonest, by the wait and the state there",
    )
    scale_up_ms: float = option(
        1000.0, "with max_replicas: queueing time after which a replica is added, if it lasts for 3 seconds", unit="ms"
    )
    scale_down_seconds: float = option(
        120.0, "with max_replicas: time without queueing after which a replica that the others can replace is drained"
    )
    replica_drain_seconds: float = option(
        30.0, "time that requests of a drained replica have to finish there before they continue on another one"
    )

    def __post_init__(self) -> None:
        for name, low, high in (
            ("replicas", 1, MOST_REPLICAS),
            ("ray_cpus", 0, 1024),
            ("ray_keep_seconds", 10, 30 * 86400),
            ("scale_up_ms", 1, 3_600_000),
            ("scale_down_seconds", 1, 86400),
            ("replica_drain_seconds", 0, 86400),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must lie between {low} and {high}")
        if self.engines:
            self._check_engines()
        if self.ray is not None and self.ray != AUTO and not re.fullmatch(r"[^/\s]+:\d+", self.ray):
            raise ValueError(f"ray is {self.ray!r}; it must be the address of a Ray cluster, host:port, or {AUTO}")
        self._check_kept()
        if self.max_replicas is not None and not self.replicas <= self.max_replicas <= MOST_REPLICAS:
            raise ValueError(
                f"max_replicas is {self.max_replicas}; it must lie between replicas, {self.replicas}, "
                f"and {MOST_REPLICAS}"
            )

    def _check_kept(self) -> None:
        if self.ray_keep is None:
            return
        if self.ray is None:
            raise ValueError(f"ray_keep is {self.ray_keep}, and ray is not given: only engines on Ray are kept so")
        if not KEPT_NAME.fullmatch(self.ray_keep):
            raise ValueError(
                f"ray_keep is {self.ray_keep!r}; it must be a name of up to 63 letters, digits, dots, hyphens and "
                "underscores that begins with a letter or digit"
            )

    def _check_engines(self) -> None:
        for address in self.addresses:
            check_address(address, self.engine_key)
        if len({*self.addresses}) < len(self.addresses) or len(self.addresses) > MOST_REPLICAS:
            raise ValueError(f"engines is {self.addresses}; give up to {MOST_REPLICAS} addresses, each once")
        for name, value in (("ray", self.ray), ("max_replicas", self.max_replicas)):
            if value is not None:
                raise ValueError(f"{name} is {value}, and engines is given: those run already; leave one of them out")
        if self.replicas not in (1, len(self.addresses)):
            raise ValueError(f"replicas is {self.replicas}, and engines has {len(self.addresses)}; leave replicas out")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the engines to attach to; empty if engines are started."""
        return tuple(address.strip() for each in self.engines for address in each.split(","))

    @property
    def count(self) -> int:
        """Number of replicas at the start."""
        return len(self.addresses) or self.replicas

    @property
    def most(self) -> int:
        """Maximum number of replicas at the same time."""
        return self.max_replicas or self.count

    @property
    def many(self) -> bool:
        """Whether requests are routed, because there may be several engines."""
        return self.most > 1 or self.ray is not None or bool(self.engines)

    def check(self, engine: EngineConfig, tuning_state: str | None) -> None:
        """Raises ValueError for options that several engines, or engines on other hosts, cannot follow.

        `tuning_state` is the server's directory of tuning jobs; None: the default, which each host has for itself.
        """
        if self.many and engine.enable_sleep_mode:
            raise ValueError(
                "enable_sleep_mode is on, and requests are routed to replicas or to engines elsewhere: only the single "
                "engine of a server sleeps; drop one of them"
            )
        if self.ray is None or not engine.tuning:
            return
        if tuning_state is None:
            raise ValueError(
                "ray is set, and tuning is on: any node may have to go on with a job; set tuning_state to a directory "
                "that all hosts see at the same path"
            )
        if engine.tuning_mirror not in (AUTO, "off"):
            raise ValueError(
                f"ray is set, and tuning_mirror is {engine.tuning_mirror}: a lost node takes the states in its memory "
                "with it, so they are stored in tuning_state alone; leave tuning_mirror out"
            )
