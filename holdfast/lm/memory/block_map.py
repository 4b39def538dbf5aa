"""BlockMap: where the state of each conversation lies, for people who watch. It is read a few blocks at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.host_pool import HostPool
from holdfast.lm.memory.protocol import AnyState
from holdfast.lm.memory.retention import Use

TIERS_BELOW = {
    "f": "being brought back to the host",
    "k": "on the disk",
    "r": "in the remote tier, when it was last asked",
}
"""Places of a block's state in tiers below the host, by letters that `block_pool.TIERS` does not have."""
MOST_CONVERSATIONS = 4096
"""Largest number of conversations followed at a time."""
KEPT_SECONDS = 60.0
"""Seconds that a conversation is still reported after all of its state is gone."""
BY_AGE = -1.0
"""Stands for a worth that changes with the age alone."""
UNKNOWN = b""
"""Stands for the digest of a block that was not seen: it was dropped, or is shared with another conversation."""


class TiersBelow(Protocol):
    """The tiers below the host tier."""

    @property
    def disk(self) -> HostPool | None:
        """The blocks of the disk; None if there is no disk tier."""
        ...

    def tiers(self, digests: Iterable[bytes]) -> str:
        """Where the state of each digest lies: a letter of TIERS_BELOW for each, or - for nowhere."""
        ...


class ConversationBlocks(NamedTuple):
    """Where one conversation's blocks lie when a row is reported."""

    number: int
    """Identifies the conversation while it is watched."""
    request: str
    """The id of its latest request; empty if that request came before anybody watched."""
    state: str
    """"running", "waiting", "idle", or "gone": it is no longer followed."""
    last: float
    """When the conversation was last active, in seconds. It gives the age of idle chunks."""
    cost: float
    """Cost of computing its first kept idle chunk again: value = cost × worth. 0 if no idle chunk is kept."""
    runs: tuple[tuple[str, int], ...]
    """From its first block on: a letter and how many blocks in a row have it. The letters are those of
    `block_pool.TIERS` and `TIERS_BELOW`, and ? for unknown."""
    worth: float = BY_AGE
    """Worth of a unit of cost by the eviction in force, per second, at the time of the row; BY_AGE: one over the age,
    so that the value is the retention value."""


class _Conversation:
    """The known state of one conversation."""

    __slots__ = ("cache", "digests", "empty_since", "last", "number", "partly", "request", "seen", "tail", "told")

    def __init__(self, number: int, request: str, digests: list[bytes], last: float) -> None:
        self.number, self.request, self.digests, self.last = number, request, digests, last
        self.cache: AnyState | None = None
        """The cache of its latest request, until that request ends."""
        self.tail = UNKNOWN
        """The digest by which its next request is known."""
        self.partly = False
        """Whether some of its digests are unknown."""
        self.seen: tuple[str, tuple[str, int], float] | None = None
        """Where its blocks were, what its last request held, and its worth, when they were last read."""
        self.told: ConversationBlocks | None = None
        self.empty_since: float | None = None


