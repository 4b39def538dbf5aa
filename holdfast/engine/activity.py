"""Records of an engine's activity: its steps, its queues, and its blocks. For traces and for live views.

In a trace file, a step's record is the arguments of its bar, and the other records are those of instant events. A live
view receives the same records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from holdfast.lm.memory.block_map import BlockMap, ConversationBlocks
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingReport
from holdfast.lm.scheduler.queue_report import QueueReport, report_queues
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import RowMove, RowPlan, SchedulerStats, StepPlan, StepResult, idle_tokens
from holdfast.loop.contracts import Clock

MOST_REQUESTS = 64
"""Largest number of requests of each queue in a record."""
LOOKED_AT = 256
"""Approximate number of blocks that are read in one go."""
IDLE_SECONDS = 0.002
"""Seconds for which an idle engine reads blocks in one go, until all state that it keeps has been reported."""


class ChunkRecord(NamedTuple):
    """Positions [start, stop) of a request that a step computes: part of its prompt, or of its generated tokens."""

    request: str
    start: int
    stop: int


class CopyRecord(msgspec.Struct, omit_defaults=True):
    """The copies that one plan began in one direction, once they are complete."""

    step: int
    inward: bool
    """Whether the copies go to the device."""
    at: float
    """The earliest time at which they can have begun, in seconds."""
    seconds: float
    bytes: int
    blocks: int = 0
    rows: int = 0
    """Number of padded rows copied, in place of blocks."""


class SliceRecord(msgspec.Struct, omit_defaults=True):
    """A slice of training."""

    plan: int
    job: str
    step: int
    micro_batch: int = msgspec.field(name="micro-batch")
    action: str
    at: float
    seconds: float
    first: int | None = msgspec.field(name="first unit", default=None)
    units: int | None = None
    keeps: bool | None = None
    loss: float | None = None


class StepRecord(msgspec.Struct, omit_defaults=True):
    """A step that has ended. Times are in seconds on the loop's clock."""

    step: int
    at: float
    """Time at which it began to compute."""
    seconds: float
    """Seconds that its segments took."""
    tokens: int
    decodes: int
    """Number of its tokens that belong to decodes, including the drafts that they verify."""
    prefill: int = msgspec.field(name="prefill tokens")
    segments: int
    preempted: list[str]
    chunks: list[ChunkRecord] = []
    budget: int = 0
    """Number of tokens that it could have held; 0 if unknown."""
    predicted: float = 0.0
    """Seconds that the policy expected; 0 if it predicts nothing."""
    stages: list[float] = []
    """Seconds that each stage of a pipeline computed; empty for one stage."""
    swap_in: int = msgspec.field(name="blocks in", default=0)
    """Number of blocks that it began to copy from the host."""
    swap_out: int = msgspec.field(name="blocks out", default=0)
    forwards: int = 0
    idle_tokens: int = msgspec.field(name="idle tokens", default=0)
    submitted: float = 0.0
    """Time at which its plan was submitted."""
    measured: float = 0.0
    """Seconds that the device measured for its segments. `seconds` is shorter if the step before was collected late."""
    lent: int = 0
    """Number of blocks lent to training."""
    training: SliceRecord | None = None
    copies: list[CopyRecord] = []
    """Copies that were seen to complete at this step."""
    steps: int = 1
    """Number of steps in this record. Many short steps in a row that only decode make one record of sums.
    """


class Recorded(NamedTuple):
    """A step that has ended: its plan, and its record."""

    plan: StepPlan
    record: StepRecord


