"""The interface of recurrent layers: metadata once a step, then convolutions and recurrences in each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

import torch
from torch.nn import functional

from holdfast.lm.kernels.attention.protocol import Segments

Metadata = TypeVar("Metadata")

Activation = Literal["silu"]

MOST_KEPT = 5
"""Most tensors that one call of `Recurrence.keep` copies."""
NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key before it is normalized."""


class Recurrence(ABC, Generic[Metadata]):
    """Causal convolutions and recurrences over the packed tokens of a step, with each sequence's state in a slot.

    `backends.recurrence_for` makes one per model. A step calls `make_metadata` once; then each layer calls the other
    methods. Segment s of `Segments` reads the state in slot `row[s]`, and the state after its last token replaces it.
    So no two segments of a step may share a row. Other slots do not change. `context_stop` has no meaning here.

    A segment that verifies a draft (`Segments.verifies`) leaves the state in its slot as it is, because it is not known
    yet which of its tokens count. `keep` keeps its inputs, from which a later call computes the state.

    The tokens of a step are those of its segments, one segment after the other, as decodes and long segments in any
    order. Tokens after the last segment are padding: they change no state, and their results are undefined.

    Inputs are float32, bfloat16 or float16 and may be strided views whose last dimension is contiguous. Sums and states
    are in float32, and a result has the dtype of its input.
    """

    @abstractmethod
    def make_metadata(self, segments: Segments) -> Metadata:
        """Prepare a batch on the host, once per step. Every layer of the step uses the result."""

    @abstractmethod
    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: Metadata,
        *,
        activation: Activation | None,
    ) -> torch.Tensor:
        """Depthwise causal convolution of x [T, C], then the activation, as [T, C].

        weight is [C, W], the last column for the current token; W is at least 2. bias is [C]. state
        [slots, C, W - 1] has the last W - 1 inputs of each sequence, oldest first, in the dtype of x; it is updated.
        """

    @abstractmethod
    def keep(self, inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], metadata: Metadata) -> None:
        """Copy the inputs of all tokens with a place (`Segments.places`) to their places.

        `inputs` are up to MOST_KEPT tensors [T, ...], each with the numbers of a token in one piece. `kept` has for
        each of them a contiguous tensor [places, ...] of the same shape and dtype otherwise. Raises ValueError for more
        tensors.
        """

    def shift(self, x: torch.Tensor, state: torch.Tensor, metadata: Metadata) -> None:
        """Update the state of a convolution as `convolve` does with inputs x [T, C], without its results."""
        weight = x.new_zeros(state.shape[2] + 1).expand(x.shape[1], -1)
        self.convolve(x, weight, None, state, metadata, activation=None)

    def gates(
        self, time: torch.Tensor, rate: torch.Tensor, time_bias: torch.Tensor, decay: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`log_decay` and `beta` of `gated_delta`, of time steps and rates [T, Hv], as a layer projects them.

        time_bias is [Hv]. decay is [Hv] float32 and at most 0: a token multiplies it by its softplus(time + time_bias).
        """
        return functional.softplus(time.float() + time_bias) * decay, rate.sigmoid()

    def gated_norm(self, x: torch.Tensor, gate: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """The RMS norm of each head of x [T, Hv, Dv] times gain [Dv] and silu(gate), as [T, Hv * Dv].

        gate is [T, Hv * Dv].
        """
        normed = functional.rms_norm(x.float(), x.shape[-1:], None, eps) * gain.float()
        return (normed.flatten(1) * functional.silu(gate.float())).to(x.dtype)

    @abstractmethod
    def gated_delta(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        metadata: Metadata,
        *,
        scale: float,
        normalize: bool,
    ) -> torch.Tensor:
        """The gated delta rule (Yang et al., 2024, Gated Delta Networks, §3.1), as [T, Hv, Dv].

        query and key are [T, Hk, Dk], value is [T, Hv, Dv], log_decay is [T, Hv] float32 and at most 0, beta is
        [T, Hv]. Value head h uses query and key head h // (Hv // Hk). state is [slots, Hv, Dk, Dv] float32; it is
        updated. With `normalize`, each query and key is first divided by the root of its sum of squares plus NORM_EPS.
        For each token, in order:

            state = exp(log_decay) * state
            state = state + key (beta * (value - key^T state))^T
            out   = scale * query^T state
        """

    @abstractmethod
    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        decay: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        skip: torch.Tensor | None,
        state: torch.Tensor,
        metadata: Metadata,
    ) -> torch.Tensor:
        """The state space model of Mamba-2 (Dao and Gu, 2024, Transformers are SSMs, §6), as [T, H, P].

        x is [T, H, P]. dt is [T, H] float32: time steps after softplus and limits, at least 0. decay is [H] float32, A
        of the paper, at most 0; or [T, H], if tokens differ in it. b and c are [T, G, N]; head h uses group
        h // (H // G). skip is [H], D of the paper. state is [slots, H, P, N] float32; it is updated. For each token, in
        order:

            state = exp(dt * decay) * state + dt * x b^T
            out   = state c + skip * x
        """


class CapturableRecurrence(Recurrence[Metadata]):
    """Recurrent layers that CUDA graphs may capture: metadata stays in place while its contents change."""

    @abstractmethod
    def reserve(self, segments: int, tokens: int | None = None, places: int = 0) -> Metadata:
        """Empty metadata with room for any batch of at most `segments` tokens.

        With `tokens`, the room is for batches of up to `tokens` tokens in up to `segments` segments. At most `places`
        of the tokens may have a place.
        """

    @abstractmethod
    def refill(self, metadata: Metadata, segments: Segments) -> bool:
        """Write a batch into metadata from `reserve`, for later launches.

        If there is no room, return False and write nothing.
        """
