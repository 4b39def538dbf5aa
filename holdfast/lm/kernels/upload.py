"""Upload small arrays from the host to the device without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def upload(numbers: npt.NDArray[np.generic] | Sequence[int], device: torch.device) -> torch.Tensor:
    """Numbers of the host as a tensor on the device, without waiting for the device. A list becomes int64."""
    array = numbers if isinstance(numbers, np.ndarray) else np.fromiter(numbers, np.int64, len(numbers))
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
