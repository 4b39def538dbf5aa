"""Random weights: what `--load-format random` draws in place of reading a checkpoint, for benchmarks."""

from __future__ import annotations

import math
import zlib

import torch

from holdfast.lm.kernels.fp8 import FIRST_CAPABILITY, FP8, LARGEST, Fp8BlockWeight
from holdfast.lm.kernels.mxfp4 import BIAS, BLOCK, SPREAD, Mxfp4Matrices
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.layer_weights import WeightSource
from holdfast.lm.models.quantized import Quantization, block_sizes
from holdfast.lm.models.shard import Piece

ROWS_AT_A_TIME = 1024
"""Number of rows that are drawn with one seed."""


class RandomWeights(WeightSource):
    """Weights drawn on the device: norms 1, biases 0, the rest normal with the config's standard deviation.

    A number depends only on its tensor's name and its place in it, so it is the same for any division among ranks.
    """

    def __init__(self, spec: DecoderSpec, device: torch.device) -> None:
        self._std, self._gain = spec.init_std, 1.0 - spec.norm_offset
        self._plain = spec.names.fields.get("gain", ())
        """Names of norms that have no offset."""
        self._generator = torch.Generator(device)

    def fill(self, name: str, piece: Piece, into: torch.Tensor) -> None:
        if name.endswith("bias"):
            into.zero_()
        elif into.ndim == 1:
            into.fill_(1.0 if name.endswith(self._plain) else self._gain)
        elif into.ndim == 3:
            for number, part in zip(piece.own[0], into, strict=True):
                self._draw(f"{name}.{number}", Piece(piece.whole[1:], piece.own[1:]), part)
        else:
            self._draw(name, piece, into)

    def _draw(self, name: str, piece: Piece, into: torch.Tensor) -> None:
        """Draw all columns of the rows that are needed, a group of rows at a time, with a seed for each group."""
        (total, width), (rows, columns) = piece.whole, piece.own
        seed = zlib.crc32(name.encode()) << 24
        for start in range(rows.start - rows.start % ROWS_AT_A_TIME, rows.stop, ROWS_AT_A_TIME):
            stop = min(start + ROWS_AT_A_TIME, total)
            drawn = into.new_empty(stop - start, width)
            drawn.normal_(0.0, self._std, generator=self._generator.manual_seed(seed + start // ROWS_AT_A_TIME))
            first, last = max(start, rows.start), min(stop, rows.stop)
            into[first - rows.start : last - rows.start] = drawn[
                first - start : last - start, columns.start : columns.stop
            ]


class RandomMxfp4(RandomWeights):
    """Random weights whose experts are MXFP4: all codes are equally likely, and all scales equal.

    Experts that no kernel reads packed are drawn as other weights are.
    """

    def packed_experts(self, name: str, piece: Piece, device: torch.device, dtype: torch.dtype) -> Mxfp4Matrices | None:
        experts, inputs, rows = piece.own
        _, width, outputs = piece.whole
        if inputs.start % BLOCK or len(inputs) % BLOCK:
            return None
        data = torch.empty(len(experts), len(rows), len(inputs) // 2, dtype=torch.uint8, device=device)
        for number, into in zip(experts, data, strict=True):
            generator = self._generator.manual_seed(zlib.crc32(f"{name}.{number}".encode()))
            whole = torch.randint(256, (outputs, width // 2), generator=generator, device=device, dtype=torch.uint8)
            into.copy_(whole[rows.start : rows.stop, inputs.start // 2 : inputs.stop // 2])
        exponent = BIAS + round(math.log2(self._std / SPREAD))
        scale = torch.full((*data.shape[:2], len(inputs) // BLOCK), exponent, dtype=torch.uint8, device=device)
        return Mxfp4Matrices(data, scale)


class RandomFp8Blocks(RandomWeights):
    """Random weights whose linear layers are FP8 in blocks, each with a scale for its largest number.

    Weights that no kernel reads so are drawn as others are.
    """

    def __init__(self, spec: DecoderSpec, device: torch.device, block: tuple[int, int]) -> None:
        super().__init__(spec, device)
        self._block = block

    def packed(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device, dtype: torch.dtype
    ) -> Fp8BlockWeight | None:
        sizes = block_sizes(self._block, pieces)
        if sizes is None:
            return None
        counts = [piece.shape[0] for piece in pieces]
        whole = torch.empty(sum(counts), pieces[0].shape[1], device=device)
        for name, piece, part in zip(names, pieces, torch.split(whole, counts), strict=True):
            self.fill(name, piece, part)
        blocks = whole.view(len(whole) // sizes[0], sizes[0], -1, sizes[1])
        scale = blocks.abs().amax((1, 3)) / LARGEST
        data = (blocks / scale[:, None, :, None]).view(whole.shape).to(FP8)
        return Fp8BlockWeight(data, scale, *sizes)


def random_source(spec: DecoderSpec, how: Quantization | None, device: torch.device) -> RandomWeights:
    """The source of random weights in the format of a checkpoint that is quantized as `how` says, where one is known.

    Others are drawn in the dtype of the weights.
    """
    if how is not None and how.method == "mxfp4":
        return RandomMxfp4(spec, device)
    known = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
    if how is not None and how.block is not None and known:
        return RandomFp8Blocks(spec, device, how.block)
    return RandomWeights(spec, device)
