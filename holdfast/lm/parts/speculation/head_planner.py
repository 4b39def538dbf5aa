"""HeadPart: when a draft head guesses, how many tokens, and which of them a step verifies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from holdfast.core.cost import CostModel
from holdfast.lm.parts.speculation.drafting import MARGIN, MOST_RATE, DraftingPart, falling
from holdfast.lm.parts.speculation.evidence import BESIDES, HOPE, HeadRow, PassTimes, Rates
from holdfast.lm.parts.speculation.values import HeadPlan, HeadResult
from holdfast.lm.parts.speculation.verification import draftable
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import PartStep
from holdfast.lm.types import GUESSED, PartPlan, StepPlan, StepResult

FORGETS = 64
"""Steps without guesses after which two thirds of the disappointment with a batch size have faded.

Chances of guesses have most of it, too, and last longer.
"""


class Guesses(NamedTuple):
    """Guesses at the next tokens of a sequence. The device knows them."""

    known: int
    """Number of tokens that they follow."""
    each: int
    """Number of guesses."""


class Decision(NamedTuple):
    """How a step guesses, if these sequences run."""

    running: Sequence[Entry]
    each: int = 0
    """Number of guesses for each sequence."""
    trial: bool = False
    """Whether the guesses are made to learn, although they are not expected to pay."""
    seconds: float = 0.0
    """Predicted seconds that the head takes."""


class HeadPart(DraftingPart):
    """Lets decodes verify the guesses of a draft head, which runs on the device at the end of a step.

    A step that is planned to guess takes longer by the passes through the head, whose time is measured. The step after
    it can verify the guesses. So the head guesses as many tokens as give most tokens per second in a sequence of such
    steps, or none: then it does not run at all, and steps are planned ahead as usual.

    The chance of a guess comes from how often guesses in its place came true, and how often those of its sequence. A
    new sequence has the rate of all. While none are verified, chances rise slowly, so that guesses are tried again,
    less often each time that they fail.

    If guesses would pay only by what was expected of the head, not by what it showed, there is a trial now and then:
    one guess for each sequence. Trials take a small share of the time, so neither a bad start nor a slow pass is the
    end.

    The host never reads the guesses: a plan names them (`GUESSED`), and the device fills them in. So the step that
    verifies them is planned while the head still runs.
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
        self._times: dict[int, PassTimes] = {}
        """Times of passes, by the power of two that the number of sequences is below."""
        self._rates = Rates(most)
        self._rows: dict[Entry, HeadRow] = {}
        self._guesses: dict[Entry, Guesses] = {}
        """The last guesses of each running sequence. They count until it has another token."""
        self._guessing: dict[Entry, int] = {}
        """For each sequence for which a step in flight guesses, the number of guesses."""
        self._trying = self._going = False
        """Whether the last step that was planned to guess is a trial; whether the last planned step guesses to gain.

        Guesses that go on need no margin, because their times are measured.
        """
        self._asked: dict[int, tuple[Sequence[Entry], int]] = {}
        """For each step in flight that guesses, its sampling sequences, and the number of guesses for each."""
        self._decision = Decision(())
        """The decision for the step under construction."""
        self._behind = -1, 0.0
        """The last step that was planned to guess, and the predicted seconds that the head takes after it."""

    def begin(self, step: PartStep) -> None:
        self._margin = 1.0 if self._going else MARGIN
        self._decision = self._best(list(step.running))
        self._further = self._decision.seconds
        last, seconds = self._behind
        if last == step.number - 1:
            step.reserve(seconds)
        super().begin(step)

    def first_gap(self, rows: int) -> float:
        return max(0.0, super().first_gap(rows) - self._expected(rows) * (1 + BESIDES))  # the host works meanwhile

    def pays(self, decoding: Sequence[Entry]) -> bool:
        """Whether waiting for the guesses in flight is expected to pay, or they are a trial."""
        rows, each = len(decoding), self._each(len(decoding))
        uses = [
            self._uses(entry, min(count, self._room(entry, each)))
            for entry in decoding
            if (count := self._guessing.get(entry, 0)) and draftable(entry)
        ]
        if not uses:
            return False
        contexts = [entry.cache.planned + 1 for entry in decoding]
        _, self._promise = self._shares(uses, contexts, self._sampled - rows, anyway=self._trying)
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
                found.append((entry, range(GUESSED, GUESSED - min(guesses.each, room), -1)))
        if not found:
            return {}
        contexts = [entry.cache.planned for entry in step.sampling]
        uses = [self._uses(entry, len(tokens)) for entry, tokens in found]
        room = min(step.budget, self._sampled - len(contexts))
        waited = self._promised > 0
        shares, _ = self._shares(uses, contexts, room, waited=waited, anyway=waited and self._trying)
        return {entry: tokens[:share] for (entry, tokens), share in zip(found, shares, strict=False) if share}

    def finish(self, step: PartStep) -> PartPlan | None:
        super().finish(step)
        for entry in step.sampling:
            self._guessing.pop(entry, None)
        if not step.num_tokens:
            return None
        running, decision = list(step.running), self._decision
        if running != decision.running:
            decision = self._best(running)
        count, trial = decision.each, decision.trial
        self._going = count > 0 and not trial
        if not count:
            self._pass(running)
            return None
        alone = step.num_tokens == len(step.sampling) + sum(map(len, self._drafts.values()))
        if not step.sampling or (self._target < inf and not alone):  # prompts may have filled the step to the target
            return HeadPlan(keeps=True)
        if trial:
            self._times_of(len(running)).tried()
        self._trying = trial
        self._guessing.update(dict.fromkeys(step.sampling, count))
        self._asked[step.number] = step.sampling, count
        self._behind = step.number, decision.seconds
        return HeadPlan(keeps=True, drafts=count)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        found = result.part(HeadResult)
        if found.passes and found.seconds:
            self._times_of(len(found.drafts)).measured(found.seconds, found.passes)
        if plan.step in self._asked:
            self._take(plan, result)
        return super().apply(plan, result, now)

    def verified(self, entry: Entry, hits: int, *, missed: bool) -> None:
        known = len(entry.sequence.tokens)
        row = self._rows.get(entry) or HeadRow(self._chance(entry), known)
        self._rows[entry] = row.learned(known, hits, missed=missed, trial=self._trying)
        self._rates.learn(hits, missed=missed)

    def guessing(self, result: StepResult) -> tuple[float, float]:
        found = result.part(HeadResult)
        return (0.0, found.seconds) if found.apart else (found.seconds, 0.0)

    def stopped(self, entry: Entry) -> None:
        super().stopped(entry)
        self._guesses.pop(entry, None)
        self._guessing.pop(entry, None)

    def ended(self, entry: Entry) -> None:
        self._rows.pop(entry, None)

    def _pass(self, running: Sequence[Entry]) -> None:
        """Take note of a step that does not guess."""
        rows = len(running)
        account, step = self.account(rows), self._plain([entry.cache.planned + 1 for entry in running])
        self._rates.forget()
        account.forget(FORGETS)
        self._times_of(rows).earn(step, self._trial_seconds(rows))

    def _take(self, plan: StepPlan, result: StepResult) -> None:
        """Take note of the guesses that the device makes after a step."""
        sampling, count = self._asked.pop(plan.step)
        given = result.counts if result.counts is not None else [1] * len(sampling)
        for entry, number in zip(sampling, given, strict=True):
            if self._guessing.get(entry) == count:
                del self._guessing[entry]
                if not entry.sequence.ended:
                    self._guesses[entry] = Guesses(len(entry.sequence.tokens) + number, count)

    def _times_of(self, rows: int) -> PassTimes:
        return self._times.setdefault(rows.bit_length(), PassTimes())

    def _expected(self, rows: int) -> float:
        """Seconds of a pass for this number of sequences before any was measured."""
        return self._pass_share * self._ratio * self._predictor.drafted(rows, [])

    def _trial_seconds(self, rows: int) -> float:
        """Predicted seconds that a trial takes: those of the head, and of the wait for its guesses."""
        each = self._times_of(rows).seconds(self._expected(rows))
        return each * (1 + BESIDES) + self.account(rows).gap

    def _chance(self, entry: Entry) -> float:
        """Chance that a guess of a sequence is right, whatever its place."""
        row = self._rows.get(entry)
        return min(self._rates.mean, MOST_RATE) if row is None else row.chance(len(entry.sequence.tokens))

    def _uses(self, entry: Entry, count: int) -> list[float]:
        """The chances that the first `count` guesses of a sequence are used."""
        return falling(self._rates.chances(self._chance(entry), count))

    def _plain(self, contexts: list[int]) -> float:
        """Predicted seconds of a step of these decodes without guesses."""
        return self._ratio * self._predictor.drafted(len(contexts), contexts)

    def _best(self, running: Sequence[Entry]) -> Decision:
        """The guesses for these sequences that give most tokens per second, or a trial if one is due.

        They are none if steps without guesses give about as many.
        """
        rows, drafted = len(running), [entry for entry in running if draftable(entry)]
        most = min(self._most, self._sampled // max(1, rows) - 1)
        if not drafted or most < 1:
            return Decision(running)
        contexts = [entry.cache.planned + 1 for entry in running]
        times, account, expected = self._times_of(rows), self.account(rows), self._expected(rows)
        each = times.seconds(expected)
        most = 1 if times.stalls(expected) else most
        uses = [self._uses(entry, most) for entry in drafted]
        if count := self._likeliest(contexts, uses, each, account.gap, account.trust):
            return Decision(running, count, seconds=each * (count + BESIDES))
        hoped = [falling([HOPE] * most)] * len(drafted)
        first = min(each, expected), min(account.gap, self.first_gap(rows))
        if times.may_try(self._trial_seconds(rows)) and self._likeliest(contexts, hoped, *first, 1.0):
            return Decision(running, 1, trial=True, seconds=each * (1 + BESIDES))
        return Decision(running)

    def _likeliest(
        self, contexts: list[int], uses: Sequence[Sequence[float]], each: float, gap: float, trust: float
    ) -> int:
        """The number of guesses for each sequence that gives most tokens per second; 0 if none pay.

        It is that of steps one after the other in which all sequences decode, guess, and verify the guesses of the step
        before. `uses` has the chances that guesses of a sequence are used. A pass takes `each` seconds, and the device
        waits for the host for a `gap`. `trust` is that of the account.
        """
        rows = len(contexts)
        attention = self._predictor.decodes(contexts)
        plain = self._ratio * (self._predictor.drafted(rows, []) + attention)
        best, found, gain = self._margin * rows / (plain + self._idle) / trust, 0, 0.0
        ratio = self._ratio * self._drafts_ratio
        for count in range(1, len(uses[0]) + 1):
            gain += sum(use[count - 1] for use in uses)
            tokens = rows + len(uses) * count
            seconds = ratio * (self._predictor.drafted(tokens, []) + attention) + each * (count + BESIDES) + gap
            if seconds > self._target:
                break
            rate = (rows + gain) / seconds
            if rate > best:
                best, found = rate, count
            elif found:
                break
        return found
