"""Varied deployments change the costs they name and nothing else."""

import pytest

from benchmarks.lib.papers import deployed
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
