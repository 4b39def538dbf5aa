"""Tuning that is interrupted in any way gives the same losses and parameters as uninterrupted tuning, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.lm.models.decoder import Decoder
from holdfast.training.done import StepReport
from holdfast.training.state import StateFiles, newest
from tests.tuning import (
    BLOCKS,
    act,
    advance,
    arena_for,
    drawn_examples,
    finish,
    native,
    new_job,
    trainer_for,
    vectors_of,
)

JOBS = {
    "one": dict(seed=1),
    "two": dict(seed=2, modules=("q", "v", "down"), rank=2, dora=True),
    "three": dict(seed=3, micro_batch=40),
}


@pytest.fixture(scope="module", params=["qwen2", "bamba"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return native(request.param, tmp_path_factory.mktemp("base"))[1]


@pytest.fixture(scope="module")
def undisturbed(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], list[bytes]]]:
    """The losses and vectors of each job when it runs alone."""
    results = {}
    for name, chosen in JOBS.items():
        trainer = trainer_for(model)
        trainer.open(new_job(tmp_path_factory.mktemp("alone"), name=name, **chosen))
        act(trainer, name, "restore")
        losses = finish(trainer, name)
        results[name] = losses, [vector.numpy().tobytes() for vector in vectors_of(trainer, name)]
    return results


@pytest.mark.always("qwen2")
@settings(  # even the plainest history is long
    max_examples=settings().max_examples * 4 // 25, suppress_health_check=[HealthCheck.large_base_example]
)
@given(chance=st.randoms(use_true_random=False))
def test_three_jobs_interrupted_at_random_give_the_bits_of_each_alone(
    model: Decoder,
    undisturbed: dict[str, tuple[list[float], list[bytes]]],
    tmp_path_factory: pytest.TempPathFactory,
    chance: random.Random,
) -> None:
    """Releases, drops, offloads, switches between jobs, closing and opening again, a new engine."""
    root, arena = tmp_path_factory.mktemp("jobs"), arena_for(model)
    directories = {name: new_job(root, name=name, **chosen) for name, chosen in JOBS.items()}
    trainer = trainer_for(model, arena=arena, mirror=root / "mirror")
    resident: str | None = None
    left = {*JOBS}
    reports: list[StepReport] = []
    for name in JOBS:
        trainer.open(directories[name])
    while left:
        event = chance.random()
        if resident is None:
            resident = chance.choice(sorted(left))
            act(trainer, resident, "restore")
        elif event < 0.7:
            advance(trainer, resident, chance.choice([1, 2, 5, None]), keep=chance.random() < 0.6)
            if trainer.next_slice(resident)[0] == trainer.steps(resident).count:
                left.discard(resident)
        elif event < 0.78:
            act(trainer, resident, "release")
        elif event < 0.84:
            act(trainer, resident, "drop")
        elif event < 0.98:
            act(trainer, resident, "offload")
            resident = None
            if event > 0.93:
                # The next user of the blocks writes to them.
                for plane in arena.planes:
                    plane.fill_(chance.randrange(256))
        else:
            trainer.shut_down()
            reports += [report for report in trainer.reports() if isinstance(report, StepReport)]
            trainer, resident = trainer_for(model, arena=arena, mirror=root / "mirror"), None
            for name in JOBS:
                trainer.open(directories[name])
        if resident is not None and resident not in left:
            act(trainer, resident, "offload")
            resident = None
    for name in JOBS:
        losses, vectors = undisturbed[name]
        found = [trainer.host_vector(name, kind).numpy().tobytes() for kind in ("params", "means", "variances")]
        assert [record.loss for record in trainer.records(name)] == losses
        assert found == vectors
    reports += [report for report in trainer.reports() if isinstance(report, StepReport)]
    for name in JOBS:
        assert [report.step for report in reports if report.job == name] == [*range(len(undisturbed[name][0]))]


def tune_in_a_child(model: Decoder, directory: Path, mirror: Path, pipe: int) -> int:
    """Start a process that runs a job to its end and writes each report to a pipe. Returns its process id."""
    with warnings.catch_warnings():
        # The child uses no lock that another thread of this process might hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:

        def tell(*values: float) -> None:
            os.write(pipe, f"{json.dumps(values)}\n".encode())

        def tell_steps() -> None:
            for report in trainer.reports():
                if isinstance(report, StepReport):
                    tell(report.step, report.record.loss)

        trainer = trainer_for(model, mirror=mirror)
        trainer.open(directory)
        tell(-1, trainer.next_slice("job")[0])
        act(trainer, "job", "restore")
        while trainer.next_slice("job")[0] < trainer.steps("job").count:
            advance(trainer, "job", 3)
            tell_steps()
        trainer.shut_down()
        tell_steps()
        os._exit(0)
    finally:
        os._exit(1)


def test_an_engine_killed_at_random_points_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    chosen: dict[str, Any] = dict(epochs=12, examples=drawn_examples(24))
    _, model = native("llama", tmp_path / "base")
    alone = trainer_for(model)
    alone.open(new_job(tmp_path / "alone", **chosen))
    act(alone, "job", "restore")
    losses, vectors = finish(alone, "job"), vectors_of(alone, "job")

    directory = new_job(tmp_path / "killed", **chosen)
    chance, told, kills, status = random.Random(0), dict[int, float](), 0, -1
    while status != 0:
        reading, writing = os.pipe()
        child = tune_in_a_child(model, directory, tmp_path / "mirror", writing)
        os.close(writing)
        with os.fdopen(reading) as lines:
            _, begun = json.loads(lines.readline())
            assert begun >= len(told)  # a reported step is a stored one
            patience = chance.randint(1, 9)
            for line in lines:
                step, loss = json.loads(line)
                told[step] = loss
                patience -= 1
                if patience == 0 and kills < 12:
                    time.sleep(chance.random() * 0.02)
                    os.kill(child, signal.SIGKILL)
                    kills += 1
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
    assert kills > 5
    job = alone.steps("job").job.digest()
    state = newest(StateFiles(path, job, durable=False) for path in (directory, tmp_path / "mirror" / "job"))
    assert state is not None and [record.loss for record in state.records] == losses
    assert all(torch.equal(a, b) for a, b in zip(state.vectors, vectors, strict=True))
    assert all(told[step] == losses[step] for step in told)


def test_an_offloaded_step_goes_on_with_the_gradients_of_its_earlier_micro_batches(
    model: Decoder, tmp_path: Path
) -> None:
    results = []
    for name in ("plain", "moved"):
        trainer = trainer_for(model)
        trainer.open(new_job(tmp_path, name=name, micro_batch=40))
        act(trainer, name, "restore")
        assert len(trainer.steps(name).micro_batches(0)) > 1
        advance(trainer, name)
        if name == "moved":
            advance(trainer, name, 9, lent=BLOCKS)
            act(trainer, name, "offload")
            act(trainer, name, "restore")
            assert trainer.next_slice(name) == (0, 1, 0)
        results.append((finish(trainer, name), vectors_of(trainer, name)))
    (losses, vectors), (moved, others) = results
    assert losses == moved and all(torch.equal(a, b) for a, b in zip(vectors, others, strict=True))
