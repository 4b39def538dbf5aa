"""The operations of a decoder layer around attention: their interface, and the backend in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from holdfast.lm.kernels.cache.kv_cache import write_slots
from holdfast.lm.kernels.collectives.protocol import Group, SumInParts
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.experts.experts import Experts, apply_experts
from holdfast.lm.kernels.lora.protocol import Finish

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}

PACKED_ROWS = range(4, 129)
"""Numbers of rows whose products read a packed weight.

This range and LEAST_PACKED were measured by `benchmarks/kernels/products_cpu.py`.
"""
LEAST_PACKED, MOST_PACKED = 4 << 20, 1 << 30
"""Smallest weight that is worth packing, and largest total of a device's packed weights, both in bytes."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine from `LayerOps.rotation`, in the layout that `rotate_and_write` of the same object takes."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes and settings that all layers of a decoder share. Numbers of heads are those of this device."""

    num_heads: int
    num_kv_heads: int
    """Number of KV heads; 0 in layers that read the cache of another one."""
    head_dim: int
    eps: float
    """Number added under the root of every norm."""
    activation: str
    """The activation, a key of ACTIVATIONS."""
    dtype: torch.dtype
    """The dtype of weights and activations."""
    inverse_frequencies: torch.Tensor
    """The angle per position of each pair, in radians, [D / 2] float32, on the device that computes."""
    amplitude: float = 1.0
    """The factor on cosine and sine, except where the frequency is 0. A pair with frequency 0 stays unchanged."""
    layer_norm: bool = False
    """Whether norms are layer norms. Their weights are then [2 * hidden]: first the factors, then the biases."""
    gated: bool = True
    """Whether the MLP has a gate. Without one, `gated_linear` and `gate` are the activation alone."""
    qk_norm_whole: bool = False
    """Whether q_norm [H D] and k_norm [Hkv D] norm all heads of all devices together."""
    qk_layer_norm: bool = False
    """Whether q_norm [H D] and k_norm [Hkv D] are the factors of layer norms without biases, a norm for each head."""
    kv_copies: int = 1
    """Number of devices that hold each KV head."""
    sums_in_parts: bool = True
    """Whether sums over devices may travel in parts (`Group.begin_sum`)."""
    unit_v_norm: bool = False
    """Whether values have a norm without weights within each head. Queries and keys then have norms, too."""

    @property
    def amplitudes(self) -> torch.Tensor:
        """The factor on cosine and sine of each pair, [D / 2] float32."""
        return torch.where(self.inverse_frequencies == 0, 1.0, self.amplitude)


@dataclass(frozen=True)
class Unnormed:
    """An RMS norm of one token that is not computed yet. The GEMM that reads it computes it."""

    stream: torch.Tensor  # [1, hidden]
    weight: torch.Tensor  # [hidden]


@dataclass(frozen=True)
class NormInParts:
    """An RMS norm of a stream whose sum over devices is still arriving. The sum is added to the stream part by part."""

    sums: SumInParts
    stream: torch.Tensor  # [T, hidden]
    bias: torch.Tensor | None  # [hidden]
    weight: torch.Tensor  # [hidden]


Normed = Any
"""The result of `add_linear_norm`: a tensor, `Unnormed`, or `NormInParts`.

Exactly one call of the same object reads it.
"""

Gated = Any
"""The result of `gated_linear`, for `add_linear_norm` of the same object: a tensor, or its FP8 form."""

Change = Callable[[torch.Tensor], None]
"""A function that changes a projection [T, N] in place before its bias is added, as adapters do."""


def nothing() -> None:
    """Do nothing."""


