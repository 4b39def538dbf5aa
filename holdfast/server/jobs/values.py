"""Files, batches and tuning jobs as plain values, with their objects in OpenAI's API. Imports no database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import asdict

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED = ("failed", "completed", "expired", "cancelled")
"""Final statuses of a batch."""
Ending = Literal["completed", "expired", "cancelled"]
"""Final statuses of a batch whose input was valid."""


class StoredFile(Struct, frozen=True, kw_only=True):
    """A file. Times are in seconds since 1970."""

    id: str
    tenant: str
    purpose: str
    name: str
    """File name for display: the last part of the name that the client gave."""
    bytes: int
    created: float
    expires: float | None = None

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
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
        """Return the `usage` object of a batch."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt + self.completion,
        }


class LineFault(Struct, frozen=True, kw_only=True):
    """A fault of a line of an input file, or of the whole file if `line` is None."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(Struct, frozen=True, kw_only=True):
    """A batch in its current state. Times are in seconds since 1970."""

    id: str
    tenant: str
    endpoint: str
    input_file: str
    model: str
    """Name of the model that was served when the batch was created. Only servers of this model continue the batch."""
    created: float
    expires: float | None
    """Time at which the batch expires. None if it never expires: a batch that `holdfast batch` runs on this machine."""
    output_seconds: float
    """Number of seconds for which its output files are kept."""
    key: str = ""
    """Name of the API key that created the batch and to which its tokens are charged; empty without keys."""
    metadata: Mapping[str, str] | None = None
    status: Status = "validating"
    times: Mapping[str, float] = field(default_factory=dict)
    """Time at which the batch reached each status after the first."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = Usage()
    faults: Sequence[LineFault] = ()
    ending: Ending | None = None
    """Final status of a batch that is finalizing; None before that."""
    output_file: str | None = None
    error_file: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the status is final."""
        return self.status in ENDED

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""

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
    """The answer to one line, as it is written to an output file."""

    batch: str
    number: int
    completed: bool
    """Whether the answer belongs to the output file. If not, it belongs to the error file."""
    text: bytes
    """Bytes of a JSON object, without a line end."""
    usage: Usage = Usage()


MOST_DIED = 2
"""Number of engines that may end during the same line or job before it is given up."""
MOST_ENDS = 3
"""Number of engines and servers, killed ones included, that may end during a line or job before it is given up."""


class Attempt(Struct, frozen=True, kw_only=True):
    """Number of engines and servers that ended while they had a batch line or a tuning job."""

    died: int = 0
    """Number of engines that ended, as reported by their server."""
    cut: int = 0
    """Number of servers that ended without a report: killed with their engine, or by a power failure."""

    @property
    def suspect(self) -> bool:
        """Whether the work may be the cause, so that it is tried again alone. One killed server does not suffice."""
        return self.died >= 1 or self.cut >= 2

    @property
    def given_up(self) -> bool:
        """Whether the work is not tried again."""
        return self.died >= MOST_DIED or self.died + self.cut >= MOST_ENDS

    def reason(self, what: str) -> str:
        """Return the reason for giving up, as an error text. `what` names the work, for example "line"."""
        who = "the engine" if not self.cut else "the engine or the server"
        times = self.died + self.cut
        return f"{who} ended {times} times while it had this {what}; it is not tried again, as it may be the cause"


ENGINE_ENDED = "engine_ended"
"""Error code of a line or a job that is given up."""

JobStatus = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
JOB_ENDED = ("succeeded", "failed", "cancelled")
"""Final statuses of a tuning job."""
Wanted = Literal["run", "pause", "cancel"]
"""Wanted state of a tuning job. The job's owner carries it out."""
CHECKPOINTS_SERVED = 3
"""Number of a job's newest checkpoints that are served. Each has its own model name."""


class JobCheckpoint(Struct, frozen=True, kw_only=True):
    """An adapter that a tuning job has written."""

    id: str
    step: int
    """Number of steps that the job had done when it wrote the adapter."""
    created: float
    loss: float
    """Training loss of the last step."""
    validation: float | None = None


