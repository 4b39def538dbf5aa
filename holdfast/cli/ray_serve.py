"""`serve run holdfast.cli.ray_serve:build model=MODEL replicas=2`: what `holdfast serve` serves, by Ray Serve.

Its arguments, there or under `args` in a file for `serve deploy`, are the options of `holdfast serve`, with _ or -.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import click  # what Ray Serve's own command is made with: it shows such an error in one line

from holdfast.cli.command import Asked, serve_configs
from holdfast.cli.flags import UsageError, checked
from holdfast.cluster.config import AUTO, ClusterConfig
from holdfast.cluster.ray_serve import application
from holdfast.core.config import AppConfig, EngineConfig
from holdfast.server.config import ServerConfig
from holdfast.server.mounted import Mounted

PROXY = ("host", "port", "ssl_certfile", "ssl_keyfile", "header_seconds", "body_seconds", "idle_seconds",
         "write_seconds")  # fmt: skip
"""Options of a server that listens itself."""


class OptionError(click.ClickException, ValueError):
    """An argument of the application is unknown or invalid."""


def build(args: dict[str, Any]) -> Any:
    """Ray Serve's application for these options. Raises OptionError, which names the option, the value and the limit.

    API keys may also be in the environment, as for `holdfast serve`.
    """
    try:
        options = checked(args, (EngineConfig, AppConfig, ClusterConfig, ServerConfig), from_text=True)
        refuse(options)
        served = serve_configs(Asked({**options, "ray": AUTO}, {}, ()))
    except UsageError as error:
        raise OptionError(str(error)) from None
    config = served.server
    return application(
        partial(Mounted, served.engine, config, served.apps, served.cluster, threads=served.threads),
        drain_seconds=config.drain_seconds,
        health_seconds=config.health_seconds,
        most_requests=config.max_connections,
    )


def refuse(options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that means nothing here."""
    for name in PROXY:
        if name in options:
            raise UsageError(
                f"{name} is {options[name]}, and Ray Serve's proxy listens here: set it by http_options in Ray Serve's "
                "configuration"
            )
    if "ray" in options:
        raise UsageError(f"ray is {options['ray']}; engines run in the cluster of Ray Serve, so leave it out")
