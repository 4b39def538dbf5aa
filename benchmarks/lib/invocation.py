"""Functions that every benchmark shares: engine options on the command line, and the origin of a result."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from holdfast.lm.types import LanguageLoop


def add_engine_options(parser: argparse.ArgumentParser, flag: str = "--set", about: str = "an engine option") -> None:
    """Add a repeatable flag NAME=VALUE; use it as `EngineConfig(**dict(arguments.set))`."""
    parser.add_argument(flag, action="append", default=[], type=engine_option, metavar="NAME=VALUE", help=about)


def engine_option(text: str) -> tuple[str, Any]:
    """The name and the value of an option. The value is YAML, but `on` and `off` are words.

    Raises ArgumentTypeError.
    """
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, as in token_budget=1024")
    if value in ("on", "off"):
        return name, value
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def settle(loop: LanguageLoop) -> None:
    """Capture the graphs that a server captures in its first pause, and wait until the host tier can be used."""
    while loop.prepare():
        pass
    while (stats := loop.stats()).host_blocks_ready < stats.host_blocks_total:
        time.sleep(0.05)


def command() -> str:
    """The command line, with file names in place of paths on this machine."""
    words = (Path(word).name if word.startswith("/") else word for word in sys.argv[1:])
    return " ".join([*program(), *words])


def program() -> tuple[str, ...]:
    """The command that ran this process's script: `python -m benchmarks.FOLDER.NAME`, or its path."""
    script = Path(sys.argv[0])
    if sys.modules["__main__"].__spec__ is None:
        return "python", f"benchmarks/{script.parent.name}/{script.name}"
    return "python", "-m", f"benchmarks.{script.parent.name}.{script.stem}"


def provenance() -> dict[str, Any]:
    """Command, date, device and versions of this run, ready for JSON."""
    import torch

    try:
        triton = version("triton")
    except PackageNotFoundError:  # only CUDA builds have it
        triton = None
    return dict(
        command=command(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
        torch=torch.__version__,
        triton=triton,
        python=platform.python_version(),
        cores=os.cpu_count(),
    )
