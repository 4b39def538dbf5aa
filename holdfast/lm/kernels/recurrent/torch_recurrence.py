"""Recurrent layers in plain PyTorch: chunks of several segments at a time, as batched products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.recurrent.protocol import MOST_KEPT, NORM_EPS, Activation, Recurrence

WIDTHS = (1, 16, 64)
"""Tokens that a chunk is padded to. Longer segments are cut into chunks of the last width."""
PIECE_BYTES = 1 << 22
"""States are copied out of their slots for as many segments at a time as fit in the cache of a CPU."""
CONVOLVED_BYTES = 1 << 19
"""Sums of a convolution are computed for as many tokens at a time as fit in the cache of one core."""
LEAST_LOG_DECAY = -1000.0
"""Float32's exp is 0 here already. Lower numbers are raised to this one, so that sums of them stay accurate."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Round:
    """Chunks of B segments that are computed together: at most one chunk of each, padded to one width."""

    tokens: torch.Tensor  # [B, width] tokens of the batch; padding repeats the chunk's last token
    real: torch.Tensor | None  # [B, width, 1]: False for padding; None if there is none
    slots: torch.Tensor  # [B]

    @property
    def width(self) -> int:
        """Tokens of a chunk, padding included."""
        return self.tokens.shape[1]

    def pieces(self, slot_bytes: int) -> Iterator[Round]:
        """The chunks in pieces, each of as many chunks as have states of PIECE_BYTES."""
        return self.parts(max(1, PIECE_BYTES // slot_bytes))

    def parts(self, size: int) -> Iterator[Round]:
        """The chunks in pieces of at most `size` chunks."""
        for first in range(0, len(self.slots), size):
            part = slice(first, first + size)
            yield Round(self.tokens[part], None if self.real is None else self.real[part], self.slots[part])

    def without_padding(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers [B, width, heads] of tokens, where those of padding become 0."""
        return numbers if self.real is None else numbers.masked_fill(~self.real, 0)

    def put(self, out: torch.Tensor, found: torch.Tensor) -> None:
        """Write the results [B, heads, width, D] of chunks to their tokens in out [T, heads, D]."""
        tokens, rows = self.tokens, found.transpose(1, 2)
        if self.real is None:
            out.index_copy_(0, tokens.reshape(-1), rows.flatten(0, 1).to(out.dtype))
        else:
            real = self.real[..., 0]
            out.index_copy_(0, tokens[real], rows[real].to(out.dtype))


@dataclass(frozen=True)
class RoundMetadata:
    """The rounds of one step, in order, and where its S segments lie in the batch of T tokens."""

    rounds: tuple[Round, ...]
    segment: torch.Tensor  # [T] segment of each token
    start: torch.Tensor  # [S] first token of each segment
    stop: torch.Tensor  # [S] token after each segment's last
    slots: torch.Tensor  # [S]
    moving: torch.Tensor  # [M] segments that leave a new state: those that verify no draft
    unmoved: torch.Tensor  # [S - M] slots of the other segments
    kept: torch.Tensor  # [K] tokens with a place
    places: torch.Tensor  # [K] places of these tokens


class TorchRecurrence(Recurrence[RoundMetadata]):
    """`Recurrence` on any device, without a Python loop over tokens. This is the backend of a CPU.

    Segments are cut into chunks. A round computes one chunk of several segments as batched products; the chunks of one
    segment follow each other. A segment that is cut at a multiple of the longest chunk and continued by a later step
    gives the same bits as a whole one.
    """

    def __init__(self, device: torch.device, *, one_by_one: bool = False) -> None:
        """`one_by_one`: each token is computed by itself, so that its bits do not depend on where segments end."""
        self.device, self._one_by_one = device, one_by_one

    def make_metadata(self, segments: Segments) -> RoundMetadata:
        lengths, start = segments.query_length.astype(np.int64), segments.query_start[:-1].astype(np.int64)
        slots, verifies = segments.row.astype(np.int64), segments.verifies
        places = np.zeros(0, np.int64) if segments.places is None else segments.places.astype(np.int64)
        return RoundMetadata(
            rounds=tuple(self._rounds(start, lengths, slots)),
            segment=self._upload(np.repeat(np.arange(len(lengths)), lengths)),
            start=self._upload(start),
            stop=self._upload(start + lengths),
            slots=self._upload(slots),
            moving=self._upload(np.flatnonzero(~verifies)),
            unmoved=self._upload(slots[verifies]),
            kept=self._upload(np.flatnonzero(places >= 0)),
            places=self._upload(places[places >= 0]),
        )

    def keep(self, inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], metadata: RoundMetadata) -> None:
        if len(inputs) > MOST_KEPT:
            raise ValueError(f"{len(inputs)} inputs of a recurrent layer are to be kept; at most {MOST_KEPT} can be")
        if len(metadata.kept):
            for numbers, places in zip(inputs, kept, strict=True):
                places.index_copy_(0, metadata.places, numbers.index_select(0, metadata.kept))

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: RoundMetadata,
        *,
        activation: Activation | None,
    ) -> torch.Tensor:
        tokens, segments, kept = len(metadata.segment), len(metadata.slots), state.shape[2]
        # The inputs of all segments, one after the other, and before each segment the inputs in its state.
        inputs = torch.empty(tokens + segments * kept, x.shape[1], dtype=torch.float32, device=x.device)
        place = torch.arange(tokens, device=x.device) + metadata.segment * kept
        before = (torch.arange(segments, device=x.device) * kept)[:, None] + torch.arange(kept, device=x.device)
        inputs[place + kept] = x[:tokens].float()
        inputs[metadata.start[:, None] + before] = state[metadata.slots].transpose(1, 2).float()
        moving = metadata.moving
        newest = metadata.stop[moving, None] + before[moving]
        state[metadata.slots[moving]] = inputs[newest].transpose(1, 2).to(state.dtype)

        columns = weight.float().t().contiguous()
        added = None if bias is None else bias.float()
        out = x.new_empty(x.shape)
        rows = 1 if self._one_by_one else max(1, CONVOLVED_BYTES // (4 * x.shape[1]))
        for first in range(0, tokens, rows):
            oldest = place[first : first + rows]
            sums = inputs.index_select(0, oldest).mul_(columns[0])
            for offset in range(1, kept + 1):
                sums.addcmul_(inputs.index_select(0, oldest + offset), columns[offset])
            if added is not None:
                sums += added
            if activation == "silu":
                torch.nn.functional.silu(sums, inplace=True)
            out[first : first + len(oldest)] = sums
        return out

    def gated_delta(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        metadata: RoundMetadata,
        *,
        scale: float,
        normalize: bool,
    ) -> torch.Tensor:
        def compute(chunk: Round, held: torch.Tensor) -> torch.Tensor:
            q, k = (chunk_heads(numbers, chunk) for numbers in (query, key))
            if normalize:
                q, k = normalized(q), normalized(k)
            v = chunk_heads(value, chunk)
            decay = chunk.without_padding(log_decay[chunk.tokens]).transpose(1, 2)
            rate = chunk.without_padding(beta[chunk.tokens].float()).transpose(1, 2)[..., None]
            step = delta_step if chunk.width == 1 else delta_chunk
            return step(q * scale, k, v, decay, rate, held)

        return recur(metadata, state, value, compute)

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        decay: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        skip: torch.Tensor | None,
        state: torch.Tensor,
        metadata: RoundMetadata,
    ) -> torch.Tensor:
        def compute(chunk: Round, held: torch.Tensor) -> torch.Tensor:
            time = chunk.without_padding(dt[chunk.tokens])
            inputs = chunk_heads(x, chunk)
            rates = decay if decay.dim() == 1 else chunk.without_padding(decay[chunk.tokens])
            found = scan_chunk(
                chunk_heads(c, chunk),
                chunk_heads(b, chunk),
                inputs * time.transpose(1, 2)[..., None],
                (time * rates).transpose(1, 2),
                held.transpose(2, 3),
            )
            return found if skip is None else found + inputs * skip.float()[:, None, None]

        return recur(metadata, state, x, compute)

    def _rounds(self, start: Ints, lengths: Ints, slots: Ints) -> Iterator[Round]:
        """The chunks of the segments, in rounds: those with one number within their segments and one width."""
        longest = 1 if self._one_by_one else WIDTHS[-1]
        chunks = -(-lengths // longest)
        segment = np.repeat(np.arange(len(lengths)), chunks)
        number = np.arange(len(segment)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        count = np.minimum(longest, lengths[segment] - number * longest)
        width = np.array(WIDTHS)[np.searchsorted(WIDTHS, count)]
        first = start[segment] + number * longest
        kinds, kind = np.unique(np.stack([number, width], 1), axis=0, return_inverse=True)
        for index, (_, padded) in enumerate(kinds.tolist()):
            chosen = np.flatnonzero(kind.reshape(-1) == index)
            offset, most = np.arange(padded)[None, :], count[chosen, None]
            tokens = first[chosen, None] + np.minimum(offset, most - 1)
            real = None if (most == padded).all() else self._upload((offset < most)[..., None])
            whole = Round(self._upload(tokens), real, self._upload(slots[segment[chosen]]))
            yield from whole.parts(1) if self._one_by_one else (whole,)

    def _upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def recur(
    metadata: RoundMetadata,
    state: torch.Tensor,
    like: torch.Tensor,
    compute: Callable[[Round, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run the rounds over copies of their states, write these back, and return results shaped as `like` [T, H, D].

    `compute` takes a round and its states [B, H, ., .], which it updates. It returns results [B, H, width, D].
    The states of segments that verify drafts are put back at the end.
    """
    out = like.new_empty(like.shape)
    before = state.index_select(0, metadata.unmoved)
    slot_bytes = state[0].numel() * state.element_size()
    for chunks in metadata.rounds:
        for piece in chunks.pieces(slot_bytes):
            held = state.index_select(0, piece.slots)
            piece.put(out, compute(piece, held))
            state.index_copy_(0, piece.slots, held)
    if len(before):
        state.index_copy_(0, metadata.unmoved, before)
    return out


def chunk_heads(numbers: torch.Tensor, chunk: Round) -> torch.Tensor:
    """The numbers [T, heads, D] of the chunk's tokens, as [B, heads, width, D] in float32."""
    return numbers[chunk.tokens].float().transpose(1, 2)


def normalized(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors [..., D], each divided by the root of its sum of squares plus NORM_EPS."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + NORM_EPS)


def grouped(numbers: torch.Tensor, heads: int) -> torch.Tensor:
    """Numbers [B, groups, ...] of groups as numbers of the `heads` that share them, [B, heads, ...]."""
    return numbers.repeat_interleave(heads // numbers.shape[1], 1)


def delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token of the gated delta rule for each of B segments, as `delta_chunk` with C = 1.

    The state is read once for key and query: query^T (state + key u^T) is query^T state + (query · key) u.
    """
    heads = value.shape[1]
    state *= log_decay.exp()[..., None]
    read = grouped(torch.cat([key, query], 2), heads) @ state
    written = beta * (value - read[:, :, :1])
    add_products(state, grouped(key, heads).transpose(2, 3), written)
    return read[:, :, 1:] + grouped((query * key).sum(-1, keepdim=True), heads) * written


def delta_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """C tokens of the gated delta rule for each of B segments (Yang et al., 2024, Gated Delta Networks, §3.3).

    query and key are [B, Hk, C, Dk], value [B, Hv, C, Dv], log_decay [B, Hv, C], beta [B, Hv, C, 1]. The result is
    [B, Hv, C, Dv]. state [B, Hv, Dk, Dv] is updated. Each token writes beta * (value - held) for its key, where `held`
    is read from the state and from the writes of the chunk's earlier tokens: a unit lower triangular system.
    """
    heads = value.shape[1]
    since, between, until = decays(log_decay)
    held = grouped(key, heads) @ state
    within = grouped(key @ key.transpose(2, 3), heads) * between
    written = torch.linalg.solve_triangular(
        beta * within, beta * (value - since * held), upper=False, unitriangular=True
    )
    return read_and_write(query, key, written, since, between, until, state)


def scan_chunk(
    query: torch.Tensor, key: torch.Tensor, written: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """C tokens of decayed sums of key written^T, read by query, for each of B segments (Dao and Gu, 2024, §6).

    Shapes are those of `delta_chunk`, and `written` is [B, Hv, C, Dv]. The state is updated.
    """
    return read_and_write(query, key, written, *decays(log_decay), state)


def decays(log_decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decay factors of C tokens with log_decay [B, H, C]: [B, H, C, 1], [B, H, C, C] and [B, H, C, 1].

    They are the decay from before the chunk to each token, the one from each token j to each token i >= j (0 for
    earlier ones), and the one from each token to the end. No factor is above 1. Sums are in float64, because a small
    difference of two large sums counts.
    """
    sums = log_decay.double().clamp(min=LEAST_LOG_DECAY).cumsum(-1)
    between = (sums[..., :, None] - sums[..., None, :]).float()
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).triu(1)
    between = between.masked_fill_(later, -torch.inf).exp_()
    return sums.float().exp()[..., None], between, between[..., -1, :, None]


def read_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    written: torch.Tensor,
    since: torch.Tensor,
    between: torch.Tensor,
    until: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Results of a chunk's queries, [B, Hv, C, Dv]. The state becomes the one after the chunk."""
    heads = written.shape[1]
    weights = grouped(query @ key.transpose(2, 3), heads) * between
    found = since * (grouped(query, heads) @ state) + weights @ written
    state *= since[:, :, -1:]
    add_products(state, grouped(key, heads).transpose(2, 3), until * written)
    return found


def add_products(state: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to state [B, H, ., .] in place. Only the last two dimensions of the state may be transposed."""
    state.view(-1, *state.shape[2:]).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
