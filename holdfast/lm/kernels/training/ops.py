"""Forward and backward between the GEMMs of a layer in training: their interface, and the backend in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from holdfast.lm.kernels.linear.layers import ACTIVATIONS, LayerOps, Rotation
from holdfast.lm.kernels.training.losses import PositionLoss

SUMMED_TOGETHER = 128
"""Number of tokens whose sums travel between devices as one row. One row per token would mean one wait per token."""


class TrainingOps:
    """The operations around GEMMs and attention, over T packed tokens, in PyTorch.

    This is the backend of a CPU and the oracle of the Triton kernels. Sums are taken in float32, or in float64 for
    float64 tensors.
    """

    def __init__(self, layers: LayerOps) -> None:
        self.layers = layers
        self.shape = layers.shape

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """activation(gate) * up, [T, N] each."""
        return ACTIVATIONS[self.shape.activation](gate).mul_(up)

    def activation(self, up: torch.Tensor) -> torch.Tensor:
        """activation(up) [T, N], of an MLP without a gate."""
        return ACTIVATIONS[self.shape.activation](up)

    def activation_backward(self, up: torch.Tensor, back: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of up [T, N], from that of its activation; and the activation [T, N]."""
        wide_up = wide(up)
        activated = ACTIVATIONS[self.shape.activation](wide_up)
        return self._activation_backward(wide(back), wide_up, activated).to(up.dtype), activated.to(up.dtype)

    def gate_backward(
        self, gate: torch.Tensor, up: torch.Tensor, back: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of gate and up in one tensor [T, 2 N], from that of their product; and the product [T, N]."""
        wide_gate, wide_up, wide_back = wide(gate), wide(up), wide(back)
        activated = ACTIVATIONS[self.shape.activation](wide_gate)
        product = (activated * wide_up).to(gate.dtype)
        back_gate = self._activation_backward(wide_back * wide_up, wide_gate, activated)
        return torch.cat((back_gate, wide_back * activated), dim=-1).to(gate.dtype), product

    def add_norm_backward(
        self, gradient: torch.Tensor, back: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> None:
        """Add to `gradient` [T, hidden], in place, the gradient of x from that of its norm, `back`.

        The weight is that of `LayerOps.norm`.
        """
        gradient += self.norm_backward(back, x, weight).to(gradient.dtype)

    def norm_backward(self, back: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of x [T, hidden] from that of its norm."""
        if not len(weight):
            return back
        if not self.shape.layer_norm:
            return self._rms_norm_backward(back, x, weight).to(x.dtype)
        return self._layer_norm_backward(back, x, weight.chunk(2)[0]).to(x.dtype)

    def rotate_backward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        qkv: torch.Tensor,
        rotation: Rotation,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """The gradient of qkv [T, (H + 2 Hkv) D], from those of the results of `LayerOps.rotate_and_write`.

        `query` [T, H, D], `key` and `value` [T, Hkv, D] are gradients; `qkv` is the input of the forward, before norms
        over all heads wrote to it.
        """
        shape = self.shape
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        cosine, sine = (wide(part) for part in rotation)
        turned = wide(torch.cat((query, key), dim=1))
        turned = turned * cosine + (turned * sine).roll(-(dim // 2), -1)
        if q_norm is not None and k_norm is not None:
            if shape.qk_norm_whole or shape.qk_layer_norm:
                whole = torch.cat((turned.to(qkv.dtype), value), dim=1).flatten(1)
                self.written_norms_backward(whole, qkv, q_norm, k_norm)
                return whole
            raw = qkv.view(-1, heads + 2 * kv_heads, dim)
            turned = torch.cat(
                (
                    self._rms_norm_backward(turned[:, :heads], raw[:, :heads], q_norm),
                    self._rms_norm_backward(turned[:, heads:], raw[:, heads : heads + kv_heads], k_norm),
                ),
                dim=1,
            )
        return torch.cat((turned.to(qkv.dtype), value), dim=1).flatten(1)

    def written_norms_backward(
        self, gradient: torch.Tensor, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor
    ) -> None:
        """Turn the gradient [T, (H + 2 Hkv) D] of normed queries and keys into that of qkv, in place.

        The norms are those that heads do not share.
        """
        if self.shape.qk_norm_whole:
            self.whole_norms_backward(gradient, qkv, q_norm, k_norm)
            return
        factors = torch.cat((q_norm, k_norm)).view(-1, self.shape.head_dim)
        columns = slice(0, factors.numel())
        back, raw = (part[:, columns].view(-1, *factors.shape) for part in (gradient, qkv))
        back.copy_(self._layer_norm_backward(back, raw, factors))

    def whole_norms_backward(
        self, gradient: torch.Tensor, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor
    ) -> None:
        """Turn the gradient [T, (H + 2 Hkv) D] of queries and keys normed over all heads into that of qkv, in place.

        With a group, each device has the sums over its own heads, and the group adds them up. Where several devices
        hold a KV head, each of them has a part of the head's gradient, and gets that part of the result.
        """
        ends = len(q_norm), len(q_norm) + len(k_norm)
        parts = [
            (gradient[:, columns], wide(gradient[:, columns]) * wide(weight), wide(qkv[:, columns]))
            for columns, weight in ((slice(0, ends[0]), q_norm), (slice(*ends), k_norm))
        ]
        sums = torch.stack([each for _, back, x in parts for each in ((x * x).sum(1), (back * x).sum(1))], dim=1)
        # Equal copies of a KV head count in the sum of squares and in the width alike.
        size = 1 if self.layers.group is None else self.layers.group.size
        for (out, back, x), own in zip(parts, torch.split(self._over_devices(sums), 2, dim=1), strict=True):
            squares, products = torch.split(own / (x.shape[1] * size), 1, dim=1)
            scale = torch.rsqrt(squares + self.shape.eps)
            out.copy_(scale * (back - x * scale.square() * products))

    def _over_devices(self, sums: torch.Tensor) -> torch.Tensor:
        """The sum of `sums` [T, N] over the devices of the group."""
        if self.layers.group is None:
            return sums
        tokens, width = sums.shape
        rows = functional.pad(sums, (0, 0, 0, -tokens % SUMMED_TOGETHER)).view(-1, SUMMED_TOGETHER * width)
        return self.layers.group.all_reduce(rows).view(-1, width)[:tokens]

    def loss_backward(
        self, logits: torch.Tensor, targets: torch.Tensor, loss: PositionLoss, *, backward: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each target, and its log probability.

        `targets` is int64, [C], or [C, K] for K targets of each row. The results have its shape. They are float32,
        or float64 for float64 logits. With `backward`, `logits` [C, vocabulary] become their gradient; otherwise they
        stay.
        """
        logs = torch.log_softmax(wide(logits), dim=-1)
        chosen = targets.view(len(targets), -1)
        logprobs = logs.gather(1, chosen).view(targets.shape)
        losses, factors = loss.of(logprobs)
        if backward:
            logits.copy_(
                scaled(logs.exp_(), factors, lambda back, k, own: back.scatter_add_(1, chosen[:, k, None], own))
            )
        return losses, logprobs

    def _activation_backward(self, back: torch.Tensor, given: torch.Tensor, activated: torch.Tensor) -> torch.Tensor:
        """The gradient of `given` from that of its activation, all in the dtype that sums are taken in."""
        name = self.shape.activation
        if name == "silu":
            sigmoid = torch.sigmoid(given)
            return back * (sigmoid + activated * (1.0 - sigmoid))
        if name == "relu":
            return back * (given > 0)
        if name == "relu2":
            return back * (2.0 * functional.relu(given))
        approximate = "none" if name == "gelu" else "tanh"
        found: torch.Tensor = torch.ops.aten.gelu_backward(back, given, approximate=approximate)
        return found

    def _layer_norm_backward(self, back: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The gradient of x [..., N] from that of its layer norm (Ba et al., 2016, §3.1)."""
        centered, back = wide(x) - wide(x).mean(-1, keepdim=True), wide(back) * wide(factor)
        scale = torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.shape.eps)
        normed = centered * scale
        means = back.mean(-1, keepdim=True), (back * normed).mean(-1, keepdim=True)
        return scale * (back - means[0] - normed * means[1])

    def _rms_norm_backward(self, back: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of x [..., N] from that of its RMS norm (Zhang and Sennrich, 2019, §4)."""
        x, back = wide(x), wide(back) * wide(weight)
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.eps)
        normed = x * scale
        return scale * (back - normed * (back * normed).mean(-1, keepdim=True))


def scaled(
    probabilities: torch.Tensor, factors: torch.Tensor, add: Callable[[torch.Tensor, int, torch.Tensor], object]
) -> torch.Tensor:
    """The gradient of logits from their probabilities [C, V] and the factors of their targets, [C] or [C, K].

    It overwrites the probabilities. `add` adds numbers [C, 1] at the targets of a column.
    """
    if factors.dim() == 1:
        add(probabilities, 0, torch.full_like(factors[:, None], -1.0))
        return probabilities.mul_(factors[:, None])
    probabilities.mul_(factors.sum(1, keepdim=True))
    for k in range(factors.shape[1]):  # column by column, so that a token that is a target twice has the same bits
        add(probabilities, k, -factors[:, k, None])
    return probabilities


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype that sums are taken in."""
    return x if x.dtype == torch.float64 else x.float()


def product_in_float32(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Write scale · left right to `out`, in float32 (or float64) without rounding to the dtype of the factors."""
    if not out.is_contiguous():  # a device's columns of a larger matrix
        whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        product_in_float32(left, right, whole, scale)
        out.copy_(whole)
        return
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)
    if scale != 1.0:
        out *= scale
