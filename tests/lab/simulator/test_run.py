"""Simulated runs: the engine's own loop and schedulers, as clients see them."""

from dataclasses import replace
from itertools import pairwise

import pytest

from holdfast.core.config import PACKED_SCHEDULERS
from holdfast.core.contract import NO_CONTRACT, Contract, ContractRefused, Refusal
from holdfast.core.types import FinishReason, Request, SequenceOutput
from holdfast.lab import workloads
from holdfast.lab.metrics import summary
from holdfast.lab.simulator.deployment import Pipeline
from holdfast.lab.simulator.devices import Link
from holdfast.lab.simulator.run import Conversations, engine_shape
from holdfast.lab.workloads import Conversation, Turn
from holdfast.lm.config import EngineConfig
from holdfast.loop.loop import Loop
from tests.built import SCHEDULING, check, settings_of
from tests.lab.simulator.simulation import COST, PROFILE, run


def separate_requests(count, prompt, output, gap=0.0):
    return [Conversation(gap * number, (Turn(prompt, output),)) for number in range(count)]


def test_a_single_request_takes_the_time_of_the_cost_model():
    outcome = run(separate_requests(1, 100, 3))
    (record,) = outcome.records
    steps = [COST.step([span]) for span in ((100, 100), (1, 101), (1, 102))]
    assert record.token_times == pytest.approx([sum(steps[: index + 1]) for index in range(3)])
    assert outcome.seconds == pytest.approx(sum(steps))
    assert outcome.busy == pytest.approx(sum(steps))
    assert outcome.stats.blocks_used == 0


def test_requests_arrive_on_time_and_the_clock_skips_idle_time():
    outcome = run(separate_requests(3, 10, 2, gap=100.0))
    assert [record.arrival for record in outcome.records] == [0.0, 100.0, 200.0]
    assert len({round(record.token_times[0] - record.arrival, 9) for record in outcome.records}) == 1
    assert outcome.seconds < 201 and outcome.busy < 1


def test_a_request_due_in_mid_step_arrives_then_and_is_planned_with_the_next_step(monkeypatch):
    given = []
    monkeypatch.setattr(Loop, "add", lambda loop, request: (given.append(request.arrival), loop.planner.add(request)))
    first, late = Conversation(0.0, (Turn(100, 3),)), Conversation(0.001, (Turn(50, 2),))
    outcome = run([first, late], config={"steps_in_flight": 1})
    steps = [COST.step(spans) for spans in ([(100, 100)], [(1, 101), (50, 50)], [(1, 102), (1, 51)])]
    ends = [sum(steps[: index + 1]) for index in range(3)]
    one, two = outcome.records
    assert steps[0] > 0.001
    assert one.token_times == pytest.approx(ends)
    assert (two.arrival, two.scheduled) == (0.001, pytest.approx(ends[0]))
    assert given == [0.0, 0.001]
    assert two.token_times == pytest.approx(ends[1:])


@pytest.mark.parametrize("name", SCHEDULING)
def test_every_option_of_the_scheduler_reaches_the_simulated_one(name, monkeypatch):
    loops = []

    class Noted(Loop):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            loops.append(self)

    monkeypatch.setattr("holdfast.lab.simulator.run.Loop", Noted)
    for options in ({}, SCHEDULING[name][0]):
        run(separate_requests(1, 10, 2), config=options)
    defaults, settings = (settings_of(loop.planner) for loop in loops)
    check(name, settings, defaults)


def test_as_many_simulated_steps_are_in_flight_as_the_option_says():
    """The tokens of a step are known when it ends: with more steps in flight the host's time is hidden."""
    one, two = (
        run(separate_requests(1, 10, 50), config={"steps_in_flight": steps}, host_seconds=0.002) for steps in (1, 2)
    )
    assert one.seconds == pytest.approx(two.seconds + 49 * 0.002, rel=0.01)


