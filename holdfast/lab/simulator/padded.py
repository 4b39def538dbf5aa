"""Padded rows in the simulator: the width of the batch after each forward, and the time of a plan's forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from holdfast.core.cost import CostModel, PaddedCost
from holdfast.lab.simulator.executor import StepTimes
from holdfast.lm.types import RowMove, RowPlan, Segment, StepPlan


@dataclass(frozen=True, slots=True)
class RowSoftware:
    """The way in which forwards of padded rows run.

    The defaults are this engine's; other values model systems in papers.
    """

    junk: bool = False
    """Whether columns that a shaped prompt adds to the other rows stay (Baton §4.1). Otherwise they are cut at once."""
    cat_rate: float = 0.0
    """Bytes per second at which each forward of the batch copies its whole state, as Transformers' own cache does with
    `torch.cat`. The state is read and written. 0: no copy."""
    forward_seconds: float = 0.0
    """Shortest time of a forward in seconds, because the host launches its kernels one by one."""
    concurrent: bool = False
    """Whether forwards outside the batch run at the same time as the batch's (Baton §3.2). A step then takes the longer
    time, not the sum."""
    host_adds: bool = False
    """Whether the host cannot launch ahead of the device.

    A forward then takes `forward_seconds` plus the device's time.
    """
    joining_seconds: float = 0.0
    """Seconds that the batch waits for each row that joins while others run, because the host changes every layer's
    state."""
    embed_rate: float = 0.0
    """Bytes per second at which an embedded state comes from the host. 0: it is on the device already."""
    kept_columns: int = 0
    """Number of positions (rows × width) up to which the batch keeps placeholders that all rows share."""

    def __post_init__(self) -> None:
        for name in ("cat_rate", "forward_seconds", "joining_seconds", "embed_rate", "kept_columns"):
            value = getattr(self, name)
            if not 0 <= value < inf:
                raise ValueError(f"{name} is {value}; it must be at least 0 and finite")


ENGINE = RowSoftware()


class Batch:
    """The rows of the running batch, as far as its size depends on them: a row is placeholders, then its own columns.

    With `junk`, columns that shaping adds to the other rows stay. Then the batch is cut only before an insertion, by
    the placeholders that all its rows have in common (Baton §4.1, resources releasing). With `kept` it is cut even then
    only if it would have more positions than that.
    """

    def __init__(self, *, junk: bool = False, kept: int = 0) -> None:
        self.width = 0
        """Number of columns in each row."""
        self._junk = junk
        self._kept = kept
        self._columns: dict[int, int] = {}
        """Number of each row's columns after its placeholders, including junk."""

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, row: int) -> bool:
        return row in self._columns

    @property
    def positions(self) -> int:
        """Rows × width, the positions that the batch takes in memory."""
        return len(self._columns) * self.width

    def embed(self, row: int, length: int) -> None:
        """Add a state of `length` positions. The batch becomes wider if that is longer (§4.2)."""
        self.release()
        self._columns[row] = length
        self.width = max(self.width, length)

    def drop(self, row: int) -> None:
        """Remove a row."""
        del self._columns[row]
        if not self._junk or not self._columns:
            self.release()

    def release(self) -> None:
        """Cut the placeholders that all rows have in common."""
        if self._columns and self.positions <= self._kept:
            return
        self.width = max(self._columns.values(), default=0)

    def forward(self, newcomers: Sequence[tuple[int, int]] = ()) -> tuple[int, int, int]:
        """Give every row a column, and add the prompts of `newcomers`, as (row, length).

        Returns rows, padded query length, and width of the state during the forward, which determine its time.
        """
        running = list(self._columns)
        longest = max((length for _, length in newcomers), default=1)
        if newcomers:
            self.release()
        during = self.width + longest
        for row in running:
            self._columns[row] += longest if self._junk else 1
        self._columns.update(newcomers)
        self.width = during
        if not self._junk:
            self.release()
        return len(self._columns), longest, during

    def move(self, move: RowMove) -> None:
        """Apply a plan's move of a row's state."""
        if move.kind == "embed":
            self.embed(move.row, move.length)
        elif move.kind in ("drop", "store", "keep") and move.row in self:
            self.drop(move.row)

    def run(self, segments: Sequence[Segment]) -> tuple[int, int, int]:
        """Apply `forward` to these segments of a plan. Rows that are not in the batch yet join it."""
        return self.forward([(each.row, each.length) for each in segments if each.row not in self])

    def follow(self, plan: StepPlan) -> tuple[int, int]:
        """Apply a whole plan.

        Returns the largest number of positions, and of columns, that the batch had in a forward.
        """
        segments, positions, width, at = list(plan.segments), self.positions, self.width, 0
        rows_plan = plan.part(RowPlan)
        for index, forward in enumerate(rows_plan.forwards):
            for move in rows_plan.moves:
                if move.before == index:
                    self.move(move)
            if not forward.apart:
                rows, _, during = self.run(segments[at : forward.stop])
                positions, width = max(positions, rows * during), max(width, during)
            at = forward.stop
        for move in rows_plan.moves:
            if move.before >= len(rows_plan.forwards):
                self.move(move)
        return positions, width


