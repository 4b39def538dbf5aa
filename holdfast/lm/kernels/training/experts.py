"""The backward pass of a layer's experts, in PyTorch. Their weights have no gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from holdfast.lm.kernels.linear.experts.experts import (
    ExpertRule,
    Experts,
    choose,
    gated,
    mixer_shares,
    router_logits,
)
from holdfast.lm.kernels.mxfp4 import matrix_of
from holdfast.lm.kernels.training.ops import wide


def experts_backward(
    back: torch.Tensor,
    x: torch.Tensor,
    experts: Experts,
    summed: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> torch.Tensor:
    """The gradient of x [T, hidden], from that of the result of `apply_experts`.

    It flows through the chosen experts and through their shares. Everything between is computed again from x. `summed`
    adds up tensors over the devices that have a part of each expert.
    """
    rule = experts.rule
    chosen, shares = choose(x, experts)
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    counts = torch.bincount(pairs, minlength=experts.down.shape[0]).tolist()
    gradient = torch.zeros_like(wide(x))
    back_shares = torch.zeros_like(shares).flatten()
    for expert, own in enumerate(torch.split(order, counts)):
        if not len(own):
            continue
        tokens, share = own // rule.per_token, shares.flatten()[own, None].to(x.dtype)
        gate_up_bias = None if experts.gate_up_bias is None else experts.gate_up_bias[expert]
        down_bias = None if experts.down_bias is None else experts.down_bias[expert]
        into, down = (matrix_of(each, expert, x.dtype) for each in (experts.gate_up, experts.down))
        given = x[tokens] * share if rule.scales_input else x[tokens]
        gate_up = functional.linear(given, into, gate_up_bias)
        back_out = back[tokens]
        back_inner = (back_out if rule.scales_input else back_out * share) @ down
        back_given = gated_backward(back_inner, gate_up, rule) @ into
        if rule.scales_input:
            back_shares[own] = (wide(back_given) * wide(x[tokens])).sum(-1)
            back_given = back_given * share
        else:
            # `gated` may write to gate_up, so the output is computed last.
            out = functional.linear(gated(gate_up, rule), down, down_bias)
            back_shares[own] = (wide(back_out) * wide(out)).sum(-1)
        gradient.index_add_(0, tokens, wide(back_given))
    back_shares = summed(back_shares.view_as(shares))
    routed = slice(0, rule.top_k)
    back_logits = _shares_backward(back_shares[:, routed], shares[:, routed], chosen[:, routed], x, experts)
    return summed(gradient.to(x.dtype)).add_(back_logits.to(x.dtype) @ experts.router)


def gated_backward(back: torch.Tensor, gate_up: torch.Tensor, rule: ExpertRule) -> torch.Tensor:
    """The gradient of gate_up [T, 2 inner], or [T, inner] without a gate, from that of the result of `gated`."""
    given = wide(back)
    if not rule.gated:
        return (2.0 * given * functional.relu(wide(gate_up))).to(gate_up.dtype)
    gate, up = wide(gate_up).chunk(2, dim=-1)
    if rule.clamp is None:
        sigmoid = torch.sigmoid(gate)
        activated = gate * sigmoid
        back_gate, back_up = given * up * (sigmoid + activated * (1.0 - sigmoid)), given * activated
    else:
        alpha, limit = rule.clamp
        low, middle = gate.clamp(max=limit), up.clamp(-limit, limit)
        sigmoid = torch.sigmoid(alpha * low)
        slope = sigmoid + alpha * low * sigmoid * (1.0 - sigmoid)
        back_gate = given * (middle + 1.0) * slope * (gate <= limit)
        back_up = given * low * sigmoid * (up.abs() <= limit)
    return torch.cat((back_gate, back_up), dim=-1).to(gate_up.dtype)


def _shares_backward(
    back: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, x: torch.Tensor, experts: Experts
) -> torch.Tensor:
    """The gradient of the router's logits [T, E], from that of the shares [T, top_k] of chosen experts."""
    rule, logits = experts.rule, router_logits(x, experts)
    product = shares * back
    if rule.jitter is not None:
        weights = mixer_shares(logits, chosen, rule.jitter)
        return (weights.mul_(-product[..., None]).sum(1)).scatter_add_(1, chosen, product)
    if rule.scales_input:
        return torch.zeros_like(logits).scatter_(1, chosen, product * (1.0 - shares))
    total = product.sum(-1, keepdim=True)
    if rule.normalized:
        return torch.zeros_like(logits).scatter_(1, chosen, product - shares * total)
    return logits.softmax(-1).mul_(-total).scatter_add_(1, chosen, product)