def test_drafts_are_simulated_by_the_share_of_guesses_that_are_right():
    def seconds(acceptance, **config):
        outcome = run(separate_requests(2, 10, 200), config=config, acceptance=acceptance)
        assert [len(record.token_times) for record in outcome.records] == [200, 200]
        return outcome.seconds

    plain = seconds(None)
    assert seconds(1.0) < 0.3 * plain
    assert seconds(1.0) < seconds(0.8) < seconds(0.5) < plain
    assert seconds(0.0) == pytest.approx(plain, rel=0.02)
    assert seconds(1.0, speculation="off") == plain
    assert seconds(1.0, draft_tokens=1) == pytest.approx(plain / 2, rel=0.15)


def test_orcas_steps_are_bounded_by_the_pool_unless_a_budget_is_given():
    def most_tokens(**options):
        return engine_shape(EngineConfig(scheduler="orca", max_sequences=16, **options), PROFILE).max_step_tokens

    assert most_tokens() == PROFILE.cache_tokens == 8192
    assert most_tokens(token_budget=32) == 2048 + 16
    assert most_tokens(max_model_len=100) == 16 * 100


@pytest.mark.parametrize("name", ["orca", "request-level"])
def test_reserving_policies_run_as_many_requests_as_the_pool_holds_at_their_longest(name):
    """Each takes 160 positions in the end: 10 blocks of a pool of 64."""
    pool = replace(PROFILE, cache_tokens=1024)
    outcome = run(separate_requests(12, 100, 61), profile=pool, config={"scheduler": name})
    started = sorted(record.scheduled for record in outcome.records)
    assert [at == 0.0 for at in started] == [True] * 6 + [False] * 6
    assert outcome.stats.preemptions == 0


def test_a_turn_arrives_after_its_think_time_and_finds_its_history_cached():
    outcome = run([Conversation(0.0, (Turn(50, 20), Turn(10, 20, think=7.0)))])
    first, second = outcome.records
    assert second.arrival == pytest.approx(first.token_times[-1] + 7.0)
    assert (second.prompt_tokens, second.cached_tokens) == (80, 64)


def test_a_closed_loop_keeps_the_given_number_of_conversations_open():
    outcome = run(separate_requests(6, 10, 5, gap=1000.0), concurrency=2)
    spans = [(record.arrival, record.token_times[-1]) for record in outcome.records]
    assert [arrival for arrival, _ in spans[:2]] == [0.0, 0.0]
    for arrival, _ in spans[2:]:
        assert arrival in [end for _, end in spans]
        assert sum(start <= arrival < end for start, end in spans) == 2


@pytest.mark.parametrize("name", PACKED_SCHEDULERS)
def test_the_same_arguments_give_the_same_outcome(name):
    workload = workloads.gamma_arrivals(
        workloads.fit_context(workloads.multi_turn(8, think=0.5, seed=1), 1500), 20.0, seed=1
    )
    first, second = (run(workload, config={"scheduler": name}) for _ in range(2))
    assert first.records == second.records and first.seconds == second.seconds
    assert all(len(record.token_times) for record in first.records)
    assert all(before < after for record in first.records for before, after in pairwise(record.token_times))


def test_stall_free_avoids_the_stalls_of_prefill_first():
    workload = [*separate_requests(8, 20, 200), *(Conversation(0.4, (Turn(1900, 4),)) for _ in range(3))]
    profile = replace(PROFILE, cache_tokens=65536)

    def worst(**config):
        return max(
            after - before
            for record in run(workload, profile=profile, config=config).records[:8]
            for before, after in pairwise(record.token_times)
        )

    assert worst(scheduler="prefill-first") > 0.05
    assert worst(scheduler="stall-free") < 0.02
    assert worst(tbt_target=8.0) <= 0.0085


def test_a_request_that_can_never_run_is_refused():
    with pytest.raises(ValueError, match="exceeds the limit of 2048"):
        run(separate_requests(1, 4000, 1))


def test_the_summary_counts_all_requests_and_tokens():
    outcome = run(workloads.gamma_arrivals(workloads.fixed(20, 30, 10), 50.0, seed=0))
    figures = summary(outcome.records)
    assert (figures["completed"], figures["total_output_tokens"]) == (20, 200)
    assert figures["p99_itl_ms"] >= figures["median_itl_ms"] >= 4.0


