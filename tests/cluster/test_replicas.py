"""Replicas over scripted engines: deaths, restarts, hangs, adapters, draining, queues, and counters."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fake_engine import engine_info

from holdfast.cluster import fleet
from holdfast.cluster.baselines import PrefixTree
from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.fleet import NoReplica
from holdfast.cluster.replica import State
from holdfast.cluster.replicas import ReplicaLost, Replicas, router_for
from holdfast.cluster.scaling import Load, Scaler
from holdfast.core.types import AdapterInfo, FinishReason, Found, Request, SamplingParams, SequenceOutput
from holdfast.engine.client.adapter_holds import AdapterHolds
from holdfast.engine.client.client import AdapterError, EngineClient
from holdfast.engine.client.connection import EngineDead, EngineStartError, QueueFull
from holdfast.engine.client.generation import GenerationDefaults
from holdfast.engine.client.pooling import NONE
from holdfast.engine.client.stream import Adoption, Delta, Stream
from holdfast.engine.client.text import TokenIds
from holdfast.lm.config import EngineConfig
from holdfast.lm.limits import RequestRefused
from holdfast.lm.types import SchedulerStats
from tests.lab.simulator.simulation import PROFILE

PROMPT = list(range(40))
FOUR = SamplingParams(temperature=0.0, max_tokens=4)


def stats(**changes: Any) -> SchedulerStats:
    fields: dict[str, Any] = dict.fromkeys(
        ("waiting", "running", "blocks_total", "blocks_used", "blocks_cached", "preemptions", "prefix_queries",
         "prefix_hits", "tokens_computed"), 0,
    )  # fmt: skip
    return SchedulerStats(**(fields | changes))


class Scripted(EngineClient):
    """An engine that counts up from the last token. It dies, hangs or fills up as its test requires."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.generation = GenerationDefaults()
        self.weights = "0123"
        self.config, self.pooling, self.info = EngineConfig(), NONE, engine_info(vocab_size=1 << 20, block_size=16)
        self.text = TokenIds()
        self._closes_text = False
        self.adapters = {}
        self.versions: set[str] = set()
        """The adapters that it has loaded and not forgotten, by content id."""
        self.loads = asyncio.Event()
        """Loads of adapters wait for this event."""
        self.loads.set()
        self._holds = AdapterHolds(self.adapters, self.versions.discard)
        self.dead, self.reason = asyncio.Event(), ""
        self.retired = False
        self.draining, self.drain_seconds = asyncio.Event(), 0.0
        self.asked: list[Stream] = []
        self.prefill = 0.0
        """Seconds before the first token of each request."""
        self.chains: list[int] = []
        """Number of blocks of each chain that it was asked for."""
        self.dies_at: int | None = None
        """Index of the token before which it dies; None if it does not die."""
        self.gate = asyncio.Event()
        """Tokens after the first wait for this event."""
        self.gate.set()
        self.hangs, self.is_full, self.refuses = False, False, ""
        self.on_disk, self.searches = 0, 0
        """Number of tokens of any prompt on its disk tier, and number of searches there."""
        self.computed = 7

    @property
    def full(self) -> bool:
        return self.is_full

    def die(self, reason: str = "it was killed") -> None:
        self.reason = reason
        self.dead.set()
        self.gate.set()

    async def run(self, stream: Stream, adopted: Adoption | None = None) -> AsyncGenerator[Delta, None]:
        self.asked.append(stream)
        request = stream.request
        if (adapter := request.identity.adapter) and adapter not in self.versions:
            raise RequestRefused(f"{adapter} is not served", "model")
        if request.id == "poison":
            await asyncio.sleep(self.prefill / 2)  # Other engines compute meanwhile.
            self.die()
            raise EngineDead(self.reason)
        if self.prefill:
            await asyncio.sleep(self.prefill)
        for place in range(request.answered, request.params.max_tokens):
            if place:
                await self.gate.wait()
            if place == self.dies_at:
                self.die()
            if self.dead.is_set():
                raise EngineDead(self.reason)
            last = FinishReason.LENGTH if place == request.params.max_tokens - 1 else None
            stream.take(SequenceOutput(request.id, (1000 + place,), last, 0, 0.0), 0.0, 0.0)
            yield await stream.next()
            await asyncio.sleep(0)

    async def health(self, timeout: float = 1.0) -> SchedulerStats:
        if self.hangs:
            await asyncio.sleep(timeout)
            raise TimeoutError
        if self.dead.is_set():
            raise EngineDead(self.reason)
        return stats(running=1, blocks_total=100, tokens_computed=self.computed)

    async def found(self, chain: Sequence[bytes]) -> Found:
        self.searches += 1
        self.chains.append(len(chain))
        if self.hangs:
            await asyncio.sleep(3600)
        return Found(lower=min(self.on_disk, 16 * len(chain)))

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        if path == "/poison":
            self.die()
            raise EngineDead(self.reason)
        if self.refuses:
            raise AdapterError(self.refuses)
        await self.loads.wait()
        before, loaded = self.adapters.get(name), AdapterInfo(f"{name}@{path}", name, 4, 1, ())
        self.adapters[name] = loaded
        self.versions.add(loaded.id)
        self._holds.keep(loaded.id)
        if before is not None and before != loaded:
            self._holds.give_up(before.id)
        return loaded

    async def forgotten(self, adapter: str) -> None:
        await self._holds.released(adapter)

    async def unload_adapter(self, name: str) -> None:
        self.versions.discard(self.adapters.pop(name).id)

    def kill(self) -> None:
        self.die("it hung")

    async def close(self) -> None:
        if not self.dead.is_set():
            self.retired = True
            self.die("the engine was closed")


