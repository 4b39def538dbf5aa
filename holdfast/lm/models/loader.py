"""Load a checkpoint directory as a model on its device, or refuse it with the reason."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from holdfast.core.config import QuantizationName
from holdfast.core.layout import Layout
from holdfast.files.cache import gguf_cache
from holdfast.files.gguf import parts_of
from holdfast.files.regular import name_of_regular, open_file
from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.fp8 import FIRST_CAPABILITY, Weight
from holdfast.lm.kernels.int4 import half_for, pack
from holdfast.lm.kernels.int4_cpu import MIDDLE, is_fit, pack_for_cpu
from holdfast.lm.kernels.int8_cpu import Int8CpuWeight, fits_int8, pack_rows
from holdfast.lm.kernels.integer.library import Library, is_missing, library_for
from holdfast.lm.kernels.integer.weight import IntegerWeight, fits, integers_of, pack_integers
from holdfast.lm.kernels.mxfp4 import Mxfp4Matrices
from holdfast.lm.kernels.packed import PackedWeight, are_alike, joined, stacked
from holdfast.lm.kernels.stacked import StackedWeight
from holdfast.lm.models import hf
from holdfast.lm.models.base import Model, check_finite, limited
from holdfast.lm.models.checkpoint_errors import DamagedCheckpoint, MisfitCheckpoint, NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec, expert_shapes, shapes_of_layer
from holdfast.lm.models.experts import with_stored_names
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.gemma4_decoder import make_decoder
from holdfast.lm.models.gguf_blocks import GROUP, FourBits
from holdfast.lm.models.gguf_reader import GGUF_FILE
from holdfast.lm.models.gguf_weights import GgufFile, GgufSlice
from holdfast.lm.models.layer_weights import WeightSource
from holdfast.lm.models.quantized import Quantization, QuantizedReader, quantization_of, within
from holdfast.lm.models.random_weights import random_source
from holdfast.lm.models.read_ahead import read_ahead
from holdfast.lm.models.same_bits import check_same_bits
from holdfast.lm.models.shard import Piece, shard_of
from holdfast.lm.models.text_decoders import text_config

JSON_LIMIT = 64 << 20
"""The largest JSON file that is read, in bytes. The index of a large mixture of experts has 10 MB."""
PUBLISHED = {"PhiMoEForCausalLM": "PhimoeForCausalLM"}
"""Names in published configs of architectures that Transformers calls by another name."""
ONE_RANK = Layout()
ROWS_AT_A_TIME = 1024
"""Number of rows that are compared at a time, which bounds the memory for them."""
log = logging.getLogger("holdfast.engine")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    directory: str | Path,
    *,
    device: torch.device | str,
    dtype: str = "auto",
    max_model_len: int | None = None,
    load_format: Literal["auto", "random"] = "auto",
    quantization: QuantizationName = "none",
    layout: Layout = ONE_RANK,
    rank: int = 0,
    group: Group | None = None,
    invariant: bool = False,
    ranks: int = 1,
    move_weights: Callable[[object], None] | None = None,
) -> Model:
    """Load a Hugging Face checkpoint directory as a model with its weights on `device`.

    With `dtype` auto, the dtype is the checkpoint's own on CUDA and float32 on a CPU. `max_model_len` shortens the
    model's own limit. With `load_format` random, only config.json is read, and the weights are drawn on the device (for
    benchmarks). With `quantization` fp8, the linear layers are rounded to FP8 as they are read, with one scale for each
    output.

    If several ranks share the model by `layout`, the result is the part of `rank`, and only that part of the weights is
    read. With tp above 1, `group` is the devices that share its layers. `invariant`: the bits of a token's results must
    depend on the tokens before it alone (`same_bits`), and with `ranks` above 1 not on tp, up to that number.
    `move_weights` is that of `Decoder`.

    Raises UnsupportedCheckpoint if the checkpoint is not supported, or `hf.NotPaged` if Transformers' module could run
    on the padded executor. No code of a checkpoint is ever run.
    """
    directory, device = Path(directory), torch.device(device)
    config = with_quantization(directory, read_json(directory / "config.json"))
    checked_architecture(config)
    kind = dtype_of(config, dtype, device)
    options: dict[str, Any] = dict(device=device, dtype=kind, eos_token_ids=eos_token_ids(directory, config))
    try:
        spec = native_spec(config)
    except NotNative as reason:
        if quantization == "fp8":
            raise UnsupportedCheckpoint(f"quantization is fp8, which only native decoders have: {reason}") from None
        if layout.ranks > 1:
            raise UnsupportedCheckpoint(
                f"tp is {layout.tp} and pp is {layout.pp}, which only native decoders take: {reason}"
            ) from None
        if move_weights is not None:
            raise UnsupportedCheckpoint(f"enable_sleep_mode is on, which is for native decoders: {reason}") from None
        if invariant:
            raise UnsupportedCheckpoint(f"deterministic is on, which is for native decoders: {reason}") from None
        refuse_quantized(config)
        if load_format == "auto" and (directory / "model.safetensors.index.json").exists():
            files_of(directory)  # Transformers would follow an index to files outside
        return hf.load(directory, config, **options, max_model_len=max_model_len, random=load_format == "random")
    if quantization == "fp8":
        check_fp8(device)
        if spec.experts is not None:
            raise UnsupportedCheckpoint(
                f"quantization is fp8, which experts do not have, and {spec.architecture} is a mixture of experts: "
                "leave it out"
            )
    shard = shard_of(spec, layout, rank)
    length = limited(max_model_len, spec.most_positions if max_model_len else spec.plain_positions)
    options |= dict(max_model_len=length, fp8=quantization == "fp8", shard=shard, group=group)
    how = quantization_of(config)
    if invariant:
        check_same_bits(spec, device=device, ranks=ranks)
        options |= dict(invariant=True, ranks=ranks)
    if move_weights is not None:
        options["move_weights"] = move_weights
    if load_format == "random":
        return make_decoder(spec, random_source(spec, how, device), **options)
    opened = open_files(directory, spec, config, device)
    spec = with_stored_names(spec, opened)
    plain = GgufWeights if is_gguf(directory) else StoredWeights
    source = plain(opened, spec) if how is None else QuantizedWeights(opened, spec, how, device)
    source.check_names()
    if (how is not None or is_gguf(directory)) and is_missing(device, kind):
        log.warning(
            "holdfast: packed weights are multiplied by PyTorch, which is slower, as this install has no library of "
            "integer products (docs/installing.md)"
        )
    spec = source.with_experts(source.with_head(spec))
    with read_ahead(files_of(directory), rank, layout.ranks):
        return make_decoder(spec, source, **options)


def decoder_spec(directory: str | Path) -> DecoderSpec:
    """The spec of a native decoder, from its config.json. Raises UnsupportedCheckpoint for any other model."""
    config = read_json(Path(directory) / "config.json")
    checked_architecture(config)
    return native_spec(config)


def with_quantization(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """config.json, with the quantization of hf_quant_config.json, where NVIDIA's older checkpoints have it alone."""
    path = directory / "hf_quant_config.json"
    if config.get("quantization_config") or not path.exists():
        return config
    return config | {"quantization_config": {"quant_method": "modelopt", **read_json(path).get("quantization", {})}}


