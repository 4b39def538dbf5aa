"""Rotary position embedding: the frequencies of each kind of scaling, equal to those of Transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of queries and keys by position (RoFormer, §3.2), and its scaling to longer contexts."""

    theta: float
    kind: str = "default"
    """The kind of scaling: none (no rotation), default, linear, dynamic, llama3, yarn, longrope or proportional."""
    factor: float = 1.0
    original_length: int = 0
    """Number of positions before scaling, for dynamic, llama3, yarn and longrope."""
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    """The factor on cosine and sine of rotated numbers (yarn, longrope)."""
    short_factors: tuple[float, ...] = ()
    """The factor that stretches each pair's wave, for sequences up to the original length (longrope)."""
    long_factors: tuple[float, ...] = ()
    """The factor that stretches each pair's wave, for sequences beyond the original length (longrope)."""
    share: float = 1.0
    """The share of each head that is rotated, from its first number on."""
    interleaved: bool = False
    """Whether neighbours in a head make a pair, as in RoFormer itself, instead of numbers that are half of it apart."""
    turning: float = 1.0
    """The share of all pairs that turn, those with the highest frequencies (proportional). The others stand still."""

    def rotated(self, dim: int) -> int:
        """Number of a head's elements that are rotated."""
        return int(dim * self.share)

    def pairs(self, dim: int) -> torch.Tensor | None:
        """The order [dim] in which a head's numbers make the pairs (i, i + dim / 2); None: the stored order.

        If only a share of the head is rotated, its pairs are within that share. The order does not change the products
        of queries and keys, because both use it.
        """
        rotated = self.rotated(dim)
        if rotated == dim and not self.interleaved:
            return None
        whole, still = torch.arange(rotated), torch.arange(rotated, dim).chunk(2)
        turned = (whole[::2], whole[1::2]) if self.interleaved else whole.chunk(2)
        return torch.cat((turned[0], still[0], turned[1], still[1]))

    def inverse_frequencies(self, dim: int, length: int = 0) -> torch.Tensor:
        """The angle per position of each pair of a head, in radians, [dim / 2] float32.

        It is 0 for a pair that is not rotated.

        `length` is that of the longest sequence to be served. It matters for kinds of scaling that have one set of
        frequencies up to the original length and another beyond it (dynamic, longrope). Transformers chooses between
        the two by the current batch. Here all sequences use the same set, so cached keys stay valid as a sequence
        grows, and a sequence's tokens do not depend on other sequences.
        """
        rotated = 0 if self.kind == "none" else self.rotated(dim)
        if rotated % 2 or dim % 2:
            raise UnsupportedCheckpoint(f"{rotated} numbers of a head of {dim} are rotated, which makes no pairs")
        if rotated < dim:
            still = torch.zeros((dim - rotated) // 2)
            return still if not rotated else torch.cat((self._of_rotated(rotated, length), still))
        return self._of_rotated(dim, length)

    def _of_rotated(self, dim: int, length: int) -> torch.Tensor:
        theta = self.theta
        if self.kind == "dynamic" and length > self.original_length:
            stretch = self.factor * length / self.original_length - (self.factor - 1)
            theta *= stretch ** (dim / (dim - 2))
        powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        plain = 1.0 / powers
        if self.kind == "longrope":
            factors = self.long_factors if length > self.original_length else self.short_factors
            if len(factors) != dim // 2:
                raise UnsupportedCheckpoint(
                    f"longrope has {len(factors)} factors, and {dim} numbers of a head are rotated in {dim // 2} pairs"
                )
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
        if self.kind == "proportional":
            still = torch.arange(dim // 2) >= int(self.turning * dim // 2)
            return (plain / self.factor).masked_fill(still, 0.0)
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(plain, 1.0 / (self.factor * powers), dim)
        return plain

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        """Stretch slow waves by `factor`, keep fast ones, and interpolate in between (Llama 3.1)."""
        wavelength = 2 * math.pi / plain
        long = self.original_length / self.low_frequency
        short = self.original_length / self.high_frequency
        smooth = (self.original_length / wavelength - self.low_frequency) / (self.high_frequency - self.low_frequency)
        between = (1 - smooth) * plain / self.factor + smooth * plain
        stretched = torch.where(wavelength > long, plain / self.factor, plain)
        return torch.where((wavelength >= short) & (wavelength <= long), between, stretched)

    def _yarn(self, plain: torch.Tensor, stretched: torch.Tensor, dim: int) -> torch.Tensor:
        """Keep waves of many rotations in the original length, stretch those of few, blend between (YaRN, §3.2)."""

        def dimension(rotations: float) -> float:
            return dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001  # a ramp of width 0 would divide by zero
        keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return stretched * (1 - keep) + plain * keep


UNROTATED = Rope(1.0, "none")
"""No rotation."""
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rope_of(config: Mapping[str, Any], *, theta: float = 10000.0, partial: bool = False) -> Rope:
    """Read `rope_parameters` (Transformers 5), or `rope_theta` and `rope_scaling`, of a config.json.

    `theta` is the base if the config names none. With `partial`, the family rotates only the share of each head that
    partial_rotary_factor gives. For other families, Transformers' attention ignores that key but its scaling code does
    not, so the combination fails there.

    Raises UnsupportedCheckpoint for that combination, and for an unknown kind of scaling.
    """
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in KINDS:
        raise UnsupportedCheckpoint(f"rope scaling {kind!r} is not supported; known: {', '.join(KINDS)}")
    share = float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if not partial and share != 1.0:
        if kind != "default":
            raise UnsupportedCheckpoint(
                f"partial_rotary_factor is {share:g} with rope scaling {kind!r}, which Transformers cannot compute "
                "for this family; leave it out"
            )
        share = 1.0
    plain = Rope(float(given.get("rope_theta") or config.get("rope_theta") or theta), share=share)
    if not 0 < plain.share <= 1:
        raise UnsupportedCheckpoint(f"partial_rotary_factor is {share:g}; it must be above 0 and at most 1")
    if kind == "default":
        return plain
    longest = int(config["max_position_embeddings"])
    # Some configs give the original length outside the scaling. That value has precedence.
    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    if kind == "dynamic":  # Transformers counts from the config's length
        original = longest
    original = int(original or longest)
    factor = given.get("factor")
    factor = float(longest / original if factor is None else factor)
    amplitude = 1.0
    if kind == "yarn":
        amplitude = _yarn_amplitude(given, factor)
    elif kind == "longrope":
        amplitude = _longrope_amplitude(given, factor, original)
    return replace(
        plain,
        kind=kind,
        factor=factor,
        original_length=original,
        low_frequency=float(given.get("low_freq_factor", 1.0)),
        high_frequency=float(given.get("high_freq_factor", 4.0)),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        amplitude=amplitude,
        short_factors=_factors(given, "short_factor") if kind == "longrope" else (),
        long_factors=_factors(given, "long_factor") if kind == "longrope" else (),
    )


def _factors(given: Mapping[str, Any], name: str) -> tuple[float, ...]:
    if not isinstance(given.get(name), list):
        raise UnsupportedCheckpoint(f"longrope needs {name}, a list of numbers")
    return tuple(map(float, given[name]))


def _longrope_amplitude(given: Mapping[str, Any], factor: float, original: int) -> float:
    """The softmax temperature that LongRoPE folds into cosine and sine, as Transformers computes it."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _yarn_amplitude(given: Mapping[str, Any], factor: float) -> float:
    """The softmax temperature that YaRN folds into cosine and sine (YaRN, §3.3)."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return grown(given["mscale"]) / grown(given["mscale_all_dim"])
    return grown(1.0)
