"""RowLora: LoRA on the linear layers of an unmodified model, with an adapter of its own for each row of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.lm.padded.driver import Driver


class LinearShape(NamedTuple):
    """The sizes of a linear layer."""

    outputs: int
    inputs: int


class RowLora:
    """Device memory for `slots` adapters of any linear layers of a model, and the sums that they add to its forwards.

    A linear layer y = W x gives y + scale · B A x, where each row of the batch has the A and B of its own slot (LoRA,
    Hu et al., 2021, §4.1). The module keeps its weights and its code: a hook after each linear layer adds the sum. The
    hooks do nothing outside of `applied`. Every slot has room for the full rank; the ranks of smaller adapters are
    padded with zeros. One more slot is always zero, for rows without an adapter.
    """

    def __init__(self, driver: Driver, *, slots: int, max_rank: int) -> None:
        """Find the layers that adapters may change, allocate the slots, all empty, and hook the layers."""
        model = driver.model
        self.max_rank, self.dtype, self.device = max_rank, model.dtype, model.device
        self.shapes = linear_layers(driver)
        """The layers that adapters may change: those which compute the tokens of all rows, by name in the module."""
        self._slots: torch.Tensor | None = None
        """The slot of each row [B] of the forward that runs; None outside of `applied`."""
        at, places = 0, dict[str, tuple[int, int]]()
        for name, (outputs, inputs) in self.shapes.items():
            places[name] = at, at + max_rank * inputs
            at += max_rank * (inputs + outputs)
        self._numbers = torch.zeros(slots + 1, at, dtype=self.dtype, device=self.device)
        for name, (outputs, inputs) in self.shapes.items():
            a, b = (
                self._cut(start, (max_rank, size)) for start, size in zip(places[name], (inputs, outputs), strict=True)
            )
            model.module.get_submodule(name).register_forward_hook(_Adding(self, a, b))

    def __len__(self) -> int:
        return len(self._numbers) - 1

    @property
    def nbytes(self) -> int:
        """Size of all slots in bytes."""
        return self._numbers.nbytes

    def pack(self, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]) -> torch.Tensor:
        """The numbers of a slot [n] for these A [rank, inputs], B [outputs, rank] and scales, by layer, on the host."""
        parts = []
        for name, (outputs, inputs) in self.shapes.items():
            a, b = torch.zeros(self.max_rank, inputs), torch.zeros(self.max_rank, outputs)
            if name in pairs:
                given_a, given_b, scale = pairs[name]
                a[: len(given_a)] = given_a
                b[: len(given_a)] = given_b.t().float() * scale
            parts += [a.reshape(-1), b.reshape(-1)]
        return torch.cat(parts).to(self.dtype)

    def write(self, slot: int, numbers: torch.Tensor) -> None:
        """Copy a packed adapter into a slot, on the current stream."""
        self._numbers[slot].copy_(numbers, non_blocking=True)

    def complete(self, slot: int) -> None:
        """Do nothing: one device has the whole model, so a slot is complete once it is written."""

    @property
    def active(self) -> torch.Tensor | None:
        """The slot of each row of the forward that runs; None if no adapter is applied."""
        return self._slots

    @contextmanager
    def applied(self, slots: Sequence[int]) -> Iterator[None]:
        """Forwards within the block have one row for each of these slots. -1: the row has no adapter."""
        if any(slot >= 0 for slot in slots):
            self._slots = torch.tensor([slot if slot >= 0 else len(self) for slot in slots], device=self.device)
        try:
            yield
        finally:
            self._slots = None

    def _cut(self, at: int, shape: tuple[int, ...]) -> torch.Tensor:
        return self._numbers[:, at : at + prod(shape)].view(len(self._numbers), *shape)


class _Adding:
    """The hook after one linear layer: adds the sum of each row's adapter."""

    def __init__(self, lora: RowLora, a: torch.Tensor, b: torch.Tensor) -> None:
        """`a` [slots, rank, inputs] and `b` [slots, rank, outputs] are the layer's part of the slots."""
        self._lora, self._a, self._b = lora, a, b

    def __call__(self, module: Any, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        slots = self._lora.active
        if slots is None:
            return None
        rows = given[0].reshape(len(slots), -1, given[0].shape[-1])  # [B, q, inputs]
        narrow = torch.bmm(rows, self._a.index_select(0, slots).transpose(1, 2))
        added = torch.bmm(narrow, self._b.index_select(0, slots))
        return output + added.view(output.shape)


def linear_layers(driver: Driver) -> dict[str, LinearShape]:
    """The sizes of the linear layers that compute every token of all rows, row by row, by name in the module.

    A forward of two rows shows which they are. Layers that see some of the tokens (experts) or none of them are left
    out, and so is one that two names share.
    """
    rows, tokens = 2, 3
    modules = {name: module for name, module in driver.model.module.named_modules() if type(module) is torch.nn.Linear}
    seen: dict[str, set[tuple[int, ...]]] = {}

    def noting(name: str) -> Any:
        return lambda module, given, output: seen.setdefault(name, set()).add(tuple(given[0].shape[:-1]))

    handles = [module.register_forward_hook(noting(name)) for name, module in modules.items()]
    try:
        driver.run(rows, tokens)
    finally:
        for handle in handles:
            handle.remove()
    whole = ({(rows, tokens)}, {(rows * tokens,)}, {(rows, 1)})
    return {
        name: LinearShape(modules[name].out_features, modules[name].in_features)
        for name, shapes in seen.items()
        if shapes in whole
    }
