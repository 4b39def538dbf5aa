"""The batch: block tables and last tokens on the device, and each step's inputs, packed and uploaded in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.lora.protocol import StepAdapters
from holdfast.lm.kernels.sampling.sampler import Wishes
from holdfast.lm.types import GUESSED, SAMPLING_COLUMNS, PartPlan, Sampling, StepPlan
from holdfast.lm.types.penalties import PenaltyPlan
from holdfast.lm.types.states import KeptInputs, StatePlan

Arrays = dict[str, npt.NDArray[np.generic]]


SAMPLING = {name: np.float32 if kind is float else np.int64 for name, kind in SAMPLING_COLUMNS.items()}
"""The columns of a row's sampling record."""

PADDING = {"ids": 0, "positions": 0, "slots": -1}
"""The fields of padding tokens. Attention's `write` skips a negative slot."""

TOKENS_PER_TABLE_WRITE = 4
"""Tokens of a padded step for each new block table entry that it has room for. Further entries are a second upload."""

NO_SIZES: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The inputs of a step on the device, as views of one persistent buffer."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64
    sample_at: torch.Tensor  # [R] int64
    sample_rows: torch.Tensor  # [R] int64
    sampling: Mapping[str, torch.Tensor]  # [R] each: SAMPLING_COLUMNS
    sample_position: torch.Tensor  # [R] int64

    @property
    def columns(self) -> dict[str, torch.Tensor]:
        """The arguments of `Sampler.draw` that say how each sampled row is drawn."""
        return {**self.sampling, "position": self.sample_position}


class Fields:
    """One int64 buffer, and a tensor for each of its fields. A float32 field uses the first half of its place."""

    def __init__(self, sizes: dict[str, int], device: torch.device | str, *, pinned: bool = False) -> None:
        """`sizes` are the capacities of the fields by name, in the order of the buffer."""
        self.buffer = torch.zeros(sum(sizes.values()), dtype=torch.int64, device=device, pin_memory=pinned)
        self.tensors = {
            name: part.view(torch.float32) if SAMPLING.get(name) is np.float32 else part
            for name, part in zip(sizes, torch.split(self.buffer, [*sizes.values()]), strict=True)
        }

    @cached_property
    def arrays(self) -> Arrays:
        """The fields of a host buffer as numpy arrays that share its memory."""
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}

    def take(self, name: str, count: int) -> torch.Tensor:
        """The first `count` entries of a field."""
        return self.tensors[name][:count]

    def packed(self, num_tokens: int, num_sampled: int) -> PackedStep:
        """The inputs of a step with this many tokens and sampled rows."""
        return PackedStep(
            ids=self.take("ids", num_tokens),
            positions=self.take("positions", num_tokens),
            slot_mapping=self.take("slots", num_tokens),
            sample_at=self.take("sample_at", num_sampled),
            sample_rows=self.take("sample_rows", num_sampled),
            sampling={name: self.take(name, num_sampled) for name in SAMPLING},
            sample_position=self.take("sample_position", num_sampled),
        )


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A plan packed into a host buffer, with its sizes and the kinds of sampling it needs."""

    plan: StepPlan
    host: Fields
    """The buffer, pinned where there is a GPU."""
    segments: Segments
    num_tokens: int
    num_sampled: int
    num_writes: int
    writes_apart: torch.Tensor | None
    """Table entries [2, n] that exceed the buffer: places, then blocks."""
    has_pending: bool
    """Whether the device fills in some of the step's tokens."""
    has_guessed: bool
    """Whether the device guessed some of these tokens."""
    any_random: bool
    any_filtered: bool
    wishes: Wishes | None = None
    """Results and rules that sampled rows ask for besides a token; None if no row asks for any."""
    more: Any = None
    """Further inputs of the model for this step, from `ModelInputs.pack`; None for a step of tokens only."""

    @property
    def kind(self) -> int:
        """Index of the step's graphs: 0 where the model reads tokens only."""
        return int(self.more is not None)

    @property
    def masked(self) -> Sequence[int]:
        """Indices of the sampled rows that may draw only some tokens."""
        return () if self.wishes is None else self.wishes.masked

    @property
    def embeds(self) -> Sequence[int]:
        """Indices of the sampled rows whose hidden states are returned."""
        return () if self.wishes is None else self.wishes.embeds


