"""Watched: shows the client what the loop does while somebody watches, in a bounded share of its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import zip_longest
from math import inf

from holdfast.engine import messages
from holdfast.engine.activity import BlockReader, Scene, StepRecord, StepRecorder
from holdfast.engine.messages import Activity
from holdfast.engine.process.handler import Handler
from holdfast.lm.memory.block_map import ConversationBlocks
from holdfast.lm.scheduler.queue_report import QueueReport
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import LanguageLoop, StepPlan, StepResult
from holdfast.loop.contracts import Clock

TELL_SECONDS = 0.1
"""Time between two messages."""
QUEUE_SECONDS = 0.25
"""Time between two looks at the queues."""
QUIET_SECONDS = 1.0
"""Time between two messages while nothing happens."""
SHARE = 0.002
"""Share of the time in which blocks are looked at."""
MOST_STEPS = 48
"""Records of steps in one message. Beyond that, steps that only decode share one with the step before."""
LONGEST_LEASE = 60.0
"""Seconds after which the client has to ask again."""


class Recording:
    """An observer that keeps a record of each step."""

    def __init__(self, clock: Clock, on_plan: Callable[[StepPlan], None]) -> None:
        """`on_plan` is called with each plan as soon as its planner has made it."""
        self._clock, self._on_plan = clock, on_plan
        self._recorder = StepRecorder()
        self._passed: list[tuple[StepPlan | StepResult, float]] = []
        """The plans and results since the last records were taken, each with its time."""

    def planned(self, plan: StepPlan) -> None:
        self._passed.append((plan, self._clock()))
        self._on_plan(plan)

    def ended(self, result: StepResult) -> None:
        self._passed.append((result, self._clock()))

    def close(self) -> None:
        """Do nothing: the records can still be taken."""

    def take(self) -> list[StepRecord]:
        """Records of the steps that have ended since the last call. Making many at once takes less time for each."""
        records: list[StepRecord] = []
        for passed, at in self._passed:
            if isinstance(passed, StepPlan):
                self._recorder.submit(passed, at)
                continue
            for _, record in self._recorder.collect(passed, at):
                if len(records) < MOST_STEPS or not merge(records[-1], record):
                    records.append(record)
        self._passed.clear()
        return records


class Watched(Handler):
    """Lets a recording observe a loop while somebody watches, and no longer.

    While nobody does, the loop is as it was. Steps cost a few µs each; a look at the queues is taken four times a
    second; and blocks are looked at a few hundred at a time, as seldom as keeps that below SHARE of the time.
    """

    receives = (messages.Watch,)

    def __init__(self, loop: LanguageLoop, send: Callable[[Activity], None], clock: Clock = time.monotonic) -> None:
        """`clock` is the loop's."""
        self._loop, self._send, self._clock = loop, send, clock
        self._watching: list[tuple[Scene, Recording, BlockReader]] = []
        """The view of the scheduler, the observer of the loop and what reads blocks, while somebody watches."""
        self._until = self._told_at = self._looked_at = 0.0
        self._blocks: list[ConversationBlocks] = []
        self._queues: list[QueueReport] = []
        """The queues as last sent; empty before."""

    @property
    def on(self) -> bool:
        """Whether somebody watches."""
        return bool(self._watching)

    def receive(self, message: messages.Watch) -> None:
        self.watch(message.seconds)

    def watch(self, seconds: float) -> None:
        """Report the loop's work for this many seconds from now on; 0 ends the reports."""
        self._until = self._clock() + min(seconds, LONGEST_LEASE)
        if seconds <= 0:
            self._end()
        elif not self._watching and isinstance(self._loop.planner, Scheduler):
            scene = Scene(self._loop.planner)
            recording = Recording(self._clock, scene.meet_all)
            self._watching.append((scene, recording, BlockReader(scene, self._clock, SHARE)))
            self._loop.observe(recording)
            self._blocks, self._queues = [], []
            self._told_at, self._looked_at = 0.0, -inf
            self._tell(self._clock(), begins=True)

    def tell_due(self) -> None:
        """Between two steps: send what is due, if somebody watches."""
        if self._watching:
            self.tell()

    def tell(self, *, idle: bool = False) -> None:
        """Between two steps, or now and then while the loop is `idle`: send what is due."""
        now = self._clock()
        if now >= self._until:
            self._end()
            return
        for _, _, blocks in self._watching:
            self._blocks += blocks.read_idle(now) if idle else blocks.read_due(now)
        if now >= self._told_at + TELL_SECONDS:
            self._tell(now)

    def _tell(self, now: float, *, begins: bool = False) -> None:
        """Send the news, if there are any, or if the last message was a while ago."""
        ((scene, recording, _),) = self._watching
        steps, queues, stats = recording.take(), None, None
        if now >= self._looked_at + QUEUE_SECONDS:
            self._looked_at = now
            queues, stats = scene.queues(), scene.stats()
            if not (steps or self._blocks or [queues] != self._queues) and now < self._told_at + QUIET_SECONDS:
                return
            self._queues = [queues]
        elif not (steps or self._blocks or begins):
            return
        costs = scene.costs() if begins else None
        self._send(Activity(now, begins, steps, self._blocks, queues, stats, costs))
        self._blocks, self._told_at = [], now

    def _end(self) -> None:
        """Stop observing the loop."""
        for _, recording, _ in self._watching:
            self._loop.ignore(recording)
        self._watching.clear()


def merge(last: StepRecord, record: StepRecord) -> bool:
    """Add a step to the record of the one before it, if both only decode. Returns whether it was added."""
    for each in (last, record):
        special = each.prefill or each.preempted or each.swap_in or each.swap_out or each.copies
        if special or each.training is not None:
            return False
    last.seconds = round(record.at + record.seconds - last.at, 6)
    last.tokens += record.tokens
    last.decodes += record.decodes
    last.segments += record.segments
    last.predicted += record.predicted
    last.measured += record.measured
    last.stages = [round(sum(both), 6) for both in zip_longest(last.stages, record.stages, fillvalue=0.0)]
    last.forwards += record.forwards
    last.idle_tokens += record.idle_tokens
    last.steps += record.steps
    return True
