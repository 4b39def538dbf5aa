"""Samplers: the sampling sessions of clients, and the requests that sample from a base model or from saved weights."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing, suppress
from typing import NamedTuple, TypeVar

from holdfast.core.types import BATCH_CLASS, MAX_DEADLINE, MAX_SEED
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.formats.registry import Reading
from holdfast.server.jobs.files import pauses
from holdfast.server.jobs.locks import Owner
from holdfast.server.pauses import BATCH
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.replies import RequestUsage
from holdfast.server.service import LARGE, Admission, Answer, Lane, Service, check_length, internal
from holdfast.server.tinker.calls import digest_of
from holdfast.server.tinker.checkpoints import Checkpoints
from holdfast.server.tinker.futures import MOST_PENDING_TENANT, Futures
from holdfast.server.tinker.protos import MEDIA
from holdfast.server.tinker.sample_requests import CreateSamplingSession, Sample, SampleAnswer, content_of
from holdfast.server.tinker.sample_results import Sampled, sample_response
from holdfast.server.tinker.sample_table import Sampler, SamplerTable
from holdfast.server.tinker.sampler_weights import SamplerWeights
from holdfast.server.tinker.sessions import Sessions
from holdfast.server.tinker.tables import SessionTable
from holdfast.server.tinker.values import Checkpoint, Future

KIND = "sample"
"""Kind of the futures of samples."""
TICK_SECONDS = 10.0
"""Seconds between two looks for sampling sessions to release."""
GONE_SECONDS = 86_400.0
"""Seconds without a heartbeat of its session after which a sampling session is released."""
UNUSED_SECONDS = 3600.0
"""Seconds without a request after which unnamed weights are deleted, if the model has saved newer ones."""
USE_SECONDS = 60.0
"""Seconds between two notes in the store of a sampling session's last use."""

T = TypeVar("T")

log = logging.getLogger("holdfast.server")


class Running(NamedTuple):
    """A sample that this server carries out."""

    tenant: str
    task: asyncio.Task[None]


