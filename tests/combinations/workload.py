"""Real engines with combinations of features, and the work that shows each feature.

An engine runs in the test's process, without a socket: messages go to its handlers, and the loop is stepped by hand.
Further ranks are processes. `serve` gives an engine the work of each of its features, and returns what was seen.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from shutil import copytree
from threading import Thread
from typing import Any
from unittest.mock import patch

import fakeredis

from holdfast.core.types import BATCH_CLASS, Grammar, Identity, Request, SamplingParams
from holdfast.engine import messages
from holdfast.engine.client.tuning import EXAMPLES_FILE, write_examples
from holdfast.engine.process import build
from holdfast.engine.process.build import PARTS, build_engine
from holdfast.engine.process.handler import Gate, Handler, Router
from holdfast.engine.process.part_builder import PartBuilder, Served, Site
from holdfast.engine.process.parts.moves import MoveHandler
from holdfast.engine.process.parts.tiers import TierHandler
from holdfast.engine.process.requests import RequestHandler
from holdfast.engine.profiles import CostProfile
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution import cost_profile
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.models.loader import decoder_spec
from holdfast.lm.parts.moves.messages import ChunksFetched, FetchChunks
from holdfast.lm.parts.tuning.messages import JobEnded, JobProgress, JobRefused, JobStart, JobStep, StartJob
from holdfast.lm.parts.tuning.values import TrainingReport
from holdfast.lm.scheduler.correction import Correction
from holdfast.lm.types import SchedulerStats, Segment, StepPlan, StepResult
from holdfast.loop.contracts import Observer
from tests.adapters import drawn, write
from tests.checkpoints import VOCAB, make
from tests.combinations.table import FEATURES
from tests.lm.models.test_quantized import quantized
from tests.lm.padded.test_encoder_decoder import make as make_encoder_decoder
from tests.tokenizers_made import byte_level

LONGEST = 256
"""Positions of a sequence."""
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Bytes of a token's state: layers, keys and values, heads, head size, bytes of a float32."""
BLOCK = 16
"""Tokens of a block."""
HOST, DISK, LITTLE_DISK = 32, 200, 64
"""Blocks of each tier. A little disk has room for some of the talks only."""
SMALL: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "max_sequences": 4,
    "max_waiting": 64,
    "token_budget": 64,
    "max_model_len": LONGEST,
    "cache_gb": 0.01,
    "eviction": "lru",
}
TIERS = {"host", "disk", "remote", "moves"}
"""Features that need a host tier."""
ON_ROWS = {"padded", "encoder-decoder"}
BOUNDED = 32
"""Tokens that the latency target leaves a step, by the pace that these engines are told."""
BOUNDED_ROWS = 17
"""Tokens that it leaves a step of padded rows: a decode, and a tile, which a step may always fill."""
TARGETS = {"paged": 1390.0, "padded": 0.001, "tuning": 60_000.0}
"""Latency targets in ms, by what they bind."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
REPEATED = replace(GREEDY, max_tokens=40, logit_bias=((70, 60.0), (71, 60.0), (72, 59.0)))
"""Answers of three tokens, which repeat themselves, so that guesses come true."""
RULE = r'(\{"identifier": [0-9]{1,2}, "valid": (true|false)\}, ){2}'
RULED = replace(GREEDY, max_tokens=90, ignore_eos=False, grammar=Grammar("regex", RULE))
SECRET = b"for tests only" * 3


@dataclass(frozen=True)
class Asked:
    """A request as the work asks for it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    adapted: bool = False
    """Whether it asks for the adapter."""
    tenant: str = ""
    priority: int = 0


