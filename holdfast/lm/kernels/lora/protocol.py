"""The interface of adapters to a model: the stacked weights of one linear layer, and what adds them to its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class LoraStack:
    """The adapters of one linear layer by slot. The layer may fuse several parts along its outputs, as q, k and v.

    Slot s adds scale[s, p] · B A x to the outputs of part p. Of A and B only the first rank[s, p] rows are read; where
    an adapter leaves a part as it is, the rank is 0. B is stored by ranks, so that what a smaller rank uses lies in one
    piece, as it does in A.
    """

    a: torch.Tensor  # [S, P, R, K]
    b: torch.Tensor  # [S, R, N]
    rank: torch.Tensor  # [S, P] int32
    scale: torch.Tensor  # [S, P] float32
    ends: tuple[int, ...]
    """The end of each part among the N outputs."""

    @property
    def outputs(self) -> int:
        return self.b.shape[2]

    @property
    def parts(self) -> list[slice]:
        """The outputs of each part."""
        return [slice(start, end) for start, end in zip((0, *self.ends), self.ends, strict=False)]


@dataclass(frozen=True, slots=True)
class Finish:
    """Ends what `Lora.begin` has begun: one of these is called, once."""

    add: Callable[[torch.Tensor], None]
    """Add to out [T, N] in place."""
    gated: Callable[[torch.Tensor], torch.Tensor] | None = None
    """silu(gate) * up, [T, N], of gate_up [T, 2 N] with what the adapters add. gate_up itself stays as it is.

    None where that is not faster than `add` and then a gate.
    """


class Lora(Protocol):
    """The adapters of a number of tokens."""

    def add(self, out: torch.Tensor, x: torch.Tensor, stack: LoraStack) -> None:
        """Add to out [T, N] in place what each token's adapter makes of its x [T, K]. Tokens without one stay."""
        ...

    def begin(self, x: torch.Tensor, stack: LoraStack, out: torch.Tensor | None = None) -> Finish:
        """Begin `add` beside what is launched next, and return what ends it with `out`.

        What is given here as `out` may be neither read nor written until then; otherwise `out` may still be computed.
        """
        ...
