"""Driven jobs in a whole engine: calls and results, several jobs, next to streams, refusals, and killed engines."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.tuning import TuningError
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.adapters.messages import LoadAdapter
from holdfast.lm.parts.tuning.messages import (
    CallDone,
    CallFailed,
    DrivenInfo,
    DrivenProgress,
    DrivenStart,
    DrivenStarted,
    JobChanged,
    JobEnded,
    JobRefused,
    RunCall,
    StartDriven,
)
from holdfast.training.calls import Datum, call_numbers, call_path, read_result, result_numbers
from tests.driven import Writer, bits, drawn_data
from tests.engine.test_tuning import SLICES, TUNING, Bench, new_job

DRIVEN: dict[str, Any] = {**TUNING, "cache_gb": 0.05}


class DrivenBench(Bench):
    """An engine in this process, with driven jobs."""

    def drive(self, writer: Writer, **values: Any) -> DrivenInfo:
        """Start a job over a directory of calls."""
        number = len(self.sent) + 1000
        start = DrivenStart(id=writer.directory.name, directory=str(writer.directory), **{"rank": 4, **values})
        self.say(StartDriven(number, start))
        self.until(lambda: bool(self.answered(number)))
        (answer,) = self.answered(number)
        if isinstance(answer, JobRefused):
            raise TuningError(answer.reason)
        assert isinstance(answer, DrivenStarted)
        return answer.info

    def call(self, job: str, call: int) -> Any:
        """Let a job take a call. Returns the answer."""
        number = len(self.sent) + 1000
        self.say(RunCall(number, job, call))
        self.until(lambda: bool(self.answered(number)))
        return self.answered(number)[0]

    def told(self, job: str, kind: type[Any] = object) -> list[Any]:
        """The events of a driven job."""
        events = [event for message in self.sent if isinstance(message, DrivenProgress) for event in message.events]
        return [event for event in events if event.job == job and isinstance(event, kind)]

    def done(self, job: str, *numbers: int) -> None:
        """Run until calls are done or refused."""
        self.until(
            lambda: {*numbers} <= {event.number for event in self.told(job) if not isinstance(event, JobEnded)}
        )  # fmt: skip

    def loop_of(self, writer: Writer, steps: int, **values: Any) -> list[float]:
        """Do some steps of training, one after the other, as a client does. Returns the loss of each."""
        losses = []
        for step in range(steps):
            numbers = writer.step(seed=step % 2, **values)
            for number in numbers:
                assert isinstance(self.call(writer.directory.name, number), JobChanged)
            self.done(writer.directory.name, *numbers)
            losses.append(read_result(writer.directory, numbers[0]).metrics["loss:sum"])
        return losses


@pytest.fixture
def bench(small: Callable[..., EngineConfig]) -> Iterable[Callable[..., DrivenBench]]:
    """Makes engines of a small random model that take driven jobs."""
    made: list[DrivenBench] = []

    def make(**changes: Any) -> DrivenBench:
        made.append(DrivenBench(small(**{**DRIVEN, **changes})))
        return made[-1]

    yield make
    for each in made:
        with suppress(RuntimeError):
            each.close()


def test_a_loop_of_gradients_and_updates_lowers_the_loss(bench: Callable[..., DrivenBench], tmp_path: Path) -> None:
    each, writer = bench(), Writer(tmp_path / "job")
    info = each.drive(writer)
    assert (info.calls, info.updates, info.alpha, info.micro_batch, len(info.modules)) == (0, 0, 8.0, 128, 7)
    losses = each.loop_of(writer, 6)
    assert losses[4] < losses[0] and losses[5] < losses[1]
    assert [event.number for event in each.told("job", CallDone)] == [*range(12)]
    first = read_result(writer.directory, 0)
    assert [len(part) for part in first.logprobs] == [len(datum.tokens) for datum in drawn_data(seed=0)]
    assert -sum(float(part.sum()) for part in first.logprobs) == pytest.approx(losses[0], rel=1e-5)
    assert not each.loop.has_work()
    each.change("job", "cancel")
    each.until(lambda: bool(each.told("job", JobEnded)))
    assert each.told("job", JobEnded)[0].outcome == "cancelled" and each.lent[-1] == 0
    assert sorted(path.name for path in writer.directory.iterdir()) == ["job.json"]


def test_a_datum_above_a_micro_batch_that_the_engine_chose_is_computed_by_itself(
    bench: Callable[..., DrivenBench], tmp_path: Path
) -> None:
    found = []
    for name, changes, size in (("alone", {"tuning_micro_batch": "auto"}, 16), ("together", {}, 128)):
        each, writer = bench(**changes), Writer(tmp_path / name)
        info = each.drive(writer, micro_batch=size)
        assert info.micro_batch == (each.info.max_model_len if name == "alone" else 128)
        found.append(each.loop_of(writer, 2))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def everything(writer: Writer) -> list[tuple[dict[str, float], list[bytes]]]:
    """The results of all calls that have one, with the bits of their log probabilities."""
    found = [read_result(writer.directory, number) for number in result_numbers(writer.directory)]
    return [({**each.metrics}, bits(each.logprobs)) for each in found]


@pytest.mark.always("slices")
@pytest.mark.parametrize("options", [{"deferral_bound": 0.0}, SLICES], ids=["deferral", "slices"])
def test_calls_give_the_same_bits_next_to_chats_and_chats_the_same_tokens(
    bench: Callable[..., DrivenBench], options: dict[str, Any], tmp_path: Path
) -> None:
    def serve(*, chats: bool, calls: bool) -> tuple[DrivenBench, Writer]:
        each, writer = bench(max_sequences=3, **options), Writer(tmp_path / f"{chats}-{calls}" / "job")
        if calls:
            each.drive(writer)
        for turn in range(3):
            for name in range(3 if chats else 0):
                each.submit(f"{turn}-{name}", [3 + turn, 5 + name, 7, 11, 13], 12)
            if calls:
                each.loop_of(writer, 2)
            each.until(lambda wanted=3 * turn + 3: len(each.ended) == wanted or not chats)
        return each, writer

    both, beside = serve(chats=True, calls=True)
    _, alone = serve(chats=False, calls=True)
    chats, _ = serve(chats=True, calls=False)
    assert everything(beside) == everything(alone) and len(everything(alone)) == 12
    assert both.tokens == chats.tokens and all(len(tokens) == 12 for tokens in chats.tokens.values())


def test_two_driven_jobs_and_one_over_files_share_the_base_and_each_gets_what_it_gets_alone(
    bench: Callable[..., DrivenBench], tmp_path: Path
) -> None:
    kinds: dict[str, Any] = {"one": {}, "two": dict(rank=8, modules=("q", "v"), seed=3)}
    expected = {}
    each = bench()
    for name, values in kinds.items():
        writer = Writer(tmp_path / "alone" / name)
        each.drive(writer, **values)
        each.loop_of(writer, 3)
        expected[name] = everything(writer)
        each.change(name, "cancel")
    each.start(new_job(tmp_path / "alone", "files"))
    each.finish("files")
    losses = each.result("files")
    each.close()
    each = bench()
    each.start(replace(new_job(tmp_path / "together", "files"), tenant="other"))
    writers = {name: Writer(tmp_path / "together" / name) for name in kinds}
    for name, writer in writers.items():
        each.drive(writer, **kinds[name])
    for step in range(3):
        numbers = {name: writer.step(seed=step % 2) for name, writer in writers.items()}
        for name, own in numbers.items():
            for number in own:
                each.call(name, number)
        for name, own in numbers.items():
            each.done(name, *own)
    each.finish("files")
    assert {name: everything(writer) for name, writer in writers.items()} == expected
    assert each.result("files") == losses
    assert each.actions["restore"] > 3


def test_inference_that_needs_memory_takes_it_back_from_a_job_that_waits(
    bench: Callable[..., DrivenBench], tmp_path: Path
) -> None:
    expected = Writer(tmp_path / "alone" / "job")
    each = bench()
    each.drive(expected)
    each.loop_of(expected, 4)
    each = bench(cache_gb=0.004, tuning_memory_fraction=0.9, max_adapters=1, max_adapter_rank=4, **SLICES)
    blocks, writer = each.info.num_blocks, Writer(tmp_path / "job")
    each.drive(writer)
    for wave in range(4):
        each.loop_of(writer, 1) if wave % 2 == 0 else None
        if wave % 2:
            numbers = writer.step(seed=1)
        for number in range(8):
            prompt = [3 + (wave + number * 7 + at) % 90 for at in range(blocks * 16 // 9 - 40)]
            each.submit(f"{wave}-{number}", prompt, 20)
        if wave % 2:
            for number in numbers:
                each.call("job", number)
        each.until(lambda wanted=wave: {f"{wanted}-{number}" for number in range(8)} <= each.ended)
        each.done("job", *range(writer.next))
    assert each.actions["offload"] > 1 and each.loop.stats().preemptions == 0
    seeds = [everything(writer)[at] for at in range(2)]
    assert seeds == everything(expected)[:2], "the first step is the same one"


def test_a_call_that_cannot_run_is_refused_alone_and_the_job_goes_on(
    bench: Callable[..., DrivenBench], tmp_path: Path
) -> None:
    probe, writer = bench(cache_gb=0.005), Writer(tmp_path / "job")
    probe.drive(writer, rank=2, micro_batch=256)
    blocks = [probe.tuning._trainer.blocks("job", tokens) for tokens in (64, 255)]
    each = bench(cache_gb=0.005, tuning_memory_fraction=sum(blocks) / 2 / probe.info.num_blocks)
    probe.close()
    each.drive(writer, rank=2, micro_batch=256)
    long = Datum([5] * 255, [6] * 255)
    assert isinstance(each.call("job", writer.write("forward_backward", [long, long, long])), JobChanged)
    each.call("job", writer.write("forward", [Datum([5] * 300, [6] * 300)]))
    each.call("job", writer.write("forward", [Datum([5], [5000])]))
    call_path(writer.directory, 3).write_bytes(b"HFCALL01 damaged")
    writer.next = 4
    each.call("job", 3)
    each.call("job", writer.write("load", directory=str(tmp_path / "nowhere")))
    each.call("job", writer.write("forward", [Datum([5] * 20, [6] * 20)]))
    each.done("job", *range(6))
    reasons = [event.reason for event in each.told("job", CallFailed)]
    assert [event.number for event in each.told("job")] == [*range(6)]
    expected = (
        "needs .* blocks of the cache .* may be lent",
        "datum 0 has 300 tokens; it may have 2",
        "targets of datum 0 have 5000",
        "is not a whole file|damaged",
        "saved state cannot be read",
    )
    for reason, words in zip(reasons, expected, strict=True):
        assert re.search(words, reason) and str(tmp_path) not in reason
    answer = each.call("job", 9)
    assert isinstance(answer, JobRefused) and "call 9 of job job is not the next one, which is 6" in answer.reason
    assert isinstance(each.call("job", 2), JobChanged), "one that it has already is no error"


def test_what_cannot_be_driven_is_refused_with_the_reason(bench: Callable[..., DrivenBench], tmp_path: Path) -> None:
    each = bench()
    for values, words in (
        ({"rank": 64}, "max_adapter_rank is 16"),
        ({"modules": ("x",)}, "modules are x"),
        ({"attention": False, "mlp": False}, "modules to tune are those of nothing"),
        ({"micro_batch": 0, "rank": 0}, "rank is 0"),
    ):
        with pytest.raises(TuningError, match=words) as refused:
            each.drive(Writer(tmp_path / f"job-{len(each.sent)}"), **values)
        assert str(tmp_path) not in str(refused.value)
    writer = Writer(tmp_path / "job")
    each.drive(writer)
    with pytest.raises(TuningError, match="open already"):
        each.drive(writer)
    assert isinstance(each.call("another", 0), JobRefused)
    each.start(new_job(tmp_path, "files", paused=True))
    with pytest.raises(TuningError, match="is a job over files"):
        each.drive(Writer(tmp_path / "files"))
    assert isinstance(each.call("files", 0), JobRefused)


def test_a_job_that_is_left_continues_with_the_calls_that_no_state_includes(
    bench: Callable[..., DrivenBench], tmp_path: Path
) -> None:
    alone = Writer(tmp_path / "alone" / "job")
    each = bench()
    each.drive(alone)
    each.loop_of(alone, 3)
    each.call("job", alone.write("forward_backward", drawn_data(seed=5)))
    each.call("job", alone.write("optimize"))
    each.done("job", 7)
    each.change("job", "leave")
    each.until(lambda: bool(each.told("job", JobEnded)))
    each.sent.clear()
    writer = Writer(tmp_path / "job")
    each.drive(writer)
    each.loop_of(writer, 3)
    each.call("job", writer.write("forward_backward", drawn_data(seed=5)))
    each.done("job", 6)
    each.change("job", "leave")
    each.until(lambda: bool(each.told("job", JobEnded)))
    assert each.told("job", JobEnded)[0].outcome == "left" and not each.loop.has_work()
    assert call_numbers(writer.directory) == [6] and each.loop.stats().blocks_training == 0
    each.sent.clear()
    writer.write("optimize")
    info = each.drive(writer, known=5)
    assert (info.calls, info.updates) == (6, 3)
    each.done("job", 5, 6, 7)
    assert [event.number for event in each.told("job")] == [5, 6, 7], "the engine finds call 7 by itself"
    assert everything(writer) == everything(alone)


def test_saves_and_loads_are_calls_in_order_and_a_saved_adapter_is_served(
    bench: Callable[..., DrivenBench], tmp_path: Path
) -> None:
    each, writer = bench(), Writer(tmp_path / "job")
    each.drive(writer)
    numbers = [
        *writer.step(rate=0.05),
        writer.write("save", directory=str(tmp_path / "saved")),
        writer.write("save_adapter", directory=str(tmp_path / "adapter")),
        writer.write("forward", drawn_data(seed=9)),
        *writer.step(seed=2),
        writer.write("load", directory=str(tmp_path / "saved")),
        writer.write("forward", drawn_data(seed=9)),
    ]
    assert isinstance(each.call("job", numbers[-1]), JobChanged), "it stands for all that are on the disk"
    each.done("job", *numbers)
    assert [event.number for event in each.told("job", CallDone)] == numbers
    results = {number: read_result(writer.directory, number) for number in numbers}
    assert bits(results[4].logprobs) == bits(results[8].logprobs)
    each.say(LoadAdapter(5000, "mine", str(tmp_path / "adapter")))
    each.until(lambda: bool(each.answered(5000)))
    (loaded,) = each.answered(5000)
    for name, adapter in (("tuned", loaded.info.id), ("base", "")):
        each.submit(name, drawn_data()[0].tokens[:10], 12, adapter)
    each.until(lambda: len(each.ended) == 2)
    assert each.tokens["tuned"] != each.tokens["base"]


# Through a process


async def drive_until(client: EngineClient, writer: Writer, known: int, upto: int, *, kill: bool) -> tuple[int, int]:
    """Drive a job until so many calls are done. Returns the calls of its stored state, and those that are done."""
    start = DrivenStart(id="job", directory=str(writer.directory), rank=4, known=known)
    run = await client.tuning.drive(start)
    for number in range(run.info.calls, writer.next):
        await run.call(number)
    async for event in run.events():
        assert isinstance(event, CallDone) and event.number == known, "each once, in order"
        known += 1
        if known == upto:
            if kill:
                os.kill(client.pid, signal.SIGKILL)
            break  # more events may have come
    return run.info.calls, known


def test_a_killed_engine_goes_on_in_mid_loop_with_the_same_bits(
    small: Callable[..., EngineConfig], bench: Callable[..., DrivenBench], tmp_path: Path
) -> None:
    alone = Writer(tmp_path / "alone" / "job")
    each = bench()
    each.drive(alone)
    each.loop_of(alone, 6)
    each.close()
    writer = Writer(tmp_path / "job")
    for step in range(6):
        writer.step(seed=step % 2)

    async def killed_twice() -> list[tuple[int, int]]:
        found, known = [], 0
        for upto in (4, 7, 12):
            config = small(**{**DRIVEN, "tuning_mirror": str(tmp_path / "mirror")})
            client = await EngineClient.start(config)
            try:
                found.append(await drive_until(client, writer, known, upto, kill=upto < 12))
                known = found[-1][1]
            finally:
                await client.close()
        return found

    found = asyncio.run(killed_twice())
    assert [done for _, done in found] == [4, 7, 12]
    assert found[0][0] == 0 and 2 <= found[1][0] <= found[2][0] <= 12
    assert everything(writer) == everything(alone)