class Log(Handler, Observer[StepPlan, StepResult]):
    """Notes the plans of an engine, and what it was built over."""

    def __init__(self, site: Site) -> None:
        self.device: Any = site.device
        """The device, with rank 0's part of the model."""
        self.plans: list[tuple[Segment, ...]] = []
        """The segments of each plan."""
        self.sliced = 0
        """Number of steps that gave tokens and computed a slice of training."""

    def planned(self, plan: StepPlan) -> None:
        self.plans.append(tuple(plan.segments))

    def ended(self, result: StepResult) -> None:
        self.sliced += bool(len(result.tokens) and result.part(TrainingReport))

    def lengths(self, *names: str) -> list[int]:
        """Tokens of each step that computed for all of these requests."""
        shared = (plan for plan in self.plans if {*names} <= {segment.sequence_id for segment in plan})
        return [sum(segment.length for segment in plan) for plan in shared]


class LogBuilder(PartBuilder):
    """Builds the log."""

    name = "log"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._log = Log(site)

    def observers(self, served: Served) -> Iterable[Log]:
        return (self._log,)

    def handlers(self, served: Served) -> Iterable[Log]:
        return (self._log,)


class Bench:
    """An engine in this process, stepped by hand."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = build_engine(config, chunk_secret=SECRET, parts=(*PARTS, LogBuilder))
        self.loop, self.info = self.engine.loop, self.engine.info
        self.log = self.engine.handler(Log)
        gates = [each for each in self.engine.handlers if isinstance(each, Gate)]
        self._router = Router([RequestHandler(self.loop, self._send, gates), *self.engine.handlers], self._send)
        self.sent: list[messages.FromEngine] = []
        self.asked: dict[str, Asked] = {}
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.cached: dict[str, int] = {}
        """By request, the prompt's tokens that were found in a cache."""
        self.ended: list[str] = []
        """The requests that have ended, in this order."""

    def _send(self, message: messages.FromEngine) -> None:
        self.sent.append(message)

    def say(self, message: messages.ToEngine) -> None:
        assert self._router.receive([message])

    @property
    def adapter(self) -> str:
        """The adapter's id; empty if the engine has none."""
        return self.info.adapters[0].id if self.info.adapters else ""

    def submit(self, name: str, asked: Asked, adapter: str = "") -> None:
        """Send a request. `adapter` is the id of another adapter than the engine's own."""
        identity = Identity(adapter=adapter or (self.adapter if asked.adapted else ""), tenant=asked.tenant)
        self.asked[name], self.tokens[name] = asked, ()
        arrival = time.monotonic()
        request = Request(
            name, asked.prompt, asked.params, identity=identity, priority=asked.priority, arrival=arrival
        )  # fmt: skip
        self.say(messages.Submit(request))

    def turn(self) -> None:
        """Send what the handlers have to say, and do one step if there is anything to do."""
        self._router.send_answers()
        if not self.loop.has_work():
            time.sleep(0.0005)  # as an idle engine waits for its threads
            return
        for output in self.loop.step() or ():
            self.tokens[output.request_id] += tuple(output.tokens)
            self.cached.setdefault(output.request_id, output.cached_tokens)
            if output.finish_reason is not None:
                self.ended.append(output.request_id)

    def until(self, what: Callable[[], bool], *others: Bench) -> None:
        """Go on until this is so, together with these other engines. Raises TimeoutError after 60 s."""
        deadline = time.monotonic() + 60.0
        while not what():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.sent[-3:]}, {self.stats()}")
            for each in (self, *others):
                each.turn()

    def run(self, requests: dict[str, Asked]) -> None:
        """Send these requests together, and go on until all have ended."""
        for name, asked in requests.items():
            self.submit(name, asked)
        self.until(lambda: {*requests} <= {*self.ended})

    def stats(self) -> SchedulerStats:
        known: dict[str, Any] = {}
        for handler in self.engine.handlers:
            known.update(handler.stats())
        return replace(self.loop.stats(), **known)

    def answer(self, number: int) -> list[messages.FromEngine]:
        return [message for message in self.sent if getattr(message, "number", None) == number]

    def settle(self) -> None:
        """Go on until no block is on its way to a lower tier, for at most 5 s."""
        tiers = [each for each in self.engine.handlers if isinstance(each, TierHandler)]
        deadline, quiet = time.monotonic() + 5.0, 0
        while tiers and quiet < 20 and time.monotonic() < deadline:
            self.turn()
            quiet = 0 if tiers[0].busy else quiet + 1

    def close(self) -> None:
        self.engine.close()


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
    """Figures before and after each kind of work."""
    fetched: ChunksFetched | None = None
    """The answer to the fetch of another engine's blocks."""
    losses: list[float] = field(default_factory=list)

    def grown(self, work: str, figure: str) -> float:
        """How much a figure grew during a kind of work."""
        return float(getattr(self.after[work], figure) - getattr(self.before[work], figure))


