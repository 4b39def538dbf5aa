"""Tuner: the queue of tuning jobs, and where each of them stands. It knows sizes and times, never data.

engine                          scheduler                              trainer (holdfast.training)
  │ add(job, steps, blocks)       │                                      │ open(directory) -> steps
  │ pause, resume, remove         │ next_slice(seconds, lent)            │
  │                               │  └─ TrainingPlan ───── ──────────────▶ launch(slice, lent)
  │ ◀── ended ── observe(result) ─┤ ◀─ TrainingReport ────── ─────────────┘
  ▼
close or discard (trainer)
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, Protocol

from holdfast.core.training_cost import HALF_OF, HALVES, KINDS, TrainingCost, UnitKind
from holdfast.lm.parts.tuning.training_room import TrainingRoom
from holdfast.lm.parts.tuning.turns import Turns
from holdfast.lm.parts.tuning.values import TrainingAction, TrainingReport, TrainingSlice
from holdfast.lm.scheduler.correction import Correction

JobStatus = Literal["queued", "running", "paused", "ending"]

DEVIATION = 0.1
"""Assumed mean deviation of units from their predicted time, as a share of it, before any was measured."""
LAUNCH_SECONDS = 0.0005
"""Host time to launch a unit, approximately; it is corrected by measured times."""


class WorkUnit(Protocol):
    """The smallest piece of work that a slice can hold (`holdfast.training.jobs.Unit`)."""

    @property
    def kind(self) -> UnitKind: ...

    @property
    def number(self) -> int:
        """Number of the layer, for half a layer."""
        ...


class WorkBatch(Protocol):
    """A micro-batch (`holdfast.training.jobs.MicroBatch`)."""

    @property
    def lengths(self) -> Sequence[int]:
        """Number of tokens of each of its examples."""
        ...

    @property
    def units(self) -> Sequence[WorkUnit]: ...

    @property
    def validation(self) -> bool:
        """Whether it is for validation, and so has no backward."""
        ...


class JobOutline(Protocol):
    """The steps of a job as sizes (`holdfast.training.jobs.JobSteps`, `holdfast.training.calls.CallSteps`)."""

    @property
    def count(self) -> int:
        """Number of steps that are known."""
        ...

    @property
    def final(self) -> bool:
        """Whether the job is complete after `count` steps. The steps of a driven job are calls, and more may come."""
        ...

    @property
    def most_tokens(self) -> int:
        """Most tokens of any micro-batch."""
        ...

    def micro_batches(self, step: int) -> Sequence[WorkBatch]:
        """The micro-batches of a step, in order. Equal at every call. Empty: the device has nothing to do for it."""
        ...


Half = tuple[str, int]
"""Kind of the half (`HalfKind`) and number of the layer."""

BlocksOf = Callable[[int, bool], int]
"""Number of blocks at the end of the cache that a resident job takes.

Arguments: the tokens of its micro-batch (0: none is open), and whether activations are kept. For example
`lambda tokens, keep: trainer.blocks(job, tokens, keep=keep)`.
"""


class Needs(NamedTuple):
    """Numbers of blocks that a job's step takes on the device."""

    least: int
    """With the inputs of halves only; the backward computes the rest again."""
    most: int
    """With all activations that the backward needs."""


