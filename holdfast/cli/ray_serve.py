"""`import_path: holdfast.cli.ray_serve:build`: the API processes of `holdfast serve --ray --ray-keep`, by Ray Serve.

Its arguments, under `args` in a file for `serve deploy`, are the options of `holdfast serve`, with _ or -.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import click  # Ray Serve's own command is made with it, and shows such an error in one line.

from holdfast.cli.command import Asked, serve_configs
from holdfast.cli.flags import UsageError, checked
from holdfast.cluster.config import AUTO, KEPT, ClusterConfig
from holdfast.cluster.ray_serve import application
from holdfast.lm.config import EngineConfig
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.mounted import Mounted

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("host", "port", "ssl_certfile", "ssl_keyfile", "header_seconds", "body_seconds", "idle_seconds",
         "write_seconds"),
        "Ray Serve's proxy listens; set it by http_options of its configuration",
    ),
    "ray": "engines run in the cluster of Ray Serve; leave it out",
    "engines": "engines run in the cluster of Ray Serve; leave it out",
    "grpc_port": "applications are not served here; leave it out",
    "api_processes": "num_replicas of the deployment is their number; leave it out",
    "max_replicas": "an API process would not know of a replica that another one adds; set replicas",
    "adapter_root": "an adapter loaded by a request would be known to one API process alone; leave it out",
}  # fmt: skip
"""Options that have no meaning here, each with the reason."""


class OptionError(click.ClickException, ValueError):
    """An argument of the application is unknown or invalid."""


def build(args: dict[str, Any]) -> Any:
    """Return Ray Serve's application. Raises OptionError, which names the option, the value and the limit.

    API keys may also be in the environment, as for `holdfast serve`.
    """
    try:
        options = checked(args, (EngineConfig, ClusterConfig, ServerConfig))
        refuse(options)
        served = serve_configs(Asked({"ray_keep": KEPT, **options, "ray": AUTO}, {}, ()))
    except UsageError as error:
        raise OptionError(str(error)) from None
    assert served.engine is not None
    return application(
        partial(Mounted, served.engine, served.server, served.cluster),
        drain_seconds=served.server.drain_seconds,
        health_seconds=served.server.health_seconds,
        most_requests=served.server.max_connections,
    )


def refuse(options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that has no meaning here, and for a store that API processes cannot share."""
    for name, why in REFUSED.items():
        if name in options:
            raise UsageError(f"{name} is {options[name]}: {why}")
    if (store := options.get("store")) in (None, MEMORY):
        raise UsageError(
            f"store is {store or 'not given'}: API processes share one; give a database URL, or a file if "
            "all of them run on one host"
        )
