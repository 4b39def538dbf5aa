"""Mamba-2: the recurrent layers of Bamba, Granite 4, Nemotron-H and Falcon-H1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch.nn import functional

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.recurrent.protocol import Recurrence
from holdfast.lm.models.base import LayerState, Shape, StateTensor
from holdfast.lm.models.mixer import RecurrentInput, RecurrentMixer, RecurrentSpec, RecurrentWeights, Units


@dataclass(frozen=True, kw_only=True)
class MambaSpec(RecurrentSpec):
    """Recurrent layers that are state space models (Dao and Gu, 2024, Transformers are SSMs, §7)."""

    heads: int
    head_dim: int
    groups: int
    """Number of groups of heads that share their B and C, the paper's input and output projections of the state."""
    state_size: int
    """Numbers of the state for each number of a head."""
    width: int
    """Number of tokens that the convolution reads, its own included."""
    eps: float
    """Number added under the root of the norm of each group's result."""
    bias: bool = False
    """Whether the projections have biases."""
    conv_bias: bool = True
    time_limits: tuple[float, float] = (0.0, float("inf"))
    """The least and the largest time step."""
    normed: bool = True
    """Whether the gated result is normed in each group."""
    multipliers: tuple[float, ...] = ()
    """The factors on output gates, heads, B, C and time steps, as the first projection gives them; empty: none."""
    copies: int = 1
    """Number of devices that hold each group. Each of them has its part of the group's heads, and all of B and C."""

    @property
    def inner(self) -> int:
        """Numbers of all heads together."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Numbers of B, or of C, of all groups together."""
        return self.groups * self.state_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of the heads, of B and of C."""
        return self.inner + 2 * self.shared

    def shapes(self, hidden: int) -> dict[str, tuple[Shape, ...]]:
        """`mixer_in` has output gates, the convolution's channels and time steps, in this order."""
        rows = self.inner + self.channels + self.heads
        shapes: dict[str, tuple[Shape, ...]] = {
            "mixer_in": ((rows, hidden),),
            "conv": ((self.channels, self.width),),
            "decay": ((self.heads,),),
            "time_bias": ((self.heads,),),
            "skip": ((self.heads,),),
            "mixer_out": ((hidden, self.inner),),
        }
        if self.normed:
            shapes["gain"] = ((self.inner,),)
        if self.bias:
            shapes |= {"mixer_in_bias": ((rows,),), "mixer_out_bias": ((hidden,),)}
        if self.conv_bias:
            shapes["conv_bias"] = ((self.channels,),)
        return shapes

    def factors(self, device: torch.device) -> torch.Tensor:
        """The multipliers by row of `mixer_in`, [rows] float32."""
        counts = torch.tensor([self.inner, self.inner, self.shared, self.shared, self.heads])
        return torch.tensor(self.multipliers).repeat_interleave(counts).to(device)

    def state(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the recurrent state, as `Recurrence.selective_scan` takes it."""
        inputs = StateTensor((self.channels, self.width - 1), dtype)
        return inputs, StateTensor((self.heads, self.head_dim, self.state_size), torch.float32)

    def kept(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The input of the convolution; heads after it; time steps; decays A, which differ by layer; and B."""
        return (
            StateTensor((self.channels,), dtype),
            StateTensor((self.heads, self.head_dim), dtype),
            StateTensor((self.heads,), torch.float32),
            StateTensor((self.heads,), torch.float32),
            StateTensor((self.groups, self.state_size), dtype),
        )

    def replay(
        self, recurrence: Recurrence[Any], states: LayerState, inputs: Sequence[torch.Tensor], metadata: Any
    ) -> None:
        conv_state, state = states
        mixed, x, dt, decay, b = inputs
        recurrence.shift(mixed, conv_state, metadata)
        # The state does not depend on C, so any will do.
        recurrence.selective_scan(x, dt, decay, b, b, None, state, metadata)

    def split(self) -> dict[str, tuple[tuple[Units, ...], ...]]:
        inner = Units("heads of Mamba-2", self.heads, self.head_dim)
        heads = inner._replace(width=1)
        shared = Units("groups of Mamba-2", self.groups, self.state_size, copied=True)
        inputs, channels = ((inner, inner, shared, shared, heads),), ((inner, shared, shared),)
        return {
            "mixer_in": inputs,
            "mixer_in_bias": inputs,
            "conv": channels,
            "conv_bias": channels,
            **dict.fromkeys(("decay", "time_bias", "skip"), ((heads,),)),
            "gain": ((inner,),),
            "mixer_out": ((inner,),),
        }

    def own(self, tp: int) -> Self:
        copies = max(1, tp // self.groups)
        return replace(self, heads=self.heads // tp, groups=max(1, self.groups // tp), copies=copies)

    def mixer(self, weights: RecurrentWeights, state: int, group: Group | None = None) -> RecurrentMixer:
        norm = partial(norm_of_groups, self)
        if group is not None and self.copies > 1:
            norm = partial(norm_of_shared_group, self, group)
        return MambaMixer(weights, self, state, norm)


Norm = Callable[[torch.Tensor], torch.Tensor]
"""An RMS norm without weights over each group of numbers [T, inner], all float32."""


def norm_of_groups(mamba: MambaSpec, numbers: torch.Tensor) -> torch.Tensor:
    """`Norm` of groups that this device has whole."""
    of_group = numbers.view(len(numbers), mamba.groups, -1)
    return functional.rms_norm(of_group, of_group.shape[-1:], None, mamba.eps).flatten(1)


def norm_of_shared_group(mamba: MambaSpec, group: Group, numbers: torch.Tensor) -> torch.Tensor:
    """`Norm` of a group whose numbers are on `MambaSpec.copies` devices. `group` adds up all devices' squares."""
    squares = numbers.new_zeros(len(numbers), group.size // mamba.copies)
    own = group.rank // mamba.copies
    squares[:, own] = numbers.square().sum(1)
    mean = group.all_reduce(squares)[:, own] / (mamba.copies * mamba.inner)
    return numbers * torch.rsqrt(mean + mamba.eps)[:, None]


class MambaMixer(RecurrentMixer):
    """Mamba-2 (Dao and Gu, 2024, Transformers are SSMs, §7.1), with a gated norm over each group of heads."""

    def __init__(self, weights: RecurrentWeights, mamba: MambaSpec, state: int, norm: Norm) -> None:
        super().__init__(weights, state)
        self._mamba, self._norm, tensors = mamba, norm, weights.tensors
        self._conv, self._conv_bias = tensors["conv"].contiguous(), tensors.get("conv_bias")
        self._decay, self._time_bias = tensors["decay"].exp().neg_(), tensors["time_bias"]
        self._skip, self._gain = tensors["skip"], tensors.get("gain")
        self._factors = mamba.factors(self._skip.device) if mamba.multipliers else None

    def recur(self, projected: torch.Tensor, step: RecurrentInput) -> torch.Tensor:
        mamba, recurrent = self._mamba, step.recurrent
        assert recurrent is not None
        conv_state, state = recurrent.states[self._state]
        recurrence, metadata = recurrent.recurrence, recurrent.metadata
        if self._factors is not None:
            projected = (projected * self._factors).to(projected.dtype)
        gate, mixed, time = torch.split(projected, [mamba.inner, mamba.channels, mamba.heads], dim=-1)
        convolved = recurrence.convolve(mixed, self._conv, self._conv_bias, conv_state, metadata, activation="silu")
        x, b, c = torch.split(convolved, [mamba.inner, mamba.shared, mamba.shared], dim=-1)
        x, b = x.view(len(x), mamba.heads, mamba.head_dim), b.view(len(b), mamba.groups, mamba.state_size)
        dt = functional.softplus(time.float() + self._time_bias).clamp(*mamba.time_limits)
        recurrent.keep(self._state, mixed, x, dt, self._decay.expand_as(dt), b)
        found = recurrence.selective_scan(
            x,
            dt,
            self._decay,
            b,
            c.view(len(c), mamba.groups, mamba.state_size),
            self._skip,
            state,
            metadata,
        )
        gated = found.flatten(1).float() * functional.silu(gate.float())
        if self._gain is None:
            return gated.to(projected.dtype)
        return self._norm(gated).to(projected.dtype) * self._gain
