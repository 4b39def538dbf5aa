"""EngineClient: an asyncio interface to the engine process: submit, stream, abort. Never imports torch."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from math import inf

from holdfast.core.contract import NO_CONTRACT, Contract, ContractRefused
from holdfast.core.pause import Pause
from holdfast.core.sleep import SLEEP_OFF, MemoryTag, SleepMode
from holdfast.core.types import (
    ALONE,
    BATCH_CLASS,
    AdapterInfo,
    Found,
    Identity,
    SamplingParams,
    SequenceOutput,
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
    EngineAsleep,
    EngineConnection,
    EngineDead,
    EngineStartError,
    Origin,
    QueueFull,
    SleepError,
    connect_child,
)
from holdfast.engine.client.generation import GenerationDefaults, find_generation
from holdfast.engine.client.pace_report import PaceReport
from holdfast.engine.client.pooling import NONE, find_pooling
from holdfast.engine.client.stream import Adoption, Delta, Stream, continued, prepare
from holdfast.engine.client.text import Text
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
from holdfast.lm.parts.sleep.messages import (
    Asleep,
    Sleep,
    SleepRefused,
    Slept,
    WakeUp,
)
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
        self._pace = PaceReport(config.tbt_seconds or inf, self._tell)
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
        super().__init__(process or EngineProcess(config.first_device), on_progress, connect)
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
            if not knows(welcome.wire, "token-waits"):
                client._pace = PaceReport(inf, client._tell)
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

    def chain(self, prompt: Sequence[int], *, tenant: str = "", adapter: str = "", salt: str = "") -> list[bytes]:
        """The digests of the blocks of a prompt whose state a request can use, as the engine makes them.

        `tenant`, `adapter` and `salt` are those of the request (`stream`). Equal for all engines of one model,
        precision and block size. Raises RequestRefused for an unknown adapter.
        """
        tokens = prompt[: usable_blocks(len(prompt), self.info.block_size) * self.info.block_size]
        return self._digests.digests(self._identity(tenant, adapter, salt).root(), tokens)

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

    def warm(self, prompt: Sequence[int], *, tenant: str = "", adapter: str = "", salt: str = "") -> None:
        """Let the engine bring kept state of these tokens back to the device, as a request with them comes soon.

        `tenant`, `adapter` and `salt` are those of the request. Does nothing for an engine that has ended. Raises
        RequestRefused for an unknown adapter.
        """
        if not self.dead.is_set():
            self._child.send(WarmState(self.chain(prompt, tenant=tenant, adapter=adapter, salt=salt)))

    def _identity(self, tenant: str, adapter: str, salt: str) -> Identity:
        return Identity(self.info.model, self._holds.content_of(adapter), self.info.precision, tenant, salt)

    async def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Put the engine to sleep. Returns once it has returned the device's memory.

        Level 1 keeps the weights on the host, and level 2 drops them: they are read again. Requests that run are ended
        (`abort`), computed to their end first (`wait`), or go on after the sleep (`keep`). New ones get EngineAsleep.
        Conversations go to the host tier and those below it, and are found there again. Raises SleepError with the
        reason if the engine stays awake, and EngineDead.
        """
        self._check_sleeps()
        await asyncio.shield(self._questions.ask(lambda number: Sleep(number, level, mode)))

    async def wake_up(self, tags: Sequence[MemoryTag] = ()) -> None:
        """Let the engine take memory back, by default all; it takes requests once all is there.

        `tags` are `weights` and `kv_cache`. Raises SleepError with the reason if the memory is not there: the engine
        then sleeps on. Raises EngineDead.
        """
        self._check_sleeps()
        await asyncio.shield(self._questions.ask(lambda number: WakeUp(number, [*tags])))

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps, falls asleep or wakes up. Raises EngineDead, TimeoutError."""
        return (await self.health()).sleep_level > 0

    def _check_sleeps(self) -> None:
        """Raise SleepError for an engine without sleep mode."""
        if not self.config.enable_sleep_mode:
            raise SleepError(SLEEP_OFF)

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
            timed, last, before = self._pace.target < inf and stream.request.priority < BATCH_CLASS, inf, 0.0
            while not stream.given:
                waits = not stream.changed  # A reader that came later than the token may be slow itself.
                delta = await stream.next()
                if timed and delta.tokens:
                    now = time.monotonic()
                    way = now - stream.sent_at if stream.sent_at else 0.0
                    if waits and last < inf:
                        self._pace.note(now - last, now, way=way, way_before=before)
                    last, before = now, way
                yield delta
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
                now, sent_at = time.monotonic(), message.sent_at and message.sent_at - self.ahead
                for output in message.outputs:
                    self._deliver(output, now, sent_at)
            case messages.Steps():
                self.on_steps(message)
            case messages.Activity():
                self.on_activity(message)
            case messages.Refused(request_id, reason, param):
                self._fail_stream(request_id, RequestRefused(reason, param))
            case messages.ContractRefusal(request_id, refusal):
                self._fail_stream(request_id, ContractRefused(refusal))
            case Asleep(request_id):
                self._fail_stream(request_id, EngineAsleep("the engine sleeps; POST /wake_up wakes it"))
            case Slept(number):
                self._questions.answer(number, None)
            case SleepRefused(number, reason):
                self._questions.refuse(number, SleepError(reason))
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

    def _deliver(self, output: SequenceOutput, now: float, sent_at: float = 0.0) -> None:
        """Hand a stream its output of one step, which the engine sent at a time on our clock (0: unknown).

        The text is decoded here and not by the reader, because a slow reader must not delay the abort after a stop
        string.
        """
        if output.request_id not in self._streams:  # its reader has left, or is not there yet
            if output.request_id in self._adopted:
                self._adopted[output.request_id].later.append(output)
            return
        stream = self._streams[output.request_id]
        self._waiting.discard(output.request_id)
        stream.take(output, now, output.scheduled_at - self.ahead, sent_at)
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
