"""The Triton kernels between the GEMMs of a layer in training, and their launches."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.linear.layers import Rotation
from holdfast.lm.kernels.training.losses import PositionLoss
from holdfast.lm.kernels.training.ops import TrainingOps

GATED_AT_A_TIME = 1024
"""Number of elements that one program gates."""
ROTATED_AT_A_TIME = 512
"""Number of pairs of numbers that one program rotates."""
LOGITS_AT_A_TIME = 8192
"""Number of logits that a program of the loss holds at a time."""


class FusedTrainingOps(TrainingOps):
    """`TrainingOps` for float32, float16 and bfloat16 on CUDA, computed in float32 and rounded once."""

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.shape.activation != "silu":
            return super().gate(gate, up)
        out = torch.empty_like(gate)
        tokens, width = gate.shape
        gate_kernel[(tokens, triton.cdiv(width, GATED_AT_A_TIME))](gate, up, out, width, BLOCK=GATED_AT_A_TIME)
        return out

    def gate_backward(
        self, gate: torch.Tensor, up: torch.Tensor, back: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.shape.activation != "silu":
            return super().gate_backward(gate, up, back)
        tokens, width = gate.shape
        both, product = gate.new_empty(tokens, 2 * width), torch.empty_like(gate)
        gate_backward_kernel[(tokens, triton.cdiv(width, GATED_AT_A_TIME))](
            gate, up, back, both, product, width, BLOCK=GATED_AT_A_TIME
        )
        return both, product

    def add_norm_backward(
        self, gradient: torch.Tensor, back: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> None:
        if self.shape.layer_norm or not len(weight):
            super().add_norm_backward(gradient, back, x, weight)
            return
        tokens, width = x.shape
        add_norm_backward_kernel[(tokens,)](
            gradient, back, x, weight, width, self.shape.eps, BLOCK=triton.next_power_of_2(width), num_warps=8
        )

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
        shape, out = self.shape, torch.empty_like(qkv)
        cosine, sine = rotation
        if (shape.qk_norm_whole or shape.qk_layer_norm) and q_norm is not None and k_norm is not None:
            whole = self.rotate_backward(query, key, value, qkv, rotation, None, None)
            self.written_norms_backward(whole, qkv, q_norm, k_norm)
            return whole
        block_half = triton.next_power_of_2(shape.head_dim // 2)
        block_heads = max(1, ROTATED_AT_A_TIME // block_half)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        rotate_backward_kernel[(len(qkv), triton.cdiv(heads, block_heads))](
            query.contiguous(), key.contiguous(), value.contiguous(), qkv, cosine, sine, q_norm, k_norm, out, shape.eps,
            NUM_HEADS=shape.num_heads, NUM_KV_HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim,
            BLOCK_HEADS=block_heads, BLOCK_HALF=block_half,
        )  # fmt: skip
        return out

    def loss_backward(
        self, logits: torch.Tensor, targets: torch.Tensor, loss: PositionLoss, *, backward: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, vocabulary = logits.shape
        log_sums = torch.empty(rows, dtype=torch.float32, device=logits.device)
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        block = min(LOGITS_AT_A_TIME, triton.next_power_of_2(vocabulary))
        several = targets.shape[1] if targets.dim() == 2 else 1
        targets = targets.contiguous()
        logprobs_kernel[(rows,)](
            logits, targets, logprobs, log_sums, vocabulary, logits.stride(0), several, BLOCK=block, num_warps=16
        )
        losses, factors = loss.of(logprobs)
        if backward:
            logits_backward_kernel[(rows, triton.cdiv(vocabulary, block))](
                logits, targets, log_sums, factors.contiguous(), vocabulary, logits.stride(0), several,
                SEVERAL=targets.dim() == 2, BLOCK=block, num_warps=16,
            )  # fmt: skip
        return losses, logprobs


@triton.jit
def gate_kernel(gate, up, out, width, BLOCK: tl.constexpr):
    """silu(gate) * up, [T, width] each. Program (token, part of the row)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(gate + at, mask=held, other=0.0).to(tl.float32)
    factor = tl.load(up + at, mask=held, other=0.0).to(tl.float32)
    tl.store(out + at, (value / (1.0 + tl.exp(-value)) * factor).to(out.dtype.element_ty), mask=held)


