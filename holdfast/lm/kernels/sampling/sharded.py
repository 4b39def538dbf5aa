"""Sampling where each device of a group has the logits of its own part of the vocabulary. All get the same tokens."""

from __future__ import annotations

import torch

from holdfast.lm.kernels.collectives.protocol import Group, own_rows
from holdfast.lm.kernels.sampling.sample import best_tokens, sample


def sample_sharded(
    logits: torch.Tensor,
    group: Group,
    vocab_size: int,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    any_random: bool,
    any_filtered: bool,
) -> torch.Tensor:
    """`sample` for logits [B, V_own] of this device's tokens, as in `Group.exchange_rows`: the same [B] everywhere.

    Without filters a row's token is the best of the devices' best ones. Top-k and top-p need whole rows, so in a step
    in which any row has one, each device takes a share of the rows, whole.
    """
    count, size = len(logits), group.size
    if not any_filtered:
        first = group.rank * -(-vocab_size // size)
        return group.best(*best_tokens(logits, temperature, seed, position, any_random=any_random, first=first))
    rows = own_rows(count, size, group.rank)
    own = slice(rows.start, rows.stop)
    tokens = torch.zeros(-(-count // size), dtype=torch.int64, device=logits.device)
    tokens[: len(rows)] = sample(
        group.exchange_rows(logits, vocab_size),
        temperature[own],
        top_k[own],
        top_p[own],
        seed[own],
        position[own],
        any_random=any_random,
        any_filtered=any_filtered,
    )
    return group.gather(tokens).flatten()[:count]
