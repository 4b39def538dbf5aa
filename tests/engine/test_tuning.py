"""Tuning in a whole engine: beside streams, in lent memory, several jobs, killed engines, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.training_cost import TrainingCost
from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.engine import messages
from holdfast.engine.client.client import AdapterError, EngineClient
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.tuning import EXAMPLES_FILE, VALIDATION_FILE, TuningError, write_examples
from holdfast.engine.process.build import build_engine
from holdfast.engine.process.handler import Gate, Router
from holdfast.engine.process.parts.tuning_handler import TuningHandler
from holdfast.engine.process.requests import RequestHandler
from holdfast.engine.process.serve import serve
from holdfast.lm.config import EngineConfig
from holdfast.lm.models.peft_files import WEIGHTS_FILE
from holdfast.lm.parts.tuning.messages import (
    ChangeJob,
    DrivenStart,
    JobAction,
    JobChanged,
    JobEnded,
    JobInfo,
    JobProgress,
    JobRefused,
    JobStart,
    JobStarted,
    JobStatus,
    JobStep,
    RunCall,
    StartDriven,
    StartJob,
)
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.values import TrainingReport
from tests.built import without_contracts
from tests.checkpoints import make
from tests.engine.conftest import SMALL
from tests.invariants import check_scheduler
from tests.tokenizers_made import byte_level
from tests.tuning import diverge

TUNING: dict[str, Any] = {**SMALL, "tuning": True, "tuning_mirror": "off", "tuning_micro_batch": 128, "max_adapters": 2}
SLICES: dict[str, Any] = {"token_budget": None, "tbt_target": 2000.0}
ROOMY: dict[str, Any] = {"token_budget": None, "tbt_target": 60_000.0}
"""Room for slices next to streams, however slow the machine was when it was measured."""
Example = tuple[list[int], list[float]]


def drawn(count: int = 6, seed: int = 1, longest: int = 60) -> list[Example]:
    chance = random.Random(seed)
    lengths = [chance.randint(20, longest) for _ in range(count)]
    return [([chance.randrange(3, 100) for _ in range(length)], [1.0] * length) for length in lengths]


def new_job(directory: Path, name: str = "job", *, examples: Iterable[Example] = (), **values: Any) -> JobStart:
    """A job whose directory is made unless it is there."""
    place = directory / name
    place.mkdir(parents=True, exist_ok=True)
    digest = write_examples(place / EXAMPLES_FILE, [*examples] or drawn())
    given: dict[str, Any] = dict(epochs=3, batch_size=2, learning_rate=0.01, rank=4)
    return JobStart(
        id=name, directory=str(place), name=f"tuned-{name}", data_digest=digest, **{**given, **values}
    )  # fmt: skip


class Bench:
    """An engine in this process, stepped by hand. After each step, every block of the cache is accounted for."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = build_engine(config)
        self.loop, self.info = self.engine.loop, self.engine.info
        self.tuning = self.engine.handler(TuningHandler)
        self.handlers = self.engine.handlers
        gates = [each for each in self.handlers if isinstance(each, Gate)]
        self.router = Router([RequestHandler(self.loop, self.send, gates), *self.handlers], self.send)
        self.sent: list[messages.FromEngine] = []
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.lent: list[int] = []
        """Blocks lent to training after each step."""
        self.beside = 0
        """Steps that had both streams and a slice."""
        self.actions: Counter[str] = Counter()
        """What the slices did."""
        collect = self.loop.executor.collect

        def watched() -> Any:
            result = collect()
            if result.part(TrainingReport):
                self.beside += bool(result.tokens)
                self.actions[result.part(TrainingReport).action] += 1
            return result

        self.loop.executor.collect = watched  # type: ignore[method-assign]

    def say(self, message: messages.ToEngine) -> None:
        assert self.router.receive([message])

    def send(self, message: messages.FromEngine) -> None:
        self.sent.append(message)

    def submit(self, name: str, prompt: Sequence[int], count: int, adapter: str = "") -> None:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        identity = Identity(self.info.model, adapter, self.info.precision)
        self.tokens[name] = []
        self.say(messages.Submit(Request(name, tuple(prompt), params, identity=identity, arrival=time.monotonic())))

    def turn(self) -> None:
        self.router.send_answers()
        if self.loop.has_work():
            for output in self.loop.step() or ():
                self.tokens[output.request_id] += output.tokens
                if output.finish_reason is not None:
                    self.ended.add(output.request_id)
            check_scheduler(self.loop.planner)
            stats = self.loop.stats()
            self.lent.append(stats.blocks_training)

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 250.0
        while not what():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.sent[-3:]}, {self.loop.stats()}")
            self.turn()
            if not self.loop.has_work():
                time.sleep(0.001)  # as an idle engine waits for its threads

    def start(self, job: JobStart) -> JobInfo:
        number = len(self.sent) + 1000
        self.say(StartJob(number, job))
        self.until(lambda: bool(self.answered(number)))
        (answer,) = self.answered(number)
        if isinstance(answer, JobRefused):
            raise TuningError(answer.reason, missing=answer.missing)
        assert isinstance(answer, JobStarted)
        return answer.info

    def start_all(self, jobs: Sequence[JobStart]) -> None:
        """Start jobs together: no step runs before all are read, however long that takes."""
        for number, job in enumerate(jobs):
            self.say(StartJob(2000 + number, job))
        for *_, reading in [*self.tuning._reading]:
            reading.result(timeout=200)
        self.until(lambda: all(self.answered(2000 + number) for number in range(len(jobs))))
        assert {job.id for job in jobs} <= {*self.tuning._open}

    def answered(self, number: int) -> list[messages.FromEngine]:
        return [message for message in self.sent if getattr(message, "number", None) == number]

    def change(self, job: str, action: JobAction) -> messages.FromEngine:
        number = len(self.sent) + 1000
        self.say(ChangeJob(number, job, action))
        self.until(lambda: bool(self.answered(number)))
        return self.answered(number)[0]

    def events(self, job: str, kind: type[Any] = object) -> list[Any]:
        told = [event for message in self.sent if isinstance(message, JobProgress) for event in message.events]
        return [event for event in told if event.job == job and isinstance(event, kind)]

    def reach(self, job: str, step: int) -> None:
        """Run until this optimizer step is planned. A slow disk may tell of the steps before it much later."""
        self.until(lambda: self.loop.planner.part(TuningPart).tuner.step_of(job)[0] >= step)

    def finish(self, *jobs: str) -> None:
        self.until(lambda: all(self.events(job, JobEnded) for job in jobs))

    def result(self, job: str) -> tuple[list[float], str]:
        """The losses of a job that has succeeded, and a digest of its adapter."""
        (ended,) = self.events(job, JobEnded)
        assert ended.outcome == "succeeded", ended
        return [step.loss for step in self.events(job, JobStep)], digest_of_adapter(ended.checkpoint)

    def close(self) -> None:
        self.engine.close()


