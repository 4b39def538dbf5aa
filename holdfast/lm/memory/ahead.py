"""Ahead: the device blocks copied from the host before any sequence asked for them. FromBelow: who fills the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol


class Ahead:
    """Keeps account of blocks that a plan copied in ahead of need, until each is used or given up.

    swapped in = used + wasted + those still waiting to be used.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self.swapped_in = 0
        """Number of blocks copied in ahead of need so far."""
        self.used = 0
        """Number of these that a sequence shared."""
        self.wasted = 0
        """Number of these that were allocated for other state before any sequence shared them."""

    def __len__(self) -> int:
        """Number of blocks that wait to be used."""
        return len(self._blocks)

    def add(self, blocks: Iterable[int]) -> None:
        """Count blocks that the current plan copies in."""
        before = len(self._blocks)
        self._blocks.update(blocks)
        self.swapped_in += len(self._blocks) - before

    def use(self, blocks: Iterable[int]) -> None:
        """Note that a sequence shares these blocks."""
        self.used += self._leave(blocks)

    def give_up(self, blocks: Iterable[int]) -> None:
        """Note that the state of these blocks is lost on the device."""
        self.wasted += self._leave(blocks)

    def move(self, places: Mapping[int, int]) -> None:
        """Follow blocks whose contents moved: `places` maps old to new."""
        moved = {places[block] for block in self._blocks & places.keys()}
        self._blocks = (self._blocks - places.keys()) | moved

    def stats(self) -> Mapping[str, int]:
        """The fields of SchedulerStats about blocks copied in ahead."""
        return {
            "blocks_swapped_in_ahead": self.swapped_in,
            "blocks_ahead_used": self.used,
            "blocks_ahead_wasted": self.wasted,
        }

    def _leave(self, blocks: Iterable[int]) -> int:
        left = self._blocks.intersection(blocks)
        self._blocks -= left
        return len(left)


class FromBelow(Protocol):
    """Brings blocks from the tiers below the host before any request asks for them."""

    num_blocks: int
    """Number of blocks that the tiers below have room for, as far as this engine bounds it."""

    @property
    def backlog(self) -> bool:
        """Whether too much of the host is still to be written to these tiers for the host to get more."""
        ...

    @property
    def is_reading(self) -> bool:
        """Whether any block is on its way to the host, or waits for room there."""
        ...

    def lead(self, blocks: int) -> float:
        """Seconds that it takes to have this many blocks on the host."""
        ...

    def read_ahead(
        self, digests: Sequence[bytes], start: int, others: Iterator[bytes], gives_way: Callable[[bytes], bool]
    ) -> int:
        """Begin to read some blocks of a sequence that the device and the host lack. `start` is the first place.

        They go to free room of the host. If too little is free, blocks in `others` that give way and that the disk has,
        too, leave the host first. Blocks that were read are the first to leave the host.

        Returns the place at which the next call goes on.
        """
        ...


class NothingBelow:
    """There is no tier below the host (`FromBelow`)."""

    num_blocks = 0
    backlog = False
    is_reading = False

    def lead(self, blocks: int) -> float:
        """0: nothing is brought."""
        return 0.0

    def read_ahead(
        self, digests: Sequence[bytes], start: int, others: Iterator[bytes], gives_way: Callable[[bytes], bool]
    ) -> int:
        """The end of the sequence: nothing can be brought."""
        return len(digests)


NOTHING_BELOW: FromBelow = NothingBelow()


class StatesAhead(Protocol):
    """Brings recurrent states to the host, and from there to the device, before any request asks for them."""

    def read_ahead(self, digests: Sequence[bytes], gives_way: Callable[[bytes], bool], now: float) -> bool:
        """Begin to read the state right after these full blocks to the host, if only a tier below has it.

        It goes to a free slot, and leaves another one free. For that, states that a tier below has, too, leave the host
        if their last full blocks `gives_way`. A state that was read is the first to leave the host until it is used.
        Returns whether it is being read.
        """
        ...

    def can_swap_in_ahead(self, digests: Sequence[bytes], gives_way: Callable[[bytes], bool]) -> bool:
        """Whether `swap_in_ahead` with these arguments would find a state to copy, and room for it."""
        ...

    def swap_in_ahead(self, digests: Sequence[bytes], gives_way: Callable[[bytes], bool]) -> None:
        """Have the next plan copy the state that comes right after these full blocks of a sequence from the host.

        It goes to a free slot, or to that of a state that the host has, too, and whose last full block `gives_way`. A
        slot with a state that the host has is the first to be given up.
        """
        ...


class NoStatesAhead:
    """The memory has no states that are not in blocks (`StatesAhead`)."""

    def read_ahead(self, digests: Sequence[bytes], gives_way: Callable[[bytes], bool], now: float) -> bool:
        """False: there is no state."""
        return False

    def can_swap_in_ahead(self, digests: Sequence[bytes], gives_way: Callable[[bytes], bool]) -> bool:
        """False: there is no state."""
        return False

    def swap_in_ahead(self, digests: Sequence[bytes], gives_way: Callable[[bytes], bool]) -> None:
        """Do nothing: there is no state."""


NO_STATES_AHEAD: StatesAhead = NoStatesAhead()
