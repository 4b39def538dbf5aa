"""The interface through which a model applies LoRA adapters.

`LoraStack` holds the weights of all adapters for one linear layer. `Lora` adds their products to the layer's output.
`StepAdapters` are the adapters of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class LoraStack:
    """The adapters of one linear layer by slot. The layer may fuse several parts along its outputs, such as q, k and v.

    Slot s adds scale[s, p] · B A x to the outputs of part p. Only the first rank[s, p] rows of A and B are read. If an
    adapter leaves a part unchanged, the rank is 0. B is stored by ranks, so that the rows of a smaller rank are
    contiguous, as they are in A.
    """

    a: torch.Tensor  # [S, P, R, K]
    b: torch.Tensor  # [S, R, N]
    rank: torch.Tensor  # [S, P] int32
    scale: torch.Tensor  # [S, P] float32
    ends: tuple[int, ...]
    """The end of each part among the N outputs."""
    gain: torch.Tensor | None = None  # [S + 1, N]
    """The factors of DoRA on the sum of the layer's product and the adapter's, by slot; 1 in the last row."""

    @property
    def inputs(self) -> int:
        return self.a.shape[3]

    @property
    def outputs(self) -> int:
        return self.b.shape[2]

    @property
    def parts(self) -> list[slice]:
        """The output columns of each part."""
        return [slice(start, end) for start, end in zip((0, *self.ends), self.ends, strict=False)]


@dataclass(frozen=True, slots=True)
class Finish:
    """The second half of `Lora.begin`. The caller calls exactly one of the two functions, once."""

    add: Callable[[torch.Tensor], None]
    """Adds to out [T, N] in place."""
    gated: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Takes gate_up [T, 2 N], and returns silu(gate) * up, [T, N], of gate_up plus what the adapters add.

    gate_up itself stays unchanged. None if this is not faster than `add` followed by a gate.
    """


class Lora(Protocol):
    """The adapters of the tokens of one step, or of some of them."""

    def add(self, out: torch.Tensor, x: torch.Tensor, stack: LoraStack) -> None:
        """Add the scaled B A x of each token's adapter to out [T, N] in place, from x [T, K].

        Other tokens stay the same.
        """
        ...

    def begin(self, x: torch.Tensor, stack: LoraStack, out: torch.Tensor | None = None) -> Finish:
        """Begin `add` in parallel with later launches, and return the functions that end it with `out`.

        If `out` is given here, it may be neither read nor written until then; otherwise `out` may still be computed.
        """
        ...

    def scale(self, out: torch.Tensor, stack: LoraStack) -> None:
        """Multiply out [T, N] in place by the gains of each token's adapter. Other tokens stay the same."""
        ...


@dataclass(frozen=True, slots=True)
class LayerStacks:
    """The adapters of one layer's linear fields."""

    qkv: LoraStack | None = None
    o: LoraStack | None = None
    """None, like qkv, in a layer that is experts alone."""
    gate_up: LoraStack | None = None
    down: LoraStack | None = None
    """None, like gate_up, if experts replace the layer's MLP."""


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The LoRA adapters of one step: their weights, and the adapter of each token."""

    layers: tuple[LayerStacks, ...]
    tokens: Lora
    """The adapters of all tokens of the step."""
    rows: Lora
    """The adapters of the tokens whose logits are needed, in the order of the logits."""
    scaled: bool = False
    """Whether an adapter of the step may have gains (DoRA). If so, each product is computed before it is added."""
