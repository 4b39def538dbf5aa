"""The host tier's memory: locked slab by slab in a thread, usable as far as it is locked."""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Iterator

import pytest
import torch

from holdfast.engine.ranks.mailbox import nameless_memory
from holdfast.lm.execution import host_memory
from holdfast.lm.execution.host_memory import HostBlocks, HostMemory, HostPart, shared_memory, slabs
from holdfast.lm.kernels.cache.kv_cache import KVCache

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4


def cache(num_blocks: int, within: torch.Tensor | None = None, *, by_block: bool = True) -> KVCache:
    return KVCache.allocate(
        layers=2, num_blocks=num_blocks, block_size=16, num_kv_heads=2, head_dim=16, dtype=torch.float32, device="cpu",
        by_block=by_block, within=within,
    )  # fmt: skip


@pytest.fixture
def descriptor() -> Iterator[int]:
    """Memory that several processes may map."""
    descriptor = nameless_memory()
    yield descriptor
    os.close(descriptor)


class Locks:
    """Locks as CUDA does, one slab for each permit, and refuses the slab of number `refused`."""

    def __init__(self, permits: int, refused: int | None = None) -> None:
        self.permits, self.refused = threading.Semaphore(permits), refused
        self.asked = threading.Semaphore(0)
        self.held: dict[int, int] = {}

    def lock(self, address: int, size: int) -> int:
        self.asked.release()
        self.permits.acquire()
        if len(self.held) == self.refused:
            return 2
        pages = {page for start, taken in self.held.items() for page in pages_of(start, taken)}
        assert pages.isdisjoint(pages_of(address, size)), "no page is locked twice"
        self.held[address] = size
        return 0

    def unlock(self, address: int) -> None:
        del self.held[address]


def pages_of(start: int, size: int) -> range:
    return range(start // mmap.PAGESIZE, -(-(start + size) // mmap.PAGESIZE))


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 4 * mmap.PAGESIZE)


def test_blocks_become_ready_as_their_slabs_are_locked() -> None:
    locks = Locks(permits=0)
    host = HostMemory(cache(10), locks.lock, locks.unlock)
    host.begin()
    locks.asked.acquire()
    assert (host.ready, host.blocks) == (0, 10)
    seen, pieces = [0], [*slabs(host.cache.memory.data_ptr(), 10 * BLOCK_BYTES)]
    for number in range(len(pieces)):
        locks.permits.release()
        if number < len(pieces) - 1:
            locks.asked.acquire()  # the next one is in progress
        else:
            host.wait()
        seen.append(host.ready)
        locked = sum(locks.held.values())
        assert seen[-1] * BLOCK_BYTES <= locked
    assert host.ready == 10
    assert seen == sorted(seen) and len(set(seen)) > 2
    assert sum(locks.held.values()) == 10 * BLOCK_BYTES
    host.close()
    assert not locks.held


def test_a_refused_slab_leaves_a_smaller_tier_and_one_line_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    locks = Locks(permits=99, refused=2)
    host = HostMemory(cache(10), locks.lock, locks.unlock)
    host.begin()
    host.wait()
    assert 0 < host.ready == host.blocks < 10
    (record,) = caplog.records
    assert "ulimit -l" in record.getMessage() and "CUDA error 2" in record.getMessage()
    assert "\n" not in record.getMessage()
    host.close()
    assert not locks.held


def test_closing_while_slabs_are_being_locked_unlocks_them_and_locks_no_more() -> None:
    locks = Locks(permits=1)
    host = HostMemory(cache(1000), locks.lock, locks.unlock)
    host.begin()
    locks.asked.acquire()
    locks.asked.acquire()  # the second slab is in progress
    closing = threading.Thread(target=host.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    locks.permits.release(3)
    closing.join()
    assert not locks.held and host.ready < 1000


def test_slabs_wait_for_each_other_while_steps_run_and_do_not_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "WAIT_SHARE", 1e6)
    locks = Locks(permits=0)
    host = HostMemory(cache(10), locks.lock, locks.unlock)
    host.begin()
    locks.asked.acquire()  # the first slab is in progress
    locks.permits.release()
    locks.asked.acquire()  # no step: the second one follows at once
    host.note_step()
    locks.permits.release(9)
    assert not locks.asked.acquire(timeout=0.05), "it rests for as long as the factor says"
    host.close()
    assert not locks.held and host.ready < 10


def test_memory_that_never_began_can_be_closed() -> None:
    locks = Locks(permits=0)
    HostMemory(cache(1), locks.lock, locks.unlock).close()
    assert not locks.held


@pytest.mark.parametrize("size", [1, 4095, 16384, 100_000])
@pytest.mark.parametrize("address", [4096 * 7, 4096 * 7 + 64])
def test_slabs_cover_everything_once_and_meet_at_bounds_of_pages(address: int, size: int) -> None:
    ranges = list(slabs(address, size))
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == size
    assert all((address + stop) % mmap.PAGESIZE == 0 for _, stop in ranges[:-1])


