"""Random histories of hybrid models over a disk of blocks and recurrent states, with kills in the middle.

The disk is late, fails, and holds corrupt pieces. Its jobs read and write what the device has on the host: a state that
is written must not change meanwhile, and a slot that is filled holds nothing until all pieces are there. An engine that
is killed leaves its writes half done. The device knows which tokens each state has seen, and asserts that each segment
begins with the state of exactly the tokens before it. So a state that is taken for another one fails the test.
"""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.lm.memory import hybrid_cache
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.parts.tiers.state_tiers import pieces_of
from holdfast.lm.tiers import LowerShape, StateAbout, StoredState
from tests.hybrid import check_states_below
from tests.invariants import check_lower
from tests.lm.parts.tiers.test_tier_histories import BLOCK_BYTES, FakeTiers
from tests.lm.scheduler.test_histories import MAX_MODEL_LEN, STEPS, check
from tests.lm.scheduler.test_hybrid_histories import HybridHistory
from tests.scheduling import EOS, run_alone

PIECE = 1 << 18
FILLED = "being filled"


class FakeDisk(FakeTiers):
    """A disk of blocks and of states, without a remote tier. It outlives engines."""

    def __init__(self, disk_blocks, places, choose, trouble=0.2):
        super().__init__(disk_blocks, choose)
        self.places, self.trouble = places, trouble
        self.bad_reads = self.bad_writes = trouble / 5
        self.past = []
        """The conversations of engines that were killed."""
        self.pieces = {}
        """Digest, place in the state, description and contents of each piece, by slot."""
        self.block_size = None

    def shape(self):
        blocks = super().shape().stored
        pieces = self.places * pieces_of(1 << 20, self.block_size, PIECE)
        snapshots = LowerShape(PIECE, pieces, states=tuple(self.whole_states()))
        return LowerShape(BLOCK_BYTES, self.disk_blocks, blocks, snapshots=snapshots)

    def whole_states(self):
        """The states of which all pieces are there, as `DiskStore.states` finds them."""
        found = {}
        for slot, (name, place, about, _) in self.pieces.items():
            found.setdefault(name, {})[place] = slot, about
        for name, pieces in found.items():
            about = StateAbout.unpacked(next(iter(pieces.values()))[1])
            if sorted(pieces) == [*range(about.pieces)]:
                yield StoredState(name, tuple(pieces[place][0] for place in range(about.pieces)), about, 1.0)

    def start(self, jobs):
        states = [job for job in jobs if job.state.pieces]
        super().start([job for job in jobs if not job.state.pieces])
        for job in states:
            slot = job.blocks[0].host
            before = self.device.seen_on_host[slot]
            if job.kind == "write":
                assert before not in (None, FILLED), "nothing is there to be written"
            else:
                self.device.seen_on_host[slot] = FILLED
            self.under_way.append((job, before))

    def end(self, job, before):
        if not job.state.pieces:
            yield from super().end(job, before)
            return
        write = job.kind == "write"
        assert not write or self.device.seen_on_host[job.blocks[0].host] == before, "a state changed while written"
        for block in job.blocks:
            self.seen["state", job.kind] += 1
            if bad := self.choose.random() < self.trouble / job.state.pieces:
                self.pieces.pop(block.slot, None)
            elif write:
                self.pieces[block.slot] = block.digest, block.place, job.state.packed(), before
            yield self.choose.choice(("failed",) if write else ("corrupt", "failed")) if bad else self.move(job, block)

    def move(self, job, block):
        """Read a piece of a state, if the job reads. The state is on the host once its last piece has come."""
        if job.kind == "read":
            name, place, about, contents = self.pieces[block.slot]
            assert (name, place, about) == (block.digest, block.place, job.state.packed()), "another state is there"
            assert self.device.seen_on_host[block.host] in (FILLED, contents), "a plan in flight wrote to the slot"
            self.device.seen_on_host[block.host] = contents
        return "done"

    def kill(self):
        """Do some pieces of the writes under way, in any order."""
        for job, before in self.under_way:
            for block in job.blocks if job.kind == "write" else ():
                self.pieces.pop(block.slot, None) if job.state.pieces else self.disk.pop(block.slot, None)
                if self.choose.random() < 0.5 and job.state.pieces:
                    self.pieces[block.slot] = block.digest, block.place, job.state.packed(), before
        self.under_way.clear()