@dataclass(eq=False)
class _Job:
    id: str
    steps: JobOutline
    blocks: BlocksOf
    tenant: str
    step: int
    """The step that is planned next, with `micro_batch` and `unit`."""
    keeps_up: Callable[[], bool]
    """Whether a step may begin."""
    micro_batch: int = 0
    unit: int = 0
    paused: bool = False
    removed: bool = False
    in_flight: int = 0
    kept: set[Half] = field(default_factory=set)
    """The halves whose activations are kept."""
    batches: Sequence[WorkBatch] = ()
    """Micro-batches of the step."""
    sizes: dict[tuple[int, bool], int] = field(default_factory=dict)
    """Cached results of `blocks`."""
    base: dict[tuple[UnitKind, bool], float] = field(default_factory=dict)
    """Predicted seconds of a unit of the micro-batch, by its kind and by whether it computes a forward again."""

    @property
    def complete(self) -> bool:
        return self.steps.final and self.step == self.steps.count

    @property
    def runs(self) -> bool:
        """Whether the job has anything to plan."""
        return self.step < self.steps.count and not (self.paused or self.removed)

    @property
    def idle(self) -> bool:
        """Whether the job only waits for its owner's next call."""
        return not (self.runs or self.paused or self.removed or self.complete)

    @property
    def lane(self) -> str:
        """Jobs over files of one tenant run one after the other. A driven job takes turns with all others."""
        return "" if self.steps.final else self.id

    @property
    def between(self) -> bool:
        """Whether another job may have the next turn: after a step, or after a micro-batch of a call."""
        return not (self.unit or (self.micro_batch and self.steps.final))

    @property
    def waits(self) -> bool:
        """Whether its next step may not begin yet."""
        return not (self.micro_batch or self.unit or self.keeps_up())

    @property
    def batch(self) -> WorkBatch:
        """The micro-batch that is planned next. The job must not be complete."""
        if not self.batches:
            self.batches = self.steps.micro_batches(self.step)
        return self.batches[self.micro_batch]

    def size(self, tokens: int = 0, *, keep: bool = False) -> int:
        """Number of blocks of its vectors and of a micro-batch of `tokens` tokens."""
        if (tokens, keep) not in self.sizes:
            self.sizes[tokens, keep] = self.blocks(tokens, keep)
        return self.sizes[tokens, keep]

    @property
    def needs(self) -> Needs:
        """Needs of the step that is planned next. The job must not be complete."""
        self.batch  # noqa: B018  knows the batches then
        tokens = [(sum(batch.lengths), not batch.validation) for batch in self.batches]
        least = max(self.size(count) for count, _ in tokens)
        return Needs(least, max(least, *(self.size(count, keep=keep) for count, keep in tokens)))

    @property
    def held(self) -> int:
        """Number of blocks that its vectors and the micro-batch under way take while it is resident."""
        return self.size(sum(self.batch.lengths), keep=bool(self.kept)) if self.unit else self.size()

    def restart(self) -> None:
        """Begin the micro-batch again."""
        self.unit = 0
        self.kept.clear()

    def advance(self, stop: int) -> None:
        """Note that units up to `stop` are planned."""
        self.unit = stop
        if stop < len(self.batch.units):
            return
        self.restart()
        self.base.clear()
        self.micro_batch += 1
        if self.micro_batch == len(self.batches):
            self.step, self.micro_batch, self.batches = self.step + 1, 0, ()
            self.pass_over()

    def pass_over(self) -> None:
        """Go on to the next step that has work for the device."""
        while self.step < self.steps.count and not self.steps.micro_batches(self.step):
            self.step += 1


