"""HeadPart: when a draft head guesses, how many tokens, and which of them a step verifies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

from holdfast.core.cost import CostModel
from holdfast.lm.parts.speculation.drafting import MARGIN, MOST_RATE, PATIENCE, DraftingPart, after
from holdfast.lm.parts.speculation.values import HeadPlan, HeadResult
from holdfast.lm.parts.speculation.verification import draftable
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import PartStep
from holdfast.lm.types import PartPlan, StepPlan, StepResult

HOPE = 0.7
"""Chance of a guess as long as none was verified, and after long without any."""
HEAD_GAIN = 0.1
"""Weight of one guess in a sequence's running rate of hits. One head makes all guesses, so the rate changes slowly."""
FIRST, LEAST_WEIGHT = 8, 0.02
"""Number of verified drafts that HOPE counts for in the rate of all sequences, and least weight of one draft in it."""
SHORT, LONG = 16, 1024
"""Least and most tokens without drafts after which half of a disappointment has faded. Drafts that fail double them."""
PASS_WEIGHT = 0.5
"""Weight of one step in the running time of a pass."""
LATEST = 7
"""Number of latest passes of which the median counts. The first ones of a size may wait for the driver, which says
nothing of later ones."""
FORGETS = 64
"""Steps without guesses after which two thirds of the disappointment with a batch size have faded.

Chances of guesses have most of it, too, and last longer.
"""


@dataclass(slots=True)
class HeadRow:
    """Record of one sequence."""

    hits: float
    """Running share of right guesses, among guesses whose predecessors were right."""
    known: int
    """Number of known tokens when a guess was verified last."""
    patience: int = SHORT
    """Tokens without drafts after which half of the way to HOPE is made up."""

    def chance(self, known: int) -> float:
        """Chance that a guess is right if the earlier ones are. It goes to HOPE with the tokens since the last one."""
        age = max(0, known - self.known)
        return min(self.hits + (HOPE - self.hits) * age / (age + self.patience), MOST_RATE)


class Guesses(NamedTuple):
    """Guesses at the next tokens of a sequence."""

    known: int
    """Number of tokens that they follow."""
    tokens: Sequence[int]


