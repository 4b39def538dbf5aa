"""RowTiers: which states go down to the disk, which come back, and that no piece of one is taken for another's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from holdfast.lm.memory.row_pool import FoundRow, RowPool, RowState
from holdfast.lm.parts.tiers import row_tiers
from holdfast.lm.parts.tiers.lower_tiers import UNKNOWN_WAIT
from holdfast.lm.parts.tiers.row_tiers import RowTiers
from holdfast.lm.tiers import LowerShape, StoredState, TierDone
from tests.padded_rows import ABLE, shape_of_rows

ROOT = b"r" * 32
PIECE = 128
"""A state of 40 positions of a byte takes two pieces with its description."""


def make(*, places=20, memory=1000, host=200, states=(), cost=None, now=0.0, abilities=ABLE):
    pool = RowPool(shape_of_rows(memory, host=host, abilities=abilities))
    return pool, RowTiers(pool, LowerShape(PIECE, disk_blocks=places, states=tuple(states)), cost, now)


def numbers(count, start=0):
    return list(range(start, start + count))


def keep(pool, tokens, now=0.0):
    """End a sequence of these tokens, whose state is kept on the device. Returns the state's slot."""
    state = RowState(pool, ROOT)
    state.allocate(FoundRow(), len(tokens), now)
    state.occupy(0)
    state.plan(0, len(tokens))
    state.keep()
    slot = state.kept
    state.settle(tokens, now)
    return slot


def step(pool, tiers, number, now=0.0):
    """Plan a step and see its copies complete. Returns the jobs to begin then."""
    pool.take_moves(0)
    pool.swap_out(number, 0, now)
    pool.finish_swap_out(number)
    return tiers.jobs(now)


def flush(pool, tiers, now=0.0):
    tiers.flush(idle=True)
    return step(pool, tiers, 0, now)


def end(tiers, jobs, outcome="done", now=0.0):
    tiers.done([TierDone(job.number, (outcome,) * len(job.blocks), 0.0) for job in jobs], now)


def stored(jobs):
    """The states on the disk after these writes."""
    return [
        StoredState(job.blocks[0].digest, tuple(block.slot for block in job.blocks), job.state, -job.blocks[0].last_use)
        for job in jobs
    ]


def written(pool, tiers, tokens, now=0.0):
    """Keep a state and write it. Returns the jobs."""
    keep(pool, tokens, now)
    jobs = flush(pool, tiers, now)
    end(tiers, jobs, now=now)
    return jobs


def forget_all(pool):
    for slot in pool.kept.slots:
        pool.give_up(slot)


def ask(pool, tiers, tokens, now=0.0):
    missing = RowState(pool, ROOT).lacking(tokens)
    return tiers.fetch(missing, now) if missing else None


def test_a_state_is_written_in_a_pause_and_read_for_a_sequence_that_begins_with_its_tokens():
    pool, tiers = make()
    tokens = numbers(40)
    keep(pool, tokens)
    assert tiers.can_flush
    tiers.flush(idle=False)
    assert not pool.storing, "requests go first"
    (job,) = flush(pool, tiers)
    assert [block.place for block in job.blocks] == [0, 1] and job.state.positions == 40 and job.state.pieces == 2
    assert pool.host_free == 160 and not tiers.can_flush
    assert ask(pool, tiers, [*tokens, 7]) is None, "the device has it"
    forget_all(pool)
    assert ask(pool, tiers, [*tokens, 7]) is None, "it is not written yet"
    end(tiers, [job])
    assert pool.host_free == 200
    fetch = ask(pool, tiers, [*tokens, 7], now=3.0)
    assert fetch.deadline == 3.0 + UNKNOWN_WAIT and not fetch.complete
    (read,) = tiers.jobs(3.0)
    assert [block[:2] for block in read.blocks] == [block[:2] for block in job.blocks]
    assert [block.slot for block in read.blocks] == [block.slot for block in job.blocks]
    assert read.state == job.state and pool.host_free == 160
    end(tiers, [read], now=3.5)
    assert fetch.complete and fetch.came["disk"] == 40
    assert pool.find(ROOT, [*tokens, 7]) == FoundRow(40, read.blocks[0].host, on_host=True)
    assert not pool.make_host_room(180), "the state is held for its sequence"
    tiers.close(fetch)
    assert pool.make_host_room(180)


