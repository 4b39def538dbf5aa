"""ContractPart: accepts or refuses contracts at their arrival, protects those accepted, and counts the outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist

from holdfast.core.contract import TERMS, Contract, ContractRefused, Refusal
from holdfast.core.cost import CostModel
from holdfast.core.types import FinishReason, Request
from holdfast.lm.limits import RequestRefused
from holdfast.lm.parts.contracts.admission import ContractAdmission, tenant_of
from holdfast.lm.parts.contracts.forecast import Forecast, Prices
from holdfast.lm.parts.contracts.lateness import FIRST_SECONDS, Lateness
from holdfast.lm.parts.contracts.lengths import CERTAIN, AnswerLengths, Survival
from holdfast.lm.parts.contracts.options import ContractOptions
from holdfast.lm.parts.contracts.order import ContractOrder
from holdfast.lm.parts.contracts.policy import ContractPolicy, Progress
from holdfast.lm.parts.contracts.promises import Promise, Promises, answered
from holdfast.lm.parts.contracts.tenancy import Tenancy
from holdfast.lm.parts.planning import Planning
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.order import Order
from holdfast.lm.scheduler.part import Part, PartQueues
from holdfast.lm.types import StepPlan, StepResult

NEWS = 16
"""Most answers that end until open ones are forecast by what is known by then."""


class ContractPart(Part):
    """Promises times to requests that ask for them, if they can be kept, and keeps them.

    While no contract is open, plans and order are as without this part.
    """

    name = "contracts"

    def __init__(
        self,
        cost: CostModel,
        *,
        tile: int,
        ceiling: int,
        max_sequences: int,
        target: float | None = None,
        confidence: float = ContractOptions.contract_confidence,
        share: float = ContractOptions.contract_share,
        stages: int = 1,
        in_flight: int = 2,
    ) -> None:
        """`cost` is that of a step through all `stages` of a pipeline. Up to `in_flight` steps are planned at once.

        Steps have at most `ceiling` tokens and, while anybody streams, take at most `target` seconds. At most
        `max_sequences` run. `confidence` is that of `AnswerLengths`. One tenant's contracts hold a `share` of rows and
        blocks while others send requests, too.
        """
        self._promises = Promises()
        self._prices = Prices(cost.predictor(), tile=tile, ceiling=ceiling)
        limits = {} if target is None else {"target": target}
        lateness = Lateness(FIRST_SECONDS if cost.deviation else 0.0)
        self._progress = Progress(cost, lateness, stages)
        self._admission = ContractAdmission(
            Forecast(
                self._prices,
                max_sequences=max_sequences,
                in_flight=in_flight,
                margin=deviations(confidence),
                usual=lambda: self._progress.usual,
            ),
            self._promises,
            lateness,
            max_sequences=max_sequences,
            confidence=confidence,
            **limits,
        )
        self._lengths = AnswerLengths(confidence)
        self._ended = 0
        """Number of answers that have ended."""
        self._next_news = 1
        """Number of ended answers with which open ones are forecast by what is known then."""
        self._share = share
        self._tenancy = Tenancy()
        self._going: set[Entry] = set()
        """Sequences that have not ended and whose lengths are unknown."""
        self._queues: PartQueues
        self._now = 0.0
        """The latest time that any call gave."""

    def attach(self, queues: PartQueues) -> None:
        self._queues = queues

    def extend_policy(self, policy: Policy) -> Policy:
        return ContractPolicy(policy, self._promises, self._admission, self._prices, self._progress)

    def extend_order(self, order: Order) -> Order:
        return ContractOrder(order, self._note_given)

    def accept(self, entry: Entry) -> None:
        contract = entry.sequence.request.contract
        self._tenancy.note(tenant_of(entry), max(self._now, entry.sequence.request.arrival))
        if contract:
            self._promise(entry, contract)
        if not has_known_length(entry.sequence.request):
            self._going.add(entry)

    def _promise(self, entry: Entry, contract: Contract) -> None:
        """Promise a contract. Raises ContractRefused if it cannot be kept."""
        queues = self._queues
        now = self._now = max(self._now, entry.sequence.request.arrival)
        tokens = self._longest(entry)
        blocks = queues.pool.blocks_for(entry.sequence.request.answer_start + tokens)
        start, survival = entry.sequence.request.answer_start, self._survival(entry)
        arrival, most = entry.sequence.request.arrival, entry.limit - start
        promise = Promise(contract, arrival, tokens, blocks, most, start, survival)
        decision = self._admission.decide(
            entry,
            promise,
            queues.pool,
            headroom=queues.headroom,
            now=now,
            start=self._progress.free_at(now, queues.seconds_apart),
            factor=self._progress.factor,
            share=self._share if self._tenancy.is_shared(now) else 1.0,
        )
        if isinstance(decision, Refusal):
            self._promises.outcomes.refused += 1
            raise ContractRefused(decision)
        self._promises.add(entry, promise, decision.bound)

    def ended(self, entry: Entry) -> None:
        self._promises.ended(entry, self._now)
        self._going.discard(entry)
        sequence, request = entry.sequence, entry.sequence.request
        length = len(sequence.tokens) - request.answer_start
        if length > 0 and not has_known_length(request):
            cut = sequence.finish_reason is not FinishReason.STOP
            self._lengths.add(request.identity.tenant, request.answer_start, length, cut=cut)
            self._learn()

    def advance(self, now: float) -> None:
        self._now = now

    def planned(self, plan: StepPlan) -> None:
        self._promises.changed()
        self._progress.planned(plan, self._now, closely=len(self._promises) > 0)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        self._now = now
        self._progress.ended(plan, result, now)
        return ()

    def stats(self) -> Mapping[str, float]:
        return self._promises.outcomes.stats()

    def _note_given(self, entries: Iterable[Entry]) -> None:
        """Note that a step gave these sequences tokens. An answer that is longer than expected is expected to go on."""
        for entry, promise in self._promises.given(entries, self._now):
            tokens = self._longest(entry)
            promise.outgrow(tokens, self._queues.pool.blocks_for(entry.sequence.request.answer_start + tokens))

    def _learn(self) -> None:
        """Note that an answer has ended: from time to time, forecast the open ones by what is known now."""
        self._ended += 1
        if self._ended < self._next_news:
            return
        self._next_news += min(NEWS, 1 + self._ended // 4)
        requests = [(entry.sequence.request, answered(entry)) for entry in self._going]
        self._lengths.see((each.identity.tenant, each.answer_start, length) for each, length in requests if length > 0)
        for entry, promise in self._promises:
            promise.learn(self._survival(entry))
        self._promises.changed()

    def _survival(self, entry: Entry) -> Survival:
        """How long answers like that of a sequence are."""
        request = entry.sequence.request
        if has_known_length(request):
            return CERTAIN
        return self._lengths.survival(request.identity.tenant, request.answer_start)

    def _longest(self, entry: Entry) -> int:
        """Most tokens that the answer of a sequence is expected to have."""
        request = entry.sequence.request
        most = entry.limit - request.answer_start
        if has_known_length(request):
            return most
        return self._lengths.longest(request.identity.tenant, request.answer_start, most, above=answered(entry))


class NoContracts(Part):
    """Refuses contracts in an engine that cannot keep them."""

    name = "no contracts"

    def __init__(self, reason: str) -> None:
        """`reason` says why it cannot."""
        self._reason = reason

    def check(self, request: Request) -> None:
        if request.contract:
            reason = f"this engine takes no contracts: {self._reason}; leave out ttft_ms, tbt_ms and complete_ms"
            raise RequestRefused(reason, next(f"{term}_ms" for term in TERMS if getattr(request.contract, term)))


def has_known_length(request: Request) -> bool:
    """Whether only its maximum ends an answer."""
    return request.params.ignore_eos and not request.params.stop_token_ids


def deviations(confidence: float) -> float:
    """Number of standard deviations that a normal sum exceeds its mean by with no more than 1 - `confidence`."""
    return NormalDist().inv_cdf(confidence) if confidence < 1 else 0.0  # with 1, nothing is left to chance


def make_parts(planning: Planning) -> Sequence[Part]:
    """The part of an engine that can keep contracts, or one that refuses them."""
    config, shape = planning.config.part(ContractOptions), planning.shape
    if reason := why_not(planning):
        if config.contracts == "on" and planning.cost is not None:
            raise ValueError(f"contracts is on, and {reason}")
        return (NoContracts(reason),)
    return (
        ContractPart(
            planning.priced,
            tile=min(shape.tile, shape.max_step_tokens),
            ceiling=shape.max_step_tokens,
            max_sequences=config.most_sequences,
            target=config.tbt_seconds if planning.stages == 1 else None,  # a pipeline may need more for its least step
            confidence=config.contract_confidence,
            share=config.contract_share,
            stages=planning.stages,
            in_flight=planning.in_flight,
        ),
    )


def why_not(planning: Planning) -> str:
    """Why an engine can keep no contracts, in words; empty if it can."""
    config = planning.config.part(ContractOptions)
    if config.contracts == "off":
        return "contracts is off"
    if planning.on_rows:
        return "the model runs on padded rows"
    if config.scheduler != "stall-free":
        return f"the scheduler is {config.scheduler}, not stall-free"
    if planning.cost is None:
        return "it has no cost profile; start it with --contracts on"
    return ""
