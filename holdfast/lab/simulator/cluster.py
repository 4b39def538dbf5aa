"""Simulates replicas: the engine's own loop and planners once per replica, over one virtual time, and a router."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, NamedTuple

from holdfast.cluster.routing import Found, Move, ReplicaState, ReplicaView, Router, Turn
from holdfast.core.types import Identity, Request, SequenceOutput
from holdfast.engine.profiles import CostProfile
from holdfast.lab.metrics import Record
from holdfast.lab.simulator.deployment import Pipeline
from holdfast.lab.simulator.devices import Link
from holdfast.lab.simulator.executor import SimulatedExecutor, VirtualClock
from holdfast.lab.simulator.run import VOCAB_SIZE, Conversations, Watch, make_loop, nobody, on_rows
from holdfast.lab.workloads import Workload
from holdfast.lm.config import EngineConfig
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.digests import DigestCache, block_digests
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import LanguageLoop, SchedulerStats

ROOT = Identity().root()
"""First digest of the hash chains of all simulated requests."""
REBALANCE_SECONDS = 1.0
"""Seconds between two checks for idle conversations to move."""
FIRST_ESTIMATE = 128.0
"""Number of tokens that the first answer is expected to have.

For later answers, it is the mean of the previous ones.
"""
REMEMBERED = 1 << 20
"""Number of prompt blocks whose digests are remembered, so that a next turn hashes only its new blocks."""


Sharing = Callable[[int], float]
"""Factor on the duration of a step that begins while this many replicas compute, including its own."""


def apart(computing: int) -> float:
    """The `Sharing` of replicas that have one device each."""
    return 1.0


def on_cores(cores: float) -> Sharing:
    """The `Sharing` of a CPU with cores for `cores` replicas at once. Raises ValueError unless it is above 0."""
    if not cores > 0:
        raise ValueError(f"cores is {cores}; it must be above 0")
    return lambda computing: max(1.0, computing / cores)


class ClusterEvent(NamedTuple):
    """A failure or a drain of one replica."""

    time: float
    """Seconds from the start."""
    kind: Literal["fail", "drain"]
    replica: int


@dataclass(frozen=True, slots=True)
class ClusterOutcome:
    """The result of a simulated run of several replicas."""

    records: list[Record]
    seconds: float
    """Virtual seconds from the start to the end of the last request."""
    busy: tuple[float, ...]
    """Virtual seconds during which each replica's device computed."""
    routed: tuple[int, ...]
    """Number of requests that each replica received."""
    stats: tuple[SchedulerStats, ...]
    """Queues and memory of each replica at the end."""
    prompts: tuple[tuple[int, int], ...]
    """For each request that began: the number of its prompt tokens, and how many of them one replica with unlimited
    memory would find if their state were there once the turn is sent."""
    fetched_tokens: int
    """Number of tokens copied between replicas for a turn."""
    moved_tokens: int
    """Number of tokens copied between replicas ahead of need, while their conversations were idle."""
    moves: int
    """Number of moves ahead of need."""
    resent: int
    """Number of requests that continued on another replica because theirs failed."""

    @property
    def reusable_tokens(self) -> int:
        """Number of prompt tokens that one replica with unlimited memory would find."""
        return sum(reusable for _, reusable in self.prompts)

    @property
    def found(self) -> float:
        """Share of the reusable prompt tokens that was not computed again; 1 if there are none."""
        return (
            sum(record.cached_tokens for record in self.records) / self.reusable_tokens if self.reusable_tokens else 1
        )

    @property
    def spread(self) -> float:
        """Busy time of the busiest replica minus that of the least busy one, as a share of the mean."""
        return spread(self.busy)


def spread(values: Sequence[float]) -> float:
    """The largest value minus the smallest, as a share of the mean."""
    return (max(values) - min(values)) / (sum(values) / len(values))


