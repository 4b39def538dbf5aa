"""Compaction: the summary that stands for a conversation, as an item that clients carry and do not read."""

from __future__ import annotations

import base64
import binascii
import json

from holdfast.server.protocol import ApiError

SUMMARIZE = (
    "Summarize our conversation so far for somebody who goes on with it: what was asked and answered, the facts and "
    "names that were given, and what is still open. Answer with the summary alone."
)
"""What the model is asked at the end of a conversation that is compacted."""
OPENING = "Summary of the conversation so far: "
MOST_TOKENS = 1024
"""Most tokens of a summary, and at most a quarter of the context, unless the client says otherwise."""


def encode_summary(summary: str) -> str:
    """A summary as the `encrypted_content` of an item. It holds nothing that its client may not see."""
    return base64.urlsafe_b64encode(json.dumps({"summary": summary}).encode()).decode()


def decode_summary(encoded: object, name: str) -> str:
    """The summary in an `encrypted_content`. Raises ApiError for anything that `encode_summary` has not made."""
    try:
        return str(json.loads(base64.urlsafe_b64decode(str(encoded).encode("ascii")))["summary"])
    except (ValueError, binascii.Error, LookupError, TypeError, RecursionError):
        reason = f"{name} was not made by this server's /v1/responses/compact"
        raise ApiError(reason, param=name, code="invalid_value") from None
