"""The work that shows each feature of an engine, and what was seen of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

from holdfast.core.contract import Contract
from holdfast.core.sleep import LEVELS
from holdfast.core.types import BATCH_CLASS, Grammar, Identity, Request, SamplingParams
from holdfast.engine.client.tuning import EXAMPLES_FILE, write_examples
from holdfast.engine.messages import ContractRefusal, Submit
from holdfast.engine.process.parts.moves import MoveHandler
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.memory.prices import Link
from holdfast.lm.parts.moves.messages import ChunksFetched, FetchChunks
from holdfast.lm.parts.sleep.messages import Sleep, Slept, WakeUp
from holdfast.lm.parts.speculation.head_planner import HeadPart
from holdfast.lm.parts.tuning.messages import JobEnded, JobProgress, JobRefused, JobStart, JobStep, StartJob
from holdfast.lm.scheduler.correction import Correction
from holdfast.lm.types import SchedulerStats
from tests.checkpoints import VOCAB
from tests.combinations.bench import Asked, Bench
from tests.combinations.place import BLOCK, HOST, LITTLE_DISK, SMALL, TIERS, Answer, Place, device_blocks

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
REPEATED = replace(GREEDY, max_tokens=40, logit_bias=((70, 60.0), (71, 60.0), (72, 59.0)))
"""Answers of three tokens, which repeat themselves, so that guesses come true."""
GUESS = 71
"""The token that the draft head guesses."""
GUESSED = replace(GREEDY, max_tokens=20, logit_bias=((GUESS, 60.0),))
"""Answers of that token."""
LOOSE = Contract(ttft=3600.0, tbt=600.0, complete=36_000.0)
HASTY = Contract(ttft=1e-6)
STREAMS = 5
"""Most streams in which a long prompt comes."""
RULE = r'(\{"identifier": [0-9]{1,2}, "valid": (true|false)\}, ){2}'
RULED = replace(GREEDY, max_tokens=90, ignore_eos=False, grammar=Grammar("regex", RULE))


@dataclass
class Seen:
    """What an engine with some features did with their work."""

    features: frozenset[str]
    bench: Bench
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By request, the tokens of a plain engine."""
    base: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By request with the adapter, the plain engine's tokens without it."""
    before: dict[str, SchedulerStats] = field(default_factory=dict)
    after: dict[str, SchedulerStats] = field(default_factory=dict)
    """Figures before and after each kind of work: `talk`, and that of each feature that has some."""
    requests: dict[str, set[str]] = field(default_factory=dict)
    """Names of the requests of each kind of work."""
    fetched: ChunksFetched | None = None
    """The answer to the fetch of another engine's blocks."""
    alone: dict[str, Answer] = field(default_factory=dict)
    """By request that is compared, what a deterministic engine gives that computes one request at a time."""
    losses: list[float] = field(default_factory=list)
    slept: list[tuple[int, int]] = field(default_factory=list)
    """For each sleep, its level, and the bytes that weights and cache had meanwhile."""

    def grown(self, work: str, figure: str) -> float:
        """How much a figure grew during a kind of work."""
        return float(getattr(self.after[work], figure) - getattr(self.before[work], figure))


@cache
def tokens(seed: int, length: int) -> tuple[int, ...]:
    """Random tokens of a text."""
    return tuple(random.Random(seed).choices(range(3, VOCAB), k=length))


def compared_alone(asked: dict[str, Asked]) -> dict[str, Asked]:
    """The requests whose bits are compared with those of a request alone: of the talks every third, and all others.

    A request alone takes as long as several together.
    """
    return {
        name: each for name, each in asked.items() if not name.startswith("talk-") or int(name.split("-")[1]) % 3 == 0
    }


