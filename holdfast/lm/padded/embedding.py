"""Vector embedding: masks of rows whose states were computed apart, and their plain decodes (Baton §4.2).

The states themselves are embedded by `StateLayout.embed`, whatever class the model keeps them in.
"""

from __future__ import annotations

import torch

from holdfast.lm.padded.driver import Inputs


def right_aligned(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """The mask [B, width] int64 of rows of these lengths [B]: placeholders in front, then the tokens."""
    columns = torch.arange(width, device=lengths.device)
    return (columns >= (width - lengths)[:, None]).to(torch.int64)


def embedded_mask(mask: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """The mask after a state of `length` tokens was embedded in `row`: one of the B rows, or the next one (BA-13).

    mask [B, L] becomes [B or B + 1, max(L, length)]. A state that is shorter than L is aligned at the end of its row
    (case 1). For a longer one all rows are extended in front by placeholders (case 2).
    """
    rows, width = mask.shape
    wide = max(width, length)
    embedded = mask.new_zeros(max(rows, row + 1), wide)
    embedded[:rows, wide - width :] = mask
    embedded[row, : wide - length] = 0
    embedded[row, wide - length :] = 1
    return embedded


def decode_inputs(last: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> Inputs:
    """One token for each of B rows: ids [B, 1] from last [B], mask [B, L] and a column of ones, positions [B, 1]."""
    return Inputs(last[:, None], torch.cat((mask, mask.new_ones(len(mask), 1)), 1), lengths[:, None])
