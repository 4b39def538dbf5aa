"""The pages agree with the code: files that they name exist, links lead somewhere, rooms are those of the contracts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.rooms import Package

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
LINK = re.compile(r"\]\(([^)\s]+)\)")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def anchors(page: Path) -> set[str]:
    """The names that a page's headings can be linked by, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(title: str) -> str:
    """The text below a heading of the architecture page, up to the next heading of its level."""
    return ARCHITECTURE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@every_page
def test_links_lead_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_files_that_the_architecture_names_exist() -> None:
    named = set(re.findall(r"`([a-z_0-9/]+/(?:[a-z_0-9]+\.py)?)`", ARCHITECTURE))
    assert len(named) > 30
    assert sorted(name for name in named if not any((ROOT / base / name).exists() for base in ("holdfast", "."))) == []


def test_a_decode_step_is_told_in_at_most_fifteen_files() -> None:
    rows = re.findall(r"^\| (\d+) \| `([a-z_0-9/]+\.py)` \|", section("Life of a decode step"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert 10 <= len(rows) <= 15
    assert len({file for _, file in rows}) == len(rows)


def test_the_architecture_lists_the_rooms_of_the_contracts() -> None:
    package = Package.read(ROOT)
    listed = re.findall(r"^\| `([a-z_/]+?)(?:\.py)?` \|", section("Rooms"), re.MULTILINE)
    assert [name for name in listed if "/" not in name] == list(package.layers)
    inner = [room.replace(".", "/") for room in package.rooms if room.startswith("lm.")]
    assert sorted(name for name in listed if "/" in name) == sorted(inner)
