"""A draft head guesses where that gives more tokens a second, and does not run where it does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

import pytest

from holdfast.core.cost import CostModel
from holdfast.core.types import Grammar, Request, SamplingParams
from holdfast.lm.parts.speculation.head_planner import HeadPart
from holdfast.lm.parts.speculation.values import HeadPlan, HeadResult
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import StepPlan, StepResult
from tests.invariants import check_scheduler
from tests.scheduling import create_requests, create_scheduler

Chance = Callable[[str, int], float]
"""The chance that the guess at a position of a sequence is right."""
STEP = 5e-3
"""Seconds of a step, besides those of its rows."""
STALL = 6e-2
"""Seconds for which a stalled head waits for its device."""


def cost(row: float) -> CostModel:
    return CostModel(
        model="m",
        device="d",
        linear_tokens=(1, 1024),
        linear_seconds=(STEP + row, STEP + 1024 * row),
        attention_queries=(1, 64),
        attention_contexts=(1, 64),
        attention_seconds=((0.0, 0.0), (0.0, 0.0)),
    )


def token(name: str, position: int) -> int:
    return (int(name) * 7919 + position * 104_729) % 50_000


class Device:
    """Runs plans on a clock of its own, with a head whose guesses are right with a chance."""

    def __init__(
        self, row: float, chance: Chance, *, head: bool = True, each: float = 3e-4, stalls: float = 0, **more: float
    ) -> None:
        """A step takes STEP, `row` seconds for each token, and `each` for a pass through the head.

        `stalls` is the number of first steps with guesses that stall.
        """
        self.model, self.chance, self.each, self.stalls = cost(row), chance, each, stalls
        self.part = HeadPart(self.model, most=7, rows=64, pass_share=0.05, **more) if head else None
        self.scheduler: Scheduler = create_scheduler(
            budget=512,
            parts=[self.part] if self.part else [],
            blocks=1100,
            max_sequences=256,
            max_model_len=2000,
        )
        self.now = self.free_at = 0.0
        self.plans: deque[tuple[StepPlan, float, float]] = deque()
        self.seen: list[StepPlan] = []
        self.answers: dict[str, list[int]] = {}

    def run(self, *requests: Request) -> float:
        """Seconds until all requests have ended."""
        began = self.now
        for request in requests:
            self.scheduler.add(request)
            self.answers[request.id] = []
        while self.scheduler.has_work():
            while len(self.plans) < 2 and (plan := self.scheduler.schedule(self.now)) is not None:
                self.now += 2e-4
                seconds = self.model.linear(plan.num_tokens) + self.head_seconds(plan)
                self.free_at = max(self.now, self.free_at) + seconds
                self.plans.append((plan, seconds, self.free_at))
                self.seen.append(plan)
                if len(self.seen) % 16 == 0:
                    check_scheduler(self.scheduler)
            plan, seconds, ends = self.plans.popleft()
            self.now = max(self.now, ends)
            for output in self.scheduler.update(plan, self.result(plan, seconds), self.now):
                self.answers[output.request_id] += output.tokens
            self.stalls -= plan.part(HeadPlan).drafts > 0
        return self.now - began

    def head_seconds(self, plan: StepPlan) -> float:
        """Seconds of the head in a step."""
        drafts = plan.part(HeadPlan).drafts
        return drafts * self.each + (STALL if drafts and self.stalls > 0 else 0.0)

    def result(self, plan: StepPlan, seconds: float) -> StepResult:
        drawn: list[int] = []
        sampled = [segment for segment in plan.segments if segment.sampling is not None]
        most = plan.samples or [1] * len(sampled)
        for segment, several in zip(sampled, most, strict=True):
            drawn += [token(segment.sequence_id, segment.stop - behind) for behind in reversed(range(several))]
        result, drafts = StepResult(plan.step, tuple(drawn), seconds), plan.drafts
        result = result if drafts is None else result.verified(drafts)
        asked = plan.part(HeadPlan)
        if not asked.keeps:
            return result
        guesses = []
        for segment, several, count in zip(sampled, most, result.counts or [1] * len(sampled), strict=True):
            known = segment.stop - several + 1 + count
            guesses.append(tuple(self.guess(segment.sequence_id, known + ahead) for ahead in range(asked.drafts)))
        return result.with_parts(HeadResult(tuple(guesses), asked.drafts, seconds - self.model.linear(plan.num_tokens)))

    def guess(self, name: str, position: int) -> int:
        mixed = (int(name) * 6151 + position + 1) * 2_654_435_761 % 2**32
        mixed = (mixed ^ mixed >> 15) * 2_246_822_519 % 2**32
        right = (mixed ^ mixed >> 13) / 2**32 < self.chance(name, position)
        return token(name, position) if right else 50_001

    @property
    def guessed(self) -> int:
        """Number of steps that asked the head for guesses."""
        return sum(plan.part(HeadPlan).drafts > 0 for plan in self.seen)


def speed(row: float, chance: float, requests: list[Request], **options: float) -> tuple[float, Device]:
    """How many times as fast the requests are with a head as without, and the device with the head."""
    device = Device(row, lambda name, position: chance, **options)  # type: ignore[arg-type]
    plain = Device(row, lambda name, position: chance, head=False)
    ratio = plain.run(*requests) / device.run(*requests)
    assert device.answers == plain.answers
    return ratio, device


@pytest.mark.parametrize(("streams", "chance", "least"), [(1, 0.8, 2.0), (4, 0.8, 1.8), (1, 0.5, 1.2)])
def test_a_head_that_is_often_right_makes_streams_faster(streams: int, chance: float, least: float) -> None:
    ratio, device = speed(1e-5, chance, create_requests(*[20] * streams, max_tokens=300))
    assert ratio > least
    assert device.part is not None and device.part.drafts_accepted > 100 * streams * chance


@pytest.mark.parametrize(("streams", "chance"), [(1, 0.0), (1, 0.4), (4, 0.1), (40, 0.4)])
@pytest.mark.parametrize("row", [1e-6, 3e-4])
def test_a_head_does_not_make_any_load_slower(streams: int, chance: float, row: float) -> None:
    ratio, _ = speed(row, chance, create_requests(*[20] * streams, max_tokens=600))
    assert ratio > 0.97


@pytest.mark.parametrize(("row", "each"), [(5e-3, 3e-4), (1e-5, 2e-2)], ids=["full steps", "slow head"])
def test_a_head_does_not_run_where_its_guesses_cost_more_than_they_give(row: float, each: float) -> None:
    _, device = speed(row, 0.9, create_requests(*[20] * 8, max_tokens=400), each=each)
    assert device.guessed < 0.03 * len(device.seen)


@pytest.mark.parametrize("streams", [1, 8])
def test_a_head_whose_first_passes_stalled_goes_on_at_once(streams: int) -> None:
    _, device = speed(1e-5, 0.65, create_requests(*[20] * streams, max_tokens=200), stalls=3)
    assert device.guessed > 0.8 * len(device.seen)


def test_the_number_of_guesses_follows_how_often_they_are_right() -> None:
    counts = []
    for chance in (0.45, 0.95):
        _, device = speed(1e-5, chance, create_requests(20, max_tokens=500))
        asked = [plan.part(HeadPlan).drafts for plan in device.seen[50:] if plan.part(HeadPlan).drafts]
        counts.append(sum(asked) / len(asked))
    assert counts[0] < 3.5 and counts[1] > 6


def test_a_sequence_whose_text_becomes_easy_is_tried_again() -> None:
    device = Device(1e-5, lambda name, position: 0.9 if position > 800 else 0.0)
    device.run(*create_requests(20, max_tokens=1900))
    assert device.part is not None and device.part.drafts_accepted > 500
    assert sum(plan.samples is not None for plan in device.seen[-100:]) > 90


@pytest.mark.parametrize("target", [0.05, inf])
def test_a_step_that_prompts_may_have_filled_to_the_target_does_not_guess(target: float) -> None:
    device = Device(1e-5, lambda name, position: 0.9, target=target)
    device.run(*create_requests(20, max_tokens=100))
    device.run(*create_requests(20, 700, max_tokens=60)[::-1])
    mixed = [plan for plan in device.seen if plan.num_tokens > 100]
    assert len(mixed) > 1 and all(plan.part(HeadPlan).keeps for plan in mixed)
    assert any(plan.part(HeadPlan).drafts for plan in mixed) == (target == inf)
    assert device.guessed > 20


def test_sequences_under_a_grammar_get_no_drafts() -> None:
    device = Device(1e-5, lambda name, position: 1.0)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, grammar=Grammar("regex", "a*"))
    device.run(Request("0", (1, 2, 3), params))
    assert device.part is not None and device.part.tokens_drafted == 0 and device.guessed == 0


def test_a_new_stream_and_an_abort_leave_the_guesses_of_others_right() -> None:
    device = Device(1e-5, lambda name, position: 1.0)
    first, second, third = create_requests(20, 30, 40, max_tokens=200)
    for request in (first, second):
        device.scheduler.add(request)
        device.answers[request.id] = []
    schedule, added = device.scheduler.schedule, []

    def with_others(now: float) -> StepPlan | None:
        if len(device.seen) == 15:
            device.scheduler.add(third)
            device.answers[third.id] = []
            device.scheduler.abort(second.id)
            added.append(now)
            device.seen.append(device.seen[-1])
        return schedule(now)

    device.scheduler.schedule = with_others  # type: ignore[method-assign]
    device.run()
    assert added and device.part is not None
    assert device.part.drafts_accepted == device.part.tokens_drafted > 200
    for request in (first, third):
        start = len(request.prompt)
        assert device.answers[request.id] == [token(request.id, start + at) for at in range(200)]
    assert not device.part._guesses and not device.part._guessing and not device.part._asked
