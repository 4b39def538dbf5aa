"""Shared by tests of driven jobs: drawn data, calls in their files, and the steps of a loop of training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.training.calls import Call, Datum, write_call
from holdfast.training.losses import Adam, Loss

VOCABULARY = 60
"""Tokens of drawn data are below this."""


def drawn_data(count: int = 3, seed: int = 1, longest: int = 40, **arrays: float) -> list[Datum]:
    """Random sequences, whose targets are the next tokens. `arrays` have one value at all positions."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        ids = [chance.randrange(3, VOCABULARY) for _ in range(chance.randint(10, longest))]
        given = {name: [value] * (len(ids) - 1) for name, value in arrays.items()}
        found.append(Datum(ids[:-1], ids[1:], given))
    return found


class Writer:
    """Writes the calls of one job to their files, in order."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.next = directory, 0

    def write(self, kind: Any, data: Sequence[Datum] = (), **values: Any) -> int:
        """Write the next call. Returns its number."""
        number, self.next = self.next, self.next + 1
        write_call(self.directory, Call(number=number, kind=kind, **values), data)
        return number

    def step(self, seed: int = 1, *, rate: float = 0.01, loss: str = "cross_entropy", **values: Any) -> list[int]:
        """Write the calls of one step of a loop: gradients and an update. Returns their numbers."""
        data = drawn_data(seed=seed, **values)
        return [
            self.write("forward_backward", data, loss=Loss(name=loss)),
            self.write("optimize", adam=Adam(learning_rate=rate)),
        ]


def bits(parts: Sequence[np.ndarray[Any, Any]]) -> list[bytes]:
    """Arrays as their bytes, to be compared bit by bit."""
    return [np.asarray(part).tobytes() for part in parts]
