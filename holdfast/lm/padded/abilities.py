"""Find by probing what a model gives the right logits for. What fails is not used."""

from __future__ import annotations

from holdfast.lm.padded.driver import Driver
from holdfast.lm.padded.state_layout import StateLayout
from holdfast.lm.types import Abilities

TOLERANCE = 1e-4
"""Largest difference of logits in float32, as a share of the largest logit, between a right history and a row alone."""
MOST_PROBED = 512
"""Longest probe in tokens. It reaches beyond the smallest window, chunk or compression rate of the model's config."""


def probe(driver: Driver, layout: StateLayout) -> Abilities:
    """Run short histories of several rows, and compare their logits with those of each prompt alone.

    Where parameters fit in float32 they are raised to it meanwhile. Otherwise a history counts as right only if it
    differs by at most four times the noise of a batch of equal lengths. Raises UnsupportedCheckpoint if even a prompt
    alone gives logits that are not finite, or other logits in one forward than in a prefill and decodes.
    """
    raise NotImplementedError