class Scripts:
    """A spawner of scripted engines."""

    kind = "scripted"
    most: int | None = None

    def __init__(self, prepare: Callable[[Scripted], None] = lambda engine: None, *, lasting: bool = False) -> None:
        self.prepare = prepare
        """Called with each new engine. May raise EngineStartError."""
        self.lasting = lasting
        self.engines: list[Scripted] = []
        """All engines that were ever started."""

    def place(self, number: int) -> str:
        return "nowhere"

    async def first(self, count: int, most: int) -> Sequence[int]:
        return range(count)

    async def start(self, number: int, on_progress: Callable[[str], None]) -> EngineClient:
        engine = Scripted(number)
        self.prepare(engine)
        self.engines.append(engine)
        return engine

    async def stop(self, number: int, engine: EngineClient) -> None:
        await engine.close()

    async def leave(self, number: int, engine: EngineClient) -> None:
        await engine.close()

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make waits short, except those for engines that hang: on a busy machine all answer late."""
    monkeypatch.setattr(fleet, "PAUSES", (0.0, 0.01))
    for module in ("replicas", "fleet"):
        monkeypatch.setattr(f"holdfast.cluster.{module}.WATCH_SECONDS", 0.01)


@pytest.fixture
async def started() -> AsyncGenerator[Callable[..., Any], None]:
    """Start replicas, which are closed at the end."""
    all_of_them: list[Replicas] = []

    async def start(scripts: Scripts, replicas: int = 2, **fields: Any) -> Replicas:
        config = ClusterConfig(replicas=replicas, **{"routing": "least-loaded", **fields})
        all_of_them.append(await Replicas.start(config, scripts))
        return all_of_them[-1]

    yield start
    for each in all_of_them:
        await each.close()


async def read(replicas: Replicas, params: SamplingParams = FOUR, **asked: Any) -> list[int]:
    async with aclosing(replicas.stream(PROMPT, params, **asked)) as deltas:
        return [token for delta in [each async for each in deltas] for token in delta.tokens]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def states(replicas: Replicas) -> list[State]:
    return [replica.state for replica in replicas.members]


async def test_an_answer_continues_on_another_replica_and_the_lost_one_is_restarted(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    scripts.engines[0].dies_at = 2
    assert await read(replicas) == [1000, 1001, 1002, 1003]
    again = scripts.engines[1].asked[0].request
    assert (list(again.prompt), again.answered) == ([*PROMPT, 1000, 1001], 2)
    await until(lambda: states(replicas) == [State.READY] * 2)
    assert len(scripts.engines) == 3 and replicas.members[0].restarts == replicas.counts.resumed == 1


@pytest.mark.parametrize(
    ("asked", "whole"), [({}, True), ({"logprobs": 0}, False), ({"logprobs": 2}, False), ({"named": (5,)}, False)]
)
async def test_a_later_part_of_an_answer_is_not_adopted_where_log_probabilities_of_the_first_are_asked(
    started: Any, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], whole: bool
) -> None:
    params = SamplingParams(logprobs=asked.get("logprobs"), logprob_token_ids=asked.get("named", ()))
    held = Adoption(
        Request("r", PROMPT, params, answered=3), b"", (7,), (), 0, (0, 0, 0), 0.0, None, ended=False, yours=True,
        later=[],
    )  # fmt: skip
    given_up: list[Adoption] = []

    async def adopt(engine: Scripted, tenant: str, request_id: str) -> Adoption | None:
        return held if engine.number == 0 else None

    monkeypatch.setattr(Scripted, "adopt", adopt)
    monkeypatch.setattr(Scripted, "give_up", lambda engine, adoption: given_up.append(adoption))
    replicas = await started(Scripts())
    assert await replicas.adopt("", "r") is (held if whole else None)
    assert given_up == ([] if whole else [held])


async def test_requests_without_a_seed_get_one_that_they_keep(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    scripts.engines[0].dies_at = 1
    await read(replicas, dataclasses.replace(FOUR, temperature=1.0))
    await read(replicas, dataclasses.replace(FOUR, temperature=1.0))
    seeds = [stream.request.params.seed for engine in scripts.engines for stream in engine.asked]
    assert None not in seeds and seeds[0] == seeds[1] != seeds[2]


async def test_a_request_that_ends_several_engines_is_given_up(started: Any) -> None:
    def poisoned(engine: Scripted) -> None:
        engine.dies_at = 1

    scripts = Scripts(poisoned)
    replicas = await started(scripts, 3)
    with pytest.raises(ReplicaLost, match="2 replicas ended while they had this request"):
        await read(replicas)
    assert replicas.counts.lost == 1 and not replicas.dead.is_set()
    assert sum(bool(engine.asked) for engine in scripts.engines) == 2


@pytest.mark.parametrize("deaths", [3, 4])
async def test_a_stream_that_gets_tokens_between_outlives_at_most_three_engines(started: Any, deaths: int) -> None:
    places = itertools.count(1)

    def dying(engine: Scripted) -> None:
        place = next(places)
        engine.dies_at = place if place <= deaths else None

    scripts = Scripts(dying)
    replicas = await started(scripts, 1, max_replicas=2, scale_up_ms=3_600_000)
    five = dataclasses.replace(FOUR, max_tokens=6)
    if deaths == 4:
        with pytest.raises(ReplicaLost, match="4 replicas ended while they had this request"):
            await read(replicas, five)
    else:
        assert await read(replicas, five) == [1000 + number for number in range(6)]
    assert replicas.counts.resumed == 3


async def test_requests_that_run_with_one_that_kills_engines_are_answered(started: Any) -> None:
    def slow(engine: Scripted) -> None:
        engine.prefill = 0.02

    scripts = Scripts(slow)
    replicas = await started(scripts)
    first, second = scripts.engines
    first.gate.clear()
    second.is_full = True
    innocent = [asyncio.create_task(read(replicas, request_id=f"r{number}")) for number in range(6)]
    await until(lambda: len(first.asked) == 6)
    killer = asyncio.create_task(read(replicas, request_id="poison"))
    await until(lambda: first.dead.is_set())
    second.is_full = False
    assert await asyncio.gather(*innocent) == [[1000, 1001, 1002, 1003]] * 6
    with pytest.raises(ReplicaLost, match="2 replicas ended while they had this request"):
        await killer
    given = [engine for engine in scripts.engines if any(each.request.id == "poison" for each in engine.asked)]
    assert len(given) == 2 and replicas.counts.lost == 1


async def test_no_request_of_a_drained_engine_is_suspected(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts, 3, replica_drain_seconds=0.01)
    for engine in scripts.engines[:2]:
        engine.gate.clear()
    scripts.engines[2].is_full = True
    reading = asyncio.create_task(read(replicas))
    for number in range(2):
        await until(lambda number=number: scripts.engines[number].asked)
        replicas.fleet.drain(str(number))
        await until(lambda number=number: scripts.engines[number].dead.is_set())
    scripts.engines[2].is_full = False
    assert await reading == [1000, 1001, 1002, 1003] and replicas.counts.lost == 0


def announce_end(engine: Scripted, seconds: float) -> None:
    """Let an engine that runs on its own say that it ends soon."""
    engine.drain_seconds = seconds
    engine.draining.set()


async def read_at_the_first(replicas: Replicas, scripts: Scripts) -> asyncio.Task[list[int]]:
    """Begin a request at the first of two engines, which gives it no further token until its gate is opened."""
    first, other = scripts.engines
    other.is_full = True
    first.gate.clear()
    reading = asyncio.create_task(read(replicas))
    await until(lambda: first.asked)
    other.is_full = False
    return reading


async def test_an_engine_that_drains_gets_no_new_requests_and_is_left_once_its_own_have_ended(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    reading, (leaving, other) = await read_at_the_first(replicas, scripts), scripts.engines
    announce_end(leaving, 3600)
    await until(lambda: states(replicas)[0] is State.DRAINING)
    assert await read(replicas) == [1000, 1001, 1002, 1003]
    assert (len(leaving.asked), len(other.asked)) == (1, 1)
    assert not leaving.dead.is_set()
    leaving.gate.set()
    assert await reading == [1000, 1001, 1002, 1003]
    await until(lambda: len(scripts.engines) == 3 and states(replicas) == [State.READY] * 2)
    assert leaving.retired and replicas.counts.resumed == 0


async def test_a_request_that_outlives_the_drain_of_its_engine_continues_on_another(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    reading = await read_at_the_first(replicas, scripts)
    announce_end(scripts.engines[0], 0.05)
    assert await reading == [1000, 1001, 1002, 1003]
    assert replicas.counts.resumed == 1 and replicas.counts.lost == 0


async def test_a_drained_replica_is_started_again_without_a_pause_for_failures(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts, 1)
    for number in range(3):
        announce_end(scripts.engines[-1], 0.01)
        await until(lambda number=number: len(scripts.engines) == number + 2 and replicas.serving)
    assert replicas.members[0].failures == 0 and not replicas.dead.is_set()


async def test_a_request_waits_while_the_only_engine_is_replaced(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts, 1)
    scripts.engines[0].gate.clear()
    running = asyncio.create_task(read(replicas))
    await until(lambda: scripts.engines[0].asked)
    announce_end(scripts.engines[0], 3600)
    await until(lambda: states(replicas)[0] is State.DRAINING)
    waiting = asyncio.create_task(read(replicas))
    await asyncio.sleep(0.01)
    scripts.engines[0].gate.set()
    assert await waiting == await running == [1000, 1001, 1002, 1003]
    assert [len(engine.asked) for engine in scripts.engines] == [1, 1]


async def test_the_router_counts_the_tokens_of_a_resumed_answer_once(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    chains: list[list[bytes]] = []
    ended = replicas.router.ended

    def note(request_id: str, now: float, chain: list[bytes]) -> None:
        chains.append(list(chain))
        ended(request_id, now, chain)

    monkeypatch.setattr(replicas.router, "ended", note)
    scripts.engines[0].dies_at = 20
    answer = await read(replicas, dataclasses.replace(FOUR, max_tokens=40))
    root = scripts.engines[0].asked[0].request.identity.root()
    assert chains[-1] == list(replicas._digests.digests(root, [*PROMPT, *answer])) and len(chains[-1]) == 5


async def test_an_adapter_that_ends_an_engine_is_given_to_no_other(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    with pytest.raises(AdapterError, match="an engine ended while it loaded the adapter bad"):
        await replicas.load_adapter("bad", "/poison")
    assert [engine.dead.is_set() for engine in scripts.engines[:2]] == [True, False]
    assert not replicas.adapters
    await until(lambda: states(replicas) == [State.READY] * 2)


async def test_scaling_uses_the_places_of_one_replica_and_drains_the_idlest(started: Any) -> None:
    loads: list[tuple[Load, int, bool]] = []

    class Down(Scaler):
        def decide(self, load: Load, replicas: int, now: float, *, changing: bool = False) -> Any:
            loads.append((load, replicas, changing))
            return -1 if len(loads) == 1 else 0

    scripts = Scripts()
    replicas = await started(scripts, 3)
    for engine in scripts.engines:
        engine.gate.clear()
    tasks = [asyncio.create_task(read(replicas)) for _ in range(5)]
    await until(lambda: sum(len(engine.asked) for engine in scripts.engines) == 5)
    running = [len(replica.running) for replica in replicas.members]
    idlest = max(number for number in range(3) if running[number] == min(running))
    scaler = Down(1, 3, 1.0, 1.0)
    replicas._scale(scaler, 10.0)
    replicas._scale(scaler, 11.0)
    assert [replica.draining.is_set() for replica in replicas.members] == [number == idlest for number in range(3)]
    places = engine_info().max_sequences
    assert [(load.places, load.running, count, changing) for load, count, changing in loads] == [
        (places, 5, 3, False), (places, 5, 2, True),
    ]  # fmt: skip
    for engine in scripts.engines:
        engine.gate.set()
    await asyncio.gather(*tasks)


async def test_the_queueing_time_is_that_of_the_earliest_request_that_still_waits(started: Any) -> None:
    replicas = await started(Scripts(), 2)
    replicas._streams = {"begun": 0.0, "runs": 1.0, "waits": 4.0, "waits too": 6.0}
    for waiting, seconds in (((1, 1), 6.0), ((0, 1), 4.0), ((0, 0), 0.0), ((3, 3), 9.0)):
        for replica, count in zip(replicas.members, waiting, strict=True):
            replica.stats = stats(waiting=count)
        assert replicas._queued(10.0) == seconds
    replicas._streams = {}


async def test_a_request_waits_for_a_replica_while_none_serves(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts, 1, max_replicas=2)
    scripts.engines[0].dies_at = 2
    assert await read(replicas) == [1000, 1001, 1002, 1003]
    assert len(scripts.engines) == 2


async def test_the_server_ends_when_no_replica_can_start(started: Any) -> None:
    starts = itertools.count()

    def fails(engine: Scripted) -> None:
        if next(starts) >= 2:
            raise EngineStartError("no memory is left")

    scripts = Scripts(fails)
    replicas = await started(scripts)
    for engine in scripts.engines:
        engine.die()
    await asyncio.wait_for(replicas.dead.wait(), 60)
    assert "no memory is left" in replicas.reason
    with pytest.raises(EngineDead, match="no memory is left"):
        await read(replicas)


async def test_a_first_start_that_fails_ends_the_engines_that_were_started() -> None:
    def fails(engine: Scripted) -> None:
        if engine.number == 1:
            raise EngineStartError("no memory is left")

    scripts = Scripts(fails)
    with pytest.raises(EngineStartError, match="no memory is left"):
        await Replicas.start(ClusterConfig(replicas=2, routing="round-robin"), scripts)
    assert all(engine.dead.is_set() for engine in scripts.engines)


async def test_a_replica_that_hangs_gets_no_requests_and_is_killed_if_that_lasts(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    monkeypatch.setattr(fleet, "HANG_SECONDS", 0.1)
    monkeypatch.setattr(fleet, "KILL_SECONDS", 1.0)
    scripts.engines[0].hangs = True
    await until(lambda: states(replicas)[0] is State.HANGING)
    await read(replicas)
    assert not scripts.engines[0].asked
    await until(lambda: scripts.engines[0].dead.is_set())
    assert scripts.engines[0].reason in ("it hung", "the engine was closed")
    await until(lambda: states(replicas) == [State.READY] * 2)


async def test_a_server_that_stood_still_calls_no_replica_silent(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cluster.replicas.WATCH_SECONDS", 3600.0)  # only the test looks
    monkeypatch.setattr(fleet, "WATCH_SECONDS", 0.5)
    scripts = Scripts()
    replicas = await started(scripts)
    scripts.engines[0].hangs = True

    async def check(now: float) -> None:
        """Look at all replicas, and wait until the other one has answered."""
        replicas.fleet.check_replicas(now)
        await until(lambda: {*replicas.fleet._asking} == {replicas.members[0]})

    await check(100.0)  # asks
    await check(500.0)  # comes late, and counts for a second
    for look in range(1, 19):
        assert states(replicas) == [State.READY] * 2
        await check(500 + look / 2)
    assert states(replicas) == [State.HANGING, State.READY]
    for look in range(19, 119):
        assert not scripts.engines[0].dead.is_set()
        await check(500 + look / 2)
    assert scripts.engines[0].dead.is_set()


async def test_an_adapter_is_served_by_all_replicas_or_by_none(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    await replicas.load_adapter("kept", "/kept")
    scripts.engines[1].refuses = "its rank is too large"
    with pytest.raises(AdapterError, match="rank is too large"):
        await replicas.load_adapter("refused", "/refused")
    with pytest.raises(AdapterError, match="rank is too large"):
        await replicas.load_adapter("kept", "/other", replace=True)
    for each in (replicas, *scripts.engines):
        assert {name: adapter.id for name, adapter in each.adapters.items()} == {"kept": "kept@/kept"}


async def test_a_new_engine_has_the_adapters_of_all_before_it_serves(started: Any) -> None:
    def preloaded(engine: Scripted) -> None:
        engine.adapters["first"] = AdapterInfo("first@0", "first", 4, 1, ())
        engine.versions.add("first@0")

    scripts = Scripts(preloaded)
    replicas = await started(scripts)
    await replicas.load_adapter("later", "/later")
    await replicas.unload_adapter("first")
    scripts.engines[0].die()
    await until(lambda: len(scripts.engines) == 3 and states(replicas) == [State.READY] * 2)
    assert [*scripts.engines[2].adapters] == [*replicas.adapters] == ["later"]
    assert await read(replicas, adapter="later")


async def test_a_drained_replica_ends_when_its_requests_have(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    scripts.engines[0].gate.clear()
    reading = asyncio.create_task(read(replicas))
    await until(lambda: scripts.engines[0].asked)
    replicas.fleet.drain("0")
    await read(replicas)
    assert len(scripts.engines[1].asked) == 1 and not scripts.engines[0].dead.is_set()
    with pytest.raises(ValueError, match="replica 1 is the only one that serves"):
        replicas.fleet.drain("1")
    scripts.engines[0].gate.set()
    assert await reading == [1000, 1001, 1002, 1003] and replicas.counts.resumed == 0
    await until(lambda: [replica.name for replica in replicas.members] == ["1"])


async def test_requests_that_outlast_the_drain_continue_on_another_replica(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts, replica_drain_seconds=0.02)
    scripts.engines[0].gate.clear()
    reading = asyncio.create_task(read(replicas))
    await until(lambda: scripts.engines[0].asked)
    replicas.fleet.drain("0")
    assert await reading == [1000, 1001, 1002, 1003]
    assert replicas.counts.resumed == 1 and scripts.engines[0].dead.is_set()


async def test_replicas_are_added_while_requests_queue_up_to_the_most(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cluster.scaling.UP_SECONDS", 0.0)
    scripts = Scripts(lambda engine: setattr(engine, "health", queueing))
    replicas = await started(scripts, 1, max_replicas=2, scale_up_ms=1.0, scale_down_seconds=86400)
    scripts.engines[0].gate.clear()

    async def never(stream: Stream, adopted: Adoption | None = None) -> AsyncGenerator[Delta, None]:
        await scripts.engines[0].gate.wait()
        raise EngineDead("the test is over")
        yield

    monkeypatch.setattr(scripts.engines[0], "run", never)
    reading = asyncio.create_task(read(replicas))
    await until(lambda: states(replicas) == [State.READY] * 2)
    looked = Mock(wraps=replicas.fleet.check_replicas)
    monkeypatch.setattr(replicas.fleet, "check_replicas", looked)
    await until(lambda: looked.call_count > 3)
    assert len(replicas.members) == 2
    with pytest.raises(ValueError, match="max_replicas is 2"):
        replicas.fleet.add()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def queueing(timeout: float) -> SchedulerStats:
    return stats(waiting=1)


async def test_a_request_is_refused_only_when_all_queues_are_full(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    scripts.engines[0].is_full = True
    await read(replicas)
    assert len(scripts.engines[1].asked) == 1
    scripts.engines[1].is_full = True
    with pytest.raises(QueueFull, match="all 2 replicas"):
        await read(replicas)


@pytest.mark.parametrize(
    ("disk", "lasting"),
    [pytest.param(True, False, id="disk"), pytest.param(False, True, id="lasting engines"), (False, False)],
)
async def test_a_router_that_has_restarted_finds_a_conversation_that_outlived_it(
    started: Any, tmp_path: Path, disk: bool, lasting: bool
) -> None:
    PROFILE.save(tmp_path / "profile.json")

    def prepare(engine: Scripted) -> None:
        profile = str(tmp_path / "profile.json")
        engine.info = engine_info(vocab_size=1 << 20, max_model_len=4096, num_blocks=400, profile_path=profile)
        engine.config = EngineConfig(disk_cache_dir=str(tmp_path) if disk else None, host_cache_gb=1.0)
        engine.on_disk = 2000 if engine.number == 2 else 0

    async def ask(prompt: list[int]) -> None:
        async with aclosing(replicas.stream(prompt, FOUR, conversation="old")) as deltas:
            assert [delta async for delta in deltas]

    scripts = Scripts(prepare, lasting=lasting)
    replicas = await started(scripts, 3, routing="priced")
    scripts.engines[1].hangs = True  # It delays nobody for long.
    await ask(list(range(16, 2016)))
    outlives = disk or lasting
    assert [len(engine.asked) for engine in scripts.engines] == ([0, 0, 1] if outlives else [1, 0, 0])
    if outlives:  # 125 whole blocks; the last token is computed in any case
        assert [engine.chains for engine in scripts.engines] == [[124]] * 3
    await ask(list(range(16, 3016)))  # The router knows the conversation now and asks no engine.
    assert [engine.searches for engine in scripts.engines] == [outlives] * 3
    await ask([7] * 400)  # computing this is as quick as asking
    assert [engine.searches for engine in scripts.engines] == [outlives] * 3


async def test_the_router_gets_the_size_of_the_tiers_of_each_replica(started: Any) -> None:
    def sized(engine: Scripted) -> None:
        engine.info = dataclasses.replace(engine.info, num_blocks=100 + engine.number, num_host_blocks=50)

    replicas = await started(Scripts(sized))
    assert [view.most_tokens for view in replicas._views()] == [150 * 16, 151 * 16]
    for tier in (
        {"disk_cache_dir": "/nowhere"},
        {"remote_cache": "redis://nowhere"},
    ):  # of a size that is not known yet
        replicas.config = EngineConfig(host_cache_gb=1.0, **tier)
        assert [view.most_tokens for view in replicas._views()] == [None, None]


async def test_counters_keep_the_counts_of_ended_engines(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    assert (await replicas.health()).tokens_computed == 14
    scripts.engines[0].computed = 9
    await replicas.health()
    scripts.engines[0].die()
    await until(lambda: len(scripts.engines) == 3 and states(replicas) == [State.READY] * 2)
    found = await replicas.health()
    assert (found.tokens_computed, found.running, found.blocks_total) == (9 + 7 + 7, 2, 200)


async def test_health_names_no_replica_when_none_lives(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PAUSES", (0.0, 60.0))
    scripts = Scripts()
    replicas = await started(scripts)
    for engine in scripts.engines:
        engine.die()
    await until(lambda: states(replicas) == [State.DOWN] * 2)
    with pytest.raises(NoReplica):
        await replicas.health()


def test_tuning_on_other_hosts_needs_a_directory_of_all_hosts_and_no_states_in_memory() -> None:
    ClusterConfig(replicas=2).check(EngineConfig(tuning=True, tuning_mirror="/dev/shm/states"), None)
    ray = ClusterConfig(replicas=2, ray="auto")
    ray.check(EngineConfig(), None)
    ClusterConfig().check(EngineConfig(enable_sleep_mode=True), None)
    with pytest.raises(ValueError, match="only the single engine of a server sleeps"):
        ClusterConfig(replicas=2).check(EngineConfig(enable_sleep_mode=True), None)
    for mirror in ("auto", "off"):
        ray.check(EngineConfig(tuning=True, tuning_mirror=mirror), "/shared/tuning")
    with pytest.raises(ValueError, match="set tuning_state to a directory that all hosts see at the same path"):
        ray.check(EngineConfig(tuning=True), None)
    with pytest.raises(ValueError, match="tuning_mirror is /dev/shm/states: a lost node takes the states"):
        ray.check(EngineConfig(tuning=True, tuning_mirror="/dev/shm/states"), "/shared/tuning")


async def test_a_new_engine_serves_the_newest_content_under_a_name_that_it_has_from_its_start(started: Any) -> None:
    def preloaded(engine: Scripted) -> None:
        engine.adapters["first"] = AdapterInfo("first@0", "first", 4, 1, ())
        engine.versions.add("first@0")

    scripts = Scripts(preloaded)
    replicas = await started(scripts)
    await replicas.load_adapter("first", "/new", replace=True)
    scripts.engines[0].die()
    await until(lambda: len(scripts.engines) == 3 and states(replicas) == [State.READY] * 2)
    assert {name: each.id for name, each in scripts.engines[2].adapters.items()} == {"first": "first@/new"}
    assert await read(replicas, adapter="first")


async def test_requests_take_the_version_before_until_every_engine_has_the_new_one(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    await replicas.load_adapter("a", "/1")
    scripts.engines[1].loads.clear()
    loading = asyncio.create_task(replicas.load_adapter("a", "/2", replace=True))
    await until(lambda: "a@/2" in scripts.engines[0].versions)
    for _ in range(4):
        assert await read(replicas, adapter="a")
    assert {each.request.identity.adapter for engine in scripts.engines for each in engine.asked} == {"a@/1"}
    scripts.engines[1].loads.set()
    await loading
    await read(replicas, adapter="a")
    assert scripts.engines[0].asked[-1].request.identity.adapter == "a@/2" or (
        scripts.engines[1].asked[-1].request.identity.adapter == "a@/2"
    )
    assert [engine.versions for engine in scripts.engines] == [{"a@/2"}] * 2


async def test_a_request_continues_with_its_version_on_an_engine_that_starts_after_a_newer_one(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts, replicas=1)
    await replicas.load_adapter("a", "/1")
    scripts.engines[0].gate.clear()
    reading = asyncio.create_task(read(replicas, adapter="a"))
    await until(lambda: scripts.engines[0].asked)
    await replicas.load_adapter("a", "/2", replace=True)
    assert scripts.engines[0].versions == {"a@/1", "a@/2"}
    scripts.engines[0].die()
    assert len(await reading) == FOUR.max_tokens
    assert scripts.engines[1].asked[0].request.identity.adapter == "a@/1"
    assert scripts.engines[1].versions == {"a@/2"}, "the version before has no request any more"
    await asyncio.wait_for(replicas.forgotten("a@/1"), 60)


async def test_all_requests_of_one_hold_have_one_version(started: Any) -> None:
    scripts = Scripts()
    replicas = await started(scripts)
    await replicas.load_adapter("a", "/1")
    with replicas.hold_adapter("a") as version:
        await replicas.load_adapter("a", "/2", replace=True)
        assert await read(replicas, adapter=version) and await read(replicas, adapter="a")
    asked = sorted(each.request.identity.adapter for engine in scripts.engines for each in engine.asked)
    assert asked == ["a@/1", "a@/2"]
    assert [engine.versions for engine in scripts.engines] == [{"a@/2"}] * 2


@pytest.mark.parametrize(("path", "reason"), [("", "the engine measured none"), ("no-such.json", "no-such.json")])
def test_without_a_cost_profile_routing_is_by_prefix_and_the_log_says_why(
    path: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = engine_info(profile_path=path and str(tmp_path / path))
    router = router_for("priced", info, 16)
    assert isinstance(router, PrefixTree)
    assert reason in caplog.text
