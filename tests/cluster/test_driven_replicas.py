"""Driven jobs of replicas: where they run, what they outlive, and when they are given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.engine.client.tuning import CallDone, CallFailed, DrivenStart, JobEnded, TuningError
from tests.cluster.test_tuning import FakeFleet, cluster, order, read

__all__ = ["cluster"]


def driven(name: str = "driven", **fields: Any) -> DrivenStart:
    return DrivenStart(id=name, directory="d", **fields)


async def test_a_driven_job_goes_on_at_another_replica_with_the_calls_that_its_owner_knows(
    cluster: tuple[FakeFleet, Any],
) -> None:
    fleet, tuning = cluster
    run, events = await tuning.drive(driven()), list[Any]()
    reading = asyncio.create_task(read(run, events))
    first, second = (each.engine for each in fleet.members)
    await run.call(0)
    await run.call(1)
    first.tuning.runs["driven"].take(CallDone("driven", 0, 1.0))
    while not events:
        await asyncio.sleep(0.001)
    first.die()
    while not second.tuning.started:
        await asyncio.sleep(0.001)
    assert second.tuning.started[0].known == 1 and first.tuning.calls == [("driven", 0), ("driven", 1)]
    second.tuning.runs["driven"].take(CallFailed("driven", 1, "its data are too long"))
    await run.call(2)
    assert second.tuning.calls == [("driven", 2)]
    second.tuning.runs["driven"].take(JobEnded("driven", "left"))
    await reading
    assert [type(event) for event in events] == [CallDone, CallFailed, JobEnded] and tuning.runs == {}


async def test_a_call_while_no_replica_has_the_job_waits_for_one(cluster: tuple[FakeFleet, Any]) -> None:
    fleet, tuning = cluster
    run = await tuning.drive(driven())
    fleet.members[0].engine.tuning.dies = True  # its death is not noticed yet
    calling = asyncio.create_task(run.call(0))
    await asyncio.sleep(0.01)
    assert not calling.done()
    fleet.members[0].engine.die()
    await calling
    assert fleet.members[1].engine.tuning.calls == [("driven", 0)]


async def test_a_driven_job_is_given_up_after_two_engines_only_if_it_had_a_call(
    cluster: tuple[FakeFleet, Any],
) -> None:
    fleet, tuning = cluster
    idle, events = await tuning.drive(driven("idle")), list[Any]()
    fleet.members[0].engine.die()
    while not fleet.members[1].engine.tuning.started:
        await asyncio.sleep(0.001)
    fleet.members.extend(FakeFleet(3).members)
    fleet.members[1].engine.die()
    while not (started := [each for each in fleet.members[2:] if each.engine.tuning.started]):
        await asyncio.sleep(0.001)
    await idle.call(0)
    reading = asyncio.create_task(read(idle, events))
    started[0].engine.die()
    while len(started := [each for each in fleet.members[2:] if each.engine.tuning.started]) < 2:
        await asyncio.sleep(0.001)
    assert events == []
    next(each for each in started if not each.engine.dead.is_set()).engine.die()
    await reading
    assert events[-1].outcome == "failed" and "2 engines ended while they had this job" in events[-1].reason


async def test_a_job_over_files_takes_no_call_and_ids_are_taken_by_both_kinds(cluster: tuple[FakeFleet, Any]) -> None:
    _, tuning = cluster
    await tuning.start(order())
    with pytest.raises(TuningError, match="no open driven job job"):
        await tuning.call("job", 0)
    with pytest.raises(TuningError, match="job job is open already"):
        await tuning.drive(driven("job"))
    await tuning.drive(driven())
    assert tuning.names == {"tuned-job"} and {*tuning.runs} == {"job", "driven"}
