"""Where the Triton kernels run: compiled on a GPU when there is one, else under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    """The device whose tensors the Triton kernels take."""
    return "cuda" if torch.cuda.is_available() else "cpu"
