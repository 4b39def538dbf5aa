"""Writes files of results that a user named. An error names the file, also that of a full disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raises OSError with the path and the reason if writing the file fails within the context."""
    try:
        yield
    except OSError as error:  # That of a full disk names no file.
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from None


def write_result(path: str | Path, text: str) -> None:
    """Write a text in UTF-8. Raises OSError that names the file."""
    with writing(path):
        Path(path).write_text(text, encoding="utf-8")
