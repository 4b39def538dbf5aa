"""Where `holdfast bench` sends its load: a server's URL, a model that runs here, or a simulated device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import uvloop
from rich.console import Console
from rich.text import Text

from holdfast.cli.progress import Bar, turns_of
from holdfast.core.config import EngineConfig
from holdfast.core.types import SamplingParams
from holdfast.engine.client import EngineClient, QueueFull
from holdfast.engine.profiles import CostProfile
from holdfast.engine.trace import TracedExecutor
from holdfast.lab.load import Ask, HttpAsk, LoadClient
from holdfast.lab.records import Record
from holdfast.lab.simulator.deployment import Pipeline
from holdfast.lab.simulator.run import simulate
from holdfast.lab.workloads import Words, Workload
from holdfast.lm.limits import RequestRefused


class Target(Protocol):
    """What takes a load."""

    @property
    def name(self) -> str:
        """For a report: what it is."""
        ...

    @property
    def model(self) -> str:
        """The model's name."""
        ...

    @property
    def longest(self) -> int | None:
        """Tokens that its context holds, where that is known."""
        ...

    def run(self, workload: Workload, title: str) -> list[Record]:
        """Send a workload, under a title for people. Each run asks with tokens of its own."""
        ...


@dataclass(slots=True)
class _Sender:
    """Sends through the load client, on one event loop for all runs."""

    name: str
    model: str
    longest: int | None
    loop: asyncio.Runner
    ask: Ask
    vocab_size: int
    concurrency: int | None
    seed: int
    sent: int = 0

    def run(self, workload: Workload, title: str) -> list[Record]:
        words = Words(self.vocab_size, f"{self.seed}/{self.sent}/")
        self.sent += 1
        with Bar(title, turns_of(workload)) as tell:
            client = LoadClient(self.ask, words, tell)
            return self.loop.run(client.run(workload, self.concurrency))


@contextmanager
def server(
    url: str, *, api_key: str | None, model: str | None, vocab_size: int, concurrency: int | None, seed: int
) -> Iterator[Target]:
    """A server with OpenAI's API. Raises OSError if it cannot be asked for its model."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    http = httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1") + "/v1/",
        headers=headers,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        timeout=httpx.Timeout(30, read=None),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        try:
            asked = model or loop.run(first_model(http))
            yield _Sender(url, asked, None, loop, HttpAsk(http, asked), vocab_size, concurrency, seed)
        finally:
            loop.run(http.aclose())


async def first_model(http: httpx.AsyncClient) -> str:
    """The first model that a server lists. Raises OSError if it cannot be asked."""
    try:
        response = await http.get("models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        wanted = "; give the key with --api-key or HOLDFAST_API_KEY" if error.response.status_code == 401 else ""
        raise OSError(f"{http.base_url}models answers with {error.response.status_code}{wanted}") from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise OSError(f"{http.base_url}models does not list a model: {type(error).__name__}: {error}") from None


@contextmanager
def engine_here(config: EngineConfig, console: Console, concurrency: int | None) -> Iterator[Target]:
    """An engine process of our own, without HTTP in between. Raises EngineStartError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:

        async def start() -> EngineClient:
            return await EngineClient.start(
                config, on_progress=lambda stage: console.print(Text(f"{stage} …", style="dim"))
            )

        client = loop.run(start())
        try:
            info = client.info
            name = f"{info.model} on {info.memory.device}, {info.precision}"
            longest = info.max_model_len
            yield _Sender(name, info.model, longest, loop, EngineAsk(client), info.vocab_size, concurrency, config.seed)
        finally:
            loop.run(client.close())


class EngineAsk:
    """Asks an engine, as `bench.load.HttpAsk` asks a server."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def __call__(self, prompt: tuple[int, ...], output: int, record: Record) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        try:
            async for delta in self._client.stream(prompt, params):
                if delta.tokens:
                    record.token_times.append(time.monotonic())
                if delta.usage is not None and delta.timings is not None:
                    record.output_tokens = delta.usage.completion_tokens
                    record.cached_tokens = delta.usage.cached_tokens
                    record.scheduled = delta.timings.scheduled
        except (RequestRefused, QueueFull) as error:
            record.error = str(error)


@dataclass(frozen=True, slots=True)
class Simulated:
    """The engine's loop, scheduler and memory over a virtual clock."""

    config: EngineConfig
    profile: CostProfile
    pipeline: Pipeline | None
    host_seconds: float
    concurrency: int | None

    @property
    def name(self) -> str:
        """What is simulated."""
        return f"{self.model} on {self.profile.cost.device}, {self.profile.precision}, simulated"

    @property
    def model(self) -> str:
        return self.profile.cost.model

    @property
    def longest(self) -> int | None:
        return min(self.config.max_model_len or self.profile.max_model_len, self.profile.cache_tokens + 1)

    def run(self, workload: Workload, title: str) -> list[Record]:
        traced: list[TracedExecutor] = []

        def wrap(executor: Any, clock: Any) -> Any:
            if self.config.trace is None:
                return executor
            suspends = self.config.host_cache_gb not in ("auto", 0)
            traced.append(TracedExecutor(executor, self.config.trace, clock, suspends=suspends))
            return traced[0]

        with Bar(title, turns_of(workload)) as tell:
            try:
                return simulate(
                    self.config,
                    self.profile,
                    workload,
                    concurrency=self.concurrency,
                    pipeline=self.pipeline,
                    host_seconds=self.host_seconds,
                    wrap=wrap,
                    on_progress=tell,
                ).records
            finally:
                for executor in traced:
                    executor.close()
