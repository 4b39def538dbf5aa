"""LowerTiers: which blocks go down to the disk and the remote tier, which come back, and whom that holds up."""

import pytest

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.prices import Prices
from holdfast.lm.memory.retention import RetentionRule
from holdfast.lm.parts.tiers import lower_tiers
from holdfast.lm.parts.tiers.lower_tiers import READ_BYTES, LowerTiers
from holdfast.lm.tiers import LowerShape, StoredBlock, TierDone


def digest(number):
    return bytes([number]) * 32


def tiers_of(disk_blocks=8, host_blocks=8, remote=False, stored=(), block_bytes=1 << 22, remote_down=False):
    """Tiers below a pool of blocks of one token. By default the bytes of each block fill a job."""
    rule = RetentionRule(cost=float, chunk_blocks=1, block_size=1)
    pool = BlockPool(8, 1, rule=rule, host_blocks=host_blocks)
    shape = LowerShape(block_bytes, disk_blocks, stored, remote, remote_down)
    return pool, LowerTiers(pool, shape, Prices(None, block_size=1, block_bytes=block_bytes), 0.0)


def put_on_host(pool, *numbers, now=0.0):
    for place, number in enumerate(numbers):
        block, _ = pool.host.reserve(1e9, pool.host.victims(now))
        pool.host.cache_block(block, digest(number), place, (now, number))


def end(lower, jobs, outcome="done", now=0.0):
    lower.done([TierDone(job.number, (outcome,) * len(job.blocks), 0.0) for job in jobs], now)


def told(jobs):
    return sorted((job.tier, job.kind, block.digest[0]) for job in jobs for block in job.blocks)


def test_what_the_host_gets_is_written_to_every_tier_once():
    pool, lower = tiers_of(remote=True)
    put_on_host(pool, 1, 2)
    jobs = lower.jobs(0.0) + lower.jobs(0.0)
    assert told(jobs) == [("disk", "write", 1), ("disk", "write", 2), ("remote", "write", 1), ("remote", "write", 2)]
    end(lower, jobs)
    assert lower.has(digest(1)) and not lower.jobs(1.0) and not lower._books


def test_a_block_is_not_evicted_from_the_host_while_it_is_written():
    pool, lower = tiers_of(host_blocks=4)
    put_on_host(pool, 1)
    jobs = lower.jobs(0.0)
    put_on_host(pool, 2, 3, 4, 5, now=1.0)
    assert pool.host.find(digest(1)) is not None and pool.host.find(digest(2)) is None
    end(lower, jobs)
    put_on_host(pool, 6, now=2.0)
    assert pool.host.find(digest(1)) is None and lower.has(digest(1))


def test_the_disk_gives_up_the_lowest_value_and_refuses_less():
    stored = [StoredBlock(0, digest(1), 0, age=100.0), StoredBlock(1, digest(2), 9, age=1.0)]
    pool, lower = tiers_of(disk_blocks=2, stored=stored)
    put_on_host(pool, 3)
    end(lower, lower.jobs(0.0))
    assert [lower.has(digest(number)) for number in (1, 2, 3)] == [False, True, True]


def full_disk(host_blocks=8):
    """A disk that is full of blocks 1 and 2, of which 1 was used first. The host has both."""
    pool, lower = tiers_of(disk_blocks=2, host_blocks=host_blocks)
    put_on_host(pool, 1, now=0.0)
    put_on_host(pool, 2, now=1.0)
    while jobs := lower.jobs(1.0):
        end(lower, jobs, now=1.0)
    assert lower.has(digest(1)) and lower.has(digest(2))
    return pool, lower


def write_another(pool, lower, now):
    """Write block 3, for which the disk has to evict a block."""
    put_on_host(pool, 3, now=now)
    end(lower, lower.jobs(now), now=now)
    assert lower.has(digest(3))


def test_a_block_that_is_found_on_the_host_is_renewed_on_the_disk():
    pool, lower = full_disk()
    pool.touch([], [digest(1)], 2.0)
    write_another(pool, lower, now=3.0)
    assert lower.has(digest(1)) and not lower.has(digest(2))


