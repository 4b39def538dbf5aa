"""The device of the Triton kernels: a GPU if there is one, else a CPU under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    """The device whose tensors the Triton kernels accept."""
    return "cuda" if torch.cuda.is_available() else "cpu"
