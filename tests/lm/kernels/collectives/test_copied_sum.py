"""Sums that copy engines carry: processes share memory, copies happen at once, and the kernel is interpreted."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.lm.kernels.collectives import copied_sum
from holdfast.lm.kernels.collectives.copied_sum import FLAGS_BYTES, CopiedSums, take_flags_kernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs under Triton's interpreter")

EACH = 4
WIDTH, SUMS = 8, 6
ROWS = (7, 5, 5, 7, 9, 6)
"""The number of rows of each sum."""
TURN_BYTES = 4096


def take(flags: torch.Tensor, alone: int, rank: int) -> None:
    is_alone = torch.tensor([alone], dtype=torch.int32)
    take_flags_kernel[(1,)](flags, is_alone, 3, rank, EACH=EACH, SENDERS=8)


def test_flags_are_taken_once_all_other_devices_have_set_theirs() -> None:
    flags = torch.full((3 * EACH,), 7, dtype=torch.int32).share_memory_()
    flags.view(3, EACH)[:, 0] = torch.tensor([1, 0, 0])
    waiting = multiprocessing.get_context("fork").Process(target=take, args=(flags, 0, 1))
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive() and flags[0] == 1
    flags[2 * EACH] = 1
    waiting.join(200)
    assert waiting.exitcode == 0
    assert flags.view(3, EACH).tolist() == [[0, 7, 7, 7]] * 3


class Stream:
    """A stream whose work is done at once."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def record_event(self) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass


def copy(to: int, source: int, num_bytes: int, stream: Stream) -> None:
    ctypes.memmove(to, source, num_bytes)


def sums_of(shared: list[torch.Tensor], rank: int, patch: pytest.MonkeyPatch, alone: bool = False) -> CopiedSums:
    patch.setattr(copied_sum, "copy", copy)
    patch.setattr(copied_sum, "ROWS", 4)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    patch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    addresses = [each.data_ptr() for each in shared]
    memory: Any = SimpleNamespace(
        own=shared[rank], address=addresses[rank], rank=rank, size=len(shared), device=torch.device("cpu"),
        num_bytes=len(shared[rank]), open=lambda: addresses,
    )  # fmt: skip
    return CopiedSums(memory, torch.tensor([int(alone)], dtype=torch.int32), lambda: alone)


def memory_of(size: int) -> list[torch.Tensor]:
    return [torch.zeros(FLAGS_BYTES + 2 * TURN_BYTES, dtype=torch.uint8).share_memory_() for _ in range(size)]


def addends(turn: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS[turn], WIDTH, generator=torch.Generator().manual_seed(100 * turn + rank))


def run_device(shared: list[torch.Tensor], rank: int, two_hops: bool, patch: pytest.MonkeyPatch, queue: Any) -> None:
    torch.set_num_threads(1)
    sums, delay, results = sums_of(shared, rank, patch), random.Random(rank), []
    for turn in range(SUMS):
        one = sums.begin(ROWS[turn], WIDTH, torch.float32, two_hops=two_hops)
        assert one is not None
        for part, rows in enumerate(one.parts):
            time.sleep(delay.choice((0, 0, 0.03)))
            one.room(part).copy_(addends(turn, rank)[rows])
            one.send(part)
        time.sleep(delay.choice((0, 0, 0.03)))
        results.append(torch.cat([one.receive(part).sum(0) for part in range(2)]).numpy())
    queue.put((rank, results))
    queue.close()
    queue.join_thread()
    os._exit(0)


@pytest.mark.parametrize(("size", "two_hops"), [(2, False), (3, False), (2, True), (3, True), (4, True)])
def test_every_device_receives_all_addends_of_each_part(
    size: int, two_hops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, context = memory_of(size), multiprocessing.get_context("fork")
    queue: Any = context.Queue()
    children = [
        context.Process(target=run_device, args=(shared, rank, two_hops, monkeypatch, queue)) for rank in range(size)
    ]
    for child in children:
        child.start()
    try:
        results = dict(queue.get(timeout=200) for _ in children)
    finally:
        for child in children:
            child.kill()
            child.join()
    for turn in range(SUMS):
        expected = torch.stack([addends(turn, rank) for rank in range(size)]).double().sum(0)
        for rank in range(size):
            found = torch.from_numpy(results[rank][turn])
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
            assert (found.numpy() == results[0][turn]).all()
    for own in shared:
        assert not own[:FLAGS_BYTES].any(), "a flag was left"


@pytest.mark.parametrize("two_hops", [False, True])
def test_alone_a_device_sends_nothing_and_waits_for_nobody(two_hops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = memory_of(2)
    sums = sums_of(shared, 0, monkeypatch, alone=True)
    one = sums.begin(7, WIDTH, torch.float32, two_hops=two_hops)
    assert one is not None
    for part in range(2):
        one.room(part).fill_(1.0)
        one.send(part)
    for part, rows in enumerate(one.parts):
        assert one.receive(part).shape[1:] == (rows.stop - rows.start, WIDTH)
    assert not shared[1].any() and not shared[0][:FLAGS_BYTES].any()


def test_a_sum_too_large_for_the_memory_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = sums_of(memory_of(2), 0, monkeypatch)
    most = TURN_BYTES // (2 * WIDTH * 4)
    assert sums.begin(most, WIDTH, torch.float32, two_hops=False) is not None
    assert sums.begin(most + 1, WIDTH, torch.float32, two_hops=False) is None
    assert sums.begin(4, WIDTH, torch.float32, two_hops=False) is None  # no row for the second part
