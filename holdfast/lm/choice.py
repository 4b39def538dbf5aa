"""The policy that a name means, the number of tokens that its steps may hold, the memory, and the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from holdfast.core.config import CoreConfig, ExecutorName
from holdfast.core.cost import CostModel, PaddedCost
from holdfast.core.types import Identity
from holdfast.files.imported import imported
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.prices import Prices
from holdfast.lm.memory.retention import Cost, RetentionRule, cost_by_position
from holdfast.lm.memory.row_pool import RowPool
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.memory.turn_queue import make_turns
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.standard import standard_parts
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.hybrid import HybridKind
from holdfast.lm.scheduler.kind import MemoryKind
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


def choose_policy(config: CoreConfig, shape: EngineShape, cost: CostModel | None, *, stages: int = 1) -> Policy:
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
    if config.tbt_seconds is None:
        kind = find_policy(config.scheduler, shape.executor)
        return kind.sized(whole_tiles(budget, shape.tile) if kind.chunks else budget, capacity)
    if cost is None:
        raise ValueError(f"tbt_target is {config.tbt_target}, which takes a profile of the device")
    target, tile, ceiling = config.tbt_seconds, min(shape.tile, capacity), whole_tiles(capacity, shape.tile)
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
        max_sequences=config.most_sequences,
        max_model_len=shape.max_model_len,
        cache_positions=shape.cache_positions(config.block_size),
    )
    if shape.rows is not None:  # no row can be left out of a forward of the batch, so a tile comes on top of all rows
        budget = max(budget, min(ceiling, config.most_sequences + tile))
    return StallFree(budget)


def describe_budget(config: CoreConfig, shape: EngineShape, cost: CostModel | None) -> str:
    """The difference between a fixed token budget and what steps hold, in words.

    Empty if steps hold as many tokens as it says, and no larger step is known to take equally long.
    """
    budget = config.fixed_token_budget
    if budget is None or shape.rows is not None or not find_policy(config.scheduler, shape.executor).chunks:
        return ""
    planned = whole_tiles(budget, shape.tile)
    notes = [f"{planned:,} of {budget:,} are used, whole matrix tiles of {shape.tile}"] * (planned < budget)
    first, last = (planned, planned) if cost is None else cost.stair(planned)
    if last > planned:
        notes.append(f"steps of {first:,} to {last:,} take equally long here, so {last:,} costs no more")
    return "; ".join(notes)


def describe_target(config: CoreConfig, cost: CostModel | None, *, contracts: bool) -> str:
    """Why no stream can keep the TBT target, in words; empty if one can, or without a target.

    The smallest step computes one token of one sequence. `contracts`: whether requests may ask for a contract.
    """
    if config.tbt_seconds is None or cost is None:
        return ""
    smallest = cost.step([(1, 1)])
    if config.tbt_seconds >= smallest:
        return ""
    refused = ", and every contract is refused" if contracts else ""
    return (
        f"the TBT target of {config.tbt_seconds * 1000:g} ms is below the smallest step, which takes "
        f"{smallest * 1000:.3g} ms here, so every token is late{refused}"
    )


def check_rows(config: CoreConfig, shape: EngineShape, rows: RowShape) -> None:
    """Raise ValueError for a configuration that padded rows of this shape cannot follow."""
    if config.scheduler in ("shaping", "orca") and not rows.abilities.shaping:
        raise ValueError(
            f"scheduler is {config.scheduler}, which computes prompts beside decodes in one forward, and {shape.model} "
            "gives wrong tokens there; choose embedding"
        )
    budget = whole_tiles(min(shape.token_budget, shape.max_step_tokens), shape.tile)
    if budget < config.most_sequences:
        raise ValueError(
            f"max_sequences is {config.most_sequences}, and a step holds {budget} tokens; on padded rows it must hold "
            "a decode of every row: lower max_sequences, or raise token_budget"
        )


def steps_in_flight(config: CoreConfig, stages: int) -> int:
    """Most steps in flight in a pipeline of `stages`: what one stage has, and one more for each further stage.

    By default that is a step on each stage, and one that is ready for the first.
    """
    return config.steps_in_flight + stages - 1


def retention_cost(config: CoreConfig, shape: EngineShape, cost: CostModel | None) -> Cost:
    """Cost of recomputing a chunk, by position: from the cost model, or without one from the model's sizes."""
    if cost is not None:
        return partial(cost.recompute, config.chunk_size)
    return partial(cost_by_position, balance=shape.attention_balance)


