"""The values of all parts, for code that carries them without knowing any part."""

from __future__ import annotations

from holdfast.lm.parts.adapters.values import AdapterPlan, AdapterResult
from holdfast.lm.parts.grammars.values import GrammarPlan, GrammarResult
from holdfast.lm.parts.prompts.values import PromptPlan, PromptResult
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingReport
from holdfast.lm.parts.vectors.values import VectorResult
from holdfast.lm.types.penalties import PenaltyPlan
from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.result import PartResult
from holdfast.lm.types.rows import RowPlan, RowResult

VALUES: tuple[type[PartPlan] | type[PartResult], ...] = (
    AdapterPlan,
    AdapterResult,
    TrainingPlan,
    TrainingReport,
    PenaltyPlan,
    GrammarPlan,
    GrammarResult,
    PromptPlan,
    PromptResult,
    VectorResult,
    RowPlan,
    RowResult,
)
"""The classes of the values that parts add to plans and to results. No two have the same name."""
