"""Adapters on CUDA: a grouped shrink and expand, two launches for a linear layer with any number of adapters.

The shrink computes low = A x of each token; the expand adds scale · B low to the output (as in Punica, Chen et al.,
2023, §4). Tokens of one adapter form tiles, so that a tile reads its adapter once and multiplies on tensor cores. In
steps of many tokens, the expand of gate and up also computes the gate. It then reads their outputs once, and never
writes the sums with the adapters' addends.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.launch import SideStream, dependent_launch_options, launch_dependents, wait_for_previous
from holdfast.lm.kernels.lora.groups import FEW_TOKENS, LARGE_TILE, SMALL_TILE, most_tiles, tile_size
from holdfast.lm.kernels.lora.protocol import Finish, LoraStack

PROGRAMS = 2048
"""Largest number of programs in a launch, roughly as many as run at once. With more tiles, a program takes several."""
OUTPUTS, FEWER_OUTPUTS = 256, 128
"""Number of outputs of one program of the expand: in small tiles with ranks below LARGE_RANK, and otherwise."""
LARGE_RANK = 64
GATED_OUTPUTS, GATED_WARPS = 64, 4
"""Outputs and warps of one program of the gated expand. The program holds this many columns each of gate and of up."""
PART_INPUTS = 256
"""Smallest number of inputs for one program of the shrink."""
PIECES = (16, 4, 1)
"""The numbers of pieces that the shrink's inputs may be cut into (split-K). Few, because each needs its own kernel."""