class StepRecorder:
    """Turns plans and results, as they pass, into records. It may begin while steps are in flight."""

    def __init__(self) -> None:
        self._plans: deque[tuple[StepPlan, float]] = deque()
        self._free_at = 0.0
        self._copying: dict[tuple[int, bool], tuple[float, int, str]] = {}
        """Copies in flight, by step and direction (True: to the device): time of submission, number, and "blocks" or
        "rows".
        """
        self._host_slots: set[int] = set()
        """The slots whose state is on the host. A load from any other slot copies nothing between the tiers."""
        self._copied_until = [0.0, 0.0]

    def submit(self, plan: StepPlan, now: float) -> None:
        """Record that a plan is submitted."""
        self._plans.append((plan, now))
        moves = plan.part(RowPlan).moves
        into, out = self._row_copies(moves) if moves else (0, 0)
        for inward, copies, rows in ((True, len(plan.copies.swap_in), into), (False, len(plan.copies.swap_out), out)):
            if copies or rows:
                self._copying[plan.step, inward] = now, copies or rows, "blocks" if copies else "rows"

    def collect(self, result: StepResult, now: float) -> list[Recorded]:
        """A result is there: the step that has ended; empty if its plan was not seen."""
        if not self._plans or self._plans[0][0].step != result.step:
            return []
        plan, submitted = self._plans.popleft()
        # Use the device's own measure if it fits between the neighbours: steps run one after another.
        training = result.part(TrainingReport).seconds
        began = max(submitted, self._free_at, now - result.seconds - training)
        self._free_at = now
        computed = now - began
        tuning = plan.part(TrainingPlan)
        if tuning.slice:
            computed *= 1.0 - (training / max(result.seconds + training, 1e-9) if plan.segments else 1.0)
        columns = plan.columns
        starts, stops = columns.column("start"), columns.column("stop")
        tokens = decodes = sum(stops) - sum(starts)
        chunks: list[ChunkRecord] = []
        if tokens > len(starts):
            lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
            verifying = verified_segments(plan)
            decodes = lengths.count(1) + sum([lengths[at] for at in verifying])
            ids = columns.column("sequence_id")
            chunks = [
                ChunkRecord(ids[at], starts[at], stops[at])
                for at, length in enumerate(lengths)
                if length > 1 and at not in verifying
            ]
        record = StepRecord(
            step=plan.step,
            at=round(began, 6),
            seconds=round(computed, 6),
            tokens=tokens,
            decodes=decodes,
            prefill=tokens - decodes,
            segments=len(starts),
            preempted=list(plan.preempted),
            chunks=chunks,
            budget=plan.forecast.budget,
            predicted=round(plan.forecast.predicted, 6),
            stages=[round(took, 6) for took in result.stages],
            swap_in=len(plan.copies.swap_in),
            swap_out=len(plan.copies.swap_out),
            submitted=round(submitted, 6),
            measured=round(result.seconds, 6),
            lent=tuning.lent,
        )
        if forwards := plan.part(RowPlan).forwards:
            record.forwards, record.idle_tokens = len(forwards), idle_tokens(plan)
        if tuning.slice:
            record.training = self._slice(plan, result, began + computed, now)
        if result.copied.times:
            record.copies = [
                self._copied(copy.step, copy.inward, copy.bytes, copy.seconds, now) for copy in result.copied.times
            ]
        return [Recorded(plan, record)]

    def _slice(self, plan: StepPlan, result: StepResult, began: float, ended: float) -> SliceRecord:
        part, loss = plan.part(TrainingPlan).slice, result.part(TrainingReport).loss
        record = SliceRecord(
            plan.step, part.job, part.step, part.micro_batch, part.action, round(began, 6), round(ended - began, 6)
        )
        if part.action == "run":
            record.first, record.units, record.keeps = part.first, part.stop - part.first, part.keep
        if loss is not None:
            record.loss = round(loss, 6)
        return record

    def _copied(self, step: int, inward: bool, size: int, seconds: float, now: float) -> CopyRecord:
        submitted, count, unit = self._copying.pop((step, inward), (now - seconds, 0, "blocks"))
        began = max(submitted, self._copied_until[inward])
        self._copied_until[inward] = began + seconds
        record = CopyRecord(step, inward, round(began, 6), round(seconds, 6), size)
        if unit == "rows":
            record.rows = count
        else:
            record.blocks = count
        return record

    def _row_copies(self, moves: Iterable[RowMove]) -> tuple[int, int]:
        """How many states of rows these moves copy to the device and to the host."""
        into = out = 0
        for move in moves:
            if move.kind in ("store", "offload", "copy"):
                self._host_slots.add(move.slot)
                out += 1
            elif move.kind in ("keep", "forget"):
                self._host_slots.discard(move.slot)
            elif move.kind == "load":
                into += move.slot in self._host_slots
        return into, out