class ModelInputs:
    """Inputs of the model besides tokens, in steps that have some. This base class adds none.

    They have their own fields at the end of the batch's buffer, which are copied to the device only in steps with such
    inputs. These steps also have their own graphs.
    """

    plans: tuple[type[PartPlan], ...] = ()
    """The classes of plans that `pack` reads."""
    sizes: Mapping[str, int] = NO_SIZES
    """Capacity of each field, by name."""

    def pack(self, plan: StepPlan, segments: Segments, num_sampled: int) -> Any:
        """The inputs of a plan with these segments and this many sampled rows, on the host; None if it has none."""
        return None

    def write(self, packed: Any, arrays: Arrays, num_tokens: int, num_rows: int, *, apart: bool) -> None:
        """Write the inputs from `pack` into the fields of a host buffer, for a step of these sizes.

        `apart` is True if sampled rows are computed separately from tokens, even if all tokens are sampled.
        """

    def clear(self, fields: Fields) -> None:
        """Set the fields on the device to padding."""

    def entered(self, packed: Any, fields: Fields, num_tokens: int, num_rows: int | None) -> StepAdapters | None:
        """The inputs of a step that was copied to these fields, as the model reads them; None if it has none.

        `num_rows` is None if the model returns a row for each token.
        """
        return None

    def captured(self, fields: Fields, num_tokens: int, num_rows: int | None) -> StepAdapters | None:
        """The inputs that a graph of this size reads, for any step that has inputs."""
        return None


TOKENS_ONLY = ModelInputs()


