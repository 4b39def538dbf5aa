"""Compiling the library of integer products, with and without a compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hatch_build
from holdfast.lm.kernels.integer.library import FILE

ROOT = Path(__file__).parents[1]


def sources(into: Path) -> Path:
    """A small package with the library's sources and the checkout's way to build it."""
    kernels = into / FILE.parent.relative_to(ROOT)
    shutil.copytree(hatch_build.SOURCES, kernels, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (into / "holdfast" / "core").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py", "holdfast/core/version.py"):
        shutil.copy(ROOT / name, into / name)
    return into


def build(directory: Path, compiler: str) -> tuple[str, str]:
    """The name of the wheel that is built with $CC, and what is printed."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out"]
    done = subprocess.run(
        command, cwd=directory, env=os.environ | {"CC": compiler}, capture_output=True, text=True, check=True
    )
    return next((directory / "out").iterdir()).name, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_wheel_has_the_library_and_the_platform_in_its_name(tmp_path: Path) -> None:
    quick = tmp_path / "cc"  # its level of optimization, the last one named, takes a third of the time of a build's
    quick.write_text('#!/bin/sh\nexec cc "$@" -O1\n')
    quick.chmod(0o755)
    name, _ = build(sources(tmp_path), f"{shlex.quote(str(quick))} -Wall -Wextra -Werror")
    assert name.startswith("holdfast-") and "-py3-none-linux_" in name
    with zipfile.ZipFile(tmp_path / "out" / name) as wheel:
        assert str(FILE.relative_to(ROOT)) in wheel.namelist()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_a_wheel_is_built_without_the_library(tmp_path: Path, compiler: str) -> None:
    directory = sources(tmp_path)
    old = directory / FILE.relative_to(ROOT)
    old.write_bytes(b"of an earlier version")
    name, printed = build(directory, compiler)
    assert name.endswith("-py3-none-any.whl")
    assert "the library of integer products was not compiled" in printed and "by PyTorch" in printed
    with zipfile.ZipFile(tmp_path / "out" / name) as wheel:
        assert not [each for each in wheel.namelist() if each.endswith(".so")]
    assert not old.exists()


def test_the_reason_is_what_the_compiler_says(tmp_path: Path) -> None:
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\necho 'products.c: no such thing' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        hatch_build.compiled(tmp_path, str(script))
    assert hatch_build.reason(failed.value).endswith("was not compiled: products.c: no such thing")
    assert not (tmp_path / "products.so").exists()
