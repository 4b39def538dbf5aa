"""Requests of the Messages API as strict types, and their conversion to chats."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, field

from holdfast.core.pause import MAX_PAUSE
from holdfast.server.pauses import cache_ttl
from holdfast.server.protocol import (
    MAX_MESSAGES,
    MAX_STOPS,
    ApiError,
    ChatRequest,
    ContractTime,
    Count,
    RequestBody,
    StopString,
    TemplateOptions,
    check_parts,
    invalid,
    refuse_extra,
    shown,
)  # fmt: skip

Blocks = list[dict[str, Any]]

TOOL_FIELDS = (
    "type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming", "input_examples",
    "defer_loading", "allowed_callers",
)  # fmt: skip
"""Fields of a tool that the client runs. The fields after `strict` do not affect answers."""
BLOCK_FIELDS = {
    "text": ("text", "citations"),
    "tool_use": ("id", "name", "input", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error", "toolset_name"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "document": ("source", "title", "context", "citations"),
}
"""Fields of each block type, besides `type` and `cache_control`."""
ROLES = {
    "system": ("text",),
    "user": ("text", "document", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
"""Block types that messages of each role may have."""
SOURCE_FIELDS = {
    "text": ("media_type", "data"),
    "base64": ("media_type", "data"),
    "content": ("content",),
}
"""Fields of each source of a document, besides `type`."""


class Thinking(Struct, kw_only=True, frozen=True):
    """The `thinking` parameter."""

    type: str
    budget_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    """Maximum number of tokens of thinking, with the type `enabled`. Ignored if the model has no reasoning tags."""


class MessagesChat(ChatRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A request of the Messages API, converted to a chat."""

    route = "/v1/messages"
    may_ignore_budget = True

    most: Count | None = None
    """Maximum number of tokens of the answer; None only where no answer is wanted."""

    @property
    def fitting_tokens(self) -> int | None:
        return self.most


class TokensRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages/count_tokens."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"compaction": (), "container": (), "mcp_servers": ([],)}
    # A fallback model answers where the first one refuses, and no model here does.
    harmless: ClassVar[tuple[str, ...]] = (
        "betas", "billing_policy", "cache_control", "context_management", "diagnostics", "fallback_credit_token",
        "fallbacks", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id", "workspace_id",
    )  # fmt: skip

    model: str = ""
    messages: Annotated[Blocks, Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Blocks = ""
    tools: Blocks = field(default_factory=list)
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] = field(default_factory=dict)
    """The `output_config` parameter. Its `format` is a JSON schema for the answer. Its effort has no effect."""
    chat_template_kwargs: TemplateOptions = field(default_factory=dict)

    def chat(self, **more: Any) -> MessagesChat:
        """Return the equivalent chat. `more` are other fields of the chat. Raises ApiError."""
        choice = self.tool_choice or {}
        options = dict(self.chat_template_kwargs)
        if self.thinking is not None:
            options = {"enable_thinking": self.thinking.type != "disabled"} | options
            if self.thinking.type == "enabled":
                more["thinking_token_budget"] = self.thinking.budget_tokens
        messages = read_messages(self.system, self.messages)
        return MessagesChat(
            model=self.model,
            messages=messages,
            continue_final_message=messages[-1]["role"] == "assistant",
            tools=[_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)],
            tool_choice=_read_choice(choice),
            parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
            chat_template_kwargs=options,
            response_format=_read_format(self.output_config.get("format")),
            **more,
        )


