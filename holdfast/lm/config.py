"""EngineConfig: the settings of an engine of a language model, collected from the core and from each part."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.lm.parts.adapters.options import AdapterOptions
from holdfast.lm.parts.contracts.options import ContractOptions
from holdfast.lm.parts.moves.options import MoveOptions
from holdfast.lm.parts.pauses.options import PauseOptions
from holdfast.lm.parts.sleep.options import SleepOptions
from holdfast.lm.parts.speculation.options import SpeculationOptions
from holdfast.lm.parts.states.options import StateOptions
from holdfast.lm.parts.tenants.options import TenantOptions
from holdfast.lm.parts.tiers.options import TierOptions
from holdfast.lm.parts.tuning.options import TuningOptions


@dataclass(frozen=True, kw_only=True)
class EngineConfig(
    SleepOptions,
    TuningOptions,
    AdapterOptions,
    SpeculationOptions,
    TierOptions,
    MoveOptions,
    PauseOptions,
    TenantOptions,
    ContractOptions,
    StateOptions,
):
    """How the engine runs a model. Raises ValueError, naming the value and the limit, for a value out of range.

    The bases are the options of the parts; each has those of the core. The help shows the last base first.
    """
