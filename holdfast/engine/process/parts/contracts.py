"""Contracts in an engine: an engine that must take them needs the device's cost profile."""

from __future__ import annotations

from holdfast.engine.process.part_builder import PartBuilder
from holdfast.lm.types import EngineShape


class ContractBuilder(PartBuilder):
    """Asks for the cost profile by which contracts are accepted or refused. `lm.parts.standard` makes the rest."""

    name = "contracts"

    def is_priced(self, shape: EngineShape) -> bool:
        return self.site.config.contracts == "on"
