"""Replicas: several engines that look like one EngineClient. Each request goes to one of them, and outlives it.

Where a request goes is `routing`'s decision. When an engine ends in the middle of an answer, the request goes on at
another: the tokens so far become the beginning of its answer there. The reader of the stream notices a pause.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.moving import Mover
from holdfast.cluster.replica import Replica, State
from holdfast.cluster.routing import (
    Choice,
    Move,
    ReplicaState,
    ReplicaView,
    Router,
    RouterName,
    RoutingRules,
    Turn,
    make_router,
)
from holdfast.cluster.scaling import Load, Scaler
from holdfast.cluster.spawner import Spawner
from holdfast.core.config import EngineConfig
from holdfast.core.types import MAX_SEED, AdapterInfo, SamplingParams
from holdfast.engine import messages
from holdfast.engine.client import AdapterError, Delta, EngineClient, Stream, prepare
from holdfast.engine.connection import EngineDead, EngineStartError, QueueFull
from holdfast.engine.pooling import Pooling
from holdfast.engine.profiles import CostProfile
from holdfast.engine.text import Text
from holdfast.engine.tuning import TuningClient, TuningError
from holdfast.lm.limits import RequestRefused
from holdfast.lm.memory.digests import DigestCache
from holdfast.lm.types import SchedulerStats

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before an engine is started again, by how many of its starts failed or did not last. Then the last one."""
LASTING_SECONDS = 60.0
"""An engine that has served for so long did not fail to start."""
MOST_FAILURES = 5
"""While no replica serves: failed starts of one in a row after which the server ends."""
MOST_LOSSES = 2
"""Engines that may end under a request without any new token of it. It may be what ends them."""
RESCUE_SECONDS = 60.0
"""How long a request waits for any replica while none serves."""
WATCH_SECONDS = 1.0
"""Between two looks at all replicas."""
HANG_SECONDS = 10.0
"""An engine that does not answer for so long gets no new requests."""
KILL_SECONDS = 60.0
"""An engine that does not answer for so long is killed, and its requests go on elsewhere."""
CHAIN_BLOCK = 16
"""Tokens of a block of a prompt's chain of digests, where the engine's cache has no blocks."""
CHAIN_BLOCKS = 1 << 18
"""Blocks of recent prompts whose digests are remembered."""
MOVE_SECONDS = 20.0
"""How long the conversations of a replica that is taken away are moved to the others."""
GAUGES = frozenset({
    "waiting", "running", "blocks_total", "blocks_used", "blocks_cached", "host_blocks_total", "host_blocks_ready",
    "host_blocks_cached", "rows_prefilled", "blocks_training", "rows_wide", "adapters_known", "adapters_resident",
})  # fmt: skip
"""Fields of SchedulerStats that say how things stand. The others count from an engine's start."""
WIDEST = frozenset({"rows_wide", "adapters_known"})
"""Gauges of which the largest counts, and not the sum."""

log = logging.getLogger("holdfast.cluster")


class ReplicaLost(EngineDead):
    """A request that cannot go on at another replica. The message says why, for the client."""


class NoReplica(EngineDead):
    """No replica serves now. The message says so, for the client."""


@dataclass(slots=True)
class Counts:
    """What has happened since the start."""

    resumed: int = 0
    """Requests that went on at another replica, each time."""
    lost: int = 0
    """Requests that could not."""
    routed_tokens: int = 0
    """Prompt tokens of all requests."""
    moved_tokens: int = 0
    """Tokens of state that were copied from one replica to another."""
    moves: int = 0


