"""The priced router, compared with an oracle that keeps every turn in plain lists and computes every price anew."""

from dataclasses import replace
from math import exp
from random import Random

import pytest

from holdfast.cluster.priced import Pricing
from holdfast.cluster.routing import Found, Move, ReplicaState, ReplicaView, RoutingRules, Turn, make_router
from tests.lab.simulator.simulation import COST

BLOCK = 16
RULES = RoutingRules(block_size=BLOCK, step_tokens=1024, fair_ms=300.0, settle=5.0, thrift=0.5)
PRICING = Pricing(COST, RULES.step_tokens)


def chain(conversation, blocks):
    """Return the digests of a conversation's first blocks, by number."""
    return [conversation.to_bytes(16, "big") + index.to_bytes(16, "big") for index in range(blocks)]


def turn(conversation, blocks, *, keyed=True, output=20):
    return Turn(str(conversation) if keyed else None, chain(conversation, blocks), blocks * BLOCK + 3, output)


def views(count, *, link=0.001, draining=()):
    return [
        ReplicaView(
            f"r{number}",
            link_ms_per_token=link,
            host_ms_per_token=0.0005,
            state=ReplicaState.DRAINING if number in draining else ReplicaState.READY,
        )
        for number in range(count)
    ]


def priced(**rules):
    return make_router("priced", COST, replace(RULES, **rules))


def serve(router, request, asked, replicas, now):
    """Choose, send and end a turn at once."""
    choice = router.choose(asked, replicas, now)
    router.sent(request, asked, choice, now)
    router.started(request, now)
    router.ended(request, now, asked.chain)
    return choice


def expected(known, name):
    """Return the tokens that a replica has, or is about to have, by a router's map."""
    return known.get(name, (Found(), 0))[0].tokens


