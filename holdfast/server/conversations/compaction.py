"""Compaction: what stands for a conversation, as one item that clients carry and do not read.

It holds a summary. The user's messages stand before it as they are, as in OpenAI's API.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import NamedTuple

import msgspec

from holdfast.server.protocol import ApiError, check_items

SUMMARIZE = (
    "Summarize our conversation so far for somebody who goes on with it: what was asked and answered, the facts and "
    "names that were given, and what is still open. Answer with the summary alone."
)
"""What the model is asked at the end of a conversation that is compacted."""
OPENING = "Summary of the conversation so far: "
MOST_TOKENS = 1024
"""Most tokens of a summary, and at most a quarter of the context, unless the client says otherwise."""


class Compacted(NamedTuple):
    """What stands for a conversation."""

    summary: str
    said: list[str] = []  # noqa: RUF012  never changed
    """The user's messages, in items that earlier versions made."""


def encode_compacted(compacted: Compacted) -> str:
    """It as the `encrypted_content` of an item, which holds nothing that its client may not see."""
    return base64.urlsafe_b64encode(json.dumps(compacted._asdict()).encode()).decode()


class _Sealed(msgspec.Struct):
    """The JSON object within an `encrypted_content`."""

    summary: str
    said: list[str] = []


def decode_compacted(encoded: object, name: str) -> Compacted:
    """What an `encrypted_content` holds. Raises ApiError for anything that `encode_compacted` has not made.

    It counts as JSON of its own, because the check of the body that it came in cannot see into it.
    """
    try:
        data = base64.urlsafe_b64decode(str(encoded).encode("ascii"))
        check_items(data, name, name)
        found = msgspec.json.decode(data, type=_Sealed)
        return Compacted(found.summary, found.said)
    except (ValueError, binascii.Error, RecursionError, msgspec.MsgspecError):
        reason = f"{name} was not made by this server's /v1/responses/compact"
        raise ApiError(reason, param=name, code="invalid_value") from None
