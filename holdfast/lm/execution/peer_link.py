"""The link between stages on GPUs of one host: copies into the next device's memory, in the order of streams."""

from __future__ import annotations

import torch

from holdfast.core.layout import Layout
from holdfast.lm.execution.stage_link import TOKEN_SLOTS, StageLink
from holdfast.lm.kernels.collectives.peer_memory import PeerMemory, copy, signal, wait
from holdfast.lm.models.base import ModelSpec

STREAM_SLOTS = 2
"""Number of streams that a device holds before it reads them. The next one arrives while it computes a step."""

FLAG_BYTES = 128
"""Bytes of a counter: of streams or tokens that have arrived, or of streams that were read."""


class PeerLink(StageLink):
    """Link that writes streams and tokens straight into the memory of the device that needs them.

    Each sender counts its messages and writes that number to the receiver. The receiver writes back the number of
    streams that it has read, and a sender waits once it is STREAM_SLOTS ahead. No call makes the host wait. A stream is
    first copied to a buffer, so that later computation need not wait for the link. Tokens need no answer: the last
    stage sends a step's tokens only after the first stage has read those of the step TOKEN_SLOTS before.
    """

    def __init__(self, memory: PeerMemory, layout: Layout, spec: ModelSpec, max_tokens: int, max_rows: int) -> None:
        """`memory` spans all ranks, with `num_bytes` bytes on each. It is not opened yet, and no other link uses it.

        A step has at most `max_tokens` tokens and `max_rows` sampled rows.
        """
        rank, last = memory.rank, layout.pp - 1
        shard, stage = layout.shard_of(rank), layout.stage_of(rank)
        self._own, addresses = memory.address, memory.open()
        self._next = addresses[rank + layout.tp] if stage < last else 0
        self._previous = addresses[rank - layout.tp] if stage else 0
        self._first = addresses[shard]
        self._stream_bytes, self._token_bytes = _slot_bytes(spec, max_tokens, max_rows)
        self._tokens_at = 3 * FLAG_BYTES + STREAM_SLOTS * self._stream_bytes
        self._sent = self._received = self._tokens_sent = self._tokens_received = 0
        device = memory.device
        self._aside = [torch.empty(0, dtype=spec.dtype, device=device) for _ in range(STREAM_SLOTS)]
        if stage < last:
            shape = (max_tokens, spec.stream_width)
            self._aside = [torch.empty(shape, dtype=spec.dtype, device=device) for _ in range(STREAM_SLOTS)]
        self._sender = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    @staticmethod
    def num_bytes(spec: ModelSpec, max_tokens: int, max_rows: int) -> int:
        """Bytes of memory on every device for steps of at most this many tokens and sampled rows."""
        stream, tokens = _slot_bytes(spec, max_tokens, max_rows)
        return 3 * FLAG_BYTES + STREAM_SLOTS * stream + TOKEN_SLOTS * tokens

    # A device's memory: counters of streams arrived, streams that the next stage has read, and tokens arrived; then
    # streams; then tokens.

    def send(self, stream: torch.Tensor) -> None:
        slot, self._sent = self._sent % STREAM_SLOTS, self._sent + 1
        current, aside = torch.cuda.current_stream(self._device), self._aside[slot][: len(stream)]
        if self._sent > STREAM_SLOTS:
            # The next stage has read this slot's earlier copy only after it was sent.
            wait(self._own + FLAG_BYTES, self._sent - STREAM_SLOTS, current)
        aside.copy_(stream)
        self._sender.wait_stream(current)
        copy(
            self._next + 3 * FLAG_BYTES + slot * self._stream_bytes,
            aside.data_ptr(),
            aside.numel() * aside.element_size(),
            self._sender,
        )
        signal(self._next, self._sent, self._sender)

    def receive(self, into: torch.Tensor) -> None:
        slot, self._received = self._received % STREAM_SLOTS, self._received + 1
        current = torch.cuda.current_stream(self._device)
        wait(self._own, self._received, current)
        place = self._own + 3 * FLAG_BYTES + slot * self._stream_bytes
        copy(into.data_ptr(), place, into.numel() * into.element_size(), current)
        signal(self._previous + FLAG_BYTES, self._received, current)

    def send_tokens(self, tokens: torch.Tensor) -> None:
        slot, self._tokens_sent = self._tokens_sent % TOKEN_SLOTS, self._tokens_sent + 1
        current = torch.cuda.current_stream(self._device)
        place = self._first + self._tokens_at + slot * self._token_bytes
        tokens = tokens.contiguous()
        copy(place, tokens.data_ptr(), tokens.numel() * tokens.element_size(), current)
        signal(self._first + 2 * FLAG_BYTES, self._tokens_sent, current)

    def receive_tokens(self, count: int) -> torch.Tensor:
        slot, self._tokens_received = self._tokens_received % TOKEN_SLOTS, self._tokens_received + 1
        current = torch.cuda.current_stream(self._device)
        wait(self._own + 2 * FLAG_BYTES, self._tokens_received, current)
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        place = self._own + self._tokens_at + slot * self._token_bytes
        copy(tokens.data_ptr(), place, tokens.numel() * tokens.element_size(), current)
        return tokens


def _slot_bytes(spec: ModelSpec, max_tokens: int, max_rows: int) -> tuple[int, int]:
    """Bytes of one slot for a stream, and of one slot for tokens."""
    stream = max_tokens * spec.stream_width * spec.dtype.itemsize
    return -(-stream // FLAG_BYTES) * FLAG_BYTES, -(-max_rows * 8 // FLAG_BYTES) * FLAG_BYTES
