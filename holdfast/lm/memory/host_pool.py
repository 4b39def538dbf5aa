"""HostPool: copies of cached blocks in the second tier of the KV cache, host memory, or on a disk below it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from sys import float_info

from holdfast.lm.memory.prefix_index import PrefixIndex
from holdfast.lm.memory.retention import RetentionRule, Use, Victims

ANY_VALUE = float_info.min
"""State of a lower value is worth nothing: it was given up, or nobody has asked for it."""


class HostPool:
    """The blocks 0 to `num_blocks - 1` in host memory. Each operation is O(1) per block.

    Only the first `ready` of them can be used so far.

    A block is in exactly one of five states. A duplicate copies a device block that is in use, so evicting it loses
    nothing. A retained block may be the only copy; it is evicted by value, after all duplicates. A held block is being
    read by others than the device, and is not evicted before each of them has released it.

        free ──reserve──▶ reserved ──cache_block──▶ duplicate or retained ──hold──▶ held
         ▲ ▲                 │                     │ ▲            │ ▲ ▲               │
         │ └──────free───────┘                     │ └mark_in_use─┘ │ └────release────┘
         │                                         ├───mark_idle────┘
         └──────────────────────── evicted ────────┘

    A reserved block that is filled from elsewhere than the device must not be written to at once: a plan in flight may
    still read its old contents, and only copies to the host are ordered after that read. See `reserve`.
    """

    def __init__(self, num_blocks: int, rule: RetentionRule, *, ready: int | None = None) -> None:
        """The first `ready` blocks can be used from the start; None: all."""
        self.num_blocks = num_blocks
        self.ready = 0
        """Number of blocks that can be used."""
        self.dropped = 0
        """Number of retained blocks evicted so far."""
        self._free: list[int] = []
        self._index = PrefixIndex(num_blocks)
        self._retained = rule.order(num_blocks)
        self._duplicates: OrderedDict[int, None] = OrderedDict()
        self._held: dict[int, Hold] = {}
        self._uses: list[tuple[bytes, Use | None]] | None = None
        """State that was cached or used again since `take_uses`, with its last use; None: nobody reads it."""
        self.resize(num_blocks if ready is None else ready, num_blocks)

    def resize(self, ready: int, num_blocks: int) -> None:
        """Let the first `ready` blocks be used, at least as many as before. In the end there will be `num_blocks`."""
        if ready > self.ready:
            self._free[:0] = range(ready - 1, self.ready - 1, -1)
            self.ready = ready
        self.num_blocks = num_blocks

    def take_uses(self) -> list[tuple[bytes, Use | None]]:
        """The digests that were cached or used again since the last call, with their last use, in order.

        A tier below may have a digest that this pool has evicted while its device block was in use, so such digests are
        noted as well. Uses are noted from the first call on.
        """
        uses, self._uses = self._uses, []
        return uses or []

    @property
    def unread_uses(self) -> int:
        """Number of uses that `take_uses` would return."""
        return len(self._uses) if self._uses is not None else 0

    @property
    def cached(self) -> int:
        """Number of blocks that hold state."""
        return len(self._index.blocks)

    @property
    def held(self) -> int:
        """Number of blocks that are held."""
        return len(self._held)

    @property
    def by_digest(self) -> Mapping[bytes, int]:
        """The blocks that hold state, by digest. Read only."""
        return self._index.blocks

    def idle_blocks(self, start: int, stop: int) -> list[tuple[Use, int, bytes]]:
        """The last use, place in its sequence, and digest of each retained block among blocks [start, stop)."""
        return self._retained.among(start, stop, self._index)

    def find(self, digest: bytes) -> int | None:
        """The block with this digest; None if there is none."""
        return self._index.blocks.get(digest)

    def find_all(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks with these digests. Digests that are not here are left out."""
        blocks = self._index.blocks
        return [block for digest in digests if (block := blocks.get(digest)) is not None]

    def victims(self, now: float) -> Victims:
        """The retained blocks, the lowest value first."""
        return self._retained.victims(now)

    def reserve(self, value: float, victims: Victims) -> tuple[int | None, list[bytes]]:
        """Reserve a block for state of this value. Returns the block, and the digests evicted for it.

        Returns no block if everything here is worth at least as much. State that is worth nothing goes first, then
        duplicates. A
        block that the current plan copies to the device may be reserved at once: a step reads the host before it writes
        there. Any other writer must first see a result whose `swapped_in` is at least the number of the last plan that
        was made before the call.
        """
        evicted: list[int] = []
        if not self._free:
            if (chunk := victims.pop(below=ANY_VALUE)) is not None:
                evicted = chunk.blocks
                self.dropped += len(evicted)
            elif self._duplicates:
                evicted = [self._duplicates.popitem(last=False)[0]]
            elif (chunk := victims.pop(below=value)) is not None:
                evicted = chunk.blocks
                self.dropped += len(evicted)
            else:
                return None, []
            self._free += evicted
        return self._free.pop(), self._index.remove(evicted)

    def reserve_all(self, count: int, value: float, victims: Victims) -> tuple[list[int], list[bytes]]:
        """`reserve` for up to `count` blocks of this value.

        Returns the blocks that there was room for, and the digests evicted.
        """
        blocks, lost = list[int](), list[bytes]()
        while len(blocks) < count:
            if free := self._free[len(blocks) - count :]:
                del self._free[-len(free) :]
                blocks += reversed(free)
                continue
            block, evicted = self.reserve(value, victims)
            lost += evicted
            if block is None:
                break
            blocks.append(block)
        return blocks, lost

    def reserve_spare(self, count: int, kept_free: int) -> list[int]:
        """Reserve up to `count` free blocks, and leave `kept_free` of them. Nothing is evicted."""
        number = max(0, min(count, len(self._free) - kept_free))
        return [self._free.pop() for _ in range(number)]

    @property
    def num_free(self) -> int:
        """Number of blocks that hold no state and are not reserved."""
        return len(self._free)

    def give_up(self, digest: bytes) -> None:
        """Free the block with this digest if it is retained, as another tier has its state, too."""
        block = self.find(digest)
        if block is not None and block not in self._held and block not in self._duplicates:
            self.drop(digest)
            self.dropped += 1

    def cache_first(self, blocks: Collection[tuple[int, bytes, int]], number: int) -> None:
        """`cache_all` for state that nobody has asked for: it is worth nothing until somebody uses it.

        `number` is that of the call. No use is noted for `take_uses`.
        """
        for block, digest, index in blocks:
            self._index.add(block, digest, index)
        self._settle([block for block, _, _ in blocks], (-inf, number))

    def cache_block(self, block: int, digest: bytes, index: int, last_use: Use | None) -> None:
        """Finish the copy to a reserved block, the `index`-th of its sequence.

        `last_use` is the last use of the device block if that is idle, and None if it is in use.
        """
        self.cache_all(((block, digest, index),), last_use)

    def cache_all(self, blocks: Collection[tuple[int, bytes, int]], last_use: Use | None) -> None:
        """`cache_block` for blocks of one last use, each with its digest and its place in its sequence."""
        for block, digest, index in blocks:
            self._index.add(block, digest, index)
        self._settle([block for block, _, _ in blocks], last_use)
        if self._uses is not None:
            self._uses += [(digest, last_use) for _, digest, _ in blocks]

    def take(self, blocks: Collection[int]) -> None:
        """Reserve these free blocks, which hold state already."""
        self._free = [block for block in self._free if block not in blocks]

    def drop(self, digest: bytes) -> None:
        """Free the block with this digest, if there is one that is not held, because its state turned out to be bad."""
        block = self.find(digest)
        if block is None or block in self._held:
            return
        if block in self._duplicates:
            del self._duplicates[block]
        else:
            self._retained.take(block)
        self._index.remove([block])
        self._free.append(block)

    def index_of(self, block: int) -> int:
        """Index of a cached block in its sequence: 0 for the first."""
        return self._index.indices[block]

    def last_use(self, block: int) -> Use | None:
        """When a held or retained block was last used; None: it is in use on the device."""
        held = self._held.get(block)
        return held.last_use if held is not None else self._retained.last_use(block)

    def free(self, block: int) -> None:
        """Return a reserved block to the free ones: its state does not come, or is here already."""
        self._free.append(block)

    def hold(self, digest: bytes) -> int | None:
        """Hold the block with this digest: it stays unchanged until `release` was called once for each hold.

        Returns None if no block has the digest. Any thread may read a held block.
        """
        block = self.find(digest)
        if block is None:
            return None
        hold = self._held.get(block)
        if hold is None:
            hold = self._held[block] = Hold(None if block in self._duplicates else self._retained.take(block))
            self._duplicates.pop(block, None)
        hold.holders += 1
        return block

    def hold_all(self, digests: Iterable[bytes], use: Use) -> list[int]:
        """`hold` for those of these blocks that are here, as one use. Each digest comes once."""
        blocks, held, duplicates = self.find_all(digests), self._held, self._duplicates
        for block in self._retained.remove(blocks):
            if block in duplicates:
                del duplicates[block]
                held[block] = Hold(None)
            elif (hold := held[block]).last_use is not None:
                hold.last_use = use
        for block in blocks:
            if block not in held:
                held[block] = Hold(use)
            held[block].holders += 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """End one hold of each block.

        After its last hold a block is a duplicate or retained, as if it had never been held.

        Raises RuntimeError for a block that is not held.
        """
        ended: dict[Use | None, list[int]] = {}
        for block in blocks:
            hold = self._held.get(block)
            if hold is None:
                raise RuntimeError(f"block {block} of the host tier is released, but nobody holds it")
            hold.holders -= 1
            if not hold.holders:
                del self._held[block]
                ended.setdefault(hold.last_use, []).append(block)
        for last_use, of_use in ended.items():
            self._settle(of_use, last_use)

    def mark_in_use(self, digests: Iterable[bytes]) -> None:
        """Make the copies of these digests duplicates, because their device blocks are in use."""
        here = self._not_held(digests, None)
        if here:
            others = set(self._retained.remove(here))
            self._duplicates.update((block, None) for block in here if block not in others)

    def mark_idle(self, digests: Collection[bytes], use: Use) -> None:
        """Retain the copies of these digests, because their device blocks are idle. They were last used together.

        Digests that are not here count as used for `take_uses`.
        """
        here = self._not_held(digests, use)
        for block in here:
            del self._duplicates[block]
        self._retained.add_all(here, map(self._index.indices.__getitem__, here), use)
        self._note_use(digests, use)

    def touch(self, digest: bytes, use: Use) -> None:
        """Count the block with this digest as used again. A duplicate stays one.

        A digest that is not here counts as used for `take_uses`.
        """
        self.touch_all((digest,), use)

    def touch_all(self, digests: Iterable[bytes], use: Use) -> None:
        """`touch` for blocks that were used together."""
        digests = dict.fromkeys(digests)
        blocks, retained, indices = self.find_all(digests), self._retained, self._index.indices
        others = set(retained.remove(blocks))
        kept = [block for block in blocks if block not in others] if others else blocks
        retained.add_all(kept, map(indices.__getitem__, kept), use)
        for block in others:
            if (hold := self._held.get(block)) is not None and hold.last_use is not None:
                hold.last_use = use
        self._note_use(digests, use)

    def _note_use(self, digests: Iterable[bytes], use: Use) -> None:
        """Note for `take_uses` that the state of these digests was used."""
        if self._uses is not None:
            self._uses += [(digest, use) for digest in digests]

    def _settle(self, blocks: Iterable[int], last_use: Use | None) -> None:
        """Make cached blocks duplicates, or retain them if they have a last use."""
        if last_use is None:
            self._duplicates.update(dict.fromkeys(blocks))
        else:
            blocks = tuple(blocks)
            self._retained.add_all(blocks, map(self._index.indices.__getitem__, blocks), last_use)

    def _not_held(self, digests: Iterable[bytes], last_use: Use | None) -> list[int]:
        """The blocks of these digests that are here and not held. Held ones get this last use, for their release."""
        here = self.find_all(digests)
        if self._held:
            for block in here:
                if block in self._held:
                    self._held[block].last_use = last_use
            here = [block for block in here if block not in self._held]
        return here


@dataclass(slots=True)
class Hold:
    """Number of holds on a block, and the state that it returns to after the last."""

    last_use: Use | None
    """Last use of the block if it is to be retained. None: it is to be a duplicate."""
    holders: int = 0
