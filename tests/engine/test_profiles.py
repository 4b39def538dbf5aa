"""Profile files: a path for each combination, exact reading, and refusal of damaged files."""

import json
import threading
from dataclasses import replace

import pytest

from holdfast.core.cell_cost import CellCost
from holdfast.engine.profiles import (
    CellProfile,
    CellType,
    CostProfile,
    cached_cell_profile_path,
    cached_profile_path,
    held,
    keep,
)  # fmt: skip
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import precision_of
from tests.lab.simulator.simulation import PROFILE


def test_a_profile_survives_saving_and_loading(tmp_path):
    path = tmp_path / "new" / "profile.json"
    PROFILE.save(path)
    assert CostProfile.load(path) == PROFILE
    assert [child.name for child in path.parent.iterdir()] == ["profile.json"]


def test_engines_that_start_together_measure_once(tmp_path):
    path, measured = tmp_path / "profiles" / "tiny.json", []
    begun, go_on = threading.Event(), threading.Event()

    def start(number):
        with held(path, required=True):
            if not path.is_file():
                begun.set()
                assert go_on.wait(60)
                measured.append(number)
                PROFILE.save(path)

    engines = [threading.Thread(target=start, args=(number,)) for number in range(3)]
    for engine in engines:
        engine.start()
    assert begun.wait(60)
    assert not path.is_file()
    go_on.set()
    for engine in engines:
        engine.join()
    assert len(measured) == 1
    assert CostProfile.load(path) == PROFILE


def test_a_profile_that_cannot_be_stored_is_refused_only_if_it_was_asked_for(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file in place of the directory")
    path = tmp_path / "cache" / "tiny.json"
    with held(path, required=False):
        keep(PROFILE, path, required=False)
    (warning,) = caplog.messages
    assert f"cannot be stored in {path}: " in warning and "each start makes it again" in warning
    with pytest.raises(OSError, match=r"tiny\.json: .*; set XDG_CACHE_HOME"), held(path, required=True):
        raise AssertionError("nothing is measured that cannot be stored")
    with pytest.raises(OSError, match=r"tiny\.json: .*; set XDG_CACHE_HOME"):
        keep(PROFILE, path, required=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("cost"),
        lambda data: data["cost"].update(linear_tokens=[1]),
        lambda data: data["cost"].update(linear_tokens=[], linear_seconds=[]),
        lambda data: data["cost"].update(attention_queries=[], attention_seconds=[]),
        lambda data: data["cost"]["linear_tokens"].reverse(),
        lambda data: data["cost"]["linear_seconds"].__setitem__(0, -0.001),
        lambda data: data["cost"].update(burst={"share": 0.0, "seconds": 0.04}),
        lambda data: data["cost"].update(burst={"share": 0.9, "seconds": "long"}),
        lambda data: data.update(tile=0),
        lambda data: data.update(quantization="int4"),
        lambda data: data.update(dtype="bfloat16, fp8 weights"),
    ],
)
def test_a_damaged_profile_is_refused_with_its_file_and_the_way_out(tmp_path, damage):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"profile\.json is not a profile.*holdfast profile"):
        CostProfile.load(path)


def test_each_model_precision_and_device_has_its_own_profile_path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = []
    for number in range(2):
        directory = tmp_path / str(number) / "llama"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({"number": number}))
        models.append(directory)
    places = {
        cached_profile_path(model, precision_of(dtype, quantization, cache), device)
        for model in models
        for dtype in ("float32", "bfloat16")
        for quantization in ("none", "fp8")
        for cache in ("auto", "fp8")
        for device in ("CPU (x86_64, 1 thread)", "NVIDIA H200")
    }
    assert len(places) == 32
    assert all(place.parent == tmp_path / "cache" / "holdfast" / "profiles" for place in places)
    assert all(" " not in place.name and "/" not in place.name for place in places)


