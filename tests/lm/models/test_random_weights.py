"""Random weights in the formats of quantized checkpoints are the plain ones, rounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from holdfast.lm.kernels.fp8 import FP8, Fp8BlockWeight
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.loader import decoder_spec
from holdfast.lm.models.quantized import Quantization
from holdfast.lm.models.random_weights import RandomFp8Blocks, RandomWeights, random_source
from holdfast.lm.models.shard import Piece
from tests.checkpoints import make

CPU = torch.device("cpu")
BLOCKS = Quantization("fp8", block=(32, 64))


@pytest.fixture
def spec(tmp_path: Path) -> DecoderSpec:
    make(tmp_path, "Llama")
    return decoder_spec(tmp_path)


@pytest.mark.parametrize("own", [(slice(0, 64), slice(0, 128)), (slice(32, 64), slice(64, 128))])
def test_fp8_blocks_are_the_plain_numbers_rounded_by_block(spec: DecoderSpec, own: tuple[slice, slice]) -> None:
    piece = Piece((64, 128), tuple(range(each.start, each.stop) for each in own))
    drawn = RandomFp8Blocks(spec, CPU, (32, 64)).packed(("a.weight", "b.weight"), (piece, piece), CPU, torch.float32)
    assert isinstance(drawn, Fp8BlockWeight) and drawn.data.dtype is FP8 and (drawn.rows, drawn.group) == (32, 64)
    wanted = torch.empty(2, 64, 128)
    for name, into in zip(("a.weight", "b.weight"), wanted, strict=True):
        RandomWeights(spec, CPU).fill(name, Piece.all_of(64, 128), into)
    plain = wanted[:, own[0], own[1]].reshape(-1, len(piece.own[1]))
    blocks = plain.view(len(plain) // 32, 32, -1, 64)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    error = (drawn.dequantized(torch.float32).view(blocks.shape) - blocks).abs()
    assert (error <= blocks.abs() / 16 + largest / 448 / 512).all()  # FP8 has three bits after the first
    assert torch.allclose(drawn.scale, largest[:, 0, :, 0] / 448)


def test_parts_that_cut_a_block_too_small_are_plain_numbers(spec: DecoderSpec) -> None:
    piece = Piece((64, 128), (range(64), range(8, 16)))
    assert RandomFp8Blocks(spec, CPU, (32, 64)).packed(("a.weight",), (piece,), CPU, torch.float32) is None


def test_a_device_without_kernels_for_fp8_blocks_gets_plain_numbers(spec: DecoderSpec) -> None:
    assert type(random_source(spec, BLOCKS, CPU)) is RandomWeights
    assert type(random_source(spec, None, CPU)) is RandomWeights


@pytest.mark.gpu
def test_a_hopper_gpu_draws_fp8_blocks_of_a_quantized_shape(tmp_path: Path) -> None:
    from holdfast.lm.models.decoder import Decoder
    from holdfast.lm.models.loader import load

    make(tmp_path, "Llama", hidden_size=256, intermediate_size=512)
    path = tmp_path / "config.json"
    quantized = dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic")
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(quantization_config=quantized)))
    model = load(tmp_path, device="cuda", dtype="bfloat16", load_format="random")
    assert isinstance(model, Decoder) and isinstance(model.layers[0].gate_up, Fp8BlockWeight)
