"""Repeats: a request that a client sends again with the same Idempotency-Key gets the turn of its first attempt."""

from __future__ import annotations

import hashlib

import msgspec
from fastapi import Request

from holdfast.server.conversations.protocol import ResponseRequest
from holdfast.server.protocol import invalid

HEADER = "idempotency-key"
REPEATED = {"idempotent-replayed": "true"}
"""Header of a reply that gives the turn of an earlier attempt."""
MOST_CHARACTERS = 255
"""Most characters of a key."""
ID_DIGITS = 48
"""Number of hexadecimal digits of a response's id that follows from a key."""


def id_of(request: Request, wanted: ResponseRequest, tenant: str) -> str:
    """Return the id of the response that a request with a key asks for; empty without a key.

    The id follows from the tenant, the key and the body. So a second attempt finds the turn of the first one, and the
    same key with another body is another turn. A response that is not stored cannot be found again, so its key has no
    effect. Raises ApiError for a key that is empty or too long.
    """
    key = request.headers.get(HEADER)
    if key is None or not wanted.store:
        return ""
    if not 0 < len(key) <= MOST_CHARACTERS:
        raise invalid(f"{HEADER} has {len(key)} characters; it must have 1 to {MOST_CHARACTERS}", HEADER)
    body = msgspec.msgpack.encode(wanted)
    parts = (tenant.encode(errors="surrogatepass"), key.encode(errors="surrogatepass"), body)
    lengths = b"".join(len(part).to_bytes(8, "little") for part in parts)
    return f"resp_{hashlib.sha256(lengths + b''.join(parts)).hexdigest()[:ID_DIGITS]}"
