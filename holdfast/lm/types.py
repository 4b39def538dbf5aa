"""The values that flow through a language model's loop: Sequence, Segment, StepPlan, StepResult.

One direction only: a request becomes a Sequence, the scheduler turns sequences into a StepPlan, the executor turns
the plan into a StepResult, and the scheduler reads the result back into its sequences.
"""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from holdfast.core.columns import Columns
from holdfast.core.config import CacheTypeName, ExecutorName, QuantizationName
from holdfast.core.types import FinishReason, Grammar, Request, SamplingParams, SequenceOutput, TokenLogprobs
from holdfast.lm.tiers import LowerShape
from holdfast.loop.contracts import Device, Executor
from holdfast.loop.loop import Loop

PENDING = -1
"""Stands for the last token that the row sampled, which the host may not know yet; the executor fills it in."""


@dataclass(frozen=True, slots=True)
class Shaping:
    """How a sequence's logits are changed before a token is drawn. The fields of these names are SamplingParams'."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits."""
    prompt: int = 0
    """Tokens of the prompt."""
    ends: tuple[int, ...] = ()
    """Tokens that may not be drawn before the answer has `min_tokens`."""

    @property
    def counts(self) -> bool:
        """Whether it depends on the tokens so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_neutral(self) -> bool:
        """Whether it changes nothing."""
        return not (self.counts or self.min_p > 0 or self.bias or (self.min_tokens and self.ends))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are drawn: the part of SamplingParams that reaches the device.

    The fields of SAMPLING_COLUMNS are columns of every step's inputs there. What fewer requests ask for follows them,
    and reaches the device only in the steps that need it.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    logprobs: int | None = None
    """Alternatives to tell with the log probability of each token; None: tell nothing."""
    shaping: Shaping | None = None
    """None: the logits are not changed."""
    grammar: Grammar | None = None
    """What the answer must match; None: anything."""
    embed: bool = False
    """Give the hidden state that the logits come from."""

    @classmethod
    def of(cls, params: SamplingParams, seed: int, *, prompt: int = 0, ends: abc.Collection[int] = ()) -> Sampling:
        """The record of one request, with its number of prompt tokens, and the tokens that end it.

        `seed` is its own, or one drawn for it.
        """
        shaping = Shaping(
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            min_p=params.min_p,
            min_tokens=params.min_tokens,
            bias=params.logit_bias,
            prompt=prompt,
            ends=tuple(sorted(ends)),
        )
        told = None if shaping.is_neutral else shaping
        drawn = params.temperature, params.top_k, params.top_p
        return cls(*drawn, seed, params.logprobs, told, params.grammar, params.embed)

    @property
    def asks(self) -> bool:
        """Whether it asks for more than a token drawn from the model's logits."""
        wishes = self.logprobs is not None or self.shaping is not None
        return wishes or self.grammar is not None or self.embed

    @property
    def counts(self) -> bool:
        """Whether the draw depends on the tokens so far."""
        return self.shaping is not None and self.shaping.counts

    @property
    def skips(self) -> bool:
        """Whether tokens that its grammar forces may be taken over without a draw, as nothing else is told of them."""
        return self.grammar is not None and self.logprobs is None and not self.counts

    @property
    def columns(self) -> tuple[float, int, float, int]:
        """The values of SAMPLING_COLUMNS."""
        return self.temperature, self.top_k, self.top_p, self.seed


SAMPLING_COLUMNS: dict[str, type[float] | type[int]] = {"temperature": float, "top_k": int, "top_p": float, "seed": int}
"""The columns of a step's sampled rows, in the order of `Sampling.columns`: float32 for a float, int64 for an int."""


class Segment(NamedTuple):
    """Compute positions [start, stop) of one sequence.

    A decode is a segment of length 1, and longer by the draft where drafted tokens are verified. A prefill chunk, or
    the recomputation of a dropped range, is a segment too. A segment may be planned only when every earlier position of
    its sequence is in the cache, or is swapped in or computed within the same step.
    """

    sequence_id: str
    row: int
    """Row of the executor's persistent state: its block table, or its padded row, and the token it sampled last."""
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


class History(NamedTuple):
    """The known tokens of a row whose draw depends on them (`Shaping.counts`), from position 0 on."""

    row: int
    tokens: tuple[int, ...]


