"""The values that flow through the loop: Sequence, Segment, StepPlan, StepResult, SamplingParams.

One direction only: a request becomes a Sequence, the scheduler turns sequences into a StepPlan, the executor turns
the plan into a StepResult, and the scheduler reads the result back into its sequences.
"""

from __future__ import annotations

import enum
from array import array
from collections import abc
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Generic, NamedTuple, TypeVar, overload

PENDING = -1
"""A token id that the host need not know yet: the executor puts in what the row sampled last."""

MAX_SEED = 2**63 - 1
MAX_DEADLINE = 86_400
"""Seconds from arrival."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one sequence are chosen, and when it ends.

    Raises ValueError, naming the value and the limit, for anything out of range.
    """

    temperature: float = 1.0
    """0 is greedy; larger is more random, up to 2 in the OpenAI API."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together reach this probability; 1 is off."""
    seed: int | None = None
    """The same seed gives the same draws, whatever else runs in the batch."""
    max_tokens: int = 16
    """The most tokens that are generated."""
    stop: tuple[str, ...] = ()
    """Strings that end the sequence; they are cut from the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-sequence token (benchmarks)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature is {self.temperature}; it must lie between 0 and 100")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or 0 for off")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must lie above 0 and be at most 1")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}; it must lie between 0 and {MAX_SEED}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if any(not stop for stop in self.stop):
            raise ValueError("stop holds an empty string; leave it out")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the executor needs to draw one token: the part of SamplingParams that reaches the device."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


Row = TypeVar("Row", bound=tuple[Any, ...])


class Columns(abc.Sequence[Row], Generic[Row]):
    """Named tuples of one type, kept by column and made where they are looked at.

    A step has hundreds of them: to make each is dearer than to decide what it holds, and who packs them into arrays
    takes whole columns.
    """

    __slots__ = ("columns", "row_type")

    def __init__(self, row_type: type[Row], columns: tuple[Any, ...]) -> None:
        """A list for each field of `row_type`, all of one length; not copied, and not to be changed."""
        self.row_type = row_type
        self.columns = columns

    @classmethod
    def of(cls, row_type: type[Row], rows: abc.Sequence[Row]) -> Columns[Row]:
        """These rows by column; as they are if that is how they come."""
        if isinstance(rows, Columns):
            return rows
        fields: tuple[str, ...] = row_type._fields  # type: ignore[attr-defined]
        return cls(row_type, tuple([row[index] for row in rows] for index in range(len(fields))))

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> abc.Iterator[Row]:
        # tuple.__new__ is what row_type(...) comes down to, at less than half its time.
        return map(tuple.__new__, repeat(self.row_type), zip(*self.columns, strict=True))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return self.row_type(*[column[index] for column in self.columns])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, abc.Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(list(self))


class Segment(NamedTuple):
    """Compute positions [start, stop) of one sequence.

    A decode is a segment of length 1, a prefill chunk a longer one, the recomputation of a dropped leading range one
    more segment of the same sequence. It may be planned only when every earlier position of its sequence is resident
    in the cache, or is computed within the same step.
    """

    sequence_id: str
    row: int
    """Row of the executor's persistent batch state: its block table and the token it sampled last."""
    start: int
    stop: int
    tokens: tuple[int, ...]
    """Token ids at [start, stop); PENDING where the row sampled the token, in a step that may still be in flight."""
    sampling: Sampling | None
    """How to sample the token at position `stop`; None when the segment ends before the sequence's last token."""

    @property
    def length(self) -> int:
        """Number of query tokens."""
        return self.stop - self.start


class TableWrite(NamedTuple):
    """Entries of a row's block table that are new: `blocks` stand at table positions [start, start + len(blocks))."""

    row: int
    start: int
    blocks: tuple[int, ...]