def test_the_next_engine_finds_what_this_one_wrote():
    pool, tiers = make()
    jobs = written(pool, tiers, numbers(40), now=5.0)
    jobs += written(pool, tiers, numbers(60, 500), now=6.0)
    pool, tiers = make(states=stored(jobs), now=100.0)
    assert tiers.stats()["disk_blocks_cached"] == 5 * PIECE and not tiers.can_flush
    fetch = ask(pool, tiers, numbers(90, 500), now=100.0)
    assert [block.slot for block in tiers.jobs(100.0)[0].blocks] == [block.slot for block in jobs[1].blocks]
    assert fetch.came["disk"] == 60
    (new,) = written(pool, tiers, numbers(50, 900), now=101.0)
    assert {block.slot for block in new.blocks}.isdisjoint(block.slot for job in jobs for block in job.blocks)
    assert new.blocks[0].digest[24:] > jobs[1].blocks[0].digest[24:], "no two writes have one number"


def test_states_that_the_next_engine_cannot_use_leave_their_places_free():
    pool, tiers = make()
    (job,) = written(pool, tiers, numbers(40))
    (good,) = stored([job])
    bad = [
        replace_about(good, key=b"damaged"),
        good._replace(digest=b"x" * 32),
        good._replace(slots=(0,)),
        good._replace(slots=(19, 20)),
    ]
    for each in bad:
        _, tiers = make(states=[each])
        assert tiers.stats()["disk_blocks_cached"] == 0 and len(tiers._free) == 20
    again = good._replace(slots=(7, 8), digest=good.digest[:24] + (9).to_bytes(8, "little"))
    pool, tiers = make(states=[good, again])
    assert len(tiers._free) == 18 and ask(pool, tiers, numbers(41))
    assert [block.slot for block in tiers.jobs(0.0)[0].blocks] == [7, 8], "the later one stays"


def replace_about(state, **changes):
    return state._replace(about=replace(state.about, **changes))


def test_the_state_that_was_idle_longest_gives_way_and_one_of_less_value_is_not_written():
    pool, tiers = make(places=4)
    for number in range(3):
        written(pool, tiers, numbers(40, 1000 * number), now=float(number))
    assert tiers.stats()["disk_blocks_dropped"] == 2 * PIECE and tiers.stats()["disk_blocks_cached"] == 4 * PIECE
    forget_all(pool)
    assert ask(pool, tiers, numbers(41)) is None
    assert ask(pool, tiers, numbers(41, 1000)) and ask(pool, tiers, numbers(41, 2000))
    pool, tiers = make(places=4)
    for number in (1, 2):
        written(pool, tiers, numbers(40, 1000 * number), now=50.0)
    keep(pool, numbers(40), now=1.0)
    assert flush(pool, tiers, now=51.0) == [] and pool.host_free == 200
    assert ask(pool, tiers, numbers(41, 1000)) is None, "the device has these"
    forget_all(pool)
    assert (
        ask(pool, tiers, numbers(41, 1000))
        and ask(pool, tiers, numbers(41, 2000))
        and not ask(pool, tiers, numbers(41))
    )


def test_a_state_that_the_disk_has_does_not_count_as_dropped():
    pool, tiers = make()
    written(pool, tiers, numbers(40))
    keep(pool, numbers(30, 1000))
    forget_all(pool)
    assert pool.dropped == 30


def test_a_copy_may_take_the_place_of_another_state_on_the_host():
    pool, tiers = make(host=50)
    first, second = keep(pool, numbers(40)), keep(pool, numbers(40, 1000), now=1.0)
    pool.make_host_room(40)
    pool.kept.offload(second)
    jobs = flush(pool, tiers, now=2.0)
    assert [job.state.key for job in jobs] == [pool.kept.key(first).packed()] and second not in pool.kept
    end(tiers, jobs)
    assert pool.host_free == 50


