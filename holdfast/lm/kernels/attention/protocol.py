"""The interface of attention backends: metadata once a step, then write and attend in each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Metadata = TypeVar("Metadata")


@dataclass(frozen=True)
class Segments:
    """The batch of one step: S segments whose query tokens are packed one after the other.

    Segment s has the tokens [query_start[s], query_start[s + 1]) of the batch. They are at the last positions before
    context_stop[s] of the sequence whose blocks are in row `row[s]` of the block tables. Two segments may share a row.
    All arrays are int32 in host memory.
    """

    query_start: npt.NDArray[np.int32]  # [S + 1]
    context_stop: npt.NDArray[np.int32]  # [S] positions attended: the segment's stop position
    row: npt.NDArray[np.int32]  # [S]
    places: npt.NDArray[np.int32] | None = None
    """[T] for each token of a draft, the place where recurrent layers keep its inputs; -1 for all other tokens.

    A segment that verifies a draft has places for all of its tokens, others for none. None: there are no drafts.
    """

    @property
    def verifies(self) -> npt.NDArray[np.bool_]:
        """Whether each segment verifies a draft, [S]."""
        if self.places is None:
            return np.zeros(len(self.row), np.bool_)
        verifies: npt.NDArray[np.bool_] = self.places[self.query_start[:-1]] >= 0
        return verifies

    @property
    def query_length(self) -> npt.NDArray[np.int32]:
        """Number of query tokens of each segment, [S]."""
        return np.diff(self.query_start)

    @property
    def num_tokens(self) -> int:
        """Number of query tokens of the batch."""
        return int(self.query_start[-1])


class Attention(ABC, Generic[Metadata]):
    """Multi-token attention over non-contiguous blocks (Pensieve, §4.4), for prefill, decode and recomputation alike.

    `backends.attention_for` makes one per model. A step calls `make_metadata` once; then each layer calls `write` and
    `attend`. Every key of the step is written before any query attends to it. So a query also sees keys that another
    segment of its sequence adds in the same step, in the same precision as earlier keys.
    """

    @abstractmethod
    def make_metadata(self, segments: Segments) -> Metadata:
        """Prepare a batch on the host, once per step. Every layer of the step uses the result."""

    @abstractmethod
    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values [T, Hkv, D] to their slots of the caches [num_blocks, block_size, Hkv, D].

        The caches have the dtype of the new keys and values, or `fp8.FP8`, to which the numbers are then rounded.
        slot_mapping is [T] int64; a slot is block * block_size + offset. No slot may occur twice.
        """

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        metadata: Metadata,
        *,
        scale: float,
        window: int | None = None,
        chunked: bool = False,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [T, Hq, D] over the paged context, as [T, Hq, D] of the same dtype.

        A query at position p attends to the positions max(0, p - window + 1) to p of its own sequence, or if `chunked`
        to those from p // window * window on. The block of position i is block_tables[row, i // block_size]
        ([rows, max_blocks] int32; it must not change between the layers of one step). Scores are query · key * scale
        (scale above 0). With a softcap, they become softcap * tanh(score / softcap). `sinks` [Hq] adds one logit
        without a value to each head's softmax (GPT-OSS).
        """


class CapturableAttention(Attention[Metadata]):
    """Attention that CUDA graphs may capture: metadata stays in place while its contents change."""

    @abstractmethod
    def reserve(self, segments: int, tokens: int | None = None) -> Metadata:
        """Empty metadata with room for any batch of at most `segments` tokens, in segments of a few tokens each.

        With `tokens`, the room is for batches of up to `tokens` tokens in up to `segments` segments. Not every batch of
        that size fits, because many segments of a few tokens take more room.
        """

    @abstractmethod
    def refill(self, metadata: Metadata, segments: Segments) -> bool:
        """Write a batch into metadata from `reserve`, for later launches.

        If there is no room, return False and write nothing.
        """
