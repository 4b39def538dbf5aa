"""The policies that the priced router is compared with."""

from collections import Counter

import pytest

from holdfast.cluster.routing import POLICIES, Choice, ReplicaState, ReplicaView, Turn, make_router
from tests.cluster.test_priced import COST, chain

REPLICAS = [ReplicaView(f"r{number}") for number in range(4)]


def turn(conversation, blocks=10, *, key=None):
    return Turn(key, chain(conversation, blocks), 16 * blocks, 20)


def pick(router, asked, replicas=REPLICAS):
    return router.choose(asked, replicas, 0.0).replica


def send(router, request, replica):
    router.sent(request, turn(0), Choice(replica), 0.0)


def test_round_robin_uses_each_replica_in_turn():
    router = make_router("round-robin")
    assert [pick(router, turn(0)) for _ in range(6)] == ["r0", "r1", "r2", "r3", "r0", "r1"]


def test_least_loaded_counts_requests_in_progress():
    router = make_router("least-loaded")
    for number, replica in enumerate(["r0", "r0", "r1", "r2", "r3", "r3"]):
        send(router, str(number), replica)
    assert pick(router, turn(0)) == "r1"
    router.ended("3", 1.0)
    assert pick(router, turn(0)) == "r2"
    router.lost("r3")
    assert pick(router, turn(0)) == "r2"  # The first of those with none.


def test_session_hash_keeps_a_conversation_and_moves_only_those_of_a_lost_replica():
    router = make_router("session-hash")
    homes = {str(key): pick(router, turn(key, key=str(key))) for key in range(200)}
    assert min(Counter(homes.values()).values()) > 25
    rest = [replica for replica in REPLICAS if replica.name != "r2"]
    after = {key: pick(router, turn(int(key) + 1, key=key), rest) for key in homes}
    assert {key for key in homes if after[key] != homes[key]} == {key for key in homes if homes[key] == "r2"}


def test_session_hash_without_a_key_goes_by_the_first_block():
    router = make_router("session-hash")
    assert len({pick(router, turn(5, blocks)) for blocks in range(1, 20)}) == 1


def test_power_of_two_takes_the_emptier_of_two_and_draws_the_same_for_a_seed():
    drawn = [[pick(make, turn(0)) for _ in range(50)] for make in (make_router("power-of-two", seed=3) for _ in "ab")]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 4
    router = make_router("power-of-two", seed=3)
    for number in range(3):
        send(router, str(number), f"r{number}")
    counts = Counter(pick(router, turn(0)) for _ in range(400))
    assert 160 < counts["r3"] < 240  # It is one of the two in half of the draws, and then it wins.
    assert pick(router, turn(0), REPLICAS[:1]) == "r0"


def test_prefix_tree_follows_the_longest_known_prefix_above_the_threshold():
    router = make_router("prefix-tree")
    send(router, "a", "r0")
    assert pick(router, turn(1, 10)) == "r1"  # Unknown, so it goes to the fewest requests.
    send(router, "b", "r1")
    send(router, "c", "r1")
    assert pick(router, turn(1, 30)) == "r1"  # 10 of 30 blocks are known.
    assert pick(router, turn(2, 3)) == "r2"
    send(router, "d", "r2")
    assert pick(router, turn(2, 10)) == "r3"  # 3 of 10 are not more than 0.3.


def test_prefix_tree_goes_to_the_fewest_while_requests_are_unbalanced():
    router = make_router("prefix-tree")
    assert pick(router, turn(1)) == "r0"
    for number in range(64):
        send(router, str(number), "r0")
    assert pick(router, turn(1)) == "r0"  # 64 more are not too many.
    send(router, "one more", "r0")
    assert pick(router, turn(1)) == "r1"
    router.ended("one more", 1.0)
    assert pick(router, turn(1)) == "r1"  # The last one that got it.
    for replica in ("r1", "r2", "r3"):
        for number in range(128):
            send(router, f"{replica} {number}", replica)
    for number in range(192 - 64):
        send(router, f"more {number}", "r0")
    assert pick(router, turn(1)) == "r1"  # 64 more, and 1.5 times as many.


def test_prefix_tree_forgets_a_lost_replica_and_is_bounded():
    router = make_router("prefix-tree")
    assert pick(router, turn(1)) == "r0"
    router.lost("r0")
    send(router, "a", "r1")
    rest = REPLICAS[1:]
    assert pick(router, turn(1), rest) == "r2"
    small = type(router)(most=100)
    for number in range(50):
        pick(small, turn(number))
    assert len(small._last) == 100


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_chooses_a_draining_replica(name):
    router = make_router(name, COST)
    draining = ReplicaView("r9", state=ReplicaState.DRAINING)
    chosen = {pick(router, turn(number, key=str(number)), [draining, *REPLICAS]) for number in range(30)}
    assert chosen and "r9" not in chosen
    with pytest.raises(ValueError, match="none of 1 replicas is ready"):
        pick(router, turn(0), [draining])
    assert router.rebalance(0.0, REPLICAS) == []


@pytest.mark.parametrize("name", POLICIES)
def test_an_end_may_be_reported_late_or_twice(name):
    router = make_router(name, COST)
    choice = router.choose(turn(1), REPLICAS, 0.0)
    router.sent("a", turn(1), choice, 0.0)
    router.lost(choice.replica)
    router.started("a", 0.1)
    router.ended("a", 0.2)
    router.ended("a", 0.3)
    again = router.choose(turn(1), REPLICAS, 1.0)
    router.sent("a", turn(1), again, 1.0)
    with pytest.raises(ValueError, match="request a is under way already"):
        router.sent("a", turn(1), again, 1.0)
    router.started("a", 1.1)
    router.ended("a", 1.2)
    idle = router.choose(turn(2), REPLICAS, 9.0)
    fresh = make_router(name, COST)
    if name in ("least-loaded", "power-of-two"):
        for number in range(name == "power-of-two" and 2):  # so that both have drawn as often
            fresh.choose(turn(number), REPLICAS, 0.0)
        assert idle == fresh.choose(turn(2), REPLICAS, 9.0), "nothing is left of the request"


def test_make_router_names_the_wrong_argument():
    with pytest.raises(ValueError, match="the priced router needs a cost model"):
        make_router("priced")
    with pytest.raises(ValueError, match="router 'random' is unknown; there are priced, round-robin"):
        make_router("random")
