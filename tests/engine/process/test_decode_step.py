"""A decode step passes few files, and the architecture's page lists exactly these."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from holdfast.core.types import Request, SamplingParams
from holdfast.engine.process.build import build
from holdfast.lm.config import EngineConfig
from holdfast.lm.kernels.integer.library import step_library

ROOT = Path(__file__).parents[3]
MOST = 27
"""Largest number of files of the package that a decode step may pass on a CPU, from the loop to the token."""
CONFIG = {"model": "holdfast-tiny", "device": "cpu", "threads": 1, "cache_gb": 0.05}
CHOICE = "lm/models/whole_steps.py"
"""File that says whether the library computes a step, if there is a library."""


def files_of_a_decode_step(options: Mapping[str, Any]) -> set[str]:
    """The files whose functions are called while a running engine computes four steps of one stream."""
    loop, _ = build(EngineConfig(**options))
    worker = loop.executor._worker  # type: ignore[attr-defined]
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and ROOT / "holdfast" in file.parents:
            seen.add(str(file.relative_to(ROOT / "holdfast")))

    params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0)
    loop.add(Request("stream", tuple(range(5, 40)), params, arrival=time.monotonic()))
    for _ in range(8):
        loop.step()
    try:
        worker.submit(sys.setprofile, note).result()
        sys.setprofile(note)
        for _ in range(4):
            loop.step()
    finally:
        sys.setprofile(None)
        worker.submit(sys.setprofile, None).result()
        loop.close()
    return seen


def listed(number: int) -> set[str]:
    """The files of a list on the architecture's page: of a step by PyTorch (0), or what the library in C adds (1)."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("### The files of a decode step on a CPU")[2].partition("\n## ")[0]
    return set(re.findall(r"^- `([a-z_/]+\.py)`", section.split("With the library, ")[number], re.MULTILINE))


def test_a_decode_step_passes_the_files_that_the_architecture_lists() -> None:
    found = files_of_a_decode_step(CONFIG | {"attention_backend": "torch"}) - {CHOICE}
    assert found == listed(0)
    assert len(found) <= MOST


@pytest.mark.skipif(step_library(torch.device("cpu")) is None, reason="the library in C is not there")
def test_a_decode_step_in_one_call_passes_the_listed_files_in_place_of_others() -> None:
    found = files_of_a_decode_step(CONFIG)
    assert found == (listed(0) | listed(1)) - {"lm/models/attention_mixer.py", "lm/kernels/cache/kv_cache.py"}
    assert len(found) <= MOST + 1
