"""Releases: what is checked, what is written, and that a failure leaves everything as it was."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from scripts.release import CHANGELOG, CHART, VERSION_FILE, ReleaseError, check_built, dated, parsed, release, run

LOG = (
    "# Changelog\n\nWhat users see.\n\n## 0.2.0, in development\n\n### 2026-01-02\n\n- A thing.\n\n"
    "## 0.1.0, 2026-01-01\n\n- First.\n"
)
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "holdfast"
dynamic = ["version"]
requires-python = ">=3.11"
[project.scripts]
holdfast = "holdfast.cli:main"
[tool.hatch.version]
path = "holdfast/core/version.py"
[tool.hatch.build.targets.wheel]
packages = ["holdfast"]
"""
MAIN = "from holdfast.core.version import __version__\ndef main():\n    print('holdfast', __version__)\n"


def commit(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    run("git", "add", "--all", cwd=root)
    run("git", "commit", "--quiet", "--message", "Change files", cwd=root)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a small package of the same form, on the way to 0.2.0."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "A")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    root = tmp_path / "checkout"
    run("git", "init", "--quiet", "--initial-branch", "trunk", root, cwd=tmp_path)
    commit(
        root,
        {
            "pyproject.toml": PROJECT,
            "holdfast/__init__.py": "",
            "holdfast/core/__init__.py": "",
            "holdfast/cli.py": MAIN,
            VERSION_FILE: '__version__ = "0.1.0"\n',
            CHART: "name: holdfast\nversion: 0.1.0\nappVersion: 0.1.0\n",
            CHANGELOG: LOG,
            ".gitignore": "dist/\n",
        },
    )
    return root


def state(root: Path) -> tuple[str, str, str, str]:
    """The commit, tags, changes and copies of a checkout, which a failed release must not change."""
    commands = (["rev-parse", "HEAD"], ["tag", "--list"], ["status", "--porcelain"], ["worktree", "list"])
    head, tags, changed, copies = (run("git", *words, cwd=root) for words in commands)
    return head, tags, changed, copies


def test_a_release_commits_and_tags_the_version_and_builds_a_package_that_says_it(checkout: Path) -> None:
    before = state(checkout)
    made = release(checkout, "0.2.0", "2026-02-03", checkout / "dist")
    assert made == ["holdfast-0.2.0.tar.gz", "holdfast-0.2.0-py3-none-any.whl"]
    assert all((checkout / "dist" / name).is_file() for name in made)
    head, tags, changed, copies = state(checkout)
    assert (tags, changed) == ("v0.2.0", "") and copies.count("\n") == before[3].count("\n")
    assert run("git", "rev-parse", "HEAD^", cwd=checkout) == before[0]
    assert run("git", "rev-parse", "v0.2.0^{commit}", cwd=checkout) == head
    assert run("git", "branch", "--show-current", cwd=checkout) == "trunk"
    assert run("git", "log", "-1", "--format=%s", cwd=checkout) == "Release 0.2.0"
    assert (checkout / VERSION_FILE).read_text() == '__version__ = "0.2.0"\n'
    assert (checkout / CHART).read_text() == "name: holdfast\nversion: 0.2.0\nappVersion: 0.2.0\n"
    assert "## 0.2.0, 2026-02-03\n" in (checkout / CHANGELOG).read_text()
    with tarfile.open(checkout / "dist" / made[0]) as sdist:
        assert "holdfast-0.2.0/holdfast/cli.py" in sdist.getnames()


def refused(root: Path, version: str, reason: str) -> None:
    before = state(root)
    with pytest.raises(ReleaseError, match=reason):
        release(root, version, "2026-02-03", root / "dist")
    assert state(root) == before
    assert not (root / "dist").exists()


class TestRefusals:
    """Each reason is named, and nothing changes."""

    def test_a_file_that_is_not_committed(self, checkout: Path) -> None:
        (checkout / "new.txt").write_text("x")
        refused(checkout, "0.2.0", r"not committed.*\n.*new\.txt")

    @pytest.mark.parametrize("version", ["0.2", "v0.2.0", "0.2.0rc1", "0.02.0"])
    def test_a_version_of_another_form(self, checkout: Path, version: str) -> None:
        refused(checkout, version, "it must be three numbers, as in 0.2.0")

    def test_a_version_that_is_not_higher_than_the_newest_tag(self, checkout: Path) -> None:
        for tag in ("v0.9.0", "v0.10.0", "vnext"):
            run("git", "tag", tag, cwd=checkout)
        refused(checkout, "0.9.1", r"the version is 0\.9\.1, and v0\.10\.0 is tagged")

    def test_a_changelog_whose_newest_section_is_another_version(self, checkout: Path) -> None:
        refused(checkout, "0.3.0", "its first section must be '## 0.3.0, in development'")

    def test_a_changelog_without_an_entry(self, checkout: Path) -> None:
        commit(checkout, {CHANGELOG: LOG.replace("- A thing.\n", "")})
        refused(checkout, "0.2.0", r"has no entry for 0\.2\.0")

    def test_a_changelog_that_says_that_nothing_was_released(self, checkout: Path) -> None:
        commit(checkout, {CHANGELOG: LOG.replace("What users see.", "No version has been tagged: wait.")})
        refused(checkout, "0.2.0", "no longer true")

    def test_no_branch(self, checkout: Path) -> None:
        run("git", "checkout", "--quiet", "--detach", cwd=checkout)
        refused(checkout, "0.2.0", "no branch is checked out")

    def test_a_package_that_cannot_be_built(self, checkout: Path) -> None:
        commit(checkout, {"pyproject.toml": "not TOML"})
        refused(checkout, "0.2.0", "hatchling build -t sdist .* ended with 1")

    def test_an_installed_command_that_fails(self, checkout: Path) -> None:
        commit(checkout, {"holdfast/cli.py": "import a_package_that_is_not_installed\n"})
        refused(checkout, "0.2.0", "No module named 'a_package_that_is_not_installed'")

    def test_an_installed_command_that_says_another_version(self, checkout: Path) -> None:
        commit(checkout, {"holdfast/cli.py": "def main():\n    print('holdfast 9')\n"})
        refused(checkout, "0.2.0", r"says 'holdfast 9'; it must say 'holdfast 0\.2\.0'")


def test_only_the_heading_of_the_version_gets_the_day() -> None:
    assert dated(LOG, "0.2.0", "2026-02-03") == LOG.replace("0.2.0, in development", "0.2.0, 2026-02-03")


def test_versions_compare_as_numbers() -> None:
    assert parsed("0.10.0") > parsed("0.9.12")


def test_the_wheel_must_be_of_the_same_version(checkout: Path, tmp_path: Path) -> None:
    sdist = tmp_path / "holdfast-0.2.0.tar.gz"
    with pytest.raises(ReleaseError, match=r"it must be holdfast-0\.3\.0\.tar\.gz"):
        check_built(sdist, sdist, "0.3.0")


def test_the_output_of_a_failed_command_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"git frobnicate ended with 1:\ngit: 'frobnicate' is not a git command"):
        run("git", "frobnicate", cwd=tmp_path)
    assert subprocess.run(["git", "--version"], capture_output=True).returncode == 0
