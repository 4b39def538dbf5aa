"""The sizes of a device, and the contracts of a loop of language models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from holdfast.core.columns import Columns
from holdfast.core.config import CacheTypeName, CoreConfig, ExecutorName, QuantizationName
from holdfast.core.types import Request, SequenceOutput
from holdfast.lm.tiers import LowerShape
from holdfast.lm.types.plan import StepPlan
from holdfast.lm.types.result import StepResult
from holdfast.lm.types.rows import RowShape
from holdfast.lm.types.states import StateShape
from holdfast.lm.types.stats import SchedulerStats
from holdfast.loop.contracts import Device, Executor
from holdfast.loop.loop import Loop


@dataclass(frozen=True, slots=True)
class MemoryMeasurement:
    """Memory that the executor measured on its device, once the weights are loaded. Sizes in bytes."""

    device: str
    """The device in words, for people."""
    total: int
    weights: int
    activations: int
    """Measured peak of one step at the token budget, without weights and cache."""
    cache: int
    """Bytes available for the KV cache."""
    block: int
    """One block of the KV cache: keys and values of `block_size` tokens in all layers. On padded rows: one position, or
    one row where the state does not grow."""
    host_cache: int = 0
    """Bytes available for the host tier."""
    adapters: int = 0
    """Bytes of the slots of adapters."""
    rows: int = 0
    """Bytes of the recurrent states of running sequences, and of the kept inputs of drafts."""
    snapshots: int = 0
    """Number of snapshots of recurrent states on the device, besides `cache`."""
    host_snapshots: int = 0
    """Number of such snapshots on the host, besides `host_cache`."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the KV cache on the device."""
        return self.cache // self.block

    @property
    def num_host_blocks(self) -> int:
        """Number of blocks in the host tier."""
        return self.host_cache // self.block

    def with_blocks(
        self, num_blocks: int, num_host_blocks: int, snapshots: int = 0, host_snapshots: int = 0
    ) -> MemoryMeasurement:
        """This measurement, with this many blocks and snapshots in the tiers."""
        return replace(
            self,
            cache=num_blocks * self.block,
            host_cache=num_host_blocks * self.block,
            snapshots=snapshots,
            host_snapshots=host_snapshots,
        )


class SharedBytes(NamedTuple):
    """Bytes of what several ranks hold together. Each rank has its part of every block, and of every state."""

    block: int
    """A block of the KV cache, on all ranks together."""
    state: int = 0
    """The recurrent states of all layers of one sequence, on all ranks together."""


COPIES_FOR_OTHERS_BYTES = {"cuda": 64 << 20, "cpu": 8 << 20}
"""Bytes that a step copies to the host for other engines: some milliseconds at most. On a CPU the step waits."""


COPIES_AHEAD_BYTES = 1 << 27
"""Bytes that a step swaps out ahead of need. On an H200, 128 MiB take 3 ms and slow a step of 22 ms by less than 3%."""


BUDGET_TILE = {"cuda": 64, "cpu": 16}
"""A token budget is a multiple of this, by kind of device. Other sizes leave part of a matrix tile idle."""


DEFAULT_TOKEN_BUDGET = {"cuda": 2048, "cpu": 512}
"""Tokens of a step, by kind of device."""

LARGE_TOKEN_BUDGET = {"cuda": 8192, "cpu": 512}
"""Tokens of a step that makes nobody wait, by kind of device. A GPU computes prompts up to 5% faster with them."""


SERIAL_TOKEN_BUDGET = 64
"""Tokens of a step that computes one token after the other. More would only lengthen it: no weight is read less often.
"""


