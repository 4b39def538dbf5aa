"""Causal attention over packed sequences, forward and backward, for training: FlashAttention on CUDA, else PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from holdfast.lm.kernels.training.ops import wide

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host, on a device, without waiting for earlier work of the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class Packing:
    """The layout of sequences among T packed tokens."""

    lengths: tuple[int, ...]
    starts: torch.Tensor
    """The index of each sequence's first token, and T, [S + 1] int32, on the device."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Packing:
        return cls(lengths, sent(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device))

    @property
    def longest(self) -> int:
        return max(self.lengths)


class PackedAttention(ABC):
    """Attention of each token over the tokens of its own sequence up to itself, at most `window` of them.

    query [T, H, D], key and value [T, Hkv, D], H a multiple of Hkv. Scores are query · key * scale.
    """

    @abstractmethod
    def forward(
        self, qkv: QKV, packing: Packing, scale: float, window: int | None, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [T, H, D] and the logarithm of each softmax's sum [H, T] float32.

        `sinks` [H] is a further logit of each head without a value.
        """

    @abstractmethod
    def backward(
        self,
        gradient: torch.Tensor,
        qkv: QKV,
        out: torch.Tensor,
        log_sums: torch.Tensor,
        packing: Packing,
        scale: float,
        window: int | None,
    ) -> QKV:
        """The gradients of query, key and value, from the gradient of the output and from the results of `forward`."""


def packed_attention_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, softcap: float | None = None, sinks: bool = False
) -> PackedAttention:
    """The backend for tensors of this dtype on this device. PyTorch's FlashAttention has neither caps nor sinks."""
    plain = softcap is None and not sinks
    if (
        plain
        and device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim <= 256
        and head_dim % 8 == 0
    ):
        return FlashPackedAttention()
    return TorchPackedAttention(softcap)


class FlashPackedAttention(PackedAttention):
    """PyTorch's FlashAttention-2 (Dao, 2023), for CUDA in 16 bits.

    With `deterministic`, the backward adds a query's gradient in a fixed order, so that runs give equal bits.
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def forward(
        self, qkv: QKV, packing: Packing, scale: float, window: int | None, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert sinks is None
        starts, longest = packing.starts, packing.longest
        out, log_sums, *_ = torch.ops.aten._flash_attention_forward(
            *qkv, starts, starts, longest, longest, 0.0, True, False, scale=scale, **_window_sides(window)
        )
        return out, log_sums

    def backward(
        self,
        gradient: torch.Tensor,
        qkv: QKV,
        out: torch.Tensor,
        log_sums: torch.Tensor,
        packing: Packing,
        scale: float,
        window: int | None,
    ) -> QKV:
        starts, longest = packing.starts, packing.longest
        # Without dropout no random state is read.
        no_state = torch.empty(2, dtype=torch.uint64, device=gradient.device)
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(self.deterministic or before)
        try:
            query, key, value = torch.ops.aten._flash_attention_backward(
                gradient, *qkv, out, log_sums, starts, starts, longest, longest, 0.0, True, no_state,
                torch.empty(0, dtype=torch.uint64, device=gradient.device), scale=scale, **_window_sides(window),
            )  # fmt: skip
        finally:
            torch.use_deterministic_algorithms(before)
        return query, key, value


def _window_sides(window: int | None) -> dict[str, int]:
    """The numbers of keys before and after its own that a query sees."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


class TorchPackedAttention(PackedAttention):
    """The formulas in PyTorch, one sequence and one key-value head at a time. Any float dtype, on any device."""

    def __init__(self, softcap: float | None = None) -> None:
        """`softcap` is the cap on scores: a score becomes cap * tanh(score / cap)."""
        self._softcap = softcap

    def forward(
        self, qkv: QKV, packing: Packing, scale: float, window: int | None, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, _, value = qkv
        tokens, heads, _ = query.shape
        out = query.new_empty(tokens, heads, value.shape[-1])
        log_sums = torch.empty(heads, tokens, dtype=wide(query[:0]).dtype, device=query.device)
        for rows, head, group, scores in self._scores(qkv, packing, scale, window):
            sums = torch.logsumexp(scores, dim=-1)
            if sinks is not None:
                sums = torch.logaddexp(sums, wide(sinks[group])[:, None])
            log_sums[group, rows] = sums
            weights = (scores - sums[..., None]).exp_()
            out[rows, group] = (weights @ wide(value[rows, head])).transpose(0, 1).to(out.dtype)
        return out, log_sums

    def backward(
        self,
        gradient: torch.Tensor,
        qkv: QKV,
        out: torch.Tensor,
        log_sums: torch.Tensor,
        packing: Packing,
        scale: float,
        window: int | None,
    ) -> QKV:
        query, key, value = qkv
        back_query, back_key, back_value = (torch.empty_like(part) for part in qkv)
        for rows, head, group, scores in self._scores(qkv, packing, scale, window):
            weights = (scores - log_sums[group, rows][..., None]).exp_()
            if self._softcap is not None:  # the slope of the cap; hidden scores have weight 0 anyway
                slope = 1.0 - (scores.clamp_(min=-self._softcap) / self._softcap).square_()
            back = wide(gradient[rows, group]).transpose(0, 1)  # [H / Hkv, n, D]
            back_value[rows, head] = (weights.transpose(-1, -2) @ back).sum(0).to(value.dtype)
            # The gradient of a softmax: each row's gradient minus its mean under the weights, which is gradient ·
            # output.
            mean = (back * wide(out[rows, group]).transpose(0, 1)).sum(-1, keepdim=True)
            back_scores = weights.mul_(back @ wide(value[rows, head]).T - mean).mul_(scale)
            if self._softcap is not None:
                back_scores.mul_(slope)
            back_query[rows, group] = (back_scores @ wide(key[rows, head])).transpose(0, 1).to(query.dtype)
            rotated = wide(query[rows, group]).transpose(0, 1)
            back_key[rows, head] = (back_scores.transpose(-1, -2) @ rotated).sum(0).to(key.dtype)
        return back_query, back_key, back_value

    def _scores(
        self, qkv: QKV, packing: Packing, scale: float, window: int | None
    ) -> Iterator[tuple[slice, int, slice, torch.Tensor]]:
        """For each sequence and KV head: its tokens, the head, its query heads, and their scores [H / Hkv, n, n]."""
        query, key, _ = qkv
        shared = query.shape[1] // key.shape[1]
        for start, stop in pairwise((0, *accumulate(packing.lengths))):
            rows, length = slice(start, stop), stop - start
            seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
            if window is not None:
                seen = seen.triu_(1 - window)
            hidden = ~seen
            for head in range(key.shape[1]):
                group = slice(head * shared, (head + 1) * shared)
                scores = wide(query[rows, group]).transpose(0, 1) @ wide(key[rows, head]).T
                scores.mul_(scale)
                if self._softcap is not None:
                    scores.div_(self._softcap).tanh_().mul_(self._softcap)
                yield rows, head, group, scores.masked_fill_(hidden, float("-inf"))
