"""The code of the version before, from this repository's history, for tests of upgrades."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BEFORE = "0660c574"
"""The commit whose code is the version before."""


def unpack(place: Path) -> Path:
    """Write the package of the version before to a directory, and return that. Skips the test without the history."""
    archive = subprocess.run(["git", "archive", BEFORE, "holdfast"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history of this repository has no {BEFORE}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(place, filter="data")
    return place
