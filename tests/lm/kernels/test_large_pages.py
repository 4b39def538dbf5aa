"""Memory in large pages for weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from holdfast.lm.kernels.large_pages import PAGE, empty_in_large_pages


def is_advised(tensor: torch.Tensor) -> bool:
    """Whether the system was asked for large pages where a tensor begins."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, stop = (int(each, 16) for each in first.split("-"))
            inside = start <= tensor.data_ptr() < stop
        elif inside and first == "VmFlags:":
            return "hg" in rest
    raise AssertionError("the tensor is in no mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's madvise")
def test_a_large_tensor_begins_at_a_large_page_and_asks_for_such() -> None:
    tensor = empty_in_large_pages(3, PAGE // 4, dtype=torch.float32)
    assert tensor.shape == (3, PAGE // 4) and tensor.dtype == torch.float32 and tensor.is_contiguous()
    assert tensor.data_ptr() % PAGE == 0
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert is_advised(tensor)
    assert tensor.fill_(1.0).sum() == 3 * PAGE // 4


@pytest.mark.parametrize(("size", "platform"), [(PAGE // 2 - 1, sys.platform), (PAGE, "darwin")])
def test_a_small_tensor_and_one_of_another_system_are_usual_ones(
    monkeypatch: pytest.MonkeyPatch, size: int, platform: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    tensor = empty_in_large_pages(size, dtype=torch.bfloat16)
    assert tensor.shape == (size,) and tensor.dtype == torch.bfloat16
    assert tensor.untyped_storage().nbytes() == 2 * size
