"""What every attention backend offers: a step's segments in, one schedule for all layers, write and attend."""

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
    """The batch of one step, as the host sees it: S segments whose query tokens lie packed one after the other.

    Segment s has the tokens [query_start[s], query_start[s + 1]) of the batch. They stand at the last positions
    before context_stop[s] of the sequence whose blocks are listed in `row[s]` of the block tables. Two segments may
    share a row. All arrays are int32 in host memory.
    """

    query_start: npt.NDArray[np.int32]  # [S + 1]
    context_stop: npt.NDArray[np.int32]  # [S] positions attended: the segment's stop position
    row: npt.NDArray[np.int32]  # [S]

    @property
    def query_length(self) -> npt.NDArray[np.int32]:
        """Query tokens of each segment, [S]."""
        return np.diff(self.query_start)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return int(self.query_start[-1])


class Attention(ABC, Generic[Metadata]):
    """Multi-token attention over non-contiguous blocks (Pensieve, §4.4): prefill, decode and recomputation are one.

    Made once per model by `attention.attention_for`. A step calls `schedule` once, then each layer calls `write` and
    `attend`. Every key of the step is written before it is attended, so a query sees the keys that another segment
    of its sequence brings in the same step, and in the same precision as those that were there before.
    """

    @abstractmethod
    def make_metadata(self, segments: Segments) -> Metadata:
        """Plan the batch: host work, once a step, good for every layer of the step."""

    @abstractmethod
    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Put new keys and values [T, Hkv, D] into their slots of the caches [num_blocks, block_size, Hkv, D].

        Caches are of the same dtype, or of `fp8.FP8`, which numbers are then rounded to.
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
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [T, Hq, D] over the paged context, as [T, Hq, D] of the same dtype.

        A query at position p attends to the positions max(0, p - window + 1) to p of its own sequence, whose block
        for position i is block_tables[row, i // block_size] ([rows, max_blocks] int32; it must not change between
        the layers of one step). Scores are query · key * scale (scale above 0), then, where softcap is given,
        softcap * tanh(score / softcap). `sinks` [Hq] adds to each head's softmax one more logit that has no value
        (GPT-OSS).
        """


class CapturableAttention(Attention[Metadata]):
    """Attention whose launches a CUDA graph may hold: a schedule stays in place while its contents change."""

    @abstractmethod
    def reserve(self, segments: int, tokens: int | None = None) -> Metadata:
        """A schedule of nothing, with room for any batch of at most so many segments of one token each.

        With `tokens`, for batches of so many tokens in so many segments, but not for each of them: many segments of a
        few tokens take more.
        """

    @abstractmethod
    def refill(self, metadata: Metadata, segments: Segments) -> bool:
        """Put a batch into what `reserve` gave, for what is launched after this call. False where it has no room."""
