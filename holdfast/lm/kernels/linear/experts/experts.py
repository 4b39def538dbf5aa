"""The experts of a layer: their tensors, the rule by which tokens choose them, and the computation in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from holdfast.lm.kernels.mxfp4 import ExpertWeights, matrix_of

TINY = 1e-20
"""A number that keeps the sum of sigmoids above 0, as in DeepSeek's own code."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Equal groups of neighbouring experts (DeepSeek-V2, §2.2.2). A token chooses experts of the best groups only."""

    count: int
    """Number of groups."""
    kept: int
    """Number of groups that a token's experts may be in."""
    best: int
    """Number of a group's highest scores whose sum ranks the group, 1 or 2."""


ALL_EXPERTS = Groups(1, 1, 1)
"""One group, which every token may choose from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRule:
    """The rule by which a token chooses experts, and the function between an expert's two products."""

    top_k: int
    """Number of experts that a token chooses: those with the highest logits."""
    normalized: bool = True
    """Whether the shares of the chosen experts add up to 1.

    If not, they are shares of a softmax over all experts.
    """
    clamp: tuple[float, float] | None = None
    """The constants (alpha, limit) of the clamped gate (GPT-OSS), or None for activation(gate) * up.

    The clamped gate is gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within ± `limit`.
    """
    jitter: float | None = None
    """The tolerance of SparseMixer (arXiv 2409.12136, §2), or None for another rule.

    An expert's share is that of a softmax over those that are not chosen before it and whose logits are near its own:
    by at most 2 * jitter of the larger one of its own logit and their absolute values. `normalized` is False then.
    """
    scales_input: bool = False
    """Whether a chosen expert computes the token times the sigmoid of its logit, and has the share 1 (Llama 4).

    `normalized` is False then.
    """
    gated: bool = True
    """Whether an expert has a gate. Without one, it has relu² (Primer, arXiv 2109.08668, §4) between its products."""
    shared: bool = False
    """Whether one more expert, the last, computes every token, with the share 1. It has no row in the router.

    `normalized` is False then.
    """
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """The activation of a gate that is not clamped."""

    sigmoid: bool = False
    """Whether an expert's score is the sigmoid of its logit, in place of its share of a softmax (DeepSeek-V3, §2.1.2).

    The shares of the chosen experts are their scores, divided by their sum if `normalized`."""
    groups: Groups = ALL_EXPERTS
    """Groups of experts, and the number of them from which a token may choose."""
    factor: float = 1.0
    """The factor on all shares. It is 1 with `shared`."""

    @property
    def per_token(self) -> int:
        """Number of experts that compute a token."""
        return self.top_k + self.shared

    @property
    def matrices(self) -> int:
        """Number of matrices of one expert, all of the same size: gate if there is one, up and down."""
        return 2 + self.gated


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The E experts of one layer, or this device's part of each."""

    rule: ExpertRule
    router: torch.Tensor  # [E, hidden]; without the shared one [E - 1, hidden]
    gate_up: (
        ExpertWeights  # [E, 2 inner, hidden]: the rows of gate, then those of up; without a gate [E, inner, hidden]
    )
    down: ExpertWeights  # [E, hidden, inner]
    router_bias: torch.Tensor | None = None  # [E]
    gate_up_bias: torch.Tensor | None = None  # [E, 2 inner]
    down_bias: torch.Tensor | None = None  # [E, hidden]
    correction: torch.Tensor | None = None  # [E] float32
    """Numbers that are added to sigmoids to choose experts, but not to shares (DeepSeek-V3, §2.1.2)."""

    @property
    def nbytes(self) -> int:
        tensors = (self.router, self.gate_up, self.down, self.router_bias, self.gate_up_bias, self.down_bias)
        return sum(tensor.nbytes for tensor in (*tensors, self.correction) if tensor is not None)


