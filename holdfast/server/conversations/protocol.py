"""Wire types of the stateful API: requests as strict types, items, response objects, stream events in their order."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from holdfast.core.types import MAX_LOGPROBS, FinishReason
from holdfast.server.conversations.compaction import OPENING, Compacted, decode_compacted, encode_compacted
from holdfast.server.conversations.values import Item
from holdfast.server.protocol import (
    MAX_MESSAGES,
    ROLES,
    ApiError,
    Count,
    Metadata,
    RequestBody,
    SampledRequest,
    check_parts,
    checked_role,
    refuse_extra,
    shown,
    text_parts,
)
from holdfast.server.replies import RequestUsage, encode

MAX_NEW_ITEMS = 20
"""Most items that one call may add to a conversation, as in OpenAI's API."""

Id = Annotated[str, Meta(min_length=1, max_length=64)]
Label = Annotated[str, Meta(max_length=1024)]
NewItems = Annotated[list[dict[str, Any]], Meta(max_length=MAX_NEW_ITEMS)]

TEXT_KINDS = ("input_text", "output_text", "text")
ITEM_FIELDS = ("type", "id", "status", "role", "content", "phase")

Event = dict[str, Any]
Response = dict[str, Any]


class ConversationParam(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`conversation` as an object."""

    id: Id


class ReasoningOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`reasoning`: told in the answer, and without effect on a model that does not reason."""

    effort: Label | None = None
    summary: Label | None = None
    generate_summary: Label | None = None


class TextOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`text`. The verbosity is told in the answer, and without effect."""

    format: dict[str, Any] = field(default_factory=lambda: {"type": "text"})
    verbosity: Literal["low", "medium", "high"] | None = None

    def __post_init__(self) -> None:
        if self.format != {"type": "text"}:
            reason = "text.format is not supported yet, except for plain text; leave it out"
            raise ApiError(reason, param="text.format", code="unsupported_parameter")


class ResponseRequest(SampledRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    route = "/v1/responses"
    prompt_param = "input"
    max_tokens_param = "max_output_tokens"
    unsupported = SampledRequest.unsupported | {
        "context_management": ([],),
        "logprobs": (False,),
        "max_tool_calls": (),
        "prompt": (),
    }
    harmless = (*SampledRequest.harmless, "prompt_cache_options")

    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    previous_response_id: Id | None = None
    conversation: Id | ConversationParam | None = None
    store: bool = True
    background: bool = False
    max_output_tokens: Count | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    """Whether the oldest turns leave a prompt that exceeds the context. The conversation keeps them."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = field(default_factory=list)
    """The log probabilities of the answer's tokens. There is no reasoning to encrypt."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    metadata: Metadata = field(default_factory=dict)
    # Told in the answer, and without effect on it.
    parallel_tool_calls: bool = True
    prompt_cache_key: Label | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    safety_identifier: Label | None = None
    text: TextOptions = field(default_factory=TextOptions)
    tool_choice: Literal["none", "auto"] = "auto"
    user: Label | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def most_logprobs(self) -> int | None:
        return self.top_logprobs if "message.output_text.logprobs" in self.include else None

    @property
    def conversation_id(self) -> str | None:
        """The conversation of this turn, if it belongs to one."""
        return self.conversation.id if isinstance(self.conversation, ConversationParam) else self.conversation

    def items(self) -> list[Item]:
        """The input as items. Raises ApiError for unsupported content, and for parameters that exclude each other."""
        if self.previous_response_id is not None and self.conversation is not None:
            reason = "previous_response_id and conversation exclude each other; give one of them"
            raise ApiError(reason, param="previous_response_id", code="mutually_exclusive_parameters")
        if self.background and not self.store:
            reason = "background needs store: true, as its answer is fetched later"
            raise ApiError(reason, param="background", code="invalid_value")
        if isinstance(self.input, str):
            return [new_item("user", self.input)] if self.input else []
        return read_items(self.input, "input")


class InputTokensRequest(ResponseRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/responses/input_tokens: a turn that is counted and not answered, of the served model by default."""

    model: str = ""


class CompactRequest(ResponseRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/responses/compact."""

    unsupported = ResponseRequest.unsupported | {"background": (False,), "conversation": (), "stream": (False,)}


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
    content = [_output_text(text) if role == "assistant" else {"type": "input_text", "text": text} for text in texts]
    return {"id": new_id("msg"), "type": "message", "status": "completed", "role": role, "content": content}


def _output_text(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def read_items(given: Sequence[Mapping[str, Any]], name: str) -> list[Item]:
    """A client's items with new ids. Raises ApiError for anything other than a text message, or too many parts."""
    check_parts(given, name)
    items: list[Item] = []
    for index, item in enumerate(given):
        place = f"{name}[{index}]"
        items += _read_compaction(item, place) if item.get("type") == "compaction" else [_read_item(item, place)]
    return items


def _read_compaction(item: Mapping[str, Any], name: str) -> list[Item]:
    """What a compaction stands for: the user's messages, then the summary."""
    refuse_extra(item, ("type", "id", "encrypted_content", "created_by"), name)
    found = decode_compacted(item.get("encrypted_content"), f"{name}.encrypted_content")
    return [*(new_item("user", text) for text in found.said), new_item("assistant", f"{OPENING}{found.summary}")]


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


def event_bytes(event: Event) -> bytes:
    """One server-sent event, named by its type."""
    return f"event: {event['type']}\ndata: ".encode() + encode(event) + b"\n\n"


def new_response(wanted: ResponseRequest, served: str) -> Response:
    """A response before it is answered."""
    conversation = wanted.conversation_id
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if wanted.background else "in_progress",
        "background": wanted.background,
        "error": None,
        "incomplete_details": None,
        "instructions": wanted.instructions,
        "max_output_tokens": wanted.max_output_tokens,
        "max_tool_calls": None,
        "metadata": wanted.metadata,
        "model": served,
        "output": [],
        "parallel_tool_calls": wanted.parallel_tool_calls,
        "presence_penalty": wanted.presence_penalty,
        "frequency_penalty": wanted.frequency_penalty,
        "previous_response_id": wanted.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation},
        "prompt_cache_key": wanted.prompt_cache_key,
        "reasoning": {"effort": wanted.reasoning.effort, "summary": wanted.reasoning.summary},
        "safety_identifier": wanted.safety_identifier,
        "service_tier": "default",
        "store": wanted.store,
        "temperature": wanted.temperature,
        "text": {"format": wanted.text.format, "verbosity": wanted.text.verbosity or "medium"},
        "tool_choice": wanted.tool_choice,
        "tools": [],
        "top_logprobs": wanted.top_logprobs,
        "top_p": wanted.top_p,
        "truncation": wanted.truncation,
        "usage": None,
        "user": wanted.user,
    }


