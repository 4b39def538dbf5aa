"""A benchmark's random model has the sizes of its shape."""

from dataclasses import replace

import pytest

from benchmarks.lib.in_real_time import config_of
from holdfast.lab.simulator.shapes import MODELS, shape_from_config
from holdfast.lm.models.families import NATIVE


@pytest.mark.parametrize("name", ["opt-13b", "opt-66b", "llama-2-13b-gqa", "llama-2-70b", "mistral-7b"])
@pytest.mark.parametrize("context", [None, 16_384])
def test_the_config_of_a_shape_is_read_back_as_the_shape_and_by_the_decoder(name: str, context: int | None) -> None:
    shape = replace(MODELS[name], max_model_len=context or MODELS[name].max_model_len)
    config = config_of(shape)
    assert shape_from_config(config, name) == shape
    spec = NATIVE[config["architectures"][0]](config)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads) == (shape.layers, shape.hidden, shape.heads)
    assert (spec.num_kv_heads, spec.head_dim, spec.max_positions) == (shape.kv_heads, 128, shape.max_model_len)


@pytest.mark.parametrize("name", ["falcon-180b", "bloom-176b"])
def test_a_shape_of_another_family_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"no config.json is known of {name}"):
        config_of(MODELS[name])
