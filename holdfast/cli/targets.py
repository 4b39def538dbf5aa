"""Targets of `holdfast bench`: a server behind a URL, a model that runs here, or a simulation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import httpx
import uvloop
from rich.console import Console
from rich.text import Text

from holdfast.cli.progress import progress_bar
from holdfast.core.config import EngineConfig
from holdfast.core.types import SamplingParams
from holdfast.engine.client import EngineClient, QueueFull
from holdfast.engine.profiles import CostProfile
from holdfast.engine.trace import TracedExecutor
from holdfast.lab.load_client import Ask, LoadClient, ask_server
from holdfast.lab.metrics import Record
from holdfast.lab.simulator.deployment import Pipeline
from holdfast.lab.simulator.run import context_length, simulate
from holdfast.lab.workloads import PromptTokens, Workload, num_requests
from holdfast.lm.limits import RequestRefused


class Target(Protocol):
    """Runs workloads."""

    @property
    def name(self) -> str:
        """The target's name in a report."""
        ...

    @property
    def model(self) -> str:
        """The model's name."""
        ...

    @property
    def context_length(self) -> int | None:
        """Longest sequence in tokens; None if unknown."""
        ...

    def run(self, workload: Workload, title: str) -> list[Record]:
        """Run a workload; `title` names it in the progress bar. Each run on a real target has other prompt tokens."""
        ...


@dataclass(slots=True)
class _Sender:
    """Sends workloads through the load client, on one event loop for all runs."""

    name: str
    model: str
    context_length: int | None
    loop: asyncio.Runner
    ask: Ask
    vocab_size: int
    concurrency: int | None
    seed: int
    runs: int = 0

    def run(self, workload: Workload, title: str) -> list[Record]:
        tokens = PromptTokens(self.vocab_size, f"{self.seed}/{self.runs}/")
        self.runs += 1
        with progress_bar(title, num_requests(workload)) as on_progress:
            client = LoadClient(self.ask, tokens, on_progress)
            return self.loop.run(client.run(workload, self.concurrency))


@contextmanager
def server(
    url: str, *, api_key: str | None, model: str | None, vocab_size: int, concurrency: int | None, seed: int
) -> Iterator[Target]:
    """A server with OpenAI's API. Without `model`, asks it for its first one. Raises OSError if that fails."""
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
            yield _Sender(url, asked, None, loop, partial(ask_server, http, asked), vocab_size, concurrency, seed)
        finally:
            loop.run(http.aclose())


async def first_model(http: httpx.AsyncClient) -> str:
    """The first model that a server lists. Raises OSError if the request fails."""
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
def local_engine(config: EngineConfig, console: Console, concurrency: int | None) -> Iterator[Target]:
    """An engine process started for the benchmark, without HTTP. Raises EngineStartError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:

        async def start() -> EngineClient:
            return await EngineClient.start(
                config, on_progress=lambda stage: console.print(Text(f"{stage} …", style="dim"))
            )

        client = loop.run(start())
        try:
            info = client.info
            name = f"{info.model} on {info.memory.device}, {info.precision}"
            ask = EngineAsk(client)
            yield _Sender(name, info.model, info.max_model_len, loop, ask, info.vocab_size, concurrency, config.seed)
        finally:
            loop.run(client.close())


class EngineAsk:
    """Sends requests to an engine process, as `lab.load_client.ask_server` does to a server."""

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
class Simulation:
    """A simulated engine: the real loop, scheduler and memory on a virtual clock."""

    config: EngineConfig
    profile: CostProfile
    pipeline: Pipeline | None
    host_seconds: float
    concurrency: int | None

    @property
    def name(self) -> str:
        """The model, the device and the precision."""
        return f"{self.model} on {self.profile.cost.device}, {self.profile.precision}, simulated"

    @property
    def model(self) -> str:
        return self.profile.cost.model

    @property
    def context_length(self) -> int | None:
        return context_length(self.config, self.profile)

    def run(self, workload: Workload, title: str) -> list[Record]:
        traced: list[TracedExecutor] = []

        def wrap(executor: Any, clock: Any) -> Any:
            if self.config.trace is None:
                return executor
            suspends = self.config.host_cache_gb not in ("auto", 0)
            traced.append(TracedExecutor(executor, self.config.trace, clock, suspends=suspends))
            return traced[0]

        with progress_bar(title, num_requests(workload)) as on_progress:
            try:
                return simulate(
                    self.config,
                    self.profile,
                    workload,
                    concurrency=self.concurrency,
                    pipeline=self.pipeline,
                    host_seconds=self.host_seconds,
                    wrap=wrap,
                    on_progress=on_progress,
                ).records
            finally:
                for executor in traced:
                    executor.close()