class Oracle:
    """All events of a router, in lists."""

    def __init__(self):
        self.requests = []
        """Entries [id, replica, work, decode, per token, has its first token]."""
        self.given = []
        """Entries [replica, work in ms, time, conversation]. All work of a conversation belongs to its owner."""
        self.since = {}
        self.links = {}
        """Time at which each replica's link is free."""
        self.left = {}
        """Current replica, previous replica and time of the change, by conversation."""

    def recent(self, replica, now):
        """Return the work that a replica got, decayed to 1/e per minute."""
        return sum(work * exp((at - now) / 60) for name, work, at, _ in self.given if name == replica)

    def waiting(self, replica):
        return [each for each in self.requests if each[1] == replica and not each[5]]

    def decoding(self, replica):
        """Return the ms that the answers in progress add to each step."""
        return sum(each[4] for each in self.requests if each[1] == replica and each[5])

    def wait(self, replica, now):
        waiting = self.waiting(replica)
        if not waiting:
            return 0.0
        stretch = 1 + self.decoding(replica) / PRICING.step
        done = min(waiting[0][2] * stretch, (now - self.since[replica]) * 1e3)
        return max(0.0, sum(each[2] for each in waiting) * stretch - done)

    def load(self, replica, now):
        return self.wait(replica, now) + sum(each[3] for each in self.requests if each[1] == replica)

    def price(self, asked, view, found, now):
        """Return the price with the cheaper of copying another replica's state and computing it."""
        have, best = found[view.name].tokens, max(each.tokens for each in found.values())
        wait, lift = self.wait(view.name, now), found[view.name].host * view.host_ms_per_token
        decoding = self.decoding(view.name)

        def stretched(work):
            return work + decoding * (1 + work / PRICING.step)

        computed = wait + lift + stretched(PRICING.prefill(have, asked.prompt_tokens))
        if best <= have or view.link_ms_per_token is None:
            return computed
        link, work = (best - have) * view.link_ms_per_token, PRICING.prefill(best, asked.prompt_tokens)
        sources = [name for name in found if found[name].tokens == best]
        free = max(self.links.get(view.name, 0.0), min(self.links.get(name, 0.0) for name in sources))
        link += max(0.0, (free - now) * 1e3)
        copied = (best - have) * view.host_ms_per_token
        if link + copied + work >= PRICING.prefill(have, asked.prompt_tokens):
            return computed
        return max(wait, link) + lift + copied + stretched(work)

    def allowed(self, asked, able, now):
        loads = {view.name: self.load(view.name, now) for view in able}
        least = min(loads.values())
        fair = {name for name in loads if loads[name] <= max(least * RULES.fair_ratio, least + RULES.fair_ms)}
        _, left, at = self.left.get(asked.key, (None, None, 0.0))
        return fair - {left} if left and now - at < RULES.settle and fair - {left} else fair

    def copies(self, source, target, ms, now):
        free = max(now, self.links.get(source, 0.0), self.links.get(target, 0.0))
        self.links[source] = self.links[target] = free + ms / 1e3

    def sent(self, request, asked, replica, work, now):
        if not self.waiting(replica):
            self.since[replica] = now
        token = PRICING.token(asked.prompt_tokens + asked.output_estimate // 2)
        self.requests.append([request, replica, work, token * asked.output_estimate, token, False])
        self.given.append([replica, work + token * asked.output_estimate, now, asked.key])
        for each in self.given:
            if each[3] == asked.key:
                each[0] = replica
        owner, left, at = self.left.get(asked.key, (replica, None, 0.0))
        self.left[asked.key] = (replica, owner, now) if owner != replica else (replica, left, at)

    def began(self, request, now):
        for each in self.requests:
            if each[0] == request and not each[5]:
                self.since[each[1]], each[5] = now, True

    def ended(self, request, now):
        for each in self.requests:
            if each[0] == request and not each[5]:
                self.since[each[1]] = now
        self.requests = [each for each in self.requests if each[0] != request]


@pytest.mark.parametrize("seed", range(20))
def test_each_choice_is_the_cheapest_that_fairness_allows(seed):
    random, router, oracle, now = Random(seed), priced(), Oracle(), 0.0
    count, open_requests, seen, queued = random.randint(2, 6), [], 0, 0
    for number in range(200):
        now += random.expovariate(20)
        replicas = views(
            count, link=random.choice([None, 0.001, 0.05]), draining={count - 1} if number % 7 == 0 else ()
        )
        able = [view for view in replicas if view.state is ReplicaState.READY]
        asked = turn(random.randrange(12), random.choice([1, 4, 40, 200]))
        found = {
            view.name: Found(random.choice([0, 0, len(asked.chain) * BLOCK]), 16 * random.randrange(3))
            for view in replicas
        }
        found = {name: each if each.tokens < asked.prompt_tokens else Found() for name, each in found.items()}
        choice = router.choose(asked, replicas, now, found.__getitem__)
        prices = {view.name: oracle.price(asked, view, found, now) for view in able}
        ranks = {name: prices[name] + RULES.thrift * choice.priced[name].work for name in prices}
        allowed = oracle.allowed(asked, able, now)
        assert choice.replica in allowed
        cheapest = min(ranks[name] for name in allowed)
        near = {name for name in allowed if ranks[name] <= cheapest + 1 + 1e-6}
        owner = oracle.left.get(asked.key, ("", None, 0.0))[0]
        held = found[owner].tokens if owner in prices else 0
        near = {name for name in near if found[name].tokens + choice.priced[name].fetched >= held} or near
        assert choice.replica in near
        assert oracle.recent(choice.replica, now) == pytest.approx(min(oracle.recent(name, now) for name in near))
        assert {name: each.total for name, each in choice.priced.items()} == pytest.approx(prices)
        seen += ranks[choice.replica] > min(ranks.values()) + 1.1
        router.sent(str(number), asked, choice, now)
        oracle.sent(str(number), asked, choice.replica, choice.priced[choice.replica].work, now)
        if choice.move_from is not None:
            oracle.copies(choice.move_from, choice.replica, choice.priced[choice.replica].link, now)
            queued += 1
        open_requests.append(str(number))
        while open_requests and random.random() < 0.55:
            request = open_requests.pop(random.randrange(len(open_requests)))
            if random.random() < 0.8:
                router.started(request, now)
                oracle.began(request, now)
            router.ended(request, now)
            oracle.ended(request, now)
    assert seen and queued, "fairness never decided, or nothing was ever copied"


@pytest.mark.parametrize("seed", range(10))
def test_map_finds_the_longest_prefix_that_was_sent_to_each_replica(seed):
    random, router, sent = Random(seed), priced(), []
    for number in range(80):
        asked = turn(random.randrange(6), random.randrange(1, 60))
        known = router.known(asked)
        for name in (view.name for view in views(4)):
            longest = max((blocks for one, blocks, at in sent if (one, at) == (asked.key, name)), default=0)
            held = expected(known, name)
            most = min(longest, len(asked.chain)) * BLOCK
            # One block in eight and the last block of each chain are remembered.
            assert most - 8 * BLOCK < held <= most or held == most
        choice = serve(router, str(number), asked, views(4), float(number))
        sent.append((asked.key, len(asked.chain), choice.replica))


def test_unknown_counts_only_tokens_that_a_replica_may_hold_without_the_routers_knowledge():
    router = priced()
    assert router.unknown(turn(1, 100)) == 1603
    serve(router, "a", turn(1, 100), views(2), 0.0)
    assert router.unknown(turn(1, 300)) == 0  # No replica has the new tokens of a known conversation.
    assert router.unknown(Turn("other", chain(1, 300), 4803, 20)) == 3203  # It has the same beginning.
    router.lost(router.owner("1"))
    assert router.unknown(turn(1, 300)) == 4803


def test_state_below_the_host_tier_counts_at_its_replica_and_is_not_copied():
    router = priced()
    held = {"r0": Found(lower=1600), "r1": Found(host=800)}
    choice = router.choose(turn(1, 100), views(3), 0.0, held.get)
    assert choice.replica == "r0" and choice.move_from is None
    assert [choice.priced[name].fetched for name in ("r0", "r1", "r2")] == [0, 0, 800]


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("link", [None, 0.001])
def test_a_conversation_of_short_turns_finds_its_state_at_each_turn_though_computing_costs_as_little(keyed, link):
    router, places = priced(), []
    for number in range(2, 12):
        asked = turn(1, number, keyed=keyed)
        choice = serve(router, str(number), asked, views(2, link=link), float(number))
        price = choice.priced[choice.replica]
        assert number > 3 or PRICING.prefill(0, asked.prompt_tokens) - price.work < 0.6, "the prices count as equal"
        assert price.found.tokens + price.fetched == (0 if number == 2 else (number - 1) * BLOCK)
        places.append(choice.replica)
    assert len({*places}) == 1 or link
    other = serve(router, "other", turn(2, 3, keyed=keyed), views(2, link=link), 12.0)
    assert len({*places, other.replica}) == 2, "another conversation goes to the replica with less work"


def test_next_turn_goes_where_the_conversation_is():
    router = priced()
    first = serve(router, "a", turn(1, 100), views(4), 0.0).replica
    for number in range(2, 6):
        choice = serve(router, str(number), turn(1, 100 * number), views(4), float(number))
        assert (choice.replica, choice.move_from) == (first, None)


def test_conversations_are_spread_by_their_cost_while_all_replicas_are_idle():
    router = priced()
    homes = [serve(router, str(n), turn(n, 400 if n in (0, 3, 6) else 2), views(3), float(n)).replica for n in range(9)]
    assert len({homes[0], homes[3], homes[6]}) == 3


def test_state_is_copied_only_once_it_is_computed():
    router = priced(fair_ms=1e9)
    asked = turn(1, 400)
    router.sent("a", asked, router.choose(asked, views(1), 0.0), 0.0)
    price = router.choose(turn(2, 400), views(2), 0.0).priced["r1"]
    again = Turn("other", chain(1, 400), 6403, 20)
    assert router.choose(again, views(2), 0.0).priced["r1"].fetched == price.fetched == 0
    assert expected(router.known(again), "r0") == 6400  # There it waits for the prompt that computes it.
    router.started("a", 1.0)
    assert router.choose(again, views(2), 1.0).priced["r1"].fetched == 6400


def test_displaced_state_costs_as_much_as_recomputing_it_has_cost_so_far():
    router, sizes = priced(), {"r0": 60 * BLOCK, "r1": 1000 * BLOCK}

    def sized():
        return [replace(view, most_tokens=sizes[view.name]) for view in views(2, link=None)]

    for number, name in enumerate(["r0", "r1"] * 2):  # Two conversations at r0, of which one does not fit.
        (only,) = (view for view in sized() if view.name == name)
        serve(router, f"a{number}", turn(number, 40), [only], float(number))
    new = turn(9, 40)
    assert [router.choose(new, sized(), 10.0).priced[name].displaced for name in ("r0", "r1")] == [0, 0]
    serve(router, "again", turn(0, 40), [sized()[0]], 11.0)  # The state that r0 dropped is needed again.
    assert (router.prefixes.dropped, router.prefixes.missed) == (48, 24)
    choice = router.choose(new, sized(), 300.0)
    tokens = (40 - 4) * BLOCK + 3 + 20  # There is room for four blocks.
    assert choice.priced["r0"].displaced == pytest.approx(tokens * 24 / 48 * PRICING.step / RULES.step_tokens)
    assert choice.priced["r1"].displaced == 0 and choice.replica == "r1"
    assert router.choose(new, views(2, link=None), 300.0).priced["r0"].displaced == 0  # its size is not known


def test_state_that_the_target_already_has_is_handed_over_without_a_copy():
    router, only = priced(most_moves=100), views(1)
    serve(router, "a", turn(1, 50), only, 0.0)
    serve(router, "b", turn(2, 50), only, 0.0)
    router.moved(Move("1", chain(1, 50), 50 * BLOCK, "r9", "r1"), 50 * BLOCK, 0.5)  # It was copied there once.
    moves = router.rebalance(1.0, views(2, draining={0}))
    assert [(move.key, move.tokens) for move in moves] == [("2", 50 * BLOCK)]
    assert router.owner("1") == "r1" and router.owner("2") == "r0"
    router.moved(moves[0], 20 * BLOCK, 2.0)  # The rest did not arrive.
    assert router.owner("2") == "r1" and expected(router.known(turn(2, 50)), "r1") == 20 * BLOCK


@pytest.mark.parametrize("keyed", [True, False])
def test_turn_leaves_a_crowded_replica_and_its_state_is_copied(keyed):
    router = priced(fair_ms=1e9)
    home = serve(router, "a", turn(1, 200, keyed=keyed), views(3), 0.0).replica
    for number in range(4):
        asked = turn(10 + number, 400)
        choice = router.choose(asked, [view for view in views(3) if view.name == home], 1.0)
        router.sent(f"big {number}", asked, choice, 1.0)
    choice = router.choose(turn(1, 210, keyed=keyed), views(3), 1.0)
    assert choice.replica != home and choice.move_from == home
    assert choice.priced[choice.replica].fetched == 200 * BLOCK


def test_state_is_computed_again_if_the_link_is_slower():
    router = priced(fair_ms=1e9)
    home = serve(router, "a", turn(1, 200), views(2), 0.0).replica
    for number in range(4):
        asked = turn(10 + number, 400)
        router.sent(f"b{number}", asked, router.choose(asked, [v for v in views(2) if v.name == home], 1.0), 1.0)
    choice = router.choose(turn(1, 210), views(2, link=10.0), 1.0)
    assert choice.replica != home and choice.move_from is None


def test_conversation_does_not_go_back_before_it_has_settled():
    router = priced(fair_ms=1e9)
    home = serve(router, "a", turn(1, 10), views(2), 0.0).replica
    crowd = turn(2, 600)
    router.sent("crowd", crowd, router.choose(crowd, [v for v in views(2) if v.name == home], 1.0), 1.0)
    away = serve(router, "b", turn(1, 11), views(2), 1.0).replica
    assert away != home
    router.ended("crowd", 2.0)
    router.sent("other", crowd, router.choose(crowd, [v for v in views(2) if v.name == away], 5.9), 5.9)
    assert router.choose(turn(1, 12), views(2), 5.9).replica == away
    assert router.choose(turn(1, 12), views(2), 1.0 + RULES.settle).replica == home


def test_lost_replica_is_forgotten_with_all_it_had():
    router = priced()
    for number in range(20):
        asked = turn(number, 50)
        router.sent(str(number), asked, router.choose(asked, views(3), 0.0), 0.0)
    gone = router.owner("3")
    router.lost(gone)
    assert all(router.owner(str(number)) != gone for number in range(20))
    assert all(gone not in router.known(turn(number, 50)) for number in range(20))
    assert router.load(gone, 0.0) == 0 and router.load("r0" if gone != "r0" else "r1", 0.0) > 0
    router.started("3", 1.0)
    router.ended("3", 1.0)  # Late events are ignored.
    left = [view for view in views(3) if view.name != gone]
    assert serve(router, "again", turn(3, 50), left, 2.0).replica == router.owner("3") != gone


@pytest.mark.parametrize("keyed", [True, False])
def test_map_is_bounded(keyed):
    router = priced(most_conversations=50, most_prefixes=300, most_blocks=2000)
    for number in range(500):
        serve(router, str(number), turn(number, 1 + number % 90, keyed=keyed), views(3), float(number))
    assert len(router) <= 50 and len(router.prefixes) <= 300 and router._blocks <= 2000
    assert len(router._tails) <= 50 and sum(map(len, router._idle.values())) == len(router)
    assert len(router.requests) == 0


def test_replica_without_state_is_not_chosen_while_it_drains():
    router = priced()
    home = serve(router, "a", turn(1, 100), views(2), 0.0).replica
    choice = router.choose(turn(1, 101), views(2, draining={int(home[1])}), 1.0)
    assert choice.replica != home and choice.move_from == home
    with pytest.raises(ValueError, match="none of 2 replicas is ready"):
        router.choose(turn(1, 101), views(2, draining={0, 1}), 1.0)


def test_idle_conversations_leave_an_overloaded_replica_costliest_first():
    router, only = priced(most_moves=2), views(1)
    for number, blocks in enumerate([10, 300, 20, 200, 400]):
        serve(router, str(number), turn(number, blocks), only, 0.0)
        if number < 4:  # The last one may never come back.
            serve(router, f"{number} again", turn(number, blocks + 1), only, 0.0)
    busy = turn(9, 2000)
    router.sent("busy", busy, router.choose(busy, only, 10.0), 10.0)
    moves = router.rebalance(10.0, views(3))
    assert [(move.key, move.source, move.tokens) for move in moves] == [
        ("1", "r0", 301 * BLOCK),
        ("3", "r0", 201 * BLOCK),
    ]
    assert {move.target for move in moves} <= {"r1", "r2"}
    assert {move.key for move in router.rebalance(10.1, views(3))}.isdisjoint({"1", "3"})  # these are under way
    router.moved(moves[0], moves[0].tokens, 10.2)
    router.moved(moves[1], 0, 10.2)
    assert router.owner("1") == moves[0].target and router.owner("3") == "r0"
    assert expected(router.known(turn(1, 301)), moves[0].target) == 301 * BLOCK


def test_all_conversations_leave_a_draining_replica_and_none_a_balanced_one():
    router, only = priced(most_moves=100), views(1)
    for number in range(12):
        serve(router, str(number), turn(number, 50), only, 0.0)
    assert router.rebalance(1.0, views(3)) == []
    moves = router.rebalance(1.0, views(3, draining={0}))
    assert {move.key for move in moves} == {str(number) for number in range(12)}
    assert {move.target for move in moves} == {"r1", "r2"}
    assert router.rebalance(1.0, views(3, link=None, draining={0})) == []


def test_turn_during_a_move_decides_where_the_conversation_lives():
    router = priced()
    serve(router, "a", turn(1, 100), views(1), 0.0)
    (move,) = router.rebalance(1.0, views(3, draining={0}))
    choice = serve(router, "b", turn(1, 110), [v for v in views(3) if v.name not in ("r0", move.target)], 1.5)
    router.moved(move, move.tokens, 2.0)
    assert router.owner("1") == choice.replica
    assert expected(router.known(turn(1, 110)), move.target) == 100 * BLOCK  # The copy is there, too.


def test_request_id_cannot_be_in_progress_twice():
    router, asked = priced(), turn(1, 3)
    choice = router.choose(asked, views(2), 0.0)
    router.sent("a", asked, choice, 0.0)
    with pytest.raises(ValueError, match="request a is under way"):
        router.sent("a", asked, choice, 0.0)


@pytest.mark.parametrize(("name", "value"), [("block_size", 0), ("fair_ratio", 0.9), ("settle", -1), ("thrift", -0.1)])
def test_rules_name_a_value_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"{name} is {value}; it must be at least"):
        replace(RULES, **{name: value})


def test_a_moves_chain_is_the_conversations_own():
    router = priced()
    serve(router, "a", turn(7, 33), views(1), 0.0)
    (move,) = router.rebalance(1.0, views(2, draining={0}))
    assert move == Move("7", chain(7, 33), 33 * BLOCK, "r0", "r1")


def test_what_a_move_brings_follows_what_its_target_had_already():
    router = priced()
    serve(router, "a", turn(1, 100), views(1), 0.0)
    serve(router, "b", Turn("another", chain(1, 40), 40 * BLOCK, 20), views(2)[1:], 0.0)
    (move,) = [each for each in router.rebalance(1.0, views(2, draining={0})) if each.key == "1"]
    assert (move.target, move.tokens) == ("r1", 60 * BLOCK)
    router.moved(move, 50 * BLOCK, 2.0)
    assert expected(router.known(turn(1, 100)), "r1") == 90 * BLOCK
    router.moved(replace(move, tokens=10 * BLOCK), 10 * BLOCK, 3.0)
    assert expected(router.known(turn(1, 100)), "r1") == 100 * BLOCK and router.owner("1") == "r1"