def native_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a native decoder.

    Raises NotNative for other architectures, and for variants that it does not support.
    """
    architecture = architecture_of(config)
    if architecture not in NATIVE:
        raise NotNative(f"{architecture} runs by Transformers' code; native decoders are {', '.join(NATIVE)}")
    try:
        return NATIVE[architecture](config)
    except NotNative as reason:
        raise NotNative(f"{architecture} runs by Transformers' code, because {reason}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UnsupportedCheckpoint naming the file if it does not hold one."""
    try:
        with open_file(path) as file:
            data = file.read(JSON_LIMIT + 1)
        if len(data) > JSON_LIMIT:
            raise UnsupportedCheckpoint(f"{path} is larger than {JSON_LIMIT} bytes, the limit for such a file")
        value = json.loads(data.decode())
    except FileNotFoundError:
        raise UnsupportedCheckpoint(f"{path.parent} holds no {path.name}; give a Hugging Face directory") from None
    except OSError as error:
        raise UnsupportedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UnsupportedCheckpoint(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedCheckpoint(f"{path} holds no JSON object")
    return value


def checked_architecture(config: Mapping[str, Any]) -> str:
    """The architecture's name. Raises UnsupportedCheckpoint if config.json names something that is not supported."""
    architecture = architecture_of(config)
    if config.get("is_encoder_decoder"):
        raise UnsupportedCheckpoint(f"{architecture} is an encoder-decoder; only causal decoders are served")
    if architecture in NATIVE:
        quantization_of(config)  # raises for a method that is not known
    else:
        refuse_quantized(config)
    return architecture


def architecture_of(config: Mapping[str, Any]) -> str:
    """The one architecture that config.json names, by the name that Transformers gives it."""
    names = config.get("architectures") or []
    if len(names) != 1:
        raise UnsupportedCheckpoint(f"config.json must name one architecture; it names {len(names)}")
    return PUBLISHED.get(str(names[0]), str(names[0]))


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedCheckpoint for weights that are not plain numbers."""
    if how := quantization_of(config):
        raise UnsupportedCheckpoint(
            f"the checkpoint is quantized ({how.method}), which runs by native decoders over a paged cache "
            f"({', '.join(NATIVE)}); give one in bfloat16, float16 or float32"
        )


def check_fp8(device: torch.device) -> None:
    """Raise UnsupportedCheckpoint for a device whose weights cannot be FP8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        least = ".".join(str(number) for number in FIRST_CAPABILITY)
        raise UnsupportedCheckpoint(
            f"quantization is fp8, which takes a GPU of compute capability {least} (Hopper) or later; "
            f"{torch.cuda.get_device_name(device)} is older: leave it out"
        )


def dtype_of(config: Mapping[str, Any], dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of a model on a device. With `dtype` auto, it is the checkpoint's own on CUDA and float32 on a CPU."""
    if dtype != "auto":
        return DTYPES[dtype]
    return own_dtype(config) if device.type == "cuda" else torch.float32


def state_bytes_of(directory: Path, dtype: str, device: torch.device) -> int:
    """Bytes of the recurrent states of one sequence in a native decoder; 0 if it keeps none.

    Raises UnsupportedCheckpoint for any other model.
    """
    recurrence = decoder_spec(directory).recurrence
    if recurrence is None:
        return 0
    tensors = recurrence.state(dtype_of(read_json(directory / "config.json"), dtype, device))
    return sum(recurrence.layers) * sum(each.nbytes for each in tensors)


def own_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype in the checkpoint's config. By default float32; bfloat16 if it is quantized (GPT-OSS names none)."""
    default = "bfloat16" if config.get("quantization_config") else "float32"
    found = (each.get(key) for each in (config, text_config(config) or {}) for key in ("dtype", "torch_dtype"))
    name = str(next(filter(None, found), default)).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedCheckpoint(f"the checkpoint's dtype is {name}; choose one with dtype: {', '.join(DTYPES)}")
    return DTYPES[name]


def eos_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids of tokens that end a sequence: generation_config.json's, else config.json's, else none."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    text = text_config(config) or {}
    given = generation.get("eos_token_id", config.get("eos_token_id", text.get("eos_token_id")))
    if given is None:
        return ()
    return tuple(int(token) for token in (given if isinstance(given, list) else [given]))


class StoredWeights(WeightSource):
    """The tensors of a checkpoint's open files.

    Tensors have the names that the decoder's spec gives. A checkpoint may store them under others, which also belong to
    the spec (`WeightNames.bases` and `heads`).
    """

    def __init__(self, opened: Mapping[str, Any], spec: DecoderSpec) -> None:
        """`opened` has the file of each stored tensor, with the methods of `safe_open`."""
        self._spec, names = spec, spec.names
        rest = names.embedding.removeprefix(names.base)
        self._base = next((base for base in (names.base, *names.bases) if base + rest in opened), names.base)
        """The beginning of tensor names in the checkpoint."""
        self._head = next((head for head in (names.lm_head, *names.heads) if head in opened), names.lm_head)
        """The LM head's name in the checkpoint."""
        self._files = {self._usual(name): file for name, file in opened.items()}
        layers = [names.layer.format(layer) for layer in range(spec.num_layers)]
        self._parts = {
            layer + name: (layer + part.name, part) for layer in layers for name, part in names.parts.items()
        }

    def _usual(self, stored: str) -> str:
        """The spec's name of a stored tensor."""
        names = self._spec.names
        if stored in (names.lm_head, self._head):
            return names.lm_head if stored == self._head else stored
        return names.base + stored.removeprefix(self._base) if stored.startswith(self._base) else stored

    def _stored(self, usual: str) -> str:
        """The name under which the checkpoint stores a tensor."""
        names = self._spec.names
        if usual == names.lm_head:
            return self._head
        return self._base + usual.removeprefix(names.base) if usual.startswith(names.base) else usual

    def fill(self, name: str, piece: Piece, into: torch.Tensor) -> None:
        name, part = self._parts.get(name, (name, None))
        expected = piece.whole if part is None else part.shape
        stored = self._slice(name, expected)
        # A whole tensor is memory-mapped; a slice is copied.
        if part is not None:
            tensor = within(self.tensor(name), part).reshape(piece.whole)[piece.slices]
        else:
            tensor = self.tensor(name) if piece.shape == expected else stored[piece.slices]
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise UnsupportedCheckpoint(
                f"tensor {self._stored(name)} is {tensor.dtype}; quantized checkpoints are not supported"
            )
        into.copy_(tensor)
        # On a GPU the copy is quick to read. On a CPU it may be stored by columns, which is slow to read.
        check_finite(self._stored(name), into if into.is_cuda else tensor, into.dtype)

    def names(self) -> Iterable[str]:
        """The names of tensors that `fill` knows."""
        return self._files.keys()

    def has(self, name: str) -> bool:
        return name in self._files

    def dtype(self, name: str) -> str:
        return str(self._files[name].get_slice(self._stored(name)).get_dtype())

    def tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._files[name].get_tensor(self._stored(name))
        return found

    def slices(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...]) -> torch.Tensor:
        stored = self._slice(name, shape)
        found: torch.Tensor = stored[cut] if cut else self.tensor(name)
        return found

    def _slice(self, name: str, shape: tuple[int, ...]) -> Any:
        """A view of a stored tensor of which nothing is read yet. Raises MisfitCheckpoint for another shape."""
        if name not in self._files:
            raise MisfitCheckpoint(f"the checkpoint has no tensor {self._stored(name)}, which its config.json asks for")
        stored = self._files[name].get_slice(self._stored(name))
        if tuple(stored.get_shape()) != shape:
            raise MisfitCheckpoint(
                f"tensor {self._stored(name)} has shape {tuple(stored.get_shape())}; config.json makes it {shape}"
            )
        return stored

    def with_head(self, spec: DecoderSpec) -> DecoderSpec:
        """The decoder's spec, with a separate head if config.json ties it but the stored tensors differ.

        Transformers ties head and embedding only if they are equal, and logs a warning if they are not.
        """
        embedding, head = spec.names.embedding, spec.names.lm_head
        if not spec.tied or head not in self._files or embedding not in self._files or self._equal(embedding, head):
            return spec
        log.warning(
            "holdfast: config.json ties %s to %s, and the checkpoint holds two that differ: both are used, as "
            "Transformers does",
            self._stored(head),
            self._stored(embedding),
        )
        return replace(spec, tied=False)

    def with_experts(self, spec: DecoderSpec) -> DecoderSpec:
        """The decoder's spec, with the layout of fused experts that the stored shapes show.

        Transformers 5 writes transposed tensors. The shape of a square one does not show it, but then the other's does.
        """
        experts = spec.experts
        if experts is None or experts.names.fused != "halves":
            return spec
        rows = replace(spec, experts=replace(experts, names=replace(experts.names, fused="rows")))
        prefix = spec.names.layer.format(experts.sparse.index(True)) if any(experts.sparse) else ""
        for name in (experts.names.gate_up[0], experts.names.down):
            file = self._files.get(prefix + name)
            shape = tuple(file.get_slice(self._stored(prefix + name)).get_shape()) if file else ()
            if shape == expert_shapes(rows)[name] != expert_shapes(spec)[name]:
                return rows
        return spec

    def _equal(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same numbers. Rows are read in groups, to bound the memory for them."""
        first, second = (self._files[name].get_slice(self._stored(name)) for name in (one, other))
        shape = tuple(first.get_shape())
        if shape != tuple(second.get_shape()):
            return False
        return all(
            torch.equal(first[start : start + ROWS_AT_A_TIME], second[start : start + ROWS_AT_A_TIME])
            for start in range(0, shape[0], ROWS_AT_A_TIME)
        )

    def check_names(self) -> None:
        """Raise MisfitCheckpoint if the checkpoint holds a tensor that the whole decoder does not use."""
        names = self._spec.names
        left = [name for name in {*self.names()} - stored_names(self._spec) if not name.endswith(names.ignored)]
        if left := sorted(name for name in left if not name.startswith(names.others)):
            raise MisfitCheckpoint(
                f"the checkpoint holds {len(left)} tensors that its config.json does not explain, first "
                f"{self._stored(left[0])}"
            )


def stored_names(spec: DecoderSpec) -> set[str]:
    """The names of all tensors that a checkpoint of the whole decoder may hold."""
    names = spec.names
    used = {names.embedding, names.norm, names.lm_head}  # a checkpoint may hold a copy of a tied head
    used |= {names.norm_bias, names.positions, names.project_in, names.project_out}
    used |= {*spec.tensors, *spec.token_tables}
    if spec.head_bias:
        used.add(names.head_bias)
    sparse = (False,) * spec.num_layers if spec.experts is None else spec.experts.sparse
    experts = expert_shapes(spec)
    for layer in range(spec.num_layers):
        fields = spec.of_layer(layer).names.fields
        own = [name for field in shapes_of_layer(spec, layer) for name in fields[field]]
        own += experts if sparse[layer] else ()
        used.update(
            names.layer.format(layer) + (names.parts[name].name if name in names.parts else name) for name in own
        )
    return used


def open_files(directory: Path, spec: DecoderSpec, config: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The open file of each tensor of a checkpoint. Tensors of GGUF are dequantized on `device`, if at all."""
    if is_gguf(directory):
        file = GgufFile(files_of(directory), stored_names(spec), config, device)
        return dict.fromkeys(file.keys(), file)
    opened: dict[str, Any] = {}
    for path in files_of(directory):
        try:
            with name_of_regular(path) as name:
                each: Any = safe_open(name, framework="pt")
            stored = each.keys()
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{path.name} cannot be read as safetensors: {error}") from None
        for name in stored:
            if name in opened:
                raise DamagedCheckpoint(f"tensor {name} stands in two files, one of them {path.name}")
            opened[name] = each
    return opened


class GgufWeights(StoredWeights):
    """The tensors of a GGUF file. Numbers stay packed if a kernel reads them."""

    def packed(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device, dtype: torch.dtype
    ) -> Weight | None:
        parts: list[Any] = []
        library = library_for(device, dtype)
        for _, run in groupby(zip(names, pieces, strict=True), lambda each: self._format(*each)):
            own, own_pieces = zip(*run, strict=True)
            part: Weight | None = None if library is None else self._integers(own, own_pieces, library)
            part = self._four_bit_weight(own, own_pieces, device, dtype) if part is None else part
            part = self._packed_of_gpu(own, own_pieces, device) if part is None else part
            part = self._packed_of_cpu(own, own_pieces, device, dtype) if part is None else part
            if part is None:
                return None
            parts.append(part)
        return parts[0] if len(parts) == 1 else StackedWeight(tuple(parts))

    def packed_matrices(
        self, names: Sequence[tuple[str, ...]], pieces: tuple[Piece, ...], device: torch.device
    ) -> PackedWeight | None:
        experts = [self._packed_of_gpu(each, pieces, device) for each in names]
        held = [each for each in experts if each is not None]
        return stacked(held) if len(held) == len(experts) and are_alike(held) else None

    def _format(self, name: str, piece: Piece) -> str:
        """The format in which a tensor is stored, or the one of which it is a part."""
        name, part = self._parts.get(name, (name, None))
        stored: GgufSlice = self._slice(name, piece.whole if part is None else part.shape)
        return stored.format

    def _integers(self, names: tuple[str, ...], pieces: tuple[Piece, ...], library: Library) -> IntegerWeight | None:
        """One weight that is multiplied as integers, with the rows of all parts; None of formats that are not."""
        if not fits(pieces[0].shape[1], GROUP):
            return None
        fours = self._parts_of_four_bits(names, pieces)
        if fours is not None:
            return pack_integers(library, *fours, 4)
        whole = self._packed_parts(names, pieces)
        return None if whole is None else integers_of(library, whole)

    def _parts_of_four_bits(self, names: tuple[str, ...], pieces: tuple[Piece, ...]) -> FourBits | None:
        """The rows of all parts, if all have 4 bits."""
        found = [self._four_bits(name, piece) for name, piece in zip(names, pieces, strict=True)]
        parts = [each for each in found if each is not None]
        return FourBits(*map(torch.cat, zip(*parts, strict=True))) if len(parts) == len(found) else None

    def _four_bit_weight(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device, dtype: torch.dtype
    ) -> Weight | None:
        """One weight of 4 bits with the rows of all parts; None of other formats, and if no kernel reads it."""
        rows, inputs = sum(piece.shape[0] for piece in pieces), pieces[0].shape[1]
        for_cpu = is_fit((rows, inputs), GROUP, device, dtype)
        half = half_for(inputs, GROUP) if device.type == "cuda" else None
        if not (for_cpu or half):
            return None
        whole = self._parts_of_four_bits(names, pieces)
        if whole is None:
            return None
        numbers, scale, low = whole
        if half:
            zero = torch.zeros_like(scale, dtype=torch.uint8)
            return pack(numbers, scale, zero, GROUP, half, low)
        return pack_for_cpu(numbers, scale, MIDDLE * scale + low, GROUP)

    def _packed_of_gpu(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device
    ) -> PackedWeight | None:
        """One weight as it is stored, with the rows of all parts; None if no kernel reads it."""
        return self._packed_parts(names, pieces) if device.type == "cuda" else None

    def _packed_parts(self, names: tuple[str, ...], pieces: tuple[Piece, ...]) -> PackedWeight | None:
        """One weight as it is stored, with the rows of all parts; None of formats without such a form."""
        if any(name in self._parts for name in names):
            return None
        found = []
        for name, piece in zip(names, pieces, strict=True):
            stored: GgufSlice = self._slice(name, piece.whole)
            found.append(stored.packed(*piece.own))
        parts = [each for each in found if each is not None]
        return joined(parts) if len(parts) == len(found) and are_alike(parts) else None

    def _packed_of_cpu(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device, dtype: torch.dtype
    ) -> Int8CpuWeight | None:
        """One weight of 8 bits with the rows of all parts; None of other formats than Q6_K, and if it loses too much.

        Q8_0 is not rounded by row: it is more exact than that.
        """
        if not fits_int8(device, dtype) or self._format(names[0], pieces[0]) != "Q6_K":
            return None
        rows = []
        for name, piece in zip(names, pieces, strict=True):
            rows.append(torch.empty(piece.shape))
            self.fill(name, piece, rows[-1])
        return pack_rows(torch.cat(rows))

    def _four_bits(self, name: str, piece: Piece) -> FourBits | None:
        """A piece of a tensor, or of a part of one, as its 4-bit numbers; None of other formats."""
        rows, columns = piece.own
        name, part = self._parts.get(name, (name, None))
        stored: GgufSlice = self._slice(name, piece.whole if part is None else part.shape)
        if part is None:
            return stored.four_bits(rows, columns)
        whole = None if part.transposed else stored.four_bits(range(part.shape[0]), columns)
        if whole is None:
            return None
        own = (within(each, part).reshape(-1, each.shape[1])[rows.start : rows.stop] for each in whole)
        return FourBits(*own)


class QuantizedWeights(StoredWeights):
    """The tensors of a quantized checkpoint, by the names and shapes of a plain one.

    Raises UnsupportedCheckpoint for a family that stores weights transposed.
    """

    def __init__(self, opened: Mapping[str, Any], spec: DecoderSpec, how: Quantization, device: torch.device) -> None:
        super().__init__(opened, spec)
        if any(part.transposed for part in spec.names.parts.values()):
            raise UnsupportedCheckpoint(
                f"the checkpoint is quantized ({how.method}), which is not read of {spec.architecture} as it stores "
                "its weights; give one in bfloat16, float16 or float32"
            )
        native = device.type == "cpu" or torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
        self._reader = QuantizedReader(
            self, how, native_fp8=native, reads_packed=device.type == "cuda", parts=self._parts
        )

    def fill(self, name: str, piece: Piece, into: torch.Tensor) -> None:
        if not self._reader.fill(name, piece, into):
            super().fill(name, piece, into)

    def packed(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device, dtype: torch.dtype
    ) -> Weight | None:
        return self._reader.packed(names, pieces, device, dtype)

    def packed_experts(self, name: str, piece: Piece, device: torch.device, dtype: torch.dtype) -> Mxfp4Matrices | None:
        return self._reader.packed_experts(name, piece, device, dtype)

    def packed_matrices(
        self, names: Sequence[tuple[str, ...]], pieces: tuple[Piece, ...], device: torch.device
    ) -> PackedWeight | None:
        return self._reader.packed_matrices(names, pieces, device)

    def names(self) -> Iterable[str]:
        return self._reader.names(super().names())


def is_gguf(directory: Path) -> bool:
    """Whether the weights of a checkpoint are in a GGUF file elsewhere (`gguf_metadata.write`).

    Raises UnsupportedCheckpoint for a directory that Holdfast has not made: it may not name files outside of it.
    """
    if not (directory / GGUF_FILE).is_file():
        return False
    if directory.resolve().parent != gguf_cache().resolve():
        raise UnsupportedCheckpoint(f"{directory} holds {GGUF_FILE}, which only Holdfast's own cache may; remove it")
    return True


def files_of(directory: Path) -> list[Path]:
    """The safetensors or GGUF files of a checkpoint, in order."""
    if is_gguf(directory):
        return parts_of(Path(str(read_json(directory / GGUF_FILE).get("file"))))
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        others = sorted(path.name for path in directory.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f"; it holds {others[0]}, convert it to safetensors" if others else ""
        raise UnsupportedCheckpoint(f"{directory} holds no model.safetensors{found}")
    names = sorted({str(name) for name in read_json(index).get("weight_map", {}).values()})
    for name in names:
        if Path(name).name != name:
            raise UnsupportedCheckpoint(f"{index.name} names {name!r}, which is not a file of its directory")
        if not (directory / name).exists():
            raise DamagedCheckpoint(f"{index.name} names {name}, which is missing")
    return [directory / name for name in names]
