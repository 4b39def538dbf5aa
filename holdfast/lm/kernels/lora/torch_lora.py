"""Adapters in plain PyTorch: for a CPU, and the oracle of the Triton kernels."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.lm.kernels.lora.groups import Groups
from holdfast.lm.kernels.lora.protocol import Finish, LoraStack


class TorchLora:
    """One pair of products for each adapter, over the tokens that have it.

    On a CPU, from 32 tokens on, this is 6 to 56 times faster than a product for each token over gathered weights.
    """

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.slots = np.full(len(groups.order), -1)
        """The slot of each token, [T] int64; -1: the token has no adapter."""
        self.slots[groups.order[: groups.starts[-1]]] = np.repeat(groups.slots, np.diff(groups.starts))
        ends = groups.starts[1:].tolist()
        starts = groups.starts[:-1].tolist()
        order = torch.from_numpy(groups.order).to(device)
        self._groups = [
            (slot, order[start:end]) for slot, start, end in zip(groups.slots.tolist(), starts, ends, strict=True)
        ]

    def begin(self, x: torch.Tensor, stack: LoraStack, out: torch.Tensor | None = None) -> Finish:
        """See `Lora.begin`. All of the work is done at the end."""
        return Finish(lambda added: self.add(added, x, stack))

    def scale(self, out: torch.Tensor, stack: LoraStack) -> None:
        """See `Lora.scale`."""
        if stack.gain is None:
            return
        for slot, tokens in self._groups:
            out[tokens] = (out[tokens] * stack.gain[slot]).to(out.dtype)

    def add(self, out: torch.Tensor, x: torch.Tensor, stack: LoraStack) -> None:
        """See `Lora.add`."""
        for slot, tokens in self._groups:
            everyone = len(tokens) == len(x)
            rows = x if everyone else x.index_select(0, tokens)
            ranks, scales = stack.rank[slot].tolist(), stack.scale[slot].tolist()
            for part, (place, rank, scale) in enumerate(zip(stack.parts, ranks, scales, strict=True)):
                if not rank:
                    continue
                low = rows @ stack.a[slot, part, :rank].t()
                b = stack.b[slot, :rank, place]
                if everyone and out.dtype == low.dtype:
                    out[:, place].addmm_(low, b, alpha=scale)
                else:
                    out[:, place].index_add_(0, tokens, (low @ b).to(out.dtype), alpha=scale)
