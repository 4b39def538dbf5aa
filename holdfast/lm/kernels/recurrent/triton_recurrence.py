"""Recurrent layers on CUDA: which Triton kernels compute a step, and their launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import triton

from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.launch import SideStream, shared_bytes
from holdfast.lm.kernels.recurrent.chunk_kernels import output_kernel, prepare_kernel, scan_kernel
from holdfast.lm.kernels.recurrent.convolution_kernel import convolution_kernel
from holdfast.lm.kernels.recurrent.gate_kernels import gated_norm_kernel, gates_kernel
from holdfast.lm.kernels.recurrent.keep_kernel import keep_kernel
from holdfast.lm.kernels.recurrent.protocol import MOST_KEPT, NORM_EPS, Activation, CapturableRecurrence
from holdfast.lm.kernels.recurrent.step_kernel import step_kernel
from holdfast.lm.kernels.recurrent.tiles import CHUNK, WorkLists, WorkListsBuilder

MAX_KEY_DIM = 256
"""Largest key dimension whose state fits the registers of one program."""
LEVELS = CHUNK.bit_length() - 1
KEPT_BLOCK = 2048
"""Numbers of a token that one program of `keep_kernel` copies of each tensor."""
INVERSE_PRECISION = "bf16x3"
"""How 16-bit inputs' triangular matrices are inverted: in products of numbers that are three bfloat16 each."""
GATES_AT_A_TIME = 512
"""Number of decays and rates that one program computes."""
NORMED_AT_A_TIME = 2048
"""Numbers of a token that one program norms and gates."""
OTHER_BYTES = 12 << 10
"""Shared memory of a program of `scan_kernel`, besides chunks that are on their way."""


@dataclass(frozen=True)
class Launch:
    """Launch settings of one kernel."""

    block: int
    """Columns of the value, or channels, in one program."""
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True)
class Inputs:
    """The arguments of a recurrence in common terms, [T, heads, D]; see `step_kernel`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    rate: torch.Tensor
    skip: torch.Tensor | None
    state: torch.Tensor
    out: torch.Tensor
    scale: float
    delta: bool
    normalize: bool

    @property
    def heads(self) -> int:
        """Number of value heads, which is that of states."""
        return self.value.shape[1]

    @property
    def input_strides(self) -> tuple[int, ...]:
        """Strides of query, key and value by token and head."""
        return (*self.query.stride()[:2], *self.key.stride()[:2], *self.value.stride()[:2])

    @property
    def rate_strides(self) -> tuple[int, int]:
        """Strides of log_decay and rate by token. A decay that all tokens share has a stride of 0."""
        return (self.log_decay.stride(0) if self.log_decay.dim() > 1 else 0), self.rate.stride(0)

    @property
    def state_strides(self) -> tuple[int, ...]:
        """Strides of the state by slot, head, key dimension and value dimension."""
        slot, head, third, fourth = self.state.stride()
        return (slot, head, third, fourth) if self.delta else (slot, head, fourth, third)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes that all kernels are compiled for. Raises ValueError for a key dimension out of range."""
        key_dim = self.key.shape[2]
        if key_dim > MAX_KEY_DIM:
            raise ValueError(f"the keys of a recurrent layer have {key_dim} dimensions; at most {MAX_KEY_DIM} fit")
        return dict(
            GROUP_SIZE=self.heads // self.key.shape[1],
            KEY_DIM=key_dim,
            BLOCK_K=padded(key_dim),
        )


@dataclass(frozen=True)
class Scratch:
    """Results that the kernels of chunks read of one another. The names are those of the kernels' arguments."""

    weights: torch.Tensor
    read: torch.Tensor
    target: torch.Tensor
    query_factor: torch.Tensor
    write_factor: torch.Tensor
    total_factor: torch.Tensor
    states: torch.Tensor

    @classmethod
    def of(cls, inputs: Inputs, chunks: int) -> Scratch:
        """Memory for these inputs and number of chunks; empty if there is no chunk."""
        key, rows = inputs.key, (len(inputs.value) if chunks else 0, inputs.heads)
        used = rows if inputs.delta else (0, 0)
        key_dim, value_dim = key.shape[2], inputs.value.shape[2]
        factors = partial(key.new_empty, dtype=torch.float32)
        return cls(
            weights=key.new_empty(*rows, CHUNK),
            read=key.new_empty(*used, key_dim),
            target=key.new_empty(*used, value_dim),
            query_factor=factors(rows),
            write_factor=factors(rows),
            total_factor=factors((chunks, inputs.heads)),
            states=key.new_empty(chunks, inputs.heads, key_dim, value_dim),
        )


