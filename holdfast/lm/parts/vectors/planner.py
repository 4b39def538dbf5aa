"""VectorPart: passes the embeddings that steps give to the outputs."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.vectors.values import VectorResult
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import Part, PartOutputs
from holdfast.lm.types import StepPlan, StepResult


class VectorPart(Part):
    """An embedding is the hidden state of a prompt's last token. It comes with the token that is drawn from it."""

    name = "vectors"

    def sampled(self, plan: StepPlan, result: StepResult, sampling: Sequence[Entry], outputs: PartOutputs) -> None:
        if vectors := result.part(VectorResult).vectors:
            outputs.add("vector", {entry: vector for entry, vector in zip(sampling, vectors, strict=True) if vector})


def make_parts(planning: Planning) -> tuple[VectorPart, ...]:
    """The part of a scheduler over a paged cache; padded rows have none."""
    return () if planning.on_rows else (VectorPart(),)
