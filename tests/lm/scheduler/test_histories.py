"""Long random histories against a sequential oracle: whatever happens, each request gets the tokens it gets alone.

The device checks at every segment that each earlier position of its sequence is there (the cache rule); the
history checks after every step that no block is lost or owned twice, and that the budget holds; and at the end that
everything is free and that no request starved. A quarter runs under a policy that calls its verbs in random order,
since plans must be right under any policy. One policy drafts tokens, right and wrong ones, and its results hold none,
one or several tokens for a segment. Half have a host tier, at times of a single block: state is swapped out and in,
dropped, recovered with holes in front of and between kept blocks; copies arrive late, and copied blocks must not change
meanwhile. Each history has at least 100 steps. Some run always, and hundreds with `make test-long`, which also checks
that they exercise what they are for; hypothesis draws others.
"""

import random
from collections import Counter, deque
from functools import cache
from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.cost import CostModel
from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.lm.choice import capacity_of, make_policy
from holdfast.lm.memory.retention import EVICTIONS
from holdfast.lm.parts.speculation.drafts import Drafter, Matcher
from holdfast.lm.parts.speculation.planner import SpeculationPart
from holdfast.lm.parts.speculation.verification import Verification, draftable
from holdfast.lm.parts.tuning.values import TrainingPlan
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.order import Deadline, Fair, Fcfs, Priority
from holdfast.lm.scheduler.pipeline_target import PipelineLatencyTarget
from holdfast.lm.scheduler.policies import LatencyTarget, StallFree
from tests.invariants import check_scheduler
from tests.long import then_long
from tests.scheduling import (
    EOS,
    VOCABULARY,
    FakeDevice,
    create_scheduler,
    model_state,
    run_alone,
    sampled,
    sampled_from,
)

MAX_MODEL_LEN = 48
STEPS = 100


OTHERS = (
    "request-level", "orca", "prefill-first", "chunked-only", "hybrid-only", "unified", "latency-target", "speculating",
    "where it pays",
)  # fmt: skip

COST = CostModel(
    model="m",
    device="d",
    linear_tokens=(1, 64),
    linear_seconds=(1.0, 10.0),
    attention_queries=(1, 64),
    attention_contexts=(1, 64),
    attention_seconds=((0.01, 0.1), (0.1, 2.0)),
)


class Speculating(Verification):
    """Lets decodes verify drafted tokens, whether or not that pays."""

    name = "speculating"

    def __init__(self, guess):
        super().__init__()
        self.guess = guess

    def draft(self, step):
        return {entry: self.guess(entry) for entry, _, _ in step.decodes if draftable(entry)}


class Noted(Matcher):
    """The tokens of a sequence."""

    def __init__(self):
        super().__init__(1)
        self.tokens = []

    def extend(self, tokens):
        self.tokens += tokens
        self.length += len(tokens)


class Seer(Drafter):
    """Mostly guesses what the model is going to say, and at times nothing."""

    def __init__(self, choose):
        self.choose = choose

    def begin(self, limit):
        return Noted()

    def propose(self, own, identity, most):
        guesses = []
        while len(guesses) < most and self.choose.random() < 0.8:
            token = sampled_from(model_state((*own.tokens, *guesses))[-1])
            guesses.append(token if self.choose.random() < 0.9 else token + 1)
        return tuple(guesses)


class AnyOrder(Policy):
    """A policy that calls its verbs in a random order at each step."""

    def __init__(self, budget, choose):
        self.budget = budget
        self.choose = choose

    def plan(self, step):
        step.budget = self.budget
        for verb in self.choose.sample((step.decode, step.prefill, step.admit), 3):
            verb()


