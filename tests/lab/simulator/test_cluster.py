"""Replicas over one virtual time: one replica equals one engine, and the effects of routing and moving state."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from holdfast.cluster.routing import POLICIES, ReplicaView, RoutingRules, make_router
from holdfast.cluster.routing import Turn as RoutedTurn
from holdfast.core.types import Request, SamplingParams
from holdfast.lab import workloads
from holdfast.lab.metrics import summary
from holdfast.lab.simulator import cluster
from holdfast.lab.simulator.cluster import ClusterEvent, Replica, on_cores, simulate_cluster
from holdfast.lab.simulator.devices import Link
from holdfast.lab.simulator.run import simulate
from holdfast.lab.workloads import Conversation, Turn
from holdfast.lm.config import EngineConfig
from holdfast.lm.memory.digests import block_digests
from tests.invariants import check_scheduler
from tests.lab.simulator.simulation import PROFILE

TIERED = replace(PROFILE, token_bytes=1000, copy_rate=1e9)
CONFIG = EngineConfig(max_sequences=16, host_cache_gb=0.02)
LINK = Link("test", 1e9, 1e-5)
RULES = RoutingRules(step_tokens=256, fair_ms=200.0, window=1.0)


def run(workload, *, policy="priced", replicas=3, config=CONFIG, link=LINK, rules=RULES, **options):
    router = make_router(policy, TIERED.cost, rules)
    return simulate_cluster(config, TIERED, workload, router, replicas=replicas, link=link, **options)


def chats(count, *, rate=60.0, think=0.3, seed=0):
    """Conversations with short answers, so that a run has few steps."""
    short = [
        replace(each, turns=tuple(replace(turn, output=max(2, turn.output // 16)) for turn in each.turns))
        for each in workloads.multi_turn(count, think, seed)
    ]
    return workloads.gamma_arrivals(workloads.fit_context(short, 1500), rate, seed)


def test_one_replica_serves_as_the_engine_alone():
    work = chats(30)
    alone = simulate(CONFIG, TIERED, work)
    outcome = run(work, replicas=1)
    assert len(outcome.records) == len(alone.records) == workloads.num_requests(work)
    assert outcome.busy[0] == pytest.approx(alone.busy, rel=0.01)
    assert outcome.seconds == pytest.approx(alone.seconds, rel=0.01)
    assert summary(outcome.records)["mean_ttft_ms"] == pytest.approx(summary(alone.records)["mean_ttft_ms"], rel=0.05)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_by_each_policy_and_the_same_in_every_run(policy):
    work = chats(15)
    outcome, again = run(work, policy=policy), run(work, policy=policy)
    assert outcome == again
    assert len(outcome.records) == workloads.num_requests(work) == sum(outcome.routed)
    outputs = sorted(turn.output for conversation in work for turn in conversation.turns)
    assert sorted(len(record.token_times) for record in outcome.records) == outputs
    assert 0 <= outcome.found <= 1
    prompts = sorted(tokens for tokens, _ in outcome.prompts)
    assert prompts == sorted(record.prompt_tokens for record in outcome.records)
    assert all(0 <= reusable < tokens for tokens, reusable in outcome.prompts)


def test_round_robin_computes_again_the_state_that_the_priced_router_finds():
    work = chats(25)
    priced, blind = run(work), run(work, policy="round-robin")
    assert priced.reusable_tokens == blind.reusable_tokens > 3_000
    assert priced.found > 0.97 and blind.found < 0.75


def test_the_router_finds_as_much_by_its_own_map_as_by_asking():
    assert run(chats(40)).found > 0.95 < run(chats(40), asks=True).found


def test_where_tiers_are_full_copies_drive_out_little_that_is_asked_for_again():
    small = replace(CONFIG, host_cache_gb=0.003)  # 11,000 tokens, of which each replica's device has 8,192
    work = chats(150, rate=60.0, think=2.0)
    priced, tree = (run(work, config=small, policy=policy) for policy in ("priced", "prefix-tree"))
    assert min(stats.tokens_dropped for stats in priced.stats) > 10_000 < priced.fetched_tokens
    assert priced.found > 0.985 > tree.found  # 0.964 without a size of replicas, and with copies that stay


def long_and_short():
    """Two long conversations that a session hash puts on one replica, and short ones around them."""
    router, at = make_router("session-hash"), {}
    long = Conversation(0.0, tuple(Turn(900 if turn == 0 else 60, 12, 0.01) for turn in range(8)))
    short = Conversation(0.0, tuple(Turn(40, 8, 0.2) for _ in range(4)))
    for number in range(60):
        asked = RoutedTurn(str(number), (), 1, 1)
        at[number] = router.choose(asked, [ReplicaView(f"replica-{n}") for n in range(3)], 0.0).replica
    crowded = [number for number in range(60) if at[number] == "replica-0"][:8]
    return workloads.gamma_arrivals([long if number in crowded else short for number in range(60)], 30.0, 1)


def test_long_conversations_on_one_host_are_spread_by_the_priced_router():
    work = long_and_short()
    hashed, priced = run(work, policy="session-hash"), run(work)
    assert hashed.spread > 2 * priced.spread
    assert summary(priced.records)["p90_ttft_ms"] < 0.6 * summary(hashed.records)["p90_ttft_ms"]
    assert priced.found > 0.95


def test_engines_that_share_a_core_take_turns():
    work = workloads.fixed(40, 200, 60)  # all at once
    alone, together = (run(work, policy="round-robin", replicas=2, sharing=on_cores(cores)) for cores in (2, 1))
    assert alone == run(work, policy="round-robin", replicas=2), "there is a core for each"
    assert together.seconds == pytest.approx(2 * alone.seconds, rel=0.05)


def test_state_is_brought_over_a_fast_link_and_computed_again_over_a_slow_one():
    work = long_and_short()
    fast, slow, none = run(work), run(work, link=Link("slow", 1e4, 1e-3)), run(work, link=None)
    assert fast.fetched_tokens + fast.moved_tokens > 0
    assert slow.fetched_tokens == none.fetched_tokens == none.moved_tokens == 0


def test_conversations_of_a_drained_replica_go_on_elsewhere_with_their_state():
    work = chats(40, think=1.0)
    outcome = run(work, events=[ClusterEvent(0.6, "drain", 1)])
    assert len(outcome.records) == workloads.num_requests(work) and outcome.resent == 0
    assert outcome.moves > 0 and outcome.found > 0.95
    assert outcome.routed[1] < min(outcome.routed[0], outcome.routed[2]) / 2


def test_requests_of_a_failed_replica_go_on_elsewhere_with_the_tokens_they_have():
    work = [Conversation(0.01 * number, (Turn(200, 50), Turn(20, 50, 0.1))) for number in range(24)]
    outcome = run(work, events=[ClusterEvent(0.3, "fail", 0)])
    assert outcome.resent > 0
    assert [len(record.token_times) for record in outcome.records] == [50] * 48
    assert all(list(record.token_times) == sorted(record.token_times) for record in outcome.records)


def test_a_replica_finds_no_block_that_holds_the_prompts_last_token():
    node = Replica.make("one", CONFIG, TIERED, None, lambda now: 1.0, lambda scheduler, shape, clock: ())
    size, prompt = node.pool.block_size, tuple(range(1, 49))
    assert size == 16
    node.loop.add(Request("first", prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
    while node.loop.has_work():
        node.loop.step()
    chain = block_digests(cluster.ROOT, prompt, size)
    assert all(node.has(digest) for digest in chain)
    assert [node.found(chain, tokens).tokens for tokens in (47, 48, 49)] == [32, 32, 48]
    again = Request("again", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    node.loop.add(again)
    cached = [output.cached_tokens for output in node.loop.step() or () if output.tokens]
    assert cached in ([], [32])
    while node.loop.has_work():
        cached += [output.cached_tokens for output in node.loop.step() or () if output.tokens]
    assert cached == [32], "the engine finds as much"


def test_blocks_are_accounted_for_at_every_step(monkeypatch):
    checked, nodes = 0, []
    make, step = cluster.Replica.make, cluster.Cluster._step

    def made(*arguments):
        nodes.append(make(*arguments))
        return nodes[-1]

    def stepped(self, number):
        nonlocal checked
        step(self, number)
        checked += 1
        check_scheduler(nodes[number].loop.planner)

    monkeypatch.setattr(cluster.Replica, "make", made)
    monkeypatch.setattr(cluster.Cluster, "_step", stepped)
    small = replace(CONFIG, host_cache_gb=0.005)
    outcome = run(chats(25), config=small, rules=replace(RULES, fair_ms=5.0, fair_ratio=1.0, uneven=0.0))
    assert checked > 100 and outcome.moved_tokens + outcome.fetched_tokens > 0


def test_a_cpu_without_cores_is_refused():
    with pytest.raises(ValueError, match="cores is 0"):
        on_cores(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"events": [ClusterEvent(1.0, "fail", 3)]}, "replica 3 is to fail, and there are 3"),
        ({"config": replace(CONFIG, executor="padded")}, "executor is padded"),
        ({"events": [ClusterEvent(0.1, "fail", n) for n in range(3)]}, "none of 0 replicas is ready"),
    ],
)
def test_a_setting_that_cannot_be_simulated_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        run(chats(20), **options)


def test_prefill_replicas_compute_prompts_and_others_go_on_with_the_state_that_comes_over_the_link():
    work = [
        Conversation(number * 0.02, (Turn(300 + number, 1 if number % 5 == 4 else 6),)) for number in range(30)
    ]  # fmt: skip
    seconds, blocks = 0.05, {300 // CONFIG.block_size, 329 // CONFIG.block_size}
    outcome = run(work, policy="least-loaded", replicas=3, prefill=1, link=Link("slow", inf, seconds))
    assert [len(record.token_times) for record in outcome.records] == [turn.turns[0].output for turn in work]
    assert outcome.routed[0] == 30 and sum(outcome.routed[1:]) == 24 and min(outcome.routed[1:]) > 0
    moved = [record.prompt_tokens // CONFIG.block_size for record in outcome.records if record.output_tokens != 1]
    assert {min(moved), max(moved)} <= blocks
    expected = sum(
        turn.turns[0].prompt // CONFIG.block_size * CONFIG.block_size for turn in work if turn.turns[0].output > 1
    )
    assert outcome.fetched_tokens == expected
    gaps = [record.token_times[1] - record.token_times[0] for record in outcome.records if len(record.token_times) > 1]
    assert min(gaps) > seconds
    later = [each for record in outcome.records for each in record.token_times[2:]]
    assert later and outcome.resent == 0


def test_prefill_replicas_leave_decodes_the_pace_that_prompts_beside_them_break():
    work = [Conversation(0.0, (Turn(8, 300),))] + [Conversation(0.1 + 0.1 * at, (Turn(1500, 1),)) for at in range(20)]
    fast = Link("fast", inf, 0.0)
    config = replace(CONFIG, scheduler="prefill-first")
    apart, together = (
        run(work, policy="round-robin", replicas=2, prefill=prefill, link=fast, config=config) for prefill in (1, 0)
    )

    def longest(outcome):
        (times,) = (record.token_times for record in outcome.records if len(record.token_times) == 300)
        return max(later - earlier for earlier, later in pairwise(times[1:]))

    assert longest(apart) * 4 < longest(together)


def test_the_state_of_a_failed_prefill_replica_is_computed_again():
    work = [Conversation(0.0, (Turn(300, 6),))]
    slow = Link("slow", inf, 1.0)
    outcome = run(work, policy="least-loaded", replicas=2, prefill=1, link=slow, events=[ClusterEvent(0.5, "fail", 0)])
    assert [len(record.token_times) for record in outcome.records] == [6]
    assert outcome.fetched_tokens == 0 and outcome.routed == (1, 1)


def test_prefill_replicas_need_a_link_a_host_tier_and_a_replica_that_decodes():
    with pytest.raises(ValueError, match="prefill is 3; it must be from 0 to 2"):
        run(chats(1), prefill=3)
    with pytest.raises(ValueError, match="needs a link and a host tier"):
        run(chats(1), prefill=1, link=None)
    with pytest.raises(ValueError, match="needs a link and a host tier"):
        run(chats(1), prefill=1, config=replace(CONFIG, host_cache_gb=0.0))
