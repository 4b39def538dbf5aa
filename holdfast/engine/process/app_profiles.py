"""Measures the cost profile of an application's cells, and finds it again. It picks their batch sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from holdfast.cells.application import Application
from holdfast.cells.cell import Cell
from holdfast.cells.measure import MEASURED, device_name, measure_cells
from holdfast.cells.types import fingerprint
from holdfast.core.version import __version__
from holdfast.engine.profiles import CellProfile, CellType, cached_cell_profile_path, keep

log = logging.getLogger("holdfast.engine")


class Found(NamedTuple):
    """A profile that fits, and its file."""

    profile: CellProfile
    path: Path


def versions() -> str:
    """Versions on which times depend."""
    return f"holdfast {__version__}, torch {torch.__version__}, measurement {MEASURED}"


def measure_profile(
    app: str,
    application: Application,
    types: Mapping[Cell, int],
    device: str,
    largest: int,
    on_progress: Callable[[str], None],
) -> Found:
    """Measure an application on a device and store what was found. Raises ValueError, OSError."""
    costs = measure_cells(application.cells, types, device, largest=largest, on_progress=on_progress)
    name = device_name(device)
    profile = CellProfile(
        app=app,
        device=name,
        versions=versions(),
        types=tuple(CellType(*known, cost) for known, cost in zip(_known(types), costs, strict=True)),
    )
    path = cached_cell_profile_path(app, name)
    keep(profile, path, required=True)
    return Found(profile, path)


def find_profile(app: str, types: Mapping[Cell, int], devices: Sequence[str], asked: str) -> Found | None:
    """The profile of an application for these workers; None if there is none that fits.

    `asked` is auto for the stored one, off, or the path of a file. Raises ValueError if a file that was asked for does
    not fit. Why the stored one does not is logged.
    """
    if asked == "off":
        return None
    names = sorted({device_name(device, devices.count("cpu")) for device in devices})
    if asked != "auto":
        return _fitting(Path(asked), types, names)
    path = cached_cell_profile_path(app, names[0])
    if len(names) > 1 or not path.is_file():
        return None
    try:
        return _fitting(path, types, names)
    except ValueError as error:
        log.warning("holdfast: %s; until then its cells have their own batch sizes", error)
        return None


def _fitting(path: Path, types: Mapping[Cell, int], names: Sequence[str]) -> Found:
    profile = CellProfile.load(path)
    profile.require(device=" and ".join(names), versions=versions(), types=_known(types))
    return Found(profile, path)


def _known(types: Mapping[Cell, int]) -> list[tuple[str, str]]:
    """The name and the fingerprint of the first cell of each type, by its number."""
    first: dict[int, Cell] = {}
    for cell, number in types.items():
        first.setdefault(number, cell)
    return [(first[number].name, fingerprint(first[number])) for number in sorted(first)]
