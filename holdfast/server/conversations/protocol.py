"""Requests of the stateful API: responses, conversations and items as strict types."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, field

from holdfast.server.conversations.values import Item
from holdfast.server.protocol import (
    MAX_MESSAGES,
    ROLES,
    ApiError,
    Count,
    Metadata,
    RequestBody,
    SampledRequest,
    StreamOptions,
    checked_role,
    refuse_extra,
    shown,
    text_parts,
)

MAX_NEW_ITEMS = 20
"""Most items that one call may add to a conversation, as in OpenAI's API."""

Id = Annotated[str, Meta(min_length=1, max_length=64)]
NewItems = Annotated[list[dict[str, Any]], Meta(max_length=MAX_NEW_ITEMS)]

TEXT_KINDS = ("input_text", "output_text", "text")
ITEM_FIELDS = ("type", "id", "status", "role", "content", "phase")


class ConversationParam(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`conversation` as an object."""

    id: Id


class ResponseRequest(SampledRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    route: ClassVar[str] = "/v1/responses"
    prompt_param: ClassVar[str] = "input"
    max_tokens_param: ClassVar[str] = "max_output_tokens"
    n: ClassVar[int] = 1
    harmless = (
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "service_tier",
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "context_management": ([],),
        "frequency_penalty": (0,),
        "include": ([],),
        "logprobs": (False,),
        "max_tool_calls": (),
        "moderation": (),
        "presence_penalty": (0,),
        "prompt": (),
        "reasoning": ({}, {"effort": "none"}, {"effort": None, "summary": None}),
        "text": ({}, {"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": "medium"}),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    previous_response_id: Id | None = None
    conversation: Id | ConversationParam | None = None
    store: bool = True
    background: bool = False
    max_output_tokens: Count | None = None
    metadata: Metadata = field(default_factory=dict)
    stream_options: StreamOptions = StreamOptions()

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of the answer."""
        return self.max_output_tokens

    @property
    def conversation_id(self) -> str | None:
        """The conversation of this turn, if it belongs to one."""
        return self.conversation.id if isinstance(self.conversation, ConversationParam) else self.conversation

    def items(self) -> list[Item]:
        """The input as items. Raises ApiError for unsupported content, and for parameters that exclude each other."""
        if self.previous_response_id is not None and self.conversation is not None:
            raise ApiError(
                "previous_response_id and conversation exclude each other; give one of them",
                param="previous_response_id",
                code="mutually_exclusive_parameters",
            )
        if self.background and not self.store:
            raise ApiError(
                "background needs store: true, as its answer is fetched later", param="background", code="invalid_value"
            )
        if isinstance(self.input, str):
            return [new_item("user", self.input)] if self.input else []
        return read_items(self.input, "input")


class ConversationRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/conversations."""

    items: NewItems = field(default_factory=list)
    metadata: Metadata = field(default_factory=dict)


class ConversationUpdate(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/conversations/{id}."""

    metadata: Metadata


class ItemsRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/conversations/{id}/items."""

    items: NewItems


def new_id(kind: str) -> str:
    """An unguessable id: resp_…, msg_…, conv_…."""
    return f"{kind}_{uuid.uuid4().hex}"


def new_item(role: str, *texts: str) -> Item:
    """A message as a completed item."""
    if role == "assistant":
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
    else:
        content = [{"type": "input_text", "text": text} for text in texts]
    return {"id": new_id("msg"), "type": "message", "status": "completed", "role": role, "content": content}


def read_items(given: Sequence[Mapping[str, Any]], name: str) -> list[Item]:
    """A client's items with new ids. Raises ApiError for anything other than a text message."""
    return [_read_item(item, f"{name}[{index}]") for index, item in enumerate(given)]


def _read_item(item: Mapping[str, Any], name: str) -> Item:
    kind = item.get("type", "message")
    if kind != "message":
        reason = f"{name}.type is {shown(kind)}; only messages are supported"
        raise ApiError(reason, param=f"{name}.type", code="unsupported_content")
    role = checked_role(item, name)
    refuse_extra(item, ITEM_FIELDS, name)
    return new_item(role, *text_parts(item.get("content"), f"{name}.content", TEXT_KINDS))


def messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, str]]:
    """The messages for the chat template: the turn's instructions first, then all items."""
    first = [{"role": "system", "content": instructions}] if instructions else []
    said = [
        {"role": ROLES[item["role"]], "content": "\n".join([part["text"] for part in item["content"]])}
        for item in items
    ]
    return [*first, *said]