class MessagesRequest(TokensRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages."""

    max_tokens: Count
    """Maximum number of tokens of the answer. The answer ends earlier if the context is full."""
    thread: dict[str, Any] | None = None
    """Conversation that the server should hold. Refused, so that the client sends the whole conversation instead."""
    stream: bool = False
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] = field(default_factory=list)
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    expected_pause_ms: Annotated[float, Meta(ge=0, le=MAX_PAUSE * 1000)] | None = None
    """Milliseconds from the end of the answer until the client expects to send the conversation's next turn."""
    keep_until: float | Annotated[str, Meta(max_length=32)] | None = None
    """Time in Unix seconds, or duration such as 5m, for which the conversation's state is worth keeping."""
    superseded: Annotated[list[Annotated[str, Meta(min_length=1, max_length=128)]], Meta(max_length=16)] = field(
        default_factory=list
    )
    """Ids of earlier answers that no turn will follow, because this one replaces them."""
    cache_control: dict[str, Any] | None = None
    """A mark like those of content blocks. The longest `ttl` of all marks counts as `keep_until`, unless that is
    given."""
    ttft_ms: ContractTime | None = None
    tbt_ms: ContractTime | None = None
    complete_ms: ContractTime | None = None

    def to_answer(self) -> MessagesChat:
        """Return the chat to answer. Raises ApiError."""
        if self.thread is not None:
            raise _no_threads(self.thread)
        return self.chat(
            most=self.max_tokens,
            stream=self.stream,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            expected_pause_ms=self.expected_pause_ms,
            keep_until=self._cache_ttl() if self.keep_until is None else self.keep_until,
            superseded=self.superseded,
            ttft_ms=self.ttft_ms,
            tbt_ms=self.tbt_ms,
            complete_ms=self.complete_ms,
        )

    def _cache_ttl(self) -> str | None:
        """Return the longest `ttl` of all marks for the prompt cache; None without any. Raises ApiError."""
        said = [*([] if isinstance(self.system, str) else self.system), *self.tools]
        for message in self.messages:
            content = message.get("content")
            said += content if isinstance(content, list) else []
        try:
            return cache_ttl([{"cache_control": self.cache_control}, *said])
        except ValueError as error:
            raise invalid(str(error), "cache_control") from None


def read_messages(system: str | Blocks, messages: Sequence[Mapping[str, Any]]) -> Blocks:
    """Convert messages to chat completions' form, in which each tool result is a message. Raises ApiError.

    If the last one is the assistant's, the client has begun the answer.
    """
    check_parts(messages, "messages")
    read: Blocks = []
    texts = [system] if isinstance(system, str) else [_text(block, f"system[{at}]") for at, block in enumerate(system)]
    if any(texts):
        read.append({"role": "system", "content": "\n".join(texts)})
    for index, message in enumerate(messages):
        read += _read_message(message, f"messages[{index}]")
    last, name = read[-1], f"messages[{len(messages) - 1}]"
    if last.get("tool_calls"):
        raise invalid(f"{name} has calls, and their results must follow", name)
    return read


def _read_message(message: Mapping[str, Any], name: str) -> Blocks:
    """Convert one message to one or more messages. Raises ApiError."""
    role, content = message.get("role"), message.get("content")
    refuse_extra(message, ("role", "content", "id", "type"), name)
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{name}.role is {shown(role)}; supported: {', '.join(ROLES)}", f"{name}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid(f"{name}.content must be a string or a list of blocks", f"{name}.content")
    texts, thoughts, calls, results = list[str](), list[str](), Blocks(), Blocks()
    for index, block in enumerate(content):
        path = f"{name}.content[{index}]"
        match _kind(block, path, ROLES[role]):
            case "text":
                texts.append(_string(block, "text", path))
            case "document":
                texts.append(_document(block, path))
            case "thinking":
                thoughts.append(_string(block, "thinking", path))
            case "tool_use":
                given = block.get("input")
                if not isinstance(given, Mapping):
                    raise invalid(f"{path}.input must be an object", f"{path}.input")
                function = {"name": _string(block, "name", path), "arguments": json.dumps(given, ensure_ascii=False)}
                calls.append({"id": _string(block, "id", path), "type": "function", "function": function})
            case "tool_result":
                call = _string(block, "tool_use_id", path)
                results.append({"role": "tool", "tool_call_id": call, "content": _result(block, path)})
    said: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        said["tool_calls"] = calls
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    return [*results, said] if texts or role != "user" or not results else results


def _result(block: Mapping[str, Any], path: str) -> str:
    """Return the text of a tool result. Raises ApiError."""
    content = block.get("content")
    if isinstance(content, list):
        return "\n".join(_shown_result(each, f"{path}.content[{index}]") for index, each in enumerate(content))
    if not isinstance(content, str | None):
        raise invalid(f"{path}.content must be a string or a list of blocks", f"{path}.content")
    return content or ""


def _shown_result(block: Any, path: str) -> str:
    """Return the text of a block within a tool result. Raises ApiError."""
    kind = _kind(block, path, ("text", "document"))
    return _string(block, "text", path) if kind == "text" else _document(block, path)


def _text(block: Any, path: str) -> str:
    _kind(block, path, ("text",))
    return _string(block, "text", path)


def _document(block: Mapping[str, Any], path: str) -> str:
    """Return a document as the model reads it: its title, context and text, each marked. Raises ApiError."""
    citations = block.get("citations")
    if citations is not None and not (isinstance(citations, Mapping) and citations.get("enabled") in (None, False)):
        param = f"{path}.citations"
        raise invalid(f"{param} are not supported; leave them out, or disable them", param, "unsupported_parameter")
    lines = ["<document>"]
    for name in ("title", "context"):
        if block.get(name):
            lines.append(f"<{name}>{_string(block, name, path)}</{name}>")
    text = _document_text(block.get("source"), f"{path}.source")
    return "\n".join([*lines, "<document_content>", text, "</document_content>", "</document>"])


def _document_text(source: Any, path: str) -> str:
    """Return the text of a document's source. Raises ApiError, which names a source that has no text."""
    kind = source.get("type") if isinstance(source, Mapping) else None
    media = source.get("media_type") if isinstance(source, Mapping) else None
    if kind in ("text", "base64") and media != "text/plain":
        what = "; PDF documents are not read here" if media == "application/pdf" else ""
        reason = f'{path}.media_type is {shown(media)}; it must be "text/plain"{what}; send the text itself'
        raise invalid(reason, f"{path}.media_type", "unsupported_content")
    if not isinstance(kind, str) or kind not in SOURCE_FIELDS:
        reason = f"{path}.type is {shown(kind)}; supported: {', '.join(SOURCE_FIELDS)}"
        raise invalid(reason, f"{path}.type", "unsupported_content")
    refuse_extra(source, ("type", *SOURCE_FIELDS[kind]), path)
    if kind == "content":
        content = source.get("content")
        if isinstance(content, list):
            return "\n".join(_text(each, f"{path}.content[{index}]") for index, each in enumerate(content))
        return _string(source, "content", path)
    data = _string(source, "data", path)
    if kind == "text":
        return data
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):  # A UnicodeDecodeError is a ValueError.
        raise invalid(f"{path}.data must be UTF-8 text in base64", f"{path}.data") from None