class TuningJob(Struct, frozen=True, kw_only=True):
    """A tuning job in its current state. Times are in seconds since 1970."""

    id: str
    tenant: str
    model: str
    """Name of the base model."""
    name: str
    """Name under which the finished adapter is served."""
    created: float
    training_file: str
    validation_file: str | None = None
    seed: int
    metadata: Mapping[str, str] | None = None
    asked: Mapping[str, Any]
    """Hyperparameters as the client gave them, by their names in the API."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Values chosen for the hyperparameters that the client left open. Empty until the files are read."""
    status: JobStatus = "validating_files"
    """Status of the job. It stays `queued` or `running` until a pause takes effect."""
    finished: float | None = None
    error: LineFault | None = None
    """Reason for the failure; None if the job has not failed."""
    faults: Sequence[LineFault] = ()
    """All faults of its files."""
    data_digest: str = ""
    """SHA-256 digest of its examples."""
    validation_digest: str = ""
    examples: int = 0
    steps: int = 0
    """Number of steps of the whole job; 0 until it is known."""
    step: int = 0
    """Number of steps whose results are stored."""
    trained_tokens: int = 0
    loss: float | None = None
    """Training loss of the last step."""
    finishes: float | None = None
    """Time at which the job is expected to end."""
    checkpoints: Sequence[JobCheckpoint] = ()
    result_file: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the status is final."""
        return self.status in JOB_ENDED

    def name_of(self, checkpoint: JobCheckpoint) -> str:
        """Return the model name of a checkpoint."""
        return f"{self.name}:ckpt-step-{checkpoint.step}"

    @property
    def served(self) -> dict[str, int]:
        """Names under which the job's adapters are served, each with the step of its checkpoint."""
        names = {self.name_of(each): each.step for each in self.checkpoints[-CHECKPOINTS_SERVED:]}
        if self.status == "succeeded" and self.checkpoints:
            names[self.name] = self.checkpoints[-1].step
        return names

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's job object. `progress` is Holdfast's own field."""
        parameters = {**dict.fromkeys(OPENAI_PARAMETERS, "auto"), **self.asked, **self.chosen}
        faults = [asdict(fault) for fault in self.faults]
        return {
            "id": self.id,
            "object": "fine_tuning.job",
            "created_at": int(self.created),
            "error": None
            if self.error is None
            else {"code": self.error.code, "message": self.error.message, "param": self.error.param, "data": faults},
            "estimated_finish": int(self.finishes) if self.finishes and self.status == "running" else None,
            "fine_tuned_model": self.name if self.status == "succeeded" else None,
            "finished_at": None if self.finished is None else int(self.finished),
            "hyperparameters": {name: parameters[name] for name in OPENAI_PARAMETERS},
            "integrations": [],
            "metadata": self.metadata,
            "method": {"type": "supervised", "supervised": {"hyperparameters": parameters}},
            "model": self.model,
            "organization_id": "",
            "result_files": [] if self.result_file is None else [self.result_file],
            "seed": self.seed,
            "status": self.status,
            "trained_tokens": self.trained_tokens if self.status == "succeeded" else None,
            "training_file": self.training_file,
            "validation_file": self.validation_file,
            "progress": {
                "step": self.step, "total_steps": self.steps, "trained_tokens": self.trained_tokens,
                "train_loss": self.loss,
            },
        }  # fmt: skip

    def shown_checkpoints(self) -> list[dict[str, Any]]:
        """Return OpenAI's checkpoint objects, the newest first."""
        return [
            {
                "id": each.id,
                "object": "fine_tuning.job.checkpoint",
                "created_at": int(each.created),
                "fine_tuned_model_checkpoint": self.name_of(each),
                "fine_tuning_job_id": self.id,
                "metrics": {"step": each.step, "train_loss": each.loss, "valid_loss": each.validation},
                "step_number": each.step,
            }
            for each in reversed(self.checkpoints)
        ]


OPENAI_PARAMETERS = ("n_epochs", "batch_size", "learning_rate_multiplier")


class JobEvent(Struct, frozen=True, kw_only=True):
    """An event of a tuning job."""

    created: float
    message: str
    level: Literal["info", "warn", "error"] = "info"
    data: Mapping[str, Any] | None = None
    """Results of a step, with its number; None for other events."""

    def shown(self, job: str, number: int) -> dict[str, Any]:
        """Return OpenAI's event object."""
        return {
            "id": event_id(job, number),
            "object": "fine_tuning.job.event",
            "created_at": int(self.created),
            "level": self.level,
            "message": self.message,
            "data": self.data,
            "type": "message" if self.data is None else "metrics",
        }


def event_id(job: str, number: int) -> str:
    """Return the id of a job's event with this number."""
    return f"ftevent-{job.removeprefix('ftjob-')}-{number}"
