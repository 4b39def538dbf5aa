"""ContractAdmission: whether a contract can be kept next to those that are accepted, and when it could be otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from holdfast.core.contract import MAX_CONTRACT, NO_CONTRACT, Contract, Refusal
from holdfast.lm.memory.protocol import AnyMemory
from holdfast.lm.parts.contracts.forecast import Decodes, Forecast, Outlook, Prompt, Room
from holdfast.lm.parts.contracts.lateness import Lateness
from holdfast.lm.parts.contracts.lengths import CERTAIN, Survival
from holdfast.lm.parts.contracts.pool import Answer, Pool
from holdfast.lm.parts.contracts.promises import Departures, Promise, Promises, answered, prompt_of
from holdfast.lm.scheduler.entries import Entry

LEAST_RATE = 0.25
"""Least rate at which prompts are computed while a pace is kept, as a share of the rate without any pace.

A contract with a faster pace is refused, because all others would pay for it.
"""
LEAST_STEP = 0.5
"""Share of a promised pace that steps may take, however late tokens were before."""
TRIES = 4
"""Most bounds that are tried for one contract."""
SLOW_SECONDS = 1.0
"""Seconds after which a contract may be asked for again that is refused because steps are slower than their prices."""
SLACK = 1 - 1e-9
"""Keeps a bound below the times that it must not exceed, whatever is lost to rounding."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A contract that can be kept."""

    bound: float
    """Most seconds that a step may take from now on."""


class End(NamedTuple):
    """The completion that a sequence was promised."""

    steps: int
    """Steps in which it gets all tokens of its answer that are expected at the most."""
    by: float
    """Time by which its last token must come."""
    most: int
    """Steps in which it gets all tokens that its answer may have."""
    so_far: int
    """Tokens of its answer before the first of these steps."""
    survival: Survival
    """How long answers like its own are."""

    def risk(self, steps: int) -> float:
        """Chance, before its first token, that its answer has more tokens than `steps` steps can give it.

        Infinite if it is certain, as nothing may be left to chance then.
        """
        if steps >= self.most:
            return 0.0
        if self.survival is CERTAIN:
            return 0.0 if steps >= self.steps else inf
        return self.survival.most_chance(max(0, self.so_far + steps))


@dataclass(frozen=True, slots=True)
class Queue:
    """The accepted sequences as a forecast sees them."""

    entries: Sequence[Entry]
    """Sequences that lack a part of their prompts, by rank."""
    prompts: Sequence[Prompt]
    """The part of its prompt that each of `entries` lacks."""
    decodes: Decodes
    """The other sequences."""
    tbt: float
    """Shortest of all paces promised, in seconds."""
    completing: Sequence[tuple[Entry, Promise]]
    """The other sequences that were promised a completion."""
    count: int = 1
    """Number of open contracts, the one that is asked for among them."""