class HybridTieredHistory(HybridHistory):
    """A history of a hybrid model over a disk that outlives it."""

    def __init__(self, seed, disk, name="stall-free"):
        self.disk = disk
        super().__init__(seed, name)
        disk.device = self.device
        self.prefixes += disk.past

    def policy(self, name):
        if self.random.random() < 0.9:  # the host may have room for the blocks of whole sequences
            self.host_blocks = self.random.choice((1, 2, 4)) * 2 * -(-MAX_MODEL_LEN // self.block_size)
            self.host_ready = self.random.choice((self.host_blocks // 2, self.host_blocks))
        return super().policy(name)

    def more_settings(self):
        settings = super().more_settings()
        if self.host_blocks:
            self.disk.block_size = self.block_size
            settings["lower"] = self.disk.shape()
            settings["host_snapshots"] = self.host_snapshots = max(1, self.host_snapshots)
        return settings

    @property
    def tiers(self):
        return self.scheduler.part(TierPart)

    @property
    def states_below(self):
        return self.tiers.lower._states

    def step(self):
        if not self.host_blocks:
            return super().step()
        now = float(self.steps)
        self.tiers.done(self.disk.take(), now)
        self.disk.start(self.tiers.jobs(now))
        self.check_books()
        super().step()

    def check_books(self):
        super().check_books()
        if self.host_blocks:
            check_lower(self.scheduler)
            check_states_below(self.states_below)

    def nothing_runs(self):
        if self.host_blocks and self.tiers.awaited:
            self.seen["waits"] += 1
            self.tiers.done(self.disk.take(every=True), float(self.steps))
            self.steps += 1  # the deadline comes nearer
        else:
            super().nothing_runs()

    def drain(self):
        """Run to the end, however long the disk takes."""
        last = self.steps + 20000
        while self.scheduler.has_work() or self.plans:
            self.step()
            assert self.steps < last, "a request starves, or the engine never rests"

    def settle(self):
        """Let all jobs end."""
        while self.host_blocks and (self.disk.under_way or self.tiers.lower.unwritten or self.scheduler.has_work()):
            self.tiers.done(self.disk.take(every=True), float(self.steps))
            self.step()
        if self.host_blocks:
            assert not self.states_below._held and not self.states_below._arriving

    def check_killed(self):
        """Check what a killed engine has said until then."""
        for name, said in self.outputs.items():
            request = self.requests[name]
            tokens, _ = run_alone(request, eos=(EOS,), max_model_len=MAX_MODEL_LEN)
            assert tuple(said) == tokens[: len(said)]
            self.disk.past.append((*request.prompt, *said))


def live(history, steps):
    """Let clients ask and leave for this many steps, with pauses in which nothing runs."""
    while history.steps < steps:
        pause = history.random.random() < 0.05
        while not pause and history.random.random() < 0.4 and history.scheduler.stats().waiting < 12:
            history.add()
        if history.random.random() < 0.04:
            history.abort()
        for _ in range(20 if pause else 1):
            history.step()
            history.steps += pause


def play(seed, name="stall-free"):
    """Three engines, one after the other, over one disk. The first two are killed. Returns what was seen."""
    choose = random.Random(seed)
    disk = FakeDisk(
        choose.choice((10, 50, 200, 500)), choose.choice((1, 3, 10, 50)), choose, choose.choice((0, 0.1, 0.5))
    )
    for engine in range(3):
        history = HybridTieredHistory(seed, disk, name)
        live(history, STEPS)
        if engine < 2:
            history.check_killed()
            disk.kill()
        else:
            history.drain()
            history.settle()
            check(history)
        stats = history.scheduler.stats()
        after = {"hits after a restart": stats.prefix_hits_on_disk, "kept": stats.disk_snapshots_kept} if engine else {}
        disk.seen += history.seen + Counter(after, written=stats.disk_bytes_written, corrupt=stats.blocks_corrupt)
    return disk.seen


@pytest.fixture(autouse=True)
def short_gains(monkeypatch):
    """The sequences of these histories are short."""
    monkeypatch.setattr(hybrid_cache, "LEAST_GAIN", 1)


@pytest.mark.parametrize("name", ["orca", "latency-target", "unified", "prefill-first"])
@pytest.mark.parametrize("seed", range(5))
def test_every_policy_lives_with_a_disk_of_states(name, seed):
    play(seed, name)


@settings(max_examples=settings.default.max_examples // 4)  # each is three long histories, as are those below
@given(seed=st.integers(0, 1 << 32))
def test_states_from_the_disk_are_exact_in_any_history(seed):
    play(seed)


@pytest.mark.long
def test_every_request_gets_the_tokens_it_gets_alone_whatever_the_disk_does_and_whenever_it_is_killed():
    seen = Counter()
    for seed in range(40):
        seen += play(seed)
    for name in ("written", "corrupt", "waits", "hits after a restart", "kept", ("state", "read"), ("state", "write")):
        assert seen[name] > 3, f"{name}: {seen[name]}"
