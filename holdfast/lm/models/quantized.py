"""Quantized checkpoints (4 bits by AWQ, GPTQ or compressed-tensors, FP8, NVFP4, MXFP4), read by plain tensors' names.

Weights stay quantized if a kernel reads their format: on any device linear layers of 4 bits, and of FP8 with one scale
for a tensor or a row, and experts of MXFP4 (GPT-OSS); on a GPU also FP8 in blocks, NVFP4, and single experts' weights.
All others are dequantized as they are read, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Protocol

import torch

from holdfast.lm.kernels.fp8 import FP8, Fp8BlockWeight, Fp8Weight, Weight
from holdfast.lm.kernels.int4 import dequantize, half_for, pack
from holdfast.lm.kernels.int4_cpu import MIDDLE, is_fit, pack_for_cpu
from holdfast.lm.kernels.integer.library import library_for
from holdfast.lm.kernels.integer.weight import BLOCK as INTEGERS
from holdfast.lm.kernels.integer.weight import fits, pack_integers
from holdfast.lm.kernels.mxfp4 import BIAS, BLOCK, LARGEST, NO_NUMBER, Mxfp4Matrices
from holdfast.lm.kernels.mxfp4 import dequantize as dequantize_mxfp4
from holdfast.lm.kernels.packed import Form, PackedWeight, joined, packed_nibbles, stacked
from holdfast.lm.models.base import check_finite
from holdfast.lm.models.checkpoint_errors import DamagedCheckpoint, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import Part
from holdfast.lm.models.shard import Piece

AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""The bit position of each of eight columns in a 32-bit word (AWQ's gemm layout)."""
SHIFTS = tuple(range(0, 32, 4))

FP4_GROUP = 16
"""Number of inputs of NVFP4 with one scale."""
MOST_OF_A_BLOCK, LEAST_GROUP = 128, 32
"""Largest number of rows or inputs of a block that a kernel knows, and its smallest number of inputs."""

