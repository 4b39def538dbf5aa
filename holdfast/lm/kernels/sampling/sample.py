"""Sampling: choose the next token of every row on the device. A row's token depends only on its own request."""

from __future__ import annotations

import torch


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    any_random: bool,
    any_filtered: bool,
) -> torch.Tensor:
    """Choose one token for each row of logits [B, V]: [B] int64, without waiting for the device.

    A row of temperature 0 takes the token with the largest logit (the lowest id among equals). Any other row draws from
    softmax(logits / temperature), cut to its `top_k` most probable tokens (0 or less: no cut), then to the fewest of
    these whose probabilities reach `top_p` (1: no cut; one token always stays). Equal logits rank by token id, so
    exactly k tokens stay. Sums are float32. If the sum reaches `top_p` to within rounding, devices may disagree on
    whether the next token stays.

    The draw is the Gumbel-max trick, with noise hashed from (seed, position, token id). A row's token depends only on
    its own logits, seed and position, never on other rows or its place in the batch.

    temperature and top_p are float32, top_k is int32 or int64, seed and position are int64; all are [B] on the device
    of the logits. `any_random`: some row has a temperature above 0. `any_filtered`: one of those rows has top-k or
    top-p on. The host knows both, so work that no row needs is skipped.
    """
    if logits.device.type == "cuda":
        # Imported here because a CPU installation has no Triton.
        from holdfast.lm.kernels.sampling.sample_kernels import sample_rows

        if not any_random:
            return argmax(logits)
        return sample_rows(logits, temperature, top_k, top_p, seed, position, any_filtered=any_filtered)
    if not any_random:
        return argmax(logits)
    if not any_filtered:
        _, tokens = best_tokens(logits, temperature, seed, position, any_random=any_random)
        return tokens
    is_random = (temperature > 0)[:, None]
    heat = torch.where(is_random, temperature[:, None], 1.0)
    scores, order = _filtered(logits.float(), heat, top_k, top_p)
    scores = torch.where(is_random, scores + _gumbel(seed, position, order.to(torch.int32)), scores)
    # Two tokens with different logits may have one score. The lower id is drawn then, as without filters.
    return order.masked_fill(scores < scores.amax(-1, keepdim=True), logits.shape[-1]).amin(-1)


def best_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    any_random: bool,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest score of each row [B] float32, and its token [B] int64: the token of `sample` without filters.

    logits [B, V] may be a part of the vocabulary, from the token `first` on. The token of the whole row is then that of
    the part with the best score, the lowest token among equals. The remaining arguments are those of `sample`.
    """
    if logits.device.type == "cuda":
        from holdfast.lm.kernels.sampling.sample_kernels import best_drawn  # a CPU installation has no Triton

        return best_drawn(logits, temperature, seed, position, any_random=any_random, first=first)
    if any_random:
        is_random = (temperature > 0)[:, None]
        tokens = torch.arange(first, first + logits.shape[-1], dtype=torch.int32, device=logits.device)[None, :]
        scores = logits.float() / torch.where(is_random, temperature[:, None], 1.0)
        scores = torch.where(is_random, scores + _gumbel(seed, position, tokens), scores)
    else:
        scores = logits
    best = argmax(scores)
    return scores.gather(1, best[:, None])[:, 0].float(), best + first


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The index [B] of the largest number in each row of logits [B, V], without waiting for the device."""
    if logits.device.type == "cuda":
        from holdfast.lm.kernels.sampling import sample_kernels  # a CPU installation has no Triton

        return sample_kernels.argmax(logits)
    # On a CPU, NumPy's argmax is vectorised and PyTorch's is not.
    if logits.dtype == torch.float32 and logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _filtered(
    logits: torch.Tensor, heat: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in descending order, -inf where top-k or top-p cuts, and the token ids in that order."""
    vocab = logits.shape[-1]
    logits, order = logits.sort(dim=-1, descending=True, stable=True)
    scores = logits / heat
    rank = torch.arange(vocab)[None, :]
    scores = scores.masked_fill(rank >= torch.where(top_k > 0, top_k, vocab)[:, None], -torch.inf)
    share = scores.softmax(-1)
    before = share.cumsum(-1) - share  # the total share of the tokens that rank before this one
    cut = (before >= top_p[:, None]) & (top_p < 1)[:, None] & (rank > 0)
    return scores.masked_fill(cut, -torch.inf), order


def _gumbel(seed: torch.Tensor, position: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Gumbel noise [B, V] for token ids [B or 1, V] of int32, from a 64-bit key of (seed, position) for each row."""
    row_key = _mix64(_mix64(seed) + position)
    low, high = row_key.view(torch.int32).view(-1, 2).unbind(1)
    # Two rounds of MurmurHash3's 32-bit finalizer over the token id, each with its own half of the row's key.
    bits = tokens ^ low[:, None]
    bits = _mix32(bits) + high[:, None]
    bits = _mix32(bits)
    # Uniform in (0, 1). A token wins when -log(1 - u) is small, so u near 0 needs the fine steps of float32.
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(bits: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finalizer on int32; products wrap around."""
    bits = (bits ^ _shift_right(bits, 16)) * -0x7A143595
    bits = (bits ^ _shift_right(bits, 13)) * -0x3D4D51CB
    return bits ^ _shift_right(bits, 16)


def _mix64(bits: torch.Tensor) -> torch.Tensor:
    """SplitMix64's step on int64; products wrap around."""
    bits = bits + -0x61C8864680B583EB
    bits = (bits ^ _shift_right(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shift_right(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Logical right shift; torch's own shift keeps the sign."""
    return (bits >> places) & ((1 << (bits.element_size() * 8 - places)) - 1)