class Batch:
    """Block tables and last sampled tokens by row, on the device, and a copy of the tables on the host.

    Packing has two halves, so that the host can prepare a step while the device still runs the last one. `stage` uses
    only state on the host. `enter` uploads the staged step and writes its table entries and pending tokens, in the
    order of submission.

    For a captured graph, `enter` is split again. `upload` copies a padded step to the buffer that the graph reads.
    `apply`, the first part of the graph, writes its table entries and pending tokens.
    """

    def __init__(
        self,
        *,
        rows: int,
        max_blocks: int,
        max_tokens: int,
        block_size: int,
        device: torch.device,
        samples: int | None = None,
        inputs: ModelInputs = TOKENS_ONLY,
        guesses: int = 0,
    ) -> None:
        """`samples` is the largest number of tokens that a step draws, by default one for each row.

        `guesses` is the largest number of tokens that the device guesses for a row (`GUESSED`).

        `inputs` are the model's inputs besides tokens. They belong to this batch alone.
        """
        samples = samples or rows
        self.block_size, self.max_tokens, self.device = block_size, max_tokens, device
        # Table entries that pad a step are written to one row after the usable ones.
        self.block_tables = torch.zeros(rows + 1, max_blocks, dtype=torch.int32, device=device)
        self._padding_row = rows * max_blocks
        self.drawn = torch.zeros(rows, 1 + guesses, dtype=torch.int64, device=device)
        """For each row, the token that it sampled last, and the tokens that were guessed after it."""
        self.last_token = self.drawn[:, 0]
        self.inputs = inputs
        # Each field has a fixed place, where a captured graph finds it.
        self._sizes = dict.fromkeys(("ids", "positions", "slots", "token_rows"), max_tokens)
        self._sizes |= dict.fromkeys(("sample_at", "sample_rows", "sample_position", *SAMPLING), samples)
        # A step's own tokens need at most this many new blocks. Only prefix hits bring more; those are a second upload.
        self._sizes |= dict.fromkeys(("write_at", "write_block"), max_tokens + rows)
        self._plain = sum(self._sizes.values())
        """Number of buffer entries that a step of only tokens needs."""
        self._sizes |= inputs.sizes
        self._mirror = np.full((rows, max_blocks), -1, np.int32)
        self._settings = np.zeros(rows, list(SAMPLING.items()))
        self._drawn: list[Sampling | None] = [None] * rows
        """For each row, the sampling record that `_settings` holds."""
        self._wishes = np.zeros(rows, np.bool_)
        """For each row, whether that record asks for more than a token."""
        self._free: list[Fields] = []
        """Host buffers that are not in use by a step."""
        self._persistent = Fields(self._sizes, device)

    def stage(self, plan: StepPlan) -> StagedStep:
        """Pack a plan into a host buffer. Raises ValueError for a plan that the batch cannot hold."""
        host = self._free.pop() if self._free else Fields(self._sizes, "cpu", pinned=self.device.type == "cuda")
        write_at = self._write_mirror(plan)
        write_block = self._mirror.reshape(-1)[write_at]
        arrays = host.arrays
        num_writes = len(write_at)
        writes_apart = None
        if num_writes <= self._sizes["write_at"]:
            arrays["write_at"][:num_writes] = write_at
            arrays["write_block"][:num_writes] = write_block
        else:
            writes_apart = torch.from_numpy(np.stack((write_at, write_block.astype(np.int64))))
        segments = self._pack_tokens(plan, arrays)
        num_sampled, any_random, any_filtered, wishes = self._pack_sampling(plan, segments, arrays)
        num_tokens = segments.num_tokens
        lowest = int(np.min(arrays["ids"][:num_tokens]))
        return StagedStep(
            plan=plan,
            host=host,
            segments=segments,
            num_tokens=num_tokens,
            num_sampled=num_sampled,
            num_writes=num_writes if writes_apart is None else 0,
            writes_apart=writes_apart,
            has_pending=lowest < 0,
            has_guessed=lowest <= GUESSED,
            any_random=any_random,
            any_filtered=any_filtered,
            wishes=wishes,
            more=self.inputs.pack(plan, segments, num_sampled),
        )

    def enter(self, staged: StagedStep) -> PackedStep:
        """Copy a staged step to the device, then write its table entries and pending tokens."""
        fields = staged.host
        if self.device.type == "cuda":
            self._copy(staged, staged.num_tokens, staged.num_sampled)
            fields = self._persistent
        self._write_tables(fields, 0, staged)
        if staged.has_pending:
            self._fill_pending(fields, staged.num_tokens)
        return fields.packed(staged.num_tokens, staged.num_sampled)

    def upload(self, staged: StagedStep, num_tokens: int, num_sampled: int, head_rows: int | None = None) -> PackedStep:
        """Copy a staged step to the device, padded to `num_tokens` and `num_sampled`, for a graph that applies it.

        Padding tokens write no slot, and padding rows sample the first token. Returns the step without padding. The
        model's further inputs for sampled rows are padded to a head of `head_rows` rows, by default `num_sampled`.
        """
        arrays = staged.host.arrays
        for name, value in PADDING.items():
            arrays[name][staged.num_tokens : num_tokens] = value
        arrays["sample_at"][staged.num_sampled : num_sampled] = 0
        room = self._room(num_tokens)
        arrays["write_at"][staged.num_writes : room] = self._padding_row
        if head_rows is None:
            self._copy(staged, num_tokens, num_sampled)
        else:
            self._copy(staged, num_tokens, head_rows, apart=True)
        self._write_tables(self._persistent, room, staged)
        return self._persistent.packed(staged.num_tokens, staged.num_sampled)

    def apply(self, num_tokens: int, num_sampled: int) -> PackedStep:
        """Write an uploaded step's table entries and pending tokens: the same launches for any step of this size."""
        fields, room = self._persistent, self._room(num_tokens)
        places, blocks = fields.take("write_at", room), fields.take("write_block", room)
        if self.device.type == "cuda":
            from holdfast.lm.kernels.cache.step_inputs import write_step_inputs  # a CPU installation has no Triton

            ids, rows = fields.take("ids", num_tokens), fields.take("token_rows", num_tokens)
            write_step_inputs(ids, rows, self.drawn, self.block_tables, places, blocks)
        else:
            self.block_tables.view(-1).index_copy_(0, places, blocks.to(torch.int32))
            self._fill_pending(fields, num_tokens)
        return fields.packed(num_tokens, num_sampled)

    def clear(self) -> None:
        """Replace the uploaded step by padding."""
        for name, value in {**PADDING, "token_rows": 0, "sample_at": 0, "write_at": self._padding_row}.items():
            self._persistent.tensors[name].fill_(value)
        self.inputs.clear(self._persistent)

    def more(self, staged: StagedStep, num_rows: int | None) -> StepAdapters | None:
        """The inputs of an entered step besides its tokens, as the model reads them; None if it has none.

        `num_rows` is the number of rows that the model returns; None for one per token.
        """
        return self.inputs.entered(staged.more, self._persistent, staged.num_tokens, num_rows)

    def captured(self, num_tokens: int, num_rows: int | None) -> StepAdapters | None:
        """The inputs besides tokens that a graph of this size reads, for any uploaded step that has some."""
        return self.inputs.captured(self._persistent, num_tokens, num_rows)

    def release(self, staged: StagedStep) -> None:
        """Return the host buffer of a step that has ended."""
        self._free.append(staged.host)

    def _copy(self, staged: StagedStep, num_tokens: int, num_rows: int, *, apart: bool = False) -> None:
        """Copy a staged step to the device, with its further inputs for this many tokens and sampled rows.

        `apart` is True if sampled rows are computed separately from tokens, even if all tokens are sampled.
        """
        used = self._plain
        if staged.more is not None:
            used = len(staged.host.buffer)
            self.inputs.write(staged.more, staged.host.arrays, num_tokens, num_rows, apart=apart)
        self._persistent.buffer[:used].copy_(staged.host.buffer[:used], non_blocking=True)

    def _room(self, num_tokens: int) -> int:
        """Number of table entries that a padded step of this many tokens has room for."""
        return -(-num_tokens // TOKENS_PER_TABLE_WRITE)

    def _write_tables(self, fields: Fields, first: int, staged: StagedStep) -> None:
        """Write the table entries from `first` on, or all of them if they are a second upload."""
        tables = self.block_tables.view(-1)
        if staged.writes_apart is not None:
            places, blocks = staged.writes_apart.to(self.device)
        elif staged.num_writes > first:
            places, blocks = (fields.take(name, staged.num_writes)[first:] for name in ("write_at", "write_block"))
        else:
            return
        tables.index_copy_(0, places, blocks.to(torch.int32))

    def _fill_pending(self, fields: Fields, num_tokens: int) -> None:
        """Replace each PENDING and GUESSED token by the row's token in `drawn`."""
        ids = fields.take("ids", num_tokens)
        drawn = self.drawn.index_select(0, fields.take("token_rows", num_tokens))
        found = drawn.gather(1, (-1 - ids).clamp_(min=0)[:, None])[:, 0]
        torch.where(ids < 0, found, ids, out=ids)

    def _write_mirror(self, plan: StepPlan) -> npt.NDArray[np.int64]:
        """Apply table writes to the host's copy of the tables. Returns the flat indices that changed."""
        rows, width = self._mirror.shape
        places: list[int] = []
        entries: list[int] = []
        for row, start, blocks in plan.table_writes:
            stop = start + len(blocks)
            if row >= rows:
                raise ValueError(f"row {row} gets table entries; the batch has rows 0 to {rows - 1}")
            if stop > width:
                raise ValueError(f"row {row} gets table entries up to {stop}; it has {width}")
            places += range(row * width + start, row * width + stop)
            entries += blocks
        write_at = np.array(places, np.int64)
        self._mirror.reshape(-1)[write_at] = entries
        return write_at

    def _pack_tokens(self, plan: StepPlan, arrays: Arrays) -> Segments:
        """Pack ids, positions, slots and rows of every query token. Returns the segments as attention reads them."""
        columns = plan.columns
        rows, starts, stops = np.array([columns.column(name) for name in ("row", "start", "stop")], np.int64)
        lengths = stops - starts
        query_start = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=query_start[1:])
        total = int(query_start[-1])
        if total > self.max_tokens:
            raise ValueError(f"step {plan.step} has {total} tokens; the batch holds {self.max_tokens}")
        arrays["ids"][:total] = np.fromiter(chain.from_iterable(columns.column("tokens")), np.int64, total)
        token_rows, positions = rows, starts
        if total > len(rows):
            token_rows = np.repeat(rows, lengths)
            positions = np.arange(total) + np.repeat(starts - query_start[:-1], lengths)
        table_at, offset = np.divmod(positions, self.block_size)
        blocks = self._mirror[token_rows, table_at]
        if blocks.min() < 0:
            token = int(blocks.argmin())
            raise ValueError(f"step {plan.step}: row {token_rows[token]} has no block for position {positions[token]}")
        arrays["token_rows"][:total] = token_rows
        arrays["positions"][:total] = positions
        arrays["slots"][:total] = blocks.astype(np.int64) * self.block_size + offset
        segments = Segments(query_start.astype(np.int32), stops.astype(np.int32), rows.astype(np.int32))
        verifies = plan.part(StatePlan).verifies if plan.samples is not None else ()
        return replace(segments, places=places_of(verifies, segments)) if verifies else segments

    def _pack_sampling(
        self, plan: StepPlan, segments: Segments, arrays: Arrays
    ) -> tuple[int, bool, bool, Wishes | None]:
        """Pack the sampling options of each token to draw.

        Returns the number of tokens, whether any is random, whether any is filtered, and what rows ask for besides
        tokens.
        """
        drawn = plan.columns.column("sampling")
        at = np.flatnonzero(np.fromiter([sampling is not None for sampling in drawn], np.bool_, len(drawn)))
        for index, row in zip(at.tolist(), segments.row[at].tolist(), strict=True):
            if self._drawn[row] is not (sampling := drawn[index]):
                self._drawn[row] = sampling
                self._settings[row] = sampling.columns
                self._wishes[row] = sampling.asks
        places: npt.NDArray[np.integer] = segments.query_start[1:][at] - 1
        positions: npt.NDArray[np.integer] = segments.context_stop[at]
        if plan.samples is not None:  # a segment samples after each of its last `most` tokens, in order
            most = np.array(plan.samples, np.int64)
            to_last = np.repeat(np.cumsum(most), most) - np.arange(int(most.sum())) - 1
            at = np.repeat(at, most)
            places, positions = np.repeat(places, most) - to_last, np.repeat(positions, most) - to_last
        count, rows = len(at), segments.row[at]
        if count > len(arrays["sample_at"]):
            raise ValueError(f"step {plan.step} draws {count} tokens; the batch holds {len(arrays['sample_at'])}")
        arrays["sample_at"][:count] = places
        arrays["sample_rows"][:count] = rows
        settings = self._settings[rows]
        any_random = bool((settings["temperature"] > 0).any())
        any_filtered = False
        if any_random:
            arrays["sample_position"][:count] = positions
            for name in SAMPLING:
                arrays[name][:count] = settings[name]
            filters = (settings["top_k"] > 0) | (settings["top_p"] < 1)
            any_filtered = bool((filters & (settings["temperature"] > 0)).any())
        wishes = None
        if self._wishes[rows].any():
            records = [drawn[index] for index in at.tolist()]
            wishes = Wishes.of(records, rows.tolist(), positions.tolist(), plan.part(PenaltyPlan).histories)
        return count, any_random, any_filtered, wishes


def places_of(verifies: Sequence[KeptInputs], segments: Segments) -> npt.NDArray[np.int32]:
    """`Segments.places` of a step in which the segments of these rows verify drafts.

    Raises ValueError for a row without a segment of as many tokens.
    """
    places = np.full(segments.num_tokens, -1, np.int32)
    of_row = {row: number for number, row in enumerate(segments.row.tolist())}
    for row, kept in verifies:
        number = of_row.get(row, -1)
        first, stop = (0, 0) if number < 0 else segments.query_start[number : number + 2].tolist()
        if stop - first != len(kept):
            raise ValueError(f"row {row} has {stop - first} tokens to verify, and {len(kept)} places for them")
        places[first:stop] = kept
    return places
