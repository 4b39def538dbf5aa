"""The profile of an application's cells: measured, found again, passed over or refused, and what it changes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_apps
import torch

from holdfast.cells.cell import Cell
from holdfast.cells.measure import device_name
from holdfast.cells.types import number
from holdfast.cli.command import main
from holdfast.core.cell_cost import CellCost
from holdfast.core.config import AppConfig
from holdfast.engine.client.app_client import AppClient
from holdfast.engine.process import app_profiles
from holdfast.engine.process.app_profiles import Found, find_profile, measure_profile
from holdfast.engine.profiles import CellProfile, cached_cell_profile_path
from tests.engine.conftest import build_app

APP = "tiny_apps:adding"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let engines find the modules of tests, and keep profiles apart from the user's."""
    monkeypatch.chdir(Path(tiny_apps.__file__).parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def types() -> dict[Cell, int]:
    return number(tiny_apps.adding().cells)


@pytest.fixture
def measured(types: dict[Cell, int], monkeypatch: pytest.MonkeyPatch) -> Found:
    """A stored profile by which the largest size is 32: twice the cell's own."""

    def costs(*given: Any, largest: int, **options: Any) -> tuple[CellCost, ...]:
        assert largest == 64
        return (CellCost((1, 8, 32, 64), (1e-5, 1.05e-5, 2e-5, 4e-5)),)

    monkeypatch.setattr(app_profiles, "measure_cells", costs)
    return measure_profile(APP, tiny_apps.adding(), types, "cpu", 64, lambda stage: None)


def test_what_was_measured_is_found_again(measured: Found, types: dict[Cell, int]) -> None:
    assert measured.path == cached_cell_profile_path(APP, device_name("cpu"))
    found = find_profile(APP, types, ["cpu"], "auto")
    assert found == measured
    assert found is not None and found.profile.sizes == ((1, 8, 32),)
    assert find_profile(APP, types, ["cpu"], str(measured.path)) == measured


def test_there_is_none_for_another_application_or_if_profiles_are_off(measured: Found, types: dict[Cell, int]) -> None:
    assert find_profile("tiny_apps:slow", types, ["cpu"], "auto") is None
    assert find_profile(APP, types, ["cpu"], "off") is None


def test_workers_that_share_the_threads_need_a_profile_of_their_own(
    types: dict[Cell, int], measured: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 * threads)
    assert find_profile(APP, types, ["cpu"], "auto") is None
    assert find_profile(APP, types, ["cpu", "cpu"], "auto") == measured


def test_a_stored_profile_that_does_not_fit_is_passed_over_with_a_line_in_the_log(
    measured: Found, types: dict[Cell, int], caplog: pytest.LogCaptureFixture
) -> None:
    replace(measured.profile, versions="torch 1.0").save(measured.path)
    with caplog.at_level(logging.WARNING):
        assert find_profile(APP, types, ["cpu"], "auto") is None
    assert "was measured with torch 1.0, and this is holdfast" in caplog.text
    assert "holdfast profile --app tiny_apps:adding" in caplog.text
    measured.path.write_text("{")
    assert find_profile(APP, types, ["cpu"], "auto") is None


def test_a_file_that_does_not_fit_is_refused(measured: Found, types: dict[Cell, int], tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    replace(measured.profile, versions="torch 1.0").save(given)
    with pytest.raises(ValueError, match=r"was measured with torch 1\.0, and this is holdfast"):
        find_profile(APP, types, ["cpu"], str(given))
    replace(measured.profile, device="NVIDIA H200").save(given)
    with pytest.raises(ValueError, match=r"was measured on NVIDIA H200, and this is CPU"):
        find_profile(APP, types, ["cpu"], str(given))
    with pytest.raises(ValueError, match=r"nothing\.json cannot be read"):
        find_profile(APP, types, ["cpu"], str(tmp_path / "nothing.json"))


async def test_an_engine_serves_at_the_sizes_of_the_profile(tmp_path: Path) -> None:
    config = AppConfig(app=(APP,), app_device=("cpu",), app_capacity=64)
    stages: list[str] = []
    client = await AppClient.start(APP, config, stages.append, threads=1, measure=4)
    await client.close()
    assert any(stage.startswith("measuring cells") for stage in stages)
    path = Path(client.info.profile_path)
    profile = CellProfile.load(path)
    assert path.is_relative_to(tmp_path) and client.info.sizes == profile.sizes
    assert [(each.name, each.cost.sizes) for each in profile.types] == [("adding-cell", (1, 2, 4))]
    data = json.loads(path.read_text())
    data["types"][0]["cost"] = {"sizes": [2, 3, 5], "seconds": [1.0, 1.2, 1.5]}
    path.write_text(json.dumps(data))
    info = build_app(config)
    assert (info.sizes, info.profile_path) == (((2, 3, 5),), str(path))
    info = build_app(replace(config, app_profile="off"))
    assert (info.sizes, info.profile_path) == (((1, 2, 4, 8, 16),), "")
    data["versions"] = "torch 1.0"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"was measured with torch 1\.0"):
        build_app(replace(config, app_profile=str(path)))


def test_the_command_prints_times_knee_and_sizes_and_writes_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.json"
    options = ["--device", "cpu", "--threads", "1", "--largest", "8", "--out", str(copy)]
    assert main(["profile", "--app", APP, *options]) == 0
    shown = capsys.readouterr().out
    profile = CellProfile.load(copy)
    (kind,) = profile.types
    assert f"batch sizes of adding-cell: {', '.join(map(str, kind.sizes))}" in shown
    assert "a task of adding-cell" in shown and "nodes/s" in shown and shown.count("knee") == 1
    for seconds in kind.cost.seconds:
        assert f"{seconds * 1e6:,.1f}" in shown
    assert f"saved to {cached_cell_profile_path(APP, profile.device)}" in shown


def test_serving_with_a_profile_of_other_versions_is_one_line_and_exit_code_2(
    measured: Found, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "given.json"
    replace(measured.profile, versions="torch 1.0").save(given)
    options = ["--port", "0", "--app-device", "cpu", "--threads", str(torch.get_num_threads())]
    assert main(["serve", "--app", APP, "--app-profile", str(given), *options]) == 2
    err = capsys.readouterr().err
    assert "was measured with torch 1.0" in err and err.count("\n") == 1
