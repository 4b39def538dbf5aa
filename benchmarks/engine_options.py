"""`--set NAME=VALUE`: options of the engine for a benchmark, one by one."""

from __future__ import annotations

import argparse
from typing import Any

import yaml


def add_engine_options(parser: argparse.ArgumentParser, flag: str = "--set", about: str = "an engine option") -> None:
    """The flag, as often as wanted; parsed it is a list for `dict`, as in `EngineConfig(**dict(arguments.set))`."""
    parser.add_argument(flag, action="append", default=[], type=engine_option, metavar="NAME=VALUE", help=about)


def engine_option(text: str) -> tuple[str, Any]:
    """Name and value, which is written as in YAML. Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, as in token_budget=1024")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
