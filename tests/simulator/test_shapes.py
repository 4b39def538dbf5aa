"""Shapes have the sizes that their models are known for."""

import pytest

from holdfast.simulator.shapes import MODELS, model_named


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mistral-7b", 7.24),
        ("llama-3-8b", 8.03),
        ("llama-2-13b", 13.0),
        ("llama-2-70b", 69.0),
        ("yi-34b", 34.4),
        ("opt-13b", 13.1),
        ("opt-66b", 66.2),
        ("falcon-180b", 179.5),
    ],
)
def test_a_shape_has_its_models_weights(name, billions):
    assert MODELS[name].weight_bytes / 2e9 == pytest.approx(billions, rel=0.01)


def test_the_cache_of_a_token():
    assert MODELS["llama-3-8b"].token_bytes == 131_072
    assert MODELS["llama-2-13b"].token_bytes == 4 * MODELS["llama-2-13b-gqa"].token_bytes


def test_an_unknown_shape_is_told_with_the_known_ones():
    with pytest.raises(ValueError, match=r"gpt-9 is unknown; there are .*mistral-7b"):
        model_named("gpt-9")
