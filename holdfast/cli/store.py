"""`holdfast store`: checks the store of conversations, or copies it while a server uses it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.core.config import option
from holdfast.server.conversations.database import place
from holdfast.server.conversations.maintenance import backup, check

ACTIONS = ("check", "backup")
"""Values of ACTION."""


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Options of `holdfast store`."""

    store: str | None = option(
        None, "the store: a SQLite file; default: holdfast/conversations.sqlite in the user's data directory"
    )


def run(config: StoreConfig, action: str | None, file: str | None) -> int:
    """Do what ACTION says. Returns the exit code. Raises ValueError for bad usage, and StoreError."""
    if action not in ACTIONS:
        raise ValueError(f"ACTION is {action or 'missing'}; it must be one of {', '.join(ACTIONS)}")
    if (file is not None) != (action == "backup"):
        reason = "name the FILE of the backup" if file is None else f"{action} takes no FILE, and {file} is given"
        raise ValueError(reason)
    where = place(config.store)
    if file is not None:
        print(f"{backup(where, Path(file))} bytes in {file}")
        return 0
    held = check(where)
    print(f"{where} is whole: {held.conversations} conversations, {held.items} items, {held.bytes} bytes of content")
    return 0
