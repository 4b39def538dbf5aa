"""The library of integer products as the checkout's sources make it, for tests."""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

import hatch_build
from holdfast.lm.kernels.integer.library import Library, open_library


@cache
def _compiled() -> Library | None:
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