def make_kind(config: CoreConfig, shape: EngineShape, cost: CostModel | None, policy: Policy) -> MemoryKind:
    """The memory of an engine of this shape, real or simulated, with the builder of plans over it."""
    rule = RetentionRule.of(config, retention_cost(config, shape, cost), make_turns(config.eviction))
    if shape.rows is not None:
        rows = RowPool(
            shape.rows,
            threshold=config.shrink_threshold,
            rule=rule,
            keeps=config.prefix_sharing,
            low_water=config.swap_threshold,
            to_completion=isinstance(policy, RowPolicy) and policy.to_completion,
        )
        return RowKind(rows, longest=shape.max_model_len, prefill_ahead=config.states_ahead)
    by_layer = config.swap_in == "by-layer"
    if shape.states is None:
        return PagedKind(make_pool(config, shape, cost, rule), by_layer=by_layer)
    pool = make_pool(config, shape, cost, rule.from_the_end())
    states = StatePool(shape.states, config.most_sequences, pool, rule, low_water=config.swap_threshold)
    return HybridKind(pool, states, by_layer=by_layer, forks=not isinstance(policy, FixedBudget) or policy.chunks)


def make_pool(config: CoreConfig, shape: EngineShape, cost: CostModel | None, rule: RetentionRule) -> BlockPool:
    """The pool of blocks of an engine of this shape. `rule` orders its idle blocks."""
    prices = None
    if shape.block_bytes and shape.num_host_blocks and cost is not None:
        again = partial(cost.recompute, config.block_size)
        prices = Prices(again, block_size=config.block_size, block_bytes=shape.block_bytes)
    return BlockPool(
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


def make_planning(
    config: CoreConfig,
    shape: EngineShape,
    cost: CostModel | None,
    policy: Policy | None = None,
    *,
    stages: int = 1,
    now: float = 0.0,
) -> Planning:
    """The values over which a scheduler's parts are made, with a memory of their own.

    `policy` replaces the one that the configuration asks for. Raises ValueError as `choose_policy` does, and for padded
    rows in a pipeline.
    """
    if shape.rows is not None and stages > 1:
        raise ValueError(f"a pipeline has {stages} stages; padded rows run on one")
    policy = policy or choose_policy(config, shape, cost, stages=stages)
    kind = make_kind(config, shape, cost, policy)
    return Planning(
        config=config,
        shape=shape,
        cost=cost,
        policy=policy,
        kind=kind,
        stages=stages,
        in_flight=steps_in_flight(config, stages),
        now=now,
    )


def compose_scheduler(planning: Planning, policy: Policy, parts: Sequence[Part]) -> Scheduler:
    """The scheduler with these parts in their order. `policy` is that of `planning`, as the parts extend it."""
    config, shape = planning.config, planning.shape
    return Scheduler(
        policy,
        planning.kind,
        parts,
        max_sequences=config.most_sequences,
        max_model_len=shape.max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        headroom=0.0 if policy.reserves else config.headroom,
        sharing=config.prefix_sharing,
        served=Identity(shape.model, dtype=shape.precision),
        order=make_order(config),
        seed=config.seed,
        stages=planning.stages,
    )


def make_scheduler(
    config: CoreConfig,
    shape: EngineShape,
    cost: CostModel | None,
    *,
    policy: Policy | None = None,
    stages: int = 1,
) -> Scheduler:
    """The scheduler of an engine without a process of its own, with the parts that need no device.

    Arguments and errors are those of `make_planning`.
    """
    planning = make_planning(config, shape, cost, policy, stages=stages)
    return compose_scheduler(planning, planning.policy, standard_parts(planning))