class Place:
    """What the engines of the tests are made of: models, an adapter, directories, and a Redis service."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._closing = ExitStack()
        self._sources: dict[Any, Bench] = {}
        self._plain: dict[Any, Plain] = {}

    @cached_property
    def plain(self) -> Path:
        """A Llama of two layers and random weights."""
        make(self.root / "llama", "Llama", max_position_embeddings=512, eos_token_id=1)
        return self._with_tokenizer("llama")

    @cached_property
    def four_bits(self) -> Path:
        """The same, with layers in 4 bits."""
        quantized(self.root / "llama-4-bit", "Llama", "awq-32", max_position_embeddings=512, eos_token_id=1)
        return self._with_tokenizer("llama-4-bit")

    @cached_property
    def encoder_decoder(self) -> Path:
        """A T5 of random weights."""
        make_encoder_decoder("T5", vocab_size=VOCAB, eos_token_id=1).save_pretrained(self.root / "t5")
        return self._with_tokenizer("t5")

    @cached_property
    def encoder_decoder_four_bits(self) -> Path:
        """A checkpoint of a T5 that says its weights are in 4 bits."""
        directory = self.root / "t5-4-bit"
        copytree(self.encoder_decoder, directory)
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    @cached_property
    def adapter(self) -> Path:
        """An adapter of the Llama that changes what it says."""
        return write(self.root / "adapter", drawn(decoder_spec(self.plain), 8, seed=1, strength=0.8))

    def redis(self) -> str:
        """The URL of a new Redis service in this process."""
        server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self._closing.callback(server.server_close)
        self._closing.callback(thread.join)
        self._closing.callback(server.shutdown)
        return f"redis://127.0.0.1:{server.server_address[1]}/0"

    def _with_tokenizer(self, name: str) -> Path:
        byte_level().save(str(self.root / name / "tokenizer.json"))
        return self.root / name

    def directory(self) -> Path:
        """A new directory."""
        return Path(tempfile.mkdtemp(dir=self.root))

    def model(self, features: frozenset[str]) -> Path:
        if "encoder-decoder" in features:
            return self.encoder_decoder
        return self.four_bits if "4-bit" in features else self.plain

    def kind(self, features: frozenset[str]) -> dict[str, Any]:
        """Options of the model and of its numbers, by which an answer may differ, and the adapter if it takes any."""
        found: dict[str, Any] = {"model": str(self.model(features))}
        if "encoder-decoder" not in features:
            found["adapter"] = (f"own={self.adapter}",)
        for name in features & {"fp8-weights", "fp8-cache"}:
            found |= FEATURES[name].options
        return found

    def options(self, features: frozenset[str]) -> dict[str, Any]:
        """Options of an engine with these features, in sizes for `serve`."""
        found = SMALL | self.kind(features)
        if "adapters" not in features:
            found.pop("adapter", None)
        if not features & ON_ROWS:
            found["speculation"] = "off"
        for name in features & {"paged", "padded", "tp", "pp", "moves", "drafts", "tenants"}:
            found |= FEATURES[name].options
        if features & TIERS:
            found |= self._sizes(features)
        if "disk" in features:
            blocks = LITTLE_DISK if "remote" in features else DISK
            found |= {"disk_cache_dir": str(self.directory()), "disk_cache_gb": blocks * BLOCK * TOKEN_BYTES / 1e9}
        if "remote" in features:
            found["remote_cache"] = self.redis()
        if "tuning" in features:
            found |= {"tuning": True, "tuning_mirror": "off", "tuning_micro_batch": 16, "max_adapters": 2}
            found["tuning_memory_fraction"] = 0.95
            found |= {} if "target" in features else {"deferral_bound": 0.0}
        if "target" in features:
            binds = "tuning" if "tuning" in features else "padded" if features & ON_ROWS else "paged"
            found |= {"tbt_target": TARGETS[binds], "token_budget": None}
        return found

    def _sizes(self, features: frozenset[str]) -> dict[str, Any]:
        """Sizes of a device and a host tier that are too small for the talks."""
        if features & ON_ROWS:
            row = LONGEST * TOKEN_BYTES * (4 if "encoder-decoder" in features else 1)
            return {"cache_gb": 3.2 * row / 1e9, "host_cache_gb": 3 * row / 1e9}
        token = TOKEN_BYTES / 4 if "fp8-cache" in features else TOKEN_BYTES
        sizes = {"cache_gb": device_blocks(features), "host_cache_gb": HOST}
        return {name: (blocks + 0.5) * BLOCK * token / 1e9 for name, blocks in sizes.items()}

    def start(self, options: dict[str, Any], pace: str = "free") -> Bench:
        """An engine with a pace that does not depend on the machine."""
        environment = {"XDG_CACHE_HOME": str(self.directory())}
        with patch.dict("os.environ", environment), patch.object(cost_profile, "SECONDS_A_POINT", 0.0), paced(pace):
            return Bench(EngineConfig(**options))

    def source(self, features: frozenset[str]) -> Bench:
        """An engine from which one with these features can fetch blocks."""
        like = features & {"4-bit", "fp8-weights", "fp8-cache", "tp", "pp"}
        if like not in self._sources:
            options = SMALL | self.kind(like) | {"chunk_host": "127.0.0.1"}
            options |= dict.fromkeys(like & {"tp", "pp"}, 2)
            self._sources[like] = self.start(options)
            self._closing.callback(self._sources[like].close)
        return self._sources[like]

    def reference(self, features: frozenset[str]) -> Plain:
        """The plain engine whose tokens one with these features gives."""
        like = features & {"4-bit", "fp8-weights", "fp8-cache", "encoder-decoder"}
        if like not in self._plain:
            bench = self.start(SMALL | self.kind(like) | {"prefix_sharing": False})
            self._plain[like] = Plain(bench)
            self._closing.callback(bench.close)
        return self._plain[like]

    def close(self) -> None:
        """End all engines and the Redis service."""
        self._closing.close()


class Plain:
    """A plain engine, and the answers that it has given."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._given: dict[Asked, tuple[int, ...]] = {}

    def answers(self, asked: dict[str, Asked]) -> dict[str, tuple[int, ...]]:
        """By name, the tokens of each request, whoever asks and how urgently."""
        plain = {name: replace(each, tenant="", priority=0) for name, each in asked.items()}
        for each in dict.fromkeys(plain.values()):
            if each not in self._given:
                name = str(len(self._given))
                self._bench.run({name: each})
                self._given[each] = self._bench.tokens[name]
        return {name: self._given[each] for name, each in plain.items()}


