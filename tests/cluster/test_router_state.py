"""The map of prefixes, compared with plain lists of the chains sent to each replica, with and without bounds."""

from random import Random

import pytest

from holdfast.cluster.router_state import STRIDE, PrefixMap, PricedRequest, Requests

NAMES = ("r0", "r1", "r2")


def chain(*parts):
    """Return the digests of a prompt of these parts, each a name and a number of blocks.

    Equal prefixes have equal digests.
    """
    prefix, digests = "", []
    for name, blocks in parts:
        for number in range(blocks):
            prefix += f"/{name}{number}"
            digests.append(prefix.encode())
    return digests


class Replicas:
    """Replicas that drop the least recently used block, the first blocks of a chain first."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.held = {name: [] for name in sizes}
        """Digests by replica, the least recently used first."""
        self.dropped, self.missed, self.missed_ever, self.known = 0, 0, 0, set()

    def add(self, chain, name):
        held = self.held[name]
        for digest in chain:
            if digest in held:
                held.remove(digest)
            elif digest in self.known and not any(digest in each for each in self.held.values()):
                self.missed += 1
                self.missed_ever += 1
            held.append(digest)
        self.known.update(chain)
        lost = max(0, len(held) - self.sizes[name])
        self.dropped += lost
        del held[:lost]
        if self.dropped > sum(self.sizes.values()):
            self.dropped, self.missed = self.dropped // 2, self.missed // 2


@pytest.mark.parametrize("seed", range(10))
def test_a_replica_of_known_size_has_the_blocks_that_it_used_last(seed):
    random, sizes = Random(seed), dict(zip(NAMES, (30, 60, 200), strict=True))
    prefixes, replicas = PrefixMap(10_000, stride=1), Replicas(sizes)
    for name, size in sizes.items():
        prefixes.resize(name, size)
    for _ in range(200):
        asked = chain(("shared", 5), (f"c{random.randrange(8)}", random.randrange(1, 20)))
        name = random.choice(NAMES)
        prefixes.add(asked, name, computed=True)
        replicas.add(asked, name)
        probe = chain(("shared", 5), (f"c{random.randrange(8)}", 20))
        held = {name: sum(digest in replicas.held[name] for digest in probe) for name in NAMES}
        found = {name: each.computed for name, each in prefixes.find(probe).items()}
        assert found == {name: count for name, count in held.items() if count}
        assert {name: prefixes.room(name) for name in NAMES} == {n: sizes[n] - len(replicas.held[n]) for n in NAMES}
    assert (prefixes.dropped, prefixes.missed) == (replicas.dropped, replicas.missed)
    assert replicas.missed_ever > 10


def test_a_conversation_that_grows_takes_room_for_each_block_once():
    prefixes, size = PrefixMap(10_000), 10_000
    prefixes.resize("r0", size)
    for turn in range(1, 40):
        prefixes.add(chain(("a", 5 * turn)), "r0", computed=False)
        prefixes.add(chain(("a", 5 * turn + 3)), "r0", computed=True)
        assert prefixes.room("r0") == size - 5 * turn - 3
    other = chain(("a", 3 * STRIDE), ("b", 2 * STRIDE))  # it shares three eighths of its blocks
    prefixes.add(other, "r0", computed=True)
    assert prefixes.room("r0") == size - 5 * 39 - 3 - 2 * STRIDE


def test_a_copied_chain_is_dropped_first_unless_another_chain_has_used_it_since():
    prefixes = PrefixMap(10_000, stride=1)
    moved, other, newest = chain(("shared", 4), ("a", 6)), chain(("shared", 4), ("b", 6)), chain(("c", 10))
    prefixes.resize("r0", 26)
    prefixes.add(newest, "r0", computed=True)
    for asked in (moved, other):
        prefixes.add(asked, "r0", computed=True)
    prefixes.add(moved, "r1", computed=True)
    prefixes.drop_first(moved, "r0")
    prefixes.add(chain(("d", 5)), "r0", computed=True)
    assert [prefixes.find(each)["r0"].computed for each in (moved, other, newest)] == [5, 10, 10]
    assert prefixes.find(moved)["r1"].computed == 10


def test_a_forgotten_replica_takes_no_room_and_counts_as_no_drop():
    prefixes = PrefixMap(20, stride=1)
    for name in NAMES:
        prefixes.resize(name, 100)
        prefixes.add(chain(("shared", 10)), name, computed=True)
    prefixes.add(chain(("other", 15)), "r0", computed=True)  # five of the shared ones are beyond the bound of the map
    assert len(prefixes) == 20
    assert [prefixes.room(name) for name in NAMES] == [80, 95, 95]
    prefixes.forget("r1")
    prefixes.resize("r1", 100)
    assert prefixes.room("r1") == 100 and "r1" not in prefixes.find(chain(("shared", 10)))
    assert prefixes.dropped == 0


@pytest.mark.parametrize("seed", range(10))
def test_the_backlog_of_each_replica_is_the_sum_of_its_requests_in_progress(seed):
    random, requests, known, now = Random(seed), Requests(), {}, 0.0
    since = {}
    for number in range(300):
        now += random.random()
        act, name = random.choice(("sent", "sent", "started", "ended", "lost")), random.choice(NAMES)
        request = random.choice([*known, "nobody"])
        if act == "sent":
            underway = PricedRequest(name, *(random.randrange(1, 50) for _ in range(3)))
            if not any(each.replica == name and not each.started for each in known.values()):
                since[name] = now
            requests.sent(str(number), underway, now)
            known[str(number)] = underway
            with pytest.raises(ValueError, match=f"request {number} is under way already"):
                requests.sent(str(number), underway, now)
        elif act == "started":
            fresh = request in known and not known[request].started
            assert requests.started(request, now) is (known[request] if fresh else None)
            if fresh:
                assert known[request].started
                since[known[request].replica] = now
        elif act == "ended":
            gone = known.pop(request, None)
            assert requests.ended(request, now) is gone
            if gone is not None and not gone.started:
                since[gone.replica] = now
        elif number % 5 == 0:
            lost = [id(each) for each in known.values() if each.replica == name]
            assert sorted(map(id, requests.forget(name))) == sorted(lost) and not requests.forget(name)
            known = {each: underway for each, underway in known.items() if underway.replica != name}
        assert len(requests) == len(known)
        for replica in NAMES:
            mine = [each for each in known.values() if each.replica == replica]
            waiting = [each for each in mine if not each.started]
            backlog = requests[replica]
            assert requests.count(replica) == len(mine) == len(backlog.waiting) + len(backlog.running)
            assert backlog.work == pytest.approx(sum(each.work for each in waiting))
            assert backlog.decode == pytest.approx(sum(each.decode for each in mine))
            assert backlog.per_token == pytest.approx(sum(each.per_token for each in mine if each.started))
            later, stretch = now + random.random() / 50, 1 + backlog.per_token / 8.0
            done = min(waiting[0].work * stretch, (later - since[replica]) * 1e3) if waiting else 0.0
            assert backlog.wait(later, 8.0) == pytest.approx(max(0.0, backlog.work * stretch - done))


def test_the_least_recently_used_prefix_is_forgotten_first_and_its_replicas_have_room_again():
    prefixes = PrefixMap(3, stride=1)
    prefixes.resize("r0", 10)
    first, second = chain(("a", 2)), chain(("b", 2))
    prefixes.add(first, "r0", computed=True)
    assert prefixes.room("r0") == 8
    prefixes.add(second, "r0", computed=True)
    assert len(prefixes) == 3 and prefixes.room("r0") == 7
    assert prefixes.find(second)["r0"] == (2, 2) and prefixes.find(first)["r0"].expected == 1


def test_what_is_about_to_be_computed_cannot_be_copied_yet():
    prefixes = PrefixMap(100, stride=2)
    whole = chain(("a", 6))
    prefixes.add(whole, "r0", computed=False)
    prefixes.add(whole[:4], "r0", computed=True)
    prefixes.add(whole[:2], "r1", computed=True)
    assert prefixes.find(whole) == {"r0": (6, 4), "r1": (2, 2)}
    prefixes.forget("r0")
    prefixes.forget("r0")
    assert prefixes.find(whole) == {"r1": (2, 2)} and len(prefixes) == 1
    assert prefixes.room("r9") == float("inf")
