"""The scheduler from outside: which requests it takes, how sequences end, and its reports."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.pause import Pause
from holdfast.core.types import FinishReason, Identity
from holdfast.lm.parts.penalties.planner import PenaltyPart
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.scheduler.order import Fcfs
from holdfast.lm.types import PENDING, StepResult
from holdfast.lm.types.result import CopyTime
from tests.invariants import check_scheduler
from tests.lm.scheduler.test_histories import STEPS, History
from tests.scheduling import answer, create_requests, create_scheduler, spans


def run_step(scheduler, token=7, now=0.0):
    plan = scheduler.schedule(now)
    return scheduler.update(plan, answer(plan, token), now)


def test_a_request_goes_from_prompt_to_length_limit():
    scheduler = create_scheduler()
    (request,) = create_requests(5, max_tokens=3)
    scheduler.add(request)
    plans, outputs = [], []
    while scheduler.has_work():
        plan = scheduler.schedule(1.5)
        plans += spans(plan)
        outputs += scheduler.update(plan, answer(plan), 2.0)
    assert plans == [("0", 0, 5), ("0", 5, 6), ("0", 6, 7)]
    assert [output.tokens for output in outputs] == [(7,), (7,), (7,)]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert outputs[-1].scheduled_at == 1.5
    assert scheduler.stats().blocks_used == 0


def test_the_models_end_token_ends_a_sequence_unless_ignored():
    scheduler = create_scheduler(eos=(2,))
    ending, ignoring = create_requests(5, 6)[0], create_requests(5, 6, ignore_eos=True)[1]
    scheduler.add(ending)
    scheduler.add(ignoring)
    outputs = run_step(scheduler, token=2)
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("0", FinishReason.STOP), ("1", None)]
    assert outputs[0].tokens == (2,)


def test_a_stop_token_of_the_request_ends_it_even_with_ignore_eos():
    scheduler = create_scheduler(eos=(2,))
    scheduler.add(create_requests(5, stop_token_ids=(9,), ignore_eos=True)[0])
    assert run_step(scheduler, token=9)[0].finish_reason is FinishReason.STOP


def test_a_request_ends_at_max_model_len():
    scheduler = create_scheduler(max_model_len=7)
    scheduler.add(create_requests(5, max_tokens=100)[0])
    assert run_step(scheduler)[0].finish_reason is None
    assert run_step(scheduler)[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (128, {}, "has 128 tokens.*limit of 128"),
        ((), {}, "empty"),
        (60, {"blocks": 15}, "60 prompt tokens and up to 4 generated ones take 63 positions.*has 60"),
        ((5, 100), {"vocab_size": 100}, "token id 100; .* between 0 and 99"),
        ((5, -1), {}, "token id -1"),
    ],
)
def test_requests_that_can_never_run_are_refused_with_the_limit(prompt, options, message):
    scheduler = create_scheduler(**options)
    with pytest.raises(ValueError, match=message):
        scheduler.add(create_requests(prompt)[0])
    assert not scheduler.has_work()


def test_the_largest_request_that_fits_runs_to_its_end():
    scheduler = create_scheduler(blocks=16)
    scheduler.add(create_requests(61, max_tokens=4)[0])
    while scheduler.has_work():
        run_step(scheduler)
    assert scheduler.stats().preemptions == 0


def test_an_id_already_in_use_is_refused():
    scheduler = create_scheduler()
    (request,) = create_requests(5, max_tokens=1)
    scheduler.add(request)
    with pytest.raises(ValueError, match="request 0 is already"):
        scheduler.add(request)
    run_step(scheduler)
    scheduler.add(request)
    assert scheduler.has_work()


def test_a_decode_is_planned_before_its_last_token_is_known():
    scheduler = create_scheduler()
    scheduler.add(create_requests(5, max_tokens=3)[0])
    first, second, third = (scheduler.schedule(0.0) for _ in range(3))
    assert spans(first) + spans(second) + spans(third) == [("0", 0, 5), ("0", 5, 6), ("0", 6, 7)]
    assert second.segments[0].tokens == third.segments[0].tokens == (PENDING,)
    assert scheduler.schedule(0.0) is None, "three tokens are on their way, no more may come"
    reasons = [scheduler.update(plan, answer(plan), 0.0)[0].finish_reason for plan in (first, second, third)]
    assert reasons == [None, None, FinishReason.LENGTH]


def test_tokens_planned_beyond_an_end_are_dropped():
    scheduler = create_scheduler(eos=(2,))
    scheduler.add(create_requests(5)[0])
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert scheduler.update(first, answer(first, 2), 0.0)[0].finish_reason is FinishReason.STOP
    assert not scheduler.has_work()
    assert scheduler.update(second, answer(second), 0.0) == []


def test_abort_frees_blocks_at_once_and_drops_tokens_in_flight():
    scheduler = create_scheduler(max_sequences=1)
    running, waiting = create_requests(5, 6)
    scheduler.add(running)
    scheduler.add(waiting)
    plan = scheduler.schedule(0.0)
    scheduler.abort("0")
    assert (scheduler.stats().blocks_used, scheduler.stats().running) == (0, 0)
    scheduler.abort("1")
    assert scheduler.stats().waiting == 0
    assert not scheduler.has_work()
    assert scheduler.update(plan, answer(plan), 0.0) == []
    check_scheduler(scheduler)


def test_abort_of_an_ended_request_is_ignored():
    scheduler = create_scheduler()
    scheduler.add(create_requests(5, max_tokens=1)[0])
    run_step(scheduler)
    scheduler.abort("0")
    scheduler.abort("never seen")
    assert not scheduler.has_work()


def test_a_token_of_an_aborted_request_does_not_reach_a_new_one_with_its_id():
    scheduler = create_scheduler()
    (request,) = create_requests(5)
    scheduler.add(request)
    stale = scheduler.schedule(0.0)
    scheduler.abort("0")
    scheduler.add(request)
    fresh = scheduler.schedule(0.0)
    assert scheduler.update(stale, answer(stale, 11), 0.0) == []
    assert [output.tokens for output in scheduler.update(fresh, answer(fresh, 12), 0.0)] == [(12,)]


def test_results_must_come_in_the_order_of_their_plans():
    scheduler = create_scheduler()
    scheduler.add(create_requests(5)[0])
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match=r"step 0 .* is due; got plan 1"):
        scheduler.update(second, answer(second), 0.0)
    assert first.step == 0


def test_a_result_with_too_few_tokens_is_refused():
    scheduler = create_scheduler()
    scheduler.add(create_requests(5)[0])
    plan = scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="with 1 sampled tokens is due"):
        scheduler.update(plan, StepResult(plan.step, (), 0.0), 0.0)


def test_equal_prompts_share_their_prefix_and_report_cached_tokens():
    scheduler = create_scheduler(block_size=4)
    prompt = tuple(range(10))
    first, second = create_requests(prompt, prompt, max_tokens=1)
    scheduler.add(first)
    assert run_step(scheduler)[0].cached_tokens == 0
    scheduler.add(second)
    plan = scheduler.schedule(0.0)
    assert spans(plan) == [("1", 8, 10)]
    assert scheduler.update(plan, answer(plan), 0.0)[0].cached_tokens == 8
    assert (scheduler.stats().prefix_queries, scheduler.stats().prefix_hits) == (20, 8)
    assert scheduler.stats().tokens_computed == 12


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_next_turn_of_a_conversation_finds_generated_tokens_in_the_cache(steps_in_flight):
    scheduler = create_scheduler(block_size=4)
    (first,) = create_requests(6, max_tokens=7)
    scheduler.add(first)
    plans = []
    while scheduler.has_work():
        while len(plans) < steps_in_flight and (plan := scheduler.schedule(0.0)):
            plans.append(plan)
        plan = plans.pop(0)
        scheduler.update(plan, answer(plan), 0.0)
    (second,) = create_requests((*first.prompt, *[7] * 7, 5), max_tokens=1)
    scheduler.add(second)
    assert run_step(scheduler)[0].cached_tokens == 12, "the last token generated was never computed"


OWN = {"model": "m", "adapter": "a", "dtype": "float32", "tenant": "t"}


@pytest.mark.parametrize("field", OWN)
def test_requests_that_differ_in_one_field_of_their_identity_share_no_block(field):
    scheduler = create_scheduler(block_size=4)
    prompt = tuple(range(10))
    for identity, cached in ((Identity(**OWN), 0), (Identity(**OWN | {field: "other"}), 0), (Identity(**OWN), 8)):
        scheduler.add(create_requests(prompt, max_tokens=1, identity=identity)[0])
        assert run_step(scheduler)[0].cached_tokens == cached


names = st.text("ab", max_size=2)
identities = st.builds(Identity, names, names, names, names)


@given(st.lists(identities, min_size=2, max_size=8))
def test_a_request_finds_cached_tokens_only_if_its_identity_ran_before(asked):
    scheduler = create_scheduler(block_size=4)
    prompt = tuple(range(10))
    for index, identity in enumerate(asked):
        scheduler.add(create_requests(prompt, max_tokens=1, identity=identity)[0])
        assert run_step(scheduler)[0].cached_tokens == (8 if identity in asked[:index] else 0)


@pytest.mark.parametrize("field", ["model", "adapter", "dtype"])
def test_an_identity_that_the_engine_does_not_serve_is_refused(field):
    scheduler = create_scheduler(served=Identity("m", dtype="float32"))
    one, two = create_requests(4, 4, identity=Identity("m", dtype="float32", tenant="anyone"))
    scheduler.add(one)
    with pytest.raises(ValueError, match=f"{field} is other, which this engine does not serve"):
        scheduler.add(replace(two, identity=Identity(**{field: "other"})))


def test_without_sharing_no_blocks_are_cached():
    scheduler = create_scheduler(block_size=4, sharing=False)
    prompt = tuple(range(10))
    for _ in range(2):
        scheduler.add(create_requests(prompt, max_tokens=1)[0])
        assert run_step(scheduler)[0].cached_tokens == 0
    assert scheduler.stats().blocks_cached == 0


def test_seeds_drawn_for_requests_are_distinct_and_the_same_in_every_run():
    def seeds(seed):
        scheduler = create_scheduler(seed=seed)
        for request in create_requests(5, 5, 5):
            scheduler.add(request)
        return [segment.sampling.seed for segment in scheduler.schedule(0.0).segments]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 6
    scheduler = create_scheduler()
    scheduler.add(create_requests(5, seed=42)[0])
    assert scheduler.schedule(0.0).segments[0].sampling.seed == 42


def test_stats_report_queues_and_blocks():
    scheduler = create_scheduler(max_sequences=1, block_size=4, blocks=16)
    for request in create_requests(9, 5):
        scheduler.add(request)
    run_step(scheduler)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert (stats.blocks_total, stats.blocks_used, stats.blocks_cached) == (16, 3, 0)
    scheduler.abort("0")
    assert scheduler.stats().blocks_cached == 2


def test_steps_of_a_pipeline_share_no_sequence_and_split_the_decodes():
    scheduler = create_scheduler(stages=2)
    for request in create_requests(3, 3, 3, 3):
        scheduler.add(request)
    run_step(scheduler)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert [name for name, _, _ in spans(first)] == ["0", "1"]
    assert [name for name, _, _ in spans(second)] == ["2", "3"]
    assert spans(scheduler.schedule(0.0)) == [("0", 4, 5), ("1", 4, 5)], "their tokens have left the last stage by then"
    scheduler.abort("2")
    assert spans(scheduler.schedule(0.0)) == [("3", 4, 5)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_sequence_is_planned_before_its_token_is_known_as_many_steps_later_as_there_are_stages(stages):
    scheduler = create_scheduler(stages=stages)
    for request in create_requests(*[3] * stages, max_tokens=5):
        scheduler.add(request)
    run_step(scheduler)
    names = [[name for name, _, _ in spans(scheduler.schedule(0.0))] for _ in range(3 * stages)]
    assert names == [[str(at % stages)] for at in range(3 * stages)]


def test_a_sequence_alone_in_a_pipeline_goes_on_when_its_token_is_known():
    scheduler = create_scheduler(stages=3)
    scheduler.add(create_requests(3)[0])
    for span in ((0, 3), (3, 4), (4, 5)):
        plan = scheduler.schedule(0.0)
        assert spans(plan) == [("0", *span)]
        assert scheduler.schedule(0.0) is None, "its token is under way"
        scheduler.update(plan, answer(plan), 0.0)


def test_a_known_token_does_not_free_a_sequence_whose_next_token_is_under_way():
    scheduler = create_scheduler(stages=2)
    for request in create_requests(3, 3, max_tokens=8):
        scheduler.add(request)
    run_step(scheduler)
    plans = [scheduler.schedule(0.0) for _ in range(3)]
    assert [[name for name, _, _ in spans(plan)] for plan in plans] == [["0"], ["1"], ["0"]]
    scheduler.update(plans[0], answer(plans[0]), 0.0)
    assert spans(scheduler.schedule(0.0)) == [("1", 4, 5)]


@pytest.mark.parametrize(("running", "stages", "shares"), [(5, 2, [3, 2]), (7, 3, [3, 3, 1]), (2, 3, [1, 1])])
def test_each_step_of_a_pipeline_takes_its_share_of_the_decodes_rounded_up(running, stages, shares):
    scheduler = create_scheduler(stages=stages)
    for request in create_requests(*[3] * running):
        scheduler.add(request)
    run_step(scheduler)
    assert [len(scheduler.schedule(0.0).segments) for _ in shares] == shares


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_chunks_of_one_prompt_follow_each_other_in_successive_steps_of_a_pipeline(stages):
    scheduler = create_scheduler(budget=4, stages=stages)
    for request in create_requests(10, 5):
        scheduler.add(request)
    planned = [spans(scheduler.schedule(0.0)) for _ in range(3)]
    assert planned == [[("0", 0, 4)], [("0", 4, 8)], [("0", 8, 10), ("1", 0, 2)]]


def test_an_end_token_at_the_limit_ends_a_sequence_once_as_stopped():
    scheduler = create_scheduler(eos=(0,))
    (request,) = create_requests(5, max_tokens=2)
    scheduler.add(request)
    for token, reason in ((7, None), (0, FinishReason.STOP)):
        plan = scheduler.schedule(0.0)
        (output,) = scheduler.update(plan, answer(plan, token), 0.0)
        assert (output.tokens, output.finish_reason) == ((token,), reason)


class Counted(History):
    """A history that counts for itself what plans and outputs say."""

    def __init__(self, *options):
        super().__init__(*options)
        self.counted, self.first = Counter(), {}
        schedule, update = self.scheduler.schedule, self.scheduler.update

        def counting_schedule(now):
            plan = schedule(now)
            if plan is not None:
                self.count(plan)
            return plan

        def counting_update(plan, result, now):
            outputs = update(plan, result, now)
            for output in outputs:
                self.first.setdefault(output.request_id, output)
                found = self.first[output.request_id]
                assert (output.cached_tokens, output.scheduled_at) == (found.cached_tokens, found.scheduled_at)
                assert output.cached_tokens % self.block_size == 0
                assert sum(output.cached_by_tier) <= output.cached_tokens < len(self.requests[output.request_id].prompt)
            return outputs

        self.scheduler.schedule, self.scheduler.update = counting_schedule, counting_update

    def count(self, plan):
        self.counted["tokens"] += plan.num_tokens
        self.counted["preemptions"] += len(plan.preempted)
        self.counted["swapped in"] += len(plan.copies.swap_in)
        self.counted["swapped out"] += len(plan.copies.swap_out)
        assert plan.forecast.budget >= plan.num_tokens
        spans = {}
        for segment in plan.segments:
            assert segment.start >= spans.get(segment.sequence_id, 0), "ranges of a sequence ascend"
            spans[segment.sequence_id] = segment.stop


@pytest.mark.parametrize(("seed", "stages"), [*((seed, 1) for seed in range(12)), (12, 2), (13, 3)])
def test_the_figures_are_the_sums_of_what_plans_and_outputs_say(seed, stages):
    history = Counted(seed, "stall-free", None, stages)
    for _ in range(STEPS):
        if history.random.random() < 0.4:
            history.add()
        history.step()
        stats = history.scheduler.stats()
        entries = history.scheduler.entries
        assert stats.running == sum(entry.row >= 0 for entry in entries.values())
        assert stats.waiting == len(entries) - stats.running
        assert stats.blocks_used == len({block for entry in entries.values() for block in entry.cache.blocks})
    history.drain()
    stats, counted, firsts = history.scheduler.stats(), history.counted, history.first.values()
    assert stats.tokens_computed == counted["tokens"]
    assert stats.preemptions == counted["preemptions"]
    assert stats.suspensions == (counted["preemptions"] if history.host_blocks else 0)
    assert (stats.blocks_swapped_in, stats.blocks_swapped_out) == (counted["swapped in"], counted["swapped out"])
    assert stats.prefix_queries == sum(len(request.prompt) for request in history.requests.values())
    assert stats.prefix_hits == sum(output.cached_tokens for output in firsts)
    assert stats.prefix_hits_on_host == sum(output.cached_by_tier[0] for output in firsts)
    assert (stats.prefix_hits_on_host > 0) <= (stats.blocks_swapped_in > 0)
    host = history.scheduler.pool.host
    assert (stats.blocks_total, stats.host_blocks_total) == (history.blocks, history.host_blocks)
    assert (stats.host_blocks_ready, stats.host_blocks_cached) == ((host.ready, host.cached) if host else (0, 0))
    assert stats.tokens_dropped == history.scheduler.pool.dropped * history.block_size


def copied(plan, inward, seconds):
    """The answer to a plan, with the time of a copy of 2 MiB that was seen to end."""
    result = answer(plan)
    return replace(result, copied=result.copied._replace(times=(CopyTime(plan.step, inward, 1 << 21, seconds),)))


def test_a_host_tier_counts_the_tokens_that_only_it_had():
    scheduler = create_scheduler(block_size=4, blocks=8, host_blocks=16)
    first, other = create_requests(17, 30, max_tokens=1)
    for request in (first, other, replace(first, id="again")):
        scheduler.add(request)
        while scheduler.has_work():
            for output in run_step(scheduler):
                found = output.cached_tokens, output.cached_by_tier
    assert found == (16, (16, 0, 0))
    stats = scheduler.stats()
    assert (stats.prefix_hits, stats.prefix_hits_on_host) == (16, 16)
    scheduler.add(replace(first, id="once more"))
    assert run_step(scheduler)[0].cached_by_tier == (0, 0, 0), "the device has it again"


def test_the_link_from_the_host_learns_from_copies_inwards_alone():
    scheduler = create_scheduler(host_blocks=4)
    link = scheduler.pool.host_link
    scheduler.add(create_requests(5)[0])
    before = link.seconds_per_byte
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, copied(plan, False, 9.0), 0.0)
    assert link.seconds_per_byte == before
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, copied(plan, True, 9.0), 0.0)
    assert link.seconds_per_byte > before


def test_all_requests_end_at_once_and_none_gives_anything_more():
    scheduler = create_scheduler(max_sequences=1)
    for request in create_requests(5, 6, 7):
        scheduler.add(request)
    plan = scheduler.schedule(0.0)
    scheduler.abort_all()
    assert not scheduler.has_work() and not scheduler.entries
    assert scheduler.update(plan, answer(plan), 0.0) == []
    check_scheduler(scheduler)


def test_a_part_is_found_by_its_class_and_one_that_is_not_there_is_named():
    scheduler = create_scheduler()
    assert isinstance(scheduler.part(PenaltyPart), PenaltyPart)
    assert scheduler.part(PenaltyPart) in scheduler.parts
    with pytest.raises(LookupError, match="this scheduler has no TierPart"):
        scheduler.part(TierPart)


def test_a_refused_request_takes_no_seed_and_no_place_in_the_order():
    def seeds(refused):
        scheduler = create_scheduler(order=Fcfs())
        for number, request in enumerate(create_requests(5, 5)):
            if refused:
                with pytest.raises(ValueError):
                    scheduler.add(replace(request, id="bad", prompt=()))
            scheduler.add(request)
            assert scheduler.entries[request.id].rank == (0.0, number)
        return [segment.sampling.seed for segment in scheduler.schedule(0.0).segments]

    assert seeds(refused=True) == seeds(refused=False)


def test_a_request_that_waits_makes_its_cached_blocks_recent_but_one_that_can_start_need_not():
    scheduler = create_scheduler(block_size=4, max_sequences=1)
    old, busy = create_requests(9, 5, max_tokens=1)
    scheduler.add(old)
    run_step(scheduler, now=1.0)
    scheduler.add(replace(busy, params=replace(busy.params, max_tokens=9)))
    run_step(scheduler, now=2.0)
    scheduler.add(replace(busy, id="behind"))
    scheduler.add(replace(old, id="again", arrival=7.0))
    assert [use[0] for use, _, _ in scheduler.pool.idle_blocks(0, 64)] == [7.0, 7.0]


def test_the_forecast_of_a_plan_is_its_budget_and_what_the_policy_predicts():
    scheduler = create_scheduler(budget=8)
    scheduler.add(create_requests(5)[0])
    assert scheduler.schedule(0.0).forecast == (8, 0.0)


def test_a_result_of_other_plans_changes_nothing_that_is_told():
    scheduler = create_scheduler()
    scheduler.add(create_requests(5)[0])
    plan = scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="result 9"):
        scheduler.update(plan, replace(answer(plan), step=9), 0.0)


@pytest.mark.parametrize("snapshots", [0, 4])
def test_an_ended_sequence_leaves_what_its_request_says_of_the_pause(snapshots):
    scheduler = create_scheduler(eviction="pauses", snapshots=snapshots)
    (request,) = create_requests(9, max_tokens=4, identity=Identity(tenant="a"))
    scheduler.add(replace(request, pause=Pause("tool:search", expected=3.0)))
    while scheduler.has_work():
        run_step(scheduler, now=5.0)
    tracker = scheduler._queues.pool.rule.turns
    (turn,) = tracker._open.values()
    assert (turn.pause, turn.tenant, turn.time) == (Pause("tool:search", expected=3.0), "a", 5.0)
    assert (turn.prompt, turn.length) == (2, 3), "the prompt's full blocks of four tokens, and all of them"
    assert tracker.note(request.id, Pause("person"), 6.0)
    prompt = (*request.prompt, 7, 7, 7, 7, 8)
    scheduler.add(replace(request, id="next", prompt=prompt, pause=Pause("person")))
    run_step(scheduler, now=20.0)
    assert len(tracker) == 0, "the next turn has ended the pause"
