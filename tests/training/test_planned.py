"""The trainer under the scheduler: a job computes the same bits, however requests interrupt it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.lm.models.decoder import Decoder
from holdfast.lm.parts.tuning.deferral import Deferred
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.slices import TrainingSlices
from holdfast.lm.parts.tuning.values import TrainingPlan
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.policies import StallFree
from tests.scheduling import answer, create_scheduler
from tests.training_plans import a_request, cost_model, make_tuner
from tests.tuning import act, advance, arena_for, drawn_examples, finish, native, new_job, trainer_for

SEED = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return native("llama", tmp_path_factory.mktemp("base"))[1]


@pytest.mark.parametrize("name", ["deferred", "slices", "scarce"])
def test_jobs_next_to_requests_have_the_losses_and_parameters_of_jobs_alone(
    model: Decoder, name: str, tmp_path: Path
) -> None:
    validation = drawn_examples(3, seed=9)
    alone = trainer_for(model)
    expected = {}
    for job in ("one", "two"):
        alone.open(new_job(tmp_path / "alone", name=job, validation=validation))
        act(alone, job, "restore")
        expected[job] = finish(alone, job)
        act(alone, job, "offload")

    choose = random.Random(SEED)
    sizing = trainer_for(model)
    sizing.open(new_job(tmp_path / "sizing"))
    tokens = sizing.steps("job").job.hyperparameters.micro_batch
    most = sizing.blocks("job", tokens, keep=True)
    blocks = most + (0 if name == "scarce" else 20)
    trainer = trainer_for(model, arena=arena_for(model, blocks))
    cost = cost_model(slope=0.0001)
    tuner = make_tuner(cost, max_blocks=most)
    part = TuningPart(tuner)
    policy: Policy = Deferred(StallFree(64), part, choose.choice((0.0, 0.05)))
    if name != "deferred":
        policy = TrainingSlices(StallFree(64), part, cost, 0.025)
    scheduler = create_scheduler(
        policy=policy, parts=[part], blocks=blocks, block_size=1, max_sequences=4, headroom=0.05, sharing=False
    )
    for job in ("one", "two"):
        steps = trainer.open(new_job(tmp_path / "beside", name=job, validation=validation))
        tuner.add(job, steps, lambda count, keep, job=job: trainer.blocks(job, count, keep=keep))
    losses: dict[str, list[float]] = {"one": [], "two": []}
    actions, now, requests = Counter[str](), 0.0, 0
    while scheduler.has_work():
        if choose.random() < 0.15 and requests < 60:
            prompt = choose.randint(2, blocks - 7 if name == "scarce" else 12)
            scheduler.add(a_request(str(requests), arrival=now, prompt=prompt, tokens=choose.randint(1, 6)))
            requests += 1
        plan = scheduler.schedule(now)
        assert plan is not None
        result = answer(plan)
        if plan.part(TrainingPlan).slice:
            actions[plan.part(TrainingPlan).slice.action] += 1
            done = trainer.run(plan.part(TrainingPlan).slice, plan.part(TrainingPlan).lent)
            if done.loss is not None:
                losses[done.job].append(done.loss)
            result = replace(result, parts=(replace(done, seconds=0.002 * (done.stop - done.first)),))
        scheduler.update(plan, result, now)
        now += 0.005
    assert losses == expected
    for job in ("one", "two"):
        for vector in ("params", "means", "variances"):
            assert torch.equal(trainer.host_vector(job, vector), alone.host_vector(job, vector))
    assert {*tuner.ended} == {"one", "two"} and requests > 5
    if name == "scarce":
        assert actions["drop"] and actions["offload"] > 2, "besides when each job ends"


@pytest.mark.parametrize("leaves_at", ["validation", "every micro-batch"])
def test_a_job_that_leaves_between_its_update_and_its_validation_keeps_the_update(
    model: Decoder, leaves_at: str, tmp_path: Path
) -> None:
    """A job that leaves again later returns in its latest state, not in its state at the validation."""
    losses = {}
    for name in ("stays", "leaves"):
        trainer = trainer_for(model)
        trainer.open(new_job(tmp_path, name=name, validation=drawn_examples(3, seed=9)))
        act(trainer, name, "restore")
        losses[name] = []
        while (step := trainer.next_slice(name)[0]) < 6:
            _, micro_batch, _ = trainer.next_slice(name)
            validates = trainer.steps(name).micro_batches(step)[micro_batch].validation
            if name == "leaves" and (validates or leaves_at == "every micro-batch"):
                act(trainer, name, "offload")
                act(trainer, name, "restore")
            if (loss := advance(trainer, name).loss) is not None:
                losses[name].append(loss)
    assert losses["leaves"] == losses["stays"]
