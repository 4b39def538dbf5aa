"""The kernel that waits for copies of other devices, interpreted."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch

from holdfast.lm.kernels.collectives.copied_sum import take_flags_kernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs under Triton's interpreter")

SIZE, EACH = 3, 4


def take(flags: torch.Tensor, alone: int, rank: int) -> None:
    is_alone = torch.tensor([alone], dtype=torch.int32)
    take_flags_kernel[(1,)](flags, is_alone, SIZE, rank, EACH=EACH, SENDERS=8)


def test_flags_are_taken_once_all_other_devices_have_set_theirs() -> None:
    flags = torch.full((SIZE * EACH,), 7, dtype=torch.int32).share_memory_()
    flags.view(SIZE, EACH)[:, 0] = torch.tensor([1, 0, 0])
    waiting = multiprocessing.get_context("fork").Process(target=take, args=(flags, 0, 1))
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive() and flags[0] == 1
    flags[2 * EACH] = 1
    waiting.join(20)
    assert waiting.exitcode == 0
    assert flags.view(SIZE, EACH).tolist() == [[0, 7, 7, 7]] * SIZE


def test_alone_a_device_waits_for_no_flag_and_takes_none() -> None:
    flags = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int32)
    take(flags, 1, 1)
    assert flags[0] == 1
