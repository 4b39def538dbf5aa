"""Long random histories of conversations through the real service, store, client and engine, on a real small model.

The events are turns, branches, edits, deletions, background responses, clients that leave during an answer, another
tenant's requests, forced evictions, restarts and kills, on tiers that are far too small. After every event: each answer
equals the one of Transformers' own module without any cache, no block of either tier is lost or owned twice, and the
store holds exactly the turns that were reported complete.

    HOLDFAST_HISTORIES=2000 python -m pytest tests/server/conversations/test_histories.py

runs that many histories, different ones at each call; with --hypothesis-seed, those from that seed on. A seed gives the
same events on every machine. So they are drawn by Python's own generator: Hypothesis also draws constants that it finds
in the code of the modules that happen to be loaded.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import msgspec
import pytest
import torch
from sqlalchemy import Row, select, update

from holdfast.core.types import SamplingParams
from holdfast.engine.client import text as client_text
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.spelled import BREAK
from holdfast.engine.client.template import ChatTemplate
from holdfast.engine.messages import EngineInfo
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule
from holdfast.lm.models.base import Model
from holdfast.lm.models.loader import load
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import MemoryMeasurement, StepPlan
from holdfast.loop.loop import Loop
from holdfast.server.config import ServerConfig
from holdfast.server.conversations import database
from holdfast.server.conversations import store as store_module
from holdfast.server.conversations.database import leases
from holdfast.server.conversations.items import new_id, new_item
from holdfast.server.conversations.prompt import Prompt
from holdfast.server.conversations.protocol import ResponseRequest
from holdfast.server.conversations.service import RUNNING, Background, Responses, Writing
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.values import GOOD, Bounds, NotFound
from holdfast.server.protocol import ApiError, parse
from holdfast.server.service import Service
from tests.checkpoints import VOCAB, make
from tests.in_process import AtOnce, Engine, settle, start
from tests.invariants import check_scheduler
from tests.late_streams import LateStream
from tests.paged import allocated
from tests.tokenizers_made import byte_level

LONGEST, ROWS = 240, 4
FAST = Path("/dev/shm")
"""A file system in memory, where commits are fast."""
MOST_IN_PROGRESS = 6
MOST_STEPS = 2000
"""Far more steps than all turns in progress can need."""
TIE = 1e-3
"""Logits closer than this count as equal, because the two implementations add in different orders."""
TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"
HISTORIES = int(os.environ.get("HOLDFAST_HISTORIES", "0"))
STEPS = 50
"""Number of events of a history."""
AMPLE = Bounds(seconds=1e9, threads=100_000, bytes=1 << 40)
Said = list[tuple[str, str]]


class Reference:
    """Transformers' own module, which caches nothing between calls."""

    def __init__(self, directory: Path) -> None:
        self.module = make(directory, "Llama", max_position_embeddings=LONGEST, eos_token_id=1)
        self.seen: set[tuple[int, ...]] = set()

    @torch.inference_mode()
    def check(self, prompt: tuple[int, ...], answer: list[int]) -> None:
        """Raise AssertionError unless each token of the answer is the argmax after all tokens before it."""
        whole = (*prompt, *answer)
        if not answer or whole in self.seen:
            return
        logits = self.module(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1]
        given = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        wrong = (logits.max(dim=1).values - given > TIE).nonzero().flatten().tolist()
        assert not wrong, f"token {wrong[0]} of the answer to {len(prompt)} tokens is not the model's own: {answer}"
        self.seen.add(whole)


