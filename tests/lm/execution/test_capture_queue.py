"""Which graph a busy engine captures next, and when that is worth a pause."""

import pytest

from holdfast.lm.execution.capture_queue import MARGIN, CaptureQueue, GraphSize, Missed

LARGE, SMALL, SMALLER = GraphSize("decode", 48), GraphSize("decode", 40), GraphSize("decode", 36)


@pytest.fixture
def queue() -> CaptureQueue:
    """The start has captured steps of 48 decodes: 8 ms of rehearsal, 12 ms of capture."""
    queue = CaptureQueue()
    queue.captured(LARGE, 0.008, 0.012)
    queue.add([SMALL, SMALLER])
    return queue


def miss(queue: CaptureQueue, wanted: GraphSize, seconds: float) -> None:
    missed = queue.missed(wanted, LARGE)
    assert missed is not None
    queue.lost(missed, seconds)


def test_a_size_is_due_once_padding_has_taken_longer_than_its_capture_would(queue: CaptureQueue) -> None:
    steps, of_a_step = 0, 0.007 * (1 - 40 / 48)
    while not queue.due:
        miss(queue, SMALL, 0.007)
        steps += 1
    assert steps * of_a_step >= MARGIN * 0.020 > (steps - 1) * of_a_step
    assert queue.due == MARGIN * 0.008, "the first half alone, because another step comes in between"


def test_the_second_half_is_due_as_soon_as_the_first_is_done(queue: CaptureQueue) -> None:
    miss(queue, SMALL, 1.0)
    queue.rehearsed = queue.next
    assert (queue.next, queue.due) == (SMALL, MARGIN * 0.012)
    miss(queue, SMALLER, 9.0)
    assert queue.next == SMALL, "a size that is rehearsed is captured next"


def test_nothing_is_due_after_a_capture_until_another_size_has_lost_as_much(queue: CaptureQueue) -> None:
    miss(queue, SMALL, 1.0)
    queue.rehearsed = queue.next
    queue.captured(SMALL, 0.004, 0.004)
    assert queue.due == 0 and queue.rehearsed is None and queue.next == SMALLER
    missed = queue.missed(SMALLER, SMALL)
    assert missed == Missed(SMALLER, pytest.approx(0.1))
    queue.lost(missed, MARGIN * 0.008 / 0.1 * 1.01)
    assert queue.due == MARGIN * 0.004, "of the next larger size"


def test_the_next_size_follows_from_padding_alone_and_not_from_times(queue: CaptureQueue) -> None:
    miss(queue, SMALL, 100.0)
    miss(queue, SMALLER, 0.0)
    assert queue.next == SMALLER and queue.padding == 12


def test_without_padding_sizes_come_in_their_order(queue: CaptureQueue) -> None:
    assert queue.next == SMALL and queue.padding == 0 and queue.due == 0


def test_a_larger_size_of_another_kind_or_of_fewer_segments_tells_no_time() -> None:
    queue = CaptureQueue()
    queue.captured(GraphSize("body", 512, 64), 1.0, 2.0)
    queue.captured(GraphSize("body", 768, 200), 3.0, 4.0)
    queue.captured(GraphSize("body", 1024, 200), 5.0, 6.0)
    assert queue.expected(GraphSize("body", 384, 64)) == (MARGIN * 1, MARGIN * 2)
    assert queue.expected(GraphSize("body", 384, 200)) == (MARGIN * 3, MARGIN * 4)
    assert queue.expected(GraphSize("decode", 8)) == (0, 0)


def test_a_miss_of_a_size_that_is_captured_since_then_counts_no_more(queue: CaptureQueue) -> None:
    missed = queue.missed(SMALL, LARGE)
    assert missed is not None
    queue.captured(SMALL, 0.0, 0.0)
    queue.lost(missed, 100.0)
    assert queue.due == 0 and queue.missed(SMALL, SMALL) is None


def test_no_size_is_due_when_capturing_has_ended(queue: CaptureQueue) -> None:
    miss(queue, SMALL, 100.0)
    queue.rehearsed = queue.next
    queue.clear()
    assert not queue and queue.due == 0 and queue.padding == 0 and queue.missed(SMALL, LARGE) is None