def simulate_cluster(
    config: EngineConfig,
    profile: CostProfile,
    workload: Workload,
    router: Router,
    *,
    replicas: int,
    prefill: int = 0,
    link: Link | None = None,
    asks: bool = False,
    pipeline: Pipeline | None = None,
    events: Sequence[ClusterEvent] = (),
    concurrency: int | None = None,
    sharing: Sharing = apart,
    watch: Watch = nobody,
    on_progress: Callable[[int], None] = lambda done: None,
    until: float = inf,
) -> ClusterOutcome:
    """Serve `workload` with `replicas` engines, as `config` describes, and one router.

    Each replica is one of `simulate`, with its own host tier. State goes between host tiers over `link`; each replica
    sends and receives one chain at a time. Without a link or a host tier nothing is moved. With `asks`, each replica
    reports its blocks to the router; else the router knows only its own map, as the server does. A replica that fails
    loses its state; its requests continue on others, with the tokens that they have. A replica that drains finishes its
    requests. After `until` virtual seconds the run ends with the records made by then.

    With `prefill`, the first `prefill` replicas compute prompts alone (disaggregation, as in SplitWise and DistServe).
    One gives the first token, and then the state of the prompt's full blocks goes over `link` to one of the others,
    which computes the rest of the prompt and all further tokens. The router chooses twice, among the replicas of each
    kind.

    `sharing` is the slowdown of replicas that share a device, such as `on_cores`. `watch` makes the observers of each
    replica's loop.

    Deterministic. Raises ValueError as `simulate`, for less than one replica, for an event of an unknown replica, for
    padded rows, for prefill replicas without a link, a host tier or others that decode, and if no replica is left.
    """
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}; it must be at least 1")
    if not 0 <= prefill < replicas:
        raise ValueError(
            f"prefill is {prefill}; it must be from 0 to {replicas - 1}, as one of {replicas} has to decode"
        )
    if prefill and (link is None or not (config.host_cache_bytes and config.prefix_sharing)):
        raise ValueError(f"prefill is {prefill}; state that goes to other replicas needs a link and a host tier")
    if on_rows(config, profile):
        raise ValueError("executor is padded, whose rows do not move between replicas; simulate one replica alone")
    for event in events:
        if not 0 <= event.replica < replicas:
            raise ValueError(f"replica {event.replica} is to {event.kind}, and there are {replicas}, from 0")
    nodes: list[Replica] = []

    def pace(now: float) -> float:
        return sharing(sum(node.stepping for node in nodes))

    nodes += [Replica.make(f"replica-{number}", config, profile, pipeline, pace, watch) for number in range(replicas)]
    cluster = Cluster(nodes, router, profile, config.block_size, link, asks, events, prefill)
    clients = Conversations(workload, cluster.add, vocab_size=VOCAB_SIZE, concurrency=concurrency)
    cluster.keyed = [len(conversation.turns) > 1 or not conversation.turns[0].hashes for conversation in workload]
    while not clients.done and cluster.now < until:
        if clients.next_due <= cluster.next_event:
            cluster.now = max(cluster.now, clients.next_due)
            clients.send_due(cluster.now)
        else:
            outputs = cluster.advance()
            clients.receive(outputs, cluster.now)
            on_progress(clients.ended)
    return ClusterOutcome(
        clients.records,
        cluster.now,
        tuple(node.executor.busy for node in nodes),
        tuple(node.routed for node in nodes),
        tuple(node.loop.stats() for node in nodes),
        tuple(cluster.prompts),
        cluster.fetched,
        cluster.moved,
        cluster.moves,
        cluster.resent,
    )


