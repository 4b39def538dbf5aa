"""Trace: what every step did and when, in Chrome's trace format. Wraps any executor."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import NamedTuple

from holdfast.lm.types import CopyTime, LanguageExecutor, Segment, StepPlan, StepResult
from holdfast.loop.contracts import Clock

MICROSECONDS = 1e6
DEVICE, ROWS, COPIES = 0, 1, 2
"""Process numbers of the trace: steps; sequences, a lane for each row; copies, a lane for each direction."""
OUT, INTO = 0, 1
"""Lanes of copies."""
STEPS, FORWARDS, TRAINING = 0, 1, 2
"""Lanes of the device."""


class TracedExecutor:
    """An executor that writes each step to a file, for chrome://tracing or ui.perfetto.dev.

    A step is a bar on the device's lane. Each of its segments is a bar on the lane of its row, so a stall of a stream
    is a gap in its lane. A counter shows the tokens of each step. A mark on the device's lane shows each preemption, or
    suspension where there is a host tier. A copy between the tiers is a bar of its duration, drawn at its earliest
    possible start. Events are written as steps end, and a truncated file can still be read. About 150 bytes a segment.

    A slice of training is a bar on a lane below the steps, after its step; a counter shows the blocks lent to training.

    On padded rows a step consists of forwards, which have a lane below the steps: each with its rows, the longest of
    their segments and its idle tokens. Only whole steps are timed, so a forward's share of the bar is its share of the
    computed tokens.
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
        self._copying: dict[tuple[int, bool], tuple[float, int, str]] = {}
        """Copies in flight, by step and direction (True: to the device): time of submission, number, and of what."""
        self._host_slots: set[int] = set()
        """The slots whose state is on the host. A load from any other copies nothing between the tiers."""
        self._copied_until = [0.0, 0.0]
        self._lent = 0
        """Blocks that the last plan lent to training."""
        names = {DEVICE: "device", ROWS: "sequences, by row", COPIES: "copies"}
        lines = [event("M", pid, 0, name="process_name", args={"name": name}) for pid, name in names.items()]
        for lane, name in ((OUT, "device to host"), (INTO, "host to device")):
            lines.append(event("M", COPIES, lane, name="thread_name", args={"name": name}))
        for lane, name in ((STEPS, "steps"), (FORWARDS, "forwards"), (TRAINING, "training")):
            lines.append(event("M", DEVICE, lane, name="thread_name", args={"name": name}))
        self._file.write("[\n" + ",\n".join(lines))

    def submit(self, plan: StepPlan) -> None:
        now = self._clock()
        self._plans.append((plan, now))
        into, out = self._row_copies(plan)
        for inward, copies, rows in ((True, len(plan.swap_in), into), (False, len(plan.swap_out), out)):
            if copies or rows:
                self._copying[plan.step, inward] = now, copies or rows, "blocks" if copies else "rows"
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        plan, submitted = self._plans.popleft()
        ended = self._clock()
        # Use the device's own measure where it fits between the neighbours: steps run one after another.
        training = 0.0 if result.training is None else result.training.seconds
        began = max(submitted, self._free_at, ended - result.seconds - training)
        self._free_at = ended
        computed = ended - began
        if plan.training is not None:
            share = training / max(result.seconds + training, 1e-9) if plan.segments else 1.0
            computed *= 1.0 - share
        events = self._events(plan, began, computed) if plan.segments or plan.training is None else []
        events += self._training(plan, result, began + computed, ended)
        events += [self._copied(copy) for copy in result.copies]
        self._file.write("".join(f",\n{line}" for line in events))
        return result

    def close(self) -> None:
        self._inner.close()
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def _training(self, plan: StepPlan, result: StepResult, began: float, ended: float) -> list[str]:
        """The slice of a plan, and the blocks that are lent if their number has changed."""
        events, slice_ = [], plan.training
        if plan.lent != self._lent:
            self._lent = plan.lent
            events.append(event("C", DEVICE, TRAINING, began, name="lent blocks", args={"training": plan.lent}))
        if slice_ is not None:
            numbers: dict[str, object] = {
                "plan": plan.step, "job": slice_.job, "step": slice_.step, "micro-batch": slice_.micro_batch,
            }  # fmt: skip
            if slice_.action == "run":
                numbers |= {"first unit": slice_.first, "units": slice_.stop - slice_.first, "keeps": slice_.keep}
            if result.training is not None and result.training.loss is not None:
                numbers["loss"] = round(result.training.loss, 6)
            name = "training" if slice_.action == "run" else slice_.action
            events.append(event("X", DEVICE, TRAINING, began, ended - began, name=name, args=numbers))
        return events

    def _row_copies(self, plan: StepPlan) -> tuple[int, int]:
        """How many states of rows a plan copies to the device and to the host."""
        into = out = 0
        for move in plan.row_moves:
            if move.kind in ("store", "offload"):
                self._host_slots.add(move.slot)
                out += 1
            elif move.kind in ("keep", "forget"):
                self._host_slots.discard(move.slot)
            elif move.kind == "load":
                into += move.slot in self._host_slots
        return into, out

    def _copied(self, copy: CopyTime) -> str:
        submitted, count, unit = self._copying.pop((copy.step, copy.inward))
        name, lane = ("swap-in", INTO) if copy.inward else ("swap-out", OUT)
        began = max(submitted, self._copied_until[lane])
        self._copied_until[lane] = began + copy.seconds
        numbers: dict[str, float] = {"step": copy.step, unit: count, "bytes": copy.bytes}
        if copy.seconds:
            numbers["GB/s"] = round(copy.bytes / copy.seconds / 1e9, 6)
        return event("X", COPIES, lane, began, copy.seconds, name=name, args=numbers)

    def _events(self, plan: StepPlan, began: float, seconds: float) -> list[str]:
        decodes = sum(segment.length == 1 for segment in plan.segments)
        sampled = [segment for segment in plan.segments if segment.sampling is not None]
        drafts = zip(sampled, plan.drafts or (), strict=False)
        verified = {segment.row: segment.length for segment, draft in drafts if draft}
        decodes += sum(verified.values())
        prefill = plan.num_tokens - decodes
        numbers: dict[str, object] = {
            "step": plan.step,
            "tokens": plan.num_tokens,
            "decodes": decodes,
            "prefill tokens": prefill,
            "segments": len(plan.segments),
            "preempted": list(plan.preempted),
        }
        if plan.forwards:
            numbers |= {"forwards": len(plan.forwards), "idle tokens": plan.idle_tokens}
        events = [
            event("X", DEVICE, STEPS, began, seconds, name=f"step {plan.step}", args=numbers),
            event("C", DEVICE, STEPS, began, name="batch tokens", args={"decodes": decodes, "prefill": prefill}),
        ]
        for name in plan.preempted:
            events.append(event("i", DEVICE, STEPS, began, name=f"{self._preempted} {name}", args={}))
        at = 0
        for run in runs(plan):
            share = seconds * run.share
            if plan.forwards:
                events.append(event("X", DEVICE, FORWARDS, began, share, name=run.name, args=run.numbers))
            for segment in plan.segments[at : run.stop]:
                kind = "verify" if segment.row in verified else "decode" if segment.length == 1 else "prefill"
                events += self._segment(segment, kind, began, share)
            at, began = run.stop, began + share
        return events

    def _segment(self, segment: Segment, kind: str, began: float, seconds: float) -> list[str]:
        events = []
        if segment.row not in self._lanes:
            self._lanes.add(segment.row)
            events.append(event("M", ROWS, segment.row, name="thread_name", args={"name": f"row {segment.row}"}))
        span = {"sequence": segment.sequence_id, "start": segment.start, "stop": segment.stop}
        events.append(event("X", ROWS, segment.row, began, seconds, name=kind, args=span))
        return events