def choose(x: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of tokens x [T, hidden], the best first, and their shares: [T, per_token] int64 and float32.

    With `scales_input`, the shares are the factors on the token.
    """
    rule, logits = experts.rule, router_logits(x, experts)
    ranked = choice_scores(logits, experts)
    chosen = torch.topk(ranked, rule.top_k, dim=-1).indices
    best = logits.gather(-1, chosen)
    if rule.sigmoid:
        shares = best.sigmoid()
        if rule.normalized:
            shares /= shares.sum(-1, keepdim=True) + TINY
    elif rule.jitter is not None:
        shares = mixer_shares(logits, chosen, rule.jitter).gather(-1, chosen[..., None])[..., 0]
    elif rule.scales_input:
        shares = best.sigmoid()
    elif rule.normalized:
        shares = best.softmax(-1)
    else:
        shares = (best - logits.logsumexp(-1, keepdim=True)).exp()
    if rule.factor != 1.0:
        shares *= rule.factor
    if not rule.shared:
        return chosen, shares
    return functional.pad(chosen, (0, 1), value=len(experts.router)), functional.pad(shares, (0, 1), value=1.0)


def choice_scores(logits: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The numbers [T, E] by which tokens with these router logits [T, E] rank experts.

    They are -inf for experts outside of a token's groups.
    """
    groups, scores = experts.rule.groups, logits
    if experts.rule.sigmoid:
        scores = scores.sigmoid()
    if experts.correction is not None:
        scores = scores + experts.correction
    if groups.count == groups.kept:
        return scores
    grouped = scores.view(len(scores), groups.count, scores.shape[1] // groups.count)
    of_groups = grouped.topk(groups.best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(of_groups, dtype=torch.bool)
    kept.scatter_(-1, of_groups.topk(groups.kept, dim=-1).indices, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


def router_logits(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The router's logits [T, E] of tokens x [T, hidden], in float32 or wider."""
    logits = functional.linear(x, experts.router, experts.router_bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def mixer_shares(logits: torch.Tensor, chosen: torch.Tensor, jitter: float) -> torch.Tensor:
    """For each chosen expert, the softmax [T, top_k, E] whose share it gets (see `ExpertRule.jitter`).

    logits [T, E]; chosen [T, top_k], the best first.
    """
    left, found = logits, []
    for rank in range(chosen.shape[1]):
        best = left.gather(1, chosen[:, rank : rank + 1])
        far = (best - left) / logits.abs().clamp(min=best) > 2 * jitter
        found.append(left.masked_fill(far, -torch.inf).softmax(-1))
        left = left.scatter(1, chosen[:, rank : rank + 1], -torch.inf)
    return torch.stack(found, dim=1)


def gated(gate_up: torch.Tensor, rule: ExpertRule) -> torch.Tensor:
    """The input of an expert's second product, [T, inner], from the result of its first one, [T, 2 inner].

    Without a gate, the result is [T, inner].
    """
    if not rule.gated:
        return functional.relu(gate_up).square()
    gate, up = gate_up.chunk(2, dim=-1)
    if rule.clamp is None:
        active = functional.silu(gate) if rule.activation == "silu" else functional.gelu(gate, approximate="tanh")
        return active.mul_(up)
    alpha, limit = rule.clamp
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(alpha * gate)).mul_(up.clamp(-limit, limit).add_(1))


def apply_experts(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The weighted sum [T, hidden] of the outputs of each token's experts for x [T, hidden].

    Tokens are sorted by expert, so each expert reads its weights once. Waits for the device, to know each expert's
    number of tokens.
    """
    rule = experts.rule
    chosen, shares = choose(x, experts)
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    counts = torch.bincount(pairs, minlength=experts.down.shape[0]).tolist()
    added = torch.zeros_like(x)
    for expert, own in enumerate(torch.split(order, counts)):
        if len(own):
            tokens, share = own // rule.per_token, shares.flatten()[own, None]
            read = (x[tokens] * share).to(x.dtype) if rule.scales_input else x[tokens]
            inner = gated(_linear(read, experts.gate_up, experts.gate_up_bias, expert), rule)
            out = _linear(inner, experts.down, experts.down_bias, expert)
            added.index_add_(0, tokens, (out if rule.scales_input else out * share).to(x.dtype))
    return added


def _linear(x: torch.Tensor, weights: ExpertWeights, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    return functional.linear(x, matrix_of(weights, expert, x.dtype), None if bias is None else bias[expert])
