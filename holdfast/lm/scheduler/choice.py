"""Which policy a name means, and how many tokens its steps may hold."""

from __future__ import annotations

from functools import partial
from typing import get_args

from holdfast.core.config import EngineConfig, SchedulerName
from holdfast.core.cost import CostModel
from holdfast.core.types import Identity
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.retention import Cost, RetentionRule, cost_by_position
from holdfast.lm.scheduler.baselines import ChunkedOnly, HybridOnly, Orca, PrefillFirst, RequestLevel, Unified
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.latency_target import PacedStallFree
from holdfast.lm.scheduler.order import make_order
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import EngineShape

NAMES: tuple[SchedulerName, ...] = get_args(SchedulerName)
CHUNKED = ("stall-free", "chunked-only")
"""Policies that cut prompts; the others compute each whole."""
RESERVING = ("request-level", "orca")
"""Policies that admit a request only with room for its longest length: they need no headroom besides."""


def capacity_of(name: SchedulerName, *, token_budget: int, max_model_len: int, max_sequences: int) -> int:
    """The most tokens of one step, in which a policy that cuts no prompt fits the longest beside all decodes."""
    return token_budget if name in CHUNKED else max(token_budget, max_model_len + max_sequences)


def make_policy(name: SchedulerName, *, token_budget: int, capacity: int) -> Policy:
    """The policy of this name. `token_budget` is what a step is filled up to, `capacity` what `capacity_of` says."""
    match name:
        case "stall-free":
            return StallFree(token_budget)
        case "chunked-only":
            return ChunkedOnly(token_budget)
        case "request-level":
            return RequestLevel(capacity)
        case "orca":
            return Orca(capacity)
        case "prefill-first":
            return PrefillFirst(capacity)
        case "hybrid-only":
            return HybridOnly(capacity)
        case "unified":
            return Unified(token_budget, capacity)


def choose_policy(config: EngineConfig, shape: EngineShape, cost: CostModel | None) -> Policy:
    """The policy that a configuration asks for. Raises ValueError for a latency target without a `cost` model."""
    capacity = shape.max_step_tokens
    if config.tbt_target is None:
        return make_policy(config.scheduler, token_budget=shape.token_budget, capacity=capacity)
    if cost is None:
        raise ValueError(f"tbt_target is {config.tbt_target}, which takes a profile of the device")
    return PacedStallFree(cost, config.tbt_target / 1000, tile=min(shape.tile, capacity), ceiling=capacity)


def retention_cost(config: EngineConfig, shape: EngineShape, cost: CostModel | None) -> Cost:
    """The cost of recomputing a chunk, by position: from the cost model, or from the model's sizes without one."""
    if cost is not None:
        return partial(cost.recompute, config.chunk_size)
    return partial(cost_by_position, balance=shape.attention_balance)


def make_scheduler(
    config: EngineConfig,
    shape: EngineShape,
    cost: CostModel | None,
    *,
    policy: Policy | None = None,
    micro_batches: int = 1,
) -> Scheduler:
    """The scheduler of an engine of this shape, real or simulated, over a block pool of its own.

    `policy` replaces the one that the configuration asks for. `micro_batches` is the number of pipeline stages.
    """
    pool = BlockPool(
        shape.num_blocks,
        config.block_size,
        rule=RetentionRule.of(config, retention_cost(config, shape, cost)),
        host_blocks=shape.num_host_blocks,
        low_water=config.swap_threshold,
    )
    return Scheduler(
        policy or choose_policy(config, shape, cost),
        pool,
        max_sequences=config.max_sequences,
        max_model_len=shape.max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        headroom=0.0 if config.scheduler in RESERVING else config.headroom,
        sharing=config.prefix_sharing,
        served=Identity(shape.model, dtype=shape.precision),
        order=make_order(config),
        seed=config.seed,
        micro_batches=micro_batches,
    )
