"""A decode step passes few files, and the architecture's page lists exactly these."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.core.types import Request, SamplingParams
from holdfast.engine.process.build import build
from holdfast.lm.config import EngineConfig

ROOT = Path(__file__).parents[3]
MOST = 27
"""Largest number of files of the package that a decode step may pass on a CPU, from the loop to the token."""


def files_of_a_decode_step(config: EngineConfig) -> set[str]:
    """The files whose functions are called while a running engine computes four steps of one stream."""
    loop, _ = build(config)
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


def test_a_decode_step_passes_the_files_that_the_architecture_lists() -> None:
    found = files_of_a_decode_step(EngineConfig(model="holdfast-tiny", device="cpu", threads=1, cache_gb=0.05))
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("### The files of a decode step on a CPU")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^- `([a-z_/]+\.py)`", section, re.MULTILINE)) == sorted(found)
    assert len(found) <= MOST
