"""Bounds of `retention_sim`: against a search through all choices on small loads, and against the policies."""

import math
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.engine.retention_bounds import Gaps, OnlineBound, fit_prices, gaps_of, optimum, seconds_between
from benchmarks.engine.retention_loads import NEVER, Law, Load, Turn, make_load
from benchmarks.engine.retention_sim import COSTS, Replay, most_state
from holdfast.core.pause import Pause
from holdfast.lm.memory.gaps import EDGES


def small_load(seed, sessions=4, turns=4):
    """Turns of a few blocks, which begin at different times."""
    draw, made = random.Random(seed), []
    for session in range(sessions):
        now, path = draw.uniform(0.0, 3.0), []
        for _ in range(draw.randint(1, turns)):
            path = [*path, *(f"{session} {at}".encode() for at in range(len(path), len(path) + draw.randint(1, 2)))]
            made.append(Turn(now, now + 0.1, path, "", Pause("tool:x"), Law(2.0)))
            made += [replace(made[-1])] * draw.randint(0, 1)  # two that go on from one turn begin and end together
            now += 0.1 + draw.expovariate(0.5)
    return Load("small", sorted(made, key=lambda turn: turn.start), 1, 1e4)


def fewest(gaps, changes, capacity):
    """The lowest cost of all choices of the gaps to hold that fit into the capacity, by trying them all."""
    whole = [at for at, needed in enumerate(gaps.needed) if needed < NEVER]
    times = [time for time, _ in changes]
    idle = capacity - np.cumsum([change for _, change in changes])
    best = math.inf
    for held in product((0, 1), repeat=len(whole)):
        taken = [at for at, is_held in zip(whole, held, strict=True) if is_held]
        fits = all(
            sum(gaps.blocks[at] for at in taken if gaps.begins[at] <= time < gaps.needed[at]) <= room
            for time, room in zip(times, idle, strict=True)
        )
        if fits:
            best = min(best, sum(gaps.cost[at] * gaps.blocks[at] for at in whole if at not in taken))
    return best


def split(gaps):
    """The gaps of single blocks."""
    counts = gaps.blocks.astype(int)
    begins, needed, cost, law = (np.repeat(each, counts) for each in (gaps.begins, gaps.needed, gaps.cost, gaps.law))
    return Gaps(begins, needed, cost, np.ones(counts.sum()), law, gaps.laws)


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_the_best_of_all_choices_of_gaps(seed):
    load, cost = small_load(seed), COSTS["flat"]
    for capacity in range(max(len(turn.digests) for turn in load.turns), most_state(load.turns)):
        outcome = Replay(load, "belady", capacity, cost).run()
        gaps, changes = gaps_of(load, cost, outcome.refused)
        if int(gaps.blocks[gaps.needed < NEVER].sum()) <= 12:
            best = fewest(split(gaps), changes, capacity)
            assert optimum(gaps, changes, capacity) == best <= outcome.cost


def test_seconds_of_intervals_are_split_by_windows():
    found = seconds_between(np.array([0.0, 2.0, 5.0]), np.array([1.0, 4.0]), np.array([3.0, 9.0]), np.array([2.0, 1.0]))
    assert found.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("prices", ["flat", "position"])
def test_no_policy_is_below_the_bounds_on_the_mean(prices):
    cost, offline, online, outcomes = COSTS[prices], 0.0, 0.0, {"informed": 0.0, "pauses": 0.0, "belady": 0.0}
    for seed in range(4):
        load = make_load("night", 200.0, seed)
        blocks = int(0.5 * most_state(load.turns))
        for name in outcomes:
            outcome = Replay(load, name, blocks, cost).run()
            outcomes[name] += outcome.cost
        gaps, changes = gaps_of(load, cost, outcome.refused)
        known = OnlineBound(load, gaps.known(), changes, blocks, 400)
        offline += known.at(fit_prices([known]))[0]
        bound = OnlineBound(load, gaps, changes, blocks, 4)
        # Prices that know nothing of this load.
        online += bound.at(np.array([1e-4, 0.01, 0.03, 0.03]))[0]
    assert 0.0 < offline <= outcomes["belady"] * 1.01
    assert online < min(outcomes["informed"], outcomes["pauses"])


def test_the_law_of_a_gap_is_that_of_the_gaps_drawn():
    load = make_load("agents", 1500.0, 3)
    starts = {}
    for turn in load.turns:
        for digest in turn.digests:
            starts.setdefault(digest, []).append(turn.start)
    told = seen = 0.0
    for turn in load.turns:
        if turn.law is not None and turn.end < load.seconds - 600.0:
            told += turn.law.below(5.0)
            seen += any(turn.end <= start <= turn.end + 5.0 for start in starts[turn.digests[-1]])
    assert seen == pytest.approx(told, rel=0.03)


@pytest.mark.parametrize("law", [Law(2.0, 0.5), Law(30.0, 1.2, never=0.3), Law(10.0), Law(5.0, 1.5, most=60.0)])
def test_rates_of_a_law_have_its_chances(law):
    rates = law.rates()
    for edge in (EDGES[20], EDGES[40], EDGES[50]):
        assert 1.0 - rates.survival(edge) == pytest.approx(law.below(edge), abs=1e-6)


def test_loads_of_the_package_extend_their_turns_and_share_their_system_prompt():
    load = make_load("lab:agents-short", 200.0, 0)
    assert len({turn.digests[0] for turn in load.turns}) <= 2, "agents, and sub-agents with a prompt of their own"
    longest = max(load.turns, key=lambda turn: len(turn.digests))
    shorter = [turn for turn in load.turns if turn.digests[-1] in longest.digests and turn is not longest]
    assert shorter and all(turn.end <= longest.start for turn in shorter)
    assert {turn.pause.kind.partition(":")[0] for turn in load.turns} == {"tool", "person", "branch"}


def test_an_unknown_load_is_refused_by_name():
    with pytest.raises(ValueError, match="load nights is unknown; there are agents, people"):
        make_load("nights", 10.0, 0)
