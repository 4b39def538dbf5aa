"""EngineClient: an asyncio interface to the engine process: submit, stream, abort. Never imports torch."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from holdfast.core.contract import NO_CONTRACT, Contract, ContractRefused, Term
from holdfast.core.pause import Pause
from holdfast.core.types import (
    ALONE,
    AdapterInfo,
    FinishReason,
    Found,
    Identity,
    Request,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
    UserBatch,
)
from holdfast.core.version import __version__
from holdfast.engine import messages
from holdfast.engine.checkpoint import Checkpoint, for_other_hosts, settled, weights_digest
from holdfast.engine.client.adapter_holds import AdapterHolds
from holdfast.engine.client.attachment import Attachment
from holdfast.engine.client.connection import (
    HEALTH_SECONDS,
    Connect,
    EngineConnection,
    EngineDead,
    EngineStartError,
    Origin,
    QueueFull,
    connect_child,
)
from holdfast.engine.client.generation import GenerationDefaults, find_generation
from holdfast.engine.client.pooling import NONE, find_pooling
from holdfast.engine.client.text import Text, TextStream
from holdfast.engine.client.tuning import TuningClient
from holdfast.engine.spawn import EngineProcess, Process
from holdfast.engine.wire import knows
from holdfast.lm.config import EngineConfig
from holdfast.lm.limits import RequestRefused
from holdfast.lm.memory.digests import DigestCache, usable_blocks
from holdfast.lm.parts.adapters.messages import (
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from holdfast.lm.parts.adapters.options import check_adapter_name
from holdfast.lm.parts.moves.messages import ChunksFetched, ChunksFound, FetchChunks, FindChunks, StopFetch
from holdfast.lm.parts.pauses.messages import NotePause, WarmState
from holdfast.lm.parts.tuning.messages import (
    DrivenProgress,
    DrivenStarted,
    JobChanged,
    JobProgress,
    JobRefused,
    JobStarted,
)
from holdfast.lm.types import SchedulerStats

REMEMBERED_BLOCKS = 1 << 16
"""Number of blocks whose digests a client remembers, about 100 bytes each, so that it hashes only a prompt's new
blocks."""

log = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    """Number of generated tokens, including the one that ended the sequence."""
    cached_tokens: int
    """Number of prompt tokens found in the prefix cache."""
    cached_by_tier: tuple[int, int, int] = (0, 0, 0)
    """`cached_tokens` by lower tier: tokens from the host, from the disk and from the remote tier."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Timestamps of one request, in seconds on the client's monotonic clock."""

    arrival: float
    scheduled: float
    first_token: float
    finish: float
    tokens: int
    """Number of generated tokens."""
    preemptions: int = 0
    """Number of times that the request lost its blocks or its row to others."""

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrival

    @property
    def queued(self) -> float:
        """Seconds from arrival to the first step."""
        return self.scheduled - self.arrival

    @property
    def prefill(self) -> float:
        """Seconds from the first step to the first token."""
        return self.first_token - self.scheduled

    @property
    def decode(self) -> float:
        """Seconds from the first token to the last one."""
        return self.finish - self.first_token

    @property
    def tokens_per_second(self) -> float:
        """Generation rate after the first token; 0 if there is only one."""
        return (self.tokens - 1) / self.decode if self.tokens > 1 and self.decode > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """A stream's new text and tokens since the last Delta. The final one has finish_reason, usage and timings."""

    text: str
    """New text; empty while text is held back: an incomplete character, or a possible beginning of a stop string."""
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Log probabilities of each token, if the request asks. None for the end token, which is not part of the text."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of the prompt's next tokens, from its second one on, if the request asks. All come before the
    end."""
    vector: bytes = b""
    """The prompt's embedding, if the request asks: float32 numbers in native order. It comes with the final Delta."""
    stop_string: str | None = None
    """The stop string that ended the answer, if one did. It comes with the final Delta."""
    end_logprobs: TokenLogprobs | None = None
    """Log probabilities of the token that ended the answer, if one did and the request asks. It comes with the final
    Delta."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """A request that another client has begun, with its answer so far."""

    request: Request
    note: bytes
    tokens: Sequence[int]
    """Tokens of the answer, except those that the request's prompt ends with."""
    logprobs: tuple[TokenLogprobs, ...]
    cached_tokens: int
    cached_by_tier: tuple[int, int, int]
    scheduled: float
    """Time of its first step, on the engine's monotonic clock; 0 before it."""
    finish_reason: FinishReason | None
    ended: bool
    """Whether no more tokens come."""
    yours: bool
    """Whether it belongs to this client now, which must run it or give it up."""
    later: list[SequenceOutput]
    """Outputs that have come since."""

    @property
    def answered(self) -> int:
        """Number of tokens of the answer."""
        return self.request.answered + len(self.tokens)

    @property
    def output(self) -> SequenceOutput:
        """The whole answer so far as one output."""
        prompt = self.request.prompt
        tokens = (*prompt[self.request.answer_start :], *self.tokens)
        return SequenceOutput(
            self.request.id, tokens, self.finish_reason, self.cached_tokens, self.scheduled, 0, self.logprobs,
            cached_by_tier=self.cached_by_tier,
        )  # fmt: skip


