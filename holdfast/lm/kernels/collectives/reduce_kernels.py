"""Triton kernels that add up rows over the devices of one host, by writing into each other's mailboxes."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.launch import dependent_launch_options, launch_dependents, wait_for_previous

REGIONS = 256
"""Number of parts of a mailbox. Each belongs to one sending and one receiving program of a kernel."""
PROGRAMS = 128
"""Number of sending programs in a launch, and also of receiving programs.

All run at once on an H100 or H200, two to a processor.
"""

EMPTY_BITS = {torch.float32: -0x7FFF8000, torch.bfloat16: -0x80000000, torch.float16: -0x80000000}
"""For each dtype, the bits of an empty place read as float32: -0 for 16-bit dtypes, two 16-bit -0 for float32."""
EMPTY_WORD = -0x8000
"""The 16 bits of -0, as an int16. They fill empty places of every dtype."""

BEST_ROWS = 128
"""Number of rows that one program of `best_kernel` handles."""
BEST_PROGRAMS = 64
"""Largest number of programs in one launch of `best_kernel`."""


@dataclass(frozen=True)
class Mailboxes:
    """The mailboxes of a group of devices, as one of the devices sees them.

    A mailbox is memory that every device can write and its owner reads. A sender writes its numbers there. A receiver
    reads until no place is empty, then empties the places again. A number is its own signal, so there is no flag, no
    fence and no second trip over the link. -0 stands for an empty place. The number -0 is sent as +0, which changes no
    sum.

    Each region of a mailbox has two halves. A program uses them in turn, by a counter on its device. It cannot
    overwrite unread numbers: before its device starts the collective after next, it has received the next one from
    every device, and by then those had finished this one. CUDA graphs may thus be replayed in any order, as long as all
    devices replay the same.
    """

    own: torch.Tensor
    """This device's mailbox, [bytes] uint8."""
    addresses: torch.Tensor
    """The addresses at which this device sees each device's mailbox, [size] int64."""
    counters: torch.Tensor
    """Number of collectives so far by each sending program, each receiving program and each program of `best_kernel`.

    [2 * REGIONS + BEST_PROGRAMS] int32.
    """
    is_alone: torch.Tensor
    """Whether kernels neither send nor wait, [1] int32: 1 if so."""
    rank: int
    size: int

    @staticmethod
    def num_bytes(size: int, room: int) -> int:
        """Bytes of a mailbox with `room` bytes (a multiple of 16 * 2 * REGIONS) for sums among `size` devices."""
        return room + BEST_PROGRAMS * 2 * (size - 1) * BEST_ROWS * 8

    def empty(self) -> None:
        """Make every place empty. Called before any device sends."""
        self.own.view(torch.int16).fill_(EMPTY_WORD)
        self.counters.zero_()
        self.is_alone.zero_()

    @property
    def room(self) -> int:
        """Number of bytes for sums."""
        return len(self.own) - self.num_bytes(self.size, 0)

    def most_rows(self, width: int, wire: torch.dtype, two_shot: bool, programs: int = PROGRAMS) -> int:
        """Largest number of rows of `width` numbers that one launch of `programs` programs can add up."""
        held = self.room // (2 * REGIONS) // (width * wire.itemsize)  # rows in half a region
        peers = self.size - 1
        if two_shot:  # ceil(rows / size) rows from each peer, and all results
            each = max((rows for rows in range(held + 1) if -(-rows // self.size) * peers + rows <= held), default=0)
        else:
            each = held // peers
        return each * programs


def reduce_rows(
    mailboxes: Mailboxes,
    partials: torch.Tensor,
    bias: torch.Tensor | None,
    stream: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    *,
    wire: torch.dtype,
    two_shot: bool,
    programs: int = PROGRAMS,
    num_warps: int | None = None,
) -> torch.Tensor:
    """The sum of partials [P, T, width] over P and over all devices: [T, width].

    With a stream [T, width], the sum is added to it in place, and the result is the stream's RMS norm. `wire` is the
    dtype in which numbers travel: a device's own sum over P is rounded to it. All devices add in the order of ranks.
    With `two_shot`, one device adds up each row and sends the result to the others.
    """
    rows, width = partials.shape[1:]
    out = torch.empty_like(partials[0] if stream is None else stream)
    most = mailboxes.most_rows(width, wire, two_shot, programs)
    if not most:
        raise ValueError(f"a mailbox of {mailboxes.room} bytes holds no row of {width} numbers for each program")
    block = max(256, triton.next_power_of_2(width))
    num_warps = num_warps or max(1, min(16, block // 512))
    own = mailboxes.own.view(wire)
    for begin in range(0, rows, most):
        part = slice(begin, min(rows, begin + most))
        count = part.stop - part.start
        each = -(-count // programs)
        grid = -(-count // each)
        device_sum_kernel[(2 * grid,)](
            partials[:, part],
            bias,
            None if stream is None else stream[part],
            norm,
            out[part],
            own,
            mailboxes.addresses,
            mailboxes.counters,
            mailboxes.is_alone,
            count,
            width,
            partials.stride(0),
            partials.stride(1),
            0 if stream is None else stream.stride(0),
            out.stride(0),
            mailboxes.room // (2 * REGIONS) // wire.itemsize,
            eps,
            RANK=mailboxes.rank,
            SIZE=mailboxes.size,
            PARTS=len(partials),
            TWO_SHOT=two_shot,
            EMPTY=EMPTY_BITS[wire],
            REGIONS=REGIONS,
            BLOCK=block,
            num_warps=num_warps,
            maxnreg=min(255, 1024 // num_warps),  # two programs fit on a processor
            **dependent_launch_options(partials.device),
        )
    return out


def best_rows(mailboxes: Mailboxes, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """For each row, the id [R] int64 of the largest of values [R] float32 over all devices, lowest id among equals."""
    out = torch.empty_like(ids)
    most = BEST_PROGRAMS * BEST_ROWS
    for begin in range(0, len(ids), most):
        part = slice(begin, begin + most)
        count = len(ids[part])
        best_kernel[(triton.cdiv(count, BEST_ROWS),)](
            values[part],
            ids[part],
            out[part],
            mailboxes.own.view(torch.int64),
            mailboxes.addresses,
            mailboxes.counters,
            mailboxes.is_alone,
            count,
            mailboxes.room // 8,
            2 * REGIONS,
            RANK=mailboxes.rank,
            SIZE=mailboxes.size,
            BLOCK=BEST_ROWS,
            num_warps=BEST_ROWS // 32,
            **dependent_launch_options(ids.device),
        )
    return out


@triton.jit
def _bits(value):
    """The bits of a number converted to float32, as an int32."""
    return value.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _own_sum(partials, row, at, held, part_stride, row_stride, wire, PARTS: tl.constexpr, EMPTY: tl.constexpr):
    """The sum of a row over PARTS on this device, ready to send: rounded to the dtype of `wire`, and never empty."""
    total = tl.zeros(at.shape, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partials + part * part_stride + row * row_stride + at, mask=held, other=0.0).to(tl.float32)
    return _filled(total.to(wire.dtype.element_ty), EMPTY)


@triton.jit
def _filled(value, EMPTY: tl.constexpr):
    """The value to send: 0 in place of a number whose bits stand for an empty place of a mailbox."""
    return tl.where(_bits(value) == EMPTY, 0.0, value.to(tl.float32)).to(value.dtype)


@triton.jit
def _send(mailboxes, peer, own, place, at, held, value):
    """Write a row into the mailbox of `peer`."""
    there = tl.load(mailboxes + peer).to(tl.pointer_type(own.dtype.element_ty))
    tl.store(tl.multiple_of(there, 16) + place + at, value, mask=held)


@triton.jit
def _receive(row_at, held, is_alone, EMPTY: tl.constexpr):
    """Wait for a row in the own mailbox, and empty its place. Each thread handles its own elements."""
    value = tl.load(row_at, mask=held, other=0.0, volatile=True)
    missing = tl.max((_bits(value) == EMPTY).to(tl.int32), 0)
    while (missing > 0) & (is_alone == 0):
        value = tl.load(row_at, mask=held, other=0.0, volatile=True)
        missing = tl.max((_bits(value) == EMPTY).to(tl.int32), 0)
    empty = tl.full(row_at.shape, EMPTY, tl.int32).to(tl.float32, bitcast=True)
    if is_alone == 0:
        tl.store(row_at, empty.to(value.dtype), mask=held)
    return value


@triton.jit
def _sum_devices(
    partials, own, box, index, row, at, held, part_stride, row_stride, width, each, is_alone,
    RANK: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """The sum of a row over all devices, in the order of their ranks. Each peer has `each` rows of the box."""
    mine = _own_sum(partials, row, at, held, part_stride, row_stride, own, PARTS, EMPTY)
    total = tl.zeros(at.shape, tl.float32)
    # The loops are not unrolled, for fewer registers.
    for source in range(RANK):
        place = box + (source - RANK + SIZE - 1) * each * width + index * width
        total += _receive(own + place + at, held, is_alone, EMPTY).to(tl.float32)
    total += mine.to(tl.float32)
    for source in range(RANK + 1, SIZE):
        place = box + (source - RANK - 1) * each * width + index * width
        total += _receive(own + place + at, held, is_alone, EMPTY).to(tl.float32)
    return total


@triton.jit
def _write_norm(out_at, value, held, gain, width, eps):
    """Write the RMS norm of a row, times `gain`."""
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out_at, (value * scale * gain.to(tl.float32)).to(out_at.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["rows"])
def device_sum_kernel(
    partials, bias, stream, norm, out, own, mailboxes, counters, alone,
    rows, width, part_stride, row_stride, stream_stride, out_stride, half, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, TWO_SHOT: tl.constexpr, EMPTY: tl.constexpr,
    REGIONS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The kernel of `reduce_rows`. The first half of the programs send, the second half receive.

    The pairs are (p, p + programs). Sending programs wait for nobody, and start first, so that receiving ones may wait.
    Programs p handle rows p, p + programs, ... and region p of the mailboxes. Row number `index` of a program is added
    up by every device, or, in two shots, by the device (p + index) % SIZE. In a half region, the rows from each peer
    come first, by the distance of its rank; the results of two shots come after.
    """
    launch_dependents(DEPENDENT)
    programs = tl.num_programs(0) // 2
    program = tl.program_id(0) % programs
    is_sending = tl.program_id(0) < programs
    count = (rows - program + programs - 1) // programs  # rows of this program
    each = (rows + programs - 1) // programs  # rows of the first program
    if TWO_SHOT:
        sent = (each + SIZE - 1) // SIZE  # largest number of these rows that one device adds up
    else:
        sent = each
    first = (RANK - program % SIZE + SIZE) % SIZE  # index of the first row that this device adds up in two shots
    at = tl.arange(0, BLOCK)
    held = at < width
    counter_at = counters + program
    if is_sending:
        wait_for_previous(DEPENDENT)
        is_alone = tl.load(alone)
        turn = tl.load(counter_at)
        box = (program * 2 + (turn & 1)).to(tl.int64) * half
        if is_alone == 0:
            for index in range(count):
                row = (program + index * programs).to(tl.int64)
                if TWO_SHOT:
                    owner = (program + index) % SIZE
                    if owner != RANK:
                        value = _own_sum(partials, row, at, held, part_stride, row_stride, own, PARTS, EMPTY)
                        source = (RANK - owner + SIZE) % SIZE - 1
                        place = box + source * sent * width + (index // SIZE) * width
                        _send(mailboxes, owner, own, place, at, held, value)
                else:
                    value = _own_sum(partials, row, at, held, part_stride, row_stride, own, PARTS, EMPTY)
                    for step in tl.static_range(1, SIZE):
                        place = box + (SIZE - step - 1) * sent * width + index * width
                        _send(mailboxes, (RANK + step) % SIZE, own, place, at, held, value)
        tl.debug_barrier()  # every thread has read the counter
        tl.store(counter_at, turn + 1 - is_alone)
    else:
        counter_at += REGIONS
        if norm is not None:
            gain = tl.load(norm + at, mask=held, other=0.0)
        else:
            gain = at
        wait_for_previous(DEPENDENT)
        is_alone = tl.load(alone)
        turn = tl.load(counter_at)
        box = (program * 2 + (turn & 1)).to(tl.int64) * half
        results = box + (SIZE - 1) * sent * width
        if TWO_SHOT:
            begin = first
            step_rows = SIZE
        else:
            begin = 0
            step_rows = 1
        for index in range(begin, count, step_rows):
            row = (program + index * programs).to(tl.int64)
            if stream is not None:
                before = tl.load(stream + row * stream_stride + at, mask=held, other=0.0)
            slot = index // step_rows
            value = _sum_devices(
                partials, own, box, slot, row, at, held, part_stride, row_stride, width, sent, is_alone,
                RANK, SIZE, PARTS, EMPTY,
            )  # fmt: skip
            if bias is not None:
                value += tl.load(bias + at, mask=held, other=0.0).to(tl.float32)
            if stream is not None:
                value += before.to(tl.float32)
            rounded = value.to(out.dtype.element_ty)
            if TWO_SHOT:
                passed = _filled(rounded.to(own.dtype.element_ty), EMPTY)
                rounded = passed.to(out.dtype.element_ty)
                if is_alone == 0:
                    for step in tl.static_range(1, SIZE):
                        place = results + index * width
                        _send(mailboxes, (RANK + step) % SIZE, own, place, at, held, passed)
            if stream is not None:
                tl.store(stream + row * stream_stride + at, rounded, mask=held)
                _write_norm(out + row * out_stride + at, rounded.to(tl.float32), held, gain, width, eps)
            else:
                tl.store(out + row * out_stride + at, rounded, mask=held)
        if TWO_SHOT:
            for index in range(count):
                if (program + index) % SIZE != RANK:
                    row = (program + index * programs).to(tl.int64)
                    result = _receive(own + results + index * width + at, held, is_alone, EMPTY)
                    rounded = result.to(out.dtype.element_ty)
                    if stream is not None:
                        tl.store(stream + row * stream_stride + at, rounded, mask=held)
                        _write_norm(out + row * out_stride + at, rounded.to(tl.float32), held, gain, width, eps)
                    else:
                        tl.store(out + row * out_stride + at, rounded, mask=held)
        tl.debug_barrier()
        tl.store(counter_at, turn + 1 - is_alone)


@triton.jit(do_not_specialize=["rows"])
def best_kernel(
    values, ids, out, own, mailboxes, counters, alone, rows, offset, first_counter,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The kernel of `best_rows`. Program (BLOCK rows). A value and its id are sent as one int64 that sorts as they do.

    Region p of these words starts `offset` words into a mailbox. No word reads as empty, because the lower half of an
    empty word is negative.
    """
    launch_dependents(DEPENDENT)
    program = tl.program_id(0)
    item = tl.arange(0, BLOCK)
    row = program * BLOCK + item
    held = row < rows
    wait_for_previous(DEPENDENT)
    is_alone = tl.load(alone)
    counter_at = counters + first_counter + program
    turn = tl.load(counter_at)
    value = tl.load(values + row, mask=held, other=0.0)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    best = (key << 32) | (0x7FFFFFFF - tl.load(ids + row, mask=held, other=0))
    place = offset + (program * 2 + (turn & 1)) * (SIZE - 1) * BLOCK
    mine = best
    if is_alone == 0:
        for step in tl.static_range(1, SIZE):
            own_place = place + (SIZE - step - 1) * BLOCK
            _send(mailboxes, (RANK + step) % SIZE, own, own_place, item, held, mine)
        for source in tl.static_range(SIZE - 1):
            from_at = own + place + source * BLOCK + item
            word = tl.load(from_at, mask=held, other=0, volatile=True)
            missing = tl.max(((word & 0xFFFFFFFF) >= 0x80000000).to(tl.int32), 0)
            while missing > 0:
                word = tl.load(from_at, mask=held, other=0, volatile=True)
                missing = tl.max(((word & 0xFFFFFFFF) >= 0x80000000).to(tl.int32), 0)
            tl.store(from_at, tl.full([BLOCK], -0x7FFF7FFF7FFF8000, tl.int64), mask=held)
            best = tl.maximum(best, word)
    tl.store(out + row, 0x7FFFFFFF - (best & 0x7FFFFFFF), mask=held)
    tl.debug_barrier()  # every thread has read the counter
    tl.store(counter_at, turn + 1 - is_alone)
