"""Whole steps of a decoder on few tokens, by the library in C (step.c)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.kernels.integer.library import STEP_SIZE, Library
from holdfast.lm.kernels.integer.weight import TILE, IntegerWeight
from holdfast.lm.kernels.lora.protocol import LoraStack
from holdfast.lm.kernels.stacked import Rows, StackedWeight

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1}
"""Activations that the library computes, with its numbers for them."""
DTYPES = (torch.float32, torch.bfloat16)
"""Types of weights and caches that it reads."""
HEAD_UNIT = 16
"""Sizes of heads are multiples of this."""
MOST_ROTATIONS = 2
NORMS = ("input_norm", "post_norm", "attention_out_norm", "mlp_out_norm", "q_norm", "k_norm", "sinks")
"""Small tensors of `struct layer`, in its order."""
MOST_PARTS = 4
"""Largest number of parts of a projection that adapters change."""
BAD_PLACE = 2
Compute = Callable[[ctypes.Structure, ctypes.Structure, torch.Tensor], int]
"""A function of the library that computes a step, or a part of one, of a decoder in scratch memory."""

StepWeight = torch.Tensor | IntegerWeight | StackedWeight
"""A weight that the library reads: plain numbers, integers, or rows of several integers."""


class _Matrix(ctypes.Structure):
    """struct matrix of integer.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "bias", "factors")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "by_rows", "bits")),
    )


class _Projection(ctypes.Structure):
    """struct projection of integer.h."""

    _fields_ = (("parts", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("count", "outputs", "packed")))


class _Layer(ctypes.Structure):
    """struct layer of integer.h."""

    _fields_ = (
        *((name, _Projection) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in NORMS),
        *((name, ctypes.c_int64) for name in ("window", "chunked", "rotation")),
    )


class _Decoder(ctypes.Structure):
    """struct decoder of integer.h."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("head", _Projection),
        ("final_norm", ctypes.c_void_p),
        ("frequencies", ctypes.c_void_p * MOST_ROTATIONS),
        ("amplitudes", ctypes.c_void_p * MOST_ROTATIONS),
        *(
            (name, ctypes.c_int64)
            for name in ("count", "hidden", "inner", "heads", "kv_heads", "dim", "activation", "half")
        ),
        *((name, ctypes.c_float) for name in ("eps", "scale", "softcap")),
    )


class _Adapted(ctypes.Structure):
    """struct adapted of integer.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "rank", "scale")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "part_stride", "table_stride")),
        *((name, ctypes.c_int64) for name in ("parts", "ranks", "inputs", "outputs")),
        ("ends", ctypes.c_int64 * MOST_PARTS),
    )


class _Step(ctypes.Structure):
    """struct step of integer.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("stream", "positions", "slots", "table_rows", "tables", "sample_at")),
        *((name, ctypes.c_void_p) for name in ("caches", "logits", "normed", "taps", "tap_layers")),
        *((name, ctypes.c_void_p) for name in ("adapted", "adapter_of", "scratch")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("rows", "samples", "blocks", "block_size", "table_count", "table_width", "longest", "tap_count"),
                *("wide", "adapter_slots", "low_width"),
            )
        ),
    )


assert ctypes.sizeof(_Step) == STEP_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayer:
    """The tensors of one layer. One that the architecture lacks is None."""

    qkv: StepWeight  # [(H + 2 Hkv) D, hidden]
    o: StepWeight  # [hidden, H D]
    gate_up: StepWeight  # [2 inner, hidden]
    down: StepWeight  # [hidden, inner]
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    input_norm: torch.Tensor | None = None  # [hidden]
    post_norm: torch.Tensor | None = None  # [hidden]
    attention_out_norm: torch.Tensor | None = None  # [hidden]
    mlp_out_norm: torch.Tensor | None = None  # [hidden]
    q_norm: torch.Tensor | None = None  # [D]
    k_norm: torch.Tensor | None = None  # [D]
    sinks: torch.Tensor | None = None  # [H]
    window: int | None = None
    """Number of positions that a token sees, or of a chunk; None: it sees all."""
    rotation: int = 0
    """Index of the layer's rotation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Sizes and settings of a decoder."""

    heads: int
    kv_heads: int
    dim: int
    """Numbers of a head."""
    eps: float
    scale: float
    """The factor on attention scores."""
    activation: str
    """A key of ACTIVATIONS."""
    softcap: float | None = None
    chunked: bool = False
    """Whether windows are chunks."""


