"""The values of all parts, for code that carries them without knowing any part."""

from __future__ import annotations

from holdfast.lm.types.adapters import AdapterForgotten, AdapterKnown, AdapterPlan, AdapterResult
from holdfast.lm.types.grammars import GrammarPlan, GrammarResult
from holdfast.lm.types.news import PartNews
from holdfast.lm.types.penalties import PenaltyPlan
from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.prompts import PromptPlan, PromptResult
from holdfast.lm.types.result import PartResult
from holdfast.lm.types.rows import RowPlan, RowResult
from holdfast.lm.types.tuning import JobClosed, JobOpened, TrainingPlan, TrainingReport
from holdfast.lm.types.vectors import VectorResult

VALUES: tuple[type[PartPlan] | type[PartResult] | type[PartNews], ...] = (
    AdapterPlan,
    AdapterResult,
    AdapterKnown,
    AdapterForgotten,
    TrainingPlan,
    TrainingReport,
    JobOpened,
    JobClosed,
    PenaltyPlan,
    GrammarPlan,
    GrammarResult,
    PromptPlan,
    PromptResult,
    VectorResult,
    RowPlan,
    RowResult,
)
"""The classes of the values that parts add to plans and to results, and of their news. No two have the same name."""