def digest_of_adapter(directory: str) -> str:
    return hashlib.sha256((Path(directory) / WEIGHTS_FILE).read_bytes()).hexdigest()


@pytest.fixture
def bench(small: Callable[..., EngineConfig]) -> Iterable[Callable[..., Bench]]:
    """Makes engines of a small random model that take tuning jobs."""
    made: list[Bench] = []

    def make(**changes: Any) -> Bench:
        made.append(Bench(small(**{**TUNING, **changes})))
        return made[-1]

    yield make
    for each in made:
        with suppress(RuntimeError):
            each.close()


@pytest.fixture
def alone(bench: Callable[..., Bench], tmp_path: Path) -> Callable[..., tuple[list[float], str]]:
    """What a job gives in an engine that does nothing else."""

    def run(**values: Any) -> tuple[list[float], str]:
        each = bench(cache_gb=0.05)
        each.start(new_job(tmp_path / "alone", **values))
        each.finish("job")
        return each.result("job")

    return run


def test_a_job_tells_each_step_once_and_ends_with_an_adapter_that_is_served(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    each = bench()
    info = each.start(new_job(tmp_path))
    assert (info.step, info.steps, info.examples, info.epochs, info.batch_size) == (0, 9, 6, 3, 2)
    assert (info.alpha, info.micro_batch, len(info.modules)) == (8.0, 128, 7)
    each.finish("job")
    steps = each.events("job", JobStep)
    assert [step.step for step in steps] == [*range(1, 10)] and {step.steps for step in steps} == {9}
    assert sum(step.tokens for step in steps) == 3 * sum(len(ids) for ids, _ in drawn())
    assert [bool(step.checkpoint) for step in steps] == [step % 3 == 0 for step in range(1, 10)]
    assert steps[-1].loss < steps[0].loss
    assert [event.status for event in each.events("job", JobStatus)] == ["running"]
    (ended,) = each.events("job", JobEnded)
    assert ended.adapter.name == "tuned-job" and ended.checkpoint == steps[-1].checkpoint
    for name, adapter in (("tuned", ended.adapter.id), ("base", "")):
        each.submit(name, drawn()[0][0][:10], 12, adapter)
    each.until(lambda: len(each.ended) == 2)
    assert each.tokens["tuned"] != each.tokens["base"]
    assert each.lent[-1] == 0 < max(each.lent)


@pytest.mark.parametrize(
    ("family", "modules"), [("Phi3", ("qkv", "o", "gate_up", "down")), ("Mixtral", ("q", "k", "v", "o"))]
)
def test_a_job_changes_all_modules_that_every_layer_of_its_family_has(
    family: str, modules: tuple[str, ...], bench: Callable[..., Bench], tmp_path: Path
) -> None:
    make(tmp_path / "model", family, eos_token_id=1)
    byte_level().save(str(tmp_path / "model" / "tokenizer.json"))
    each = bench(model=str(tmp_path / "model"))
    with pytest.raises(TuningError, match=rf"modules to tune are gate; choose from {', '.join(modules)}"):
        each.start(new_job(tmp_path, "wrong", modules=("q", "gate") if "q" in modules else ("o", "gate")))
    assert each.start(new_job(tmp_path)).modules == modules
    each.finish("job")
    losses, _ = each.result("job")
    assert sum(losses[-3:]) < sum(losses[:3])
    (ended,) = each.events("job", JobEnded)
    for name, adapter in (("tuned", ended.adapter.id), ("base", "")):
        each.submit(name, drawn()[0][0][:10], 12, adapter)
    each.until(lambda: len(each.ended) == 2)
    assert each.tokens["tuned"] != each.tokens["base"]


@pytest.mark.always("slices")
@pytest.mark.parametrize("options", [{"deferral_bound": 0.0}, ROOMY], ids=["deferral", "slices"])
def test_streams_get_the_same_tokens_with_and_without_training(
    bench: Callable[..., Bench], options: dict[str, Any], tmp_path: Path
) -> None:
    def serve(with_job: bool) -> Bench:
        each = bench(model=BUILTIN_MODEL, cache_gb=0.15, max_sequences=3, **options)
        if with_job:
            each.start(new_job(tmp_path, epochs=2, learning_rate=0.001))
        for turn in range(3):
            for name in range(3):
                each.submit(f"{turn}-{name}", [3 + turn, 5 + name, 7, 11, 13], 12)
            each.until(lambda wanted=3 * turn + 3: len(each.ended) == wanted)
            for _ in range(20):
                each.turn()
        if with_job:
            each.finish("job")
            assert each.result("job")[0]
        return each

    without, beside = serve(False), serve(True)
    assert without.tokens == beside.tokens and all(len(tokens) == 12 for tokens in beside.tokens.values())
    assert max(beside.lent) > 0 and max(without.lent) == 0
    assert bool(beside.beside) == ("tbt_target" in options)


def test_inference_that_needs_memory_takes_it_back_and_the_job_gives_the_same(
    bench: Callable[..., Bench], alone: Callable[..., tuple[list[float], str]], tmp_path: Path
) -> None:
    expected = alone(epochs=5)
    each = bench(cache_gb=0.004, tuning_memory_fraction=0.9, max_adapters=1, max_adapter_rank=4, **SLICES)
    blocks = each.info.num_blocks
    each.start(new_job(tmp_path, epochs=5))
    for wave in range(4):
        each.until(lambda: each.loop.stats().blocks_training > 0)
        for _ in range(3 * wave):
            each.turn()
        names = [f"{wave}-{number}" for number in range(8)]
        for number, name in enumerate(names):
            each.submit(name, [3 + (wave + number * 7 + at) % 90 for at in range(blocks * 16 // 9 - 40)], 20)
        each.until(lambda wanted=names: {*wanted} <= each.ended)
        assert not each.events("job", JobEnded)
        assert min(each.lent[-20:]) < max(each.lent) / 2
    assert each.actions["offload"] > 3
    each.finish("job")
    assert each.loop.stats().preemptions == 0
    assert each.result("job") == expected


def test_jobs_over_one_base_take_turns_pause_and_go_on_with_the_same_result(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    each = bench(cache_gb=0.05)
    kinds = {"one": dict(seed=1), "two": dict(rank=8, epochs=2), "three": dict(modules=("q", "v"), seed=3)}
    expected = {}
    for name, values in kinds.items():
        each.start(new_job(tmp_path / "alone", name, **values))
        each.finish(name)
        expected[name] = each.result(name)
    each.sent.clear()
    each.start_all(
        [
            replace(new_job(tmp_path / "together", name, **values), name=f"again-{name}")
            for name, values in kinds.items()
        ]
    )
    each.reach("one", 2)
    assert [event.status for event in each.events("two", JobStatus)] == ["queued"]
    assert isinstance(each.change("one", "pause"), JobChanged)
    each.until(lambda: each.events("one", JobStatus)[-1].status == "paused")
    done = len(each.events("one", JobStep))
    each.until(lambda: len(each.events("two", JobStep)) >= 2)
    assert len(each.events("one", JobStep)) == done and done < 9
    each.change("two", "pause")
    each.change("two", "pause")
    each.finish("three")
    each.change("two", "resume")
    each.change("one", "resume")
    each.finish("one", "two")
    assert {name: each.result(name) for name in kinds} == expected
    assert [event.status for event in each.events("one", JobStatus)][-2:] == ["queued", "running"] or (
        each.events("one", JobStatus)[-1].status == "running"
    )


def test_a_job_that_begins_paused_runs_after_resume(bench: Callable[..., Bench], tmp_path: Path) -> None:
    each = bench()
    each.start(new_job(tmp_path, paused=True))
    for _ in range(50):
        each.turn()
    assert [event.status for event in each.events("job")] == ["paused"]
    assert not each.loop.has_work()
    each.change("job", "resume")
    each.finish("job")
    assert len(each.result("job")[0]) == 9


def test_a_cancelled_job_leaves_its_checkpoints_and_no_state(bench: Callable[..., Bench], tmp_path: Path) -> None:
    each = bench()
    each.start(new_job(tmp_path, epochs=500))
    each.until(lambda: len(each.events("job", JobStep)) >= 4)
    each.change("job", "cancel")
    each.finish("job")
    (ended,) = each.events("job", JobEnded)
    assert (ended.outcome, ended.adapter) == ("cancelled", None)
    assert (tmp_path / "job" / "checkpoints" / "3" / WEIGHTS_FILE).exists()
    assert not [*(tmp_path / "job").glob("state.*")]
    assert not each.loop.has_work()
    answer = each.change("job", "pause")
    assert isinstance(answer, JobRefused) and answer.missing


def test_a_job_that_is_left_goes_on_in_the_same_engine_with_the_same_losses(
    bench: Callable[..., Bench], alone: Callable[..., tuple[list[float], str]], tmp_path: Path
) -> None:
    expected, digest = alone()
    each = bench()
    each.start(new_job(tmp_path))
    each.reach("job", 3)
    each.change("job", "leave")
    each.finish("job")
    assert each.events("job", JobEnded)[0].outcome == "left"
    before = [step.loss for step in each.events("job", JobStep)]
    each.sent.clear()
    assert each.start(new_job(tmp_path)).step == len(before) < 9
    each.finish("job")
    losses, same = each.result("job")
    assert (before + losses, same) == (expected, digest)


def test_a_job_whose_numbers_are_not_finite_fails_and_leaves_the_engine_as_it_was(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = bench()
    monkeypatch.setattr("holdfast.training.sources.adamw_step", diverge)
    each.start(new_job(tmp_path))
    each.finish("job")
    (ended,) = each.events("job", JobEnded)
    assert ended.outcome == "failed" and "lower the learning rate" in ended.reason
    assert not each.loop.has_work()
    monkeypatch.undo()
    each.start(new_job(tmp_path, "next"))
    each.finish("next")
    assert len(each.result("next")[0]) == 9


def test_a_complete_job_that_is_started_again_ends_at_once_with_the_same_adapter(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    first = bench()
    first.start(new_job(tmp_path))
    first.finish("job")
    first.close()
    again = bench()
    info = again.start(new_job(tmp_path))
    assert (info.step, info.steps) == (9, 9) and info.checkpoint and info.loss is not None
    assert [step.step for step in info.untold] == [*range(1, 10)]
    again.finish("job")
    assert not again.events("job", JobStep)
    assert again.events("job", JobEnded)[0].adapter == first.events("job", JobEnded)[0].adapter


def test_an_engine_that_ends_in_order_stores_its_jobs_and_the_next_one_goes_on(
    bench: Callable[..., Bench], alone: Callable[..., tuple[list[float], str]], tmp_path: Path
) -> None:
    expected, _ = alone()
    each = bench(tuning_mirror=str(tmp_path / "mirror"))
    each.start(new_job(tmp_path))
    each.until(lambda: len(each.events("job", JobStep)) >= 4)
    each.close()
    done = [step.loss for step in each.events("job", JobStep)]
    assert not [*(tmp_path / "mirror").iterdir()]
    again = bench(tuning_mirror="off")
    info = again.start(new_job(tmp_path))
    assert info.step >= len(done) and info.loss == expected[info.step - 1]
    again.finish("job")
    assert done == expected[: len(done)] and again.result("job")[0] == expected[info.step :]


def test_a_validation_file_is_computed_at_the_end_of_each_epoch(bench: Callable[..., Bench], tmp_path: Path) -> None:
    each = bench()
    job = new_job(tmp_path)
    digest = write_examples(Path(job.directory) / VALIDATION_FILE, drawn(3, seed=5))
    each.start(replace(job, validation_digest=digest))
    each.finish("job")
    steps = each.events("job", JobStep)
    assert [step.validation is not None for step in steps] == [step.step % 3 == 0 for step in steps]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": "../job"}, "must have 1 to 128 letters"),
        ({"name": "no name"}, "adapter's name"),
        ({"data_digest": "00"}, "not the file of its digest"),
        ({"directory": "/nowhere"}, "No such file"),
        ({"rank": 64}, "max_adapter_rank is 16"),
        ({"learning_rate": 5.0}, "learning_rate is 5"),
        ({"modules": ("x",)}, "modules are x"),
        ({"micro_batch": 17}, "longest example"),
        ({"validation_digest": "00"}, "cannot be read"),
    ],
)
def test_a_job_that_cannot_run_is_refused_and_the_engine_serves_on(
    bench: Callable[..., Bench], change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    each = bench()
    with pytest.raises(TuningError, match=words) as refused:
        each.start(replace(new_job(tmp_path), **change))
    assert str(tmp_path) not in str(refused.value)
    assert not each.loop.has_work()


def test_too_little_lent_memory_and_a_job_that_is_open_are_refused(bench: Callable[..., Bench], tmp_path: Path) -> None:
    each = bench(tuning_memory_fraction=0.02)
    with pytest.raises(TuningError, match=r"needs \d+ blocks of the cache .* may be lent"):
        each.start(new_job(tmp_path))
    each = bench()
    each.start(new_job(tmp_path, "twice", paused=True))
    with pytest.raises(TuningError, match="open already"):
        each.start(new_job(tmp_path, "twice"))


def test_a_target_that_leaves_training_nothing_fails_a_job_once_steps_were_measured(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    each = bench(token_budget=None, tbt_target=0.01)
    each.submit("stream", range(5, 20), 400)
    each.start_all([new_job(tmp_path)])  # however long its data are read, the stream goes on
    (started,) = each.answered(2000)
    assert isinstance(started, JobStarted) and started.info.steps > 0, "nothing is known of steps beside streams yet"
    each.finish("job")
    (ended,) = each.events("job", JobEnded)
    assert ended.outcome == "failed" and not each.events("job", JobStep)
    assert "tbt_target is 0.01 ms" in ended.reason and "raise tbt_target" in ended.reason
    assert "stream" not in each.ended
    with pytest.raises(TuningError, match="which leaves nothing for training"):
        each.start(new_job(tmp_path, "again"))
    each.until(lambda: "stream" in each.ended)


def test_an_engine_without_tuning_refuses_jobs(small: Callable[..., EngineConfig], tmp_path: Path) -> None:
    engine = build_engine(small())
    sent: list[messages.FromEngine] = []

    with pytest.raises(LookupError):
        engine.handler(TuningHandler)
    driven = DrivenStart(id="driven", directory=str(tmp_path))
    told = [
        StartJob(1, new_job(tmp_path)), ChangeJob(2, "job", "pause"), StartDriven(3, driven), RunCall(4, "driven", 0)
    ]  # fmt: skip
    router = Router(engine.handlers, sent.append)
    router.receive(told)
    router.send_answers()
    assert [type(message) for message in sent] == [JobRefused] * 4
    engine.loop.close()


def test_a_micro_batch_that_is_chosen_suits_bound_target_and_memory_and_is_stored_with_the_job(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 1e-3  # of a token of an iteration; its longest unit takes a hundredth
    monkeypatch.setattr(TrainingCost, "iteration", lambda self, lengths: seconds * sum(lengths))
    monkeypatch.setattr(TrainingCost, "largest_unit", lambda self, tokens: seconds * tokens / 100)
    monkeypatch.setattr(TrainingCost, "unit", lambda self, kind, lengths, recompute=False: 0.0)

    def chosen(name: str, **changes: Any) -> int:
        each = bench(**{"tuning_micro_batch": "auto", "cache_gb": 0.05, **changes})
        return each.start(new_job(tmp_path, name, paused=True)).micro_batch

    assert chosen("bound", deferral_bound=3.0) == 2048
    assert [chosen(f"extreme-{bound}", deferral_bound=bound) for bound in (0.0, float("inf"))] == [512, 512]
    assert chosen("target", **SLICES | {"tbt_target": 150.0}) == 2048
    seconds = 1e-6
    assert chosen("fast") == 8192
    each = bench(cache_gb=0.005)
    info = each.start(new_job(tmp_path, "all", batch_size=6, paused=True))
    blocks = [each.tuning._trainer.blocks("all", tokens) for tokens in (128, 200)]
    fraction = sum(blocks) / 2 / each.info.num_blocks
    each = bench(cache_gb=0.005, tuning_memory_fraction=fraction, tuning_micro_batch="auto")
    assert info.examples == 6 and sum(len(ids) for ids, _ in drawn()) > 200
    assert each.start(new_job(tmp_path, "memory", batch_size=6, paused=True)).micro_batch == 128
    assert chosen("bound", tuning_micro_batch=100) == 2048
    assert chosen("given", tuning_micro_batch=100) == 100


def test_every_option_of_tuning_reaches_what_it_is_for(bench: Callable[..., Bench], tmp_path: Path) -> None:
    def policy(**changes: Any) -> Any:
        return without_contracts(bench(**changes).loop.planner._policy)  # type: ignore[attr-defined]

    assert [policy(**options).bound for options in ({}, {"deferral_bound": 0.25})] == [1.0, 0.25]
    assert [policy(**SLICES, tuning_progress=progress).progress for progress in (False, True)] == [False, True]
    assert policy(**SLICES).target == 2.0
    for fraction in (0.25, 0.5):
        each = bench(tuning_memory_fraction=fraction)
        assert each.tuning._tuner.max_blocks == int(fraction * each.info.num_blocks)
    assert bench(max_adapters=0).info.adapter_slots == 8


def test_the_trace_shows_slices_after_their_steps_and_the_blocks_lent(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    each = bench(trace=str(tmp_path / "trace.json"), **ROOMY)
    each.start(new_job(tmp_path, epochs=1))
    each.submit("stream", range(3, 20), 30)
    each.finish("job")
    each.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    (lane,) = [e["tid"] for e in events if e["ph"] == "M" and e["args"].get("name") == "training"]
    bars = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    training = [e for e in bars if e["tid"] == lane]
    assert {"restore", "training", "offload"} == {e["name"] for e in training}
    assert sum("loss" in e["args"] for e in training) == 3
    lent = [e["args"]["training"] for e in events if e["name"] == "lent blocks"]
    assert max(lent) > 0 and lent[-1] == 0
    steps = {e["args"]["step"]: e for e in bars if e["tid"] == 0}
    both = [(steps[e["args"]["plan"]], e) for e in training if e["args"]["plan"] in steps]
    assert both and all(step["ts"] + step["dur"] <= bar["ts"] + 1 for step, bar in both)


def test_graphs_are_captured_between_two_steps_of_a_job_once_each(bench: Callable[..., Bench], tmp_path: Path) -> None:
    each = bench()
    prepared: list[int] = []

    def prepare() -> bool:
        if each.loop.has_work():
            prepared.append(each.tuning._tuner.step_of("job")[0])
        return False

    each.loop.prepare = prepare  # type: ignore[method-assign]

    class Parent:
        wake = staticmethod(lambda: None)
        wait = staticmethod(lambda: time.sleep(0.001))
        send = staticmethod(each.send)

        def __init__(self) -> None:
            self.turns = 0
            # Each step has several micro-batches.
            job = new_job(tmp_path, examples=9 * drawn(), epochs=1, batch_size=6, micro_batch=64)
            self.first: list[messages.ToEngine] = [StartJob(1, job)]

        def poll(self, seconds: float) -> bool:
            return True

        def receive(self) -> list[messages.ToEngine]:
            return [self.first.pop() if self.first else messages.Shutdown()]

        def waiting(self) -> list[messages.ToEngine]:
            self.turns += 1
            return []

    serve(each.loop, Parent(), each.handlers)  # type: ignore[arg-type]
    assert len(each.result("job")[0]) == 9
    assert sorted({*prepared}) == prepared and {*prepared} >= {*range(1, 9)}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"deferral_bound": 0.0}, SLICES | {"tbt_target": 25.0}], ids=["deferral", "slices"]
)
def test_a_gpu_trains_beside_streams_whose_tokens_stay_the_same(
    bench: Callable[..., Bench], options: dict[str, Any], tmp_path: Path
) -> None:
    def serve(with_job: bool) -> Bench:
        each = bench(
            model=BUILTIN_MODEL, device="cuda", dtype="bfloat16", cache_gb=0.5, max_sequences=4, host_cache_gb=0.2,
            **options,
        )  # fmt: skip
        if with_job:
            each.start(new_job(tmp_path, epochs=4, learning_rate=0.001))
        for turn in range(6):
            for name in range(4):
                each.submit(f"{turn}-{name}", [3 + turn, 5 + name, 7, 11, 13], 24)
            each.until(lambda wanted=4 * turn + 4: len(each.ended) == wanted)
        if with_job:
            each.finish("job")
        return each

    without, beside = serve(False), serve(True)
    assert without.tokens == beside.tokens
    losses, _ = beside.result("job")
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert bool(beside.beside) == ("tbt_target" in options)


# Through a process


async def steps_of(client: EngineClient, job: JobStart, *, kill_after: int = 0) -> tuple[JobInfo, list[JobStep], Any]:
    """Run a job until it ends, or until its engine is killed after so many told steps."""
    run = await client.tuning.start(job)
    steps: list[JobStep] = []
    with suppress(EngineDead):
        async for event in run.events():
            if isinstance(event, JobStep):
                steps.append(event)
                if len(steps) == kill_after:
                    os.kill(client.pid, signal.SIGKILL)
            elif isinstance(event, JobEnded):
                return run.info, steps, event
    return run.info, steps, None


def test_a_killed_engine_goes_on_after_the_last_stored_step_with_the_same_losses_bit_for_bit(
    small: Callable[..., EngineConfig], alone: Callable[..., tuple[list[float], str]], tmp_path: Path
) -> None:
    expected, digest = alone(epochs=12)

    async def killed_twice() -> tuple[list[list[JobStep]], list[JobInfo], Any]:
        told, infos, ended = [], [], None
        for kill_after in (4, 5, 0):
            config = small(**TUNING | {"tuning_mirror": str(tmp_path / "mirror"), "cache_gb": 0.05})
            client = await EngineClient.start(config)
            try:
                info, steps, ended = await steps_of(client, new_job(tmp_path, epochs=12), kill_after=kill_after)
            finally:
                await client.close()
            told.append(steps)
            infos.append(info)
        return told, infos, ended

    told, infos, ended = asyncio.run(killed_twice())
    assert infos[0].step == 0 and 4 <= infos[1].step < infos[2].step < 36
    for info, steps in zip(infos, told, strict=True):
        assert [step.step for step in steps] == [*range(info.step + 1, info.step + 1 + len(steps))]
        assert [step.loss for step in steps] == expected[info.step : info.step + len(steps)]
        assert info.loss == (expected[info.step - 1] if info.step else None)
        assert [step.step for step in info.untold] == [*range(1, info.step + 1)]  # the owner says that it knows none
        assert [step.loss for step in info.untold] == expected[: info.step]
    assert infos[2].step + len(told[2]) == 36
    assert ended.outcome == "succeeded" and digest_of_adapter(ended.checkpoint) == digest


def test_a_client_names_the_adapter_of_a_job_as_soon_as_it_has_ended(
    small: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    async def use() -> None:
        client = await EngineClient.start(small(**TUNING))
        try:
            job = new_job(tmp_path, epochs=8)
            run = await client.tuning.start(job)
            assert client.tuning.runs == {"job": run} and client.tuning.names == {"tuned-job"}
            for wrong in (job, replace(job, id="other"), replace(job, id="model", name=client.info.model)):
                with pytest.raises(TuningError, match=r"open already|taken"):
                    await client.tuning.start(wrong)
            with pytest.raises(AdapterError, match="taken"):
                await client.load_adapter("tuned-job", str(tmp_path))
            with pytest.raises(TuningError, match="no open job") as missing:
                await client.tuning.change("another", "pause")
            assert missing.value.missing
            await run.pause()
            events = []
            async for event in run.events():
                events.append(event)
                if event == JobStatus("job", "paused"):  # the engine is idle by now
                    await run.resume()
            assert isinstance(events[-1], JobEnded) and client.tuning.runs == {} and client.tuning.names == set()
            info = client.adapters["tuned-job"]
            assert info == events[-1].adapter
            stream = client.stream([3, 4, 5], SamplingParams(max_tokens=3, ignore_eos=True), adapter="tuned-job")
            assert sum(len(delta.tokens) for delta in [delta async for delta in stream]) == 3
            with pytest.raises(TuningError, match="taken"):
                await client.tuning.start(replace(job, id="second"))
            client._check_alive()
        finally:
            await client.close()
        with pytest.raises(EngineDead):
            await client.tuning.start(replace(job, id="late", name="late"))

    asyncio.run(use())


def test_options_of_tuning_that_cannot_be_used_are_refused_with_the_reason(
    small: Callable[..., EngineConfig], checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"tuning_mirror .* cannot be used: it is a link, or others may write"):
        (tmp_path / "open").mkdir(mode=0o777)
        (tmp_path / "open").chmod(0o777)
        build_engine(small(**TUNING | {"tuning_mirror": str(tmp_path / "open")}))
    with pytest.raises(ValueError, match="native decoder"):
        build_engine(small(tuning=True, executor="auto", scheduler="stall-free", **padded_model(tmp_path)))
    assert torch.get_num_threads() >= 1


def padded_model(directory: Path) -> dict[str, Any]:
    from tests.checkpoints import make

    make(directory / "other", "Starcoder2")
    return {"model": str(directory / "other")}
