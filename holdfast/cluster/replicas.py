"""Replicas: several engines with the interface of one EngineClient. A request survives the end of its replica.

`routing` decides where a request goes. If an engine ends in the middle of an answer, the request continues on another
engine, where the tokens so far become the beginning of its answer. The client only notices a pause.

A request may itself have caused its engine to end. So the requests of an ended engine are tried on another engine one
at a time. If that engine ends as well, only the request on trial is given up.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.contracts import ContractCounts, Refusals
from holdfast.cluster.fleet import HANG_SECONDS, WATCH_SECONDS, Fleet, NoReplica
from holdfast.cluster.moving import Mover
from holdfast.cluster.replica import Replica, State
from holdfast.cluster.routing import (
    Choice,
    Found,
    FoundAt,
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
from holdfast.cluster.tuning import ReplicaTuning
from holdfast.core.contract import NO_CONTRACT, Contract, ContractRefused
from holdfast.core.pause import Pause
from holdfast.core.types import ALONE, MAX_SEED, AdapterInfo, SamplingParams, UserBatch
from holdfast.engine import messages
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead, QueueFull
from holdfast.engine.client.generation import GenerationDefaults
from holdfast.engine.client.pooling import Pooling
from holdfast.engine.client.stream import Adoption, Delta, Stream, continued, prepare
from holdfast.engine.client.text import Text
from holdfast.engine.profiles import CostProfile
from holdfast.lm.config import EngineConfig
from holdfast.lm.limits import RequestRefused
from holdfast.lm.memory.digests import DigestCache
from holdfast.lm.types import SchedulerStats

MOST_LOSSES = 2
"""Number of engines that may end in a row under a request that got no new token from them. Then it is given up."""
MOST_ENDS = 4
"""Number of engines that may end under a request in total, even if it got tokens from them."""
RESCUE_SECONDS = 60.0
"""Maximum number of seconds that a request waits while no replica serves."""
CHAIN_BLOCK = 16
"""Number of tokens per block of a chain of digests, for an engine whose cache has no blocks."""
ASK_TOKENS = 512
"""Minimum number of unknown prompt tokens for which the engines are asked how much of the prompt they have."""
ASK_SECONDS = 0.2
"""Maximum number of seconds that a request waits for these answers. An engine answers between two steps."""
ADOPT_SECONDS = 2.0
"""Maximum number of seconds that the adoption of a request waits for each engine."""
DISK_BYTES_PER_SECOND = 1e9
"""Assumed read rate of a disk tier, in bytes per second."""
CHAIN_BLOCKS = 1 << 18
"""Maximum number of blocks of recent prompts whose digests are cached."""

log = logging.getLogger("holdfast.cluster")


class ReplicaLost(EngineDead):
    """A request could not continue on another replica. The message is sent to the client."""


@dataclass(slots=True)
class Counts:
    """Counts since the server's start."""

    resumed: int = 0
    """Number of times that a request continued on another replica."""
    lost: int = 0
    """Number of requests that could not continue on another replica."""
    routed_tokens: int = 0
    """Number of prompt tokens of all requests."""
    moved_tokens: int = 0
    """Number of tokens whose state was copied from one replica to another."""
    moves: int = 0


