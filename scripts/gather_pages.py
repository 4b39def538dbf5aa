"""Gather the pages of the site in build/pages: `make docs` builds them with MkDocs into build/docs.

The site has the pages in the folders of the repository, with every file that a page links to, so a relative link works
both on GitHub and on the site. Needs only Python.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


def pages(root: Path) -> list[Path]:
    """The Markdown pages at the root and below docs, the list of benchmarks, and the page on the built-in model."""
    lists = [root / "benchmarks" / "README.md", root / "tools" / "tiny" / "README.md"]
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *lists])


def linked(page: Path) -> list[Path]:
    """The files of the repository that a page links to. Links to other servers are left out."""
    return [(page.parent / link).resolve() for link in LINK.findall(page.read_text()) if "://" not in link]


def gather(root: Path, target: Path) -> list[str]:
    """Copy all pages, and the files that they link to, to `target`. Returns the links that lead to no file."""
    shutil.rmtree(target, ignore_errors=True)
    missing = []
    todo, done = pages(root), set[Path]()
    while todo:
        file = todo.pop()
        if file in done:
            continue
        done.add(file)
        place = target / file.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
        for link in linked(file) if file.suffix == ".md" else ():
            if link.is_file():
                todo.append(link)
            else:
                missing.append(f"{file.relative_to(root)}: {os.path.relpath(link, root)}")
    return missing


def main() -> int:
    """Gather the pages. Returns the exit code: 1 if a page links to a file that does not exist."""
    missing = gather(ROOT, PAGES)
    for line in missing:
        print(f"no such file: {line}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
