"""Items: messages, reasoning, calls and their results, in the API's shape and as messages for chat templates.

A compaction is one opaque item, carried by the client, that replaces a conversation. It holds a summary. If the client
asks for one, the user's messages stay before it unchanged, as in OpenAI's API. If a response makes one at its
threshold, it replaces all items before it, and holds what must stay of them.
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
from holdfast.server.formats.custom import input_arguments
from holdfast.server.protocol import (
    MAX_MESSAGES,
    REFUSAL,
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
from holdfast.server.remote_tools.hub import failure_text
from holdfast.server.remote_tools.values import RemoteTool
from holdfast.server.remote_tools.values import Result as RemoteResult
from holdfast.server.search import FAILED, SEARCH_TOOL, Result, format_results

TEXT_KINDS = ("input_text", "output_text", "text")
ITEM_FIELDS = ("type", "id", "status", "role", "content", "phase")
CALL_FIELDS = ("type", "id", "status", "call_id", "name", "arguments", "namespace")
SEARCH_FIELDS = ("type", "id", "status", "action", "results")
CUSTOM_FIELDS = ("type", "id", "status", "call_id", "name", "input", "namespace")
RESULT_FIELDS = ("type", "id", "status", "call_id", "output")
LIST_FIELDS = ("type", "id", "status", "server_label", "tools", "error")
REMOTE_FIELDS = (
    "type", "id", "status", "server_label", "name", "arguments", "output", "error", "approval_request_id",
)  # fmt: skip
RESULT_IDS = {"function_call_output": "fco", "custom_tool_call_output": "ctco"}
"""Prefix of ids by type of result."""
CLIENT_CALLS = ("function_call", "custom_tool_call")
"""Types of calls that the client makes."""
REQUEST_FIELDS = ("type", "id", "status", "server_label", "name", "arguments")
APPROVAL_FIELDS = ("type", "id", "status", "approval_request_id", "approve", "reason")
MOST_LISTED = 1024
"""Maximum number of tools in one list that a client sends back."""
AWAITED = "The user has not approved this call."
"""Text that the model reads instead of a result, for a call that was not approved."""
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


def custom_item(name: str, call_id: str, text: str = "") -> Item:
    """Return a call of a custom tool as a completed item."""
    return {
        "id": new_id("ctc"), "type": "custom_tool_call", "status": "completed", "call_id": call_id, "name": name,
        "input": text,
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


def list_item(label: str) -> Item:
    """Return an item for the list of a remote server's tools, before it is known."""
    return {"id": new_id("mcpl"), "type": "mcp_list_tools", "server_label": label, "tools": [], "error": None}


def remote_item(tool: RemoteTool, arguments: str = "", approval: str | None = None) -> Item:
    """Return an item for a call of a remote tool. `approval` is the id of the request that the user has approved."""
    return {
        "id": new_id("mcp"), "type": "mcp_call", "status": "in_progress", "approval_request_id": approval,
        "server_label": tool.server.label, "name": tool.name, "arguments": arguments, "output": None, "error": None,
    }  # fmt: skip


def called_item(item: Item, result: RemoteResult) -> Item:
    """Return the item of a remote call that has ended."""
    error = None if result.error is None else dict(result.error)
    return item | {"status": "failed" if error else "completed", "output": result.output, "error": error}


def request_item(tool: RemoteTool) -> Item:
    """Return an item that asks the user to approve a call."""
    return {
        "id": new_id("mcpr"), "type": "mcp_approval_request", "server_label": tool.server.label, "name": tool.name,
        "arguments": "",
    }  # fmt: skip


class Compacted(NamedTuple):
    """The summary that replaces a conversation."""

    summary: str
    said: list[str] = []  # noqa: RUF012  never changed
    """Texts of the user's messages. Only items of earlier versions of Holdfast have them."""
    whole: bool = False
    """Whether it replaces all items before it."""
    system: list[str] = []  # noqa: RUF012  never changed
    """Texts of the system messages that it replaces."""
    last: list[str] = []  # noqa: RUF012  never changed
    """Text of the user's last message, which follows the summary; empty: there is none."""


def compaction_item() -> Item:
    """Return an item for a compaction, before there is a summary."""
    return {"id": new_id("cmp"), "type": "compaction", "encrypted_content": ""}


def replacing(summary: str, items: Sequence[Item]) -> Compacted:
    """Return the compaction that replaces all these items by a summary."""
    said = [(item["role"], "\n".join(part["text"] for part in item["content"])) for item in unfolded(items)
            if item["type"] == "message"]  # fmt: skip
    system = [text for role, text in said if ROLES[role] == "system"]
    return Compacted(summary, [], True, system, [text for role, text in said if role == "user"][-1:])


