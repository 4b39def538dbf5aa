"""Runs a workload through the engine's own loop, on a virtual or a real clock, and records what clients see."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Protocol

from holdfast.core.contract import NO_CONTRACT, ContractRefused
from holdfast.core.pause import Pause
from holdfast.core.types import Request, SamplingParams, SequenceOutput
from holdfast.engine.profiles import CostProfile
from holdfast.lab.metrics import Record
from holdfast.lab.simulator.deployment import Pipeline
from holdfast.lab.simulator.executor import END, SimulatedDrafter, SimulatedExecutor, StepTimes, VirtualClock
from holdfast.lab.simulator.padded import ENGINE, PaddedStepTimes, RowSoftware
from holdfast.lab.simulator.tiers import DISK_RATE, NoDisk, SimulatedDisk
from holdfast.lab.simulator.training import SimulatedTrainer, Tuning
from holdfast.lab.workloads import History, PromptTokens, Turn, Workload
from holdfast.lm.choice import capacity_of, compose_scheduler, make_planning, steps_in_flight
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.contracts.planner import why_not
from holdfast.lm.parts.pauses.planner import PausePart
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.speculation.choice import make_parts as speculation_parts
from holdfast.lm.parts.standard import standard_parts
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.parts.tuning.choice import make_tuner, with_training
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.part import Part
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.tiers import LowerShape, piece_bytes
from holdfast.lm.types import (
    COPIES_AHEAD_BYTES,
    Abilities,
    EngineShape,
    LanguageLoop,
    RowBytes,
    RowShape,
    SchedulerStats,
    StateShape,
    StepPlan,
    StepResult,
)
from holdfast.loop.contracts import Observer
from holdfast.loop.loop import Loop

VOCAB_SIZE = 32_000
"""Vocabulary of the simulated prompts. No model reads them, so any size gives the same times."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulated run."""

    records: list[Record]
    seconds: float
    """Virtual seconds from the start to the end of the last request."""
    busy: float
    """Virtual seconds during which the device computed."""
    steps: int
    stats: SchedulerStats
    """State of queues and memory at the end."""
    trained: float = 0.0
    """Virtual seconds that the device trained, not included in `busy`."""
    trained_tokens: int = 0
    """Number of tokens in complete micro-batches."""
    slices: int = 0
    stages_busy: tuple[float, ...] = ()
    """Virtual seconds that each stage of a pipeline computed. `busy` is their mean. Empty for one stage."""
    most_decodes: int = 0
    """Largest number of sequences that decoded in a step."""
    most_tokens: int = 0
    """Largest number of tokens of a step."""

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the run in which each stage of a pipeline had nothing to do (bubbles)."""
        return tuple(1 - busy / self.seconds for busy in self.stages_busy)


Watch = Callable[[Scheduler, EngineShape, VirtualClock], Iterable[Observer[StepPlan, StepResult]]]
"""Function that makes the observers of a simulated loop from its planner, the engine's shape and the virtual clock."""


def nobody(scheduler: Scheduler, shape: EngineShape, clock: VirtualClock) -> tuple[()]:
    """No observers."""
    return ()


