"""The page by which a language model and applications share a device."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from holdfast.cells.plan import CellRequest
from holdfast.core.config import AppConfig
from holdfast.core.types import Request, SamplingParams
from holdfast.engine.ledger import NO_GPU, DeviceLedger, DeviceNews, make_ledger
from holdfast.engine.process.apps import SharedDevice
from holdfast.engine.process.build import build_engine
from holdfast.engine.process.parts.neighbours import BETWEEN_STEPS, LONGEST_STEP, LedgerWriter
from holdfast.lm.types import StepResult
from holdfast.server.run import shared_page
from tests.cells.models import MODELS
from tests.cells.test_workers import ask, run_all, running


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path() -> Iterator[str]:
    with shared_page() as found:
        yield found
    assert not Path(found).exists()


def test_a_page_is_read_as_it_was_written_by_another_mapping_of_this_user_alone(path: str) -> None:
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    writer, reader = DeviceLedger(path), DeviceLedger(path)
    assert reader.read() == (0.0, 0.0, NO_GPU)
    writer.write(DeviceNews(1.5, 2.5, 2.0))
    assert reader.read() == DeviceNews(1.5, 2.5, 2.0)


def test_the_writer_tells_of_steps_in_flight_of_their_end_and_of_late_streams(path: str) -> None:
    clock, reader, streams = Clock(), DeviceLedger(path), [True]
    writer = LedgerWriter(DeviceLedger(path), lambda: streams[0], target=0.05, gpus=2, clock=clock)
    writer.planned(Mock())
    assert reader.read() == (100.0 + LONGEST_STEP, 0.0, 2)
    writer.planned(Mock())
    writer.ended(StepResult(0, (), 0.04))
    assert reader.read().working_until == 100.0 + LONGEST_STEP, "another step is in flight"
    writer.ended(StepResult(1, (), 0.06))
    news = reader.read()
    assert news.working_until == 100.0 + BETWEEN_STEPS and news.late_until > 100.0
    clock.now = 200.0
    streams[0] = False
    writer.planned(Mock())
    writer.ended(StepResult(2, (), 0.06))
    assert reader.read().late_until < 200.0, "a batch has no target"
    writer.close()
    assert reader.read() == (0.0, 0.0, 2)


@pytest.mark.parametrize(("device", "gpus", "shares"), [
    ("cpu", NO_GPU, True), ("cpu", 1.0, False), ("cuda:0", NO_GPU, False), ("cuda:0", 1.0, True),
    ("cuda:1", 1.0, False), ("cuda:1", 2.0, True),
])  # fmt: skip
def test_an_application_gives_way_only_on_the_model_s_devices(
    path: str, device: str, gpus: float, shares: bool
) -> None:
    DeviceLedger(path).write(DeviceNews(100.0, 0.0, gpus))
    turns = Mock()
    SharedDevice(turns, DeviceLedger(path), device).pause(50.0)
    turns.pause.assert_called_once_with(50.0, 100.0 if shares else 0.0, 0.0)


def test_a_real_engine_tells_what_it_does(small, path: str) -> None:
    engine = build_engine(small(), ledger=path)
    reader = DeviceLedger(path)
    try:
        assert reader.read() == (0.0, 0.0, NO_GPU)
        engine.loop.add(Request("r", (5, 6, 7), SamplingParams(max_tokens=3, ignore_eos=True)))
        told = []
        while engine.loop.has_work():
            engine.loop.step()
            told.append(reader.read().working_until)
        assert 0.0 < told[-1] < told[0], "after the last step, the next one is expected for a moment only"
    finally:
        engine.close()
    assert reader.read() == (0.0, 0.0, NO_GPU)


class Bound:
    """Turns that a test opens and closes."""

    def __init__(self) -> None:
        self.free, self.rounds, self.seconds = False, 0, 0.0

    def pause(self, now: float) -> float:
        return 0.0 if self.free else 0.01

    def spent(self, seconds: float) -> None:
        self.rounds += 1
        self.seconds += seconds


def test_workers_begin_no_round_before_their_turn_and_all_of_them_after_it() -> None:
    model = MODELS["tree"]()
    turns = Bound()
    with running(model, turns={"cpu": turns}) as (workers, outcomes):
        asked = ask(model, 4)
        turns.free = True
        run_all(workers, outcomes, asked)
        rounds = turns.rounds
        assert rounds > 0 and turns.seconds > 0.0
        turns.free = False
        more = {f"more {name}": each for name, each in ask(model, 4, seed=1).items()}
        outcomes.results.clear()
        for name, each in more.items():
            workers.submit(CellRequest(name, each.graph))
        assert not workers._threads[0].join(0.1), "it waits, and looks again every 10 ms"
        assert (turns.rounds, outcomes.results) == (rounds, {})
        turns.free = True
        outcomes.wait_for(lambda: len(outcomes.results) == len(more))


def test_shares_of_applications_out_of_range_are_refused() -> None:
    for value in (0.0, 1.1):
        with pytest.raises(ValueError, match=f"app_share is {value}; it must lie between"):
            AppConfig(app_share=value)
    with pytest.raises(ValueError, match="app_memory_fraction is"):
        AppConfig(app_memory_fraction=0.95)


def test_a_page_can_be_made_where_there_is_no_shared_memory(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("holdfast.engine.ledger.SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = make_ledger()
    assert Path(path).parent == tmp_path and len(Path(path).read_bytes()) == 24