def encode_compacted(compacted: Compacted) -> str:
    """Encode a compaction as the `encrypted_content` of an item. It is not encrypted: the client knows it all."""
    return base64.urlsafe_b64encode(json.dumps(compacted._asdict()).encode()).decode()


class _Sealed(msgspec.Struct):
    """JSON object within an `encrypted_content`."""

    summary: str
    said: list[str] = []
    whole: bool = False
    system: list[str] = []
    last: list[str] = []


def decode_compacted(encoded: object, name: str) -> Compacted:
    """Decode an `encrypted_content`. Raises ApiError for a value that `encode_compacted` did not make.

    Checks the size of the decoded JSON, because the check of the request body does not decode it.
    """
    try:
        data = base64.urlsafe_b64decode(str(encoded).encode("ascii"))
        check_items(data, name, name)
        found = msgspec.json.decode(data, type=_Sealed)
        return Compacted(found.summary, found.said, found.whole, found.system, found.last)
    except (ValueError, binascii.Error, RecursionError, msgspec.MsgspecError):
        raise invalid(f"{name} was not made by this server's compaction", name) from None


def read_items(given: Sequence[Mapping[str, Any]], name: str) -> list[Item]:
    """Convert a client's items to stored items with new ids.

    Raises ApiError for a value that is not an item, and for too many content parts or messages.
    """
    check_parts(given, name)
    check_arguments((text for item in given if isinstance(text := item.get("arguments"), str)), name)
    items: list[Item] = []
    requests: dict[str, str] = {}
    """New ids of approval requests by the ids that the client gave."""
    expanded = 0
    for index, item in enumerate(given):
        place = f"{name}[{index}]"
        if item.get("type") == "compaction":
            refuse_extra(item, ("type", "id", "encrypted_content", "created_by"), place)
            found = decode_compacted(item.get("encrypted_content"), f"{place}.encrypted_content")
            expanded += len(found.said) + len(found.system) + len(found.last) + 1
            if expanded > MAX_MESSAGES:
                reason = f"the compactions in {name} stand for {expanded} messages or more; at most {MAX_MESSAGES}"
                raise invalid(reason, name)
            if found.whole:
                items.clear()
            items += _expanded(found)
        else:
            read = _read_item(item, place)
            if (asked := read.get("approval_request_id")) is not None:
                read["approval_request_id"] = requests.get(asked, asked)
            if read["type"] == "mcp_approval_request" and isinstance(item.get("id"), str):
                requests[item["id"]] = read["id"]
            items.append(read)
    return items


def _expanded(found: Compacted) -> list[Item]:
    """Return the items of a compaction: messages from before the summary, the summary, and the user's last message."""
    before = [*(new_item("system", text) for text in found.system), *(new_item("user", text) for text in found.said)]
    summary = new_item("assistant", f"{OPENING}{found.summary}")
    return [*before, summary, *(new_item("user", text) for text in found.last)]