def simulate(
    config: EngineConfig,
    profile: CostProfile,
    workload: Workload,
    *,
    concurrency: int | None = None,
    host_seconds: float = 0.0,
    pace: Callable[[float], float] = lambda now: 1.0,
    pipeline: Pipeline | None = None,
    watch: Watch = nobody,
    on_progress: Callable[[int], None] = lambda done: None,
    software: RowSoftware = ENGINE,
    make_policy: Callable[[EngineShape], Policy] | None = None,
    until: float = inf,
    tuning: Tuning | None = None,
    acceptance: float | None = None,
    disk_rate: float = DISK_RATE,
    tells_pauses: bool = True,
) -> Outcome:
    """Serve `workload` with the engine that `config` describes on the device that `profile` was measured on.

    Conversations arrive at their times. With `concurrency`, arrival times are ignored and that number of conversations
    is kept open (closed loop). `host_seconds` is the host's time for each step. `pace(t)` multiplies the duration of a
    step that starts at t. With a `pipeline`, one more step is in flight for each further stage, and `profile.cost` must
    be its `whole()`. `watch` makes the observers of the loop. `on_progress` receives the number of requests that have
    ended.

    With the executor "padded", or a profile of padded rows, plans are of padded rows, which `software` runs.
    `make_policy` replaces the policy that `config` asks for. With an `acceptance`, decodes verify drafts as
    `config.speculation` says, and each guess is right with this probability. `tuning` has training jobs that run with
    the requests; the run ends with the last request. After `until` virtual seconds it ends with the records made by
    then.

    A turn with a `limit` above its `output` asks for answers of up to `limit` tokens, and its answer ends before: the
    engine does not know the length ahead.

    If `config` has a directory for a disk tier, that tier is empty at first and moves `disk_rate` bytes per second.
    There is no remote tier.

    With `tells_pauses`, clients say how long they expect pauses to last and which answers they replace. The engine
    knows the kinds of pauses in any case, as a server reads them from the answers.

    Clients ask an engine that takes contracts for what each turn wants, and a refused turn ends its conversation. Other
    engines are not asked, so the records show which contracts they would have kept.

    Deterministic: the same arguments give the same outcome. Raises ValueError for a request that this engine can never
    serve, and for a host tier if the profile has no cache size or copy rate.
    """
    clock = VirtualClock()
    loop, executor, trainer, disk, takes_contracts = make_loop(
        config,
        profile,
        clock,
        disk_rate=disk_rate,
        host_seconds=host_seconds,
        pace=pace,
        pipeline=pipeline,
        watch=watch,
        software=software,
        make_policy=make_policy,
        tuning=tuning,
        acceptance=acceptance,
    )
    clients = Clients(
        workload,
        loop,
        clock,
        vocab_size=VOCAB_SIZE,
        concurrency=concurrency,
        wait=disk.wait,
        ends=executor.ends,
        tells=takes_contracts,
        tells_pauses=tells_pauses,
        next_look=lambda: min(next_look(loop), disk.next_end),
        supersede=partial(supersede, loop, clock) if tells_pauses else forget,
    )
    while clients.advance() and clock.now < until:
        on_progress(clients.ended)
    stages_busy = tuple(executor.stages_busy) if pipeline is not None else ()
    outcome = Outcome(
        clients.records, clock.now, executor.busy, clients.steps, loop.stats(), stages_busy=stages_busy,
        most_decodes=executor.most_decodes, most_tokens=executor.most_tokens,
    )  # fmt: skip
    if trainer is None:
        return outcome
    return replace(outcome, trained=trainer.seconds, trained_tokens=trainer.tokens, slices=trainer.slices)


def make_loop(
    config: EngineConfig,
    profile: CostProfile,
    clock: VirtualClock,
    *,
    disk_rate: float = DISK_RATE,
    host_seconds: float = 0.0,
    pace: Callable[[float], float] = lambda now: 1.0,
    pipeline: Pipeline | None = None,
    watch: Watch = nobody,
    software: RowSoftware = ENGINE,
    make_policy: Callable[[EngineShape], Policy] | None = None,
    tuning: Tuning | None = None,
    acceptance: float | None = None,
) -> tuple[LanguageLoop, SimulatedExecutor, SimulatedTrainer | None, SimulatedDisk | NoDisk, bool]:
    """The engine's loop on its own clock, its executor, its trainer if there is `tuning`, its disk, and a flag.

    Call the disk's `wait` when no step can run. The flag says whether the engine takes contracts. See `simulate`.
    """
    stages = len(pipeline.stages) if pipeline else 1
    host_blocks, copy_seconds = _host_tier(config, profile)
    if on_rows(config, profile):
        step_times: StepTimes = PaddedStepTimes(
            profile.cost, token_bytes=profile.token_bytes, copy_rate=profile.copy_rate, software=software
        )
    else:
        step_times = StepTimes(
            profile.cost, pipeline, copy_seconds, profile.token_bytes * config.block_size, config.swap_in_groups
        )
    shape = engine_shape(config, profile, host_blocks=host_blocks)
    if config.disk_cache_dir is not None:
        shape = replace(shape, lower=_disk_tier(config, shape))
    cost = profile.cost
    planning = make_planning(config, shape, cost, make_policy(shape) if make_policy else None, stages=stages)
    policy = planning.policy
    drafter = SimulatedDrafter() if acceptance is not None and config.drafter else None
    parts: list[Part] = [*speculation_parts(planning, drafter)]
    trainer = None
    if tuning is not None:
        part, trainer = _begin_tuning(planning, profile, tuning)
        policy = with_training(
            planning, policy, part, tuning.deferral_bound, progress=tuning.progress, share=config.tuning_share
        )
        parts.append(part)
    executor = SimulatedExecutor(
        step_times, clock, host_seconds, pace, trainer, 1.0 if acceptance is None else acceptance
    )
    scheduler = compose_scheduler(planning, policy, [*parts, *standard_parts(planning)])
    lower = shape.lower
    disk: SimulatedDisk | NoDisk = NoDisk()
    if lower is not None:
        disk = SimulatedDisk(scheduler.part(TierPart), clock, lower.block_bytes, disk_rate)
    observers = watch(scheduler, shape, clock)
    loop = Loop(scheduler, executor, steps_in_flight(config, stages), clock, disk.exchange, observers=observers)
    return loop, executor, trainer, disk, not why_not(planning)


