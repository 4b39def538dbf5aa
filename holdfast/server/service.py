"""Generation: turns a parsed request into the deltas of its choices, through admission, tokenizing and the engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from holdfast.cluster.fleet import NoReplica
from holdfast.cluster.replicas import ReplicaLost, Replicas
from holdfast.core.contract import NO_CONTRACT, ContractRefused
from holdfast.core.pause import Pause
from holdfast.core.types import (
    ALONE,
    BATCH_CLASS,
    MAX_DEADLINE,
    MAX_SEED,
    FinishReason,
    SamplingParams,
    ThinkingBudget,
    TokenLogprobs,
    UserBatch,
)
from holdfast.engine.client.app_group import AppGroup
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineAsleep, EngineConnection, EngineDead, QueueFull
from holdfast.engine.client.stream import Adoption, Delta, Timings
from holdfast.lm.limits import CONTEXT_LENGTH_EXCEEDED, RequestRefused
from holdfast.server.bad_words import word_tokens
from holdfast.server.config import ServerConfig
from holdfast.server.contracts import contract_of, contract_refused
from holdfast.server.default_contracts import DefaultContracts
from holdfast.server.endings import Answered, Ending
from holdfast.server.fingerprint import system_fingerprint
from holdfast.server.formats.registry import AnswerFormat, Reading
from holdfast.server.logprobs import echoed
from holdfast.server.metrics import Metrics
from holdfast.server.pauses import BATCH, BRANCH, PERSON
from holdfast.server.protocol import ApiError, ChatRequest, CompletionRequest, SampledRequest, invalid
from holdfast.server.replies import Reply, RequestUsage, Shape, Written
from holdfast.server.time_spent import current, spending
from holdfast.server.tools import chat_toolset
from holdfast.server.truncation import Truncation

log = logging.getLogger("holdfast.server")
T = TypeVar("T")
Shaped = TypeVar("Shaped", bound=Shape)
Sampled = TypeVar("Sampled", bound=SampledRequest)
AnyEngine = EngineConnection[Any, Any] | AppGroup | Replicas
"""An engine of a server, or several with the interface of one."""

REPLICA_LOST = "replica_lost"
"""Error code of a request whose replica has ended and that no other replica can continue."""
HIDDEN = "tinker:"
"""Prefix of the names of adapters that belong to sampling sessions. No list shows them."""
LARGE = 1 << 18
"""Number of characters or bytes from which a text counts as large. Tokenizing 8 MB may take 10 s and 1.5 GB."""
SMALL_WORKERS = 2
"""Number of threads that tokenize small texts.

Large texts share a separate thread. This bounds their memory, and they cannot delay small texts. Small chats have a
thread of their own, because a chat template renders one chat at a time and may take seconds.
"""


class Admission:
    """Counts the choices in progress. Refuses new ones beyond the limit, before any work is done for them."""

    def __init__(self, limit: int, tenant_limit: int | None = None, unit: str = "choices") -> None:
        """`unit` is the name of the counted things in error messages."""
        self.unit = unit
        self.limit = limit
        """Maximum number of choices in progress, whether they run or wait."""
        self.tenant_limit = limit if tenant_limit is None else tenant_limit
        """Maximum number of choices in progress per tenant."""
        self.in_progress = 0
        self.by_tenant: Counter[str] = Counter()
        """Number of choices in progress by tenant. A tenant without choices in progress has no entry."""
        self.closing = False
        """Whether the server will end soon. Requests are admitted until it drains."""
        self.draining = False
        self.idle = asyncio.Event()
        """Set while no choice is in progress."""
        self.idle.set()

    def leave(self) -> None:
        """Let health checks say that the server drains. Requests are still admitted."""
        self.closing = True

    def check(self, choices: int, tenant: str) -> None:
        """Raises ApiError: 503 while draining or full, 429 beyond the tenant's limit, 400 if they can never fit."""
        if self.draining:
            reason = "the server is shutting down and takes no new requests; try another one"
            raise ApiError(reason, status=503, code="shutting_down", retry_after=5)
        if choices > self.tenant_limit:
            reason = f"the request asks for {choices} choices (n times prompts); at most {self.tenant_limit} are taken"
            raise invalid(reason, "n")
        if self.in_progress + choices > self.limit:
            raise queue_full(self.limit)
        if self.by_tenant[tenant] + choices > self.tenant_limit:
            reason = (
                f"this API key has {self.by_tenant[tenant]} {self.unit} in progress and asks for {choices} more; "
                f"at most {self.tenant_limit} are taken; try again in a moment"
            )
            raise ApiError(reason, status=429, code="rate_limit_exceeded", retry_after=1)

    @contextmanager
    def admit(self, choices: int, tenant: str) -> Iterator[None]:
        """Count the choices as in progress while the context lasts. Raises ApiError like `check`."""
        self.check(choices, tenant)
        self.in_progress += choices
        self.by_tenant[tenant] += choices
        self.idle.clear()
        try:
            yield
        finally:
            self.in_progress -= choices
            self.by_tenant[tenant] -= choices
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]
            if not self.in_progress:
                self.idle.set()


