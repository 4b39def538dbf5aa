"""What an expert computes between its two products, within a kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


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
