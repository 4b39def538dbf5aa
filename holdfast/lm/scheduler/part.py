"""Part: the planner's side of a feature of a step, and Hooks: which parts are called at which event."""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from holdfast.core.types import Identity, Request
from holdfast.lm.memory.protocol import AnyMemory
from holdfast.lm.scheduler.entries import Entry, RankedQueue
from holdfast.lm.scheduler.order import Order
from holdfast.lm.types import BlockCopy, PartPlan, Sampling, StepPlan, StepResult, TableWrite


class PartQueues(Protocol):
    """The members of the scheduler's queues that a part may use (`queues.Queues`)."""

    @property
    def pool(self) -> AnyMemory:
        """The memory that holds the sequences' state."""
        ...

    @property
    def headroom(self) -> int:
        """Blocks that admission leaves to running sequences."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, also those that parts hold."""
        ...

    @property
    def seconds_apart(self) -> float:
        """Predicted seconds of the parts' own work in the steps in flight."""
        ...

    @property
    def running(self) -> RankedQueue:
        """The running sequences."""
        ...

    @property
    def swapping_in(self) -> Sequence[Entry]:
        """The sequences that have rows and blocks, and wait for their state from the host."""
        ...

    def hold(self, entry: Entry, part: Part) -> None:
        """Let a part hold an entry of the waiting queue."""
        ...

    def release(self, entry: Entry, part: Part) -> None:
        """Let an entry that the part holds wait, unless another part holds it."""
        ...


class Decode(NamedTuple):
    """A decode of a step under construction."""

    entry: Entry
    segment: int
    """Index of its segment."""
    place: int
    """Index of its segment among those that sample."""


class PartStep(Protocol):
    """The members of a step under construction that a part may use (`builder.StepBuilder`)."""

    @property
    def number(self) -> int:
        """The step's number."""
        ...

    @property
    def now(self) -> float:
        """The time of planning in seconds."""
        ...

    @property
    def in_flight(self) -> bool:
        """Whether the result of a plan is still to come."""
        ...

    @property
    def running(self) -> RankedQueue:
        """The running sequences."""
        ...

    @property
    def budget(self) -> int:
        """Tokens that may still be planned."""
        ...

    @property
    def bound(self) -> float:
        """Most seconds that the step may take; infinite: no policy bounds it before it plans."""
        ...

    def reserve(self, seconds: float) -> None:
        """Leave this much of the time of a step with streams to other work, which the streams wait for as well."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens planned so far."""
        ...

    @property
    def planned(self) -> Sequence[Entry]:
        """The sequence of each segment planned so far."""
        ...

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """The positions [start, stop) of each segment planned so far."""
        ...

    @property
    def draws(self) -> Sequence[Sampling | None]:
        """How the token after each segment planned so far is drawn; None: the segment samples none."""
        ...

    @property
    def sampling(self) -> Sequence[Entry]:
        """The sequence of each sampling segment planned so far."""
        ...

    @property
    def decodes(self) -> Iterable[Decode]:
        """The decodes planned so far."""
        ...

    def give(self, decode: Decode, token: int) -> None:
        """Have a decode compute this token, instead of the one that its row sampled last."""
        ...

    def extend(self, decode: Decode, tokens: Sequence[int]) -> tuple[int, ...]:
        """Have a decode compute these tokens, too, as far as budget, free blocks and its limit allow; returns them.

        The result says how many of them are right. Its sequence sits out every step until then.
        """
        ...

    def limit_draws(self, more: int) -> None:
        """Let the step draw at most `more` further tokens. Then a prompt lacks its last token after the step."""
        ...

    def compute(self, entry: Entry) -> None:
        """Plan what a running sequence lacks, as far as the budget and its blocks last."""
        ...

    def preempt(self, entry: Entry) -> None:
        """Let a running sequence that the step does not plan yet wait again. Its row and its blocks are free then."""
        ...

    def postpone(self) -> None:
        """Let the policy plan nothing in this step. To be called in `begin`."""
        ...

    @property
    def begun(self) -> bool:
        """Whether any verb has planned anything yet."""
        ...

    @property
    def predicted(self) -> float:
        """Seconds that the policy expects the step to take; 0 if it predicts nothing."""
        ...

    @property
    def swaps_in(self) -> bool:
        """Whether the step begins copies from the host."""
        ...

    def swap_in_ahead(self, copies: Collection[BlockCopy]) -> None:
        """Let the step begin these copies from the host, which no segment of it needs. To be called in `finish`."""
        ...

    @property
    def resident(self) -> Iterable[Entry]:
        """The sequences that have blocks."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any sequence runs, is swapping in or waits."""
        ...

    def write(self, writes: Iterable[TableWrite]) -> None:
        """Let the step write these entries of block tables, after those that it has already."""
        ...

    def keep(self) -> None:
        """Have the plan made even if it gets no segments and others are in flight."""
        ...


