"""The link between stages on GPUs of one host: copies into the next device's memory, in the order of streams."""

from __future__ import annotations

import torch

from holdfast.core.layout import Layout
from holdfast.lm.execution.stage_link import TOKEN_SLOTS, StageLink
from holdfast.lm.kernels.collectives.peer_memory import PeerMemory, copy, signal, wait
from holdfast.lm.models.base import ModelSpec

STREAM_SLOTS = 2
"""Number of messages from a neighbour that a device holds before it reads them. The next one arrives while it computes
a step.
"""

FLAG_BYTES = 128
"""Bytes of a counter of messages that have arrived, or that were read."""
STREAMS_CAME, STREAMS_READ, TOKENS_CAME, BACK_CAME, BACK_READ = range(5)
"""The counters of a device: streams that have arrived, streams that the next stage has read, tokens that have arrived,
tensors that the next stage has sent back, and tensors that the stage before has read.
"""
SLOTS_AT = 5 * FLAG_BYTES


class PeerLink(StageLink):
    """Link that writes streams and tokens straight into the memory of the device that needs them.

    Each sender counts its messages and writes that number to the receiver. The receiver writes back the number of
    streams that it has read, and a sender waits once it is STREAM_SLOTS ahead. No call makes the host wait. A stream is
    first copied to a buffer, so that later computation need not wait for the link. Tokens need no answer: the last
    stage sends a step's tokens only after the first stage has read those of the step TOKEN_SLOTS before.
    """

    def __init__(
        self, memory: PeerMemory, layout: Layout, spec: ModelSpec, max_tokens: int, max_rows: int, *, back: bool = False
    ) -> None:
        """`memory` spans all ranks, with `num_bytes` bytes on each. It is not opened yet, and no other link uses it.

        A step has at most `max_tokens` tokens and `max_rows` sampled rows. Tensors are sent back only with `back`.
        """
        rank, last, device = memory.rank, layout.pp - 1, memory.device
        shard, stage = layout.shard_of(rank), layout.stage_of(rank)
        own, addresses = memory.address, memory.open()
        following = addresses[rank + layout.tp] if stage < last else 0
        previous = addresses[rank - layout.tp] if stage else 0
        self._own, self._first = own, addresses[shard]
        stream_bytes, self._token_bytes = _slot_bytes(spec, max_tokens, max_rows)
        self._tokens_at = SLOTS_AT + STREAM_SLOTS * stream_bytes
        back_at = self._tokens_at + TOKEN_SLOTS * self._token_bytes
        self._tokens_sent = self._tokens_received = 0
        self._device = device
        counters = STREAMS_CAME, STREAMS_READ
        if stage < last:
            self._to_next = _Sender(device, own, following, SLOTS_AT, stream_bytes, *counters)
        if stage:
            self._from_previous = _Receiver(device, own, previous, SLOTS_AT, stream_bytes, *counters)
        counters = BACK_CAME, BACK_READ
        if back and stage:
            self._to_previous = _Sender(device, own, previous, back_at, stream_bytes, *counters)
        if back and stage < last:
            self._from_next = _Receiver(device, own, following, back_at, stream_bytes, *counters)

    @staticmethod
    def num_bytes(spec: ModelSpec, max_tokens: int, max_rows: int, *, back: bool = False) -> int:
        """Bytes of memory on every device for steps of at most this many tokens and sampled rows."""
        stream, tokens = _slot_bytes(spec, max_tokens, max_rows)
        return SLOTS_AT + (2 if back else 1) * STREAM_SLOTS * stream + TOKEN_SLOTS * tokens

    # A device's memory: the counters; then streams; then tokens; then tensors from the next stage.

    def send(self, stream: torch.Tensor) -> None:
        self._to_next.send(stream)

    def receive(self, into: torch.Tensor) -> None:
        self._from_previous.receive(into)

    def send_back(self, tensor: torch.Tensor) -> None:
        self._to_previous.send(tensor)

    def receive_back(self, into: torch.Tensor) -> None:
        self._from_next.receive(into)

    def send_tokens(self, tokens: torch.Tensor) -> None:
        slot, self._tokens_sent = self._tokens_sent % TOKEN_SLOTS, self._tokens_sent + 1
        current = torch.cuda.current_stream(self._device)
        place = self._first + self._tokens_at + slot * self._token_bytes
        tokens = tokens.contiguous()
        copy(place, tokens.data_ptr(), tokens.numel() * tokens.element_size(), current)
        signal(self._first + TOKENS_CAME * FLAG_BYTES, self._tokens_sent, current)

    def receive_tokens(self, count: int) -> torch.Tensor:
        slot, self._tokens_received = self._tokens_received % TOKEN_SLOTS, self._tokens_received + 1
        current = torch.cuda.current_stream(self._device)
        wait(self._own + TOKENS_CAME * FLAG_BYTES, self._tokens_received, current)
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        place = self._own + self._tokens_at + slot * self._token_bytes
        copy(tokens.data_ptr(), place, tokens.numel() * tokens.element_size(), current)
        return tokens


