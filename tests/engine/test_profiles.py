"""Profile files: a path for each combination, exact reading, and refusal of damaged files."""

import json
import threading
from dataclasses import replace

import pytest

from holdfast.core.cell_cost import CellCost
from holdfast.engine import profiles
from holdfast.engine.profiles import (
    CellProfile,
    CellType,
    CostProfile,
    Extent,
    StoredProfiles,
    cached_cell_profile_path,
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


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A checkpoint's directory, and no stored profile."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "llama-3.1").mkdir()
    (tmp_path / "llama-3.1" / "config.json").write_text("{}")
    return tmp_path / "llama-3.1"


def reaching(decodes, tokens=512, context=2048, *, measured=False):
    """A profile of this extent."""
    sizes = {"max_decodes": decodes, "max_step_tokens": tokens, "max_model_len": context}
    return replace(PROFILE, measured=measured, **sizes)


def save(stored, *profiles):
    for profile in profiles:
        profile.save(stored.path(profile))


def found(stored, *extent, **how):
    """The profile found for an engine of this extent; None if there is none."""
    kept = stored.find(Extent(*extent), **how)
    assert kept is None or kept[0] == stored.path(kept[1])
    return None if kept is None else kept[1]


def test_a_stored_profile_serves_an_engine_of_its_extent_and_smaller_ones_only(model):
    stored, profile = StoredProfiles(model, "float32", "CPU"), reaching(8)
    assert found(stored, 8, 512, 2048) is None
    save(stored, profile)
    assert found(stored, 8, 512, 2048) == found(stored, 1, 16, 64) == profile
    assert found(stored, 9, 512, 2048) is found(stored, 8, 513, 2048) is None
    assert found(stored, 8, 512, 4096) == profile, "attention is priced up to twice the context"
    assert found(stored, 8, 512, 4097) is None


def test_the_smallest_covering_profile_is_used_and_one_measured_in_full_before_estimates(model):
    stored, small, large = StoredProfiles(model, "float32", "CPU"), reaching(8), reaching(64)
    save(stored, large, small)
    assert found(stored, 8, 512, 2048) == small and found(stored, 9, 512, 2048) == large
    assert found(stored, 8, 512, 2048, in_full=True) is None
    measured = reaching(256, measured=True)
    save(stored, measured)
    assert found(stored, 8, 512, 2048) == found(stored, 8, 512, 2048, in_full=True) == measured
    save(stored, reaching(256))
    assert found(stored, 256, 512, 2048) == measured, "an estimate does not replace it"


def test_a_profile_of_an_unknown_extent_covers_no_engine(model):
    stored = StoredProfiles(model, "float32", "CPU")
    save(stored, PROFILE)
    assert found(stored, 1, 1, 64) is None


def test_a_file_that_is_no_profile_is_passed_over_with_a_warning_that_names_it(model, caplog):
    stored = StoredProfiles(model, "float32", "CPU")
    save(stored, reaching(8), reaching(64))
    stored.path(reaching(8)).write_text("{}")
    (stored.folder / "a.json").mkdir()
    assert found(stored, 8, 512, 2048) == reaching(64)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2 and "a.json" in warned[0] and str(stored.path(reaching(8))) in warned[1]


def test_the_profiles_of_earlier_versions_are_removed_and_nothing_else(model, monkeypatch):
    kept = [StoredProfiles(model, "float32", "CPU", "no library"), StoredProfiles(model, "bfloat16", "CPU")]
    earlier = []
    for version in (profiles.MEASURED - 1, profiles.MEASURED):
        with monkeypatch.context() as before:
            before.setattr(profiles, "MEASURED", version)
            earlier.append(StoredProfiles(model, "float32", "CPU"))
    for each in (*earlier, *kept):
        save(each, reaching(8), reaching(8, measured=True))
        with each.held(required=True):
            pass
    files = [earlier[0].folder.with_name(f"{earlier[0].folder.name}{end}") for end in (".json", ".lock")]
    for path in files:
        path.write_text("{}")
    note = earlier[1].folder / "note.json"
    note.write_text("by hand")
    StoredProfiles(model, "float32", "CPU", "library").remove_earlier()
    assert not any(path.exists() for path in (earlier[0].folder, *files))
    assert list(earlier[1].folder.iterdir()) == [note]
    assert all(found(each, 8, 512, 2048) for each in kept)


def test_a_profile_of_the_present_version_is_not_removed_by_its_own_engine(model):
    stored = StoredProfiles(model, "float32", "H200")
    save(stored, reaching(8))
    stored.remove_earlier()
    assert found(stored, 8, 512, 2048)


def test_engines_that_start_together_measure_once(model):
    stored, measured = StoredProfiles(model, "float32", "CPU"), []
    begun, go_on = threading.Event(), threading.Event()

    def start(number):
        with stored.held(required=True):
            if found(stored, 8, 512, 2048) is None:
                begun.set()
                assert go_on.wait(60)
                measured.append(number)
                save(stored, reaching(8))

    engines = [threading.Thread(target=start, args=(number,)) for number in range(3)]
    for engine in engines:
        engine.start()
    assert begun.wait(60)
    assert found(stored, 8, 512, 2048) is None
    go_on.set()
    for engine in engines:
        engine.join()
    assert len(measured) == 1
    assert found(stored, 8, 512, 2048) == reaching(8)


def test_a_profile_that_cannot_be_stored_is_refused_only_if_it_was_asked_for(model, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file in place of the directory")
    stored = StoredProfiles(model, "float32", "CPU")
    path = stored.path(PROFILE)
    with stored.held(required=False):
        assert found(stored, 8, 512, 2048) is None
        keep(PROFILE, path, required=False)
    (warning,) = caplog.messages
    assert f"cannot be stored in {path}: " in warning and "each start makes it again" in warning
    with pytest.raises(OSError, match=r"llama.*: .*; set XDG_CACHE_HOME"), stored.held(required=True):
        raise AssertionError("nothing is measured that cannot be stored")
    with pytest.raises(OSError, match=r"llama.*: .*; set XDG_CACHE_HOME"):
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


def test_each_model_precision_and_device_has_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = []
    for number in range(2):
        directory = tmp_path / str(number) / "llama"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({"number": number}))
        models.append(directory)
    places = {
        StoredProfiles(model, precision_of(dtype, quantization, cache), device).folder
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
