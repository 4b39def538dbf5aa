"""Functions that the kernels of experts share: scores that can be compared, and what is between two products."""

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


@triton.jit
def squared_relu(x):
    """relu² of x. NaN stays NaN."""
    x = tl.where(x < 0.0, 0.0, x)
    return x * x


@triton.jit
def ranked(
    score, correction, e, experts,
    SIGMOID: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """The numbers by which experts are chosen, from their logits: -inf for experts outside of the kept groups.

    score [..., E] with the experts `e` [E] along AXIS, the last one. With a `correction` [experts], it is added to the
    scores. With GROUPS above 1, only experts of the KEPT groups with the highest sums of their BEST numbers count.
    """
    rank = score
    if SIGMOID:
        rank = 1.0 / (1.0 + tl.exp(-score))
    if correction is not None:
        rank += tl.load(correction + e, mask=e < experts, other=0.0)
    rank = tl.where(e < experts, rank, float("-inf"))
    if GROUPS > 1:
        size = experts // GROUPS
        group = e // size
        of_group = tl.full(rank.shape, float("-inf"), tl.float32)
        for number in tl.static_range(GROUPS):
            own = tl.where(group == number, rank, float("-inf"))
            total, first = tl.max(own, AXIS, return_indices=True, keep_dims=True)
            if BEST == 2:
                total += tl.max(tl.where(e == first, float("-inf"), own), AXIS, keep_dims=True)
            of_group = tl.where(group == number, total, of_group)
        kept = tl.zeros(rank.shape, tl.int32)
        for _ in tl.static_range(KEPT):
            _, first = tl.max(of_group, AXIS, return_indices=True, keep_dims=True)
            taken = group == first // size
            kept = tl.where(taken, 1, kept)
            of_group = tl.where(taken, float("-inf"), of_group)
        rank = tl.where(kept == 1, rank, float("-inf"))
    return rank
