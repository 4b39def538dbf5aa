"""Measures what forwards of padded rows take, as the points of a `core.cost.PaddedCost`.

Plans run through the executor that serves, so captured decodes and copies of states are in what is measured. For each
width a batch of equal rows is prefilled and embedded. Its decode is timed, half of the rows leave, and so on. Then one
prompt is computed in chunks of each length, so each chunk is timed at several contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.core.cost import PaddedCost
from holdfast.lm.types import (
    EngineShape,
    Forward,
    LanguageExecutor,
    RowMove,
    RowShape,
    Sampling,
    Segment,
    StepPlan,
)

WIDTHS = (64, 256, 1024, 4096, 16384)
CHUNKS = (16, 64, 256, 1024, 4096)
"""Widths of rows and lengths of chunks that are measured, as far as the engine has room for them."""
FEW_WIDTHS, FEW_CHUNKS = (64, 512), (64, 512)
"""The same for an estimate."""
MOST_ROWS = 64
"""Most rows of a measured decode; more rows are extrapolated."""
REPEATS = 3
"""Decodes of which the fastest counts. The first of them may load kernels."""
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
TOKEN = 17
"""What every position holds. Time does not depend on it, and most vocabularies have it."""


def measure_padded_cost(
    executor: LanguageExecutor, shape: EngineShape, *, max_sequences: int, device: str
) -> PaddedCost:
    """Measure decodes by rows and width, and chunks by length and context. `device` is its name in words.

    Nothing may be in flight, and no row may have a state; so it is again afterwards. Raises ValueError for an engine of
    packed tokens, and RuntimeError if the device runs out of memory.
    """
    return _measure(executor, shape, max_sequences, device, WIDTHS, CHUNKS)


def estimate_padded_cost(
    executor: LanguageExecutor, shape: EngineShape, *, max_sequences: int, device: str
) -> PaddedCost:
    """As `measure_padded_cost`, at two widths and two lengths of chunks."""
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
    longest = shape.max_model_len - REPEATS - 2
    kept = [at for at in widths if at <= longest and rows.bytes.of(at + rows.quantum) <= rows.memory] or [longest]
    most = min(max_sequences, MOST_ROWS)
    counts = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    steps = _Steps(executor, min(shape.max_step_tokens, max(shape.token_budget, 1)), rows)
    decodes = {width: steps.decodes(width, counts) for width in kept}
    lengths = [at for at in chunks if at <= min(shape.token_budget, longest)] or [min(shape.token_budget, longest)]
    if not rows.abilities.chunks:
        alone = {length: {length: steps.chunks(length, length)[length]} for length in lengths}
    else:
        alone = {length: steps.chunks(length, max(length, kept[-1])) for length in lengths}
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
    """Seconds by which a chunk takes longer at `context` than at the start of its prompt; those of the nearest one."""
    nearest = min(by_context, key=lambda at: abs(at - context))
    return max(0.0, by_context[nearest] - by_context[length])


def _known(decodes: dict[int, dict[int, float]], width: int, count: int) -> float:
    """Seconds of a decode, in proportion to the rows where memory had no room for so many."""
    by_count = decodes[width]
    if count in by_count:
        return by_count[count]
    most = max(by_count)
    return by_count[most] * count / most


class _Steps:
    """Runs plans made for measuring, one at a time."""

    def __init__(self, executor: LanguageExecutor, budget: int, rows: RowShape) -> None:
        self._executor, self._budget, self._shape = executor, budget, rows
        self._number = 0

    def decodes(self, width: int, counts: Sequence[int]) -> dict[int, float]:
        """By number of rows, the seconds of a decode of rows that are `width` long afterwards, where they fit."""
        room = self._shape.memory // (2 * self._shape.bytes.of(width + self._shape.quantum))
        rows = max((count for count in counts if count <= room), default=1)
        for row in range(rows):
            for start, stop in self._pieces(width - 1):
                self._run([self._segment(row, start, stop, stop == width - 1)], Forward(1, apart=True))
        moves = tuple(RowMove(0, "embed", row, length=width - 1) for row in range(rows))
        seconds, length = {}, width - 1
        while rows:
            times = []
            for _ in range(REPEATS):
                segments = [self._segment(row, length, length + 1, True) for row in range(rows)]
                times.append(self._run(segments, Forward(rows), moves))
                moves, length = (), length + 1
            seconds[rows] = min(times)
            left = rows // 2
            moves = tuple(RowMove(0, "drop", row) for row in range(left, rows))
            rows = left
        self._drop(moves)
        return seconds

    def chunks(self, length: int, until: int) -> dict[int, float]:
        """By the position where it ends, the seconds of each chunk of this length of one prompt."""
        seconds: dict[int, float] = {}
        for _ in range(2):  # the first time loads kernels
            for stop in range(length, until + 1, length):
                taken = self._run([self._segment(0, stop - length, stop, True)], Forward(1, apart=True))
                seconds[stop] = min(taken, seconds.get(stop, taken))
            self._drop((RowMove(0, "drop", 0),))
        return seconds

    def _pieces(self, length: int) -> Iterator[tuple[int, int]]:
        """[start, stop) of the chunks of a prompt, or all of it where the model takes no chunks."""
        size = self._budget if self._shape.abilities.chunks else length
        return ((start, min(length, start + size)) for start in range(0, length, max(1, size)))

    def _segment(self, row: int, start: int, stop: int, samples: bool) -> Segment:
        return Segment(f"measured-{row}", row, start, stop, (TOKEN,) * (stop - start), GREEDY if samples else None)

    def _drop(self, moves: tuple[RowMove, ...]) -> None:
        """Give up what is left: beside a short prompt of another row, as a plan has segments."""
        spare = max((move.row for move in moves), default=0) + 1
        self._run([self._segment(spare, 0, 1, True)], Forward(1, apart=True), (*moves, RowMove(1, "drop", spare)))

    def _run(self, segments: Sequence[Segment], forward: Forward, moves: tuple[RowMove, ...] = ()) -> float:
        plan = StepPlan(self._number, tuple(segments), forwards=(forward,), row_moves=moves)
        self._number += 1
        self._executor.submit(plan)
        result = self._executor.collect()
        if result.lost:
            raise RuntimeError(f"the device ran out of memory in a step of {plan.num_tokens} tokens that was measured")
        return result.seconds
