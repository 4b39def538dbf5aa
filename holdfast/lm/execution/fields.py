"""Fields: the buffers that a step's inputs are packed into, and PackedStep: the inputs on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.types import SAMPLING_COLUMNS

Arrays = dict[str, npt.NDArray[np.generic]]


SAMPLING = {name: np.float32 if kind is float else np.int64 for name, kind in SAMPLING_COLUMNS.items()}
"""The columns of a row's sampling record."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The inputs of a step on the device; views of one persistent buffer."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64
    sample_at: torch.Tensor  # [R] int64
    sample_rows: torch.Tensor  # [R] int64
    sampling: Mapping[str, torch.Tensor]  # [R] each: SAMPLING_COLUMNS
    sample_position: torch.Tensor  # [R] int64

    @property
    def columns(self) -> dict[str, torch.Tensor]:
        """How the sampled rows are drawn, as `Sampler.draw` takes it."""
        return {**self.sampling, "position": self.sample_position}


class Fields:
    """One int64 buffer, and a tensor for each of its fields. Float32 fields use the first half of their place."""

    def __init__(self, sizes: dict[str, int], device: torch.device | str, *, pinned: bool = False) -> None:
        """`sizes` are the capacities of the fields by name, in the order of the buffer."""
        self.buffer = torch.zeros(sum(sizes.values()), dtype=torch.int64, device=device, pin_memory=pinned)
        self.tensors = {
            name: part.view(torch.float32) if SAMPLING.get(name) is np.float32 else part
            for name, part in zip(sizes, torch.split(self.buffer, [*sizes.values()]), strict=True)
        }

    @cached_property
    def arrays(self) -> Arrays:
        """The fields of a host buffer as numpy arrays that share its memory."""
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}

    def take(self, name: str, count: int) -> torch.Tensor:
        """The first `count` entries of a field."""
        return self.tensors[name][:count]

    def packed(self, num_tokens: int, num_sampled: int) -> PackedStep:
        """The inputs of a step with this many tokens and sampled rows."""
        return PackedStep(
            ids=self.take("ids", num_tokens),
            positions=self.take("positions", num_tokens),
            slot_mapping=self.take("slots", num_tokens),
            sample_at=self.take("sample_at", num_sampled),
            sample_rows=self.take("sample_rows", num_sampled),
            sampling={name: self.take(name, num_sampled) for name in SAMPLING},
            sample_position=self.take("sample_position", num_sampled),
        )