class Replicas:
    """As EngineClient, over several of them. Made by `start`, for one event loop."""

    def __init__(self, config: ClusterConfig, spawner: Spawner, on_progress: Callable[[str], None]) -> None:
        """Use `start` instead."""
        self.cluster = config
        self.config: EngineConfig
        self.info: messages.EngineInfo
        """That of one engine, but with the places of all that there may be."""
        self.text: Text
        self.pooling: Pooling
        self.adapters: dict[str, AdapterInfo] = {}
        """The adapters that requests may name, by name. Every replica has them."""
        self.on_steps: Callable[[Sequence[int], Sequence[float]], None] = lambda tokens, seconds: None
        """Called with the tokens and the seconds of all engines' steps, some at a time."""
        self.dead = asyncio.Event()
        """Set when no replica can serve any more."""
        self.reason = ""
        """Why, in one line."""
        self.tuning = TuningClient(lambda message: None, {}, refuse_tuning)
        """Takes no jobs: a job needs an engine of its own."""
        self.counts = Counts()
        self.router: Router
        self.members: list[Replica] = []
        """All replicas, by number."""
        self._spawner, self._on_progress = spawner, on_progress
        self._changed = asyncio.Event()
        """Set when a replica has become ready, or there will be none."""
        self._streams: dict[str, float] = {}
        """Requests in progress, each with the time of its arrival until its first output, then 0."""
        self._paths: dict[str, str] = {}
        """The directories of adapters that were loaded later, by name."""
        self._changing = asyncio.Lock()
        """Held while adapters change, or a new engine gets them."""
        self._past: dict[str, float] = {}
        """Sums of the counters of engines that have ended."""
        self._drawn = 0
        self._answer_tokens = 128.0
        """How long answers are of late."""
        self._closing = False
        self._moving: set[asyncio.Task[int]] = set()
        """Moves of idle conversations that are under way."""
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, config: ClusterConfig, spawner: Spawner, on_progress: Callable[[str], None] = lambda stage: None
    ) -> Replicas:
        """Start all engines side by side; returns when all take requests. Raises EngineStartError if one cannot."""
        replicas = cls(config, spawner, on_progress)
        numbers = range(config.replicas)
        starts = [asyncio.create_task(spawner.start(number, replicas._progress(number))) for number in numbers]
        try:
            engines = await asyncio.gather(*starts)
        except BaseException:
            for task in starts:
                task.cancel()
            ended = await asyncio.gather(*starts, return_exceptions=True)
            for number, engine in zip(numbers, ended, strict=True):
                if isinstance(engine, EngineClient):
                    await spawner.stop(number, engine)
            await spawner.close()
            raise
        replicas._begin(engines)
        return replicas

    @property
    def names(self) -> tuple[str, ...]:
        """As `EngineClient.names`."""
        return self.info.model, *self.config.served_model_name[1:]

    @property
    def serving(self) -> list[Replica]:
        """Those that may get requests."""
        return [replica for replica in self.members if replica.serves]

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        adapter: str = "",
        deadline: float | None = None,
        shown: Collection[int] = (),
        conversation: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """As `EngineClient.stream`. `conversation` names the one that this is a turn of, if it is known.

        An EngineDead is only raised if no replica can go on with the request; its message is for the client.
        """
        self._check_alive()
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._streams:
            raise RequestRefused(f"request id {request_id} is already in use; give each its own", "request_id")
        if (serving := self.serving) and all(replica.engine is None or replica.engine.full for replica in serving):
            raise QueueFull(f"the queues of all {len(serving)} replicas are full")
        if params.seed is None and params.temperature > 0:
            params = replace(params, seed=self._draw_seed())  # the same at whatever replica it goes on
        stream = prepare(
            self.info, self.text, self.adapters, prompt, params, request_id, priority, tenant, adapter, deadline, shown
        )
        return self._run(stream, f"{tenant}/{conversation}" if conversation else None)

    async def _run(self, stream: Stream, key: str | None) -> AsyncGenerator[Delta, None]:
        """The deltas of a request, from as many replicas as it takes."""
        request_id, losses, resumed = stream.request.id, 0, False
        if request_id in self._streams:
            raise RequestRefused(f"request id {request_id} is already in use; give each its own", "request_id")
        self._streams[request_id] = time.monotonic()
        turn = self._turn(stream, key)
        self.counts.routed_tokens += turn.prompt_tokens
        try:
            while True:
                known = len(stream.answer)
                replica, engine, choice = await self._choose(stream, turn)
                try:
                    if choice.move_from is not None:
                        await self._bring(turn, choice, engine)
                    async with aclosing(engine.run(stream)) as deltas:
                        async for delta in deltas:
                            if delta.tokens and self._streams[request_id]:
                                self._streams[request_id] = 0.0
                                self.router.started(request_id, time.monotonic())
                            yield delta
                    self._answer_tokens += 0.02 * (len(stream.answer) - self._answer_tokens)
                    return
                except RequestRefused as error:
                    if not resumed:
                        raise
                    self.counts.lost += 1
                    raise ReplicaLost(f"the answer could not go on at another replica: {error}") from error
                except QueueFull:
                    if not resumed:
                        raise
                    await asyncio.sleep(0.05)
                except EngineDead as error:
                    self._check_alive()
                    self._forget(replica, engine)
                    losses = 1 if len(stream.answer) > known else losses + 1
                    if losses > MOST_LOSSES:
                        self.counts.lost += 1
                        raise ReplicaLost(
                            f"{losses} replicas ended one after another while they had this request; it is not tried "
                            "again, as it may be the cause"
                        ) from error
                    log.info("request %s goes on elsewhere with %d tokens", request_id, len(stream.answer))
                    stream.resume()
                    turn, resumed = self._turn(stream, key), True
                    self.counts.resumed += 1
                finally:
                    replica.leave(request_id)
                    self.router.ended(request_id, time.monotonic(), self._chain(stream))
        finally:
            del self._streams[request_id]

    async def _choose(self, stream: Stream, turn: Turn) -> tuple[Replica, EngineClient, Choice]:
        """The replica for a request, which counts as sent there. Waits for one while none serves.

        Raises QueueFull if all queues are full, NoReplica if none serves for a long time.
        """
        until = time.monotonic() + RESCUE_SECONDS
        while not (serving := self.serving):
            self._check_alive()
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), until - time.monotonic())
            except TimeoutError:
                raise NoReplica(f"no replica has served for {RESCUE_SECONDS:g} s; try again later") from None
        able = [replica for replica in serving if replica.engine is not None and not replica.engine.full]
        if not able and not stream.request.answered:
            raise QueueFull(f"the queues of all {len(serving)} replicas are full")
        views = [self._view(replica) for replica in able or serving]
        now = time.monotonic()
        choice = self.router.choose(turn, views, now)
        replica = next(each for each in serving if each.name == choice.replica)
        engine = replica.engine
        assert engine is not None
        self.router.sent(stream.request.id, turn, choice, now)
        replica.enter(stream.request.id)
        return replica, engine, choice

    async def _bring(self, turn: Turn, choice: Choice, engine: EngineClient) -> None:
        """Bring the state that a turn goes without at its replica, where that is cheaper than to compute it."""
        source = next((each.engine for each in self.members if each.name == choice.move_from and each.answers), None)
        price = (choice.priced or {}).get(choice.replica)
        if source is None or price is None:
            return
        first = price.found.tokens // self._block
        last = first + -(-price.brought // self._block)
        self._count_move(await self.mover.move(turn.chain, first, last, source, engine))

    async def _move(self, move: Move) -> int:
        """Move an idle conversation. It belongs to its new replica once its state is there."""
        engines = {each.name: each.engine for each in self.members if each.engine is not None and each.answers}
        tokens = 0
        if move.source in engines and move.target in engines:
            source, target = engines[move.source], engines[move.target]
            tokens = await self.mover.move(move.chain, 0, len(move.chain), source, target)
        self._count_move(tokens)
        self.router.moved(move, tokens, time.monotonic())
        return tokens

    def _count_move(self, tokens: int) -> None:
        self.counts.moves += tokens > 0
        self.counts.moved_tokens += tokens

    async def _move_away(self, replica: Replica) -> None:
        """Move the conversations of a replica that drains to the others, until none is left that is worth it."""
        while any(each.serves for each in self.members):
            views = [self._view(each) for each in self.members if each.answers]
            moves = self.router.rebalance(time.monotonic(), views)
            came = await asyncio.gather(*(self._move(move) for move in moves))
            if not any(tokens for move, tokens in zip(moves, came, strict=True) if move.source == replica.name):
                return

    def _view(self, replica: Replica) -> ReplicaView:
        stats = replica.stats
        free = None if stats is None else (stats.blocks_total - stats.blocks_used) * self.info.block_size
        state = ReplicaState.READY if replica.serves else ReplicaState.DRAINING
        movable = replica.engine is not None and self.mover.can(replica.engine)
        link = self.mover.ms_per_token if movable else None
        return ReplicaView(replica.name, free_tokens=free, link_ms_per_token=link, state=state)

    def _turn(self, stream: Stream, key: str | None) -> Turn:
        request = stream.request
        rest = max(1, request.params.max_tokens - request.answered)
        return Turn(
            key=key,
            chain=self._digests.digests(request.identity.root(), request.prompt),
            prompt_tokens=len(request.prompt),
            output_estimate=min(rest, int(self._answer_tokens) + 1),
            tenant=request.identity.tenant,
        )

    def _chain(self, stream: Stream) -> list[bytes]:
        """Digests of the prompt and the answer so far; none of a request that leaves nothing to share."""
        request = stream.request
        if not stream.answer:
            return []
        tokens = array("I", request.prompt[: request.answer_start])
        tokens.extend(stream.answer)
        return self._digests.digests(request.identity.root(), tokens)

    def _forget(self, replica: Replica, engine: EngineClient) -> None:
        """Let the router forget a replica whose engine has ended. Again and again does no harm."""
        if replica.engine is engine and engine.dead.is_set() and replica.state is not State.DOWN:
            replica.state, replica.reason = State.DOWN, engine.reason
            replica.running.clear()
            replica.idle.set()
            self.router.lost(replica.name)

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """As `EngineClient.load_adapter`, at every replica: at all or none."""
        async with self._changing:
            before, old = self.adapters.get(name), self._paths.get(name)
            engines = [replica.engine for replica in self.members if replica.engine is not None and replica.answers]
            self._check_alive()
            load = partial(EngineClient.load_adapter, name=name, path=path, replace=replace)
            results = await asyncio.gather(*(load(engine) for engine in engines), return_exceptions=True)
            failed = next((error for error in results if isinstance(error, AdapterError)), None)
            loaded = [each for each in results if isinstance(each, AdapterInfo)]
            if failed is not None:
                for engine, result in zip(engines, results, strict=True):
                    if isinstance(result, AdapterInfo):
                        with suppress(AdapterError, EngineDead):
                            if before is not None and old is not None:
                                await engine.load_adapter(name, old, replace=True)
                            else:
                                await engine.unload_adapter(name)
                raise failed
            for result in results:
                if isinstance(result, BaseException) and not isinstance(result, EngineDead):
                    raise result
            if not loaded:
                raise NoReplica("no replica serves now; try again in a moment")
            self._paths[name] = path
            self.adapters[name] = loaded[0]
            return loaded[0]

    async def unload_adapter(self, name: str) -> None:
        """As `EngineClient.unload_adapter`, at every replica."""
        async with self._changing:
            if name not in self.adapters:
                raise AdapterError(f"there is no adapter {name}", missing=True)
            del self.adapters[name]
            self._paths.pop(name, None)
            engines = [replica.engine for replica in self.members if replica.engine is not None and replica.answers]
            ended = await asyncio.gather(*(each.unload_adapter(name) for each in engines), return_exceptions=True)
            for error in ended:
                if isinstance(error, BaseException) and not isinstance(error, EngineDead):
                    raise error

    async def health(self, timeout: float = HANG_SECONDS) -> SchedulerStats:
        """Queues and memory of all replicas that answer in time, summed. Raises NoReplica and TimeoutError if none."""
        self._check_alive()
        asked = [replica for replica in self.members if replica.answers]
        if not asked:
            raise NoReplica("no replica serves now")
        results = await asyncio.gather(*(self._ask(replica, timeout) for replica in asked))
        answers = [stats for stats in results if stats is not None]
        if not answers:
            raise TimeoutError
        return self._sum(answers)

    async def _ask(self, replica: Replica, timeout: float) -> SchedulerStats | None:
        """A replica's queues and memory; None if it does not answer in time."""
        engine = replica.engine
        assert engine is not None
        with suppress(TimeoutError, EngineDead):
            replica.stats = await engine.health(timeout)
            if replica.state is State.HANGING:
                replica.state, replica.reason = State.READY, ""
                self._changed.set()
            return replica.stats
        return None

    def _sum(self, answers: Iterable[SchedulerStats]) -> SchedulerStats:
        sums: dict[str, float] = dict(self._past)
        for stats in answers:
            for field in fields(SchedulerStats):
                value = getattr(stats, field.name)
                known = sums.get(field.name, 0)
                sums[field.name] = max(known, value) if field.name in WIDEST else known + value
        return SchedulerStats(**sums)  # type: ignore[arg-type]

    async def drain(self, name: str) -> None:
        """Take a replica away: it finishes its requests, for as long as it may, and the others go on elsewhere.

        Returns at once. Raises KeyError for an unknown name, ValueError for the last one that serves.
        """
        replica = next((each for each in self.members if each.name == name), None)
        if replica is None:
            raise KeyError(name)
        if replica.serves and len(self.serving) == 1:
            raise ValueError(f"replica {name} is the only one that serves; add another one first")
        replica.leaving.set()

    def add(self) -> Replica:
        """Start one more replica. Returns at once. Raises ValueError if there are as many as there may be."""
        most = self.cluster.most if self._spawner.most is None else min(self.cluster.most, self._spawner.most)
        if len(self.members) >= most:
            raise ValueError(f"there are {len(self.members)} replicas, and max_replicas is {most}")
        taken = {replica.number for replica in self.members}
        number = next(number for number in range(most) if number not in taken)
        replica = Replica(number, self._spawner.place(number))
        self.members.append(replica)
        self.members.sort(key=lambda each: each.number)
        replica.task = asyncio.create_task(self._live(replica))
        return replica

    async def close(self) -> None:
        """End all engines. Running streams raise EngineDead. May be called more than once."""
        self._end("the engines were closed")
        if self._closing:
            return
        self._closing = True
        tasks: list[asyncio.Task[Any]] = [*self._moving]
        tasks += [replica.task for replica in self.members if replica.task is not None]
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engines = [(replica.number, replica.engine) for replica in self.members if replica.engine is not None]
        await asyncio.gather(*(self._spawner.stop(number, engine) for number, engine in engines))
        await self._spawner.close()
        self.text.close()

    def _begin(self, engines: Sequence[EngineClient]) -> None:
        """Take over the first engines, all of which are ready."""
        first = engines[0]
        self.config, self.text, self.pooling = first.config, first.text, first.pooling
        self.adapters.update(first.adapters)
        most, info = self.cluster.most, first.info
        self.info = replace(
            info, max_sequences=most * info.max_sequences, max_waiting=most * info.max_waiting,
            started_in=max(engine.info.started_in for engine in engines),
        )  # fmt: skip
        self._block = info.block_size if info.executor == "paged" else CHAIN_BLOCK
        self._digests = DigestCache(self._block, CHAIN_BLOCKS)
        self.router = router_for(self.cluster.routing, info, self._block)
        self.mover = Mover(info.memory.block / info.block_size, self._block)
        for number, engine in enumerate(engines):
            replica = Replica(number, self._spawner.place(number))
            self.members.append(replica)
            self._adopt(replica, engine)
            replica.task = asyncio.create_task(self._live(replica))
        self._watching = asyncio.create_task(self._watch())

    def _adopt(self, replica: Replica, engine: EngineClient) -> None:
        """Let a replica serve with this engine, which is ready."""
        engine.use_text(self.text)
        engine.on_steps = lambda tokens, seconds: self.on_steps(tokens, seconds)
        replica.engine, replica.state, replica.reason = engine, State.READY, ""
        replica.place = self._spawner.place(replica.number)
        replica.ready_at, replica.stats, replica.asked_at = time.monotonic(), None, None
        self._changed.set()

    async def _live(self, replica: Replica) -> None:
        """A replica's life: serve, start again after each end, until it is to leave."""
        leaving = asyncio.create_task(replica.leaving.wait())
        try:
            while not replica.leaving.is_set():
                if replica.engine is None:
                    await self._wait_first(self._start_one(replica), leaving)
                if replica.engine is None:
                    continue
                await self._wait_first(replica.engine.dead.wait(), leaving)
                if replica.engine.dead.is_set():
                    await self._bury(replica, replica.engine)
            await self._take_away(replica)
        finally:
            leaving.cancel()

    @staticmethod
    async def _wait_first(work: object, leaving: asyncio.Task[bool]) -> None:
        """Wait for the end of some work, which is cancelled if the replica is to leave first. Raises what it raises."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if not task.cancelled():
            task.result()

    async def _start_one(self, replica: Replica) -> None:
        """Start a replica's engine, after a pause if it failed before. It has the adapters when it serves."""
        pause = PAUSES[min(replica.failures, len(PAUSES) - 1)] if replica.failures else 0.0
        if pause:
            await asyncio.sleep(pause)
        replica.state, replica.place = State.STARTING, self._spawner.place(replica.number)
        engine = None
        try:
            engine = await self._spawner.start(replica.number, self._progress(replica.number))
            async with self._changing:
                await self._sync_adapters(engine)
                self._adopt(replica, engine)
        except (EngineStartError, EngineDead, AdapterError, OSError) as error:
            replica.failures += 1
            replica.state, replica.reason = State.DOWN, str(error)
            log.error("replica %s (%s) cannot start: %s", replica.name, replica.place, error)
            if engine is not None:
                await self._spawner.stop(replica.number, engine)
            if replica.failures >= MOST_FAILURES and not any(each.answers for each in self.members):
                self._end(f"no replica can start; replica {replica.name}: {error}")
            return
        except BaseException:
            if engine is not None and replica.engine is not engine:
                await self._spawner.stop(replica.number, engine)
            raise
        log.warning("replica %s (%s) is ready", replica.name, replica.place)

    async def _sync_adapters(self, engine: EngineClient) -> None:
        """Give a new engine the adapters that requests may name, and no others."""
        for name in [name for name in engine.adapters if name not in self.adapters]:
            await engine.unload_adapter(name)
        for name, path in self._paths.items():
            if engine.adapters.get(name) != self.adapters[name]:
                await engine.load_adapter(name, path, replace=name in engine.adapters)

    async def _bury(self, replica: Replica, engine: EngineClient) -> None:
        """Clean up after an engine that has ended."""
        log.error("replica %s (%s) has ended and is started again: %s", replica.name, replica.place, engine.reason)
        self._forget(replica, engine)
        lasted = time.monotonic() - replica.ready_at >= LASTING_SECONDS
        replica.failures = 0 if lasted else replica.failures + 1
        replica.restarts += 1
        self._keep_counters(replica)
        replica.engine = None
        await self._spawner.stop(replica.number, engine)

    def _keep_counters(self, replica: Replica) -> None:
        """Add what an engine counted to that of all engines before."""
        if replica.stats is not None:
            for field in fields(SchedulerStats):
                if field.name not in GAUGES:
                    self._past[field.name] = self._past.get(field.name, 0) + getattr(replica.stats, field.name)
            replica.stats = None

    async def _take_away(self, replica: Replica) -> None:
        """Drain a replica and end it. Requests that do not finish in time go on elsewhere."""
        engine = replica.engine
        if engine is not None:
            replica.state, replica.reason = State.DRAINING, "it is taken away"
            with suppress(TimeoutError):
                idle = asyncio.create_task(replica.idle.wait())
                try:
                    await asyncio.wait_for(
                        self._wait_any(idle, asyncio.create_task(engine.dead.wait())),
                        self.cluster.replica_drain_seconds,
                    )
                finally:
                    idle.cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._move_away(replica), MOVE_SECONDS)
            await self._ask(replica, WATCH_SECONDS)
            self._keep_counters(replica)
            self.router.lost(replica.name)
            self.members.remove(replica)
            await self._spawner.stop(replica.number, engine)
        else:
            self.members.remove(replica)
        log.warning("replica %s (%s) was taken away", replica.name, replica.place)

    @staticmethod
    async def _wait_any(*tasks: asyncio.Task[bool]) -> None:
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _watch(self) -> None:
        """Once a second: ask all replicas how they are, and change their number if need be."""
        scaler = Scaler(
            self.cluster.replicas, self.cluster.most, self.cluster.scale_up_ms / 1000, self.cluster.scale_down_seconds
        )
        asking: dict[str, asyncio.Task[SchedulerStats | None]] = {}
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            for replica in self.members:
                if replica.answers and replica.name not in asking:
                    replica.asked_at = now
                    task = asyncio.create_task(self._ask(replica, KILL_SECONDS))
                    asking[replica.name] = task
                    task.add_done_callback(lambda _, name=replica.name: asking.pop(name, None))  # type: ignore[misc]
                elif replica.name in asking:
                    self._judge(replica, now)
            if self.cluster.max_replicas is not None:
                self._scale(scaler, now)
            if len(self.members) > 1:
                views = [self._view(replica) for replica in self.members if replica.answers]
                for move in self.router.rebalance(now, views):
                    moving = asyncio.create_task(self._move(move))
                    self._moving.add(moving)
                    moving.add_done_callback(self._moving.discard)

    def _judge(self, replica: Replica, now: float) -> None:
        """Look at a replica that has not answered the last question yet."""
        silent = now - (replica.asked_at or now)
        if silent >= KILL_SECONDS and replica.engine is not None and replica.answers:
            log.error("replica %s has not answered for %g s and is killed", replica.name, silent)
            replica.engine.kill()
        elif silent >= HANG_SECONDS and replica.state is State.READY:
            replica.state, replica.reason = State.HANGING, "its engine does not answer"

    def _scale(self, scaler: Scaler, now: float) -> None:
        members = [replica for replica in self.members if not replica.leaving.is_set()]
        changing = any(replica.state is State.STARTING or replica.leaving.is_set() for replica in self.members)
        load = Load(self._queued(now), len(self._streams), self.info.max_sequences // self.cluster.most)
        match scaler.decide(load, len(members), now, changing=changing):
            case 1:
                with suppress(ValueError):
                    added = self.add()
                    log.warning("requests queue for %.1f s: replica %s is added", load.queued_seconds, added.name)
            case -1 if len(self.serving) > 1:
                least = min(reversed(members), key=lambda replica: len(replica.running))
                least.leaving.set()

    def _queued(self, now: float) -> float:
        """How long the request that waits longest for its first step has waited."""
        waiting = sum(replica.stats.waiting for replica in self.members if replica.stats is not None)
        since = sorted(at for at in self._streams.values() if at)[-waiting:] if waiting else []
        return now - since[0] if since else 0.0

    def _draw_seed(self) -> int:
        """The next seed for a request that brings none, the same in every run."""
        self._drawn += 1
        digest = hashlib.sha256(f"{self.config.seed}/{self._drawn}".encode()).digest()
        return int.from_bytes(digest[:8], "little") & MAX_SEED

    def _progress(self, number: int) -> Callable[[str], None]:
        """Where the stages of a replica's start go: those of the first one stand for all."""
        return self._on_progress if number == 0 and not self.members else lambda stage: None

    def _check_alive(self) -> None:
        if self.dead.is_set():
            raise EngineDead(self.reason)

    def _end(self, reason: str) -> None:
        if not self.dead.is_set():
            self.reason = reason
            self.dead.set()
            self._changed.set()


def router_for(name: RouterName, info: messages.EngineInfo, block_size: int) -> Router:
    """The router of this policy. Without a cost profile, none can price; then conversations stay where they are."""
    rules = RoutingRules(block_size=block_size, step_tokens=info.token_budget)
    if name != "priced":
        return make_router(name)
    try:
        cost = CostProfile.load(Path(info.profile_path)).cost
    except (OSError, ValueError) as error:
        log.warning("there is no cost profile to price requests with, so routing is by prefix-tree: %s", error)
        return make_router("prefix-tree")
    return make_router("priced", cost, rules)


def refuse_tuning() -> None:
    """Raises TuningError."""
    raise TuningError("tuning needs an engine of its own, and this server has several; run a server with --tuning")