class BlockMap:
    """Follows the conversations whose blocks are in a pool, from the moment the map is made.

    A request continues a conversation if its prompt begins with all full blocks of it; otherwise it begins another one.
    Blocks that were idle before are grouped by their last use, because one request frees its blocks together. Blocks
    that only the disk has are read last, during the first rounds over the others: a disk may hold far more than the
    tiers above.

    The map reads the pool and the tiers below it, and changes nothing. Each call of `advance` reads a bounded number of
    blocks.
    """

    def __init__(self, pool: BlockPool, lower: TiersBelow | None = None) -> None:
        """`lower` holds the tiers below the host tier of `pool`."""
        self._pool = pool
        self._lower = lower
        self._disk = lower.disk if lower is not None else None
        self._numbers = 0
        self._conversations: dict[int, _Conversation] = {}
        self._by_request: dict[str, _Conversation] = {}
        self._tails: dict[bytes, _Conversation] = {}
        self._found: dict[Use, dict[int, bytes]] = {}
        """Blocks that were idle when watching began, by last use and place in their sequence. Emptied when all are
        read.
        """
        self._blocks = pool.num_blocks + (pool.host.num_blocks if pool.host is not None else 0)
        self._seeded = 0
        """Number of device and host blocks already searched for idle state."""
        self._on_disk: dict[float, list[dict[int, bytes]]] = {}
        """Idle blocks of the disk, by last use. Blocks of one last use and one place in their sequences are in separate
        groups.
        """
        self._disk_left = 0 if self._disk is None else self._disk.num_blocks
        """Number of disk blocks still to be searched. They are the first ones: the disk is searched from its end."""
        self._disk_order: list[float] = []
        """Last uses whose disk blocks are still to be grouped, the next one last. Empty until all are searched."""
        self._disk_met: set[bytes] = set()
        """Digests of all known conversations, while the disk's blocks are grouped."""
        self._partly: dict[float, _Conversation] = {}
        """Idle conversations with unknown digests, by their last use, while the disk's blocks are grouped."""
        self._order: list[int] = []
        """The conversations still to be read in this round, the next one last."""
        self._letters: list[str] = []
        """Tier letters read so far of the conversation that is being read."""
        self._at = 0
        self._costs: dict[int, float] = {}
        self.complete = False
        """Whether all state that was idle when watching began has been found and reported."""

    def meet(self, request: str, cache: AnyState) -> None:
        """Start or continue a conversation for a request that is planned for the first time.

        Its cache must know the digests of its prompt.
        """
        if request in self._by_request:
            return
        digests = cache.digests
        known = next((each for each in map(self._tails.get, reversed(digests)) if each is not None), None)
        if known is None or known.cache is not None:
            known = self._begin(request, digests, 0.0)
        self._by_request.pop(known.request, None)
        known.request, known.cache, known.digests = request, cache, digests
        known.empty_since, known.partly = None, False
        self._by_request[request] = known
        if self._disk_order:
            self._disk_met.update(digests)

    def advance(self, open_requests: Mapping[str, object], now: float, most: int) -> list[ConversationBlocks]:
        """Read about `most` blocks. Returns the conversations that changed since they were last reported.

        `open_requests` holds the ids of requests that have not ended.
        """
        if self._seeded < self._blocks:
            self._seed(most)
            return []
        if self._disk_left or self._disk_order:
            most -= self._seed_from_disk(max(1, most // 2))
        changed: list[ConversationBlocks] = []
        if not self._order:
            self._forget(now, changed)
            self._order = list(reversed(self._conversations))
        while self._order and most > 0:
            conversation = self._conversations.get(self._order[-1])
            if conversation is None:
                self._order.pop()
                continue
            seen = conversation.digests[self._at : self._at + most]
            self._letters.append(self._tiers(seen))
            self._at += len(seen)
            most -= len(seen) + 4
            if self._at >= len(conversation.digests):
                self._order.pop()
                letters = "".join(self._letters)
                self._letters, self._at = [], 0
                held = self._held(conversation, open_requests, now)
                seen_now = letters, held, self._worth(conversation, now)
                if seen_now != conversation.seen:
                    conversation.seen = seen_now
                    row = self._row(conversation, letters, now)
                    if row != conversation.told:
                        conversation.told = row
                        changed.append(row)
        self.complete = self.complete or not (self._order or self._disk_left or self._disk_order)
        return changed

    def everything(self, open_requests: Mapping[str, object], now: float) -> list[ConversationBlocks]:
        """`advance` for one whole round, however long that takes."""
        changed = []
        while self._seeded < self._blocks or self._disk_left or self._disk_order or self._order:
            changed += self.advance(open_requests, now, 1 << 30)
        return changed + self.advance(open_requests, now, 1 << 30)

    def costs(self) -> list[tuple[int, float]]:
        """The cost of computing a chunk again, by block of its conversation, for a sample of places."""
        rule = self._pool.rule
        places = [0, *(1 << power for power in range(self._blocks.bit_length()))]
        return [(place, rule.class_cost(rule.cost_class(place))) for place in places]

    def _begin(self, request: str, digests: list[bytes], last: float) -> _Conversation:
        self._numbers += 1
        conversation = _Conversation(self._numbers, request, digests, last)
        self._conversations[conversation.number] = conversation
        return conversation

    def _seed(self, most: int) -> None:
        """Read the next `most` blocks for state that was idle before; after the last, make conversations of them."""
        pool, start = self._pool, self._seeded
        first, stop = pool.num_blocks, min(start + most, self._blocks)
        found = pool.idle_blocks(start, min(stop, first))
        if pool.host is not None:
            found += pool.host.idle_blocks(max(start - first, 0), max(stop - first, 0))
        for use, index, digest in found:
            self._found.setdefault(use, {})[index] = digest
        self._seeded = stop
        if stop < self._blocks:
            return
        met = self._met()
        for use, found_together in sorted(self._found.items())[-MOST_CONVERSATIONS:]:
            self._find(use[0], found_together, met)
        self._found.clear()

    def _seed_from_disk(self, most: int) -> int:
        """`_seed` for about `most` blocks of the disk, which are grouped by the time of their last use.

        Returns how many it read.
        """
        assert self._disk is not None
        looked = 0
        if self._disk_left:
            start = max(0, self._disk_left - most)
            for (last, _), index, digest in self._disk.idle_blocks(start, self._disk_left):
                groups = self._on_disk.setdefault(last, [])
                group = next((each for each in groups if index not in each), None)
                if group is None:
                    groups.append(group := {})
                group[index] = digest
            looked, self._disk_left = self._disk_left - start, start
            if not start:
                self._disk_met = self._met()
                self._disk_order = sorted(self._on_disk)[-MOST_CONVERSATIONS:]
                known = self._conversations.values()
                self._partly = {each.last: each for each in known if each.partly and each.cache is None}
        while self._disk_order and looked < most:
            last = self._disk_order.pop()
            for group in self._on_disk.pop(last):
                if not self._complete(last, group):
                    self._find(last, group, self._disk_met)
                looked += len(group)
        if not (self._disk_left or self._disk_order):
            self._on_disk.clear()
            self._disk_met.clear()
            self._partly.clear()
        return looked

    def _met(self) -> set[bytes]:
        """The digests of all known conversations."""
        return {digest for each in self._conversations.values() for digest in each.digests}

    def _find(self, last: float, together: Mapping[int, bytes], met: Collection[bytes]) -> None:
        """Make a conversation of blocks last used together, by place, without the blocks whose digests are in `met`."""
        blocks = {index: digest for index, digest in together.items() if digest not in met}
        if not blocks:
            return
        digests = [blocks.get(index, UNKNOWN) for index in range(max(blocks) + 1)]
        conversation = self._begin("", digests, last)
        conversation.tail, conversation.partly = digests[-1], UNKNOWN in digests
        self._tails.setdefault(conversation.tail, conversation)

    def _complete(self, last: float, group: Mapping[int, bytes]) -> bool:
        """Fill unknown digests of the conversation last used at `last` from `group`. Returns whether they fitted."""
        conversation = self._partly.get(last)
        blocks = {index: digest for index, digest in group.items() if digest not in self._disk_met}
        if conversation is None or conversation.cache is not None or not blocks:
            return False
        digests = conversation.digests
        if any(index >= len(digests) or digests[index] != UNKNOWN for index in blocks):
            return False
        for index, digest in blocks.items():
            digests[index] = digest
        conversation.partly = UNKNOWN in digests
        return True

    def _tiers(self, digests: Sequence[bytes]) -> str:
        """The tier of each of these digests, one letter each."""
        letters = self._pool.tiers(digests)
        if self._lower is None or "-" not in letters:
            return letters
        below = self._lower.tiers(digests)
        return "".join([lower if letter == "-" else letter for letter, lower in zip(letters, below, strict=True)])

    def _held(self, conversation: _Conversation, open_requests: Mapping[str, object], now: float) -> tuple[str, int]:
        """A conversation's last request, and the number of blocks that it holds; -1 if it has ended."""
        cache = conversation.cache
        if cache is not None and conversation.request not in open_requests:
            cache = conversation.cache = None
            conversation.last = now
        return conversation.request, -1 if cache is None else len(cache.blocks)

    def _row(self, conversation: _Conversation, letters: str, now: float) -> ConversationBlocks:
        """The row to report for a conversation whose digests have been looked up."""
        digests, cache, state = conversation.digests, conversation.cache, "idle"
        if cache is not None:
            state = "running" if cache.blocks else "waiting"
            letters = (letters + "u" * (len(cache.blocks) - len(letters))) if cache.blocks else letters
        if digests and conversation.tail != digests[-1]:
            if self._tails.get(conversation.tail) is conversation:
                del self._tails[conversation.tail]
            conversation.tail = digests[-1]
            self._tails[conversation.tail] = conversation
        if conversation.partly:
            letters = "".join("?" if not digest else each for digest, each in zip(digests, letters, strict=True))
        kept = -1 if cache is not None else next((at for at, each in enumerate(letters) if each in "dobhk"), -1)
        if cache is None and not letters.strip("-?") and conversation.empty_since is None:
            conversation.empty_since = now
        runs = tuple([(letter, len(list(group))) for letter, group in groupby(letters)])
        cost = self._cost(kept) if kept >= 0 else 0.0
        worth = self._worth(conversation, now)
        return ConversationBlocks(
            conversation.number, conversation.request, state, conversation.last, cost, runs, worth
        )

    def _worth(self, conversation: _Conversation, now: float) -> float:
        """The worth of a unit of cost of an idle conversation's state: the same for some time, or BY_AGE."""
        turns = self._pool.rule.turns
        if turns.by_age or conversation.cache is not None or not conversation.digests:
            return BY_AGE
        return float(f"{turns.worth_at(conversation.digests[-1], conversation.last, now):.3g}")

    def _cost(self, index: int) -> float:
        """The cost of the chunk that holds block `index` of its conversation."""
        number = self._pool.rule.cost_class(index)
        if number not in self._costs:
            self._costs[number] = self._pool.rule.class_cost(number)
        return self._costs[number]

    def _forget(self, now: float, changed: list[ConversationBlocks]) -> None:
        """Stop following conversations whose state is gone, and the longest idle ones beyond the limit."""
        idle = [each for each in self._conversations.values() if each.cache is None]
        gone = [
            each
            for each in idle
            if each.empty_since is not None and now - each.empty_since > (KEPT_SECONDS if each.digests else 0)
        ]
        if (over := len(self._conversations) - len(gone) - MOST_CONVERSATIONS) > 0:
            rest = [each for each in idle if each not in gone]
            gone += sorted(rest, key=lambda each: each.last)[:over]
        for each in gone:
            del self._conversations[each.number]
            self._by_request.pop(each.request, None)
            if self._tails.get(each.tail) is each:
                del self._tails[each.tail]
            changed.append(ConversationBlocks(each.number, each.request, "gone", each.last, 0.0, ()))
