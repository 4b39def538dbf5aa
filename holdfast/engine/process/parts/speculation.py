"""Speculation: guessed tokens, several of which one step verifies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.process.part_builder import Order, PartBuilder, excluded
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.execution.part import DevicePart
from holdfast.lm.models.base import Model
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.draft_head import read_head
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.speculation.choice import make_drafter, make_head_parts, make_parts
from holdfast.lm.parts.speculation.device import HeadDevice
from holdfast.lm.scheduler.part import Part
from holdfast.lm.types import EngineShape


class SpeculationBuilder(PartBuilder):
    """Builds the drafter or the draft head, which guesses tokens so that one step verifies several of them."""

    name = "speculation"
    is_optional = True

    @staticmethod
    def device_parts(
        config: EngineConfig, order: Order, model: Model, parts: Sequence[DevicePart]
    ) -> Sequence[DevicePart]:
        """The draft head, if there is one. Raises ValueError for one that does not fit the model."""
        if not config.draft_model:
            return ()
        try:
            found = Checkpoint.find(config.draft_model)
        except ValueError as error:
            raise ValueError(f"draft_{error}" if str(error).startswith("model ") else f"draft_model: {error}") from None
        try:
            head = read_head(found.directory, model)
        except UnsupportedCheckpoint as error:  # the head, not the model: no other executor would help
            raise ValueError(str(error)) from None
        return (HeadDevice(head, config.most_sequences, model.spec.weight_bytes, config.draft_tokens),)

    def allocated(self, shape: EngineShape) -> EngineShape:
        """Raises ValueError if the configuration names a drafter, and the engine can have none."""
        config = self.site.config
        if config.draft_model and not isinstance(self.site.device, PagedDevice):
            raise ValueError(
                f"draft_model is {config.draft_model}, and {self.site.checkpoint.name} runs on padded rows, which "
                "verify no drafts; leave it out"
            )
        reason = excluded((self.name,), self.site)
        if reason and config.speculation not in ("auto", "off"):
            raise ValueError(f"speculation is {config.speculation}, and {reason}")
        self._drafter = None if reason else make_drafter(config, shape, self.site.device.kind)
        return shape

    def is_priced(self, shape: EngineShape) -> bool:
        return bool(self._drafter or self.site.config.draft_model)

    def planners(self, planning: Planning) -> Iterable[Part]:
        if not self.site.config.draft_model:
            return make_parts(planning, self._drafter)
        return make_head_parts(planning, self.site.paged.part(HeadDevice).pass_share)
