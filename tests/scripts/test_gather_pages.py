"""The site has every page, and every file that a page links to, where the repository has it."""

from __future__ import annotations

from pathlib import Path

from scripts.gather_pages import gather, pages


def make_repository(root: Path) -> Path:
    """A repository with a few pages, a picture, a result and a file that no page links to."""
    for name, text in {
        "README.md": "![a picture](docs/a.png) and [docs](docs/README.md#docs)",
        "docs/README.md": "# Docs\n[notes](notes/2026-11-21-a.md), [home](../README.md), [else](https://example.com/x.md)",
        "docs/notes/2026-11-21-a.md": "[result](../../benchmarks/lib/results/a.md)",
        "docs/a.png": "picture",
        "benchmarks/README.md": "Scripts",
        "benchmarks/lib/results/a.md": "[raw](a.json)",
        "benchmarks/lib/results/a.json": "{}",
        "benchmarks/lib/results/b.json": "{}",
        "scripts/tiny/README.md": "Model",
        "holdfast/README.md": "not a page",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_pages_and_all_that_they_link_to_are_copied(tmp_path: Path) -> None:
    root, target = make_repository(tmp_path / "repository"), tmp_path / "pages"
    assert gather(root, target) == []
    copied = {file.relative_to(target).as_posix() for file in target.rglob("*") if file.is_file()}
    assert copied == {
        "README.md", "docs/README.md", "docs/notes/2026-11-21-a.md", "docs/a.png", "benchmarks/README.md",
        "benchmarks/lib/results/a.md", "benchmarks/lib/results/a.json", "scripts/tiny/README.md",
    }  # fmt: skip
    assert (target / "docs/a.png").read_text() == "picture"


def test_links_to_no_file_are_reported_with_their_page(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "repository")
    (root / "docs/README.md").write_text("[gone](gone.md#a) and [folder](notes/)")
    assert sorted(gather(root, tmp_path / "pages")) == [
        "docs/README.md: docs/gone.md",
        "docs/README.md: docs/notes",
    ]


def test_pages_of_an_earlier_run_do_not_stay(tmp_path: Path) -> None:
    root, target = make_repository(tmp_path / "repository"), tmp_path / "pages"
    gather(root, target)
    (root / "docs/notes/2026-11-21-a.md").unlink()
    (root / "docs/README.md").write_text("# Docs")
    gather(root, target)
    assert not (target / "docs/notes/2026-11-21-a.md").exists()


def test_files_outside_the_pages_are_left_out(tmp_path: Path) -> None:
    root = make_repository(tmp_path)
    assert root / "holdfast/README.md" not in pages(root)