def token_budget_of(config: CoreConfig, kind: str, *, one_by_one: bool = False) -> int:
    """Most tokens of a step on a `kind` of device ("cuda", "cpu"), unless a latency target sets it.

    `one_by_one`: the model computes one token after the other (`ModelSpec.one_by_one`). A default budget then has room
    for a decode of each of `max_sequences`, if that is given and no more than the usual budget.
    """
    usual = (LARGE_TOKEN_BUDGET if config.token_budget == "large" else DEFAULT_TOKEN_BUDGET)[kind]
    if one_by_one:
        decodes = -(-(config.max_sequences or 0) // BUDGET_TILE[kind]) * BUDGET_TILE[kind]
        usual = min(usual, max(SERIAL_TOKEN_BUDGET, decodes))
    return config.fixed_token_budget or usual


def precision_of(dtype: str, quantization: QuantizationName, kv_cache_dtype: CacheTypeName) -> str:
    """The type of a model's numbers and which of them are in FP8, for people: `bfloat16, fp8 weights and cache`."""
    fp8 = [part for part, kind in (("weights", quantization), ("cache", kv_cache_dtype)) if kind == "fp8"]
    return f"{dtype}, fp8 {' and '.join(fp8)}" if fp8 else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The engine as allocated: everything that planning needs to know of the model and the device. A value."""

    model: str
    """Name under which the model is served."""
    precision: str
    """The type of weights, activations and cache, for people and as part of the identity of cached state."""
    num_blocks: int
    """Number of blocks of the KV cache on the device; positions for padded rows (`RowShape.positions`)."""
    num_host_blocks: int = 0
    """Number of blocks in the host tier."""
    host_blocks_ready: int | None = None
    """Number of host blocks that can be used from the start; None: all."""
    block_bytes: int = 0
    """Bytes of a block. 0: unknown, and every block that the host has is copied back."""
    lower: LowerShape | None = None
    """The disk and the remote tier below the host tier; None if there are none."""
    copies_for_others: int | None = None
    """Number of blocks that a step copies to the host for other engines; None: as many as in a pause."""
    copies_ahead: int | None = None
    """Number of blocks that a step swaps out ahead of need without becoming slower. None: as many as a plan may."""
    token_budget: int
    """Tokens that a step is filled up to."""
    max_step_tokens: int
    """Most tokens of one step. Above the budget if a policy computes prompts whole."""
    max_model_len: int
    """Longest sequence in tokens: the model's limit, or the capacity of the cache if that is less."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    tile: int
    """A token budget is a multiple of this: other sizes leave part of a matrix tile idle."""
    attention_balance: int = 16384
    """Position at which a token's attention costs as much as all its other work. Used if no cost was measured."""
    adapter_slots: int = 0
    """Number of adapters that the device holds at a time; 0 if none are served."""
    gives_hidden: bool = False
    """Whether the engine can give hidden states: for log probabilities of prompts, and for embeddings."""
    executor: ExecutorName = "paged"
    rows: RowShape | None = None
    """Sizes of the padded executor; None for the paged one. Raises ValueError if it does not go with `executor`."""
    states: StateShape | None = None
    """Sizes of the recurrent states of a hybrid model; None for a model without any. Raises ValueError with `rows`."""

    def __post_init__(self) -> None:
        if (self.rows is not None) != (self.executor == "padded"):
            raise ValueError(f"executor is {self.executor} and rows are {self.rows}; give rows for the padded one only")
        if self.rows is not None and self.states is not None:
            raise ValueError(
                f"states are {self.states} on the padded executor, whose rows hold all state; give one only"
            )

    def cache_positions(self, block_size: int) -> int | None:
        """Positions that the paged cache holds in blocks of this size; None for padded rows."""
        return None if self.rows is not None else self.num_blocks * block_size


LanguageLoop = Loop[Request, StepPlan, StepResult, Columns[SequenceOutput], SchedulerStats]
"""The loop of language models."""


LanguageExecutor = Executor[StepPlan, StepResult]


class DeviceExecutor(LanguageExecutor, Protocol):
    """An executor of step plans, as a device makes it."""

    def prepare(self) -> bool:
        """Use a pause for work that makes later steps faster. Returns whether it did. Nothing may be in flight."""
        ...

    @property
    def due(self) -> float:
        """Seconds that the next `prepare` takes at most, if it is worth a pause of all streams; else 0."""
        ...


class HostTier(Protocol):
    """The memory of the host tier, which becomes usable piece by piece after `begin` was called."""

    @property
    def ready(self) -> int:
        """Number of blocks that can be used. Never falls."""
        ...

    @property
    def blocks(self) -> int:
        """Number of blocks that can be used once all are ready."""
        ...

    def begin(self) -> None:
        """Begin to make blocks usable, in a thread."""
        ...


Kind = TypeVar("Kind")


class LanguageDevice(Device[MemoryMeasurement, EngineShape], Protocol):
    """A language model on its device, paged or padded. The engine is built from it."""

    @property
    def kind(self) -> str:
        """ "cuda" or "cpu"."""
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
        """The host tier, if it has to be made usable. Raises RuntimeError before `allocate`."""
        ...

    def part(self, kind: type[Kind]) -> Kind:
        """The part of this class. Raises LookupError if the device has none."""
        ...

    def compile(self) -> None:
        """Compile the kernels that captured steps need. Does nothing if steps are not captured."""
        ...
