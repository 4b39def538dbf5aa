"""Values of batches and tuning jobs: the names under which a job's adapters are served."""

from __future__ import annotations

import pytest

from holdfast.server.jobs.values import JobCheckpoint, JobStatus, TuningJob


def job(status: JobStatus, *steps: int) -> TuningJob:
    checkpoints = [JobCheckpoint(id=f"c{step}", step=step, created=1.0, loss=0.5) for step in steps]
    return TuningJob(
        id="j", tenant="a", model="m", name="ft:m", created=1.0, training_file="f", seed=0, asked={}, status=status,
        checkpoints=checkpoints,
    )  # fmt: skip


@pytest.mark.parametrize("status", ["running", "failed", "cancelled"])
def test_the_newest_three_checkpoints_are_served_under_names_of_their_own(status: JobStatus) -> None:
    names = {f"ft:m:ckpt-step-{step}": step for step in (30, 40, 50)}
    assert job(status, 10, 20, 30, 40, 50).served == names
    assert job(status, 10).served == {"ft:m:ckpt-step-10": 10} and job(status).served == {}


def test_a_job_that_has_succeeded_is_served_under_its_name_with_its_last_checkpoint() -> None:
    assert job("succeeded", 10, 20).served == {"ft:m:ckpt-step-10": 10, "ft:m:ckpt-step-20": 20, "ft:m": 20}
    assert job("succeeded").served == {}
