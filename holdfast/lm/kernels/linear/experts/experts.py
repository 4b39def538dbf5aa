"""The experts of a layer: their tensors, the rule by which tokens choose them, and the computation in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from holdfast.lm.kernels.mxfp4 import ExpertWeights, matrix_of


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
    """The constants (alpha, limit) of the clamped gate (GPT-OSS), or None for silu(gate) * up.

    The clamped gate is gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within ± `limit`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The E experts of one layer, or this device's part of each."""

    rule: ExpertRule
    router: torch.Tensor  # [E, hidden]
    gate_up: ExpertWeights  # [E, 2 inner, hidden]: the rows of gate, then those of up
    down: ExpertWeights  # [E, hidden, inner]
    router_bias: torch.Tensor | None = None  # [E]
    gate_up_bias: torch.Tensor | None = None  # [E, 2 inner]
    down_bias: torch.Tensor | None = None  # [E, hidden]

    @property
    def nbytes(self) -> int:
        tensors = (self.router, self.gate_up, self.down, self.router_bias, self.gate_up_bias, self.down_bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def choose(x: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of tokens x [T, hidden], the best first, and their shares: [T, top_k] int64 and float32."""
    logits = functional.linear(x, experts.router, experts.router_bias)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    best, chosen = torch.topk(wide, experts.rule.top_k, dim=-1)
    if experts.rule.normalized:
        return chosen, best.softmax(-1)
    return chosen, (best - wide.logsumexp(-1, keepdim=True)).exp()


def gated(gate_up: torch.Tensor, rule: ExpertRule) -> torch.Tensor:
    """The input of an expert's second product, [T, inner], from the result of its first one, [T, 2 inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if rule.clamp is None:
        return functional.silu(gate).mul_(up)
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
    counts = torch.bincount(pairs, minlength=len(experts.router)).tolist()
    added = torch.zeros_like(x)
    for expert, own in enumerate(torch.split(order, counts)):
        if len(own):
            tokens = own // rule.top_k
            inner = gated(_linear(x[tokens], experts.gate_up, experts.gate_up_bias, expert), rule)
            out = _linear(inner, experts.down, experts.down_bias, expert)
            added.index_add_(0, tokens, (out * shares.flatten()[own, None]).to(x.dtype))
    return added


def _linear(x: torch.Tensor, weights: ExpertWeights, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    return functional.linear(x, matrix_of(weights, expert, x.dtype), None if bias is None else bias[expert])
