"""Speculation: drafts are verified where that pays, steps are planned ahead where it does not."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.core.cost import CostModel
from holdfast.core.types import Identity, Request
from holdfast.lm.parts.speculation.drafting import GAP, MARGIN, PATIENCE, Account, falling
from holdfast.lm.parts.speculation.drafts import Drafter, Matcher, NgramDrafter, SuffixDrafter
from holdfast.lm.parts.speculation.planner import Row, SpeculationPart
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import StepPlan, StepResult
from tests.invariants import check_scheduler
from tests.scheduling import create_requests, create_scheduler

Source = Callable[[str, int], int]
"""The token of a sequence, by its name, at a position."""


def cost(row: float, step: float = 5e-3) -> CostModel:
    """Steps take so long for each row, and for all together."""
    return CostModel(
        model="m",
        device="d",
        linear_tokens=(1, 1024),
        linear_seconds=(step + row, step + 1024 * row),
        attention_queries=(1, 64),
        attention_contexts=(1, 64),
        attention_seconds=((0.0, 0.0), (0.0, 0.0)),
    )


def speculating(model: CostModel, drafter: Drafter | None = None, most: int = 7, **options: Any) -> Scheduler:
    rows = options.pop("rows", 64)
    target = options.pop("target", float("inf"))
    stages = options.get("stages", 1)
    part = SpeculationPart(drafter or SuffixDrafter(), model, most=most, rows=rows, target=target, stages=stages)
    return create_scheduler(budget=512, parts=[part], blocks=1100, max_sequences=256, max_model_len=2000, **options)


class Device:
    """Runs plans as long as a cost model says, on a clock of its own; `source` gives the tokens."""

    def __init__(self, scheduler: Scheduler, model: CostModel, source: Source, host: float = 2e-4) -> None:
        self.scheduler, self.model, self.source, self.host = scheduler, model, source, host
        self.now = self.free_at = 0.0
        self.plans: deque[tuple[StepPlan, float, float]] = deque()
        self.answers: dict[str, list[int]] = {}
        self.seen: list[StepPlan] = []
        self.ahead: list[bool] = []
        """For each plan, whether it was made while another one was in flight."""
        self.late: Request | None = None
        """Comes once drafts are verified."""

    def run(self, *requests: Request) -> float:
        """Seconds until all requests have ended."""
        began = self.now
        for request in requests:
            self.add(request)
        while self.scheduler.has_work():
            while len(self.plans) < 2 and (plan := self.scheduler.schedule(self.now)) is not None:
                self.now += self.host
                seconds = self.model.linear(plan.num_tokens)
                self.free_at = max(self.now, self.free_at) + seconds
                self.plans.append((plan, seconds, self.free_at))
                self.seen.append(plan)
                self.ahead.append(len(self.plans) > 1)
                if plan.samples and self.late is not None:
                    self.add(self.late)
                    self.late = None
                check_scheduler(self.scheduler)
            plan, seconds, ends = self.plans.popleft()
            self.now = max(self.now, ends)
            for output in self.scheduler.update(plan, self.result(plan, seconds), self.now):
                self.answers[output.request_id] += output.tokens
            check_scheduler(self.scheduler)
        return self.now - began

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.answers[request.id] = []

    def result(self, plan: StepPlan, seconds: float) -> StepResult:
        drawn: list[int] = []
        sampled = [segment for segment in plan.segments if segment.sampling is not None]
        for segment, most in zip(sampled, plan.samples or [1] * len(sampled), strict=True):
            drawn += [self.source(segment.sequence_id, segment.stop - behind) for behind in reversed(range(most))]
        result, drafts = StepResult(plan.step, tuple(drawn), seconds), plan.drafts
        return result if drafts is None else result.verified(drafts)


def looping(name: str, position: int) -> int:
    return position % 5 + 10 * int(name)


def random_text(name: str, position: int) -> int:
    return random.Random(f"{name} {position}").randrange(50_000)


def test_prompts_that_end_beside_drafts_do_not_let_a_step_draw_more_tokens_than_the_device_can() -> None:
    device = Device(speculating(cost(row=1e-6), rows=8), cost(row=1e-6), looping)
    requests = create_requests(*[8] * 7, max_tokens=100)
    for request in requests[:4]:
        device.add(request)
    late = deque(requests[4:])
    schedule = device.scheduler.schedule

    def with_a_late_one(now: float) -> StepPlan | None:
        if late and device.seen and device.seen[-1].samples:
            device.add(late.popleft())
        return schedule(now)

    device.scheduler.schedule = with_a_late_one  # type: ignore[method-assign]
    device.run()
    drawn = [
        sum(plan.samples) if plan.samples else sum(segment.sampling is not None for segment in plan.segments)
        for plan in device.seen
    ]
    assert max(drawn) == 8, "the drafts take what there is, and no prompt more"
    assert not late and {len(answer) for answer in device.answers.values()} == {100}


@pytest.mark.parametrize("source", [looping, random_text])
def test_stages_of_a_pipeline_stay_busy_with_drafts_and_without(source: Source) -> None:
    device = Device(speculating(cost(row=1e-6), stages=2), cost(row=1e-6), source)
    device.run(*create_requests(*[8] * 4, max_tokens=100))
    assert any(plan.samples for plan in device.seen) == (source is looping)
    later = device.seen[20:-20]
    after = [(set(ids_of(plan)), set(ids_of(following))) for plan, following in pairwise(later)]
    assert all(len(ids) == 2 for ids, _ in after), "each step takes its share"
    assert all(ids.isdisjoint(following) for ids, following in after), "no step needs tokens of the one before it"
    assert sum(device.ahead) > 0.9 * len(device.ahead)


def ids_of(plan: StepPlan) -> list[str]:
    """The names of the sequences in a plan."""
    return [segment.sequence_id for segment in plan.segments]


def pace(batch: int, source: Source, model: CostModel, drafter: Drafter | None = None, tokens: int = 200) -> float:
    """How many times as many tokens a second as without drafts."""
    requests = create_requests(*[8] * batch, max_tokens=tokens)
    plain = create_scheduler(policy=StallFree(512), blocks=1100, max_sequences=256, max_model_len=2000)
    before = Device(plain, model, source)
    seconds = before.run(*requests)
    device = Device(speculating(model, drafter), model, source)
    ratio = seconds / device.run(*requests)
    assert device.answers == before.answers
    assert [len(answer) for answer in device.answers.values()] == [tokens] * batch
    return ratio


@pytest.mark.parametrize("drafter", [NgramDrafter, SuffixDrafter])
def test_text_that_repeats_is_several_times_as_fast_at_batch_1(drafter: type[Drafter]) -> None:
    assert pace(1, looping, cost(row=1e-5), drafter()) > 4


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_random_text_loses_nothing(batch: int) -> None:
    assert pace(batch, random_text, cost(row=1e-5)) > 0.99


def test_where_a_row_costs_as_much_as_a_step_nothing_is_drafted() -> None:
    model = cost(row=5e-3, step=1e-6)
    assert pace(4, looping, model) > 0.99
    device = Device(speculating(model), model, looping)
    device.run(*create_requests(8, max_tokens=100))
    assert not any(plan.samples for plan in device.seen)


def test_drafts_are_longer_where_rows_cost_less() -> None:
    def longest(row: float) -> int:
        model = cost(row=row)
        device = Device(speculating(model, most=31), model, lambda name, at: looping(name, at) if at % 20 else at)
        device.run(*create_requests(8, max_tokens=400))
        return max(max(plan.samples or (1,)) for plan in device.seen)

    assert longest(1e-6) > longest(2e-3) > 1


def test_a_step_with_drafts_stays_within_the_target() -> None:
    model = cost(row=1e-3)
    device = Device(speculating(model, target=8e-3), model, looping)
    device.run(*create_requests(4, max_tokens=200))
    drafted = [plan for plan in device.seen if plan.samples]
    assert drafted and max(model.linear(plan.num_tokens) for plan in drafted) <= 8e-3


def test_a_step_samples_no_more_tokens_than_there_is_room_for() -> None:
    model = cost(row=1e-6)
    device = Device(speculating(model, rows=20), model, looping)
    device.run(*create_requests(*[4] * 6, max_tokens=200))
    assert max(sum(plan.samples) for plan in device.seen if plan.samples) == 20


def test_while_drafts_pay_a_step_waits_for_the_tokens_before_it() -> None:
    model = cost(row=1e-6)
    device = Device(speculating(model), model, looping)
    device.run(*create_requests(8, max_tokens=100))
    first = next(index for index, plan in enumerate(device.seen) if plan.samples)
    assert all(plan.samples for plan in device.seen[first:-1])
    assert [plan.segments[0].tokens[0] for plan in device.seen[first + 1 :]] == [
        looping("0", plan.segments[0].start) for plan in device.seen[first + 1 :]
    ], "the host tells the last token, since a row has drawn others behind it"


def test_few_decodes_without_drafts_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of them alone would take as long as one of all, while the others wait for it."""

    def partly(name: str, position: int) -> int:
        """Text of which about half repeats itself."""
        return random.Random(f"{name} {position}").choice([300, 300, 301])

    def sizes() -> tuple[set[int], float]:
        model = cost(row=6e-6)
        device = Device(speculating(model, rows=128), model, partly, host=5e-4)
        seconds = device.run(*create_requests(*[8] * 24, max_tokens=200))
        drafting = [plan.step for plan in device.seen if plan.samples]
        assert len(drafting) > 3
        decodes = [plan for plan in device.seen if drafting[0] <= plan.step < drafting[-1]]
        return {len(plan.segments) for plan in decodes if plan.step < drafting[0] + 50}, seconds

    waiting, seconds = sizes()
    assert min(waiting) >= 12
    monkeypatch.setattr(SpeculationPart, "_too_few", lambda *_: False)
    apart, longer = sizes()
    assert min(apart) < 12 and longer > seconds


