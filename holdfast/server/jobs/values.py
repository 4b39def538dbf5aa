"""Files and batches as plain values, with the shapes in which OpenAI's API shows them. Imports no database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import asdict

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED = ("failed", "completed", "expired", "cancelled")
"""Statuses that never change again."""
Ending = Literal["completed", "expired", "cancelled"]
"""How a batch ends whose input was good."""


class StoredFile(Struct, frozen=True, kw_only=True):
    """A file. Times are in seconds since 1970."""

    id: str
    tenant: str
    purpose: str
    name: str
    """For people: the last part of the name that the client gave."""
    bytes: int
    created: float
    expires: float | None = None

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created),
            "expires_at": None if self.expires is None else int(self.expires),
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of the answered lines."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt=self.prompt + other.prompt,
            cached=self.cached + other.cached,
            completion=self.completion + other.completion,
        )

    def shown(self) -> dict[str, Any]:
        """`usage` of a batch."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt + self.completion,
        }


class LineFault(Struct, frozen=True, kw_only=True):
    """What is wrong with a line of an input file, or with the file where `line` is None."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(Struct, frozen=True, kw_only=True):
    """A batch in its present state. Times are in seconds since 1970."""

    id: str
    tenant: str
    endpoint: str
    input_file: str
    model: str
    """The model that the server served when it took the batch; one that serves another does not go on with it."""
    created: float
    expires: float | None
    """None where no time limit applies, for a batch that runs on the user's own machine."""
    output_seconds: float
    """How long its output files are kept."""
    metadata: Mapping[str, str] | None = None
    status: Status = "validating"
    times: Mapping[str, float] = field(default_factory=dict)
    """When it got each of its later statuses."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = Usage()
    faults: Sequence[LineFault] = ()
    ending: Ending | None = None
    """What finalizing leads to."""
    output_file: str | None = None
    error_file: str | None = None

    @property
    def ended(self) -> bool:
        """Whether its status never changes again."""
        return self.status in ENDED

    def shown(self) -> dict[str, Any]:
        """OpenAI's batch object."""

        def time_of(status: str) -> int | None:
            return int(self.times[status]) if status in self.times else None

        faults = {"object": "list", "data": [asdict(fault) for fault in self.faults]} if self.faults else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": faults,
            "input_file_id": self.input_file,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": int(self.created),
            "in_progress_at": time_of("in_progress"),
            "expires_at": None if self.expires is None else int(self.expires),
            "finalizing_at": time_of("finalizing"),
            "completed_at": time_of("completed"),
            "failed_at": time_of("failed"),
            "expired_at": time_of("expired"),
            "cancelling_at": time_of("cancelling"),
            "cancelled_at": time_of("cancelled"),
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage.shown(),
            "metadata": self.metadata,
        }


class AnsweredLine(Struct, frozen=True, kw_only=True):
    """The answer to one line, as it will stand in an output file."""

    batch: str
    number: int
    completed: bool
    """Whether it belongs to the output file; otherwise to the error file."""
    text: bytes
    """A JSON object, without the end of the line."""
    usage: Usage = Usage()
