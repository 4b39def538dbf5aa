"""CopyLedger: which copies are under way, and of which plan, until a result says that they are complete."""

from __future__ import annotations

from holdfast.lm.memory.copy_ledger import CopyLedger
from holdfast.lm.types import BlockCopy

USE = (1.0, 1)


def leaving(*blocks: int) -> list[BlockCopy]:
    """A copy to the host of each of these blocks, to the place that is 100 higher."""
    return [BlockCopy(block, 100 + block) for block in blocks]


def test_copies_to_the_host_end_with_their_plan_and_those_before_it_the_oldest_first() -> None:
    ledger = CopyLedger()
    ledger.start_swap_out(leaving(1, 2), {1: USE, 2: (2.0, 2)}, step=3)
    ledger.start_swap_out(leaving(5), {5: (5.0, 5)}, step=4)
    ledger.start_swap_out(leaving(7), {7: (7.0, 7)}, step=6)
    assert [*ledger.finish_swap_out(2)] == []
    assert [*ledger.finish_swap_out(5)] == [
        (BlockCopy(1, 101), USE),
        (BlockCopy(2, 102), (2.0, 2)),
        (BlockCopy(5, 105), (5.0, 5)),
    ]
    assert ledger.swapping_out == {7: 107} and ledger.under_way == {7}
    assert [*ledger.finish_swap_out(5)] == []


def test_idle_blocks_are_counted_without_those_that_have_an_owner() -> None:
    ledger = CopyLedger()
    ledger.start_swap_out(leaving(1, 2, 3), dict.fromkeys((1, 2, 3), USE), step=0, owned=2)
    assert ledger.idle == 1
    assert ledger.add_idle([2, 8, 9], (4.0, 4)) == [8, 9], "these are not being copied"
    assert ledger.idle == 2
    ledger.touch(1, (6.0, 6))
    assert [use for _, use in ledger.finish_swap_out(0)] == [(6.0, 6), (4.0, 4), USE]


def test_a_plan_without_copies_is_not_kept() -> None:
    ledger = CopyLedger()
    ledger.start_swap_out([], {}, step=0)
    assert (ledger.idle, ledger.under_way, [*ledger.finish_swap_out(9)]) == (0, set(), [])


def test_blocks_wait_for_the_latest_plan_that_fills_one_of_them() -> None:
    ledger = CopyLedger()
    assert ledger.swap_in_step([1]) == -1
    ledger.start_swap_in([1, 2], 3)
    ledger.start_swap_in([4], 5)
    assert [ledger.swap_in_step(blocks) for blocks in ([1, 4], [2], [4], [9], [])] == [5, 3, 5, -1, -1]
    ledger.finish_swap_in(3)
    assert [ledger.swap_in_step(blocks) for blocks in ([1, 2], [1, 4])] == [-1, 5]
    ledger.finish_swap_in(4)
    assert ledger.under_way == {4}
    ledger.finish_swap_in(5)
    assert ledger.under_way == set() and ledger.swap_in_step([4]) == -1
