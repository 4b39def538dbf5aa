"""What a configuration has built: the settings of a scheduler, for tests that every option arrives."""

from __future__ import annotations

from typing import Any

from holdfast.lm.memory.retention import EVICTIONS
from holdfast.lm.parts.contracts.order import ContractOrder
from holdfast.lm.parts.contracts.policy import ContractPolicy
from holdfast.lm.parts.speculation.drafting import DraftingPart
from holdfast.lm.parts.speculation.planner import SpeculationPart
from holdfast.lm.parts.tenants.planner import TenantPart
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.scheduler import Scheduler


def without_contracts(policy: Policy) -> Any:
    """The policy that a configuration names, which plans while no contract is open."""
    return policy.inner if isinstance(policy, ContractPolicy) else policy


def settings_of(scheduler: Scheduler) -> dict[str, Any]:
    """By name of the option: what the scheduler was made with."""
    queues, policy, order = scheduler._queues, without_contracts(scheduler._policy), scheduler._intake.order
    order = order.inner if isinstance(order, ContractOrder) else order
    pool = queues.pool
    limiting = next((part for part in queues.hooks.parts if isinstance(part, TenantPart)), None)
    drafting = next((part for part in queues.hooks.parts if isinstance(part, DraftingPart)), None)
    drafter = drafting._drafter if isinstance(drafting, SpeculationPart) else drafting
    return {
        "speculation": None if drafter is None else type(drafter).__name__,
        "draft_tokens": None if drafting is None else drafting._most,
        "max_tenant_sequences": None if limiting is None else limiting._most,
        "scheduler": type(policy).__name__,
        "token_budget": getattr(policy, "token_budget", None),
        "tbt_target": getattr(policy, "target", None),
        "order": type(order).__name__,
        "priority_aging": getattr(order, "aging", None),
        "ttft_target": getattr(order, "ttft_target", None),
        "fair_weight": getattr(order, "weight", None),
        "max_sequences": len(queues.free_rows),
        "max_model_len": scheduler._intake.limits.max_model_len,
        "block_size": pool.block_size,
        "chunk_size": pool.rule.chunk_blocks * pool.block_size,
        "eviction": pool.rule.eviction,
        "swap_threshold": pool._low_water / pool.num_blocks,
        "swap_in": scheduler._kind._by_layer,
        "headroom": queues.headroom / pool.num_blocks,
        "prefix_sharing": scheduler._intake.sharing,
        "seed": scheduler._intake.seed,
    }


SCHEDULING: dict[str, tuple[dict[str, Any], Any]] = {
    "max_model_len": ({"max_model_len": 160}, 160),
    "max_sequences": ({"max_sequences": 5}, 5),
    "max_tenant_sequences": ({"max_tenant_sequences": 3}, 3),
    "block_size": ({"block_size": 8}, 8),
    "chunk_size": ({"chunk_size": 64}, 64),
    "eviction": ({"eviction": "tail-first"}, EVICTIONS["tail-first"]),
    "swap_threshold": ({"swap_threshold": 0.5}, 0.5),
    "swap_in": ({"swap_in": "by-layer"}, True),
    "headroom": ({"headroom": 0.3}, 0.3),
    "scheduler": ({"scheduler": "hybrid-only"}, "HybridOnly"),
    "order": ({"order": "fcfs"}, "Fcfs"),
    "priority_aging": ({"priority_aging": 60.0}, 60.0),
    "ttft_target": ({"order": "deadline", "ttft_target": 500.0}, 0.5),
    "fair_weight": ({"order": "fair", "fair_weight": 3.0}, 3.0),
    "token_budget": ({"token_budget": 32}, 32),
    "tbt_target": ({"token_budget": None, "tbt_target": 40.0}, 0.04),
    "prefix_sharing": ({"prefix_sharing": False}, False),
    "seed": ({"seed": 7}, 7),
}
"""For each option of the scheduler: what sets it, and what `settings_of` then says."""


def check(name: str, settings: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Fail unless the option `name` has changed these settings from the defaults to what it says."""
    expected = SCHEDULING[name][1]
    found = settings[name]
    assert found != defaults[name], f"{name} changes nothing"
    assert abs(found - expected) < 0.01 if isinstance(expected, float) else found == expected
