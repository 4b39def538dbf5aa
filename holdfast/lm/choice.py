"""The policy that a name means, and the number of tokens that its steps may hold."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

from holdfast.core.config import EngineConfig, ExecutorName
from holdfast.core.cost import CostModel, PaddedCost
from holdfast.core.types import Identity
from holdfast.files.imported import imported
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.prices import Prices
from holdfast.lm.memory.retention import Cost, RetentionRule, cost_by_position
from holdfast.lm.memory.row_pool import RowPool
from holdfast.lm.parts.adapters.planner import AdapterPart
from holdfast.lm.parts.adapters.pool import AdapterPool
from holdfast.lm.parts.moves.planner import MovePart
from holdfast.lm.parts.speculation.drafts import Drafter, NgramDrafter, SuffixDrafter
from holdfast.lm.parts.speculation.planner import SpeculationPart
from holdfast.lm.parts.standard import parts_of_requests, parts_of_rows
from holdfast.lm.parts.tiers.lower_tiers import LowerTiers
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.parts.tuning.choice import with_training
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.tuner import Tuner
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.order import make_order
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.part import Part
from holdfast.lm.scheduler.pipeline_target import PipelineLatencyTarget
from holdfast.lm.scheduler.policies import (
    FixedBudget,
    LatencyTarget,
    StallFree,
    compute_token_budget,
    whole_tiles,
)
from holdfast.lm.scheduler.row_kind import RowKind
from holdfast.lm.scheduler.row_policies import RowPolicy
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import EngineShape, RowShape

POLICIES: dict[str, str] = {
    "stall-free": "holdfast.lm.scheduler.policies:StallFree",
    "request-level": "holdfast.lab.schedulers:RequestLevel",
    "orca": "holdfast.lab.schedulers:Orca",
    "prefill-first": "holdfast.lab.schedulers:PrefillFirst",
    "chunked-only": "holdfast.lab.schedulers:ChunkedOnly",
    "hybrid-only": "holdfast.lab.schedulers:HybridOnly",
    "unified": "holdfast.lab.schedulers:Unified",
    "run-to-completion": "holdfast.lab.row_schedulers:RunToCompletion",
    "prefill-apart": "holdfast.lab.row_schedulers:PrefillApart",
    "shaping": "holdfast.lm.scheduler.row_policies:Shaping",
    "embedding": "holdfast.lm.scheduler.row_policies:Embedding",
    "padded-batches": "holdfast.lab.row_schedulers:PaddedBatches",
}
"""The class of each scheduler that has a name. A class outside `lm` is imported only for an engine that asks for it."""
ROW_POLICIES = POLICIES | {
    "request-level": "holdfast.lab.row_schedulers:PaddedRequestLevel",
    "orca": "holdfast.lab.row_schedulers:PaddedOrca",
}
"""The classes on padded rows."""


def find_policy(name: str, executor: ExecutorName = "paged") -> type[FixedBudget]:
    """The class of a scheduler's name, or the class that `module:Class` names.

    Raises ValueError if there is none, if it is no `FixedBudget`, and for a class of padded rows on the paged executor.
    """
    found = imported("scheduler", (ROW_POLICIES if executor == "padded" else POLICIES).get(name, name))
    if not (isinstance(found, type) and issubclass(found, FixedBudget)):
        raise ValueError(f"scheduler {name}: it must be a subclass of {FixedBudget.__module__}.{FixedBudget.__name__}")
    if issubclass(found, RowPolicy) and executor == "paged":
        raise ValueError(f"scheduler is {name}, which plans padded rows, and the model runs on the paged executor")
    return found


def capacity_of(
    name: str,
    *,
    token_budget: int,
    max_model_len: int,
    max_sequences: int,
    limit: int,
    chunks: bool = True,
    executor: ExecutorName = "paged",
) -> int:
    """The most tokens of one step.

    Policies that cut prompts fill a step up to `token_budget`, if the model takes `chunks`. The others need room for
    the longest prompt and all decodes. `orca`, `request-level`, `run-to-completion` and `padded-batches` put any number
    of whole prompts into a step, up to max_model_len tokens of each of max_sequences (Sarathi-Serve §2.4, §5.1); for
    these `limit` bounds the capacity above that room. On a device it should bound the activation memory, which grows
    with the capacity; in a simulation the size of the cache is one.
    """
    kind = find_policy(name, executor)
    if kind.chunks and chunks:
        return token_budget
    least = max(token_budget, max_model_len + max_sequences)
    return max(least, min(limit, max_model_len * max_sequences)) if kind.unbounded else least


def make_policy(name: str, *, token_budget: int, capacity: int, executor: ExecutorName = "paged") -> Policy:
    """The policy of this name. Steps are filled up to `token_budget`; `capacity` is the value of `capacity_of`.

    Raises ValueError as `find_policy` does.
    """
    return find_policy(name, executor).sized(token_budget, capacity)


def choose_policy(config: EngineConfig, shape: EngineShape, cost: CostModel | None, *, stages: int = 1) -> Policy:
    """The policy that a configuration asks for, in a pipeline of `stages`; `cost` is that of a step through all.

    Raises ValueError for a latency target without a `cost` model, and on padded rows for a policy that the model cannot
    follow, or a token budget below `max_sequences`: a forward of the batch decodes every row.

    Token budgets above a tile are rounded down to a multiple of it: a step of 257 tokens takes up to a third longer
    than one of 256 (Sarathi-Serve §4.3).
    """
    capacity, budget = shape.max_step_tokens, shape.token_budget
    if shape.rows is not None:
        check_rows(config, shape, shape.rows)
        cost = None if cost is None else PaddedCost.of(cost)
    if config.tbt_target is None:
        kind = find_policy(config.scheduler, shape.executor)
        return kind.sized(whole_tiles(budget, shape.tile) if kind.chunks else budget, capacity)
    if cost is None:
        raise ValueError(f"tbt_target is {config.tbt_target}, which takes a profile of the device")
    target, tile, ceiling = config.tbt_target / 1000, min(shape.tile, capacity), whole_tiles(capacity, shape.tile)
    if config.token_budget != "auto" and stages > 1:
        return PipelineLatencyTarget(cost, target, tile=tile, ceiling=ceiling, stages=stages)
    if config.token_budget != "auto":
        whole = shape.rows is not None and not shape.rows.abilities.chunks
        return LatencyTarget(cost, target, tile=tile, ceiling=ceiling, whole=whole)
    budget = compute_token_budget(
        cost,
        target,
        tile=tile,
        ceiling=ceiling,
        max_sequences=config.max_sequences,
        max_model_len=shape.max_model_len,
        cache_positions=shape.cache_positions(config.block_size),
    )
    if shape.rows is not None:  # no row can be left out of a forward of the batch, so a tile comes on top of all rows
        budget = max(budget, min(ceiling, config.max_sequences + tile))
    return StallFree(budget)


def check_rows(config: EngineConfig, shape: EngineShape, rows: RowShape) -> None:
    """Raise ValueError for a configuration that padded rows of this shape cannot follow."""
    if config.scheduler in ("shaping", "orca") and not rows.abilities.shaping:
        raise ValueError(
            f"scheduler is {config.scheduler}, which computes prompts beside decodes in one forward, and {shape.model} "
            "gives wrong tokens there; choose embedding"
        )
    budget = whole_tiles(min(shape.token_budget, shape.max_step_tokens), shape.tile)
    if budget < config.max_sequences:
        raise ValueError(
            f"max_sequences is {config.max_sequences}, and a step holds {budget} tokens; on padded rows it must hold a "
            "decode of every row: lower max_sequences, or raise token_budget"
        )


def steps_in_flight(config: EngineConfig, stages: int) -> int:
    """Most steps in flight in a pipeline of `stages`: what one stage has, and one more for each further stage.

    By default that is a step on each stage, and one that is ready for the first.
    """
    return config.steps_in_flight + stages - 1


def retention_cost(config: EngineConfig, shape: EngineShape, cost: CostModel | None) -> Cost:
    """Cost of recomputing a chunk, by position: from the cost model, or without one from the model's sizes."""
    if cost is not None:
        return partial(cost.recompute, config.chunk_size)
    return partial(cost_by_position, balance=shape.attention_balance)


