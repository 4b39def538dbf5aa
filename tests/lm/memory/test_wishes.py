"""Wishes: which states clients want kept, and that no tenant keeps more than its share."""

from holdfast.lm.memory.wishes import NO_WISH, Wish, granted


def test_a_wish_is_granted_until_its_time():
    states = [("a", Wish("one", 5.0), 1.0), ("b", NO_WISH, 3.0)]
    assert granted(states, 4.9) == {"a"} and granted(states, 5.0) == set()


def test_a_tenant_keeps_no_more_than_an_equal_share_and_what_it_wants_longest_is_left_out():
    greedy = [(f"{until}", Wish("greedy", float(until)), 1.0) for until in range(10, 16)]
    others = [("x", Wish("other"), 1.0), ("y", Wish("other"), 1.0)]
    assert granted([*greedy, *others], 1.0) == {"10", "11", "12", "13"}
    assert granted(greedy, 1.0) == {name for name, *_ in greedy}, "a tenant alone may keep all"


def test_shares_are_of_bytes():
    states = [("big", Wish("one", 5.0), 10.0), ("small", Wish("one", 6.0), 4.0), ("x", Wish("two"), 8.0)]
    assert granted(states, 1.0) == {"big"}
    assert granted([("huge", Wish("one", 5.0), 10.0), ("x", Wish("two"), 8.0)], 1.0) == set()


def test_wishes_of_all_tenants_are_granted_by_themselves():
    states = [("a", Wish("one", 9.0), 1.0), ("b", Wish("two", 9.0), 1.0), ("c", Wish("two", 10.0), 1.0)]
    assert granted(states, 1.0) == {"a", "b"}
    assert granted([], 1.0) == set()
