"""Deployments: profiles and stages by name; derived cost models are close to measurements, if there are some."""

from dataclasses import replace
from importlib.resources import files

import pytest

from holdfast.core.cost import LinkCost
from holdfast.core.layout import Layout
from holdfast.lab.simulator import deployment
from holdfast.lab.simulator.deployment import (
    TOKENS,
    attended_pairs,
    cache_tokens,
    configured_shape,
    deploy,
    derive,
    packaged_profile,
    round_to_tile,
)
from holdfast.lab.simulator.devices import DEVICES, LINKS, Link
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.workloads import fixed
from holdfast.lm.config import EngineConfig
from tests.lab.simulator.simulation import PROFILE


def test_stages_divide_the_layers_and_the_whole_is_their_sum():
    one, two = deploy("yi-34b", "h100"), deploy("yi-34b", "h100", pp=2, stage_link="ethernet-100g")
    assert one.pipeline is None and not one.measured
    first, last = two.pipeline.stages
    assert first.attention(1, 4096) == pytest.approx(last.attention(1, 4096))
    assert first.linear(1024) < last.linear(1024)  # the LM head
    whole = two.profile.cost
    assert whole.linear(1024) == pytest.approx(first.linear(1024) + last.linear(1024) + two.pipeline.hop(1024))
    assert whole.attention(512, 4096) == pytest.approx(one.profile.cost.attention(512, 4096))


def test_every_layer_is_in_one_stage_where_stages_do_not_divide_them_evenly():
    shape = MODELS["yi-34b"]
    stages = deploy("yi-34b", "h100", pp=7).pipeline.stages
    one = derive(shape, DEVICES["h100"])
    assert shape.layers % 7 and len({stage.attention(1, 4096) for stage in stages}) == 2
    assert sum(stage.attention(1, 4096) for stage in stages) == pytest.approx(one.attention(1, 4096))


def test_devices_that_share_layers_keep_all_of_a_position_together():
    for tp in (1, 2):
        assert deploy("yi-34b", "h100", tp=tp).profile.token_bytes == MODELS["yi-34b"].token_bytes


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


LAYOUTS = [Layout(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4)]


def test_every_packaged_profile_loads():
    for file in files("holdfast").joinpath("profiles").iterdir():
        if file.name.endswith(".json"):
            model, on = file.name.removesuffix(".json").split("--")
            device, layout = next((name, at) for name in DEVICES for at in LAYOUTS if on == f"{name}{at.suffix}")
            profile = packaged_profile(MODELS[model], device, layout)
            assert profile is not None and profile.layout == layout


def test_a_measured_profile_of_the_layout_precedes_a_derived_one(tmp_path, monkeypatch):
    derived = deploy("llama-3-8b", "h200", tp=2, pp=2)
    measured = replace(
        derived.profile,
        cost=replace(derived.profile.cost, stage_shares=(0.4, 0.6)),
        send=LinkCost((8192, 81920), (2e-5, 4e-5)),
        token_budget=4096,
    )
    measured.save(tmp_path / "profiles" / "llama-3-8b--h200-tp2-pp2.json")
    monkeypatch.setattr(deployment, "files", lambda name: tmp_path)
    found = deploy("llama-3-8b", "h200", tp=2, pp=2)
    assert found.measured and found.profile == measured
    first, second = found.pipeline.stages
    assert first.linear(512) == pytest.approx(0.4 * measured.cost.linear(512))
    assert second.attention(512, 4096) == pytest.approx(0.6 * measured.cost.attention(512, 4096))
    assert found.pipeline.hop(1) == 2e-5 and found.pipeline.hop(100) == pytest.approx(4e-5 * 10)
    for layout in (dict(tp=2), dict(tp=2, pp=2, link="pcie5"), dict(tp=2, pp=2, stage_link="pcie5")):
        assert not deploy("llama-3-8b", "h200", **layout).measured


@pytest.mark.parametrize("option", ["quantization", "kv_cache_dtype"])
def test_fp8_is_refused_on_devices_without_it(option):
    config = EngineConfig(**{option: "fp8"})
    assert getattr(configured_shape("mistral-7b", "h100", config), option) == "fp8"
    with pytest.raises(ValueError, match=f"{option} is fp8, which takes a Hopper GPU"):
        configured_shape("mistral-7b", "rtx-3090", config)


def test_fp8_weights_are_refused_without_a_native_decoder():
    with pytest.raises(ValueError, match=r"quantization is fp8, which native decoders have \(llama.*bloom-176b runs"):
        configured_shape("bloom-176b", "h200", EngineConfig(quantization="fp8"))
    cached = configured_shape("bloom-176b", "h200", EngineConfig(kv_cache_dtype="fp8"))
    assert cached.token_bytes == MODELS["bloom-176b"].token_bytes / 2


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