def test_where_nothing_is_drafted_all_steps_are_planned_ahead_however_slow_the_host_is() -> None:
    model, requests = cost(row=1e-5, step=2e-3), create_requests(8, max_tokens=100)
    plain = create_scheduler(policy=StallFree(512), blocks=1100, max_sequences=256, max_model_len=2000)
    seconds = Device(plain, model, random_text, host=4e-3).run(*requests)
    assert Device(speculating(model), model, random_text, host=4e-3).run(*requests) == pytest.approx(seconds)


def test_drafting_ends_with_the_repetition_and_comes_back_with_it() -> None:
    model = cost(row=1e-5)

    def source(name: str, position: int) -> int:
        return random_text(name, position) if 150 <= position < 400 else looping(name, position)

    device = Device(speculating(model), model, source)
    device.run(*create_requests(8, max_tokens=600))
    drafted = [plan.segments[0].start for plan in device.seen if plan.samples]
    assert drafted[0] < 50 and not [at for at in drafted if 200 <= at < 400] and [at for at in drafted if at > 420]


def test_what_one_request_was_answered_speeds_up_the_next() -> None:
    model = cost(row=1e-5)
    device = Device(speculating(model), model, lambda name, at: random_text("", at))
    request, again = create_requests(8, 8, max_tokens=200)
    stranger = create_requests(8, 8, 8, max_tokens=200, identity=Identity(tenant="other"))[2]
    first, second, third = (device.run(each) for each in (request, again, stranger))
    assert device.answers["0"] == device.answers["1"] == device.answers["2"]
    assert second < first / 2 and third > 0.99 * first