class Work:
    """The work of one engine. Its requests are drawn by a seed; every second one has the adapter, if there is one."""

    def __init__(self, place: Place, features: frozenset[str], seed: int) -> None:
        self.place, self.features = place, features
        self._seed = 1000 * seed
        pace = "bounded" if "target" in features and "tuning" not in features else "free"
        self.bench = place.start(place.options(features), pace)
        self.seen = Seen(features, self.bench)

    def do(self) -> Seen:
        """Do the work of all features."""
        job = self.begin_job() if "tuning" in self.features else None
        kinds = {
            "moves": self.fetch,
            "drafts": self.draft,
            "grammars": self.follow,
            "priorities": self.displace,
            "tenants": self.wait_in_turn,
            "target": self.stream,
            "contracts": self.promise,
            "sleep": self.sleep,
        }
        if "heads" in self.features:  # before other answers show that the head's guesses do not pay
            self._measured("heads", self.guess)
        self._measured("talk", self.talk)
        for name, work in kinds.items():
            if name in self.features:
                self._measured(name, work)
        if self.features >= {"host", "encoder-decoder"} and "priorities" not in self.features:
            self._measured("priorities", self.displace)
        if job is not None:
            self.end_job(job)
        plain = {name: each for name, each in self.bench.asked.items() if name not in ("tuned", "untuned")}
        if "deterministic" in self.features:
            self.seen.alone = self.place.alone(self.features).told(compared_alone(plain))
        reference = self.place.reference(self.features)
        self.seen.expected = reference.answers(plain)
        self.seen.base = reference.answers(
            {name: replace(each, adapted=False) for name, each in plain.items() if each.adapted}
        )
        return self.seen

    def _measured(self, name: str, work: Callable[[], None]) -> None:
        before = {*self.bench.asked}
        self.seen.before[name] = self.bench.stats()
        work()
        self.seen.after[name] = self.bench.stats()
        self.seen.requests[name] = {*self.bench.asked} - before

    def asked(self, number: int, length: int, params: SamplingParams, **values: Any) -> Asked:
        adapted = "adapters" in self.features and number % 2 == 0
        params = self._told(params)
        return Asked(tokens(self._seed + number, length), params, adapted, **values)

    def talk(self) -> None:
        """Conversations of two turns. The last ones go on first, while the host still has their state."""
        bench, params, limited = self.bench, replace(GREEDY, max_tokens=6), "tenants" in self.features
        first = {
            f"talk-{number}": self.asked(number, 80, params, tenant=f"tenant-{number % 2}" if limited else "")
            for number in range(self._talks)
        }
        bench.run(first)
        bench.settle()
        second = {}
        for number, (name, asked) in enumerate(first.items()):
            more = asked.prompt + bench.tokens[name] + tokens(self._seed + 50, 4)
            second[f"{name}-again"] = replace(asked, prompt=more, params=self._second(number, params))
        waiting = [*reversed(second)]
        while waiting:
            together, waiting = waiting[:3], waiting[3:]
            bench.run({name: second[name] for name in together})

    def _second(self, number: int, params: SamplingParams) -> SamplingParams:
        """How a second turn is sampled: grammars and drafts meet state that was kept somewhere else."""
        if "grammars" in self.features and number % 2:
            return self._told(RULED)
        return self._told(REPEATED if self.features & {"drafts", "heads"} and number % 4 == 0 else params)

    def _told(self, params: SamplingParams) -> SamplingParams:
        """The options of a request, with log probabilities where bits are compared."""
        return replace(params, logprobs=2) if "deterministic" in self.features else params

    @property
    def _talks(self) -> int:
        """Number of conversations of five blocks. With tiers, more than the device and the host have room for."""
        if not self.features & TIERS:
            return 4
        blocks = device_blocks(self.features) + HOST + (LITTLE_DISK if self.features >= {"disk", "remote"} else 0)
        return blocks // 5 + 4

    def fetch(self) -> None:
        """Another engine computes a prompt, whose blocks come from there.

        With recurrent layers the next turn is asked for: a state serves only prompts that go on after its tokens.
        """
        bench, source = self.bench, self.place.source(self.features)
        asked = replace(self.asked(100, 120, replace(GREEDY, max_tokens=6)), adapted="adapters" in self.features)
        name = f"moved-{len(source.asked)}"
        source.run({name: asked})
        if "hybrid" in self.features:
            asked = replace(asked, prompt=asked.prompt + source.tokens[name] + tokens(self._seed + 101, 4))
        identity = Identity(adapter=bench.adapter if asked.adapted else "")
        chain = block_digests(identity.root(), asked.prompt[: len(asked.prompt) // BLOCK * BLOCK], BLOCK)
        bench.say(FetchChunks(1, chain, list(range(len(chain))), source.info.chunk_address, BLOCK))
        handlers = (*bench.engine.handlers, *source.engine.handlers)
        both = [each for each in handlers if isinstance(each, MoveHandler)]
        bench.until(lambda: bool(bench.answer(1)) and not any(each.ready for each in both), source)
        (answer,) = bench.answer(1)
        assert isinstance(answer, ChunksFetched)
        self.seen.fetched = answer
        bench.run({"moved": asked})

    def draft(self) -> None:
        self.bench.run({f"repeated-{number}": self.asked(200 + number, 24, REPEATED) for number in range(3)})

    def guess(self) -> None:
        self.bench.run({f"guessed-{number}": self.asked(220 + number, 24, GUESSED) for number in range(3)})

    def follow(self) -> None:
        self.bench.run({f"ruled-{number}": self.asked(300 + number, 20, RULED) for number in range(2)})

    def displace(self) -> None:
        """Lines of a batch have all rows when a chat comes."""
        bench, lines = self.bench, [f"line-{number}" for number in range(SMALL["max_sequences"])]
        for number, name in enumerate(lines):
            params = replace(GREEDY, max_tokens=24)
            bench.submit(name, self.asked(400 + number, 16, params, tenant=name, priority=BATCH_CLASS))
        bench.until(lambda: all(bench.tokens[name] for name in lines))
        bench.run({"chat": self.asked(410, 16, replace(GREEDY, max_tokens=4))})
        bench.until(lambda: {*lines} <= {*bench.ended})

    def wait_in_turn(self) -> None:
        """Three requests of one tenant, then one of another."""
        params = replace(GREEDY, max_tokens=8)
        names = {"first-0": "first", "first-1": "first", "first-2": "first", "second": "second"}
        self.bench.run(
            {name: self.asked(500 + at, 12, params, tenant=names[name]) for at, name in enumerate(names)}
        )  # fmt: skip

    def promise(self) -> None:
        """Requests with contracts that any engine keeps, in all ways of sampling, then one that none could keep."""
        bench, params = self.bench, replace(GREEDY, max_tokens=8)
        ways = [params, *[RULED] * ("grammars" in self.features), *[REPEATED] * ("drafts" in self.features)]
        asked = [self.asked(800 + number, 40, ways[number % len(ways)], contract=LOOSE) for number in range(4)]
        for two in (0, 2):  # the share of one of several tenants
            bench.run({f"promised-{number}": asked[number] for number in (two, two + 1)})
        hasty = Request("hasty", tokens(self._seed, 40), params, arrival=time.monotonic(), contract=HASTY)
        bench.say(Submit(hasty))
        (refusal,) = [message for message in bench.sent if isinstance(message, ContractRefusal)]
        assert "even an idle engine is slower" in refusal.refusal.reason
        if "grammars" in self.features:
            bench.say(Submit(replace(hasty, id="hasty in form", params=replace(RULED, max_tokens=8))))
            bench.until(lambda: len([each for each in bench.sent if isinstance(each, ContractRefusal)]) == 2)

    def sleep(self) -> None:
        """The engine sleeps at each level while answers are written."""
        bench = self.bench
        for level in LEVELS:
            at = 900 + 10 * level
            names = [f"asleep-{level}-{number}" for number in range(3)]
            for number, name in enumerate(names):
                params = self._second(number, replace(GREEDY, max_tokens=30))
                tenant = f"tenant-{number % 2}" if "tenants" in self.features else ""
                bench.submit(name, self.asked(at + number, 40, params, tenant=tenant))
            bench.until(lambda names=names: all(bench.tokens[name] for name in names))
            self._order(Sleep(at, level, "keep"))
            self.seen.slept.append((bench.stats().sleep_level, bench.log.device.sleeping.mapped_bytes))
            self._order(WakeUp(at + 1, []))
            bench.until(lambda names=names: {*names} <= {*bench.ended})

    def _order(self, order: Sleep | WakeUp) -> None:
        """Give an order, and wait until it is carried out."""
        self.bench.say(order)
        self.bench.until(lambda: bool(self.bench.answer(order.number)))
        assert self.bench.answer(order.number) == [Slept(order.number)]

    def stream(self) -> None:
        """A long prompt comes while an answer is streamed.

        If a tier answers so slowly that the stream ends meanwhile, another prompt comes in another stream.
        """
        bench = self.bench
        for attempt in range(STREAMS):
            stream, prompt = f"stream-{attempt}", f"long-{attempt}"
            bench.submit(stream, self.asked(600 + 2 * attempt, 12, replace(GREEDY, max_tokens=100)))
            bench.until(lambda stream=stream: bool(bench.tokens[stream]))
            bench.run({prompt: self.asked(601 + 2 * attempt, 120, replace(GREEDY, max_tokens=2))})
            bench.until(lambda stream=stream: stream in bench.ended)
            if len(bench.log.lengths(stream, prompt)) > 2:
                break

    def begin_job(self) -> JobStart:
        """A tuning job, which goes on during all other work."""
        chance, directory = random.Random(self._seed), self.place.directory()
        examples = [([chance.randrange(3, 100) for _ in range(16)], [1.0] * 16) for _ in range(6)]
        digest = write_examples(directory / EXAMPLES_FILE, examples)
        job = JobStart(
            id="job", directory=str(directory), name="tuned", data_digest=digest, epochs=4, batch_size=2,
            learning_rate=0.02, rank=2,
        )  # fmt: skip
        self.bench.say(StartJob(2, job))
        self.bench.until(lambda: bool(self.bench.answer(2)))
        (answer,) = self.bench.answer(2)
        assert not isinstance(answer, JobRefused), answer
        return job

    def end_job(self, job: JobStart) -> None:
        """Wait for the job, then ask its adapter and the base model."""
        bench = self.bench

        def events(kind: type[Any]) -> list[Any]:
            told = [event for message in bench.sent if isinstance(message, JobProgress) for event in message.events]
            return [event for event in told if event.job == job.id and isinstance(event, kind)]

        bench.until(lambda: bool(events(JobEnded)))
        (ended,) = events(JobEnded)
        assert ended.outcome == "succeeded", ended
        self.seen.losses = [step.loss for step in events(JobStep)]
        asked = Asked(tokens(self._seed + 700, 12), replace(GREEDY, max_tokens=12))
        bench.submit("tuned", asked, ended.adapter.id)
        bench.submit("untuned", asked)
        bench.until(lambda: {"tuned", "untuned"} <= {*bench.ended})


def serve(place: Place, features: Sequence[str], seed: int = 0) -> Seen:
    """Give a new engine with these features their work. The engine is closed then."""
    # Steps take as long as the engine was told, and a busy machine that gives results late changes nothing.
    steady = patch.multiple(Correction, update=lambda *_: None, update_host=lambda *_: None)
    copies = patch.object(Link, "observe", lambda *_: None)  # so do copies: one that is late makes no tier too slow
    # By its bytes, a head is slow beside so small a model. Once it runs, its passes are measured.
    fast = patch.object(HeadPart, "_expected", lambda *_: 0.001)
    with steady, copies, fast:
        work = Work(place, frozenset(features), seed)
        try:
            return work.do()
        finally:
            work.bench.close()
