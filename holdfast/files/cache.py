"""The user's directory of files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Holdfast's directory within the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast"


def gguf_cache() -> Path:
    """The directory of the directories that stand for GGUF files."""
    return cache_directory() / "gguf"
