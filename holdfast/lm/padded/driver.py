"""Driver: calls an unmodified model with input ids, attention mask, positions and its own cache object."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from holdfast.lm.padded.loading import UnmodifiedModel
from holdfast.lm.padded.state_layout import State

MaskStyle = Literal["all columns", "this forward's", "none"]
"""What a model takes for its mask: all columns, those of the forward's own tokens, or no mask."""


class Inputs(NamedTuple):
    """The tensors of one forward of B rows, q tokens each, over a state of width L. On the device."""

    ids: torch.Tensor  # [B, q] int64
    mask: torch.Tensor  # [B, L + q] int64: 1 for tokens, 0 for placeholders
    positions: torch.Tensor  # [B, q] int64: number of unmasked tokens before each; any number where masked
    columns: torch.Tensor | None = None  # [B] int64: the column of `ids` whose logits are needed; None: the last


class Driver:
    """One way to call any causal model, found from the signature of its `forward` and by trial.

    The model makes its own state. Only layers of exactly Transformers' dynamic classes are replaced, by ones that grow
    in place (`growing_layer`); a `StaticCache` is given only to a module that refuses all others.
    """

    def __init__(self, model: UnmodifiedModel, *, growing: bool = True) -> None:
        """`growing` False leaves every layer of the state as the model makes it.

        Raises UnsupportedCheckpoint if the model's logits for a short prompt cannot be had.
        """
        self.model = model
        self.growing = growing
        self.keyword: str | None = None
        """The argument of `forward` that takes the state; None where the model gives none out."""
        self.mask_style: MaskStyle = "all columns"
        raise NotImplementedError

    def forward(self, inputs: Inputs, state: State | None) -> tuple[torch.Tensor, State | None]:
        """Logits [B, vocab_size] at the columns asked for, and the state afterwards, of width L + q.

        `state` None starts rows at position 0. The state given is consumed. Where `keyword` is None the state stays
        None, and the rows must be whole each time. Never waits for the device.
        """
        raise NotImplementedError

    def run(self, rows: int, tokens: int) -> State:
        """The state after one forward of arbitrary tokens: what `StateLayout.discover` takes."""
        raise NotImplementedError
