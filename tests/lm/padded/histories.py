"""Random histories of rows: a planner that draws what happens next, and compares each token with the row alone.

Every plan is checked by `StatePlaces`, so what the executor is asked for is what plans may ask for.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.lm.padded.driver import Driver
from holdfast.lm.padded.executor import PaddedExecutor
from holdfast.lm.padded.host_rows import HostRows
from holdfast.lm.padded.loading import UnmodifiedModel
from holdfast.lm.padded.running_rows import RunningRows
from holdfast.lm.padded.state_layout import StateLayout
from holdfast.lm.types import PENDING, Abilities, Forward, RowMove, RowPlan, RowResult, Sampling, Segment, StepPlan
from tests.padded_checks import LONGEST, VOCAB, StatePlaces, check_batch, generate_alone

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
CPU = torch.device("cpu")
ALL = Abilities(chunks=True, left_padding=True, batched_decode=True, shaping=True, croppable=True)
KINDS = ("shape", "chunk", "group", "preempt", "abort", "keep", "reuse", "run_on", "again")
"""What may happen to a row beside joining by embedding, decoding and ending."""
PROMPTS = 64
"""Histories of a model draw from so many prompts, so that most of what it generates alone is known."""


def model_of(module: Any) -> UnmodifiedModel:
    """A module as `load_unmodified` gives it."""
    return UnmodifiedModel(
        module=module,
        architecture=type(module).__name__,
        vocab_size=VOCAB,
        max_model_len=LONGEST,
        eos_token_ids=(),
        dtype=torch.float32,
        device=module.device,
        weight_bytes=0,
    )


@dataclass
class Made:
    """A tiny model with its driver and layout."""

    module: Any
    driver: Driver
    layout: StateLayout

    @classmethod
    def of(cls, module: Any, *, growing: bool = True) -> Made:
        driver = Driver(model_of(module), growing=growing)
        return cls(module, driver, StateLayout.discover(driver.run) if driver.keyword else StateLayout(()))

    def executor(
        self,
        abilities: Abilities,
        *,
        rows: int = 8,
        host_bytes: int = 1 << 30,
        compact: bool = True,
        make_stream: Callable[[], Any] | None = None,
        driver: Any = None,
        second_stream: bool = True,
    ) -> PaddedExecutor:
        device = self.driver.model.device
        host = HostRows(self.layout, host_bytes, device, make_stream=make_stream) if host_bytes else None
        running = RunningRows(self.layout, rows, device, compact=compact)
        return PaddedExecutor(driver or self.driver, abilities, running, host, second_stream=second_stream)


class FailingDriver:
    """A driver that runs out of memory in the forwards that `fails` says, before or after the model has run."""

    def __init__(self, driver: Driver, fails: Callable[[], bool]) -> None:
        self._driver, self.fails = driver, fails
        self.model, self.inputs = driver.model, driver.inputs
        self.failures = 0

    def forward(self, inputs: Any, state: Any) -> Any:
        if not self.fails():
            return self._driver.forward(inputs, state)
        self.failures += 1
        if self.failures % 2:
            self._driver.forward(inputs, state)  # the state given is written to
        raise torch.OutOfMemoryError("CUDA out of memory, says the test")


@dataclass(eq=False)
class Row:
    """A sequence on its way: what plans have computed of it, and which tokens are known."""

    id: str
    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    row: int = -1
    place: str = "waiting"  # waiting, apart, batch, slot, gone
    slot: int = -1
    computed: int = 0
    sampled: int = 0
    known: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and known tokens."""
        return [*self.prompt, *self.known]

    @property
    def prefilled(self) -> bool:
        """Whether the next segment is a decode."""
        return self.computed >= len(self.prompt) and self.computed == len(self.prompt) + self.sampled - 1

    @property
    def ended(self) -> bool:
        return self.sampled >= len(self.expected)

    def lose(self) -> None:
        """Nothing is computed any more, and tokens that are not known are not sampled."""
        self.computed, self.sampled, self.place, self.slot = 0, len(self.known), "waiting", -1