def test_a_block_that_is_found_on_the_host_while_it_is_held_is_renewed_on_the_disk():
    pool, lower = full_disk()
    pool.host.hold(digest(1))
    pool.touch([], [digest(1)], 2.0)
    write_another(pool, lower, now=3.0)
    assert lower.has(digest(1)) and not lower.has(digest(2))


@pytest.mark.parametrize("end_use", ["free", "touch"])
def test_a_block_used_on_the_device_is_renewed_on_the_disk_although_the_host_has_evicted_it(end_use):
    pool, lower = full_disk(host_blocks=2)
    (block,) = pool.allocate(1, 1.0)
    pool.cache_block(block, digest(1), 0)  # a duplicate on the host, which is evicted first
    put_on_host(pool, 4, now=1.5)
    assert pool.host.find(digest(1)) is None
    pool.free([block], 2.0 if end_use == "free" else 0.5)
    if end_use == "touch":
        pool.touch([block], [], 2.0)
    pool.host.drop(digest(4))  # so that only block 3 is to be written
    write_another(pool, lower, now=3.0)
    assert lower.has(digest(1)) and not lower.has(digest(2))


def renewed(lower):
    """The blocks whose last use is to be noted now, each with that time. The jobs end at once."""
    lower.renew()
    jobs = [job for job in lower.jobs(9.0) if job.kind == "renew"]
    end(lower, jobs, now=9.0)
    assert not lower.disk.held
    return {block.digest[0]: (block.slot, block.last_use) for job in jobs for block in job.blocks}


def test_the_last_uses_of_blocks_on_the_disk_are_noted_once():
    pool, lower = full_disk()
    assert renewed(lower) == {}, "they are as they were written"
    pool.touch([], [digest(1)], 2.0)
    assert renewed(lower) == {1: (lower.disk.find(digest(1)), 2.0)}
    assert renewed(lower) == {}


def test_a_read_from_the_disk_is_a_use_to_be_noted():
    stored = [StoredBlock(slot, digest(slot), slot, age=1.0) for slot in range(3)]
    _, lower = tiers_of(stored=stored)
    lower.fetch({1: digest(1)}, 4.0)
    end(lower, lower.jobs(4.0), now=5.0)
    assert renewed(lower) == {1: (1, 5.0)}, "when it came"


def test_a_block_that_the_disk_has_evicted_is_no_longer_known_as_used():
    pool, lower = full_disk()
    pool.touch([], [digest(1)], 2.0)
    lower.jobs(2.0)
    pool.touch([], [digest(2)], 3.0)
    write_another(pool, lower, now=4.0)
    assert not lower.has(digest(1)) and lower._renewed == {digest(2)}


def test_state_that_the_host_has_evicted_is_not_waiting_to_be_written():
    pool, lower = tiers_of(remote=True)
    (block,) = pool.allocate(1, 0.0)
    pool.cache_block(block, digest(1), 0)
    pool.free([block], 1.0)
    assert lower.unwritten == 0 and lower.jobs(1.0) == []


def test_blocks_of_the_disk_come_back_and_are_held_until_the_sequence_starts():
    stored = [StoredBlock(slot, digest(slot), slot, age=1.0) for slot in range(3)]
    pool, lower = tiers_of(host_blocks=8, stored=stored)
    fetch = lower.fetch({0: digest(0), 1: digest(1), 5: digest(9)}, 0.0)
    jobs = lower.jobs(0.0)
    assert told(jobs) == [("disk", "read", 0), ("disk", "read", 1)] and not fetch.complete
    end(lower, jobs, now=0.1)
    assert fetch.complete and fetch.came == {"disk": 2, "remote": 0} and pool.host.held == 2
    lower.close(fetch)
    assert pool.host.held == 0 and pool.host.find(digest(0)) is not None
    assert not lower.jobs(0.2), "they are on the disk already"