class Telling(NamedTuple):
    """Tell the log probabilities of prompt tokens that follow tokens of one segment."""

    segment: int
    """Its index in the plan."""
    first: int
    """The first of its tokens whose following token is told."""
    targets: tuple[int, ...]
    """The tokens that follow it and the tokens after it."""
    alternatives: int
    """How many of the most probable tokens are told beside each."""


class Answer(NamedTuple):
    """What a sequence with a grammar has answered so far."""

    row: int
    start: int
    """Tokens of its prompt."""
    tokens: tuple[int, ...]
    tenant: str = ""
    """Whose it is. The time that its grammar takes counts for this tenant."""


class ConstrainedRow(NamedTuple):
    """A sampled row whose token a grammar restricts."""

    at: int
    """Its index among the step's sampled rows, of which a segment with a draft has several."""
    row: int
    """Of the executor."""
    start: int
    """The segment's, as are those below."""
    stop: int
    tokens: tuple[int, ...]
    sampling: Sampling
    place: int
    """Index of its segment among those that sample, in plan order."""


class Forced(NamedTuple):
    """Tokens that must follow a sampled one, as its sequence's grammar allows no other."""

    at: int
    """Index of the sampling segment, in plan order."""
    tokens: tuple[int, ...]


class TableWrite(NamedTuple):
    """New entries of a row's block table: `blocks` go to its indices [start, start + len(blocks))."""

    row: int
    start: int
    blocks: tuple[int, ...]


class BlockCopy(NamedTuple):
    """The contents of one block, keys and values of all layers, copied to a block of the other tier."""

    source: int
    target: int


class Forward(NamedTuple):
    """One run of an unmodified model: some of a plan's segments, padded to the longest of them.

    A forward of the batch (not `apart`) computes the rows that are in the batch. If the row of a segment is not in it
    yet, its whole prompt is computed in this forward and the row joins: by vector shaping beside rows that run (Baton
    §4.1), or left-padded if nothing runs. Each row of the batch has exactly one segment in it, or is in `ended`.

    A forward apart computes states that are not in the batch: one chunk of one prompt, or a group of whole prompts from
    position 0, left-padded. Their states join the batch by a `RowMove` "embed" of this plan or a later one.
    """

    stop: int
    """Its segments are those of the plan from the `stop` of the forward before it, at first 0, up to this index."""
    apart: bool = False
    ended: tuple[int, ...] = ()
    """Rows of the batch that are computed although their sequences have ended (run to completion)."""


RowMoveKind = Literal["embed", "drop", "keep", "store", "offload", "load", "forget"]


class RowMove(NamedTuple):
    """What happens to the state of one row, or of one slot, between the forwards of a plan.

    A row's state is in the batch, or apart. A slot holds one state outside of both, on the device or on the host.

    - embed: the row's state apart joins the batch (vector embedding, Baton §4.2).
    - drop: the row's state is given up, in the batch or apart. Its sequence ended or was preempted.
    - keep: the row's state goes to the slot and stays on the device. The row is empty then.
    - store: the row's state goes to the slot, on the host. The row is empty then.
    - offload: the slot's state goes from the device to the host.
    - load: a copy of the slot's state, cut to `length` positions, becomes the row's state apart. The slot keeps its
      own.
    - forget: the slot's state is given up.

    The scheduler knows when a copy to the host is complete from `StepResult.swapped_out`, and when a load from there is
    from `swapped_in`. It needs neither before it plans on: what needs a state waits for it on the device.
    """

    before: int
    """Index of the forward that it happens before; the number of forwards: after the last."""
    kind: RowMoveKind
    row: int = -1
    """Of the executor's rows; -1 for offload and forget."""
    slot: int = -1
    """-1 for embed and drop."""
    length: int = 0
    """Positions of the state afterwards; 0 for drop and forget."""


class AdapterLoad(NamedTuple):
    """An adapter's weights copied from the host into a slot on the device."""

    slot: int
    """Only plans before this one may read what it held."""
    adapter: str
    """Its content id (`Identity.adapter`)."""


class BlockMove(NamedTuple):
    """The contents of one block copied to another of the same tier, before the plan's segments run."""

    source: int
    target: int


TrainingAction = Literal["run", "release", "drop", "offload", "restore"]