H200, A100 = DEVICES["h200"], DEVICES["a100-80gb"]
STEPS = {
    "one decode": [(1, 512)],
    "8 decodes": [(1, 600)] * 8,
    "32 decodes": [(1, 600)] * 32,
    "32 decodes at 4k": [(1, 4096)] * 32,
    "128 decodes": [(1, 600)] * 128,
    "128 decodes at 4k": [(1, 4096)] * 128,
    "prefill of 512": [(512, 512)],
    "prefill of 1,024": [(1024, 1024)],
    "prefill of 2,048": [(2048, 2048)],
    "prefill of 4,096": [(4096, 4096)],
    "prefill of 8,192": [(8192, 8192)],
    "chunk of 512 at 4k": [(512, 4096)],
    "chunk of 2,048 at 8k": [(2048, 8192)],
    "chunk of 512 at 4k beside 32 decodes": [(512, 4096)] + [(1, 1024)] * 32,
}


MEASURED = ("llama-3-8b", "mistral-7b-v0.3", "llama-2-13b")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (model, name)
        for model in MEASURED
        for name, step in STEPS.items()
        if max(context for _, context in step) <= MODELS[model].max_model_len
    ],
)
def test_derived_steps_on_an_h200_are_within_7_percent_of_measured_ones(model, name):
    measured, derived = packaged_profile(MODELS[model], "h200").cost, derive(MODELS[model], H200)
    assert derived.step(STEPS[name]) == pytest.approx(measured.step(STEPS[name]), rel=0.07)


@pytest.mark.parametrize(("model", "tp", "stated"), [("mistral-7b", 1, 0.020), ("yi-34b", 2, 0.040)])
def test_a_derived_decode_step_on_an_a100_matches_sarathi_serves_slo(model, tp, stated):
    """Table 3: the strict SLO is five times a step of 32 decodes at 4k."""
    cost = derive(MODELS[model], A100, tp=tp, link=LINKS["nvlink3"])
    assert cost.step([(1, 4096)] * 32) == pytest.approx(stated, rel=0.15)


GAINS = {
    "quantization": {(1, 512, 256): 1.43, (32, 512, 128): 1.40, (128, 512, 128): 1.42, (16, 8192, 16): 1.48},
    "kv_cache_dtype": {(32, 512, 128): 0.99, (128, 512, 128): 1.02},
}
"""Measured throughput gain of FP8 for Llama-3-8B on an H200, by (prompts, prompt length, output length)."""


@pytest.mark.parametrize(("option", "work"), [(option, work) for option, works in GAINS.items() for work in works])
def test_fp8_gains_as_much_as_measured_on_an_h200(option, work):
    count, prompt, output = work
    seconds = []
    for kind in ({}, {option: "fp8"}):
        shape = replace(MODELS["llama-3-8b"], max_model_len=16_384, **kind)
        profile = replace(deploy(shape, "h200").profile, token_budget=2048)
        config = EngineConfig(max_sequences=512, prefix_sharing=False)
        seconds.append(simulate(config, profile, fixed(count, prompt, output)).seconds)
    assert seconds[0] / seconds[1] == pytest.approx(GAINS[option][work], rel=0.03)


def test_fp8_weights_leave_room_for_as_many_blocks_as_measured_on_an_h200():
    shapes = [replace(MODELS["llama-3-8b"], quantization=kind) for kind in ("none", "fp8")]
    plain, fp8 = (cache_tokens(shape, H200, devices=1) for shape in shapes)
    assert (fp8 - plain) // 16 == pytest.approx(59_241 - 55_925, rel=0.01)


def test_an_fp8_cache_holds_twice_the_tokens_and_decodes_read_it_in_three_quarters_of_the_time():
    shapes = [replace(MODELS["llama-3-8b"], kv_cache_dtype=kind) for kind in ("auto", "fp8")]
    plain, fp8 = (cache_tokens(shape, H200, devices=1) for shape in shapes)
    assert fp8 == pytest.approx(2 * plain, abs=1)
    plain, fp8 = (derive(shape, H200).attention(1, 2048) for shape in shapes)
    assert 0.71 < fp8 / plain < 0.80


def test_fp8_on_a_device_without_it_is_refused():
    for option in ("quantization", "kv_cache_dtype"):
        message = rf"{option} is fp8, which takes a Hopper GPU .*\(h100, h200\), not a100-80gb"
        with pytest.raises(ValueError, match=message):
            derive(replace(MODELS["mistral-7b"], **{option: "fp8"}), A100)


