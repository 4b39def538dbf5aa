"""A fake EngineClient that answers with scripted words, for the server's tests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from fake_tuning import FakeTuner

from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.core.pause import Pause
from holdfast.core.types import ALONE, AdapterInfo, FinishReason, SamplingParams, TokenLogprobs, UserBatch
from holdfast.engine.client.client import AdapterError
from holdfast.engine.client.connection import EngineAsleep, EngineDead
from holdfast.engine.client.generation import GenerationDefaults
from holdfast.engine.client.pooling import NONE, Pooling
from holdfast.engine.client.stream import Delta, Timings, Usage
from holdfast.engine.messages import EngineInfo
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import MemoryMeasurement, SchedulerStats

WORDS = ("Ahoy", ", ", "sailor", "!")


def engine_info(**changes: Any) -> EngineInfo:
    fields: dict[str, Any] = {
        "model": "tiny",
        "precision": "float32",
        "memory": MemoryMeasurement(
            "a CPU", total=8 << 30, weights=1 << 20, activations=1 << 20, cache=1 << 30, block=4096
        ),
        "num_blocks": 100,
        "block_size": 16,
        "token_budget": 512,
        "max_model_len": 200,
        "max_sequences": 4,
        "max_waiting": 4,
        "vocab_size": 256,
        "started_in": 0.5,
    }
    return EngineInfo(**(fields | changes))


END = 31
"""The token that ends an answer."""


def told(token: int, count: int) -> tuple[TokenLogprobs, ...]:
    """What is told of a token of an answer: it is the second most probable one."""
    likely = ((ord("?"), -0.25), (token, -2.0), (ord("x"), -5.0))[:count]
    return (TokenLogprobs(-2.0, tuple(each for each, _ in likely), tuple(value for _, value in likely)),)


def told_of(token: int, named: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    """What is told of a token of an answer and of named tokens: the log probability of each is minus its id."""
    return (TokenLogprobs(-float(token), named, tuple(-float(each) for each in named)),)


class FakeText:
    """A tokenizer with one token for each character; an answer's tokens are its words' numbers."""

    special = frozenset({END})

    def __init__(self, opening: str = "", template: str = "") -> None:
        self.opening = opening
        """The text that the template puts before an answer."""
        self.template = template
        self.encoded = 0
        """Characters tokenized so far."""
        self.tags: dict[str, int] = {}
        """Tags that are tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        self.encoded += len(text)
        return [ord(character) for character in text]

    def escape(self, text: str) -> str:
        return text

    def encode_after(self, before: str, text: str, *, most: int | None = None) -> list[int]:
        return self.encode(text)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [chr(token) for token in ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(WORDS[token] if token < len(WORDS) else chr(token) for token in ids)

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def is_visible(self, token: int) -> bool:
        return token != END

    def digest(self, text: str) -> bytes:
        return hashlib.sha256(text.encode()).digest()

    def token_id(self, piece: str) -> int | None:
        return self.tags.get(piece)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        if any("mutiny" in message["content"] for message in messages):
            raise ValueError("the chat template refuses this conversation: mutiny")
        rendered = "".join(f"<tool>{tool['function']['name']}" for tool in tools or ())
        rendered += "".join(f"<{name}={value}>" for name, value in (options or {}).items())
        for message in messages:
            rendered += f"<{message['role']}>"
            if thought := message.get("reasoning_content"):
                rendered += f"({thought})"
            rendered += message["content"]
            for call in message.get("tool_calls", ()):
                rendered += f"[{call['function']['name']} {call['function']['arguments']} {call['id']}]"
        return rendered + self.opening * add_generation_prompt

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, most: int | None = None) -> list[int]:
        return self.encode(self.render_chat(messages))


