"""Make a release: `make release VERSION=0.2.0`. It commits and tags, and pushes nothing.

All happens in a copy of the last commit: the version is set, the package is built and installed into a fresh
environment, and the commit is tagged. Only then the branch moves on to that commit. Whatever fails leaves the checkout
as it was.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION_FILE = "holdfast/core/version.py"
CHART = "deploy/helm/holdfast/Chart.yaml"
CHANGELOG = "CHANGELOG.md"
UNTAGGED = "No version has been tagged"
"""A sentence of the changelog that a release makes untrue."""


class ReleaseError(Exception):
    """A reason why there can be no release now. The message says what to do."""


def run(*words: str | Path, cwd: Path) -> str:
    """Return what a command prints. Raises ReleaseError with its output if it fails."""
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout.strip()


def parsed(version: str) -> tuple[int, ...]:
    """Return the numbers of a version. Raises ReleaseError for another form than 1.2.3."""
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version):
        raise ReleaseError(f"the version is {version!r}; it must be three numbers, as in 0.2.0")
    return tuple(map(int, version.split(".")))


def check_checkout(root: Path, version: str) -> None:
    """Raises ReleaseError unless everything is committed, on a branch, and the version is new."""
    if changed := run("git", "status", "--porcelain", cwd=root):
        raise ReleaseError(f"these files are not committed; commit them, or remove them:\n{changed}")
    if not run("git", "branch", "--show-current", cwd=root):
        raise ReleaseError("no branch is checked out; check out the one to release")
    tags = run("git", "tag", "--list", "v*", cwd=root).split()
    earlier = [each for each in tags if re.fullmatch(r"v\d+\.\d+\.\d+", each)]
    newest = max(earlier, key=lambda tag: parsed(tag[1:]), default="")
    if newest and parsed(version) <= parsed(newest[1:]):
        raise ReleaseError(f"the version is {version}, and {newest} is tagged; choose a higher one")


def dated(changelog: str, version: str, day: str) -> str:
    """Return the changelog with the day in the heading of this version. Raises ReleaseError if it is not ready."""
    heading = f"## {version}, in development\n"
    newest = re.search(r"^## .*\n", changelog, re.MULTILINE)
    if newest is None or newest[0] != heading:
        found = newest[0].strip() if newest else "no section"
        raise ReleaseError(f"{CHANGELOG} begins with {found!r}; its first section must be {heading.strip()!r}")
    section = re.split(r"^## ", changelog[newest.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    if not re.search(r"^- \S", section, re.MULTILINE):
        raise ReleaseError(f"{CHANGELOG} has no entry for {version}; say what users notice")
    if UNTAGGED in changelog:
        raise ReleaseError(f"{CHANGELOG} says {UNTAGGED!r}, which is no longer true; change that sentence")
    return changelog.replace(heading, f"## {version}, {day}\n", 1)


def replaced(text: str, pattern: str, new: str, file: str) -> str:
    """Replace the only line that matches. Raises ReleaseError if there is another number of them."""
    changed, count = re.subn(pattern, new, text, flags=re.MULTILINE)
    if count != 1:
        raise ReleaseError(f"{file} has {count} lines like {pattern}; there must be one")
    return changed


def set_version(root: Path, version: str, day: str) -> None:
    """Write the version to the package and the chart, and the day to the changelog. Raises ReleaseError."""
    log, own, chart = root / CHANGELOG, root / VERSION_FILE, root / CHART
    log.write_text(dated(log.read_text(), version, day))
    own.write_text(replaced(own.read_text(), r'^__version__ = ".*"$', f'__version__ = "{version}"', VERSION_FILE))
    text = replaced(chart.read_text(), r"^version: .*$", f"version: {version}", CHART)
    chart.write_text(replaced(text, r"^appVersion: .*$", f"appVersion: {version}", CHART))


def build(root: Path, target: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the unpacked sdist, which shows it to be whole. Raises ReleaseError."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", target, cwd=root)
    (sdist,) = target.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (source,) = Path(unpacked).iterdir()
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target, cwd=source)
    (wheel,) = target.glob("*.whl")
    return sdist, wheel


def check_built(sdist: Path, wheel: Path, version: str) -> None:
    """Install the wheel into a fresh environment and ask for its version. Raises ReleaseError."""
    if sdist.name != f"holdfast-{version}.tar.gz":
        raise ReleaseError(f"the sdist is {sdist.name}; it must be holdfast-{version}.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if f"holdfast-{version}.dist-info/METADATA" not in names:
        raise ReleaseError(f"{wheel.name} has no metadata of holdfast {version}")
    with tempfile.TemporaryDirectory() as place:
        run(sys.executable, "-m", "venv", "--without-pip", place, cwd=Path(place))
        python = Path(place, "bin", "python")
        pip = (sys.executable, "-m", "pip", "--python", python)
        run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=sdist.parent)
        # Showing the version needs no other package. Isolated, Python finds no checkout by PYTHONPATH.
        said = run(python, "-I", Path(place, "bin", "holdfast"), "--version", cwd=Path(place))
    if said != f"holdfast {version}":
        raise ReleaseError(f"the installed command says {said!r}; it must say 'holdfast {version}'")


def release(root: Path, version: str, day: str, dist: Path) -> list[str]:
    """Make the release. Returns the names of what was built, in `dist`.

    Raises ReleaseError, and then nothing has changed.
    """
    parsed(version)
    check_checkout(root, version)
    with tempfile.TemporaryDirectory() as place:
        copy, built = Path(place, "copy"), Path(place, "dist")
        run("git", "worktree", "add", "--quiet", "--detach", copy, "HEAD", cwd=root)
        try:
            set_version(copy, version, day)
            sdist, wheel = build(copy, built)
            check_built(sdist, wheel, version)
            run("git", "commit", "--quiet", "--all", "--message", f"Release {version}", cwd=copy)
            commit = run("git", "rev-parse", "HEAD", cwd=copy)
        finally:
            run("git", "worktree", "remove", "--force", copy, cwd=root)
        run("git", "tag", "--annotate", f"v{version}", "--message", f"Holdfast {version}", commit, cwd=root)
        run("git", "merge", "--quiet", "--ff-only", commit, cwd=root)
        dist.mkdir(exist_ok=True)
        for file in (sdist, wheel):
            (dist / file.name).write_bytes(file.read_bytes())
    return [sdist.name, wheel.name]


def main() -> int:
    """Make the release that the command line asks for. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Set the version, build, check, commit and tag. Pushes nothing.")
    parser.add_argument("version", help="three numbers, as in 0.2.0")
    version = parser.parse_args().version
    try:
        made = release(ROOT, version, f"{datetime.now(UTC):%Y-%m-%d}", ROOT / "dist")
    except ReleaseError as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    print(f"v{version} is committed and tagged; dist/ has {' and '.join(made)}.")
    print(f"Push it: git push origin HEAD v{version}")
    if "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]:
        print("Before you upload it: pyproject.toml has no [project.urls], so its page would link to no source.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
