"""Grammars on a device: the masks of rows whose answers follow a grammar, and the tokens that must come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property

import torch

from holdfast.lm.execution.batch import StagedStep
from holdfast.lm.execution.part import Allocated, DevicePart, DrawnStep, DrawRules, PartExecutor
from holdfast.lm.grammar.compiler import GrammarCompiler
from holdfast.lm.grammar.matchers import Matchers
from holdfast.lm.grammar.rows import Answer, ConstrainedRow
from holdfast.lm.grammar.sources import mask_words
from holdfast.lm.parts.grammars.values import GrammarPlan, GrammarResult
from holdfast.lm.types import PartResult, Segment, StepPlan


class MaskBuffers:
    """Buffers for masks, which are copied to a GPU while it computes the step that they are for."""

    def __init__(self, rows: int, words: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty(rows, words, dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.empty_like(self._host, device=device) if on_gpu else self._host
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def host(self, rows: int) -> torch.Tensor:
        """Room for the masks of `rows` rows [rows, words]. The draw by the last masks must have ended."""
        return self._host[:rows]

    def upload(self, rows: int) -> torch.Tensor:
        """The masks on the device, for what is launched from now on."""
        masks = self._device[:rows]
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                masks.copy_(self._host[:rows], non_blocking=True)
            torch.cuda.current_stream(masks.device).wait_stream(self._stream)
        return masks


class GrammarRules(DrawRules):
    """The restrictions on the draws of one step's rows by their grammars."""

    restricts = reads = True

    def __init__(self, executor: GrammarExecutor, rows: Sequence[ConstrainedRow], answers: Sequence[Answer]) -> None:
        """`rows` follow a grammar; `answers` belong to rows that have a new sequence."""
        self._executor, self.rows, self._answers = executor, rows, answers

    @property
    def waits(self) -> bool:
        return self._executor.unread

    def masks(self) -> torch.Tensor:
        return self._executor.masks(self.rows, self._answers)

    def drawn(self, step: DrawnStep) -> None:
        self._executor.drawn(self, step)

    def read(self) -> None:
        self._executor.read(self)

    def results(self) -> Sequence[PartResult]:
        forced = self._executor.matchers.forced(self.rows)
        return (GrammarResult(forced),) if forced else ()


class GrammarExecutor(PartExecutor):
    """Follows the answers of rows with grammars, on the first of the devices that draw.

    The masks of a step follow from the tokens of all earlier steps. Drawn tokens that are not read yet are read first.
    """

    plans = (GrammarPlan,)

    def __init__(self, matchers: Matchers, rows: int, device: torch.device) -> None:
        """A step has at most `rows` sampled rows."""
        self.matchers = matchers
        self._most_rows, self._device = rows, device
        self._unread: deque[tuple[GrammarRules, DrawnStep]] = deque()
        """Drawn steps whose tokens the matchers have not read."""

    @property
    def unread(self) -> bool:
        """Whether the tokens of a drawn step are still to be read."""
        return bool(self._unread)

    def rules(self, staged: StagedStep) -> GrammarRules:
        return GrammarRules(self, constrained_rows(staged), staged.plan.part(GrammarPlan).answers)

    def masks(self, rows: Sequence[ConstrainedRow], answers: Sequence[Answer]) -> torch.Tensor:
        """The masks of the next step's rows [M, words] int32, on the device. Waits for the tokens of earlier steps."""
        while self._unread:
            self._read_next()
        self.matchers.masks(rows, answers, self._buffers.host(len(rows)).numpy())
        return self._buffers.upload(len(rows))

    def drawn(self, rules: GrammarRules, step: DrawnStep) -> None:
        """Note that the draw of the step with these rules was launched."""
        self._unread.append((rules, step))

    def read(self, rules: GrammarRules) -> None:
        """Read the tokens of steps up to the one with these rules."""
        while any(each is rules for each, _ in self._unread):
            self._read_next()

    @cached_property
    def _buffers(self) -> MaskBuffers:
        return MaskBuffers(self._most_rows, self.matchers.words, self._device)

    def _read_next(self) -> None:
        """Let the matchers read the tokens of the oldest step that they have not read. Waits for the device."""
        rules, step = self._unread.popleft()
        self.matchers.read(rules.rows, step.tokens)