class Tuner:
    """Decides which job's work comes next. One job is resident at a time; the others wait in order of arrival.

    Jobs of several tenants, and driven jobs, take turns (`Turns`). A driven job without a call stays on the device
    until another job has a turn, or until the blocks are needed.

    All methods are called in the scheduler's thread, between its calls.
    """

    def __init__(
        self,
        cost: TrainingCost,
        *,
        max_blocks: int,
        room: TrainingRoom | None = None,
        max_launch_seconds: float = inf,
    ) -> None:
        """`max_blocks` is the most blocks of the cache that are lent to training.

        A job is refused if one of its units takes longer than the `room` that a full step of streams leaves; None: no
        unit is too long.
        """
        self.cost, self.max_blocks = cost, max_blocks
        self.max_launch_seconds = max_launch_seconds
        """A slice has no more units than the host is predicted to launch within this time."""
        self.refused: deque[tuple[str, str]] = deque()
        """Jobs that were accepted before the price of a step was known, and do not fit by the measured price.

        Each has the reason. The reader takes them out, and removes the jobs.
        """
        self.ended: deque[str] = deque()
        """Jobs that are complete, or were removed, and that are off the device.

        No slice of theirs is planned or in flight, and the copies of their vectors come before any new use of their
        blocks. The tuner has forgotten them. The reader takes them out, and may close or discard them.
        """
        self.lent = 0
        """Number of blocks that are lent to training now."""
        self._jobs: dict[str, _Job] = {}
        """The jobs in order of arrival."""
        self._current: _Job | None = None
        """The job whose turn it is."""
        self._resident: _Job | None = None
        """The job whose vectors are on the device once all planned work is done."""
        self._leaving = 0
        """Number of blocks of a job that the plan under construction moves to the host."""
        self._turns = Turns()
        deviation = max(DEVIATION, cost.cost.deviation)
        self._corrections = {kind: Correction(deviation) for kind in KINDS}
        self._measured: set[UnitKind] = set()
        """Kinds of units of which a slice was measured."""
        self._room = room
        self._on_trial: list[_Job] = []
        """Jobs with a unit that is too long by a price that is not known well enough to refuse them."""
        self._launch: Correction | None = None
        """Correction of LAUNCH_SECONDS; None before any launch was measured."""
        self._expected: deque[tuple[_Job, float, tuple[UnitKind, ...]]] = deque()
        """For each slice in flight: its job, its expected seconds, and the kinds of its units."""

    # For the engine

    @property
    def max_unit_seconds(self) -> float:
        """Longest unit that fits after a full step: 0 or less if none does, infinite without a target."""
        return inf if self._room is None else self._room.seconds

    def largest_unit(self, tokens: int) -> float:
        """Seconds of the longest unit of a micro-batch of one sequence of `tokens`, corrected by measured times."""
        kinds = self.cost.shape.kinds
        return max(self.cost.unit(kind, (tokens,), recompute=True) * self._corrections[kind].mean for kind in kinds)

    def add(
        self,
        job: str,
        steps: JobOutline,
        blocks: BlocksOf,
        *,
        step: int = 0,
        tenant: str = "",
        keeps_up: Callable[[], bool] = lambda: True,
    ) -> None:
        """Queue a job that begins with the first micro-batch of its optimizer step `step`.

        A step begins only while `keeps_up` is true, so that the storage of its results can catch up. A job with all
        steps done goes to `ended` at once.

        Raises ValueError with both numbers if the id is taken, if the job has fewer steps, if `max_blocks` do not hold
        its vectors and its largest micro-batch without kept activations, or if a unit takes longer than
        `max_unit_seconds`. A job that has begun is not refused for a long unit. Before enough steps were measured no
        job is: it runs if it fits, and goes to `refused` if it does not fit by the measured price and has not ended a
        step by then.
        """
        if job in self._jobs:
            raise ValueError(f"job {job} is in the queue already")
        if not 0 <= step <= steps.count:
            raise ValueError(f"job {job} goes on from step {step}; it has {steps.count} steps")
        if step == steps.count and steps.final:
            self.ended.append(job)
            return
        added = _Job(job, steps, blocks, tenant, step, keeps_up)
        self._check(added)
        added.pass_over()
        self._jobs[job] = added

    def grow(self, job: str) -> None:
        """Note that the job's outline has a new step. Ignores unknown jobs."""
        if job in self._jobs:
            self._jobs[job].pass_over()

    def refusal(self, job: str, batches: Sequence[WorkBatch]) -> str:
        """Why these micro-batches cannot run as a step of a job; empty if they can. Raises KeyError for an unknown one.

        Nothing is known to be too long before enough steps were measured.
        """
        known = self._jobs[job]
        tokens = max((sum(batch.lengths) for batch in batches), default=0)
        if reason := self._no_memory(known, tokens):
            return reason
        if self._room is None or not self._room.known or not tokens:
            return ""
        return self._too_long(self._room, batches)

    def _check(self, job: _Job) -> None:
        """Raise ValueError if the job's micro-batches are too large, or if they are known to take too long."""
        if reason := self._no_memory(job, job.steps.most_tokens if job.steps.final else 0):
            raise ValueError(f"job {job.id} {reason}")
        if job.step or self._room is None or not (reason := self._no_room(job, self._room)):
            return
        if self._room.known:
            raise ValueError(f"job {job.id} has no room beside streams: {reason}")
        self._on_trial.append(job)

    def _no_memory(self, job: _Job, tokens: int) -> str:
        """Why a micro-batch of this many tokens is too large for the job; empty if it is not."""
        if (blocks := job.size(tokens)) <= self.max_blocks:
            return ""
        return (
            f"needs {blocks} blocks of the cache for micro-batches of {tokens} tokens, and {self.max_blocks} may be "
            "lent: choose a smaller micro_batch or rank, or shorter data"
        )

    def _no_room(self, job: _Job, room: TrainingRoom) -> str:
        """Why a unit of the job's step is too long, by the present prices; empty if none is, or if it has no step."""
        return self._too_long(room, job.steps.micro_batches(job.step)) if job.runs else ""

    def _too_long(self, room: TrainingRoom, batches: Sequence[WorkBatch]) -> str:
        """Why a unit of these micro-batches is too long, by the present prices; empty if none is."""
        units = [
            (self.cost.unit(kind, batch.lengths) * self._corrections[kind].mean, sum(batch.lengths))
            for batch in batches
            for kind in {unit.kind for unit in batch.units}
        ]
        return room.refusal(*max(units)) if units else ""

    def observe_step(self, ratio: float) -> None:
        """Learn that a step of decodes took `ratio` times its predicted time.

        Kinds of units that were never measured are corrected by the same ratio, because their prices come from the same
        measurement.
        """
        if self._room is None:
            return
        self._room.observe(ratio)
        for kind in KINDS:
            if kind not in self._measured:
                self._corrections[kind].mean = self._room.factor
        if self._on_trial and self._room.known:
            for job in self._on_trial:
                if not (job.step or job.removed) and (reason := self._no_room(job, self._room)):
                    self.refused.append((job.id, f"it has no room beside streams: {reason}"))
            self._on_trial.clear()

    def pause(self, job: str) -> None:
        """Plan nothing more of a job. Its vectors go to the host with the next plan that has room for the copy.

        `status` is then "paused". Raises KeyError for an unknown job. A paused job may be paused again.
        """
        self._jobs[job].paused = True

    def resume(self, job: str) -> None:
        """Let a paused job wait for its turn again. It goes on where it was; the micro-batch under way begins again."""
        self._jobs[job].paused = False

    def remove(self, job: str) -> None:
        """Plan nothing more of a job; forget it once it is off the device (`ended` says when). Ignores unknown ones."""
        if job in self._jobs:
            self._jobs[job].removed = True
            self._forget(self._jobs[job])

    def status(self, job: str) -> JobStatus:
        """queued: waits for its turn, or for a call; running: it is the one whose turn it is; paused: by `pause`;
        ending: complete, or removed, and not yet in `ended`. Raises KeyError for a job that is not known."""
        known = self._jobs[job]
        if known.removed or known.complete:
            return "ending"
        return "paused" if known.paused else "running" if known is self._choose() else "queued"

    def step_of(self, job: str) -> tuple[int, int]:
        """Number of the step that is planned next, and of all steps. Raises KeyError for an unknown job."""
        return self._jobs[job].step, self._jobs[job].steps.count

    # For the scheduler

    @property
    def runs(self) -> bool:
        """Whether a job can run."""
        return self._choose() is not None

    @property
    def leaves(self) -> bool:
        """Whether the job on the device has to leave: it is complete, paused or removed, or another has the turn."""
        if self._resident is None:
            return False
        job = self._choose()
        return self._resident is not job and not (job is None and self._resident.idle)

    @property
    def rests(self) -> bool:
        """Whether a job is on the device that has nothing to do there now."""
        return self._resident is not None and self._resident.idle

    @property
    def has_work(self) -> bool:
        """Whether a job can run now, or has to leave the device. Then the loop goes on without a request."""
        job = self._choose()
        return self.leaves or (job is not None and not job.waits)

    @property
    def needs(self) -> Needs:
        """Blocks for the next step of the job whose turn it is; none if no job can run."""
        job = self._choose()
        return job.needs if job is not None else Needs(0, 0)

    @property
    def held(self) -> int:
        """Number of blocks that training uses in the plan under construction, and can give back only by an action."""
        return max(self._leaving, self._resident.held if self._resident is not None else 0)

    def held_after(self, action: TrainingAction) -> int | None:
        """Number of blocks that stay in use in the plan that has this action; None if there is nothing to act on.

        The blocks that `offload` leaves are free in the next plan.
        """
        job = self._resident
        if job is None or (action == "release" and not job.kept) or (action == "drop" and not job.unit):
            return None
        return job.size(sum(job.batch.lengths)) if action == "release" else job.size()

    def begin(self) -> None:
        """Begin a plan."""
        self._leaving = 0

    def iteration_seconds(self) -> float:
        """T_ft of FineInfer §2.4: an upper estimate of the time of the next iteration, which is one micro-batch.

        It is the predicted time, corrected by measured ones, with the copies that bring the job to the device. 0 if no
        job can run.
        """
        job, resident = self._choose(), self._resident
        if job is None:
            return 0.0
        moved = {job, resident} - {None} if resident is not job else set()
        moves = sum(self._move_seconds(each) for each in moved if each is not None)
        again = job.batch.validation or job.size(sum(job.batch.lengths), keep=True) > self.lent
        return moves + sum(
            self._seconds(job, unit.kind, again=again) * self._corrections[unit.kind].factor
            for unit in job.batch.units[job.unit :]
        )

    def next_slice(self, seconds: float, *, at_least_one: bool = False) -> TrainingSlice | None:
        """The next work that is predicted to take at most `seconds` in the lent blocks. It counts as planned.

        `inf` asks for a whole micro-batch. With `at_least_one`, one unit may take longer. None if there is no work. A
        copy of a job's vectors to or from the device that takes longer than `max_unit_seconds` waits for that much room
        only.
        """
        job, resident = self._choose(), self._resident
        if resident is None and (job is None or job.needs.least > self.lent):
            return None
        if resident is not None and job is None and not self.leaves:
            return None
        if resident is not job or resident is None:
            moved = resident or job
            assert moved is not None
            room = at_least_one or seconds >= min(self._move_seconds(moved), max(0.0, self.max_unit_seconds))
            return self.act("offload" if moved is resident else "restore") if room else None
        fits = resident.size(sum(resident.batch.lengths)) <= self.lent
        return self._run(resident, seconds, at_least_one) if fits and not resident.waits else None

    def act(self, action: TrainingAction) -> TrainingSlice:
        """Plan an action on the resident job, or `restore` of the job whose turn it is. There must be one."""
        job = self._choose() if action == "restore" else self._resident
        assert job is not None
        slice_ = TrainingSlice(job.id, job.step, job.micro_batch, action)
        if action == "release":
            job.kept.clear()
        else:
            job.restart()
        if action == "offload":
            self._resident, self._leaving = None, job.size()
        elif action == "restore":
            self._resident = job
        self._note(job, 0.0, ())
        return slice_

    def observe(self, result: TrainingReport) -> None:
        """Learn how long a slice took. Results come in the order of the slices."""
        job, expected, kinds = self._expected.popleft()
        units = result.stop - result.first
        if result.launch_seconds and units:
            self._launch = self._launch or Correction(DEVIATION)
            self._launch.update(result.launch_seconds / (units * LAUNCH_SECONDS))
        if expected:
            for kind in kinds:  # a slice is measured as a whole: each kind takes its share of the error
                correction = self._corrections[kind]
                self._measured.add(kind)
                correction.update(correction.mean * result.seconds / expected)
        job.in_flight -= 1
        self._forget(job)

    @property
    def in_flight(self) -> int:
        """Number of slices that are planned and whose result is not known."""
        return len(self._expected)

    @property
    def expected_seconds(self) -> float:
        """Predicted seconds of the slices in flight."""
        return sum(expected for _, expected, _ in self._expected)

    @property
    def next_unit_seconds(self) -> float:
        """Upper estimate of the time of the next unit of the job on the device; 0 if no job there can run."""
        job = self._resident
        if job is None or job is not self._choose() or job.waits:
            return 0.0
        unit = job.batch.units[job.unit]
        again = (HALF_OF.get(unit.kind, unit.kind), unit.number) not in job.kept
        return self._seconds(job, unit.kind, again=again) * self._corrections[unit.kind].factor

    def _run(self, job: _Job, seconds: float, at_least_one: bool) -> TrainingSlice | None:
        """The next units of the resident job, as many as fit."""
        batch, first = job.batch, job.unit
        keep = not batch.validation and job.size(sum(batch.lengths), keep=True) <= self.lent
        stop, upper, expected, kinds = first, 0.0, 0.0, set[UnitKind]()
        for kind, number in [(unit.kind, unit.number) for unit in batch.units[first : first + self._most_units]]:
            half = HALF_OF.get(kind, kind), number
            backward = half[0] != kind
            price, correction = self._seconds(job, kind, again=half not in job.kept), self._corrections[kind]
            if upper + price * correction.factor > seconds and not (at_least_one and stop == first):
                break
            upper += price * correction.factor
            expected += price * correction.mean
            kinds.add(kind)
            stop += 1
            if backward:
                job.kept.discard(half)
            elif keep and kind in HALVES:
                job.kept.add(half)
        if stop == first:
            return None
        slice_ = TrainingSlice(job.id, job.step, job.micro_batch, "run", first, stop, keep)
        self._turns.charge(job, expected)
        self._note(job, expected, tuple(kind for kind in KINDS if kind in kinds))
        job.advance(stop)
        return slice_

    @property
    def _most_units(self) -> int:
        """Most units that the host can launch in time. A late launch delays the step."""
        if self._launch is None or self.max_launch_seconds == inf:
            return sys.maxsize
        return max(1, int(self.max_launch_seconds / (LAUNCH_SECONDS * self._launch.factor)))

    def _note(self, job: _Job, expected: float, kinds: tuple[UnitKind, ...]) -> None:
        """Note a planned slice."""
        job.in_flight += 1
        self._expected.append((job, expected, kinds))

    def _seconds(self, job: _Job, kind: UnitKind, *, again: bool) -> float:
        """Predicted seconds of a unit of the job's micro-batch; `again`: a backward computes its forward first."""
        key = kind, again and kind.endswith("_backward")
        if key not in job.base:
            job.base[key] = self.cost.unit(kind, job.batch.lengths, recompute=key[1])
        return job.base[key]

    def _move_seconds(self, job: _Job) -> float:
        """Predicted seconds of copying a job's vectors to or from the device."""
        return self.cost.block_seconds * job.size()

    def _choose(self) -> _Job | None:
        """The job whose turn it is."""
        jobs, current = [*self._jobs.values()], self._current
        ready = [job for job in jobs if job.runs]
        self._current = self._turns.choose(ready, current, jobs, between=current is None or current.between)
        return self._current

    def _forget(self, job: _Job) -> None:
        """Forget a job that is complete or removed, and off the device."""
        if (job.removed or job.complete) and job is not self._resident and not job.in_flight:
            del self._jobs[job.id]
            if job is self._current:
                self._current = None
            self.ended.append(job.id)
