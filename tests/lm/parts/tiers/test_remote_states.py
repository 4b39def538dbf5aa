"""RemoteStates in a scheduler: what other engines have left is asked for, comes whole or not at all, and is let go."""

import pytest

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.memory import hybrid_cache
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.tiers import LowerShape, TierDone
from tests.hybrid import check_hybrid
from tests.scheduling import answer, create_scheduler, spans

SIZE, STATE = 4, 1 << 20
PROMPT = tuple(range(100, 122))
NEXT = (*PROMPT, 7, 7, 7, 1, 2, *range(300, 320))
"""The next turn. The state has seen all but the last token of the answer: 24 tokens."""


class Service:
    """The blocks and states that engines have written: digests, and keys by the block before them."""

    def __init__(self):
        self.blocks, self.states, self.after = set(), set(), {}

    def do(self, job):
        """The outcome of a job that nothing disturbs."""
        digests = [block.digest for block in job.blocks]
        if job.kind == "check":
            return TierDone(job.number, ("done",), 0.0)
        if job.kind == "find":
            found = [key for digest in reversed(digests) for key in self.after.get(digest, ())]
            return TierDone(job.number, ("done",) * len(digests), 0.0, tuple(found))
        there = self.states if job.state.pieces else self.blocks
        if job.kind == "write":
            there.update(digests)
            if job.state.pieces:
                self.after.setdefault(job.state.key[:32], []).append(job.state.key[32:])
        return TierDone(job.number, tuple("done" if each in there else "missing" for each in digests), 0.0)