@dataclass
class Asked:
    """One call of `stream`."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    tenant: str
    deadline: float | None
    request_id: str | None = None
    adapter: str = ""
    batch: UserBatch = ALONE
    contract: Contract = NO_CONTRACT
    salt: str = ""
    given: int = 0
    """Deltas after which the next one was asked for."""
    ended: str = "running"


@dataclass
class FakeClient:
    """Answers every request with `words`, one per token. `hold` pauses each stream after its first word until set."""

    info: EngineInfo = field(default_factory=engine_info)
    config: EngineConfig = field(default_factory=EngineConfig)
    text: FakeText = field(default_factory=FakeText)
    words: Sequence[str] = WORDS
    ends: bool = False
    """Whether an end token follows the answer, as with real models."""
    ending: FinishReason | None = None
    """The reason why answers end; None: the end of the words, or `max_tokens`."""
    cached: int = 0
    cached_by_tier: tuple[int, int, int] = (0, 0, 0)
    hold: asyncio.Event | None = None
    poison: str = ""
    """A prompt with this text kills the engine."""
    refuse: Exception | None = None
    hangs: bool = False
    warming: int = 0
    asked: list[Asked] = field(default_factory=list)
    adapters: dict[str, AdapterInfo] = field(default_factory=dict)
    loaded: list[tuple[str, str, bool]] = field(default_factory=list)
    """What `load_adapter` was asked for."""
    deadly_adapter: str = ""
    """The end of the path of the adapter that kills the engine when it is loaded."""
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    closed: bool = False

    adopts: bool = False
    on_steps: Any = None
    on_activity: Any = None
    watched: list[float] = field(default_factory=list)
    """What `watch` was asked for."""
    noted: list[tuple[str, Pause]] = field(default_factory=list)
    """What `note_pause` was told: the requests' ids and their pauses."""
    warmed: list[tuple[list[int], str, str, str]] = field(default_factory=list)
    """What `warm` was asked for: tokens, tenant, adapter and salt."""
    pooling: Pooling = NONE
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    weights: str = "0123"
    sleep_level: int = 0
    sleep_error: Exception | None = None
    ordered: list[tuple[Any, ...]] = field(default_factory=list)
    """What `sleep` and `wake_up` were asked for."""

    def __post_init__(self) -> None:
        self.tuner = FakeTuner(self.adapters, self._check_alive)
        self.tuner.kill = self.die
        self.tuning = self.tuner.client

    @property
    def names(self) -> tuple[str, ...]:
        return self.info.model, *self.config.served_model_name[1:]

    def _check_alive(self) -> None:
        if self.dead.is_set():
            raise EngineDead(self.reason)

    def watch(self, seconds: float) -> None:
        self._check_alive()
        self.watched.append(seconds)

    def note_pause(self, request_id: str, pause: Pause) -> None:
        self.noted.append((request_id, pause))

    def warm(self, prompt: Sequence[int], *, tenant: str = "", adapter: str = "", salt: str = "") -> None:
        self.warmed.append((list(prompt), tenant, adapter, salt))

    @property
    def gone(self) -> set[str]:
        return set()

    def introduce(self, server: str, on_change: Any) -> None:
        """No other server shares it."""

    async def adopt(self, tenant: str, request_id: str) -> None:
        """It holds no requests."""

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        if self.refuse is not None:
            raise self.refuse
        self.loaded.append((name, path, replace))
        if self.deadly_adapter and path.endswith(self.deadly_adapter):
            self.die("an adapter ended it")
            raise EngineDead(self.reason)
        self.adapters[name] = AdapterInfo(f"{name}@0123", name, 4, 100, ("q",))
        return self.adapters[name]

    def hold_adapter(self, adapter: str) -> AbstractContextManager[str]:
        return nullcontext(adapter)

    async def forgotten(self, adapter: str) -> None:
        """It keeps nothing."""

    async def unload_adapter(self, name: str) -> None:
        if name not in self.adapters:
            raise AdapterError(f"there is no adapter {name}", missing=True)
        del self.adapters[name]

    async def stream(
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
        adopted: Any = None,
        salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        if self.refuse is not None:
            raise self.refuse
        asked = Asked(list(prompt), params, priority, tenant, deadline, request_id, adapter, batch, contract, salt)
        self.asked.append(asked)
        if self.poison and self.poison in "".join(map(chr, prompt)):
            self.die("the engine ended by signal 11 (SIGSEGV)")
        words = self.words[: params.max_tokens]
        try:
            for number, word in enumerate(words):
                last = number == len(words) - 1
                reason = FinishReason.LENGTH if len(words) < len(self.words) else FinishReason.STOP
                reason = self.ending or reason
                ends = reason is FinishReason.STOP and self.ends
                count = len(words) + ends  # the engine counts the token that ends an answer
                usage = Usage(
                    prompt_tokens=len(prompt),
                    completion_tokens=count,
                    cached_tokens=self.cached,
                    cached_by_tier=self.cached_by_tier,
                )
                await self._alive(number)
                timings = Timings(arrival=1.0, scheduled=1.5, first_token=2.0, finish=3.0, tokens=count)
                tokens = (number, END) if last and ends else (number,)
                delta = Delta(word, tokens, *((reason, usage, timings) if last else ()))
                if params.logprobs is not None:
                    ended = told(END, params.logprobs)[0] if last and ends else None
                    delta = replace(delta, logprobs=told(number, params.logprobs), end_logprobs=ended)
                elif named := params.logprob_token_ids:
                    delta = replace(delta, logprobs=sum((told_of(each, named) for each in delta.tokens), ()))
                yield delta
                asked.given += 1
            asked.ended = "finished"
        finally:
            if asked.ended == "running":
                asked.ended = "aborted"

    async def _alive(self, number: int) -> None:
        if self.hold is not None and number == 1:
            waits = [asyncio.create_task(self.hold.wait()), asyncio.create_task(self.dead.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if self.dead.is_set():
            raise EngineDead(self.reason)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.ordered.append(("sleep", level, mode))
        self._check_alive()
        if self.sleep_error is not None:
            raise self.sleep_error
        self.sleep_level, self.refuse = level, EngineAsleep("it sleeps")

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        self.ordered.append(("wake_up", *tags))
        self._check_alive()
        if self.sleep_error is not None:
            raise self.sleep_error
        self.sleep_level, self.refuse = 0, None

    async def is_sleeping(self) -> bool:
        return (await self.health()).sleep_level > 0

    async def health(self, timeout: float = 5.0) -> SchedulerStats:
        if self.dead.is_set():
            raise EngineDead(self.reason)
        if self.hangs:
            raise TimeoutError
        return SchedulerStats(
            waiting=1,
            running=2,
            blocks_total=100,
            blocks_used=7,
            blocks_cached=3,
            preemptions=0,
            prefix_queries=40,
            prefix_hits=16,
            tokens_computed=123,
            tokens_recovered=32,
            host_blocks_total=300,
            host_blocks_ready=250,
            host_blocks_cached=200,
            blocks_swapped_in=11,
            blocks_swapped_out=12,
            prefix_hits_on_host=8,
            suspensions=1,
            tokens_dropped=64,
            warming=self.warming,
            sleep_level=self.sleep_level,
        )

    def die(self, reason: str) -> None:
        self.reason = reason
        self.dead.set()
        self.tuner.die(reason)

    async def close(self) -> None:
        self.closed = True
        self.die("closed")


class Rounds(FakeClient):
    """Writes one text for each request, its words between bars, and repeats the last one."""

    texts: tuple[str, ...] = ()

    async def stream(self, *given: Any, **named: Any) -> AsyncGenerator[Delta, None]:
        self.words = self.texts[min(len(self.asked), len(self.texts) - 1)].split("|")
        async for delta in super().stream(*given, **named):
            yield delta
