"""Random histories with driven jobs: calls come at any time, next to requests and to jobs over files.

As in `test_training_histories`, requests get what they get alone, and each micro-batch of each call is computed once,
in order. Besides, a job that waits for its owner's next call gives its memory up if anybody needs it.
"""

from collections import Counter
from functools import cache

import pytest

from holdfast.core.training_cost import PLAIN
from holdfast.training.calls import Call, CallSteps
from holdfast.training.jobs import Hyperparameters, TrainingJob
from tests.lm.parts.tuning.test_training_histories import TrainingHistory, play_history
from tests.long import then_long
from tests.training_plans import LAYERS, FakeTrainer, blocks_of


def driven_steps(name="job", micro_batch=24):
    chosen = Hyperparameters(epochs=1, batch_size=1, micro_batch=micro_batch)
    job = TrainingJob(id=name, hyperparameters=chosen, base_model="base", base_digest="b", driven=True)
    return CallSteps(job, (PLAIN,) * LAYERS)


class PassingTrainer(FakeTrainer):
    """A trainer without numbers that passes over calls with nothing to compute."""

    def run(self, slice_, lent):
        report = super().run(slice_, lent)
        self.pass_over(slice_.job)
        return report

    def pass_over(self, name):
        job = self.jobs[name]
        while job["step"] < job["steps"].count and not job["steps"].micro_batches(job["step"]):
            job["step"] += 1


class DrivenHistory(TrainingHistory):
    """A random run with jobs of both kinds."""

    def __init__(self, seed, name="stall-free"):
        super().__init__(seed, name)
        self.trainer = self.device.trainer = PassingTrainer(self.device.slots, self.block_size, self.slice_seconds)
        self.driven = {}

    def change_jobs(self):
        super().change_jobs()
        choose = self.tuning
        if choose.random() < 0.05 and len(self.driven) < 3:
            self.add_driven()
        for name, steps in self.driven.items():
            if name not in self.removed and choose.random() < 0.08:
                self.add_call(name, steps)
            self.seen["rests"] += self.tuner.rests

    def add_driven(self):
        choose, name = self.tuning, f"driven {len(self.trainer.trained)}"
        steps = driven_steps(name, choose.choice((16, 24)))
        blocks = blocks_of(choose.randint(0, 2), tokens_per_block=choose.choice((4, 16)))
        self.trainer.trained[name] = []
        try:
            self.tuner.add(name, steps, blocks, tenant=choose.choice(("", "other")))
        except ValueError as error:
            assert "may be lent" in str(error)
            return
        self.trainer.open(name, steps, blocks)
        self.jobs[name] = self.driven[name] = steps

    def add_call(self, name, steps):
        choose = self.tuning
        kind = choose.choice(("forward", "forward_backward", "forward_backward", "optimize", "save", "load"))
        place = "d" if kind in ("save", "load") else ""
        call = Call(number=steps.count, kind=kind, directory=place)
        lengths = [choose.randint(1, 16) for _ in range(choose.randint(1, 4))] if call.scores else ()
        if self.tuner.refusal(name, steps.outline(call, lengths)):
            steps.refuse(call.number)
            self.seen["refused"] += 1
        else:
            steps.add(call, lengths)
        self.trainer.pass_over(name)
        self.tuner.grow(name)

    def drain(self):
        super().drain()
        for name, steps in self.driven.items():
            if name in self.removed:
                continue
            whole = [(step, at) for step in range(steps.count) for at in range(len(steps.micro_batches(step)))]
            assert self.trainer.trained[name] == whole and self.tuner.status(name) == "queued"
            self.seen["calls done"] += len(whole)
            self.removed.add(name)
            self.tuner.remove(name)
        super().drain()
        self.end_jobs()


@cache
def seen_in(seed, name):
    """The events of a history in which every request and every call got the results that it gets alone."""
    return play_history(DrivenHistory(seed, name)).seen


@pytest.mark.parametrize("name", ["stall-free", "latency-target"])
@pytest.mark.parametrize("seed", then_long(3, range(15)))
def test_requests_and_calls_of_a_random_history_both_get_what_they_get_alone(name, seed):
    seen_in(seed, name)


@pytest.mark.long
def test_random_histories_of_calls_exercise_resting_refusing_and_leaving():
    seen = sum((seen_in(seed, "stall-free") for seed in range(15)), Counter())
    assert seen["calls done"] > 100 and seen["rests"] > 20 and seen["refused"] > 3
    assert min(seen[name] for name in ("offload", "restore")) > 100
