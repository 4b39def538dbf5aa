"""Saved conversations of `holdfast chat`: names for what a turn goes on from, in a file of the user's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from holdfast.cli.talkers import ChatError, Head

LAST = "last"
"""The name under which every turn is saved."""
MAX_NAME = 64


class Bookmark(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a conversation."""

    head: Head
    system: str | None = None
    turns: int = 0
    said: str = ""
    """What the user said last, for the list."""


class Bookmarks:
    """The bookmarks of one place: a server, or our own engine."""

    def __init__(self, path: Path, place: str) -> None:
        self.path = path
        self.place = place

    def all(self) -> dict[str, Bookmark]:
        """Every bookmark by its name. Raises ChatError when the file cannot be read."""
        return self._read().get(self.place, {})

    def save(self, name: str, bookmark: Bookmark) -> None:
        """Set a bookmark. The file is replaced whole. Raises ChatError."""
        if not name.isprintable() or not 1 <= len(name) <= MAX_NAME:
            raise ChatError(f"a name has up to {MAX_NAME} visible characters")
        places = self._read()
        places.setdefault(self.place, {})[name] = bookmark
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)  # for us alone
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(places)))
            Path(temporary).replace(self.path)
        except OSError as error:
            raise ChatError(f"{self.path} cannot be written: {error.strerror}") from None

    def load(self, name: str) -> Bookmark:
        """The bookmark of this name. Raises ChatError that says which there are."""
        found = self.all()
        if name not in found:
            raise ChatError(f"there is no conversation {name!r}; /conversations lists what there is")
        return found[name]

    def _read(self) -> dict[str, dict[str, Bookmark]]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, dict[str, Bookmark]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            raise ChatError(f"{self.path} cannot be read: {error}") from None