class ContractAdmission:
    """Decides on contracts at their arrival, and on the bound of steps once one has ended.

    A contract is accepted if rows and blocks are left for the whole of its answer, and if a forecast says that every
    accepted sequence, the new one among them, gets its tokens in time. Answers of unknown length may be late, if few
    enough of all are expected to be.
    """

    def __init__(
        self,
        forecast: Forecast,
        promises: Promises,
        lateness: Lateness,
        *,
        max_sequences: int,
        target: float = inf,
        confidence: float = 1.0,
    ) -> None:
        """At most `max_sequences` run; steps with streams take at most `target` seconds.

        A share of `confidence` of the open contracts is expected to complete in time, however long answers become.

        The bound of steps leaves room for the `lateness` of tokens.
        """
        self._forecast, self._promises, self._lateness = forecast, promises, lateness
        self._max_sequences, self._target, self._confidence = max_sequences, target, confidence
        self._known: tuple[Decodes, Sequence[tuple[Entry, Promise]]] = Decodes(), ()
        self._known_at = -1
        """Stamp of the promises that `_known` is made of."""
        self._prompts: dict[Entry, Prompt] = {}
        """The part of its prompt that each sequence lacks that was looked up since the latest step."""
        self._prompts_at = -1
        """Stamp of the promises at that step."""

    def decide(
        self,
        entry: Entry,
        promise: Promise,
        pool: AnyMemory,
        *,
        headroom: int,
        now: float,
        start: float,
        factor: float,
        share: float = 1.0,
    ) -> Accepted | Refusal:
        """Accept a contract, or say why not.

        Its tenant may hold a `share` of the rows and blocks. The next step begins at `start`, and takes at most
        `factor` times its price.
        """
        usable = pool.num_blocks - pool.lent - headroom
        refusal = self._lacks_place(entry, promise, pool, usable, now, start)
        refusal = refusal or self._lacks_share(entry, promise, usable, share)
        if refusal:
            return refusal
        queue = self.queue(pool, start, (entry, promise))
        found = self.find_bound(queue, start=start, factor=factor)
        if isinstance(found, float):
            return Accepted(found)
        return self._late(entry, promise, pool, queue, start=start, factor=factor)

    def queue(self, pool: AnyMemory, start: float, *more: tuple[Entry, Promise]) -> Queue:
        """The accepted sequences, and `more`, before a step that begins at `start`."""
        everyone = [*self._promises, *more]
        lacking = sorted((pair for pair in everyone if not pair[0].decoding), key=lambda pair: pair[0].rank)
        asking = {entry for entry, _ in more}  # a contract that is asked for must be kept whole
        decodes, completing = self._decoding()
        return Queue(
            [entry for entry, _ in lacking],
            self._prompts_of(lacking, asking, pool, start),
            decodes,
            min([self._longest_step(promise) for _, promise in everyone], default=inf),
            completing,
            len(everyone),
        )

    def _prompts_of(
        self, lacking: Sequence[tuple[Entry, Promise]], asking: Collection[Entry], pool: AnyMemory, start: float
    ) -> Sequence[Prompt]:
        """The prompts of these sequences, in their order. Each is looked up once per step, as only steps change it."""
        stamp, known = self._promises.stamp, self._prompts
        if self._prompts_at != stamp:
            known.clear()
            self._prompts_at = stamp
        prompts = []
        for entry, promise in lacking:
            prompt = known.get(entry)
            if prompt is None:
                prompt = known[entry] = prompt_of(entry, promise, pool)
            if entry not in asking and (prompt.due <= start or prompt.complete <= start):
                prompt = prompt.without(start)  # a contract that is broken already refuses nobody
            prompts.append(prompt)
        if pool.host is None:
            return prompts
        leaving = Departures(pool, len(self._promises) - len(lacking), self._forecast.in_flight)
        return [prompt.after(*leaving.before(entry)) for prompt, (entry, _) in zip(prompts, lacking, strict=True)]

    def _decoding(self) -> tuple[Decodes, Sequence[tuple[Entry, Promise]]]:
        """The accepted sequences that decode, and those of them that must complete in time, made once per step."""
        promises = self._promises
        if self._known_at != promises.stamp:
            decoding = [pair for pair in promises if pair[0].decoding]
            completing = [pair for pair in decoding if pair[1].complete_by < inf and not pair[1].outgrown]
            self._known, self._known_at = (decodes_of(decoding, least=1), completing), promises.stamp
        return self._known

    def find_bound(self, queue: Queue, *, start: float, factor: float) -> float | None:
        """The largest bound of steps with which all contracts of a queue are kept; None if there is none."""
        bound = self._widest(queue, factor)
        tried = [bound]
        if self._promises.bound < bound:
            tried.append(self._promises.bound)
        for candidate in tried:
            if (found := self._narrowed(queue, candidate, start, factor)) is not None:
                return found
        return None

    def slack(self, sampling: Sequence[Entry], seconds: float, *, start: float, factor: float) -> float:
        """Most seconds that a step of accepted sequences may be predicted to take, with others added to it.

        The step begins at `start`, gives tokens to the sequences in `sampling`, is predicted to take `seconds`, and no
        accepted sequence lacks a part of its prompt after it. No sequence gets less time for this step than for its
        later ones.
        """
        promises, until = self._promises, start + factor * seconds
        now = {entry for entry in sampling if promises.get(entry) is not None}
        open_ = [(entry, promise, promise.tokens - answered(entry)) for entry, promise in promises]
        decodes = decodes_of(promises, least=0)
        outlook = self._forecast.follow((), decodes, start=until, bound=promises.bound, factor=factor)
        if not outlook.decodes:
            return seconds
        latest = promises.latest(now)
        for entry, promise, left in open_:
            if promise.complete_by < inf and (left > 0 or entry in now):
                own = promise.complete_by - outlook.timeline.after(max(0, left))
                if own < 0 and (promise.outgrown or promise.complete_by <= start):
                    continue  # nobody has to wait for what is late anyway
                pace = (promise.complete_by - start) / (1 + max(0, left))
                latest = min(latest, until + own, start + pace)
        return (latest - start) / factor

    def _widest(self, queue: Queue, factor: float) -> float:
        """The largest bound that paces and the largest step allow, in seconds."""
        return min(self._target, self._full_step(queue, factor), queue.tbt) * SLACK

    def _full_step(self, queue: Queue, factor: float) -> float:
        """Predicted seconds of the largest step, with as many decodes as there may be soon."""
        prices = self._forecast.prices
        rows, attention = self._forecast.load(queue.prompts, queue.decodes, (), 0, 1)
        most = max(1, prices.ceiling - rows)
        context = max((prompt.context for prompt in queue.prompts), default=most)
        return factor * (
            prices.linear(rows, most) + attention + prices.chunk(max(0, context - most), max(context, most))
        )

    def _narrowed(
        self, queue: Queue, bound: float, start: float, factor: float, *, least: float = LEAST_RATE
    ) -> float | None:
        """This bound, or a smaller one with which every sequence completes in time; None if contracts are broken."""
        for _ in range(TRIES):
            outlook = self._forecast.follow(queue.prompts, queue.decodes, start=start, bound=bound, factor=factor)
            firsts = outlook.firsts
            if not outlook.decodes or len(firsts) < len(queue.prompts):
                return None
            pairs = list(zip(queue.prompts, firsts, strict=True))
            if any(first > min(prompt.due, prompt.complete) for prompt, first in pairs):
                return None
            ends, timeline = ends_of(queue, outlook, start), outlook.timeline
            late = [end for end in ends if timeline.after(end.steps) > end.by]
            if not late or self._is_unlikely(ends, outlook, queue.count):
                return bound if self._is_efficient(queue, bound, factor, least) else None
            if max(end.steps for end in late) > outlook.backlog:  # a shorter bound makes the backlog last longer
                return None
            bound = min((end.by - start) / end.steps for end in late) * SLACK
            if not bound > 0:
                return None
        return None

    def _is_unlikely(self, ends: Iterable[End], outlook: Outlook, count: int) -> bool:
        """Whether few enough of `count` open contracts are expected to be late, as their answers become too long.

        The risk of each is that before its first token. So the mean over all contracts stays as low, too: a contract
        that has ended had its share of the sum while it was open.
        """
        before = outlook.timeline.before
        return sum(end.risk(before(end.by)) for end in ends) <= (1 - self._confidence) * count

    def _is_efficient(self, queue: Queue, bound: float, factor: float, least: float) -> bool:
        """Whether steps within the bound compute prompts at this share of the rate of the largest steps, at least."""
        full = self._full_step(queue, factor)
        if bound >= full * SLACK:
            return True
        prices = self._forecast.prices
        rows, attention = self._forecast.load(queue.prompts, queue.decodes, (), 0, 1)
        room = Room(prices, rows, attention)
        room.take(0, prices.ceiling, bound / factor)
        return room.tokens / bound >= least * (prices.ceiling - rows) / full

    def _lacks_share(self, entry: Entry, promise: Promise, usable: int, share: float) -> Refusal | None:
        """A refusal if its tenant would hold more than its share of rows and blocks; None if it would not.

        A tenant without an open contract may always have one. Rows and blocks that are all one tenant's can be waited
        for.
        """
        if share == 1:
            return None
        tenant = tenant_of(entry)
        own = [(each, other) for each, other in self._promises if tenant_of(each) == tenant]
        blocks = promise.blocks + sum(other.blocks for _, other in own)
        if not own or (len(own) < share * self._max_sequences and blocks <= share * usable):
            return None
        wait = min(other.tokens_left(each) for each, other in own) * self._promises.bound
        return Refusal("the contract cannot be kept now: the share of its API key is promised already", wait)

    def _lacks_place(
        self, entry: Entry, promise: Promise, pool: AnyMemory, usable: int, now: float, start: float
    ) -> Refusal | None:
        """A refusal for want of blocks, of which `usable` are for contracts; None if there are enough."""
        if promise.blocks > usable:
            needed = f"it may need {promise.blocks} blocks of the KV cache, and contracts can have {usable}"
            return Refusal(f"the contract can never be kept: {needed}", inf)
        blocks = sum(other.blocks for _, other in self._promises) + promise.blocks - usable
        if blocks > 0:  # each by itself may need too many, and all together enough
            blocks = self._blocks((entry, promise), pool.block_size) - usable
        if blocks <= 0:
            return None
        wait = self._until_free(blocks, start) - now
        return Refusal("the contract cannot be kept now: the KV cache is promised to accepted requests", wait)

    def _blocks(self, asking: tuple[Entry, Promise], block_size: int) -> int:
        """Most blocks that the accepted sequences and the one that is `asking` need in any step.

        Decoding sequences are summed step by step. The others may start in any step, so the most of any step counts.
        """
        margin = self._forecast.margin
        waiting = [asking, *(pair for pair in self._promises if not pair[0].decoding)]
        decoding = [pair for pair in self._promises if pair[0].decoding]
        total = 0
        for pairs in (waiting, decoding):
            learned = [(entry, promise) for entry, promise in pairs if promise.survival is not CERTAIN]
            pool = Pool([answer_of(*pair, least=1) for pair in learned], others=len(self._promises))
            alone = sum(promise.blocks for _, promise in learned)
            total += min(alone, pool.most_blocks(margin, block_size))
            total += sum(promise.blocks for _, promise in pairs) - alone
        return total

    def _until_free(self, blocks: int, start: float) -> float:
        """Time by which accepted sequences have given up this many blocks."""
        step = self._promises.bound
        ends = sorted((promise.tokens_left(entry) * step, promise.blocks) for entry, promise in self._promises)
        for seconds, freed in ends:
            blocks -= freed
            if blocks <= 0:
                return start + seconds
        return inf

    def _late(
        self, entry: Entry, promise: Promise, pool: AnyMemory, queue: Queue, *, start: float, factor: float
    ) -> Refusal:
        """The refusal of a contract for want of time."""
        place = queue.entries.index(entry)
        own = queue.prompts[place]
        alone = Queue([entry], [prompt_of(entry, promise, pool)], Decodes(), self._longest_step(promise), ())
        # In an idle engine, a request that arrives now starts now.
        if self._narrowed(alone, self._widest(alone, factor), promise.arrival, factor) is None:
            predicted = self._predict(replace(alone, prompts=[own]), promise, promise.arrival, factor)
            slow = self._narrowed(alone, self._widest(alone, factor), promise.arrival, factor, least=0.0) is None
            reason = "even an idle engine is slower" if slow else "steps as short as its pace would delay all others"
            if slow and self._is_kept_beyond_target(alone, promise.arrival, factor):
                reason = f"steps within the TBT target of {self._target * 1000:g} ms compute too little of its prompt"
                if self._narrowed(alone, self._widest(alone, 1.0), promise.arrival, 1.0) is not None:
                    return Refusal(
                        f"the contract cannot be kept now: {reason}, as slow as steps are", SLOW_SECONDS, predicted
                    )
            return Refusal(f"the contract can never be kept: {reason}", inf, predicted)
        others = [prompt for index, prompt in enumerate(queue.prompts) if index != place]
        predicted = self._predict(replace(queue, prompts=[*others, own]), promise, start, factor)
        if predicted.ttft is not None and promise.contract.ttft is not None and predicted.ttft > promise.contract.ttft:
            full = len(self._promises) >= self._max_sequences
            reason = "the accepted prompts before it take too long"
            if full:
                reason = "all rows are promised to accepted requests"
            wait = predicted.ttft - (promise.due - promise.arrival)
        else:
            reason = "accepted requests would be too slow beside it"
            wait = min((other.tokens_left(each) for each, other in self._promises), default=1) * self._promises.bound
        return Refusal(f"the contract cannot be kept now: {reason}", max(0.001, wait), predicted)

    def _is_kept_beyond_target(self, alone: Queue, start: float, factor: float) -> bool:
        """Whether an idle engine would keep a contract if its steps could be longer than their target."""
        longest = min(self._full_step(alone, factor), alone.tbt) * SLACK
        return self._target < longest and self._narrowed(alone, longest, start, factor) is not None

    def _predict(self, queue: Queue, promise: Promise, start: float, factor: float) -> Contract:
        """The times that the last prompt of a queue could be promised after the others."""
        beside = self._promises if len(queue.prompts) > 1 or queue.decodes.steps else ()
        others = [self._longest_step(other) for _, other in beside]
        prompts = [prompt._replace(due=inf) for prompt in queue.prompts]
        bound = min(self._target, self._full_step(queue, factor), *others)
        outlook = self._forecast.follow(prompts, queue.decodes, start=start, bound=bound, factor=factor)
        if len(outlook.firsts) < len(prompts):
            return NO_CONTRACT
        ttft = outlook.firsts[-1] - promise.arrival
        return promised(ttft, bound + self._lateness.largest, ttft + max(0, promise.tokens - 1) * bound)

    def _longest_step(self, promise: Promise) -> float:
        """Most seconds of a step with which the pace of a promise is kept, though a token may be late."""
        return max(promise.tbt - self._lateness.largest, LEAST_STEP * promise.tbt)


