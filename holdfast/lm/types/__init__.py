"""The values that flow through a language model's loop: Sequence, Segment, StepPlan, StepResult.

One direction only: a request becomes a Sequence, the scheduler turns sequences into a StepPlan, the executor turns
the plan into a StepResult, and the scheduler reads the result back into its sequences.
"""

from holdfast.lm.types.device import (
    BUDGET_TILE,
    COPIES_AHEAD_BYTES,
    COPIES_FOR_OTHERS_BYTES,
    DEFAULT_TOKEN_BUDGET,
    DeviceExecutor,
    EngineShape,
    HostTier,
    LanguageDevice,
    LanguageExecutor,
    LanguageLoop,
    MemoryMeasurement,
    SharedBytes,
    precision_of,
    token_budget_of,
)
from holdfast.lm.types.padding import QUANTUM, BatchShape, padded_columns, padded_rows, whole_quanta
from holdfast.lm.types.plan import (
    NO_COPIES,
    NO_FORECAST,
    PENDING,
    BlockCopy,
    BlockMove,
    Forecast,
    PartPlan,
    Segment,
    StepPlan,
    TableWrite,
    TierCopies,
)
from holdfast.lm.types.result import NONE_COPIED, CopyTime, PartResult, StepResult, TierCopied
from holdfast.lm.types.rows import (
    Abilities,
    Forward,
    RowBytes,
    RowMove,
    RowMoveKind,
    RowPlan,
    RowResult,
    RowShape,
    idle_tokens,
)
from holdfast.lm.types.sampling import SAMPLING_COLUMNS, History, Sampling, Shaping
from holdfast.lm.types.sequence import Sequence
from holdfast.lm.types.states import KeptInputs, StateCopy, StatePlan, StateShape
from holdfast.lm.types.stats import SchedulerStats

__all__ = [
    "BUDGET_TILE",
    "COPIES_AHEAD_BYTES",
    "COPIES_FOR_OTHERS_BYTES",
    "DEFAULT_TOKEN_BUDGET",
    "NONE_COPIED",
    "NO_COPIES",
    "NO_FORECAST",
    "PENDING",
    "QUANTUM",
    "SAMPLING_COLUMNS",
    "Abilities",
    "BatchShape",
    "BlockCopy",
    "BlockMove",
    "CopyTime",
    "DeviceExecutor",
    "EngineShape",
    "Forecast",
    "Forward",
    "History",
    "HostTier",
    "KeptInputs",
    "LanguageDevice",
    "LanguageExecutor",
    "LanguageLoop",
    "MemoryMeasurement",
    "PartPlan",
    "PartResult",
    "RowBytes",
    "RowMove",
    "RowMoveKind",
    "RowPlan",
    "RowResult",
    "RowShape",
    "Sampling",
    "SchedulerStats",
    "Segment",
    "Sequence",
    "Shaping",
    "SharedBytes",
    "StateCopy",
    "StatePlan",
    "StateShape",
    "StepPlan",
    "StepResult",
    "TableWrite",
    "TierCopied",
    "TierCopies",
    "idle_tokens",
    "padded_columns",
    "padded_rows",
    "precision_of",
    "token_budget_of",
    "whole_quanta",
]
