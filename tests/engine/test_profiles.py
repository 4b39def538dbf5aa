"""Profiles as files: kept apart by what they depend on, read back as they were, refused where damaged."""

import json

import pytest

from holdfast.engine.profiles import Profile, kept_at
from tests.simulator.simulation import PROFILE


def test_a_profile_survives_its_file(tmp_path):
    path = tmp_path / "new" / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert [child.name for child in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("cost"),
        lambda data: data["cost"].update(linear_tokens=[1]),
        lambda data: data.update(tile=0),
    ],
)
def test_a_damaged_file_is_refused_by_name_with_the_way_out(tmp_path, damage):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"profile\.json is not a profile.*holdfast profile"):
        Profile.load(path)


def test_each_model_dtype_and_device_has_a_place_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = []
    for number in range(2):
        directory = tmp_path / str(number) / "llama"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({"number": number}))
        models.append(directory)
    places = {
        kept_at(model, dtype, cache_dtype, device)
        for model in models
        for dtype, cache_dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"))
        for device in ("CPU (x86_64, 1 thread)", "NVIDIA H200")
    }
    assert len(places) == 12
    assert all(place.parent == tmp_path / "cache" / "holdfast" / "profiles" for place in places)
    assert all(" " not in place.name and "/" not in place.name for place in places)
