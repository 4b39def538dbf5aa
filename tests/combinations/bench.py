"""A real engine in the test's process, without a socket: messages go to its handlers, and the loop is stepped by hand.

Further ranks are processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.core.types import Identity, Request, SamplingParams, TokenLogprobs
from holdfast.engine import messages
from holdfast.engine.process.build import PARTS, build_engine
from holdfast.engine.process.handler import Gate, Handler, Router
from holdfast.engine.process.part_builder import PartBuilder, Served, Site
from holdfast.engine.process.parts.tiers import TierHandler
from holdfast.engine.process.requests import RequestHandler
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.tuning.values import TrainingReport
from holdfast.lm.types import SchedulerStats, Segment, StepPlan, StepResult
from holdfast.loop.contracts import Observer

SECRET = b"for tests only" * 3
"""Shared secret of engines that move blocks between them."""


@dataclass(frozen=True)
class Asked:
    """A request as the work asks for it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    adapted: bool = False
    """Whether it asks for the adapter."""
    tenant: str = ""
    priority: int = 0
    contract: Contract = NO_CONTRACT


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

    def first_step(self, name: str) -> int:
        """Number of the first step that computed for a request."""
        return next(at for at, plan in enumerate(self.plans) if any(each.sequence_id == name for each in plan))


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
        self.logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        """By request, the log probabilities of its prompt and of its answer, as far as it asks for them."""
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
            name, asked.prompt, asked.params, identity=identity, priority=asked.priority, arrival=arrival,
            contract=asked.contract,
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
            told = (*output.prompt_logprobs, *output.logprobs)
            self.logprobs[output.request_id] = self.logprobs.get(output.request_id, ()) + told
            self.cached.setdefault(output.request_id, output.cached_tokens)
            if output.finish_reason is not None:
                self.ended.append(output.request_id)

    def until(self, what: Callable[[], bool], *others: Bench) -> None:
        """Go on until this is so, together with these other engines. Raises TimeoutError after 250 s."""
        deadline = time.monotonic() + 250.0
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

    def answer_of(self, name: str) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """The tokens of a request, and the log probabilities that it asks for."""
        return self.tokens[name], self.logprobs.get(name, ())

    def stats(self) -> SchedulerStats:
        known: dict[str, Any] = {}
        for handler in self.engine.handlers:
            known.update(handler.stats())
        return replace(self.loop.stats(), **known)

    def answer(self, number: int) -> list[messages.FromEngine]:
        return [message for message in self.sent if getattr(message, "number", None) == number]

    def settle(self) -> None:
        """Go on until no block has been on its way to a lower tier for a while."""
        tiers, quiet = [each for each in self.engine.handlers if isinstance(each, TierHandler)], 0

        def is_quiet() -> bool:
            nonlocal quiet
            quiet = 0 if any(each.busy for each in tiers) else quiet + 1
            return not tiers or quiet > 20

        self.until(is_quiet)

    def close(self) -> None:
        self.engine.close()
