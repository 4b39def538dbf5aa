"""Driven jobs in the client: their runs, their events, and an engine that does not know them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.tuning import (
    CallDone,
    CallFailed,
    DrivenRun,
    DrivenStart,
    JobEnded,
    TuningClient,
    TuningError,
)
from holdfast.lm.parts.tuning.messages import (
    DrivenInfo,
    DrivenProgress,
    DrivenStarted,
    JobChanged,
    JobRefused,
    RunCall,
    StartDriven,
)

START = DrivenStart(id="j", directory="/d")
INFO = DrivenInfo(id="j", calls=2, updates=1, rank=4, alpha=8.0, modules=("q",), micro_batch=64)


def new_client(**options: Any) -> tuple[TuningClient, list[Any]]:
    """A client, and the messages that it sends."""
    sent: list[Any] = []
    return TuningClient(sent.append, {}, lambda: None, **options), sent


async def driven(client: TuningClient, sent: list[Any]) -> DrivenRun:
    starting = asyncio.ensure_future(client.drive(START))
    while not sent:
        await asyncio.sleep(0)
    client.take(DrivenStarted(sent[-1].number, INFO))
    return await starting


async def test_a_driven_job_reserves_no_name_and_its_events_come_in_order_to_its_own_run() -> None:
    client, sent = new_client()
    run = await driven(client, sent)
    assert isinstance(sent[0], StartDriven) and sent[0].job == START and run.info == INFO
    assert client.names == set() and client.runs == {"j": run}
    client.take(DrivenProgress([CallDone("j", 2, 0.5), CallDone("other", 0)]))
    client.take(DrivenProgress([CallFailed("j", 3, "its data are bad"), JobEnded("j", "left")]))
    events = [event async for event in run.events()]
    assert events == [CallDone("j", 2, 0.5), CallFailed("j", 3, "its data are bad"), JobEnded("j", "left")]
    assert not client.runs
    with pytest.raises(TuningError, match="no open job j") as missing:
        await run.call(4)
    assert missing.value.missing


async def test_a_call_returns_when_the_engine_has_it_and_raises_its_refusal() -> None:
    client, sent = new_client()
    run = await driven(client, sent)
    for call, answer in ((2, JobChanged), (9, lambda number: JobRefused(number, "call 9 is not the next one"))):
        calling = asyncio.ensure_future(run.call(call))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sent[-1] == RunCall(sent[-1].number, "j", call) and not calling.done()
        client.take(answer(sent[-1].number))
        if call == 2:
            await calling
        else:
            with pytest.raises(TuningError, match="not the next one"):
                await calling


async def test_an_id_is_taken_by_one_job_and_free_again_after_a_refusal() -> None:
    client, sent = new_client()
    starting = asyncio.ensure_future(client.drive(START))
    while not sent:
        await asyncio.sleep(0)
    with pytest.raises(TuningError, match="job j is open already"):
        await client.drive(START)
    client.take(JobRefused(sent[0].number, "rank is 64"))
    with pytest.raises(TuningError, match="rank is 64"):
        await starting
    sent.clear()
    await driven(client, sent)


async def test_a_run_ends_with_its_engine() -> None:
    client, sent = new_client()
    run = await driven(client, sent)
    client.take(DrivenProgress([CallDone("j", 2)]))
    client.fail("it was killed")
    events = run.events()
    assert await anext(events) == CallDone("j", 2)
    with pytest.raises(EngineDead, match="it was killed"):
        await anext(events)


async def test_an_engine_of_an_older_version_is_sent_nothing_that_it_does_not_know() -> None:
    client, sent = new_client(drives=False)
    with pytest.raises(TuningError, match="older version, which knows no driven jobs"):
        await client.drive(START)
    assert not sent