@dataclass(slots=True)
class Replica:
    """One replica: an engine's loop, whose clock is ahead of the others while it computes a step."""

    name: str
    clock: VirtualClock
    loop: LanguageLoop
    executor: SimulatedExecutor
    pool: BlockPool
    state: ReplicaState = ReplicaState.READY
    failed: bool = False
    stepping: bool = False
    """Whether one of its events is queued."""
    routed: int = 0
    sends_until: float = 0.0
    receives_until: float = 0.0
    """Virtual time at which the replica's link becomes free in each direction."""

    @classmethod
    def make(
        cls,
        name: str,
        config: EngineConfig,
        profile: CostProfile,
        pipeline: Pipeline | None,
        pace: Callable[[float], float],
        watch: Watch,
    ) -> Replica:
        """An idle replica. `pace(t)` multiplies the profile's duration of a step that starts at t."""
        clock = VirtualClock()
        loop, executor, *_ = make_loop(config, profile, clock, pipeline=pipeline, pace=pace, watch=watch)
        planner = loop.planner
        assert isinstance(planner, Scheduler)
        (pool,) = planner.block_pools
        return cls(name, clock, loop, executor, pool)

    @property
    def size(self) -> int:
        """Number of tokens of KV that the replica's tiers hold together."""
        host = self.pool.host
        return (self.pool.num_blocks + (host.num_blocks if host is not None else 0)) * self.pool.block_size

    def found(self, chain: Sequence[bytes], prompt_tokens: int) -> Found:
        """The tokens of a prompt that the replica holds, by tier.

        The last token never counts, because it must be computed.
        """
        chain = chain[: (prompt_tokens - 1) // self.pool.block_size]
        device = self.pool.find_all(chain)
        lacking = [digest for digest, block in zip(chain, device, strict=True) if block is None]
        host = len(self.pool.host.find_all(lacking)) if self.pool.host is not None else 0
        return Found((len(chain) - len(lacking)) * self.pool.block_size, host * self.pool.block_size)

    def has(self, digest: bytes) -> bool:
        """Whether a block is on the device or in the host tier."""
        return self.pool.find_all([digest])[0] is not None or self.pool.find_on_host(digest) is not None

    def receive(self, blocks: Iterable[tuple[int, bytes]], now: float) -> int:
        """Store these blocks in the host tier while there is room. Returns the number stored.

        Each block comes with its place in its chain.
        """
        host, came = self.pool.host, 0
        assert host is not None
        victims = host.victims(now)
        for index, digest in blocks:
            if not self.has(digest):
                room, _ = host.reserve(inf, victims)
                if room is None:
                    break
                host.cache_block(room, digest, index, (now, 0))
                came += 1
        return came


@dataclass(slots=True)
class Sent:
    """A request that has not ended."""

    request: Request
    turn: Turn
    replica: int
    attempt: int
    """Number of replicas so far. Output of an earlier replica is not read."""
    reusable: int
    """Number of prompt tokens that earlier requests had."""
    started: bool = False
    """Whether its present replica has given a token."""
    tokens: list[int] = field(default_factory=list)
    computed_at: str | None = None
    """Replica that has computed the prompt for another one, which does not have it yet."""
    cached: int | None = None
    scheduled: float = 0.0


BOUNDARY, STATE, EVENT, REBALANCE, STEP = range(5)
"""Kinds of events, in the order in which events of one time happen. A step begins after all others."""


class Cluster:
    """Replicas and a router over one virtual time."""

    def __init__(
        self,
        nodes: Sequence[Replica],
        router: Router,
        profile: CostProfile,
        block_size: int,
        link: Link | None,
        asks: bool,
        events: Sequence[ClusterEvent],
        prefill: int = 0,
    ) -> None:
        self.now = 0.0
        self.keyed: Sequence[bool] = ()
        """Whether the router receives the key of each conversation."""
        self.fetched = self.moved = self.moves = self.resent = 0
        self.prompts: list[tuple[int, int]] = []
        self._nodes, self._router, self._asks = nodes, router, asks
        self._computes_prompts, self._decodes = (nodes[:prefill], nodes[prefill:]) if prefill else (nodes, nodes)
        self._by_name = {node.name: number for number, node in enumerate(nodes)}
        self._block_size, self._token_bytes = block_size, profile.token_bytes
        self._copy_rate = profile.copy_rate or inf
        self._link = link if link is not None and nodes[0].pool.host is not None else None
        self._digests = DigestCache(block_size, REMEMBERED)
        self._sent: dict[str, Sent] = {}
        self._seen: set[bytes] = set()
        """The digests of all blocks so far."""
        self._answers, self._answered = FIRST_ESTIMATE, 1
        self._count = 0
        self._queue: list[tuple[float, int, int, Any]] = []
        """Future events: time, kind, number, argument."""
        for event in events:
            self._push(event.time, EVENT, event)
        self._push(REBALANCE_SECONDS, REBALANCE, None)

    @property
    def next_event(self) -> float:
        """Virtual time of the next event."""
        return self._queue[0][0]

    def add(self, request: Request) -> None:
        """Route a request that is sent now."""
        chain = self._digests.digests(ROOT, request.prompt)[: len(request.prompt) // self._block_size]
        number = int(request.id.partition(".")[0])
        turn = Turn(
            str(number) if self.keyed[number] else None,
            chain,
            len(request.prompt),
            round(self._answers / self._answered),
        )
        most = (len(request.prompt) - 1) // self._block_size
        reusable = sum(map(self._seen.__contains__, chain[:most])) * self._block_size
        self._seen.update(chain)
        self._route(Sent(request, turn, 0, 0, reusable))

    def advance(self) -> Iterable[SequenceOutput]:
        """Let the next event happen. Returns the tokens that it gives."""
        self.now, kind, _, what = heapq.heappop(self._queue)
        if kind == STEP:
            self._step(what)
        elif kind == BOUNDARY:
            return self._receive(*what)
        elif kind == STATE:
            what()
        elif kind == REBALANCE:
            self._rebalance()
            self._push(self.now + REBALANCE_SECONDS, REBALANCE, None)
        elif what.kind == "fail":
            self._fail(what.replica)
        else:
            self._nodes[what.replica].state = ReplicaState.DRAINING
        return ()

    def _route(self, sent: Sent) -> None:
        """Choose a replica, and give it the request once the state that it should have has arrived."""
        turn = sent.turn
        nodes = [node for node in (self._decodes if sent.tokens else self._computes_prompts) if not node.failed]
        found = {node.name: node.found(turn.chain, turn.prompt_tokens) for node in nodes} if self._asks else None
        views = self._views(nodes)
        choice = self._router.choose(turn, views, self.now, None if found is None else found.__getitem__)
        if sent.computed_at is not None:
            choice = replace(choice, move_from=sent.computed_at)
            sent.computed_at = None
        self._router.sent(sent.request.id, turn, choice, self.now)
        number = self._by_name[choice.replica]
        sent.replica = number
        sent.attempt += 1
        sent.started = False
        self._sent[sent.request.id] = sent
        self._nodes[number].routed += 1
        if choice.move_from is None:
            self._deliver(sent)
            return
        source, attempt = self._nodes[self._by_name[choice.move_from]], sent.attempt

        def arrive(blocks: int) -> None:
            self.fetched += blocks * self._block_size
            if sent.attempt == attempt:
                self._deliver(sent)

        self._transfer(source, self._nodes[number], turn.chain, arrive)

    def _deliver(self, sent: Sent) -> None:
        """Add a request to its replica's loop."""
        node, request = self._nodes[sent.replica], sent.request
        if sent.tokens:
            params = replace(request.params, max_tokens=request.params.max_tokens - len(sent.tokens))
            request = replace(request, prompt=(*request.prompt, *sent.tokens), params=params)
        elif self._decodes is not self._computes_prompts:
            request = replace(request, params=replace(request.params, max_tokens=1))
        node.loop.add(request)
        if not node.stepping:
            node.clock.advance_to(self.now)
            node.stepping = True
            self._push(self.now, STEP, sent.replica)

    def _step(self, number: int) -> None:
        node = self._nodes[number]
        if node.failed:
            return
        outputs = node.loop.step()
        if outputs is None:
            node.stepping = False
        else:
            self._push(node.clock.now, BOUNDARY, (number, outputs))

    def _receive(self, number: int, outputs: Iterable[SequenceOutput]) -> Iterable[SequenceOutput]:
        """Read the output of a step when it ends."""
        node, router = self._nodes[number], self._router
        if node.failed:
            return ()
        read = []
        for output in outputs:
            sent = self._sent[output.request_id]
            if sent.cached is None:
                sent.cached, sent.scheduled = output.cached_tokens, output.scheduled_at
                self.prompts.append((sent.turn.prompt_tokens, sent.reusable))
            if output.tokens and not sent.started:
                router.started(output.request_id, self.now)
                sent.started = True
            sent.tokens += output.tokens
            if sent.attempt > 1:  # the figure of the first replica counts
                output = output._replace(cached_tokens=sent.cached, scheduled_at=sent.scheduled)
            if output.finish_reason is not None and len(sent.tokens) < sent.request.params.max_tokens:
                self._hand_over(sent)
                output = output._replace(finish_reason=None)
            elif output.finish_reason is not None:
                self._end(sent)
            read.append(output)
        if node.loop.has_work():
            self._push(self.now, STEP, number)
        else:
            node.stepping = False
        return read

    def _hand_over(self, sent: Sent) -> None:
        """Continue a request, whose prompt is computed, on a replica that decodes."""
        self._router.ended(sent.request.id, self.now, sent.turn.chain)
        sent.computed_at = self._nodes[sent.replica].name
        self._route(sent)

    def _end(self, sent: Sent) -> None:
        del self._sent[sent.request.id]
        chain, size, prompt = list(sent.turn.chain), self._block_size, sent.request.prompt
        # The last token is sampled, and computed only with the next turn.
        known = (*prompt[len(chain) * size :], *sent.tokens[:-1])
        added = len(known) // size
        chain += block_digests(chain[-1] if chain else ROOT, known[: added * size], size) if added else []
        self._seen.update(chain[len(sent.turn.chain) :])
        self._answers += len(sent.tokens)
        self._answered += 1
        self._router.ended(sent.request.id, self.now, chain)

    def _rebalance(self) -> None:
        for move in self._router.rebalance(self.now, self._views(self._alive())):
            self._begin(move)

    def _begin(self, move: Move) -> None:
        """Begin to move a conversation."""
        source, target = (self._nodes[self._by_name[name]] for name in (move.source, move.target))

        def arrive(blocks: int) -> None:
            self.moves += 1
            self.moved += blocks * self._block_size
            self._router.moved(move, blocks * self._block_size, self.now)

        self._transfer(source, target, move.chain, arrive)

    def _transfer(
        self, source: Replica, target: Replica, chain: Sequence[bytes], arrive: Callable[[int], None]
    ) -> None:
        """Copy the blocks of a chain that the source has and the target lacks.

        `arrive` receives the number of blocks that have arrived.

        As in engines, the source holds the blocks until they have arrived, and gaps between them do not matter.
        """
        link, size = self._link, self._block_size * self._token_bytes
        assert link is not None
        wanted = [(at, each) for at, each in enumerate(chain) if source.has(each) and not target.has(each)]
        on_device = sum(block is not None for block in source.pool.find_all([each for _, each in wanted]))
        begins = max(self.now, source.sends_until, target.receives_until)
        ends = begins + link.send(len(wanted) * size) + on_device * size / self._copy_rate
        source.sends_until = target.receives_until = ends

        def end() -> None:
            came = 0 if source.failed or target.failed else target.receive(wanted, self.now)
            if came == len(wanted) and came:
                source.pool.give_way([digest for _, digest in wanted])
            arrive(came)

        self._push(ends, STATE, end)

    def _fail(self, number: int) -> None:
        """Fail a replica: its state is lost, and its requests continue on others."""
        node = self._nodes[number]
        node.failed = True
        self._router.lost(node.name)
        for sent in [sent for sent in self._sent.values() if sent.replica == number]:
            self.resent += 1
            self._route(sent)

    def _alive(self) -> list[Replica]:
        return [node for node in self._nodes if not node.failed]

    def _views(self, nodes: Sequence[Replica]) -> list[ReplicaView]:
        per_token = self._token_bytes * 1e3
        link = per_token / self._link.rate if self._link is not None else None
        lift = per_token / self._copy_rate
        return [
            ReplicaView(
                node.name,
                most_tokens=node.size,
                link_ms_per_token=link,
                host_ms_per_token=lift,
                state=node.state,
            )
            for node in nodes
        ]

    def _push(self, time: float, kind: int, what: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, kind, self._count, what))
