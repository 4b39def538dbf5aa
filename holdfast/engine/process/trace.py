"""Trace: what every step did and when, in Chrome's trace format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.engine.activity import (
    BlockReader,
    CopyRecord,
    Scene,
    SliceRecord,
    StepRecord,
    StepRecorder,
    verified_segments,
)
from holdfast.files.regular import create_file
from holdfast.lm.config import EngineConfig
from holdfast.lm.memory.block_map import ConversationBlocks
from holdfast.lm.parts.tuning.values import TrainingPlan
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import EngineShape, RowPlan, Segment, StepPlan, StepResult
from holdfast.loop.contracts import Clock

MICROSECONDS = 1e6
DEVICE, ROWS, COPIES, STATE = 0, 1, 2, 3
"""Process numbers of the trace: steps; sequences, a lane for each row; copies, a lane for each direction; queues and
blocks."""
OUT, INTO = 0, 1
"""Lanes of copies."""
STEPS, FORWARDS, TRAINING = 0, 1, 2
"""Lanes of the device."""
NOT_ARGUMENTS = ("at", "seconds", "training", "copies", "action", "inward")
"""Fields of records that bars show by their place and name."""
LOOKS_PER_SECOND = 10
"""How often a trace shows the queues."""
SHARE = 0.01
"""Largest share of the time in which a trace reads blocks."""


class Trace:
    """An observer that writes each step to a file, for chrome://tracing, ui.perfetto.dev or the server's own page.

    A step is a bar on the device's lane, with its record (`activity.StepRecord`) as arguments. Each of its segments is
    a bar on the lane of its row, so a stall of a stream is a gap in its lane. A counter shows the tokens of each step.
    A mark on the device's lane shows each preemption, or suspension where there is a host tier. A copy between the
    tiers is a bar of its duration, drawn at its earliest possible start. Events are written as steps end, and a
    truncated file can still be read. About 150 bytes a segment.

    With a planner, marks of a process of their own show the queues LOOKS_PER_SECOND times a second of the clock. Other
    marks show the blocks of each conversation that has changed. Blocks are read a few hundred at a time, between steps,
    and all at once when the trace is closed.

    A slice of training is a bar on a lane below the steps, after its step; a counter shows the blocks lent to training.

    On padded rows a step consists of forwards, which have a lane below the steps: each with its rows, the longest of
    their segments and its idle tokens. Only whole steps are timed, so a forward's share of the bar is its share of the
    computed tokens.
    """

    def __init__(
        self,
        path: str | Path,
        clock: Clock,
        *,
        suspends: bool = False,
        planner: Scheduler | None = None,
        about: Mapping[str, object] | None = None,
    ) -> None:
        """`clock` is the loop's. `suspends`: preempted sequences keep their state on the host.

        The trace also shows the queues and blocks of a `planner`. `about` describes the engine (`about_engine`).

        Raises ValueError if the file cannot be written.
        """
        self._clock = clock
        self._preempted = "suspended" if suspends else "preempted"
        try:
            self._file = TextIOWrapper(create_file(path, follow_links=True), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"trace {path} cannot be written: {error.strerror}") from None
        self._recorder = StepRecorder()
        self._scenes = [] if planner is None else [Scene(planner)]
        """The view of the planner, if it is to be shown."""
        self._blocks = [BlockReader(scene, clock, SHARE) for scene in self._scenes]
        self._next_look = 0.0
        self._lanes: set[int] = set()
        self._lent = 0
        """Blocks that the last plan lent to training."""
        names = {DEVICE: "device", ROWS: "sequences, by row", COPIES: "copies"}
        lines = [event("M", pid, 0, name="process_name", args={"name": name}) for pid, name in names.items()]
        for lane, name in ((OUT, "device to host"), (INTO, "host to device")):
            lines.append(event("M", COPIES, lane, name="thread_name", args={"name": name}))
        for lane, name in ((STEPS, "steps"), (FORWARDS, "forwards"), (TRAINING, "training")):
            lines.append(event("M", DEVICE, lane, name="thread_name", args={"name": name}))
        for scene in self._scenes:
            lines.append(event("M", STATE, 0, name="process_name", args={"name": "queues and blocks"}))
            numbers = {**(about or {}), "costs": scene.costs()}
            lines.append(event("i", STATE, 0, name="engine", args=numbers))
        self._file.write("[\n" + ",\n".join(lines))

    def planned(self, plan: StepPlan) -> None:
        now = self._clock()
        self._recorder.submit(plan, now)
        for scene in self._scenes:
            self._look(scene, plan, now)

    def ended(self, result: StepResult) -> None:
        ((plan, record),) = self._recorder.collect(result, self._clock())
        events = self._events(plan, record) if plan.segments or not plan.part(TrainingPlan).slice else []
        events += self._training(record)
        events += [self._copied(copy) for copy in record.copies]
        self._write(events)

    def close(self) -> None:
        """Write the blocks as they are now, and complete the file. May be called more than once."""
        if not self._file.closed:
            now = self._clock()
            for scene in self._scenes:
                self._write_blocks(scene.blocks(now, 0), now)
            self._file.write("\n]\n")
            self._file.close()

    def _write(self, events: Iterable[str]) -> None:
        self._file.write("".join(f",\n{line}" for line in events))

    def _look(self, scene: Scene, plan: StepPlan, now: float) -> None:
        """Write what has changed in the queues and the blocks, as far as it is time."""
        scene.meet_all(plan)
        for blocks in self._blocks:
            self._write_blocks(blocks.read_due(now), now)
        if now < self._next_look:
            return
        self._next_look = now + 1 / LOOKS_PER_SECOND
        self._write(
            [
                event("i", STATE, 0, now, name="queues", args=scene.queues()._asdict()),
                event("i", STATE, 0, now, name="stats", args=asdict(scene.stats())),
            ]
        )

    def _write_blocks(self, rows: list[ConversationBlocks], now: float) -> None:
        """Write where the blocks of these conversations are."""
        if rows:
            self._write([event("i", STATE, 0, now, name="blocks", args={"rows": rows})])

    def _training(self, record: StepRecord) -> list[str]:
        """The slice of a step, and the blocks that are lent if their number has changed."""
        events, slices = [], [] if record.training is None else [record.training]
        began = slices[0].at if slices else record.at + record.seconds
        if record.lent != self._lent:
            self._lent = record.lent
            events.append(event("C", DEVICE, TRAINING, began, name="lent blocks", args={"training": record.lent}))
        for slice_ in slices:
            name = "training" if slice_.action == "run" else slice_.action
            numbers = arguments(slice_)
            events.append(event("X", DEVICE, TRAINING, began, slice_.seconds, name=name, args=numbers))
        return events

    def _copied(self, copy: CopyRecord) -> str:
        name, lane = ("swap-in", INTO) if copy.inward else ("swap-out", OUT)
        numbers = arguments(copy)
        if copy.seconds:
            numbers["GB/s"] = round(copy.bytes / copy.seconds / 1e9, 6)
        return event("X", COPIES, lane, copy.at, copy.seconds, name=name, args=numbers)

    def _events(self, plan: StepPlan, record: StepRecord) -> list[str]:
        began, seconds = record.at, record.seconds
        tokens = {"decodes": record.decodes, "prefill": record.prefill}
        events = [
            event("X", DEVICE, STEPS, began, seconds, name=f"step {plan.step}", args=arguments(record)),
            event("C", DEVICE, STEPS, began, name="batch tokens", args=tokens),
        ]
        for name in plan.preempted:
            events.append(event("i", DEVICE, STEPS, began, name=f"{self._preempted} {name}", args={}))
        at, verified = 0, {plan.segments[place].row for place in verified_segments(plan)}
        for run in runs(plan):
            share = seconds * run.share
            if plan.part(RowPlan).forwards:
                events.append(event("X", DEVICE, FORWARDS, began, share, name=run.name, args=run.numbers))
            times = f'"ts": {round(began * MICROSECONDS, 3)}, "dur": {round(share * MICROSECONDS, 3)}'
            for segment in plan.segments[at : run.stop]:
                kind = "verify" if segment.row in verified else "decode" if segment.length == 1 else "prefill"
                events += self._segment(segment, kind, times)
            at, began = run.stop, began + share
        return events

    def _segment(self, segment: Segment, kind: str, times: str) -> list[str]:
        """The bar of a segment, with the beginning and the duration in `times`.

        It is written without `event`: a step has hundreds of segments, and its tokens wait until they are written.
        """
        name, row, start, stop, _, _ = segment
        events = []
        if row not in self._lanes:
            self._lanes.add(row)
            events.append(event("M", ROWS, row, name="thread_name", args={"name": f"row {row}"}))
        span = f'{{"sequence": {json.dumps(name)}, "start": {start}, "stop": {stop}}}'
        events.append(f'{{"ph": "X", "pid": {ROWS}, "tid": {row}, {times}, "name": "{kind}", "args": {span}}}')
        return events


def arguments(record: StepRecord | CopyRecord | SliceRecord) -> dict[str, object]:
    """A record as the arguments of its bar, which has its times. Fields with bars of their own are left out."""
    fields: dict[str, object] = msgspec.to_builtins(record)
    return {name: value for name, value in fields.items() if name not in NOT_ARGUMENTS}


def about_engine(config: EngineConfig, shape: EngineShape) -> dict[str, object]:
    """Facts about an engine that a view needs in addition to its records."""
    return {
        "model": shape.model,
        "scheduler": config.scheduler,
        "target": config.tbt_seconds,
        "budget": shape.token_budget,
        "block_size": config.block_size if shape.executor == "paged" else 1,
        "blocks": shape.num_blocks,
        "host_blocks": shape.num_host_blocks,
        "rows": config.most_sequences,
    }


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
    if not plan.part(RowPlan).forwards:
        return [Run(len(plan.segments), 1.0, "", {})]
    sizes, at = [], 0
    for forward in plan.part(RowPlan).forwards:
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
        for forward, (rows, longest, own) in zip(plan.part(RowPlan).forwards, sizes, strict=True)
    ]


def event(kind: str, process: int, lane: int, began: float = 0.0, seconds: float | None = None, **more: object) -> str:
    """One event of the trace as JSON; times in seconds."""
    fields: dict[str, object] = {"ph": kind, "pid": process, "tid": lane, "ts": round(began * MICROSECONDS, 3)}
    if seconds is not None:
        fields["dur"] = round(seconds * MICROSECONDS, 3)
    return json.dumps(fields | more)