def test_progress_reports_ended_requests():
    seen = []
    run(separate_requests(3, 10, 2), on_progress=seen.append)
    assert seen[-1] == 3 and seen == sorted(seen)


TIERED = replace(PROFILE, cache_tokens=1024, token_bytes=1000, copy_rate=1e9)


def returning(count, think=50.0):
    """Conversations of two turns, whose state does not all fit on the device during the think time."""
    return [Conversation(0.5 * at, (Turn(300, 20), Turn(20, 20, think=think))) for at in range(count)]


def test_a_host_tier_returns_state_that_the_device_had_no_room_for():
    without = run(returning(8), profile=TIERED)
    outcome = run(returning(8), profile=TIERED, config={"host_cache_gb": 0.01})
    assert outcome.stats.blocks_swapped_out > 0 and outcome.stats.blocks_swapped_in > 0
    cached, before = (sum(record.cached_tokens for record in each.records) for each in (outcome, without))
    assert cached > before
    assert summary(outcome.records)["mean_ttft_ms"] < summary(without.records)["mean_ttft_ms"]


def test_slow_copies_delay_first_tokens():
    fast, slow = (
        run(returning(8), profile=replace(TIERED, copy_rate=rate), config={"host_cache_gb": 0.01})
        for rate in (1e9, 1e6)
    )
    assert summary(slow.records)["p99_ttft_ms"] > summary(fast.records)["p99_ttft_ms"] + 50


def test_a_disk_tier_returns_state_that_the_host_had_no_room_for():
    config = {"host_cache_gb": 0.0006}
    without, slow, fast = (
        run(returning(8), profile=TIERED, config={**config, **more}, disk_rate=rate)
        for more, rate in (({}, 1e9), ({"disk_cache_dir": "d"}, 1e4), ({"disk_cache_dir": "d"}, 1e9))
    )
    assert fast.stats.disk_bytes_written > 0 and fast.stats.prefix_hits_on_disk > 0
    assert fast.stats.tokens_dropped < without.stats.tokens_dropped
    assert summary(fast.records)["mean_ttft_ms"] < summary(without.records)["mean_ttft_ms"]
    assert slow.stats.prefix_hits_on_disk < fast.stats.prefix_hits_on_disk, "what is dearer to read is computed"


def test_a_disk_tier_of_padded_rows_returns_state_that_the_host_had_no_room_for():
    config = {"host_cache_gb": 0.0006, "executor": "padded"}
    without, slow, fast = (
        run(returning(8), profile=TIERED, config={**config, **more}, disk_rate=rate)
        for more, rate in (({}, 1e9), ({"disk_cache_dir": "d"}, 1e4), ({"disk_cache_dir": "d"}, 1e9))
    )
    assert fast.stats.disk_bytes_written > 0 and fast.stats.prefix_hits_on_disk > 0
    assert fast.stats.prefix_hits > without.stats.prefix_hits
    assert slow.stats.prefix_hits_on_disk < fast.stats.prefix_hits_on_disk, "what is dearer to read is computed"


@pytest.mark.parametrize("executor", ["auto", "padded"])
def test_a_disk_tier_needs_a_host_tier_before_it(executor):
    with pytest.raises(ValueError, match="no host tier"):
        run(returning(2), profile=TIERED, config={"disk_cache_dir": "d", "executor": executor})


def test_a_host_tier_is_refused_if_the_profile_has_no_cache_size():
    with pytest.raises(ValueError, match=r"host_cache_gb is 1\.0, and the profile of m on d does not say"):
        run(separate_requests(1, 10, 1), config={"host_cache_gb": 1.0})


STAGED = Pipeline((COST, COST), Link("wire", 1e9, 1e-4), token_bytes=100)
BOTH = replace(PROFILE, cost=STAGED.whole(), pp=2)


