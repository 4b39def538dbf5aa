"""The tuner and the policy that a configuration with tuning asks for."""

from __future__ import annotations

from math import inf

from holdfast.core.config import EngineConfig
from holdfast.core.cost import CostModel
from holdfast.core.training_cost import TrainingCost, TrainingShape
from holdfast.lm.parts.tuning.deferral import DEFAULT_BOUND, Deferred
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.slices import LAUNCH_SHARE, RESERVE, TrainingSlices
from holdfast.lm.parts.tuning.training_room import TrainingRoom
from holdfast.lm.parts.tuning.tuner import Tuner
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.policies import reference_step
from holdfast.lm.types import EngineShape


def make_tuner(
    config: EngineConfig,
    shape: EngineShape,
    cost: CostModel,
    sizes: TrainingShape,
    *,
    memory_fraction: float = 0.5,
    block_seconds: float = 0.0,
    exact: bool = False,
) -> Tuner:
    """The tuner of an engine of this shape, for `lm.choice.make_scheduler`.

    At most `memory_fraction` of the cache is lent to training. `block_seconds` is the time of copying a block between
    host and device, 0 if it is not known. With a target between tokens, a job is refused if one of its units takes
    longer than what a full step of decodes (`reference_step`) leaves of the target: once measured steps say so, or at
    once if `cost` is `exact`. Raises ValueError for a fraction that is not above 0 and at most 1.
    """
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"tuning_memory_fraction is {memory_fraction}; it must be above 0 and at most 1")
    room = None
    if config.tbt_target is not None:
        decodes, context = reference_step(
            config.max_sequences, shape.max_model_len, shape.cache_positions(config.block_size)
        )
        seconds = cost.step([(1, context)] * decodes)
        room = TrainingRoom(
            config.tbt_target / 1000, 1 - RESERVE, decodes, seconds, deviation=cost.deviation, exact=exact
        )
    training = TrainingCost(cost, sizes, block_seconds=block_seconds)
    return Tuner(
        training,
        max_blocks=int(memory_fraction * shape.num_blocks),
        room=room,
        max_launch_seconds=inf if config.tbt_target is None else LAUNCH_SHARE * config.tbt_target / 1000,
    )


def with_training(
    config: EngineConfig,
    shape: EngineShape,
    cost: CostModel | None,
    policy: Policy,
    part: TuningPart,
    stages: int,
    deferral_bound: float | None,
    progress: bool,
) -> Policy:
    """A policy of inference, extended by training.

    Training runs in slices if there is a target between tokens, else by the deferral rule with `deferral_bound` seconds
    (None: DEFAULT_BOUND). With `progress`, slices go on however full the steps are. While a batch has work, training
    takes `tuning_share` of the time. Raises ValueError for padded rows, in a pipeline, under a scheduler that is not
    stall-free, and for a bound with a target.
    """
    if shape.rows is not None:
        raise ValueError("tuning needs a paged cache, and the model runs on padded rows")
    if stages > 1:
        raise ValueError(f"a pipeline has {stages} stages; tuning runs on one")
    if config.scheduler != "stall-free":
        raise ValueError(f"tuning is for the stall-free scheduler, and scheduler is {config.scheduler}; drop one")
    if config.tbt_target is None:
        return Deferred(
            policy, part, DEFAULT_BOUND if deferral_bound is None else deferral_bound, share=config.tuning_share
        )
    if deferral_bound is not None:
        raise ValueError(
            f"deferral_bound is {deferral_bound} and tbt_target is {config.tbt_target}: training goes by one of them"
        )
    assert cost is not None  # a target needs it in any case
    return TrainingSlices(policy, part, cost, config.tbt_target / 1000, progress=progress, share=config.tuning_share)
