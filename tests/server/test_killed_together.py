"""A short run of kills: a server and an engine end at the same time under load, and no turn is lost or doubled."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from benchmarks.robustness import kill_served
from benchmarks.robustness.kill_served import BAD, measure, options, programs
from tests import served


@pytest.mark.timeout(600)
async def test_no_turn_is_lost_or_doubled_when_a_server_and_an_engine_are_killed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill_served, "subprocess", served.processes)
    args = options().parse_args(["--kills", "4", "--pairs", "1", "--clients", "3", "--tokens", "60"])
    with (
        tempfile.TemporaryDirectory(prefix="hf", dir="/tmp") as folder,  # The path of a socket is short.
        programs(folder, str(tmp_path / "store.sqlite"), 2, tmp_path) as (urls, begun),
    ):
        figures = await measure(args, urls, begun)
    assert {name: figures[name] for name in BAD} == dict.fromkeys(BAD, 0), figures
    # Whether a stream is under way when a process is killed is chance, so none need be resumed.
    assert figures["kills"] == 4 and figures["turns_done"] > 5
