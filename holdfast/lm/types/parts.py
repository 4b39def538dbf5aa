"""The values of all parts, for code that carries them without knowing any part."""

from __future__ import annotations

from holdfast.lm.types.adapters import AdapterPlan, AdapterResult
from holdfast.lm.types.grammars import GrammarPlan, GrammarResult
from holdfast.lm.types.penalties import PenaltyPlan
from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.prompts import PromptPlan, PromptResult
from holdfast.lm.types.result import PartResult
from holdfast.lm.types.rows import RowPlan, RowResult
from holdfast.lm.types.tuning import TrainingPlan, TrainingReport
from holdfast.lm.types.vectors import VectorResult

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
