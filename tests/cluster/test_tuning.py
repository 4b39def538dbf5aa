"""Tuning jobs of replicas: where they run, what they outlive, and who serves their adapters."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.local_spawner import LocalSpawner
from holdfast.cluster.replicas import Replicas
from holdfast.cluster.tuning import PlacedJob, ReplicaTuning
from holdfast.core.types import AdapterInfo, SamplingParams
from holdfast.engine.client.client import AdapterError
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.tuning import (
    DrivenInfo,
    DrivenRun,
    DrivenStart,
    JobEnded,
    JobInfo,
    JobStart,
    JobStatus,
    JobStep,
    TuningError,
    TuningRun,
)
from holdfast.lm.config import EngineConfig
from tests.checkpoints import make
from tests.engine.conftest import SMALL
from tests.engine.test_tuning import TUNING, Bench, new_job
from tests.tokenizers_made import byte_level

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(3, 13))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "random-llama"
    make(directory, "Llama", max_position_embeddings=4096, eos_token_id=1)
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = SMALL | TUNING | {"cache_gb": 0.05, "tuning_mirror": str(tmp_path / "mirror")}
    return EngineConfig(**{"model": str(checkpoint), **options})


@asynccontextmanager
async def two(config: EngineConfig) -> AsyncGenerator[Replicas, None]:
    cluster = ClusterConfig(replicas=2, routing="least-loaded")
    replicas = await Replicas.start(cluster, LocalSpawner(config, 2))
    try:
        yield replicas
    finally:
        await replicas.close()


def place_of(replicas: Replicas, job: str) -> PlacedJob:
    return replicas.tuning._jobs[job]


async def answers(replicas: Replicas, adapter: str) -> list[list[int]]:
    """The answer of each replica to one prompt."""
    found = []
    for engine in replicas.fleet.engines.values():
        async with aclosing(engine.stream(PROMPT, GREEDY, adapter=adapter)) as deltas:
            found.append([token for delta in [each async for each in deltas] for token in delta.tokens])
    return found


@pytest.fixture
def alone(config: EngineConfig, tmp_path: Path) -> Callable[[], list[float]]:
    """The losses of a job in an engine by itself."""

    def run() -> list[float]:
        each = Bench(config)
        try:
            each.start(new_job(tmp_path / "alone", epochs=8))
            each.finish("job")
            return each.result("job")[0]
        finally:
            each.close()

    return run


async def test_a_job_outlives_its_replica_and_both_serve_its_adapter(
    config: EngineConfig, tmp_path: Path, alone: Callable[[], list[float]]
) -> None:
    expected = await asyncio.to_thread(alone)
    async with two(config) as replicas:
        run = await replicas.tuning.start(new_job(tmp_path, epochs=8))
        other = await replicas.tuning.start(new_job(tmp_path, "other", epochs=1))
        first = place_of(replicas, "job").replica
        assert place_of(replicas, "other").replica is not first, "each has a job"
        steps, ended = [], None
        async for event in run.events():
            if isinstance(event, JobStep):
                steps.append(event)
                if len(steps) == 5:
                    assert first.engine is not None
                    os.kill(first.engine.pid, signal.SIGKILL)
            elif isinstance(event, JobEnded):
                ended = event
        assert ended is not None and ended.outcome == "succeeded" and ended.adapter is not None
        assert [step.step for step in steps] == [*range(1, 25)], "each once and in order"
        assert [step.loss for step in steps] == expected, "bit for bit as without the kill"
        assert steps[-1].loss < steps[0].loss
        async for event in other.events():
            assert not isinstance(event, JobEnded) or event.outcome == "succeeded"
        while len(replicas.serving) < 2:
            await asyncio.sleep(0.01)
        assert {*replicas.adapters} == {"tuned-job", "tuned-other"}
        tuned, base = await answers(replicas, "tuned-job"), await answers(replicas, "")
        assert tuned[0] == tuned[1] != base[0] == base[1]
        assert replicas.tuning.runs == {} and replicas.tuning.names == set()


# Over scripted engines


class FakeTuning:
    """The jobs of one scripted engine."""

    def __init__(self) -> None:
        self.runs: dict[str, Any] = {}
        self.started: list[Any] = []
        self.changes: list[tuple[str, str]] = []
        self.calls: list[tuple[str, int]] = []
        self.refusal = ""
        self.info: dict[str, Any] = {}
        self.dies = False

    async def start(self, job: JobStart) -> TuningRun:
        self.started.append(job)
        if self.dies:
            raise EngineDead("it was killed")
        if self.refusal:
            raise TuningError(self.refusal)
        self.runs[job.id] = TuningRun(self, info_of(job, **self.info))
        return self.runs[job.id]

    async def change(self, job: str, action: str) -> None:
        self.changes.append((job, action))

    async def drive(self, job: DrivenStart) -> DrivenRun:
        self.started.append(job)
        if self.dies:
            raise EngineDead("it was killed")
        info = DrivenInfo(id=job.id, calls=0, updates=0, rank=4, alpha=8.0, modules=(), micro_batch=64)
        self.runs[job.id] = DrivenRun(self, info)  # type: ignore[arg-type]
        return self.runs[job.id]

    async def call(self, job: str, number: int) -> None:
        if self.dies:
            raise EngineDead("it was killed")
        self.calls.append((job, number))


def info_of(job: JobStart, **fields: Any) -> Any:
    given: dict[str, Any] = dict(
        id=job.id, step=0, steps=9, examples=3, trained_tokens=0, loss=None, validation=None, checkpoint="", epochs=3,
        batch_size=1, learning_rate=1e-4, rank=4, alpha=8.0, modules=(), dora=False, micro_batch=64,
    )  # fmt: skip
    return JobInfo(**given | fields)


class FakeEngine:
    retired = False

    def __init__(self) -> None:
        self.tuning, self.dead, self.reason = FakeTuning(), asyncio.Event(), "it was killed"

    def die(self) -> None:
        self.dead.set()
        for run in self.tuning.runs.values():
            run.fail(self.reason)
        self.tuning.runs.clear()


class FakeReplica:
    def __init__(self, number: int) -> None:
        self.number, self.name, self.running, self.engine = number, str(number), set[str](), FakeEngine()


class FakeFleet:
    """Replicas that serve while their engines live."""

    def __init__(self, count: int = 2) -> None:
        self.members = [FakeReplica(number) for number in range(count)]
        self.adapters: dict[str, Any] = {}
        self.changed, self.dead = asyncio.Event(), False
        self.draining = set[FakeReplica]()
        self.failures, self.loads = 0, list[tuple[str, str, bool]]()

    @property
    def serving(self) -> list[FakeReplica]:
        return [each for each in self.members if not each.engine.dead.is_set() and each not in self.draining]

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> AdapterInfo:
        self.loads.append((name, path, replace))
        if len(self.loads) <= self.failures:
            raise AdapterError("an engine ended while it loaded the adapter")
        return AdapterInfo("a", name, 4, 100, ("q",))

    def forget(self, replica: FakeReplica, engine: FakeEngine) -> None:
        engine.dead.set()

    def check_alive(self) -> None:
        if self.dead:
            raise EngineDead("no replica is left")


def order(name: str = "job", **fields: Any) -> JobStart:
    return JobStart(id=name, directory="d", name=f"tuned-{name}", data_digest="x", **fields)


async def read(run: TuningRun, events: list[Any]) -> None:
    async for event in run.events():
        events.append(event)


@pytest.fixture
async def cluster() -> AsyncGenerator[tuple[FakeFleet, Any], None]:
    fleet = FakeFleet()
    tuning = ReplicaTuning(fleet)  # type: ignore[arg-type]
    yield fleet, tuning
    await tuning.close()


async def test_a_paused_job_stays_paused_at_its_next_replica(cluster: tuple[FakeFleet, Any]) -> None:
    fleet, tuning = cluster
    run, events = await tuning.start(order()), list[Any]()
    reading = asyncio.create_task(read(run, events))
    first, second = (each.engine for each in fleet.members)
    first.tuning.runs["job"].take(JobStep("job", 1, 9, 10, 1.0))
    await run.pause()
    assert first.tuning.changes == [("job", "pause")]
    while not events:
        await asyncio.sleep(0.001)
    first.die()
    while not second.tuning.started:
        await asyncio.sleep(0.001)
    assert (second.tuning.started[0].paused, second.tuning.started[0].known) == (True, 1)
    await asyncio.sleep(0.01)
    await run.resume()
    assert second.tuning.changes == [("job", "resume")]
    second.tuning.runs["job"].take(JobStatus("job", "running"))
    second.tuning.runs["job"].take(JobEnded("job", "cancelled"))
    await reading
    assert [type(event) for event in events] == [JobStep, JobStatus, JobEnded]
    assert tuning.runs == {}


async def test_a_job_of_a_drained_replica_leaves_it_and_goes_on_at_another(cluster: tuple[FakeFleet, Any]) -> None:
    fleet, tuning = cluster
    run, events = await tuning.start(order()), list[Any]()
    reading = asyncio.create_task(read(run, events))
    drained, second = fleet.members
    fleet.draining.add(drained)
    moving = asyncio.create_task(tuning.move_away(drained))
    while drained.engine.tuning.changes != [("job", "leave")]:
        await asyncio.sleep(0.001)
    assert not moving.done()
    untold = (JobStep("job", 1, 9, 10, 1.0), JobStep("job", 2, 9, 10, 0.9))
    second.engine.tuning.info = dict(step=2, untold=untold, checkpoint="d/checkpoints/2")
    drained.engine.tuning.runs["job"].take(JobEnded("job", "left"))
    await moving
    second.engine.tuning.runs["job"].take(JobEnded("job", "left"))
    await reading
    reported = [JobStep("job", 1, 9, 10, 1.0), JobStep("job", 2, 9, 10, 0.9, checkpoint="d/checkpoints/2")]
    assert events == [*reported, JobEnded("job", "left")], "the second time, its owner let it leave"


@pytest.mark.parametrize("failures", [1, 2])
async def test_an_adapter_that_a_dying_replica_did_not_load_is_loaded_again(
    cluster: tuple[FakeFleet, Any], failures: int
) -> None:
    fleet, tuning = cluster
    run, events = await tuning.start(order()), list[Any]()
    fleet.failures = failures
    made = AdapterInfo("a", "tuned-job", 4, 100, ("q",))
    fleet.members[0].engine.tuning.runs["job"].take(JobEnded("job", "succeeded", adapter=made, checkpoint="d/c/9"))
    await read(run, events)
    assert events[0].adapter == (made if failures == 1 else None)
    assert fleet.loads == [("tuned-job", "d/c/9", True)] * 2


async def test_a_change_while_no_replica_has_the_job_waits_for_one(cluster: tuple[FakeFleet, Any]) -> None:
    fleet, tuning = cluster
    run = await tuning.start(order())
    for each in fleet.members:
        each.engine.die()
    await asyncio.sleep(0.01)
    cancelling = asyncio.create_task(run.cancel())
    await asyncio.sleep(0.01)
    assert not cancelling.done()
    fleet.members.append(FakeReplica(2))
    fleet.changed.set()
    await cancelling
    assert fleet.members[2].engine.tuning.changes == [("job", "cancel")]


async def test_a_job_that_ends_engine_after_engine_without_a_step_has_failed(cluster: tuple[FakeFleet, Any]) -> None:
    fleet, tuning = cluster
    run, events = await tuning.start(order()), list[Any]()
    fleet.members[1].engine.tuning.dies = True
    fleet.members[0].engine.die()
    await read(run, events)
    assert events[-1].outcome == "failed" and "2 engines ended while they had this job" in events[-1].reason
    with pytest.raises(TuningError, match="no open job"):
        await run.cancel()


async def test_a_job_that_is_refused_at_its_next_replica_has_failed_with_the_reason(
    cluster: tuple[FakeFleet, Any],
) -> None:
    fleet, tuning = cluster
    run, events = await tuning.start(order()), list[Any]()
    fleet.members[1].engine.tuning.refusal = "it has no room"
    fleet.members[0].engine.die()
    await read(run, events)
    assert events == [JobEnded("job", "failed", "it has no room")]


async def test_jobs_end_with_the_last_replica_and_go_on_at_the_next_start(cluster: tuple[FakeFleet, Any]) -> None:
    fleet, tuning = cluster
    run = await tuning.start(order())
    fleet.dead = True
    fleet.members[0].engine.die()
    with pytest.raises(EngineDead, match="no replica is left"):
        await read(run, [])
    with pytest.raises(EngineDead):
        await tuning.start(order("late"))


async def test_jobs_of_one_id_or_name_are_refused_at_whatever_replica(cluster: tuple[FakeFleet, Any]) -> None:
    fleet, tuning = cluster
    await tuning.start(order())
    fleet.adapters["tuned-third"] = object()
    with pytest.raises(TuningError, match="job job is open already"):
        await tuning.start(order())
    second = order("second")
    with pytest.raises(TuningError, match="the name tuned-job is taken"):
        await tuning.start(JobStart(id="second", directory="d", name="tuned-job", data_digest="x"))
    with pytest.raises(TuningError, match="the name tuned-third is taken"):
        await tuning.start(order("third"))
    await tuning.start(second)
    assert [len(each.engine.tuning.runs) for each in fleet.members] == [1, 1]
    assert {*tuning.runs} == {"job", "second"} and tuning.names == {"tuned-job", "tuned-second"}
