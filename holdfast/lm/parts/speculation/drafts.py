"""Drafters: guess the next tokens of a sequence from what followed the same tokens before, in its text or in others.

Matches are found as in Deflate (RFC 1951 §4): a table leads from a hash of the last three tokens to where they occurred
last, and a chain from there to earlier places. So memory is bounded, and a token takes constant time. `NgramDrafter` is
prompt lookup (Saxena 2023); `SuffixDrafter` takes the longest suffix, as SuffixDecoding (Oliaro et al. 2024), of the
sequence itself or of earlier answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from holdfast.core.types import Identity

NGRAM = 3
"""Least number of tokens of a match."""
LONGEST = 32
"""Most tokens that are compared. A longer match counts as one of this length."""
CANDIDATES = 8
"""Number of earlier places that are compared, the latest first."""
OWN_TOKENS = 1 << 15
"""Most tokens of a sequence that are kept: its last ones. Each takes 20 bytes."""
PAST_TOKENS = 1 << 15
"""Number of tokens of earlier answers that are kept for each identity: the latest ones."""
IDENTITIES = 16
"""Number of identities whose answers are kept: those used last."""
PENDING_TOKENS = 1 << 15
"""Most tokens of answers that wait to be added. Further answers are left out."""
SEPARATOR = 0xFFFFFFFF
"""Stands between two answers. No token has this number."""
SHIFT, KEY_BITS = 11, 33
"""Bits by which a key shifts for each token, and bits of a key. A key covers three tokens: a fourth shifts out."""
KEY_MASK = (1 << KEY_BITS) - 1
FACTOR = 0x9E3779B1
"""Knuth's multiplicative hash."""


class Matcher:
    """The last tokens of a stream, and where each run of NGRAM tokens occurred in it. 20 bytes a token."""

    __slots__ = ("_before", "_heads", "_key", "_mask", "_tokens", "length")

    def __init__(self, capacity: int) -> None:
        """It keeps at least the last `capacity` tokens."""
        size = 1 << max(4, (capacity - 1).bit_length())
        self._mask = size - 1
        self._tokens = array("I", bytes(4 * size))
        self._before = array("q", bytes(8 * size))
        """For each token, where the run that ends with it occurred before; -1: nowhere."""
        self._heads = array("q", [-1]) * size
        """By hash of a run, where it occurred last. Runs with the same hash share a chain."""
        self._key = 0
        self.length = 0
        """Number of tokens so far, with those that are no longer kept."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        held, before, heads, mask = self._tokens, self._before, self._heads, self._mask
        key, length = self._key, self.length
        for token in tokens:
            key = (key << SHIFT ^ token) & KEY_MASK
            at = length & mask
            held[at] = token
            place = (key * FACTOR >> 16) & mask
            before[at] = heads[place]
            heads[place] = length
            length += 1
        self._key, self.length = key, length

    def find(self, end: Matcher, *, longest: bool) -> tuple[int, int]:
        """Length of a match with the last tokens of `end`, and the position here where it ends; 0 and -1 if none.

        `end` may be this stream: then an earlier place is found. The longest match of the places looked at, the latest
        of them if several are as long; without `longest` the latest.
        """
        if end.length < NGRAM:
            return 0, -1
        if end is self:
            at = self._before[(self.length - 1) & self._mask]
        else:
            at = self._heads[(end._key * FACTOR >> 16) & self._mask]
        best, found, oldest = 0, -1, max(0, self.length - self._mask - 1)
        for _ in range(CANDIDATES):
            if at < oldest:
                break
            length = self._matched(at, end, at - oldest + 1)
            if length >= NGRAM and length > best:
                best, found = length, at
                if not longest or best >= LONGEST:
                    break
            at = self._before[at & self._mask]
        return best, found

    def follow(self, position: int, count: int) -> tuple[int, ...]:
        """The next `count` tokens after a position, or fewer: up to a separator.

        At the end of the stream, the tokens after the position repeat: text that repeats usually goes on like this.
        """
        start = position + 1
        guesses = self._slice(start, min(self.length, start + count))
        if SEPARATOR in guesses:
            return guesses[: guesses.index(SEPARATOR)]
        if guesses and len(guesses) < count:
            guesses = (guesses * (count // len(guesses) + 1))[:count]
        return guesses

    def _slice(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at [start, stop), which are kept."""
        first, last = start & self._mask, stop & self._mask
        if first < last or start == stop:
            return tuple(self._tokens[first:last])
        return (*self._tokens[first:], *self._tokens[:last])

    def _matched(self, position: int, end: Matcher, most: int) -> int:
        """How many tokens up to a position are the last ones of `end`."""
        most = min(most, LONGEST, end.length, end._mask + 1)
        here = self._slice(position + 1 - most, position + 1)
        there = end._slice(end.length - most, end.length)
        if here == there:
            return most
        return next(count for count in range(most) if here[-1 - count] != there[-1 - count])