class ResponseShape:
    """The wire format of one response, from its creation to its end. `response` is its present state."""

    def __init__(self, response: Response, item_id: str | None = None) -> None:
        """`item_id` is that of its message, where it is known."""
        self.response = response
        self.item_id = item_id or new_id("msg")
        self.text: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        """The records of the text's tokens, if they are asked for."""
        self.numbers = itertools.count()

    def queued(self) -> Iterator[Event]:
        """The first events of a background response, before anything of it runs."""
        yield self._event("response.created", response=self.response)
        yield self._event("response.queued", response=self.response)

    def opening(self) -> Iterator[Event]:
        """The events before the text: the first ones of a stream that does not run in the background."""
        if not self.response["background"]:
            yield self._event("response.created", response=self.response)
        self.response = self.response | {"status": "in_progress"}
        yield self._event("response.in_progress", response=self.response)
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._part("response.content_part.added", part=_output_text(""))

    def delta(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Event:
        """More text of the answer, with the records of its tokens."""
        self.text.append(text)
        self.logprobs += logprobs
        return self._part("response.output_text.delta", delta=text, logprobs=_in_event(logprobs))

    def whole(self, reason: FinishReason, usage: RequestUsage) -> Response:
        """The complete response. The caller stores it first, and then sets `response` to it."""
        stopped = reason is FinishReason.STOP
        status = "completed" if stopped else "incomplete"
        return self.response | {
            "status": status,
            "completed_at": int(time.time()) if stopped else None,
            "incomplete_details": None if stopped else {"reason": "max_output_tokens"},
            "output": [self._item(status, [_output_text("".join(self.text), self.logprobs)])],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
        }

    def cancelled(self) -> Response:
        """The response as it is when it is cancelled: with the text so far, if any was sent."""
        text = "".join(self.text)
        output = [self._item("incomplete", [_output_text(text, self.logprobs)])] if text else []
        return ended(self.response, "cancelled") | {"output": output}

    def closing(self) -> Iterator[Event]:
        """The last events of a stream, sent once the response is stored.

        OpenAI's types have no event for a cancelled response: it is response.incomplete, and its response says more.
        """
        for item in self.response["output"]:
            (part,) = item["content"]
            yield self._part("response.output_text.done", text=part["text"], logprobs=_in_event(part["logprobs"]))
            yield self._part("response.content_part.done", part=part)
            yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{LAST_EVENTS[self.response['status']]}", response=self.response)

    def failed(self, error: ApiError) -> Event:
        """The last event of a stream that failed. Marks the response as failed."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response = ended(self.response, "failed", code, error.message)
        return self._event("response.failed", response=self.response)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "sequence_number": next(self.numbers), **fields}

    def _part(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self.item_id, output_index=0, content_index=0, **fields)

    def _item(self, status: str, content: list[dict[str, Any]]) -> Item:
        return new_item("assistant") | {"id": self.item_id, "status": status, "content": content}


def _in_event(logprobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of tokens as events have them: without bytes."""

    def short(record: Mapping[str, Any]) -> dict[str, Any]:
        return {"token": record["token"], "logprob": record["logprob"]}

    return [short(each) | {"top_logprobs": [short(top) for top in each["top_logprobs"]]} for each in logprobs]


def compacted(response: Response, items: Sequence[Item]) -> dict[str, Any]:
    """The answer to /v1/responses/compact: what the user said in these items and the summary in the response."""
    summary = "".join(part["text"] for item in response["output"] for part in item["content"])
    said = ["\n".join(part["text"] for part in item["content"]) for item in items if item["role"] == "user"]
    content = encode_compacted(Compacted(summary, said))
    return {
        "id": response["id"],
        "object": "response.compaction",
        "created_at": response["created_at"],
        "output": [{"id": new_id("cmp"), "type": "compaction", "encrypted_content": content}],
        "usage": response["usage"],
    }


def error_event(error: ApiError) -> Event:
    """The last event of a stream whose reader is failed, and not the response."""
    return {
        "type": "error", "code": error.code, "message": error.message, "param": error.param, "sequence_number": 0
    }  # fmt: skip


LAST_EVENTS = {"completed": "completed", "incomplete": "incomplete", "cancelled": "incomplete", "failed": "failed"}
"""The last event of a stream, by the status of its response."""


def replay(response: Response, after: int = -1) -> Iterator[Event]:
    """The events above `after` of a background response that has ended, whose own are no longer kept.

    All text comes as one delta, so there may be fewer than there were. The last one always comes, with the response.
    """
    begun = response | {"status": "queued", "output": [], "usage": None, "completed_at": None}
    begun |= {"incomplete_details": None, "error": None}
    shape = ResponseShape(begun, response["output"][0]["id"] if response["output"] else None)
    *events, last = list(_replayed(shape, response))
    yield from (event for event in events if event["sequence_number"] > after)
    yield last | {"sequence_number": max(last["sequence_number"], after + 1)}


def _replayed(shape: ResponseShape, response: Response) -> Iterator[Event]:
    yield from shape.queued()
    if response["output"]:
        yield from shape.opening()
        (part,) = response["output"][0]["content"]
        yield shape.delta(part["text"], part["logprobs"])
    shape.response = response
    yield from shape.closing()


def ended(response: Response, status: str, code: str | None = None, message: str = "") -> Response:
    """A response without an answer: failed with a reason, or cancelled."""
    error = None if code is None else {"code": code, "message": message}
    return response | {"status": status, "output": [], "usage": None, "error": error}


def item_list(items: Sequence[Item], has_more: bool) -> dict[str, Any]:
    """A page of items."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}