def unfolded(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, with each compaction replaced by its content, and without those that one replaces."""
    given = list(items)
    found = {
        at: decode_compacted(item["encrypted_content"], "compaction")
        for at, item in enumerate(given)
        if item["type"] == "compaction"
    }
    first = max((at for at, each in found.items() if each.whole), default=0)
    for at, item in enumerate(given[first:], first):
        if at in found:
            yield from _expanded(found[at])
        else:
            yield item


def _read_item(item: Mapping[str, Any], name: str) -> Item:
    match item.get("type", "message"):
        case "message":
            role = checked_role(item, name)
            refuse_extra(item, ITEM_FIELDS, name)
            kinds = (*TEXT_KINDS, REFUSAL) if role == "assistant" else TEXT_KINDS
            return new_item(role, *text_parts(item.get("content"), f"{name}.content", kinds))
        case "function_call":
            refuse_extra(item, CALL_FIELDS, name)
            called, call_id = (_string(item, field, name) for field in ("name", "call_id"))
            return call_item(called, call_id, _string(item, "arguments", name, empty=True))
        case "custom_tool_call":
            refuse_extra(item, CUSTOM_FIELDS, name)
            called, call_id = (_string(item, field, name) for field in ("name", "call_id"))
            return custom_item(called, call_id, _string(item, "input", name, empty=True))
        case "function_call_output" | "custom_tool_call_output" as kind:
            refuse_extra(item, RESULT_FIELDS, name)
            output = text_parts(item.get("output"), f"{name}.output", TEXT_KINDS)
            return {
                "id": new_id(RESULT_IDS[kind]), "type": kind, "status": "completed",
                "call_id": _string(item, "call_id", name), "output": "\n".join(output),
            }  # fmt: skip
        case "web_search_call":
            refuse_extra(item, SEARCH_FIELDS, name)
            return _read_search(item, name)
        case "mcp_list_tools":
            refuse_extra(item, LIST_FIELDS, name)
            return _read_list(item, name)
        case "mcp_call":
            refuse_extra(item, REMOTE_FIELDS, name)
            return _read_remote_call(item, name)
        case "mcp_approval_request":
            refuse_extra(item, REQUEST_FIELDS, name)
            read = {field: _string(item, field, name) for field in ("server_label", "name")}
            read["arguments"] = _string(item, "arguments", name, empty=True)
            return {"id": new_id("mcpr"), "type": "mcp_approval_request", **read}
        case "mcp_approval_response":
            refuse_extra(item, APPROVAL_FIELDS, name)
            return _read_approval(item, name)
        case "reasoning":
            refuse_extra(item, REASONING_FIELDS, name)
            content = item.get("content")
            return reasoning_item(*(text_parts(content, f"{name}.content", ("reasoning_text",)) if content else ()))
        case kind:
            reason = (
                f"{name}.type is {shown(kind)}; supported: message, function_call, function_call_output, "
                "custom_tool_call, custom_tool_call_output, "
                "web_search_call, mcp_list_tools, mcp_call, mcp_approval_request, mcp_approval_response, reasoning, "
                "compaction"
            )
            raise invalid(reason, f"{name}.type", "unsupported_content")


def _search_call(item: Item) -> dict[str, Any]:
    """Return a web search as a function call, which the model wrote."""
    arguments = {"query": item["action"]["query"]}
    return {"id": item["id"], "type": "function", "function": {"name": SEARCH_TOOL.name, "arguments": arguments}}


def _past_call(item: Item) -> dict[str, Any]:
    """Return the call of an item as chat templates expect it."""
    match item["type"]:
        case "web_search_call":
            return _search_call(item)
        case "function_call":
            return past_call(item["call_id"], item["name"], item["arguments"])
        case "custom_tool_call":
            function = {"name": item["name"], "arguments": input_arguments(item["input"])}
            return {"id": item["call_id"], "type": "function", "function": function}
    return past_call(item["id"], item["name"], item["arguments"])


def _result_text(item: Item, answers: Mapping[str, Item]) -> str:
    """Return what the model reads as the result of a call that the server makes.

    `answers` are the user's to approval requests, by their ids.
    """
    match item["type"]:
        case "web_search_call":
            return format_results(item["results"]) if item["status"] == "completed" else FAILED
        case "mcp_call":
            return failure_text(item["error"]) if item["error"] else item["output"] or ""
    reason = answers[item["id"]]["reason"] if item["id"] in answers else None
    return f"{AWAITED} Reason: {reason}" if reason else AWAITED


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


def _read_list(item: Mapping[str, Any], name: str) -> Item:
    """Read the list of a remote server's tools, in the shape of this server's answers. Raises ApiError."""
    tools, path = item.get("tools"), f"{name}.tools"
    if not isinstance(tools, list) or len(tools) > MOST_LISTED:
        raise invalid(f"{path} must be a list of at most {MOST_LISTED} tools", path)
    read = []
    for index, tool in enumerate(tools):
        place = f"{path}[{index}]"
        if not isinstance(tool, Mapping) or not isinstance(tool.get("input_schema"), Mapping):
            raise invalid(f"{place} must be an object with a name and an input_schema, an object", place)
        description, hints = tool.get("description"), tool.get("annotations")
        if not isinstance(description, str | None) or not isinstance(hints, Mapping | None):
            reason = f"{place}.description must be a string, and annotations an object"
            raise invalid(reason, f"{place}.description")
        read.append(
            {
                "name": _string(tool, "name", place), "description": description,
                "input_schema": tool["input_schema"], "annotations": hints,
            }
        )  # fmt: skip
    error = item.get("error")
    return list_item(_string(item, "server_label", name)) | {
        "tools": read, "error": error if isinstance(error, str) else None
    }  # fmt: skip


def _read_remote_call(item: Mapping[str, Any], name: str) -> Item:
    """Read a call of a remote tool, in the shape of this server's answers. Raises ApiError."""
    output, error, asked = item.get("output"), item.get("error"), item.get("approval_request_id")
    if not isinstance(output, str | None):
        raise invalid(f"{name}.output must be a string", f"{name}.output")
    if isinstance(error, str):  # The shape of earlier versions of OpenAI's API.
        error = {"type": "mcp_protocol_error", "code": 0, "message": error}
    if not isinstance(error, Mapping | None):
        raise invalid(f"{name}.error must be an object", f"{name}.error")
    if not isinstance(asked, str | None):
        raise invalid(f"{name}.approval_request_id must be a string", f"{name}.approval_request_id")
    if error is None and output is None:
        error = {"type": "http_error", "code": 0, "message": "the call has no output"}
    return {
        "id": new_id("mcp"), "type": "mcp_call", "status": "failed" if error else "completed",
        "approval_request_id": asked, "server_label": _string(item, "server_label", name),
        "name": _string(item, "name", name), "arguments": _string(item, "arguments", name, empty=True),
        "output": output, "error": error,
    }  # fmt: skip


def _read_approval(item: Mapping[str, Any], name: str) -> Item:
    """Read the user's answer to an approval request. Raises ApiError."""
    approve, reason = item.get("approve"), item.get("reason")
    if not isinstance(approve, bool):
        raise invalid(f"{name}.approve must be true or false", f"{name}.approve")
    if not isinstance(reason, str | None):
        raise invalid(f"{name}.reason must be a string", f"{name}.reason")
    return {
        "id": new_id("mcpa"), "type": "mcp_approval_response", "approve": approve, "reason": reason,
        "approval_request_id": _string(item, "approval_request_id", name),
    }  # fmt: skip


def _string(item: Mapping[str, Any], field: str, name: str, *, empty: bool = False) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not (value or empty):
        path = f"{name}.{field}"
        raise invalid(f"{path} must be a string", path)
    return value


def check_results(before: Sequence[Item], given: Sequence[Item]) -> None:
    """Raises ApiError if a turn's input gives the result of a call that neither it nor the turns before it have."""
    results = [item for item in given if item["type"] in RESULT_IDS]
    if not results:
        return
    called = {item["call_id"] for item in unfolded([*before, *given]) if item["type"] in CLIENT_CALLS}
    for item in results:
        if item["call_id"] not in called:
            kind = "custom tool call" if item["type"] == "custom_tool_call_output" else "function call"
            raise invalid(f"No tool call found for {kind} output with call_id {item['call_id'][:64]}.", "input")


def text_size(opening: Sequence[Mapping[str, Any]], items: Sequence[Item]) -> int:
    """Return the number of characters in a turn's opening messages and in the texts of its own items."""
    parts = (part for item in items for part in item.get("content", ()))
    others = sum(len(item.get(field) or "") for item in items for field in ("output", "arguments", "input"))
    others += sum(len(page["text"]) for item in items for page in item.get("results", ()))
    return sum(len(message["content"]) for message in opening) + others + sum(len(part["text"]) for part in parts)


def opening_messages(instructions: str | None, prompt: Sequence[Mapping[str, str]] = ()) -> list[dict[str, Any]]:
    """Return the messages that come first in a turn's prompt: its instructions, and those of a stored `prompt`.

    Instructions replace the stored prompt's system messages.
    """
    if not instructions:
        return [dict(message) for message in prompt]
    kept = [dict(message) for message in prompt if message["role"] != "system"]
    return [{"role": "system", "content": instructions}, *kept]


def messages(opening: Sequence[Mapping[str, Any]], items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages for the chat template: those of the turn's `opening_messages`, then all items.

    Reasoning and calls are merged into the adjacent message of the assistant. A call that waits for the user's approval
    has a result that says so, until it is made.
    """
    items = list(unfolded(items))
    answers = {item["approval_request_id"]: item for item in items if item["type"] == "mcp_approval_response"}
    made = {item["approval_request_id"] for item in items if item["type"] == "mcp_call"}
    said: list[dict[str, Any]] = [dict(message) for message in opening]
    names: dict[str, str] = {}
    answering: dict[str, Any] | None = None
    """The assistant's message to which calls may be added."""
    for item in items:
        match item["type"]:
            case "message":
                role, content = ROLES[item["role"]], "\n".join([part["text"] for part in item["content"]])
                if role == "assistant" and answering is not None and answering.keys() == {"role", "reasoning_content"}:
                    answering["content"] = content
                    continue
                said.append({"role": role, "content": content})
                answering = said[-1] if role == "assistant" else None
            case "function_call_output" | "custom_tool_call_output":
                call = item["call_id"]
                said.append({"role": "tool", "content": item["output"], "tool_call_id": call})
                if call in names:
                    said[-1]["name"] = names[call]
                answering = None
            case "reasoning":
                thought = "\n".join(part["text"] for part in item["content"])
                answering = {"role": "assistant", "reasoning_content": thought}
                said.append(answering)
            case "mcp_approval_request" if item["id"] in made:
                pass  # The call itself follows.
            case "function_call" | "custom_tool_call" | "web_search_call" | "mcp_call" | "mcp_approval_request":
                if answering is None:
                    answering = {"role": "assistant"}
                    said.append(answering)
                call = _past_call(item)
                answering.setdefault("tool_calls", []).append(call)
                if "call_id" in item:  # The client makes the call.
                    names[item["call_id"]] = item["name"]
                    continue
                said.append({"role": "tool", "content": _result_text(item, answers), "tool_call_id": item["id"]})
                said[-1]["name"] = call["function"]["name"]
                answering = None
    for message in said:
        message.setdefault("content", "")
    return [message for message in said if message.keys() != {"role", "content", "reasoning_content"}
            or message["content"]]  # fmt: skip
