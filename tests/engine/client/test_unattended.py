"""The wait for an engine that no client is attached to: who counts as attached, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.engine.client import unattended
from holdfast.engine.client.attachment import Attachment
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.unattended import until_unattended
from tests.engine.conftest import checkpoint, small  # noqa: F401  # fixtures

LONG = 3600.0


class Counted:
    """An engine with a number of clients that the test sets, and its own clock."""

    def __init__(self, *counts: int | None) -> None:
        """One number for each answer; None for no answer in time. The last one repeats."""
        self.counts, self.asked = counts, 0

    async def count_clients(self) -> int:
        count = self.counts[min(self.asked, len(self.counts) - 1)]
        self.asked += 1
        if count is None:
            raise TimeoutError
        return count


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A clock that goes on by the seconds of each sleep."""
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(unattended.asyncio, "sleep", sleep)
    monkeypatch.setattr(unattended.time, "monotonic", lambda: now[0])
    return lambda: now[0]


@pytest.mark.parametrize(
    ("counts", "ends"),
    [((0,), 60.0), ((1, 0), 65.0), ((0, 0, 2, 0), 75.0), ((0, None, 0), 70.0)],
)
async def test_the_wait_begins_anew_with_each_attached_client_and_each_missing_answer(
    clock: Callable[[], float], counts: tuple[Any, ...], ends: float
) -> None:
    await until_unattended(Counted(*counts), 60.0)  # type: ignore[arg-type]
    assert clock() == ends


async def test_an_engine_counts_its_attached_clients_and_not_the_one_that_started_it(small, tmp_path) -> None:  # noqa: F811
    address = str(tmp_path / "engine.sock")
    engine = await EngineClient.start(small(), listen=address)
    assert await engine.count_clients() == 0
    attachment, welcome = await Attachment.open(address)
    client = await EngineClient.attach(attachment, welcome)
    assert (await engine.count_clients(), await client.count_clients()) == (1, 1)
    waiting = asyncio.create_task(until_unattended(engine, 0.5))
    await asyncio.sleep(1.5)
    assert not waiting.done()
    await client.close()
    await asyncio.wait_for(waiting, 60)
    await engine.close()
    with pytest.raises(EngineDead):
        await until_unattended(engine, LONG)
