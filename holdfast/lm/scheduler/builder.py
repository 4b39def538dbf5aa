"""StepBuilder: one StepPlan under construction, and the verbs with which a policy builds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from math import inf

from holdfast.core.columns import Columns
from holdfast.lm.scheduler.admission import NO_LIMIT, Admission
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import Decode
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.types import (
    PENDING,
    BlockCopy,
    Forecast,
    PartPlan,
    Sampling,
    Segment,
    StepPlan,
    StepResult,
    TableWrite,
    TierCopies,
)

LAST_SAMPLED = (PENDING,)
"""The token of a decode: the last one that its row sampled."""


def anyone(entry: Entry) -> bool:
    """Allows every sequence."""
    return True


class Policy(ABC):
    """Chooses what runs in a step: sets the builder's budget, then calls its verbs in an order of its own."""

    reserves = False
    """Whether it starts a request only if its longest length has room. Then the cache needs no headroom."""

    @abstractmethod
    def plan(self, step: StepBuilder) -> None:
        """Plan a step."""

    def step_bound(self, step: StepBuilder) -> float:
        """The most seconds that the step about to be planned may take. Asked before any part begins it."""
        return inf

    def observe(self, plan: StepPlan, result: StepResult) -> None:  # noqa: B027  most policies learn nothing
        """Learn from the result of a step. Results come in the order of the plans."""

    def ended(self, entry: Entry) -> None:  # noqa: B027  most policies learn nothing
        """Learn from a sequence that has ended."""

    def spare(self, running: Iterable[Entry]) -> float:
        """Seconds that streams among these sequences can wait in addition to a step of their decodes alone.

        Infinite if none decodes, or if nothing was promised to them.
        """
        return inf

    def note_waits(self, count: int, late: int) -> None:  # noqa: B027  most policies learn nothing
        """Learn that clients had `late` of `count` times between two tokens of streams above the latency target."""


class PolicyExtension(Policy):
    """A policy that plans what another one does, with work of a part in addition. The other one learns as if alone."""

    def __init__(self, inner: Policy) -> None:
        self.inner, self.reserves = inner, inner.reserves

    def step_bound(self, step: StepBuilder) -> float:
        return self.inner.step_bound(step)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        self.inner.observe(plan, result)

    def ended(self, entry: Entry) -> None:
        self.inner.ended(entry)

    def spare(self, running: Iterable[Entry]) -> float:
        return self.inner.spare(running)

    def note_waits(self, count: int, late: int) -> None:
        self.inner.note_waits(count, late)


