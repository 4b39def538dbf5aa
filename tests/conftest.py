"""Settings that every test runs under."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# A slow machine must not fail a test: none is timed. Runs are derandomized so that a failure repeats.
settings.register_profile("holdfast", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("holdfast")

# Triton's kernels are compiled where there is a GPU and interpreted elsewhere; Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