@triton.jit
def gate_backward_kernel(gate, up, back, both, product, width, BLOCK: tl.constexpr):
    """The gradients of gate and up to `both` [T, 2 width], and silu(gate) * up to `product`.

    Program (token, part of the row).
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    token = tl.program_id(0).to(tl.int64)
    at = token * width + column
    value = tl.load(gate + at, mask=held, other=0.0).to(tl.float32)
    factor = tl.load(up + at, mask=held, other=0.0).to(tl.float32)
    given = tl.load(back + at, mask=held, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-value))
    activated = value * sigmoid
    back_gate = given * factor * (sigmoid + activated * (1.0 - sigmoid))
    both_at = both + token * 2 * width + column
    tl.store(both_at, back_gate.to(both.dtype.element_ty), mask=held)
    tl.store(both_at + width, (given * activated).to(both.dtype.element_ty), mask=held)
    tl.store(product + at, (activated * factor).to(product.dtype.element_ty), mask=held)


@triton.jit
def add_norm_backward_kernel(gradient, back, x, weight, width, eps, BLOCK: tl.constexpr):
    """gradient += the gradient of x from that of its RMS norm, [T, width] each. Program (token)."""
    column = tl.arange(0, BLOCK)
    held = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, mask=held, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=held, other=0.0).to(tl.float32)
    given = tl.load(back + at, mask=held, other=0.0).to(tl.float32) * gain
    before = tl.load(gradient + at, mask=held, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    normed = value * scale
    added = scale * (given - normed * (tl.sum(given * normed, 0) / width))
    # Several threads may hold the same element, and all must read it before one writes it.
    tl.debug_barrier()
    tl.store(gradient + at, (before + added).to(gradient.dtype.element_ty), mask=held)


@triton.jit
def rotate_backward_kernel(
    query, key, value, qkv, cosine, sine, q_norm, k_norm, out, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """The gradient of qkv from those of rotated queries and keys, and of values. Program (token, group of heads).

    Heads are held as two halves of [BLOCK_HEADS, BLOCK_HALF], as in `rotate_write_kernel`.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_HALF)
    inside = dim < HALF
    held = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & inside[None, :]
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    turned = (is_query | is_key)[:, None]

    key_head = head - NUM_HEADS
    value_head = key_head - NUM_KV_HEADS
    query_at = query + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    key_at = key + (token * NUM_KV_HEADS + key_head)[:, None] * HEAD_DIM + dim[None, :]
    value_at = value + (token * NUM_KV_HEADS + value_head)[:, None] * HEAD_DIM + dim[None, :]
    of_query = held & is_query[:, None]
    of_key = held & is_key[:, None]
    of_value = held & (value_head >= 0)[:, None]
    first = tl.load(query_at, mask=of_query, other=0.0).to(tl.float32)
    first += tl.load(key_at, mask=of_key, other=0.0).to(tl.float32)
    first += tl.load(value_at, mask=of_value, other=0.0).to(tl.float32)
    second = tl.load(query_at + HALF, mask=of_query, other=0.0).to(tl.float32)
    second += tl.load(key_at + HALF, mask=of_key, other=0.0).to(tl.float32)
    second += tl.load(value_at + HALF, mask=of_value, other=0.0).to(tl.float32)

    cos = tl.load(cosine + token * HALF + dim, mask=inside, other=0.0)[None, :]
    sin = tl.load(sine + token * HALF + dim, mask=inside, other=0.0)[None, :]
    a = first * cos + second * sin
    b = second * cos - first * sin
    place = (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head)[:, None] * HEAD_DIM + dim[None, :]
    if q_norm is not None:
        q_first = tl.load(q_norm + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        q_second = tl.load(q_norm + HALF + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(k_norm + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(k_norm + HALF + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        a *= tl.where(is_query[:, None], q_first, k_first)
        b *= tl.where(is_query[:, None], q_second, k_second)
        x = tl.load(qkv + place, mask=held & turned, other=0.0).to(tl.float32)
        y = tl.load(qkv + place + HALF, mask=held & turned, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / HEAD_DIM + eps)[:, None]
        x *= scale
        y *= scale
        mean = (tl.sum(a * x + b * y, 1) / HEAD_DIM)[:, None]
        a = scale * (a - x * mean)
        b = scale * (b - y * mean)
    tl.store(out + place, tl.where(turned, a, first).to(out.dtype.element_ty), mask=held)
    tl.store(out + place + HALF, tl.where(turned, b, second).to(out.dtype.element_ty), mask=held)


@triton.jit
def logprobs_kernel(logits, targets, logprobs, log_sums, vocabulary, stride, several, BLOCK: tl.constexpr):
    """The log probabilities of each row's `several` targets, and the logarithm of the row's sum of exponentials.

    Program (row).
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    column = tl.arange(0, BLOCK)
    # This number is below every logit and finite, so a column without a logit adds nothing.
    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocabulary, BLOCK):
        held = first + column < vocabulary
        score = tl.load(start + first + column, mask=held, other=0.0).to(tl.float32)
        score = tl.where(held, score, -1e30)
        above = tl.maximum(largest, score)
        total = total * tl.exp(largest - above) + tl.where(held, tl.exp(score - above), 0.0)
        largest = above
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    for k in range(several):
        at = row * several + k
        chosen = tl.load(start + tl.load(targets + at)).to(tl.float32)
        tl.store(logprobs + at, chosen - log_sum)
    tl.store(log_sums + row, log_sum)


@triton.jit
def logits_backward_kernel(
    logits, targets, log_sums, factors, vocabulary, stride, several, SEVERAL: tl.constexpr, BLOCK: tl.constexpr
):
    """The logits become the sum over targets of factor (softmax - onehot), in place. Program (row, part of the row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < vocabulary
    at = logits + row * stride + column
    score = tl.load(at, mask=held, other=0.0).to(tl.float32)
    probability = tl.exp(score - tl.load(log_sums + row))
    if SEVERAL:
        total = 0.0
        chosen = tl.zeros([BLOCK], tl.float32)
        for k in range(several):
            factor = tl.load(factors + row * several + k)
            total += factor
            chosen += tl.where(column == tl.load(targets + row * several + k), factor, 0.0)
        back = probability * total - chosen
    else:
        onehot = tl.where(column == tl.load(targets + row), 1.0, 0.0)
        back = (probability - onehot) * tl.load(factors + row)
    # Several threads may hold the same element, and all must read it before one writes it.
    tl.debug_barrier()
    tl.store(at, back.to(logits.dtype.element_ty), mask=held)
