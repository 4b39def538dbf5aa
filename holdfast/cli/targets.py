"""Targets of `holdfast bench`: a server at a URL, a local model, or a simulation."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from urllib.request import getproxies

import httpx
import uvloop
from rich.console import Console

from holdfast.cli.output import progress_bar, stage_printer
from holdfast.cli.talkers import server_client
from holdfast.core.contract import NO_CONTRACT, ContractRefused
from holdfast.core.pause import Pause
from holdfast.core.types import SamplingParams
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import QueueFull
from holdfast.engine.messages import Steps
from holdfast.engine.process.step_log import StepLog
from holdfast.engine.process.trace import Trace, about_engine
from holdfast.engine.profiles import CostProfile
from holdfast.lab.http_stream import StreamTransport
from holdfast.lab.load_client import NOTHING_SAID, Ask, LoadClient, Said, ask_server
from holdfast.lab.metrics import Record, StageTimes
from holdfast.lab.simulator.deployment import Pipeline
from holdfast.lab.simulator.executor import VirtualClock
from holdfast.lab.simulator.run import context_length, simulate
from holdfast.lab.simulator.tiers import DISK_RATE
from holdfast.lab.workloads import PromptTokens, Workload, num_requests
from holdfast.lm.config import EngineConfig
from holdfast.lm.limits import RequestRefused
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import EngineShape


class Ran(NamedTuple):
    """A run of a workload."""

    records: list[Record]
    idle: list[float]
    """Share of the time with steps in flight in which each pipeline stage computed nothing; empty if it is unknown."""


@dataclass(frozen=True, slots=True)
class Target:
    """A system that runs workloads."""

    name: str
    """Name of the target in a report."""
    model: str
    context_length: int | None
    """Maximum number of tokens of a sequence; None if it is unknown."""
    run: Callable[[Workload, str], Ran]
    """Runs a workload under a title for the progress bar. On a real target, each run sends different prompt tokens."""
    note: Callable[[], str] = str
    """Returns how far the steps of all runs so far exceed those of a measured profile; empty if they do not."""


async def untimed() -> StageTimes:
    """No times, of a server that does not report them here."""
    return StageTimes()


def sender(
    loop: asyncio.Runner,
    ask: Ask,
    vocab_size: int,
    concurrency: int | None,
    seed: int,
    timed: Callable[[], Awaitable[StageTimes]] = untimed,
) -> Callable[[Workload, str], Ran]:
    """Return the `run` of a real target. It sends workloads by the load client, on one event loop for all runs.

    `timed` returns the times of the stages since it was called last.
    """
    numbers = itertools.count()

    async def send(client: LoadClient, workload: Workload) -> Ran:
        await timed()
        records = await client.run(workload, concurrency)
        return Ran(records, (await timed()).idle())

    def run(workload: Workload, title: str) -> Ran:
        tokens = PromptTokens(vocab_size, f"{seed}/{next(numbers)}/")
        with progress_bar(title, num_requests(workload)) as on_progress:
            return loop.run(send(LoadClient(ask, tokens, on_progress), workload))

    return run


@contextmanager
def server(
    url: str,
    *,
    api_key: str | None,
    model: str | None,
    vocab_size: int,
    concurrency: int | None,
    seed: int,
    tells: bool = True,
    tells_pauses: bool = True,
) -> Iterator[Target]:
    """Yield a server with OpenAI's API. `model` is by default its first. Raises OSError if it lists none.

    With `tells`, requests ask for their contracts; with `tells_pauses`, they say what clients know of pauses.
    """
    plain = url.lower().startswith("http://") and not getproxies()
    transport = StreamTransport() if plain else None  # TLS and proxies are left to httpx
    http = server_client(url, api_key, httpx.Timeout(30, read=None), transport)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        try:
            asked, longest = loop.run(served(http, model))
            ask = partial(ask_server, http, asked, tells=tells, tells_pauses=tells_pauses)
            yield Target(url, asked, longest, sender(loop, ask, vocab_size, concurrency, seed))
        finally:
            loop.run(http.aclose())


async def served(http: httpx.AsyncClient, model: str | None) -> tuple[str, int | None]:
    """Return the model to ask for, and its longest sequence in tokens; None if the server does not list that.

    The model is by default the first that the server lists. Then raises OSError if it lists none.
    """
    try:
        models = await listed(http)
    except OSError:
        if model is None:
            raise
        return model, None
    asked = model or next(iter(models))
    return asked, models.get(asked)


async def listed(http: httpx.AsyncClient) -> dict[str, int | None]:
    """Return the models that a server lists, in its order, with their longest sequences in tokens where it says them.

    Holdfast, vLLM and SGLang say them. Raises OSError if the request fails, or if there is no model.
    """
    try:
        response = await http.get("models")
        response.raise_for_status()
        models = {str(each["id"]): each.get("max_model_len") for each in response.json()["data"]}
        if not models:
            raise LookupError("the list is empty")
    except httpx.HTTPStatusError as error:
        wanted = "; give the key with --api-key or HOLDFAST_API_KEY" if error.response.status_code == 401 else ""
        raise OSError(f"{http.base_url}models answers with {error.response.status_code}{wanted}") from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise OSError(f"{http.base_url}models does not list a model: {type(error).__name__}: {error}") from None
    return {name: longest if isinstance(longest, int) and longest > 0 else None for name, longest in models.items()}


@contextmanager
def local_engine(
    config: EngineConfig,
    console: Console,
    concurrency: int | None,
    *,
    tells: bool = True,
    tells_pauses: bool = True,
) -> Iterator[Target]:
    """Start an engine process for the benchmark, without HTTP. With `tells`, requests ask for their contracts.

    With `tells_pauses`, the engine hears what clients know of pauses. Raises EngineStartError.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        client = loop.run(EngineClient.start(config, on_progress=stage_printer(console)))
        try:
            info = client.info
            name = f"{info.model} on {info.memory.device}, {info.precision}"
            timed = EngineTimes(client).take
            ask = partial(ask_engine, client, tells=tells, tells_pauses=tells_pauses)
            run = sender(loop, ask, info.vocab_size, concurrency, config.seed, timed)
            yield Target(name, info.model, info.max_model_len, run)
        finally:
            loop.run(client.close())


