"""Items: messages, reasoning, calls and their results, in the API's shape and as messages for chat templates.

A compaction is one opaque item, carried by the client, that replaces a conversation. It holds a summary. The user's
messages stay before it unchanged, as in OpenAI's API.
"""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.server.conversations.values import Item
from holdfast.server.protocol import (
    MAX_MESSAGES,
    ROLES,
    check_arguments,
    check_items,
    check_parts,
    checked_role,
    invalid,
    past_call,
    refuse_extra,
    shown,
    text_parts,
)  # fmt: skip
from holdfast.server.search import FAILED, SEARCH_TOOL, Result, format_results

TEXT_KINDS = ("input_text", "output_text", "text")
ITEM_FIELDS = ("type", "id", "status", "role", "content", "phase")
CALL_FIELDS = ("type", "id", "status", "call_id", "name", "arguments", "namespace")
SEARCH_FIELDS = ("type", "id", "status", "action", "results")
RESULT_FIELDS = ("type", "id", "status", "call_id", "output")
REASONING_FIELDS = ("type", "id", "status", "summary", "content", "encrypted_content")
SUMMARIZE = (
    "Summarize our conversation so far for somebody who goes on with it: what was asked and answered, the facts and "
    "names that were given, and what is still open. Answer with the summary alone."
)
"""Request for a summary, put to the model at the end of a conversation that is compacted."""
OPENING = "Summary of the conversation so far: "
MOST_TOKENS = 1024
"""Maximum number of tokens of a summary, unless the client gives one. A quarter of the context is also a limit."""


def new_id(kind: str) -> str:
    """Return an unguessable id such as resp_…, msg_… or conv_…."""
    return f"{kind}_{uuid.uuid4().hex}"


def new_item(role: str, *texts: str) -> Item:
    """Return a message as a completed item."""
    content = [output_text(text) if role == "assistant" else {"type": "input_text", "text": text} for text in texts]
    return {"id": new_id("msg"), "type": "message", "status": "completed", "role": role, "content": content}


def output_text(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return text as a content part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_item(name: str, call_id: str, arguments: str = "") -> Item:
    """Return a call as a completed item."""
    return {
        "id": new_id("fc"), "type": "function_call", "status": "completed", "call_id": call_id, "name": name,
        "arguments": arguments,
    }  # fmt: skip


def search_item() -> Item:
    """Return an item for a web search that the model asks for."""
    return {
        "id": new_id("ws"), "type": "web_search_call", "status": "in_progress",
        "action": {"type": "search", "query": "", "sources": []}, "results": [],
    }  # fmt: skip


def searched_item(item: Item, query: str, results: list[Result] | None) -> Item:
    """Return the item of a search that has ended. `results` is None if the search failed."""
    sources = [{"type": "url", "url": page["url"]} for page in results or ()]
    return item | {
        "status": "failed" if results is None else "completed",
        "action": {"type": "search", "query": query, "sources": sources}, "results": results or [],
    }  # fmt: skip


def reasoning_item(*texts: str) -> Item:
    """Return reasoning as a completed item, without a summary."""
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"id": new_id("rs"), "type": "reasoning", "status": "completed", "summary": [], "content": content}


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


def read_items(given: Sequence[Mapping[str, Any]], name: str) -> list[Item]:
    """Convert a client's items to stored items with new ids.

    Raises ApiError for a value that is not an item, and for too many content parts or messages.
    """
    check_parts(given, name)
    check_arguments((text for item in given if isinstance(text := item.get("arguments"), str)), name)
    items: list[Item] = []
    expanded = 0
    for index, item in enumerate(given):
        place = f"{name}[{index}]"
        if item.get("type") == "compaction":
            refuse_extra(item, ("type", "id", "encrypted_content", "created_by"), place)
            found = decode_compacted(item.get("encrypted_content"), f"{place}.encrypted_content")
            expanded += len(found.said) + 1
            if expanded > MAX_MESSAGES:
                reason = f"the compactions in {name} stand for {expanded} messages or more; at most {MAX_MESSAGES}"
                raise invalid(reason, name)
            items += _expanded(found)
        else:
            items.append(_read_item(item, place))
    return items


def _expanded(found: Compacted) -> list[Item]:
    """Return the items of a compaction: the user's messages, then the summary."""
    return [*(new_item("user", text) for text in found.said), new_item("assistant", f"{OPENING}{found.summary}")]