class Engine:
    """A scheduler over a service, whose steps and jobs end at once unless a test holds them up."""

    def __init__(self, service, **options):
        lower = LowerShape(STATE // 4, remote=True, snapshots=LowerShape(1 << 18, remote=True))
        sizes = {"blocks": 64, "block_size": SIZE, "snapshots": 4, "host_blocks": 32, "host_snapshots": 4} | options
        self.service = service
        self.scheduler = create_scheduler(lower=lower, **sizes)
        self.part, self.now = self.scheduler.part(TierPart), 0.0
        (self.remote,) = self.part.lower._states.remote

    def ask(self, name, prompt, tokens=3):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.scheduler.add(Request(name, tuple(prompt), params, arrival=self.now))

    def step(self):
        self.now += 0.01
        plan = self.scheduler.schedule(self.now)
        check_hybrid(self.scheduler)
        if plan is None:
            return None
        self.scheduler.update(plan, answer(plan), self.now)
        return spans(plan)

    def jobs(self):
        return self.part.jobs(self.now)

    def end(self, jobs, outcome=""):
        """End these jobs, all with this outcome if one is given."""
        for job in jobs:
            done = self.service.do(job) if not outcome else TierDone(job.number, (outcome,) * len(job.blocks), 0.0)
            self.part.done([done], self.now)

    def rest(self):
        """Do all that is left to do. Returns the segments."""
        done = []
        for _ in range(100):
            self.end(self.jobs())
            planned = self.step() if self.scheduler.has_work() else None
            done += planned or ()
            if planned is None and not self.part.lower.unwritten and not self.scheduler.has_work():
                return done
        raise AssertionError("the engine never rests")

    def check_idle(self):
        states = self.scheduler._kind.states
        assert not self.remote._held and not self.remote._arriving and not states._host.reserved
        assert all(not each.holds for each in states.snapshots()) and self.scheduler.pool.host.held == 0


@pytest.fixture
def service():
    """The service after one turn of PROMPT, which another engine answered with 7, 7, 7."""
    written = Service()
    engine = Engine(written)
    engine.ask("0", PROMPT)
    engine.rest()
    assert len(written.states) == 1 and len(written.blocks) == 6
    return written


def kinds(jobs):
    return sorted(job.kind for job in jobs)


def test_a_turn_asks_what_other_engines_have_left_then_reads_it_and_computes_its_new_tokens(service):
    engine = Engine(service)
    engine.ask("1", NEXT)
    assert engine.step() is None and engine.part.awaited
    questions = engine.jobs()
    assert kinds(questions) == ["find", "probe"]
    engine.end(questions)
    assert engine.step() is None and engine.part.awaited, "it waits for what it has found"
    reads = engine.jobs()
    assert {job.kind for job in reads} == {"read"} and sum(bool(job.state.pieces) for job in reads) == 1
    engine.end(reads)
    assert engine.step() == [("1", 24, len(NEXT))]
    assert engine.scheduler.stats().prefix_hits_on_remote == 24
    engine.rest()
    engine.check_idle()


def test_what_is_known_is_not_asked_for_again(service):
    engine = Engine(service)
    engine.ask("1", NEXT)
    engine.rest()
    engine.ask("2", (*NEXT, 7, 7, 7, 9))
    assert "find" not in kinds(engine.jobs()), "the state at the end of its turn saves all but a few tokens"
    assert engine.step() == [("2", len(NEXT) + 2, len(NEXT) + 4)]


def test_a_question_that_is_not_answered_in_time_ends_the_wait(service):
    engine = Engine(service)
    engine.ask("1", NEXT)
    assert engine.step() is None
    questions = engine.jobs()
    engine.now += 6
    assert engine.step() == [("1", 0, len(NEXT))]
    engine.end(questions)
    engine.rest()
    engine.check_idle()


@pytest.mark.parametrize("what", ["state", "block"])
def test_a_state_or_a_block_that_was_evicted_there_makes_the_turn_compute_everything(service, what):
    engine = Engine(service)
    engine.ask("1", NEXT)
    engine.step()
    engine.end(engine.jobs())
    engine.step()
    (service.states if what == "state" else service.blocks).clear()
    engine.end(engine.jobs())
    assert engine.step()[0][:2] == ("1", 0)
    if what == "state":
        assert not engine.remote._known and not engine.remote._by_parent, "it is forgotten"
    engine.rest()
    engine.check_idle()


def test_a_service_that_fails_is_left_alone_and_gets_what_it_missed_once_it_works(service):
    engine = Engine(service)
    engine.ask("1", NEXT)
    engine.step()
    engine.end(engine.jobs(), "failed")
    assert engine.scheduler.stats().remote_down == 1
    assert engine.step() == [("1", 0, len(NEXT))]
    known = len(service.states)
    while engine.scheduler.has_work():
        engine.step()
        engine.end([job for job in engine.jobs() if job.kind != "check"])
    assert len(service.states) == known
    engine = Engine(service)
    engine.ask("1", PROMPT[:9])
    engine.step()
    engine.part.lower._blocks.note_remote_failure()
    checks = [job for job in engine.jobs() if job.kind == "check"]
    for _ in range(20):
        engine.step()
        engine.jobs()
    assert len(service.states) == known
    engine.end(checks)
    engine.rest()
    assert len(service.states) == known + 1
    engine.check_idle()


def test_keys_that_do_not_follow_the_blocks_asked_for_are_ignored(service):
    (parent, (key,)) = next(iter(service.after.items()))
    for wrong in (b"", key[:-1], key[:8] + bytes([key[8] ^ 1]) + key[9:], (99).to_bytes(8, "little") + key[8:]):
        service.after[parent] = [wrong]
        engine = Engine(service)
        engine.ask("1", NEXT)
        assert engine.step() is None
        engine.end(engine.jobs())
        assert engine.step() == [("1", 0, len(NEXT))] and not engine.remote._known


@pytest.mark.parametrize("late", [True, False])
def test_a_sequence_that_is_aborted_leaves_nothing_held(service, late):
    for waits in range(2):
        engine = Engine(service)
        engine.ask("1", NEXT)
        for _ in range(waits):
            engine.step()
            engine.end(engine.jobs())
        engine.step()
        jobs = engine.jobs()
        if not late:
            engine.end(jobs)
        engine.scheduler.abort("1")
        if late:
            engine.end(jobs)
        engine.rest()
        engine.check_idle()
        assert not engine.part._questioned and not engine.part._asked and not engine.part._arrived


def test_a_prompt_that_may_gain_few_tokens_asks_nothing(service, monkeypatch):
    monkeypatch.setattr(hybrid_cache, "LEAST_GAIN", len(NEXT))
    engine = Engine(service)
    engine.ask("1", NEXT)
    assert engine.step() == [("1", 0, len(NEXT))]


def test_a_host_without_a_slot_for_a_state_is_refused():
    with pytest.raises(ValueError, match="raise host_cache_gb or snapshot_share"):
        Engine(Service(), host_snapshots=0)
