"""Reports: one HTML file that needs no network, and its plots as PNG files. Imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from holdfast.lab.reports import plots
from holdfast.lab.reports.plots import Draw

TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline figure."""

    name: str
    value: str
    unit: str
    note: str = ""
    missed: bool = False
    """Whether the figure misses its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a report: a caption, plots, a table and text to copy. Each may be empty."""

    title: str
    caption: str = ""
    draws: Mapping[str, Draw]
    """Plots by file name, without suffix."""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    best: int | None = None
    """Index of the highlighted row."""
    code: str = ""

    @property
    def plots(self) -> list[str]:
        """The plots as SVG."""
        return [plots.svg(draw, name.replace("-", " ")) for name, draw in self.draws.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The content of a page."""

    title: str
    lead: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    settings: Sequence[tuple[str, str]]
    command: str
    footer: str

    def write(self, html: str | None, plots: str | None) -> list[str]:
        """Write the page and the plots that have a path. Returns the paths of all files. Raises OSError."""
        if html is not None:
            self.write_html(Path(html))
        paths = [] if html is None else [html]
        return paths if plots is None else paths + [str(path) for path in self.write_plots(Path(plots))]

    def write_html(self, path: Path) -> None:
        """Write the page. Raises OSError."""
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(report=self)
        path.write_text(page, encoding="utf-8")

    def write_plots(self, directory: Path) -> list[Path]:
        """Write each plot as a PNG file. Returns their paths. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        paths = []
        for section in self.sections:
            for name, draw in section.draws.items():
                plots.png(draw, directory / f"{name}.png")
                paths.append(directory / f"{name}.png")
        return paths


def short(value: float) -> str:
    """A figure with about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
