"""Recurrent states: snapshots at the ends of turns, for models with recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.process.part_builder import Order, PartBuilder
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.part import DevicePart
from holdfast.lm.models.base import Model
from holdfast.lm.parts.states.device import state_parts


class StateBuilder(PartBuilder):
    """Builds the copies of recurrent states, where the model has recurrent layers. Its memory brings the planner."""

    name = "states"

    @staticmethod
    def device_parts(
        config: EngineConfig, order: Order, model: Model, parts: Sequence[DevicePart]
    ) -> Sequence[DevicePart]:
        return state_parts(config, model)
