"""Keys as values: their scopes, limits and digests, and the parsing of times such as 90d."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Literal, get_args

Scope = Literal["use", "adapters", "operator"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Scopes of keys: `use` generates and stores, `adapters` loads and tunes adapters, `operator` sees all keys' data."""
USE, ADAPTERS, OPERATOR = SCOPES
PREFIX = "sk-holdfast-"
"""Beginning of the keys that Holdfast makes. Scanners for secrets in source code can search for it."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names of keys and tenants. They appear in logs, metrics and queries."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DIGEST_LENGTH = 64
MOST = (1 << 53) - 1
"""Largest limit. JSON and SQLite hold it exactly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a key over all models. None is no limit. Raises ValueError for a limit below 1."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Maximum number of prompt and output tokens per minute."""
    streams: int | None = None
    """Maximum number of requests in progress in one server process."""
    budget_tokens: int | None = None
    """Maximum number of prompt and output tokens per calendar month in UTC."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST:
                raise ValueError(f"{name} is {value}; it must lie between 1 and {MOST}, or be none")


UNLIMITED = Limits()


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A key without its secret. Times are in seconds since 1970. Raises ValueError for an invalid field."""

    name: str
    tenant: str
    """Owner of the data that requests with this key store. Several keys may have the same tenant."""
    scopes: tuple[Scope, ...]
    created: float
    expires: float | None = None
    revoked: float | None = None
    limits: Limits = UNLIMITED

    def __post_init__(self) -> None:
        for field, value in (("name", self.name), ("tenant", self.tenant)):
            if not NAME.fullmatch(value) and not (field == "tenant" and is_digest(value)):
                raise ValueError(
                    f"the {field} of a key is {value[:80]!r}; it must begin with a letter or digit, and have at most "
                    "63 letters, digits, '.', '_' or '-'"
                )
        if not self.scopes:
            raise ValueError(f"the key {self.name} has no scope; give it one of {', '.join(SCOPES)}")
        for scope in self.scopes:
            if scope not in SCOPES:
                raise ValueError(f"a scope of the key {self.name} is {scope!r}; it must be one of {', '.join(SCOPES)}")

    def valid(self, now: float) -> bool:
        """Whether the key is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret of a key. A rotated key has several, until the earlier ones end."""

    key: Key
    until: float | None = None
    """Time at which this secret ends before its key; None if it ends with its key."""

    def valid(self, now: float) -> bool:
        """Whether a request with this secret is accepted."""
        return self.key.valid(now) and (self.until is None or now < self.until)


def is_digest(text: str) -> bool:
    """Whether a text is a digest as `tenant_of_secret` returns it."""
    return len(text) == DIGEST_LENGTH and set(text) <= set("0123456789abcdef")


def new_secret() -> str:
    """Return a new random secret of 256 bits."""
    return PREFIX + secrets.token_urlsafe(32)


def check_secret(secret: str) -> str:
    """Return a secret without surrounding white space. Raises ValueError if no header can carry it."""
    secret = secret.strip()
    if not secret or not secret.isascii() or not secret.isprintable() or " " in secret or "," in secret:
        raise ValueError("the given key is empty or holds something other than visible ASCII without commas")
    return secret


def digest_of(secret: bytes) -> str:
    """Return the digest by which a secret is stored and found.

    It differs from the tenant's digest, which logs and lists show.
    """
    return hashlib.sha256(b"holdfast key\0" + secret).hexdigest()


def tenant_of_secret(secret: str) -> str:
    """Return the tenant of a key that has no other: a digest of its first secret."""
    return hashlib.sha256(b"holdfast tenant\0" + secret.encode()).hexdigest()


def seconds_of(duration: str, name: str) -> float:
    """Parse a duration such as 90d, 12h, 30m or 45s. Raises ValueError that names the option `name`."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", duration.strip())
    if found is None:
        raise ValueError(f"{name} is {duration[:32]!r}; it must look like 90d, 12h, 30m or 45s")
    return float(found[1]) * UNITS[found[2]]