def test_one_token_past_a_tile_costs_a_whole_tile():
    cost = derive(MODELS["mistral-7b"], A100)
    assert 1.25 < cost.linear(257) / cost.linear(256) < 1.45  # Sarathi-Serve §4.3: 1.32 in some cases
    assert cost.linear(257) == pytest.approx(cost.linear(384))
    assert [round_to_tile(tokens) for tokens in (1, 17, 65, 257)] == [16, 32, 128, 384]


def test_time_grows_with_tokens_and_context():
    cost = derive(MODELS["yi-34b"], A100)
    linear = [cost.linear(tokens) for tokens in TOKENS]
    assert linear == sorted(linear)
    assert cost.attention(1, 1000) < cost.attention(1, 2000) < cost.attention(512, 2000) < cost.attention(1024, 2000)


def test_a_chunked_prompt_has_as_many_attended_pairs_as_a_whole_one():
    for window in (None, 100):
        chunks = sum(attended_pairs(50, stop, window) for stop in range(50, 401, 50))
        assert chunks == attended_pairs(400, 400, window) == sum(min(at, window or at) for at in range(1, 401))


def test_a_sliding_window_bounds_decode_attention():
    cost = derive(MODELS["mistral-7b"], A100)
    assert cost.attention(1, 4096) == pytest.approx(cost.attention(1, 32_768))


def test_two_devices_halve_the_work_and_add_all_reduces():
    shape = MODELS["llama-2-70b"]
    one, two = derive(shape, A100), derive(shape, A100, tp=2, link=LINKS["nvlink3"])
    slow = derive(shape, A100, tp=2, link=LINKS["pcie4"])
    assert one.linear(2048) / 2 < two.linear(2048) < slow.linear(2048)
    assert two.attention(1, 4096) == pytest.approx(one.attention(1, 4096) / 2)


@pytest.mark.parametrize(("model", "reductions"), [("llama-2-70b", 2), ("falcon-180b", 1)])
def test_each_layer_ends_in_an_all_reduce_after_attention_and_after_the_mlp_unless_they_are_parallel(model, reductions):
    """A ring of 4 devices sends 6 messages for each: apart from latency they cost the same on both links."""
    shape = MODELS[model]
    near, far = (derive(shape, A100, tp=4, link=Link("wire", 1e11, latency)) for latency in (0.0, 1e-5))
    for tokens in (1, 1024):
        extra = far.linear(tokens) - near.linear(tokens)
        assert extra == pytest.approx(shape.layers * reductions * 6 * 1e-5)


def test_an_all_reduce_sends_the_activations_of_every_token():
    shape = MODELS["llama-2-70b"]
    near, far = (derive(shape, A100, tp=2, link=Link("wire", rate, 0.0)) for rate in (1e12, 1e9))
    extra = [far.linear(tokens) - near.linear(tokens) for tokens in (1024, 4096)]
    assert extra[1] == pytest.approx(4 * extra[0]) and extra[0] > 0


def test_the_cache_gets_the_memory_that_the_weights_leave():
    assert cache_tokens(MODELS["mistral-7b"], A100, devices=1) == pytest.approx(420_000, rel=0.05)
    with pytest.raises(ValueError, match="llama-2-70b takes 138 GB, and 1 a100-80gb have 80; take more devices"):
        cache_tokens(MODELS["llama-2-70b"], A100, devices=1)


def test_each_device_keeps_memory_for_its_own_activations():
    shape = MODELS["mistral-7b"]
    one, four, all_memory = (
        cache_tokens(shape, A100, devices=devices, memory_fraction=fraction) * shape.token_bytes
        for devices, fraction in ((1, 0.9), (4, 0.9), (1, 1.0))
    )
    of_a_device = A100.memory * 0.9 - one - shape.weight_bytes
    assert of_a_device > 1e9, "a step's activations take memory"
    assert four == pytest.approx(4 * (one + shape.weight_bytes) - shape.weight_bytes, rel=1e-5)
    assert all_memory - one == pytest.approx(0.1 * A100.memory, rel=1e-5)


def test_an_invalid_tensor_parallel_size_is_refused():
    with pytest.raises(ValueError, match="tp is 3; it must divide the 32 heads"):
        derive(MODELS["mistral-7b"], A100, tp=3, link=LINKS["pcie4"])
    with pytest.raises(ValueError, match="takes a link"):
        derive(MODELS["mistral-7b"], A100, tp=2)