PARTS = (
    *(".qweight", ".qzeros", ".scales", ".g_idx"),
    *(".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    *(".weight_global_scale", ".input_global_scale", ".weight_scale_2"),
    *(".weight_scale_inv", ".weight_scale", ".input_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale"),
    *("_blocks", "_scales"),
)
"""Endings of the names of the tensors that hold a quantized tensor. They may be there in addition to its own name."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization that a checkpoint's config describes."""

    method: str
    """The method: awq, gptq, packed (4 bits of compressed-tensors), fp8, mxfp4, nvfp4 or modelopt (NVFP4, too)."""
    group: int = -1
    """Number of inputs in a group of 4-bit weights; -1: all inputs."""
    zero_offset: int = 0
    """Number to add to each stored zero point of 4-bit weights: 1 in GPTQ's first format, else 0."""
    block: tuple[int, int] | None = None
    """Rows and columns of a block of FP8 weights with one scale; None: one scale for a row or the whole tensor."""


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization in config.json; None for plain numbers. Raises UnsupportedCheckpoint for an unknown method."""
    given = config.get("quantization_config")
    if not given:
        return None
    method = str(given.get("quant_method", "unknown"))
    if method in ("awq", "gptq"):
        bits, group = given.get("bits", 4), int(given.get("group_size", 128))
        if bits != 4:
            raise UnsupportedCheckpoint(f"the checkpoint is quantized ({method}) with {bits} bits; 4 are supported")
        if method == "gptq":
            return Quantization("gptq", group, 0 if given.get("checkpoint_format") == "gptq_v2" else 1)
        layout = str(given.get("version", "gemm")).lower()
        if layout != "gemm":
            raise UnsupportedCheckpoint(f"the checkpoint is quantized (awq) in layout {layout!r}; gemm is supported")
        return Quantization("awq", group)
    if method == "fp8":
        block = given.get("weight_block_size")
        return Quantization("fp8", block=None if block is None else (int(block[0]), int(block[1])))
    if method == "compressed-tensors":
        return _compressed(given)
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method == "modelopt":
        return _modelopt(given)
    raise UnsupportedCheckpoint(
        f"the checkpoint is quantized ({method}); known: awq, gptq, fp8, compressed-tensors of FP8 or 4 bits, mxfp4, "
        "modelopt of FP8 or NVFP4"
    )


def _modelopt(given: Mapping[str, Any]) -> Quantization:
    """The quantization of NVIDIA's Model Optimizer."""
    algorithm, group = str(given.get("quant_algo")), int(given.get("group_size") or FP4_GROUP)
    if algorithm == "FP8":
        return Quantization("fp8")
    if algorithm != "NVFP4" or group != FP4_GROUP:
        raise UnsupportedCheckpoint(
            f"the checkpoint is quantized (modelopt) by {algorithm} in groups of {group}; known: FP8, and NVFP4 in "
            f"groups of {FP4_GROUP}"
        )
    return Quantization("modelopt", FP4_GROUP)


def _compressed(given: Mapping[str, Any]) -> Quantization:
    """The quantization of FP8 or 4-bit weights in the format of compressed-tensors."""
    groups = list((given.get("config_groups") or {}).values())
    if groups and given.get("format") == "pack-quantized":
        return _packed(groups)
    if groups and given.get("format") == "nvfp4-pack-quantized":
        return _nvfp4(groups)
    block: tuple[int, int] | None = None
    for group in groups:
        weights = group.get("weights") or {}
        kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
        if kind != "float" or bits != 8 or strategy not in ("tensor", "channel", "block"):
            raise UnsupportedCheckpoint(
                f"the checkpoint is quantized (compressed-tensors) with {bits}-bit {kind} weights by {strategy}; "
                "known: 8-bit float by tensor, channel or block, 4-bit int in the format pack-quantized, and 4-bit "
                "float in the format nvfp4-pack-quantized"
            )
        if strategy == "block":
            block = (int(weights["block_structure"][0]), int(weights["block_structure"][1]))
    if not groups:
        raise UnsupportedCheckpoint("the checkpoint is quantized (compressed-tensors) without config_groups")
    return Quantization("fp8", block=block)


def _packed(groups: Sequence[Mapping[str, Any]]) -> Quantization:
    """The quantization of weights whose numbers are packed into words: 4 bits, by group or by row."""
    sizes = set()
    for group in groups:
        weights = group.get("weights") or {}
        kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
        if kind != "int" or bits != 4 or strategy not in ("group", "channel") or group.get("input_activations"):
            raise UnsupportedCheckpoint(
                f"the checkpoint is quantized (compressed-tensors, pack-quantized) with {bits}-bit {kind} weights by "
                f"{strategy}, and {'quantized' if group.get('input_activations') else 'plain'} activations; known: "
                "4-bit int by group or channel, and plain activations"
            )
        sizes.add(int(weights["group_size"]) if strategy == "group" else -1)
    if len(sizes) > 1:
        raise UnsupportedCheckpoint(
            f"the checkpoint is quantized (compressed-tensors) in groups of {' and '.join(map(str, sorted(sizes)))}; "
            "one size is supported"
        )
    return Quantization("packed", sizes.pop())


def _nvfp4(groups: Sequence[Mapping[str, Any]]) -> Quantization:
    """The quantization of NVFP4 weights of compressed-tensors. Their activations are not rounded, whatever it says."""
    for group in groups:
        weights = group.get("weights") or {}
        kind, bits, size = weights.get("type"), weights.get("num_bits"), weights.get("group_size")
        if kind != "float" or bits != 4 or size != FP4_GROUP:
            raise UnsupportedCheckpoint(
                f"the checkpoint is quantized (compressed-tensors, nvfp4-pack-quantized) with {bits}-bit {kind} "
                f"weights in groups of {size}; known: 4-bit float in groups of {FP4_GROUP}"
            )
    return Quantization("nvfp4", FP4_GROUP)


class Stored(Protocol):
    """The tensors of a checkpoint as they are stored."""

    def has(self, name: str) -> bool: ...

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, by safetensors' name."""

    def tensor(self, name: str) -> torch.Tensor: ...

    def slices(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...]) -> torch.Tensor:
        """The slices of a tensor's first dimensions.

        Raises UnsupportedCheckpoint if it is missing or has another shape.
        """