@cache
def checkpoint() -> tuple[Path, Reference, Model]:
    """A small random model with a byte tokenizer: its directory, Transformers' module, and our model."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-histories-"))
    reference = Reference(directory)
    byte_level().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory, reference, load(directory, device="cpu", dtype="float32")


class KeptTemplate(ChatTemplate):
    """A chat template whose process outlives the servers. Each of them would start another one, which takes longest."""

    def close(self) -> None:
        pass


@cache
def only_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> KeptTemplate:
    return KeptTemplate(source, dict(special_tokens))


def kept_template(source: str, special_tokens: Mapping[str, str]) -> KeptTemplate:
    return only_template(source, tuple(special_tokens.items()))


@dataclass(eq=False)
class Talk:
    """One turn from its client's view."""

    wanted: ResponseRequest
    said: Said
    """Messages of its prompt."""
    parent: Talk | None = None
    writing: Writing | None = None
    task: asyncio.Task[None] | None = None
    background: Background | None = None
    must_be_locked: bool = False
    may_conflict: bool = False
    """Whether its parent or conversation may have been deleted or edited while it was written."""
    edited: bool = False
    """Whether its conversation was certainly edited."""
    began_with: tuple[str, ...] = ()
    """The conversation's items when the turn began."""
    refusal: ApiError | None = None

    @property
    def conversation(self) -> str | None:
        return self.wanted.conversation_id

    @property
    def id(self) -> str:
        assert self.writing is not None
        return self.writing.id

    @property
    def left_while_it_was_stored(self) -> bool:
        """Whether the client left after the turn was stored and before it got the answer."""
        if self.task is None or self.writing is None or not self.writing.settled:
            return False
        return self.task.cancelled() if self.background is None else self.response["status"] in RUNNING

    @property
    def response(self) -> dict[str, Any]:
        assert self.writing is not None
        return self.writing.shape.response

    @property
    def answer(self) -> str:
        return "".join(part["text"] for item in self.response["output"] for part in item["content"])


class Watched(PagedExecutor):
    """An executor that records the plans it is given."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.computed: Counter[str] = Counter()
        """Number of tokens of each request computed before its first sampled one."""
        self.answering: set[str] = set()

    def submit(self, plan: StepPlan) -> None:
        seen = Histories.seen
        ranges = Counter(segment.sequence_id for segment in plan.segments).values()
        seen["holes"] += sum(count > 1 for count in ranges)
        seen["several holes of one sequence"] += sum(count > 2 for count in ranges)
        seen["arrivals under the computation"] += plan.copies.awaits == plan.step
        seen["arrivals beside other steps"] += bool(plan.copies.swap_in) and plan.copies.awaits < plan.step
        seen["steps that wait for room"] += not plan.segments
        for segment in plan.segments:
            if segment.sequence_id not in self.answering:
                self.computed[segment.sequence_id] += segment.length
                self.answering |= {segment.sequence_id} if segment.sampling else set()
        super().submit(plan)


Drawn = Callable[[random.Random], Any]
"""Draws an argument of an event."""


def event(weight: int, **arguments: Drawn) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a method as an event of a history, with its weight and its arguments."""

    def mark(method: Callable[..., None]) -> Callable[..., None]:
        method.weight, method.arguments = weight, arguments  # type: ignore[attr-defined]
        return method

    return mark


def integer(first: int, last: int) -> Drawn:
    return lambda draw: draw.randint(first, last)


def one_of(*values: Any) -> Drawn:
    return lambda draw: draw.choice(values)


def words(draw: random.Random) -> str:
    return "".join(draw.choice("ab é") for _ in range(draw.randint(1, 16)))