class TrainingSlice(NamedTuple):
    """Work on one micro-batch of a job, computed after the plan's segments.

    A micro-batch is a list of units: half a layer, attention or MLP, forward or backward, or a chunk of the head; the
    last micro-batch of a step ends with the unit of the optimizer. The result does not depend on where slices are cut.

    - run: compute units [first, stop).
    - release: give up the activations that were kept. The backward computes them again.
    - drop: give up the micro-batch. It begins again at unit 0.
    - offload: move the job's vectors (parameters, gradients, moments) to the host.
    - restore: move them back.
    """

    job: str
    step: int
    """Number of the optimizer step, from 0."""
    micro_batch: int
    """Index within the step."""
    action: TrainingAction
    first: int = 0
    stop: int = 0
    keep: bool = True
    """Forward units keep the activations that backward needs; otherwise only the inputs of the halves."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What one slice took and gave."""

    job: str
    step: int
    micro_batch: int
    action: TrainingAction
    first: int
    stop: int
    seconds: float
    """Time that the device spent on it."""
    tokens: int = 0
    """Of the micro-batch, where the slice ended it."""
    loss: float | None = None
    """Mean over the step's tokens, where the slice ended the step."""
    launch_seconds: float = 0.0
    """Time that the host spent to launch it; 0 where it does not run beside the device."""


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

    forwards: tuple[Forward, ...] = ()
    """The runs of the model that the segments make up, in order. Empty: a single one of packed tokens (paged)."""
    row_moves: tuple[RowMove, ...] = ()
    """Where states of rows go, in the order in which it happens."""

    adapter_loads: tuple[AdapterLoad, ...] = ()
    """Begun before the segments run. `StepResult.adapters_in` says when they are complete; until then no segment reads
    their slots. A plan without segments is complete when all loads are."""
    adapter_slots: tuple[int, ...] = ()
    """For each segment, the slot of its adapter, or -1. Empty: no segment has one."""
    lent: int = 0
    """The cache's last blocks, so many of them, belong to training from this plan on."""
    block_moves: tuple[BlockMove, ...] = ()
    """Applied before everything else of the plan; table writes name the new places."""
    histories: tuple[History, ...] = ()
    """Of sampling segments. On paged rows only the first one of a sequence in its row has it: the executor notes the
    tokens of later ones."""
    tells: tuple[Telling, ...] = ()
    """Of paged rows, in the order of their segments."""
    answers: tuple[Answer, ...] = ()
    """Of sampling segments with a grammar: the first one of a sequence in its row has it."""
    training: TrainingSlice | None = None
    """Computed after the segments. A plan may have a slice and no segments."""
    budget: int = 0
    """Tokens that the policy would have let into the step, for those who watch; 0: not told."""
    predicted: float = 0.0
    """Seconds that the policy expects the segments to take, for those who watch; 0: it predicts nothing."""

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
    def idle_tokens(self) -> int:
        """Tokens that the forwards compute and that belong to no segment: padding, and rows whose sequence has ended.

        One insertion of l tokens into a batch of B rows by shaping makes (B - 1)(l - 1) of them (Baton §4.1). Without
        `forwards` there is no padding.
        """
        lengths = [stop - start for start, stop in zip(*map(self.columns.column, ("start", "stop")), strict=True)]
        idle = at = 0
        for forward in self.forwards:
            longest = max(lengths[at : forward.stop], default=1)
            rows = forward.stop - at + len(forward.ended)
            idle += rows * longest - sum(lengths[at : forward.stop])
            at = forward.stop
        return idle

    @property
    def drafts(self) -> list[tuple[int, ...]] | None:
        """The drafted tokens of each sampling segment, in plan order; None for a plan without any."""
        if self.samples is None:
            return None
        pairs = zip(self.columns.column("tokens"), self.columns.column("sampling"), strict=True)
        sampled = [tokens for tokens, sampling in pairs if sampling is not None]
        return [tokens[len(tokens) - most + 1 :] for tokens, most in zip(sampled, self.samples, strict=True)]

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
    """Time that the device spent on the step. In a pipeline, that of all stages and of what they send, without their
    waits for each other: what the step takes alone in the pipeline."""
    swapped_out: int = -1
    """Number of a plan: its copies to the host, and those of all plans before it, are complete."""
    swapped_in: int = -1
    """The same of copies to the device."""
    copies: tuple[CopyTime, ...] = ()
    """The copies that were seen to complete since the last result."""
    counts: abc.Sequence[int] | None = None
    """How many of `tokens` each sampling segment gave, in plan order; None: one each."""
    lost: tuple[str, ...] = ()
    """Sequences whose state is gone because the device ran out of memory: nothing of them is computed. Their sampling
    segments in this plan and in those after it, up to the one that starts them again, give no token (`counts`)."""
    training: TrainingResult | None = None
    """Of the plan's slice. `seconds` above does not include it."""
    adapters_in: int = -1
    """Number of a plan: its adapter loads, and those of all plans before it, are complete."""
    adapters_lost: tuple[str, ...] = ()
    """Those of such adapters that could not be read any more. Their slots hold what they held."""
    stages: tuple[float, ...] = ()
    """The time that each stage of a pipeline spent on the step; empty for one stage."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Of each of the tokens; None for one whose request does not ask. Empty: no request of the step does."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """For each of the plan's `tells`, the records of its targets."""
    vectors: tuple[bytes, ...] = ()
    """For each sampling segment, the hidden state [hidden] of its last token as float32 numbers; empty where it is not
    asked for. Without any: no request of the step asks."""
    forced: tuple[Forced, ...] = ()
    """What must follow some of the tokens. Not told where `Sampling.skips` is false."""

    def verified(self, drafts: abc.Sequence[abc.Sequence[int]]) -> StepResult:
        """This result, with a token drawn at every sampled position, cut to those that follow from right guesses.

        Position by position the model draws what it would draw without a draft, with the noise of that position. A draw
        is the sequence's next token if all guesses in front of it were right. So the tokens are those that it would
        have had, one by one: also with a temperature, for the same seed. (Rejection sampling, as by Leviathan et al.
        2023, would keep the distribution only.)
        """
        kept: list[int] = []
        last: list[int] = []
        counts: list[int] = []
        at, tokens = 0, self.tokens
        for draft in drafts:
            right = 0
            while right < len(draft) and tokens[at + right] == draft[right]:
                right += 1
            kept.extend(range(at, at + right + 1))
            counts.append(right + 1)
            last.append(at + right)
            at += len(draft) + 1
        logprobs = tuple([self.logprobs[place] for place in kept]) if self.logprobs else ()
        vectors = tuple([self.vectors[place] for place in last]) if self.vectors else ()
        given = tuple([tokens[place] for place in kept])
        return replace(self, tokens=given, counts=tuple(counts), logprobs=logprobs, vectors=vectors)


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
    cached_by_tier: tuple[int, int, int] = (0, 0, 0)
    """Of `cached_tokens`, those from the host, from the disk and from the remote tier."""
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
    forwards: int = 0
    """Of padded rows, as are all below: runs of the model so far."""
    idle_tokens: int = 0
    """Tokens computed so far that belong to no request (`StepPlan.idle_tokens`)."""
    rows_wide: int = 0
    """Positions that memory is counted for in each row of the batch, before it is rounded up."""
    rows_prefilled: int = 0
    """Of `running`, those that were prefilled ahead and wait for a place in the batch."""
    shrinks: int = 0
    """Steps in which the device ran out of memory. The batch was made smaller each time."""
    adapters_known: int = 0
    """Adapters that requests may ask for."""
    adapters_resident: int = 0
    """Those in a slot on the device."""
    adapter_loads: int = 0
    """Copies of adapters to the device so far."""
    blocks_training: int = 0
    """Blocks lent to training: free + cached + used + training = total."""
    training_tokens: int = 0
    """Tokens of the micro-batches of tuning jobs that were computed."""
    training_seconds: float = 0.0
    """Device time of their slices."""
    deferred_seconds: float = 0.0
    """How long requests have waited by the deferral bound, summed."""
    tokens_drafted: int = 0
    """Drafted tokens that were verified."""
    drafts_accepted: int = 0
    """Those of them that were the model's own."""
    prefix_hits_on_disk: int = 0
    """Of `prefix_hits`, those that came from the disk for their request."""
    prefix_hits_on_remote: int = 0
    """The same of the remote tier."""
    disk_blocks_total: int = 0
    disk_blocks_cached: int = 0
    disk_bytes_written: int = 0
    disk_bytes_read: int = 0
    disk_blocks_dropped: int = 0
    """Given up for others of a higher value."""
    remote_down: int = 0
    """1 while the remote tier does not work; over several engines, how many find that."""
    remote_bytes_written: int = 0
    remote_bytes_read: int = 0
    blocks_corrupt: int = 0
    """Blocks of the disk or the remote tier whose bytes were not what was written; they are computed again."""
    tier_failures: int = 0
    """Blocks that could not be written to these tiers or read from them."""
    blocks_cheaper_computed: int = 0
    """Blocks that these tiers had, and that were computed again as that is faster."""
    fetches_given_up: int = 0
    """Requests that did not wait for their blocks any longer and computed them."""
    chunk_bytes_in: int = 0
    """Bytes of KV blocks that have come from other engines."""
    chunk_bytes_out: int = 0
    """Bytes that were sent to others."""
    chunk_rate: float = 0.0
    """Bytes per second of recent moves into this engine; 0 before the first."""
    chunk_failures: int = 0
    """Moves into this engine that ended early because of an error."""


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
    """One block of the KV cache: keys and values of `block_size` tokens in all layers. On padded rows: one position, or
    one row where the state does not grow."""
    host_cache: int = 0
    """What may be given to the host tier."""
    adapters: int = 0
    """The slots of adapters."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache on the device."""
        return self.cache // self.block

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier."""
        return self.host_cache // self.block

    def with_blocks(self, num_blocks: int, num_host_blocks: int) -> MemoryMeasurement:
        """The same, with this many blocks in the tiers."""
        return replace(self, cache=num_blocks * self.block, host_cache=num_host_blocks * self.block)


COPIES_FOR_OTHERS_BYTES = {"cuda": 64 << 20, "cpu": 8 << 20}
"""Copied to the host beside a step for other engines to read: some milliseconds at most. On a CPU the step waits."""

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


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of the state of one row, as a model that was not modified keeps it."""

    fixed: int = 0
    """Bytes that do not depend on the length: recurrent states."""
    growing: tuple[tuple[int, int | None], ...] = ()
    """Of states that grow: bytes of a position, and the most positions that are kept (a window), or None for all."""

    def of(self, length: int) -> int:
        """Bytes of a state of this many positions."""
        return self.fixed + sum(each * (length if most is None else min(length, most)) for each, most in self.growing)

    @property
    def position(self) -> int:
        """Bytes of one position in a short state; where nothing grows, of the whole row."""
        return sum(each for each, _ in self.growing) or self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What an unmodified model gives the right logits for, as probes against each prompt alone have shown.

    What is False is not used. The last resort, one row at a time, is right for every model.
    """

    chunks: bool
    """A prompt may be computed in several forwards."""
    left_padding: bool
    """Prompts of unequal length may be computed in one forward, placeholders in front. If not: of equal length only."""
    batched_decode: bool
    """Rows may be merged and decoded in one forward. If not, each forward has one row."""
    shaping: bool
    """A prompt may be computed beside decodes, in one forward of the batch (Baton §4.1)."""
    croppable: bool
    """A state may be cut to its first positions, so it can serve a prompt that has only these in common with it."""
    graphs: bool = False
    """A decode may be captured as a CUDA graph."""
    not_captured: str = ""
    """Why not, where there is a GPU and graphs are wanted."""
    continues: bool = True
    """A state serves any longer prompt that begins with its tokens. Not where an encoder reads the prompt whole."""
    keeps_state: bool = True
    """The model gives its state out. If not, a row is computed from its first token in every step, alone."""

    @property
    def sentence(self) -> str:
        """What the executor will do, for the line at start: `prompts in chunks, rows decoded together`."""
        prompts = "prompts in chunks" if self.chunks else "whole prompts"
        if not self.keeps_state:
            return "each row computed again from its first token in every step"
        rows = "rows decoded together" if self.batched_decode else "rows decoded one by one"
        graphs = ", decodes captured" if self.graphs else ""
        if self.not_captured:
            graphs = f", decodes not captured: {self.not_captured}"
        return f"{prompts}, {rows}{graphs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """What planning needs to know of padded rows."""

    memory: int
    """Bytes for the states of all rows: the batch, states apart, and those kept on the device."""
    bytes: RowBytes
    abilities: Abilities
    host_memory: int = 0
    """Bytes for states on the host."""
    quantum: int = 256
    """The batch has room for a multiple of this many positions in each row."""
    settled: int = 0
    """Positions of the memory in which captured decodes have the batch, beside `memory`. 0: there is none."""
    longest: int = 1 << 24
    """Most positions of a row."""

    @property
    def positions(self) -> int:
        """Positions that the memory holds, for stats; rows where a state does not grow."""
        return self.memory // self.bytes.position

    def settles(self, rows: int, width: int) -> bool:
        """Whether a decode leaves a batch of this size, with the new column, in the memory of captured decodes."""
        if not self.settled or not self.bytes.growing:
            return self.settled > 0
        columns = padded_columns(width, self.longest, self.quantum)
        return width <= columns and padded_rows(rows) * columns <= self.settled


def padded_rows(rows: int) -> int:
    """Rows of a captured decode: 1, 2, 4, 8, 12, 16, then steps of at most a half of the power of two below.

    At most a third is padding.
    """
    if rows <= 4:
        return 1 << (rows - 1).bit_length()
    step = 4 if rows <= 16 else 8 if rows <= 64 else 1 << (rows - 1).bit_length() - 3
    return -(-rows // step) * step


def padded_columns(columns: int, most: int, quantum: int = 256) -> int:
    """Columns of a captured decode: 1, 2 ... 8, 10, 12, 14, 16, 20 ... times half the quantum, and at most `most`.

    Beyond a quantum, at most a third is padding; beyond four, a fifth.
    """
    unit = max(1, quantum // 2)
    units = -(-columns // unit)
    step = 1 << max((units - 1).bit_length() - 3, 0)
    return min(-(-units // step) * step * unit, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The engine as allocated: all that planning needs to know of the model and the device. A value."""

    model: str
    """The name under which it is served."""
    precision: str
    """The type of weights, activations and cache, for people and as part of the identity of cached state."""
    num_blocks: int
    """Blocks of the KV cache on the device; positions of padded rows (`row_positions`)."""
    num_host_blocks: int = 0
    """Blocks of the host tier."""
    host_blocks_ready: int | None = None
    """Those that can be used from the start; None: all."""
    block_bytes: int = 0
    """Bytes of a block; 0: unknown, and every block of the host is brought back."""
    lower: LowerShape | None = None
    """The tiers behind the host tier."""
    copies_for_others: int | None = None
    """Blocks that a step copies to the host for other engines to read; None: as many as in a pause."""
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
    adapter_slots: int = 0
    """Adapters that the device holds at a time; 0: none are served."""
    gives_hidden: bool = False
    """Whether hidden states can be had: for log probabilities of prompts, and for embeddings."""
    executor: ExecutorName = "paged"
    rows: RowShape | None = None
    """Of the padded executor; None for the paged one. Raises ValueError if it does not go with `executor`."""

    def __post_init__(self) -> None:
        if (self.rows is not None) != (self.executor == "padded"):
            raise ValueError(f"executor is {self.executor} and rows are {self.rows}; give rows for the padded one only")

    @property
    def row_positions(self) -> int:
        """Positions that the states of padded rows may hold in all; 0 for the paged executor."""
        return 0 if self.rows is None else self.rows.positions


