"""The examples of each optimizer step: a pure function of the job's seed, so a resumed job skips and repeats none.

Within an epoch, examples come in the order of a permutation of their numbers: a Feistel network over the smallest
square of a power of two that holds them, walked until it reaches a number that exists (Black and Rogaway, 2002, §5).
Any position is found without computing the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

ROUNDS = 4
"""Number of rounds of the Feistel network."""


def example_at(position: int, *, count: int, seed: int, epoch: int) -> int:
    """The example at a position of an epoch's order; both from 0 to count - 1."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    number = position
    while True:
        left, right = number >> half_bits, number & mask
        for turn in range(ROUNDS):
            text = f"{seed}/{epoch}/{turn}/{right}".encode()
            left, right = right, left ^ (int.from_bytes(blake2b(text, digest_size=8).digest()) & mask)
        number = left << half_bits | right
        if number < count:
            return number


@dataclass(frozen=True)
class Order:
    """The examples of all steps of a job. No batch spans two epochs, so the last batch of an epoch may be smaller."""

    count: int
    """Number of examples."""
    batch_size: int
    epochs: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.count // self.batch_size)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        """Whether this is the last step of its epoch."""
        return (step + 1) % self.steps_per_epoch == 0

    def examples(self, step: int) -> tuple[int, ...]:
        """The examples of a step, from 0 to steps - 1."""
        epoch, index = divmod(step, self.steps_per_epoch)
        positions = range(index * self.batch_size, min((index + 1) * self.batch_size, self.count))
        return tuple(example_at(at, count=self.count, seed=self.seed, epoch=epoch) for at in positions)


def pack(examples: Sequence[int], lengths: Sequence[int], limit: int, *, alone: int = 0) -> tuple[tuple[int, ...], ...]:
    """Cut a list of examples, in order, into micro-batches of at most `limit` tokens. `lengths` are of all examples.

    No example is cut. One above the limit, of up to `alone` tokens, is a micro-batch by itself. Raises ValueError for
    one above both.
    """
    most = max(limit, alone)
    packed: list[list[int]] = []
    room = 0
    for example in examples:
        length = int(lengths[example])
        if length > most:
            raise ValueError(f"example {example} has {length} tokens; a micro-batch holds {most}")
        if length > room:
            packed.append([])
            room = limit
        packed[-1].append(example)
        room -= length
    return tuple(tuple(part) for part in packed)
