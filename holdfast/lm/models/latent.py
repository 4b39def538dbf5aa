"""Multi-head latent attention (DeepSeek-V2, §2.1): its sizes, and the mixer of a layer that has it.

A token's keys and values of all heads are linear in one vector, the latent. The cache keeps only the normed latent and
one rotated key that all heads share. The matrices that would expand a latent are multiplied into queries and results
instead (§2.1.2): scores are products of queries and latents, and a head's result is a sum of latents. Prefill and
decode do this alike. Expanded keys would take fewer operations in a long prefill, but each chunk would have to expand
the whole context again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.layers import LayerOps, Normed, Rotation
from holdfast.lm.models.base import Shape, StepInput
from holdfast.lm.models.mixer import Mixer

LATENT_FIELDS = ("query_norm", "query_up", "latent_norm", "latent_up")
"""The fields that a layer with latent attention adds to those of a layer with attention."""


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Sizes of latent attention, in numbers per token or per head."""

    rank: int
    """Width of the latent."""
    rotated: int
    """Width of the rotated part of each query, and of the rotated key that all heads share."""
    plain: int
    """Width of each query's other part."""
    value: int
    """Width of each head's values."""
    query_rank: int
    """Width of the vector that all heads' queries are computed from; 0: they are computed from the stream."""
    biased: bool = False
    """Whether the projections from and to the stream have biases. Then `query_rank` is above 0."""
    eps: float = 1e-6
    """Number added under the square root of the norms of the latent and of the queries' vector."""

    @property
    def cached(self) -> int:
        """Numbers per token in a layer's cache: the latent, then the rotated key."""
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        """Width of a query before the matrix of the keys is multiplied into it."""
        return self.plain + self.rotated

    def shapes(self, hidden: int, heads: int) -> dict[str, tuple[Shape, ...]]:
        """For each field that attention has, the shapes of its parts.

        `qkv` is the projection from the stream: queries, or the vector that they are computed from; the latent and the
        rotated key.
        """
        queries, first = heads * self.query, self.query_rank or heads * self.query
        shapes: dict[str, tuple[Shape, ...]] = {
            "qkv": ((first, hidden), (self.cached, hidden)),
            "latent_norm": ((self.rank,),),
            "latent_up": ((heads * (self.plain + self.value), self.rank),),
            "o": ((hidden, heads * self.value),),
        }
        if self.query_rank:
            shapes |= {"query_norm": ((self.query_rank,),), "query_up": ((queries, self.query_rank),)}
        if self.biased:
            shapes |= {"qkv_bias": ((first,), (self.cached,)), "o_bias": ((hidden,),)}
        return shapes

    def rows(self, heads: range) -> dict[str, tuple[range, ...]]:
        """For each field that devices divide by rows, the rows of each part on a device with these heads."""
        queries = _rows(heads, self.query)
        first = range(self.query_rank) if self.query_rank else queries
        of_stream = (first, range(self.cached))
        up = _rows(heads, self.plain + self.value)
        return {"qkv": of_stream, "qkv_bias": of_stream, "query_up": (queries,), "latent_up": (up,)}

    def columns(self, heads: range) -> range:
        """The columns of `o` that a device with these heads holds."""
        return _rows(heads, self.value)

    def order(self, pairs: torch.Tensor) -> dict[str, torch.Tensor]:
        """For each kind of projection, the order of its rows that puts rotated numbers in the order `pairs` [rotated].

        `query` is the order of each head's rows, and `latent` that of the rows of latent and rotated key.
        """

        def after(width: int) -> torch.Tensor:
            return torch.cat((torch.arange(width), width + pairs))

        return {"query": after(self.plain), "latent": after(self.rank)}


def _rows(heads: range, width: int) -> range:
    """The rows of these heads, of `width` rows each."""
    return range(heads.start * width, heads.stop * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """The weights of a layer's latent attention, except the projection that adds to the stream."""

    qkv: Weight  # [query_rank or H (plain + rotated), then rank + rotated; hidden]
    bias: torch.Tensor | None
    tensors: Mapping[str, torch.Tensor]
    """The other tensors, by the fields of LATENT_FIELDS."""


class LatentMixer(Mixer):
    """Latent attention over the paged cache, of the heads of this device."""

    def __init__(self, weights: LatentWeights, spec: LatentSpec, *, heads: int, scale: float, cache: int) -> None:
        """`cache` is the layer's number among those with a cache."""
        self._weights, self._spec, self._heads, self._scale, self._cache = weights, spec, heads, scale, cache
        up = weights.tensors["latent_up"].contiguous().view(heads, spec.plain + spec.value, spec.rank)
        self._of_keys, self._of_values = torch.split(up, [spec.plain, spec.value], dim=1)

    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        spec, weights = self._spec, self._weights
        projected = ops.linear(normed, weights.qkv, weights.bias)
        first, latent = torch.split(projected, [projected.shape[1] - spec.cached, spec.cached], dim=1)
        query = self._absorbed(self._queries(ops, first))
        keys, _ = step.caches[self._cache]
        norm = weights.tensors["latent_norm"]
        ops.rotate_and_write_latent(query, latent, rotations[0], norm, spec.eps, keys, step.slot_mapping)
        attended = step.attend(self._cache, query, scale=self._scale)  # [T, H, rank]
        return self._expanded(attended)

    def _queries(self, ops: LayerOps, first: torch.Tensor) -> torch.Tensor:
        """The queries [T, H, plain + rotated], not rotated yet, from the first part of the projection."""
        spec, tensors = self._spec, self._weights.tensors
        if spec.query_rank:
            first = ops.linear(ops.norm_with(first, tensors["query_norm"], spec.eps), tensors["query_up"])
        return first.reshape(len(first), self._heads, spec.query)

    def _absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, rank + rotated] that attend to latents, from those that would attend to keys."""
        spec = self._spec
        plain, rotated = torch.split(query, [spec.plain, spec.rotated], dim=2)
        absorbed = query.new_empty(len(query), self._heads, spec.cached)
        torch.bmm(plain.transpose(0, 1), self._of_keys, out=absorbed[..., : spec.rank].transpose(0, 1))
        absorbed[..., spec.rank :] = rotated
        return absorbed

    def _expanded(self, attended: torch.Tensor) -> torch.Tensor:
        """The heads' results [T, H value] from their sums of latents [T, H, rank]."""
        values = torch.bmm(attended.transpose(0, 1), self._of_values.transpose(1, 2))
        return values.transpose(0, 1).flatten(1)
