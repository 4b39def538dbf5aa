"""Azure's traces: requests with their lengths and times."""

from __future__ import annotations

import csv
import io
from datetime import datetime
from pathlib import Path

from holdfast.lab.workloads.fields import read_workload
from holdfast.lab.workloads.values import Conversation, Turn


def azure_csv(path: str | Path) -> list[Conversation]:
    """Read an Azure LLM inference trace: TIMESTAMP, ContextTokens, GeneratedTokens. Raises ValueError with the line."""
    requests: list[Conversation] = []
    first: datetime | None = None
    rows = csv.DictReader(io.StringIO(read_workload(path)))
    try:
        for row in rows:
            stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
            turn = Turn(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            first = first or stamp
            requests.append(_request((stamp - first).total_seconds(), turn))
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path}, line {rows.reader.line_num}: {error}; the columns are TIMESTAMP, ContextTokens, GeneratedTokens"
        ) from None
    return requests


def _request(arrival: float, turn: Turn) -> Conversation:
    """A request of a trace. Raises ValueError for an invalid time or length."""
    if not 0 <= arrival < float("inf"):
        raise ValueError(f"it arrives {arrival:g} s after the first")
    if turn.prompt < 1 or turn.output < 1:
        raise ValueError(f"{turn.prompt} and {turn.output} tokens")
    return Conversation(arrival, (turn,))
