"""LoRA adapters in a step: each token's own adapter added to the linear layers, any number of adapters in one batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.kernels.lora.groups import groups_of
from holdfast.lm.kernels.lora.protocol import Lora
from holdfast.lm.kernels.lora.torch_lora import TorchLora


def lora_for(slots: npt.NDArray[np.int64], device: torch.device) -> Lora:
    """The adapters of tokens that are computed on a CPU, given each token's slot or -1."""
    return TorchLora(groups_of(slots), device)
