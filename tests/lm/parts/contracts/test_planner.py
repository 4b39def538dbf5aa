"""ContractPart: acceptance, refusal, protection, outcomes, and plans without contracts that are as without the part."""

import random
from itertools import pairwise
from math import inf, isinf

import pytest

from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.lab.simulator.executor import TOKEN
from holdfast.lm.limits import RequestRefused
from holdfast.lm.parts.contracts.planner import ContractPart, NoContracts
from tests.lm.parts.contracts.world import EXACT, World

STEP = EXACT.step([(1, 500)])
"""Seconds of a step with one decode."""


def plans_of(world, seed):
    """The plans of a random history without any contract."""
    choose, plans = random.Random(seed), []
    world.loop.observe(Noting(plans))
    arrivals = []
    for number in range(40):
        prompt, tokens, priority = choose.randrange(1, 700), choose.randrange(1, 80), choose.choice((0, 0, 1, 100))
        given = {"prompt": prompt, "tokens": tokens, "priority": priority}
        at = choose.uniform(0, 60) * STEP
        arrivals.append((at, lambda world, at, name=str(number), given=given: world.add(name, **given, at=at)))
    world.run(arrivals)
    return plans


class Noting:
    """Notes what each plan holds."""

    def __init__(self, plans):
        self.plans = plans

    def planned(self, plan):
        self.plans.append((plan.step, tuple(plan.segments), plan.table_writes, plan.preempted, plan.forecast))

    def ended(self, result):
        pass

    def close(self):
        pass


@pytest.mark.each_value
@pytest.mark.parametrize("order", ["fcfs", "priority", "deadline", "fair"])
@pytest.mark.parametrize("target", [{}, {"tbt_target": 12}])
def test_requests_without_contracts_are_planned_as_without_the_part(order, target):
    for seed in range(4):
        options = {"order": order, "blocks": 130, "max_sequences": 8, **target}
        plain = plans_of(World(contracts="off", **options), seed)
        assert plans_of(World(**options), seed) == plain
        assert len(plain) > 50


def test_plans_are_as_without_the_part_again_once_all_contracts_have_ended():
    after = []
    for contract in (NO_CONTRACT, Contract(ttft=1.0, tbt=1.0)):
        world = World(blocks=130, max_sequences=8)
        world.add("first", 100, 5, contract)
        world.run()
        world.clock.now = 10.0
        after.append([(plan[1], plan[3]) for plan in plans_of(world, 0)])
    assert after[0] == after[1]


def test_a_contract_that_even_an_idle_engine_breaks_is_refused_for_good():
    world = World()
    for contract in (Contract(ttft=1e-4), Contract(tbt=1e-4), Contract(complete=1e-3)):
        assert not world.add(str(contract), 300, 10, contract)
        assert isinf(world.refusals[str(contract)].retry_after)
        assert "even an idle engine" in world.refusals[str(contract)].reason
    assert not world.loop.has_work()


def test_a_contract_without_room_in_memory_is_refused_until_an_accepted_answer_ends():
    world = World(blocks=128, model_len=2048)
    loose = Contract(complete=100.0)
    assert world.add("first", 1000, 500, loose)
    assert not world.add("second", 1000, 500, loose)
    refusal = world.refusals["second"]
    assert "KV cache" in refusal.reason and 0 < refusal.retry_after < inf
    world.run()
    assert world.clock.now <= refusal.retry_after * 1.5
    assert world.add("third", 1000, 500, loose)


def test_contracts_leave_the_headroom_of_running_sequences():
    for blocks, accepted in ((112, False), (128, True)):  # each contract needs 52 blocks, and 10% are headroom
        world = World(blocks=blocks, model_len=1024)
        assert world.add("first", 800, 32, Contract(complete=100.0))
        assert world.add("second", 800, 32, Contract(complete=100.0)) is accepted


def test_one_of_several_tenants_gets_its_share_of_rows_and_blocks():
    loose = Contract(complete=100.0)
    alone = World(max_sequences=4)
    assert [alone.add(str(number), 10, 10, loose) for number in range(4)] == [True] * 4
    for options, prompt in (({"max_sequences": 4}, 10), ({"blocks": 128}, 400)):  # 26 blocks each, of 116
        world = World(**options)
        world.add("plain", 10, 10, tenant="other")
        assert [world.add(f"own {number}", prompt, 10, loose) for number in range(3)] == [True, True, False]
        assert "share of its API key" in world.refusals["own 2"].reason
        assert 0 < world.refusals["own 2"].retry_after < 1
        assert [world.add(f"other {number}", prompt, 10, loose, tenant="other") for number in range(2)] == [True] * 2
        world.run()
        assert world.add("own again", prompt, 10, loose)