def test_a_pause_copies_about_as_many_bytes_as_may_be_written_at_a_time(monkeypatch):
    monkeypatch.setattr(row_tiers, "WRITE_BYTES", 2 * PIECE)
    pool, tiers = make(places=40, host=900)
    for number in range(12):
        keep(pool, numbers(40, 1000 * number))
    seen = []
    for number in range(60):
        tiers.flush(idle=True)
        seen.append(len(tiers._copies))
        end(tiers, step(pool, tiers, number))
    assert 0 < max(seen) <= 7 and pool.host_free == 900
    assert tiers.stats()["disk_blocks_cached"] == 24 * PIECE and not tiers.can_flush


def test_a_state_larger_than_the_disk_or_the_host_is_not_written():
    pool, tiers = make(places=1)
    keep(pool, numbers(40))
    assert flush(pool, tiers) == [] and pool.host_free == 200 and not tiers.can_flush
    pool, tiers = make(host=30)
    keep(pool, numbers(40))
    assert not tiers.can_flush


def test_a_state_that_is_used_in_memory_counts_as_used_on_the_disk():
    pool, tiers = make(places=4)
    written(pool, tiers, numbers(40), now=0.0)
    written(pool, tiers, numbers(40, 1000), now=1.0)
    pool.kept.touch(pool.find(ROOT, numbers(41)).slot, 7.0)
    written(pool, tiers, numbers(40, 2000), now=9.0)
    forget_all(pool)
    assert ask(pool, tiers, numbers(41)) and not ask(pool, tiers, numbers(41, 1000))


def test_a_longer_turn_replaces_the_shorter_one_once_it_is_written():
    pool, tiers = make()
    written(pool, tiers, numbers(40))
    keep(pool, numbers(70))
    jobs = flush(pool, tiers)
    assert tiers.stats()["disk_blocks_cached"] == 2 * PIECE
    end(tiers, jobs)
    assert tiers.stats()["disk_blocks_cached"] == 3 * PIECE and len(tiers._free) == 17
    forget_all(pool)
    assert ask(pool, tiers, numbers(71)).came["disk"] == 70


def test_a_state_whose_write_failed_is_not_found_and_its_places_are_free():
    pool, tiers = make()
    keep(pool, numbers(40))
    (job,) = flush(pool, tiers)
    tiers.done([TierDone(job.number, ("done", "failed"), 0.0)], 0.0)
    forget_all(pool)
    assert ask(pool, tiers, numbers(41)) is None
    assert len(tiers._free) == 20 and pool.host_free == 200
    assert tiers.stats()["tier_failures"] == 1 and tiers.stats()["disk_bytes_written"] == PIECE


@pytest.mark.parametrize(("outcome", "counter"), [("corrupt", "blocks_corrupt"), ("failed", "tier_failures")])
def test_a_state_with_a_piece_that_cannot_be_read_is_dropped_and_its_sequence_goes_on(outcome, counter):
    pool, tiers = make()
    written(pool, tiers, numbers(40))
    forget_all(pool)
    fetch = ask(pool, tiers, numbers(41))
    (job,) = tiers.jobs(0.0)
    tiers.done([TierDone(job.number, ("done", outcome), 0.0)], 0.0)
    assert fetch.complete and fetch.came["disk"] == 0 and pool.host_free == 200
    assert ask(pool, tiers, numbers(41)) is None and len(tiers._free) == 20
    assert tiers.stats()[counter] == 1


def test_two_sequences_wait_for_one_read():
    pool, tiers = make()
    written(pool, tiers, numbers(40))
    forget_all(pool)
    fetches = [ask(pool, tiers, numbers(60)), ask(pool, tiers, numbers(50))]
    jobs = tiers.jobs(0.0)
    assert len(jobs) == 1 and not tiers.jobs(0.0)
    end(tiers, jobs)
    assert all(fetch.complete for fetch in fetches)
    tiers.close(fetches[0])
    assert pool.kept.held_bytes == 40
    tiers.close(fetches[1])
    assert pool.kept.held_bytes == 0