def test_prompts_are_planned_beside_drafts() -> None:
    model = cost(row=1e-5)
    device = Device(speculating(model), model, looping)
    first, device.late = create_requests(8, 900, max_tokens=100)
    device.run(first)
    assert any(plan.samples and plan.num_tokens == 512 for plan in device.seen)
    assert device.answers["1"] == [looping("1", at) for at in range(900, 1000)]


def test_tokens_drafted_and_accepted_are_counted() -> None:
    model = cost(row=1e-5)
    scheduler = speculating(model)
    device = Device(scheduler, model, looping)
    device.run(*create_requests(8, max_tokens=100))
    stats = scheduler.stats()
    assert stats.tokens_drafted == sum(sum(plan.samples) - 1 for plan in device.seen if plan.samples)
    assert 0 < stats.drafts_accepted <= stats.tokens_drafted
    assert len(device.seen) + stats.drafts_accepted >= 100


def test_the_wait_for_the_host_is_measured_and_counts() -> None:
    model = cost(row=1e-5, step=1e-3)
    scheduler = speculating(model)
    Device(scheduler, model, looping, host=9.9e-4).run(*create_requests(8, max_tokens=400))
    part = scheduler.part(SpeculationPart)
    assert GAP < part.account(1).gap < 1e-3


def test_what_is_known_of_a_sequence_ends_with_it() -> None:
    model = cost(row=1e-5)
    scheduler = speculating(model)
    part = scheduler.part(SpeculationPart)
    Device(scheduler, model, looping).run(*create_requests(8, 8, max_tokens=30))
    assert not part._rows
    for request in create_requests(8, 8, max_tokens=30):
        scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert plan is not None and scheduler.schedule(0.0) is not None
    for name in ("0", "1"):
        scheduler.abort(name)
    assert not part._rows