class GivenMasks(DrawRules):
    """The rules of a step whose masks come from the first of the devices that draw it."""

    restricts = True

    def __init__(self, rows: int, words: int, device: torch.device) -> None:
        self._shape, self._device = (rows, words), device

    def masks(self) -> torch.Tensor:
        return torch.zeros(self._shape, dtype=torch.int32, device=self._device)


class GivenGrammarExecutor(PartExecutor):
    """Has room for the masks of rows with grammars, on the other devices that draw: the first one gives them."""

    plans = (GrammarPlan,)

    def __init__(self, words: int, device: torch.device) -> None:
        """`words` is the number of 32-bit words of a mask."""
        self._words, self._device = words, device

    def rules(self, staged: StagedStep) -> GivenMasks:
        return GivenMasks(len(staged.masked), self._words, self._device)


class RowGrammars:
    """Grammars on padded rows, where a plan has a draw for each forward. See `lm.padded.draw_rules.RowRules`.

    A draw with masks waits for the tokens of all draws before it: a step with grammars is computed when the one before
    it has ended. Tokens that a grammar forces are drawn one by one, as no row of a batch computes several at a time.
    """

    def __init__(self, executor: GrammarExecutor) -> None:
        self._executor = executor
        self._answers: dict[int, Answer] = {}
        """By row, the answers of the plan whose rows have not drawn yet."""

    def begin(self, plan: StepPlan) -> None:
        self._answers = {answer.row: answer for answer in plan.part(GrammarPlan).answers}

    def of(self, segments: Sequence[Segment]) -> GrammarRules:
        rows = [
            ConstrainedRow(at, each.row, each.start, each.stop, each.tokens, each.sampling, at)
            for at, each in enumerate(segments)
            if each.sampling is not None and each.sampling.grammar is not None
        ]
        answers = [self._answers.pop(each.row) for each in rows if each.row in self._answers]
        return GrammarRules(self._executor, rows, answers)


class GrammarDevice(DevicePart):
    """Grammars on the first of the devices that draw, and on rank 0, which tests them all."""

    def __init__(self, compiler: GrammarCompiler, threads: int | None = None) -> None:
        """`threads` compute masks at a time; by default half of the machine's cores."""
        self.compiler, self._threads = compiler, threads

    def executor(self, allocated: Allocated) -> GrammarExecutor:
        batch = allocated.memory.batch
        return GrammarExecutor(Matchers(self.compiler, self._threads), len(batch.last_token), batch.device)

    def row_rules(self, rows: int, device: torch.device) -> RowGrammars:
        """The rules for the draws of padded rows. See `lm.padded.draw_rules.RowPart`."""
        return RowGrammars(GrammarExecutor(Matchers(self.compiler, self._threads), rows, device))


class GivenGrammarDevice(DevicePart):
    """Grammars on the other devices, which compile none."""

    def __init__(self, vocab_size: int) -> None:
        self._words = mask_words(vocab_size)

    def executor(self, allocated: Allocated) -> GivenGrammarExecutor:
        return GivenGrammarExecutor(self._words, allocated.memory.batch.device)


def constrained_rows(staged: StagedStep) -> tuple[ConstrainedRow, ...]:
    """The sampled rows of a step that follow a grammar."""
    plan = staged.plan
    sampled = [(segment, segment.sampling) for segment in plan.segments if segment.sampling is not None]
    most = plan.samples or [1] * len(sampled)
    place_of = [place for place, count in enumerate(most) for _ in range(count)]
    found = []
    for at in staged.masked:
        place = place_of[at]
        (_, row, start, stop, tokens, _), sampling = sampled[place]
        found.append(ConstrainedRow(at, row, start, stop, tokens, sampling, place))
    return tuple(found)