class PartOutputs(Protocol):
    """The changes that a part may make to the outputs of a step (`results.StepOutputs`)."""

    def extend(self, entry: Entry, tokens: Sequence[int]) -> bool:
        """Append tokens that need no draw to a decoding sequence that the step has given a token.

        Returns whether the sequence lacks their positions now: the part must have them computed (`PartStep.compute`).
        """
        ...

    def add(self, field: str, values: Mapping[Entry, Any]) -> None:
        """Give a field of `SequenceOutput` these values.

        A sequence without new tokens has an output, too, unless it has ended.
        """
        ...


class Part(ABC):
    """The planner's side of one feature: it adds to plans, and reads results.

    A part overrides the hooks that it needs. The other hooks are not called for it. All methods are called in the
    loop's thread, and time is an argument. A part keeps its own data about a sequence, by Entry.

    Every part knows each waiting sequence (`queued`). A part may hold one: then only this part knows it, until the part
    calls `Queues.release`. A held sequence takes neither a row nor blocks, and holds up no other.
    """

    name: ClassVar[str]
    """The part's name, for people."""
    waits_for: ClassVar[str] = ""
    """Why a sequence waits that the part holds: one of `queue_report.REASONS`."""

    awake: bool = True
    """Whether `decoded` and `finish` are to be called. A part sets it to false while no request needs it, so a step
    does not pass it."""

    def attach(self, queues: PartQueues) -> None:  # noqa: B027
        """The part belongs to the scheduler with these queues. Called once, before every other hook."""

    def base_identity(self, identity: Identity) -> Identity:
        """The identity that the engine itself must serve for requests of this one."""
        return identity

    def check(self, request: Request) -> None:  # noqa: B027
        """Raise ValueError for a request that could never run to its end."""

    def uses_kept(self, request: Request) -> bool:
        """Whether the request's sequence may start from state that memory keeps of its tokens."""
        return True

    def extend_policy(self, policy: Any) -> Any:
        """The `builder.Policy`, extended by what the part plans. Called once, when the scheduler is made."""
        return policy

    def extend_order(self, order: Order) -> Order:
        """The order of requests, extended by the part. Called once, when the scheduler is made."""
        return order

    def accept(self, entry: Entry) -> None:  # noqa: B027
        """Raise ContractRefused for a request that cannot be served as it asks. Called before `added`, which may not.

        The last refusal of a request: a part that returns counts it as accepted.
        """

    def added(self, entry: Entry) -> None:  # noqa: B027
        """A request was accepted. It is not in a queue yet."""

    def ended(self, entry: Entry) -> None:  # noqa: B027
        """A sequence has ended, and has left its queue."""

    def queued(self, entry: Entry) -> bool:
        """A sequence waits from now on: a new one, one that was preempted, or one that another part held.

        Returns whether this part holds it.
        """
        return False

    def starting(self, entry: Entry, now: float) -> bool:
        """A waiting sequence would start now, if it finds room. Returns whether this part holds it instead."""
        return False

    def left(self, entry: Entry) -> None:  # noqa: B027
        """A waiting sequence has ended, or another part holds it; or one that this part holds has ended."""

    def started(self, entry: Entry) -> None:  # noqa: B027
        """A sequence that waited has a row and blocks."""

    def stopped(self, entry: Entry) -> None:  # noqa: B027
        """A sequence is about to lose its row and its blocks: it has ended, or will wait again."""

    def make_room(self, blocks: int, now: float) -> bool:
        """Make this many more blocks available, before a request waits for them or is preempted.

        Returns whether it did. A part that gives lent blocks back in a later plan returns False; while any are lent
        (`SequenceMemory.lent`), nobody is preempted for a block.
        """
        return False

    def advance(self, now: float) -> None:  # noqa: B027
        """A step is to be planned. The first hook of each step."""

    def begin(self, step: PartStep) -> None:  # noqa: B027
        """The policy is about to plan."""

    def decoded(self, step: PartStep) -> None:  # noqa: B027
        """The policy has planned the decodes."""

    def finish(self, step: PartStep) -> PartPlan | None:
        """The part's slice of the plan; None: it adds nothing.

        `step.keep()` says that the plan is made even without segments. Without that, there is no plan, and what is
        returned counts for nothing, if there are no segments and `step.in_flight`, or no part `wants_step`.
        """
        return None

    @property
    def wants_step(self) -> bool:
        """Whether the part needs the result of a plan, even of one without segments, while none is in flight.

        Asked after `finish`.
        """
        return False

    def planned(self, plan: StepPlan) -> None:  # noqa: B027
        """A plan is made; it counts as submitted."""

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        """Take note of the result of the oldest plan in flight, before its tokens are read.

        Returns the sequences that can never go on: they end. Raises RuntimeError for a result that is not the plan's.
        """
        return ()

    def sampled(  # noqa: B027
        self, plan: StepPlan, result: StepResult, sampling: Sequence[Entry], outputs: PartOutputs
    ) -> None:
        """The tokens of a result were appended. `sampling` are the sequences of the plan's sampling segments.

        Sequences among them may have ended, and may do so by these tokens. Called only where the plan or its result
        carries anything of a part. Raises RuntimeError for a result that is not the plan's.
        """

    @property
    def has_work(self) -> bool:
        """Whether there is something to plan without any request."""
        return False

    @property
    def seconds_in_flight(self) -> float:
        """Predicted seconds of the part's own work in the steps in flight, besides their segments."""
        return 0.0

    def stats(self) -> Mapping[str, float]:
        """The fields of SchedulerStats that the part knows."""
        return {}


