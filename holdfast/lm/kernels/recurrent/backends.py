"""The choice of a backend for recurrent layers, by device."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.lm.kernels.recurrent.protocol import Recurrence
from holdfast.lm.kernels.recurrent.torch_recurrence import TorchRecurrence

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def recurrence_for(device: torch.device | str, dtype: torch.dtype, *, invariant: bool = False) -> Recurrence[Any]:
    """The backend for recurrent layers on `device`: our kernels on CUDA, and PyTorch on a CPU.

    `dtype` is that of the activations. `invariant`: the bits of a token's result must not depend on where its segment
    begins and ends, nor on other segments. Prompts then take longer.

    Raises ValueError for a dtype or a device without a backend.
    """
    device = torch.device(device)
    if dtype not in DTYPES:
        raise ValueError(f"there are no recurrent layers in {dtype}; use float32, bfloat16 or float16")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"there are no recurrent layers for device {device!s}; use cpu or cuda")
    if device.type == "cpu":
        return TorchRecurrence(device, one_by_one=invariant)
    # Imported here because a CPU installation has no Triton.
    from holdfast.lm.kernels.recurrent.triton_recurrence import TritonRecurrence

    return TritonRecurrence(device, one_by_one=invariant)
