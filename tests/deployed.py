"""Helpers of the tests of deploy/: its command lines, options, probes and metrics, and the places of programs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli.command import Asked, load_command, make_parser, options_in, serve_configs
from holdfast.cli.engine import ListenConfig
from holdfast.cli.flags import UsageError, flag_of
from holdfast.lm.config import EngineConfig

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PLACES = {
    "$(POD_IP)": "10.0.0.1",  # Kubernetes
    "${HOLDFAST_MODEL:?}": "/models/a",  # Compose
}
"""Values for the variables that Kubernetes and Compose replace before Holdfast sees the argument."""
COMING_FLAGS = {("serve", "--lame-duck-seconds"), ("engine", "--drain-seconds")}
COMING_ROUTES = {"/health/live", "/health/ready"}
"""Options and routes of draining that the files use already. A version that has them does not read these sets."""


def check_command_line(words: Sequence[str], file: Mapping[str, Any] | None = None) -> None:
    """Parse the words after `holdfast`, and build the configs. Raises UsageError or SystemExit if they are wrong.

    `file` holds the options of --config.
    """
    for variable, value in PLACES.items():
        words = [word.replace(variable, value) for word in words]
    words = without_coming(words)
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


def without_coming(words: Sequence[str]) -> list[str]:
    """Leave out the coming options that this version does not have yet."""
    known = load_command(words[0]).flags
    coming = [flag for command, flag in COMING_FLAGS if command == words[0] and flag not in known]
    return [word for before, word in pairwise(["", *words]) if not {before, word} & {*coming}]


def check_options(path: Path, command: str, place: Path) -> None:
    """Check a YAML file of options for a command, by a copy in a directory `place`. Raises UsageError."""
    options = yaml.safe_load(path.read_text())
    for flag in {flag_of(name) for name in options} - set(without_coming([command, *map(flag_of, options)])):
        del options[flag.removeprefix("--").replace("-", "_")]
    copy = place / path.name
    copy.write_text(yaml.safe_dump(options))
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
