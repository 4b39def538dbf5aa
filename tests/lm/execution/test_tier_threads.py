"""The threads that move blocks between the host tier and the disk."""

import threading
import time

import pytest
import torch

from holdfast.lm.execution import tier_threads
from holdfast.lm.execution.disk_store import DiskStore
from holdfast.lm.execution.host_memory import HostBlocks, HostPart
from holdfast.lm.execution.tier_threads import TierThreads
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.tiers import TierBlock, TierJob

BLOCKS = 8


def host_cache(by_block=True):
    sizes = dict(layers=2, num_blocks=BLOCKS, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    return KVCache.allocate(**sizes, device="cpu", by_block=by_block)


def blocks_of(cache):
    return HostBlocks([HostPart.of(cache)])


def job(number, kind, *pairs):
    """A job of (block of the host, place on the disk) pairs. A digest follows from the place."""
    return TierJob(number, "disk", kind, tuple(TierBlock(bytes([slot]) * 32, 0, host, slot) for host, slot in pairs))


@pytest.fixture
def disk(tmp_path):
    return DiskStore(tmp_path, 1_000_000, 2 * 2 * 4 * 2 * 8 * 4, {})


def wait_for(threads, count):
    ended, deadline = [], time.monotonic() + 200
    while len(ended) < count:
        assert time.monotonic() < deadline
        ended += threads.take()
        time.sleep(0.001)
    return {each.number: each.outcomes for each in ended}


def test_blocks_go_to_the_disk_and_back_whole_and_somebody_is_woken(disk):
    cache, woken = host_cache(), threading.Event()
    cache.data.copy_(torch.randn(cache.data.shape))
    threads = TierThreads(blocks_of(cache), disk, None, time.monotonic, woken.set)
    threads.start([job(0, "write", (3, 0), (5, 1))])
    assert wait_for(threads, 1) == {0: ("done", "done")} and woken.wait(60) and not threads.busy
    threads.start([job(1, "read", (0, 1)), job(2, "read", (1, 0), (2, 7))])
    assert wait_for(threads, 2) == {1: ("done",), 2: ("done", "corrupt")}
    assert torch.equal(cache.data[:, :, 0], cache.data[:, :, 5]) and torch.equal(
        cache.data[:, :, 1], cache.data[:, :, 3]
    )
    threads.close()


def test_blocks_of_one_last_use_keep_one_on_the_disk_whenever_they_are_written(disk):
    threads = TierThreads(blocks_of(host_cache()), disk, None, time.monotonic)
    last = time.monotonic() - 5.0
    for number in range(3):
        threads.start([TierJob(number, "disk", "write", (TierBlock(bytes([number]) * 32, 0, 0, number, last),))])
        wait_for(threads, 1)
    (age,) = {each.age for each in disk.stored()}
    assert 5.0 <= age <= time.monotonic() - last + 1.0
    threads.close()


def test_reads_come_before_writes_that_have_not_begun(disk, monkeypatch):
    monkeypatch.setattr(tier_threads, "DISK_THREADS", 1)
    gate, order = threading.Event(), []

    def noted(name, inner):
        def do(blocks, *rest):
            gate.wait(60)
            order.append((name, blocks[0].slot))
            return inner(blocks, *rest)

        return do

    monkeypatch.setattr(disk, "write", noted("write", disk.write))
    monkeypatch.setattr(disk, "read", noted("read", disk.read))
    threads = TierThreads(blocks_of(host_cache()), disk, None, time.monotonic)
    threads.start([job(number, "write", (number % BLOCKS, number)) for number in range(3)])
    threads.start([job(90, "read", (0, 90)), job(91, "read", (1, 91))])
    gate.set()
    wait_for(threads, 5)
    reads, (first, *writes) = [("read", 90), ("read", 91)], [("write", slot) for slot in range(3)]
    assert order in ([*reads, first, *writes], [first, *reads, *writes])
    threads.close()


def test_a_job_that_raises_has_failed_and_others_go_on(disk, monkeypatch):
    monkeypatch.setattr(disk, "read", lambda *args: 1 / 0)
    threads = TierThreads(blocks_of(host_cache()), disk, None, time.monotonic)
    threads.start([job(0, "read", (0, 0)), job(1, "write", (1, 1))])
    assert wait_for(threads, 2) == {0: ("failed",), 1: ("done",)}
    threads.close()


class SlowStore:
    """A remote tier whose check ends when a test lets it. It notes what happens."""

    def __init__(self):
        self.seen, self.began, self.gate = [], threading.Event(), threading.Event()

    def check(self):
        self.began.set()
        self.gate.wait(60)
        self.seen.append("checked")
        return "failed"

    def close(self):
        self.seen.append("closed")


def test_the_remote_tier_is_closed_after_a_check_that_has_begun():
    store = SlowStore()
    threads = TierThreads(blocks_of(host_cache()), None, store, time.monotonic, pause=0.0)
    threads.start([TierJob(0, "remote", "check", ())])
    assert store.began.wait(60)
    threading.Timer(0.05, store.gate.set).start()
    threads.close()
    assert store.seen == ["checked", "closed"]


def test_a_check_that_has_not_begun_holds_up_no_end():
    store, began = SlowStore(), time.monotonic()
    threads = TierThreads(blocks_of(host_cache()), None, store, time.monotonic, pause=3600.0)
    threads.start([TierJob(0, "remote", "check", ())])
    threads.close()
    assert store.seen == ["closed"] and time.monotonic() - began < 60
