"""Forms of batches: the ids, purposes and result lines of OpenAI's batches, and of Anthropic's message batches."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Protocol

from holdfast.server.jobs.values import Ending
from holdfast.server.messages.protocol import MessagesChat
from holdfast.server.protocol import ApiError

BATCH, MESSAGE_BATCH = "batch_", "msgbatch_"
"""Beginnings of the ids of OpenAI's batches and of message batches."""
MESSAGE_PURPOSE = "message_batch"
"""Purpose of the files of message batches. Lists of files leave them out."""


class Form(Protocol):
    """How the batches of one API differ from those of the other."""

    prefix: ClassVar[str]
    """Beginning of a batch's id."""
    purpose: ClassVar[str]
    """Purpose of the output files."""
    announced: ClassVar[bool]
    """Whether listeners to OpenAI's batch events hear of these batches."""
    checked: ClassVar[bool]
    """Whether the batch fails as a whole if one of its lines is wrong. If not, only that line fails."""
    told: ClassVar[Collection[str]]
    """Endings of a batch with which each unanswered line has a result."""

    def answered(self, id: str, custom_id: str, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a line that was answered. `id` is the result's own, and `body` the answer."""

    def refused(self, id: str, custom_id: str, request_id: str, error: ApiError) -> dict[str, Any]:
        """Return the result of a line that was refused or failed."""

    def unanswered(self, id: str, custom_id: str, ending: Ending | None) -> dict[str, Any]:
        """Return the result of a line that the end of the batch left without an answer."""


class LineForm:
    """Form of OpenAI's batches."""

    prefix: ClassVar[str] = BATCH
    purpose: ClassVar[str] = "batch_output"
    announced: ClassVar[bool] = True
    checked: ClassVar[bool] = True
    told: ClassVar[Collection[str]] = ("expired",)

    def answered(self, id: str, custom_id: str, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer as OpenAI's API writes it, with its status."""
        response = {"status_code": 200, "request_id": request_id, "body": body}
        return {"id": id, "custom_id": custom_id, "response": response, "error": None}

    def refused(self, id: str, custom_id: str, request_id: str, error: ApiError) -> dict[str, Any]:
        """Return the error as OpenAI's API writes it, with its status."""
        response = {"status_code": error.status, "request_id": request_id, "body": error.body()}
        return {"id": id, "custom_id": custom_id, "response": response, "error": None}

    def unanswered(self, id: str, custom_id: str, ending: Ending | None) -> dict[str, Any]:
        """Return the error of a line of an expired batch."""
        reason = "the completion window ended before this line was answered"
        error = {"code": "batch_expired", "message": reason}
        return {"id": id, "custom_id": custom_id, "response": None, "error": error}


class MessageForm:
    """Form of Anthropic's message batches."""

    prefix: ClassVar[str] = MESSAGE_BATCH
    purpose: ClassVar[str] = MESSAGE_PURPOSE
    announced: ClassVar[bool] = False
    checked: ClassVar[bool] = False
    told: ClassVar[Collection[str]] = ("expired", "cancelled")

    def answered(self, id: str, custom_id: str, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the message."""
        return {"custom_id": custom_id, "result": {"type": "succeeded", "message": body}}

    def refused(self, id: str, custom_id: str, request_id: str, error: ApiError) -> dict[str, Any]:
        """Return the error as the Messages API writes it."""
        body = error.message_body() | {"request_id": request_id}
        return {"custom_id": custom_id, "result": {"type": "errored", "error": body}}

    def unanswered(self, id: str, custom_id: str, ending: Ending | None) -> dict[str, Any]:
        """Return that the line was canceled, or has expired."""
        return {"custom_id": custom_id, "result": {"type": "canceled" if ending == "cancelled" else "expired"}}


OPENAI, MESSAGES = LineForm(), MessageForm()


def form_of(endpoint: str) -> Form:
    """Return the form of the batches that call this endpoint."""
    return MESSAGES if endpoint == MessagesChat.route else OPENAI