Stacks = tuple[LoraStack | None, ...]
"""The adapters of a layer's qkv, o, gate_up and down."""


@dataclass(frozen=True, slots=True)
class TokenAdapters:
    """The LoRA adapters of a step's tokens. Adapters with gains (DoRA) are not among them."""

    layers: tuple[Stacks, ...]
    slots: npt.NDArray[np.int64]  # [T]: each token's slot; -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The T tokens of a step, as `Attention` reads them."""

    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64
    rows: npt.NDArray[np.int64]  # [T]: each token's row of the block tables
    tables: torch.Tensor  # [rows, max_blocks] int32
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer, [num_blocks, block_size, Hkv, D] each."""
    longest: int
    """One more than the largest position."""
    sample_at: torch.Tensor | None = None  # [R] int64: the tokens whose logits are wanted; None: all
    taps: torch.Tensor | None = None  # [T, len(tap_layers), hidden]: gets the stream as it enters these layers
    tap_layers: Sequence[int] = ()
    adapters: TokenAdapters | None = None
    """The adapters of the tokens; None if no token has one."""


class _Records:
    """The records of a decoder's tensors, which the library reads where they are, and memory for its activations."""

    _decoder: _Decoder

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        """`dtype` is that of plain weights."""
        self._library, self._dtype, self._kept = library, dtype, list[Any]()
        self._scratch: list[torch.Tensor] = []
        """Memory for activations that no call uses now."""

    def _run(self, compute: Compute, step: _Step) -> None:
        size = self._library.step_bytes(self._decoder, step)
        scratch = self._scratch.pop() if self._scratch else torch.empty(0, dtype=torch.uint8)
        if len(scratch) < size:
            scratch = torch.empty(size, dtype=torch.uint8)
        status = compute(self._decoder, step, scratch)
        self._scratch.append(scratch)
        if status:
            what = (
                "a slot, block, position or row of the step does not exist" if status == BAD_PLACE else "sizes differ"
            )
            raise ValueError(f"a step of {step.rows} tokens cannot be computed: {what}")

    def _projection(self, weight: StepWeight, bias: torch.Tensor | None, shape: tuple[int, ...]) -> _Projection:
        """A weight [N, K]. Raises ValueError for another shape, and for parts that the library does not take."""
        if weight.shape != shape:
            raise ValueError(f"a weight {[*weight.shape]} does not have the shape {[*shape]}")
        given = weight.with_biases(bias) if isinstance(weight, StackedWeight) else [(weight, bias)]
        parts = (_Matrix * len(given))(*(self._matrix(part, own) for part, own in given))
        packed = any(part.bits for part in parts)
        edges = [part.outputs for part in parts[:-1]]
        if any(edge % TILE for edge in edges):
            raise ValueError(f"parts of a weight have {edges} outputs, and not all are multiples of {TILE}")
        self._kept.append(parts)
        return _Projection(ctypes.addressof(parts), len(parts), shape[0], packed)

    def _matrix(self, weight: Rows | torch.Tensor, bias: torch.Tensor | None) -> _Matrix:
        """A part of a weight, [n, K]. Plain numbers lie by inputs or by outputs."""
        outputs, inputs = weight.shape
        self._kept.append(weight)
        bias_at = self._small(bias, outputs)
        if isinstance(weight, IntegerWeight):
            at = weight.data.data_ptr(), bias_at, weight.factors.data_ptr()
            return _Matrix(*at, outputs, inputs, False, weight.bits)
        if not isinstance(weight, torch.Tensor) or weight.dtype != self._dtype:
            raise ValueError(f"a weight {[outputs, inputs]} is not of {self._dtype} or of integers")
        by_rows = weight.is_contiguous()
        if not by_rows and not weight.t().is_contiguous():
            raise ValueError(f"a weight {[outputs, inputs]} has strides {weight.stride()}")
        return _Matrix(weight.data_ptr(), bias_at, None, outputs, inputs, by_rows, 0)

    def _small(self, tensor: torch.Tensor | None, width: int) -> int | None:
        """The address of a copy in float32 of a small tensor, which stays as long as this object."""
        if tensor is None:
            return None
        if tensor.shape != (width,):
            raise ValueError(f"a tensor {[*tensor.shape]} does not have {width} numbers")
        copy = tensor.detach().to(torch.float32, copy=True).contiguous()
        self._kept.append(copy)
        return copy.data_ptr()

    @staticmethod
    def _check(what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(f"{what} are {tensor.dtype} {[*tensor.shape]}; a step takes contiguous {dtype} {[*shape]}")


class LibraryProduct(_Records):
    """Products with a weight [N, K] in float32. Each sum has one order, for any number of rows and of other outputs."""

    def __init__(self, library: Library, weight: StepWeight, dtype: torch.dtype) -> None:
        """`dtype` is that of a plain weight. Raises ValueError for a weight that the library does not take."""
        super().__init__(library, dtype)
        outputs, inputs = weight.shape
        one = dict(inner=1, heads=1, kv_heads=1, dim=HEAD_UNIT)  # there are no layers
        projection = self._projection(weight, None, (outputs, inputs))
        self._decoder = _Decoder(head=projection, hidden=inputs, half=dtype == torch.bfloat16, **one)
        self._shape = weight.shape

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] float32 times the weight transposed: [T, N] float32. Raises ValueError for another x."""
        rows, (outputs, inputs) = len(x), self._shape
        self._check("activations", x, torch.float32, (rows, inputs))
        out = x.new_empty(rows, outputs)
        if rows:
            step = _Step(logits=out.data_ptr(), normed=x.data_ptr(), rows=rows, samples=rows, wide=True)
            self._run(self._library.head, step)
        return out


class WholeSteps(_Records):
    """A decoder whose steps are one call each. Weights are read where they are; none may change or move afterwards.

    Everything between weights and caches is in float32.
    """

    def __init__(
        self,
        library: Library,
        sizes: StepSizes,
        layers: Sequence[StepLayer],
        *,
        head: StepWeight,
        head_bias: torch.Tensor | None,
        dtype: torch.dtype,
        final_norm: torch.Tensor,
        rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """`head` is the LM head [V, hidden]; `dtype` is that of plain weights and of caches.

        `rotations` are frequencies and amplitudes [D / 2] of each kind of layer.

        Raises ValueError for tensors that the library does not take.
        """
        super().__init__(library, dtype)
        self._dim, self._kv_heads = sizes.dim, sizes.kv_heads
        hidden, inner = head.shape[1], layers[0].down.shape[1]
        queries = sizes.heads * sizes.dim
        shapes = {
            "qkv": (queries + 2 * sizes.kv_heads * sizes.dim, hidden),
            "o": (hidden, queries),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        widths = dict.fromkeys(NORMS, hidden) | {"q_norm": sizes.dim, "k_norm": sizes.dim, "sinks": sizes.heads}
        if dtype not in DTYPES or sizes.dim % HEAD_UNIT or sizes.activation not in ACTIVATIONS:
            raise ValueError(f"no whole steps for {dtype}, heads of {sizes.dim} numbers and {sizes.activation}")
        if not 1 <= len(rotations) <= MOST_ROTATIONS:
            raise ValueError(f"there are {len(rotations)} kinds of rotation; the library takes 1 or {MOST_ROTATIONS}")
        records = (_Layer * len(layers))()
        for record, layer in zip(records, layers, strict=True):
            for name, shape in shapes.items():
                setattr(record, name, self._projection(getattr(layer, name), getattr(layer, f"{name}_bias"), shape))
            if record.gate_up.packed and inner % TILE:
                raise ValueError(f"a packed gate has {inner} outputs, which is not a multiple of {TILE}")
            for name, width in widths.items():
                setattr(record, name, self._small(getattr(layer, name), width))
            record.window, record.chunked = layer.window or 0, sizes.chunked
            record.rotation = range(len(rotations))[layer.rotation]
        self._kept.append(records)
        pointers = [[self._small(each, sizes.dim // 2) for each in rotation] for rotation in rotations]
        pointers += [[None, None]] * (MOST_ROTATIONS - len(rotations))
        by_kind = [(ctypes.c_void_p * MOST_ROTATIONS)(*each) for each in zip(*pointers, strict=True)]
        self._decoder = _Decoder(
            ctypes.addressof(records),
            self._projection(head, head_bias, (head.shape[0], hidden)),
            self._small(final_norm, hidden),
            *by_kind,
            *(len(layers), hidden, inner, sizes.heads, sizes.kv_heads, sizes.dim),
            *(ACTIVATIONS[sizes.activation], dtype == torch.bfloat16),
            *(sizes.eps, sizes.scale, sizes.softcap or 0.0),
        )
        self._outputs, self._hidden = head.shape[0], hidden
        self._caches: tuple[Sequence[weakref.ref[torch.Tensor]], Any] = (), None
        """The caches of the last step, which may be freed, and their addresses."""
        self._adapted: tuple[tuple[Stacks, ...], Any, int] = (), None, 0
        """The adapters of the last step that had some, their records, and the largest parts * ranks of them."""
        self._shapes = shapes

    def logits(self, stream: torch.Tensor, tokens: StepTokens) -> torch.Tensor:
        """Logits [R, V] after the embeddings [T, hidden] of a step's tokens. Writes their keys and values.

        Raises ValueError for tensors of other types or shapes, and for slots, blocks and positions that do not exist.
        """
        logits = stream.new_empty(_sampled(stream, tokens), self._outputs)
        self._compute(stream, tokens, logits, None)
        return logits

    def normed(self, stream: torch.Tensor, tokens: StepTokens) -> torch.Tensor:
        """The final norm's output [R, hidden] in float32, in place of the logits that `head` gives of it.

        See `logits`.
        """
        normed = stream.new_empty(_sampled(stream, tokens), self._hidden, dtype=torch.float32)
        self._compute(stream, tokens, None, normed)
        return normed

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of rows that `normed` gave, with the bits that `logits` gives. Raises ValueError for others."""
        rows = len(normed)
        self._check("normed rows", normed, torch.float32, (rows, self._hidden))
        logits = normed.new_empty(rows, self._outputs, dtype=self._dtype)
        if rows:
            step = _Step(logits=logits.data_ptr(), normed=normed.data_ptr(), rows=rows, samples=rows)
            self._run(self._library.head, step)
        return logits

    def _compute(
        self, stream: torch.Tensor, tokens: StepTokens, logits: torch.Tensor | None, normed: torch.Tensor | None
    ) -> None:
        """Compute a step, and write what is wanted of its sampled rows."""
        rows, (blocks, block_size, *_) = len(stream), tokens.caches[0][0].shape
        self._check("embeddings", stream, self._dtype, (rows, self._hidden))
        self._check("block tables", tokens.tables, torch.int32, tuple(tokens.tables.shape))
        for name in ("positions", "slots"):
            self._check(name, getattr(tokens, name), torch.int64, (rows,))
        table_rows = torch.from_numpy(np.ascontiguousarray(tokens.rows, np.int64))
        if len(table_rows) != rows or len(tokens.caches) != self._decoder.count:
            raise ValueError(f"{len(table_rows)} rows of tables and {len(tokens.caches)} caches do not fit the step")
        at, samples = None, _sampled(stream, tokens)
        if tokens.sample_at is not None:
            at = tokens.sample_at.data_ptr()
            self._check("sampled tokens", tokens.sample_at, torch.int64, (samples,))
        taps, tap_layers = None, np.array(tokens.tap_layers, np.int64)
        if tokens.taps is not None:
            self._check("taps", tokens.taps, self._dtype, (rows, len(tap_layers), self._hidden))
            if not all(0 <= layer < self._decoder.count for layer in tokens.tap_layers):
                raise ValueError(f"layers {[*tokens.tap_layers]} are tapped, and there are {self._decoder.count}")
            taps = tokens.taps.data_ptr()
        caches = self._places_of(tokens.caches)
        inputs = (stream, tokens.positions, tokens.slots)
        results = (None if each is None else each.data_ptr() for each in (logits, normed))
        adapted, adapter_of, slots, low_width = None, np.empty(0, np.int64), 0, 0
        if tokens.adapters is not None:
            adapter_of = np.ascontiguousarray(tokens.adapters.slots, np.int64)
            if len(adapter_of) != rows:
                raise ValueError(f"{len(adapter_of)} slots of adapters do not fit a step of {rows} tokens")
            records, low_width, slots = self._records_of(tokens.adapters)
            adapted = ctypes.addressof(records)
        step = _Step(
            *(each.data_ptr() for each in inputs),
            *(table_rows.data_ptr(), tokens.tables.data_ptr(), at, ctypes.addressof(caches), *results),
            *(taps, tap_layers.ctypes.data, adapted, adapter_of.ctypes.data, None),
            *(rows, samples, blocks, block_size, *tokens.tables.shape, tokens.longest, len(tap_layers)),
            *(False, slots, low_width),
        )
        self._run(self._library.step, step)

    def _places_of(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """The addresses of the keys and values of each layer, which are checked when they are new."""
        tensors = [each for layer in caches for each in layer]
        known, places = self._caches
        if len(known) != len(tensors) or any(own() is not each for own, each in zip(known, tensors, strict=True)):
            shape = (*tensors[0].shape[:2], self._kv_heads, self._dim)
            for each in tensors:
                self._check("a cache", each, self._dtype, shape)
            places = (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))
            self._caches = [weakref.ref(each) for each in tensors], places
        return places

    def _records_of(self, adapters: TokenAdapters) -> tuple[Any, int, int]:
        """The records of a step's adapters, the largest parts * ranks of them, and the number of slots.

        Adapters are written to places that stay, so records are made once. Raises ValueError for adapters that the
        library does not take.
        """
        known, records, width = self._adapted
        stacks = [stack for layer in adapters.layers for stack in layer]
        if known is not adapters.layers:
            if len(adapters.layers) != self._decoder.count or any(len(each) != 4 for each in adapters.layers):
                raise ValueError(f"there are adapters of {len(adapters.layers)} layers of {self._decoder.count}")
            shapes = [*self._shapes.values()] * self._decoder.count
            records = (_Adapted * len(stacks))(*map(self._stack, stacks, shapes))
            width = max(each.parts * each.ranks for each in records)
            self._adapted = adapters.layers, records, width
        return records, width, max((len(each.rank) for each in stacks if each is not None), default=0)

    def _stack(self, stack: LoraStack | None, shape: tuple[int, int]) -> _Adapted:
        """The record of the adapters of a projection [N, K]. Raises ValueError for others."""
        if stack is None:
            return _Adapted()
        slots, parts, ranks, inputs = stack.a.shape
        table = stack.rank.stride(0)
        if (stack.outputs, inputs) != shape or parts > MOST_PARTS or stack.b.shape != (slots, ranks, shape[0]):
            raise ValueError(f"adapters of {parts} parts [{stack.outputs}, {inputs}] do not fit a weight {[*shape]}")
        fit = stack.a.dtype == stack.b.dtype == self._dtype and stack.a[0, 0].is_contiguous()
        fit = fit and stack.b[0].is_contiguous() and stack.a.stride(0) == stack.b.stride(0)
        tables = (
            stack.rank.dtype == torch.int32 and stack.scale.dtype == torch.float32 and stack.scale.stride(0) == table
        )
        if not (fit and tables and stack.rank.stride(1) == stack.scale.stride(1) == 1) or stack.gain is not None:
            raise ValueError(f"adapters are {stack.a.dtype} with strides {stack.a.stride()}, or have gains")
        pointers = (each.data_ptr() for each in (stack.a, stack.b, stack.rank, stack.scale))
        strides = stack.a.stride(0), stack.a.stride(1), table
        ends = (ctypes.c_int64 * MOST_PARTS)(*stack.ends)
        return _Adapted(*pointers, *strides, parts, ranks, inputs, shape[0], ends)


def _sampled(stream: torch.Tensor, tokens: StepTokens) -> int:
    """Number of tokens of a step whose results are wanted."""
    return len(stream) if tokens.sample_at is None else len(tokens.sample_at)