class Hooks:
    """The parts of a scheduler, in their order, and for each hook those that override it: the others are not called."""

    __slots__ = (
        "accept",
        "added",
        "advance",
        "apply",
        "base_identity",
        "begin",
        "check",
        "decoded",
        "ended",
        "extend_order",
        "extend_policy",
        "finish",
        "has_work",
        "left",
        "make_room",
        "parts",
        "planned",
        "queued",
        "sampled",
        "seconds_in_flight",
        "started",
        "starting",
        "stats",
        "stopped",
        "uses_kept",
        "wants_step",
    )

    def __init__(self, parts: Collection[Part] = ()) -> None:
        self.parts = tuple(parts)
        self.base_identity = self._overriding("base_identity")
        self.check = self._overriding("check")
        self.uses_kept = self._overriding("uses_kept")
        self.accept = self._overriding("accept")
        self.added = self._overriding("added")
        self.ended = self._overriding("ended")
        self.extend_order = self._overriding("extend_order")
        self.extend_policy = self._overriding("extend_policy")
        self.queued = self._overriding("queued")
        self.starting = self._overriding("starting")
        self.left = self._overriding("left")
        self.started = self._overriding("started")
        self.stopped = self._overriding("stopped")
        self.make_room = self._overriding("make_room")
        self.advance = self._overriding("advance")
        self.begin = self._overriding("begin")
        self.decoded = self._overriding("decoded")
        self.finish = self._overriding("finish")
        self.wants_step = self._overriding("wants_step")
        self.planned = self._overriding("planned")
        self.apply = self._overriding("apply")
        self.sampled = self._overriding("sampled")
        self.seconds_in_flight = self._overriding("seconds_in_flight")
        self.has_work = self._overriding("has_work")
        self.stats = self._overriding("stats")

    def _overriding(self, hook: str) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if getattr(type(part), hook) is not getattr(Part, hook))
