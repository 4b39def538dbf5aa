"""Energy of GPUs: what NVML's counters say, and how much of it belongs to a row that another process printed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.lib import energy
from benchmarks.lib.energy import EnergyLog, energy_counter, energy_log, joules_per_token
from benchmarks.peers.beside_vllm import offline_table, with_energy

UUID = "GPU-1"


@pytest.fixture
def millijoules(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The counters of two GPUs."""
    counters = [5_000, 70_000]

    def by_index(index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0 if index.value < 2 else 2

    def by_uuid(name: bytes, handle: Any) -> int:
        handle._obj.value = 2
        return 0 if name == UUID.encode() else 2

    def count(found: Any) -> int:
        found._obj.value = 2
        return 0

    def used(handle: Any, found: Any) -> int:
        counter = counters[handle.value - 1]
        found._obj.value = max(0, counter)
        return 3 if counter < 0 else 0

    nvml = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetCount_v2=count,
        nvmlDeviceGetHandleByIndex_v2=by_index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetTotalEnergyConsumption=used,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return counters


@pytest.mark.parametrize(("visible", "joules"), [(None, 75.0), ("0", 5.0), ("1, 0", 75.0), (UUID, 70.0)])
def test_the_visible_gpus_are_counted_in_joules(millijoules: list[int], visible: str | None, joules: float) -> None:
    counter = energy_counter(visible=visible)
    assert counter is not None and counter() == joules
    millijoules[:] = [millijoules[0] + 2_000, millijoules[1] + 2_000]
    assert counter() - joules in (2.0, 4.0)


@pytest.mark.parametrize("visible", ["", "7", "GPU-unknown"])
def test_without_a_gpu_there_is_no_counter(millijoules: list[int], visible: str) -> None:
    assert energy_counter(visible=visible) is None


def test_a_gpu_that_does_not_count_its_energy_has_no_counter(millijoules: list[int]) -> None:
    millijoules[1] = -1
    assert energy_counter() is None and energy_counter(visible="0") is not None


def test_a_machine_without_nvml_has_no_counter_and_an_empty_log() -> None:
    assert energy_counter("no-such-library.so") is None
    with energy_log(None) as log:
        pass
    assert log.used(0.0, 1.0) is None


def test_a_log_interpolates_between_readings_that_differ() -> None:
    log = EnergyLog()
    for at, joules in ((0.0, 100.0), (1.0, 100.0), (2.0, 300.0), (4.0, 500.0)):
        log.note(at, joules)
    assert log.at == [0.0, 2.0, 4.0]
    assert log.used(1.0, 3.0) == pytest.approx(200.0)
    assert log.used(3.0, 3.0) is None


def test_a_log_is_written_while_other_work_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "PERIOD", 0.0)
    readings = iter(range(1 << 30))
    with energy_log(lambda: float(next(readings))) as log:
        while len(log.at) < 3:
            pass
    assert log.joules[:3] == [0.0, 1.0, 2.0] and log.at == sorted(log.at)


def test_a_row_has_the_joules_of_the_time_before_it_was_printed() -> None:
    log = EnergyLog([0.0, 10.0], [0.0, 5_000.0])  # 500 W
    row = dict(what="bs1", seconds=2.0, output_tok_s=100.0, total_tok_s=300.0)
    assert with_energy(row, 8.0, log) == row | dict(joules=1000.0, joules_output_token=5.0, joules_token=1.6667)
    assert with_energy(row, 8.0, EnergyLog()) == row
    assert with_energy(dict(what="stall", worst_ms=3.0), 8.0, log) == dict(what="stall", worst_ms=3.0)
    assert joules_per_token(10.0, 0, 0) == {}


def test_the_table_compares_joules_where_both_engines_have_them() -> None:
    def job(engine: str, what: str, joules: float) -> dict[str, Any]:
        row = dict(what=what, output_tok_s=200.0, joules_output_token=joules)
        return dict(engine=engine, part="offline", rows=[row, dict(what=what, output_tok_s=200.0)])

    done = [job("holdfast", "bs1", 2.0), job("vllm", "bs1 512/256", 3.0)]
    rate, joules = offline_table(done, "offline", {"bs1": "bs1 512/256"})
    assert (rate["what"], rate["ratio"], rate["runs"]) == ("bs1", 1.0, {"holdfast": 2, "vllm": 2})
    assert (joules["what"], joules["ratio"], joules["runs"]) == ("bs1, energy", 1.5, {"holdfast": 1, "vllm": 1})