@pytest.mark.parametrize("name", PACKED_SCHEDULERS)
def test_every_policy_serves_on_a_pipeline(name):
    workload = workloads.gamma_arrivals(workloads.fixed(24, 200, 12), 30.0, seed=2)
    first, second = (run(workload, profile=BOTH, pipeline=STAGED, config={"scheduler": name}) for _ in range(2))
    assert first.records == second.records
    assert [len(record.token_times) for record in first.records] == [12] * 24
    assert first.stats.blocks_used == 0


def test_two_stages_prefill_almost_twice_as_fast_as_one_device_with_their_total_time():
    workload = workloads.fixed(16, 1000, 2)
    one, two = run(workload, profile=BOTH), run(workload, profile=BOTH, pipeline=STAGED)
    assert 0.5 < two.seconds / one.seconds < 0.6
    assert 0.85 < two.busy / two.seconds <= 1


def test_a_tbt_target_holds_on_a_pipeline():
    streams = [Conversation(0.0, (Turn(20, 120),))] * 8
    prompts = [Conversation(0.3 + 0.4 * at, (Turn(1500, 2),)) for at in range(3)]
    target, roomy = 20.0, replace(BOTH, token_budget=1024)
    outcome = run([*streams, *prompts], profile=roomy, pipeline=STAGED, config={"tbt_target": target})
    gaps = [after - before for record in outcome.records[:8] for before, after in pairwise(record.token_times)]
    assert max(gaps) <= 1.02e-3 * target
    free = run([*streams, *prompts], profile=roomy, pipeline=STAGED)
    waits = [max(each.token_times[0] - each.arrival for each in of.records[8:]) for of in (outcome, free)]
    assert waits[0] < 1.3 * waits[1], "prompts do not wait much longer for it"


def test_a_single_request_on_two_stages_leaves_bubbles():
    outcome = run(separate_requests(1, 20, 50), profile=BOTH, pipeline=STAGED)
    assert outcome.busy / outcome.seconds == pytest.approx(0.5, abs=0.02)
    assert outcome.idle == pytest.approx((0.5, 0.5), abs=0.02)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.3, 0.7), (0.7, 0.3)])
def test_a_full_pipeline_idles_where_its_stages_take_less_than_the_slowest(shares):
    stages = tuple(replace(COST.slower(2 * share, 2 * share)) for share in shares)
    pipeline = Pipeline(stages, Link("wire", 1e12, 0.0), token_bytes=1)
    profile = replace(PROFILE, cost=pipeline.whole(), pp=2)
    outcome = run(workloads.fixed(16, 20, 400), profile=profile, pipeline=pipeline, concurrency=16)
    assert outcome.idle == pytest.approx([1 - share / max(shares) for share in shares], abs=0.03)
    assert outcome.busy == pytest.approx(sum(outcome.stages_busy) / 2)


def named(records, prompt):
    """The record of the request whose prompt has this many tokens."""
    return next(record for record in records if record.prompt_tokens == prompt)


def test_forks_begin_after_their_turn_and_the_next_turn_waits_for_those_that_join():
    joined = Conversation(0.5, (Turn(30, 4), Turn(20, 4, think=2.0)))
    fresh = Conversation(0.0, (Turn(70, 4),), inherits=False)
    left = Conversation(30.0, (Turn(1, 4),), joins=False)
    records = run([Conversation(0.0, (Turn(100, 4, forks=(joined, fresh, left)), Turn(50, 4, think=1.0)))]).records
    assert sorted(record.prompt_tokens for record in records) == [70, 100, 105, 134, 154, 158]
    ended, first, second = named(records, 100).token_times[-1], named(records, 134), named(records, 158)
    assert first.arrival == pytest.approx(ended + 0.5)
    assert named(records, 70).arrival == ended
    assert second.arrival == pytest.approx(first.token_times[-1] + 2.0)
    assert named(records, 154).arrival == pytest.approx(second.token_times[-1] + 1.0)
    assert named(records, 105).arrival == pytest.approx(ended + 30.0)
    assert first.cached_tokens >= 96, "a fork finds its parent's state"