def _no_threads(thread: Mapping[str, Any]) -> ApiError:
    """Return the error that makes Anthropic's clients send whole conversations, as they do to any other server."""
    found = thread.get("type") != "continue"
    code = "thread_unsupported_request" if found else "thread_not_found"
    return ApiError(
        "thread is not supported: this server holds no threads; send the whole conversation, whose prefix is cached",
        status=400 if found else 404,
        param="thread",
        code="unsupported_parameter",
        details={"details": {"error_code": code, "unsupported": ["thread"]}},
    )


def _kind(block: Any, path: str, kinds: Sequence[str]) -> str:
    """Return the type of a block, which must be one of `kinds`. Raises ApiError."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str) or kind not in kinds:
        reason = f"{path}.type is {shown(kind)}; supported here: {', '.join(kinds)}"
        raise invalid(reason, f"{path}.type", "unsupported_content")
    refuse_extra(block, ("type", "cache_control", *BLOCK_FIELDS[kind]), path)
    return kind


def _string(block: Mapping[str, Any], field: str, path: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise invalid(f"{path}.{field} must be a string", f"{path}.{field}")
    return value


def _read_tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Convert a tool to chat completions' form. Raises ApiError."""
    kind = tool.get("type", "custom")
    if kind not in ("custom", None):
        reason = f"{path}.type is {shown(kind)}; only tools with an input_schema are supported, which the client runs"
        raise invalid(reason, f"{path}.type", "unsupported_parameter")
    refuse_extra(tool, TOOL_FIELDS, path)
    function = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _read_format(given: Any) -> dict[str, Any] | None:
    """Convert the answer's format to chat completions' form. Raises ApiError."""
    match given:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    raise invalid("output_config.format must have the type json_schema, and a schema", "output_config.format")


def _read_choice(choice: Mapping[str, Any]) -> str | dict[str, Any] | None:
    """Convert `tool_choice` to chat completions' form. Raises ApiError."""
    match choice.get("type"):
        case None if not choice:
            return None
        case "auto" | "none" as same:
            return str(same)
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}
        case kind:
            raise invalid(f"tool_choice.type is {shown(kind)}; supported: auto, any, tool, none", "tool_choice.type")
