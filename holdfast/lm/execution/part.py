"""PartExecutor: the work of a part in steps. DevicePart: the state of a part on the device before there is a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch

from holdfast.lm.copy_streams import CopyStream
from holdfast.lm.execution.batch import TOKENS_ONLY, ModelInputs, PackedStep, StagedStep
from holdfast.lm.execution.paged_memory import PagedMemory
from holdfast.lm.execution.stage_link import StageLink
from holdfast.lm.models.base import StreamTaps
from holdfast.lm.types import EngineShape, PartPlan, PartResult, StepPlan
from holdfast.lm.types.news import PartNews

NOTHING: AbstractContextManager[object] = nullcontext()


class Launched(Protocol):
    """Work that a part has launched on the device, separate from the segments."""

    def result(self) -> PartResult:
        """The result of the work. Waits for the device."""
        ...


class Found(Protocol):
    """A part's result from the hidden states of a step."""

    def on_host(self) -> Found:
        """A copy in the host's memory, complete once the work on the current stream is done."""
        ...

    def result(self) -> PartResult:
        """The part's result, once all values are on the host."""
        ...


HiddenWork = Callable[[torch.Tensor, torch.Tensor], Found]
"""Function that computes a result from the hidden states of a step's tokens [T, hidden] and sampled rows [R, hidden].

It does not wait for the device.
"""


DrawnWork = Callable[[PackedStep, torch.Tensor], Found]
"""Function that computes a result from a step's inputs and the tokens [R] int64 that its rows drew.

It does not wait for the device. The inputs of the tapped layers are in `StreamTaps.into` (`DevicePart.taps`).
"""


class DrawnStep(Protocol):
    """A step whose draw has been launched."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that the step has drawn. Waits for the device."""
        ...


class DrawRules(ABC):
    """Rules for the tokens that the rows of one step may draw.

    The rules of a step may follow from the tokens of earlier steps. Methods are called in plan order, by one thread at
    a time: for each step, first `masks`, then `drawn`, then `read` and `results`.
    """

    restricts = False
    """Whether some row may not draw every token. Otherwise `masks` is not called."""
    reads = False
    """Whether later rules follow from the step's tokens. Otherwise `drawn`, `read` and `results` are not called."""

    @property
    def waits(self) -> bool:
        """Whether `masks` would wait for the tokens of a step that may still be on the device."""
        return False

    @abstractmethod
    def masks(self) -> torch.Tensor:
        """The masks [M, W] int32 of the rows in `StagedStep.masked`, on the device."""

    def drawn(self, step: DrawnStep) -> None:  # noqa: B027
        """Called when the step's draw has been launched."""

    def read(self) -> None:  # noqa: B027
        """Read the step's tokens, after those of earlier steps. Waits for the device."""

    def results(self) -> Sequence[PartResult]:
        """Results that follow from the step's tokens. Called once the later steps that waited for them are drawn."""
        return ()


class EveryToken(DrawRules):
    """Rules that restrict no row."""

    def masks(self) -> torch.Tensor:
        return torch.empty((0, 0), dtype=torch.int32)


EVERY_TOKEN: DrawRules = EveryToken()


