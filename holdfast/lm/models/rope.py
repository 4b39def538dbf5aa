"""Rotary position embedding: the frequencies of each kind of scaling, equal to those of Transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.lm.models.base import UnsupportedCheckpoint


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions rotate queries and keys (RoFormer, §3.2), and how the angles are scaled to longer contexts."""

    theta: float
    kind: str = "default"
    """default, linear, llama3 or yarn."""
    factor: float = 1.0
    original_length: int = 0
    """Positions before scaling, for llama3 and yarn."""
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    """Factor on cosine and sine (yarn)."""

    def inverse_frequencies(self, dim: int) -> torch.Tensor:
        """Radians per position, [dim / 2] float32."""
        powers = self.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        plain = 1.0 / powers
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(plain, 1.0 / (self.factor * powers), dim)
        return plain

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        """Slow waves are stretched by `factor`, fast ones kept, those between interpolated (Llama 3.1)."""
        wavelength = 2 * math.pi / plain
        long = self.original_length / self.low_frequency
        short = self.original_length / self.high_frequency
        smooth = (self.original_length / wavelength - self.low_frequency) / (self.high_frequency - self.low_frequency)
        between = (1 - smooth) * plain / self.factor + smooth * plain
        stretched = torch.where(wavelength > long, plain / self.factor, plain)
        return torch.where((wavelength >= short) & (wavelength <= long), between, stretched)

    def _yarn(self, plain: torch.Tensor, stretched: torch.Tensor, dim: int) -> torch.Tensor:
        """Interpolate from kept to stretched between two numbers of rotations over the original length (YaRN, §3.2)."""

        def dimension(rotations: float) -> float:
            return dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001  # the ramp needs a width
        keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return stretched * (1 - keep) + plain * keep


def rope_of(config: Mapping[str, Any]) -> Rope:
    """Read `rope_parameters` (Transformers 5) or `rope_theta` and `rope_scaling` of a config.json.

    Raises UnsupportedCheckpoint for an unknown kind of scaling, or one that depends on the longest running sequence,
    because a sequence's tokens must not depend on its neighbours.
    """
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedCheckpoint(f"rope scaling {kind!r} is not supported; known: default, linear, llama3, yarn")
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedCheckpoint(f"partial_rotary_factor is {partial}; only whole heads are rotated here")
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return Rope(theta)
    original = given.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = given.get("factor")
    if factor is None:
        factor = config["max_position_embeddings"] / original
    return Rope(
        theta,
        kind,
        factor=float(factor),
        original_length=int(original),
        low_frequency=float(given.get("low_freq_factor", 1.0)),
        high_frequency=float(given.get("high_freq_factor", 4.0)),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        amplitude=_yarn_amplitude(given, float(factor)) if kind == "yarn" else 1.0,
    )


def _yarn_amplitude(given: Mapping[str, Any], factor: float) -> float:
    """The softmax temperature that YaRN folds into cosine and sine (YaRN, §3.3)."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return grown(given["mscale"]) / grown(given["mscale_all_dim"])
    return grown(1.0)