class History:
    """One random run: its settings, its requests, what came out of it."""

    def __init__(self, seed, name="stall-free", order=None, stages=1):
        self.random = choose = random.Random(seed)
        self.block_size = choose.choice((1, 2, 4, 16))
        least = -(-(MAX_MODEL_LEN - 1) // self.block_size)
        self.blocks = choose.choice((least, least + 1, 2 * least, 6 * least))
        self.budget = choose.choice((1, 2, 3, 7, 16, 64))
        self.steps_in_flight = choose.randint(1, 3) + stages - 1
        self.max_sequences = choose.choice((1, 2, 4, 12))
        self.host_blocks = choose.choice((0, 0, 0, 1, least // 2 + 1, 4 * least))
        self.growth = random.Random(seed)
        self.host_ready = self.growth.choice((0, self.host_blocks // 2, self.host_blocks))
        self.any_order = name == "stall-free" and choose.random() < 0.25
        self.never_preempts = name in ("request-level", "orca")
        self.order = order or Priority(aging=choose.choice((0.5, 20.0, 1e6)))
        self.stages = stages
        self.parts = []
        policy = self.policy(name)
        self.scheduler = create_scheduler(
            stages=stages,
            policy=policy,
            parts=[*self.parts, *self.more_parts()],
            order=self.order,
            blocks=self.blocks,
            block_size=self.block_size,
            max_sequences=self.max_sequences,
            max_model_len=MAX_MODEL_LEN,
            headroom=choose.choice((0.0, 0.1)),
            sharing=choose.random() < 0.8,
            eos=(EOS,),
            host_blocks=self.host_blocks,
            host_ready=self.host_ready,
            eviction=choose.choice(("retention",) * 4 + tuple(EVICTIONS)),
            chunk_blocks=choose.choice((1, 2)),
            low_water=choose.choice((0.05, 0.25, 0.6)),
            by_layer=self.growth.random() < 0.3,
            **self.more_settings(),
        )
        self.talkative = choose.choice((0.3, 0.8))
        self.device = FakeDevice(self.blocks, self.block_size, self.host_blocks, choose)
        self.prefixes = [self.some_tokens(choose.randint(1, 40)) for _ in range(3)]
        self.plans = deque()
        self.requests = {}
        self.outputs = {}
        self.finished = {}
        self.aborted = set()
        self.running = set()
        """Sequences that were planned and not preempted since, whether or not they have ended."""
        self.judged = set()
        """Sequences whose preemption was judged and that no plan has reported yet."""
        self.steps = 0
        self.seen = Counter()

    def check_books(self):
        check_scheduler(self.scheduler)

    def more_settings(self):
        """Settings of the scheduler, for histories with more in them."""
        return {}

    def more_parts(self):
        """Parts of the scheduler, for histories with more in them."""
        return []

    def policy(self, name):
        """The policy of that name; `budget` becomes the most tokens of its steps."""
        if self.any_order:
            return AnyOrder(self.budget, self.random)
        if name == "speculating":
            self.parts = [Speculating(self.draft)]
            return StallFree(self.budget)
        if name == "where it pays":
            policy = self.policy(self.random.choice(("stall-free", "latency-target")))
            rows = self.random.choice((self.max_sequences, 64))
            self.parts = [SpeculationPart(Seer(self.random), COST, most=5, rows=rows)]
            return policy
        if name == "latency-target":
            tile, target = self.random.choice((1, 4, 16)), self.random.choice((0.5, 3.0, 8.0))
            self.budget = max(self.budget, tile)
            if self.stages > 1:
                return PipelineLatencyTarget(COST, target, tile=tile, ceiling=self.budget, stages=self.stages)
            return LatencyTarget(COST, target, tile=tile, ceiling=self.budget)
        threshold, self.budget = (
            self.budget,
            capacity_of(
                name,
                token_budget=self.budget,
                max_model_len=MAX_MODEL_LEN,
                max_sequences=self.max_sequences,
                limit=self.random.choice((1, self.blocks * self.block_size)),
            ),
        )
        return make_policy(name, token_budget=threshold, capacity=self.budget)

    def draft(self, entry):
        """Up to four guesses at the tokens after the last one of a sequence; the first few are right."""
        request, choose = self.requests[entry.id], self.random
        expected, _ = run_alone(request, max_model_len=MAX_MODEL_LEN)
        at = entry.sequence.length - 1 - len(request.prompt)
        guesses = list(expected[at:][: choose.randint(0, 4)])
        if guesses and choose.random() < 0.4:
            guesses[choose.randrange(len(guesses))] += 1
        return guesses

    def some_tokens(self, count):
        return tuple(self.random.randrange(1, VOCABULARY) for _ in range(count))

    def limit(self, name):
        request = self.requests[name]
        return min(len(request.prompt) + request.params.max_tokens, MAX_MODEL_LEN)

    def rank(self, name):
        return self.order.rank(self.requests[name], int(name))

    def add(self):
        choose = self.random
        prefix = choose.choice(self.prefixes) if choose.random() < 0.7 else ()
        prompt = (prefix[: choose.choice((len(prefix), choose.randint(0, len(prefix))))] + self.some_tokens(2))[
            : MAX_MODEL_LEN - 1
        ]
        if self.outputs and choose.random() < self.talkative:  # the next turn of a conversation
            earlier = self.requests[choose.choice(list(self.outputs)[-8:])]
            prompt = (earlier.prompt + tuple(self.outputs[earlier.id]) + self.some_tokens(1))[: MAX_MODEL_LEN - 1]
        request = Request(
            id=str(len(self.requests)),
            prompt=prompt,
            params=SamplingParams(
                max_tokens=choose.choice((1, 2, 5, 40)),
                stop_token_ids=choose.choice(((), (3,))),
                ignore_eos=choose.random() < 0.3,
            ),
            priority=choose.choice((0, 0, 0, 1, 2)),
            identity=Identity(tenant=choose.choice(("", "", "other"))),
            arrival=float(self.steps),
            deadline=choose.choice((None, 0.5, 30.0)),
        )
        self.requests[request.id] = request
        self.device.expect(request)
        self.scheduler.add(request)

    def abort(self):
        alive = [name for name in self.requests if name not in self.finished and name not in self.aborted]
        if alive:
            name = self.random.choice(alive)
            self.aborted.add(name)
            self.scheduler.abort(name)
            self.check_books()

    def step(self):
        """Plan some steps ahead, never more than may be in flight; collect the oldest."""
        if self.host_ready < self.host_blocks and self.growth.random() < 0.2:
            self.host_ready += 1
            self.scheduler.pool.host.resize(self.host_ready, self.host_blocks)
        depth = self.random.randint(1, self.steps_in_flight)
        while len(self.plans) < depth:
            plan = self.scheduler.schedule(float(self.steps))
            self.check_books()
            if plan is None:
                late = [name for name in self.scheduler.queues.unreported if name not in self.judged]
                self.judge(late)  # the next plan reports them
                self.judged.update(late)
                break
            assert plan.num_tokens <= self.budget
            trains = plan.part(TrainingPlan).slice or plan.part(TrainingPlan).moves
            assert plan.segments or trains or not self.plans, "only a step that nothing waits behind waits for copies"
            self.seen["waits for copies"] += not plan.segments and not trains
            self.seen["swapped in"] += len(plan.copies.swap_in)
            self.seen["swapped out"] += len(plan.copies.swap_out)
            ranges = Counter(segment.sequence_id for segment in plan.segments)
            self.seen["holes"] += sum(count > 1 for count in ranges.values())
            assert all(segment.length == len(segment.tokens) for segment in plan.segments)
            within = [earlier for earlier in self.plans if earlier.step > plan.step - self.stages]
            under_way = {segment.sequence_id for earlier in within for segment in sampled(earlier)}
            assert not under_way & {*ranges, *plan.preempted}, "its token is still in the pipeline"
            unknown = {segment.sequence_id for earlier in self.plans for segment in sampled(earlier)}
            self.seen["before its token is known"] += len(unknown & ranges.keys())
            uncertain = {
                segment.sequence_id
                for earlier in self.plans
                for segment, most in zip(sampled(earlier), earlier.samples or repeat(1), strict=False)
                if most > 1
            }
            assert not uncertain & {*ranges, *plan.preempted}, "it sits out until its outcome is known"
            for segment in plan.segments:
                assert segment.sequence_id not in self.aborted
                assert segment.stop < self.limit(segment.sequence_id), "what is computed can still be of use"
            assert not (plan.preempted and self.never_preempts)
            self.seen["suspended"] += len(plan.preempted) * bool(self.host_blocks)
            self.running |= ranges.keys()
            self.judge([name for name in plan.preempted if name not in self.judged])
            self.judged.clear()
            self.device.submit(plan)
            self.plans.append(plan)
            self.steps += 1
        if not self.plans:
            self.nothing_runs()
            return
        plan = self.plans.popleft()
        for output in self.scheduler.update(plan, self.device.collect(), float(self.steps)):
            assert output.request_id not in self.finished and output.request_id not in self.aborted
            self.outputs.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason
            assert output.tokens
            self.seen["several"] += len(output.tokens) > 1
            self.seen["cached"] += output.cached_tokens > 0
            self.seen["preempted"] += output.preemptions > 0
        self.check_books()

    def nothing_runs(self):
        """Nothing is in flight and nothing is planned."""
        assert not self.scheduler.has_work(), "work is left, nothing is in flight and nothing is planned"

    def judge(self, preempted):
        """Check that each victim made room for a sequence of earlier rank: a running one, or one of a higher class.

        That sequence need not be in the plan: idle state may have to be copied before its blocks can be taken.
        """
        self.running.difference_update(preempted)
        alive = self.requests.keys() - self.finished.keys() - self.aborted - set(preempted)
        for name in preempted:
            priority = self.requests[name].priority
            ahead = [other for other in alive if other in self.running or self.requests[other].priority < priority]
            assert any(self.rank(other) < self.rank(name) for other in ahead), "it makes room for nobody"

    def training_left(self):
        """Number of steps that training may take in addition."""
        return 0

    def drain(self):
        """Run to the end, within the bound that rules starvation out.

        A step that samples brings one of the G tokens still to come, or is one of those planned before an end was
        known. A step that samples nothing prefills, no block is taken from anyone, and the first in rank ends its
        prefill after at most max_model_len / budget such steps (any sequence does, if the policy has no order). With
        a host tier each of these may wait for copies, of every block once, and for each of them to arrive. Drafted
        tokens that gave none cost a step each.
        """
        ended = self.finished.keys() | self.aborted
        alive = [self.requests[name] for name in self.requests if name not in ended]
        to_come = sum(request.params.max_tokens for request in alive)
        prefills = self.max_sequences if self.any_order else 1
        stale = self.steps_in_flight * (len(alive) + 1)
        copies = 2 * self.blocks if self.host_blocks else 0
        each = 1 + copies + prefills * -(-MAX_MODEL_LEN // self.budget)
        bound, refused = self.steps + (to_come + stale) * each + self.training_left(), self.device.refused
        while self.scheduler.has_work() or self.plans:
            self.step()
            assert self.steps <= bound + (self.device.refused - refused) * each, "a request starves"


def play(seed, name="stall-free", order=None, stages=1):
    history = History(seed, name, order, stages)
    while history.steps < STEPS:
        while history.random.random() < 0.4 and history.scheduler.stats().waiting < 12:
            history.add()
        if history.random.random() < 0.04:
            history.abort()
        history.step()
    history.drain()
    history.seen["recovered"] = history.scheduler.stats().tokens_recovered
    return history


@cache
def seen_in(seed, name, stages=1):
    """The events of a history in which every request got the tokens that it gets alone."""
    history = play(seed, name, stages=stages)
    check(history)
    return history.seen + Counter(refused=history.device.refused)


@pytest.mark.parametrize(
    ("name", "seed"),
    then_long(10, [("stall-free", seed) for seed in range(100)])
    + then_long(len(OTHERS), [(name, seed) for seed in range(10) for name in OTHERS]),
)
def test_every_request_of_a_random_history_gets_the_tokens_it_gets_alone(name, seed):
    seen_in(seed, name)


@pytest.mark.parametrize("seed", then_long(1, range(2)))
@pytest.mark.parametrize("order", [Fcfs, Deadline, Fair])
@pytest.mark.parametrize("name", ["stall-free", *OTHERS])
def test_every_request_gets_the_tokens_it_gets_alone_under_every_order(name, order, seed):
    check(play(seed, name, order()))


@pytest.mark.parametrize("name", ("stall-free", *OTHERS))
@pytest.mark.parametrize("stages", (2, 3, 4))
@pytest.mark.parametrize("seed", then_long(2, range(4)))
def test_every_request_gets_the_tokens_it_gets_alone_in_a_pipeline(name, stages, seed):
    seen_in(seed, name, stages)


@given(
    seed=st.integers(0, 1 << 32),
    name=st.sampled_from(("stall-free", "stall-free", *OTHERS)),
    order=st.sampled_from((None, Fcfs, Deadline, Fair)),
    stages=st.integers(1, 4),
)
def test_every_request_gets_the_tokens_it_gets_alone_under_any_policy_and_order(seed, name, order, stages):
    check(play(seed, name, order and order(), stages))


def check(history):
    assert history.steps >= STEPS
    assert len(history.finished) + len(history.aborted) == len(history.requests)
    for name, reason in history.finished.items():
        tokens, expected = run_alone(history.requests[name], eos=(EOS,), max_model_len=MAX_MODEL_LEN)
        assert (tuple(history.outputs[name]), reason) == (tokens, expected)
    for name in history.aborted & history.outputs.keys():
        tokens, _ = run_alone(history.requests[name], eos=(EOS,), max_model_len=MAX_MODEL_LEN)
        assert tuple(history.outputs[name]) == tokens[: len(history.outputs[name])]
    stats = history.scheduler.stats()
    assert (stats.waiting, stats.running, stats.blocks_used) == (0, 0, 0)


@pytest.mark.long
def test_random_histories_exercise_caching_preemption_swapping_and_recovery():
    seen = Counter()
    for seed in range(30):
        seen += seen_in(seed, "stall-free")
    assert seen["cached"] > 100
    assert seen["preempted"] > 100
    assert seen["swapped out"] > 500
    assert seen["swapped in"] > 50
    assert seen["suspended"] > 7
    assert seen["holes"] > 15
    assert seen["recovered"] > 50
    assert seen["waits for copies"] > 5


@pytest.mark.long
@pytest.mark.parametrize("stages", (2, 3, 4))
def test_random_histories_in_a_pipeline_exercise_tokens_that_the_host_does_not_know_preemption_and_swapping(stages):
    seen = Counter()
    for seed in range(20):
        seen += seen_in(seed, "stall-free", stages)
    assert seen["before its token is known"] > 100
    assert seen["preempted"] > 50
    assert seen["swapped out"] > 250
    assert seen["swapped in"] > 25
    assert seen["suspended"] > 2


@pytest.mark.long
@pytest.mark.parametrize(("name", "often"), [("speculating", 100), ("where it pays", 25)])
def test_random_histories_exercise_drafts_that_give_no_and_several_tokens(name, often):
    seen = Counter()
    for seed in range(10):
        seen += seen_in(seed, name)
    assert seen["several"] > often
    assert seen["refused"] > often
    assert seen["preempted"] > 10
    assert seen["swapped in"] > 10
