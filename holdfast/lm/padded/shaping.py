"""Vector shaping: the tensors of a forward that computes whole prompts together with running rows (Baton §4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from holdfast.lm.kernels.upload import upload
from holdfast.lm.padded.driver import Inputs

PLACEHOLDER = 0
"""The id of placeholders. They are masked, so any id of the vocabulary works."""


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Inputs:
    """The first forward of n whole prompts, placeholders in front: all [n, l] for the longest of l tokens (BA-1).

    The caller needs the logits of the last column.
    """
    longest = max(map(len, prompts))
    both = np.zeros((2, len(prompts), longest), np.int64)
    both[0] = PLACEHOLDER
    for index, prompt in enumerate(prompts):
        both[0, index, longest - len(prompt) :] = prompt
        both[1, index, longest - len(prompt) :] = 1
    ids, mask = upload(both, device)
    return Inputs(ids, mask, (mask.cumsum(1) - 1).clamp_(min=0))


def shaped_inputs(
    last: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, newcomers: Mapping[int, Sequence[int]]
) -> Inputs:
    """One forward of all B rows, in which whole prompts take the slots that `newcomers` names (BA-4 to BA-6).

    last [B] int64: the latest token of each row. mask [B, L] int64: 1 where a column of the state is a token. lengths
    [B] int64: the number of tokens. Their values at the newcomers' slots are not read. With l the longest prompt:

    - ids [B, l]: a running row has its token, then placeholders. A newcomer has its prompt, after placeholders if it is
      not the longest.
    - mask [B, L + l]: a running row has its own mask, a 1, then zeros. A newcomer has zeros for the old state, then its
      own mask.
    - positions [B, l]: a running row has its length throughout. A newcomer counts from 0.
    - columns [B]: 0 for a running row, l - 1 for a newcomer.
    """
    device, (rows, width) = mask.device, mask.shape
    prompts = left_padded([*newcomers.values()], device)
    slots = upload([*newcomers], device)
    longest = prompts.ids.shape[1]
    ids = mask.new_full((rows, longest), PLACEHOLDER)
    ids[:, 0] = last
    shaped = mask.new_zeros(rows, width + longest)
    shaped[:, :width] = mask
    shaped[:, width] = 1
    own = mask.new_zeros(len(newcomers), width + longest)
    own[:, width:] = prompts.mask
    positions = lengths[:, None].repeat(1, longest)
    return Inputs(
        ids.index_copy_(0, slots, prompts.ids),
        shaped.index_copy_(0, slots, own),
        positions.index_copy_(0, slots, prompts.positions),
        mask.new_zeros(rows).index_fill_(0, slots, longest - 1),
    )
