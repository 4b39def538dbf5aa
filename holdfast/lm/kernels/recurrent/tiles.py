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
"""Tokens of a chunk. Programs compute a chunk's tokens together."""
FEW = 8
"""A segment of at most this many tokens is computed token by token, with its state in registers."""

Records = npt.NDArray[np.int32]


@dataclass(frozen=True)
class WorkLists:
    """The work of one step on the device, [., 4] int32 each. A record of zeros does nothing, so a list may be padded.

    The records of the first three lists begin with a segment's first token in the batch, its number of tokens, and its
    slot. A segment that verifies a draft leaves its state as it is, and has -1 - slot in place of its slot.
    """

    few: torch.Tensor  # the segments of few tokens; the last number is 0
    many: torch.Tensor  # the other segments, longest first; the last number is that of the first chunk in `chunks`
    chunks: torch.Tensor  # their chunks; the last number counts the segment's tokens before the chunk
    kept: torch.Tensor  # the tokens with a place: the token in the batch, 1, its place, and 0

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The four lists, in the order in which they are uploaded."""
        return self.few, self.many, self.chunks, self.kept


def work_lists(segments: Segments, *, all_few: bool = False) -> tuple[Records, Records, Records, Records]:
    """The records of `WorkLists` on the host. With `all_few`, long segments are computed token by token, too."""
    lengths = segments.query_length
    slots = np.where(segments.verifies, -1 - segments.row, segments.row)
    records = np.stack([segments.query_start[:-1], lengths, slots, np.zeros_like(lengths)], 1)
    is_few = np.ones(len(lengths), np.bool_) if all_few else lengths <= FEW
    many = records[~is_few]
    # Longest first: no program waits for a long segment that started late.
    many = many[np.argsort(-many[:, 1], kind="stable")]
    count = -(-many[:, 1] // CHUNK)
    many[:, 3] = np.cumsum(count) - count
    chunks = np.repeat(many, count, 0)
    chunks[:, 3] = (np.arange(len(chunks)) - chunks[:, 3]) * CHUNK
    return records[is_few], many, chunks, kept_records(segments)


def kept_records(segments: Segments) -> Records:
    """The records of `WorkLists.kept` on the host."""
    if segments.places is None:
        return np.zeros((0, FIELDS), np.int32)
    tokens = np.flatnonzero(segments.places >= 0).astype(np.int32)
    return np.stack([tokens, np.ones_like(tokens), segments.places[tokens], np.zeros_like(tokens)], 1)


class WorkListsBuilder:
    """Makes the work lists of steps on one device."""

    def __init__(self, device: torch.device, *, all_few: bool = False) -> None:
        """With `all_few`, long segments are computed token by token, too."""
        self.device, self._all_few = device, all_few

    def build(self, segments: Segments) -> WorkLists:
        """The work lists of a batch, without padding."""
        lists = work_lists(segments, all_few=self._all_few)
        host = self._packed(lists, [len(records) for records in lists])
        return self._cut(host.to(self.device, non_blocking=True), [len(records) for records in lists])

    def reserve(self, segments: int, tokens: int | None, places: int = 0) -> WorkLists:
        """Empty lists with the room of `CapturableRecurrence.reserve`. Without `tokens`, there is none for chunks."""
        most = 0 if tokens is None else min(segments, tokens // (FEW + 1))
        sizes = [segments, most, 0 if tokens is None else tokens // CHUNK + most, min(places, tokens or segments)]
        return self._cut(torch.zeros((sum(sizes), FIELDS), dtype=torch.int32, device=self.device), sizes)

    def refill(self, reserved: WorkLists, segments: Segments) -> bool:
        """Write the work of a batch into reserved lists. Returns False and writes nothing if they have no room."""
        lists = work_lists(segments, all_few=self._all_few or not len(reserved.many))
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
        few, many, chunks, kept = torch.split(records, list(sizes))
        return WorkLists(few, many, chunks, kept)
