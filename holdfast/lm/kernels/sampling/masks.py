"""Masks: logits of tokens that a row's grammar does not allow become -inf."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.kernels.upload import upload


def forbid(logits: torch.Tensor, masks: torch.Tensor, at: npt.NDArray[np.int64], *, first: int = 0) -> torch.Tensor:
    """Set the logits of tokens that are not allowed to -inf, in place, without waiting for the device.

    Returns the logits.

    logits [R, V] may be a part of the vocabulary, from the token `first` on. masks [M, W] int32 have one bit for each
    token of the whole vocabulary, with token 0 in the lowest bit of the first word. They belong to the rows `at` [M].
    """
    if not len(at):
        return logits
    rows = upload(at, logits.device)
    if logits.device.type == "cuda":
        from holdfast.lm.kernels.sampling.mask_kernels import forbid_rows  # a CPU installation has no Triton

        return forbid_rows(logits, masks, rows, first)
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
    forbidden = torch.from_numpy(bits[:, first : first + logits.shape[1]] == 0)
    return logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))
