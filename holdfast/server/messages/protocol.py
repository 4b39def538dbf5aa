"""Requests of the Messages API as strict types, and their conversion to chats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, field

from holdfast.core.pause import MAX_PAUSE
from holdfast.server.pauses import cache_ttl
from holdfast.server.protocol import (
    MAX_MESSAGES,
    MAX_STOPS,
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
}
"""Fields of each block type, besides `type` and `cache_control`."""
ROLES = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
"""Block types that messages of each role may have."""


class Thinking(Struct, kw_only=True, frozen=True):
    """The `thinking` parameter. Only its type has an effect; the model decides how long it thinks."""

    type: str


class MessagesChat(ChatRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A request of the Messages API, converted to a chat."""

    route = "/v1/messages"


class TokensRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages/count_tokens."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],)}
    harmless: ClassVar[tuple[str, ...]] = (
        "betas", "cache_control", "context_management", "diagnostics", "inference_geo", "metadata",
        "service_tier", "speed", "user_profile_id", "workspace_id",
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
        return MessagesChat(
            model=self.model,
            messages=read_messages(self.system, self.messages),
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
        return self.chat(
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
    """Convert messages to chat completions' form, in which each tool result is a message. Raises ApiError."""
    check_parts(messages, "messages")
    read: Blocks = []
    texts = [system] if isinstance(system, str) else [_text(block, f"system[{at}]") for at, block in enumerate(system)]
    if any(texts):
        read.append({"role": "system", "content": "\n".join(texts)})
    for index, message in enumerate(messages):
        read += _read_message(message, f"messages[{index}]")
    if read[-1]["role"] == "assistant":
        name = f"messages[{len(messages) - 1}]"
        reason = f"{name} is the assistant's: answers that are begun by the client are not supported; end with a user's"
        raise invalid(reason, name, "unsupported_parameter")
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
        return "\n".join(_text(each, f"{path}.content[{index}]") for index, each in enumerate(content))
    if not isinstance(content, str | None):
        raise invalid(f"{path}.content must be a string or a list of blocks", f"{path}.content")
    return content or ""


def _text(block: Any, path: str) -> str:
    _kind(block, path, ("text",))
    return _string(block, "text", path)


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