def test_a_sequence_waits_for_room_on_the_host_and_a_read_goes_on_without_it():
    pool, tiers = make(host=50)
    written(pool, tiers, numbers(40))
    written(pool, tiers, numbers(40, 1000))
    forget_all(pool)
    first, second = ask(pool, tiers, numbers(41)), ask(pool, tiers, numbers(41, 1000))
    (job,) = tiers.jobs(0.0)
    assert second.queued and not second.complete
    end(tiers, [job])
    assert not tiers.jobs(0.0), "the first state is held"
    tiers.close(first)
    (job,) = tiers.jobs(0.0)
    tiers.end_wait(second)
    end(tiers, [job])
    assert second.came["disk"] == 0 and pool.kept.held_bytes == 0 and tiers.stats()["fetches_given_up"] == 1
    assert pool.find(ROOT, numbers(41, 1000)).length == 40, "the state is there for others"


def test_a_wait_for_room_ends_when_the_state_is_dropped_meanwhile():
    pool, tiers = make(host=50, places=4)
    written(pool, tiers, numbers(40))
    written(pool, tiers, numbers(40, 1000), now=1.0)
    forget_all(pool)
    assert ask(pool, tiers, numbers(41, 1000), now=2.0)
    fetch = ask(pool, tiers, numbers(41), now=2.0)
    tiers._forget(tiers._by_digest[next(iter(fetch.pending))])
    tiers.jobs(2.0)
    pool.cancel_arrival(next(iter(pool._passing)))
    tiers.jobs(2.0)
    assert fetch.complete and fetch.came["disk"] == 0


def test_what_is_computed_sooner_than_it_is_read_is_not_fetched():
    read = 1e-3 + 40e-9
    for second, found in ((1.1 * read / 40, True), (0.9 * read / 40, False)):
        pool, tiers = make(cost=lambda chunk, position, second=second: chunk * second)
        written(pool, tiers, numbers(40))
        forget_all(pool)
        assert bool(ask(pool, tiers, numbers(41))) == found
        assert tiers.stats()["blocks_cheaper_computed"] == (not found)


def test_only_what_the_memory_lacks_counts_against_a_read():
    pool, tiers = make(cost=lambda chunk, position: chunk * 4e-5)
    written(pool, tiers, numbers(100))
    forget_all(pool)
    keep(pool, [*numbers(80), 900])
    assert ask(pool, tiers, numbers(101)) is None, "20 tokens are computed in 0.8 ms, and a read takes 1 ms"
    forget_all(pool)
    assert ask(pool, tiers, numbers(101)).came["disk"] == 100


def test_a_few_tokens_are_never_read():
    pool, tiers = make()
    written(pool, tiers, numbers(40))
    forget_all(pool)
    keep(pool, [*numbers(33), 900])
    assert ask(pool, tiers, numbers(41)) is None


def test_a_state_that_cannot_be_cut_serves_only_prompts_with_all_of_its_tokens():
    pool, tiers = make(abilities=replace(ABLE, croppable=False))
    written(pool, tiers, numbers(40))
    forget_all(pool)
    assert ask(pool, tiers, numbers(39)) is None and ask(pool, tiers, [*numbers(39), 900, 901]) is None
    assert ask(pool, tiers, numbers(41)).came["disk"] == 40


def test_a_long_state_is_read_in_jobs_that_threads_share(monkeypatch):
    monkeypatch.setattr(row_tiers, "READ_BYTES", 2 * PIECE)
    pool, tiers = make(memory=10_000, host=2000)
    (write,) = written(pool, tiers, numbers(600))
    forget_all(pool)
    fetch = ask(pool, tiers, numbers(601))
    jobs = tiers.jobs(0.0)
    assert len(jobs) > 3 and [block for job in jobs for block in job.blocks][-1].place == write.state.pieces - 1
    end(tiers, jobs[1:])
    assert not fetch.complete
    end(tiers, jobs[:1])
    assert fetch.complete


def test_without_a_host_tier_there_is_no_disk():
    with pytest.raises(ValueError, match="lies behind the host tier"):
        make(host=0)


