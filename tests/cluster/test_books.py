"""The map of prefixes, against plain lists of what was sent where, with room for all of it and without."""

from random import Random

import pytest

from holdfast.cluster.books import STRIDE, PrefixMap

NAMES = ("r0", "r1", "r2")


def chain(*parts):
    """The digests of a prompt of these parts, each a name and a number of blocks: equal prefixes have equal ones."""
    prefix, digests = "", []
    for name, blocks in parts:
        for number in range(blocks):
            prefix += f"/{name}{number}"
            digests.append(prefix.encode())
    return digests


class Shelves:
    """Replicas that give up the block used least recently, first blocks of a chain first."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.held = {name: [] for name in sizes}
        """The digests, the least recently used first."""
        self.given_up, self.missed, self.missed_ever, self.known = 0, 0, 0, set()

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
        self.given_up += lost
        del held[:lost]
        if self.given_up > sum(self.sizes.values()):
            self.given_up, self.missed = self.given_up // 2, self.missed // 2


@pytest.mark.parametrize("seed", range(10))
def test_a_replica_of_known_size_has_the_blocks_that_it_used_last(seed):
    random, sizes = Random(seed), dict(zip(NAMES, (30, 60, 200), strict=True))
    books, shelves = PrefixMap(10_000, stride=1), Shelves(sizes)
    for name, size in sizes.items():
        books.resize(name, size)
    for _ in range(200):
        asked = chain(("shared", 5), (f"c{random.randrange(8)}", random.randrange(1, 20)))
        name = random.choice(NAMES)
        books.add(asked, name, there=True)
        shelves.add(asked, name)
        probe = chain(("shared", 5), (f"c{random.randrange(8)}", 20))
        held = {name: sum(digest in shelves.held[name] for digest in probe) for name in NAMES}
        assert {name: each.there for name, each in books.find(probe).items()} == {n: h for n, h in held.items() if h}
        assert {name: books.room(name) for name in NAMES} == {n: sizes[n] - len(shelves.held[n]) for n in NAMES}
    assert (books.given_up, books.missed) == (shelves.given_up, shelves.missed)
    assert shelves.missed_ever > 10


def test_a_conversation_that_grows_takes_room_for_each_block_once():
    books, size = PrefixMap(10_000), 10_000
    books.resize("r0", size)
    for turn in range(1, 40):
        books.add(chain(("a", 5 * turn)), "r0", there=False)
        books.add(chain(("a", 5 * turn + 3)), "r0", there=True)
        assert books.room("r0") == size - 5 * turn - 3
    other = chain(("a", 3 * STRIDE), ("b", 2 * STRIDE))  # it shares three eighths of its blocks
    books.add(other, "r0", there=True)
    assert books.room("r0") == size - 5 * 39 - 3 - 2 * STRIDE


def test_what_was_copied_away_goes_first_unless_something_else_has_used_it_since():
    books = PrefixMap(10_000, stride=1)
    moved, other, newest = chain(("shared", 4), ("a", 6)), chain(("shared", 4), ("b", 6)), chain(("c", 10))
    books.resize("r0", 26)
    books.add(newest, "r0", there=True)
    for asked in (moved, other):
        books.add(asked, "r0", there=True)
    books.add(moved, "r1", there=True)
    books.give_way(moved, "r0")
    books.add(chain(("d", 5)), "r0", there=True)
    assert [books.find(each)["r0"].there for each in (moved, other, newest)] == [5, 10, 10]
    assert books.find(moved)["r1"].there == 10


def test_what_is_forgotten_takes_no_room_and_was_not_given_up():
    books = PrefixMap(20, stride=1)
    for name in NAMES:
        books.resize(name, 100)
        books.add(chain(("shared", 10)), name, there=True)
    books.add(chain(("other", 15)), "r0", there=True)  # five of the shared ones are beyond the bound of the map
    assert len(books) == 20
    assert [books.room(name) for name in NAMES] == [80, 95, 95]
    books.forget("r1")
    books.resize("r1", 100)
    assert books.room("r1") == 100 and "r1" not in books.find(chain(("shared", 10)))
    assert books.given_up == 0
