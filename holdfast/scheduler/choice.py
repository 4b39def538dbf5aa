"""Which policy a name means, and how many tokens its steps may hold."""

from __future__ import annotations

from typing import get_args

from holdfast.core.config import EngineConfig, SchedulerName
from holdfast.core.cost import CostModel
from holdfast.scheduler.baselines import ChunkedOnly, HybridOnly, Orca, PrefillFirst, RequestLevel, Unified
from holdfast.scheduler.paced import PacedStallFree
from holdfast.scheduler.policies import StallFree
from holdfast.scheduler.step import Policy

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


def choose_policy(
    config: EngineConfig, *, token_budget: int, capacity: int, tile: int, cost: CostModel | None
) -> Policy:
    """The policy that a configuration asks for. With a target it takes a `cost` model of the device."""
    if config.tbt_target is None:
        return make_policy(config.scheduler, token_budget=token_budget, capacity=capacity)
    if cost is None:
        raise ValueError(f"tbt_target is {config.tbt_target}, which takes a profile of the device")
    return PacedStallFree(cost, config.tbt_target / 1000, tile=min(tile, capacity), ceiling=capacity)
