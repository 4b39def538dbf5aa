"""The simulated executor: takes plans as the real one does, and returns results on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from math import inf
from random import Random
from typing import NamedTuple

from holdfast.core.cost import HEAVY, Burst, CostModel, Predictor
from holdfast.core.types import Identity
from holdfast.lab.simulator.deployment import Pipeline
from holdfast.lab.simulator.training import SimulatedTrainer
from holdfast.lm.parts.speculation.drafts import Drafter, Matcher
from holdfast.lm.parts.tuning.values import TrainingPlan
from holdfast.lm.types import PENDING, CopyTime, PartResult, StepPlan, StepResult, TierCopied

TOKEN, OTHER, END = 7, 8, 9
"""The tokens that steps sample: TOKEN, OTHER if a guess should be wrong, or END as the last one of an answer that ends
before its maximum length. No model runs."""


class Copying(NamedTuple):
    """Copies of one plan in one direction that have not completed."""

    begins: float
    ends: float
    time: CopyTime


NO_COPYING = Copying(0.0, 0.0, CopyTime(-1, True, 0, 0.0))
"""The own swap-in of a step that awaits none: it ended when the clock began."""


class VirtualClock:
    """A clock in seconds that moves only when it is advanced. A `loop.contracts.Clock`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, time: float) -> None:
        """Move to `time`, unless the clock is already past it."""
        self.now = max(self.now, time)


class Reserve:
    """Seconds of boost left in a burst. Heavy steps use it up; all other time restores it at the same rate."""

    def __init__(self, burst: Burst) -> None:
        self._burst = burst
        self._left = burst.seconds

    def step(self, tokens: int, seconds: float, idle: float = 0.0) -> float:
        """Seconds that the next step takes, if it has `tokens` query tokens and takes `seconds` at the steady pace.

        It starts `idle` seconds after the previous step ended.
        """
        burst = self._burst
        if not burst.seconds:
            return seconds
        left = min(burst.seconds, self._left + idle)
        if tokens < HEAVY:
            self._left = min(burst.seconds, left + seconds)
            return seconds
        fast = min(left, burst.share * seconds)
        self._left = left - fast
        return fast + seconds - fast / burst.share


class StepTimes:
    """The cost model applied to a StepPlan: seconds that each pipeline stage computes, and seconds of block copies."""

    def __init__(
        self,
        cost: CostModel,
        pipeline: Pipeline | None = None,
        copy_seconds: float = 0.0,
        block_bytes: int = 0,
        swap_in_groups: float = inf,
    ) -> None:
        """`copy_seconds` is the time to copy one block of `block_bytes` in either direction.

        A step that waits for its own swap-in has it copied in `swap_in_groups` groups of layers.
        """
        self.copy_seconds = copy_seconds
        self.swap_in_groups = swap_in_groups
        self.block_bytes = block_bytes
        self._pipeline = pipeline
        self._stages = [Predictor(stage) for stage in (pipeline.stages if pipeline else (cost,))]

    def reserves(self) -> list[Reserve]:
        """A full burst reserve for each pipeline stage, or a single one without a pipeline."""
        return [Reserve(stage.cost.burst) for stage in self._stages]

    def stages(self, plan: StepPlan) -> list[float]:
        """Seconds that each stage computes at its steady pace, without a burst."""
        columns = plan.columns
        spans = list(zip(columns.column("start"), columns.column("stop"), strict=True))
        if (drafts := plan.drafts) is None:
            return [stage.segments(spans) for stage in self._stages]
        lengths = iter(map(len, drafts))
        drafted = [sampling is not None and next(lengths) > 0 for sampling in columns.column("sampling")]
        return [with_drafts(stage, spans, drafted) for stage in self._stages]

    def hop(self, plan: StepPlan) -> float:
        """Seconds to send the plan's activations to the next stage."""
        return self._pipeline.hop(plan.num_tokens) if self._pipeline else 0.0

    def hop_of_tokens(self) -> float:
        """Seconds to send a step's sampled tokens from the last stage to the first: the shortest message."""
        return self._pipeline.hop(0) if self._pipeline else 0.0


def with_drafts(predictor: Predictor, spans: Sequence[tuple[int, int]], drafted: Sequence[bool]) -> float:
    """Seconds of a step that computes these [start, stop) segments, some of which verify drafts."""
    chunks, contexts, tokens = [], [], 0
    for (start, stop), is_draft in zip(spans, drafted, strict=True):
        if is_draft or stop - start == 1:
            contexts.append(stop)
            tokens += stop - start
        else:
            chunks.append((start, stop))
    if not chunks:
        return predictor.drafted(tokens, contexts)
    prompts = sum(stop - start for start, stop in chunks)
    attention = predictor.decodes(contexts) + sum(predictor.chunk(*chunk) for chunk in chunks)
    return predictor.mixed(tokens, prompts) + attention