def test_a_contract_waits_for_a_row_if_one_is_free_in_time():
    world, step = World(max_sequences=2), EXACT.step([(1, 20), (1, 20)])
    assert all(world.add(str(number), 10, 10, Contract(complete=100.0)) for number in range(2))
    world.step()
    assert not world.add("early", 10, 10, Contract(ttft=10 * step))
    assert "rows" in world.refusals["early"].reason
    assert world.refusals["early"].predicted.ttft > 10 * step
    assert world.add("late", 10, 10, Contract(ttft=18 * step))
    assert not world.add("behind it", 10, 10, Contract(ttft=19 * step, complete=22 * step))
    world.run()
    assert world.broken == {} and world.deliveries["late"][0] > 10 * step


def test_a_prompt_behind_accepted_ones_is_refused_with_the_time_at_which_it_is_accepted():
    world = World(blocks=800)
    for number in range(3):
        assert world.add(str(number), 1000, 2, Contract(ttft=0.15))
    own = Contract(ttft=0.151)
    assert not world.add("own", 1000, 2, own)
    refusal = world.refusals["own"]
    assert refusal.predicted.ttft > 0.151 and 0 < refusal.retry_after < 0.1
    world.run([(refusal.retry_after, lambda world, at: world.add("again", 1000, 2, own, at=at))])
    assert "again" in world.contracts and world.broken == {}


def test_an_accepted_contract_preempts_a_running_request_without_one():
    world = World(max_sequences=1, blocks=130)
    world.add("plain", 100, 200)
    for _ in range(4):
        world.step()
    world.add("own", 50, 5, Contract(ttft=0.1, tbt=0.1))
    world.run()
    assert world.broken == {} and world.scheduler.stats().preemptions == 1
    assert len(world.deliveries["plain"]) == 200


def test_contracts_go_by_due_time_and_before_requests_of_any_priority():
    world = World(budget=64)
    world.add("plain", 300, 1, priority=-5)
    world.add("later", 300, 1, Contract(ttft=2.0))
    world.add("sooner", 300, 1, Contract(ttft=1.0))
    world.run()
    ends = {name: times[-1] for name, times in world.deliveries.items()}
    assert ends["sooner"] < ends["later"] < ends["plain"]


def test_a_step_is_no_longer_than_the_fastest_pace_promised():
    world = World(budget=512, blocks=800)
    assert world.add("paced", 20, 60, Contract(tbt=1.6 * STEP))
    world.step()
    for number in range(4):
        world.add(f"plain {number}", 1000, 1)
    world.run()
    gaps = [
        after - before for before, after in zip(world.deliveries["paced"], world.deliveries["paced"][1:], strict=False)
    ]
    assert max(gaps) <= 1.6 * STEP
    assert max(gaps) > 1.3 * STEP  # the room next to it is used


def test_a_pace_that_would_slow_all_prompts_down_is_refused():
    world = World(budget=512, tile=1)
    assert not world.add("greedy", 1, 500, Contract(tbt=1.06 * EXACT.step([(1, 501)])))
    assert "delay all others" in world.refusals["greedy"].reason


def test_reports_of_the_pace_count_for_the_target_only_while_no_contract_is_open():
    world = World(budget=512, blocks=800, tbt_target=1e3 * 1.6 * STEP)
    policy = world.scheduler._policy
    noted = []
    policy.inner.note_waits = lambda count, late: noted.append((count, late))
    world.scheduler.note_waits(10, 1)
    assert world.add("paced", 20, 60, Contract(tbt=1.6 * STEP))
    world.step()
    world.scheduler.note_waits(20, 20)
    world.run()
    world.scheduler.note_waits(30, 2)
    assert noted == [(10, 1), (30, 2)]


def test_no_pause_holds_up_steps_while_a_contract_is_open():
    world = World(budget=512, blocks=800)
    spare = world.scheduler._policy.spare
    world.add("plain", 20, 60)
    world.step()
    assert spare(world.scheduler.queues.running) == inf
    assert world.add("paced", 20, 60, Contract(tbt=1.6 * STEP))
    world.step()
    assert spare(world.scheduler.queues.running) == 0
    world.run()
    assert world.scheduler.pause(100.0, 0.0)