def answer_of(entry: Entry, promise: Promise, *, least: int) -> Answer:
    """The answer of a sequence of learned length, which takes at least this many steps."""
    length = entry.sequence.length
    so_far = length - promise.answer_start
    return Answer(promise.survival, so_far, max(least, promise.most - so_far), length)


def decodes_of(sequences: Iterable[tuple[Entry, Promise]], *, least: int) -> Decodes:
    """Sequences that decode, each of which takes at least this many steps."""
    pairs, answers = [], []
    for entry, promise in sequences:
        length = entry.sequence.length
        so_far = length - promise.answer_start
        left = promise.most - so_far
        if left < least:
            left = least
        if left <= 0:
            continue
        if promise.survival is CERTAIN:
            pairs.append((left, length))
        else:
            answers.append((promise.survival, so_far, left, length))
    return Decodes(pairs, Pool(answers))


def ends_of(queue: Queue, outlook: Outlook, start: float) -> list[End]:
    """The promised completions that lie after `start` and before the last step that is forecast.

    The steps of a prompt's answer come after those before its first token.
    """
    last = outlook.timeline.end
    decoding = [
        End(left, promise.complete_by, promise.most - so_far, so_far, promise.survival)
        for entry, promise in queue.completing
        if start < promise.complete_by < last
        and (left := promise.tokens - (so_far := entry.sequence.length - promise.answer_start)) > 0
    ]
    prompts = [
        End(ended + prompt.remaining, prompt.complete, ended + prompt.most, prompt.so_far - ended, prompt.survival)
        for prompt, ended in zip(queue.prompts, outlook.ended, strict=True)
        if start < prompt.complete < last
    ]
    return decoding + prompts


def promised(ttft: float, tbt: float, complete: float) -> Contract:
    """These times as a contract; those that no contract can have are left out."""
    times = [time if 0 < time <= MAX_CONTRACT else None for time in (ttft, tbt, complete)]
    return Contract(*times)


def tenant_of(entry: Entry) -> str:
    """A sequence's tenant."""
    return entry.sequence.request.identity.tenant
