"""A short rolling upgrade: two engines and two servers are restarted one after another under load."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.robustness import rolling_upgrade
from benchmarks.robustness.rolling_upgrade import fine, measure
from tests import served


@pytest.mark.timeout(600)
async def test_no_request_fails_and_no_turn_is_lost_while_engines_and_servers_are_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))  # The engines make their key there.
    monkeypatch.setattr(rolling_upgrade, "subprocess", served.processes)
    figures = await measure(clients=2, tokens=16, seconds=0.5)
    assert fine(figures), figures
    assert figures["turns_done"] > 10
    assert [each["program"] for each in figures["restarts"]] == ["engine 0", "engine 1", "server 0", "server 1"]
    went_on = [phase["conversations_that_went_on"] for phase in figures["cache_by_phase"].values()]
    kept = [phase["of_them_with_their_cache"] for phase in figures["cache_by_phase"].values()]
    assert sum(kept) >= sum(went_on) / 2 > 0
