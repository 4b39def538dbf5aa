"""A weight whose rows are stored in several formats, as those of queries, keys and values in GGUF's Q4_K_M are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Rows(Protocol):
    """Some of the rows of a weight, in one format."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def nbytes(self) -> int: ...

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """A weight [N, K] whose rows are those of its parts, one after the other."""

    parts: tuple[Rows, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] times the weight transposed, plus bias: [T, N]. Each part is multiplied by itself."""
        return torch.cat([part.linear(x, own) for part, own in self.with_biases(bias)], 1)

    def with_biases(self, bias: torch.Tensor | None) -> list[tuple[Rows, torch.Tensor | None]]:
        """Each part with its share of the bias [N]."""
        rows = [part.shape[0] for part in self.parts]
        biases = [None for _ in rows] if bias is None else [*torch.split(bias, rows)]
        return [*zip(self.parts, biases, strict=True)]

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`, rounded once."""
        return torch.cat([part.dequantized(dtype) for part in self.parts])
