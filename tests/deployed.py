"""Helpers of the tests of deploy/: its command lines, options, probes and metrics, and the places of programs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.command import Asked, make_parser, options_in, serve_configs
from holdfast.cli.engine import ListenConfig
from holdfast.cli.flags import UsageError
from holdfast.lm.config import EngineConfig

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PLACES = {
    "$(POD_IP)": "10.0.0.1",  # Kubernetes
    "${HOLDFAST_MODEL:?}": "/models/a",  # Compose
}
"""Values for the variables that Kubernetes and Compose replace before Holdfast sees the argument."""
PROBED = {"/health/live", "/health/ready"}
"""Routes by which a cluster looks at a server."""


def check_command_line(words: Sequence[str], file: Mapping[str, Any] | None = None) -> None:
    """Parse the words after `holdfast`, and build the configs. Raises UsageError or SystemExit if they are wrong.

    `file` holds the options of --config.
    """
    for variable, value in PLACES.items():
        words = [word.replace(variable, value) for word in words]
    given, unknown = make_parser(words[0]).parse_known_args(words)
    if unknown:
        raise UsageError(f"holdfast {words[0]} does not know {' '.join(unknown)}")
    flags = {name: value for name, value in vars(given).items() if name not in ("command", "config")}
    asked = Asked(flags, file or {}, words[1:])
    if words[0] == "serve":
        serve_configs(asked)
    else:
        asked.config(ListenConfig)
        asked.config(EngineConfig)


def check_options(path: Path, command: str, place: Path) -> None:
    """Check a YAML file of options for a command, by a copy in a directory `place`. Raises UsageError."""
    copy = place / path.name
    copy.write_text(path.read_text())
    check_command_line([command], options_in(str(copy), command))


def pods(manifests: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each pod's spec that runs Holdfast, with the container that does."""
    for each in manifests:
        if each["kind"] in ("Deployment", "StatefulSet"):
            pod = each["spec"]["template"]["spec"]
            yield pod, pod["containers"][0]


def option(arguments: Sequence[str], flag: str) -> str:
    """Return the value of a flag among arguments."""
    return arguments[list(arguments).index(flag) + 1]


def paths_of_probes(container: Mapping[str, Any]) -> set[str]:
    """Return the paths that the probes of a container ask for."""
    probes = [each for name, each in container.items() if name.endswith("Probe")]
    return {probe["httpGet"]["path"] for probe in probes if "httpGet" in probe}


def metrics_in(text: str) -> set[str]:
    """Return the names of Holdfast's metrics in an expression."""
    return set(re.findall(r"\bholdfast_\w+", text))


def program(name: str) -> str:
    """Return the path of a program on PATH, or in the directory HOLDFAST_TEST_PROGRAMS. Skips the test without it."""
    places = os.pathsep.join([os.environ.get("HOLDFAST_TEST_PROGRAMS", ""), os.environ["PATH"], "/usr/sbin"])
    found = shutil.which(name, path=places)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return str(Path(found).absolute())
