"""HybridTiers in a scheduler: a start on the disk comes back whole or not at all, and nothing is left held."""

import pytest

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.memory import hybrid_cache
from holdfast.lm.parts.tiers.hybrid_tiers import HybridTiers
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.parts.tiers.state_tiers import StateTiers, pieces_of
from holdfast.lm.tiers import LowerShape, StoredBlock, StoredState, TierDone
from tests.hybrid import check_hybrid, check_states_below
from tests.invariants import check_lower
from tests.scheduling import answer, create_scheduler, spans

SIZE, STATE, PIECE = 4, 1 << 20, 1 << 18
PIECES = pieces_of(STATE, SIZE, PIECE)
PROMPT = tuple(range(100, 122))
"""22 tokens. With 3 more, its turn ends in a state of 24 tokens and a tail without tokens."""


class Disk:
    """The blocks and states that engines have written."""

    def __init__(self, blocks=64, places=8):
        self.num_blocks, self.places = blocks, places
        self.blocks, self.states = {}, {}

    def shape(self):
        stored = tuple(StoredBlock(slot, *pair, 1.0) for slot, pair in self.blocks.items())
        states = LowerShape(PIECE, self.places * PIECES, states=tuple(self.states.values()))
        return LowerShape(STATE // 4, self.num_blocks, stored, snapshots=states)

    def write(self, job):
        for block in job.blocks:
            if not job.state.pieces:
                self.blocks[block.slot] = block.digest, block.place
        if job.state.pieces:
            first = job.blocks[0]
            slots = tuple(block.slot for block in job.blocks)
            self.states[first.slot] = StoredState(first.digest, slots, job.state, 1.0)


class Engine:
    """A scheduler over a disk, whose steps and jobs end at once unless a test holds them up."""

    def __init__(self, disk, host_snapshots=4, host_blocks=32, **options):
        sizes = {"blocks": 64, "block_size": SIZE, "snapshots": 4, "host_blocks": host_blocks} | options
        self.disk = disk
        self.scheduler = create_scheduler(lower=disk.shape(), host_snapshots=host_snapshots, **sizes)
        self.part = self.scheduler.part(TierPart)
        self.lower, self.now = self.part.lower, 0.0

    def ask(self, name, prompt, tokens=3):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.scheduler.add(Request(name, tuple(prompt), params, arrival=self.now))

    def step(self):
        """Plan and end a step. Returns its segments; None if nothing was planned."""
        self.now += 0.01
        plan = self.scheduler.schedule(self.now)
        check_hybrid(self.scheduler)
        if plan is None:
            return None
        self.scheduler.update(plan, answer(plan), self.now)
        return spans(plan)

    def jobs(self):
        self.check()
        return self.part.jobs(self.now)

    def end(self, jobs, outcome="done", bad=()):
        """End these jobs. The states and blocks whose digests are in `bad` get this outcome, without it all do."""
        for job in jobs:
            wrong = [not bad or block.digest in bad for block in job.blocks]
            outcomes = tuple(outcome if each else "done" for each in wrong)
            if job.kind == "write" and "done" in outcomes:
                self.disk.write(job)
            self.part.done([TierDone(job.number, outcomes, 0.0)], self.now)
        self.check()

    def check(self):
        check_lower(self.scheduler)
        check_states_below(self.lower._states)

    def rest(self):
        """Do all that is left to do. Returns the segments."""
        done = []
        for _ in range(100):
            self.end(self.jobs())
            planned = self.step() if self.scheduler.has_work() else None
            done += planned or ()
            if planned is None and not self.lower.unwritten and not self.scheduler.has_work():
                return done
        raise AssertionError("the engine never rests")


@pytest.fixture
def disk():
    """The disk after one turn of PROMPT, which the engine answered with 7, 7, 7."""
    written = Disk()
    engine = Engine(written)
    engine.ask("0", PROMPT)
    engine.rest()
    assert len(written.states) == 1 and len(written.blocks) == 6
    return written


NEXT = (*PROMPT, 7, 7, 7, 1, 2)
"""The next turn. The state has seen all but the last token of the answer."""


def reads(jobs):
    return [job for job in jobs if job.kind == "read"]


def test_an_idle_engine_writes_the_state_and_the_blocks_of_a_turn(disk):
    (state,) = disk.states.values()
    assert state.about.positions == 24 and state.slots == tuple(range(PIECES))
    assert sorted(place for _, place in disk.blocks.values()) == [0, 1, 2, 3, 4, 5]


def test_after_a_restart_the_next_turn_computes_its_new_tokens_only(disk):
    engine = Engine(disk)
    engine.ask("1", NEXT)
    jobs = engine.jobs()
    assert engine.step() is None and engine.part.awaited, "it waits for its state and its blocks"
    assert {job.number < 0 for job in reads(jobs)} == {True, False}
    engine.end(jobs)
    assert engine.step() == [("1", 24, 27)]
    stats = engine.scheduler.stats()
    assert (stats.prefix_hits, stats.prefix_hits_on_disk, stats.snapshot_tokens) == (24, 24, 24)
    engine.rest()
    assert not engine.lower._states._held and engine.scheduler.pool.host.held == 0


def test_a_tail_that_is_not_full_counts_its_own_tokens_only():
    written = Disk()
    engine = Engine(written)
    engine.ask("0", PROMPT[:19])
    engine.rest()
    (state,) = written.states.values()
    assert state.about.positions == 21 and len(written.blocks) == 6
    engine = Engine(written)
    engine.ask("1", (*PROMPT[:19], 7, 7, 7, 1))
    engine.end(engine.jobs())
    assert engine.step() == [("1", 21, 23)]
    assert engine.scheduler.stats().prefix_hits_on_disk == 21


def test_a_sequence_waits_until_state_and_blocks_are_there(disk):
    for first in (True, False):
        engine = Engine(disk)
        engine.ask("1", NEXT)
        jobs = engine.jobs()
        engine.end([job for job in jobs if (job.number < 0) == first])
        assert engine.step() is None and engine.part.awaited
        engine.end([job for job in jobs if (job.number < 0) != first])
        assert engine.step() == [("1", 24, 27)]


@pytest.mark.parametrize("what", ["a piece of the state", "a block"])
def test_a_bad_piece_or_a_bad_block_makes_the_turn_compute_everything(disk, what):
    (state,) = disk.states.values()
    bad = disk.blocks[0][0] if what == "a block" else state.digest
    engine = Engine(disk)
    engine.ask("1", NEXT)
    engine.end(engine.jobs(), "corrupt", bad={bad})
    assert engine.step()[0][:2] == ("1", 0)
    stats = engine.scheduler.stats()
    assert stats.blocks_corrupt > 0 and stats.prefix_hits_on_disk == 0
    assert len(engine.lower._states._states) == (what == "a block"), "a bad state is forgotten"
    engine.rest()


def test_a_state_without_one_of_its_blocks_is_not_read(disk):
    del disk.blocks[2]
    engine = Engine(disk)
    engine.ask("1", NEXT)
    assert not reads(engine.jobs())
    assert engine.step() == [("1", 0, 27)]


def test_a_sequence_stops_waiting_at_its_deadline_and_lets_go(disk):
    engine = Engine(disk)
    engine.ask("1", NEXT)
    jobs = engine.jobs()
    engine.now += 6
    assert engine.step() == [("1", 0, 27)]
    assert engine.scheduler.stats().fetches_given_up == 1
    engine.end(jobs)
    engine.rest()
    assert not engine.lower._states._held and engine.scheduler.pool.host.held == 0


def test_a_sequence_that_is_aborted_while_it_waits_leaves_nothing_held(disk):
    for late in (True, False):
        engine = Engine(disk)
        engine.ask("1", NEXT)
        jobs = engine.jobs()
        if not late:
            engine.end(jobs)
        engine.scheduler.abort("1")
        if late:
            engine.end(jobs)
        assert not engine.lower._states._held and engine.scheduler.pool.host.held == 0
        assert not engine.scheduler._kind.states._host.reserved


def test_two_branches_of_a_turn_read_its_state_once(disk):
    engine = Engine(disk)
    engine.ask("1", NEXT)
    engine.ask("2", (*NEXT[:-1], 9))
    assert engine.step() is None
    jobs = engine.jobs()
    assert sum(len(job.blocks) for job in reads(jobs) if job.number < 0) == PIECES
    engine.end(jobs)
    done = [*engine.step(), *engine.rest()]
    assert ("1", 24, 27) in done and ("2", 24, 27) in done


def test_a_start_waits_for_a_slot_of_the_host_that_another_holds(disk):
    engine = Engine(disk)
    engine.ask("0", [*range(200, 222)])
    engine.rest()
    engine = Engine(disk, host_snapshots=1)
    engine.ask("1", NEXT)
    engine.ask("2", (*range(200, 222), 7, 7, 7, 1, 2))
    assert engine.step() is None
    jobs = engine.jobs()
    assert {job.blocks[0].digest for job in jobs if job.number < 0} == {disk.states[0].digest}
    engine.end(jobs)
    assert engine.step() == [("1", 24, 27)]
    assert engine.part.awaited, "the other still waits"
    engine.end(engine.jobs())
    assert ("2", 24, 27) in engine.rest() + (engine.step() or [])


def test_a_conversation_longer_than_half_of_the_host_is_computed(disk):
    engine = Engine(disk, host_blocks=11)
    engine.ask("1", NEXT)
    assert not reads(engine.jobs())
    assert engine.step() == [("1", 0, 27)] and engine.scheduler.stats().blocks_cheaper_computed == 6


def test_a_start_waits_until_a_host_that_grows_has_room_for_its_blocks(disk):
    engine = Engine(disk, host_ready=4)
    engine.ask("1", NEXT)
    assert not reads(engine.jobs()) and engine.step() is None and engine.part.awaited
    engine.scheduler.pool.host.resize(32, 32)
    engine.end(engine.jobs())
    assert engine.step() == [("1", 24, 27)]


def test_a_state_is_read_only_if_that_is_faster_than_computing(disk):
    for seconds, read in ((1.0, True), (1e-9, False)):
        engine = Engine(disk)
        tiers = HybridTiers(
            engine.scheduler.pool, engine.lower._blocks, engine.lower._states, lambda *_, each=seconds: each
        )
        engine.ask("1", NEXT)
        missing = engine.scheduler.entries["1"].cache.lacking(NEXT)
        latency = engine.lower._states.link.latency
        engine.part._waiting.clear()
        assert (tiers.fetch(missing, 0.0) is not None) == read
        assert (engine.lower._states.link.latency < latency) != read, "a price that was refused is tried again later"


def test_the_state_that_a_conversation_has_left_goes_before_one_of_less_value():
    written = Disk(places=3)
    engine = Engine(written)
    engine.ask("0", [*range(200, 210)])
    engine.rest()
    engine.ask("1", PROMPT)
    engine.rest()
    engine.ask("2", NEXT)
    engine.rest()
    assert engine.scheduler.stats().disk_snapshots_kept == 3
    engine.ask("3", [*range(300, 340)])
    engine.rest()
    assert sorted(state.key.length for state in engine.lower._states._states.values()) == [12, 29, 42]
    restarted = Engine(written)
    restarted.ask("4", (*NEXT, 7, 7, 7, 5))
    restarted.end(restarted.jobs())
    assert restarted.step() == [("4", 29, 31)], "the last turn of the conversation has stayed"


def test_of_two_writes_of_a_state_the_later_is_found_and_the_places_of_the_other_are_free(disk):
    (first,) = disk.states.values()
    number = int.from_bytes(first.digest[24:], "little") + 5
    again = first._replace(
        digest=first.digest[:24] + number.to_bytes(8, "little"), slots=tuple(range(PIECES, 2 * PIECES))
    )
    for order in ((first, again), (again, first)):
        disk.states = dict(enumerate(order))
        states = Engine(disk).lower._states
        (state,) = states._states.values()
        assert state.name == again.digest and len(states._free) == disk.places - 1 and states._writes == number + 1
        check_states_below(states)


@pytest.mark.parametrize(
    "change",
    [
        {"slots": tuple(range(1, 1 + PIECES))},
        {"slots": tuple(range(8 * PIECES, 9 * PIECES))},
        {"digest": b"another state".ljust(32, b"\0")},
    ],
    ids=["a place of another size", "beyond the disk", "another digest"],
)
def test_a_state_that_does_not_fit_what_the_disk_says_of_it_is_left_out(disk, change):
    disk.states = {slot: state._replace(**change) for slot, state in disk.states.items()}
    assert not Engine(disk).lower._states._states


def test_a_write_that_fails_leaves_the_place_free(disk):
    engine = Engine(disk)
    engine.ask("5", [*range(400, 422)])
    while engine.scheduler.has_work():
        engine.step()
        engine.end(engine.jobs(), "failed")
    stats = engine.scheduler.stats()
    assert (stats.disk_snapshots_kept, stats.tier_failures > PIECES) == (1, True)
    assert all(not snapshot.holds for snapshot in engine.scheduler._kind.states.snapshots())


def test_a_host_or_a_disk_without_room_for_a_state_is_refused():
    with pytest.raises(ValueError, match="raise host_cache_gb or snapshot_share"):
        Engine(Disk(), host_snapshots=0)
    with pytest.raises(ValueError, match=f"has {PIECES - 1} pieces for states, and one takes {PIECES}"):
        states = Engine(Disk()).scheduler._kind.states
        StateTiers(states, SIZE, LowerShape(PIECE, PIECES - 1), 0.0)


def test_a_gain_of_few_tokens_is_computed(disk, monkeypatch):
    monkeypatch.setattr(hybrid_cache, "LEAST_GAIN", 25)
    engine = Engine(disk)
    engine.ask("1", NEXT)
    assert not reads(engine.jobs())