class Replicas:
    """Client of several engines, with the interface of EngineClient. Must be used on one event loop."""

    def __init__(self, config: ClusterConfig, spawner: Spawner, on_progress: Callable[[str], None]) -> None:
        """Internal; call `start` to get a started client."""
        self.cluster = config
        self.config: EngineConfig
        self.info: messages.EngineInfo
        """Properties of one engine, except that the numbers of sequences and queue places are those of all engines."""
        self.text: Text
        self.pooling: Pooling
        self.generation: GenerationDefaults
        self.weights: str
        self.on_steps: Callable[[messages.Steps], None] = lambda steps: None
        """Called with the numbers of tokens and the seconds of several steps of one engine."""
        self.counts = Counts()
        self.contracts = ContractCounts()
        """Contracts whose outcome no single engine knows."""
        self.router: Router
        self.fleet = Fleet(config, spawner, on_progress)
        """The replicas and their engines."""
        self.tuning = ReplicaTuning(self.fleet)
        """The tuning jobs of all replicas."""
        self._streams: dict[str, float] = {}
        """Arrival time of each request in progress, by id. It is 0 after the request's first output."""
        self._introduce: Callable[[EngineClient], None] = lambda engine: None
        """Introduces this server to a new engine."""
        self._drawn = 0
        self._answer_tokens = 128.0
        """Recent mean number of tokens per answer."""
        self._moving: set[asyncio.Task[int]] = set()
        """Tasks that move idle conversations."""
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, config: ClusterConfig, spawner: Spawner, on_progress: Callable[[str], None] = lambda stage: None
    ) -> Replicas:
        """Start all engines in parallel. Returns when all accept requests. Raises EngineStartError."""
        replicas = cls(config, spawner, on_progress)
        replicas._begin(await replicas.fleet.start())
        return replicas

    @property
    def names(self) -> tuple[str, ...]:
        """See `EngineClient.names`."""
        return self.info.model, *self.config.served_model_name[1:]

    @property
    def members(self) -> list[Replica]:
        """All replicas, by number."""
        return self.fleet.members

    @property
    def serving(self) -> list[Replica]:
        """Replicas that may receive requests."""
        return self.fleet.serving

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """Adapters that requests may name, by name. Every replica has them."""
        return self.fleet.adapters

    @property
    def adopts(self) -> bool:
        """Whether the engines outlive this server, so that another server can adopt its requests."""
        return self.fleet.lasting

    @property
    def dead(self) -> asyncio.Event:
        """Set when no replica will serve again."""
        return self.fleet.dead

    @property
    def reason(self) -> str:
        """Reason why no replica will serve again, in one line; empty before."""
        return self.fleet.reason

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
        batch: UserBatch = ALONE,
        contract: Contract = NO_CONTRACT,
        arrival: float = 0.0,
        note: bytes = b"",
        adopted: Adoption | None = None,
        salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """Run a request. See `EngineClient.stream`.

        The `batch` reaches no engine, as its requests may go to different ones.
        `conversation` is the id of the conversation that the request continues, if it is known. Raises EngineDead only
        if no replica can continue the request. Its message is sent to the client.
        """
        self.fleet.check_alive()
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._streams:
            raise RequestRefused(f"request id {request_id} is already in use; give each its own", "request_id")
        where = f"{tenant}/{conversation}" if conversation else None
        if adopted is not None:
            return self._run(continued(self.text, adopted, shown), where, adopted)
        if (serving := self.serving) and all(replica.full for replica in serving):
            raise QueueFull(f"the queues of all {len(serving)} replicas are full")
        if params.seed is None and params.temperature > 0:
            params = replace(params, seed=self._draw_seed())  # All replicas must use the same seed.
        stream = prepare(
            self.info, self.text, prompt, params, request_id, priority, tenant, self.fleet.holds.content_of(adapter),
            deadline, shown, contract=contract, arrival=arrival, note=note, salt=salt,
        )  # fmt: skip
        return self._run(stream, where)

    async def adopt(self, tenant: str, request_id: str) -> Adoption | None:
        """Adopt a request whose server has ended, from the engine with most of its answer. See `EngineClient.adopt`.

        Other engines may hold an earlier part, if they had the request before; it is aborted there.
        """

        async def ask(engine: EngineClient) -> Adoption | None:
            with suppress(TimeoutError, EngineDead):
                return await asyncio.wait_for(engine.adopt(tenant, request_id), ADOPT_SECONDS)
            return None

        engines = [*self.fleet.engines.values()]
        found = zip(engines, await asyncio.gather(*map(ask, engines)), strict=True)
        held = [(engine, adoption) for engine, adoption in found if adoption is not None]
        complete = [pair for pair in held if not (pair[1].request.answered and pair[1].request.params.reports_logprobs)]
        best = max(complete, key=lambda pair: (pair[1].answered, pair[1].yours), default=None)
        for engine, adoption in held:
            if best is None or adoption is not best[1]:
                engine.give_up(adoption)
        return None if best is None else best[1]

    def give_up(self, adoption: Adoption) -> None:
        """Abort an adopted request that this server does not run."""
        for engine in self.fleet.engines.values():
            engine.give_up(adoption)

    @property
    def gone(self) -> set[str]:
        """Other servers that have ended: they have left an engine lately, and no engine has them now."""
        known = [engine.servers for engine in self.fleet.engines.values()]
        present = {server for each in known for server in each.present}
        return {server for each in known for server in each.left} - present

    def introduce(self, server: str, on_change: Callable[[], None]) -> None:
        """Let all servers of these engines know the name of this one. `on_change` is called when `gone` may change."""
        self._introduce = lambda engine: engine.introduce(server, on_change)
        for engine in self.fleet.engines.values():
            self._introduce(engine)

    async def _run(
        self, stream: Stream, key: str | None, adopted: Adoption | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of a request, and continue it on other replicas as needed.

        An `adopted` request continues where it runs, if that engine is still there.
        """
        request_id, losses, ends, resumed = stream.request.id, 0, 0, adopted is not None
        refusals = Refusals()
        if request_id in self._streams:
            raise RequestRefused(f"request id {request_id} is already in use; give each its own", "request_id")
        self._streams[request_id] = time.monotonic()
        turn = self._turn(stream, key)
        self.counts.routed_tokens += turn.prompt_tokens
        held = ExitStack()
        try:
            with suppress(RequestRefused):  # An adopted request may have a version that is not known here.
                held.enter_context(self.fleet.hold_adapter(stream.request.identity.adapter))
            found = await self._ask(turn) if adopted is None else None
            while True:
                known, begun = len(stream.answer), False
                place = await self._choose(stream, turn, found, refusals, patient=resumed, adopted=adopted)
                replica, engine, choice = place
                if adopted is not None and not engine.has_adopted(adopted):  # Its engine has ended since.
                    self.give_up(adopted)  # It may still run where nothing is sent to now.
                    stream.take(adopted.output, time.monotonic(), adopted.scheduled)
                    stream.resume()
                    turn, adopted = self._turn(stream, key), None
                on_trial = False
                try:
                    if losses:
                        on_trial = await replica.trial.acquire()
                    if choice.move_from is not None:
                        await self._bring(turn, choice, engine)
                    if not replica.serves or replica.engine is not engine:  # It ended before the request was sent.
                        self.fleet.check_alive()
                        self.fleet.forget(replica, engine)
                        continue
                    async with aclosing(engine.run(stream, adopted)) as deltas:
                        async for delta in deltas:
                            if on_trial and len(stream.answer) > known:
                                on_trial = False
                                replica.trial.release()
                            if delta.tokens and not begun:
                                begun, self._streams[request_id] = True, 0.0
                                self.router.started(request_id, time.monotonic())
                            yield delta
                    # An exponential mean over about the last 50 answers.
                    self._answer_tokens += 0.02 * (len(stream.answer) - self._answer_tokens)
                    self.contracts.ended(stream)
                    return
                except ContractRefused as error:
                    refusals.add(engine, error.refusal)
                    self._offer_again(stream, refusals, resumed=resumed)
                except RequestRefused as error:
                    if not resumed:
                        raise
                    self.counts.lost += 1
                    self.contracts.lost(stream)
                    raise ReplicaLost(f"the answer could not continue on another replica: {error}") from error
                except QueueFull:
                    if not resumed:
                        raise
                    await asyncio.sleep(0.05)
                except EngineDead as error:
                    self.fleet.check_alive()
                    self.fleet.forget(replica, engine)
                    if not engine.retired:
                        losses, ends = 1 if len(stream.answer) > known else losses + 1, ends + 1
                    if losses >= MOST_LOSSES or ends >= MOST_ENDS:
                        self.counts.lost += 1
                        self.contracts.lost(stream)
                        raise ReplicaLost(
                            f"{ends} replicas ended while they had this request; it is not tried again, as it may be "
                            "the cause"
                        ) from error
                    log.info("request %s continues on another replica with %d tokens", request_id, len(stream.answer))
                    stream.resume()
                    refusals.clear()
                    turn, resumed, adopted = self._turn(stream, key), True, None
                    self.counts.resumed += 1
                finally:
                    if on_trial:
                        replica.trial.release()
                    replica.leave(request_id)
                    self.router.ended(request_id, time.monotonic(), self._chain(stream))
        finally:
            held.close()
            del self._streams[request_id]

    def _offer_again(self, stream: Stream, refusals: Refusals, *, resumed: bool) -> None:
        """Have a refused contract offered to the next replica. Raises ContractRefused if no other one can take it.

        A request that an ended engine had accepted goes on without a contract then.
        """
        if refusals.without(self.serving):
            stream.offer_again(stream.request.contract)
        elif resumed:
            stream.offer_again(NO_CONTRACT)
            refusals.clear()
        else:
            self.contracts.refuse()
            raise refusals.error

    async def _ask(self, turn: Turn) -> FoundAt | None:
        """Ask the engines how much they have of a prompt that the router does not know; None if that is useless.

        After a restart of the server or a replica, the router's map is empty, although the disk tier still has state.
        State in the other tiers ends with its engine, or can be reached from all engines. An engine that outlives
        servers also has state of earlier servers, and of others that use it.
        """
        outlives = self.config.disk_cache_dir is not None or self.fleet.lasting
        if not outlives or self.router.unknown(turn) < ASK_TOKENS:
            return None
        chain, engines = turn.chain[: (turn.prompt_tokens - 1) // self._block], self.fleet.engines

        async def ask(engine: EngineClient) -> Found | None:
            with suppress(TimeoutError, EngineDead):
                return await asyncio.wait_for(engine.found(chain), ASK_SECONDS)
            return None

        return dict(zip(engines, await asyncio.gather(*map(ask, engines.values())), strict=True)).get

    async def _choose(
        self, stream: Stream, turn: Turn, found: FoundAt | None, refusals: Refusals, *, patient: bool,
        adopted: Adoption | None = None,
    ) -> tuple[Replica, EngineClient, Choice]:  # fmt: skip
        """Choose a replica for a request, and record the request there. Waits while no replica serves.

        An adopted request stays where it is.

        A replica that refused the contract is not asked again while another one was not asked. Raises NoReplica if no
        replica serves for a long time, and QueueFull if the queues of all these are full and not `patient`.
        """
        until = time.monotonic() + RESCUE_SECONDS
        while not (serving := self.serving):
            self.fleet.check_alive()
            self.fleet.changed.clear()
            try:
                await asyncio.wait_for(self.fleet.changed.wait(), until - time.monotonic())
            except TimeoutError:
                raise NoReplica(f"no replica has served for {RESCUE_SECONDS:g} s; try again later") from None
        serving = refusals.without(serving) or serving  # the others may have ended since
        able = [replica for replica in serving if not replica.full]
        if not able and not patient:
            raise QueueFull(f"the queues of all {len(serving)} replicas are full")
        now = time.monotonic()
        holders = [each for each in serving if adopted and each.engine and each.engine.has_adopted(adopted)]
        if holders:
            choice = Choice(holders[0].name)
        else:
            choice = self.router.choose(turn, self._views(able or serving), now, found)
        replica = next(each for each in serving if each.name == choice.replica)
        engine = replica.engine
        assert engine is not None
        self.router.sent(stream.request.id, turn, choice, now)
        replica.enter(stream.request.id)
        return replica, engine, choice

    async def _bring(self, turn: Turn, choice: Choice, engine: EngineClient) -> None:
        """Copy the state that a turn lacks at its replica, from the replica that the router chose."""
        source = self.fleet.engines.get(choice.move_from or "")
        if source is not None:
            self._count_move(await self.mover.move(turn.chain, source, engine))

    async def _move(self, move: Move) -> int:
        """Move an idle conversation. Once its state has arrived, it belongs to the target replica."""
        engines, tokens = self.fleet.engines, 0
        if move.source in engines and move.target in engines:
            source, target = engines[move.source], engines[move.target]
            tokens = await self.mover.move(move.chain, source, target)
        self._count_move(tokens)
        self.router.moved(move, tokens, time.monotonic())
        return tokens

    def _count_move(self, tokens: int) -> None:
        self.counts.moves += tokens > 0
        self.counts.moved_tokens += tokens

    async def _move_away(self, replica: Replica) -> None:
        """Move tuning jobs and conversations of a draining replica to others, until no move is worthwhile."""
        if self.serving:
            await self.tuning.move_away(replica)
        while self.serving:
            moves = self.router.rebalance(time.monotonic(), self._views())
            came = await asyncio.gather(*(self._move(move) for move in moves))
            if not any(tokens for move, tokens in zip(moves, came, strict=True) if move.source == replica.name):
                break
        if self._moving:  # Moves that began earlier may need this replica's engine.
            await asyncio.wait([*self._moving])

    def _views(self, able: Sequence[Replica] | None = None) -> list[ReplicaView]:
        """Return the router's views of all live engines. Replicas in `able`, by default all, take requests."""
        views, block = [], self.info.block_size
        for replica in self.fleet.answering:
            takes = replica.serves and (able is None or replica in able)
            stats = replica.stats
            free = None if stats is None else (stats.blocks_total - stats.blocks_used) * block
            state = ReplicaState.READY if takes else ReplicaState.DRAINING
            movable = replica.engine is not None and self.mover.can(replica.engine)
            link = self.mover.ms_per_token if movable else None
            views.append(
                ReplicaView(
                    replica.name,
                    free_tokens=free,
                    most_tokens=self._most_tokens(replica),
                    link_ms_per_token=link,
                    lower_ms_per_token=self._lower,
                    state=state,
                )
            )
        return views

    def _most_tokens(self, replica: Replica) -> int | None:
        """Return the number of KV tokens that all tiers of a replica can hold; None if it is unknown or unlimited."""
        if replica.engine is None or replica.engine.info.executor != "paged" or self.config.remote_cache is not None:
            return None
        info, stats = replica.engine.info, replica.stats
        if self.config.disk_cache_dir is not None and stats is None:
            return None
        on_disk = 0 if stats is None else stats.disk_blocks_total
        return (info.num_blocks + info.num_host_blocks + on_disk) * info.block_size

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
        """Return the digests of the prompt and the answer so far; none if the request leaves no shareable state."""
        request = stream.request
        if not stream.answer:
            return []
        tokens = array("I", request.prompt[: request.answer_start])
        tokens.extend(stream.answer)
        return self._digests.digests(request.identity.root(), tokens)

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Load an adapter at every replica; if one fails, at none. See `EngineClient.load_adapter`."""
        return await self.fleet.load_adapter(name, path, replace=replace)

    def hold_adapter(self, adapter: str) -> AbstractContextManager[str]:
        """Hold the present version of an adapter at every replica. See `EngineClient.hold_adapter`."""
        return self.fleet.hold_adapter(adapter)

    async def forgotten(self, adapter: str) -> None:
        """Wait until every replica has forgotten a replaced version. See `EngineClient.forgotten`."""
        await self.fleet.forgotten(adapter)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter at every replica. See `EngineClient.unload_adapter`."""
        await self.fleet.unload_adapter(name)

    def note_pause(self, request_id: str, pause: Pause) -> None:
        """Let the engines know what follows a request that has ended. The others ignore the note."""
        for replica in self.serving:
            if replica.engine is not None:
                replica.engine.note_pause(request_id, pause)

    def warm(self, prompt: Sequence[int], *, tenant: str = "", adapter: str = "", salt: str = "") -> None:
        """Let each engine bring back what it keeps of these tokens. Raises RequestRefused for an unknown adapter."""
        for replica in self.serving:
            if replica.engine is not None:
                replica.engine.warm(prompt, tenant=tenant, adapter=adapter, salt=salt)

    async def health(self, timeout: float = HANG_SECONDS) -> SchedulerStats:
        """Return the summed stats of all replicas that answer in time.

        Raises NoReplica if no replica is alive, and TimeoutError if none answers.
        """
        self.fleet.check_alive()
        return self.contracts.added_to(await self.fleet.health(timeout))

    async def close(self) -> None:
        """Stop all engines. Running streams raise EngineDead. May be called more than once."""
        self.fleet.end("the engines were closed")
        tasks = [*self._moving, *([] if self._watching is None else [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.fleet.close()
        await self.tuning.close()
        self.text.close()

    def _begin(self, engines: dict[int, EngineClient]) -> None:
        """Begin to serve with the first engines, which are ready."""
        first = next(iter(engines.values()))
        self.config, self.text = first.config, first.text
        self.pooling, self.generation, self.weights = first.pooling, first.generation, first.weights
        most, info = self.cluster.most, first.info
        self.info = replace(
            info, max_sequences=most * info.max_sequences, max_waiting=most * info.max_waiting,
            started_in=max(engine.info.started_in for engine in engines.values()),
        )  # fmt: skip
        self._block = info.block_size if info.executor == "paged" else CHAIN_BLOCK
        self._digests = DigestCache(self._block, CHAIN_BLOCKS)
        self.router = router_for(self.cluster.routing, info, self._block)
        self.mover = Mover(info.memory.block / info.block_size, self._block)
        self._lower = info.memory.block / info.block_size / DISK_BYTES_PER_SECOND * 1e3
        self.fleet.on_ready = self._adopt
        self.fleet.on_lost = lambda replica: self.router.lost(replica.name)
        self.fleet.before_end = self._move_away
        self.fleet.begin(engines)
        self._watching = asyncio.create_task(self._watch())

    def _adopt(self, engine: EngineClient) -> None:
        """Let a new engine use the shared text and report its steps here."""
        engine.use_text(self.text)
        engine.on_steps = lambda steps: self.on_steps(steps)
        self._introduce(engine)

    async def _watch(self) -> None:
        """Check all replicas once a second, change their number if needed, and move idle conversations."""
        scaler = Scaler(
            self.cluster.count, self.cluster.most, self.cluster.scale_up_ms / 1000, self.cluster.scale_down_seconds
        )
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            self.fleet.check_replicas(now)
            if self.cluster.max_replicas is not None:
                self._scale(scaler, now)
            if len(self.members) > 1:
                for move in self.router.rebalance(now, self._views()):
                    moving = asyncio.create_task(self._move(move))
                    self._moving.add(moving)
                    moving.add_done_callback(self._moving.discard)

    def _scale(self, scaler: Scaler, now: float) -> None:
        members = [replica for replica in self.members if not replica.draining.is_set()]
        changing = any(replica.state is State.STARTING or replica.draining.is_set() for replica in self.members)
        load = Load(self._queued(now), len(self._streams), self.info.max_sequences // self.cluster.most)
        match scaler.decide(load, len(members), now, changing=changing):
            case 1:
                with suppress(ValueError):
                    added = self.fleet.add()
                    log.warning("requests queue for %.1f s: replica %s is added", load.queued_seconds, added.name)
            case -1 if len(self.serving) > 1:
                self.fleet.drain(min(reversed(self.serving), key=lambda replica: len(replica.running)).name)

    def _queued(self, now: float) -> float:
        """Return the seconds for which the longest waiting request has waited for its first step."""
        waiting = sum(replica.stats.waiting for replica in self.members if replica.stats is not None)
        since = sorted(at for at in self._streams.values() if at)[-waiting:] if waiting else []
        return now - since[0] if since else 0.0

    def _draw_seed(self) -> int:
        """Return the next seed for a request without one. Each run draws the same sequence."""
        self._drawn += 1
        digest = hashlib.sha256(f"{self.config.seed}/{self._drawn}".encode()).digest()
        return int.from_bytes(digest[:8], "little") & MAX_SEED


def router_for(name: RouterName, info: messages.EngineInfo, block_size: int) -> Router:
    """Return the router for a policy.

    The priced policy needs a cost profile. If there is none, the policy prefix-tree is used instead.
    """
    rules = RoutingRules(block_size=block_size, step_tokens=info.token_budget)
    if name != "priced":
        return make_router(name)
    try:
        if not info.profile_path:
            raise FileNotFoundError("the engine measured none")
        cost = CostProfile.load(Path(info.profile_path)).cost
    except (OSError, ValueError) as error:
        log.warning("there is no cost profile to price requests with, so routing is by prefix-tree: %s", error)
        return make_router("prefix-tree")
    return make_router("priced", cost, rules)