def device_blocks(features: frozenset[str]) -> int:
    """Blocks of a device that is too small for the talks. A tuning job needs some: as many bytes on each rank."""
    lent = 14 * (4 if "fp8-cache" in features else 1) * (2 if features & {"tp", "pp"} else 1)
    if features >= {"tuning", "target"}:
        return 24 + lent  # slices of training and streams at the same time
    return max(24, lent if "tuning" in features else 0)


PACES: dict[str, dict[str, Any]] = {
    # A step takes a second, whatever it computes: drafts pay, and bringing state is cheaper than computing it again.
    "free": {"linear_tokens": (1, 512), "linear_seconds": (1.0, 1.01)},
    # A step takes a second, and 10 ms for each token.
    "bounded": {"linear_tokens": (1, 512), "linear_seconds": (1.0, 6.11)},
}


@contextmanager
def paced(pace: str) -> Iterator[None]:
    """Engines on a paged cache are told this pace, and find that steps keep it. Padded rows are estimated."""
    estimate = build.make_profile

    def told(*given: Any, **options: Any) -> CostProfile:
        profile = estimate(*given, **options)
        decodes: dict[str, Any] = {"decode_rows": (), "decode_seconds": (), "decode_attention": ()}
        cost = replace(profile.cost, **PACES[pace], **decodes, deviation=0.0)
        return replace(profile, cost=cost)

    with patch.object(build, "make_profile", told):
        yield