class EngineTimes:
    """The times of an engine's stages, as it reports them."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._times = StageTimes()
        client.on_steps = self._add

    async def take(self) -> StageTimes:
        """The times since the last call. Raises EngineDead, TimeoutError."""
        await self._client.health()  # the engine sends the steps that it has not reported before it answers
        times, self._times = self._times, StageTimes()
        return times

    def _add(self, steps: Steps) -> None:
        self._times.add(steps.under_way, steps.stages)


async def ask_engine(
    client: EngineClient,
    prompt: tuple[int, ...],
    output: int,
    record: Record,
    said: Said = NOTHING_SAID,
    *,
    tells: bool = True,
    tells_pauses: bool = True,
) -> str:
    """Send a request to an engine process, as `lab.load_client.ask_server` does to a server. Returns its id."""
    id, contract = uuid.uuid4().hex, record.contract if tells else NO_CONTRACT
    for replaced in said.superseded if tells_pauses else ():
        client.note_pause(replaced, Pause(said.kind, superseded=True))
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    try:
        async for delta in client.stream(prompt, params, request_id=id, contract=contract):
            if delta.tokens:
                record.token_times.append(time.monotonic())
            if delta.usage is not None and delta.timings is not None:
                record.output_tokens = delta.usage.completion_tokens
                record.cached_tokens = delta.usage.cached_tokens
                record.scheduled = delta.timings.scheduled
                client.note_pause(id, Pause(said.kind, said.expected_pause if tells_pauses else None))
    except ContractRefused as refused:
        record.refused = str(refused)
    except (RequestRefused, QueueFull) as error:
        record.error = str(error)
    return id


def simulated_engine(
    config: EngineConfig,
    profile: CostProfile,
    pipeline: Pipeline | None,
    host_seconds: float,
    concurrency: int | None,
    disk_rate: float = DISK_RATE,
    *,
    tells_pauses: bool = True,
) -> Target:
    """Return a simulated engine: the real loop, scheduler and memory on a virtual clock.

    With `tells_pauses`, it hears what clients know of pauses.
    """

    sizes = list[tuple[int, int]]()
    """Largest numbers of decodes and tokens of a step, of each run."""

    def run(workload: Workload, title: str) -> Ran:
        logs = list[StepLog]()
        with ExitStack() as open_files, progress_bar(title, num_requests(workload)) as on_progress:

            def watch(planner: Scheduler, shape: EngineShape, clock: VirtualClock) -> list[StepLog | Trace]:
                logs.append(StepLog(clock))
                if config.trace is None:
                    return [*logs]
                suspends, about = config.host_cache_gb not in ("auto", 0), about_engine(config, shape)
                trace = Trace(config.trace, clock, suspends=suspends, planner=planner, about=about)
                return [*logs, open_files.enter_context(closing(trace))]

            outcome = simulate(
                config,
                profile,
                workload,
                concurrency=concurrency,
                pipeline=pipeline,
                host_seconds=host_seconds,
                watch=watch,
                on_progress=on_progress,
                disk_rate=disk_rate,
                tells_pauses=tells_pauses,
            )
        sizes.append((outcome.most_decodes, outcome.most_tokens))
        times = StageTimes()
        for log in logs:
            steps = log.take()
            times.add(steps.under_way, steps.stages)
        return Ran(outcome.records, times.idle())

    def note() -> str:
        return profile.beyond(*(max(column) for column in zip(*sizes, strict=True))) if sizes else ""

    model = profile.cost.model
    name = f"{model} on {profile.cost.device}, {profile.precision}, simulated"
    return Target(name, model, context_length(config, profile), run, note)
