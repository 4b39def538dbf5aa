"""A model whose keys are the ids that it was given, so that a state can be read: for tests of exact tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from holdfast.lm.padded.driver import Driver, Inputs
from holdfast.lm.padded.running_rows import RunningRows
from holdfast.lm.padded.state_layout import StateLayout

CPU = torch.device("cpu")


class Echo:
    """A driver over no model. Its state has one leaf, `keys` [B, L, 1]. Its logits [B, V] name the token asked for."""

    inputs = staticmethod(Driver.inputs)

    def __init__(self, vocab_size: int = 100) -> None:
        self.vocab_size = vocab_size
        self.model = SimpleNamespace(is_encoder_decoder=False)
        self.seen: list[Inputs] = []

    def forward(self, inputs: Inputs, state: Any) -> tuple[torch.Tensor, Any]:
        self.seen.append(inputs)
        new = inputs.ids[:, :, None].float()
        keys = new if state is None else torch.cat((state["keys"], new), 1)
        columns = inputs.columns
        at = inputs.ids[:, -1] if columns is None else inputs.ids.gather(1, columns[:, None])[:, 0]
        return torch.nn.functional.one_hot((at + 1) % self.vocab_size, self.vocab_size).float(), {"keys": keys}

    def run(self, rows: int, tokens: int) -> Any:
        return {"keys": torch.ones(rows, tokens, 1)}


def echo_rows(rows: int = 8, *, compact: bool = True) -> tuple[Echo, RunningRows]:
    """The model and an empty batch of it."""
    echo = Echo()
    return echo, RunningRows(StateLayout.discover(echo.run), rows, CPU, compact=compact)


def keys_of(state: Any) -> list[list[int]]:
    """The keys of a state, by row and column."""
    return state["keys"][:, :, 0].int().tolist()


def shape(echo: Echo, batch: RunningRows, *newcomers: tuple[int, Sequence[int]]) -> Inputs:
    """Compute whole prompts together with the rows of the batch. Returns the inputs of the forward."""
    inputs = batch.shaped_inputs(newcomers)
    _, state = echo.forward(inputs, batch.state)
    batch.advance(state, newcomers)
    return inputs


def decode(echo: Echo, batch: RunningRows) -> Inputs:
    """Decode every row once. Returns the inputs of the forward."""
    inputs = batch.decode_inputs()
    _, state = echo.forward(inputs, batch.state)
    batch.advance(state)
    return inputs
