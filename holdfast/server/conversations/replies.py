"""Replies of the stateful API: response objects, stream events in their order, lists."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.core.types import FinishReason
from holdfast.server.conversations.protocol import ResponseRequest, new_id
from holdfast.server.conversations.values import Item
from holdfast.server.protocol import ApiError
from holdfast.server.replies import UsageReply, encode

Event = dict[str, Any]
Response = dict[str, Any]


def event_bytes(event: Event) -> bytes:
    """One server-sent event, named by its type."""
    return f"event: {event['type']}\ndata: ".encode() + encode(event) + b"\n\n"


class ResponseShape:
    """The wire format of one response, from its creation to its end. `response` is its present state."""

    def __init__(self, wanted: ResponseRequest, served: str) -> None:
        self.item_id = new_id("msg")
        self.text: list[str] = []
        self.numbers = itertools.count()
        conversation = wanted.conversation_id
        self.response: Response = {
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
            "parallel_tool_calls": True,
            "previous_response_id": wanted.previous_response_id,
            "conversation": None if conversation is None else {"id": conversation},
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": wanted.store,
            "temperature": wanted.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": wanted.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": None,
        }

    def opening(self) -> Iterator[Event]:
        """The first events of a stream."""
        yield self._event("response.created", response=self.response)
        self.response = self.response | {"status": "in_progress"}
        yield self._event("response.in_progress", response=self.response)
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._part("response.content_part.added", part=_text_part(""))

    def delta(self, text: str) -> Event:
        """More text of the answer."""
        self.text.append(text)
        return self._part("response.output_text.delta", delta=text, logprobs=[])

    def whole(self, reason: FinishReason, usage: UsageReply) -> Response:
        """The complete response. The caller stores it first, and then sets `response` to it."""
        stopped = reason is FinishReason.STOP
        status = "completed" if stopped else "incomplete"
        return self.response | {
            "status": status,
            "completed_at": int(time.time()) if stopped else None,
            "incomplete_details": None if stopped else {"reason": "max_output_tokens"},
            "output": [self._item(status, [_text_part("".join(self.text))])],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
        }

    def closing(self) -> Iterator[Event]:
        """The last events of a stream, sent once the response is stored."""
        (item,) = self.response["output"]
        (part,) = item["content"]
        yield self._part("response.output_text.done", text=part["text"], logprobs=[])
        yield self._part("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{self.response['status']}", response=self.response)

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
        return {
            "id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content,
        }  # fmt: skip


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def ended(response: Response, status: str, code: str | None = None, message: str = "") -> Response:
    """A response without an answer: failed with a reason, or cancelled."""
    error = None if code is None else {"code": code, "message": message}
    return response | {"status": status, "output": [], "usage": None, "error": error}


def item_list(items: Sequence[Item], has_more: bool) -> dict[str, Any]:
    """A page of items."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}
