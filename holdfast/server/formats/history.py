"""Converts past calls and their results for chat templates, also for templates without tools."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.server.formats.toolset import Toolset

Message = dict[str, Any]

LETTERS = string.ascii_letters + string.digits
EXPLAINED = """\
You may call these functions to answer the user; each line has the JSON schema of one:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between tags, and nothing after them:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
You will get its result between <tool_response> and </tool_response>."""
"""Text that describes the tools in a system message, for a template without tools."""


def spelled_out(messages: Sequence[Message], toolset: Toolset | None) -> list[Message]:
    """Convert messages for a template without tools. Calls and results become text in Hermes' format."""
    said = [_plain(message) for message in messages]
    if toolset is None:
        return said
    tools = "\n".join(json.dumps(tool.shown()["function"], ensure_ascii=False) for tool in toolset.tools)
    text = EXPLAINED.format(tools=tools)
    if said and said[0]["role"] == "system":
        return [said[0] | {"content": f"{said[0]['content']}\n\n{text}"}, *said[1:]]
    return [{"role": "system", "content": text}, *said]


def _plain(message: Message) -> Message:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [_spelled(call["function"]) for call in message.get("tool_calls", ())]
    return {"role": message["role"], "content": "\n".join(filter(None, (content, *calls)))}


def _spelled(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def short_ids(messages: Sequence[Message]) -> list[Message]:
    """Replace the ids of calls by nine letters and digits, which Mistral's templates require."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Message) -> Message:
    if "tool_call_id" in message:
        message = message | {"tool_call_id": _short(message["tool_call_id"])}
    if "tool_calls" in message:
        message = message | {"tool_calls": [call | {"id": _short(call["id"])} for call in message["tool_calls"]]}
    return message


def _short(id: str) -> str:
    """Return an id of nine letters and digits: the id itself if it has this form, otherwise its digest."""
    if re.fullmatch("[A-Za-z0-9]{9}", id):
        return id
    number = int.from_bytes(hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest())
    return "".join(LETTERS[number // len(LETTERS) ** place % len(LETTERS)] for place in range(9))


def as_thinking(messages: Sequence[Message]) -> list[Message]:
    """Move reasoning to the field that GPT-OSS's template reads.

    A message with text loses its reasoning, because the template accepts only one of them.
    """
    return [_with_thinking(message) if "reasoning_content" in message else message for message in messages]


def _with_thinking(message: Message) -> Message:
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return kept if message.get("content") else kept | {"thinking": message["reasoning_content"]}


def settled(messages: Sequence[Message]) -> list[Message]:
    """Remove the reasoning of finished turns. Only the turn after the last user message keeps its reasoning."""
    last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        {key: value for key, value in message.items() if key != "reasoning_content"} if at < last else message
        for at, message in enumerate(messages)
    ]
