"""What the kernels of experts share: scores that can be compared, and what is computed between two products."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def comparable(score):
    """Scores with the lowest number in place of NaN, as rows of padding may have.

    Threads that compare NaN in another order find another maximum. Then they would disagree on how many pairs an expert
    has, and sort those of other tokens to wrong places.
    """
    return tl.where(score == score, score, -3.4e38)


@triton.jit
def gated_product(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """silu(gate) * up; CLAMPED: as `ExpertRule.clamp` says. NaN stays NaN."""
    if CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    return result