class Samplers:
    """The sampling sessions of one server, which carries out the samples that it has accepted."""

    def __init__(
        self,
        service: Service,
        store: AsyncStore,
        owner: Owner,
        sessions: Sessions,
        futures: Futures,
        checkpoints: Checkpoints,
        now: Callable[[], float] = time.time,
        *,
        tick: float = TICK_SECONDS,
    ) -> None:
        """`owner` is this server."""
        self._service, self._store, self._owner, self._now, self._tick_seconds = service, store, owner, now, tick
        self._sessions, self._futures, self._checkpoints = sessions, futures, checkpoints
        self._weights = SamplerWeights(service)
        info = service.client.info
        places = asyncio.Semaphore(max(1, min(info.max_sequences, info.max_waiting // 2)))
        self._lane = Lane(
            Admission(MOST_PENDING_TENANT * service.config.max_choices),
            [places, service.unstarted],
            priority=BATCH_CLASS,
            deadline=MAX_DEADLINE,
            timed=False,
            pause=BATCH,
        )
        """Lane of samples. They hold at most half of the engine's queue, so chats find places there."""
        self._running: dict[str, Running] = {}
        """The samples that this server carries out, by the id of their future."""
        self._used: dict[str, float] = {}
        """Time of the last note of each sampling session's use."""
        self._ticking: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Begin to release sampling sessions whose clients are gone."""
        if self._ticking is None and not self._closed:
            self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Abort the samples. A client that sends one again gets it from another server. May be called twice."""
        self._closed = True
        tasks = [*(each.task for each in self._running.values()), *([] if self._ticking is None else [self._ticking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._weights.close()

    # Sampling sessions

    async def create(self, wanted: CreateSamplingSession, tenant: str) -> Sampler:
        """Create a sampling session, or return the one of this number. Raises ApiError."""
        await self._sessions.running(tenant, wanted.session_id)
        checkpoint = await self._source(wanted.base_model, wanted.model_path, tenant)
        return await self._open(tenant, wanted.session_id, wanted.sampling_session_seq_id, checkpoint)

    async def open(self, tenant: str, session: str, seq: int, checkpoint: Checkpoint) -> str:
        """Open a sampling session over saved weights, or find the one of this number. Returns its id."""
        return (await self._open(tenant, session, seq, checkpoint)).id

    async def get(self, tenant: str, id: str) -> Sampler:
        """Return a sampling session. Raises ApiError 404."""
        return await self._store.read(lambda store: SamplerTable(store.database).get(tenant, id))

    async def join(self, tenant: str, id: str) -> int:
        """Count a copy of a sampling client. Returns its number. Raises ApiError 404."""
        return await self._store.run(lambda store: SamplerTable(store.database).join(tenant, id))

    async def release(self, session: str) -> None:
        """Delete the sampling sessions of a session, abort their samples, and delete the weights without a name."""
        gone = await self._store.read(lambda store: SamplerTable(store.database).of_session(session))
        await self._release(gone)

    async def _open(self, tenant: str, session: str, seq: int, checkpoint: Checkpoint | None) -> Sampler:
        now, base = self._now(), self._service.client.info.model
        path = None if checkpoint is None else checkpoint.path
        id = f"{session}:sample:{seq}"
        source = None if checkpoint is None else checkpoint.id
        sampler = Sampler(id, tenant, session, seq, base, path, source, now, now)
        found = await self._store.run(lambda store: SamplerTable(store.database).open(sampler))
        if found.checkpoint != sampler.checkpoint:
            reason = f"sampling session {seq} of {session[:64]} was created with other weights"
            raise invalid(reason, "sampling_session_seq_id", "number_reused")
        return found

    async def _source(self, base: str | None, path: str | None, tenant: str) -> Checkpoint | None:
        """Return the checkpoint to sample from; None for the base model. Raises ApiError."""
        if base is not None and base not in self._service.client.names:
            served = self._service.client.info.model
            raise invalid(f"base_model is {base[:128]!r}; this server has {served!r}", "base_model", "model_not_found")
        if path is None:
            if base is None:
                raise invalid("give base_model or model_path", "base_model")
            return None
        checkpoint = await self._checkpoints.find(tenant, path, "model_path")
        if checkpoint.kind != "sampler":
            reason = f"{path[:128]} is a training state; sample from weights that save_weights_for_sampler has written"
            raise invalid(reason, "model_path")
        return checkpoint

    async def _release(self, gone: list[Sampler]) -> None:
        await self._store.run(lambda store: SamplerTable(store.database).delete([each.id for each in gone]))
        for sampler in gone:
            self._used.pop(sampler.id, None)
            for future in await self._futures.of_item(sampler.id):
                await self._abort(future.id, "the sampling session has ended")
            checkpoint = await self._unnamed(sampler)
            if checkpoint is not None:
                await self._weights.drop(checkpoint, sampler.tenant)
                await self._checkpoints.drop(checkpoint)

    async def _unnamed(self, sampler: Sampler) -> Checkpoint | None:
        """Return the weights of a sampling session if they have no name; None if they have one, or are gone."""
        checkpoint = None if sampler.checkpoint is None else await self._checkpoints.get(sampler.checkpoint)
        return None if checkpoint is None or checkpoint.listed else checkpoint

    # Samples

    async def sample(self, wanted: Sample, tenant: str) -> tuple[Future, RequestUsage, asyncio.Task[None] | None]:
        """Take a request to sample. Returns its future, its usage, and the task that counts it if it is new.

        A request that is sent again under its number has the same future, and is carried out once. Raises ApiError.
        """
        if self._closed:
            raise ApiError("the server is shutting down; try another one", status=503, code="shutting_down")
        await self.start()
        item, checkpoint = await self._item(wanted, tenant)

        def read() -> tuple[list[int], str]:
            prompt = wanted.prompt.tokens()
            self._check(wanted, prompt)
            return prompt, digest_of(KIND, content_of(wanted))

        prompt, digest = await self._off_loop(wanted, read)
        future, new = await self._futures.begin(
            tenant, item, wanted.seq_id or 0, KIND, digest, detail={"owner": self._owner.id}
        )
        if not new and self.lost(future):
            future = await self._futures.get(tenant, future.id)  # It may have ended here since it was read.
        if not new and not self.lost(future):
            return future, RequestUsage(), None
        usage = RequestUsage()
        task = asyncio.create_task(self._run(future, wanted, prompt, checkpoint, usage))
        self._running[future.id] = Running(tenant, task)
        task.add_done_callback(lambda _: self._running.pop(future.id, None))
        return future, usage, task

    def lost(self, future: Future) -> bool:
        """Whether the server that carries out a pending sample has ended. Another one can take it over."""
        if future.kind != KIND or future.state != "pending" or future.id in self._running:
            return False
        owner = future.detail.get("owner", "")
        return bool(owner == self._owner.id or self._owner.gone(owner))

    async def cancel(self, tenant: str, id: str) -> None:
        """Abort a sample that its client does not want any more. One that is unknown or has ended stays as it is."""
        with suppress(ApiError):
            future = await self._futures.get(tenant, id)
            if future.kind == KIND and future.state == "pending":
                await self._abort(id, "the client has cancelled it")

    async def _abort(self, id: str, reason: str) -> None:
        """Abort a sample, at whichever server it runs, and end its future."""
        if (running := self._running.get(id)) is not None:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
        await self._futures.fail(id, reason, "user")

    async def _item(self, wanted: Sample, tenant: str) -> tuple[str, Checkpoint | None]:
        """Return the id under which a sample is numbered, and the weights that it is drawn from. Raises ApiError."""
        if wanted.sampling_session_id is None:
            return f"sample-{uuid.uuid4().hex}", await self._source(wanted.base_model, wanted.model_path, tenant)
        sampler = await self.get(tenant, wanted.sampling_session_id)
        await self._note_use(sampler)
        if sampler.checkpoint is None:
            return sampler.id, None
        checkpoint = await self._checkpoints.get(sampler.checkpoint)
        if checkpoint is None or (checkpoint.expires is not None and checkpoint.expires <= self._now()):
            reason = f"the weights {sampler.path} of this sampling session are deleted; save them again"
            raise ApiError(reason, status=404, param="sampling_session_id", code="checkpoint_not_found")
        return sampler.id, checkpoint

    async def _note_use(self, sampler: Sampler) -> None:
        now = self._now()
        if now - self._used.get(sampler.id, sampler.used) >= USE_SECONDS:
            await self._store.run(lambda store: SamplerTable(store.database).use(sampler.id, now))
            self._used[sampler.id] = now

    async def _off_loop(self, wanted: Sample, work: Callable[[], T]) -> T:
        """Run work on the numbers of a request, in a thread if they are many."""
        return await self._service.off_loop(wanted.size, work) if wanted.size >= LARGE else work()

    def _check(self, wanted: Sample, prompt: list[int]) -> None:
        """Raises ApiError for a sample that this server can never draw."""
        client, most = self._service.client, self._service.config.max_choices
        if wanted.num_samples > most:
            raise invalid(
                f"num_samples is {wanted.num_samples}; at most {most} are taken (--max-choices)", "num_samples"
            )
        targets = wanted.target_prompt_logprobs
        for token in (*prompt, *wanted.sampling_params.stops[1], *(() if targets is None else targets.data)):
            if token >= client.info.vocab_size:
                raise invalid(f"token id {token} is out of range; the model has {client.info.vocab_size}", "prompt")
        check_length(len(prompt), client, SampleAnswer.of(wanted, client.info.model, 0, client.text))

    async def _run(
        self, future: Future, wanted: Sample, prompt: list[int], checkpoint: Checkpoint | None, usage: RequestUsage
    ) -> None:
        """Carry out a sample, and end its future with the result or the error.

        If the engine has ended, so will the server. The sample is then lost, and its client asks another server.
        """
        try:
            body = await self._answer(future, wanted, prompt, checkpoint, usage)
        except ApiError as error:
            if self._service.client.dead.is_set():
                return
            await self._futures.fail(future.id, error.message, "user" if error.status < 500 else "server")
        except Exception as error:
            await self._futures.fail(future.id, internal(error).message, "server")
        else:
            await self._futures.finish(future.id, body, MEDIA)

    async def _answer(
        self, future: Future, wanted: Sample, prompt: list[int], checkpoint: Checkpoint | None, usage: RequestUsage
    ) -> bytes:
        """Return the result of a sample. Tries again while the server is full or an engine is lost. Raises ApiError."""
        seed = int.from_bytes(hashlib.sha256(future.id.encode()).digest()[:8], "little") & MAX_SEED
        waits = pauses()
        async with AsyncExitStack() as held:
            model = self._service.client.info.model
            if checkpoint is not None:
                model = await held.enter_async_context(self._weights.served(checkpoint, future.tenant))
            text = self._service.client.text
            request = await self._off_loop(wanted, lambda: SampleAnswer.of(wanted, model, seed, text))
            while True:
                try:
                    return await self._draw(request, wanted, prompt, future.tenant, usage)
                except ApiError as error:
                    if error.status not in (429, 503) or self._service.client.dead.is_set():
                        raise
                await asyncio.sleep(next(waits))

    async def _draw(
        self, request: SampleAnswer, wanted: Sample, prompt: list[int], tenant: str, usage: RequestUsage
    ) -> bytes:
        async def encoded() -> list[list[int]]:
            return [prompt]

        reading = Reading(self._service.format.unread, None, {})
        answer = Answer(self._service, request, tenant, encoded, reading, lane=self._lane)
        sampled = [Sampled() for _ in range(wanted.num_samples)]
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for choice, delta in deltas:
                    sampled[choice].add(delta)
        finally:
            usage.include(answer.usage)
            usage.wanted = request.changed(model=self._service.client.info.model)  # Weights have no names of their own.

        def write() -> bytes:
            return sample_response(
                sampled,
                prompt_tokens=len(prompt),
                cached_tokens=answer.usage.cached_tokens,
                alternatives=request.alternatives,
                prompt_alternatives=request.prompt_alternatives,
                last=wanted.prompt_logprobs_last_n,
                targets=wanted.target_prompt_logprobs,
            )

        return await self._off_loop(wanted, write)

    # Upkeep

    async def _tick(self) -> None:
        while True:
            try:
                await self._stop_ended()
                for session in await self._store.read(lambda store: SamplerTable(store.database).sessions()):
                    await self._look_at(session)
                await self._drop_deleted()
            except (ApiError, OSError) as error:
                log.warning("sampling sessions cannot be released now: %s", error)
            await asyncio.sleep(self._tick_seconds)

    async def _stop_ended(self) -> None:
        """Abort the samples here whose futures other servers have ended, because their clients cancelled them."""
        for id, running in [*self._running.items()]:
            future = await self._futures.get(running.tenant, id)
            if future.state != "pending":
                running.task.cancel()

    async def _drop_deleted(self) -> None:
        """Unload the weights whose checkpoints are deleted."""
        if loaded := self._weights.checkpoints:
            await self._weights.drop_deleted({*loaded} - await self._checkpoints.known(loaded))

    async def _look_at(self, session: str) -> None:
        """Release the sampling sessions of a session that has ended, and unnamed weights that nobody uses."""
        now = self._now()
        own = await self._store.read(lambda store: SamplerTable(store.database).of_session(session))
        if await self._ended(session, own[0].tenant if own else ""):
            await self._release(own)
            return
        if await self._sessions.away(session):
            for sampler in own:
                for future in await self._futures.of_item(sampler.id):
                    await self._abort(future.id, "its client has sent no heartbeat for some minutes")
        newest = {sampler.path.rpartition("/")[0]: sampler.id for sampler in own if sampler.path is not None}
        for sampler in own:
            if sampler.path is None or newest[sampler.path.rpartition("/")[0]] == sampler.id:
                continue
            if now - max(sampler.used, self._used.get(sampler.id, 0.0)) < UNUSED_SECONDS:
                continue
            if await self._unnamed(sampler) is not None:
                await self._release([sampler])

    async def _ended(self, session: str, tenant: str) -> bool:
        try:
            found = await self._store.read(lambda store: SessionTable(store.database).get(tenant, session))
        except ApiError as error:
            if error.status != 404:
                raise
            return True
        return bool(found.finished) or self._now() - found.seen > GONE_SECONDS
