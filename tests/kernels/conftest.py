"""Where the Triton kernels run: compiled on a GPU when there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before its interpreter was chosen; set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def device() -> str:
    """The device whose tensors the Triton kernels take."""
    return "cuda" if torch.cuda.is_available() else "cpu"