LanguageLoop = Loop[Request, "StepPlan", "StepResult", Columns[SequenceOutput], "SchedulerStats"]
"""The loop of language models."""
LanguageExecutor = Executor["StepPlan", "StepResult"]


class DeviceExecutor(LanguageExecutor, Protocol):
    """An executor of step plans as a device makes it."""

    def prepare(self) -> bool:
        """Use a pause for a bit of what makes later steps faster; whether it did. Nothing may be in flight."""
        ...


class HostTier(Protocol):
    """The memory of the host tier, which becomes usable bit by bit once `begin` was called."""

    @property
    def ready(self) -> int:
        """Blocks that can be used. Never falls."""
        ...

    @property
    def blocks(self) -> int:
        """Blocks that can be used once all is done."""
        ...

    def begin(self) -> None:
        """Begin to make blocks usable, in a thread."""
        ...


class LanguageDevice(Device[MemoryMeasurement, EngineShape], Protocol):
    """A language model on its device, paged or padded: what the engine is built from."""

    @property
    def kind(self) -> str:
        """cuda or cpu."""
        ...

    @property
    def precision(self) -> str:
        """The type of weights, activations and cache, for people and as part of the identity of cached state."""
        ...

    @property
    def captures(self) -> bool:
        """Whether steps run as captured CUDA graphs, so that `compile` has something to do."""
        ...

    @property
    def executor(self) -> DeviceExecutor:
        """The executor over the allocated memory, always the same. Raises RuntimeError before `allocate`."""
        ...

    @property
    def host(self) -> HostTier | None:
        """The host tier, where it has to be made usable. Raises RuntimeError before `allocate`."""
        ...

    def compile(self) -> None:
        """Compile what captured steps need. Does nothing where steps are not captured."""
        ...