class StepBuilder(ABC):
    """Plans segments while the budget lasts; a planned segment cannot be taken back.

    Every verb goes through the sequences in rank order. There are no phases. A sequence that lacks only the token its
    row sampled last is decoded. One that lacks more is prefilled, whether its tokens came from a client or were
    generated before a preemption.

    Each kind of memory has a builder of its own, which says how these verbs use that memory: `PagedBuilder`,
    `RowBuilder`. This class holds the plan under construction, and makes the StepPlan of it.
    """

    __slots__ = (
        "_ahead", "_decodes", "_ids", "_kept", "_preempted", "_queues", "_rows", "_samples", "_starts", "_stops",
        "_swap_in", "_tokens", "_writes", "bound", "budget", "draws", "draws_left", "due", "in_flight", "now",
        "num_tokens", "number", "pace", "planned", "pool", "postponed", "predicted", "reserved", "results_at",
        "running", "sampling", "swapping_in", "weigh",
    )  # fmt: skip

    def __init__(self, queues: Queues, number: int, now: float) -> None:
        self.budget = 0
        """Tokens that may still be planned."""
        self.draws_left = NO_LIMIT
        """Number of prompts that the step may still end: each draws a token."""
        self.bound = inf
        """Most seconds that the step may take (`Policy.step_bound`)."""
        self.num_tokens = 0
        """Tokens planned so far."""
        self.predicted = 0.0
        """Seconds that the policy expects the step to take; 0 if it predicts nothing."""
        self.reserved = 0.0
        """Seconds of a step with streams that prompts and batch requests leave to other work. Set before they plan."""
        self.pace: Callable[[int, int], int] | None = None
        """Number of tokens of [start, stop) that the step may compute. Set by a policy that bounds prefills by time."""
        self.weigh: Callable[[Entry], float] | None = None
        """Weight of a sequence's decode, above 0. Set by a policy that balances the steps of a pipeline."""
        self.planned: list[Entry] = []
        """The sequence of each segment, in plan order."""
        self.sampling: list[Entry] = []
        """The sequence of each sampling segment, in plan order."""
        self.draws: list[Sampling | None] = []
        """How the token after each segment is drawn; None: the segment samples none."""
        self.number = number
        """The step's number."""
        self.now = now
        """Time of planning in seconds."""
        self.results_at = now
        """Time at which the latest tokens were given to their sequences. The host may have been busy since then."""
        self.in_flight = False
        """Whether the result of an earlier plan is still to come."""
        self.running = queues.running
        """The running sequences; read only."""
        self.swapping_in = queues.swapping_in
        """The sequences that will run once their state has arrived; read only."""
        self.pool = queues.pool
        """The memory; read only."""
        self._queues = queues
        self._ids: list[str] = []
        self._rows: list[int] = []
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._tokens: list[tuple[int, ...]] = []
        self._samples: dict[int, int] = {}
        """Most tokens that a sampling segment gives, by its place in `sampling`; 1 for a segment that is not in it."""
        self.postponed = False
        """Whether a part has asked the policy to plan nothing."""
        self._kept = False
        """Whether a part wants the plan even if it has no segments."""
        self._writes: list[TableWrite] = []
        self._decodes: list[tuple[int, int, int]] = []
        """Runs of decodes: the index of the first one's segment, its place in `sampling`, and their number."""
        self.due: Callable[[Entry], bool] | None = None
        """Which waiting sequences may start. None: all. Sequences that may not start hold up no other."""
        self._preempted = queues.unreported
        """Ids of the sequences that lost their rows so far, also in earlier steps for which no plan was made."""
        self._swap_in: list[BlockCopy] = []
        """Copies from the host that the step begins."""
        self._ahead = False
        """Whether some of `_swap_in` are needed by no segment of the step."""
        if queues.swapping_in:
            queues.join_ready()

    @property
    def mostly_busy(self) -> bool:
        """Whether more rows are taken than free."""
        return len(self.running) + len(self._queues.swapping_in) > len(self._queues.free_rows)

    @abstractmethod
    def displace(self) -> None:
        """Preempt running sequences for waiting ones of a higher class, if the order displaces at all."""

    @abstractmethod
    def decode(self) -> None:
        """Plan one token of every decoding sequence. Preempts sequences if memory runs out."""

    @abstractmethod
    def admit(
        self, allow: Callable[[Entry], bool] = anyone, *, whole: bool = False, beyond_budget: bool = False
    ) -> None:
        """Start waiting sequences in rank order and plan their first chunks, until the first of them has to wait.

        A sequence waits if `allow` refuses it, if no row or too little memory is free, or if the budget is spent. With
        `whole` it also waits if the budget cannot hold all that it lacks. `beyond_budget` starts sequences whether or
        not the budget lasts: `prefill` computes the rest of their prompts in later steps.
        """

    @abstractmethod
    def compute(self, entry: Entry) -> None:
        """Plan the positions that a running sequence lacks, as far as budget and memory last."""

    @abstractmethod
    def extend(self, decode: Decode, tokens: Sequence[int]) -> tuple[int, ...]:
        """Append tokens to a decode, as far as budget, memory and its limit allow; returns the appended ones.

        With n appended tokens the decode gives between 0 and n + 1. Its positions count as computed only when the
        result accepts them. The sequence sits out every step until then.
        """

    def _close(self) -> None:  # noqa: B027
        """Plan the work that the verbs have left open. Called first in `finish`, before the parts add to the plan."""

    def _state_plans(self) -> Sequence[PartPlan]:
        """How the step treats state that is not in blocks: part plans of the memory's own. Called once per plan."""
        return ()

    def _start(self, entry: Entry, *, most: int, at_once: bool) -> bool:
        """Start a waiting sequence if memory has room for it (`Admission.start`). Returns whether it did."""
        admission = Admission(self._queues, self.number, self.now, self._writes, self._swap_in)
        return admission.start(entry, most=most, at_once=at_once)

    def reserve(self, seconds: float) -> None:
        """Leave this much of the time of a step with streams to other work, which the streams wait for as well."""
        self.reserved += seconds

    def preempt(self, entry: Entry) -> None:
        """Let a running sequence that the step does not plan yet wait again. Its row and its blocks are free then."""
        self._queues.preempt(entry, self.now)
        self._preempted.append(entry.id)

    @property
    def headroom(self) -> int:
        """Blocks that admission leaves to running sequences."""
        return self._queues.headroom

    @property
    def seconds_apart(self) -> float:
        """Predicted seconds of other work than segments in the steps in flight."""
        return self._queues.seconds_apart

    @property
    def free_rows(self) -> int:
        """Number of rows that no sequence uses."""
        return len(self._queues.free_rows)

    @property
    def waiting(self) -> Iterable[Entry]:
        """The sequences that wait for rows, blocks or the budget; read only."""
        return self._queues.waiting

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The positions [start, stop) of each segment planned so far."""
        return list(zip(self._starts, self._stops, strict=True))

    def postpone(self) -> None:
        """Let the policy plan nothing in this step."""
        self.postponed = True

    def limit_draws(self, more: int) -> None:
        """Let the step draw at most `more` further tokens."""
        self.draws_left = more

    def keep(self) -> None:
        """Have the plan made even if it gets no segments and earlier plans are in flight."""
        self._kept = True

    @property
    def swaps_in(self) -> bool:
        """Whether the step begins copies from the host."""
        return bool(self._swap_in)

    def swap_in_ahead(self, copies: Collection[BlockCopy]) -> None:
        """Let the step begin these copies from the host, which no segment of it needs.

        A step without segments then copies nothing to the host: a request that comes meanwhile waits for all copies.
        """
        self._ahead = True
        self._swap_in += copies
        self.pool.copies.start_swap_in([copy.target for copy in copies], self.number)

    @property
    def begun(self) -> bool:
        """Whether any verb has planned anything yet."""
        return bool(self._writes or self._ids)

    @property
    def resident(self) -> Iterable[Entry]:
        """The sequences that have blocks."""
        return chain(self.running, self.swapping_in)

    @property
    def busy(self) -> bool:
        """Whether any sequence runs, is swapping in or waits."""
        return bool(self.running or self.swapping_in or self._queues.num_waiting)

    def write(self, writes: Iterable[TableWrite]) -> None:
        """Let the step write these entries of block tables, after those that it has already."""
        self._writes += writes

    @property
    def decodes(self) -> Iterator[Decode]:
        """The decodes planned so far."""
        for segment, place, count in self._decodes:
            for index in range(count):
                yield Decode(self.sampling[place + index], segment + index, place + index)

    def give(self, decode: Decode, token: int) -> None:
        """Have a decode compute this token instead of the one that its row sampled last."""
        self._tokens[decode.segment] = (token,)

    def prefill(self) -> None:
        """Plan the next chunk of every running sequence that lacks more than its last token."""
        for entry in self.running:
            if self.budget <= 0:
                return
            if not entry.decoding and entry.next_step <= self.number:
                self.compute(entry)

    def finish(self, in_flight: bool) -> StepPlan | None:
        """The plan, or None if there is nothing to do. `in_flight`: the result of an earlier plan is still to come.

        With nothing in flight the plan may have no segments: then it waits for copies that make room or bring state in.
        """
        queues, pool, hooks = self._queues, self.pool, self._queues.hooks
        self.in_flight = in_flight
        self._close()
        awaits = max(queues.awaits, pool.copies.overwritten)
        parts = [plan for part in hooks.finish if part.awake and (plan := part.finish(self)) is not None]
        if self._ids:
            swap_out = pool.swap_out(self.number, self.num_tokens, self.now)
            pool.copies.finish_swap_in(awaits)
            queues.awaits = -1  # without segments the next plan has to wait
        else:
            if in_flight and not self._kept:
                return None
            ready = pool.allocatable
            swap_out = () if self._ahead else pool.swap_out(self.number, self.num_tokens, self.now)
            awaited = self._kept or any(part.wants_step for part in hooks.wants_step)
            idle = not pool.copies.swapping_out and pool.allocatable == ready and not queues.swapping_in
            if idle and not awaited:
                return None
        segments = Columns(
            Segment,
            sequence_id=self._ids,
            row=self._rows,
            start=self._starts,
            stop=self._stops,
            tokens=self._tokens,
            sampling=self.draws,
        )
        parts += self._state_plans()
        samples = self._samples
        return StepPlan(
            self.number,
            segments,
            tuple(self._writes),
            preempted=queues.report_preempted() if queues.unreported else (),
            samples=tuple([samples.get(place, 1) for place in range(len(self.sampling))]) if samples else None,
            copies=TierCopies(tuple(self._swap_in), swap_out, awaits),
            forecast=Forecast(self.num_tokens + max(0, self.budget), self.predicted),
            parts=tuple(parts),
        )