def make_scheduler(
    config: EngineConfig,
    shape: EngineShape,
    cost: CostModel | None,
    *,
    policy: Policy | None = None,
    stages: int = 1,
    tuner: Tuner | None = None,
    deferral_bound: float | None = None,
    tuning_progress: bool = False,
    drafter: Drafter | None = None,
    now: float = 0.0,
) -> Scheduler:
    """The scheduler of an engine of this shape, real or simulated, with its own memory.

    `policy` replaces the one that the configuration asks for. `stages` is the number of pipeline stages. With a `tuner`
    (`parts.tuning.choice.make_tuner`) it plans training too (`with_training`). With a `drafter` (`make_drafter`),
    decodes verify drafts if `cost` says that it pays. `now` is the time at which the contents of the disk tier were
    listed (`EngineShape.lower`).

    Raises ValueError as `choose_policy` and `with_training` do, for padded rows in a pipeline, and for a bound without
    a tuner.
    """
    policy = policy or choose_policy(config, shape, cost, stages=stages)
    parts: list[Part] = []
    if drafter is not None and cost is not None:
        target = inf if config.tbt_target is None else config.tbt_target / 1000
        most, rows = config.draft_tokens, config.max_samples
        parts.append(SpeculationPart(drafter, cost, most=most, rows=rows, target=target, stages=stages))
    parts += parts_of_requests()  # after drafts, which have the budget before forced tokens
    if shape.adapter_slots:
        parts.append(AdapterPart(AdapterPool(shape.adapter_slots)))
    if tuner is not None:
        tuning = TuningPart(tuner)
        policy = with_training(config, shape, cost, policy, tuning, stages, deferral_bound, tuning_progress)
        parts.append(tuning)
    elif deferral_bound is not None:
        raise ValueError(f"deferral_bound is {deferral_bound}, and no training is taken; drop it")
    settings: dict[str, Any] = dict(
        max_sequences=config.max_sequences,
        max_model_len=shape.max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        headroom=0.0 if policy.reserves else config.headroom,
        sharing=config.prefix_sharing,
        served=Identity(shape.model, dtype=shape.precision),
        order=make_order(config),
        seed=config.seed,
    )
    rule = RetentionRule.of(config, retention_cost(config, shape, cost))
    if shape.rows is not None:
        if stages > 1:
            raise ValueError(f"a pipeline has {stages} stages; padded rows run on one")
        rows = RowPool(
            shape.rows,
            threshold=config.shrink_threshold,
            rule=rule,
            keeps=config.prefix_sharing,
            low_water=config.swap_threshold,
            to_completion=isinstance(policy, RowPolicy) and policy.to_completion,
        )
        kind = RowKind(rows, longest=shape.max_model_len, prefill_ahead=config.states_ahead)
        return Scheduler(policy, kind, parts_of_rows(), **settings)
    again = partial(cost.recompute, config.block_size) if cost is not None else None
    prices = None
    if shape.block_bytes and shape.num_host_blocks and again is not None:
        prices = Prices(again, block_size=config.block_size, block_bytes=shape.block_bytes)
    pool = BlockPool(
        shape.num_blocks,
        config.block_size,
        rule=rule,
        host_blocks=shape.num_host_blocks,
        host_ready=shape.host_blocks_ready,
        low_water=config.swap_threshold,
        copies_ahead=shape.copies_ahead,
        copies_for_others=shape.copies_for_others,
        prices=prices,
    )
    if shape.lower is not None:
        below = Prices(again, block_size=config.block_size, block_bytes=shape.lower.block_bytes)
        parts.append(TierPart(LowerTiers(pool, shape.lower, below, now)))
    if config.chunk_host and shape.num_host_blocks:
        parts.append(MovePart())
    return Scheduler(policy, PagedKind(pool), parts, **settings, stages=stages)


def make_drafter(config: EngineConfig, shape: EngineShape, kind: str) -> Drafter | None:
    """The drafter on a device of a `kind` ("cuda", "cpu"); None if no drafts are verified.

    Padded rows verify none. A drafter needs a cost profile to judge by, whose estimate takes seconds on a CPU. So
    "auto" is off on a CPU, unless a latency target needs the profile in any case.
    """
    if shape.rows is not None or (config.speculation == "auto" and kind == "cpu" and config.tbt_target is None):
        return None
    match config.drafter:
        case "ngram":
            return NgramDrafter()
        case "suffix":
            return SuffixDrafter(sharing=config.prefix_sharing)
    return None