class Run(NamedTuple):
    """One run of the model within a step."""

    stop: int
    """Its segments end before this index."""
    share: float
    """Its part of the tokens that the step computes."""
    name: str
    numbers: dict[str, object]


def runs(plan: StepPlan) -> list[Run]:
    """The runs of a plan: its forwards, or the only one of packed tokens."""
    if not plan.forwards:
        return [Run(len(plan.segments), 1.0, "", {})]
    sizes, at = [], 0
    for forward in plan.forwards:
        lengths = [segment.length for segment in plan.segments[at : forward.stop]]
        sizes.append((len(lengths) + len(forward.ended), max(lengths, default=1), sum(lengths)))
        at = forward.stop
    computed = sum(rows * longest for rows, longest, _ in sizes)
    return [
        Run(
            forward.stop,
            rows * longest / computed if computed else 1 / len(sizes),
            f"{rows} × {longest}{' apart' if forward.apart else ''}",
            {"rows": rows, "longest": longest, "idle tokens": rows * longest - own, "ended rows": len(forward.ended)},
        )
        for forward, (rows, longest, own) in zip(plan.forwards, sizes, strict=True)
    ]


def event(kind: str, process: int, lane: int, began: float = 0.0, seconds: float | None = None, **more: object) -> str:
    """One event of the trace as JSON; times in seconds."""
    fields: dict[str, object] = {"ph": kind, "pid": process, "tid": lane, "ts": round(began * MICROSECONDS, 3)}
    if seconds is not None:
        fields["dur"] = round(seconds * MICROSECONDS, 3)
    return json.dumps(fields | more)