def next_look(loop: LanguageLoop) -> float:
    """Time at which a loop without work may bring state back ahead of a turn; infinity: never."""
    planner = loop.planner
    assert isinstance(planner, Scheduler)
    return min((part.next_look for part in planner.parts if isinstance(part, PausePart)), default=inf)


def supersede(loop: LanguageLoop, clock: VirtualClock, request: str) -> None:
    """Let the loop know that no turn will follow a request that has ended."""
    planner = loop.planner
    assert isinstance(planner, Scheduler)
    for part in planner.parts:
        if isinstance(part, PausePart):
            part.note(request, REPLACED, clock.now)


def forget(request: str) -> None:
    """Do nothing: nobody hears of it."""


def _begin_tuning(planning: Planning, profile: CostProfile, tuning: Tuning) -> tuple[TuningPart, SimulatedTrainer]:
    """The part that plans training, with its jobs, and the trainer that prices their slices.

    Raises ValueError as the engine would.
    """
    block_bytes = profile.token_bytes * planning.config.block_size
    if not block_bytes:
        raise ValueError(f"the profile of {profile.cost.model} does not say the size of a position, which tuning needs")
    copying = block_bytes / profile.copy_rate if profile.copy_rate else 0.0
    tuner = make_tuner(
        planning,
        tuning.shape,
        memory_fraction=tuning.memory_fraction,
        block_seconds=copying,
        exact=True,
    )
    jobs = {f"job {number}": job for number, job in enumerate(tuning.jobs)}
    for name, job in jobs.items():
        tuner.add(name, job, partial(job.blocks, block_bytes=block_bytes))
    return TuningPart(tuner), SimulatedTrainer(tuner.cost, jobs, block_bytes, tuning.error)


def on_rows(config: EngineConfig, profile: CostProfile) -> bool:
    """Whether plans are of padded rows: the configuration says so, or the profile was measured on them."""
    return config.executor == "padded" or profile.executor == "padded"


def _host_tier(config: EngineConfig, profile: CostProfile) -> tuple[int, float]:
    """Number of blocks in the host tier, and seconds to copy one block."""
    if not config.host_cache_bytes or not config.prefix_sharing:
        return 0, 0.0  # "auto" means none: a simulation has no host memory to measure
    states = _snapshots(config, profile, config.host_cache_bytes, least=0) * profile.state_bytes
    if not (profile.token_bytes and profile.copy_rate):
        cost = profile.cost
        raise ValueError(
            f"host_cache_gb is {config.host_cache_gb}, and the profile of {cost.model} on {cost.device} does not say "
            "both the size of a position and how fast it is copied; give the rate with --copy-gbs, or drop the tier"
        )
    block = profile.token_bytes * config.block_size
    return int((config.host_cache_bytes - states) / block), block / profile.copy_rate


def _snapshots(config: EngineConfig, profile: CostProfile, memory: float, *, least: int) -> int:
    """Number of snapshots of recurrent states in their share of this many bytes of cache, and at least this many.

    It is 0 for a model without recurrent layers.
    """
    share = config.snapshot_share if config.prefix_sharing else 0.0
    return max(least, int(memory * share / profile.state_bytes)) if profile.state_bytes else 0


