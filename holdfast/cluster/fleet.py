"""Fleet: starts the replicas of an engine, monitors and restarts them, loads their adapters, and removes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.replica import Replica, State
from holdfast.cluster.spawner import Spawner
from holdfast.core.types import AdapterInfo
from holdfast.engine.client.adapter_holds import AdapterHolds
from holdfast.engine.client.attachment import NoEngine
from holdfast.engine.client.client import AdapterError, EngineClient
from holdfast.engine.client.connection import EngineDead, EngineStartError
from holdfast.lm.limits import RequestRefused
from holdfast.lm.types import SchedulerStats

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before an engine is started again, by the number of its failed or short runs. The last value repeats."""
LASTING_SECONDS = 60.0
"""Seconds of serving after which a start counts as successful."""
MOST_FAILURES = 5
"""Number of failed starts of one replica in a row after which the fleet ends, if no replica serves."""
OTHERS_SECONDS = 2.0
"""Seconds for which a start waits for the other engines that run already, once it has found one."""
WATCH_SECONDS = 1.0
"""Seconds between two checks of all replicas."""
LATE_CHECK = 2
"""Most seconds that a check counts for, in times of the usual seconds between two checks."""
HANG_SECONDS = 10.0
"""Seconds without an answer after which an engine gets no new requests."""
KILL_SECONDS = 60.0
"""Seconds without an answer after which an engine is killed. Its requests continue on other replicas."""
MOVE_SECONDS = 20.0
"""Maximum number of seconds for moving the conversations of a removed replica to the others."""
FINISH_SHARE, MOVE_SHARE = 0.6, 0.25
"""Shares of the time that an engine gives its clients to leave: for running requests, and for moving conversations."""
GAUGES = frozenset({
    "waiting", "running", "blocks_total", "blocks_used", "blocks_cached", "host_blocks_total", "host_blocks_ready",
    "host_blocks_cached", "rows_prefilled", "blocks_training", "rows_wide", "adapters_known", "adapters_resident",
    "disk_blocks_total", "disk_blocks_cached", "remote_down", "chunk_rate",
    "snapshots_total", "snapshots_used", "snapshots_kept", "host_snapshots_total", "host_snapshots_kept",
    "disk_snapshots_total", "disk_snapshots_kept", "turns_expected", "warming", "sleep_level",
})  # fmt: skip
"""Fields of SchedulerStats that describe the current state. All other fields count from an engine's start."""
WIDEST = frozenset({"rows_wide", "adapters_known"})
"""Gauges whose total is the maximum over all replicas, not the sum."""

log = logging.getLogger("holdfast.cluster")


async def all_of(starts: Sequence[asyncio.Task[EngineClient]]) -> dict[int, EngineClient]:
    """The engines of all starts, by place among them. Raises EngineStartError as soon as one fails."""
    return dict(enumerate(await asyncio.gather(*starts)))


def engines_of(starts: Sequence[asyncio.Task[EngineClient]]) -> dict[int, EngineClient]:
    """The engines that are ready, by place among the starts. Raises EngineStartError for one that cannot serve."""
    ended = {place: task for place, task in enumerate(starts) if task.done()}
    return {place: task.result() for place, task in ended.items() if not isinstance(task.exception(), NoEngine)}


class ReplacedVersion(NamedTuple):
    """A version of an adapter that another one has replaced, while requests may still begin with it."""

    name: str
    path: str
    """Directory of the version."""
    held: ExitStack
    """Holds the version at the engines that started since it was replaced."""


class NoReplica(EngineDead):
    """No replica serves now. The message is sent to the client."""