def test_the_rate_of_hits_rises_and_falls_with_them() -> None:
    row = Row(Matcher(16))
    assert row.chance == 0
    row.count(10, missed=False)
    assert 0.85 < row.chance < 0.95
    row.count(1000, missed=False)
    assert row.chance < 1
    for _ in range(20):
        row.count(0, missed=True)
    assert row.chance == 0
    row.count(10, missed=False)
    for _ in range(20):
        row.searched(False)
    assert row.chance == 0


def test_results_below_the_promise_lower_the_trust_and_steps_without_drafts_restore_it() -> None:
    account = Account(GAP)
    assert account.trust == 1.0
    for _ in range(40):
        account.settle(1.0, 2.0)
    low = account.trust
    assert 0.5 <= low < 0.6
    for _ in range(PATIENCE):
        account.forget()
    assert low + 0.5 * (1 - low) < account.trust < 1.0
    for _ in range(40):
        account.settle(9.0, 1.0)
    assert account.trust == 1.0, "never more than the prediction"


CHANCES = st.tuples(st.floats(0.05, 0.95), st.integers(1, 6), st.sampled_from([0.3, 1.0]))


@given(
    st.lists(CHANCES, min_size=1, max_size=6), st.integers(0, 12), st.booleans(), st.sampled_from([1e-5, 1e-4, 1e-3])
)
@example([(0.5, 2, 1.0), (0.5, 2, 1.0), (0.5, 1, 1.0)], 4, True, 1e-5)
def test_the_guesses_that_are_verified_are_the_likeliest_ones_and_as_many_as_give_most_tokens_a_second(
    chances: list[tuple[float, int, float]], room: int, waited: bool, row: float
) -> None:
    model = cost(row=row)
    part = speculating(model).part(SpeculationPart)
    rows, gap = len(chances), part.account(len(chances)).gap
    given = [falling([chance] * count, match) for chance, count, match in chances]
    shares, rate = part._shares(given, [1] * rows, room, waited=waited)
    uses = sorted((m * c**place for c, count, m in chances for place in range(1, count + 1)), reverse=True)[:room]

    def seconds(tokens: int) -> float:
        return model.linear(tokens) + gap

    rates = [(rows + sum(uses[:count])) / seconds(rows + count) for count in range(1, len(uses) + 1)]
    without = rows / seconds(rows) if waited else MARGIN * rows / model.linear(rows)
    if max(rates, default=0.0) == pytest.approx(without):
        return  # rounding decides
    if max(rates, default=0.0) <= without:
        assert (shares, rate) == ([], 0.0)
        return
    assert rate == pytest.approx(max(rates))
    assert sum(shares) <= room and rates[sum(shares) - 1] == pytest.approx(max(rates))
    taken = [m * c**place for (c, _, m), share in zip(chances, shares, strict=False) for place in range(1, share + 1)]
    assert sorted(taken, reverse=True) == pytest.approx(uses[: len(taken)])
    assert all(share <= count for share, (_, count, _) in zip(shares, chances, strict=False))


def test_a_guess_is_made_for_a_token_that_a_sequence_may_still_get() -> None:
    scheduler = speculating(cost(row=1e-5))
    (request,) = create_requests(8, max_tokens=5)
    scheduler.add(request)
    part, entry = scheduler.part(SpeculationPart), scheduler.entries["0"]
    assert [part._room(entry, most) for most in (9, 3)] == [4, 3], "the last token is drawn, never guessed"
    assert [part._each(rows) for rows in (1, 32, 64, 200)] == [7, 2, 1, 1]
