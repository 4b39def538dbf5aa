"""Collects the sockets that Tinker's client leaves open, in the module of tests that has used it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """Collect unclosed sockets while their warnings are ignored. In the next module each would fail a test."""
    yield
    gc.collect()