class History:
    """Draws plans and follows their results. `kinds` says what may happen, `fails` how often memory runs out."""

    def __init__(
        self,
        made: Made,
        abilities: Abilities,
        *,
        seed: int,
        kinds: tuple[str, ...] = KINDS,
        requests: int = 6,
        places: int = 4,
        rows: int = 7,
        in_flight: int = 2,
        fails: float = 0.0,
        longest_prompt: int = 24,
        most_tokens: int = 9,
        alone: dict[Any, tuple[int, ...]] | None = None,
        **options: Any,
    ) -> None:
        self.made, self.abilities, self.draw = made, abilities, random.Random(seed)
        self.kinds = {*kinds} if made.layout.leaves else {*kinds} - {"keep", "reuse"}
        self.places, self.in_flight = places, in_flight
        self.longest, self.most = longest_prompt, most_tokens
        self.alone = {} if alone is None else alone
        self.free_rows = list(range(rows))
        self.draw.shuffle(self.free_rows)
        self.waiting: list[Row] = []
        self.live: list[Row] = []
        self.running_on: dict[int, Row] = {}
        """By row of the batch, the sequence that has ended and is still computed."""
        self.aborted: set[str] = set()
        self.by_id: dict[str, Row] = {}
        self.kept: dict[int, tuple[list[int], int]] = {}
        """By slot, the tokens of a finished sequence and how many positions its state has."""
        self.on_host: set[int] = set()
        self.slots = 0
        self.step = 0
        self.seen: dict[str, int] = {}
        self.in_check = StatePlaces()
        self.flights: deque[tuple[StepPlan, list[tuple[Row, int]]]] = deque()
        self.driver = FailingDriver(made.driver, lambda: self.draw_failure.random() < fails)
        self.draw_failure = random.Random(seed + 1)
        self.executor = made.executor(abilities, rows=rows, driver=self.driver, **options)
        for number in range(requests):
            words = random.Random(self.draw.randrange(PROMPTS))
            self.add(f"r{number}", [words.randrange(1, VOCAB) for _ in range(words.randint(1, self.longest))])
        self.arriving = [self.waiting.pop() for _ in range(requests // 2)]

    def add(self, name: str, prompt: list[int]) -> None:
        wanted, key = self.draw.randint(1, self.most), tuple(prompt)
        if len(self.alone.get(key, ())) < wanted:
            self.alone[key] = generate_alone(self.made.module, prompt, self.most)
        row = self.by_id[name] = Row(name, key, self.alone[key][:wanted])
        self.waiting.append(row)

    def count(self, kind: str) -> bool:
        self.seen[kind] = self.seen.get(kind, 0) + 1
        return True

    def may(self, kind: str, chance: float) -> bool:
        return kind in self.kinds and self.draw.random() < chance

    def run(self, steps: int = 400) -> dict[str, int]:
        """Run until all requests have ended; how often each kind of event happened."""
        try:
            for _ in range(steps):
                while len(self.flights) < self.in_flight and self.plan():
                    pass
                if not self.flights:
                    break
                self.collect()
            assert not (self.waiting or self.live or self.arriving or self.flights), f"not done after {steps} steps"
            return self.seen
        finally:
            self.executor.close()

    # One plan

    def plan(self) -> bool:
        """Draw and submit one plan; False if there is nothing left to do."""
        if not self.waiting and not self.live and not self.arriving:
            return False
        if self.arriving and self.draw.random() < 0.2:
            self.waiting.append(self.arriving.pop())
        self.segments: list[Segment] = []
        self.forwards: list[Forward] = []
        self.moves: list[RowMove] = []
        self.sampling: list[tuple[Row, int]] = []
        self.leave()
        decode_first = self.draw.random() < 0.5
        if not decode_first:
            self.compute_apart()
        self.embed()
        self.compute_batch()
        if decode_first:
            self.compute_apart()
        plan = StepPlan(
            self.step, self.segments, parts=(RowPlan(forwards=tuple(self.forwards), moves=tuple(self.moves)),)
        )
        self.step += 1
        self.count("step")
        self.in_check.apply(plan)
        self.flights.append((plan, self.sampling))
        self.executor.submit(plan)
        return True

    def move(self, kind: Any, row: int = -1, slot: int = -1, length: int = 0) -> None:
        self.moves.append(RowMove(len(self.forwards), kind, row, slot, length))
        self.count(kind)

    def vacate(self, row: Row, place: str) -> None:
        self.free_rows.append(row.row)
        row.row, row.place = -1, place

    def in_doubt(self, row: Row) -> bool:
        """Whether tokens of the row are in flight."""
        return row.sampled > len(row.known)

    def leave(self) -> None:
        """Ended rows leave, some are kept; some that run are preempted or aborted; some come back."""
        for row in list(self.live):
            if row.ended and row.place in ("batch", "apart"):
                self.live.remove(row)
                if row.place == "batch" and self.may("run_on", 0.3):
                    self.running_on[row.row] = row
                    row.place = "run on"
                    self.count("run_on")
                elif not self.in_doubt(row) and self.may("keep", 0.8):
                    self.slots += 1
                    self.keep(row, self.slots, row.computed)
                    self.kept[self.slots] = (row.tokens, row.computed)
                    self.vacate(row, "gone")
                else:
                    self.move("drop", row.row)
                    self.vacate(row, "gone")
            elif not row.ended and row.place in ("batch", "apart") and row.computed and self.may("abort", 0.02):
                self.live.remove(row)
                self.aborted.add(row.id)
                self.move("drop", row.row)
                self.vacate(row, "gone")
                self.count("abort")
            elif row.place in ("batch", "apart") and row.computed and self.may("preempt", 0.06):
                self.slots += 1
                row.slot = self.slots
                self.keep(row, row.slot, row.computed)
                self.vacate(row, "slot")
                self.count("preempt")
            elif row.place == "batch" and not self.in_doubt(row) and self.may("again", 0.03):
                self.move("drop", row.row)
                self.vacate(row, "waiting")
                row.computed = 0
                self.live.remove(row)
                self.waiting.append(row)
                self.count("again")
            elif row.place == "slot" and self.free_rows and not self.in_doubt(row) and self.draw.random() < 0.4:
                row.row, row.place = self.free_rows.pop(), "apart"
                self.move("load", row.row, row.slot, row.computed)
                self.move("forget", slot=row.slot)
        for number, row in list(self.running_on.items()):
            if self.draw.random() < 0.3:
                self.move("drop", number)
                del self.running_on[number]
                self.vacate(row, "gone")
        for slot, _ in list(self.kept.items()):
            if slot not in self.on_host and self.draw.random() < 0.2:
                self.move("offload", slot=slot)
                self.on_host.add(slot)
            elif self.draw.random() < 0.02:
                self.move("forget", slot=slot)
                del self.kept[slot]

    def keep(self, row: Row, slot: int, length: int) -> None:
        on_host = self.draw.random() < 0.5
        if on_host:
            self.on_host.add(slot)
        self.move("store" if on_host else "keep", row.row, slot, length)

    def start(self, row: Row) -> None:
        row.row = self.free_rows.pop()
        self.waiting.remove(row)
        self.live.append(row)

    def add_segment(self, row: Row, stop: int) -> None:
        """The next segment of a row."""
        goal = len(row.prompt) + len(row.known) if not row.prefilled else row.computed + 1
        tokens = row.tokens[row.computed : stop]
        if row.prefilled and len(tokens) == 0:
            tokens = [PENDING]
        assert len(tokens) == stop - row.computed
        last = stop == goal
        self.segments.append(Segment(row.id, row.row, row.computed, stop, tuple(tokens), GREEDY if last else None))
        row.computed = stop
        if last:
            row.sampled = stop - len(row.prompt) + 1
            self.sampling.append((row, row.sampled - 1))
        else:
            self.count("chunk")

    def compute_apart(self) -> None:
        """A group of whole prompts, or one chunk."""
        for row in [row for row in self.live if row.place == "apart" and not row.prefilled]:
            goal = len(row.prompt) + len(row.known)
            if row.computed and self.draw.random() < 0.8:
                stop = self.draw.randint(row.computed + 1, goal) if "chunk" in self.kinds else goal
                self.add_segment(row, stop)
                self.forwards.append(Forward(len(self.segments), apart=True))
        fresh = self.waiting[: len(self.free_rows)]
        if not fresh or self.draw.random() < 0.4:
            return
        fresh = fresh[: self.draw.randint(1, 3) if "group" in self.kinds else 1]
        for row in fresh:
            self.start(row)
            row.place = "apart"
        if len(fresh) > 1:
            self.count("group")
            for row in fresh:
                self.add_segment(row, len(row.tokens))
        else:
            (row,) = fresh
            self.reuse(row)
            stop = self.draw.randint(row.computed + 1, len(row.tokens)) if self.may("chunk", 0.5) else len(row.tokens)
            self.add_segment(row, stop)
        self.forwards.append(Forward(len(self.segments), apart=True))

    def reuse(self, row: Row) -> None:
        """Begin a row with the state of a finished sequence: its prompt becomes the old tokens and more."""
        if not self.kept or row.known or not self.may("reuse", 0.9):
            return
        slot = self.draw.choice([*self.kept])
        tokens, length = self.kept[slot]
        if self.abilities.croppable:
            length = self.draw.randint(1, length)
        prompt = [*tokens[:length], *row.prompt][: LONGEST - self.most - 2]
        if len(prompt) <= length:
            return
        self.add(row.id, prompt)
        renewed = self.waiting.pop()
        self.by_id[row.id] = row
        row.prompt, row.expected, row.computed = renewed.prompt, renewed.expected, length
        self.move("load", row.row, slot, length)
        self.count("reuse")

    def embed(self) -> None:
        """Some of the rows that are prefilled join the batch."""
        for row in [row for row in self.live if row.place == "apart" and row.prefilled and not row.ended]:
            if len(self.batch) + len(self.running_on) < self.places and self.draw.random() < 0.8:
                row.place = "batch"
                self.move("embed", row.row, length=row.computed)

    @property
    def batch(self) -> list[Row]:
        return [row for row in self.live if row.place == "batch"]

    def compute_batch(self) -> None:
        """Decode all rows of the batch, and whole prompts beside them."""
        before = len(self.segments)
        batch = self.batch
        self.draw.shuffle(batch)
        for row in batch:
            self.add_segment(row, row.computed + 1)
        room = self.places - len(batch) - len(self.running_on)
        fresh = [row for row in self.waiting[: max(0, min(room, len(self.free_rows)))] if self.may("shape", 0.5)]
        for row in fresh:
            self.start(row)
            row.place = "batch"
            self.count("shape")
            self.add_segment(row, len(row.tokens))
        if len(self.segments) > before or self.running_on:
            self.forwards.append(Forward(len(self.segments), ended=tuple(self.running_on)))

    # One result

    def collect(self) -> None:
        plan, sampling = self.flights.popleft()
        result = self.executor.collect()
        if not self.flights:
            check_batch(self.executor.rows)
            if self.executor.rows.compact:
                self.executor.rows.check()
        assert result.step == plan.step
        counts = result.counts if result.counts is not None else [1] * len(sampling)
        assert len(counts) == len(sampling) and sum(counts) == len(result.tokens)
        tokens = iter(result.tokens)
        for (row, index), given in zip(sampling, counts, strict=True):
            if given:
                token = next(tokens)
                assert token == row.expected[index], (
                    f"{row.id} of {len(row.prompt)} tokens gave {token} as token {index} in step {plan.step}; "
                    f"alone it gives {row.expected}"
                )
                assert index == len(row.known)
                self.count("token")
                row.known.append(token)
        self.lose({*result.part(RowResult).lost})

    def lose(self, lost: set[str]) -> None:
        """Lost sequences start again; what plans in flight ask for them computes nothing."""
        for row in [self.by_id[name] for name in lost]:
            self.count("lost")
            for place in (self.in_check.batch, self.in_check.apart):
                place.pop(row.row, None)
            self.in_check.slots.pop(row.slot, None)
            self.running_on.pop(row.row, None)
            if row.row != -1:
                self.vacate(row, "gone")
            if row in self.live:
                self.live.remove(row)
            row.lose()
            if len(row.known) < len(row.expected) and row.id not in self.aborted:
                self.waiting.append(row)