def test_a_block_is_the_parts_of_all_ranks_in_rank_order(descriptor: int) -> None:
    own, other = cache(5), cache(5, shared_memory(descriptor, 5 * BLOCK_BYTES))
    for number, each in enumerate((own, other)):
        each.data.copy_(torch.arange(5.0).view(1, 1, 5, 1, 1, 1) + 10 * number)
    blocks = HostBlocks([HostPart.of(own), HostPart.shared(descriptor, 5, BLOCK_BYTES)])
    assert [torch.frombuffer(part, dtype=torch.float32).unique().tolist() for part in blocks[3]] == [[3.0], [13.0]]
    for part in blocks[4]:
        part[:] = bytes(BLOCK_BYTES)
    assert not own.data[:, :, 4].any() and not other.data[:, :, 4].any()
    assert own.data[:, :, 3].unique() == 3.0 and other.data[:, :, 3].unique() == 13.0


def test_another_process_sees_writes_to_shared_memory(descriptor: int) -> None:
    shared_memory(descriptor, 2 * BLOCK_BYTES)[BLOCK_BYTES:] = 7
    if (child := os.fork()) == 0:
        data, _ = HostPart.shared(descriptor, 2, BLOCK_BYTES)
        right = bytes(data) == bytes(BLOCK_BYTES) + bytes([7]) * BLOCK_BYTES
        data[:1] = b"c"
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(HostPart.shared(descriptor, 2, BLOCK_BYTES).data[:2]) == b"c\0"


def test_blocks_in_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match="in pieces"):
        HostPart.of(cache(3, by_block=False))


@pytest.mark.gpu
def test_a_gpu_copies_blocks_of_pinned_memory_that_another_rank_maps(descriptor: int) -> None:
    """A rank's part of the host tier, which rank 0 maps as well."""
    kept = cache(1000, shared_memory(descriptor, 1000 * BLOCK_BYTES))
    seen = HostPart.shared(descriptor, 1000, BLOCK_BYTES).data
    flat = torch.empty(0, dtype=torch.uint8).set_(kept.data.untyped_storage())
    assert not flat.is_pinned()
    host = HostMemory(kept)
    host.begin()
    host.wait()
    try:
        assert host.ready == host.blocks == 1000
        data = flat.numpy().data
        assert all(torch.frombuffer(data[at:], dtype=torch.uint8).is_pinned() for at in range(0, len(data), 100_000))
        seen[:] = random.Random(1).randbytes(len(seen))
        before, device = bytes(seen), torch.empty(1000 * BLOCK_BYTES // 4, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # some 0.1 s, in which a copy that is not asynchronous would wait
        slab = device.view(torch.uint8)[: 4 * mmap.PAGESIZE]
        slab.copy_(flat[: len(slab)], non_blocking=True)
        flat[-len(slab) :].copy_(slab, non_blocking=True)
        under_way = torch.cuda.Event()
        under_way.record()
        assert not under_way.query() and bytes(seen[-len(slab) :]) == before[-len(slab) :]
        torch.cuda.synchronize()
        assert bytes(seen) == before[: -len(slab)] + before[: len(slab)]

        from holdfast.lm.kernels.cache.copy_kernel import copy_runs

        numbers, there = torch.arange(1000, device="cuda"), torch.zeros(2, 2, 1000, 16, 2, 16, device="cuda")
        copy_runs(kept.data, numbers, there, numbers.flip(0))
        copy_runs(there, numbers, kept.data, numbers)
        torch.cuda.synchronize()
        blocks = [before[at : at + BLOCK_BYTES] for at in range(0, len(before), BLOCK_BYTES)]
        assert bytes(seen) == b"".join(reversed([*blocks[:-2], *blocks[:2]]))
    finally:
        host.close()
    assert not flat.is_pinned()


@pytest.mark.gpu
def test_a_gpu_reads_and_writes_blocks_of_every_slab() -> None:
    from holdfast.lm.kernels.cache.copy_kernel import copy_runs

    kept = cache(100)
    host = HostMemory(kept)
    host.begin()
    host.wait()
    try:
        assert host.ready == host.blocks == 100
        kept.data.copy_(torch.arange(100.0).view(1, 1, 100, 1, 1, 1))
        device, numbers = torch.zeros(2, 2, 100, 16, 2, 16, device="cuda"), torch.arange(100, device="cuda")
        copy_runs(kept.data, numbers, device, numbers.flip(0))
        copy_runs(device, numbers, kept.data, numbers)
        torch.cuda.synchronize()
        assert torch.equal(kept.data[1, 1, :, 3, 1, 5], torch.arange(100.0).flip(0))
    finally:
        host.close()
