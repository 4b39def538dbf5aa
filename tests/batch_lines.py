"""Lines of batches, for tests of files, batches and the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

CHAT = "/v1/chat/completions"


def line(custom_id: str, content: str = "hello", **body: Any) -> dict[str, Any]:
    """A line that asks for a chat completion."""
    messages = [{"role": "user", "content": content}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "tiny", "messages": messages} | body,
    }


def jsonl(lines: Sequence[Any]) -> bytes:
    """Lines of a file."""
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)
