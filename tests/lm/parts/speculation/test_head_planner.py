"""A draft head guesses where that gives more tokens a second, and does not run where it does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from holdfast.core.cost import CostModel
from holdfast.core.types import Grammar, Request, SamplingParams
from holdfast.lm.parts.speculation.head_planner import HeadPart
from holdfast.lm.parts.speculation.values import HeadPlan, HeadResult
from holdfast.lm.scheduler.policies import LatencyTarget
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import GUESSED, StepPlan, StepResult
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
    """Runs plans on a clock of its own, with a head whose guesses are right with a chance.

    The host has a step's tokens before the head has run, and the head's result with the next step's.
    """

    def __init__(
        self,
        row: float,
        chance: Chance,
        *,
        head: bool = True,
        each: float = 3e-4,
        stalls: float = 0,
        policy: Any = None,
        **more: float,
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
            policy=policy,
        )
        self.now = self.free_at = 0.0
        self.plans: deque[tuple[StepPlan, float, float]] = deque()
        self.seen: list[StepPlan] = []
        self.answers: dict[str, list[int]] = {}
        self.guesses: dict[str, list[int]] = {}
        self.came: dict[str, list[float]] = {}
        """Times at which each answer got tokens."""
        self.found = HeadResult()
        """The head's result of the last step that has ended."""

    def run(self, *requests: Request) -> float:
        """Seconds until all requests have ended."""
        began = self.now
        for request in requests:
            self.scheduler.add(request)
            self.answers[request.id] = []
        while self.scheduler.has_work():
            while len(self.plans) < 2 and (plan := self.scheduler.schedule(self.now)) is not None:
                self.now += 2e-4
                seconds = self.model.linear(plan.num_tokens)
                ends = max(self.now, self.free_at) + seconds
                self.free_at = ends + self.head_seconds(plan)
                self.plans.append((plan, self.free_at - ends, ends))
                self.seen.append(plan)
                if len(self.seen) % 16 == 0:
                    check_scheduler(self.scheduler)
            plan, of_head, ends = self.plans.popleft()
            self.now = max(self.now, ends)
            for output in self.scheduler.update(plan, self.result(plan, of_head), self.now):
                self.answers[output.request_id] += output.tokens
                self.came.setdefault(output.request_id, []).append(self.now)
            self.stalls -= plan.part(HeadPlan).drafts > 0
        return self.now - began

    def head_seconds(self, plan: StepPlan) -> float:
        """Seconds of the head in a step."""
        drafts = plan.part(HeadPlan).drafts
        return drafts * self.each + (STALL if drafts and self.stalls > 0 else 0.0)

    def result(self, plan: StepPlan, of_head: float) -> StepResult:
        """The result of a step after which the head takes this many seconds."""
        drawn: list[int] = []
        sampled = [segment for segment in plan.segments if segment.sampling is not None]
        most = plan.samples or [1] * len(sampled)
        for segment, several in zip(sampled, most, strict=True):
            drawn += [token(segment.sequence_id, segment.stop - behind) for behind in reversed(range(several))]
        result, drafts = StepResult(plan.step, tuple(drawn), self.model.linear(plan.num_tokens)), plan.drafts
        if drafts is not None:
            names = [segment.sequence_id for segment in sampled]
            result = result.verified([self.known(*each) for each in zip(names, drafts, strict=True)])
        result = result.with_parts(*[self.found] if self.found.passes else [])
        asked, self.found = plan.part(HeadPlan), HeadResult()
        if not asked.drafts:
            return result
        for segment, several, count in zip(sampled, most, result.counts or [1] * len(sampled), strict=True):
            known = segment.stop - several + 1 + count
            name = segment.sequence_id
            self.guesses[name] = [self.guess(name, known + ahead) for ahead in range(asked.drafts)]
        drafted = tuple([tuple(self.guesses[segment.sequence_id]) for segment in sampled])
        self.found = HeadResult(drafted, asked.drafts, of_head, apart=True)
        return result

    def known(self, name: str, draft: Sequence[int]) -> tuple[int, ...]:
        """The tokens of a draft, which are all guesses of the head."""
        assert [*draft] == [GUESSED - place for place in range(len(draft))]
        return tuple(self.guesses.get(name, ())[: len(draft)])

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