class PaddedStepTimes(StepTimes):
    """A PaddedCost applied to plans, forward by forward. Plans come in the order in which they run, each once.

    A forward of the batch takes rows × padded length, attended over the width of the batch. A forward outside the batch
    takes the same for its own prompts. A state that is loaded from the host delays the step by its copy; stores run at
    the same time as the computation.
    """

    def __init__(
        self, cost: CostModel, *, token_bytes: int = 0, copy_rate: float = 0.0, software: RowSoftware = ENGINE
    ) -> None:
        """`token_bytes` is the size of a position; `copy_rate` is the link to the host in bytes per second."""
        super().__init__(cost)
        self._cost = PaddedCost.of(cost)
        self._load = token_bytes / copy_rate if copy_rate else 0.0
        self._cat = 2 * token_bytes / software.cat_rate if software.cat_rate else 0.0
        self._software = software
        self._embed = token_bytes / software.embed_rate if software.embed_rate else 0.0
        self.batch = Batch(junk=software.junk, kept=software.kept_columns)
        """The batch after the last plan."""
        self._known: dict[tuple[int, int, int, bool], float] = {}

    def stages(self, plan: StepPlan) -> list[float]:
        """Seconds of the plan, as a list for its single stage. Raises ValueError for a plan of packed tokens."""
        forwards = plan.part(RowPlan).forwards
        if plan.segments and not forwards:
            raise ValueError(f"plan {plan.step} has no forwards; padded rows need them")
        segments = list(plan.segments)
        moves = list(plan.part(RowPlan).moves)
        in_batch = apart = 0.0
        at = 0
        for index, forward in enumerate(forwards):
            in_batch += self._move(moves, index)
            own, at = segments[at : forward.stop], forward.stop
            if forward.apart:
                longest = max(segment.length for segment in own)
                apart += self._forward(len(own), longest, max(segment.stop for segment in own), cat=False)
            else:
                in_batch += self._batch(own)
        in_batch += self._move(moves, len(forwards))
        return [max(in_batch, apart) if self._software.concurrent else in_batch + apart]

    def _batch(self, segments: Sequence[Segment]) -> float:
        running = len(self.batch)
        rows, longest, width = self.batch.run(segments)
        waited = self._software.joining_seconds * (rows - running) if running else 0.0
        return waited + self._forward(rows, longest, width, cat=True)

    def _forward(self, rows: int, query: int, context: int, *, cat: bool) -> float:
        key = (rows, query, context, cat)
        seconds = self._known.get(key)
        if seconds is None:
            device = self._cost.forward(rows, query, context) + (self._cat * rows * context if cat else 0.0)
            host = self._software.forward_seconds
            seconds = self._known[key] = host + device if self._software.host_adds else max(host, device)
        return seconds

    def _move(self, moves: list[RowMove], before: int) -> float:
        """Apply the moves before forward `before`.

        Returns the seconds that the forward waits for the states they load.
        """
        seconds = 0.0
        while moves and moves[0].before <= before:
            move = moves.pop(0)
            if move.kind == "embed":
                seconds += move.length * self._embed + self._software.joining_seconds * bool(len(self.batch))
            self.batch.move(move)
            if move.kind == "load":
                seconds += move.length * self._load
        return seconds
