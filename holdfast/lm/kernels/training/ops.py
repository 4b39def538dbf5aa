"""Forward and backward between the GEMMs of a layer in training: their interface, and the backend in PyTorch."""

from __future__ import annotations

import torch

from holdfast.lm.kernels.linear.layers import ACTIVATIONS, LayerOps, Rotation


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

    def gate_backward(
        self, gate: torch.Tensor, up: torch.Tensor, back: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of gate and up in one tensor [T, 2 N], from that of their product; and the product [T, N]."""
        wide_gate, wide_up, wide_back = wide(gate), wide(up), wide(back)
        activated = ACTIVATIONS[self.shape.activation](wide_gate)
        product = (activated * wide_up).to(gate.dtype)
        back_activated = wide_back * wide_up
        if self.shape.activation == "silu":
            sigmoid = torch.sigmoid(wide_gate)
            back_gate = back_activated * (sigmoid + activated * (1.0 - sigmoid))
        else:
            approximate = "tanh" if self.shape.activation == "gelu_pytorch_tanh" else "none"
            back_gate = torch.ops.aten.gelu_backward(back_activated, wide_gate, approximate=approximate)
        return torch.cat((back_gate, wide_back * activated), dim=-1).to(gate.dtype), product

    def add_norm_backward(
        self, gradient: torch.Tensor, back: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> None:
        """Add to `gradient` [T, hidden], in place, the gradient of x from that of its RMS norm, `back`."""
        gradient += self._norm_backward(back, x, weight).to(gradient.dtype)

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

        `query` [T, H, D], `key` and `value` [T, Hkv, D] are gradients; `qkv` is the input of the forward.
        """
        shape = self.shape
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        cosine, sine = (wide(part) for part in rotation)
        turned = wide(torch.cat((query, key), dim=1))
        turned = turned * cosine + (turned * sine).roll(-(dim // 2), -1)
        if q_norm is not None and k_norm is not None:
            raw = qkv.view(-1, heads + 2 * kv_heads, dim)
            turned = torch.cat(
                (
                    self._norm_backward(turned[:, :heads], raw[:, :heads], q_norm),
                    self._norm_backward(turned[:, heads:], raw[:, heads : heads + kv_heads], k_norm),
                ),
                dim=1,
            )
        return torch.cat((turned.to(qkv.dtype), value), dim=1).flatten(1)

    def loss_backward(self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The cross entropy of each row times its weight, [C]. `logits` [C, vocabulary] become their gradient.

        `targets` [C] int64, `weights` [C] float32.
        """
        scores = wide(logits)
        logs = torch.log_softmax(scores, dim=-1)
        weights = weights.to(scores.dtype)
        chosen = targets[:, None]
        losses = -logs.gather(1, chosen)[:, 0] * weights
        back = logs.exp_()
        back.scatter_add_(1, chosen, torch.full_like(chosen, -1, dtype=back.dtype))
        logits.copy_(back.mul_(weights[:, None]))
        return losses

    def _norm_backward(self, back: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of x [..., N] from that of its RMS norm (Zhang and Sennrich, 2019, §4)."""
        x, back = wide(x), wide(back) * wide(weight)
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.eps)
        normed = x * scale
        return scale * (back - normed * (back * normed).mean(-1, keepdim=True))


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype that sums are taken in."""
    return x if x.dtype == torch.float64 else x.float()


def product_in_float32(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Write scale · left right to `out`, in float32 (or float64) without rounding to the dtype of the factors."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)
    if scale != 1.0:
        out *= scale