def test_outcomes_are_counted_by_the_term_that_was_broken():
    part = ContractPart(EXACT, tile=32, ceiling=256, max_sequences=4)
    assert set(part.stats().values()) == {0}
    world = World()
    world.add("kept", 10, 3, Contract(ttft=1.0, tbt=1.0, complete=5.0))
    world.run()
    world.add("late", 10, 3, Contract(ttft=1.0))
    world.clock.now += 2.0  # the engine stands still
    world.run()
    world.add("slow", 10, 30, Contract(tbt=1.0))
    world.step(), world.step()
    world.clock.now += 2.0
    world.run()
    world.add("too late", 10, 3, Contract(complete=1.0))
    world.step()
    world.clock.now += 2.0
    world.run()
    stats = world.scheduler.stats()
    assert (stats.contracts_accepted, stats.contracts_kept) == (4, 1)
    assert (stats.contracts_broken_ttft, stats.contracts_broken_tbt, stats.contracts_broken_complete) == (1, 1, 1)
    assert world.broken == {"late": "ttft", "slow": "tbt", "too late": "complete"}


def test_a_client_that_leaves_before_its_first_token_is_due_counts_for_nothing():
    world = World()
    world.add("left", 500, 50, Contract(ttft=1.0))
    world.loop.abort("left")
    world.run()
    stats = world.scheduler.stats()
    assert (stats.contracts_accepted, stats.contracts_kept, stats.contracts_broken_ttft) == (1, 0, 0)


def test_answers_are_expected_to_be_as_long_as_earlier_ones():
    """An answer of up to 1,500 tokens may take most of the 128 blocks. After short answers, several fit."""
    world, loose = World(blocks=128), Contract(complete=100.0)
    short = {"stop_token_ids": (TOKEN,), "ignore_eos": False}
    assert [world.add(f"first {number}", 10, 1500, loose, **short) for number in range(2)] == [True, False]
    for number in range(64):
        world.run()
        world.add(f"earlier {number}", 10, 1500, **short)
    world.run()
    assert [world.add(f"own {number}", 10, 1500, loose, **short) for number in range(4)] == [True] * 4


def test_lengths_are_learned_only_where_a_stop_token_can_end_an_answer():
    """An ignored EOS does not make a length known: a stop token may end the answer."""
    loose, stop = Contract(complete=100.0), {"stop_token_ids": (TOKEN,)}
    for own, accepted in ((stop, True), ({}, False)):
        world = World(blocks=128)
        for number in range(64):
            world.add(f"earlier {number}", 10, 1500, **stop)
            world.run()
        assert [world.add(f"own {number}", 10, 1500, loose, **own) for number in range(2)] == [True, accepted]


def test_with_a_confidence_of_1_every_answer_counts_as_long_as_it_may_be():
    stop = {"stop_token_ids": (TOKEN,), "ignore_eos": False}
    world = World(blocks=128, contract_confidence=1.0)
    for number in range(64):
        world.add(f"earlier {number}", 10, 1500, **stop)
        world.run()
    loose = Contract(complete=100.0)
    assert [world.add(f"own {number}", 10, 1500, loose, **stop) for number in range(2)] == [True, False]


def outgrown_world():
    """A world whose answers had one token each, and a contract whose answer goes on for longer than it can."""
    world = World()
    for number in range(64):
        world.add(f"earlier {number}", 10, 1500, stop_token_ids=(TOKEN,))
        world.run()
    assert world.add("long", 10, 500, Contract(complete=30 * STEP), ignore_eos=False)
    for _ in range(5):
        world.step()
    return world


def test_an_answer_that_has_outgrown_what_was_expected_refuses_nobody():
    world = outgrown_world()
    assert world.add("next", 100, 20, Contract(ttft=20 * STEP, complete=60 * STEP))
    world.run()
    assert world.broken == {"long": "complete"}


def test_a_contract_that_is_broken_already_refuses_nobody():
    world = World()
    assert world.add("stuck", 10, 100, Contract(ttft=1.0, complete=2.0))
    world.clock.now += 3.0  # the engine stands still
    assert world.add("next", 100, 20, Contract(ttft=20 * STEP, complete=60 * STEP))
    world.run()
    assert world.broken == {"stuck": "ttft"}


def test_nobody_waits_for_a_contract_that_is_late_anyway():
    world = outgrown_world()
    for _ in range(40):
        world.step()
    world.add("plain", 100, 20)
    for _ in range(60):
        world.step()
    assert len(world.deliveries["plain"]) == 20


