"""Compaction: replaces a conversation by one opaque item that clients carry.

The item holds a summary. The user's messages stay before it unchanged, as in OpenAI's API.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import NamedTuple

import msgspec

from holdfast.server.protocol import check_items, invalid

SUMMARIZE = (
    "Summarize our conversation so far for somebody who goes on with it: what was asked and answered, the facts and "
    "names that were given, and what is still open. Answer with the summary alone."
)
"""Request for a summary, put to the model at the end of a conversation that is compacted."""
OPENING = "Summary of the conversation so far: "
MOST_TOKENS = 1024
"""Maximum number of tokens of a summary, unless the client gives one. A quarter of the context is also a limit."""


class Compacted(NamedTuple):
    """The summary that replaces a conversation."""

    summary: str
    said: list[str] = []  # noqa: RUF012  never changed
    """Texts of the user's messages. Only items of earlier versions of Holdfast have them."""


def encode_compacted(compacted: Compacted) -> str:
    """Encode a compaction as the `encrypted_content` of an item. It is not encrypted: the client knows it all."""
    return base64.urlsafe_b64encode(json.dumps(compacted._asdict()).encode()).decode()


class _Sealed(msgspec.Struct):
    """JSON object within an `encrypted_content`."""

    summary: str
    said: list[str] = []


def decode_compacted(encoded: object, name: str) -> Compacted:
    """Decode an `encrypted_content`. Raises ApiError for a value that `encode_compacted` did not make.

    Checks the size of the decoded JSON, because the check of the request body does not decode it.
    """
    try:
        data = base64.urlsafe_b64decode(str(encoded).encode("ascii"))
        check_items(data, name, name)
        found = msgspec.json.decode(data, type=_Sealed)
        return Compacted(found.summary, found.said)
    except (ValueError, binascii.Error, RecursionError, msgspec.MsgspecError):
        raise invalid(f"{name} was not made by this server's /v1/responses/compact", name) from None
