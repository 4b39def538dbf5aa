"""Functions that the kernels of experts share: scores that can be compared, and the gate between two products."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def comparable(score):
    """Scores with the lowest number in place of NaN, which rows of padding may have.

    Threads that compare NaN in different orders find different maxima. They would then disagree on how many pairs an
    expert has, and sort the pairs of other tokens to wrong places.
    """
    return tl.where(score == score, score, -3.4e38)


@triton.jit
def mixer_share(left, best, jitter, AXIS: tl.constexpr):
    """The share of an expert with logit `best` by `ExpertRule.jitter`. `left` holds the logits that are left after it.

    Logits of experts that were chosen before it, and its own, are -inf in `left`.
    """
    near = best - left <= 2.0 * jitter * tl.maximum(tl.abs(left), best)
    return 1.0 / (1.0 + tl.sum(tl.where(near, tl.exp(left - best), 0.0), AXIS))


@triton.jit
def gated_product(gate, up, alpha, limit, CLAMPED: tl.constexpr, GELU: tl.constexpr):
    """silu(gate) * up, with GELU gelu(gate) * up by tanh, or with CLAMPED the gate of `ExpertRule.clamp`.

    NaN stays NaN.
    """
    if CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    elif GELU:
        # gelu(x) = x / (1 + exp(-2 z)) with z = sqrt(2 / pi) (x + 0.044715 x^3), as 1 + tanh(z) = 2 / (1 + exp(-2 z))
        exponent = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(tl.minimum(exponent, 80.0))) * up  # exp overflows from 89 on
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    return result
