"""Runs a workload through the engine's own loop over a virtual clock, and records what each request saw."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.bench.records import Record
from holdfast.bench.workloads import Turn, Words, Workload
from holdfast.core.config import EngineConfig
from holdfast.core.protocols import Executor
from holdfast.core.types import Request, SamplingParams, SchedulerStats
from holdfast.engine.loop import Loop
from holdfast.engine.profiles import Profile
from holdfast.memory.blocks import BlockPool, StateIdentity
from holdfast.scheduler.base import Scheduler
from holdfast.scheduler.choice import RESERVING, capacity_of, choose_policy
from holdfast.simulator.executor import TOKEN, SimulatedExecutor, VirtualClock
from holdfast.simulator.latency import Latency

VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run gave."""

    records: list[Record]
    seconds: float
    """Virtual time from the start to the end of the last request."""
    busy: float
    """Virtual seconds in which the device computed."""
    steps: int
    stats: SchedulerStats
    """Queues and memory at the end."""


def simulate(
    config: EngineConfig,
    profile: Profile,
    workload: Workload,
    *,
    concurrency: int | None = None,
    host_seconds: float = 0.0,
    wrap: Callable[[Executor, VirtualClock], Executor] = lambda executor, clock: executor,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Serve `workload` with the engine that `config` describes on the device that `profile` was measured on.

    With `concurrency` so many conversations are under way at once and their arrivals do not count (closed loop);
    without, each arrives at its time. `host_seconds` is the host's time for a step, `wrap` may put something around
    the executor, `on_progress` is told how many requests have ended. The same arguments give the same outcome. Raises
    ValueError for a request that this engine can never serve.
    """
    clock = VirtualClock()
    executor = SimulatedExecutor(Latency(profile.cost), clock, host_seconds)
    loop = Loop(_scheduler(config, profile), wrap(executor, clock), config.steps_in_flight, clock)
    run = _Run(workload, loop, clock, concurrency)
    while run.advance():
        on_progress(run.ended)
    return Outcome(run.records, clock.now, executor.busy, run.steps, loop.stats())


def _scheduler(config: EngineConfig, profile: Profile) -> Scheduler:
    max_model_len = min(config.max_model_len or profile.max_model_len, profile.cache_tokens + 1)
    budget = config.token_budget or profile.token_budget
    capacity = capacity_of(
        config.scheduler, token_budget=budget, max_model_len=max_model_len, max_sequences=config.max_sequences
    )
    return Scheduler(
        choose_policy(config, token_budget=budget, capacity=capacity, tile=profile.tile, cost=profile.cost),
        BlockPool(profile.cache_tokens // config.block_size, config.block_size),
        max_sequences=config.max_sequences,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        headroom=0.0 if config.scheduler in RESERVING else config.headroom,
        sharing=StateIdentity(model=profile.cost.model) if config.prefix_sharing else None,
        seed=config.seed,
    )


class _Run:
    """The clients of a simulated engine: who asks when, and what they saw."""

    def __init__(self, workload: Workload, loop: Loop, clock: VirtualClock, concurrency: int | None) -> None:
        self.records: list[Record] = []
        self.ended = 0
        self.steps = 0
        self._workload = workload
        self._loop = loop
        self._clock = clock
        self._words = Words(VOCAB_SIZE)
        self._under_way: dict[str, tuple[Record, int, int, tuple[int, ...]]] = {}
        """By request id: its record, the conversation, the turn, the prompt."""
        self._history: dict[int, tuple[int, ...]] = {}
        """What was said so far, of conversations that go on."""
        open_loop = concurrency is None
        first = len(workload) if concurrency is None else min(concurrency, len(workload))
        self._due = [(workload[number].arrival if open_loop else 0.0, number, 0) for number in range(first)]
        """What will be asked: when, the conversation, the turn."""
        self._later = iter(range(first, len(workload)))
        heapq.heapify(self._due)

    def advance(self) -> bool:
        """Take in what is due and do one step; False when all has ended."""
        due, clock, loop = self._due, self._clock, self._loop
        if not loop.has_work():
            if not due:
                return False
            clock.advance_to(due[0][0])
        while due and due[0][0] <= clock.now:
            self._ask(*heapq.heappop(due))
        outputs = loop.step()
        now = clock.now
        self.steps += 1
        for name, _, reason, cached, scheduled, _ in outputs:
            record, conversation, turn, prompt = self._under_way[name]
            times = record.token_times
            if not times:
                record.scheduled, record.cached_tokens = scheduled, cached
            times.append(now)
            if reason:
                del self._under_way[name]
                self._end(conversation, turn, prompt, len(times))
        return True

    def _ask(self, arrival: float, number: int, turn: int) -> None:
        wanted: Turn = self._workload[number].turns[turn]
        prompt = self._history.pop(number, ()) + self._words.prompt(number, turn, wanted)
        name = f"{number}.{turn}"
        params = SamplingParams(temperature=0.0, max_tokens=wanted.output, ignore_eos=True)
        record = Record(arrival, len(prompt))
        self.records.append(record)
        self._under_way[name] = record, number, turn, prompt
        self._loop.add(Request(name, prompt, params, arrival=arrival))

    def _end(self, number: int, turn: int, prompt: tuple[int, ...], generated: int) -> None:
        """A turn has ended: the next one comes after its think time, or the next conversation may begin."""
        self.ended += 1
        turns = self._workload[number].turns
        if turn + 1 < len(turns):
            self._history[number] = prompt + (TOKEN,) * generated
            heapq.heappush(self._due, (self._clock.now + turns[turn + 1].think, number, turn + 1))
        elif (following := next(self._later, None)) is not None:
            heapq.heappush(self._due, (self._clock.now, following, 0))