@cache
def tokens(seed: int, length: int) -> tuple[int, ...]:
    """Random tokens of a text."""
    return tuple(random.Random(seed).choices(range(3, VOCAB), k=length))


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
        }
        self._measured("talk", self.talk)
        for name, work in kinds.items():
            if name in self.features:
                self._measured(name, work)
        if self.features >= {"host", "encoder-decoder"} and "priorities" not in self.features:
            self._measured("priorities", self.displace)
        if job is not None:
            self.end_job(job)
        plain = {name: each for name, each in self.bench.asked.items() if name not in ("tuned", "untuned")}
        reference = self.place.reference(self.features)
        self.seen.expected = reference.answers(plain)
        self.seen.base = reference.answers(
            {name: replace(each, adapted=False) for name, each in plain.items() if each.adapted}
        )
        return self.seen

    def _measured(self, name: str, work: Callable[[], None]) -> None:
        self.seen.before[name] = self.bench.stats()
        work()
        self.seen.after[name] = self.bench.stats()

    def asked(self, number: int, length: int, params: SamplingParams, **values: Any) -> Asked:
        adapted = "adapters" in self.features and number % 2 == 0
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
        for number, (name, asked) in reversed([*enumerate(first.items())]):
            more = asked.prompt + bench.tokens[name] + tokens(self._seed + 50, 4)
            bench.run({f"{name}-again": replace(asked, prompt=more, params=self._second(number, params))})

    def _second(self, number: int, params: SamplingParams) -> SamplingParams:
        """How a second turn is sampled: grammars and drafts meet state that was kept somewhere else."""
        if "grammars" in self.features and number % 2:
            return RULED
        return REPEATED if "drafts" in self.features and number % 4 == 0 else params

    @property
    def _talks(self) -> int:
        """Number of conversations of five blocks: more than the device and the host have room for."""
        blocks = device_blocks(self.features) + HOST + (LITTLE_DISK if self.features >= {"disk", "remote"} else 0)
        return blocks // 5

    def fetch(self) -> None:
        """Another engine computes a prompt, whose blocks come from there."""
        bench, source = self.bench, self.place.source(self.features)
        asked = replace(self.asked(100, 120, replace(GREEDY, max_tokens=6)), adapted="adapters" in self.features)
        name = f"moved-{len(source.asked)}"
        source.run({name: asked})
        identity = Identity(adapter=bench.adapter if asked.adapted else "")
        chain = block_digests(identity.root(), asked.prompt[: 120 // BLOCK * BLOCK], BLOCK)
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

    def stream(self) -> None:
        """A long prompt comes while an answer is streamed."""
        bench = self.bench
        bench.submit("stream", self.asked(600, 12, replace(GREEDY, max_tokens=100)))
        bench.until(lambda: bool(bench.tokens["stream"]))
        bench.run({"long": self.asked(601, 120, replace(GREEDY, max_tokens=2))})
        bench.until(lambda: "stream" in bench.ended)

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
    with patch.object(Correction, "update", lambda *_: None):  # steps take as long as the engine was told
        work = Work(place, frozenset(features), seed)
        try:
            return work.do()
        finally:
            work.bench.close()
