"""Varied deployments change the costs they name and nothing else."""

import pytest

from benchmarks.lib.papers import (
    DECODED_AT,
    LAUNCH_SECONDS,
    PROMPTS_FROM,
    RECORDED_DECODES,
    RECORDED_PREFILLS,
    deployed,
    recorded_rows,
)
from holdfast.lab.simulator.deployment import deploy

YI = {"device": "a100-80gb", "tp": 2}
PIPELINE = {"device": "a40", "tp": 4, "pp": 2, "link": "nvlink-pairs", "stage_link": "pcie4-staged"}


def test_no_variation_gives_the_plain_deployment() -> None:
    assert deployed("yi-34b", **YI) == deploy("yi-34b", **YI)
    assert deployed("llama-2-70b", **PIPELINE) == deploy("llama-2-70b", **PIPELINE)


def test_reading_keys_per_query_head_multiplies_decode_attention_by_the_group_and_keeps_memory() -> None:
    plain, heads = deployed("yi-34b", **YI), deployed("yi-34b", ["heads"], **YI)
    assert heads.profile.cost.attention(1, 4096) == pytest.approx(7 * plain.profile.cost.attention(1, 4096))
    assert heads.profile.cost.attention(2048, 2048) == pytest.approx(plain.profile.cost.attention(2048, 2048))
    assert heads.profile.cost.linear_seconds == plain.profile.cost.linear_seconds
    assert heads.profile.cache_tokens == plain.profile.cache_tokens


@pytest.mark.parametrize(("model", "layout"), [("yi-34b", YI), ("llama-2-70b", PIPELINE)])
def test_extra_step_seconds_are_added_once_and_shared_by_pipeline_stages(model, layout) -> None:
    plain, slow = deployed(model, **layout), deployed(model, step_seconds=0.02, **layout)
    decodes = [(1, 1024)] * 16
    assert slow.profile.cost.step(decodes) == pytest.approx(plain.profile.cost.step(decodes) + 0.02)
    if slow.pipeline:
        assert sum(stage.step(decodes) for stage in slow.pipeline.stages) == pytest.approx(
            sum(stage.step(decodes) for stage in plain.pipeline.stages) + 0.02
        )


@pytest.mark.parametrize("vary", [["recorded"], ["recorded", "hidden"]])
def test_recorded_steps_take_as_long_as_the_records(vary) -> None:
    cost = deployed("yi-34b", vary, **YI).profile.cost
    for tokens, ms in RECORDED_PREFILLS.items():
        assert 1e3 * cost.step([(tokens, tokens)]) == pytest.approx(ms)
    for rows, ms in RECORDED_DECODES.items():
        assert 1e3 * cost.step([(1, DECODED_AT)] * rows) == pytest.approx(ms, rel=1e-3)


@pytest.mark.parametrize("vary", [["prompts"], ["prompts", "launch"]])
def test_steps_of_many_tokens_take_the_recorded_time_of_a_prompt_and_those_of_few_do_not(vary) -> None:
    plain, cost = (deployed("yi-34b", each, **YI).profile.cost for each in (vary[1:], vary))
    for tokens, ms in RECORDED_PREFILLS.items():
        wanted = ms / 1e3 if tokens >= PROMPTS_FROM else plain.step([(tokens, tokens)])
        assert cost.step([(tokens, tokens)]) == pytest.approx(wanted), tokens
    decodes = [(1, 2048)] * 32
    assert cost.step(decodes) == pytest.approx(plain.step(decodes))


def test_what_a_recorded_decode_takes_beyond_the_derived_one_is_hidden_only_beside_a_prompt() -> None:
    plain, paid, hidden = (
        deployed("yi-34b", vary, **YI).profile.cost for vary in ([], ["recorded"], ["recorded", "hidden"])
    )
    step, decodes = [(480, 480), *[(1, DECODED_AT)] * 32], [(1, DECODED_AT)] * 32
    assert paid.step(decodes) == pytest.approx(hidden.step(decodes))
    assert paid.step(step) - hidden.step(step) > 0.03
    assert hidden.step(step) - hidden.linear(512) == pytest.approx(
        plain.attention(480, 480) + 32 * plain.attention(1, DECODED_AT)
    )


def test_records_of_one_model_are_refused_for_another() -> None:
    for name in ("recorded", "prompts"):
        with pytest.raises(ValueError, match=f"{name} is of yi-34b with tp 2, not of mistral-7b"):
            deployed("mistral-7b", [name], device="a100-80gb")


@pytest.mark.parametrize(("model", "layout"), [("yi-34b", YI), ("llama-2-70b", PIPELINE)])
def test_launches_make_short_steps_longer_and_leave_long_ones(model, layout) -> None:
    plain, late = deployed(model, **layout), deployed(model, ["launch"], **layout)
    layers = {"yi-34b": 60, "llama-2-70b": 80}[model]
    assert late.profile.cost.linear(1) >= LAUNCH_SECONDS * layers
    assert late.profile.cost.linear(1) > plain.profile.cost.linear(1) or model == "llama-2-70b"
    assert late.profile.cost.linear(4096) == pytest.approx(plain.profile.cost.linear(4096))


def test_fused_kernels_make_every_step_shorter_and_leave_the_memory() -> None:
    plain, fused = (deployed("opt-13b", fused=fused, device="a100-80gb").profile for fused in (False, True))
    for segments in ([(1, 1024)], [(1, 1024)] * 64, [(2048, 2048)]):
        assert fused.cost.step(segments) < plain.cost.step(segments)
    assert fused.cache_tokens == plain.cache_tokens


def test_decodes_of_any_model_take_as_much_more_as_the_recorded_ones_by_layers_and_heads() -> None:
    more = recorded_rows()
    assert more[1] == 0 and 0.0009 < more[128] < 0.0012
    for model, layout, share in (("yi-34b", YI, 1.0), ("opt-13b", {"device": "a100-80gb"}, 40 / 60 * 40 / 28)):
        plain, slow = (deployed(model, vary, **layout).profile.cost for vary in ([], ["rows"]))
        decodes = [(1, 2048)] * 128
        assert slow.step(decodes) - plain.step(decodes) == pytest.approx(128 * share * more[128])
        assert slow.step([(512, 512), *decodes]) - plain.step([(512, 512), *decodes]) == pytest.approx(
            128 * share * more[128]
        )


def test_stages_of_a_pipeline_share_what_decodes_take_more() -> None:
    plain, slow = deployed("llama-2-70b", **PIPELINE), deployed("llama-2-70b", ["rows"], **PIPELINE)
    decodes = [(1, 1024)] * 64
    more = [
        late.step(decodes) - stage.step(decodes)
        for stage, late in zip(plain.pipeline.stages, slow.pipeline.stages, strict=True)
    ]
    each = 64 * 40 / 60 * (64 / 4) / 28 * recorded_rows()[64]
    assert more == pytest.approx([each, each])
    assert slow.profile.cost.step(decodes) - plain.profile.cost.step(decodes) == pytest.approx(sum(more))