class TritonRecurrence(CapturableRecurrence[WorkLists]):
    """`Recurrence` in Triton: segments of few tokens token by token, long ones in chunks.

    Records of zeros do nothing, so captured launches of fixed size serve smaller batches. Products of bfloat16 and
    float16 are on tensor cores, with sums in float32; float32 is computed exactly (no TF32).
    """

    def __init__(self, device: torch.device, *, one_by_one: bool = False) -> None:
        """`one_by_one`: long segments, too, are computed token by token, so that bits do not depend on their ends."""
        self.lists = WorkListsBuilder(device, all_few=one_by_one)
        self._side_stream = SideStream(device)
        self._shared_bytes = shared_bytes(device)

    def make_metadata(self, segments: Segments) -> WorkLists:
        return self.lists.build(segments)

    def reserve(self, segments: int, tokens: int | None = None, places: int = 0) -> WorkLists:
        return self.lists.reserve(segments, tokens, places)

    def refill(self, metadata: WorkLists, segments: Segments) -> bool:
        return self.lists.refill(metadata, segments)

    def keep(self, inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], metadata: WorkLists) -> None:
        if len(inputs) > MOST_KEPT:
            raise ValueError(f"{len(inputs)} inputs of a recurrent layer are to be kept; at most {MOST_KEPT} can be")
        if not len(metadata.kept):
            return
        arguments: list[torch.Tensor | int | None] = []
        for numbers, places in zip(inputs, kept, strict=True):
            arguments += [numbers, places, numbers.stride(0), places[0].numel()]
        arguments += [None, None, 0, 0] * (MOST_KEPT - len(inputs))
        widest = max(places[0].numel() for places in kept)
        keep_kernel[(triton.cdiv(widest, KEPT_BLOCK), len(metadata.kept))](
            metadata.kept, *arguments, BLOCK=KEPT_BLOCK, num_warps=4
        )

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: WorkLists,
        *,
        activation: Activation | None,
    ) -> torch.Tensor:
        out = x.new_empty(x.shape)
        channels, width = weight.shape

        def launch(work: torch.Tensor, block_t: int, block_c: int, tile: int) -> None:
            convolution_kernel[(triton.cdiv(channels, block_c), len(work))](
                x, weight, bias, state, work, out, channels,
                x.stride(0), weight.stride(0), *state.stride()[:2], out.stride(0),
                WIDTH=width, BLOCK_W=triton.next_power_of_2(width - 1), BLOCK_T=block_t, BLOCK_C=block_c, TILE=tile,
                SILU=activation == "silu", num_warps=4,
            )  # fmt: skip

        self._both(
            metadata,
            few=lambda: launch(metadata.few, block_t=1, block_c=256, tile=0),
            many=lambda: launch(metadata.chunks, block_t=CHUNK // 4, block_c=128, tile=CHUNK),
        )
        return out

    def gates(
        self, time: torch.Tensor, rate: torch.Tensor, time_bias: torch.Tensor, decay: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_decay, beta = torch.empty(time.shape, dtype=torch.float32, device=time.device), torch.empty_like(rate)
        tokens, heads = time.shape
        gates_kernel[(triton.cdiv(tokens * heads, GATES_AT_A_TIME),)](
            time, rate, time_bias, decay, log_decay, beta, tokens, time.stride(0), rate.stride(0),
            HEADS=heads, BLOCK=GATES_AT_A_TIME, num_warps=4,
        )  # fmt: skip
        return log_decay, beta

    def gated_norm(self, x: torch.Tensor, gate: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        tokens, heads, dim = x.shape
        out = x.new_empty(tokens, heads * dim)
        block_d = int(triton.next_power_of_2(dim))
        block_h = max(1, NORMED_AT_A_TIME // block_d)
        gated_norm_kernel[(triton.cdiv(heads, block_h), tokens)](
            x, gate, gain, out, heads, *x.stride()[:2], gate.stride(0), eps,
            DIM=dim, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
        return out

    def gated_delta(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        metadata: WorkLists,
        *,
        scale: float,
        normalize: bool,
    ) -> torch.Tensor:
        out = value.new_empty(value.shape)
        return self._recur(
            Inputs(query, key, value, log_decay, beta, None, state, out, scale, delta=True, normalize=normalize),
            metadata,
        )

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        decay: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        skip: torch.Tensor | None,
        state: torch.Tensor,
        metadata: WorkLists,
    ) -> torch.Tensor:
        out = x.new_empty(x.shape)
        return self._recur(Inputs(c, b, x, decay, dt, skip, state, out, 1.0, delta=False, normalize=False), metadata)

    def _recur(self, inputs: Inputs, metadata: WorkLists) -> torch.Tensor:
        """Launch both kinds of work; returns `inputs.out`."""
        # Memory freed before `join` could be reused while the side stream still writes it.
        scratch = Scratch.of(inputs, len(metadata.chunks))
        self._both(
            metadata,
            few=lambda: self._step(inputs, metadata.few),
            many=lambda: self._scan(inputs, metadata, scratch),
        )
        return inputs.out

    def _both(self, metadata: WorkLists, *, few: Callable[[], object], many: Callable[[], object]) -> None:
        """Run the launches for each kind of segment that the step has. The two kinds overlap."""
        if len(metadata.few) and len(metadata.many):
            with self._side_stream.fork():
                many()
            few()
            self._side_stream.join()
        elif len(metadata.few):
            few()
        elif len(metadata.many):
            many()

    def _step(self, inputs: Inputs, work: torch.Tensor) -> None:
        """Launch segments of few tokens."""
        launch = self.step_launch(inputs)
        step_kernel[(triton.cdiv(inputs.value.shape[2], launch.block), inputs.heads, len(work))](
            inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.rate, inputs.skip, inputs.state, work,
            inputs.out, *inputs.input_strides, *inputs.rate_strides, *inputs.state_strides, *inputs.out.stride()[:2],
            inputs.scale, NORM_EPS, **inputs.sizes, VALUE_DIM=inputs.value.shape[2], BLOCK_V=launch.block,
            DELTA=inputs.delta, NORMALIZE=inputs.normalize, num_warps=launch.num_warps,
        )  # fmt: skip

    def _scan(self, inputs: Inputs, metadata: WorkLists, scratch: Scratch) -> None:
        """Launch long segments: all their chunks, the chunks of each in order, and the outputs of all chunks."""
        query, key, value, chunks, out = inputs.query, inputs.key, inputs.value, metadata.chunks, inputs.out
        query_strides, key_strides, value_strides = (each.stride()[:2] for each in (query, key, value))
        exact = key.dtype == torch.float32
        value_dim = value.shape[2]
        common = dict(
            **inputs.sizes, HEADS=inputs.heads, VALUE_DIM=value_dim, CHUNK=CHUNK, DELTA=inputs.delta,
            PRECISION="ieee" if exact else "tf32",
        )  # fmt: skip
        wide = min(32 if exact else 64, padded(value_dim))
        prepare_kernel[(inputs.heads, len(chunks))](
            query, key, value, inputs.log_decay, inputs.rate, chunks, scratch.weights, scratch.read, scratch.target,
            scratch.query_factor, scratch.write_factor, scratch.total_factor, *query_strides, *key_strides,
            *value_strides, *inputs.rate_strides, inputs.scale, NORM_EPS, **common, BLOCK_V=wide, LEVELS=LEVELS,
            NORMALIZE=inputs.normalize, INVERSE_PRECISION="ieee" if exact else INVERSE_PRECISION,
            num_warps=8 if exact else 4,
        )  # fmt: skip
        launch = self.scan_launch(inputs)
        scan_kernel[(triton.cdiv(value_dim, launch.block), inputs.heads, len(metadata.many))](
            key, value, inputs.state, metadata.many, scratch.read, scratch.target, scratch.write_factor,
            scratch.total_factor, scratch.states, out, *key_strides, *value_strides, *inputs.state_strides,
            *out.stride()[:2], **common, BLOCK_V=launch.block, STAGES=launch.num_stages, num_warps=launch.num_warps,
        )  # fmt: skip
        output_kernel[(triton.cdiv(value_dim, wide), inputs.heads, len(chunks))](
            query, value, inputs.skip, chunks, scratch.weights, scratch.query_factor, scratch.states, out,
            *query_strides, *value_strides, *out.stride()[:2], **common, BLOCK_V=wide, num_warps=8 if exact else 4,
        )  # fmt: skip

    def step_launch(self, inputs: Inputs) -> Launch:
        """Launch settings of `step_kernel`: a part of the state that fits the registers of its warps."""
        return Launch(block=16, num_warps=1)

    def scan_launch(self, inputs: Inputs) -> Launch:
        """Launch settings of `scan_kernel`: the next chunk is on its way, if shared memory has room for two."""
        if inputs.key.dtype == torch.float32:
            return Launch(block=16, num_warps=8)
        block = min(32, padded(inputs.value.shape[2]))
        chunk = CHUNK * (2 * padded(inputs.key.shape[2]) + block) * inputs.key.element_size()
        return Launch(block=block, num_warps=4, num_stages=2 if 2 * chunk + OTHER_BYTES <= self._shared_bytes else 1)


def padded(size: int) -> int:
    """The number of elements of a kernel's block that holds `size` of them: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(size)))