def test_a_late_end_leaves_steps_long_while_prompts_are_computed():
    """An answer that must complete at 1.3 times the pace of decodes alone does not make the steps of prompts short."""
    world = World(max_sequences=4, budget=256)
    assert world.add("answer", 10, 100, Contract(complete=130 * STEP))
    for _ in range(4):
        world.step()
    assert world.add("prompt", 700, 2, Contract(ttft=20 * STEP))
    world.run()
    gaps = [after - before for before, after in pairwise(world.deliveries["answer"])]
    assert world.broken == {} and max(gaps) > 1.5 * STEP


def test_requests_without_contracts_leave_a_late_end_its_time():
    world = World(max_sequences=4, budget=256)
    assert world.add("answer", 10, 100, Contract(complete=115 * STEP))
    for number in range(12):
        world.add(f"plain {number}", 500, 30)
    world.run()
    assert world.broken == {}
    assert any(world.deliveries[f"plain {number}"][0] < 115 * STEP for number in range(12))


def test_an_engine_without_contracts_refuses_them_and_says_how_to_get_them():
    world = World(contracts="off")
    with pytest.raises(RequestRefused, match="contracts is off; leave out ttft_ms") as refused:
        world.add("own", 10, 3, Contract(tbt=1.0))
    assert refused.value.param == "tbt_ms"
    request = Request("r", (1, 2), SamplingParams(), identity=Identity(), contract=Contract(ttft=1.0))
    with pytest.raises(RequestRefused, match="this engine takes no contracts: it has no cost profile"):
        NoContracts("it has no cost profile").check(request)


@pytest.mark.parametrize("terms", [(1e-9, None, None), (None, 1e-9, None), (86_400.0, 1e-9, 86_400.0), (1e-3,) * 3])
def test_300_hostile_contracts_harm_nobody(terms):
    def serve(hostile):
        world = World(max_sequences=8)
        arrivals = [(0.0, lambda world, at: world.add("own", 200, 60, Contract(ttft=0.5, tbt=0.05), at=at))]
        for number in range(hostile):
            at = number * STEP / 10
            arrivals.append(
                (at, lambda world, at, name=f"hostile {number}": world.add(name, 500, 400, Contract(*terms), at=at))
            )
        return world.run(arrivals)

    alone, beside = serve(0), serve(300)
    assert len(beside.refusals) == 300
    assert beside.deliveries["own"] == alone.deliveries["own"]


def test_steps_leave_room_for_tokens_as_late_as_those_before():
    longest = []
    for lateness in (0.0, 0.01):
        world = World(budget=2048)
        world.add("stream", 10, 60, Contract(tbt=0.03))
        for _ in range(20):
            world.step()
        world.clock.now += lateness  # what the process does between two steps, such as taking arrivals
        for _ in range(10):
            world.step()
        before = len(world.deliveries["stream"])
        assert world.add("long", 2000, 10, Contract(complete=100.0))
        world.run()
        longest.append(max(after - at for at, after in pairwise(world.deliveries["stream"][before:])))
    assert longest[1] < longest[0] - 0.005


def test_a_contract_that_slow_steps_refuse_within_the_target_can_be_kept_later():
    shortest = EXACT.step([(1, 1)])
    paces = {"slow": 9.0, "fast": 1.0}
    world = World(tbt_target=shortest * 3000, pace=lambda now: paces[name])  # target in ms
    for name in paces:
        for number in range(4):
            world.add(f"{name} {number}", 100, 150)
            world.run()
        accepted = world.add(f"{name} contract", 100, 20, Contract(ttft=60.0))
        assert accepted is (name == "fast")
    refusal = world.refusals["slow contract"]
    assert "cannot be kept now" in refusal.reason and "TBT target" in refusal.reason
    assert 0 < refusal.retry_after < 60
    world.run()
    assert world.broken == {}


def test_a_refusal_names_the_target_if_steps_within_it_compute_no_prompt():
    shortest = EXACT.step([(1, 1)])
    world = World(tbt_target=shortest * 500)  # in ms: half of the shortest step
    assert not world.add("loose", 300, 20, Contract(ttft=60.0))
    assert f"the TBT target of {shortest * 500:g} ms" in world.refusals["loose"].reason
    assert not world.add("tight", 300, 20, Contract(tbt=shortest / 2))
    assert "even an idle engine is slower" in world.refusals["tight"].reason
