"""Installs with and without the library of integer products."""

from __future__ import annotations

import pytest

from tests.compiled import integer_library


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """An install without the library."""
    monkeypatch.setattr("holdfast.lm.kernels.integer.library.library", lambda: None)


@pytest.fixture
def with_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """An install with the library, as the checkout's sources make it."""
    found = integer_library()
    monkeypatch.setattr("holdfast.lm.kernels.integer.library.library", lambda: found)
