"""The work lists of a step's recurrent layers: what each program computes. Made in NumPy, then uploaded in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.kernels.attention.protocol import Segments

FIELDS = 4  # int32 numbers in a record

CHUNK = 64
"""Tokens of a chunk. Programs compute a chunk's tokens together, on tensor cores."""
EXACT_CHUNK = 16
"""Tokens of a chunk in float32, whose products are not on tensor cores and take more registers and shared memory."""
FEW = 8
"""A segment of at most this many tokens is computed token by token, with its state in registers."""
MOST_MANY = 64
"""Segments that captured launches compute in chunks. Records that a step does not use take time, so there are few."""

Records = npt.NDArray[np.int32]


@dataclass(frozen=True)
class WorkLists:
    """The work of one step on the device, [., 4] int32 each. A record of zeros does nothing, so a list may be padded.

    All records begin with a segment's first token in the batch, its number of tokens, and its slot.
    """

    few: torch.Tensor  # the segments that are computed token by token; the last number is 0
    many: torch.Tensor  # the other segments, longest first; the last number is that of the first chunk in `chunks`
    chunks: torch.Tensor  # their chunks; the last number counts the segment's tokens before the chunk

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three lists, in the order in which they are uploaded."""
        return self.few, self.many, self.chunks


def work_lists(segments: Segments, chunk: int, most: int | None = None) -> tuple[Records, Records, Records]:
    """The records of `WorkLists` on the host, with chunks of `chunk` tokens.

    With `most`, only that number of segments is cut into chunks, the longest. Others are computed token by token.
    """
    lengths = segments.query_length
    records = np.stack([segments.query_start[:-1], lengths, segments.row, np.zeros_like(lengths)], 1)
    long = np.flatnonzero(lengths > FEW)
    # Longest first: no program waits for a long segment that started late.
    long = long[np.argsort(-lengths[long], kind="stable")][:most]
    many = records[long]
    count = -(-many[:, 1] // chunk)
    many[:, 3] = np.cumsum(count) - count
    chunks = np.repeat(many, count, 0)
    chunks[:, 3] = (np.arange(len(chunks)) - chunks[:, 3]) * chunk
    return np.delete(records, long, 0), many, chunks


class WorkListsBuilder:
    """Makes the work lists of steps on one device, with chunks of `chunk` tokens."""

    def __init__(self, device: torch.device, chunk: int) -> None:
        self.device, self.chunk = device, chunk

    def build(self, segments: Segments) -> WorkLists:
        """The work lists of a batch, without padding."""
        lists = work_lists(segments, self.chunk)
        host = self._packed(lists, [len(records) for records in lists])
        return self._cut(host.to(self.device, non_blocking=True), [len(records) for records in lists])

    def reserve(self, segments: int, tokens: int | None) -> WorkLists:
        """Empty lists with the room of `CapturableRecurrence.reserve`. Without `tokens`, there is none for chunks."""
        most = 0 if tokens is None else min(MOST_MANY, segments, tokens // (FEW + 1))
        sizes = [segments, most, 0 if tokens is None else tokens // self.chunk + most]
        return self._cut(torch.zeros((sum(sizes), FIELDS), dtype=torch.int32, device=self.device), sizes)

    def refill(self, reserved: WorkLists, segments: Segments) -> bool:
        """Write the work of a batch into reserved lists. Returns False and writes nothing if they have no room."""
        lists = work_lists(segments, self.chunk, most=len(reserved.many))
        sizes = [len(place) for place in reserved.tensors]
        if any(len(records) > size for records, size in zip(lists, sizes, strict=True)):
            return False
        host = self._packed(lists, sizes)
        # `reserve` put all lists into one tensor, so one copy is enough.
        reserved.few.as_strided(host.shape, host.stride()).copy_(host, non_blocking=True)
        return True

    def _packed(self, lists: Sequence[Records], sizes: Sequence[int]) -> torch.Tensor:
        """The lists in host memory, each padded to its size. PyTorch keeps pinned memory until the copy is complete."""
        host = torch.zeros((sum(sizes), FIELDS), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        for records, place in zip(lists, np.split(host.numpy(), np.cumsum(sizes)[:-1]), strict=True):
            place[: len(records)] = records
        return host

    def _cut(self, records: torch.Tensor, sizes: Sequence[int]) -> WorkLists:
        """Work lists of these sizes, which lie one after the other in `records`."""
        few, many, chunks = torch.split(records, list(sizes))
        return WorkLists(few, many, chunks)
