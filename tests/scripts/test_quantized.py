"""What FP8 weights may cost the built-in model, and that what measures it would see more."""

from __future__ import annotations

import pytest
import torch

from holdfast.engine.text import Text
from holdfast.models.decoder import Decoder
from holdfast.models.loader import load
from scripts.tiny.quantized import MODEL, agreement, held_out, messages_of


def texts(count: int) -> list[list[int]]:
    text = Text.from_directory(MODEL)
    return [text.encode_chat(messages_of(dialogue)) for dialogue in held_out(count)]


def builtin(quantization: str, device: str = "cpu", dtype: str = "float32") -> Decoder:
    model = load(MODEL, device=device, dtype=dtype, quantization=quantization)
    assert isinstance(model, Decoder)
    return model


def test_the_likeliest_token_is_nearly_always_the_same() -> None:
    found = agreement(builtin("none"), builtin("fp8"), texts(4))
    assert found.tokens > 1500
    assert 0.98 <= found.share < 1.0
    assert 0 < found.divergence < 0.001


@pytest.mark.gpu
def test_so_it_is_where_activations_are_fp8_as_well() -> None:
    found = agreement(builtin("none", "cuda", "bfloat16"), builtin("fp8", "cuda", "bfloat16"), texts(4))
    assert 0.97 <= found.share < 1.0
    assert 0 < found.divergence < 0.002


def test_coarser_weights_would_be_seen() -> None:
    coarse = builtin("none")
    for layer in coarse.layers:
        for weight in (layer.qkv, layer.o, layer.gate_up, layer.down):
            assert isinstance(weight, torch.Tensor)
            scale = weight.abs().amax() / 7  # four bits, one scale for all
            weight.copy_((weight / scale).round() * scale)
    assert agreement(builtin("none"), coarse, texts(1)).share < 0.9
