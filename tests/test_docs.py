"""Pages agree with the code and each other: files and headings that they name exist, and the index has each page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.gather_pages import pages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = pages(ROOT)
ARCHITECTURE = (DOCS / "architecture.md").read_text()
LINK = re.compile(r"\]\(([^)\s]+)\)")
MENTION = re.compile(r"(?<!llguidance, )\bdocs/([\w/.-]+\.md)(?:#([\w-]+))?")
"""A page of the documentation as code, a script or a message names it."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> list[str]:
    """The names that a page's headings can be linked by, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def listed_in(navigation: Any) -> Iterator[str]:
    """The pages of the site's navigation, however deep."""
    if isinstance(navigation, str):
        yield navigation
    else:
        for entry in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from listed_in(entry)


def section(title: str) -> str:
    """The text below a heading of the architecture page, up to the next heading of its level."""
    return ARCHITECTURE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@every_page
def test_links_lead_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link:
            continue
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@every_page
def test_no_two_headings_of_a_page_share_an_anchor(page: Path) -> None:
    names = anchors(page)
    assert sorted({name for name in names if names.count(name) > 1}) == []


@every_page
def test_lists_and_tables_read_the_same_on_github_and_on_the_site(page: Path) -> None:
    """Python-Markdown wants a list or table to begin after an empty line, and nothing but text inside a list."""
    apart = []
    before = ""
    for line in prose(page).split("\n"):
        item = re.match(r"([-*]|\d+\.) ", line)
        follows = re.match(r"([-*]|\d+\.) |  ", before)
        if (item and before and not follows) or re.match(r" {1,3}([-*|]|\d+\.) ", line):
            apart.append(line)
        before = line
    assert apart == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_begins_with_its_title_and_what_it_is_about(page: Path) -> None:
    title, nothing, first = page.read_text().split("\n")[:3]
    assert title.startswith("# ")
    assert nothing == ""
    assert re.match(r"(?!```)[\w`*\[]", first), first


def test_pages_that_code_and_messages_name_exist() -> None:
    files = [
        *(file for folder in ("holdfast", "scripts", "benchmarks") for file in (ROOT / folder).rglob("*.py")),
        *(ROOT / "docker").iterdir(),
        *(file for file in (ROOT / "deploy").rglob("*") if file.is_file()),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
    ]
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name, anchor in MENTION.findall(file.read_text())
        if not (DOCS / name).is_file() or (anchor and anchor not in anchors(DOCS / name))
    }
    assert missing == set()


def test_the_site_lists_each_page_once() -> None:
    text = re.sub(r"!!python\S+ \{.*?\}\}", "slugify", (ROOT / "mkdocs.yml").read_text())
    settings = yaml.safe_load(text)
    named = list(listed_in(settings["nav"]))
    expected = [page.relative_to(ROOT).as_posix() for page in PAGES if not re.match(r"20\d\d-", page.name)]
    assert sorted(named) == sorted(expected)


def test_the_index_by_audience_links_to_each_page() -> None:
    linked = set(LINK.findall((DOCS / "README.md").read_text()))
    assert {page.name for page in DOCS.glob("*.md")} - linked == {"README.md"}


def test_the_list_of_notes_links_to_each_note() -> None:
    notes = DOCS / "notes"
    linked = set(LINK.findall((notes / "README.md").read_text()))
    assert {page.name for page in notes.glob("*.md")} - linked == {"README.md"}


def test_pictures_of_the_front_page_are_small() -> None:
    pictures = [name for name in LINK.findall((ROOT / "README.md").read_text()) if name.endswith(".png")]
    assert pictures
    assert [name for name in pictures if (ROOT / name).stat().st_size > 150_000] == []


def test_files_that_the_architecture_names_exist() -> None:
    named = set(re.findall(r"`([a-z_0-9/]+/(?:[a-z_0-9]+\.py)?)`", ARCHITECTURE))
    assert len(named) > 30
    assert sorted(name for name in named if not any((ROOT / base / name).exists() for base in ("holdfast", "."))) == []


def test_a_decode_step_is_told_in_at_most_fifteen_files() -> None:
    rows = re.findall(r"^\| (\d+) \| `([a-z_0-9/]+\.py)` \|", section("Life of a decode step"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert 10 <= len(rows) <= 15
    assert len({file for _, file in rows}) == len(rows)


def test_figures_of_the_front_page_are_those_of_the_benchmarks() -> None:
    def rows(page: Path) -> dict[str, list[str]]:
        """The cells of the rows that link to a page of benchmarks, by what the row is about."""
        found = re.findall(r"^\|.*?\[([^\]]+)\]\((?:docs/)?benchmarks/[^|]*\|(.*)\|$", page.read_text(), re.MULTILINE)
        return {what: [cell.strip() for cell in cells.split("|")] for what, cells in found}

    ours, all_of_them = rows(ROOT / "README.md"), rows(DOCS / "benchmarks.md")
    names = {"8 streams": "CPU"}
    assert len(ours) in range(3, 6)
    for what, (holdfast, peer, ratio, day) in ours.items():
        theirs = all_of_them[names.get(what, what)]
        assert (holdfast, ratio.split(" ")[0]) == (theirs[0], theirs[2]), what
        assert peer.split(" ")[0] == theirs[1].split(" ")[0], what
        assert ratio.partition("(")[2].split(",")[0].rstrip(")") == theirs[3].split(",")[0], what
        assert day in theirs[4], what