class _Sender:
    """Sends tensors to one neighbour. A tensor that is larger than a slot goes in pieces."""

    def __init__(
        self, device: torch.device, own: int, there: int, slots_at: int, slot_bytes: int, came: int, read: int
    ) -> None:
        """`own` and `there` are the addresses of this device's memory and the neighbour's.

        The slots begin at `slots_at`. `came` and `read` are the counters of the messages.
        """
        self._device, self._slot_bytes = device, slot_bytes
        self._slots, self._came = there + slots_at, there + came * FLAG_BYTES
        self._read, self._sent = own + read * FLAG_BYTES, 0
        self._aside = torch.empty(STREAM_SLOTS, slot_bytes, dtype=torch.uint8, device=device)
        self._sender = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor. It may be overwritten by what is computed later."""
        data = tensor.contiguous().view(-1).view(torch.uint8)
        current = torch.cuda.current_stream(self._device)
        for piece in torch.split(data, self._slot_bytes):
            slot, self._sent = self._sent % STREAM_SLOTS, self._sent + 1
            if self._sent > STREAM_SLOTS:
                # The neighbour has read this slot's earlier copy only after it was sent.
                wait(self._read, self._sent - STREAM_SLOTS, current)
            aside = self._aside[slot, : len(piece)]
            aside.copy_(piece)
            self._sender.wait_stream(current)
            copy(self._slots + slot * self._slot_bytes, aside.data_ptr(), len(piece), self._sender)
            signal(self._came, self._sent, self._sender)


class _Receiver:
    """Receives the tensors of one neighbour."""

    def __init__(
        self, device: torch.device, own: int, there: int, slots_at: int, slot_bytes: int, came: int, read: int
    ) -> None:
        """As for `_Sender`."""
        self._device, self._slot_bytes = device, slot_bytes
        self._slots, self._came = own + slots_at, own + came * FLAG_BYTES
        self._read, self._received = there + read * FLAG_BYTES, 0

    def receive(self, into: torch.Tensor) -> None:
        """Write the next tensor into a contiguous one of the same size."""
        current = torch.cuda.current_stream(self._device)
        for piece in torch.split(into.view(-1).view(torch.uint8), self._slot_bytes):
            slot, self._received = self._received % STREAM_SLOTS, self._received + 1
            wait(self._came, self._received, current)
            copy(piece.data_ptr(), self._slots + slot * self._slot_bytes, len(piece), current)
            signal(self._read, self._received, current)


def _slot_bytes(spec: ModelSpec, max_tokens: int, max_rows: int) -> tuple[int, int]:
    """Bytes of one slot for a stream, and of one slot for tokens."""
    stream = max_tokens * spec.stream_width * spec.dtype.itemsize
    return -(-stream // FLAG_BYTES) * FLAG_BYTES, -(-max_rows * 8 // FLAG_BYTES) * FLAG_BYTES
