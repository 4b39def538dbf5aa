"""Fixtures of kernel tests: the device of Triton's kernels, and the library in C with each set of instructions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from holdfast.lm.kernels.integer.library import LEVELS, Library
from tests.compiled import integer_library


@pytest.fixture
def device() -> str:
    """The device whose tensors the Triton kernels accept: a GPU if there is one, else a CPU under the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=range(len(LEVELS)), ids=["portable", "avx2", "avx512"])
def library(request: pytest.FixtureRequest) -> Library:
    """The library with one set of instructions."""
    found = integer_library()
    if request.param > found.level:
        pytest.skip(f"this CPU has no {LEVELS[request.param]}")
    return replace(found, level=request.param)