class LayerOps:
    """The operations of a decoder layer other than `Attention`, on T packed tokens, in PyTorch.

    This is the backend of a CPU and the oracle of the Triton kernels. A projection and its neighbours are one call, so
    that a backend may fuse them. The projection that ends each half of a layer adds to the residual stream in place,
    and returns the stream normed for the next half. The stream is complete once the norm has been read.

    With a `group`, each device has its own heads. It holds rows of the weights that read the stream, and columns of the
    weights that add to the stream. Products with these columns are partial sums, which the group adds up. The stream is
    equal on all devices. In large steps, one part of the rows travels between devices while the next one is computed.
    """

    def __init__(self, shape: LayerShape, group: Group | None = None) -> None:
        self.shape, self.group = shape, group
        frequencies = shape.inverse_frequencies
        self._rotates = bool(frequencies.any())
        self._amplitudes = shape.amplitudes
        self._packed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Each packed weight and its packed copy, by the weight's address."""

    def pack(self, weights: Iterable[Weight]) -> int:
        """Keep second copies of large float32 weights on a CPU, in oneDNN's format for `linear`. Returns their bytes.

        MKL packs a weight again for every product, which for a few rows takes a third as long as the product. If the
        weights have more than MOST_PACKED bytes together, none gets a copy. No weight may change afterwards. Weights
        with fewer outputs than inputs gain nothing.
        """
        dense = [each for each in weights if isinstance(each, torch.Tensor) and each.dtype == torch.float32]
        large = [each for each in dense if each.device.type == "cpu" and each.nbytes >= LEAST_PACKED]
        size = sum(each.nbytes for each in large)
        if size > MOST_PACKED or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return 0
        with torch.inference_mode():
            for each in large:
                self._packed[each.data_ptr()] = each, torch.ops.mkldnn._reorder_linear_weight(each.contiguous())
        return size

    def settle(self, weights: Iterable[Weight]) -> str:
        """Choose the kernels of products with these weights, once, before the first step.

        Returns what the choice changes in the order of sums, in words; empty if nothing. On devices that share layers,
        all call it at the same time.
        """
        return ""

    def embed(self, ids: torch.Tensor, embedding: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The stream [T, hidden] of token ids [T]. `embedding` has this device's tokens, from `first` on."""
        if self.group is None:
            return functional.embedding(ids, embedding)
        place = ids - first
        absent = (place < 0) | (place >= len(embedding))
        rows = functional.embedding(place.masked_fill_(absent, 0), embedding)
        return self.group.all_reduce(rows.masked_fill_(absent[:, None], 0))

    def norm(self, stream: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm [T, hidden] times weight [hidden], accumulated in float32, in the dtype of the stream.

        For a layer norm, the weight is [2 * hidden]. A weight of no numbers stands for no norm: the result is the
        stream itself.
        """
        if not len(weight):
            return stream
        if weight.dtype != stream.dtype:  # the weight is more precise than the stream
            return self._plain_norm(stream.to(weight.dtype), weight).to(stream.dtype)
        return self._plain_norm(stream, weight)

    def _plain_norm(self, stream: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`norm` by PyTorch, of a stream and a weight of one dtype."""
        if not self.shape.layer_norm:
            return functional.rms_norm(stream, weight.shape, weight, self.shape.eps)
        factor, bias = weight.chunk(2)
        return functional.layer_norm(stream, factor.shape, factor, bias, self.shape.eps)

    def linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N]."""
        if isinstance(x, NormInParts):
            return self._linear_of_parts(x, weight, bias)
        return self._linear(x, weight, bias)

    def gated_linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> Gated:
        """activation(gate) * up, [T, N]. weight [2 N, K] and bias [2 N] stack the rows of gate above those of up."""
        return LayerOps.gate(self, LayerOps.linear(self, x, weight, bias))

    def gate(self, gate_up: torch.Tensor, adapters: Finish | None = None) -> torch.Tensor:
        """activation(gate) * up, [T, N], of gate_up [T, 2 N] plus what `adapters` add. gate_up may be overwritten."""
        if adapters is not None:
            adapters.add(gate_up)
        if not self.shape.gated:
            return ACTIVATIONS[self.shape.activation](gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[self.shape.activation](gate).mul_(up)

    def computed(self, x: Normed) -> torch.Tensor:
        """The tensor of a result of `add_linear_norm`, computed if it is not yet."""
        if isinstance(x, NormInParts):
            normed = torch.empty_like(x.stream)
            for part, rows in enumerate(x.sums.parts):
                self._received(x, part, normed[rows])
            return normed
        return x  # type: ignore[no-any-return]

    def add_linear_norm(
        self,
        stream: torch.Tensor,
        x: Gated,
        weight: Weight,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        first: Callable[[], None] = nothing,
        out_norm: torch.Tensor | None = None,
        change: Change | None = None,
    ) -> Normed:
        """Add the projection of x to the stream [T, hidden] in place; return the sum normed by `norm` [hidden].

        `first` is called before anything here reads or writes the stream. With a group, x and weight are this device's
        part of the inputs, and the bias is the whole one. With `out_norm` [hidden], the projection is normed before it
        is added. With `change`, that comes first of all. If `norm` has no numbers, the result is the stream itself.
        """
        first()
        separate = out_norm is not None or change is not None
        if separate or (self.group is not None and (self.shape.layer_norm or not len(norm))):
            return self._add_separately(stream, x, weight, bias, norm, out_norm, change)
        if self.group is not None:
            in_parts = self._begin_sum(stream, x, weight, bias, norm)
            if in_parts is not None:
                return in_parts
            return self.group.add_norm(stream, self._linear(x, weight, None)[None], bias, norm, self.shape.eps)
        if not isinstance(weight, torch.Tensor):
            stream += self._linear(x, weight, None)
        else:
            stream.addmm_(x, weight.t())
        if bias is not None:
            stream += bias
        return self.norm(stream, norm)

    def add_adapted_norm(
        self,
        stream: torch.Tensor,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        adapters: Finish,
    ) -> torch.Tensor:
        """`add_linear_norm` with a group, where each device's adapters add to its partial sums of the projection."""
        added = self._projected(x, weight)
        adapters.add(added)
        if self.group is not None and not self.shape.layer_norm and len(norm):
            return self.group.add_norm(stream, added[None], bias, norm, self.shape.eps)
        if self.group is not None:
            added = self.group.all_reduce(added)
        if bias is not None:
            added += bias
        stream += added
        return self.norm(stream, norm)

    def add_linears_norm(
        self,
        stream: torch.Tensor,
        one: tuple[Gated, Weight, torch.Tensor | None],
        other: tuple[Gated, Weight, torch.Tensor | None],
        norm: torch.Tensor,
        changes: Sequence[Change] = (),
    ) -> torch.Tensor:
        """`add_linear_norm` of two projections in one sum, each with its own input, weight, bias and change."""
        added, second = self._projected(*one[:2]), self._projected(*other[:2])
        for change, projected in zip(changes, (added, second), strict=False):
            change(projected)
        added += second
        if self.group is not None:
            added = self.group.all_reduce(added)
        for _, _, bias in (one, other):
            if bias is not None:
                added += bias
        stream += added
        return self.norm(stream, norm)

    def _add_separately(
        self,
        stream: torch.Tensor,
        x: Gated,
        weight: Weight,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        out_norm: torch.Tensor | None,
        change: Change | None = None,
    ) -> torch.Tensor:
        """`add_linear_norm` as separate operations, for norms and changes that no kernel is fused with."""
        added = self._projected(x, weight)
        if change is not None:
            change(added)
        if self.group is not None:
            added = self.group.all_reduce(added)
        if bias is not None:
            added += bias
        stream += added if out_norm is None else self.norm(added, out_norm)
        return self.norm(stream, norm)

    def _projected(self, x: Gated, weight: Weight) -> torch.Tensor:
        """x times weight transposed, as a new tensor."""
        return self._linear(x, weight, None)

    def add_experts_norm(self, stream: torch.Tensor, x: Normed, experts: Experts, norm: torch.Tensor) -> Normed:
        """Add the experts' outputs for x to the stream [T, hidden] in place; return the sum normed by `norm` [hidden].

        With a group, the experts are this device's part of each, but the router is whole.
        """
        added = self._experts_output(x, experts)
        if self.group is not None and not self.shape.layer_norm:
            return self.group.add_norm(stream, added[None], None, norm, self.shape.eps)
        stream += added if self.group is None else self.group.all_reduce(added)
        return self.norm(stream, norm)

    def _experts_output(self, x: Normed, experts: Experts) -> torch.Tensor:
        """The weighted sum [T, hidden] of the outputs of the experts for x, or this device's part of it."""
        return apply_experts(self.computed(x), experts)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Cosine and sine of the angles of positions [T] int64, computed in float32, for all layers of a step."""
        cosine, sine = self._angles(positions)
        cosine, sine = cosine[:, None].to(self.shape.dtype), sine[:, None].to(self.shape.dtype)
        # Whole heads, [T, 1, D]. The sine is negative in the first half, where the other half is subtracted.
        return torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        caches: tuple[torch.Tensor, torch.Tensor],
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate queries and keys, write keys and values to the cache, and return the queries [T, H, D].

        qkv [T, (H + 2 Hkv) D] holds queries, keys and values, in this order. With q_norm and k_norm [D] (both or
        neither), queries and keys are normed within each head first; with `qk_norm_whole`, over all heads. For that and
        for `qk_layer_norm`, qkv is written to. The first half of a head is rotated against its second half (the pairing
        of GPT-NeoX and of Transformers). Caches and slot_mapping are those of `Attention.write`. If the shape has no KV
        heads, qkv holds queries alone, and nothing is written.
        """
        shape = self.shape
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        q_norm, k_norm = self._norm_written(qkv, q_norm, k_norm)
        turned, value = torch.split(qkv.view(-1, heads + 2 * kv_heads, dim), [heads + kv_heads, kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            query, key = torch.split(turned, [heads, kv_heads], dim=1)
            turned = torch.cat((self.norm(query, q_norm), self.norm(key, k_norm)), dim=1)
        if self._rotates:
            cosine, sine = rotation
            turned = (turned * cosine).addcmul_(turned.roll(dim // 2, -1), sine)
        query, key = torch.split(turned, [heads, kv_heads], dim=1)
        if shape.unit_v_norm:
            value = functional.rms_norm(value, (dim,), eps=shape.eps)
        if kv_heads:
            write_slots(key, value, *caches, slot_mapping)
        return query

    def norm_with(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm [T, width] of x times weight [width], with `eps` in place of the shape's own."""
        return functional.rms_norm(x, weight.shape, weight, eps)

    def rotate_and_write_latent(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rotation: Rotation,
        norm: torch.Tensor,
        eps: float,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Norm the latents, rotate their keys and the queries, and write latents and keys to the cache.

        latent [T, rank + R] holds each token's latent, which is normed by `norm` [rank] with `eps`, and then the key
        that is rotated. The last R numbers of query [T, H, rank + R] are rotated in place. The cache is
        [num_blocks, block_size, 1, rank + R]; slot_mapping is that of `Attention.write`. `latent` may be overwritten.
        """
        rank = len(norm)
        cosine, sine = rotation
        for turned in (query[..., rank:], latent[:, None, rank:]):
            half = turned.shape[-1] // 2
            turned.copy_((turned * cosine).addcmul_(turned.roll(half, -1), sine))
        key = torch.cat((self.norm_with(latent[:, :rank], norm, eps), latent[:, rank:]), dim=1)
        cache.view(-1, cache.shape[-1]).index_copy_(0, slot_mapping, key)

    def _norm_written(
        self, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Norm queries and keys of qkv in place, where heads do not share a norm. Returns the norms that are left."""
        if q_norm is None or k_norm is None:
            return None, None
        if self.shape.qk_norm_whole:
            self._norm_whole(qkv, q_norm, k_norm)
        elif self.shape.qk_layer_norm:
            self._norm_heads(qkv, q_norm, k_norm)
        else:
            return q_norm, k_norm
        return None, None

    def _norm_heads(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        """Norm each head of queries and keys of qkv [T, (H + 2 Hkv) D] in place, as `qk_layer_norm` says."""
        factors = torch.cat((q_norm, k_norm)).view(-1, self.shape.head_dim)
        heads = qkv[:, : factors.numel()].view(-1, *factors.shape)
        normed = functional.layer_norm(heads, factors.shape[1:], eps=self.shape.eps)
        heads.copy_(normed.mul_(factors))

    def _norm_whole(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        """Norm the queries and the keys of qkv [T, (H + 2 Hkv) D] in place, each over all heads together.

        With a group, each device has the sums of squares of its own heads, and the group adds them up.
        """
        query, key, _ = torch.split(qkv, [len(q_norm), len(k_norm), qkv.shape[1] - len(q_norm) - len(k_norm)], dim=1)
        if self.group is None:
            query.copy_(self.norm(query, q_norm))
            key.copy_(self.norm(key, k_norm))
            return
        squares = [each.float().square().sum(1) for each in (query, key)]
        sums = self.group.all_reduce(torch.stack((squares[0], squares[1] / self.shape.kv_copies), dim=1))
        means = [
            each / width
            for each, width in zip(torch.split(sums, 1, dim=1), self._whole_widths(q_norm, k_norm), strict=True)
        ]
        query.copy_(query * torch.rsqrt(means[0] + self.shape.eps) * q_norm)
        key.copy_(key * torch.rsqrt(means[1] + self.shape.eps) * k_norm)

    def _whole_widths(self, q_norm: torch.Tensor, k_norm: torch.Tensor) -> tuple[int, int]:
        """Widths of a token's queries and of its keys over all devices, each KV head counted once."""
        size = 1 if self.group is None else self.group.size
        return len(q_norm) * size, len(k_norm) * size // self.shape.kv_copies

    def _begin_sum(
        self, stream: torch.Tensor, x: Gated, weight: Weight, bias: torch.Tensor | None, norm: torch.Tensor
    ) -> NormInParts | None:
        """Compute and send the projection of x part by part; None if one sum of all rows is as fast."""
        if self.group is None or not self.shape.sums_in_parts:
            return None
        sums = self.group.begin_sum(len(stream), stream.shape[1], stream.dtype)
        if sums is None:
            return None
        for part, rows in enumerate(sums.parts):
            self._linear_into(sums.room(part), x[rows], weight, None)
            sums.send(part)
        return NormInParts(sums, stream, bias, norm)

    def _linear_of_parts(self, x: NormInParts, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x times weight transposed, plus bias, of each part as it arrives."""
        out = x.stream.new_empty(len(x.stream), weight.shape[0])
        for part, rows in enumerate(x.sums.parts):
            self._linear_into(out[rows], self._received(x, part), weight, bias)
        return out

    def _received(self, x: NormInParts, part: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Add a part of a sum to its rows of the stream, and return their norm, in `out` if it is given."""
        rows, addends = x.sums.parts[part], x.sums.receive(part)
        out = torch.empty_like(x.stream[rows]) if out is None else out
        self._add_norm(x.stream[rows], addends, x.bias, x.weight, out)
        return out

    def _add_norm(
        self,
        stream: torch.Tensor,
        partials: torch.Tensor,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add partial sums [P, T, hidden] of any float dtype and a bias to the stream in place; write its RMS norm."""
        added = partials.sum(0, dtype=torch.float32)
        stream += added if bias is None else added.add_(bias)
        out.copy_(self.norm(stream, weight))

    def _linear_into(self, out: torch.Tensor, x: Gated, weight: Weight, bias: torch.Tensor | None) -> None:
        """Write x times weight transposed, plus bias, to `out`."""
        if not isinstance(weight, torch.Tensor):
            out.copy_(self._linear(x, weight, bias))
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    def _linear(self, x: Gated, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x times weight transposed, plus bias."""
        if not isinstance(weight, torch.Tensor):
            return weight.linear(x, bias)
        if len(x) in PACKED_ROWS and weight.data_ptr() in self._packed:
            _, packed = self._packed[weight.data_ptr()]
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return product
        return functional.linear(x, weight, bias)

    def _angles(self, positions: torch.Tensor) -> Rotation:
        """Cosine and sine, [T, D / 2] float32, multiplied by the amplitude."""
        angles = positions[:, None].float() * self.shape.inverse_frequencies
        cosine, sine = angles.cos(), angles.sin()
        if self.shape.amplitude != 1.0:
            cosine, sine = cosine * self._amplitudes, sine * self._amplitudes
        return cosine, sine