class Histories:
    """A server, and everything that its clients know of it."""

    seen: ClassVar[Counter[str]] = Counter()
    """Counts of cases in all histories, to show that the interesting ones occurred."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.runner = asyncio.Runner()
        self.directory, self.reference, self.model = checkpoint()
        self.folder = tempfile.TemporaryDirectory(prefix="holdfast-store-", dir=FAST if FAST.is_dir() else None)
        self.where = str(Path(self.folder.name) / "store.sqlite")
        self.in_progress: list[Talk] = []
        self.rivals: list[asyncio.Task[None]] = []
        self.stored: dict[str, Talk] = {}
        """Completed turns by id; they must stay complete."""
        self.deleted: set[str] = set()
        self.came_to_nothing: dict[str, str] = {}
        """Status of background responses that failed or were cancelled, by id."""
        self.items: dict[str, list[tuple[str, str, str]]] = {}
        """Id, role and text of each item, by conversation."""
        self.cached: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        """Numbers of cached tokens each time a prompt was sent, by prompt."""
        self.numbers = itertools.count()

    def run(self) -> None:
        """Run a whole history. An error names the events that led to it."""
        happened: list[str] = []
        try:
            self.begin()
            happened.append(f"begin {self.shape}")
            for _ in range(STEPS):
                name = self.draw.choice(EVENTS)
                method = getattr(self, name)
                arguments = {key: drawn(self.draw) for key, drawn in method.arguments.items()}
                happened.append(f"{name} {arguments}")
                method(**arguments)
                self.no_block_is_lost_or_owned_twice()
                self.the_store_holds_whole_turns_and_all_of_them()
                self.background_responses_and_conversations_are_as_their_clients_know()
        except BaseException as error:
            error.add_note("\n".join(["the history:", *happened]))
            raise
        finally:
            self.close()

    def begin(self) -> None:
        """Choose the sizes and rules of the server, and start it."""
        choose = self.draw.choice
        self.shape = {
            "block_size": choose((1, 2, 4, 8)),
            "device": choose((64, 120, 240, 240)),
            "host": choose((0, 0, 16, 120, 240, 400)),
            "chunk": choose((1, 1, 2)),
            "eviction": choose(("retention", "retention", "retention", "lru", "lru-conversation", "tail-first")),
            "costs": choose(range(1 << 16)),
            "steps_in_flight": choose((1, 2, 3)),
            "budget": choose((8, 24, 64)),
            "low_water": choose((0.25, 0.6, 1.0)),
            "late": choose((False, True)),
        }
        self.runner.run(self.boot())
        self.edit("make", 0)

    async def boot(self) -> None:
        """Start an engine and a server over the existing store."""
        asyncio.get_running_loop().set_default_executor(AtOnce())
        shape, spec = self.shape, self.model.spec
        size = shape["block_size"]
        blocks, places = shape["device"] // size, shape["host"] // size
        config = EngineConfig(
            model=str(self.directory), block_size=size, token_budget=shape["budget"], max_sequences=ROWS
        )
        device = allocated(self.model, config, blocks, places, make_stream=LateStream if shape["late"] else None)
        executor = self.executor = Watched(device.model, device.attention, device.memory)
        draw = random.Random(shape["costs"])
        costs = [10 ** draw.uniform(-3, 3) for _ in range(64)]  # In random order, so that holes appear anywhere.
        self.pool = BlockPool(
            blocks,
            size,
            rule=RetentionRule(
                EVICTIONS[shape["eviction"]], lambda at: costs[at % 64], chunk_blocks=shape["chunk"], block_size=size
            ),
            host_blocks=places,
            low_water=shape["low_water"],
        )
        self.scheduler = Scheduler(
            StallFree(shape["budget"]),
            PagedKind(self.pool),
            max_sequences=ROWS,
            max_model_len=blocks * size,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            headroom=0.0,
            sharing=True,
        )
        info = EngineInfo(
            model="m", precision="float32",
            memory=MemoryMeasurement("cpu", 1, 1, 1, 1, 1), num_blocks=blocks, block_size=size,
            token_budget=shape["budget"], max_model_len=blocks * size, max_sequences=ROWS,
            max_waiting=64, vocab_size=spec.vocab_size, started_in=0.0,
        )  # fmt: skip
        ticks = itertools.count()
        self.clock = lambda: float(next(ticks))
        loop = Loop(self.scheduler, executor, shape["steps_in_flight"], self.clock)
        self.engine = Engine(loop, info)
        with patch.object(client_text, "ChatTemplate", kept_template):
            self.client = await start(self.engine, config)
        self.store = Store.open(self.where, AMPLE)
        self.at_once = AtOnce()
        with (
            patch.object(store_module, "ThreadPoolExecutor", lambda **_: self.at_once),
            patch.object(store_module, "GroupWriter", lambda database: self.at_once),
        ):
            store = AsyncStore(self.store)
        service = Service(self.client, ServerConfig())
        service._small = service._chats = service._large = AtOnce()
        self.responses = Responses(service, store)

    # Events from clients

    @event(
        20,
        kind=one_of("new", "again", "branch", "branch", "conversation", "conversation"),
        which=integer(0, 1 << 10),
        text=words,
        most=integer(1, 20),
        mode=one_of("plain", "plain", "plain", "plain", "background", "not stored", "instructed"),
        lost=one_of(0, 0, 0.2, 0.4),
    )
    def talk(self, kind: str, which: int, text: str, most: int, mode: str, lost: float) -> None:
        """Begin a turn: in a new chain, repeating an earlier one, after any response, or in a conversation.

        First, the share `lost` of the idle state is dropped.
        """
        self.evict(lost)
        if len(self.in_progress) == MOST_IN_PROGRESS:
            return
        body: dict[str, Any] = {"model": "m", "input": text, "temperature": 0, "max_output_tokens": most}
        body |= {
            "background": {"background": True},
            "not stored": {"store": False},
            "instructed": {"instructions": "zz"},
        }.get(mode, {})
        parent, said = None, []
        visible = [talk for talk in self.stored.values() if talk.id not in self.deleted and talk.wanted.store]
        again = [talk for talk in visible if talk.parent in (None, *visible) and talk.conversation is None]
        if kind == "again" and again:
            earlier = again[-1 - which % len(again)]
            text = body["input"] = earlier.said[-1][1]
            parent, said = earlier.parent, earlier.said[:-1]
            body |= {} if parent is None else {"previous_response_id": parent.id}
        elif kind == "branch" and visible:
            parent = visible[-1 - which % len(visible)]
            body["previous_response_id"] = parent.id
            said = [*parent.said, ("assistant", parent.answer)]
            self.seen["branches"] += any(other.parent is parent for other in self.stored.values())
        elif kind == "conversation" and self.items:
            conversation = list(self.items)[which % len(self.items)]
            body["conversation"] = conversation
            said = [(role, words) for _, role, words in self.items[conversation]]
        wanted = parse(msgspec.json.encode(body), ResponseRequest)
        talk = Talk(wanted, [*said, ("user", text)], parent)
        talk.began_with = tuple(item for item, _, _ in self.items.get(talk.conversation or "", ()))
        talk.must_be_locked = any(talk.conversation == other.conversation is not None for other in self.in_progress)
        self.in_progress.append(talk)
        self.runner.run(self._begin(talk))

    async def _begin(self, talk: Talk) -> None:
        if talk.wanted.background:
            try:
                talk.background = await self.responses.start(talk.wanted, "")
            except ApiError as refusal:
                talk.refusal = refusal
            else:
                talk.writing, talk.task = talk.background.writing, talk.background.task
        else:
            talk.writing = self.responses.write(talk.wanted, "")
            talk.task = asyncio.create_task(listen(talk.writing, self.store))
        await self._settle()

    @event(4, which=integer(0, MOST_IN_PROGRESS), turns=integer(0, 20), work=integer(0, 3))
    def leave(self, which: int, turns: int, work: int) -> None:
        """Disconnect a client, or cancel a background response, at any moment of an answer."""
        if self.in_progress:
            self.runner.run(self._leave(self.in_progress[which % len(self.in_progress)], turns, work))

    async def _leave(self, talk: Talk, turns: int, work: int) -> None:
        for _ in range(work):
            self.engine.step()
        await settle(turns)
        if talk.background is not None:
            self.seen["cancelled"] += not talk.background.task.done()
            await self.responses.cancel("", talk.id)
        elif talk.task is not None:
            text = "".join(item["content"][0]["text"] for item in talk.writing.shape.output)
            self.seen["clients that left in mid-answer"] += not talk.task.done() and bool(text)
            talk.task.cancel()
        await self._settle()

    @event(1, which=integer(0, 1 << 10))
    def delete(self, which: int) -> None:
        """Delete a response, even if others build on it."""
        if not self.stored:
            return
        talk = list(self.stored.values())[which % len(self.stored)]
        for other in self.in_progress:
            other.may_conflict |= other.parent is talk or other.conversation is not None
        self.runner.run(self._delete(talk))
        if talk.wanted.store:
            self.deleted.add(talk.id)

    async def _delete(self, talk: Talk) -> None:
        try:
            await self.responses.delete("", talk.id)
        except ApiError as refusal:
            assert refusal.status == 404 and (talk.id in self.deleted or not talk.wanted.store)

    @event(4, what=one_of("make", "make", "add", "remove", "delete"), which=integer(0, 1 << 10))
    def edit(self, what: str, which: int) -> None:
        """Create, edit or delete a conversation through another server, where no lock applies."""
        new = new_item("user", f"by hand {which % 10}")
        entry = (new["id"], "user", f"by hand {which % 10}")
        if what == "make" or not self.items:
            id = new_id("conv")
            self.store.conversations.create("", id, {}, [new] if which % 2 else [])
            self.items[id] = [entry] if which % 2 else []
            return
        busy = [id for id in self.items if any(talk.conversation == id for talk in self.in_progress)]
        ids = busy if busy and which % 4 else list(self.items)
        id = ids[which % len(ids)]
        entries = self.items[id]
        if what == "add":
            self.store.conversations.add_items("", id, [new])
            entries.append(entry)
        elif what == "remove" and entries:
            gone = entries.pop(which % len(entries))
            self.store.conversations.delete_item("", id, gone[0])
        elif what == "delete":
            self.store.conversations.delete("", id)
            del self.items[id]
        else:
            return
        for talk in self.in_progress:
            talk.edited |= talk.conversation == id
            talk.may_conflict = True  # A chain kept only by this conversation may be deleted.
        self.seen["edits in mid-turn"] += any(talk.conversation == id for talk in self.in_progress)

    @event(2, length=integer(1, 110), copy=one_of(False, True))
    def rival(self, length: int, copy: bool) -> None:
        """Let another tenant use memory, sometimes for tokens that the first tenant has cached."""
        prompts = [talk.writing.prompt.tokens for talk in self.stored.values() if talk.writing is not None]
        prompt = (
            prompts[length % len(prompts)] if copy and prompts else [(7 * length + at) % VOCAB for at in range(length)]
        )
        self.runner.run(self._rival(prompt[: self.client.info.max_model_len - 8]))

    async def _rival(self, prompt: list[int]) -> None:
        tenant = f"rival {next(self.numbers)}"

        async def ask() -> None:
            stream = self.client.stream(prompt, SamplingParams(temperature=0, max_tokens=6), tenant=tenant)
            async for delta in stream:
                assert delta.usage is None or not delta.usage.cached_tokens, "another tenant's prefix was a hit"

        self.rivals.append(asyncio.create_task(ask()))
        await self._settle()

    # Events in the server

    @event(6, count=integer(1, 12))
    def work(self, count: int) -> None:
        """Run some steps."""
        self.runner.run(self._work(count))

    async def _work(self, count: int) -> None:
        for _ in range(MOST_STEPS):
            if not count or not self.engine.step():
                return
            count -= 1
            check_scheduler(self.scheduler)
            await self._settle()
        raise AssertionError(f"the turns in progress have not ended after {MOST_STEPS} steps")

    @event(8)
    def finish(self) -> None:
        """Run until nothing is left to do."""
        self.runner.run(self._work(-1))
        assert not self.in_progress and not self.rivals

    @event(4, share=one_of(0.1, 0.3, 0.5, 0.8))
    def evict(self, share: float) -> None:
        """Drop some of the device's idle state, even if blocks are free."""
        pool, now = self.pool, self.clock()
        free = pool.num_blocks - pool.used - pool.cached
        pool.free(pool.allocate(min(free + math.ceil(share * pool.cached), pool.allocatable), now), now)

    @event(1, kill=one_of(False, True))
    def end(self, kill: bool) -> None:
        """End the server while turns run, and start another over the same store."""
        self.seen["kills in mid-turn" if kill else "restarts in mid-turn"] += bool(self.in_progress)
        self._read_stats()
        self.runner.run(self._kill() if kill else self._close())
        self.runner.run(self.boot())

    async def _kill(self) -> None:
        """End the server as SIGKILL does: nothing that runs has any further effect."""
        self.engine.die()
        self.at_once.gone = True
        tasks = [talk.task for talk in self.in_progress if talk.task is not None] + self.rivals
        if self.responses._renewing is not None:
            tasks.append(self.responses._renewing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for talk in self.in_progress:
            if talk.background is not None:
                self.came_to_nothing[talk.id] = "failed"
        self.in_progress.clear()
        self.rivals.clear()
        await self.client.close()
        with self.store.database.write() as db:
            db.execute(update(leases).values(seen=0.0))  # They lapse before anybody asks.
        self.store.close()

    async def _close(self) -> None:
        """End the server as SIGTERM does after the drain."""
        await self.client.close()
        await self._settle()
        assert not self.in_progress and not self.rivals
        await self.responses.close()

    # Invariants

    async def _settle(self) -> None:
        """Let every task run as far as it can without another step, and collect those that ended."""
        await settle()
        for id in [id for id in self.engine.asked if id not in self.client._streams]:
            prompt = self.engine.asked.pop(id)
            self.reference.check(prompt, self.engine.answered[id])
            if self.engine.answered[id]:
                cached, preemptions = self.engine.began[id]
                assert preemptions or cached + self.executor.computed[id] == len(prompt)
                self.cached[prompt].add(cached)
        for talk in [talk for talk in self.in_progress if talk.task is None or talk.task.done()]:
            self.in_progress.remove(talk)
            self._see_off(talk)
        for task in [task for task in self.rivals if task.done()]:
            self.rivals.remove(task)
            error = task.exception()
            assert error is None or isinstance(error, EngineDead)

    def _see_off(self, talk: Talk) -> None:
        """Check the end of a turn."""
        if talk.left_while_it_was_stored:
            self.seen["clients that left while their turn was stored"] += 1
            row = self._rows().get(talk.id)
            if row is not None and row.status in GOOD:
                talk.writing.shape.response = msgspec.json.decode(row.response)
                assert not self._must_conflict(talk)
                self._see_whole(talk)
            else:
                assert talk.may_conflict
                if talk.background is not None:
                    self.came_to_nothing[talk.id] = "failed"
            return
        error: BaseException | None = talk.refusal
        if talk.task is not None and not talk.task.cancelled():
            error = talk.task.exception()
        if talk.background is not None and talk.response["status"] not in GOOD:
            assert talk.response["status"] in ("failed", "cancelled")
            self.came_to_nothing[talk.id] = talk.response["status"]
            return
        if error is not None:
            self._see_refused(talk, error)
        elif talk.task is not None and not talk.task.cancelled():
            assert not talk.must_be_locked and not self._must_conflict(talk)
            self._see_whole(talk)

    def _must_conflict(self, talk: Talk) -> bool:
        """Whether a turn's conversation has changed: an edit clears its head, or changes its items.

        A conversation without a head whose edits cancelled each other has not changed.
        """
        if not talk.edited or talk.writing is None or talk.conversation is None:
            return False
        now = tuple(item for item, _, _ in self.items.get(talk.conversation, ()))
        had_a_head = talk.writing.context.parent is not None
        return had_a_head or talk.conversation not in self.items or now != talk.began_with

    def _see_refused(self, talk: Talk, error: BaseException) -> None:
        assert isinstance(error, ApiError), error
        self.seen[str(error.code)] += 1
        match error.code:
            case "conversation_busy":
                assert talk.must_be_locked or talk.may_conflict
            case "conflict":
                assert talk.may_conflict
            case "context_length_exceeded":
                instructed = bool(talk.wanted.instructions)
                tokens = len("".join(text for _, text in talk.said).encode()) + 3 * (len(talk.said) + 2 * instructed)
                assert tokens + (talk.wanted.max_output_tokens or 0) > self.client.info.max_model_len / 3, (
                    "it would have fitted"
                )
            case "engine_dead":
                assert self.engine.ended.is_set()
            case _:
                raise error

    def _see_whole(self, talk: Talk) -> None:
        assert talk.writing is not None and talk.response["status"] in GOOD
        prompt, wanted = talk.writing.prompt, talk.wanted
        first: Said = [("system", wanted.instructions)] if wanted.instructions else []
        shown = [{"role": role, "content": text} for role, text in [*first, *talk.said]]
        assert prompt.text == self.client.text.render_chat(shown)
        assert self.client.text.decode(prompt.tokens) == prompt.text.replace(BREAK, "")
        self.seen["prompts from stored tokens"] += bool(prompt.known)
        self.seen["whole turns"] += 1
        usage = talk.response["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        assert usage["input_tokens"] == len(prompt.tokens)
        assert cached in self.cached[tuple(prompt.tokens)], "other tokens are said to be cached than were not computed"
        self.seen["turns with cached tokens"] += bool(cached)
        self.seen["prompts cached as far as can be"] += len(prompt.tokens) - cached <= self.pool.block_size
        if talk.conversation is not None:
            output = talk.response["output"][0]
            entries = self.items[talk.conversation]
            entries.append((talk.writing.input[0]["id"], *talk.said[-1]))
            entries.append((output["id"], "assistant", talk.answer))
        if wanted.store or talk.conversation is not None:
            self.stored[talk.id] = talk
            self._see_what_was_known(talk.id, prompt)

    def _see_what_was_known(self, id: str, prompt: Prompt) -> None:
        """Check that a prompt that continues its parent's text takes all of the parent's tokens from the store."""
        rows = self._rows()
        parent = rows.get(rows[id].parent) if id in rows else None
        if parent is None:  # It begins a chain, or its parent was pruned meanwhile.
            return
        text, border = self.client.text, parent.characters
        before, after = prompt.text[:border], prompt.text[border:]
        goes_on = text.digest(before) == parent.digest and text.encode_after(before, after) is not None
        assert prompt.known == (parent.start + len(parent.tokens) // 4 if goes_on else 0), "stored tokens were not used"
        self.seen["prompts from all of a parent's tokens"] += goes_on

    def _rows(self) -> dict[str, Row[Any]]:
        """Return all turns in the store, visible or not, by id."""
        with self.store.database.read() as db:
            return {row.id: row for row in db.execute(select(database.turns))}

    def _read_stats(self) -> None:
        stats = self.scheduler.stats()
        for name in ("blocks_swapped_in", "blocks_swapped_out", "suspensions", "preemptions", "tokens_recovered"):
            self.seen[name] += getattr(stats, name)
        self.seen["tokens_dropped"] += stats.tokens_dropped

    def no_block_is_lost_or_owned_twice(self) -> None:
        check_scheduler(self.scheduler)
        if not self.in_progress and not self.rivals:
            stats = self.scheduler.stats()
            assert (stats.waiting, stats.running, stats.blocks_used) == (0, 0, 0)
            assert not self.client._streams and not self.responses._locked and not self.responses._background
            assert not self.responses.service.admission.in_progress

    def the_store_holds_whole_turns_and_all_of_them(self) -> None:
        rows = self._rows()
        in_progress = {talk.id for talk in self.in_progress if talk.background is not None}
        for id, row in rows.items():
            if row.status in GOOD:
                assert id in self.stored, "half a turn was kept"
                assert row.visible == (self.stored[id].wanted.store and id not in self.deleted)
            else:
                assert id in in_progress or id in self.came_to_nothing
        for id, talk in self.stored.items():
            if talk.wanted.store and id not in self.deleted:
                found, _ = self.store.turns.response("", id)
                assert found == talk.response, "a turn that its client saw whole is not there as it was"
            else:
                with pytest.raises(NotFound):
                    self.store.turns.response("", id)

    def background_responses_and_conversations_are_as_their_clients_know(self) -> None:
        self.runner.run(self._compare())

    async def _compare(self) -> None:
        for id, status in self.came_to_nothing.items():
            assert (await self.responses.retrieve("", id))["status"] == status
        for talk in self.in_progress:
            if talk.background is not None:
                assert (await self.responses.retrieve("", talk.id))["status"] in ("queued", "in_progress")
        for id, entries in self.items.items():
            items, _ = self.store.conversations.items("", id, limit=1000, newest_first=False)
            listed = [(it["id"], it["role"], "".join(part["text"] for part in it["content"])) for it in items]
            assert listed == entries

    def close(self) -> None:
        if hasattr(self, "engine"):
            self._read_stats()
            self.runner.run(self._kill())
        self.runner.close()
        self.folder.cleanup()


EVENTS = [name for name, method in vars(Histories).items() for _ in range(getattr(method, "weight", 0))]


async def listen(writing: Writing, store: Store) -> None:
    """Read a foreground turn to its end, and check each event as it arrives."""
    number = 0
    async with aclosing(writing.events()) as events:
        async for event in events:
            assert event["sequence_number"] == number
            number += 1
            status = event["type"].removeprefix("response.")
            if status in GOOD and (writing.wanted.store or writing.wanted.conversation_id):
                with store.database.read() as db:
                    stored = select(database.turns.c.status).where(database.turns.c.id == writing.id)
                    assert db.execute(stored).scalar() == status


OFTEN = {
    "whole turns": 125,
    "turns with cached tokens": 62,
    "prompts cached as far as can be": 6,
    "prompts from stored tokens": 31,
    "prompts from all of a parent's tokens": 25,
    "branches": 5,
    "holes": 6,
    "several holes of one sequence": 1,
    "tokens_recovered": 31,
    "tokens_dropped": 625,
    "blocks_swapped_in": 31,
    "blocks_swapped_out": 500,
    "arrivals under the computation": 6,
    "arrivals beside other steps": 1,
    "steps that wait for room": 12,
    "suspensions": 1,
    "clients that left in mid-answer": 6,
    "cancelled": 1,
    "kills in mid-turn": 1,
    "restarts in mid-turn": 1,
    "edits in mid-turn": 1,
    "conversation_busy": 4,
    "context_length_exceeded": 3,
}
"""Minimum count of each case over all histories."""


@pytest.mark.hypothesis
@pytest.mark.timeout(1800)  # Half a minute of work, or ten times that next to ten other processes.
def test_answers_equal_those_of_a_model_without_a_cache_through_any_history(pytestconfig: pytest.Config) -> None:
    Histories.seen.clear()
    given = pytestconfig.getoption("hypothesis_seed")
    first = int(given) if given else random.randrange(1 << 32) if HISTORIES else 0
    for number in range(max(30, HISTORIES)):
        try:
            Histories(first + number).run()
        except BaseException as error:
            error.add_note(f"seed {first + number}")
            raise
    seen = Histories.seen
    for event, least in OFTEN.items():
        assert seen[event] >= least, f"the histories came to this {seen[event]} times: {event}"