@dataclass(frozen=True, slots=True)
class TiledLora:
    """The adapters of `tokens` tokens, some of which may be padding, as tiles on the device.

    The launches depend only on `tokens` and on the number of slots, so CUDA graphs may capture them.
    """

    tokens: int
    order: torch.Tensor  # [tokens] int64: token indices, sorted by slot
    slot: torch.Tensor  # [tiles] int64
    start: torch.Tensor  # [tiles] int64: the tile's first index in `order`
    count: torch.Tensor  # [tiles] int64
    used: torch.Tensor  # [2] int64: the number of tiles of adapters, and of all tiles
    counts: torch.Tensor  # [3 * tiles or more] int32: number of finished pieces of a part of a tile; 0 between launches
    gain: torch.Tensor | None = None  # [tokens] int64: each token's row of `LoraStack.gain`; None: there are no gains
    beside: SideStream | None = None
    """The stream on which a step of few tokens computes adapters, while the layer's own product reads its weights."""
    fixed: bool = False
    """Whether tiles have one size in all steps, and sums one order, so that a token's bits do not depend on the step.

    In steps of many tokens this takes longer."""

    def add(self, out: torch.Tensor, x: torch.Tensor, stack: LoraStack) -> None:
        """See `Lora.add`. Both products are accumulated in float32; `low` is rounded to the type of B in between."""
        self._expand(out, self._shrink(x, stack), stack)

    def scale(self, out: torch.Tensor, stack: LoraStack) -> None:
        """See `Lora.scale`."""
        if stack.gain is not None and self.gain is not None:
            out.mul_(stack.gain.index_select(0, self.gain))

    def begin(self, x: torch.Tensor, stack: LoraStack, out: torch.Tensor | None = None) -> Finish:
        """See `Lora.begin`. With many tokens nothing runs in parallel, because the layer's product fills the GPU."""
        side = self.beside
        if tile_size(self.tokens, fixed=self.fixed) == LARGE_TILE:
            halves = stack.ends == (stack.outputs // 2, stack.outputs)
            gated = (lambda gate_up: self._gated_expand(gate_up, self._shrink(x, stack), stack)) if halves else None
            return Finish(lambda added: self.add(added, x, stack), gated)
        if side is None or self.tokens > FEW_TOKENS:
            return Finish(lambda added: self.add(added, x, stack))
        with side.fork():
            low = self._shrink(x, stack)
            if out is not None:
                self._expand(out, low, stack)

        def end(added: torch.Tensor) -> None:
            side.join()
            if out is None:
                self._expand(added, low, stack)

        return Finish(end)

    def _sizes(self, stack: LoraStack) -> tuple[int, int, int]:
        """Number of tokens in a tile, largest number of tiles, and number of ranks that a program computes."""
        tiles = most_tiles(self.tokens, stack.a.shape[0], fixed=self.fixed)
        return tile_size(self.tokens, fixed=self.fixed), tiles, max(16, triton.next_power_of_2(stack.a.shape[2]))

    def _shrink(self, x: torch.Tensor, stack: LoraStack) -> torch.Tensor:
        """A x, [P, T, ranks] in B's dtype, in the order of the tiles' tokens."""
        _, parts, _, inputs = stack.a.shape
        tokens, (tile, tiles, ranks) = self.tokens, self._sizes(stack)
        pieces = input_pieces(inputs, 1, 1) if self.fixed else input_pieces(inputs, tokens, parts)
        together = self.fixed and tokens > FEW_TOKENS
        programs = 1 if together else pieces
        low = x.new_empty(parts, tokens, ranks, dtype=stack.b.dtype)
        partials = x.new_empty(pieces, parts, tokens, ranks, dtype=torch.float32) if programs > 1 else low
        lists = self.order, self.slot, self.start, self.count, self.used
        block_k = 128 if tile == SMALL_TILE and ranks <= 64 else 64
        length = -(-inputs // (pieces * block_k)) * block_k
        shrink_kernel[(min(tiles, max(1, PROGRAMS // (parts * programs))), parts, programs)](
            x, stack.a, stack.rank, low, partials, self.counts, *lists, tokens, inputs, length, tiles,
            x.stride(0), stack.a.stride(0), stack.a.stride(1), stack.rank.stride(0),
            TILE=tile, RANKS=ranks, PIECES=pieces, TOGETHER=together, BLOCK_K=block_k,
            num_warps=2 if tile == SMALL_TILE else 8, **dependent_launch_options(x.device),
        )  # fmt: skip
        return low

    def _expand(self, out: torch.Tensor, low: torch.Tensor, stack: LoraStack) -> None:
        """Add scale · B low to out."""
        parts, tokens, _ = low.shape
        tile, tiles, ranks = self._sizes(stack)
        lists = self.order, self.slot, self.start, self.count, self.used
        starts = [part.start for part in stack.parts]
        ends = [*stack.ends, *[stack.outputs] * (4 - parts)]
        block_n = OUTPUTS if tile == SMALL_TILE and ranks < LARGE_RANK else FEWER_OUTPUTS
        blocks = sum(-(-(end - start) // block_n) for start, end in zip(starts, stack.ends, strict=True))
        expand_kernel[(min(tiles, max(1, PROGRAMS // blocks)), blocks)](
            low, stack.b, stack.rank, stack.scale, out, *lists, tokens, *ends,
            out.stride(0), stack.b.stride(0), stack.rank.stride(0),
            TILE=tile, RANKS=ranks, PARTS=parts, BLOCK_N=block_n, num_warps=4, **dependent_launch_options(out.device),
        )  # fmt: skip

    def _gated_expand(self, gate_up: torch.Tensor, low: torch.Tensor, stack: LoraStack) -> torch.Tensor:
        """silu(gate) * up of gate_up + scale · B low, for all tokens."""
        tile, tiles, ranks = self._sizes(stack)
        width = stack.outputs // 2
        out = gate_up.new_empty(self.tokens, width)
        lists = self.order, self.slot, self.start, self.count, self.used
        blocks = triton.cdiv(width, GATED_OUTPUTS)
        gated_expand_kernel[(min(tiles, max(1, PROGRAMS // blocks)), blocks)](
            low, stack.b, stack.rank, stack.scale, gate_up, out, *lists, self.tokens, width,
            gate_up.stride(0), out.stride(0), stack.b.stride(0), stack.rank.stride(0),
            TILE=tile, RANKS=ranks, BLOCK_N=GATED_OUTPUTS, num_warps=GATED_WARPS,
            **dependent_launch_options(out.device),
        )  # fmt: skip
        return out


def input_pieces(inputs: int, tokens: int, parts: int) -> int:
    """The number of pieces that the shrink's inputs are cut into, so that a step of few tokens has enough programs."""
    tiles = -(-tokens // tile_size(tokens))
    wanted = -(-PROGRAMS // (4 * tiles * parts))
    return next((pieces for pieces in PIECES if pieces <= min(wanted, inputs // PART_INPUTS)), 1)


@triton.jit(do_not_specialize=["tokens"])
def shrink_kernel(
    x, a, rank, low, partials, counts, order, tile_slot, tile_start, tile_count, used, tokens, inputs, length,
    most_tiles, x_stride, slot_stride, part_stride, table_stride,
    TILE: tl.constexpr, RANKS: tl.constexpr, PIECES: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """low [parts, tokens, RANKS] = x Aᵀ. Program (some tiles, part, piece of the inputs).

    `low` has the order of the tiles' tokens. Entries beyond an adapter's rank are 0; if the rank is 0, nothing is
    written. With several pieces, each program writes its sum to `partials` [PIECES, parts, tokens, RANKS] and counts
    itself in `counts` [parts, most_tiles]. The last program adds the pieces in order, so that the result does not
    depend on which program is last, and sets the count back to 0. With TOGETHER, one program computes all pieces of a
    tile, and adds them in the same order.
    """
    launch_dependents(DEPENDENT)
    part = tl.program_id(1)
    piece = tl.program_id(2)
    item = tl.arange(0, TILE)
    at = tl.arange(0, RANKS)
    tiles = tl.load(used).to(tl.int32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        slot = tl.load(tile_slot + tile)
        start = tl.load(tile_start + tile)
        held = item < tl.load(tile_count + tile)
        ranks = tl.load(rank + slot * table_stride + part)
        token = tl.load(order + start + item, mask=held, other=0)
        wait_for_previous(DEPENDENT)
        if ranks > 0:
            a_at = a + slot * slot_stride + part * part_stride + at[None, :].to(tl.int64) * inputs
            x_at = x + token[:, None] * x_stride
            if TOGETHER:
                acc = tl.zeros([TILE, RANKS], tl.float32)
                for own in range(PIECES):
                    acc += _shrunk(x_at, a_at, held, at < ranks, own * length, length, inputs, TILE, RANKS, BLOCK_K)
            else:
                acc = _shrunk(x_at, a_at, held, at < ranks, piece * length, length, inputs, TILE, RANKS, BLOCK_K)
            place = ((part * tokens.to(tl.int64) + start + item) * RANKS)[:, None] + at[None, :]
            if PIECES == 1 or TOGETHER:
                tl.store(low + place, acc.to(low.dtype.element_ty), mask=held[:, None])
            else:
                between = tl.num_programs(1) * tokens.to(tl.int64) * RANKS
                tl.store(partials + piece * between + place, acc, mask=held[:, None])
                tl.debug_barrier()  # the whole program must have written before it is counted
                count = counts + part * most_tiles + tile
                if tl.atomic_add(count, 1) == PIECES - 1:
                    total = tl.zeros([TILE, RANKS], tl.float32)
                    for other in tl.static_range(PIECES):
                        total += tl.load(
                            partials + other * between + place, mask=held[:, None], other=0.0, cache_modifier=".cg"
                        )
                    tl.store(low + place, total.to(low.dtype.element_ty), mask=held[:, None])
                    tl.store(count, 0)
    wait_for_previous(DEPENDENT)  # also without a tile


@triton.jit
def _shrunk(
    x_at, a_at, held, of_rank, begin, length, inputs, TILE: tl.constexpr, RANKS: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """x Aᵀ [TILE, RANKS] over `length` inputs from `begin` on, of the tokens `held` and the rows `of_rank`."""
    end = tl.minimum(inputs, begin + length)
    acc = tl.zeros([TILE, RANKS], tl.float32)
    for first in tl.range(begin, end, BLOCK_K, num_stages=3):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < end
        values = tl.load(x_at + k[None, :], mask=held[:, None] & inside[None, :], other=0.0)
        weights = tl.load(a_at + k[:, None], mask=of_rank[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(values, weights, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens"])
def expand_kernel(
    low, b, rank, scale, out, order, tile_slot, tile_start, tile_count, used, tokens,
    first_end, second_end, third_end, fourth_end, out_stride, slot_stride, table_stride,
    TILE: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out += scale · low Bᵀ for the tokens of the tiles. Program (some tiles, BLOCK_N outputs of one part).

    The parts end at first_end, second_end, third_end and fourth_end. Ends of parts that are not there are the last one.
    """
    launch_dependents(DEPENDENT)
    block = tl.program_id(1)
    part = 0
    start_n = block * BLOCK_N
    end_n = first_end
    if PARTS > 1:
        before = tl.cdiv(first_end, BLOCK_N)
        if block >= before:
            part = 1
            start_n = first_end + (block - before) * BLOCK_N
            end_n = second_end
        if PARTS > 2:
            before += tl.cdiv(second_end - first_end, BLOCK_N)
            if block >= before:
                part = 2
                start_n = second_end + (block - before) * BLOCK_N
                end_n = third_end
            if PARTS > 3:
                before += tl.cdiv(third_end - second_end, BLOCK_N)
                if block >= before:
                    part = 3
                    start_n = third_end + (block - before) * BLOCK_N
                    end_n = fourth_end
    n = start_n + tl.arange(0, BLOCK_N)
    item = tl.arange(0, TILE)
    at = tl.arange(0, RANKS)
    tiles = tl.load(used).to(tl.int32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        slot = tl.load(tile_slot + tile)
        start = tl.load(tile_start + tile)
        held = item < tl.load(tile_count + tile)
        ranks = tl.load(rank + slot * table_stride + part)
        token = tl.load(order + start + item, mask=held, other=0)
        # Weights do not depend on the previous kernel, so they are loaded while it ends.
        b_at = b + slot * slot_stride + at[:, None].to(tl.int64) * fourth_end + n[None, :]
        weights = tl.load(b_at, mask=(at < ranks)[:, None] & (n < end_n)[None, :], other=0.0)
        factor = tl.load(scale + slot * table_stride + part)
        wait_for_previous(DEPENDENT)
        if ranks > 0:
            place = (part * tokens.to(tl.int64) + start + item) * RANKS
            values = tl.load(low + place[:, None] + at[None, :], mask=held[:, None], other=0.0)
            product = tl.dot(values, weights, input_precision="ieee")
            out_at = out + token[:, None] * out_stride + n[None, :]
            written = held[:, None] & (n < end_n)[None, :]
            added = tl.load(out_at, mask=written, other=0.0).to(tl.float32) + factor * product
            # Several threads may hold the same element, and all must read it before one writes it.
            tl.debug_barrier()
            tl.store(out_at, added.to(out.dtype.element_ty), mask=written)
    wait_for_previous(DEPENDENT)  # also without a tile


@triton.jit(do_not_specialize=["tokens"])
def gated_expand_kernel(
    low, b, rank, scale, gate_up, out, order, tile_slot, tile_start, tile_count, used, tokens, width,
    gate_up_stride, out_stride, slot_stride, table_stride,
    TILE: tl.constexpr, RANKS: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up of gate_up + scale · low Bᵀ, also for the tokens without an adapter.

    gate_up is [gate, up] of 2 * width numbers, the two parts of the stack. Program (some tiles, BLOCK_N outputs).
    """
    launch_dependents(DEPENDENT)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < width
    item = tl.arange(0, TILE)
    at = tl.arange(0, RANKS)
    tiles = tl.load(used + 1).to(tl.int32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        slot = tl.load(tile_slot + tile)
        start = tl.load(tile_start + tile)
        count = tl.load(tile_count + tile)
        held = item < count
        token = tl.load(order + start + item, mask=held, other=0)
        # Without an adapter the ranks are 0: no weights and no part of low are read, and the products are 0.
        table = slot * table_stride
        gate_ranks = tl.load(rank + table, mask=slot >= 0, other=0)
        up_ranks = tl.load(rank + table + 1, mask=slot >= 0, other=0)
        b_at = b + slot * slot_stride + at[:, None].to(tl.int64) * (2 * width) + n[None, :]
        gate_weights = tl.load(b_at, mask=(at < gate_ranks)[:, None] & inside[None, :], other=0.0)
        up_weights = tl.load(b_at + width, mask=(at < up_ranks)[:, None] & inside[None, :], other=0.0)
        gate_factor = tl.load(scale + table, mask=slot >= 0, other=0.0)
        up_factor = tl.load(scale + table + 1, mask=slot >= 0, other=0.0)
        wait_for_previous(DEPENDENT)
        written = held[:, None] & inside[None, :]
        gate_at = gate_up + token[:, None] * gate_up_stride + n[None, :]
        gate = tl.load(gate_at, mask=written, other=0.0)
        up = tl.load(gate_at + width, mask=written, other=0.0)
        # If the rank is 0, nothing was written to low.
        low_at = low + ((start + item) * RANKS)[:, None] + at[None, :]
        in_gate = item < tl.where(gate_ranks > 0, count, 0)
        in_up = item < tl.where(up_ranks > 0, count, 0)
        gate_low = tl.load(low_at, mask=in_gate[:, None], other=0.0)
        up_low = tl.load(low_at + tokens.to(tl.int64) * RANKS, mask=in_up[:, None], other=0.0)
        gate_added = tl.dot(gate_low, gate_weights, input_precision="ieee")
        up_added = tl.dot(up_low, up_weights, input_precision="ieee")
        gate = gate.to(tl.float32) + gate_factor * gate_added
        up = up.to(tl.float32) + up_factor * up_added
        result = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + token[:, None] * out_stride + n[None, :], result.to(out.dtype.element_ty), mask=written)
    wait_for_previous(DEPENDENT)  # also without a tile
