"""The library of integer products as the checkout's sources make it, for tests."""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

import hatch_build
from holdfast.lm.kernels.integer.library import FILE, Library, open_library


def _is_current() -> bool:
    """Whether the checkout has its own library, compiled after its sources were last changed, as `make setup` does."""
    sources = [Path(hatch_build.__file__), *hatch_build.SOURCES.glob("*.[ch]")]
    return FILE.exists() and FILE.stat().st_mtime > max(source.stat().st_mtime for source in sources)


@cache
def _compiled() -> Library | None:
    if _is_current():
        return open_library(FILE)
    with tempfile.TemporaryDirectory() as place:  # a loaded library needs no name
        try:
            return open_library(hatch_build.compiled(Path(place)))
        except OSError:
            return None
        except subprocess.CalledProcessError as error:
            raise AssertionError(error.stderr) from None


def integer_library() -> Library:
    """The library. Skips the test without a C compiler."""
    found = _compiled()
    if found is None:
        pytest.skip("needs a C compiler, and PyTorch with GNU OpenMP")
    return found
