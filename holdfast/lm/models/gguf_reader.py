"""Opens GGUF files, without loading PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.files.regular import name_of_regular
from holdfast.lm.models.checkpoint_errors import DamagedCheckpoint, UnsupportedCheckpoint

GGUF_FILE = "gguf.json"
"""The file that names the GGUF file of a checkpoint whose directory holds no weights."""


def read_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` of one file. Raises UnsupportedCheckpoint and DamagedCheckpoint."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UnsupportedCheckpoint("GGUF files need the package gguf: pip install 'holdfast[gguf]'") from None
    try:
        with name_of_regular(path) as name:
            return GGUFReader(name)
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a cut or hostile header raises many kinds
        raise DamagedCheckpoint(f"{path.name} cannot be read as GGUF: {type(error).__name__}: {error}") from None