def name_of(adapter: str) -> str:
    """The name of an adapter, from its content id (`AdapterInfo.id`)."""
    return adapter.rpartition("@")[0]


class AdapterError(ValueError):
    """An adapter that could not be loaded or unloaded. The message has the reason; it names no directory."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing
        """Whether there is no adapter of this name."""


class EngineClient(EngineConnection[messages.EngineInfo, SchedulerStats]):
    """One engine process and its streams. Made by `start`, for one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[str], None] | None = None,
        measure: bool = False,
        process: Origin | None = None,
        *,
        priced: bool = False,
        chunk_secret: bytes = b"",
        ledger: str = "",
        listen: str = "",
        listen_key: str = "",
        connect: Connect = connect_child,
        lasting: bool = False,
        drives: bool = True,
    ) -> None:
        """Not for callers, who use `start` or `attach`."""
        self.config = config
        self._chunk_secret, self._ledger, self._door = chunk_secret, ledger, (listen, listen_key)
        self._digests = DigestCache(config.block_size, REMEMBERED_BLOCKS)
        self.text: Text
        self._closes_text = True
        self.pooling = NONE
        """How embeddings are made, if the model gives any."""
        self.generation = GenerationDefaults()
        """Sampling options of requests that give none."""
        self.weights = ""
        """Digest of the checkpoint's files."""
        self._measure, self._priced = measure, priced
        self._streams: dict[str, Stream] = {}
        self._waiting: set[str] = set()
        self.on_steps: Callable[[messages.Steps], None] = lambda steps: None
        """Called with the engine's steps, a few at a time."""
        self.on_activity: Callable[[messages.Activity], None] = lambda activity: None
        """Called with the engine's activity while it is watched (`watch`)."""
        self._on_servers: Callable[[], None] = lambda: None
        self.servers = messages.Servers([], [])
        """The servers that are attached to the engine, and those that have left lately."""
        self._adopted: dict[str, Adoption] = {}
        """Adopted requests that do not run here yet, by id."""
        self.adopts = lasting
        """Whether the engine outlives this client and knows how to let another one adopt its requests."""
        self.adapters: dict[str, AdapterInfo] = {}
        """The adapters that requests may name, by name."""
        self.version = __version__
        """The engine's version of Holdfast; empty if the engine is too old to say so."""
        self._holds = AdapterHolds(self.adapters, self._forget_adapter)
        """The versions of adapters that requests are about to use."""
        self.draining = asyncio.Event()
        """Set when the engine, to which this client is attached, is to end soon and should get no new requests."""
        self.drain_seconds = 0.0
        """Time from `draining` until the engine ends in any case."""
        self._changing: dict[str, asyncio.Event] = {}
        """For the name of each adapter that is being loaded or unloaded, the event of its end."""
        self._postponed: set[str] = set()
        """Versions to forget, content ids, whose name is being loaded: the load may bring them back."""
        super().__init__(process or EngineProcess(config.device), on_progress, connect)
        self.tuning = TuningClient(self._tell, self.adapters, self._check_alive, drives=drives)
        """The tuning jobs of the engine."""

    def _tell(self, message: messages.ToEngine) -> None:
        """Send a message to the engine of now."""
        self._child.send(message)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        on_progress: Callable[[str], None] | None = None,
        measure: bool = False,
        process: Process | None = None,
        *,
        priced: bool = False,
        chunk_secret: bytes = b"",
        ledger: str = "",
        listen: str = "",
        listen_key: str = "",
    ) -> EngineClient:
        """Start an engine in a new process, or in `process`, begun before, and wait until it takes requests.

        `on_progress` is called with the name of each stage. With `measure`, the engine measures its cost profile again
        and writes it to `info.profile_path`; with `priced`, it finds one even if it needs none. With `chunk_host`,
        engines of one `chunk_secret` fetch blocks from each other; with an empty secret, from none. `ledger` is the
        page in which it reports its work to applications on its device. At the address `listen` other clients attach
        (`attach`), over TCP with the secret key `listen_key`. Raises EngineStartError with the reason. If the wait ends
        early, for whatever reason, so does the process.
        """
        try:
            checkpoint = await asyncio.to_thread(Checkpoint.of, config)  # a model of the hub may have to be fetched
            elsewhere = process is not None and process.remote is not None
            config = for_other_hosts(config, checkpoint) if elsewhere else settled(config, checkpoint)
            client = cls(
                config, on_progress, measure, process,
                priced=priced, chunk_secret=chunk_secret, ledger=ledger, listen=listen, listen_key=listen_key,
            )  # fmt: skip
            client._read_defaults(checkpoint)
        except (ValueError, OSError) as error:
            raise EngineStartError(str(error)) from error
        async with client._starting():
            # At the same time, the tokenizer loads here and the weights in the engine. The first failure ends the wait.
            read = asyncio.to_thread(Text.from_directory, checkpoint.directory, config.chat_template)
            text = asyncio.create_task(read)
            client.info, client.text = await asyncio.gather(client._ready, text)
            client.adapters.update({adapter.name: adapter for adapter in client.info.adapters})
        return client

    @classmethod
    async def attach(
        cls, attachment: Attachment, welcome: messages.Attached, on_progress: Callable[[str], None] | None = None
    ) -> EngineClient:
        """A client of an engine that runs already: `Attachment.open` gives the first two. It outlives the client.

        The tokenizer is read from the model's directory, which must be at the same path here. Raises EngineStartError
        with the reason. If the wait ends early, so does the attachment.
        """
        try:
            checkpoint = await asyncio.to_thread(Checkpoint.of, welcome.config)
            client = cls(
                welcome.config, on_progress, process=attachment, connect=lambda on_end, origin: origin.join(on_end),
                lasting=knows(welcome.wire, "adopt"), drives=knows(welcome.wire, "start-driven"),
            )  # fmt: skip
        except BaseException as error:
            await attachment.close()
            if isinstance(error, (ValueError, OSError)):
                raise EngineStartError(str(error)) from error
            raise
        async with client._starting():
            client._begin_ticks(welcome.now)
            client._read_defaults(checkpoint)
            client.text = await asyncio.to_thread(
                Text.from_directory, checkpoint.directory, client.config.chat_template
            )
            client.info, client.version = welcome.info, welcome.version
            client.adapters.update({adapter.name: adapter for adapter in client.info.adapters})
        return client

    def _read_defaults(self, checkpoint: Checkpoint) -> None:
        """Read how embeddings are made, and the sampling options of requests. Raises ValueError."""
        config = self.config
        self.pooling = find_pooling(checkpoint.directory, config.convert)
        self.weights = weights_digest(checkpoint.directory)
        self.generation = find_generation(
            checkpoint.directory, config.generation_config, config.override_generation_config
        )

    def use_text(self, text: Text) -> None:
        """Use a text that its owner closes, in place of the engine's own."""
        if text is not self.text:
            self.text.close()
        self.text = text
        self._closes_text = False

    @property
    def full(self) -> bool:
        """Whether the queue of waiting requests is full."""
        return len(self._waiting) >= self.config.max_waiting

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model itself. The first is its main name."""
        return self.info.model, *self.config.served_model_name[1:]

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
        """The deltas of one request. It is submitted when the first delta is awaited.

        `adapter` is the name of a loaded adapter, or the content id that `hold_adapter` gave; empty: none. The request
        shares cached prefixes only with requests of the same `tenant` and `salt`, and with the same adapter. `deadline`
        is the time until the first token is due, in seconds from now, for the deadline order. `shown` are special
        tokens whose names belong to the text. `conversation` names the conversation that this is a turn of, for a
        router among several engines. `batch` is the batch that the request is sent in. `contract` has the times that it
        must be promised, counted from `arrival`, a time on the monotonic clock; 0 is now. Leaving the iterator before
        its last Delta (aclose, cancellation) aborts the request.

        Raises RequestRefused at once for a request that can never be served, QueueFull, ContractRefused if the engine
        cannot keep the contract, and EngineDead, even while it runs.

        With a `note`, another client of the engine can adopt the request, and gets the note (`adopt`). Its deltas then
        have one token each. `adopted` is such a request, which this client continues: the deltas begin with its first
        token, and the prompt and the options are its own.
        """
        request_id = request_id or uuid.uuid4().hex
        self._admit(request_id)
        if adopted:
            return self.run(continued(self.text, adopted, shown), adopted)
        return self.run(
            prepare(
                self.info,
                self.text,
                prompt,
                params,
                request_id,
                priority,
                tenant,
                self._holds.content_of(adapter),
                deadline,
                shown,
                batch,
                contract,
                arrival,
                note,
                salt,
            )
        )

    async def adopt(self, tenant: str, request_id: str) -> Adoption | None:
        """Adopt a request whose client is lost, by the id that this client gave it. Raises EngineDead.

        None if the engine does not hold it, or if its client is there. An ended request is given to all who ask.
        """
        if not self.adopts:
            return None
        asked = self._questions.ask(lambda number: messages.Adopt(number, tenant, request_id))
        try:
            found: Adoption | None = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._give_up_late)
            raise
        return found

    def _give_up_late(self, asked: asyncio.Future[Adoption | None]) -> None:
        """Give up a request that came after its caller had left."""
        if not (asked.cancelled() or asked.exception()) and (found := asked.result()):
            self.give_up(found)

    def has_adopted(self, adoption: Adoption) -> bool:
        """Whether an adopted request belongs to this client and waits to be run."""
        return self._adopted.get(adoption.request.id) is adoption

    def give_up(self, adoption: Adoption) -> None:
        """Abort an adopted request that this client does not run, unless it has ended."""
        if not self.has_adopted(adoption):
            return
        del self._adopted[adoption.request.id]
        if not (adoption.ended or self.dead.is_set()):
            self._child.send(messages.Abort(adoption.request.id))

    @property
    def gone(self) -> set[str]:
        """Servers that have left the engine lately."""
        return {*self.servers.left} - {*self.servers.present}

    def introduce(self, server: str, on_change: Callable[[], None]) -> None:
        """Let the engine's other clients know the name of this client's server.

        `on_change` is called when `servers` has changed.
        """
        self._on_servers = on_change
        if self.adopts and not self.dead.is_set():
            self._child.send(messages.Introduce(server))

    @property
    def chunk_address(self) -> str:
        """Address at which other engines fetch KV blocks from this one. If empty, see `info.chunk_reason`."""
        return self.info.chunk_address

    def chain(self, prompt: Sequence[int], *, tenant: str = "", adapter: str = "") -> list[bytes]:
        """The digests of the blocks of a prompt whose state a request can use, as the engine makes them.

        Equal for all engines of one model, precision and block size. Raises RequestRefused for an unknown adapter.
        """
        tokens = prompt[: usable_blocks(len(prompt), self.info.block_size) * self.info.block_size]
        return self._digests.digests(self._identity(tenant, adapter).root(), tokens)

    async def found(self, chain: Sequence[bytes]) -> Found:
        """Number of tokens of a chain (`chain`) that the engine has, by tier. One dictionary look-up per block.

        Raises EngineDead.
        """
        found: Found = await self._questions.ask(lambda number: FindChunks(number, list(chain)))
        return found

    async def fetch(self, chain: Sequence[bytes], indices: Sequence[int], source: str) -> int:
        """Fetch the blocks at these places of a chain from the engine at `source`, its `chunk_address`.

        Returns the number of tokens that have come. Requests then find them in the host tier. It is less than asked for
        if the source does not have all, if the host tier holds more valuable state, if the source ends, or if this
        engine moves nothing; the engine's log has the reason. Blocks that have come stay in any case, even if this is
        cancelled. Raises EngineDead.
        """
        sent: list[int] = []

        def message(number: int) -> FetchChunks:
            sent.append(number)
            digests = [chain[index] for index in indices]
            return FetchChunks(number, digests, list(indices), source, self.info.block_size)

        try:
            tokens: int = await self._questions.ask(message)
        except asyncio.CancelledError:
            if not self.dead.is_set():
                self._child.send(StopFetch(sent[0]))
            raise
        return tokens

    def note_pause(self, request_id: str, pause: Pause) -> None:
        """Let the engine know what follows a request that has ended: when its state is needed again, if ever.

        `pause.keep_until` is on this process's monotonic clock. Does nothing for an engine that has ended.
        """
        if not self.dead.is_set():
            self._child.send(NotePause.of(request_id, pause, time.monotonic()))

    def warm(self, prompt: Sequence[int], *, tenant: str = "", adapter: str = "") -> None:
        """Let the engine bring kept state of these tokens back to the device, as a request with them comes soon.

        Does nothing for an engine that has ended. Raises RequestRefused for an unknown adapter.
        """
        if not self.dead.is_set():
            self._child.send(WarmState(self.chain(prompt, tenant=tenant, adapter=adapter)))

    def _identity(self, tenant: str, adapter: str) -> Identity:
        return Identity(self.info.model, self._holds.content_of(adapter), self.info.precision, tenant)

    async def drain(self, seconds: float) -> None:
        """Let the clients that are attached to the engine leave it, and wait until all have left.

        Clients of an older version do not leave, so the caller limits the wait. `seconds` is that limit. Raises
        EngineDead.
        """
        await self._questions.ask(lambda number: messages.Drain(number, seconds))

    def watch(self, seconds: float) -> None:
        """Make the engine report its activity (`on_activity`) for `seconds` seconds from now on; 0 stops it.

        Raises EngineDead.
        """
        self._check_alive()
        self._child.send(messages.Watch(seconds))

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Serve the adapter in a directory under a name. With `replace`, the name may already have an adapter.

        Requests that name the replaced adapter run to their end. Raises AdapterError, EngineDead.
        """
        with self._change(name):
            try:
                check_adapter_name(name)
            except ValueError as error:
                raise AdapterError(str(error)) from None
            before = {self.adapters[name].id} if name in self.adapters else set()
            if name in self.names or name in self.tuning.names or (before and not replace):
                raise AdapterError(f"the name {name} is taken")
            asked = self._questions.ask(lambda number: LoadAdapter(number, name, path))
            loaded: AdapterInfo = await asyncio.shield(asked)
            self.adapters[name] = loaded
            self._holds.keep(loaded.id)
        for adapter in before - {loaded.id}:
            self._holds.give_up(adapter)
        return loaded

    def hold_adapter(self, adapter: str) -> AbstractContextManager[str]:
        """Hold the present version of an adapter, by its name. Gives the content id that `stream` takes.

        While it is held, requests may begin with it, even if another version has replaced it. Raises RequestRefused on
        entering if there is no such adapter. An empty name holds nothing.
        """
        return self._holds.hold(adapter)

    async def forgotten(self, adapter: str) -> None:
        """Wait until the engine has forgotten a replaced version, a content id. Other clients must have replaced it.

        Returns at once if requests may name it again. Raises EngineDead.
        """
        await self._holds.released(adapter)
        while name_of(adapter) in self._changing:
            await self._changing[name_of(adapter)].wait()
        if not self._serves(adapter):
            await asyncio.shield(self._questions.ask(lambda number: UnloadAdapter(number, adapter)))

    def _serves(self, adapter: str) -> bool:
        """Whether new requests may take this version, a content id."""
        return any(info.id == adapter for info in self.adapters.values())

    def _forget_adapter(self, adapter: str) -> None:
        """Let the engine forget a version that nobody holds. Does nothing for an engine that has ended."""
        if name_of(adapter) in self._changing:
            self._postponed.add(adapter)
        elif not self.dead.is_set():
            self._questions.ask(partial(UnloadAdapter, adapter=adapter))

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter, and forget it once the running ones have ended.

        Raises AdapterError, with `missing`, for a name without an adapter, and EngineDead.
        """
        with self._change(name):
            if name not in self.adapters:
                raise AdapterError(f"there is no adapter {name}", missing=True)
            adapter = self.adapters.pop(name)
            await self._holds.released(adapter.id)
            await asyncio.shield(self._questions.ask(lambda number: UnloadAdapter(number, adapter.id)))

    @contextmanager
    def _change(self, name: str) -> Iterator[None]:
        """Prevent other loads and unloads of this name inside the block. Raises AdapterError."""
        if name in self._changing:
            raise AdapterError(f"adapter {name} is being loaded or unloaded; try again in a moment")
        self._changing[name] = asyncio.Event()
        try:
            yield
        finally:
            self._changing.pop(name).set()
            for adapter in [each for each in self._postponed if name_of(each) == name]:
                self._postponed.discard(adapter)
                if not self._serves(adapter):
                    self._forget_adapter(adapter)

    async def close(self) -> None:
        """End the engine process. Running streams raise EngineDead. May be called more than once."""
        if self._closes_text:
            self.text.close()
        await super().close()

    async def count_clients(self, timeout: float = HEALTH_SECONDS) -> int:
        """Return the number of clients that are attached to the engine. It must listen at an address.

        Raises EngineDead, TimeoutError.
        """
        count: int = await asyncio.wait_for(self._questions.ask(messages.CountClients), timeout)
        return count

    async def run(self, stream: Stream, adopted: Adoption | None = None) -> AsyncGenerator[Delta, None]:
        """Submit a request when the first delta is awaited, and give its deltas. Raises as `stream` does.

        An `adopted` request runs already: its deltas so far come first.
        """
        request_id = stream.request.id
        self._admit(request_id, counts=not adopted)  # again, because this may be long after `stream` was called
        self._streams[request_id] = stream
        self._waiting.add(request_id)
        try:
            if adopted:
                self._join(stream, adopted)
            else:
                request = stream.request
                there = replace(request, arrival=request.arrival + self.ahead) if self.ahead else request
                self._child.send(messages.Submit(there, stream.note))
            while not stream.given:
                yield await stream.next()
        finally:
            if self._forget(request_id) and not self.dead.is_set():
                self._child.send(messages.Abort(request_id))

    def _join(self, stream: Stream, adopted: Adoption) -> None:
        """Give a stream the answer of its adopted request so far, and the outputs that have come since."""
        self._adopted.pop(adopted.request.id, None)
        now = time.monotonic()
        if adopted.answered or adopted.ended:
            self._deliver(adopted.output, now)
        for output in adopted.later:
            self._deliver(output, now)

    def _forget(self, request_id: str) -> bool:
        """Drop a request's stream. Returns whether there was one."""
        self._waiting.discard(request_id)
        known = request_id in self._streams
        self._streams.pop(request_id, None)
        return known

    def _admit(self, request_id: str, *, counts: bool = True) -> None:
        """Raise if a request with this id cannot be taken now. One that `counts` needs a place in the queue."""
        self._check_alive()
        if request_id in self._streams:
            raise RequestRefused(f"request id {request_id} is already in use; give each its own", "request_id")
        if counts and self.full:
            raise QueueFull(f"{len(self._waiting)} requests wait, and max_waiting is {self.config.max_waiting}")

    def _start_message(self) -> messages.Start:
        return messages.Start(
            self.config, self._began + self.ahead, self._measure, self._chunk_secret, self._priced, self._ledger,
            *self._door,
        )  # fmt: skip

    def _take_output(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Outputs():
                now = time.monotonic()
                for output in message.outputs:
                    self._deliver(output, now)
            case messages.Steps():
                self.on_steps(message)
            case messages.Activity():
                self.on_activity(message)
            case messages.Refused(request_id, reason, param):
                self._fail_stream(request_id, RequestRefused(reason, param))
            case messages.ContractRefusal(request_id, refusal):
                self._fail_stream(request_id, ContractRefused(refusal))
            case messages.Adopted(number, held, yours):
                self._questions.answer(number, self._take_adopted(held, yours=yours))
            case messages.Servers():
                self.servers = message
                self._on_servers()
            case ChunksFound(number, device, host, lower):
                self._questions.answer(number, Found(device, host, lower))
            case ChunksFetched(number, tokens, reason):
                if reason:
                    log.debug("holdfast: a fetch gave %d tokens: %s", tokens, reason)
                self._questions.answer(number, tokens)
            case AdapterLoaded(number, info):
                self._questions.answer(number, info)
            case messages.Drained(number):
                self._questions.answer(number, None)
            case messages.Draining(seconds):
                self.drain_seconds = seconds
                self.draining.set()
            case AdapterUnloaded(number):
                self._questions.answer(number, None)
            case messages.ClientCount(number, count):
                self._questions.answer(number, count)
            case AdapterRefused(number, reason):
                self._questions.refuse(number, AdapterError(reason))
            case JobStarted() | JobChanged() | JobRefused() | JobProgress() | DrivenStarted() | DrivenProgress():
                self.tuning.take(message)

    def _take_adopted(self, held: messages.Held | None, *, yours: bool) -> Adoption | None:
        """Read the answer to Adopt. Outputs of a request that is ours are kept from now on."""
        if not held:
            return None
        request = replace(held.request, prompt=array("I", held.prompt), arrival=held.request.arrival - self.ahead)
        adoption = Adoption(
            request, held.note, array("I", held.tokens), tuple(held.logprobs), held.cached_tokens,
            held.cached_by_tier, held.scheduled_at, held.finish_reason, held.ended, yours, [],
        )  # fmt: skip
        if yours:
            self._adopted[request.id] = adoption
        return adoption

    def _deliver(self, output: SequenceOutput, now: float) -> None:
        """Hand a stream its output of one step.

        The text is decoded here and not by the reader, because a slow reader must not delay the abort after a stop
        string.
        """
        if output.request_id not in self._streams:  # its reader has left, or is not there yet
            if output.request_id in self._adopted:
                self._adopted[output.request_id].later.append(output)
            return
        stream = self._streams[output.request_id]
        self._waiting.discard(output.request_id)
        stream.take(output, now, output.scheduled_at - self.ahead)
        if stream.finish_reason is not None:
            self._forget(output.request_id)
            if output.finish_reason is None:  # ended by a stop string, which only the client looks for
                self._child.send(messages.Abort(output.request_id, complete=True))

    def _fail_stream(self, request_id: str, error: Exception) -> None:
        """End a request's stream with an error. Its reader may have left."""
        if request_id in self._streams:
            stream = self._streams[request_id]
            self._forget(request_id)
            stream.fail(error)

    def _fail_requests(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.fail(EngineDead(reason))
        self._streams.clear()
        self._waiting.clear()
        self.tuning.fail(reason)


class Stream:
    """One request in progress, from the engine's outputs to deltas. Outputs that are not read yet are merged.

    The deltas of a request with a note have one token each, so they are the same whoever reads them, and whenever.
    """

    def __init__(self, request: Request, text: TextStream, note: bytes = b"") -> None:
        self.request = request
        self.note = note
        """Data with which another client can continue the request; empty: none can."""
        self.contract = request.contract
        """The contract that the client asked for. An engine after the first one may promise less (`resume`)."""
        self.finish_reason: FinishReason | None = None
        self.given = False
        """Whether the reader has received the last Delta."""
        self._text = text
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._vector = b""
        self._end_logprobs: TokenLogprobs | None = None
        """Log probabilities of the token that ended the answer."""
        self._count = 0
        self._cached = 0
        self._by_tier = 0, 0, 0
        self._preemptions = 0
        self._scheduled = self._first = self._last = 0.0
        self._gap = 0.0
        """Longest time between two outputs, in seconds."""
        self._errors: list[Exception] = []
        """The error that ends the stream, if there is one."""
        self._changed = asyncio.Event()
        self._answer = array("I")
        self._single: deque[tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]] = deque()
        """Text, token and log probabilities of each delta to come, if the request has a note."""
        self._told = self._told_again = 0

    @property
    def answer(self) -> Sequence[int]:
        """All tokens so far, including those that no reader has yet."""
        return self._answer

    def resume(self, now: float = 0.0) -> None:
        """Prepare the request to continue on another engine, after this one has ended.

        The tokens so far then begin its answer, and figures of the prompt are not given again. Draws depend only on the
        seed and the position, so a request that has a seed continues as if nothing had happened. The other engine is
        asked to promise what is left of the contract at `now`; 0 is the present. Nothing is left once a token is
        late.
        """
        request, params = self.request, self.request.params
        if self._answer:
            params = replace(params, prompt_logprobs=None)  # all of them were given with the first token
        prompt = array("I", request.prompt[: request.answer_start]) + self._answer
        since = (now or time.monotonic()) - request.arrival
        rest = self.contract.rest(self._last - request.arrival if self._count else None)
        contract = NO_CONTRACT if not request.contract or rest.expired(since) else rest
        self.request = replace(request, prompt=prompt, params=params, answered=len(self._answer), contract=contract)
        self._told_again = self._told
        self._forget_error()

    def offer_again(self, contract: Contract) -> None:
        """Prepare the request to be sent to an engine with this contract, after one has refused its contract."""
        self.request = replace(self.request, contract=contract)
        self._forget_error()

    def _forget_error(self) -> None:
        self._errors.clear()
        if self._tokens or self._prompt_logprobs or self._single:
            self._changed.set()
        else:
            self._changed.clear()

    def broken(self, at: float = 0.0) -> Term | None:
        """The first term of the contract that the answer so far has broken; None if it has kept them all.

        With `at`, a time after the latest token, as if the next token came then.
        """
        last, arrival = max(at, self._last), self.request.arrival
        first, gap = (self._first, max(self._gap, last - self._last)) if self._count else (last, 0.0)
        return self.contract.first_broken(first - arrival, gap, last - arrival)

    def take(self, output: SequenceOutput, now: float, scheduled: float) -> None:
        """Add the output of one step.

        `scheduled` is the time at which the sequence was first scheduled, on our clock.
        """
        tokens, reason = output.tokens, output.finish_reason
        ended = reason is not None
        if not self._count:
            # Another host's clock is known only to within half a round trip, so its times may seem to lie outside of
            # ours.
            self._scheduled = min(max(scheduled, self.request.arrival), now)
            self._first, self._cached = now, output.cached_tokens
            self._by_tier = output.cached_by_tier
        elif self.contract:
            self._gap = max(self._gap, now - self._last)
        self._vector = output.vector or self._vector
        self._last, self._preemptions = now, output.preemptions
        # The token that stopped the sequence is not part of its text, unless the request wants it there.
        cut = reason is FinishReason.STOP and not self.request.params.include_stop_str_in_output
        visible = tokens[:-1] if cut else tokens
        if self.note:
            tokens = self._take_singly(tokens, visible, output.logprobs, ended=ended)
        elif len(visible) > 1 and self.request.params.stop:
            # Tokens after the end of a stop string do not count, as if each token had come alone.
            for count, token in enumerate(visible, 1):
                self._pieces.append(self._text.push((token,), last=ended and count == len(visible)))
                if self._text.stopped:
                    tokens = visible = visible[:count]
                    break
        else:
            self._pieces.append(self._text.push(visible, last=ended))
        self._count += len(tokens)
        self._answer.extend(tokens)
        if not self.note:
            self._tokens.extend(tokens)
        if output.logprobs and not self.note:
            self._logprobs.extend(output.logprobs[: len(visible)])
            if len(visible) < len(tokens):
                self._end_logprobs = output.logprobs[len(visible)]
        if output.prompt_logprobs:
            again = min(self._told_again, len(output.prompt_logprobs))
            self._told_again -= again
            self._told += len(output.prompt_logprobs) - again
            self._prompt_logprobs.extend(output.prompt_logprobs[again:])
        self.finish_reason = FinishReason.STOP if self._text.stopped else reason
        self._changed.set()

    def _take_singly(
        self, tokens: tuple[int, ...], visible: tuple[int, ...], logprobs: Sequence[TokenLogprobs], *, ended: bool
    ) -> tuple[int, ...]:
        """Make a delta of each token. Returns the tokens up to the end of a stop string; all if there is none.

        The deltas depend on the tokens alone, not on the steps in which they came: a token that ends the answer, which
        has no text, has a delta of its own.
        """
        for at, token in enumerate(visible):
            last = ended and at == len(tokens) - 1
            self._single.append((self._text.push((token,), last=last), (token,), tuple(logprobs[at : at + 1])))
            if self._text.stopped:
                return tokens[: at + 1]
        if ended and len(visible) < max(1, len(tokens)):
            self._single.append((self._text.push((), last=True), tokens[len(visible) :], ()))
        return tokens

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self._errors[:] = [error]
        self._changed.set()

    async def next(self) -> Delta:
        """Wait for the next Delta. Raises the error given to `fail`."""
        await self._changed.wait()
        self._changed.clear()
        for error in self._errors:
            raise error
        text, tokens, logprobs = "".join(self._pieces), tuple(self._tokens), tuple(self._logprobs)
        prompt = tuple(self._prompt_logprobs)
        for taken in (self._pieces, self._tokens, self._logprobs, self._prompt_logprobs):
            taken.clear()
        if self._single:
            text, tokens, logprobs = self._single.popleft()
        if self._single:
            self._changed.set()
        if self.finish_reason is None or self._single:
            return Delta(text, tokens, logprobs=logprobs, prompt_logprobs=prompt)
        self.given = True
        request = self.request
        usage = Usage(request.answer_start, self._count, self._cached, self._by_tier)
        timings = Timings(request.arrival, self._scheduled, self._first, self._last, self._count, self._preemptions)
        stop = self._text.stop_string
        return Delta(
            text, tokens, self.finish_reason, usage, timings, logprobs, prompt, self._vector, stop, self._end_logprobs
        )  # fmt: skip


def prepare(
    info: messages.EngineInfo,
    text: Text,
    prompt: Sequence[int],
    params: SamplingParams,
    request_id: str,
    priority: int = 0,
    tenant: str = "",
    content: str = "",
    deadline: float | None = None,
    shown: Collection[int] = (),
    batch: UserBatch = ALONE,
    contract: Contract = NO_CONTRACT,
    arrival: float = 0.0,
    note: bytes = b"",
    salt: str = "",
) -> Stream:
    """Check a request as `EngineClient.stream` does, for that engine or another like it.

    `content` is the content id of the request's adapter; empty: it has none. Raises RequestRefused.
    """
    identity = Identity(info.model, content, info.precision, tenant, salt)
    tokens = info.limits.check(
        prompt, params, identity=identity, priority=priority, deadline=deadline, adapters=(content,)
    )
    request = Request(
        id=request_id,
        prompt=tokens,
        params=params,
        priority=priority,
        identity=identity,
        arrival=arrival or time.monotonic(),
        deadline=deadline,
        batch=batch,
        contract=contract,
    )
    try:
        text_stream = _text_stream(text, params, shown)
    except ValueError as error:
        raise RequestRefused(str(error), "stop") from error
    return Stream(request, text_stream, note)


def continued(text: Text, adopted: Adoption, shown: Collection[int]) -> Stream:
    """The stream of an adopted request. It gets the answer so far when it runs."""
    return Stream(adopted.request, _text_stream(text, adopted.request.params, shown), adopted.note)


def _text_stream(text: Text, params: SamplingParams, shown: Collection[int]) -> TextStream:
    """The text of one request's answer. Raises ValueError for too many or too long stop strings."""
    include = params.include_stop_str_in_output
    return TextStream(text, params.stop, params.min_tokens, shown, include_stop=include)