def _cache(config: EngineConfig, profile: CostProfile) -> tuple[int, StateShape | None]:
    """Number of positions in the KV cache, and the sizes of recurrent states, if the model has any.

    The profile's cache is what is left by snapshots of the default share.
    """
    if not profile.state_bytes or on_rows(config, profile):
        return profile.cache_tokens, None
    memory = profile.cache_tokens * profile.token_bytes / (1 - EngineConfig.snapshot_share)
    snapshots = _snapshots(config, profile, memory, least=1)
    host = config.host_cache_bytes if config.prefix_sharing and profile.copy_rate else 0
    states = StateShape(
        snapshots=snapshots,
        host_snapshots=_snapshots(config, profile, host or 0, least=0),
        slot_bytes=profile.state_bytes,
    )
    return max(1, int((memory - snapshots * profile.state_bytes) / profile.token_bytes)), states


def _disk_tier(config: EngineConfig, shape: EngineShape) -> LowerShape:
    """The disk tier of an engine, empty. Raises ValueError without a host tier."""
    host, size = shape.num_host_blocks, shape.block_bytes
    if shape.rows is not None:
        host, size = shape.rows.host_memory, piece_bytes(shape.rows.bytes.of)
    if not (host and size):
        raise ValueError(
            "disk_cache_dir is set, and the simulated engine has no host tier before it; set host_cache_gb"
        )
    return LowerShape(size, disk_blocks=config.disk_cache_bytes // size)


def context_length(config: EngineConfig, profile: CostProfile) -> int:
    """Largest number of tokens in a sequence, prompt and output together."""
    longest = config.max_model_len or profile.max_model_len
    if profile.rows is None:
        return min(longest, _cache(config, profile)[0] + 1)
    return row_shape(config, profile).longest_row(min(longest, profile.max_model_len))


def engine_shape(config: EngineConfig, profile: CostProfile, *, host_blocks: int = 0) -> EngineShape:
    """The EngineShape that `config` gives on the device that `profile` was measured on."""
    max_model_len = context_length(config, profile)
    rows = row_shape(config, profile) if on_rows(config, profile) else None
    budget = config.fixed_token_budget or profile.token_budget
    tokens, states = _cache(config, profile)
    return EngineShape(
        model=profile.cost.model,
        precision=profile.precision,
        num_blocks=tokens if rows else tokens // config.block_size,
        num_host_blocks=host_blocks,
        block_bytes=0 if rows else profile.token_bytes * config.block_size,
        copies_ahead=max(1, COPIES_AHEAD_BYTES // (profile.token_bytes * config.block_size)) if host_blocks else None,
        token_budget=budget,
        max_step_tokens=capacity_of(
            config.scheduler,
            token_budget=budget,
            max_model_len=max_model_len,
            max_sequences=config.most_sequences,
            limit=config.fixed_token_budget or tokens,
            chunks=rows is None or rows.abilities.chunks,
            executor="padded" if rows else "paged",
        ),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        tile=profile.tile,
        executor="padded" if rows else "paged",
        rows=rows,
        states=states,
    )


def row_shape(config: EngineConfig, profile: CostProfile) -> RowShape:
    """Padded rows in the memory of the profile's cache, with the layout that the profile was measured on.

    If the profile is of a paged cache, the rows are of a model with full attention, which has every ability. The host
    tier has the size in `config`; "auto" means none. Raises ValueError if the profile has no size of a position.
    """
    if not profile.token_bytes:
        cost = profile.cost
        raise ValueError(
            f"executor is padded, and the profile of {cost.model} on {cost.device} does not say the size of a position"
        )
    host = 0.0 if config.host_cache_gb == "auto" else config.host_cache_gb
    memory = profile.cache_tokens * profile.token_bytes
    if profile.rows is not None:
        return replace(profile.rows, memory=memory, host_memory=int(host * 1e9))
    return RowShape(
        memory=memory,
        bytes=RowBytes(growing=((profile.token_bytes, None),)),
        abilities=Abilities(chunks=True, left_padding=True, batched_decode=True, shaping=True, croppable=True),
        host_memory=int(host * 1e9),
    )


class WaitableClock(Protocol):
    """A clock that a caller can wait on."""

    def __call__(self) -> float:
        """The current time in seconds."""

    def advance_to(self, time: float) -> None:
        """Return once the clock is at `time` or later."""


@dataclass(eq=False, slots=True)
class _Talk:
    """A conversation or a fork that has not ended."""

    path: tuple[int, ...]
    """Number of the conversation; for a fork followed by the number of the turn, and the fork's own among its forks."""
    turns: tuple[Turn, ...]
    history: History
    parent: _Talk | None
    """The conversation whose next turn waits for this fork."""
    number: int = 0
    """Number of the next turn."""
    awaited: int = 0
    """Number of forks that the next turn waits for."""
    alive: list[str] = field(default_factory=list)
    """Names of the requests that are part of its history."""

    @property
    def name(self) -> str:
        """The path as text."""
        return ".".join(map(str, self.path))


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended."""

    record: Record
    talk: _Talk
    turn: Turn
    answer: list[int]
    """Generated tokens, collected only if something follows."""
    continues: bool
    """Whether another turn or a fork follows."""


REPLACED = Pause(superseded=True)
"""The pause after an answer that another one replaces."""


class Conversations:
    """The clients of a workload: sends each turn when it is due, and records the answers.

    A conversation or a fork ends with its last turn, or with a turn whose contract is refused.
    """

    def __init__(
        self,
        workload: Workload,
        add: Callable[[Request], None],
        *,
        vocab_size: int,
        concurrency: int | None,
        ends: dict[str, int] | None = None,
        tells: bool = False,
        tells_pauses: bool = True,
        supersede: Callable[[str], None] = forget,
    ) -> None:
        """`add` takes each request. With `concurrency`, arrival times are ignored: see `simulate`.

        `ends` is the `SimulatedExecutor.ends` of what answers: clients then allow answers of a turn's `longest` tokens,
        which end earlier, with END. Without it each answer is as long as it may be, `Turn.output`. With `tells`,
        requests carry their contracts, and `add` raises ContractRefused where it refuses one. With `tells_pauses`, they
        carry the pauses that clients expect. `supersede` gets the name of each request that another one replaces.
        """
        self.records: list[Record] = []
        self.ended = 0
        self._workload = workload
        self._add = add
        self._ends = ends
        self._tells, self._tells_pauses = tells, tells_pauses
        self._supersede = supersede
        self._tokens = PromptTokens(vocab_size)
        self._open: dict[str, _OpenRequest] = {}
        first = len(workload) if concurrency is None else min(concurrency, len(workload))
        self._due: list[tuple[float, tuple[int, ...], _Talk]] = []
        """Turns to send: time, path of the conversation, conversation."""
        self._later = iter(range(first, len(workload)))
        for number in range(first):
            self._begin(0.0 if concurrency else workload[number].arrival, number)

    @property
    def next_due(self) -> float:
        """Time at which the next turn is to be sent, in seconds; infinite if none is due before another ends."""
        return self._due[0][0] if self._due else inf

    @property
    def done(self) -> bool:
        """Whether all turns have ended."""
        return not (self._due or self._open)

    def send_due(self, now: float) -> None:
        """Send the turns that are due."""
        due = self._due
        while due and due[0][0] <= now:
            at, _, talk = heapq.heappop(due)
            self._send(at, talk)

    def receive(self, outputs: Iterable[SequenceOutput], now: float) -> None:
        """Record the tokens that came at `now`."""
        for name, tokens, reason, cached, scheduled, *_ in outputs:
            request = self._open[name]
            times = request.record.token_times
            if not times:
                request.record.scheduled, request.record.cached_tokens = scheduled, cached
            times.extend([now] * len(tokens))
            if request.continues:
                request.answer.extend(tokens)
            if reason:
                del self._open[name]
                self._end(request, now)

    def _begin(self, at: float, number: int) -> None:
        """Queue the first turn of a conversation."""
        talk = _Talk((number,), self._workload[number].turns, History(), None)
        heapq.heappush(self._due, (at, talk.path, talk))

    def _send(self, arrival: float, talk: _Talk) -> None:
        turn, number, name = talk.turns[talk.number], talk.number, f"{talk.name}.{talk.number}"
        prompt = talk.history.ask(turn, self._tokens.prompt(talk.name, number, turn))
        talk.number += 1
        for _ in range(turn.replaces):
            self._supersede(talk.alive.pop())
        talk.alive.append(name)
        params = SamplingParams(temperature=0.0, max_tokens=turn.output, ignore_eos=True)
        if self._ends is not None and turn.longest > turn.output:
            params = replace(params, max_tokens=turn.longest, stop_token_ids=(END,))
            self._ends[name] = len(prompt) + turn.output - 1
        record = Record(arrival, len(prompt), contract=turn.contract)
        self.records.append(record)
        continues = talk.number < len(talk.turns) or bool(turn.forks)
        self._open[name] = _OpenRequest(record, talk, turn, [], continues)
        contract = turn.contract if self._tells else NO_CONTRACT
        request = Request(
            name, prompt, params, turn.priority, arrival=arrival, deadline=turn.deadline, contract=contract
        )
        try:
            self._add(replace(request, pause=Pause(turn.pause, turn.expected_pause if self._tells_pauses else None)))
        except ContractRefused as refused:
            record.refused = str(refused)
            del self._open[name]
            self.ended += 1
            talk.number = len(talk.turns)
            self._follow(talk, arrival)

    def _end(self, request: _OpenRequest, now: float) -> None:
        """Queue what follows a turn that has ended: its forks, the next turn, or another conversation."""
        self.ended += 1
        talk, turn = request.talk, request.turn
        if request.continues:
            talk.history.answer(tuple(request.answer))
            self._fork(talk, turn, now)
        self._follow(talk, now)

    def _fork(self, talk: _Talk, turn: Turn, now: float) -> None:
        """Queue the forks of a turn that has ended."""
        for number, fork in enumerate(turn.forks):
            history = History(talk.history.tokens if fork.inherits else ())
            parent = talk if fork.joins else None
            begun = _Talk((*talk.path, talk.number - 1, number), fork.turns, history, parent)
            talk.awaited += fork.joins
            heapq.heappush(self._due, (now + fork.arrival, begun.path, begun))

    def _follow(self, talk: _Talk, now: float) -> None:
        """Queue the next turn of a conversation if it waits for no fork, or what follows the conversation."""
        if talk.awaited:
            return
        if talk.number < len(talk.turns):
            heapq.heappush(self._due, (now + talk.turns[talk.number].think, talk.path, talk))
        elif talk.parent is not None:
            talk.parent.awaited -= 1
            self._follow(talk.parent, now)
        elif len(talk.path) == 1 and (number := next(self._later, None)) is not None:
            self._begin(now, number)


class Clients(Conversations):
    """All clients of a loop, in the same thread."""

    def __init__(
        self,
        workload: Workload,
        loop: LanguageLoop,
        clock: WaitableClock,
        *,
        vocab_size: int,
        concurrency: int | None,
        wait: Callable[[], None] = lambda: None,
        ends: dict[str, int] | None = None,
        tells: bool = False,
        tells_pauses: bool = True,
        supersede: Callable[[str], None] = forget,
        next_look: Callable[[], float] = lambda: inf,
    ) -> None:
        """Arrival times are seconds on `clock`. With `concurrency` they are ignored: see `simulate`.

        `wait` is called when requests are open and no step can run: it lets the event that they wait for happen.
        `next_look` gives the time at which the loop has to be run even if it has no work.
        """
        super().__init__(
            workload,
            loop.add,
            vocab_size=vocab_size,
            concurrency=concurrency,
            ends=ends,
            tells=tells,
            tells_pauses=tells_pauses,
            supersede=supersede,
        )
        self.steps = 0
        self._loop = loop
        self._clock = clock
        self._wait = wait
        self._next_look = next_look

    def advance(self) -> bool:
        """Send the requests that are due and run one step. Returns False once all requests have ended."""
        if self.done:
            return False
        clock, loop = self._clock, self._loop
        if not loop.has_work():
            clock.advance_to(min(self.next_due, self._next_look()))
        self.send_due(clock())
        outputs = loop.step()
        if outputs is None:
            self._wait()
        self.steps += 1
        self.receive(outputs or (), clock())
        return True