class HeadPart(DraftingPart):
    """Lets decodes verify the guesses of a draft head, which runs on the device at the end of a step.

    A step that is planned to guess takes longer by the passes through the head, whose time is measured. The step after
    it can verify the guesses. So the head guesses as many tokens as give most tokens per second in a sequence of such
    steps, or none: then it does not run at all, and steps are planned ahead as usual.

    The chance of a guess comes from how often guesses came true, for each sequence. A new sequence has the rate of all.
    While none are verified, chances rise slowly, so that guesses are tried again, less often each time that they fail.
    """

    name = "speculation"

    def __init__(
        self,
        cost: CostModel,
        *,
        most: int,
        rows: int,
        pass_share: float,
        target: float = inf,
    ) -> None:
        """The arguments are those of `DraftingPart`.

        `pass_share` is the time of a pass through the head, as a share of a step's, until one was measured.
        """
        super().__init__(cost, most=most, rows=rows, target=target)
        self._pass_share = pass_share
        self._passes: dict[int, float] = {}
        """Running seconds of a pass, by the power of two that the number of sequences is below.

        They go back to the first estimate while none is made, as one slow pass must not end guessing for good.
        """
        self._latest: dict[int, deque[float]] = {}
        """Seconds of the latest passes, by that power of two; at first the estimate."""
        self._mean = HOPE
        """Running rate of hits of all sequences."""
        self._verified_drafts = 0
        """Number of verified drafts."""
        self._rows: dict[Entry, HeadRow] = {}
        self._guesses: dict[Entry, Guesses] = {}
        """The last guesses of each running sequence. They count until it has another token."""
        self._guessing: dict[Entry, int] = {}
        """For each sequence for which a step in flight guesses, the number of guesses."""
        self._asked: dict[int, tuple[Sequence[Entry], int]] = {}
        """For each step in flight that guesses, its sampling sequences, and the number of guesses for each."""

    def begin(self, step: PartStep) -> None:
        count, seconds = self._best(list(step.running))
        self._further = seconds if count else 0.0
        super().begin(step)

    def pays(self, decoding: Sequence[Entry]) -> bool:
        """Whether waiting for the guesses in flight is expected to pay."""
        rows, each = len(decoding), self._each(len(decoding))
        chances = [
            (self._chance(entry), min(count, self._room(entry, each)), 1.0)
            for entry in decoding
            if (count := self._guessing.get(entry, 0)) and draftable(entry)
        ]
        if not chances:
            return False
        contexts = [entry.cache.planned + 1 for entry in decoding]
        _, self._promise = self._shares(chances, contexts, self._sampled - rows)
        return self._promise > 0

    def draft(self, step: PartStep) -> Mapping[Entry, Sequence[int]]:
        """The guesses for those decodes of the step whose tokens are known, as far as they pay."""
        each = self._each(len(step.sampling))
        found: list[tuple[Entry, Sequence[int]]] = []
        for entry in step.sampling:
            guesses = self._guesses.get(entry)
            if guesses is None or entry.sequence.in_flight > 1 or not draftable(entry):
                continue  # the token that this step samples is one in flight
            if guesses.known == len(entry.sequence.tokens) and (room := self._room(entry, each)):
                found.append((entry, guesses.tokens[:room]))
        if not found:
            return {}
        contexts = [entry.cache.planned for entry in step.sampling]
        chances = [(self._chance(entry), len(tokens), 1.0) for entry, tokens in found]
        room = min(step.budget, self._sampled - len(contexts))
        shares, _ = self._shares(chances, contexts, room, waited=self._promised > 0)
        return {entry: tokens[:share] for (entry, tokens), share in zip(found, shares, strict=False) if share}

    def finish(self, step: PartStep) -> PartPlan | None:
        super().finish(step)
        for entry in step.sampling:
            self._guessing.pop(entry, None)
        if not step.num_tokens:
            return None
        running = list(step.running)
        count, _ = self._best(running)
        if not count:
            self._mean += (HOPE - self._mean) / PATIENCE
            self.account(len(running)).forget(FORGETS)
            size = len(running).bit_length()
            if size in self._passes:
                self._passes[size] += (self._first_pass(len(running)) - self._passes[size]) / PATIENCE
            return None
        alone = step.num_tokens == len(step.sampling) + sum(map(len, self._drafts.values()))
        if not step.sampling or (self._target < inf and not alone):  # prompts may have filled the step to the target
            return HeadPlan(keeps=True)
        self._guessing.update(dict.fromkeys(step.sampling, count))
        self._asked[step.number] = step.sampling, count
        return HeadPlan(keeps=True, drafts=count)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        if plan.step in self._asked:
            self._take(plan, result)
        return super().apply(plan, result, now)

    def verified(self, entry: Entry, hits: int, *, missed: bool) -> None:
        rate = after(self._chance(entry), hits, missed=missed, gain=HEAD_GAIN)
        patience = self._rows[entry].patience if entry in self._rows else SHORT
        patience = max(SHORT, patience // 2) if hits else min(LONG, patience * 2)
        self._rows[entry] = HeadRow(rate, len(entry.sequence.tokens) + hits + 1, patience)
        self._verified_drafts += 1
        weight = max(LEAST_WEIGHT, 1 / (FIRST + self._verified_drafts))
        self._mean += weight * (hits / (hits + missed) - self._mean)

    def guessing(self, result: StepResult) -> float:
        return result.part(HeadResult).seconds

    def stopped(self, entry: Entry) -> None:
        super().stopped(entry)
        self._guesses.pop(entry, None)
        self._guessing.pop(entry, None)

    def ended(self, entry: Entry) -> None:
        self._rows.pop(entry, None)

    def _take(self, plan: StepPlan, result: StepResult) -> None:
        """Take note of a step's guesses, and of the time that they took."""
        sampling, count = self._asked.pop(plan.step)
        found = result.part(HeadResult)
        if found.passes and found.seconds:
            rows, seconds = len(sampling), found.seconds / found.passes
            before = self._pass_seconds(rows)
            latest = self._latest.setdefault(rows.bit_length(), deque([before] * LATEST, LATEST))
            latest.append(seconds)
            self._passes[rows.bit_length()] = before + PASS_WEIGHT * (median(latest) - before)
        given = result.counts if result.counts is not None else [1] * len(sampling)
        for entry, tokens, number in zip(sampling, found.drafts or [()] * len(sampling), given, strict=True):
            if self._guessing.get(entry) == count:
                del self._guessing[entry]
                if tokens and not entry.sequence.ended:
                    self._guesses[entry] = Guesses(len(entry.sequence.tokens) + number, tokens)

    def _pass_seconds(self, rows: int) -> float:
        """Predicted seconds of a pass for this number of sequences."""
        return self._passes.get(rows.bit_length()) or self._first_pass(rows)

    def _first_pass(self, rows: int) -> float:
        """`_pass_seconds` before any was measured."""
        return self._pass_share * self._ratio * self._predictor.drafted(rows, [])

    def _chance(self, entry: Entry) -> float:
        row = self._rows.get(entry)
        return min(self._mean, MOST_RATE) if row is None else row.chance(len(entry.sequence.tokens))

    def _best(self, running: Sequence[Entry]) -> tuple[int, float]:
        """The number of guesses for each of these sequences that gives most tokens per second, and the head's seconds.

        0 if steps without guesses give about as many. It is that of steps one after the other in which all sequences
        decode, guess, and verify the guesses of the step before.
        """
        rows = len(running)
        chances = [self._chance(entry) for entry in running if draftable(entry)]
        if not chances or self._sampled < 2 * rows:
            return 0, 0.0
        contexts = [entry.cache.planned + 1 for entry in running]
        attention, account = self._predictor.decodes(contexts), self.account(rows)
        plain = self._ratio * (self._predictor.drafted(rows, []) + attention)
        each = self._pass_seconds(rows)
        best, found, gain = MARGIN * rows / (plain + self._idle) / account.trust, 0, 0.0
        uses, ratio = chances, self._ratio * self._drafts_ratio
        for count in range(1, min(self._most, self._sampled // rows - 1) + 1):
            gain += sum(uses)
            uses = [use * chance for use, chance in zip(uses, chances, strict=True)]
            drafted = len(chances) * count
            seconds = ratio * (self._predictor.drafted(rows + drafted, []) + attention) + each * count
            if seconds > self._target:
                break
            rate = (rows + gain) / (seconds + account.gap)
            if rate > best:
                best, found = rate, count
            elif found:
                break
        return found, found * each