def unfolded(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, with each compaction replaced by its content."""
    for item in items:
        if item["type"] == "compaction":
            yield from _expanded(decode_compacted(item["encrypted_content"], "compaction"))
        else:
            yield item


def _read_item(item: Mapping[str, Any], name: str) -> Item:
    match item.get("type", "message"):
        case "message":
            role = checked_role(item, name)
            refuse_extra(item, ITEM_FIELDS, name)
            return new_item(role, *text_parts(item.get("content"), f"{name}.content", TEXT_KINDS))
        case "function_call":
            refuse_extra(item, CALL_FIELDS, name)
            called, call_id = (_string(item, field, name) for field in ("name", "call_id"))
            return call_item(called, call_id, _string(item, "arguments", name, empty=True))
        case "function_call_output":
            refuse_extra(item, RESULT_FIELDS, name)
            output = text_parts(item.get("output"), f"{name}.output", TEXT_KINDS)
            return {
                "id": new_id("fco"), "type": "function_call_output", "status": "completed",
                "call_id": _string(item, "call_id", name), "output": "\n".join(output),
            }  # fmt: skip
        case "web_search_call":
            refuse_extra(item, SEARCH_FIELDS, name)
            return _read_search(item, name)
        case "reasoning":
            refuse_extra(item, REASONING_FIELDS, name)
            content = item.get("content")
            return reasoning_item(*(text_parts(content, f"{name}.content", ("reasoning_text",)) if content else ()))
        case kind:
            reason = (
                f"{name}.type is {shown(kind)}; supported: message, function_call, function_call_output, "
                "web_search_call, reasoning, compaction"
            )
            raise invalid(reason, f"{name}.type", "unsupported_content")


def _search_call(item: Item) -> dict[str, Any]:
    """Return a web search as a function call, which the model wrote."""
    arguments = {"query": item["action"]["query"]}
    return {"id": item["id"], "type": "function", "function": {"name": SEARCH_TOOL.name, "arguments": arguments}}


def _read_search(item: Mapping[str, Any], name: str) -> Item:
    """Read a search with its results, in the shape of this server's answers. Raises ApiError."""
    action, found = item.get("action"), item.get("results")
    query = action.get("query") if isinstance(action, Mapping) else None
    if not isinstance(query, str):
        path = f"{name}.action.query"
        raise invalid(f"{path} must be a string", path)
    results: list[Result] = []
    for index, page in enumerate(found if isinstance(found, list) else ()):
        path = f"{name}.results[{index}]"
        if not isinstance(page, Mapping):
            raise invalid(f"{path} must be an object", path)
        refuse_extra(page, ("title", "url", "text"), path)
        results.append({field: _string(page, field, path, empty=True) for field in ("title", "url", "text")})
    return searched_item(search_item(), query, None if item.get("status") == "failed" else results)


def _string(item: Mapping[str, Any], field: str, name: str, *, empty: bool = False) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not (value or empty):
        path = f"{name}.{field}"
        raise invalid(f"{path} must be a string", path)
    return value


def text_size(instructions: str, items: Sequence[Item]) -> int:
    """Return the number of characters in a turn's instructions and in the texts of its own items."""
    parts = (part for item in items for part in item.get("content", ()))
    others = sum(len(item.get("output", "")) + len(item.get("arguments", "")) for item in items)
    others += sum(len(page["text"]) for item in items for page in item.get("results", ()))
    return len(instructions) + others + sum(len(part["text"]) for part in parts)


def messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages for the chat template: the turn's instructions first, then all items.

    Reasoning and calls are merged into the adjacent message of the assistant.
    """
    said: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[str, str] = {}
    answering: dict[str, Any] | None = None
    """The assistant's message to which calls may be added."""
    for item in unfolded(items):
        match item["type"]:
            case "message":
                role, content = ROLES[item["role"]], "\n".join([part["text"] for part in item["content"]])
                if role == "assistant" and answering is not None and answering.keys() == {"role", "reasoning_content"}:
                    answering["content"] = content
                    continue
                said.append({"role": role, "content": content})
                answering = said[-1] if role == "assistant" else None
            case "function_call_output":
                call = item["call_id"]
                said.append({"role": "tool", "content": item["output"], "tool_call_id": call})
                if call in names:
                    said[-1]["name"] = names[call]
                answering = None
            case "reasoning":
                thought = "\n".join(part["text"] for part in item["content"])
                answering = {"role": "assistant", "reasoning_content": thought}
                said.append(answering)
            case "function_call" | "web_search_call" as kind:
                if answering is None:
                    answering = {"role": "assistant"}
                    said.append(answering)
                searched = kind == "web_search_call"
                call = _search_call(item) if searched else past_call(item["call_id"], item["name"], item["arguments"])
                answering.setdefault("tool_calls", []).append(call)
                if searched:
                    found = format_results(item["results"]) if item["status"] == "completed" else FAILED
                    said.append({"role": "tool", "content": found, "tool_call_id": item["id"]})
                    said[-1]["name"] = SEARCH_TOOL.name
                    answering = None
                else:
                    names[item["call_id"]] = item["name"]
    for message in said:
        message.setdefault("content", "")
    return [message for message in said if message.keys() != {"role", "content", "reasoning_content"}
            or message["content"]]  # fmt: skip
