"""Deployments: from names of models and devices to profiles and stages."""

from dataclasses import replace
from importlib.resources import files

import pytest

from holdfast.core.config import EngineConfig
from holdfast.engine.profiles import CostProfile
from holdfast.lab.simulator import deployment
from holdfast.lab.simulator.deployment import configured_shape, deploy, packaged_profile
from holdfast.lab.simulator.devices import DEVICES
from holdfast.lab.simulator.shapes import MODELS
from tests.lab.simulator.simulation import PROFILE


def test_stages_divide_the_layers_and_the_whole_is_their_sum():
    one, two = deploy("yi-34b", "h100"), deploy("yi-34b", "h100", pp=2, stage_link="ethernet-100g")
    assert one.pipeline is None and not one.measured and (one.devices, two.devices) == (1, 2)
    first, last = two.pipeline.stages
    assert first.attention(1, 4096) == pytest.approx(last.attention(1, 4096))
    assert first.linear(1024) < last.linear(1024)  # the LM head
    whole = two.profile.cost
    assert whole.linear(1024) == pytest.approx(first.linear(1024) + last.linear(1024) + two.pipeline.hop(1024))
    assert whole.attention(512, 4096) == pytest.approx(one.profile.cost.attention(512, 4096))


def test_more_devices_have_more_memory_and_copy_faster():
    one, four = deploy("mistral-7b", "a100-80gb"), deploy("mistral-7b", "a100-80gb", tp=2, pp=2)
    assert four.profile.cache_tokens > 4 * one.profile.cache_tokens
    assert four.profile.copy_rate == 4 * one.profile.copy_rate


def test_a_measured_profile_in_the_package_replaces_a_derived_one(tmp_path, monkeypatch):
    (tmp_path / "profiles").mkdir()
    PROFILE.save(tmp_path / "profiles" / "mistral-7b--h200.json")
    replace(PROFILE, copy_rate=3e9).save(tmp_path / "profiles" / "mistral-7b--a40.json")
    monkeypatch.setattr(deployment, "files", lambda package: tmp_path)
    found = deploy("mistral-7b", "h200")
    assert found.measured and found.profile == replace(PROFILE, copy_rate=DEVICES["h200"].copy_rate)
    assert deploy("mistral-7b", "a40").profile.copy_rate == 3e9
    assert not deploy("mistral-7b", "h200", tp=2).measured
    assert not deploy("llama-3-8b", "h200").measured
    for option in ("quantization", "kv_cache_dtype"):
        fp8 = deploy(replace(MODELS["mistral-7b"], **{option: "fp8"}), "h200")
        assert not fp8.measured and getattr(fp8.profile, option) == "fp8", "the measured profile has another precision"
    assert not deploy(replace(MODELS["mistral-7b"], layers=2), "h200").measured


def test_every_packaged_profile_loads():
    for file in files("holdfast").joinpath("profiles").iterdir():
        if file.name.endswith(".json"):
            model, device = file.name.removesuffix(".json").split("--")
            assert model in MODELS and device in DEVICES
            assert isinstance(packaged_profile(MODELS[model], device), CostProfile)


@pytest.mark.parametrize("option", ["quantization", "kv_cache_dtype"])
def test_fp8_is_refused_on_devices_without_it(option):
    config = EngineConfig(**{option: "fp8"})
    assert getattr(configured_shape("mistral-7b", "h100", config), option) == "fp8"
    with pytest.raises(ValueError, match=f"{option} is fp8, which takes a Hopper GPU"):
        configured_shape("mistral-7b", "rtx-3090", config)


def test_fp8_weights_are_refused_without_a_native_decoder():
    with pytest.raises(ValueError, match=r"quantization is fp8, which native decoders have \(llama.*opt-13b runs on"):
        configured_shape("opt-13b", "h200", EngineConfig(quantization="fp8"))
    cached = configured_shape("opt-13b", "h200", EngineConfig(kv_cache_dtype="fp8"))
    assert cached.token_bytes == MODELS["opt-13b"].token_bytes / 2


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 0}, "tp is 0 and pp is 1"),
        ({"pp": 33}, "at most 32 layers"),
        ({"tp": 3}, "must divide the 32 heads"),
        ({"link": "string"}, "link string is unknown"),
    ],
)
def test_an_invalid_layout_is_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        deploy("mistral-7b", "a100-80gb", **layout)
