"""The drafter and the part of speculation that a configuration asks for."""

from __future__ import annotations

from math import inf

from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.speculation.drafts import Drafter, NgramDrafter, SuffixDrafter
from holdfast.lm.parts.speculation.head_planner import HeadPart
from holdfast.lm.parts.speculation.options import SpeculationOptions
from holdfast.lm.parts.speculation.planner import SpeculationPart
from holdfast.lm.types import EngineShape


def make_parts(planning: Planning, drafter: Drafter | None) -> tuple[SpeculationPart, ...]:
    """The part of a scheduler whose decodes verify drafts if the cost model says that it pays."""
    if drafter is None or planning.cost is None:
        return ()
    options = planning.config.part(SpeculationOptions)
    target = inf if options.tbt_seconds is None else options.tbt_seconds
    most, rows = options.draft_tokens, options.max_samples
    stages = planning.stages
    return (SpeculationPart(drafter, planning.cost, most=most, rows=rows, target=target, stages=stages),)


def make_head_parts(planning: Planning, pass_share: float) -> tuple[HeadPart, ...]:
    """The part of a scheduler whose decodes verify the guesses of a draft head on the device.

    `pass_share` is that of `HeadPart`.
    """
    options = planning.config.part(SpeculationOptions)
    target = inf if options.tbt_seconds is None else options.tbt_seconds
    most, rows = options.draft_tokens, options.max_samples
    return (HeadPart(planning.priced, most=most, rows=rows, pass_share=pass_share, target=target),)


def make_drafter(config: SpeculationOptions, shape: EngineShape, kind: str) -> Drafter | None:
    """The drafter on a device of a `kind` ("cuda", "cpu"); None if no drafts are verified, or a head makes them.

    Padded rows verify none, and neither do recurrent layers without places for the inputs of drafts.
    """
    if shape.rows is not None or (shape.states is not None and not shape.states.places):
        return None
    match config.drafter_on(kind):
        case "ngram":
            return NgramDrafter()
        case "suffix":
            return SuffixDrafter(sharing=config.prefix_sharing)
    return None
