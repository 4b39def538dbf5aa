"""The interface between models and the executor: a model's sizes, and the input of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from holdfast.lm.kernels.attention.protocol import Attention, Segments
from holdfast.lm.kernels.cache.kv_cache import KVShape
from holdfast.lm.kernels.lora.protocol import StepAdapters
from holdfast.lm.kernels.recurrent.protocol import Recurrence
from holdfast.lm.models.checkpoint_errors import DamagedCheckpoint, UnsupportedCheckpoint
from holdfast.lm.types.states import KeptInputs, StateCopy

Shape = tuple[int, ...]

LENGTH_LIMIT = 1 << 22
"""Largest number of tokens in a sequence unless max_model_len is given. Block tables are sized for this length."""


def limited(wanted: int | None, made_for: int) -> int:
    """Length limit of a sequence, in tokens: `wanted`, or else `made_for`, the limit that the model was made for.

    Raises ValueError if `wanted` is longer than `made_for`, and UnsupportedCheckpoint if `made_for` is above
    LENGTH_LIMIT and `wanted` is not given.
    """
    if wanted is not None and wanted > made_for:
        raise ValueError(f"max_model_len is {wanted}; the model was made for {made_for} tokens at most")
    if wanted is None and not 0 < made_for <= LENGTH_LIMIT:
        raise UnsupportedCheckpoint(
            f"the model was made for {made_for} tokens; at most {LENGTH_LIMIT} are served: give max_model_len"
        )
    return wanted or made_for


def check_finite(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise DamagedCheckpoint if a weight holds NaN, or numbers that are infinite in `dtype`."""
    largest = torch.finfo(dtype).max
    low, high = torch.aminmax(tensor) if tensor.numel() else (0.0, 0.0)
    if not (-largest <= float(low) and float(high) <= largest):  # NaN fails every comparison
        kind = str(dtype).removeprefix("torch.")
        raise DamagedCheckpoint(f"tensor {name} holds NaN or infinite values, as {kind}: the checkpoint is damaged")


