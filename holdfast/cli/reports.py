"""Shared by commands that write files: checks before the work starts, and the options that a report lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol


class Page(Protocol):
    """A `lab.reports.report.Report`, declared here so that matplotlib is imported only for a report."""

    def write_html(self, path: Path) -> None:
        """Write the page. Raises OSError."""
        ...

    def write_plots(self, directory: Path) -> list[Path]:
        """Write the plots. Returns their paths. Raises OSError."""
        ...


def require_matplotlib() -> None:
    """Raise ValueError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("reports and plots need matplotlib, which is not installed: pip install 'holdfast[report]'")


def require_writable(path: str | None) -> None:
    """Raise ValueError if no file can be written at `path`."""
    if path is None:
        return
    if not (directory := Path(path).absolute().parent).is_dir():
        raise ValueError(f"{path} cannot be written: {directory} is not a directory")
    if Path(path).is_dir():
        raise ValueError(f"{path} cannot be written: it is a directory")


def require_directory(path: str | None) -> None:
    """Raise ValueError if `path` is not a directory and cannot become one."""
    if path is None:
        return
    for place in (Path(path).absolute(), *Path(path).absolute().parents):
        if place.exists():
            if not place.is_dir():
                raise ValueError(f"{path} cannot be a directory: {place} is a file")
            return


def changed_options(config: Any, without: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Name and value of each option that differs from its default, as text."""
    shown = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in without and value != field.default:
            listed = ", ".join(f"{each:g}" for each in value) if isinstance(value, tuple) else str(value)
            unit = " ms" if field.metadata["unit"] else ""
            shown.append((field.name.replace("_", " "), listed + unit))
    return shown


def write_page(page: Page, report: str | None, plots: str | None) -> str:
    """Write the HTML page and the PNG plots that have a path. Returns a message naming the files. Raises OSError."""
    paths = []
    if report is not None:
        page.write_html(Path(report))
        paths.append(report)
    if plots is not None:
        paths += [str(path) for path in page.write_plots(Path(plots))]
    return "written: " + ", ".join(paths)
