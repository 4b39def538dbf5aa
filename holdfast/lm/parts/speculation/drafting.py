"""Drafting: how many drafted tokens the decodes of a step verify, by the predictions of the cost model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import NamedTuple

from holdfast.core.cost import CostModel
from holdfast.lm.parts.speculation.verification import Verification
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import PartStep
from holdfast.lm.types import PartPlan, StepPlan, StepResult

GAIN = 0.2
"""Weight of one token in the running rate of hits, and of one search in the running rate of matches."""
MOST_RATE = 0.98
"""Upper limit of the rate of hits."""
MARGIN = 1.1
"""Drafts must give this many times the tokens per second of steps without them, because predictions err."""
GAP, GAP_OF_ROW = 7e-4, 3e-5
"""Seconds that the device waits for the host before a step that is not planned ahead, and seconds added by each decode.

Used until the wait was measured.
"""
PATIENCE = 512
"""Number of steps without drafts after which disappointment with drafts has faded by two thirds."""
PRIOR = 10
"""Number of steps for which predictions of a new batch size weigh as much as measurements."""
WEIGHT = 0.1
"""Weight of one step in the running means of gaps and of measured over predicted times."""
MOST_GAP, MOST_GAPS, MOST_RATIO, MOST_CYCLE = 0.02, 4.0, 4.0, 2.0
"""Upper limits of a single measurement: a gap in seconds, and over the usual gap before steps with drafts; a step's
time over the predicted one; and the tokens that a step with drafts should have given in its time, over those that it
gave."""


class Planned(NamedTuple):
    """The last step that was planned."""

    number: int
    at: float
    """Time of planning in seconds."""
    waited: bool
    """Whether nothing was in flight then."""
    rows: int = 0
    """Number of sequences that it samples for."""
    promise: float = 0.0
    """Predicted tokens per second, if the step waited so that tokens could be drafted; else 0."""


@dataclass(slots=True)
class Account:
    """Results of steps with drafts, for batches of one size."""

    gap: float
    """Seconds that the device waits for the host before a step with drafts."""
    given: float = 0.0
    """Number of tokens that these steps gave, weighted towards the latest."""
    promised: float = 0.0
    """Number of tokens that these steps were predicted to give in the time that they took."""

    @property
    def trust(self) -> float:
        """The measured share of the predicted tokens per second; at most 1."""
        return min(1.0, self.given / self.promised) if self.promised else 1.0

    def settle(self, given: float, promised: float) -> None:
        """Note the tokens that one step gave, and the predicted number."""
        if not self.promised:
            self.given = self.promised = PRIOR * promised
        self.given += given - self.given / PRIOR / 2
        self.promised += promised - self.promised / PRIOR / 2

    def forget(self, patience: int = PATIENCE) -> None:
        """Trust predictions a little more, because a step passed without drafts.

        Two thirds of the disappointment have faded after `patience` such steps.
        """
        self.given += (self.promised - self.given) / patience


class DraftingPart(Verification):
    """A part that lets decodes verify drafted tokens if that gives more tokens per second.

    A draft needs the last token of its sequence, so a step with drafts can be planned only when the results of all
    earlier steps are known. The device then waits for the host in between. So either all decodes wait for each other's
    tokens, or no draft is made and steps are planned ahead as usual. The better of the two is chosen for each step.

    The tokens per second of a step are its expected tokens over the predicted time of the step and of the wait.
    Expected tokens are the decodes, and for each guess the chance that it and all earlier ones are right. Subclasses
    make the guesses, and know their chances.
    """

    def __init__(self, cost: CostModel, *, most: int, rows: int, target: float = inf, stages: int = 1) -> None:
        """`most` guesses for each sequence; `rows` is the number of tokens that a step can sample in all.

        A step with drafts is predicted to end within the `target`, in seconds. With several `stages`, decodes wait
        only for tokens of their own last step, while steps of other decodes are on the other stages.
        """
        super().__init__()
        self.tokens_drafted = self.drafts_accepted = 0
        """Number of drafted tokens that steps have verified so far, and number of right ones among them."""
        self._most, self._sampled, self._target, self._stages = most, rows, target, stages
        self._predictor = cost.predictor()
        self._ratio = self._drafts_ratio = 1.0
        """Measured over predicted time of steps of decodes without drafts; the further ratio of those with drafts."""
        self._accounts: dict[int, Account] = {}
        """Account of each batch size, by the power of two that the number of decodes is below."""
        self._margin = MARGIN
        """Times the tokens per second of steps without drafts that those with drafts must give now."""
        self._idle = 0.0
        """Seconds that the device waits for the host before a step that was planned ahead."""
        self._promise = 0.0
        """Predicted tokens per second of the step that waits so that drafts can be made; 0: no step waits."""
        self._promised = 0.0
        """`_promise` as it stood when the step under construction began."""
        self._planned: dict[int, tuple[Sequence[Entry], dict[Entry, tuple[int, ...]], float]] = {}
        """For each step in flight: the sampling sequences, the drafts, and the predicted seconds if it only decodes."""
        self._last = Planned(-1, 0.0, waited=False)
        self._seconds, self._given = inf, 0
        """Seconds of the last step whose result is known, and the number of tokens that it gave."""
        self._apart = self._guessed = 0.0
        """Further seconds that the device spent on work of other parts after that step, and on guesses before it."""
        self._further = 0.0
        """Predicted seconds that the device spends on guesses in the step under construction."""

    def account(self, rows: int) -> Account:
        """The account of steps with drafts that have about this many decodes."""
        size = rows.bit_length()
        if size not in self._accounts:
            self._accounts[size] = Account(self.first_gap(rows))
        return self._accounts[size]

    def first_gap(self, rows: int) -> float:
        """Expected seconds that the device waits for the host before a step with drafts, before any were measured."""
        return GAP + GAP_OF_ROW * rows

    def begin(self, step: PartStep) -> None:
        super().begin(step)
        decoding = [entry for entry in step.running if entry.decoding]
        only = len(decoding) == len(step.running) and self._stages == 1
        if self._stages > 1:
            decoding = [entry for entry in decoding if entry.next_step <= step.number]
        in_flight = step.in_flight and any(unknown(entry) for entry in decoding)
        in_flight = in_flight and step.bound == inf  # a bounded step must not wait for the host
        # A stream whose drafts are verified in a step sits out the next one. If prompts filled that one to the target,
        # the stream would be late.
        sits_out = self._target < inf and not only and any(entry.next_step > step.number for entry in decoding)
        if in_flight and (self.pays(decoding) or sits_out or (only and self._too_few(decoding, step.number))):
            step.postpone()  # it is planned once their tokens are known
            return
        self._measure(step)
        self._promised, self._promise = self._promise, 0.0

    def decoded(self, step: PartStep) -> None:
        super().decoded(step)
        if self._drafts:
            step.limit_draws(self._sampled - len(step.sampling) - sum(map(len, self._drafts.values())))

    def finish(self, step: PartStep) -> PartPlan | None:
        if step.num_tokens:
            alone = step.num_tokens == len(step.sampling) + sum(map(len, self._drafts.values()))
            contexts = [entry.cache.planned for entry in step.sampling]
            seconds = self._predictor.drafted(step.num_tokens, contexts) if alone else 0.0
            self._planned[step.number] = step.sampling, self._drafts, seconds
            rows = len(step.sampling)
            promise = self._promised if alone else 0.0
            self._last = Planned(step.number, step.now, not step.in_flight, rows, promise)
        return super().finish(step)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        self._learn(plan, result)
        return super().apply(plan, result, now)

    def stats(self) -> Mapping[str, float]:
        return {"tokens_drafted": self.tokens_drafted, "drafts_accepted": self.drafts_accepted}

    def _learn(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from the result of a step how long steps take, and which guesses were right."""
        within, self._guessed = self.guessing(result)
        self._seconds, self._given = result.seconds, len(result.tokens)
        self._apart = result.seconds_apart - self._guessed
        seconds = result.seconds - within
        if plan.step not in self._planned:
            return
        sampling, drafts, predicted = self._planned.pop(plan.step)
        if predicted and seconds > 0:
            ratio = min(max(seconds / predicted, 1 / MOST_RATIO), MOST_RATIO)
            if drafts:
                self._drafts_ratio += WEIGHT * (ratio / self._ratio - self._drafts_ratio)
            else:
                self._ratio += WEIGHT * (ratio - self._ratio)
        if not drafts:
            return
        counts = result.counts if result.counts is not None else [1] * len(sampling)
        for entry, given in zip(sampling, counts, strict=True):
            guesses = drafts.get(entry, ())
            if guesses and given:
                self.tokens_drafted += len(guesses)
                self.drafts_accepted += given - 1
                self.verified(entry, given - 1, missed=given <= len(guesses))

    @abstractmethod
    def pays(self, decoding: Sequence[Entry]) -> bool:
        """Whether waiting for the tokens of these decodes is expected to pay. Sets `_promise`."""

    @abstractmethod
    def verified(self, entry: Entry, hits: int, *, missed: bool) -> None:
        """Learn that a sequence's first `hits` guesses were right, and whether the next one was wrong."""

    def guessing(self, result: StepResult) -> tuple[float, float]:
        """Seconds that the device spent on guesses: those of the step, and those that are apart from it."""
        return 0.0, 0.0

    def _measure(self, step: PartStep) -> None:
        """Learn from the time since the last step was planned, if this one follows it at once."""
        last, waited = self._last, not step.in_flight
        if last.number != step.number - 1 or last.waited is not waited or not step.running:
            return
        cycle = step.now - last.at - self._apart
        gap = cycle - self._seconds - self._guessed
        if gap >= MOST_GAP + self._seconds:
            return
        gap = min(max(gap, 0.0), MOST_GAP)
        if not waited:
            self._idle += WEIGHT * (gap - self._idle)
            return
        account = self.account(last.rows)
        account.gap += WEIGHT * (min(gap, MOST_GAPS * max(account.gap, GAP)) - account.gap)
        if last.promise:
            # A step that took many times what was predicted waited for something else than its drafts.
            most = MOST_CYCLE * max(self._given, last.rows)
            account.settle(self._given, min(last.promise * cycle, most))

    def _too_few(self, decoding: Sequence[Entry], number: int) -> bool:
        """Whether all decodes had better wait, because drafts in flight leave too few that can be planned now.

        A step of these few alone takes nearly as long as a step of all, which would be planned after it.
        """
        rows, free = len(decoding), sum(entry.next_step <= number for entry in decoding)
        if free == rows:  # there are no such drafts
            return False
        contexts = [entry.cache.planned + 1 for entry in decoding]
        whole = self._ratio * self._predictor.drafted(rows, contexts)
        alone = self._ratio * self._predictor.drafted(free, contexts[:free]) if free else 0.0
        return rows / (whole + self.account(rows).gap) > (rows + free) / (whole + alone + self._idle)

    def _shares(
        self,
        uses: Sequence[Sequence[float]],
        contexts: list[int],
        room: int,
        *,
        waited: bool = False,
        anyway: bool = False,
    ) -> tuple[list[int], float]:
        """How many guesses of each sequence to verify, and predicted tokens per second; none and 0 if it does not pay.

        `uses` has for each sequence the chances that its first guess is used, its second one, and so on, which fall.
        `contexts` are those of all decodes of the step. There are at most `room` guesses in all. The guesses with the
        highest chance of use come first. They must beat a step that was planned ahead; or, if the device has `waited`
        anyway, one that was not; or, if they are to be verified `anyway`, nothing but the target.
        """
        rows = len(contexts)
        attention = self._predictor.decodes(contexts)
        account, ratio = self.account(rows), self._ratio * self._drafts_ratio
        plain = self._ratio * (self._predictor.drafted(rows, []) + attention)
        best = (
            rows / (plain + self._further + account.gap)
            if waited
            else self._margin * rows / (plain + self._idle) / account.trust
        )
        best = 0.0 if anyway else best
        share, gain = 0, 0.0
        order = sorted(chain.from_iterable(uses), reverse=True)[: max(0, room)]
        every = 1 if len(order) <= 64 else 8
        for count, chance in enumerate(order, 1):
            gain += chance
            if count % every and count < len(order):
                continue
            seconds = ratio * (self._predictor.drafted(rows + count, []) + attention) + self._further
            if seconds + account.gap > self._target:
                break
            if (rate := (rows + gain) / (seconds + account.gap)) > best:
                best, share = rate, count
        if not share:
            return [], 0.0
        return shares_of(uses, order[share - 1], share), best

    def _each(self, rows: int) -> int:
        """Most guesses to look for in each of `rows` sequences: twice the number for which there is room in all."""
        return min(self._most, max(1, 2 * (self._sampled - rows) // max(1, rows)))

    def _room(self, entry: Entry, most: int) -> int:
        """Most guesses for a sequence: its last token is sampled, never guessed."""
        return max(0, min(most, entry.limit - len(entry.sequence.tokens) - 1))


def unknown(entry: Entry) -> bool:
    """Whether a token of a decoding sequence is still to come."""
    return entry.sequence.in_flight > 0


def shares_of(uses: Sequence[Sequence[float]], least: float, share: int) -> list[int]:
    """How many guesses of each sequence are among the `share` likeliest, of which the last has the chance `least`.

    `uses` is that of `DraftingPart._shares`. Guesses of earlier sequences go first among those with the chance `least`.
    """
    shares = [sum(use > least for use in each) for each in uses]
    left = share - sum(shares)
    for number, each in enumerate(uses):
        taken = min(left, each.count(least))
        shares[number] += taken
        left -= taken
    return shares


def falling(chances: Iterable[float], match: float = 1.0) -> list[float]:
    """The chances that guesses are used. `chances` are those that each is right if all before it are.

    `match` is the chance that there are any guesses.
    """
    return [match := match * chance for chance in chances]


def after(rate: float, hits: int, *, missed: bool, gain: float = GAIN) -> float:
    """A running rate of hits after this many, and after a miss if one followed them. `gain` is the weight of each."""
    rate = 1 - (1 - rate) * (1 - gain) ** hits
    return rate * (1 - gain) if missed else rate
