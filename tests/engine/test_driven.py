"""Driven jobs in a whole engine: calls and their results, several jobs, beside streams, refusals, and killed engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.client.tuning import TuningError
from holdfast.lm.config import EngineConfig
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
from holdfast.training.calls import read_result
from tests.driven import Writer, bits, drawn_data
from tests.engine.test_tuning import SLICES, TUNING, Bench

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
