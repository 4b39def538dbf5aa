"""The kernels of mailboxes, interpreted: several processes that share memory, each with the kernels of one device."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.lm.kernels.collectives.reduce_kernels import (
    BEST_PROGRAMS,
    BEST_ROWS,
    REGIONS,
    Mailboxes,
    best_rows,
    reduce_rows,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs under Triton's interpreter")

ROOM = 16 * 2 * REGIONS * 64
"""Bytes for sums. Half a region has 1,024 of them."""

Case = Callable[[Mailboxes], list[torch.Tensor]]


def run_devices(case: Case, size: int) -> list[list[torch.Tensor]]:
    """The results of `case` on each of `size` devices."""
    shared = [torch.empty(Mailboxes.num_bytes(size, ROOM), dtype=torch.uint8).share_memory_() for _ in range(size)]
    for own in shared:
        own.view(torch.int16).fill_(-0x8000)
    context = multiprocessing.get_context("fork")
    queue: Any = context.Queue()
    children = [context.Process(target=run_device, args=(case, shared, rank, queue)) for rank in range(size)]
    for child in children:
        child.start()
    try:
        results = dict(queue.get(timeout=200) for _ in children)
    finally:
        for child in children:
            child.kill()
            child.join()
    for own in shared:
        assert (own.view(torch.int16) == -0x8000).all(), "a place was left full"
    return [[torch.from_numpy(array) for array in results[rank]] for rank in range(size)]


def run_device(case: Case, shared: list[torch.Tensor], rank: int, queue: Any) -> None:
    torch.set_num_threads(1)
    mailboxes = Mailboxes(
        own=shared[rank],
        addresses=torch.tensor([each.data_ptr() for each in shared]),
        counters=torch.zeros(2 * REGIONS + BEST_PROGRAMS, dtype=torch.int32),
        is_alone=torch.zeros(1, dtype=torch.int32),
        rank=rank,
        size=len(shared),
    )
    queue.put((rank, [tensor.numpy() for tensor in case(mailboxes)]))
    queue.close()
    queue.join_thread()
    os._exit(0)


def draw(name: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(name))


@pytest.mark.parametrize(
    ("size", "rows", "width", "parts", "programs", "two_shot"),
    [(2, 3, 40, 1, 4, False), (2, 5, 96, 3, 2, False), (3, 4, 64, 2, 2, False), (3, 7, 40, 1, 2, True)],
)
def test_every_device_gets_the_same_bits_of_the_sum_and_its_norm(
    size: int, rows: int, width: int, parts: int, programs: int, two_shot: bool
) -> None:
    turns, eps = 3, 1e-5
    bias, norm = draw(1, width), draw(2, width)

    def case(mailboxes: Mailboxes) -> list[torch.Tensor]:
        results = []
        for turn in range(turns):  # more than there are halves of a region
            time.sleep(0.05 * ((turn + mailboxes.rank) % 2))
            stream = draw(10 + turn, rows, width)
            partials = draw(100 * turn + mailboxes.rank + 20, parts, rows, width)
            partials[:, 0, :3] = -0.0  # reads as an empty place of 16 bits
            partials[:, 0, 3] = torch.tensor(-0x7FFF8000, dtype=torch.int32).view(torch.float32)  # and of 32 bits
            normed = reduce_rows(
                mailboxes, partials, bias, stream, norm, eps,
                wire=torch.float32, two_shot=two_shot, programs=programs,
            )  # fmt: skip
            results += [stream, normed]
        return results

    first, *others = run_devices(case, size)
    for turn in range(turns):
        partials = torch.stack([draw(100 * turn + rank + 20, parts, rows, width) for rank in range(size)]).double()
        partials[:, :, 0, :4] = 0
        stream = draw(10 + turn, rows, width).double() + partials.sum((0, 1)) + bias.double()
        torch.testing.assert_close(first[2 * turn].double(), stream, rtol=1e-5, atol=1e-5)
        normed = torch.nn.functional.rms_norm(stream, (width,), norm.double(), eps)
        torch.testing.assert_close(first[2 * turn + 1].double(), normed, rtol=1e-5, atol=1e-5)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("two_shot", [False, True])
def test_more_rows_than_a_mailbox_holds_take_several_launches(two_shot: bool) -> None:
    def case(mailboxes: Mailboxes) -> list[torch.Tensor]:
        assert 0 < mailboxes.most_rows(100, torch.float32, two_shot, 4) < 20
        x = draw(mailboxes.rank, 1, 20, 100)
        return [reduce_rows(mailboxes, x, None, None, None, 0.0, wire=torch.float32, two_shot=two_shot, programs=4)]

    for [total] in run_devices(case, 2):
        torch.testing.assert_close(total, draw(0, 20, 100) + draw(1, 20, 100))


def test_a_row_too_wide_for_the_mailbox_is_refused() -> None:
    own = torch.zeros(Mailboxes.num_bytes(2, ROOM), dtype=torch.uint8)
    state = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="holds no row of 300 numbers"):
        reduce_rows(
            Mailboxes(own, state, state, state, 0, 2), draw(0, 1, 2, 300), None, None, None, 0.0,
            wire=torch.float32, two_shot=False,
        )  # fmt: skip


def test_half_precision_travels_without_a_change() -> None:
    def case(mailboxes: Mailboxes) -> list[torch.Tensor]:
        x = draw(mailboxes.rank, 1, 3, 64).half()
        x[0, 1] = -0.0
        results = []
        for wire in (torch.float16, torch.float32):  # one after the other in the same places
            results.append(reduce_rows(mailboxes, x, None, None, None, 0.0, wire=wire, two_shot=False, programs=2))
        return results

    expected = draw(0, 3, 64).half() + draw(1, 3, 64).half()
    expected[1] = 0
    for results in run_devices(case, 2):
        assert all(torch.equal(total, expected) for total in results)


def test_alone_a_device_waits_for_nobody_and_sends_nothing() -> None:
    def case(mailboxes: Mailboxes) -> list[torch.Tensor]:
        x, values, ids = draw(mailboxes.rank, 1, 3, 64), torch.zeros(3), torch.arange(3)
        if mailboxes.rank == 0:
            mailboxes.is_alone.fill_(1)
            for two_shot in (False, True):
                reduce_rows(mailboxes, x, None, None, None, 0.0, wire=torch.float32, two_shot=two_shot)
            best_rows(mailboxes, values, ids)
            mailboxes.is_alone.zero_()
        total = reduce_rows(mailboxes, x, None, None, None, 0.0, wire=torch.float32, two_shot=False)
        return [total, best_rows(mailboxes, values, ids + 3 * mailboxes.rank)]

    for total, best in run_devices(case, 2):
        torch.testing.assert_close(total, draw(0, 3, 64) + draw(1, 3, 64))
        assert best.tolist() == [0, 1, 2]


def test_best_takes_the_largest_value_and_the_lowest_id_among_equals() -> None:
    rows, size = BEST_ROWS + 40, 3
    all_values = draw(5, size, rows).round()
    all_values[:, 0] = torch.tensor([-0.0, 0.0, -torch.inf])
    all_values[:, 1] = -torch.inf
    all_values[:, 2] = torch.tensor([-3.0, -2.0, -2.0])
    all_ids = torch.arange(size)[:, None] * 1000 + torch.arange(rows)[None]

    def case(mailboxes: Mailboxes) -> list[torch.Tensor]:
        return [best_rows(mailboxes, all_values[mailboxes.rank], all_ids[mailboxes.rank]) for _ in range(3)]

    expected = all_ids.gather(0, all_values.argmax(0, keepdim=True))[0]
    for results in run_devices(case, size):
        assert all(torch.equal(best, expected) for best in results)
