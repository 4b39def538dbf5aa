"""The other ranks of an engine: serving ends when one of them has failed."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine import messages
from holdfast.engine.process.handler import Handler
from holdfast.engine.process.part_builder import PartBuilder, Served
from holdfast.engine.ranks.ranks import AnyRanks
from holdfast.lm.config import EngineConfig


class RankHandler(Handler):
    """Ends serving when another rank has failed."""

    def __init__(self, ranks: AnyRanks) -> None:
        self._ranks = ranks

    def answers(self) -> Iterable[messages.FromEngine]:
        """Raises RankFailure."""
        self._ranks.check()
        return ()


class RankBuilder(PartBuilder):
    """Builds the handler that watches the processes of other ranks."""

    name = "ranks"

    @staticmethod
    def wanted(config: EngineConfig) -> bool:
        return config.layout.ranks > 1

    def handlers(self, served: Served) -> Iterable[Handler]:
        return (RankHandler(self.site.ranks),)