@pytest.mark.parametrize(("name", "measured", "asked"), [
    ("quantization", "none", "fp8"),
    ("quantization", "fp8", "none"),
    ("kv_cache_dtype", "auto", "fp8"),
    ("kv_cache_dtype", "fp8", "auto"),
])  # fmt: skip
def test_a_profile_of_another_precision_is_refused(name, measured, asked):
    profile = replace(PROFILE, **{name: measured})
    profile.require(EngineConfig(**{name: measured}))
    with pytest.raises(ValueError, match=f"{name} is {asked}, and the profile of m on d was measured with {measured}"):
        profile.require(EngineConfig(**{name: asked}))


def test_one_error_names_every_mismatch_of_a_profile():
    with pytest.raises(
        ValueError, match=r"none and kv_cache_dtype is auto.*--quantization fp8 --kv-cache-dtype fp8, or"
    ):
        replace(PROFILE, quantization="fp8", kv_cache_dtype="fp8").require(EngineConfig())


def test_a_precision_names_the_parts_in_fp8():
    assert precision_of("bfloat16", "none", "auto") == "bfloat16"
    assert precision_of("bfloat16", "fp8", "auto") == "bfloat16, fp8 weights"
    assert replace(PROFILE, kv_cache_dtype="fp8", quantization="fp8").precision == "float32, fp8 weights and cache"


CELLS = CellProfile(
    app="dates",
    device="NVIDIA H200",
    versions="torch 1",
    types=(
        CellType("encoder", "e1", CellCost((1, 2, 4), (1.0, 1.9, 2.0))),
        CellType("decoder", "d1", CellCost((1, 2, 4), (1.0, 2.0, 4.0))),
    ),
)
FITTING = {"device": "NVIDIA H200", "versions": "torch 1", "types": [("encoder", "e1"), ("decoder", "d1")]}


def test_a_profile_of_cells_survives_saving_and_loading_and_gives_sizes_by_type(tmp_path):
    path = tmp_path / "new" / "profile.json"
    CELLS.save(path)
    assert CellProfile.load(path) == CELLS
    assert CELLS.sizes == ((1, 4), (1,))
    CELLS.require(**FITTING)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": "NVIDIA H100"}, "was measured on NVIDIA H200, and this is NVIDIA H100"),
        ({"versions": "torch 2"}, "was measured with torch 1, and this is torch 2"),
        ({"types": [("encoder", "e1")]}, "has the cells encoder, decoder, and the application has encoder"),
        ({"types": [("decoder", "d1"), ("encoder", "e1")]}, "and the application has decoder, encoder"),
        ({"types": [("encoder", "e1"), ("decoder", "d2")]}, "was measured with another cell decoder"),
    ],
)
def test_a_profile_of_other_cells_versions_or_devices_is_refused_with_the_way_out(changed, message):
    with pytest.raises(ValueError, match=f"application dates .*{message}.*holdfast profile --app dates"):
        CELLS.require(**(FITTING | changed))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("versions"),
        lambda data: data["types"][0].pop("fingerprint"),
        lambda data: data["types"][0]["cost"].update(sizes=[1, 2]),
        lambda data: data["types"][0]["cost"].update(sizes=[4, 2, 1]),
        lambda data: data["types"][1]["cost"]["seconds"].__setitem__(0, 0.0),
        lambda data: data["types"][1]["cost"]["seconds"].__setitem__(0, "long"),
    ],
)
def test_a_damaged_profile_of_cells_is_refused_with_its_file_and_the_way_out(tmp_path, damage):
    path = tmp_path / "profile.json"
    CELLS.save(path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"profile\.json is not a profile.*holdfast profile --app"):
        CellProfile.load(path)


def test_each_application_and_device_has_its_own_profile_path():
    apps = ("dates", "my.module:dates", "my.module.dates", "my.module-dates")
    places = {cached_cell_profile_path(app, device) for app in apps for device in ("CPU (x86_64, 1 thread)", "NVIDIA")}
    assert len(places) == 8
    assert all(" " not in place.name and "/" not in place.name and ":" not in place.name for place in places)
