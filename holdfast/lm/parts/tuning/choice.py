"""The tuner and the policy that a configuration with tuning asks for."""

from __future__ import annotations

from math import inf

from holdfast.core.training_cost import TrainingCost, TrainingShape
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.tuning.deferral import Deferred
from holdfast.lm.parts.tuning.options import DEFAULT_BOUND, TuningOptions
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.slices import LAUNCH_SHARE, RESERVE, TrainingSlices
from holdfast.lm.parts.tuning.training_room import TrainingRoom
from holdfast.lm.parts.tuning.tuner import Tuner
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.policies import reference_step


def make_tuner(
    planning: Planning,
    sizes: TrainingShape,
    *,
    memory_fraction: float = 0.5,
    block_seconds: float = 0.0,
    exact: bool = False,
) -> Tuner:
    """The tuner of an engine of this shape, for `TuningPart`.

    At most `memory_fraction` of the cache is lent to training. `block_seconds` is the time of copying a block between
    host and device, 0 if it is not known. With a target between tokens, a job is refused if one of its units takes
    longer than what a full step of decodes (`reference_step`) leaves of the target: once measured steps say so, or at
    once if `cost` is `exact`. Raises ValueError for a fraction that is not above 0 and at most 1.
    """
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"tuning_memory_fraction is {memory_fraction}; it must be above 0 and at most 1")
    config, shape, cost = planning.config, planning.shape, planning.priced
    room = None
    if config.tbt_seconds is not None:
        decodes, context = reference_step(
            config.most_sequences, shape.max_model_len, shape.cache_positions(config.block_size)
        )
        seconds = cost.step([(1, context)] * decodes)
        room = TrainingRoom(
            config.tbt_seconds,
            1 - RESERVE,
            decodes,
            seconds,
            deviation=cost.deviation,
            exact=exact,
            stages=planning.stages,
        )
    training = TrainingCost(cost, sizes, block_seconds=block_seconds)
    return Tuner(
        training,
        max_blocks=int(memory_fraction * shape.num_blocks),
        room=room,
        max_launch_seconds=inf if config.tbt_seconds is None else LAUNCH_SHARE * config.tbt_seconds,
    )


def with_training(
    planning: Planning,
    policy: Policy,
    part: TuningPart,
    deferral_bound: float | None,
    *,
    progress: bool,
    share: float = TuningOptions.tuning_share,
) -> Policy:
    """A policy of inference, extended by training.

    Training runs in slices if there is a target between tokens, else by the deferral rule with `deferral_bound` seconds
    (None: DEFAULT_BOUND). With `progress`, slices go on however full the steps are. While a batch has work, training
    takes `share` of the time. Raises ValueError for padded rows, under a scheduler that is not stall-free, and for a
    bound with a target.
    """
    config, stages = planning.config, planning.stages
    if planning.on_rows:
        raise ValueError("tuning needs a paged cache, and the model runs on padded rows")
    if config.scheduler != "stall-free":
        raise ValueError(f"tuning is for the stall-free scheduler, and scheduler is {config.scheduler}; drop one")
    if config.tbt_seconds is None:
        return Deferred(policy, part, DEFAULT_BOUND if deferral_bound is None else deferral_bound, share=share)
    if deferral_bound is not None:
        raise ValueError(
            f"deferral_bound is {deferral_bound} and tbt_target is {config.tbt_target}: training goes by one of them"
        )
    return TrainingSlices(
        policy, part, planning.priced, config.tbt_seconds, progress=progress, stages=stages, share=share
    )
