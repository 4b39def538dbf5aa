"""The package, built as `make package` builds it, works from an environment of its own, outside the checkout."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.lm.kernels.integer.library import FILE

ROOT = Path(__file__).parents[1]
LIBRARY = FILE.relative_to(ROOT)
"""The library of integer products, which a build compiles if it finds a C compiler."""


def run(*command: str | Path, cwd: Path, **options: Any) -> str:
    """What a command prints. It must end with 0."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, text=True, capture_output=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist."""
    built = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", built, cwd=ROOT)
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        sdist.extractall(built, filter="data")
    unpacked = next(path for path in built.iterdir() if path.is_dir())
    environment = dict(os.environ)
    if compiler := shutil.which(environment.get("CC") or "cc"):  # its library is not measured, so it need not be fast
        quick = built / "cc"
        quick.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" -O0\n')
        quick.chmod(0o755)
        environment["CC"] = str(quick)
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built, cwd=unpacked, env=environment)
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The `holdfast` command of an environment with the wheel, and with the dependencies of the one that tests it.

    Those are found through a path file. Python reads no path files in the directory that one names, so the checkout,
    which is installed by such a file, is not to be found.
    """
    directory = wheel.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", directory, cwd=wheel.parent)
    python = directory / "bin" / "python"
    # Few of the modules are imported, so pip need not compile them all.
    options = ("--no-deps", "--no-index", "--no-compile")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=wheel.parent)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=directory).strip())
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return directory / "bin" / "holdfast"


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, Any]:
    """A directory and variables under which nothing leads to the checkout."""
    own = {"XDG_DATA_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "PATH"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {"cwd": tmp_path, "env": {**kept, **own, "PATH": os.defpath}}


def test_every_file_of_the_package_is_in_the_wheel(installed: Path) -> None:
    packages = next((installed.parents[1] / "lib").glob("python*/site-packages"))
    wanted, found = (
        {
            path.relative_to(base)
            for path in (base / "holdfast").rglob("*")
            if path.is_file() and path.parent.name != "__pycache__" and path != base / LIBRARY
        }
        for base in (ROOT, packages)
    )
    assert found == wanted
    assert (packages / LIBRARY).exists() == (shutil.which(os.environ.get("CC") or "cc") is not None)


def test_it_runs_outside_the_checkout(installed: Path, outside: dict[str, Any]) -> None:
    where = run(installed.with_name("python"), "-c", "import holdfast; print(holdfast.__file__)", **outside)
    assert Path(where.strip()).is_relative_to(installed.parents[1])
    assert run(installed, "chat", "-p", "What is 2 plus 2?", **outside).startswith("2 plus 2 is 4.")


@pytest.mark.long
def test_it_serves_the_built_in_model_and_is_measured(installed: Path, outside: dict[str, Any]) -> None:
    command = [str(installed), "serve", "--port", "0", "--max-model-len", "512", "--cache-gb", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **outside)
    assert process.stdout is not None
    try:
        address = next(line for line in process.stdout if line.startswith("  address"))
        url = address.split()[1]
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "holdfast-tiny"
        table = run(
            installed, "bench", "--url", url, "--requests", "2", "--rates", "50", "--output-tokens", "2", **outside
        )
        assert re.search(r"50\.00 +2 +0 ", table)
    finally:
        process.terminate()
        process.communicate()
    assert process.returncode == 0


def test_it_finds_the_profiles_that_come_with_it(installed: Path, outside: dict[str, Any]) -> None:
    command = ("bench", "--simulate", "llama-3-8b@h200", "--requests", "2", "--rates", "1")
    assert "measured" in run(installed, *command, **outside)


def test_extras_that_the_pages_name_exist(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        metadata = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        extras = set(re.findall(r"^Provides-Extra: (\S+)$", packed.read(metadata).decode(), re.MULTILINE))
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("docker/*")]
    named = re.findall(r"holdfast(?:-\*\.whl)?\[([\w,]+)\]", "".join(page.read_text() for page in pages))
    assert named
    assert set(",".join(named).split(",")) <= extras