def within(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The rows of one part of a stored tensor, with a dimension for each entry of `part.rows`; a view."""
    rows = tensor.t() if part.transposed else tensor
    if not part.rows:
        return rows
    dim, start, stop = part.at
    return rows.reshape(*part.rows, *rows.shape[1:]).narrow(dim, start, stop - start)


class QuantizedReader:
    """Reads the tensors of a quantized checkpoint by the names and shapes of a plain one."""

    def __init__(
        self,
        stored: Stored,
        quantization: Quantization,
        *,
        native_fp8: bool,
        reads_packed: bool = False,
        parts: Mapping[str, tuple[str, Part]] | None = None,
    ) -> None:
        """With `native_fp8`, the device multiplies FP8, so weights stay FP8.

        With `reads_packed`, the device has kernels for a `PackedWeight` and for FP8 in blocks. `parts` has, for each
        weight that is stored together with others, the stored tensor and its place there.
        """
        self._stored, self._how, self._native_fp8 = stored, quantization, native_fp8
        self._reads_packed, self._parts = reads_packed, parts or {}

    def fill(self, name: str, piece: Piece, into: torch.Tensor) -> bool:
        """Write a dequantized piece of a tensor to `into`.

        If it holds plain numbers, return False and write nothing.
        """
        kind = self._kind(name)
        if kind is None:
            return False
        if name in self._parts:
            stored, wider, part = self._place(name, piece)
            whole = torch.empty(wider.shape, dtype=torch.float32, device=into.device)
            self.fill(stored, wider, whole)
            into.copy_(rows_within(whole, part, piece))
            return True
        if kind == "mxfp4":
            found = self._mxfp4(name, piece, into.device)
        elif kind == "fp8":
            found = self._dequantized_fp8(name, piece, into.device)
        elif kind == "fp4":
            found = self._fp4(name, piece, into.device).dequantized(torch.float32)[:, piece.slices[1]]
        else:
            numbers, scale, zero, group = self._int4(name, piece, into.device)
            found = dequantize(numbers, scale, zero, group)
        into.copy_(found)
        check_finite(name, found, into.dtype)
        return True

    def packed(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device, dtype: torch.dtype
    ) -> Weight | None:
        """One weight with the rows of all parts, in a kernel's format; None if no kernel reads it."""
        kinds = {self._kind(name) for name in names}
        if kinds == {"int4"}:
            return self._packed_int4(names, pieces, device, dtype)
        if kinds == {"fp8"} and self._native_fp8 and self._how.block is None:
            data, scale = zip(*map(self._fp8, names, pieces, [device] * len(names)), strict=True)
            return Fp8Weight(torch.cat(data), torch.cat(scale))
        placed = [self._rows_of(name, piece) for name, piece in zip(names, pieces, strict=True)]
        if not self._reads_packed or not all(placed):
            return None
        names, pieces = zip(*(each for each in placed if each), strict=True)
        if kinds == {"fp8"} and self._native_fp8:
            return self._fp8_blocks(names, pieces, device)
        if kinds == {"fp4"}:
            parts = self._fp4_parts(names, pieces, device)
            return None if parts is None else joined(parts)
        return None

    def packed_matrices(
        self, names: Sequence[tuple[str, ...]], pieces: tuple[Piece, ...], device: torch.device
    ) -> PackedWeight | None:
        """The weights of experts, each with the rows of all its tensors; None if no kernel reads them.

        `pieces` are those of each expert's tensors.
        """
        kinds = {self._kind(name) for each in names for name in each}
        readers = {"fp4": self._fp4_parts, "fp8": self._fp8_parts, "int4": self._int4_parts}
        kind = kinds.pop() if len(kinds) == 1 else None
        if not self._reads_packed or kind not in readers or (kind == "fp8" and not self._native_fp8):
            return None
        experts = []
        for each in names:
            parts = readers[kind](each, pieces, device)
            if parts is None:
                return None
            experts.append(joined(parts))
        return stacked(experts)

    def packed_experts(self, name: str, piece: Piece, device: torch.device, dtype: torch.dtype) -> Mxfp4Matrices | None:
        """A piece of the experts' tensor [E, inputs, outputs] as [E, outputs, inputs] of MXFP4; None of others.

        None also if the piece has a part of a block of inputs. Raises DamagedCheckpoint for numbers beyond `dtype`.
        """
        inputs = piece.own[1]
        if self._kind(name) != "mxfp4" or inputs.start % BLOCK or len(inputs) % BLOCK:
            return None
        data, scale = self._mxfp4_rows(name, piece, device)
        if LARGEST * 2.0 ** (int(scale.max()) - BIAS) > torch.finfo(dtype).max:
            check_finite(name, dequantize_mxfp4(data, scale), dtype)
        data = data[..., inputs.start // 2 : inputs.stop // 2]
        return Mxfp4Matrices(data, scale[..., inputs.start // BLOCK : inputs.stop // BLOCK])

    def names(self, stored: Iterable[str]) -> Iterable[str]:
        """The names of the plain tensors that stored ones represent, except the zero biases that GPTQ's tools add."""
        for name in stored:
            ending = next((ending for ending in PARTS if name.endswith(ending)), "")
            stem = name.removesuffix(ending)
            if ending.startswith("."):
                yield f"{stem}.weight"
            elif not (
                stem.endswith(".bias")
                and self._stored.has(stem.removesuffix(".bias") + ".qweight")
                and self._zeros(stem)
            ):
                yield stem

    def _zeros(self, name: str) -> bool:
        return not bool(self._stored.tensor(name).any())

    def _place(self, name: str, piece: Piece) -> tuple[str, Piece, Part]:
        """For a weight stored with others: their tensor, the piece of it with the same inputs, and the place in it."""
        stored, part = self._parts[name]
        return stored, Piece(part.shape, (range(part.shape[0]), *piece.own[1:])), part

    def _rows_of(self, name: str, piece: Piece) -> tuple[str, Piece] | None:
        """The stored tensor of a piece, and the piece of it with the same rows; None if these lie apart."""
        if name not in self._parts:
            return name, piece
        stored, part = self._parts[name]
        if len(part.rows) > 1 or part.transposed:
            return None
        rows, first = piece.own[0], part.at[1]
        return stored, Piece(part.shape, (range(first + rows.start, first + rows.stop), *piece.own[1:]))

    def _kind(self, name: str) -> str | None:
        """The format of a stored tensor: int4, fp8, fp4, mxfp4, or None for plain numbers."""
        name = self._parts[name][0] if name in self._parts else name
        if self._stored.has(name):
            if self._how.method == "modelopt" and self._stored.dtype(name) == "U8":
                return "fp4"
            return "fp8" if self._stored.dtype(name) == "F8_E4M3" else None
        if self._stored.has(name + "_blocks"):
            return "mxfp4"
        if self._how.method == "nvfp4":
            return "fp4" if self._stored.has(name + "_packed") else None
        packed = name + "_packed" if self._how.method == "packed" else name.removesuffix(".weight") + ".qweight"
        return "int4" if self._stored.has(packed) else None

    def _fp4_parts(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device
    ) -> list[PackedWeight] | None:
        """Pieces of NVFP4; None if they cut a group of inputs."""
        columns = pieces[0].own[1]
        if columns.start % FP4_GROUP or len(columns) % FP4_GROUP:
            return None
        found = []
        for name, piece in zip(names, pieces, strict=True):
            whole = self._fp4(name, piece, device)
            data = whole.data[:, columns.start // 2 : columns.stop // 2].contiguous()
            scale = whole.factors[:, columns.start // FP4_GROUP : columns.stop // FP4_GROUP].contiguous().view(FP8)
            found.append(replace(whole, data=data, scale=scale))
        return found

    def _fp8_parts(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device
    ) -> list[PackedWeight] | None:
        """Pieces of FP8; None if they cut blocks into too small ones."""
        if self._how.block is None:
            parts = [self._fp8(name, piece, device) for name, piece in zip(names, pieces, strict=True)]
            return [PackedWeight(Form.FP8, data, scale[:, None], data.shape[1]) for data, scale in parts]
        sizes = block_sizes(self._how.block, pieces)
        if sizes is None:
            return None
        found = [self._fp8_block(name, piece, sizes, device) for name, piece in zip(names, pieces, strict=True)]
        return [PackedWeight(Form.FP8, data, scale, sizes[1], sizes[0]) for data, scale in found]

    def _int4_parts(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device
    ) -> list[PackedWeight] | None:
        """Pieces of 4-bit integers; None if groups have a size that no kernel knows."""
        inputs = pieces[0].shape[1]
        group = self._group(pieces[0].whole[1], inputs)
        if inputs % 2 or (group != inputs and (group & (group - 1) or group < FP4_GROUP)):
            return None
        found = []
        for name, piece in zip(names, pieces, strict=True):
            numbers, scale, zero, group = self._int4(name, piece, device)
            scale = scale.float()
            low = -zero.float() * scale
            found.append(PackedWeight(Form.INT4, packed_nibbles(numbers), scale, group, low=low))
        return found

    def _fp8_blocks(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device
    ) -> Fp8BlockWeight | None:
        """One FP8 weight in blocks with the rows of all parts; None if the parts cut blocks into too small ones."""
        assert self._how.block is not None
        sizes = block_sizes(self._how.block, pieces)
        if sizes is None:
            return None
        parts = (self._fp8_block(name, piece, sizes, device) for name, piece in zip(names, pieces, strict=True))
        data, scale = (torch.cat(each) for each in zip(*parts, strict=True))
        return Fp8BlockWeight(data, scale, *sizes)

    def _fp8_block(
        self, name: str, piece: Piece, sizes: tuple[int, int], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A piece [N, K] of FP8, and the scales of its blocks of `sizes`, which divide the stored ones, float32."""
        data = self._numbers_of_fp8(name, piece, device)
        scale = self._block_scale(name, piece).to(device)
        rows, columns = (
            torch.arange(own.start, own.stop, size, device=device) // block
            for own, size, block in zip(piece.own, sizes, self._how.block or (1, 1), strict=True)
        )
        return data, scale[rows][:, columns]

    def _fp4(self, name: str, piece: Piece, device: torch.device) -> PackedWeight:
        """The rows of a piece of NVFP4, with all inputs."""
        stem, (outputs, inputs) = name.removesuffix(".weight"), piece.whole
        rows = piece.own[0]
        stored = f"{stem}.weight_packed" if self._how.method == "nvfp4" else name
        data = self._stored.slices(stored, (outputs, inputs // 2), (slice(rows.start, rows.stop),)).to(device)
        scale_name = f"{stem}.weight_scale"
        own = (slice(rows.start, rows.stop),)
        scale = self._stored.slices(scale_name, (outputs, inputs // FP4_GROUP), own).to(device)
        if data.dtype != torch.uint8 or scale.dtype != FP8:
            raise UnsupportedCheckpoint(
                f"tensor {stored} is {data.dtype} and its scales are {scale.dtype}; {torch.uint8} and {FP8} are "
                "supported"
            )
        check_finite(scale_name, scale.float(), torch.float32)
        if bool((scale.float() < 0).any()):
            raise DamagedCheckpoint(f"tensor {scale_name} holds negative scales: the checkpoint is damaged")
        unit = torch.full((len(rows),), self._fp4_unit(stem), dtype=torch.float32, device=device)
        return PackedWeight(Form.FP4, data, scale, FP4_GROUP, unit=unit)

    def _fp4_unit(self, stem: str) -> float:
        """The factor of all numbers of an NVFP4 tensor. compressed-tensors stores its reciprocal."""
        ending = "weight_global_scale" if self._how.method == "nvfp4" else "weight_scale_2"
        name = f"{stem}.{ending}"
        if not self._stored.has(name):
            raise UnsupportedCheckpoint(f"the checkpoint has no {name}, the factor of tensor {stem}.weight")
        stored = self._stored.tensor(name).float()
        if stored.numel() != 1 or not bool(stored.isfinite().all()) or float(stored) <= 0:
            raise UnsupportedCheckpoint(
                f"tensor {name} is {stored.flatten().tolist()}; one positive number is supported"
            )
        return float(1 / stored) if self._how.method == "nvfp4" else float(stored)

    def _packed_int4(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device, dtype: torch.dtype
    ) -> Weight | None:
        rows, inputs = sum(piece.shape[0] for piece in pieces), pieces[0].shape[1]
        group = self._group(pieces[0].whole[1], inputs)
        library = library_for(device, dtype) if fits(inputs, group) else None
        for_cpu = is_fit((rows, inputs), group, device, dtype)
        half = None if for_cpu else half_for(inputs, group)
        if not (library or for_cpu or half):
            return None
        parts = [self._int4(name, piece, device) for name, piece in zip(names, pieces, strict=True)]
        numbers, scale, zero = (torch.cat(each) for each in list(zip(*parts, strict=True))[:3])
        if library is not None:
            factors, zeros = (each.float().repeat_interleave(group // INTEGERS, 1) for each in (scale, zero))
            return pack_integers(library, numbers, factors, -zeros * factors, 4)
        if half:
            return pack(numbers, scale, zero, group, half)
        return pack_for_cpu(numbers, scale, (MIDDLE - zero.float()) * scale.float(), group)

    def _group(self, whole: int, own: int) -> int:
        """Number of inputs in a group, if this device has `own` of the `whole` inputs of a row."""
        return own if self._how.group == -1 else min(self._how.group, whole)

    def _int4(
        self, name: str, piece: Piece, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """A piece [N, K] as 4-bit numbers, scales and zeros, and the number of inputs in a group."""
        if name in self._parts:
            stored_name, wider, part = self._place(name, piece)
            *found, group = self._int4(stored_name, wider, device)
            numbers, scale, zero = (rows_within(each, part, piece) for each in found)
            return numbers, scale, zero, group
        stem = name.removesuffix(".weight")
        outputs, inputs = piece.whole
        group = inputs if self._how.group == -1 else min(self._how.group, inputs)
        groups = inputs // group
        self._check_order(stem, inputs, group)
        stored = self._packed_words if self._how.method == "packed" else self._words
        numbers, scale, zero = stored(stem, outputs, inputs, groups, device)
        rows, columns = piece.own
        taken = range(0, groups)
        if len(columns) < inputs and groups > 1:
            if columns.start % group or columns.stop % group:
                raise UnsupportedCheckpoint(
                    f"tensor {name} is quantized in groups of {group} inputs, which tp would cut: "
                    f"{len(columns)} of {inputs} inputs are one device's"
                )
            taken = range(columns.start // group, columns.stop // group)
        elif len(columns) < inputs:
            group = len(columns)
        cut = slice(rows.start, rows.stop)
        numbers = numbers[columns.start : columns.stop, cut].t().contiguous()
        scale, zero = (each[taken.start : taken.stop, cut].t().contiguous() for each in (scale, zero))
        return numbers, scale, zero, group

    def _words(
        self, stem: str, outputs: int, inputs: int, groups: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers [K, N], scales and zeros [G, N] of AWQ or GPTQ."""
        is_awq = self._how.method == "awq"
        words, zero_words, scale = (
            self._part(f"{stem}.{part}", shape).to(device)
            for part, shape in (
                ("qweight", (inputs, outputs // 8) if is_awq else (inputs // 8, outputs)),
                ("qzeros", (groups, outputs // 8)),
                ("scales", (groups, outputs)),
            )
        )
        check_finite(f"{stem}.scales", scale, scale.dtype)
        shifts = AWQ_SHIFTS if is_awq else SHIFTS
        numbers = _columns(words, shifts) if is_awq else _columns(words.t(), shifts).t()
        return numbers, scale, _columns(zero_words, shifts).add_(self._how.zero_offset).bitwise_and_(15)

    def _packed_words(
        self, stem: str, outputs: int, inputs: int, groups: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers [K, N], scales and zeros [G, N] of compressed-tensors. Without stored zeros, 8 stands for 0."""
        words = self._part(f"{stem}.weight_packed", (outputs, inputs // 8)).to(device)
        scale = self._part(f"{stem}.weight_scale", (outputs, groups)).to(device)
        check_finite(f"{stem}.weight_scale", scale, scale.dtype)
        zeros = f"{stem}.weight_zero_point"
        if self._stored.has(zeros):
            zero = _columns(self._part(zeros, (outputs // 8, groups)).to(device).t(), SHIFTS)
        else:
            zero = torch.full((groups, outputs), 8, dtype=torch.uint8, device=device)
        return _columns(words, SHIFTS).t(), scale.t(), zero

    def _check_order(self, stem: str, inputs: int, group: int) -> None:
        """Refuse groups whose inputs are not adjacent (GPTQ's desc_act)."""
        name = f"{stem}.weight_g_idx" if self._how.method == "packed" else f"{stem}.g_idx"
        if self._stored.has(name) and not torch.equal(self._stored.tensor(name).long(), torch.arange(inputs) // group):
            raise UnsupportedCheckpoint(
                f"tensor {name} orders inputs by activation (desc_act), which is not supported; give a checkpoint "
                "quantized without it"
            )

    def _fp8(self, name: str, piece: Piece, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """A piece [N, K] of FP8 and the scale of each row, float32."""
        if name in self._parts:
            stored, wider, part = self._place(name, piece)
            data, scale = self._fp8(stored, wider, device)
            return rows_within(data.view(torch.uint8), part, piece).view(FP8), rows_within(scale, part, piece)
        data, scale = self._numbers_of_fp8(name, piece, device), self._scale(name)
        if scale.numel() not in (1, piece.whole[0]):
            raise UnsupportedCheckpoint(
                f"the scale of tensor {name} has shape {tuple(scale.shape)}; one number, or one for each of "
                f"{piece.whole[0]} rows is supported"
            )
        rows = piece.own[0]
        scale = scale.flatten().expand(piece.whole[0])[rows.start : rows.stop]
        return data, scale.to(device).contiguous()

    def _dequantized_fp8(self, name: str, piece: Piece, device: torch.device) -> torch.Tensor:
        if self._how.block is None:
            data, scale = self._fp8(name, piece, device)
            return data.float() * scale[:, None]
        data, scale = self._fp8_data(name, piece).to(device), self._block_scale(name, piece).to(device)
        rows, columns = (
            torch.arange(own.start, own.stop, device=device) // block
            for own, block in zip(piece.own, self._how.block, strict=True)
        )
        return data.float() * scale[rows][:, columns]

    def _block_scale(self, name: str, piece: Piece) -> torch.Tensor:
        """The scales of all blocks of an FP8 tensor, float32."""
        scale = self._scale(name)
        wanted = tuple(-(-size // block) for size, block in zip(piece.whole, self._how.block or (1, 1), strict=True))
        if tuple(scale.shape) != wanted:
            raise UnsupportedCheckpoint(f"the scale of tensor {name} has shape {tuple(scale.shape)}, not {wanted}")
        return scale

    def _numbers_of_fp8(self, name: str, piece: Piece, device: torch.device) -> torch.Tensor:
        """A piece of an FP8 tensor as it is stored. Raises DamagedCheckpoint if it holds NaN."""
        data = self._fp8_data(name, piece).to(device)
        if bool(data.to(torch.float32).isnan().any()):
            raise DamagedCheckpoint(f"tensor {name} holds NaN: the checkpoint is damaged")
        return data

    def _fp8_data(self, name: str, piece: Piece) -> torch.Tensor:
        """A piece of an FP8 tensor as it is stored."""
        whole = self._part(name, piece.whole)
        if whole.dtype != FP8:
            raise UnsupportedCheckpoint(f"tensor {name} is {whole.dtype}; {FP8} is supported")
        return whole.view(torch.uint8)[piece.slices].view(FP8)

    def _scale(self, name: str) -> torch.Tensor:
        stem = name.removesuffix(".weight")
        for ending in (".weight_scale_inv", ".weight_scale"):
            if self._stored.has(stem + ending):
                scale = self._stored.tensor(stem + ending).float()
                check_finite(stem + ending, scale, torch.float32)
                return scale
        raise UnsupportedCheckpoint(f"the checkpoint has no {stem}.weight_scale, the scale of tensor {name}")

    def _mxfp4(self, name: str, piece: Piece, device: torch.device) -> torch.Tensor:
        """A dequantized piece of all experts' tensor [E, inputs, outputs], stored by outputs in blocks of inputs."""
        columns = piece.own[1]
        numbers = dequantize_mxfp4(*self._mxfp4_rows(name, piece, device))
        return numbers[..., columns.start : columns.stop].transpose(1, 2)

    def _mxfp4_rows(self, name: str, piece: Piece, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes [E, outputs, inputs / 2] and scales [E, outputs, inputs / BLOCK] of a piece, with all inputs."""
        count, inputs, outputs = piece.whole
        experts, _, rows = piece.own
        shape = (count, outputs, inputs // BLOCK, BLOCK // 2)
        cut = (slice(experts.start, experts.stop), slice(rows.start, rows.stop))
        blocks = self._stored.slices(name + "_blocks", shape, cut).to(device)
        scales = self._stored.slices(name + "_scales", shape[:3], cut).to(device)
        for part, tensor in (("_blocks", blocks), ("_scales", scales)):
            if tensor.dtype != torch.uint8:
                raise UnsupportedCheckpoint(f"tensor {name}{part} is {tensor.dtype}; {torch.uint8} is supported")
        if bool((scales == NO_NUMBER).any()):
            raise DamagedCheckpoint(f"tensor {name}_scales holds NaN: the checkpoint is damaged")
        return blocks.flatten(-2), scales

    def _part(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._stored.slices(name, shape, ())


def rows_within(stored: torch.Tensor, part: Part, piece: Piece) -> torch.Tensor:
    """The rows of a piece of a part, from all rows of the stored tensor [rows, ...]."""
    rows = piece.own[0]
    return within(stored, part).reshape(-1, *stored.shape[1:])[rows.start : rows.stop].contiguous()


def block_sizes(block: tuple[int, int], pieces: Sequence[Piece]) -> tuple[int, int] | None:
    """The largest rows and inputs of a block that no piece cuts, as kernels take them; None if inputs are too few."""
    rows = gcd(MOST_OF_A_BLOCK, block[0], *(end for piece in pieces for end in (piece.own[0].start, piece.shape[0])))
    columns = pieces[0].own[1]
    group = gcd(MOST_OF_A_BLOCK, block[1], columns.start, len(columns))
    return (rows, group) if group >= LEAST_GROUP else None


def _columns(words: torch.Tensor, shifts: tuple[int, ...]) -> torch.Tensor:
    """Unpack words [R, C] int32 into 4-bit numbers [R, 8 C] uint8, eight columns from each word."""
    by = torch.tensor(shifts, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> by) & 15).to(torch.uint8).flatten(1)
