"""Random histories with requests and jobs of training, in memory that the cache lends and takes back.

As in `test_histories`, each request gets the tokens that it gets alone, nothing is lost or owned twice, and nobody
starves. Besides: free + cached + used + lent = total at every step; the trainer is given its slices in order and
with room for them, nobody writes to a block that it uses, and it reads nothing that inference wrote; jobs come, pause,
go on and are removed; and every job that is left has computed each of its micro-batches once.

    python -m tests.lm.parts.tuning.test_training_histories 10000   # least number of random steps
"""

import random
import sys
from collections import Counter
from functools import cache, cached_property
from math import inf

import pytest

from holdfast.lm.parts.tuning.deferral import Deferred
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.slices import TrainingSlices
from holdfast.lm.parts.tuning.values import TrainingPlan
from holdfast.lm.scheduler.builder import Policy
from tests.lm.scheduler.test_histories import COST, STEPS, History, check
from tests.long import then_long
from tests.training_plans import FakeTrainer, blocks_of, make_steps, make_tuner

NAMES = ("stall-free", "latency-target", "speculating")


class AnyTime(Policy):
    """Lends and trains at random in the steps of another policy, as much as it likes."""

    def __init__(self, inner, part, choose):
        self.inner, self.part, self.choose = inner, part, choose

    def plan(self, step):
        if self.choose.random() < 0.7 or not step.running:
            self.part.lend(step)
        self.inner.plan(step)
        if self.choose.random() < 0.7 or not (step.num_tokens or step.in_flight):
            self.part.train(self.choose.choice((0.0, 1.0, 3.0, 10.0)), at_least_one=not step.num_tokens)

    def observe(self, plan, result):
        self.inner.observe(plan, result)


class TrainingHistory(History):
    """A random run with jobs."""

    def __init__(self, seed, name="stall-free"):
        self.tuning = random.Random(seed)
        self.jobs = {}
        self.removed = set()
        super().__init__(seed, name)
        self.trainer = self.device.trainer = FakeTrainer(self.device.slots, self.block_size, self.slice_seconds)

    @cached_property
    def tuner(self):
        return make_tuner(COST, max_blocks=self.tuning.randint(1, self.blocks))

    @cached_property
    def part(self):
        return TuningPart(self.tuner)

    def more_parts(self):
        return [self.part]

    def policy(self, name):
        inner, choose = super().policy(name), self.tuning
        match choose.randrange(3):
            case 0:
                return Deferred(inner, self.part, choose.choice((0.0, 5.0, 50.0, inf)))
            case 1:
                target = choose.choice((0.5, 8.0, 40.0))
                return TrainingSlices(inner, self.part, COST, target, progress=choose.random() < 0.3)
            case _:
                return AnyTime(inner, self.part, choose)

    def slice_seconds(self, slice_):
        return self.tuning.uniform(0.1, 3.0) * (slice_.stop - slice_.first)

    def change_jobs(self):
        choose = self.tuning
        if choose.random() < 0.2 and len(self.jobs) < 4:
            self.add_job()
        known = [name for name in self.jobs if name in self.tuner._jobs]
        if known and choose.random() < 0.1:
            name = choose.choice(known)
            match choose.randrange(8):
                case 0 | 1 | 2:
                    self.tuner.pause(name)
                case 3:
                    self.tuner.remove(name)
                    self.removed.add(name)
                case _:
                    self.tuner.resume(name)

    def add_job(self):
        choose, name = self.tuning, f"job {len(self.trainer.trained)}"
        lengths = [choose.randint(1, 16) for _ in range(choose.randint(1, 5))]
        steps = make_steps(
            lengths, name=name, epochs=choose.choice((1, 2)), micro_batch=choose.choice((16, 24)),
            validation=[4, 9] if choose.random() < 0.3 else (),
        )  # fmt: skip
        blocks = blocks_of(choose.randint(0, 2), tokens_per_block=choose.choice((4, 16)))
        self.trainer.trained[name] = []
        try:
            self.tuner.add(name, steps, blocks, tenant=choose.choice(("", "other")))
        except ValueError as error:
            assert "may be lent" in str(error)
            return
        self.trainer.open(name, steps, blocks)
        self.jobs[name] = steps

    def end_jobs(self):
        while self.tuner.ended:
            name = self.tuner.ended.popleft()
            self.trainer.close(name)
            steps = self.jobs.pop(name)
            whole = [(step, index) for step in range(steps.count) for index in range(len(steps.micro_batches(step)))]
            done = self.trainer.trained[name]
            assert done == whole[: len(done)], "each micro-batch once, in order"
            assert done == whole or name in self.removed
            self.seen["jobs done"] += done == whole

    def step(self):
        if self.steps < STEPS:
            self.change_jobs()
        super().step()
        self.end_jobs()
        stats, pool = self.scheduler.stats(), self.scheduler._queues.pool
        assert (
            len(pool._free) + stats.blocks_cached + stats.blocks_used + stats.blocks_training == stats.blocks_total
        ), "the books"
        for plan in self.plans:
            assert plan.part(TrainingPlan).lent <= self.tuner.max_blocks
            self.seen["moved"] += len(plan.part(TrainingPlan).moves)
            self.seen["beside requests"] += bool(plan.segments and plan.part(TrainingPlan).slice)

    def training_left(self):
        """Each unit in a slice of its own, some times over, as memory that is wanted elsewhere makes it begin again."""
        for name in self.tuner._jobs:
            self.tuner.resume(name)
        units = sum(
            len(batch.units) + 3
            for steps in self.jobs.values()
            for step in range(steps.count)
            for batch in steps.micro_batches(step)
        )
        return 20 * units + 200


def play(seed, name="stall-free"):
    return play_history(TrainingHistory(seed, name))


def play_history(history):
    """Play a history to its end, and check what requests and jobs got."""
    while history.steps < STEPS:
        while history.random.random() < 0.3 and history.scheduler.stats().waiting < 12:
            history.add()
        if history.random.random() < 0.04:
            history.abort()
        history.step()
    history.drain()
    history.seen.update(history.trainer.seen)
    assert not history.jobs and history.scheduler.stats().blocks_training == 0
    check(history)
    return history


@cache
def seen_in(seed, name):
    """The events of a history in which every request and every job got the results that it gets alone."""
    return play(seed, name).seen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", then_long(3, range(15)))
def test_requests_and_jobs_of_a_random_history_both_get_what_they_get_alone(name, seed):
    seen_in(seed, name)


@pytest.mark.long
def test_random_histories_exercise_every_way_of_giving_memory_back():
    seen = sum((seen_in(seed, "stall-free") for seed in range(50)), Counter())
    assert seen["jobs done"] > 100
    assert min(seen[name] for name in ("run", "drop", "offload", "restore")) > 20 and seen["release"] > 3
    assert min(seen["kept"], seen["recomputed"], seen["beside requests"]) > 50
    assert seen["moved"] > 20


if __name__ == "__main__":
    wanted, steps, at = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, 0, 1000
    while steps < wanted:
        steps += play(at, NAMES[at % len(NAMES)]).steps
        at += 1
    print(f"{at - 1000} histories, {steps} steps: every request and every job got what it gets alone")
