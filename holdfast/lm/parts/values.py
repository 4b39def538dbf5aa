"""The values of all parts, for code that carries them without knowing any part."""

from __future__ import annotations

from holdfast.lm.parts.adapters.values import AdapterForgotten, AdapterKnown, AdapterPlan, AdapterResult
from holdfast.lm.parts.grammars.values import GrammarPlan, GrammarResult
from holdfast.lm.parts.prompts.values import PromptPlan, PromptResult
from holdfast.lm.parts.tuning.values import CallTaken, JobClosed, JobOpened, TrainingPlan, TrainingReport
from holdfast.lm.parts.vectors.values import VectorResult
from holdfast.lm.types.news import PartNews
from holdfast.lm.types.penalties import PenaltyPlan
from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.result import PartResult
from holdfast.lm.types.rows import RowPlan, RowResult
from holdfast.lm.types.states import StatePlan, StateResult

VALUES: tuple[type[PartPlan] | type[PartResult] | type[PartNews], ...] = (
    AdapterPlan,
    AdapterResult,
    AdapterKnown,
    AdapterForgotten,
    TrainingPlan,
    TrainingReport,
    JobOpened,
    JobClosed,
    CallTaken,
    PenaltyPlan,
    GrammarPlan,
    GrammarResult,
    PromptPlan,
    PromptResult,
    VectorResult,
    RowPlan,
    RowResult,
    StatePlan,
    StateResult,
)
"""The classes of the values that parts add to plans and to results, and of their news. No two have the same name."""
