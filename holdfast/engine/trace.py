"""Trace: what every step did and when, in Chrome's trace format. Wraps any executor."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from holdfast.lm.types import CopyTime, LanguageExecutor, StepPlan, StepResult
from holdfast.loop.contracts import Clock

MICROSECONDS = 1e6
DEVICE, ROWS, COPIES = 0, 1, 2
"""Process numbers of the trace: steps; sequences, a lane for each row; copies, a lane for each direction."""
OUT, INTO = 0, 1
"""Lanes of copies."""


class TracedExecutor:
    """An executor that writes each step to a file, for chrome://tracing or ui.perfetto.dev.

    A step is a bar on the device's lane. Each of its segments is a bar on the lane of its row, so a stall of a stream
    is a gap in its lane. A counter shows the tokens of each step. A mark on the device's lane shows each preemption, or
    suspension where there is a host tier. A copy between the tiers is a bar of its duration, drawn at its earliest
    possible start. Events are written as steps end, and a truncated file can still be read. About 150 bytes a segment.
    """

    def __init__(self, inner: LanguageExecutor, path: str | Path, clock: Clock, *, suspends: bool = False) -> None:
        """`clock` is the loop's. `suspends`: preempted sequences keep their state on the host.

        Raises ValueError if the file cannot be written.
        """
        self._inner = inner
        self._clock = clock
        self._preempted = "suspended" if suspends else "preempted"
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  closed by `close`
        except OSError as error:
            raise ValueError(f"trace {path} cannot be written: {error.strerror}") from None
        self._plans: deque[tuple[StepPlan, float]] = deque()
        self._free_at = 0.0
        self._lanes: set[int] = set()
        self._copying: dict[tuple[int, bool], tuple[float, int]] = {}
        """Copies in flight, by step and direction (True: to the device): time of submission, number of blocks."""
        self._copied_until = [0.0, 0.0]
        names = {DEVICE: "device", ROWS: "sequences, by row", COPIES: "copies"}
        lines = [event("M", pid, 0, name="process_name", args={"name": name}) for pid, name in names.items()]
        for lane, name in ((OUT, "device to host"), (INTO, "host to device")):
            lines.append(event("M", COPIES, lane, name="thread_name", args={"name": name}))
        self._file.write("[\n" + ",\n".join(lines))

    def submit(self, plan: StepPlan) -> None:
        now = self._clock()
        self._plans.append((plan, now))
        for inward, copies in ((True, plan.swap_in), (False, plan.swap_out)):
            if copies:
                self._copying[plan.step, inward] = now, len(copies)
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        plan, submitted = self._plans.popleft()
        ended = self._clock()
        # Use the device's own measure where it fits between the neighbours: steps run one after another.
        began = max(submitted, self._free_at, ended - result.seconds)
        self._free_at = ended
        events = self._events(plan, began, ended - began)
        events += [self._copied(copy) for copy in result.copies]
        self._file.write("".join(f",\n{line}" for line in events))
        return result

    def close(self) -> None:
        self._inner.close()
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def _copied(self, copy: CopyTime) -> str:
        submitted, blocks = self._copying.pop((copy.step, copy.inward))
        name, lane = ("swap-in", INTO) if copy.inward else ("swap-out", OUT)
        began = max(submitted, self._copied_until[lane])
        self._copied_until[lane] = began + copy.seconds
        numbers: dict[str, float] = {"step": copy.step, "blocks": blocks, "bytes": copy.bytes}
        if copy.seconds:
            numbers["GB/s"] = round(copy.bytes / copy.seconds / 1e9, 6)
        return event("X", COPIES, lane, began, copy.seconds, name=name, args=numbers)

    def _events(self, plan: StepPlan, began: float, seconds: float) -> list[str]:
        decodes = sum(segment.length == 1 for segment in plan.segments)
        prefill = plan.num_tokens - decodes
        numbers = {
            "step": plan.step,
            "tokens": plan.num_tokens,
            "decodes": decodes,
            "prefill tokens": prefill,
            "segments": len(plan.segments),
            "preempted": list(plan.preempted),
        }
        events = [
            event("X", DEVICE, 0, began, seconds, name=f"step {plan.step}", args=numbers),
            event("C", DEVICE, 0, began, name="batch tokens", args={"decodes": decodes, "prefill": prefill}),
        ]
        for name in plan.preempted:
            events.append(event("i", DEVICE, 0, began, name=f"{self._preempted} {name}", args={}))
        for segment in plan.segments:
            if segment.row not in self._lanes:
                self._lanes.add(segment.row)
                events.append(event("M", ROWS, segment.row, name="thread_name", args={"name": f"row {segment.row}"}))
            kind = "decode" if segment.length == 1 else "prefill"
            span = {"sequence": segment.sequence_id, "start": segment.start, "stop": segment.stop}
            events.append(event("X", ROWS, segment.row, began, seconds, name=kind, args=span))
        return events


def event(kind: str, process: int, lane: int, began: float = 0.0, seconds: float | None = None, **more: object) -> str:
    """One event of the trace as JSON; times in seconds."""
    fields: dict[str, object] = {"ph": kind, "pid": process, "tid": lane, "ts": round(began * MICROSECONDS, 3)}
    if seconds is not None:
        fields["dur"] = round(seconds * MICROSECONDS, 3)
    return json.dumps(fields | more)
