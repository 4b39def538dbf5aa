"""Every pair of features that works is served by a real engine, which shows the effect of both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.lm.kernels.integer.library import step_library
from tests.combinations.effects import EFFECTS, check_tokens
from tests.combinations.place import Place
from tests.combinations.table import FEATURES, served_pairs
from tests.combinations.workload import Seen, serve

LAYOUTS = {"tp", "pp"}
WITH_RANKS = (
    "paged", "host", "disk", "moves", "grammars", "drafts", "adapters", "fp8-weights", "fp8-cache", "priorities",
    "tenants", "target",
)  # fmt: skip
SHARED = (
    ("tp", "pp", "remote", "tuning", "4-bit"),
    ("tp", *WITH_RANKS),
    ("pp", *WITH_RANKS),
    ("hybrid", "tp", "pp", "host", "drafts"),
    ("tp", "contracts"),
    ("pp", "contracts"),
    ("tp", "deterministic"),
    ("pp", "deterministic"),
)
"""Features of each engine of several ranks. Those take seconds to start, so the pairs of one engine share it."""


def engine_of(pair: tuple[str, str]) -> tuple[str, ...]:
    """The features of the engine that serves a pair."""
    if not LAYOUTS & {*pair}:
        return pair
    return next(shared for shared in SHARED if {*pair} <= {*shared})


def a_few() -> list[tuple[str, str]]:
    """The first pairs in which each feature occurs. Both layouts are in one: engines of several ranks start slowly."""
    found, left = [("tp", "pp")], {*FEATURES} - LAYOUTS
    for news in (2, 1):
        for pair in served_pairs():
            if len(left & {*pair}) >= news:
                found.append(pair)
                left -= {*pair}
    return found


@pytest.fixture(scope="module")
def serve_once(place: Place) -> Callable[[tuple[str, ...]], Seen]:
    """Gives what an engine with these features did. Pairs that share an engine see the same, also if it failed."""
    shared: dict[tuple[str, ...], Seen | Exception] = {}

    def serve_or_remember(features: tuple[str, ...]) -> Seen:
        if features not in SHARED:
            return serve(place, features)
        if features not in shared:
            try:
                shared[features] = serve(place, features)
            except Exception as error:
                shared[features] = error
        found = shared[features]
        if isinstance(found, Exception):
            raise RuntimeError(f"the engine with {', '.join(features)} failed") from found
        return found

    return serve_or_remember


def test_each_feature_has_an_effect_that_the_tests_look_for() -> None:
    assert {*EFFECTS} == {*FEATURES}


@pytest.mark.always(*map("+".join, a_few()))
@pytest.mark.parametrize("pair", served_pairs(), ids="+".join)
def test_a_pair_shows_the_effects_of_both_and_gives_the_answers_of_a_plain_engine(
    pair: tuple[str, str], serve_once: Callable[[tuple[str, ...]], Seen]
) -> None:
    if {*pair} == {"tp", "deterministic"} and not step_library(torch.device("cpu")):
        pytest.skip("the library in C is not there, which ranks load themselves")
    seen = serve_once(engine_of(pair))
    for feature in pair:
        EFFECTS[feature](seen)
    check_tokens(seen, pair)
