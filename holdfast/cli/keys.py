"""`holdfast keys`: adds, lists, rotates, limits and revokes the API keys in a server's store."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Literal

from holdfast.cli.flags import CommandError
from holdfast.core.config import option
from holdfast.files.regular import read_text
from holdfast.server.conversations.database import FAILURES, MEMORY, Database, migrate, place, reason_of, shown
from holdfast.server.keys.tables import KeyTable
from holdfast.server.keys.values import (
    USE,
    Key,
    Limits,
    check_secret,
    digest_of,
    new_secret,
    seconds_of,
    tenant_of_secret,
)
from holdfast.server.schema import SCHEMA

ACTIONS = ("add", "list", "rotate", "limit", "revoke")
TAKES: Mapping[str, tuple[str, ...]] = {
    "add": ("tenant", "scope", "expires", "from_key_file", *(field.name for field in fields(Limits))),
    "rotate": ("overlap", "expires", "from_key_file"),
    "limit": tuple(field.name for field in fields(Limits)),
}
"""Options of each action, besides `store`."""


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    """Options of `holdfast keys`. Raises ValueError for an invalid option."""

    store: str | None = option(
        None, "the server's store: a file or a database URL; default: that of `holdfast serve` without --store"
    )
    tenant: str | None = option(
        None,
        "owner of the key's conversations, shown by `list`; keys of one tenant share them; default: the key's own",
    )
    scope: tuple[str, ...] = option(
        (), "what the key may do: use (default), adapters or operator; repeat it for several"
    )
    expires: str | None = option(None, "time after which the key ends, as 90d, 12h, 30m or 45s; default: never")
    overlap: str = option("0s", "time for which `rotate` still accepts the earlier key, as 1h")
    from_key_file: str | None = option(
        None,
        "file with the key to store, or - for standard input, instead of a new one; a key of HOLDFAST_API_KEY keeps "
        "its conversations",
    )
    requests_per_minute: int | Literal["none"] | None = option(None, "most requests per minute, or none")
    tokens_per_minute: int | Literal["none"] | None = option(
        None, "most tokens per minute, of prompts and answers, or none"
    )
    streams: int | Literal["none"] | None = option(None, "most requests in progress at once, or none")
    budget_tokens: int | Literal["none"] | None = option(
        None, "most tokens per calendar month (UTC), of prompts and answers, or none"
    )

    def __post_init__(self) -> None:
        for name in ("expires", "overlap"):
            if (given := getattr(self, name)) is not None:
                seconds_of(given, name)
        self.limits()

    def limits(self) -> Limits:
        """Return the given limits."""
        return Limits(**self.changes())

    def changes(self) -> dict[str, int | None]:
        """Return the limits that are given, by field of `Limits`."""
        given = {field.name: getattr(self, field.name) for field in fields(Limits)}
        return {name: None if value == "none" else value for name, value in given.items() if value is not None}

    def check(self, action: str | None, name: str | None) -> None:
        """Raises ValueError if the action is unknown, or has a name or an option that it does not take or lacks."""
        if action not in ACTIONS:
            raise ValueError(f"ACTION is {action or 'missing'}; it must be one of {', '.join(ACTIONS)}")
        if (name is None) != (action == "list"):
            raise ValueError("list takes no NAME" if name else f"{action} needs the NAME of the key")
        for field in fields(self):
            used = field.name == "store" or field.name in TAKES.get(action, ())
            if not used and getattr(self, field.name) != field.default:
                raise ValueError(f"--{field.name.replace('_', '-')} has no meaning for {action}")
        if action == "limit" and not self.changes():
            raise ValueError(
                "limit needs one of --requests-per-minute, --tokens-per-minute, --streams, --budget-tokens"
            )


def run(config: KeysConfig, action: str | None, name: str | None) -> int:
    """Run one action on the keys in the store. Returns the exit code. Raises ValueError, CommandError."""
    config.check(action, name)
    where = place(config.store)
    if where == MEMORY:
        raise ValueError("the store is memory, which no other program can reach; give the store of a server")
    try:
        with closing(Database(where)) as database:
            with database.write() as db:
                migrate(db, SCHEMA)
            table = KeyTable(database)
            if action == "list":
                show(table.all())
            else:
                RUNS[str(action)](config, table, str(name))
    except ModuleNotFoundError as error:
        raise CommandError(f"the store needs the package {error.name}; pip install 'holdfast[postgres]'") from None
    except FAILURES as error:
        reason = reason_of(error)
        raise CommandError(f"the store {shown(where)} cannot be used: {reason}") from None
    return 0


def add(config: KeysConfig, table: KeyTable, name: str) -> None:
    """Add a key. Prints a new secret."""
    secret, now = secret_for(config), time.time()
    key = Key(
        name=name,
        tenant=config.tenant or tenant_of_secret(secret),
        scopes=tuple(dict.fromkeys(config.scope)) or (USE,),  # type: ignore[arg-type]  # Key checks them.
        created=now,
        expires=None if config.expires is None else now + seconds_of(config.expires, "expires"),
        limits=config.limits(),
    )
    table.add(key, digest_of(secret.encode()))
    reveal(config, secret, f"added {name}, tenant {key.tenant}, scopes {', '.join(key.scopes)}, {end_of(key)}")


def rotate(config: KeysConfig, table: KeyTable, name: str) -> None:
    """Give a key a new secret. Prints it."""
    secret, overlap = secret_for(config), seconds_of(config.overlap, "overlap")
    expires = None if config.expires is None else time.time() + seconds_of(config.expires, "expires")
    key = table.rotate(name, digest_of(secret.encode()), overlap, expires)
    reveal(config, secret, f"rotated {name}; the earlier key ends in {config.overlap}, and the new one {end_of(key)}")


def limit(config: KeysConfig, table: KeyTable, name: str) -> None:
    """Change the given limits of a key."""
    say(f"{name}: {limits_of(table.limit(name, config.changes()))}")


def revoke(config: KeysConfig, table: KeyTable, name: str) -> None:
    """Revoke a key."""
    table.revoke(name)
    say(f"revoked {name}; servers refuse it within some seconds")


RUNS: Mapping[str, Callable[[KeysConfig, KeyTable, str], None]] = {
    "add": add, "rotate": rotate, "limit": limit, "revoke": revoke,
}  # fmt: skip


def secret_for(config: KeysConfig) -> str:
    """Return the secret of the file or of standard input, or a new one. Raises ValueError, OSError."""
    if config.from_key_file is None:
        return new_secret()
    return check_secret(sys.stdin.read() if config.from_key_file == "-" else read_text(config.from_key_file))


def reveal(config: KeysConfig, secret: str, what: str) -> None:
    """Print a new secret alone on standard output, so that a script can read it. A secret from a file is not shown."""
    say(what)
    if config.from_key_file is None:
        say("this is the only time that the key is shown:")
        print(secret)


def say(text: str) -> None:
    """Print a line for people, on standard error."""
    print(text, file=sys.stderr)


def show(keys: list[Key]) -> None:
    """Print a table of keys."""
    now = time.time()
    rows = [("NAME", "STATE", "SCOPES", "CREATED", "LIMITS", "TENANT")]
    for key in keys:
        state = end_of(key) if key.valid(now) else "revoked" if key.revoked is not None else "expired"
        rows.append((key.name, state, ",".join(key.scopes), day_of(key.created), limits_of(key), key.tenant))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def limits_of(key: Key) -> str:
    """Return a key's limits in words."""
    words = {"requests_per_minute": "requests/min", "tokens_per_minute": "tokens/min", "streams": "streams",
             "budget_tokens": "tokens/month"}  # fmt: skip
    given: dict[str, Any] = {name: getattr(key.limits, name) for name in words}
    return ", ".join(f"{given[name]:,} {word}" for name, word in words.items() if given[name] is not None) or "none"


def end_of(key: Key) -> str:
    """Return when a key ends, in words."""
    return "never ends" if key.expires is None else f"ends {day_of(key.expires)}"


def day_of(seconds: float) -> str:
    """Return a time as a day and a minute in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
