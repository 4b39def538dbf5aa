"""Fixtures of the tests of whole processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from served import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights that reads and writes bytes."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "bytes")