def test_trials_find_a_head_that_became_fast_and_take_little_time_from_one_that_did_not() -> None:
    fast, slow = (Device(1e-5, lambda name, position: 0.8) for _ in range(2))
    for device in (fast, slow):
        device.each = 4e-3
        device.run(*create_requests(20, max_tokens=400))
        assert device.part is not None and device.guessed < 0.05 * len(device.seen)
    fast.each, guessed = 3e-4, slow.guessed
    began = len(fast.seen)
    fast.run(*create_requests(20, max_tokens=1900))
    assert sum(plan.part(HeadPlan).drafts > 0 for plan in fast.seen[began:]) > 0.5 * len(fast.seen[began:])
    plain = Device(1e-5, lambda name, position: 0.8, head=False).run(*create_requests(20, max_tokens=1900))
    assert slow.run(*create_requests(20, max_tokens=1900)) < 1.01 * plain
    assert slow.guessed > guessed, "it is tried now and then"


def test_a_stream_is_tried_soon_after_others_whose_guesses_all_failed() -> None:
    device = Device(1e-5, lambda name, position: 0.8 if int(name) == 4 else 0.0)
    *others, last = create_requests(*[20] * 5, max_tokens=100)
    device.run(*others)
    began = len(device.seen)
    device.run(last)
    first = next(at for at, plan in enumerate(device.seen[began:]) if plan.part(HeadPlan).drafts)
    assert first < 3
    assert len(device.seen) - began < 60, "100 tokens in fewer steps"


def test_one_long_wait_for_the_host_does_not_end_guessing() -> None:
    device = Device(1e-5, lambda name, position: 0.8)
    device.run(*create_requests(20, max_tokens=100))
    began, schedule = len(device.seen), device.scheduler.schedule

    def after_a_pause(now: float) -> StepPlan | None:
        if len(device.seen) == began + 10 and not device.plans:
            device.now += 1.9e-2
        return schedule(device.now)

    device.scheduler.schedule = after_a_pause  # type: ignore[method-assign]
    device.run(*create_requests(20, max_tokens=200))
    assert sum(plan.samples is not None for plan in device.seen[began + 15 :]) > 0.9 * len(device.seen[began + 15 :])


def test_no_step_with_guesses_ends_after_the_target() -> None:
    free = Device(1e-5, lambda name, position: 0.9)
    free.run(*create_requests(20, max_tokens=200))
    most = max(plan.part(HeadPlan).drafts for plan in free.seen)
    device = Device(1e-5, lambda name, position: 0.9, target=STEP + 2e-3)
    device.run(*create_requests(20, max_tokens=200))
    counts = [plan.part(HeadPlan).drafts for plan in device.seen]
    assert 0 < max(counts) < most, "fewer guesses fit"
    gap = device.part.account(1).gap if device.part else 0.0
    late = [plan for plan in device.seen[20:] if plan.num_tokens < 20
            and device.model.linear(plan.num_tokens) + device.head_seconds(plan) + gap > STEP + 2e-3]  # fmt: skip
    assert not late


def test_prompts_leave_time_for_the_head_that_still_runs() -> None:
    target = 1.2e-2
    policy = LatencyTarget(replace(cost(1e-5), deviation=0.0), target, tile=16, ceiling=1024)
    device = Device(1e-5, lambda name, position: 0.9, target=target, policy=policy)
    first, second = create_requests(20, 1400, max_tokens=150)
    device.scheduler.add(first)
    device.answers[first.id], device.answers[second.id] = [], []
    schedule = device.scheduler.schedule

    def with_a_prompt(now: float) -> StepPlan | None:
        if len(device.answers[first.id]) > 60 and second.id not in device.scheduler.entries:
            device.scheduler.add(second)
        return schedule(now)

    device.scheduler.schedule = with_a_prompt  # type: ignore[method-assign]
    device.run()
    waits = [later - came for came, later in pairwise(device.came[first.id])]
    full = [plan for plan in device.seen if plan.num_tokens > 300]
    assert len(full) > 1 and device.guessed > 20
    assert max(waits) < target + 3e-4, "the host takes 0.2 ms"


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
