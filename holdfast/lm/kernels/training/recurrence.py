"""Recurrent layers for training: whole sequences from a state of zeros, in operations that autograd can follow.

Sequences are cut into chunks. Products that need no state are computed for all chunks together. Then one chunk of each
sequence follows the other, a few small products at a time, so that a GPU's host launches little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.recurrent.protocol import Activation, Recurrence
from holdfast.lm.kernels.recurrent.torch_recurrence import LEAST_LOG_DECAY, grouped, normalized
from holdfast.lm.kernels.training.attention import sent

WIDTHS = (8, 16, 32, 64)
"""Numbers of tokens that chunks are padded to. The smallest that holds the longest sequence is taken, or the last."""
PIECE_BYTES = 1 << 28
"""Heads are computed in pieces whose tensors take about this many bytes, so that long batches take no more memory."""
TENSORS = 8
"""Number of float32 tensors of the size of all keys and values that the computation of a piece holds."""


@dataclass(frozen=True)
class Chunks:
    """The chunks of S sequences of T tokens together: N chunks of C tokens, the first ones of all sequences first.

    The chunks of one round come in the order of their sequences' numbers of chunks, the longest first. So the chunks of
    a round are those of the first sequences of the round before.
    """

    tokens: torch.Tensor  # [N, C] the batch's token at each place; padding repeats the chunk's last token
    real: torch.Tensor  # [N, C]: False for padding, which only a sequence's last chunk has
    rounds: tuple[int, ...]
    """Number of chunks in each round."""
    position: torch.Tensor  # [T] position of each token in its sequence

    def of(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers [T, heads, D] of the chunks' tokens, as [N, heads, C, D] in float32."""
        return numbers[self.tokens].float().transpose(1, 2)

    def of_heads(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers [T, heads] of the chunks' tokens, as [N, heads, C] in float32."""
        return numbers[self.tokens].float().transpose(1, 2)

    def put(self, found: torch.Tensor) -> torch.Tensor:
        """Results [N, heads, C, D] by token, [T, heads, D]."""
        count = len(self.position)
        place = torch.where(self.real, self.tokens, count).flatten()  # padding goes to a row that is dropped
        out = found.new_zeros(count + 1, found.shape[1], found.shape[3])
        return out.index_copy(0, place, found.transpose(1, 2).flatten(0, 1))[:count]


class TrainingRecurrence(Recurrence[Chunks]):
    """`Recurrence` of whole sequences, each from a state of zeros, on any device.

    It writes to no tensor in place. No state is read or written: those that its methods are given need no slots.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make_metadata(self, segments: Segments) -> Chunks:
        lengths, starts = segments.query_length.astype(np.int64), segments.query_start[:-1].astype(np.int64)
        width = next((width for width in WIDTHS if width >= lengths.max()), WIDTHS[-1])
        order = np.argsort(-lengths, kind="stable")
        counts = -(-lengths[order] // width)
        rounds = [int((counts > number).sum()) for number in range(counts[0])]
        sequence = np.concatenate([order[:count] for count in rounds])
        first = np.repeat(np.arange(len(rounds)), rounds) * width
        offset = first[:, None] + np.arange(width)
        most = lengths[sequence, None]
        tokens = starts[sequence, None] + np.minimum(offset, most - 1)
        position = np.arange(segments.num_tokens) - np.repeat(starts, lengths)
        real = torch.from_numpy(offset < most)
        return Chunks(
            sent(torch.from_numpy(tokens), self.device),
            sent(real, self.device),
            tuple(rounds),
            sent(torch.from_numpy(position), self.device),
        )

    def keep(self, inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], metadata: Chunks) -> None:
        """Keep nothing: training verifies no drafts."""

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: Chunks,
        *,
        activation: Activation | None,
    ) -> torch.Tensor:
        columns, inputs = weight.float().t(), x.float()
        sums = inputs * columns[-1]
        for back in range(1, len(columns)):
            earlier = functional.pad(inputs, (0, 0, back, 0))[: len(inputs)]
            known = (metadata.position >= back)[:, None]
            sums = sums + earlier.masked_fill(~known, 0.0) * columns[-1 - back]
        if bias is not None:
            sums = sums + bias.float()
        return (functional.silu(sums) if activation == "silu" else sums).to(x.dtype)

    def gated_delta(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        metadata: Chunks,
        *,
        scale: float,
        normalize: bool,
    ) -> torch.Tensor:
        def compute(*inputs: torch.Tensor) -> torch.Tensor:
            q, k, v = map(metadata.of, inputs[:3])
            if normalize:
                q, k = normalized(q), normalized(k)
            decay, rate = map(metadata.of_heads, inputs[3:])
            return metadata.put(delta_rule(q * scale, k, v, decay, rate[..., None], metadata.rounds))

        return in_pieces(compute, (query, key), (value, log_decay, beta), metadata).to(value.dtype)

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        decay: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        skip: torch.Tensor | None,
        state: torch.Tensor,
        metadata: Chunks,
    ) -> torch.Tensor:
        def compute(*inputs: torch.Tensor) -> torch.Tensor:
            read, write, given = map(metadata.of, inputs[:3])
            time, log_decay = map(metadata.of_heads, inputs[3:])
            return metadata.put(decayed_sums(read, write, given * time[..., None], log_decay, metadata.rounds))

        found = in_pieces(compute, (c, b), (x, dt, dt * decay), metadata)
        if skip is not None:
            found = found + x.float() * skip.float()[:, None]
        return found.to(x.dtype)


def in_pieces(
    compute: Callable[..., torch.Tensor],
    shared: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, ...],
    chunks: Chunks,
) -> torch.Tensor:
    """The results [T, H, D] of `compute` for all H heads, some of them at a time.

    `shared` are [T, G, D], a group for H / G heads each, and `own` are [T, H, ...]. Where gradients are wanted and
    there are several pieces, the backward computes each piece again (Chen et al., 2016, §3), so that it holds the
    tensors of one.
    """
    groups, heads = shared[0].shape[1], own[0].shape[1]
    many, width = heads // groups, chunks.tokens.shape[1]
    numbers = TENSORS * (shared[0].shape[2] + own[0].shape[2]) + 4 * width
    size = max(1, PIECE_BYTES // (4 * chunks.tokens.numel() * numbers * many))
    found = []
    for first in range(0, groups, size):
        of_groups, of_heads = slice(first, first + size), slice(first * many, (first + size) * many)
        inputs = [each[:, of_groups] for each in shared] + [each[:, of_heads] for each in own]
        if size < groups and torch.is_grad_enabled():
            found.append(checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            found.append(compute(*inputs))
    return torch.cat(found, dim=1)


@dataclass(frozen=True)
class Decays:
    """Decay factors within chunks of C tokens. None is above 1."""

    since: torch.Tensor  # [N, H, C, 1] from before the chunk to each token
    between: torch.Tensor  # [N, H, C, C] from each token j to each token i >= j; 0 for earlier ones

    @property
    def until(self) -> torch.Tensor:
        """The factor from each token to the end of its chunk, [N, H, C, 1]."""
        return self.between[..., -1, :, None]

    @property
    def whole(self) -> torch.Tensor:
        """The factor of the whole chunk, [N, H, 1, 1]."""
        return self.since[:, :, -1:]


def decays_of(log_decay: torch.Tensor) -> Decays:
    """The decay factors of chunks with log_decay [N, H, C]. Sums are in float64, as in `torch_recurrence.decays`."""
    sums = log_decay.double().clamp(min=LEAST_LOG_DECAY).cumsum(-1)
    between = (sums[..., :, None] - sums[..., None, :]).float()
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).triu(1)
    return Decays(sums.float().exp()[..., None], between.masked_fill(later, -torch.inf).exp())


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    rounds: tuple[int, ...],
) -> torch.Tensor:
    """The gated delta rule over chunks (Yang et al., 2024, Gated Delta Networks, §3.3), as [N, Hv, C, Dv].

    query and key are [N, Hk, C, Dk], value [N, Hv, C, Dv], log_decay [N, Hv, C], beta [N, Hv, C, 1]. A chunk's writes
    solve a unit lower triangular system, and are linear in the state before the chunk: they are `alone` - `read` state.
    """
    heads, factors = value.shape[1], decays_of(log_decay)
    keys, width = grouped(key, heads), value.shape[-1]
    system = beta * grouped(key @ key.transpose(2, 3), heads) * factors.between
    right = beta * torch.cat((value, factors.since * keys), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    alone, read = solved[..., :width], solved[..., width:]
    adding = (factors.until * keys).transpose(2, 3)
    states, written = list[torch.Tensor](), list[torch.Tensor]()
    state = value.new_zeros(rounds[0], heads, key.shape[-1], width)
    at = 0
    for count in rounds:
        part, at = slice(at, at + count), at + count
        state = state[:count]
        states.append(state)
        written.append(alone[part] - read[part] @ state)
        state = state * factors.whole[part] + adding[part] @ written[-1]
    return results(query, key, torch.cat(written), torch.cat(states), factors)


def decayed_sums(
    query: torch.Tensor, key: torch.Tensor, written: torch.Tensor, log_decay: torch.Tensor, rounds: tuple[int, ...]
) -> torch.Tensor:
    """Decayed sums of key written^T, read by query, over chunks (Dao and Gu, 2024, §6), as [N, H, C, D].

    Shapes are those of `delta_rule`.
    """
    heads, factors = written.shape[1], decays_of(log_decay)
    added = grouped(key, heads).transpose(2, 3) @ (factors.until * written)
    states, state, at = list[torch.Tensor](), torch.zeros_like(added[: rounds[0]]), 0
    for count in rounds:
        part, at = slice(at, at + count), at + count
        state = state[:count]
        states.append(state)
        state = state * factors.whole[part] + added[part]
    return results(query, key, written, torch.cat(states), factors)


def results(
    query: torch.Tensor, key: torch.Tensor, written: torch.Tensor, states: torch.Tensor, factors: Decays
) -> torch.Tensor:
    """The results of queries, read from the states before their chunks and from the chunks' writes: [N, H, C, D]."""
    heads = written.shape[1]
    weights = grouped(query @ key.transpose(2, 3), heads) * factors.between
    return factors.since * (grouped(query, heads) @ states) + weights @ written
