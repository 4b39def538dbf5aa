"""The values that flow through a language model's loop: Sequence, Segment, StepPlan, StepResult.

One direction only: a request becomes a Sequence, the scheduler turns sequences into a StepPlan, the executor turns
the plan into a StepResult, and the scheduler reads the result back into its sequences.
"""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.core.columns import Columns
from holdfast.core.config import CacheTypeName, QuantizationName
from holdfast.core.types import FinishReason, Request, SamplingParams, SequenceOutput
from holdfast.loop.contracts import Executor
from holdfast.loop.loop import Loop

PENDING = -1
"""Stands for the last token that the row sampled, which the host may not know yet; the executor fills it in."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are drawn: the part of SamplingParams that reaches the device.

    Each field is a column of a step's inputs there, by its name: float32 for a float, int64 for an int. A new field of
    this name in SamplingParams and here is all that it takes for the sampler to find it.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> Sampling:
        """The record of one request; `seed` is its own, or one drawn for it."""
        return cls(**{name: seed if name == "seed" else getattr(params, name) for name in cls.__dataclass_fields__})


class Segment(NamedTuple):
    """Compute positions [start, stop) of one sequence.

    A decode is a segment of length 1, and longer by the draft where drafted tokens are verified. A prefill chunk, or
    the recomputation of a dropped range, is a segment too. A segment may be planned only when every earlier position of
    its sequence is in the cache, or is swapped in or computed within the same step.
    """

    sequence_id: str
    row: int
    """Row of the executor's persistent batch state: its block table and the token it sampled last."""
    start: int
    stop: int
    tokens: tuple[int, ...]
    """Token ids at [start, stop). The first may be PENDING; known or drafted tokens follow."""
    sampling: Sampling | None
    """How to sample after it; None when it ends before the sequence's last token. `StepPlan.samples` says how many."""

    @property
    def length(self) -> int:
        """Number of query tokens."""
        return self.stop - self.start


class TableWrite(NamedTuple):
    """New entries of a row's block table: `blocks` go to its indices [start, start + len(blocks))."""

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

    samples: tuple[int, ...] | None = None
    """Most tokens to sample after each sampling segment, in plan order; None: exactly one after each.

    A segment with 1 gives exactly one. One with n > 1 ends with n - 1 drafted tokens to verify. It gives the drafted
    tokens that are accepted and one more, or fewer, down to none.
    """

    @property
    def columns(self) -> Columns[Segment]:
        """The segments by column."""
        return Columns.of(Segment, self.segments)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step, which the token budget bounds."""
        columns = self.columns
        starts: list[int] = columns.column("start")
        stops: list[int] = columns.column("stop")
        return sum(stops) - sum(starts)

    @property
    def num_sampled(self) -> int:
        """Sampling segments: the length of StepResult.tokens where `samples` is None."""
        return sum([sampling is not None for sampling in self.columns.column("sampling")])


class CopyTime(NamedTuple):
    """How long the copies took that one plan began in one direction."""

    step: int
    inward: bool
    """Host to device; otherwise device to host."""
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave: no, one or several tokens for each sampling segment of its plan."""

    step: int
    tokens: tuple[int, ...]
    """The tokens of all sampling segments, in plan order."""
    seconds: float
    """Time that the device spent on the step."""
    swapped_out: int = -1
    """Number of a plan: its copies to the host, and those of all plans before it, are complete."""
    swapped_in: int = -1
    """The same of copies to the device."""
    copies: tuple[CopyTime, ...] = ()
    """The copies that were seen to complete since the last result."""
    counts: abc.Sequence[int] | None = None
    """How many of `tokens` each sampling segment gave, in plan order; None: one each."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's token stream while the scheduler holds it. Only the scheduler changes it.

    Its `SequenceCache` knows which of its positions are in the KV cache.
    """

    request: Request
    seed: int
    """The request's own seed, or one drawn for it."""
    tokens: array[int] = field(init=False)
    """Prompt and generated tokens known to the host."""
    length: int = field(init=False)
    """Number of its positions, including those whose token is still being sampled."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    preemptions: int = 0
    scheduled_at: float | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = array("I", self.request.prompt)
        self.length = len(self.tokens)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def in_flight(self) -> int:
        """Most tokens that steps in flight sample for this sequence."""
        return self.length - len(self.tokens)

    def rollback(self, length: int) -> None:
        """Drop the positions from `length` on, whose tokens were not accepted; known tokens stay."""
        assert len(self.tokens) <= length <= self.length
        self.length = length


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
    host_blocks_ready: int = 0
    """Blocks of the host tier that can be used; the others are still being locked."""
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


@dataclass(frozen=True, slots=True)
class MemoryMeasurement:
    """What the executor measured of its device, once the weights are loaded. Sizes in bytes."""

    device: str
    """The device in words, for people."""
    total: int
    weights: int
    activations: int
    """Peak of one step at the token budget, measured, beside weights and cache."""
    cache: int
    """What may be given to the KV cache."""
    block: int
    """One block of the KV cache: keys and values of `block_size` tokens in all layers."""
    host_cache: int = 0
    """What may be given to the host tier."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache on the device."""
        return self.cache // self.block

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier."""
        return self.host_cache // self.block


COPIES_AHEAD_BYTES = 1 << 27
"""Bytes that a step swaps out ahead of need. On an H200, 128 MiB take 3 ms and slow a step of 22 ms by less than 3%."""

BUDGET_TILE = {"cuda": 64, "cpu": 16}
"""By kind of device: a token budget is a multiple of this, as other sizes leave part of a matrix tile idle."""

DEFAULT_TOKEN_BUDGET = {"cuda": 2048, "cpu": 512}
"""Tokens of a step, by kind of device."""


def precision_of(dtype: str, quantization: QuantizationName, kv_cache_dtype: CacheTypeName) -> str:
    """The type of a model's numbers and which of them are in FP8, for people: `bfloat16, fp8 weights and cache`."""
    fp8 = [part for part, kind in (("weights", quantization), ("cache", kv_cache_dtype)) if kind == "fp8"]
    return f"{dtype}, fp8 {' and '.join(fp8)}" if fp8 else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The engine as allocated: all that planning needs to know of the model and the device. A value."""

    model: str
    """The name under which it is served."""
    precision: str
    """The type of weights, activations and cache, for people and as part of the identity of cached state."""
    num_blocks: int
    """Blocks of the KV cache on the device."""
    num_host_blocks: int = 0
    """Blocks of the host tier."""
    host_blocks_ready: int | None = None
    """Those that can be used from the start; None: all."""
    copies_ahead: int | None = None
    """Blocks that a step swaps out ahead of need without becoming slower. None: as many as one plan may copy."""
    token_budget: int
    """Tokens that a step is filled up to."""
    max_step_tokens: int
    """Most tokens of one step. Above the budget where a policy computes prompts whole."""
    max_model_len: int
    """Longest sequence in tokens: what the model was made for, or what the cache holds if that is less."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    tile: int
    """A token budget is a multiple of this: other sizes leave part of a matrix tile idle."""
    attention_balance: int = 16384
    """Position at which a token's attention costs as much as all its other work. Used where no cost was measured."""


LanguageLoop = Loop[Request, "StepPlan", "StepResult", Columns[SequenceOutput], "SchedulerStats"]
"""The loop of language models."""
LanguageExecutor = Executor["StepPlan", "StepResult"]
