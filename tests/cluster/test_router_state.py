"""The map of prefixes, compared with plain lists of the chains sent to each replica, with and without bounds."""

from random import Random

import pytest

from holdfast.cluster.router_state import STRIDE, PrefixMap

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