class SimulatedDrafter(Drafter):
    """Drafter that guesses TOKEN. The simulated model samples TOKEN as often as guesses should be right."""

    def propose(self, own: Matcher, identity: Identity, most: int) -> tuple[int, ...]:
        return (TOKEN,) * most


class SimulatedExecutor:
    """A `loop.contracts.Executor` without a device. Steps run in order, for the time that the cost model predicts.

    - Bursts: a heavy step after lighter ones is faster while the cost model's burst reserve lasts.
    - Host time: the clock advances by `host_seconds` at each submission, for planning and packing. It overlaps the
      device, as in the real engine.
    - Pace: `pace(t)` multiplies the duration of a step that starts at t, for a device whose speed varies over time.
    - Pipelines: a step passes the stages in order, and a stage runs its steps in order. A stage starts a step when its
      previous step has ended and the previous stage's output has arrived. The time that it waits is a bubble. Sampled
      tokens go from the last stage to the first without the host; a step that asks for one (`PENDING`) waits for it.
    - Copies: they run on their own link, as in `lm.execution.transfer`. Swap-in starts after the computation submitted
      so far. A step that awaits its own swap-in reads it by groups of layers: it computes the first group once that has
      been copied, and the last one after all have. It waits for swap-in of earlier steps before it begins. Swap-out
      waits for both the computation and swap-in. Results report the copies that have completed.
    - Lengths: an answer whose end is in `ends` ends there, as if the model had ended it.
    - Drafts: at each sampled position the token is TOKEN, the guess, with probability `acceptance`.
    - Training: a plan's slice follows its segments, on one stage. The copies of a job's vectors take their time on the
      link.
    """

    def __init__(
        self,
        step_times: StepTimes,
        clock: VirtualClock,
        host_seconds: float = 0.0,
        pace: Callable[[float], float] = lambda now: 1.0,
        trainer: SimulatedTrainer | None = None,
        acceptance: float = 1.0,
    ) -> None:
        self._trainer = trainer
        self._acceptance, self._random = acceptance, Random(0)
        self._step_times = step_times
        self._clock = clock
        self._host_seconds = host_seconds
        self._pace = pace
        self._reserves = step_times.reserves()
        self._free_at = [0.0] * len(self._reserves)
        """Time at which each stage has finished all submitted steps."""
        self._in_flight: deque[tuple[StepPlan, tuple[float, ...], float, float, tuple[PartResult, ...]]] = deque()
        """Plans in flight, each with the seconds of its stages, the seconds of its sends, its end, and its slice's
        result."""
        self._in_free = self._out_free = 0.0
        """Time at which each direction of the copy link becomes free."""
        self._swapping_out: deque[Copying] = deque()
        self._swapping_in: deque[Copying] = deque()
        """Copies that have not completed: to the host (`_swapping_out`), and from it (`_swapping_in`)."""
        self._last_step = -1
        self._sampled_at: dict[int, float] = {}
        """For each row, the time at which the first stage has its last token. Used only in a pipeline."""
        self.most_decodes = self.most_tokens = 0
        """Largest numbers of sequences that decoded in a step, and of tokens of a step."""
        self.stages_busy = [0.0] * len(self._reserves)
        """Seconds during which each stage computed."""
        self.ends: dict[str, int] = {}
        """Number of positions before the END of an answer, by the request's id. Answers that are not here have their
        maximum length."""

    def submit(self, plan: StepPlan) -> None:
        self._note_size(plan)
        self._clock.now += self._host_seconds
        now, free_at, step_times = self._clock.now, self._free_at, self._step_times
        at = max(now, free_at[0], self._tokens_at(plan))
        self._copy(plan, at)
        awaited = [copy for copy in self._swapping_in if copy.time.step <= plan.copies.awaits]
        at = max((at, *(copy.ends for copy in awaited if copy.time.step < plan.step)))
        own = next((copy for copy in awaited if copy.time.step == plan.step), NO_COPYING)
        hop = step_times.hop(plan)
        pace = self._pace(at)
        stages, took = [pace * seconds for seconds in step_times.stages(plan)], []
        for stage, reserve in enumerate(self._reserves):
            idle = max(0.0, at - free_at[stage])
            begins = free_at[stage] + idle
            stages[stage] = reserve.step(plan.num_tokens, stages[stage], idle)
            free_at[stage] = max(begins + stages[stage], self._swapped_in(own, stages[stage]))
            took.append(free_at[stage] - begins)
            at = free_at[stage] + hop
        computed, parts = free_at[-1], tuple[PartResult, ...]()
        if slice_ := plan.part(TrainingPlan).slice:
            assert self._trainer is not None and len(stages) == 1
            trained = self._trainer.time(slice_)
            free_at[0] += trained.seconds
            parts = (trained,)
        self.stages_busy = [before + seconds for before, seconds in zip(self.stages_busy, stages, strict=True)]
        if len(stages) > 1:
            back = computed + step_times.hop_of_tokens()
            self._sampled_at |= {segment.row: back for segment in plan.segments if segment.sampling is not None}
        self._in_flight.append((plan, tuple(took), hop * (len(stages) - 1), free_at[-1], parts))

    def _note_size(self, plan: StepPlan) -> None:
        """Take note of the size of a step."""
        self.most_tokens = max(self.most_tokens, plan.num_tokens)
        starts = plan.columns.column("start")
        if len(starts) > self.most_decodes:  # Otherwise it cannot have more decodes, and is not counted.
            lengths = (stop - start for start, stop in zip(starts, plan.columns.column("stop"), strict=True))
            self.most_decodes = max(self.most_decodes, sum(length == 1 for length in lengths))

    def collect(self) -> StepResult:
        plan, stages, sent, ends, parts = self._in_flight.popleft()
        clock, directions = self._clock, (self._swapping_out, self._swapping_in)
        clock.advance_to(ends)
        if not (plan.num_tokens or parts):  # a plan without segments is complete when all copies are
            clock.advance_to(max((copies[-1].ends for copies in directions if copies), default=0.0))
        done: list[CopyTime] = []
        for copies in directions:
            while copies and copies[0].ends <= clock.now:
                done.append(copies.popleft().time)
        out, into = (copies[0].time.step - 1 if copies else self._last_step for copies in directions)
        sampled = plan.num_sampled if plan.samples is None else sum(plan.samples)
        tokens = (TOKEN,) * sampled
        if self._acceptance < 1:
            tokens = tuple([TOKEN if self._random.random() < self._acceptance else OTHER for _ in range(sampled)])
        if self.ends:
            tokens = self._with_ends(plan, tokens)
        seconds, of_stages = sum(stages) + sent, stages if len(stages) > 1 else ()
        result = StepResult(
            plan.step,
            tokens,
            seconds,
            stages=of_stages,
            copied=TierCopied(swapped_out=out, swapped_in=into, times=tuple(done)),
            parts=parts,
        )
        drafts = plan.drafts
        return result if drafts is None else result.verified(drafts)

    def _with_ends(self, plan: StepPlan, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The sampled tokens, with END where an answer ends. If a step samples several, the last one is END."""
        columns = plan.columns
        rows = zip(columns.column("sequence_id"), columns.column("stop"), columns.column("sampling"), strict=True)
        sampling = [(name, stop) for name, stop, sampling in rows if sampling is not None]
        found, at = [*tokens], -1
        for (name, stop), count in zip(sampling, plan.samples or repeat(1), strict=False):
            at += count
            if stop >= self.ends.get(name, inf):
                found[at] = END
        return tuple(found)

    @property
    def busy(self) -> float:
        """Seconds during which the device computed; for several stages, their mean."""
        return sum(self.stages_busy) / len(self.stages_busy)

    def close(self) -> None:
        self._in_flight.clear()

    def _swapped_in(self, own: Copying, computing: float) -> float:
        """Earliest end of a stage that computes for this many seconds while its step's own swap-in comes by groups."""
        groups = self._step_times.swap_in_groups
        return max(own.begins + (own.ends - own.begins) / groups + computing, own.ends + computing / groups)

    def _tokens_at(self, plan: StepPlan) -> float:
        """Time at which the first stage of a pipeline has the tokens that a plan asks for."""
        if not self._sampled_at:
            return 0.0
        columns = plan.columns
        rows = zip(columns.column("row"), columns.column("tokens"), strict=True)
        return max((self._sampled_at[row] for row, tokens in rows if tokens[0] == PENDING), default=0.0)

    def _copy(self, plan: StepPlan, computed: float) -> None:
        """Start the plan's copies. `computed` is the time at which the computation submitted so far ends."""
        if plan.copies.swap_in:
            self._in_free = max(computed, self._in_free)
            self._in_free = self._start(plan, inward=True, blocks=len(plan.copies.swap_in), at=self._in_free)
        if plan.copies.swap_out:
            at = max(computed, self._in_free, self._out_free)
            self._out_free = self._start(plan, inward=False, blocks=len(plan.copies.swap_out), at=at)
        self._last_step = plan.step

    def _start(self, plan: StepPlan, *, inward: bool, blocks: int, at: float) -> float:
        """Start a copy of `blocks` blocks at time `at`. Returns the time at which it ends."""
        seconds = blocks * self._step_times.copy_seconds
        time = CopyTime(plan.step, inward, blocks * self._step_times.block_bytes, seconds)
        (self._swapping_in if inward else self._swapping_out).append(Copying(at, at + seconds, time))
        return at + seconds
