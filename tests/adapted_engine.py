"""A paged engine that serves adapters, without processes: a scheduler over a device of a chosen number of blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from holdfast.core.types import FinishReason, Identity, Request
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.parts.adapters.device import AdapterDevice, AdapterStore
from holdfast.lm.parts.adapters.planner import AdapterPart
from holdfast.lm.parts.adapters.pool import AdapterPool
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import StepPlan
from holdfast.loop.loop import Loop
from tests.paged import sizes


class Engine:
    """A model with adapters on a device, and a scheduler over it."""

    def __init__(
        self, model: Decoder, *, slots: int = 9, budget: int = 64, blocks: int = 256, host_blocks: int = 0,
        steps_in_flight: int = 2, host_gb: float = 1.0, sequences: int = 30, dora: bool = False,
    ) -> None:  # fmt: skip
        config = EngineConfig(
            token_budget=budget, max_sequences=sequences, max_adapters=slots, max_adapter_rank=128, block_size=4,
            adapter_host_gb=host_gb, dora=dora,
        )  # fmt: skip
        self.slots = AdapterDevice(model, config)
        self.device = PagedDevice(model, config, parts=[self.slots])
        shape = self.device.allocate(sizes(blocks, host_blocks))
        if self.device.memory.host is not None:
            self.device.memory.host.begin()
            self.device.memory.host.wait()
        self.adapters = AdapterPool(shape.adapter_slots)
        self.part = AdapterPart(self.adapters)
        self.scheduler = Scheduler(
            StallFree(budget),
            PagedKind(BlockPool(blocks, 4, host_blocks=host_blocks)),
            [self.part],
            max_sequences=sequences,
            max_model_len=model.spec.max_model_len,
            headroom=0.0,
            sharing=True,
        )
        ticks = count()
        self.loop: Any = Loop(self.scheduler, self.device.executor, steps_in_flight, lambda: float(next(ticks)))
        self.plans: list[StepPlan] = []
        submit = self.device.executor.submit
        self.device.executor.submit = lambda plan: (self.plans.append(plan), submit(plan))[1]  # type: ignore[assignment,func-returns-value,method-assign]
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.cached: dict[str, int] = {}
        self.reasons: dict[str, FinishReason | None] = {}

    @property
    def store(self) -> AdapterStore:
        return self.slots.store

    def register(self, name: str, directory: Path) -> str:
        adapter = self.store.register(self.store.read(name, directory)).id
        self.part.add(adapter)
        return adapter

    def add(self, request: Request, adapter: str = "") -> None:
        self.tokens[request.id] = ()
        self.loop.add(replace(request, identity=Identity(adapter=adapter)))

    def run(self) -> dict[str, tuple[int, ...]]:
        while self.loop.has_work():
            for output in self.loop.step() or ():
                self.tokens[output.request_id] += output.tokens
                self.cached.setdefault(output.request_id, output.cached_tokens)
                self.reasons[output.request_id] = output.finish_reason
        return self.tokens

    def close(self) -> None:
        self.loop.close()
