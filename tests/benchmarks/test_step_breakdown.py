"""Tests of what a profile of steps counts as time of a kind, between kernels, or between steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.autograd import DeviceType

from benchmarks.engine.step_breakdown import GAPS, IDLE, watched


def profile_of(*spans: tuple[str, float, float]) -> Any:
    """A profile of device work with these names, starts and ends in microseconds."""
    events = [
        SimpleNamespace(name=name, device_type=DeviceType.CUDA, time_range=SimpleNamespace(start=start, end=end))
        for name, start, end in spans
    ]
    return SimpleNamespace(events=lambda: events)


def test_a_memset_within_a_step_does_not_make_a_gap_one_between_steps() -> None:
    found = watched(
        profile_of(
            ("norm_kernel", 0, 10),
            ("Memset (Device)", 14, 15),
            ("nvjet_product", 20, 50),
            ("Memcpy DtoD (Device -> Device)", 51, 52),
            ("silu_mul_kernel", 53, 60),
        ),
        per=1,
    )
    assert found["kinds_us"] == {"products": 30, GAPS: 13, "norms": 10, "gate": 7, IDLE: 0}


def test_a_copy_from_or_to_the_host_makes_a_gap_one_between_steps() -> None:
    for copy in ("Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"):
        found = watched(profile_of(("norm_kernel", 0, 10), (copy, 12, 14), ("norm_kernel", 40, 50)), per=2)
        assert found["kinds_us"] == {IDLE: 15, "norms": 10}
        assert found["idle_share"] == 0.6
