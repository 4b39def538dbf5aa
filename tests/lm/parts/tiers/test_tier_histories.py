"""Long random histories with a disk and a remote tier below the host tier, against the sequential oracle.

The tiers are late, lose blocks, hold corrupt ones and fail. Their jobs read and write what the fake device has on the
host: a block that is written from must not change meanwhile, and one that is filled holds nothing until it is there.
After each history another engine starts over what the first one left on the disk and in the remote tier.
"""

import random
from collections import Counter

import pytest

from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.tiers import LowerShape, StoredBlock, TierDone
from tests.invariants import check_lower
from tests.lm.scheduler.test_histories import STEPS, History, check

BLOCK_BYTES = 1 << 20


class FakeTiers:
    """A disk and a remote tier whose jobs end late, in any order, and not always well."""

    bad_reads, bad_writes = 0.5, 0.2
    """Shares of blocks that are not read or written."""

    def __init__(self, disk_blocks, choose):
        self.disk_blocks = disk_blocks
        self.choose = choose
        self.disk, self.remote = {}, {}
        """Digest and contents by slot, and contents by digest."""
        self.device = None
        self.under_way = []
        self.seen = Counter()

    def shape(self):
        stored = [StoredBlock(slot, digest, place, 1.0) for slot, (digest, place, _) in self.disk.items()]
        return LowerShape(BLOCK_BYTES, self.disk_blocks, tuple(stored), remote=True)

    def start(self, jobs):
        for job in jobs:
            before = [self.device.host[block.host] for block in job.blocks] if job.kind == "write" else None
            assert before is None or None not in before, "nothing is there to be written"
            for block in job.blocks:
                if job.kind == "read":
                    self.device.host[block.host] = "being filled"
            self.under_way.append((job, before))

    def take(self, every=False):
        """Jobs that have ended by now."""
        ended = [each for each in self.under_way if every or self.choose.random() < 0.3]
        self.under_way = [each for each in self.under_way if each not in ended]
        self.choose.shuffle(ended)
        return [TierDone(job.number, tuple(self.end(job, before)), 0.001) for job, before in ended]

    def end(self, job, before):
        if job.kind == "check":
            yield self.choose.choice(("done", "failed"))
        for at, block in enumerate(job.blocks):
            bad = self.choose.random() < (self.bad_reads if job.kind == "read" else self.bad_writes)
            self.seen[job.tier, job.kind] += 1
            if job.kind == "probe":
                yield "done" if block.digest in self.remote else "missing"
            elif job.kind == "write":
                contents = self.device.host[block.host]
                assert contents == before[at], "a block changed while it was written"
                if bad:
                    self.disk.pop(block.slot, None)
                elif job.tier == "disk":
                    self.disk[block.slot] = block.digest, block.place, contents
                else:
                    self.remote[block.digest] = contents
                yield "failed" if bad else "done"
            elif bad:
                yield self.choose.choice(("missing", "corrupt", "failed"))
            else:
                digest, _, contents = self.disk[block.slot] if job.tier == "disk" else ("", 0, None)
                if job.tier == "remote":
                    digest, contents = block.digest, self.remote[block.digest]
                assert digest == block.digest, "the disk has another block there"
                self.device.host[block.host] = contents
                yield "done"


class TieredHistory(History):
    """A history over tiers that outlive it."""

    def __init__(self, seed, tiers, name="stall-free"):
        self.tiers = tiers
        super().__init__(seed, name)
        tiers.device = self.device
        tiers.under_way.clear()

    def more_settings(self):
        return {"lower": self.tiers.shape()} if self.host_blocks else {}

    def step(self):
        if not self.host_blocks:
            return super().step()
        now, scheduler = float(self.steps), self.scheduler
        scheduler.part(TierPart).done(self.tiers.take(), now)
        self.tiers.start(scheduler.part(TierPart).jobs(now))
        check_lower(scheduler)
        super().step()
        check_lower(scheduler)

    def nothing_runs(self):
        if self.host_blocks and self.scheduler.part(TierPart).awaited:
            self.seen["waits"] += 1
            self.scheduler.part(TierPart).done(self.tiers.take(every=True), float(self.steps))
            self.steps += 1  # the deadline comes nearer
        else:
            super().nothing_runs()

    def unsettled(self):
        lower = self.scheduler.part(TierPart).lower
        return lower._books or lower._host.unread_uses or any(lower._dirty.values()) or self.scheduler.has_work()

    def settle(self):
        """Let all jobs end."""
        while self.host_blocks and (self.unsettled()):
            self.scheduler.part(TierPart).done(self.tiers.take(every=True), float(self.steps))
            self.step()
        if self.host_blocks:
            stats = self.scheduler.stats()
            assert not self.scheduler.part(TierPart).lower._held and not self.scheduler.part(TierPart).lower._arriving
            self.seen += Counter(written=stats.disk_bytes_written, read=stats.disk_bytes_read)
            self.seen += Counter(remote=stats.remote_bytes_read, corrupt=stats.blocks_corrupt)
            self.seen["dropped on disk"] += stats.disk_blocks_dropped


def play(seed, name="stall-free"):
    """Two engines, one after the other, over the same lower tiers. Returns what was seen."""
    seen, tiers = Counter(), FakeTiers(seed % 5 * 20 + 1, random.Random(seed))
    for engine in range(2):
        history = TieredHistory(seed, tiers, name)
        while history.steps < STEPS:
            while history.random.random() < 0.4 and history.scheduler.stats().waiting < 12:
                history.add()
            if history.random.random() < 0.04:
                history.abort()
            history.step()
        history.drain()
        history.settle()
        check(history)
        seen += history.seen
        seen["hits after a restart"] += engine * history.scheduler.stats().prefix_hits_on_disk
    return seen


@pytest.mark.parametrize("name", ["orca", "speculating", "latency-target", "unified"])
@pytest.mark.parametrize("seed", range(2))
def test_every_policy_lives_with_lower_tiers(name, seed):
    play(seed, name)


@pytest.mark.long
def test_every_request_gets_the_tokens_it_gets_alone_whatever_the_lower_tiers_do():
    seen = Counter()
    for seed in range(24):
        seen += play(seed)
    for name in ("written", "read", "remote", "corrupt", "dropped on disk", "waits", "hits after a restart"):
        assert seen[name] > 4, f"{name}: {seen[name]}"
