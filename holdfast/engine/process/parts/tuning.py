"""Tuning: the training of adapters in the gaps of an engine, and the jobs for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from holdfast.engine.process.handler import Handler, find, refusal
from holdfast.engine.process.part_builder import Order, PartBuilder, Served, Site
from holdfast.engine.process.parts.adapters import AdapterHandler
from holdfast.engine.process.parts.tuning_handler import Notice, TuningHandler, TuningRules, nobody
from holdfast.engine.ranks.many_device import ManyDevice
from holdfast.engine.ranks.tuning import make_trainer, training_workspace
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.part import Allocated, DevicePart, part_of
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.base import Model
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.parts.adapters.device import AdapterDevice
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.tuning.choice import make_tuner, with_training
from holdfast.lm.parts.tuning.device import TuningDevice, TuningExecutor
from holdfast.lm.parts.tuning.messages import ChangeJob, JobRefused, RunCall, StartDriven, StartJob
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.part import Part
from holdfast.lm.types import EngineShape
from holdfast.training.base import training_shape
from holdfast.training.trainer import Trainer

HOST_BYTES_PER_SECOND = {"cuda": 40e9, "cpu": 5e9}
"""Speed of copies between the cache and the host, roughly. The planner only needs to know which slices are long."""


class TuningOnDevice(TuningDevice[Trainer]):
    """An engine's training on its device."""

    def __init__(self, config: EngineConfig, order: Order, model: Decoder, adapters: AdapterDevice) -> None:
        """The trained adapters are served from `adapters`."""
        self.notice = Notice(order.wake)
        """The trainer calls this when it is done with a state."""

        def make(allocated: Allocated) -> Trainer:
            with order.stages.stage("tuning"):
                return make_trainer(config, model, adapters, allocated, wake=self.notice)

        super().__init__(make, partial(training_workspace, config, model))


class TuningBuilder(PartBuilder):
    """Builds the tuner, which plans slices of training, the trainer, which computes them, and their handler."""

    name = "tuning"
    refusals = dict.fromkeys(
        (StartJob, StartDriven, RunCall, ChangeJob),
        refusal(JobRefused, "this engine takes no tuning jobs; give it tuning"),
    )

    @staticmethod
    def wanted(config: EngineConfig) -> bool:
        return config.tuning

    @staticmethod
    def device_parts(
        config: EngineConfig, order: Order, model: Model, parts: Sequence[DevicePart]
    ) -> Sequence[DevicePart]:
        if not isinstance(model, Decoder):
            return ()  # EXCLUSIONS say why
        return (TuningOnDevice(config, order, model, part_of(parts, AdapterDevice)),)

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._model = site.decoder

    def is_priced(self, shape: EngineShape) -> bool:
        return True

    def planners(self, planning: Planning) -> Iterable[Part]:
        config, device = self.site.config, self.site.blocks
        self._tuner = make_tuner(
            planning,
            training_shape(self._model.decoder),
            memory_fraction=config.tuning_memory_fraction,
            block_seconds=device.block_bytes / HOST_BYTES_PER_SECOND[device.kind],
        )
        self._part = TuningPart(self._tuner)
        return (self._part,)

    def policy(self, policy: Policy, planning: Planning) -> Policy:
        config = self.site.config
        return with_training(
            planning,
            policy,
            self._part,
            config.deferral_bound,
            progress=config.tuning_progress,
            share=config.tuning_share,
        )

    def handlers(self, served: Served) -> Iterable[Handler]:
        adapters = find(served.handlers, AdapterHandler)
        device = self.site.blocks
        trainer: Trainer = device.executor.part(TuningExecutor).training
        notice, rules = device.part(TuningOnDevice).notice, self._rules(trainer.base_digest)
        announce = device.announce if isinstance(device, ManyDevice) else nobody
        return (TuningHandler(self._tuner, trainer, adapters, rules, notice, announce),)

    def _rules(self, base_digest: str) -> TuningRules:
        config, device = self.site.config, self.site.blocks
        base = adapted_modules(self._model.decoder)
        return TuningRules(
            base_model=self.site.checkpoint.name,
            base_digest=base_digest,
            micro_batch=None if config.tuning_micro_batch == "auto" else config.tuning_micro_batch,
            target=config.tbt_seconds,
            bound=config.deferral_seconds,
            max_rank=config.max_adapter_rank,
            takes_dora=device.part(AdapterDevice).slots.takes_gains,
            modules=base.tunable,
            dora_modules=base.scalable,
            threads=torch.get_num_threads() if device.kind == "cpu" else 0,
        )
