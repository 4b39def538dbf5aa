"""Reports of the pace on their way to the planner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.engine import messages
from holdfast.engine.process.handler import RefusalHandler
from holdfast.engine.process.parts.pace import PaceBuilder, PaceHandler
from holdfast.lm.config import EngineConfig
from holdfast.lm.scheduler.policies import LatencyTarget
from tests.scheduling import create_scheduler


class Noting(LatencyTarget):
    """Notes what clients report."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []

    def note_waits(self, count: int, late: int) -> None:
        self.noted.append((count, late))


def test_a_report_crosses_between_the_processes_unchanged() -> None:
    message = messages.TokenWaits(40, 3)
    assert messages.decode_to_engine(messages.encode(message)) == message


@pytest.mark.parametrize(("count", "late"), [(3, 4), (-1, -1), (5, -1)])
def test_a_report_that_cannot_be_true_is_ignored(count: int, late: int) -> None:
    handler = PaceHandler(create_scheduler(policy=(policy := Noting())))
    handler.receive(messages.TokenWaits(count, late))
    handler.receive(messages.TokenWaits(40, 3))
    assert policy.noted == [(40, 3)]


def test_an_engine_without_a_target_takes_reports_and_answers_nothing() -> None:
    site: Any = SimpleNamespace(config=EngineConfig())
    served: Any = SimpleNamespace(scheduler=create_scheduler())
    assert not [*PaceBuilder(site).handlers(served)]
    handler = RefusalHandler(PaceBuilder.refusals)
    handler.receive(messages.TokenWaits(40, 3))
    assert not [*handler.answers()]