class Fleet:
    """All replicas of a server. Must be used on one event loop."""

    def __init__(self, config: ClusterConfig, spawner: Spawner, on_progress: Callable[[str], None]) -> None:
        """`on_progress` receives the stages of the first start."""
        self.members: list[Replica] = []
        """All replicas, by number."""
        self.adapters: dict[str, AdapterInfo] = {}
        """Adapters that requests may name, by name. Every replica has them."""
        self.changed = asyncio.Event()
        """Set when a replica becomes ready, or when the fleet ends."""
        self.dead = asyncio.Event()
        """Set when the fleet has ended: no replica will serve again."""
        self.reason = ""
        """Reason why the fleet has ended, in one line; empty before."""
        self.on_ready: Callable[[EngineClient], None] = lambda engine: None
        """Called with each new engine before it serves."""
        self.on_lost: Callable[[Replica], None] = lambda replica: None
        """Called when a replica's engine has ended and its state is lost."""
        self.before_end: Callable[[Replica], Awaitable[None]]
        """Awaited, for a limited time, before the engine of a drained replica is stopped."""
        self._config, self._spawner, self._on_progress = config, spawner, on_progress
        self._first: Sequence[int] = ()
        """Numbers of the first engines."""
        self._paths: dict[str, str] = {}
        """Directories of adapters that were loaded while the server ran, by adapter name."""
        self.holds = AdapterHolds(self.adapters, self._drop_version)
        """The versions of adapters that requests are about to use."""
        self._replaced: dict[str, ReplacedVersion] = {}
        """The replaced versions that are held, by content id. New engines load these too."""
        self._changing = asyncio.Lock()
        """Held while adapters are changed, and while a new engine loads them."""
        self._past: dict[str, float] = {}
        """Sums of the ended engines' counters, by field."""
        self._asking: dict[Replica, asyncio.Task[SchedulerStats | None]] = {}
        self._checked_at = 0.0
        """Time of the latest check of all replicas."""
        self._closing = False

    async def start(self) -> dict[int, EngineClient]:
        """Start the first engines in parallel, and return them by number. Raises EngineStartError.

        Waits until all are ready. Engines that run already may be down, so if there is one, the others are waited for a
        short time only, and join later.
        """
        self._first = numbers = await self._spawner.first(self._config.count, self._config.most)
        starts = [asyncio.create_task(self._spawner.start(number, self._progress(number))) for number in numbers]
        try:
            ready = await (self._first_of(starts) if self.lasting else all_of(starts))
            return {numbers[place]: engine for place, engine in ready.items()}
        except BaseException:
            for task in starts:
                task.cancel()
            ended = await asyncio.gather(*starts, return_exceptions=True)
            for number, engine in zip(numbers, ended, strict=True):
                if isinstance(engine, EngineClient):
                    await self._spawner.leave(number, engine)
            await self._spawner.close()
            raise

    @staticmethod
    async def _first_of(starts: Sequence[asyncio.Task[EngineClient]]) -> dict[int, EngineClient]:
        """Wait until an engine is ready, and OTHERS_SECONDS for the others. Raises EngineStartError if none comes."""
        waiting: set[asyncio.Task[EngineClient]] = {*starts}
        ready: dict[int, EngineClient] = {}
        while waiting and not ready:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            waiting = {task for task in waiting if not task.done()}
            ready = engines_of(starts)
        if waiting:
            await asyncio.wait(waiting, timeout=OTHERS_SECONDS)
        if not (ready := engines_of(starts)):
            await starts[0]  # Raises the reason.
        for task in starts:
            task.cancel()
        return ready

    def begin(self, engines: dict[int, EngineClient]) -> None:
        """Let the first engines serve, and start monitoring them. Engines that are not ready yet join later."""
        self.adapters.update(next(iter(engines.values())).adapters)
        for number in self._first:
            replica = Replica(number, self._spawner.place(number))
            self.members.append(replica)
            if number in engines:
                self._adopt(replica, engines[number])
            replica.task = asyncio.create_task(self._run(replica))

    @property
    def serving(self) -> list[Replica]:
        """Replicas that may receive requests."""
        return [replica for replica in self.members if replica.serves]

    @property
    def answering(self) -> list[Replica]:
        """Replicas whose engine is alive. It has been ready at least once."""
        return [replica for replica in self.members if replica.answers]

    @property
    def engines(self) -> dict[str, EngineClient]:
        """Engines that are alive, by the name of their replica."""
        return {each.name: each.engine for each in self.members if each.engine is not None and each.answers}

    def add(self) -> Replica:
        """Start one more replica. Returns at once. Raises ValueError at the maximum number of replicas."""
        most = self._config.most if self._spawner.most is None else min(self._config.most, self._spawner.most)
        if len(self.members) >= most:
            raise ValueError(f"there are {len(self.members)} replicas, and max_replicas is {most}")
        taken = {replica.number for replica in self.members}
        number = next(number for number in range(most) if number not in taken)
        replica = Replica(number, self._spawner.place(number))
        self.members.append(replica)
        self.members.sort(key=lambda each: each.number)
        replica.task = asyncio.create_task(self._run(replica))
        return replica

    def drain(self, name: str) -> None:
        """Remove a replica. Its requests may finish within the time limit. Unfinished ones continue on other replicas.

        Returns at once. Raises KeyError for an unknown name, and ValueError for the last replica that serves.
        """
        replica = next((each for each in self.members if each.name == name), None)
        if replica is None:
            raise KeyError(name)
        if replica.serves and len(self.serving) == 1:
            raise ValueError(f"replica {name} is the only one that serves; add another one first")
        if replica.state in (State.READY, State.HANGING):
            replica.state, replica.reason = State.DRAINING, "it is being removed"
        replica.draining.set()

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Load an adapter at every replica; if one fails, at none. See `EngineClient.load_adapter`."""
        async with self._changing:
            before, old = self.adapters.get(name), self._paths.get(name)
            self.check_alive()
            held = ExitStack() if before is None else self.hold_adapter(before.id)
            with held:  # Requests begin with the version before until every engine has the new one.
                loaded = await self._load_at_all(name, path, old, replace=replace)
                self._paths[name] = path
                self.adapters[name] = loaded
                if before is not None and before != loaded:
                    if old is not None:
                        self._replaced[before.id] = ReplacedVersion(name, old, ExitStack())
                    self.holds.give_up(before.id)
            return loaded

    async def _load_at_all(self, name: str, path: str, old: str | None, *, replace: bool) -> AdapterInfo:
        """Load an adapter at every replica; if one fails, at none. `old` is the directory of the version before."""
        engines, before = [*self.engines.values()], self.adapters.get(name)
        results = await self._try_at_all(engines, name, path, replace) if engines else []
        failed = next((error for error in results if isinstance(error, AdapterError)), None)
        loaded = [each for each in results if isinstance(each, AdapterInfo)]
        if failed is not None:
            for engine, result in zip(engines, results, strict=False):
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
        return loaded[0]

    @contextmanager
    def hold_adapter(self, adapter: str) -> Iterator[str]:
        """Hold the present version of an adapter at every replica. See `EngineClient.hold_adapter`."""
        with ExitStack() as held:
            content = held.enter_context(self.holds.hold(adapter))
            for engine in self.engines.values() if content else ():
                with suppress(RequestRefused):  # The engine started since, and never had a replaced version.
                    held.enter_context(engine.hold_adapter(content))
            yield content

    async def forgotten(self, adapter: str) -> None:
        """Wait until every engine has forgotten a replaced version. See `EngineClient.forgotten`."""
        await self.holds.released(adapter)
        ended = await asyncio.gather(
            *(engine.forgotten(adapter) for engine in self.engines.values()), return_exceptions=True
        )
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, EngineDead):
                raise error

    def _drop_version(self, content: str) -> None:
        """Let the engines that started since forget a replaced version that nobody holds any more."""
        if content in self._replaced:
            self._replaced.pop(content).held.close()

    @staticmethod
    async def _try_at_all(
        engines: Sequence[EngineClient], name: str, path: str, replace: bool
    ) -> list[AdapterInfo | BaseException]:
        """Load an adapter at one engine, and then at the others. Returns the results of all engines that tried.

        If the adapter ends the first engine, no other engine tries.
        """
        first = await asyncio.gather(engines[0].load_adapter(name, path, replace=replace), return_exceptions=True)
        if isinstance(first[0], EngineDead):
            return [AdapterError(f"an engine ended while it loaded the adapter {name}; it is loaded nowhere")]
        if isinstance(first[0], BaseException):
            return [*first]
        loads = [engine.load_adapter(name, path, replace=replace) for engine in engines[1:]]
        return [*first, *await asyncio.gather(*loads, return_exceptions=True)]

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter at every replica. See `EngineClient.unload_adapter`."""
        async with self._changing:
            if name not in self.adapters:
                raise AdapterError(f"there is no adapter {name}", missing=True)
            del self.adapters[name]
            self._paths.pop(name, None)
            engines = [*self.engines.values()]
            ended = await asyncio.gather(*(each.unload_adapter(name) for each in engines), return_exceptions=True)
            for error in ended:
                if isinstance(error, BaseException) and not isinstance(error, EngineDead):
                    raise error

    async def health(self, timeout: float) -> SchedulerStats:
        """Return the summed stats of all replicas that answer in time.

        Raises NoReplica if no replica is alive, and TimeoutError if none answers.
        """
        asked = self.answering
        if not asked:
            raise NoReplica("no replica serves now; try again in a moment")
        results = await asyncio.gather(*(self._ask(replica, timeout) for replica in asked))
        sums, answers = dict(self._past), [stats for stats in results if stats is not None]
        if not answers:
            raise TimeoutError
        for stats in answers:
            for field in fields(SchedulerStats):
                value, known = getattr(stats, field.name), sums.get(field.name, 0)
                sums[field.name] = max(known, value) if field.name in WIDEST else known + value
        return SchedulerStats(**sums)  # type: ignore[arg-type]

    def check_replicas(self, now: float) -> None:
        """Ask each replica for its stats, and check those that have not answered yet. Does not wait for answers.

        A check that comes late counts as one in time: a server that stood still has read no answers meanwhile.
        """
        passed, self._checked_at = min(now - self._checked_at, LATE_CHECK * WATCH_SECONDS), now
        for replica in self.members:
            if replica in self._asking:
                if replica.silent is not None:
                    replica.silent += passed
                    self._check_silence(replica, replica.silent)
            elif replica.answers:
                replica.silent = 0.0
                task = self._asking[replica] = asyncio.create_task(self._ask(replica, 2 * KILL_SECONDS))
                task.add_done_callback(partial(self._answered, replica))

    def forget(self, replica: Replica, engine: EngineClient) -> None:
        """Record the end of a replica's engine, if it has ended. May be called repeatedly."""
        if replica.engine is engine and engine.dead.is_set() and replica.state is not State.DOWN:
            replica.state, replica.reason = State.DOWN, engine.reason
            replica.running.clear()
            replica.idle.set()
            self.on_lost(replica)

    async def close(self) -> None:
        """Stop all engines. May be called more than once."""
        self.end("the engines were closed")
        if self._closing:
            return
        self._closing = True
        tasks: list[asyncio.Task[Any]] = [*self._asking.values()]
        tasks += [replica.task for replica in self.members if replica.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engines = [(replica.number, replica.engine) for replica in self.members if replica.engine is not None]
        await asyncio.gather(*(self._spawner.leave(number, engine) for number, engine in engines))
        await self._spawner.close()

    def end(self, reason: str) -> None:
        """Mark the fleet as ended. Only the first call has an effect."""
        if not self.dead.is_set():
            self.reason = reason
            self.dead.set()
            self.changed.set()

    @property
    def lasting(self) -> bool:
        """Whether the engines outlive this server, and may serve others. See `Spawner.lasting`."""
        return self._spawner.lasting

    def check_alive(self) -> None:
        """Raises EngineDead if the fleet has ended."""
        if self.dead.is_set():
            raise EngineDead(self.reason)

    def _answered(self, replica: Replica, task: asyncio.Task[SchedulerStats | None]) -> None:
        self._asking.pop(replica, None)

    def _adopt(self, replica: Replica, engine: EngineClient) -> None:
        """Let a replica serve with this engine, which is ready."""
        self.on_ready(engine)
        replica.engine, replica.state, replica.reason = engine, State.READY, ""
        replica.place = self._spawner.place(replica.number)
        replica.ready_at, replica.stats, replica.silent = time.monotonic(), None, None
        self.changed.set()

    async def _run(self, replica: Replica) -> None:
        """Run a replica until it is drained: start its engine, and restart it whenever it ends."""
        draining = asyncio.create_task(replica.draining.wait())
        try:
            while not replica.draining.is_set():
                if replica.engine is None:
                    await self._wait_first(self._start_one(replica), draining)
                if replica.engine is None:
                    continue
                await self._wait_first(self._end_of(replica.engine), draining)
                if replica.engine.dead.is_set():
                    await self._clean_up(replica, replica.engine)
                elif replica.engine.draining.is_set():
                    await self._leave(replica, replica.engine)
            await self._drain_and_end(replica)
        finally:
            draining.cancel()

    @staticmethod
    async def _end_of(engine: EngineClient) -> None:
        """Wait until an engine has ended, or says that it will end soon."""
        waits = [asyncio.create_task(event.wait()) for event in (engine.dead, engine.draining)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @staticmethod
    async def _wait_first(work: object, draining: asyncio.Task[bool]) -> None:
        """Wait for `work`, or cancel it if the replica is drained first. Raises the exceptions of `work`."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        try:
            await asyncio.wait({task, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if not task.cancelled():
            task.result()

    async def _start_one(self, replica: Replica) -> None:
        """Start a replica's engine, after a pause if it has failed before. Adapters are loaded before it serves."""
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
            if replica.failures >= MOST_FAILURES and not self.answering:
                self.end(f"no replica can start; replica {replica.name}: {error}")
            return
        except BaseException:
            if engine is not None and replica.engine is not engine:
                await self._spawner.stop(replica.number, engine)
            raise
        log.warning("replica %s (%s) is ready", replica.name, replica.place)

    async def _sync_adapters(self, engine: EngineClient) -> None:
        """Make a new engine have exactly the adapters that requests may name."""
        for name in [name for name in engine.adapters if name not in self.adapters]:
            await engine.unload_adapter(name)
        for content, version in [*self._replaced.items()]:
            await engine.load_adapter(version.name, version.path, replace=version.name in engine.adapters)
            if content in self._replaced:
                version.held.enter_context(engine.hold_adapter(content))
        for name, path in self._paths.items():
            if engine.adapters.get(name) != self.adapters[name]:
                await engine.load_adapter(name, path, replace=name in engine.adapters)

    async def _clean_up(self, replica: Replica, engine: EngineClient) -> None:
        """Clean up after an engine that has ended."""
        log.error("replica %s (%s) has ended and is started again: %s", replica.name, replica.place, engine.reason)
        self.forget(replica, engine)
        lasted = time.monotonic() - replica.ready_at >= LASTING_SECONDS
        replica.failures = 0 if lasted else replica.failures + 1
        replica.restarts += 1
        self._keep_counters(replica)
        replica.engine = None
        await self._spawner.stop(replica.number, engine)

    def _keep_counters(self, replica: Replica) -> None:
        """Add the counters of a replica's engine, which ends, to the sums of ended engines."""
        if replica.stats is not None:
            for field in fields(SchedulerStats):
                if field.name not in GAUGES:
                    self._past[field.name] = self._past.get(field.name, 0) + getattr(replica.stats, field.name)
            replica.stats = None

    async def _leave(self, replica: Replica, engine: EngineClient) -> None:
        """Leave an engine that ends soon, and wait for one in its place. Its requests finish or continue elsewhere."""
        replica.state, replica.reason = State.DRAINING, "its engine drains"
        log.warning("replica %s (%s) drains, for at most %.0f s", replica.name, replica.place, engine.drain_seconds)
        await self._empty(replica, engine, FINISH_SHARE * engine.drain_seconds, MOVE_SHARE * engine.drain_seconds)
        replica.restarts += 1
        replica.failures, replica.engine, replica.state = 0, None, State.STARTING
        self.on_lost(replica)
        await self._spawner.stop(replica.number, engine)

    async def _empty(self, replica: Replica, engine: EngineClient, seconds: float, move_seconds: float) -> None:
        """Wait until a replica's requests have ended, move its conversations away, and keep its counters.

        `seconds` and `move_seconds` limit the two waits. Both end early if the engine does.
        """
        died = asyncio.create_task(engine.dead.wait())
        idle = asyncio.create_task(replica.idle.wait())
        try:
            await asyncio.wait({died, idle}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.before_end(replica), min(move_seconds, MOVE_SECONDS))
        finally:
            died.cancel()
            idle.cancel()
        await self._ask(replica, min(WATCH_SECONDS, move_seconds / 4))
        self._keep_counters(replica)

    async def _drain_and_end(self, replica: Replica) -> None:
        """Drain a replica and stop its engine. Requests that do not finish in time continue on other replicas."""
        engine = replica.engine
        if engine is not None:
            await self._empty(replica, engine, self._config.replica_drain_seconds, MOVE_SECONDS)
            await self._spawner.stop(replica.number, engine)
        self.members.remove(replica)
        self.on_lost(replica)
        log.warning("replica %s (%s) was removed", replica.name, replica.place)

    async def _ask(self, replica: Replica, timeout: float) -> SchedulerStats | None:
        """Return the stats of a replica; None if it does not answer in time."""
        engine = replica.engine
        assert engine is not None
        with suppress(TimeoutError, EngineDead):
            replica.stats = await engine.health(timeout)
            if replica.state is State.HANGING:
                replica.state, replica.reason = State.READY, ""
                self.changed.set()
            return replica.stats
        return None

    def _check_silence(self, replica: Replica, silent: float) -> None:
        """Mark a replica as hanging, or kill its engine, if it has not answered for too many seconds."""
        if silent >= KILL_SECONDS and replica.engine is not None and replica.answers:
            log.error("replica %s has not answered for %g s and is killed", replica.name, silent)
            replica.engine.kill()
        elif silent >= HANG_SECONDS and replica.state is State.READY:
            replica.state, replica.reason = State.HANGING, "its engine does not answer"

    def _progress(self, number: int) -> Callable[[str], None]:
        """Return the receiver of the stages of a start. Only the first replica's first start reports them."""
        return self._on_progress if number == 0 and not self.members else lambda stage: None