class PartExecutor:
    """The work of one part in the steps of a paged executor.

    A part overrides the hooks that it needs; others are not called. Work on the device goes to the current stream, in
    the order of the hooks, and waits for nothing unless the hook's doc says so.
    """

    plans: ClassVar[tuple[type[PartPlan], ...]] = ()
    """The classes of plans that the part reads. A step with a plan that no part reads is refused."""

    def before(self, plan: StepPlan) -> None:
        """Called when a plan is about to run, in the thread that runs the steps."""

    def hidden(self, staged: StagedStep) -> Sequence[HiddenWork]:
        """Functions that compute the part's results from the hidden states of a step."""
        return ()

    def follow(self, staged: StagedStep) -> Sequence[DrawnWork]:
        """Functions that compute the part's results once a step's tokens are drawn.

        On CUDA the host does not wait for them: it has the step's tokens before, and the results with the next step's.

        The step keeps the inputs of the part's tapped layers if there are any such functions. Called when the step is
        submitted, in plan order; not called on a device that draws no tokens.
        """
        return ()

    def rules(self, staged: StagedStep) -> DrawRules:
        """The rules for the rows in `staged.masked` of a step, which has at least one such row.

        At most one part of an executor has this hook. It is not called on a device that draws no tokens.
        """
        return EVERY_TOKEN

    def after(self, plan: StepPlan) -> Sequence[Launched]:
        """Called when the segments of a plan have run or are launched, in the thread that runs the steps."""
        return ()

    def completed(self, *, wait: bool) -> Sequence[PartResult]:
        """Results of other work that has ended; with `wait`, of all work begun. Called when a step is collected."""
        return ()

    def idle(self) -> AbstractContextManager[object]:
        """Context for capturing a graph: within it, no thread of the part may allocate pinned memory."""
        return NOTHING

    def learn(self, news: PartNews) -> None:
        """Get news of the planner's side. Called on every rank but the first, before the plans made after it."""

    def close(self) -> None:
        """End the part's threads. The device is idle by then."""


Kind = TypeVar("Kind")


class PartHooks:
    """The parts of an executor in order. For each hook, it lists the parts that override it; only these are called."""

    __slots__ = ("_reads", "after", "before", "close", "completed", "follow", "hidden", "idle", "parts", "rules")

    def __init__(self, parts: Iterable[PartExecutor], plans: Iterable[type[PartPlan]] = ()) -> None:
        """`plans` are plans that the executor itself reads. Raises ValueError for two parts with draw rules."""
        self.parts = tuple(parts)
        self.before = self._overriding("before")
        self.hidden = self._overriding("hidden")
        self.follow = self._overriding("follow")
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
        """Raise ValueError for a step with a plan that nothing here reads."""
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
    """The memory and streams over which a part's executor is made."""

    memory: PagedMemory
    make_stream: Callable[[], CopyStream]
    """Makes streams for copies that run during the computation."""
    link: StageLink | None = None
    """The link to the other stages, if the device is one of a pipeline."""


class DevicePart(ABC):
    """One part's state on a device. It is made when the weights are on the device."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device that the part keeps as long as the engine runs."""
        return 0

    @property
    def guesses(self) -> int:
        """Most tokens that the part's work guesses for a row (`GUESSED`)."""
        return 0

    @property
    def cache_share(self) -> float:
        """Share of the cache's memory that goes to snapshots of recurrent states, from 0 to 1."""
        return 0.0

    @property
    def sends_back(self) -> bool:
        """Whether its work sends tensors to the stage before it in a pipeline."""
        return False

    def workspace_bytes(self) -> int:
        """Largest number of bytes that the part's work takes besides the cache. Measured while there is no cache."""
        return 0

    def inputs(self, max_tokens: int, samples: int) -> ModelInputs:
        """The part's inputs of the model, in a batch of this size. At most one part of a device has any."""
        return TOKENS_ONLY

    def taps(self, max_tokens: int) -> StreamTaps | None:
        """The layers whose inputs the part reads, with memory for steps of this size; None: it reads none.

        At most one part of a device has any. Called once.
        """
        return None

    def widest(self, rows: int) -> Sequence[PartPlan]:
        """The part's plans in the steps that take the most memory, each of `rows` segments."""
        return ()

    def widened(self) -> AbstractContextManager[object]:
        """Context for measuring the widest steps: within it, the part's work is the largest possible."""
        return NOTHING

    def shaped(self, shape: EngineShape) -> EngineShape:
        """An engine's shape with the part's additions."""
        return shape

    def learn(self, news: PartNews) -> None:  # noqa: B027
        """`PartExecutor.learn`, also before there is an executor."""

    @abstractmethod
    def executor(self, allocated: Allocated) -> PartExecutor:
        """The part's executor over an allocated cache. Called once."""
