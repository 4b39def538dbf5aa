"""EngineClient and its messages, with a process that only a test plays: what is sent, and who gets each answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from holdfast.core.contract import Contract, ContractRefused, Refusal
from holdfast.core.types import AdapterInfo, FinishReason, Found, Identity, SamplingParams
from holdfast.engine import messages
from holdfast.engine.client import connection
from holdfast.engine.client.client import AdapterError, EngineClient
from holdfast.engine.client.connection import CLOCKS, EngineDead, QueueFull
from holdfast.engine.client.tuning import JobEnded, JobInfo, JobStart, JobStep, TuningError
from holdfast.lm.config import EngineConfig
from holdfast.lm.limits import RequestRefused
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.parts.adapters.messages import (
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from holdfast.lm.parts.moves.messages import ChunksFetched, ChunksFound, FetchChunks, FindChunks, StopFetch
from holdfast.lm.parts.pauses.messages import WarmState
from holdfast.lm.parts.tuning.messages import ChangeJob, JobChanged, JobProgress, JobRefused, JobStarted, StartJob
from tests.engine.client.test_stream import Letters
from tests.fake_engine import engine_info


def job_start(name: str, adapter: str) -> JobStart:
    return JobStart(id=name, directory="/there", name=adapter, data_digest="0")


class Wire:
    """The engine's end of the link."""

    pid = 1

    def __init__(self, end: Callable[[str], None], process: Any) -> None:
        self.sent: list[Any] = []
        self.killed = self.closed = False

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def hide(self) -> None:
        pass

    def kill(self) -> None:
        self.killed = True

    async def close(self, *, at_once: bool) -> None:
        self.closed = True

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class Told(Letters):
    """A text that says whether it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest_asyncio.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    monkeypatch.setattr(connection, "Child", Wire)
    process: Any = SimpleNamespace(remote=None, began=0.0)
    made = EngineClient(EngineConfig(max_waiting=2, served_model_name=("m", "alias")), process=process)
    made.info, made.text = engine_info(model="m"), Told()  # type: ignore[assignment]
    yield made
    await made.close()


def wire(client: EngineClient) -> Wire:
    return client._child  # type: ignore[return-value]


def outputs(name: str, text: str, reason: FinishReason | None = None, at: float = 1.0) -> messages.Outputs:
    columns: dict[str, Any] = {
        "request_id": [name], "tokens": [tuple(map(ord, text))], "finish_reason": [reason], "cached_tokens": [0],
        "scheduled_at": [at], "preemptions": [0], "logprobs": [()], "prompt_logprobs": [()], "vector": [b""],
        "cached_by_tier": [(0, 0, 0)],
    }  # fmt: skip
    return messages.Outputs(**columns)


async def begun(client: EngineClient, name: str, **options: Any) -> tuple[Any, asyncio.Task[Any]]:
    """A stream whose first delta is awaited."""
    stream = client.stream([1, 2, 3], SamplingParams(max_tokens=9, **options), request_id=name)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    return stream, reading


async def test_a_request_is_sent_when_its_first_delta_is_awaited_and_a_normal_end_is_not_answered(
    client: EngineClient,
) -> None:
    stream = client.stream([1, 2, 3], SamplingParams(max_tokens=9), request_id="a")
    assert wire(client).sent == []
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    (submit,) = wire(client).sent
    assert (submit.request.id, [*submit.request.prompt]) == ("a", [1, 2, 3])
    client._take(outputs("a", "x"))
    assert (await reading).text == "x"
    client._take(outputs("a", "y", FinishReason.LENGTH))
    assert [delta.text async for delta in stream] == ["y"]
    assert wire(client).sent == [submit], "the engine has ended it itself"


@pytest.mark.parametrize("leave", ["close", "cancel"])
async def test_a_reader_that_leaves_aborts_its_request_and_later_outputs_are_ignored(
    client: EngineClient, leave: str
) -> None:
    stream, reading = await begun(client, "a")
    if leave == "cancel":
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    else:
        client._take(outputs("a", "x"))
        await reading
        await stream.aclose()
    assert [message.request_id for message in wire(client).of(messages.Abort)] == ["a"]
    client._take(outputs("a", "y"))
    client._take(messages.Refused("a", "too late"))
    assert not client._streams and not client._waiting


async def test_a_stop_string_aborts_the_request_at_the_engine_at_once(client: EngineClient) -> None:
    stream, reading = await begun(client, "a", stop=("END",))
    client._take(outputs("a", "xEND"))
    assert len(wire(client).of(messages.Abort)) == 1, "before anybody has read it"
    delta = await reading
    assert (delta.text, delta.stop_string) == ("x", "END")
    assert [delta async for delta in stream] == [] and len(wire(client).of(messages.Abort)) == 1


async def test_places_in_the_queue_are_given_back_with_the_first_token_a_refusal_or_a_reader_that_leaves(
    client: EngineClient,
) -> None:
    _, first = await begun(client, "a")
    second_stream, second = await begun(client, "b")
    assert client.full
    with pytest.raises(QueueFull, match="2 requests wait, and max_waiting is 2"):
        client.stream([1], SamplingParams())
    client._take(outputs("a", "x"))
    assert not client.full and (await first).text == "x"
    _, third = await begun(client, "c")
    assert client.full
    client._take(messages.Refused("c", "it is bad", "grammar"))
    assert not client.full
    with pytest.raises(RequestRefused, match="it is bad") as refused:
        await third
    assert refused.value.param == "grammar" and not wire(client).of(messages.Abort)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert client._waiting == set()
    await second_stream.aclose()


async def test_a_refused_contract_ends_its_stream_with_what_the_engine_said(client: EngineClient) -> None:
    contract, refusal = Contract(ttft=0.5, tbt=0.05), Refusal("too busy", 1.5, Contract(ttft=0.75))
    stream = client.stream([1], SamplingParams(), request_id="a", contract=contract, arrival=12.5)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    (submit,) = wire(client).of(messages.Submit)
    assert (submit.request.contract, submit.request.arrival) == (contract, 12.5)
    client._take(messages.ContractRefusal("a", refusal))
    with pytest.raises(ContractRefused, match="too busy") as refused:
        await reading
    assert refused.value.refusal == refusal
    assert not client._streams and not client._waiting and not wire(client).of(messages.Abort)
    client._take(messages.ContractRefusal("a", refusal))  # nobody waits for it any more


async def test_an_id_is_taken_while_its_request_runs_also_if_it_was_asked_for_before(client: EngineClient) -> None:
    early = client.stream([1], SamplingParams(max_tokens=9), request_id="a")
    _, reading = await begun(client, "a")
    with pytest.raises(RequestRefused, match="request id a is already in use"):
        client.stream([1], SamplingParams(), request_id="a")
    with pytest.raises(RequestRefused, match="already in use"):
        await anext(early)
    client._take(outputs("a", "x", FinishReason.LENGTH))
    assert (await reading).text == "x", "the refusal has not touched it"
    _, again = await begun(client, "a")
    again.cancel()


async def test_the_clock_of_another_host_is_the_largest_difference_of_the_last_answers(client: EngineClient) -> None:
    now = time.monotonic()
    for late in (150.0, 50.0, 100.0):
        client._take(messages.Clock(now + 1000.0 - late))
    assert client.ahead == pytest.approx(950.0, abs=10.0)
    for _ in range(CLOCKS):
        client._take(messages.Clock(time.monotonic() + 500.0))
    assert client.ahead == pytest.approx(500.0, abs=10.0), "clocks drift: old answers are forgotten"
    _, reading = await begun(client, "a")
    (submit,) = wire(client).of(messages.Submit)
    assert submit.request.arrival == pytest.approx(time.monotonic() + 500.0, abs=10.0), "in the engine's time"
    at = time.monotonic()
    await asyncio.sleep(0.01)
    client._take(outputs("a", "x", FinishReason.LENGTH, at=at + client.ahead))
    timings = (await reading).timings
    assert timings.scheduled == pytest.approx(at, abs=1e-3)
    assert timings.arrival <= timings.scheduled <= timings.first_token


async def test_each_question_gets_its_own_answer_and_an_answer_that_nobody_awaits_is_ignored(
    client: EngineClient,
) -> None:
    finds = [asyncio.ensure_future(client.found([bytes([number])])) for number in range(2)]
    fetch = asyncio.ensure_future(client.fetch([b"a", b"b", b"c"], [0, 2], "there:1"))
    await asyncio.sleep(0)
    first, second = wire(client).of(FindChunks)
    (asked,) = wire(client).of(FetchChunks)
    assert (asked.digests, asked.indices, asked.source) == ([b"a", b"c"], [0, 2], "there:1")
    client._take(ChunksFound(second.number, 1, 2, 3))
    client._take(ChunksFetched(asked.number, 32, "half of it"))
    assert (await finds[1], await fetch) == (Found(1, 2, 3), 32) and not finds[0].done()
    client._take(ChunksFound(first.number, 0, 0, 0))
    assert await finds[0] == Found()
    for _ in range(2):
        client._take(ChunksFound(first.number, 9, 9, 9))
        client._take(ChunksFetched(asked.number, 9))
    assert not client._questions._open and not wire(client).of(StopFetch)


async def test_a_fetch_that_nobody_awaits_any_longer_is_stopped(client: EngineClient) -> None:
    fetch = asyncio.ensure_future(client.fetch([b"a"], [0], "there:1"))
    await asyncio.sleep(0)
    fetch.cancel()
    await asyncio.gather(fetch, return_exceptions=True)
    (asked,) = wire(client).of(FetchChunks)
    assert [message.number for message in wire(client).of(StopFetch)] == [asked.number]
    assert not client._questions._open


async def test_health_asks_once_for_each_caller_and_forgets_those_that_wait_too_long(client: EngineClient) -> None:
    with pytest.raises(TimeoutError):
        await client.health(0.01)
    (ask,) = wire(client).of(messages.Ask)
    assert not client._questions._open
    client._take(messages.Stats(ask.number, None))  # type: ignore[arg-type]  # late: nobody waits
    asking = asyncio.ensure_future(client.health(5))
    await asyncio.sleep(0)
    stats: Any = object()
    client._take(messages.Stats(wire(client).of(messages.Ask)[1].number, stats))
    assert await asking is stats


async def test_steps_and_activity_reach_those_who_listen(client: EngineClient) -> None:
    heard: list[Any] = []
    client._take(messages.Steps([1], [0.5]))
    client.on_steps = heard.append
    client.on_activity = heard.append
    client._take(messages.Steps([3, 4], [0.1, 0.2], 0.25, (0.3,)))
    activity = messages.Activity(1.0, True, [], [], None, None, None)
    client._take(activity)
    assert heard == [messages.Steps([3, 4], [0.1, 0.2], 0.25, (0.3,)), activity]
    client.watch(7.0)
    assert [message.seconds for message in wire(client).of(messages.Watch)] == [7.0]


ONE, TWO = (AdapterInfo(content, "a", 8, 100, ("q_proj",)) for content in ("a@1", "a@2"))


async def loaded(client: EngineClient, info: AdapterInfo, **options: Any) -> AdapterInfo:
    loading = asyncio.ensure_future(client.load_adapter(info.name, "/there", **options))
    await asyncio.sleep(0)
    client._take(AdapterLoaded(wire(client).of(LoadAdapter)[-1].number, info))
    return await loading


async def test_a_replaced_adapter_is_unloaded_and_one_of_equal_content_is_not(client: EngineClient) -> None:
    await loaded(client, ONE)
    with pytest.raises(AdapterError, match="the name a is taken"):
        await client.load_adapter("a", "/there")
    assert await loaded(client, ONE, replace=True) == ONE
    assert not wire(client).of(UnloadAdapter)
    assert await loaded(client, TWO, replace=True) == TWO and client.adapters == {"a": TWO}
    assert [message.adapter for message in wire(client).of(UnloadAdapter)] == ["a@1"]


@pytest.mark.parametrize("name", ["m", "alias", "job-adapter"])
async def test_an_adapter_takes_no_name_of_the_model_or_of_a_tuning_job(client: EngineClient, name: str) -> None:
    client.tuning._starting["job"] = "job-adapter"
    with pytest.raises(AdapterError, match=f"the name {name} is taken"):
        await client.load_adapter(name, "/there", replace=True)
    assert not wire(client).sent and not client._changing


async def test_a_name_changes_once_at_a_time_and_again_after_a_refusal(client: EngineClient) -> None:
    loading = asyncio.ensure_future(client.load_adapter("a", "/there"))
    await asyncio.sleep(0)
    for change in (client.load_adapter("a", "/other"), client.unload_adapter("a")):
        with pytest.raises(AdapterError, match="adapter a is being loaded or unloaded"):
            await change
    (asked,) = wire(client).of(LoadAdapter)
    client._take(AdapterRefused(asked.number, "it is bad"))
    with pytest.raises(AdapterError, match="it is bad"):
        await loading
    assert client.adapters == {} and not client._questions._open
    await loaded(client, ONE)
    unloading = asyncio.ensure_future(client.unload_adapter("a"))
    await asyncio.sleep(0)
    assert client.adapters == {}, "no new request may name it"
    (unload,) = wire(client).of(UnloadAdapter)
    assert unload.adapter == "a@1" and not unloading.done()
    client._take(AdapterUnloaded(unload.number))
    await unloading
    with pytest.raises(AdapterError) as missing:
        await client.unload_adapter("a")
    assert missing.value.missing


async def test_a_request_is_of_its_tenant_and_of_the_content_of_its_adapter(client: EngineClient) -> None:
    await loaded(client, ONE)
    stream = client.stream([1, 2], SamplingParams(max_tokens=2), tenant="t", adapter="a")
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    identity = wire(client).of(messages.Submit)[0].request.identity
    assert (identity.tenant, identity.adapter, identity.model) == ("t", "a@1", "m")
    prompt = [*range(40)]
    chains = [client.chain(prompt, tenant=tenant, adapter=name) for tenant, name in (("t", "a"), ("t", ""), ("", "a"))]
    assert len({*map(tuple, chains)}) == 3 and {*map(len, chains)} == {2}
    assert client.chain(prompt[:32], tenant="t", adapter="a") == chains[0][:1], "the last token is always computed"
    salted = Identity("m", "a@1", client.info.precision, "t", "s")
    asked = {"tenant": "t", "adapter": "a", "salt": "s"}
    assert client.chain(prompt, **asked) == block_digests(salted.root(), prompt[:32], 16)
    client.warm(prompt, **asked)
    assert wire(client).of(WarmState)[0].chain == client.chain(prompt, **asked)
    for ask in (
        lambda: client.chain(prompt, adapter="b"),
        lambda: client.stream(prompt, SamplingParams(), adapter="b"),
    ):
        with pytest.raises(RequestRefused, match="there is no adapter b"):
            ask()
    reading.cancel()


async def test_the_end_of_the_engine_ends_everything_with_its_reason_and_nothing_is_sent_to_it(
    client: EngineClient,
) -> None:
    _, reading = await begun(client, "a")
    waiting = [
        reading,
        *map(
            asyncio.ensure_future,
            (
                client.found([b"a"]), client.fetch([b"a"], [0], "there:1"), client.health(5),
                client.load_adapter("x", "/there"), client.tuning.start(job_start("j", "n")),
            ),
        ),
    ]  # fmt: skip
    for _ in range(3):
        await asyncio.sleep(0)
    sent = len(wire(client).sent)
    client._take(messages.Failure("the GPU is gone"))
    client._take(messages.Failure("and something else"))
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [(type(end), str(end)) for end in ends] == [(EngineDead, "the GPU is gone")] * 6
    assert len(wire(client).sent) == sent and client.dead.is_set() and not client.retired
    for ask in (lambda: client.stream([1], SamplingParams()), lambda: client.watch(1.0)):
        with pytest.raises(EngineDead, match="the GPU is gone"):
            ask()
    assert not (client._streams or client._waiting or client._questions._open or client.tuning.names)


async def test_a_client_that_is_closed_while_its_engine_lives_has_retired_it_and_closes_its_text_once(
    client: EngineClient,
) -> None:
    own: Any = client.text
    _, reading = await begun(client, "a")
    await client.close()
    assert client.retired and wire(client).closed and own.closed == 1
    with pytest.raises(EngineDead, match="the engine was closed"):
        await reading


async def test_a_text_of_another_owner_is_used_and_not_closed(client: EngineClient) -> None:
    own: Any = client.text
    shared: Any = Told()
    client.use_text(shared)
    assert own.closed == 1 and client.text is shared
    client.use_text(shared)
    await client.close()
    assert shared.closed == 0


JOB = job_start("j", "tuned")


def job_info(name: str = "j") -> JobInfo:
    return JobInfo(
        id=name, step=0, steps=3, examples=2, trained_tokens=0, loss=None, validation=None, checkpoint="", epochs=1,
        batch_size=1, learning_rate=1e-4, rank=8, alpha=16.0, modules=(), dora=False,
        micro_batch=16,
    )  # fmt: skip


async def tuned(client: EngineClient) -> Any:
    starting = asyncio.ensure_future(client.tuning.start(JOB))
    for _ in range(3):
        await asyncio.sleep(0)
    client._take(JobStarted(wire(client).of(StartJob)[-1].number, job_info()))
    return await starting


async def test_a_jobs_events_come_in_order_to_its_own_run_and_its_end_is_the_last(client: EngineClient) -> None:
    run = await tuned(client)
    steps = [JobStep("j", number, 3, 10, 0.5) for number in (1, 2)]
    client._take(JobProgress([steps[0], JobStep("other", 1, 3, 10, 0.5)]))
    client._take(JobProgress([steps[1], JobEnded("j", "succeeded", adapter=AdapterInfo("t@1", "tuned", 8, 100, ()))]))
    client._take(JobProgress([JobStep("j", 3, 3, 10, 0.5)]))
    events = [event async for event in run.events()]
    assert events[:2] == steps and len(events) == 3 and isinstance(events[2], JobEnded)
    assert client.adapters["tuned"].id == "t@1" and not client.tuning.runs and not client.tuning.names


async def test_an_id_or_a_name_of_a_job_is_taken_until_it_has_ended_or_was_refused(client: EngineClient) -> None:
    starting = asyncio.ensure_future(client.tuning.start(JOB))
    for _ in range(3):
        await asyncio.sleep(0)
    with pytest.raises(TuningError, match="job j is open already"):
        await client.tuning.start(JOB)
    with pytest.raises(TuningError, match="the name tuned is taken"):
        await client.tuning.start(job_start("k", "tuned"))
    client._take(JobRefused(wire(client).of(StartJob)[0].number, "it is bad"))
    with pytest.raises(TuningError, match="it is bad"):
        await starting
    await tuned(client)
    assert client.tuning.names == {"tuned"} and [*client.tuning.runs] == ["j"]
    client._take(JobProgress([JobEnded("j", "failed", "it is bad")]))
    assert client.tuning.names == set()
    assert (await tuned(client)).id == "j"


@pytest.mark.parametrize("action", ["pause", "resume", "cancel", "leave"])
async def test_a_change_of_a_job_waits_until_the_engine_has_it(client: EngineClient, action: str) -> None:
    run = await tuned(client)
    changing = asyncio.ensure_future(getattr(run, action)())
    for _ in range(3):
        await asyncio.sleep(0)
    (change,) = wire(client).of(ChangeJob)
    assert (change.job, change.action) == ("j", action) and not changing.done()
    client._take(JobChanged(change.number))
    await changing
    again = asyncio.ensure_future(getattr(run, action)())
    for _ in range(3):
        await asyncio.sleep(0)
    client._take(JobRefused(wire(client).of(ChangeJob)[1].number, "there is no open job j", True))
    with pytest.raises(TuningError) as refused:
        await again
    assert refused.value.missing
    with pytest.raises(TuningError, match="there is no open job k"):
        await client.tuning.change("k", action)  # type: ignore[arg-type]


async def test_a_run_ends_with_its_engine_after_the_events_that_had_come(client: EngineClient) -> None:
    run = await tuned(client)
    step = JobStep("j", 1, 3, 10, 0.5)
    client._take(JobProgress([step]))
    client._take(messages.Failure("the GPU is gone"))
    seen = []
    with pytest.raises(EngineDead, match="the GPU is gone"):
        async for event in run.events():
            seen.append(event)
    assert seen == [step] and not client.tuning.runs and not client.tuning.names
