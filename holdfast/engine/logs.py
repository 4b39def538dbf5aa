"""Logs: the lines of this process and of those that it starts, as text or as JSON, on standard error."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any, Literal

Format = Literal["text", "json"]

FORMAT_VARIABLE = "HOLDFAST_LOG_FORMAT"
"""Environment variable by which the processes that we start learn the format. Options set it; users need not."""


class JsonFormatter(logging.Formatter):
    """One JSON object on one line for each record.

    Each has `time` (UTC, ISO 8601), `level`, `logger` and `message`. A record that was logged with
    `extra=fields(...)` has these fields, too, and one of an exception has `exception`, its traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, default=str)


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Return `extra` for a record: the fields of its JSON object."""
    return {"fields": values}


def log_as(form: Format, level: str, *, timed: bool = False) -> None:
    """Configure the log of this process: records of Holdfast from `level` on, and warnings of other packages.

    Text has the time of a record only if it is `timed`. Processes that are started later get the same format.
    """
    os.environ[FORMAT_VARIABLE] = form
    if form == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        logging.basicConfig(handlers=[handler], level=logging.WARNING)
        logging.captureWarnings(True)
    else:
        logging.basicConfig(format=f"{'%(asctime)s ' * timed}holdfast: %(message)s", level=logging.WARNING)
    logging.getLogger("holdfast").setLevel(level.upper())


def log_as_parent() -> None:
    """Configure the log of an engine's process: JSON if its parent writes JSON. Text needs no configuration."""
    if os.environ.get(FORMAT_VARIABLE) == "json":
        log_as("json", "warning")
