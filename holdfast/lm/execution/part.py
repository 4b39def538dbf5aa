"""PartExecutor: a part's work in steps. DevicePart: its state on the device before there is a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch

from holdfast.lm.copy_streams import CopyStream
from holdfast.lm.execution.batch import TOKENS_ONLY, ModelInputs, StagedStep
from holdfast.lm.execution.paged_memory import PagedMemory
from holdfast.lm.execution.stage_link import StageLink
from holdfast.lm.types import EngineShape, PartPlan, PartResult, StepPlan
from holdfast.lm.types.news import PartNews

NOTHING: AbstractContextManager[object] = nullcontext()


class Launched(Protocol):
    """Work that the device does, or has done, apart from the segments."""

    def result(self) -> PartResult:
        """The work's result. Waits for the device."""
        ...


class Found(Protocol):
    """A part's result from the hidden states of a step."""

    def on_host(self) -> Found:
        """A copy in the host's memory, complete once the work on the current stream is done."""
        ...

    def result(self) -> PartResult:
        """The part's result, once all is on the host."""
        ...


HiddenWork = Callable[[torch.Tensor, torch.Tensor], Found]
"""Computes something from the hidden states of a step's tokens [T, hidden] and of its sampled rows [R, hidden].

It does not wait for the device.
"""


class DrawnStep(Protocol):
    """A step whose draw was launched."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that the step has drawn. Waits for the device."""
        ...


class DrawRules(ABC):
    """Which tokens the rows of one step may draw.

    The rules of a step may follow from the tokens of the steps before it. Methods are called in plan order, by one
    thread at a time: `masks`, then `drawn`, then `read` and `results`, each for step after step.
    """

    restricts = False
    """Whether some row may not draw every token: only then is `masks` called."""
    reads = False
    """Whether later rules follow from the step's tokens: only then are `drawn`, `read` and `results` called."""

    @property
    def waits(self) -> bool:
        """Whether `masks` would wait for the tokens of a step that the device may still compute."""
        return False

    @abstractmethod
    def masks(self) -> torch.Tensor:
        """The masks [M, W] int32 of the rows `StagedStep.masked`, on the device."""

    def drawn(self, step: DrawnStep) -> None:  # noqa: B027
        """The step's draw was launched."""

    def read(self) -> None:  # noqa: B027
        """Read the step's tokens, and before them those of earlier steps. Waits for the device."""

    def results(self) -> Sequence[PartResult]:
        """Results that follow from the step's tokens. Called once the later steps that waited for them were drawn."""
        return ()


class EveryToken(DrawRules):
    """Rules that restrict no row."""

    def masks(self) -> torch.Tensor:
        return torch.empty((0, 0), dtype=torch.int32)


EVERY_TOKEN: DrawRules = EveryToken()


class PartExecutor:
    """The work of one part in the steps of a paged executor.

    A part overrides the hooks that it needs and is called at no other. Work on the device goes to the current stream,
    in the order of the hooks, and waits for nothing unless the hook says so.
    """

    plans: ClassVar[tuple[type[PartPlan], ...]] = ()
    """The classes of plans that the part reads. A plan with a value that nothing reads is refused."""

    def before(self, plan: StepPlan) -> None:
        """Called when a plan is about to run. In the thread that runs the steps."""

    def hidden(self, staged: StagedStep) -> Sequence[HiddenWork]:
        """Functions that compute the part's results from the hidden states of a step."""
        return ()

    def rules(self, staged: StagedStep) -> DrawRules:
        """The rules for the rows `staged.masked` of a step, which has at least one such row.

        At most one part of an executor has this hook. It is not called on a device that draws no tokens.
        """
        return EVERY_TOKEN

    def after(self, plan: StepPlan) -> Sequence[Launched]:
        """Called when the segments of a plan have run, or are launched. In the thread that runs the steps."""
        return ()

    def completed(self, *, wait: bool) -> Sequence[PartResult]:
        """A step is collected: results of other work that has ended by now. With `wait`, of all work begun so far."""
        return ()

    def idle(self) -> AbstractContextManager[object]:
        """Context in which a graph is captured: no thread of the part may allocate pinned memory within it."""
        return NOTHING

    def learn(self, news: PartNews) -> None:
        """Get news of the planner's side. Called on every rank but the first, before the plans made after it."""

    def close(self) -> None:
        """End the part's threads. The device is idle by then."""