def verified_segments(plan: StepPlan) -> set[int]:
    """Indices of the segments that verify drafted tokens."""
    drafts = plan.drafts
    if drafts is None:
        return set()
    samplings = plan.columns.column("sampling")
    sampled = [at for at, sampling in enumerate(samplings) if sampling is not None]
    return {at for at, draft in zip(sampled, drafts, strict=False) if draft}


class Scene:
    """The queues and the blocks of a scheduler, as records. It changes nothing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        lower = next((part.lower for part in scheduler.parts if isinstance(part, TierPart)), None)
        self._maps = [BlockMap(pool, lower) for pool in scheduler.block_pools]
        """The maps of paged memory."""
        for name in scheduler.entries:
            self.meet(name)

    def meet(self, request: str) -> None:
        """Follow the blocks of a request, because a step computes part of its prompt."""
        entries = self._scheduler.entries
        for map_ in self._maps:
            if request in entries:
                map_.meet(request, entries[request].cache)

    def meet_all(self, plan: StepPlan) -> None:
        """Follow the blocks of all requests for which a new plan does more than decode."""
        if not self._maps:
            return
        columns = plan.columns
        starts, stops = columns.column("start"), columns.column("stop")
        if sum(stops) - sum(starts) > len(starts):
            ids = columns.column("sequence_id")
            for at, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                if stop - start > 1:
                    self.meet(ids[at])

    def queues(self) -> QueueReport:
        """The requests that wait, with the reason, and those that run."""
        return report_queues(self._scheduler.queues, MOST_REQUESTS)

    def stats(self) -> SchedulerStats:
        """Queues and memory in numbers."""
        return self._scheduler.stats()

    def blocks(self, now: float, most: int) -> list[ConversationBlocks]:
        """The conversations whose blocks have changed, from reading about `most` blocks; 0 reads all blocks."""
        found, entries = list[ConversationBlocks](), self._scheduler.entries
        for map_ in self._maps:
            found += map_.advance(entries, now, most) if most else map_.everything(entries, now)
        return found

    @property
    def complete(self) -> bool:
        """Whether all blocks that were idle when watching began have been reported."""
        return all(map_.complete for map_ in self._maps)

    def costs(self) -> list[tuple[int, float]]:
        """The cost of computing a chunk again, by block of its conversation, for a sample of places."""
        return [cost for map_ in self._maps for cost in map_.costs()]


class BlockReader:
    """Reads a scene's blocks LOOKED_AT at a time, and seldom enough that reading takes at most a share of the time.

    A step waits while blocks are read. All blocks of a GPU at once would take longer than several steps.
    """

    def __init__(self, scene: Scene, clock: Clock, share: float) -> None:
        """`share` is above 0; `clock` gives the time in seconds."""
        self._scene, self._clock, self._share = scene, clock, share
        self._next = 0.0
        """Time from which on the next blocks may be read."""

    def read_due(self, now: float) -> list[ConversationBlocks]:
        """The conversations whose blocks have changed, if it is time to read some; else none."""
        return self.read(now) if now >= self._next else []

    def read(self, now: float) -> list[ConversationBlocks]:
        """Read the next blocks whether or not it is time. Returns the conversations whose blocks have changed."""
        rows = self._scene.blocks(now, LOOKED_AT)
        self._next = now + (self._clock() - now) / self._share
        return rows

    def read_idle(self, now: float) -> list[ConversationBlocks]:
        """`read` while no step waits: for IDLE_SECONDS, until all idle state has been reported. So it shows soon."""
        rows = self.read(now)
        while not self._scene.complete and self._clock() < now + IDLE_SECONDS:
            rows += self.read(now)
        return rows
