"""Pages and plots are self-contained, and equal for equal runs."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from holdfast.lab.metrics import Record, summary
from holdfast.lab.reports.report import bench_report
from holdfast.lab.reports.run_data import Run


def run(rate, slow=1.0):
    gaps = [slow * gap * 0.01 for gap in range(1, 6)]
    records = [Record(at / rate, 10, token_times=[at / rate + gap for gap in gaps]) for at in range(20)]
    return Run.of(records, {"request_rate": rate, **summary(records)})


def report(runs, capacity=None, **options):
    return bench_report(
        runs,
        title="a <model>",
        workload="fixed",
        limits={"p99_itl_ms": 15.0},
        capacity=capacity,
        **options,
    )


CALL = {"settings": [("seed", "1")], "command": "holdfast bench --rates 1,2"}


class Page(HTMLParser):
    """Collects text and tags; fails on tags that do not close."""

    VOID = ("meta", "path", "line", "circle", "rect", "use", "image")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def page(tmp_path):
    def write(made):
        path = tmp_path / "page.html"
        assert made.write(str(path), None, **CALL) == [str(path)]
        return path.read_text()

    return write


def test_a_page_loads_nothing_from_a_network(page):
    text = page(report([run(1), run(2, slow=2)], capacity=1))
    assert not [link for link in re.findall(r"""(?:src|href)=["']([^"']*)""", text) if not link.startswith("#")]
    assert "@import" not in text and "<script" not in text
    read = Page(text)
    assert sum(tag == "svg" for tag, _ in read.tags) == 4
    assert "holdfast bench --rates 1,2" in read.text and "a <model>" in read.text


def test_svg_colours_are_css_variables_of_the_page(page):
    text = page(report([run(1)]))
    drawn = text[text.index("<svg") :]
    assert "var(--accent)" in drawn and "#0a0b" not in drawn


def test_the_same_runs_give_the_same_page(page):
    assert page(report([run(1), run(2)])) == page(report([run(1), run(2)]))


def test_a_tile_beyond_its_limit_is_marked_as_missed():
    kept, missed = ({tile.name: tile.missed for tile in report([run(1, slow)]).tiles} for slow in (1.0, 2.0))
    assert not kept["TBT p99"] and missed["TBT p99"]


def test_a_capacity_search_shows_the_run_at_the_capacity():
    tiles = {tile.name: tile.value for tile in report([run(1), run(2), run(4, slow=3)], capacity=2).tiles}
    assert tiles["Capacity"] == "2"
    assert tiles["TBT p99"] == "10"


def test_plots_are_written_as_png_files(tmp_path):
    directory = tmp_path / "new" / "plots"
    paths = report([run(1), run(2)]).write(None, str(directory), **CALL)
    assert paths == [str(directory / name) for name in ("rates.png", "ttft.png", "tbt.png", "timeline.png")]
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_run_of_one_token_requests_has_no_stalls_section(page):
    records = [Record(arrival=0.0, prompt_tokens=10, token_times=[0.5])]
    assert "Worst stalls" not in page(report([Run.of(records, summary(records))]))