class StateTensor(NamedTuple):
    """One tensor of a recurrent layer's state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


LayerState = tuple[torch.Tensor, ...]
"""The states of one recurrent layer: for each tensor of `ModelSpec.state`, one with a slot for each state first."""


class RecurrentLayers(Protocol):
    """The kind of a model's recurrent layers, as far as it computes states from kept inputs."""

    def kept(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The inputs of one token in one layer from which its state can be computed. `dtype` is the activations'."""

    def replay(
        self, recurrence: Recurrence[Any], states: LayerState, inputs: Sequence[torch.Tensor], metadata: Any
    ) -> None:
        """Move states on by the tokens of a batch, from their inputs [T, ...] as `kept` lists them.

        The batch may hold segments of several layers, as nothing here depends on the layer. `metadata` is that of
        `recurrence` for this batch.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Facts about a model of any architecture that the engine needs.

    If several devices share the model, layers, heads and bytes are those of this device's part.
    """

    architecture: str
    num_layers: int
    """Number of layers that keep keys and values."""
    num_heads: int
    num_kv_heads: int
    """Number of KV heads of the first of these layers."""
    head_dim: int
    """Size of a head of the first of these layers."""
    vocab_size: int
    own_vocab_size: int
    """Number of vocabulary tokens whose logits this device computes."""
    max_model_len: int
    """Largest number of tokens in a sequence."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    """The dtype of weights and activations, and also of the cache, unless the engine's configuration sets another."""
    device: torch.device
    weight_bytes: int
    stream_width: int = 0
    """Numbers per token in the residual stream between pipeline stages; 0 for a model in one stage."""
    first: bool = True
    """Whether this is the first stage, which embeds tokens. Other stages begin with the previous stage's stream."""
    last: bool = True
    """Whether this is the last stage, which computes logits. Other stages return their stream."""
    latent_rank: int = 0
    """Width of the first part of each key that is also its value, in latent attention; 0: values are on their own.

    With latent attention there is one KV head, and `head_dim` is the width of its keys."""
    recurrent_layers: int = 0
    """Number of layers that keep a recurrent state in place of keys and values."""
    state: tuple[StateTensor, ...] = ()
    """The tensors of the state that each of these layers keeps of a sequence."""
    recurrence: RecurrentLayers | None = None
    """The kind of these layers; None for a model without any."""
    shapes: tuple[KVShape, ...] = ()
    """The sizes that each layer keeps of a token, if layers differ; empty: all have `num_kv_heads` and `head_dim`."""

    arithmetic: str = ""
    """With results whose bits do not depend on a step's other tokens: what computes them (`same_bits.arithmetic_of`).

    Empty: their bits may depend on these."""
    one_by_one: bool = False
    """Whether a step computes one token after the other, so that its time grows with each of them."""
    reading_layers: int = 0
    """Number of layers that read the keys and values of another layer, and keep none."""

    @property
    def kept(self) -> tuple[StateTensor, ...]:
        """The inputs of one token that a recurrent layer keeps while a draft is verified."""
        return () if self.recurrence is None else self.recurrence.kept(self.dtype)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept inputs of one token in all recurrent layers."""
        return self.recurrent_layers * sum(tensor.nbytes for tensor in self.kept)

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.num_layers + self.reading_layers

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """The sizes that each layer keeps of a token."""
        if self.latent_rank:
            return (KVShape(1, self.head_dim, 0),) * self.num_layers
        return self.shapes or (KVShape(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all recurrent layers of one sequence; 0 for a model without such layers."""
        return self.recurrent_layers * sum(tensor.nbytes for tensor in self.state)


LayerCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, [num_blocks, block_size, Hkv, D] each."""


class LayerCaches(Protocol):
    """The caches of all layers. They are read one layer at a time, because a later layer may still be swapping in."""

    def __getitem__(self, layer: int, /) -> LayerCache: ...


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """The input of recurrent layers for one packed batch, besides the stream."""

    recurrence: Recurrence[Any]
    metadata: Any  # from `recurrence.make_metadata` for this batch
    states: Sequence[LayerState]
    """The states of each recurrent layer. The layer updates the slots of the batch's rows."""
    places: Sequence[LayerState] = ()
    """For each recurrent layer, the kept inputs of drafted tokens, as `ModelSpec.kept` lists them, with a place first.

    Empty if no drafts are verified.
    """

    def keep(self, layer: int, *inputs: torch.Tensor) -> None:
        """Keep the inputs of drafted tokens of a layer: tensors [T, ...] as `ModelSpec.kept` lists them."""
        if self.places:
            self.recurrence.keep(inputs, self.places[layer], self.metadata)


ZEROS = -1
"""Stands for the state before the first token in place of a slot, which is all zeros."""


class StateMemory:
    """The states of a model's recurrent layers. This base class is for models without any: it keeps none."""

    def step(self, segments: Segments) -> RecurrentStep | None:
        """The input of the recurrent layers for a batch."""
        return None

    def reserve(self, segments: int, tokens: int | None) -> RecurrentStep | None:
        """The input that a CUDA graph reads, as `CapturableRecurrence.reserve` has room for it."""
        return None

    def refill(self, step: RecurrentStep | None, segments: Segments) -> bool:
        """Write a batch into an input from `reserve`. If there is no room, return False and write nothing."""
        return True

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy states from slot to slot on the device. The source ZEROS stands for a state of zeros.

        All slots are read before any is written. The copies run on the current stream.
        """

    def replay(self, replays: Sequence[KeptInputs]) -> None:
        """Move the states of rows on by the kept inputs of accepted tokens, on the current stream."""

    def rehearsals(self) -> Sequence[Callable[[], None]]:
        """Calls that launch the kernels of `replay` once, to compile them. They change the state of row 0."""
        return ()

    def swap_out(self, copies: Sequence[StateCopy]) -> None:
        """Copy states from slots on the device to slots on the host, on the current stream."""

    def swap_in(self, copies: Sequence[StateCopy]) -> None:
        """Copy states from slots on the host to slots on the device, on the current stream."""

    def rehearse_copies(self) -> None:
        """Copy a state to the host and back, so that no step waits for the first such copies.

        Their kernels are compiled by that. Does nothing without slots on the host.
        """

    @property
    def host(self) -> memoryview:
        """The bytes of all slots on the host, in place, slot after slot (`host_memory.StatesPart`)."""
        return memoryview(b"")


NO_STATES = StateMemory()


class StreamTaps(NamedTuple):
    """Layers of which a step keeps the inputs, and the memory for them."""

    layers: tuple[int, ...]
    """Indices of the layers, ascending."""
    into: torch.Tensor  # [max tokens, len(layers), hidden]
    """Gets the residual stream of each token of a step, as it enters these layers."""

    def keep(self, layer: int, stream: torch.Tensor) -> None:
        """Keep the stream [T, hidden] as it enters a layer, if this layer is one of `layers`."""
        if layer in self.layers:
            self.into[: len(stream), self.layers.index(layer)].copy_(stream)


@dataclass(frozen=True, slots=True)
class StepInput:
    """One packed batch of T tokens on the device, with the cache it reads and writes."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    sample_at: torch.Tensor | None  # [R] int64: tokens of the batch whose logits are needed; None: all, in order
    slot_mapping: torch.Tensor  # [T] int64
    block_tables: torch.Tensor  # [rows, max_blocks] int32
    caches: LayerCaches
    attention: Attention[Any]
    metadata: Any  # from `attention.make_metadata` for this batch
    adapters: StepAdapters | None = None  # None: no token has an adapter
    stream: torch.Tensor | None = None  # [T, hidden] from the previous stage; may be overwritten; None: first stage
    recurrent: RecurrentStep | None = None  # None: the model has no recurrent layers
    taps: StreamTaps | None = None  # None: no layer's input is kept

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        chunked: bool = False,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [T, H, D] over the layer's cache, once the step's keys are in it: [T, H, D]."""
        keys, values = self.caches[layer]
        return self.attention.attend(
            query,
            keys,
            values,
            self.block_tables,
            self.metadata,
            scale=scale,
            window=window,
            chunked=chunked,
            softcap=softcap,
            sinks=sinks,
        )


class Model(Protocol):
    """Weights on a device that turn a packed batch into logits."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits [R, own_vocab_size] of the tokens at `sample_at`; in a stage before the last, the stream [T, hidden].

        Writes the cache, and never waits for the device.
        """


@runtime_checkable
class HiddenModel(Model, Protocol):
    """A model that can return its last hidden states: `forward` is `logits` of `hidden`."""

    def hidden(self, step: StepInput) -> torch.Tensor:
        """The final norm's output [R, hidden] of the tokens at `sample_at`. Writes the cache.

        In a stage before the last, the result is the stream [T, hidden].
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, own_vocab_size] of rows of `hidden`."""


@runtime_checkable
class CapturableModel(Model, Protocol):
    """A model that launches the same work for any batch of one size, so that CUDA graphs may capture it.

    `forward` is `head` of `body`. `body` computes every token; `head` computes only the tokens whose logits are needed.
    A stage before the last has no head: its `forward` returns the result of `body`, the stream.
    """

    def body(self, step: StepInput) -> tuple[torch.Tensor, ...]:
        """The input of `head`: tensors of R rows, for the tokens at `sample_at`. Writes the cache."""

    def head(self, rows: tuple[torch.Tensor, ...], adapters: StepAdapters | None = None) -> torch.Tensor:
        """Logits [R, own_vocab_size] from the result of `body`, which may be overwritten. `adapters` are the step's."""
