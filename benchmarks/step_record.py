"""A record of every step of a loop: when the host planned, packed and read it, what it held, what the device took."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from holdfast.core.columns import Columns
from holdfast.core.types import SequenceOutput
from holdfast.lm.types import StepPlan, StepResult
from holdfast.loop.loop import Loop

NAMES = (
    "step", "plan", "planned", "submitted", "collect", "collected", "updated", "seconds", "decodes", "context",
    "prefill", "pairs", "chunks", "in", "out", "awaits", "waiting", "running", "arriving", "ready", "available",
    "preempted", "copies",
)  # fmt: skip
"""Times in seconds on the monotonic clock, `seconds` on the device; `context` is the positions that decodes attend to,
`pairs` those of all tokens of chunks together; copies as (step, whether they come in, bytes, seconds) as they end."""


class StepRecord:
    """Goes around a loop's scheduler and executor; takes some 1 ms a step of 100 sequences."""

    def __init__(self, loop: Loop) -> None:
        self.rows: list[list[Any]] = []
        self._under_way: dict[int, dict[str, Any]] = {}
        self._scheduler, self._executor = loop._scheduler, loop._executor
        self._inner = (
            self._scheduler.schedule, self._scheduler.update, self._executor.submit, self._executor.collect
        )  # fmt: skip
        for holder, name in (
            (self._scheduler, "schedule"), (self._scheduler, "update"),
            (self._executor, "submit"), (self._executor, "collect"),
        ):  # fmt: skip
            setattr(holder, name, getattr(self, f"_{name}"))

    def write(self, path: Path) -> None:
        """Write what was recorded so far as JSON."""
        rounded = [[round(value, 6) if isinstance(value, float) else value for value in row] for row in self.rows]
        path.write_text(json.dumps(dict(names=NAMES, rows=rounded)))

    def _schedule(self, now: float) -> StepPlan | None:
        began = time.monotonic()
        plan = self._inner[0](now)
        if plan is None:
            return None
        row: dict[str, Any] = dict(step=plan.step, plan=began, planned=time.monotonic())
        spans = [(segment.start, segment.stop) for segment in plan.segments]
        chunks = [span for span in spans if span[1] - span[0] > 1]
        queues, pool = self._scheduler._queues, self._scheduler._queues.pool
        row |= dict(
            decodes=len(spans) - len(chunks), context=sum(stop for start, stop in spans if stop - start == 1),
            prefill=sum(stop - start for start, stop in chunks), chunks=len(chunks),
            pairs=sum((stop - start) * (start + stop) // 2 for start, stop in chunks),
            awaits=plan.awaits, waiting=len(queues.waiting), running=len(queues.running), arriving=len(queues.swapping_in),
            ready=pool.allocatable, available=pool.available, preempted=len(plan.preempted),
        )  # fmt: skip
        row["in"], row["out"] = len(plan.swap_in), len(plan.swap_out)
        self._under_way[plan.step] = row
        return plan

    def _submit(self, plan: StepPlan) -> None:
        self._inner[2](plan)
        self._under_way[plan.step]["submitted"] = time.monotonic()

    def _collect(self) -> StepResult:
        began = time.monotonic()
        result = self._inner[3]()
        copies = [(copy.step, copy.inward, copy.bytes, round(copy.seconds, 6)) for copy in result.copies]
        self._under_way[result.step] |= dict(
            collect=began, collected=time.monotonic(), seconds=result.seconds, copies=copies
        )
        return result

    def _update(self, plan: StepPlan, result: StepResult, now: float) -> Columns[SequenceOutput]:
        outputs = self._inner[1](plan, result, now)
        row = self._under_way.pop(plan.step)
        row["updated"] = time.monotonic()
        self.rows.append([row[name] for name in NAMES])
        return outputs
