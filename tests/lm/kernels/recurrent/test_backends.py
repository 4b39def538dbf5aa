"""The choice of a backend for recurrent layers."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.recurrent.backends import recurrence_for
from holdfast.lm.kernels.recurrent.protocol import CapturableRecurrence
from holdfast.lm.kernels.recurrent.torch_recurrence import TorchRecurrence
from holdfast.lm.kernels.recurrent.triton_recurrence import TritonRecurrence


def test_a_cpu_has_the_backend_in_pytorch_which_graphs_cannot_capture() -> None:
    backend = recurrence_for("cpu", torch.bfloat16)
    assert isinstance(backend, TorchRecurrence)
    assert not isinstance(backend, CapturableRecurrence)


@pytest.mark.gpu
def test_a_gpu_has_our_kernels() -> None:
    assert isinstance(recurrence_for("cuda", torch.float16), TritonRecurrence)


def test_a_dtype_or_device_without_a_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no recurrent layers in torch\.float64; use float32, bfloat16 or float16"):
        recurrence_for("cpu", torch.float64)
    with pytest.raises(ValueError, match="no recurrent layers for device meta; use cpu or cuda"):
        recurrence_for("meta", torch.float32)
