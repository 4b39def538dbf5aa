"""ManyDevice: the devices of all ranks as one. Every rank runs the same plans over its own part of the model."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from typing import Any, NamedTuple

from holdfast.core.config import CoreConfig
from holdfast.core.layout import Layout
from holdfast.core.types import Grammar
from holdfast.engine.ranks.messages import (
    Allocate,
    Announce,
    BeginHost,
    Compile,
    CompileGrammar,
    Done,
    Loaded,
    Measure,
    Measured,
    PlanWriter,
    Prepare,
    Reported,
    Stepped,
    TimeLinks,
    read_parts,
    write_parts,
)
from holdfast.engine.ranks.paged import weights_of
from holdfast.engine.ranks.part_results import PartResults, split
from holdfast.engine.ranks.ranks import BEAT_SECONDS, HOST_BLOCKS, HOST_READY, PART_SECONDS, STEP_SECONDS, Ranks
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.execution.host_memory import HostPart, StatesPart, after_blocks
from holdfast.lm.execution.link_times import LinkTimes
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.execution.paged_memory import PagedMemory
from holdfast.lm.execution.part import DevicePart, Kind
from holdfast.lm.kernels.attention.protocol import Attention
from holdfast.lm.models.base import Model
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.types import (
    CopyTime,
    DeviceExecutor,
    EngineShape,
    HostTier,
    LanguageDevice,
    MemoryMeasurement,
    SharedBytes,
    StepPlan,
    StepResult,
    TierCopied,
)
from holdfast.lm.types.news import PartNews

log = logging.getLogger("holdfast.engine")


class ManyDevice(LanguageDevice):
    """A model that several ranks share, each on a device of its own. This process is rank 0."""

    def __init__(self, own: PagedDevice, ranks: Ranks, loaded: Sequence[Loaded]) -> None:
        """`own` is rank 0's part; `loaded` are the other ranks' reports of their parts."""
        self._own, self._ranks, self._loaded = own, ranks, loaded
        self.block_bytes = own.block_bytes + sum(other.block_bytes for other in loaded)
        """Bytes of a block of the cache, on all ranks together."""
        self.state_bytes = own.model.spec.state_bytes + sum(other.state_bytes for other in loaded)
        """Bytes of the recurrent states of one sequence, on all ranks together."""
        self.max_step_tokens = own.max_step_tokens
        """Most tokens of one step."""

    @property
    def name(self) -> str:
        """The name under which the model is served."""
        return self._own.name

    @property
    def parts(self) -> Sequence[DevicePart]:
        """Rank 0's parts."""
        return self._own.parts

    @property
    def kind(self) -> str:
        return self._own.kind

    @property
    def precision(self) -> str:
        """The types of weights, activations and cache, in words.

        It also names what computes other stages, if that differs from the first: their state has other bits.
        """
        others = sorted({each.arithmetic for each in self._loaded} - {self._own.model.spec.arithmetic})
        return ", and on other ranks ".join([self._own.precision, *others])

    @property
    def captures(self) -> bool:
        return self._own.captures

    @property
    def config(self) -> CoreConfig:
        """The engine's configuration."""
        return self._own.config

    @property
    def description(self) -> str:
        """The devices in words."""
        return in_words(self._own.description, self._ranks.layout)

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        model = self._own.model
        assert isinstance(model, Decoder)
        return model.decoder.num_layers

    @property
    def model(self) -> Model:
        """Rank 0's part of the model."""
        return self._own.model

    @property
    def memory(self) -> PagedMemory:
        """The memory that rank 0 has allocated."""
        return self._own.memory

    @property
    def attention(self) -> Attention[Any]:
        """Rank 0's attention."""
        return self._own.attention

    @cached_property
    def executor(self) -> ManyExecutor:
        """The executor of all ranks. Raises RuntimeError before `allocate`."""
        return ManyExecutor(self._own.executor, self._ranks, captures=self.captures)

    @property
    def host(self) -> ManyHost | None:
        return None if self._own.host is None else ManyHost(self._own.host, self._ranks)

    @cached_property
    def host_parts(self) -> list[HostPart]:
        """The bytes of the host tier's blocks by rank; empty without one. Raises RuntimeError before `allocate`.

        They are as all ranks have them once a copy is complete (`StepResult`). The configuration must move blocks.
        """
        kept = self.memory.host_cache
        if kept is None:
            return []
        others = zip(self._ranks.hosts, self._loaded, strict=True)
        parts = [HostPart.shared(memory, kept.num_blocks, loaded.block_bytes) for memory, loaded in others]
        return [*self._own.host_parts, *parts]

    @cached_property
    def state_parts(self) -> list[StatesPart]:
        """The bytes of recurrent states on the host by rank; empty without any. See `host_parts`."""
        own = self._own.state_parts
        found = [*own]
        for block in self._own.host_parts if own else ():
            for memory, loaded in zip(self._ranks.hosts, self._loaded, strict=True):
                start = after_blocks(len(block.data) // block.block_bytes, loaded.block_bytes)
                found.append(StatesPart.shared(memory, start, own[0].slots, loaded.state_bytes))
        return found

    @property
    def weights(self) -> str:
        """A digest of all ranks' weights, where there are tiers below the host tier. Raises ValueError."""
        digests = [weights_of(self._own), *(loaded.weights for loaded in self._loaded)]
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def part(self, kind: type[Kind]) -> Kind:
        """Rank 0's part of this class. Raises LookupError if it has none."""
        return self._own.part(kind)

    def expect(self, grammar: Grammar) -> None:
        """Let the rank that draws compile a grammar in time, where that is another. Raises RankFailure."""
        self._ranks.send(CompileGrammar(grammar))

    def announce(self, news: PartNews) -> None:
        """Let the parts of all other ranks learn something, before plans that are made later. Raises RankFailure."""
        self._ranks.send(Announce(write_parts((news,))))

    def compile(self) -> None:
        """Compile on rank 0, then on the others, which find most kernels compiled."""
        self._ranks.do(self._own.compile)
        self._ranks.together(Compile(), lambda: None)

    def measure(self) -> MemoryMeasurement:
        """The memory of all ranks together. A block counts on all ranks. The rank with the fewest limits them."""
        whole = SharedBytes(self.block_bytes, self.state_bytes)
        own, answers = self._ranks.together(Measure(*whole), partial(self._own.measure, whole))
        others = [answer.memory for answer in answers if isinstance(answer, Measured)]
        self._measured = own
        return combined([own, *others], self._ranks.layout, self.kind)

    def allocate(self, sizes: MemoryMeasurement) -> EngineShape:
        counts = sizes.num_blocks, sizes.num_host_blocks, sizes.snapshots, sizes.host_snapshots
        own = self._measured.with_blocks(*counts)
        shape, _ = self._ranks.together(Allocate(*counts), partial(self._own.allocate, own))
        self._ranks.begin_steps()
        states = shape.states and replace(shape.states, slot_bytes=self.state_bytes)
        return replace(shape, precision=self.precision, states=states)

    def time_links(self) -> LinkTimes:
        """Time the messages between ranks, while no step runs."""
        times, _ = self._ranks.together(TimeLinks(), self._own.time_links)
        return times


def in_words(device: str, layout: Layout) -> str:
    """The devices of all ranks in words: `4 × NVIDIA H200 (tp 2, pp 2)`."""
    sizes = [f"{name} {size}" for name, size in (("tp", layout.tp), ("pp", layout.pp)) if size > 1]
    return f"{layout.ranks} × {device} ({', '.join(sizes)})"


def combined(memories: Sequence[MemoryMeasurement], layout: Layout, kind: str) -> MemoryMeasurement:
    """The memory of all ranks as one.

    Each holds its part of every block and of every snapshot, so the least numbers of them count.
    """
    block = sum(each.block for each in memories)
    return MemoryMeasurement(
        device=in_words(memories[0].device, layout),
        # On a CPU all ranks have the same memory.
        total=sum(each.total for each in memories) if kind == "cuda" else memories[0].total,
        weights=sum(each.weights for each in memories),
        activations=sum(each.activations for each in memories),
        cache=block * min(each.num_blocks for each in memories),
        block=block,
        host_cache=block * min(each.num_host_blocks for each in memories),
        adapters=sum(each.adapters for each in memories),
        rows=sum(each.rows for each in memories),
        snapshots=min(each.snapshots for each in memories),
        host_snapshots=min(each.host_snapshots for each in memories),
    )


class ManyHost(HostTier):
    """The host tier of all ranks. A block can be used once all have made their part of it usable."""

    def __init__(self, own: HostTier, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    @property
    def ready(self) -> int:
        return min(self._own.ready, self._ranks.least(HOST_READY))

    @property
    def blocks(self) -> int:
        return min(self._own.blocks, self._ranks.least(HOST_BLOCKS))

    def begin(self) -> None:
        self._ranks.send(BeginHost())
        self._own.begin()


class _Flight(NamedTuple):
    """A plan in flight."""

    step: int
    waits: bool
    """Whether it computes nothing, so that it is complete when all copies are."""
    has_segments: bool = True
    """Whether the later stages report it."""
    seconds: float = STEP_SECONDS
    """The longest that it may take."""


class ManyExecutor(DeviceExecutor):
    """`loop.contracts.Executor` for all ranks: each gets every plan, in order, and runs its part of it.

    Tokens come from the first rank of the last stage. A copy is complete when it is on every rank. Once a rank has
    failed, all raises RankFailure.
    """

    def __init__(self, own: PagedExecutor, ranks: Ranks, *, captures: bool) -> None:
        """`captures` says whether there may be graphs to capture in pauses."""
        self._own, self._ranks, self._captures = own, ranks, captures
        layout = ranks.layout
        self._later = [layout.ranks_of(stage)[0] for stage in range(1, layout.pp)]
        """The first ranks of later stages. Each reports how long its steps took; the last one has the tokens."""
        self._writer = PlanWriter()
        self._in_flight: deque[_Flight] = deque()
        self._stepped: dict[int, deque[Stepped]] = {rank: deque() for rank in self._later}
        """Each rank's reports, in order, of steps that were not collected."""
        self._parts = PartResults(layout.ranks)
        self._copying: dict[tuple[int, bool], list[CopyTime]] = {}
        """Copies that ranks have completed, in order, by step and direction (True: to the device)."""

    def submit(self, plan: StepPlan) -> None:
        self._ranks.send(self._writer.write(plan))
        try:
            self._own.submit(plan)
        except Exception as error:
            raise self._ranks.cause(error) from error
        self._copying |= {
            (plan.step, inward): []
            for inward, copies in ((True, plan.copies.swap_in), (False, plan.copies.swap_out))
            if copies
        }
        self._parts.submitted(plan)
        seconds = PART_SECONDS if any(part.is_long for part in plan.parts) else STEP_SECONDS
        self._in_flight.append(_Flight(plan.step, not plan.computes, bool(plan.segments), seconds))

    def collect(self) -> StepResult:
        flight = self._in_flight.popleft()
        deadline = time.monotonic() + flight.seconds
        while not self._own.wait(BEAT_SECONDS):
            self._check(flight, deadline)
        try:
            result = self._own.collect()
        except Exception as error:
            raise self._ranks.cause(error) from error
        self._note(result.copied.times)
        own = split(result.parts)
        self._parts.reported(0, result.step, own[True])
        self._take()
        while not self._complete(flight):
            self._ranks.wait(BEAT_SECONDS)
            self._check(flight, deadline)
            self._take()
        result = replace(result, parts=(*own[False], *self._parts.results(flight.step)))
        if self._later and flight.has_segments:
            parts = [self._stepped[rank].popleft() for rank in self._later]
            seconds = (result.seconds, *(part.seconds for part in parts))
            last = parts[-1]
            result = replace(
                result,
                tokens=last.tokens,
                counts=last.counts,
                logprobs=last.logprobs,
                seconds=sum(seconds),
                stages=seconds,
            ).with_parts(*read_parts(last.parts))
        return self._with_copies(result)

    def part(self, kind: type[Kind]) -> Kind:
        """Rank 0's part of this class. Raises LookupError if it has none."""
        return self._own.part(kind)

    def prepare(self) -> bool:
        """Use a pause to capture one more graph on every rank. False if none is left on any."""
        if not self._captures or self._in_flight:
            return False
        own, answers = self._ranks.together(Prepare(), self._own.prepare)
        self._captures = own or any(isinstance(answer, Done) and answer.result for answer in answers)
        return self._captures

    @property
    def due(self) -> float:
        return self._own.due if self._captures else 0.0

    def close(self) -> None:
        """End the steps in flight on all ranks, then the ranks. Once one has failed, none is waited for."""
        try:
            while self._in_flight:
                self.collect()
        except Exception as error:
            log.debug("holdfast: steps in flight were abandoned: %s", error)
        failed = bool(self._ranks.failure)
        self._ranks.close()
        if not failed:  # else a step may wait on the device for one that will never come
            self._own.close()

    def _check(self, flight: _Flight, deadline: float) -> None:
        """Raise RankFailure if a rank has failed, or if the deadline has passed."""
        self._ranks.check()
        if time.monotonic() > deadline:
            self._ranks.give_up(flight.step, flight.seconds)

    def _take(self) -> None:
        """Record the messages of the other ranks."""
        for number, said in self._ranks.of_steps():
            if isinstance(said, Stepped):
                self._stepped[number].append(said)
            elif isinstance(said, Reported):
                self._parts.reported(number, said.step, read_parts(said.parts))
            else:
                self._note(said.copies)

    def _note(self, copies: Iterable[CopyTime]) -> None:
        """Record copies that one rank has completed."""
        for copy in copies:
            self._copying[copy.step, copy.inward].append(copy)

    def _complete(self, flight: _Flight) -> bool:
        """Whether all reports that make up a step's result have come."""
        if not self._parts.complete(flight.step, waits=flight.waits):
            return False
        if flight.waits:
            return all(step > flight.step or self._copied(done) for (step, _), done in self._copying.items())
        return not flight.has_segments or all(self._stepped.values())

    def _copied(self, done: list[CopyTime]) -> bool:
        return len(done) == self._ranks.layout.ranks

    def _with_copies(self, result: StepResult) -> StepResult:
        """Rank 0's result with the copies that are complete on all ranks. Each took as long as on the slowest."""
        found: list[CopyTime] = []
        for (step, inward), done in list(self._copying.items()):
            if self._copied(done):
                del self._copying[step, inward]
                size, seconds = sum(copy.bytes for copy in done), max(copy.seconds for copy in done)
                found.append(CopyTime(step, inward, size, seconds))
        last_in, last_out = (
            min((step - 1 for step, inward in self._copying if inward is direction), default=inf)
            for direction in (True, False)
        )
        return replace(
            result,
            copied=TierCopied(
                swapped_out=int(min(result.copied.swapped_out, last_out)),
                swapped_in=int(min(result.copied.swapped_in, last_in)),
                times=tuple(found),
            ),
        )
