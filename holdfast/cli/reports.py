"""What commands that write reports share: the checks before the work, the configuration for people, the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol


class Page(Protocol):
    """A report."""

    def write_html(self, path: Path) -> None:
        """Write the page. Raises OSError."""
        ...

    def write_plots(self, directory: Path) -> list[Path]:
        """Write its plots. Raises OSError."""
        ...


def needs_matplotlib() -> None:
    """Raises ValueError where there is no matplotlib: before the work, and not after it."""
    if find_spec("matplotlib") is None:
        raise ValueError("reports and plots take matplotlib, which is not installed: pip install 'holdfast[report]'")


def writable(path: str | None) -> None:
    """Raises ValueError where a file cannot be put: before the work, and not after it."""
    if path is None:
        return
    if not (directory := Path(path).absolute().parent).is_dir():
        raise ValueError(f"{path} cannot be written: {directory} is no directory")
    if Path(path).is_dir():
        raise ValueError(f"{path} cannot be written: it is a directory")


def makeable(path: str | None) -> None:
    """Raises ValueError where a directory cannot be made: before the work, and not after it."""
    if path is None:
        return
    for place in (Path(path).absolute(), *Path(path).absolute().parents):
        if place.exists():
            if not place.is_dir():
                raise ValueError(f"{path} cannot be a directory: {place} is a file")
            return


def changed(config: Any, without: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The options that are not as they are by default, for people."""
    shown = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in without and value != field.default:
            listed = ", ".join(f"{each:g}" for each in value) if isinstance(value, tuple) else str(value)
            unit = " ms" if field.metadata["unit"] else ""
            shown.append((field.name.replace("_", " "), listed + unit))
    return shown


def written(page: Page, report: str | None, plots: str | None) -> str:
    """Write what was asked for. Returns which files, for people. Raises OSError."""
    paths = []
    if report is not None:
        page.write_html(Path(report))
        paths.append(report)
    if plots is not None:
        paths += [str(path) for path in page.write_plots(Path(plots))]
    return "written: " + ", ".join(paths)