def test_what_is_written_together_lies_on_the_disk_by_conversation():
    pool, lower = tiers_of(host_blocks=20)
    for number, (place, use) in enumerate([(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]):
        block, _ = pool.host.reserve(1e9, pool.host.victims(0.0))
        pool.host.cache_block(block, digest(number), place, (0.0, use))
    slots = {block.digest[0]: block.slot for job in lower.jobs(0.0) for block in job.blocks}
    assert sorted(slots, key=slots.get) == [0, 2, 4, 1, 3]


def test_a_long_read_is_several_jobs_each_of_neighbours_on_the_disk():
    stored = [StoredBlock(slot, digest(place), place, age=1.0) for place, slot in enumerate((3, 0, 2, 1))]
    _, lower = tiers_of(stored=stored, block_bytes=READ_BYTES // 2)
    fetch = lower.fetch({place: digest(place) for place in range(4)}, 0.0)
    jobs = lower.jobs(0.0)
    assert [[block.slot for block in job.blocks] for job in jobs] == [[0, 1], [2, 3]]
    end(lower, jobs[1:])
    assert not fetch.complete and fetch.came["disk"] == 2
    end(lower, jobs[:1], "corrupt")
    assert fetch.complete and fetch.came["disk"] == 2 and not lower._arriving


def test_a_sequence_may_wait_for_some_blocks_of_anothers_read():
    _, lower = tiers_of(stored=[StoredBlock(slot, digest(slot), slot, age=1.0) for slot in range(3)])
    first = lower.fetch({slot: digest(slot) for slot in range(3)}, 0.0)
    second = lower.fetch({1: digest(1)}, 0.0)
    jobs = lower.jobs(0.0)
    end(lower, [job for job in jobs if job.blocks[0].place == 1])
    assert second.complete and second.came["disk"] == 1 and not first.complete
    end(lower, [job for job in jobs if job.blocks[0].place != 1])
    assert first.complete and first.came["disk"] == 3 and second.came["disk"] == 1


def test_two_sequences_wait_for_one_read():
    pool, lower = tiers_of(stored=[StoredBlock(0, digest(0), 0, age=1.0)])
    fetches = [lower.fetch({0: digest(0)}, 0.0) for _ in range(2)]
    jobs = lower.jobs(0.0)
    assert len(jobs) == 1
    end(lower, jobs)
    assert all(fetch.complete for fetch in fetches) and pool.host.held == 1
    for fetch in fetches:
        lower.close(fetch)
    assert pool.host.held == 0


@pytest.mark.parametrize("outcome", ["corrupt", "missing", "failed"])
def test_a_block_that_does_not_come_is_forgotten_and_its_room_is_free(outcome):
    pool, lower = tiers_of(stored=[StoredBlock(0, digest(0), 0, age=1.0)])
    fetch = lower.fetch({0: digest(0)}, 0.0)
    end(lower, lower.jobs(0.0), outcome)
    assert fetch.complete and not fetch.held and not lower.has(digest(0))
    assert len(pool.host._free) == 8 and len(lower.disk._free) == 8
    assert lower.stats()["blocks_corrupt"] == (outcome == "corrupt")
    assert lower.fetch({0: digest(0)}, 1.0) is None


def test_a_block_is_not_filled_before_plans_that_may_read_its_place_have_ended():
    _, lower = tiers_of(stored=[StoredBlock(0, digest(0), 0, age=1.0)])
    lower.begin_swap_in(4)
    lower.fetch({0: digest(0)}, 0.0)
    assert not lower.jobs(0.0)
    lower.finish_swap_in(3)
    assert not lower.jobs(0.0)
    lower.finish_swap_in(4)
    assert len(lower.jobs(0.0)) == 1


def test_a_fetch_takes_no_more_than_half_of_the_host_and_the_last_blocks_first():
    _, lower = tiers_of(stored=[StoredBlock(slot, digest(slot), slot, age=1.0) for slot in range(6)])
    lower.fetch({slot: digest(slot) for slot in range(6)}, 0.0)
    assert [number for *_, number in told(lower.jobs(0.0))] == [2, 3, 4, 5]


def test_a_fetch_waits_for_room_until_another_sequence_has_started():
    _, lower = tiers_of(stored=[StoredBlock(slot, digest(slot), slot, age=1.0) for slot in range(6)])
    first = lower.fetch({slot: digest(slot) for slot in range(4)}, 0.0)
    second = lower.fetch({4: digest(4), 5: digest(5)}, 0.0)
    end(lower, lower.jobs(0.0))
    assert first.complete and not second.complete and not lower.jobs(0.1)
    lower.close(first)
    assert told(lower.jobs(0.2)) == [("disk", "read", 4), ("disk", "read", 5)]


def test_the_remote_tier_is_asked_first_and_gives_what_it_has():
    _, lower = tiers_of(disk_blocks=0, remote=True)
    fetch = lower.fetch({0: digest(0), 1: digest(1)}, 0.0)
    (probe,) = lower.jobs(0.0)
    assert probe.kind == "probe"
    lower.done([TierDone(probe.number, ("missing", "done"), 0.0)], 0.0)
    jobs = lower.jobs(0.0)
    assert told(jobs) == [("remote", "read", 1)]
    end(lower, jobs)
    assert fetch.complete and fetch.came["remote"] == 1


@pytest.mark.parametrize("found", ["done", "missing"])
def test_a_remote_tier_that_fails_gets_what_it_lacks_once_a_check_finds_that_it_works(found):
    pool, lower = tiers_of(disk_blocks=0, remote=True)
    put_on_host(pool, 1)
    end(lower, lower.jobs(0.0))
    fetch = lower.fetch({0: digest(0)}, 0.0)
    end(lower, lower.jobs(0.0), "failed", now=1.0)
    assert fetch.complete and lower.stats()["remote_down"] == 1
    put_on_host(pool, 2)
    for now in (1.0, 2.0):
        (check,) = lower.jobs(now)
        assert (check.tier, check.kind, check.blocks) == ("remote", "check", ())
        assert not lower.jobs(now) and lower.fetch({0: digest(0)}, now) is None, "one check at a time"
        lower.done([TierDone(check.number, ("failed",), 0.0)], now)
    (check,) = lower.jobs(3.0)
    lower.done([TierDone(check.number, (found,), 0.0)], 3.0)
    assert lower.stats()["remote_down"] == 0 and lower.stats()["tier_failures"] == 1
    written = [1, 2] if found == "missing" else [2]
    assert told(lower.jobs(3.0)) == [("remote", "write", number) for number in written]
    assert lower.fetch({0: digest(0)}, 3.0) is not None


def test_a_remote_tier_that_did_not_answer_at_the_start_is_checked():
    pool, lower = tiers_of(disk_blocks=0, remote=True, remote_down=True)
    put_on_host(pool, 1)
    assert [job.kind for job in lower.jobs(0.0)] == ["check"] and lower.stats()["remote_down"] == 1


# Through a scheduler: blocks of four tokens, of which the disk has the first three of the prompt of request "0".


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_failure_of_the_disk_does_not_pause_the_remote_tier(kind):
    pool, lower = tiers_of(remote=True, stored=[StoredBlock(0, digest(9), 0, age=1.0)])
    if kind == "read":
        lower.fetch({0: digest(9)}, 0.0)
    else:
        put_on_host(pool, 1)
    jobs = lower.jobs(0.0)
    end(lower, [job for job in jobs if job.tier == "disk"], "failed", now=1.0)
    end(lower, [job for job in jobs if job.tier == "remote"], now=1.0)
    put_on_host(pool, 2, now=2.0)
    begun = lower.jobs(2.0)
    assert ("remote", "write", 2) in told(begun) and ("disk", "write", 2) in told(begun)
    assert lower.stats()["tier_failures"] == 1


@pytest.mark.parametrize("outcome", ["missing", "corrupt"])
def test_a_remote_tier_that_answers_without_a_block_is_not_paused(outcome):
    pool, lower = tiers_of(disk_blocks=0, remote=True)
    fetch = lower.fetch({0: digest(9)}, 0.0)
    end(lower, lower.jobs(0.0), outcome, now=0.0)
    assert fetch.complete
    put_on_host(pool, 1, now=1.0)
    assert told(lower.jobs(1.0)) == [("remote", "write", 1)]


@pytest.mark.parametrize(
    ("host_blocks", "block_bytes", "most"), [(16, 1 << 20, 4), (200, 1 << 22, 16), (3, 1 << 22, 1)]
)
def test_no_more_than_64_mib_and_a_quarter_of_the_host_is_written_to_a_tier_at_a_time(host_blocks, block_bytes, most):
    pool, lower = tiers_of(disk_blocks=64, host_blocks=host_blocks, block_bytes=block_bytes)
    put_on_host(pool, *range(min(host_blocks, 30)))
    written = 0
    while jobs := lower.jobs(0.0):
        assert sum(len(job.blocks) for job in jobs) == min(most, min(host_blocks, 30) - written) == pool.host.held
        written += sum(len(job.blocks) for job in jobs)
        end(lower, jobs)
    assert written == min(host_blocks, 30) and pool.host.held == 0


def test_the_blocks_that_are_not_written_yet_are_counted():
    pool, lower = tiers_of(host_blocks=4)
    put_on_host(pool, 1, 2)
    assert lower.unwritten == 2 and not lower.unflushed
    jobs = lower.jobs(0.0)
    assert len(jobs) == 1 and lower.unwritten == 2, "one is being written, and one is still to be written"
    while jobs:
        end(lower, jobs)
        jobs = lower.jobs(0.0)
    assert lower.unwritten == 0
    (block,) = pool.allocate(1, 0.0)
    pool.cache_block(block, digest(3), 0)
    pool.free([block], 1.0)
    assert lower.unflushed


def test_without_a_disk_the_remote_tier_gets_each_block_once():
    pool, lower = tiers_of(disk_blocks=0, remote=True)
    put_on_host(pool, 1, 2)
    jobs = lower.jobs(0.0)
    assert told(jobs) == [("remote", "write", 1), ("remote", "write", 2)]
    end(lower, jobs)
    lower._dirty["remote"][digest(1)] = None  # as when the host gets it again
    assert not lower.jobs(1.0) and not lower.has_on_disk(digest(1)) and lower.has(digest(1))


def test_the_tier_of_each_block_is_reported_arriving_ones_first_and_the_disk_before_the_remote_tier():
    _, lower = tiers_of(remote=True, stored=[StoredBlock(slot, digest(slot), slot, age=1.0) for slot in range(3)])
    lower._know(digest(1))
    lower._know(digest(7))
    lower.fetch({2: digest(2)}, 0.0)
    assert lower.tiers(map(digest, (0, 1, 2, 7, 9))) == "kkfr-"


def test_bytes_and_faults_are_counted_by_tier():
    stored = [StoredBlock(slot, digest(slot), slot, age=1.0) for slot in range(3)]
    pool, lower = tiers_of(stored=stored, remote=True, block_bytes=READ_BYTES // 2)
    lower.fetch({slot: digest(slot) for slot in range(3)}, 0.0)
    read = lower.jobs(0.0)
    lower.done([TierDone(job.number, ("done", "corrupt", "done")[: len(job.blocks)], 0.0) for job in read], 0.1)
    put_on_host(pool, 9, now=1.0)
    writes = lower.jobs(1.0)
    end(lower, [job for job in writes if job.tier == "disk"])
    end(lower, [job for job in writes if job.tier == "remote"], "failed")
    stats = lower.stats()
    each = READ_BYTES // 2
    assert (stats["disk_bytes_read"], stats["blocks_corrupt"]) == (2 * each, 1)
    assert (stats["disk_bytes_written"], stats["remote_bytes_written"]) == (each, 0)
    assert stats["disk_blocks_total"] == 8 and stats["disk_blocks_cached"] == 3
    assert stats["tier_failures"] == sum(len(job.blocks) for job in writes if job.tier == "remote")
    assert stats["remote_down"] == 1


def test_a_wait_that_is_given_up_is_counted_and_what_comes_later_is_not_held():
    pool, lower = tiers_of(stored=[StoredBlock(0, digest(0), 0, age=1.0)])
    fetch = lower.fetch({0: digest(0)}, 0.0)
    jobs = lower.jobs(0.0)
    lower.end_wait(fetch)
    assert fetch.complete and lower.stats()["fetches_given_up"] == 1
    end(lower, jobs)
    assert pool.host.held == 0 and fetch.came["disk"] == 0 and pool.host.find(digest(0)) is not None
    lower.close(fetch)
    lower.close(fetch)
    assert pool.host.held == 0 and lower._held == 0


def test_a_sequence_waits_twice_as_long_as_computing_takes_but_neither_too_short_nor_too_long():
    for seconds, wait in ((0.01, 0.25), (0.4, 0.8), (90.0, 10.0), (None, 5.0)):
        stored = [StoredBlock(slot, digest(slot), slot, age=1.0) for slot in range(2)]
        _, lower = tiers_of(stored=stored)
        if seconds is not None:
            lower.prices = Prices(lambda position, each=seconds / 2: each, block_size=1, block_bytes=1)
        fetch = lower.fetch({slot: digest(slot) for slot in range(2)}, 3.0)
        assert fetch.deadline == pytest.approx(3.0 + wait)


def test_the_time_of_a_read_teaches_what_the_tier_takes():
    _, lower = tiers_of(stored=[StoredBlock(0, digest(0), 0, age=1.0)])
    before = lower.links["disk"].seconds(1 << 22)
    lower.fetch({0: digest(0)}, 0.0)
    end(lower, lower.jobs(0.0), now=9.0)
    assert lower.links["disk"].seconds(1 << 22) > before
    assert lower.links["remote"].seconds(1 << 22) < 1.0


def test_idle_state_goes_down_only_while_the_lower_tiers_keep_up():
    pool, lower = tiers_of(disk_blocks=64, host_blocks=8)
    (block,) = pool.allocate(1, 0.0)
    pool.cache_block(block, digest(50), 0)
    assert not lower.can_flush, "nothing is idle"
    pool.free([block], 0.0)
    assert lower.can_flush and not lower.backlog
    put_on_host(pool, 1, 2)
    assert lower.backlog and not lower.can_flush, "a quarter of the host is still to be written"
    jobs = lower.jobs(0.0)
    assert not lower.backlog, "it is being written"
    end(lower, jobs)
    lower.flush(True)
    assert pool.swap_out(0, 0, 1.0), "though most of the device is free"
    lower.flush(False)
    pool.finish_swap_out(0)
    assert pool.swap_out(1, 0, 1.0) == ()


def test_the_blocks_that_the_remote_tier_was_seen_to_have_are_remembered_up_to_a_number(monkeypatch):
    monkeypatch.setattr(lower_tiers, "REMOTE_KNOWN", 2)
    _, lower = tiers_of(remote=True)
    for number in (1, 2, 1, 3):
        lower._know(digest(number))
    assert [lower.has(digest(number)) for number in (1, 2, 3)] == [True, False, True]


def test_the_time_that_a_read_waits_for_room_is_not_the_tiers():
    def pace(waits):
        _, lower = tiers_of(stored=[StoredBlock(slot, digest(slot), slot, age=1.0) for slot in range(6)])
        first = lower.fetch({slot: digest(slot) for slot in range(4)}, 0.0)
        if waits:
            second = lower.fetch({4: digest(4), 5: digest(5)}, 0.0)
        end(lower, lower.jobs(0.0), now=0.01)
        lower.close(first)
        if not waits:
            second = lower.fetch({4: digest(4), 5: digest(5)}, 50.0)
        end(lower, lower.jobs(50.0), now=50.01)
        assert second.complete
        return lower.links["disk"].seconds(1 << 22)

    assert pace(waits=True) == pytest.approx(pace(waits=False))
