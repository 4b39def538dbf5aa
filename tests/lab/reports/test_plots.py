"""Panels of named curves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from holdfast.lab.reports import plots

CURVES = [plots.Line("ours", [1.0, 2.0], [3.0, 30.0], accent=True), plots.Line("theirs", [1.0, 2.0], [5.0, 500.0])]


def test_panels_draw_every_curve_with_its_name() -> None:
    figure = plots.panels([plots.Panel("first", "ms", CURVES, log=True), plots.Panel("second", "ms", CURVES[:1])], 3, plots.PRINT)  # fmt: skip # noqa: E501
    first, second, unused = figure.get_axes()
    assert [list(line.get_ydata()) for line in first.get_lines()] == [[3.0, 30.0], [5.0, 500.0]]
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["ours", "theirs"]
    assert (first.get_yscale(), second.get_yscale()) == ("log", "linear")
    assert not unused.get_visible()


def test_a_plot_is_written_as_png(tmp_path: Path) -> None:
    shown = [plots.Panel("first", "ms", CURVES, log_x=True)]
    plots.png(lambda palette: plots.panels(shown, 1, palette), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("y", "labels"),
    [
        ([3.0, 2000.0], ["10", "100", "1,000"]),
        ([6.0, 60.0], ["10", "20", "50"]),
        ([110.0, 390.0], ["200", "300", "400"]),
        ([12.0, 19.0], ["12", "14", "16", "18"]),
    ],
)
def test_a_logarithmic_axis_has_at_least_two_labels(y: list[float], labels: list[str]) -> None:
    line = plots.Line("ours", y, y)
    figure = plots.panels([plots.Panel("first", "ms", [line], log=True, log_x=True)], 1, plots.PRINT)
    figure.draw_without_rendering()
    (axes,) = figure.get_axes()
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
        assert [label.get_text() for at, label in ticks if low <= at <= high] == labels


def test_no_heading_of_a_plot_reaches_into_the_next_one() -> None:
    figures = ({"request_rate": rate, "output_throughput": 1e4, "p99_itl_ms": 9, "p99_ttft_ms": 9} for rate in (1, 8))
    runs: Any = [SimpleNamespace(figures=each) for each in figures]
    figure = plots.metrics_by_rate(runs, {}, None, plots.PRINT)
    figure.draw_without_rendering()
    boxes = [[text.get_window_extent() for text in axes.texts] for axes in figure.get_axes()]
    ends, begins = [max(box.x1 for box in each) for each in boxes], [min(box.x0 for box in each) for each in boxes]
    assert all(end < begin for end, begin in zip(ends, begins[1:], strict=False)), (ends, begins)
    assert ends[-1] < figure.bbox.x1
