"""Finding the library of integer products."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from holdfast.lm.kernels.integer import library as module
from holdfast.lm.kernels.integer.library import library_for, open_library
from holdfast.lm.kernels.integer.weight import pack_integers
from tests.compiled import integer_library

CPU = torch.device("cpu")


def test_only_models_in_bfloat16_on_a_cpu_are_multiplied_as_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = integer_library()
    monkeypatch.setattr(module, "library", lambda: found)
    assert library_for(CPU, torch.bfloat16) is found
    assert library_for(CPU, torch.float32) is None and library_for(torch.device("cuda"), torch.bfloat16) is None


def test_without_its_file_there_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "FILE", tmp_path / "products.so")
    module.library.cache_clear()
    try:
        assert module.library() is None
    finally:
        module.library.cache_clear()


def test_a_file_that_cannot_be_loaded_is_no_library(tmp_path: Path) -> None:
    file = tmp_path / "products.so"
    file.write_bytes(b"of another system")
    assert open_library(file) is None


def test_a_file_of_older_sources_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout may have the file that its sources made before they had whole steps."""
    older = SimpleNamespace(
        **{f"holdfast_{name}": SimpleNamespace() for name in ("multiply", "norm", "gate", "rotate")}
    )
    libraries = iter((older, SimpleNamespace(GOMP_parallel=None)))
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: next(libraries))
    assert open_library(Path("products.so")) is None


def test_a_file_whose_records_have_another_size_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("multiply", "norm", "gate", "rotate", "step_bytes", "step", "head")
    sized = Mock(return_value=module.STEP_SIZE - 8)
    other = SimpleNamespace(**{f"holdfast_{name}": SimpleNamespace() for name in names}, holdfast_step_size=sized)
    libraries = iter((other, SimpleNamespace(GOMP_parallel=None)))
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: next(libraries))
    assert open_library(Path("products.so")) is None
    assert sized.call_count == 1


def test_threads_are_those_of_pytorch() -> None:
    """A product with three threads runs in PyTorch's team: no thread is added to those that PyTorch has begun."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        torch.ones(1 << 22).sum()
        begun = len([*Path("/proc/self/task").iterdir()])
        numbers = torch.zeros(4096, 256, dtype=torch.uint8)
        weight = pack_integers(integer_library(), numbers, torch.ones(4096, 8), None, 8)
        weight.linear(torch.ones(4, 256), None)
        assert len([*Path("/proc/self/task").iterdir()]) == begun
    finally:
        torch.set_num_threads(before)