class Disk:
    """A disk that keeps, for each place, the last complete write: piece, name, and tokens of the state."""

    def __init__(self, draw, tokens):
        self.draw, self.tokens = draw, tokens
        self.places = {}
        self.jobs = []

    def start(self, jobs):
        for job in jobs:
            for block in job.blocks:
                others = {each.slot for other in self.jobs for each in other.blocks}
                assert block.slot not in others, "two jobs use one place"
        self.jobs += jobs

    def end(self, tiers, now):
        """End a random job with random outcomes. A read gives back what was written."""
        job = self.jobs.pop(self.draw.randrange(len(self.jobs)))
        outcomes = []
        for block in job.blocks:
            good = self.draw.random() < 0.97
            if job.kind == "write":
                self.places.pop(block.slot, None)
                if good:
                    self.places[block.slot] = (block.digest, block.place, job.state, block.last_use)
                outcomes.append("done" if good else "failed")
            else:
                assert self.places[block.slot][:3] == (block.digest, block.place, job.state), "another state is read"
                outcomes.append("done" if good else "corrupt")
                if not good:
                    del self.places[block.slot]
        tiers.done([TierDone(job.number, tuple(outcomes), 0.0)], now)

    def kill(self):
        """The engine ends at once: each piece that was being written is whole, or its place is empty."""
        for job in self.jobs:
            for block in job.blocks if job.kind == "write" else ():
                self.places.pop(block.slot, None)
                if self.draw.random() < 0.5:
                    self.places[block.slot] = (block.digest, block.place, job.state, block.last_use)
        self.jobs.clear()

    def states(self, now):
        """The whole states, as a store lists them."""
        found = {}
        for slot, (digest, place, about, used) in self.places.items():
            found.setdefault(digest, ({}, about, used))[0][place] = slot
        return [
            StoredState(digest, tuple(slots[place] for place in range(about.pieces)), about, now - used)
            for digest, (slots, about, used) in sorted(found.items(), key=lambda each: each[1][2])
            if len(slots) == about.pieces
        ]


def check(pool, tiers):
    """Each place has one owner; the host holds no more than it has room for."""
    owned = [place for places in tiers._places.values() for place in places]
    assert sorted([*owned, *tiers._free]) == list(range(tiers._total))
    assert {*tiers._places} == {*tiers._by_digest.values()} | {*tiers._moving}
    assert pool.host_free >= 0 and {*tiers._copies} <= {*pool._passing}


@pytest.mark.parametrize("croppable", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_over_long_histories_with_restarts_nothing_is_lost_track_of(seed, croppable):
    draw = random.Random(seed)
    abilities = replace(ABLE, croppable=croppable)
    talks = [[draw.randrange(9999) for _ in range(draw.randrange(20, 60))] for _ in range(5)]
    disk, now, number, fetches, hits = Disk(draw, talks), 0.0, 0, [], 0
    pool, tiers = make(places=14, memory=300, host=150, abilities=abilities)
    for _ in range(600):
        now += draw.random()
        talk = draw.choice(talks)
        match draw.randrange(8):
            case 0 | 1:
                if len(talk) < 100:
                    talk += [draw.randrange(9999) for _ in range(draw.randrange(1, 20))]
                keep(pool, talk, now)
            case 2:
                if draw.random() < 0.3:
                    forget_all(pool)
                fetch = ask(pool, tiers, [*talk, 1], now)
                fetches += [fetch] if fetch else []
            case 3 if fetches:
                fetch = fetches.pop(draw.randrange(len(fetches)))
                hits += fetch.complete and fetch.came["disk"]
                if not fetch.complete:
                    tiers.end_wait(fetch)
                tiers.close(fetch)
            case 4 | 5 if disk.jobs:
                disk.end(tiers, now)
            case 6 if draw.random() < 0.05:
                disk.kill(), fetches.clear()
                pool, tiers = make(
                    places=14, memory=300, host=150, abilities=abilities, states=disk.states(now), now=now
                )
            case _:
                tiers.flush(idle=draw.random() < 0.7)
                number += 1
                disk.start(step(pool, tiers, number, now))
        disk.start(tiers.jobs(now))
        check(pool, tiers)
    assert hits > 0, "the disk was of use"
