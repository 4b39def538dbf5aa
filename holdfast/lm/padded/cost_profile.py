"""Measures the time of forwards of padded rows, as the points of a `core.cost.PaddedCost`.

Plans run through the executor that serves, so captured decodes and copies of states are measured, too. For each width
one prompt is computed, and its state is copied to all rows of a batch. Its decode is timed, half of the rows leave, and
so on. Then one prompt is computed for each chunk length, and the chunks that end at several contexts are timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.core.cost import PaddedCost
from holdfast.lm.types import (
    EngineShape,
    Forward,
    LanguageExecutor,
    RowMove,
    RowPlan,
    RowResult,
    Sampling,
    Segment,
    StepPlan,
)

WIDTHS = (64, 256, 1024, 4096, 16384)
CHUNKS = (16, 64, 256, 1024, 4096)
"""Row widths and chunk lengths to measure, as far as the engine has room for them."""
FEW_WIDTHS, FEW_CHUNKS = (64, 512), (64, 512)
"""Row widths and chunk lengths to measure for an estimate."""
MOST_ROWS, MOST_ALONE = 64, 4
"""Most rows of a measured decode, batched and with one forward per row. Times of more rows are extrapolated."""
REPEATS = 3
"""Number of decodes of which the fastest counts. The first copies states and loads kernels, the second may be captured.
"""
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
TOKEN = 17
"""The token at every position, if the vocabulary has it. Time does not depend on it."""


def measure_padded_cost(
    executor: LanguageExecutor, shape: EngineShape, *, max_sequences: int, device: str
) -> PaddedCost:
    """Measure decodes by rows and width, and chunks by length and context. `device` is its name in words.

    Nothing may be in flight, and no row may have a state. Afterwards no row has one either. Raises ValueError for an
    engine of packed tokens or for sequences too short to be measured, and RuntimeError if the device runs out of
    memory.
    """
    return _measure(executor, shape, max_sequences, device, WIDTHS, CHUNKS)


def estimate_padded_cost(
    executor: LanguageExecutor, shape: EngineShape, *, max_sequences: int, device: str
) -> PaddedCost:
    """`measure_padded_cost` at two widths and two chunk lengths only."""
    return _measure(executor, shape, max_sequences, device, FEW_WIDTHS, FEW_CHUNKS)


def _measure(
    executor: LanguageExecutor,
    shape: EngineShape,
    max_sequences: int,
    device: str,
    widths: Sequence[int],
    chunks: Sequence[int],
) -> PaddedCost:
    rows = shape.rows
    if rows is None:
        raise ValueError(f"executor is {shape.executor}; a cost of padded rows takes the padded one")
    able = rows.abilities
    most = min(max_sequences, MOST_ROWS if able.batched_decode and able.keeps_state else MOST_ALONE)
    counts = [1 << power for power in range(most.bit_length())]
    longest = shape.max_model_len - REPEATS * len(counts)
    if longest < 2:
        raise ValueError(
            f"max_model_len is {shape.max_model_len}; to measure decodes of up to {counts[-1]} rows it must be at "
            f"least {REPEATS * len(counts) + 2}"
        )
    widest = min(longest, widths[-1])
    asked = [*(at for at in widths if at < widest), widest]
    kept = [at for at in asked if rows.bytes.of(at + rows.quantum) <= rows.memory] or asked[:1]
    budget = min(shape.token_budget, shape.max_step_tokens) if able.chunks else shape.max_step_tokens
    steps = _Steps(executor, shape, budget)
    decodes = {width: steps.decodes(width, counts) for width in kept}
    largest = min(budget, longest, chunks[-1])
    lengths = [*(at for at in chunks if at < largest), largest]
    alone = {length: steps.chunks(length, kept if able.chunks else ()) for length in lengths}
    contexts = kept
    first = kept[0]
    return PaddedCost(
        model=shape.model,
        device=device,
        linear_tokens=tuple(lengths),
        linear_seconds=tuple(alone[length][length] for length in lengths),
        attention_queries=tuple(lengths),
        attention_contexts=tuple(contexts),
        attention_seconds=tuple(
            tuple(_added(alone[length], length, context) for context in contexts) for length in lengths
        ),
        decode_rows=tuple(counts),
        decode_seconds=tuple(_known(decodes, first, count) for count in counts),
        decode_attention=tuple(
            tuple(max(0.0, _known(decodes, at, count) - _known(decodes, first, count)) / count for at in contexts)
            for count in counts
        ),
    )


def _added(by_context: dict[int, float], length: int, context: int) -> float:
    """Extra seconds of a chunk at `context`, or at the nearest measured one, over one at the start of its prompt."""
    nearest = min(by_context, key=lambda at: abs(at - context))
    return max(0.0, by_context[nearest] - by_context[length])


def _known(decodes: dict[int, dict[int, float]], width: int, count: int) -> float:
    """Seconds of a decode of `count` rows; in proportion to the rows if memory had no room for that many."""
    by_count = decodes[width]
    if count in by_count:
        return by_count[count]
    most = max(by_count)
    return by_count[most] * count / most


class _Steps:
    """Runs plans made for measuring, one at a time."""

    def __init__(self, executor: LanguageExecutor, shape: EngineShape, budget: int) -> None:
        """`budget` is the largest number of tokens in a chunk. Raises ValueError for an engine of packed tokens."""
        if shape.rows is None:
            raise ValueError(f"executor is {shape.executor}; steps of padded rows take the padded one")
        self._executor, self._budget, self._rows = executor, budget, shape.rows
        self._token = min(TOKEN, shape.vocab_size - 1)
        self._number = self._prompts = 0

    def decodes(self, width: int, counts: Sequence[int]) -> dict[int, float]:
        """Seconds of a decode by number of rows, for each of `counts` that fits. The first has rows `width` long."""
        room = self._rows.memory // (2 * self._rows.bytes.of(width + self._rows.quantum))
        rows = max((count for count in counts if count < room), default=1)
        length = width - 1
        self._prompts += 1
        for start, stop in self._pieces(0, length):
            self._run([self._segment(0, start, stop, stop == length)], Forward(1, apart=True))
        moves = [RowMove(0, "embed", 0, length=length)]
        if rows > 1:
            moves = [RowMove(0, "keep", 0, 0, length)]
            for row in range(rows):
                moves += [RowMove(0, "load", row, 0, length), RowMove(0, "embed", row, length=length)]
            moves.append(RowMove(0, "forget", slot=0))
        seconds: dict[int, float] = {}
        while rows:
            times = []
            for _ in range(REPEATS):
                segments = [self._segment(row, length, length + 1, True) for row in range(rows)]
                times.append(self._run(segments, Forward(rows), moves))
                moves, length = [], length + 1
            seconds[rows] = min(times)
            left = rows // 2
            moves = [RowMove(0, "drop", row) for row in range(left, rows)]
            rows = left
        self._drop(moves)
        return seconds

    def chunks(self, length: int, contexts: Sequence[int]) -> dict[int, float]:
        """Seconds of a chunk of `length` tokens of one prompt, by the position where it ends.

        It ends at `length`, and at those of `contexts` that leave room for it after the previous chunk.
        """
        seconds: dict[int, float] = {}
        for _ in range(2):  # the first time loads kernels
            self._prompts += 1
            at = 0
            for end in (length, *contexts):
                if end - length < at:
                    continue
                for start, stop in self._pieces(at, end - length):
                    self._run([self._segment(0, start, stop, False)], Forward(1, apart=True))
                taken = self._run([self._segment(0, end - length, end, True)], Forward(1, apart=True))
                seconds[end] = min(taken, seconds.get(end, taken))
                at = end
            self._drop([RowMove(0, "drop", 0)])
        return seconds

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """[start, stop) in chunks, or whole if the model takes no chunks."""
        size = self._budget if self._rows.abilities.chunks else max(1, stop - start)
        return ((at, min(stop, at + size)) for at in range(start, stop, size))

    def _segment(self, row: int, start: int, stop: int, samples: bool) -> Segment:
        name = f"measured-{self._prompts}-{row}"
        return Segment(name, row, start, stop, (self._token,) * (stop - start), GREEDY if samples else None)

    def _drop(self, moves: Sequence[RowMove]) -> None:
        """Give up all states left, including row 0. A plan needs segments, so a prompt of one token takes that row."""
        self._prompts += 1
        self._run([self._segment(0, 0, 1, True)], Forward(1, apart=True), [*moves, RowMove(1, "drop", 0)])

    def _run(self, segments: Sequence[Segment], forward: Forward, moves: Sequence[RowMove] = ()) -> float:
        plan = StepPlan(self._number, tuple(segments), parts=(RowPlan(forwards=(forward,), moves=tuple(moves)),))
        self._number += 1
        self._executor.submit(plan)
        result = self._executor.collect()
        if result.part(RowResult).lost:
            raise RuntimeError(f"the device ran out of memory in a step of {plan.num_tokens} tokens that was measured")
        return result.seconds