class BlockCopy(NamedTuple):
    """The contents of one block, keys and values of all layers, copied to a block of the other tier."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, decided and not yet applied. Plain data: it can be printed, asserted, simulated, replayed."""

    step: int
    segments: abc.Sequence[Segment]
    """What is computed; the scheduler gives them as Columns."""
    table_writes: tuple[TableWrite, ...] = ()
    """Applied before the segments run, in order."""
    preempted: tuple[str, ...] = ()
    """Sequences that lost their blocks to make room for this step; with a host tier what they held goes there."""
    swap_in: tuple[BlockCopy, ...] = ()
    """Host to device, into blocks that nothing reads or writes before a plan that awaits it, or a result that says that
    it is complete."""
    swap_out: tuple[BlockCopy, ...] = ()
    """Device to host, of blocks that stay as they are until a result says that it is complete. Writes to the host only
    after `swap_in` has read there. A plan without segments is complete when all copies are."""
    awaits: int = -1
    """Number of the last plan whose `swap_in` the segments need, with those of all plans before it. If it is this very
    plan, they need each layer when they come to it. What is not awaited comes in beside the segments."""

    @property
    def columns(self) -> Columns[Segment]:
        """The segments by column."""
        return Columns.of(Segment, self.segments)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step: what the token budget bounds."""
        starts: list[int]
        stops: list[int]
        _, _, starts, stops, _, _ = self.columns.columns
        return sum(stops) - sum(starts)

    @property
    def num_sampled(self) -> int:
        """Tokens that the step samples: the length of StepResult.tokens."""
        return sum([sampling is not None for sampling in self.columns.columns[-1]])

    def sampled(self) -> abc.Iterator[Segment]:
        """The segments that sample a token, in the order of StepResult.tokens."""
        return (segment for segment in self.segments if segment.sampling is not None)


class CopyTime(NamedTuple):
    """How long the copies took that one plan began in one direction."""

    step: int
    inward: bool
    """Host to device; otherwise device to host."""
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave: a token for each sampling segment of its plan, in plan order."""

    step: int
    tokens: tuple[int, ...]
    seconds: float
    """Time that the device spent on the step."""
    swapped_out: int = -1
    """Number of a plan: its copies to the host, and those of all plans before it, are complete."""
    swapped_in: int = -1
    """The same of copies to the device."""
    copies: tuple[CopyTime, ...] = ()
    """What was seen to be complete since the result before."""


@dataclass(frozen=True, slots=True)
class Request:
    """A client's ask, as the engine takes it: token ids in, token ids out."""

    id: str
    prompt: abc.Sequence[int]
    """Token ids, 32-bit numbers; not to be changed. A long one is best an array of typecode I, which goes from hand to
    hand without a look at each."""
    params: SamplingParams
    priority: int = 0
    """Class: lower runs first; FCFS among equals."""
    tenant: str = ""
    """Prefixes are shared within a tenant only."""
    arrival: float = 0.0
    """Seconds on the clock of the process group (monotonic)."""
    deadline: float | None = None
    """Seconds from arrival until the first token is due; None leaves it to the order."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's token stream while the scheduler holds it. Only the scheduler changes it.

    Which of its positions are resident is the memory's to know (`memory.conversation`), not the sequence's.
    """

    request: Request
    seed: int
    """The request's own seed, or one drawn for it."""
    tokens: array[int] = field(default_factory=lambda: array("I"))
    """Prompt and generated tokens known to the host."""
    length: int = 0
    """Positions that exist, those whose token is still being sampled included."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache gave at first admission."""
    preemptions: int = 0
    scheduled_at: float | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = array("I", self.request.prompt)
        self.length = self.length or len(self.tokens)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def in_flight(self) -> int:
        """Tokens that steps in flight sample for this sequence."""
        return self.length - len(self.tokens)

    @property
    def generated(self) -> int:
        """Generated tokens, those in flight included."""
        return self.length - len(self.request.prompt)


class SequenceOutput(NamedTuple):
    """What one step added to one sequence."""

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    cached_tokens: int
    scheduled_at: float
    """When its first segment was planned, seconds on the clock given to the scheduler."""
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A look at queues and memory after a step."""

    waiting: int
    running: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    """Unowned blocks that still hold reusable state."""
    preemptions: int
    prefix_queries: int
    """Prompt tokens of admitted requests."""
    prefix_hits: int
    """Those that the prefix cache gave."""
    tokens_computed: int
    tokens_recovered: int = 0
    """Positions computed again before kept state of their sequence: they had been dropped."""
    host_blocks_total: int = 0
    host_blocks_cached: int = 0
    """Blocks of the host tier that hold state."""
    host_blocks_dropped: int = 0
    """Blocks given up for others of a higher value."""
    blocks_swapped_in: int = 0
    blocks_swapped_out: int = 0
    prefix_hits_on_host: int = 0
    """Of `prefix_hits`, those that came from the host tier."""
    suspensions: int = 0
    """Of `preemptions`, those of sequences whose state went to the host tier."""
    tokens_dropped: int = 0
    """Tokens whose state was given up in every tier."""