class Lane:
    """State that requests of one kind share: admission, places in the engine's queue, and priority."""

    def __init__(
        self,
        admission: Admission,
        places: Sequence[asyncio.Semaphore],
        *,
        priority: int | None = None,
        deadline: float | None = None,
        workers: ThreadPoolExecutor | None = None,
        timed: bool = True,
        pause: str = "",
    ) -> None:
        """`priority` and `deadline` override those of each request.

        `pause` is the kind of the pause after each answer; empty: the answer says it.

        `workers` tokenize instead of the service's threads. Only `timed` requests count in the latency metrics.
        """
        self.admission = admission
        self.places = places
        """Semaphores. Each choice holds one place of each until its first output."""
        self.priority = priority
        self.deadline = deadline
        self.workers = workers
        self.timed = timed
        self.pause = pause


class Service:
    """State that all routes of one server share."""

    def __init__(self, client: EngineClient | Replicas, config: ServerConfig, metrics: Metrics | None = None) -> None:
        self.client = client
        self.config = config
        self.metrics = metrics or Metrics(client.info.model)
        client.on_steps = self.metrics.steps
        sequences, waiting = client.info.max_sequences, client.info.max_waiting
        self.admission = Admission(sequences + waiting, sequences + int(config.share * waiting))
        self.unstarted = asyncio.Semaphore(waiting)
        """Places for choices that were sent to the engine and have no output yet.

        The engine refuses more than this number, even when it is idle.
        """
        self.contracts = DefaultContracts.read(config.contract)
        """The contracts of requests that ask for none."""
        self.lane = Lane(self.admission, [self.unstarted])
        """Lane of requests that arrive over HTTP."""
        most = max(2 * sequences, config.max_choices)
        places = asyncio.Semaphore(max(1, min(sequences, waiting // 2)))
        self.batch_lane = Lane(
            Admission(most),
            [places, self.unstarted],
            priority=BATCH_CLASS,
            deadline=MAX_DEADLINE,
            workers=ThreadPoolExecutor(1, "holdfast-batch-text"),
            timed=False,
            pause=BATCH,
        )
        """Lane of batch lines.

        Batch lines have their own admission and thread, so they cannot take a chat's place or delay its tokenizing.
        They hold at most half of the engine's queue.
        """
        self.tuned: dict[str, tuple[str, str]] = {}
        """Tenant and job by adapter name, for adapters that tuning jobs wrote. Only that tenant may use them."""
        self.own: dict[str, str] = {}
        """Tenant by adapter name, for the adapters that a tenant's key loaded. Only that tenant may use the adapter."""
        self.loading: set[str] = set()
        """Names of adapters that are being loaded."""
        self.truncation = Truncation(client.text, client.info.max_model_len)
        self.format = AnswerFormat.find(client.text, config.tool_call_parser, config.reasoning_parser)
        """Format of the model's answers."""
        self.answered = Answered()
        """Recent answers, which later requests may replace."""
        self.started_at = int(time.time())
        self._small = ThreadPoolExecutor(SMALL_WORKERS, "holdfast-text")
        self._chats = ThreadPoolExecutor(1, "holdfast-chat-text")
        self._large = ThreadPoolExecutor(1, "holdfast-large-text")

    async def off_loop(self, size: int, work: Callable[[], T], *, renders: bool = False, lane: Lane | None = None) -> T:
        """Run work in a thread, outside the event loop. `size` is the length of its text in characters or bytes.

        `renders` means that the work calls the chat template.
        """
        workers = self._large if size >= LARGE else self._chats if renders else self._small
        chosen = (lane and lane.workers) or workers
        return await asyncio.get_running_loop().run_in_executor(chosen, work)

    def models(self, tenant: str) -> list[str]:
        """Return the names that a tenant may use as `model`: the model's names, then those of the tenant's adapters.

        Adapters of sampling sessions are left out.
        """
        shown = (name for name in self.client.adapters if not name.startswith(HIDDEN) and self._allowed(name, tenant))
        return [*self.client.names, *shown]

    def check_model(self, name: str, tenant: str) -> None:
        """Raises ApiError: 404 if this tenant has no such model or adapter, 503 while the adapter is being loaded."""
        known = name in self.client.names or name in self.client.adapters
        if name in self.loading and self._allowed(name, tenant):
            reason = f"the adapter {name} is being loaded; try again in a moment"
            raise ApiError(reason, status=503, code="adapter_loading", retry_after=1)
        if not known or not self._allowed(name, tenant):
            raise unknown_model(name, self.client.info.model)

    async def check_awake(self) -> None:
        """Raises ApiError 503 while the engine sleeps, for a request that is accepted before the engine has it."""
        with suppress(TimeoutError):  # The request will find out.
            if await self.is_sleeping():
                raise asleep()

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps, falls asleep or wakes up. Raises ApiError if it has ended, and TimeoutError."""
        client = self.client
        if isinstance(client, Replicas) or not client.config.enable_sleep_mode:
            return False
        try:
            return await client.is_sleeping()
        except EngineDead as error:
            raise engine_dead(error) from None

    def adapter_of(self, name: str, tenant: str) -> str:
        """Return the adapter that a request names as its `model`; "" for the model itself. Raises ApiError."""
        self.check_model(name, tenant)
        return name if name in self.client.adapters else ""

    def _allowed(self, name: str, tenant: str) -> bool:
        if name in self.tuned:
            return self.tuned[name][0] == tenant
        return self.own.get(name, tenant) == tenant

    def fingerprint(self, name: str) -> str:
        """Return OpenAI's `system_fingerprint` of a model or adapter. Equal ones answer alike."""
        client, adapters = self.client, self.client.adapters
        content = adapters[name].id if name in adapters else ""
        return system_fingerprint(client.info, client.config, client.weights, content)

    def may_change(self, adapter: str, tenant: str, *, all_adapters: bool) -> bool:
        """Whether a key may unload or replace a loaded adapter. Keys for `all_adapters` may change each."""
        return all_adapters or self.own.get(adapter) == tenant

    def belongs(self, adapter: str, tenant: str, *, all_adapters: bool) -> None:
        """Record which tenant owns a loaded adapter. If a key for `all_adapters` loaded it, all tenants may use it."""
        if not all_adapters:
            self.own[adapter] = tenant
        else:
            self.own.pop(adapter, None)

    def settled(self, wanted: Sampled, lane: Lane | None = None) -> Sampled:
        """Fill in the model's sampling defaults. Reset the service tier if this server uses no priorities."""
        wanted = wanted.with_defaults(self.client.generation.sampling)
        if self.client.config.order == "priority" and (lane or self.lane).priority is None:
            return wanted
        return wanted if wanted.service_tier is None else wanted.changed(service_tier="default")

    def seeded(self, wanted: Sampled) -> Sampled:
        """Give a request that draws a seed, so that each server draws the same."""
        if wanted.seed is not None and wanted.seed >= 0:
            return wanted
        return wanted.changed(seed=secrets.randbelow(MAX_SEED + 1))

    def answer(
        self,
        wanted: ChatRequest | CompletionRequest,
        tenant: str,
        lane: Lane | None = None,
        name: str | None = None,
        batch: str = "",
    ) -> Answer:
        """Prepare an answer, which runs when it is iterated. Raises ApiError for errors that are known before it runs.

        `name` is the prefix of the answer's request ids in the engine, and `batch` the batch job that it is a line of.
        """
        self.check_model(wanted.model, tenant)
        wanted = self.settled(wanted, lane)
        # Prompts are checked here, and tokenized off the event loop after admission.
        text = self.client.text
        most = self.client.info.max_model_len if wanted.truncate_prompt_tokens is None else None
        if isinstance(wanted, ChatRequest):
            messages = wanted.conversation()
            reading = Reading(self.format, chat_toolset(wanted), wanted.template_options, wanted.prompt_end)
            special = wanted.add_special_tokens
            if wanted.documents and re.search(r"\bdocuments\b", text.template or "") is None:
                reason = "this model's chat template uses no documents; put them into a message"
                raise invalid(reason, "documents", "unsupported_parameter")
            size = sum(len(message["content"]) for message in messages)
            size += sum(len(part) for document in wanted.documents for part in document.values())

            def encode_chat(messages: Sequence[dict[str, Any]]) -> list[int]:
                return text.encode(reading.render(text, messages), add_special_tokens=special, most=most)

            def render() -> list[list[int]]:
                if wanted.truncation == "auto":
                    fit, most_tokens = self.truncation.compose, wanted.most_tokens
                    return [fit(messages, most_tokens, encode_chat, reading.toolset)]
                return [encode_chat(messages)]

            def begin() -> Awaitable[list[list[int]]]:
                return self.off_loop(size, render, renders=True, lane=lane)

            return Answer(self, wanted, tenant, begin, reading, 1, lane, name, batch)
        prompts = wanted.prompts()
        size = sum(map(len, prompts))

        def encode() -> list[list[int]]:
            special = wanted.add_special_tokens
            return [
                text.encode(prompt, add_special_tokens=special, most=most) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]

        reading = Reading(self.format.unread, None, {})
        answer = Answer(
            self,
            wanted,
            tenant,
            lambda: self.off_loop(size, encode, lane=lane),
            reading,
            len(prompts),
            lane,
            name,
            batch,
        )
        answer.given = prompts
        return answer


def batch_of_choices(count: int, places: int) -> UserBatch:
    """The batch of one request's choices. They come together if the engine's queue has `places` for all of them."""
    return ALONE if count == 1 else UserBatch(uuid.uuid4().hex, count if count <= places else 1)


class Answer:
    """One HTTP request in progress: yields the deltas of its choices, and counts its tokens."""

    def __init__(
        self,
        service: Service,
        wanted: SampledRequest,
        tenant: str,
        encode: Callable[[], Awaitable[Sequence[Sequence[int]]]],
        reading: Reading,
        num_prompts: int = 1,
        lane: Lane | None = None,
        name: str | None = None,
        batch: str = "",
    ) -> None:
        """`encode` returns the prompts' tokens, and is called after admission. `reading` parses the answers.

        `batch` is the id of the batch job that the request is a line of; empty: none.
        """
        self.service = service
        self.lane = lane or service.lane
        self.name = name
        self._numbers = itertools.count()
        self.wanted = wanted
        self.tenant = tenant
        self.encode = encode
        self.reading = reading
        self.num_choices = wanted.candidates * num_prompts
        self.batch = UserBatch(batch) if batch else batch_of_choices(self.num_choices, service.client.info.max_waiting)
        """The batch that its choices are sent in: that of the batch job as its lines come, or of this request alone."""
        self.arrival = time.monotonic()
        self.most_tokens = wanted.most_tokens
        default = NO_CONTRACT if lane is not None else service.contracts.of(tenant, wanted.priority_class)
        self.contract = contract_of(wanted, default)
        """The times that each choice asks to be promised. Only requests over HTTP have the server's defaults."""
        self.given: Sequence[str | Sequence[int]] = ()
        """Prompts as the client gave them, for an answer that echoes them."""
        self.usage = RequestUsage(wanted=wanted)
        """Token counts so far."""
        self.goes_on = False
        """Whether another answer to the same HTTP request follows this one."""
        self.conversation = ""
        """Id of the stored conversation that the request continues; empty if there is none."""
        self.prompts: Sequence[Sequence[int]] = ()
        """Tokens of the prompts. Empty until they are tokenized."""
        self.bad_words: tuple[tuple[int, ...], ...] = ()
        """Token sequences that the answer may not have. Empty until the prompts are tokenized."""
        self.sent = False
        """Whether any choice was sent to the engine."""
        self.may_be_cut = False
        """Whether what there is of a choice is an answer, too, when the engine falls asleep before its end."""
        self._adapter = ""
        """The version of its adapter that all choices use, a content id; empty: none."""
        self._timings: Timings | None = None
        """Times of the choice that ended last; None before the first one ends."""
        self._placed = 0.0
        """Longest time in seconds that a choice has waited for a place in the engine's queue."""
        self.id = ""
        """Id by which later requests may name this answer; empty: none can."""
        self.note = b""
        """Data with which another server can continue the answer; empty: none can."""
        self.adopted: Adoption | None = None
        """The request of an ended server that this answer continues, if an engine holds it."""

    def hold(self, note: bytes, adopted: Adoption | None) -> None:
        """Let another server continue the answer by a note, and continue that of an ended server."""
        self.note, self.adopted = note, adopted

    def shape(self, kind: Callable[..., Shaped], request_id: str = "") -> Shaped:
        """Return the wire format of this answer. `request_id` is the id in the request's header; empty: none.

        It says why a choice has ended, so one that the engine cuts is shown as far as it came. A line of a batch is
        asked for again instead.
        """
        service = self.service
        self.may_be_cut = self.lane is service.lane
        return kind(
            self.wanted,
            service.client.text,
            self.reading,
            request_id=request_id,
            fingerprint=service.fingerprint(self.wanted.model),
            prompt_of=lambda choice: self.prompts[choice // self.wanted.candidates],
        )

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (choice, delta) pairs as they come. Closing the generator aborts running choices. Raises ApiError."""
        config = self.service.config
        if self.num_choices > config.max_choices:
            reason = f"the request asks for {self.num_choices} choices (n times prompts); at most {config.max_choices}"
            raise invalid(reason, "n")
        with self.lane.admission.admit(self.num_choices, self.tenant):
            with spending("text"):
                self.prompts = await self._prompts()
            held = ExitStack()
            try:
                adapter = self.service.adapter_of(self.wanted.model, self.tenant)
                self._adapter = held.enter_context(self.service.client.hold_adapter(adapter))
                choices = [self._choices(number, prompt) for number, prompt in enumerate(self.prompts)]
                async with aclosing(side_by_side(choices)) as merged:
                    async for choice, delta in merged:
                        yield choice, delta
                if not self.goes_on:
                    self.ended("ok")
                    if self.lane.timed:
                        self.service.metrics.asked(self.wanted.n, len(self.prompts))
            except (asyncio.CancelledError, GeneratorExit):
                self.ended("left")
                raise
            except QueueFull:
                raise queue_full(self.lane.admission.limit) from None
            except EngineAsleep:
                raise asleep() from None
            except EngineDead as error:
                raise engine_dead(error, draining=self.lane.admission.draining) from None
            except RequestRefused as error:
                raise refused(error, self.wanted, self.service.client) from None
            except ContractRefused as error:
                raise contract_refused(error.refusal) from None
            finally:
                held.close()
                self._note_time()

    def _note_time(self) -> None:
        """Add the time of the choice that ended last to the parts of the request's time."""
        spent = current()
        spent.add("place", self._placed)
        if self._timings is not None:
            # With a contract, the engine's client counts from the request's arrival.
            before = spent.seconds["text"] + self._placed if self.contract else 0.0
            spent.add_engine(self._timings, before)
        self._placed, self._timings = 0.0, None

    async def whole(self, shape: Shape) -> Reply:
        """Collect all choices, and return the whole answer. Raises ApiError."""
        written = [Written() for _ in range(self.num_choices)]
        async with aclosing(self.deltas()) as deltas:
            async for choice, delta in deltas:
                written[choice].add(delta, shape.read(choice, delta))
        for number, each in enumerate(written):
            each.prompt = self.prompts[number // self.wanted.candidates]
        return shape.whole(self._best(written), self.usage)

    def _best(self, written: list[Written]) -> list[Written]:
        """Return the `n` candidates of each prompt that have the highest log probability per token, the best first."""
        wanted, count = self.wanted, self.wanted.candidates
        if count == wanted.n:
            return written
        best: list[Written] = []
        for start in range(0, len(written), count):
            ranked = sorted(written[start : start + count], key=lambda choice: choice.likelihood, reverse=True)
            best += ranked[: wanted.n]
        if wanted.most_logprobs is None:
            for choice in best:
                choice.tokens.clear()
        return best

    def ended(self, outcome: str) -> None:
        """Count an ended HTTP request by its outcome. Batch lines are left out, because their batch counts them."""
        if self.lane.timed:
            self.service.metrics.outcome(self.wanted.route, outcome)

    async def _prompts(self) -> Sequence[Sequence[int]]:
        try:
            prompts = await self.encode()
        except RequestRefused as error:  # The prompt is too long for any tokenization.
            raise refused(error, self.wanted, self.service.client) from None
        except ValueError as error:  # The chat template refuses these messages.
            raise invalid(str(error), self.wanted.prompt_param) from None
        if (kept := self.wanted.kept_tokens(self.service.client.info.max_model_len)) is not None:
            part = slice(kept) if self.wanted.keeps_start else slice(-kept, None)
            if self.given:
                pairs = zip(self.given, prompts, strict=True)
                self.given = [prompt[part] if len(prompt) > kept else given for given, prompt in pairs]
            prompts = [prompt[part] for prompt in prompts]
        for prompt in prompts:
            check_length(len(prompt), self.service.client, self.wanted)
            self.usage.prompt_tokens += len(prompt)
        if words := self.wanted.bad_words:
            text, size = self.service.client.text, sum(map(len, words))
            self.bad_words = await self.service.off_loop(size, lambda: word_tokens(text, words), lane=self.lane)
        return prompts

    def _choices(self, number: int, prompt: Sequence[int]) -> list[AsyncGenerator[Delta, None]]:
        wanted, most = self.wanted, self.most_tokens
        # The engine always writes at least one token.
        most = self.service.client.info.max_model_len - len(prompt) if most is None else max(most, 1)
        limits = (wanted.fitting_tokens, self.service.client.generation.max_new_tokens)
        most = min([most, *(limit for limit in limits if limit is not None)])
        try:
            first = self.reading.constrained(wanted.sampling(0, most))
            others = range(1, wanted.candidates)
            params = [first, *(replace(wanted.sampling(choice, most), grammar=first.grammar) for choice in others)]
            if self.bad_words:
                params = [replace(each, bad_words=self.bad_words) for each in params]
            if (thinking := self._thinking(prompt)) is not None:
                params = [replace(each, thinking=thinking) for each in params]
        except ValueError as error:  # The grammar of the tools is too long.
            raise invalid(str(error), "tools") from None
        choices = [self._choice(prompt, each, choice) for choice, each in enumerate(params)]
        return [self._echoing(number, prompt, choice) for choice in choices] if wanted.echoes else choices

    def _thinking(self, prompt: Sequence[int]) -> ThinkingBudget | None:
        """Return the limit of the reasoning after a prompt; None if there is none. Raises ApiError."""
        tokens = self.wanted.thinking_token_budget
        if tokens is None or tokens == -1:
            return None
        try:
            return self.reading.thinking(tokens, prompt)
        except ValueError as error:
            if self.wanted.may_ignore_budget:
                return None
            reason = f"thinking_token_budget is {tokens}, and {error}; leave it out, or give -1 for no limit"
            raise invalid(reason, "thinking_token_budget", "unsupported_parameter") from None

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens whose names are text: those that the reading needs, or all if the client asks for them."""
        if self.wanted.skip_special_tokens:
            return self.reading.shown
        return self.reading.shown | self.service.client.text.special

    async def _echoing(
        self, number: int, prompt: Sequence[int], choice: AsyncGenerator[Delta, None]
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of a choice with the prompt in front of the first one."""
        given, begun, of_prompt = self.given[number], False, list[TokenLogprobs]()
        async with aclosing(choice) as deltas:
            async for delta in deltas:
                if begun:
                    yield delta
                    continue
                of_prompt += delta.prompt_logprobs
                if not (delta.tokens or delta.finish_reason):  # More log probabilities of the prompt will follow.
                    yield delta
                    continue
                begun = True
                text = (
                    given
                    if isinstance(given, str)
                    else self.service.client.text.decode(given, skip_special_tokens=False)
                )
                if self.most_tokens == 0:
                    delta = replace(delta, text="", tokens=(), logprobs=(), finish_reason=FinishReason.LENGTH)
                most = self.wanted.most_logprobs
                yield echoed(prompt, text, of_prompt if most is not None else (), delta, most or 0)

    async def _choice(self, prompt: Sequence[int], params: SamplingParams, number: int) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of choice `number` of a prompt. Records its metrics."""
        metrics, wanted, lane = self.service.metrics, self.wanted, self.lane
        last: float | None = None
        own = None if wanted.deadline_ms is None else wanted.deadline_ms / 1000
        request_id, ending = self._request_id() or uuid.uuid4().hex, self._ending(number)
        self.supersede(wanted.superseded)
        if self.id:
            self.service.answered.add(self.tenant, self.id, request_id)
        async with AsyncExitStack() as started:
            asked = time.monotonic()
            for place in lane.places:
                await started.enter_async_context(place)
            self._placed = max(self._placed, time.monotonic() - asked)
            stream = self.service.client.stream(
                prompt,
                params,
                request_id=request_id,
                priority=wanted.priority_class if lane.priority is None else lane.priority,
                tenant=self.tenant,
                adapter=self._adapter,
                deadline=own if lane.deadline is None else lane.deadline,
                shown=self.shown,
                conversation=self.conversation,
                batch=self.batch,
                contract=self.contract,
                arrival=self.arrival if self.contract else 0.0,
                note=self.note,
                adopted=self.adopted,
                salt=wanted.cache_salt or "",
            )
            self.sent = True
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    if last is None:
                        await started.aclose()
                    now = time.monotonic()
                    ending.read(delta)
                    if delta.tokens:
                        if lane.timed:
                            wait, since = (metrics.ttft, self.arrival) if last is None else (metrics.tbt, last)
                            wait.observe(now - since)
                        if self.usage.ttft is None:
                            self.usage.ttft = now - self.arrival
                        last = now
                        metrics.generated_tokens.inc(len(delta.tokens))
                        self.usage.completion_tokens += 0 if self.most_tokens == 0 else len(delta.tokens)
                    if delta.usage is not None:
                        self._timings = delta.timings or self._timings
                        self.service.client.note_pause(request_id, ending.pause())
                        if number == 0:
                            self.usage.cached_tokens += delta.usage.cached_tokens
                            self.usage.add_tiers(delta.usage.cached_by_tier)
                        self.usage.finish_reasons.add(delta.finish_reason or "")
                        if self.usage.queued is None and delta.timings is not None:
                            self.usage.queued = delta.timings.queued
                            self.usage.pace = delta.timings.tokens_per_second
                        metrics.finished.labels(delta.finish_reason or "").inc()
                        metrics.prompt_tokens.inc(len(prompt))
                        metrics.cached_tokens.inc(delta.usage.cached_tokens)
                        if lane.timed:
                            if delta.timings is not None:
                                metrics.choice(delta.timings, len(prompt), params.max_tokens)
                            metrics.e2e.observe(now - self.arrival)
                    if delta.finish_reason is FinishReason.ABORT and not self.may_be_cut:
                        raise EngineAsleep
                    yield delta

    def _ending(self, number: int) -> Ending:
        """Watch choice `number` of a prompt. A conversation goes on from the first; the others are its branches."""
        wanted, kind = self.wanted, self.lane.pause or (BRANCH if number else "")
        expected = None if wanted.expected_pause_ms is None else wanted.expected_pause_ms / 1000
        return Ending(self.reading, expected, wanted.kept_for, kind)

    def supersede(self, answers: Sequence[str]) -> None:
        """Let the engine know that no turn will follow these earlier answers. Ids that are not known are ignored.

        The kind is not that of a branch: what came before the answer is still needed.
        """
        for answer in answers:
            for request_id in self.service.answered.find(self.tenant, answer):
                self.service.client.note_pause(request_id, Pause(PERSON, superseded=True))

    def _request_id(self) -> str | None:
        """Return the next request id for the engine; None if the answer has no name."""
        number = next(self._numbers)
        return self.name and (f"{self.name}/{number}" if number else self.name)


async def side_by_side(
    groups: Sequence[Sequence[AsyncGenerator[Delta, None]]],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Merge streams, as their deltas arrive. Streams are numbered across all groups.

    The streams of a group have the same prompt. The first one starts alone. The others start at its first delta, when
    the blocks of the prompt are cached.
    """
    if len(groups) == 1 and len(groups[0]) == 1:
        async for delta in groups[0][0]:
            yield 0, delta
        return
    merged: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[Delta, None], ready: asyncio.Event, first: bool) -> None:
        if not first:
            await ready.wait()
        try:
            async with aclosing(stream):
                async for delta in stream:
                    merged.put_nowait((index, delta))
                    ready.set()
        finally:
            ready.set()

    def ended(task: asyncio.Task[None]) -> None:
        merged.put_nowait(None if task.cancelled() else task.exception())

    tasks: list[asyncio.Task[None]] = []
    for group in groups:
        ready = asyncio.Event()
        for number, stream in enumerate(group):
            tasks.append(asyncio.create_task(pump(len(tasks), stream, ready, first=number == 0)))
            tasks[-1].add_done_callback(ended)
    running = len(tasks)
    try:
        while running:
            item = await merged.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_length(prompt_tokens: int, client: EngineClient | Replicas, wanted: SampledRequest) -> None:
    """Raises ApiError if the prompt and the requested answer do not fit into the context.

    The message keeps OpenAI's wording and numbers, because clients search for them.
    """
    limit, answer, what = client.info.max_model_len, wanted.most_tokens, wanted.prompt_param
    if prompt_tokens >= limit:
        raise context_exceeded(
            limit, f"your {what} resulted in {prompt_tokens} tokens. Please reduce the length of the {what}"
        )
    if answer is not None and prompt_tokens + answer > limit:
        raise context_exceeded(
            limit,
            f"you requested {prompt_tokens + answer} tokens ({prompt_tokens} in the {what}, {answer} in the "
            f"completion). Please reduce the length of the {what} or {wanted.max_tokens_param} "
            f"({limit - prompt_tokens} at most)",
            wanted.max_tokens_param,
        )
    try:
        client.info.limits.check_length(prompt_tokens)
    except RequestRefused as error:
        raise refused(error, wanted, client) from None


def context_exceeded(limit: int, why: str, param: str | None = None) -> ApiError:
    """Return the error for a request that does not fit into the context, in OpenAI's wording."""
    reason = f"This model's maximum context length is {limit} tokens. However, {why}"
    return invalid(reason, param, CONTEXT_LENGTH_EXCEEDED)


def refused(error: RequestRefused, wanted: SampledRequest, client: EngineClient | Replicas) -> ApiError:
    """Convert the engine's refusal to OpenAI's error, with the parameter names of the request's route.

    The error for a prompt that is too long names no parameter, as in OpenAI's API.
    """
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        return context_exceeded(client.info.max_model_len, str(error))
    names = {
        "prompt": wanted.prompt_param,
        "max_tokens": wanted.max_tokens_param,
        "grammar": wanted.grammar_param or "tools",
    }
    param = names.get(error.param, error.param)
    return invalid(str(error), param, error.code)


def queue_full(limit: int) -> ApiError:
    """Return the error for a full queue."""
    reason = f"the queue is full ({limit} requests); try again in a moment"
    return ApiError(reason, status=503, code="queue_full", retry_after=1)


def asleep() -> ApiError:
    """Return the error for an engine that sleeps."""
    return ApiError("the engine sleeps; try again when it is awake", status=503, code="engine_asleep", retry_after=5)


async def trouble(admissions: Sequence[Admission], clients: Sequence[AnyEngine], seconds: float) -> str | None:
    """Return the reason why requests are not accepted now; None if every engine answers within `seconds`."""
    if any(admission.closing or admission.draining for admission in admissions):
        return "draining"
    for answer in await asyncio.gather(*(client.health(timeout=seconds) for client in clients), return_exceptions=True):
        match answer:
            case NoReplica():
                return "no replica serves"
            case EngineDead():
                return "engine dead"
            case TimeoutError():
                return "engine hangs"
            case BaseException():
                raise answer
    return None


def engine_dead(error: EngineDead | None = None, *, draining: bool = False) -> ApiError:
    """Return the error for an engine that has ended. The reason is only in the server's log.

    The client may retry if another replica could serve the request. `draining`: the server leaves, and has ended its
    engine itself.
    """
    match error:
        case ReplicaLost():
            return ApiError(str(error), status=503, code=REPLICA_LOST)
        case NoReplica():
            return ApiError(str(error), status=503, code="no_replica", retry_after=5)
    what = "this request was not answered in time" if draining else "the engine has stopped"
    return ApiError(f"{what}; the server is going down", status=503, code="engine_dead")


def internal(error: Exception) -> ApiError:
    """Log an unexpected exception with its traceback, and return the error for the client."""
    log.error("a request failed", exc_info=error)
    return ApiError("the server failed on this request", status=500, code="internal_error")


def unknown_model(name: str, served: str) -> ApiError:
    """Return the error for a model that is not served."""
    reason = f"the model {name[:128]!r} is not served here; this server has {served!r}"
    return ApiError(reason, status=404, param="model", code="model_not_found")
