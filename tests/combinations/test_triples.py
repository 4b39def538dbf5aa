"""Random combinations of three and more features: each engine gives the greedy tokens of a plain one.

A few run with the other tests, and a dozen with `make test-long`. `python -m tests.combinations.test_triples [SEED]`
runs all sixty, and draws others with another seed.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks.lib.invocation import provenance
from tests.combinations.effects import EFFECTS, check_tokens
from tests.combinations.place import Place
from tests.combinations.table import FEATURES, is_served
from tests.combinations.workload import Seen, serve
from tests.long import then_long

ALL, DOZEN, SEED = 60, 12, 0
LAYOUTS = (("tp",), ("pp",), ("tp",), ("pp",), ("tp", "pp"))
"""Layouts of the combinations with several ranks, in turns."""
EVERY = 6
"""One combination in so many has several ranks: such engines take seconds to start."""
MOST = 7
"""Features of a combination, at most."""


PAIRS_ONLY = {"hybrid", "deterministic", "heads", "sleep"}
"""Features without a part in the sixty, whose results are recorded. HYBRIDS and LATER are combinations of these."""
HYBRIDS = (
    ("hybrid", "remote", "moves", "grammars", "adapters"),
    ("hybrid", "tp", "host", "disk", "moves", "adapters"),
    ("hybrid", "pp", "remote", "moves", "drafts", "adapters"),
)
"""Combinations with recurrent layers."""
TIERED = ("paged", "host", "disk", "grammars", "adapters", "tuning", "priorities", "tenants", "deterministic")
LATER = (
    ("moves", "drafts", *TIERED),
    ("heads", *TIERED),
    ("remote", "moves", "adapters", "4-bit", "contracts", "deterministic", "heads"),
    ("remote", "drafts", "fp8-weights", "contracts", "deterministic"),
    ("hybrid", "drafts", "adapters", "4-bit", "deterministic"),
    ("remote", "moves", "grammars", "drafts", "adapters", "4-bit", "fp8-cache", "tenants", "sleep"),
    ("disk", "grammars", "adapters", "target", "priorities", "deterministic", "heads", "sleep"),
)
"""Combinations with the same bits, with draft heads, and with sleep."""


def drawn(seed: int) -> Iterator[tuple[str, ...]]:
    """Different combinations that the table has no refusal for, in the order of the table's features."""
    choose, before = random.Random(seed), set[tuple[str, ...]]()
    others = [name for name in FEATURES if name not in ("tp", "pp", *PAIRS_ONLY)]
    while True:
        number = len(before)
        chosen = [*LAYOUTS[number // EVERY % len(LAYOUTS)]] if number % EVERY == EVERY - 1 else []
        size = choose.randint(3, MOST)
        for name in choose.sample(others, len(others)):
            if len(chosen) < size and is_served(*chosen, name):
                chosen.append(name)
        features = tuple(name for name in FEATURES if name in chosen)
        if features not in before:
            before.add(features)
            yield features


def check(seen: Seen) -> None:
    """Raise AssertionError for tokens that are not the plain engine's, and for a feature without its effect."""
    check_tokens(seen, seen.features)
    for feature in seen.features:
        EFFECTS[feature](seen)


@pytest.mark.parametrize("number", then_long(4, range(DOZEN)))
def test_a_random_combination_gives_the_tokens_of_a_plain_engine(place: Place, number: int) -> None:
    features = next(islice(drawn(SEED), number, None))
    check(serve(place, features, seed=number))


@pytest.mark.always(*map("+".join, (HYBRIDS[0], LATER[0], LATER[2])))
@pytest.mark.parametrize("features", [*HYBRIDS, *LATER], ids="+".join)
def test_a_chosen_combination_gives_the_tokens_of_a_plain_engine(place: Place, features: tuple[str, ...]) -> None:
    check(serve(place, features))


def test_sixty_combinations_are_different_served_and_ten_of_them_have_several_ranks() -> None:
    sixty = [*islice(drawn(SEED), ALL)]
    assert len({*sixty}) == ALL and all(is_served(*each) and 3 <= len(each) <= MOST for each in sixty)
    assert sum(bool({"tp", "pp"} & {*each}) for each in sixty) == 10
    assert {name for each in sixty for name in each} == {*FEATURES} - PAIRS_ONLY


def run(place: Place, seed: int, number: int, features: tuple[str, ...]) -> bool:
    """Serve one combination and print a line about it. Returns whether it is right."""
    began, named = time.monotonic(), " + ".join(features)
    try:
        seen = serve(place, features, seed=ALL * seed + number)
        check(seen)
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        print(f"{number:2} {named}: {type(error).__name__}: {error}: {line}", flush=True)
        return False
    counted = f"{len(seen.expected)} requests, {sum(map(len, seen.expected.values()))} tokens equal, all effects seen"
    print(f"{number:2} {named}: {counted}, {time.monotonic() - began:.1f} s", flush=True)
    return True


def main(seed: int) -> int:
    """Run all combinations of a seed. Returns the exit status: 1 if one is wrong."""
    torch.set_num_threads(1)
    print(json.dumps({**provenance(), "command": f"python -m tests.combinations.test_triples {seed}"}), flush=True)
    with tempfile.TemporaryDirectory() as root:
        place = Place(Path(root))
        try:
            right = [run(place, seed, number, each) for number, each in enumerate(islice(drawn(seed), ALL))]
        finally:
            place.close()
    print(f"{sum(right)} of {ALL} combinations give the tokens of a plain engine")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else SEED))
