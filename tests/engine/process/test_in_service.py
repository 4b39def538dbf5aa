"""A cost model corrected by the times of steps in the loop."""

import itertools

import pytest

from holdfast.core.cost import CostModel
from holdfast.engine.process.in_service import SECONDS, in_service
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import StepResult
from holdfast.loop.loop import Loop

COST = CostModel(
    model="m",
    device="d",
    linear_tokens=(1, 512),
    linear_seconds=(0.004, 0.020),
    attention_queries=(1, 512),
    attention_contexts=(16, 1024),
    attention_seconds=((0.00001, 0.0001), (0.0005, 0.004)),
    decode_rows=(1, 16),
    decode_seconds=(0.001, 0.003),
    decode_attention=((0.0, 0.0002), (0.0, 0.0001)),
)


class Slower:
    """An executor slower than the model, by about one factor for decode steps and another for others."""

    def __init__(self, decodes, others):
        self.factors = others, decodes
        self.now = 0.0
        self.wobble = itertools.cycle((0.9, 0.95, 1.0, 1.05, 1.1))
        self.plans = []

    def submit(self, plan):
        self.plans.append(plan)

    def collect(self):
        plan = self.plans.pop(0)
        spans = [(segment.stop - segment.start, segment.stop) for segment in plan.segments]
        factor = self.factors[all(query == 1 for query, _ in spans)] * next(self.wobble)
        seconds = COST.step(spans) * factor
        self.now += seconds
        return StepResult(plan.step, (7,) * plan.num_sampled, seconds)


def loop_over(device):
    scheduler = Scheduler(
        StallFree(256),
        PagedKind(BlockPool(512, 16)),
        max_sequences=16,
        max_model_len=1024,
        vocab_size=100,
    )
    return Loop(scheduler, device, 2, lambda: device.now)


def test_each_kind_of_step_is_scaled_by_its_median_ratio():
    device = Slower(decodes=1.2, others=1.5)
    corrected = in_service(COST, loop_over(device), vocab_size=100, clock=lambda: device.now)
    decodes, mixed = [(1, 100)] * 4, [(1, 100)] * 4 + [(60, 60)]
    assert corrected.step(decodes) / COST.step(decodes) == pytest.approx(1.2, rel=0.03)
    assert corrected.linear(64) / COST.linear(64) == pytest.approx(1.5, rel=0.1)
    assert corrected.step(mixed) / COST.step(mixed) == pytest.approx(1.5, rel=0.1)
    assert not device.plans


def test_a_kind_with_too_few_steps_is_not_scaled():
    slow = Slower(decodes=1e3, others=1e3)
    assert in_service(COST, loop_over(slow), vocab_size=100, clock=lambda: slow.now) == COST
    assert slow.now >= SECONDS