Kind = TypeVar("Kind")


class PartHooks:
    """The parts of an executor in order, and for each hook the parts that override it. Others are not called."""

    __slots__ = ("_reads", "after", "before", "close", "completed", "hidden", "idle", "parts", "rules")

    def __init__(self, parts: Iterable[PartExecutor], plans: Iterable[type[PartPlan]] = ()) -> None:
        """`plans` are classes of plans that the executor reads. Raises ValueError for two parts with draw rules."""
        self.parts = tuple(parts)
        self.before = self._overriding("before")
        self.hidden = self._overriding("hidden")
        self.rules = self._overriding("rules")
        self.after = self._overriding("after")
        self.completed = self._overriding("completed")
        self.idle = self._overriding("idle")
        self.close = self._overriding("close")
        self._reads = frozenset(plans).union(*[part.plans for part in self.parts])
        if len(self.rules) > 1:
            raise ValueError(f"{len(self.rules)} parts have rules for draws, and a row can follow those of one")

    def part(self, kind: type[Kind]) -> Kind:
        """The part of this class. Raises LookupError if there is none."""
        return part_of(self.parts, kind)

    def check(self, plan: StepPlan) -> None:
        """Raise ValueError for a plan with a part that nothing here reads."""
        for part in plan.parts:
            if type(part) not in self._reads:
                name = type(part).__name__
                raise ValueError(f"step {plan.step} has a {name}, and this executor has no part that reads it")

    def _overriding(self, hook: str) -> tuple[PartExecutor, ...]:
        return tuple(part for part in self.parts if getattr(type(part), hook) is not getattr(PartExecutor, hook))


def part_of(parts: Iterable[object], kind: type[Kind]) -> Kind:
    """The object of this class. Raises LookupError if there is none."""
    for part in parts:
        if isinstance(part, kind):
            return part
    raise LookupError(f"there is no {kind.__name__}")


@dataclass(frozen=True, slots=True)
class Allocated:
    """Memory and streams that a part's executor is made over."""

    memory: PagedMemory
    make_stream: Callable[[], CopyStream]
    """Makes streams for copies that run during the computation."""
    link: StageLink | None = None
    """The link to the other stages, if the device is one of a pipeline."""


class DevicePart(ABC):
    """One part's state on a device, from the moment when the weights are there."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device that it holds for good."""
        return 0

    def workspace_bytes(self) -> int:
        """Most bytes that its work takes besides the cache. Measured while there is no cache."""
        return 0

    def inputs(self, max_tokens: int, samples: int) -> ModelInputs:
        """Inputs of the model for the part in a batch of this size. At most one part of a device has any."""
        return TOKENS_ONLY

    def widest(self, rows: int) -> Sequence[PartPlan]:
        """The part's plans in the steps that take most memory, each of `rows` segments."""
        return ()

    def widened(self) -> AbstractContextManager[object]:
        """Context in which the widest steps are measured: the part's work is the largest that it can be."""
        return NOTHING

    def shaped(self, shape: EngineShape) -> EngineShape:
        """An engine's shape with what the part adds to it."""
        return shape

    def learn(self, news: PartNews) -> None:  # noqa: B027
        """`PartExecutor.learn`, also before there is an executor."""

    @abstractmethod
    def executor(self, allocated: Allocated) -> PartExecutor:
        """The part's work in the steps over an allocated cache. Called once."""