def test_forks_of_forks_join_one_after_the_other():
    inner = Conversation(0.0, (Turn(11, 2),))
    outer = Conversation(0.0, (Turn(5, 2, forks=(inner,)),))
    records = run([Conversation(0.0, (Turn(20, 2, forks=(outer,)), Turn(9, 2)))]).records
    assert [record.prompt_tokens for record in records] == [20, 27, 40, 31]
    assert records[3].arrival == records[2].token_times[-1]


def test_a_turn_that_replaces_others_follows_the_history_before_them():
    turns = (Turn(100, 4), Turn(50, 4, think=1.0), Turn(60, 4, think=1.0, replaces=1), Turn(8, 4, think=1.0))
    records = run([Conversation(0.0, turns)]).records
    assert [record.prompt_tokens for record in records] == [100, 154, 164, 176]
    assert 96 <= records[2].cached_tokens < 112, "nothing of the replaced turn is found"


def test_an_answer_ends_before_the_limit_that_its_client_allows():
    turns = (Turn(40, 6, limit=200), Turn(5, 3, limit=3), Turn(5, 2))
    outcome = run([Conversation(0.0, turns)] * 2)
    assert [len(record.token_times) for record in outcome.records] == [6, 6, 3, 3, 2, 2]
    assert [record.prompt_tokens for record in outcome.records][-1] == 40 + 6 + 5 + 3 + 5
    assert outcome.stats.blocks_used == 0


def test_a_record_has_the_contract_of_its_turn():
    contract = Contract(ttft=0.5)
    records = run([Conversation(0.0, (Turn(40, 6, contract=contract), Turn(5, 3)))]).records
    assert [record.contract for record in records] == [contract, NO_CONTRACT]
    assert records[0].outcome == "kept"


class Answering:
    """Answers each request at once, with two tokens, and refuses those whose ids are in `refuses`."""

    def __init__(self, workload, refuses=(), **options):
        self.requests, self._refuses = list[Request](), refuses
        self.clients = Conversations(workload, self._add, vocab_size=1000, concurrency=None, **options)

    def _add(self, request):
        self.requests.append(request)
        if request.id in self._refuses:
            raise ContractRefused(Refusal("no room", 2.0))

    def run(self):
        while not self.clients.done:
            now, known = self.clients.next_due, len(self.requests)
            self.clients.send_due(now)
            for request in self.requests[known:]:
                if request.id not in self._refuses:
                    self.clients.receive([SequenceOutput(request.id, (7, 7), FinishReason.LENGTH, 0, now)], now + 1.0)
        return self.clients.records


def test_a_refused_turn_ends_its_conversation_and_its_parent_goes_on():
    fork = Conversation(0.0, (Turn(5, 2), Turn(5, 2)))
    server = Answering([Conversation(0.0, (Turn(20, 2, forks=(fork,)), Turn(9, 2)))], refuses=("0.0.0.0",))
    assert [record.refused for record in server.run()] == ["", "no room", ""]
    assert [request.id for request in server.requests] == ["0.0", "0.0.0.0", "0.1"]
    assert server.clients.ended == 3


def test_an_engine_that_takes_contracts_refuses_what_it_cannot_keep_and_keeps_the_rest():
    asked = [Conversation(0.005 * at, (Turn(900, 4, contract=Contract(ttft=0.2)),)) for at in range(200)]
    told, untold = run(asked), run(asked, config={"contracts": "off"})
    assert {record.outcome for record in told.records} == {"kept", "refused"}
    assert {record.outcome for record in untold.records} == {"kept", "ttft"}
    kept = [sum(record.outcome == "kept" for record in each.records) for each in (told, untold)]
    assert kept[0] > 2 * kept[1]


def test_a_request_carries_its_class_its_deadline_and_its_contract_if_the_engine_takes_contracts():
    turn = Turn(20, 2, contract=Contract(ttft=0.25, tbt=0.1), priority=3, deadline=0.5)
    for tells, contract in ((True, turn.contract), (False, NO_CONTRACT)):
        server = Answering([Conversation(0.0, (turn,))], tells=tells)
        server.run()
        (request,) = server.requests
        assert (request.contract, request.priority, request.deadline) == (contract, 3, 0.5)