class Drafter(ABC):
    """Guesses the next tokens of sequences. Pure."""

    def begin(self, limit: int) -> Matcher:
        """An empty matcher for a sequence of at most `limit` tokens. The caller adds the tokens before it asks."""
        return Matcher(min(limit, OWN_TOKENS))

    @abstractmethod
    def propose(self, own: Matcher, identity: Identity, most: int) -> tuple[int, ...]:
        """At most `most` guesses at the next tokens; empty without a match."""

    def end(self, identity: Identity, answer: Sequence[int]) -> None:  # noqa: B027  most learn nothing from it
        """Note the answer of a sequence that has ended."""

    def index(self, budget: int) -> int:
        """Add up to `budget` tokens of noted answers to the searched text. Returns the number of added tokens."""
        return 0


class NgramDrafter(Drafter):
    """Guesses what followed the last NGRAM tokens when the sequence had them the last time."""

    def propose(self, own: Matcher, identity: Identity, most: int) -> tuple[int, ...]:
        _, at = own.find(own, longest=False)
        return own.follow(at, most) if at >= 0 else ()


class SuffixDrafter(Drafter):
    """Guesses what followed the longest suffix of the sequence, in the sequence or in earlier answers.

    If two matches are equally long, the sequence's own counts. Answers are searched only for sequences of the same
    identity, because the pace of an answer must not reveal the answers of others.
    """

    def __init__(self, *, sharing: bool = True) -> None:
        """Without `sharing`, answers are not kept."""
        self._sharing = sharing
        self._past: OrderedDict[Identity, Matcher] = OrderedDict()
        self._noted: deque[tuple[Identity, array[int]]] = deque()
        """Answers that are still to be added."""
        self._waiting = 0
        """Number of tokens in `_noted`."""

    def propose(self, own: Matcher, identity: Identity, most: int) -> tuple[int, ...]:
        length, at = own.find(own, longest=True)
        past = self._past.get(identity) if self._sharing and length < LONGEST else None
        if past is not None:
            of_past, place = past.find(own, longest=True)
            if of_past > length:
                return past.follow(place, most)
        return own.follow(at, most) if at >= 0 else ()

    def end(self, identity: Identity, answer: Sequence[int]) -> None:
        if self._sharing and NGRAM < len(answer) <= PENDING_TOKENS - self._waiting:
            self._noted.append((identity, array("I", answer)))
            self._waiting += len(answer)

    def index(self, budget: int) -> int:
        added = 0
        while self._noted and added < budget:
            identity, answer = self._noted.popleft()
            past = self._past.get(identity)
            if past is None:
                if len(self._past) >= IDENTITIES:
                    self._past.popitem(last=False)
                past = self._past[identity] = Matcher(PAST_TOKENS)
            self._past.move_to_end(identity)
            some = answer[: budget - added]
            past.extend(some)
            added += len(some)
            if len(some) < len(answer):
                self._noted.appendleft((identity, answer[len(some) :]))
            else:
                past.extend((SEPARATOR,))
        self._waiting -= added
        return added
