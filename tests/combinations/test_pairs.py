"""Every pair of features: served by a real engine that shows the effect of both, or refused with the engine's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.engine.process.build import build_engine
from holdfast.lm.config import EngineConfig
from tests.combinations.effects import EFFECTS, check_tokens
from tests.combinations.table import FEATURES, REFUSALS, Refusal, served_pairs
from tests.combinations.workload import SMALL, Place, Seen, serve

LAYOUTS = {"tp", "pp"}
WITH_RANKS = (
    "paged", "host", "disk", "moves", "grammars", "drafts", "adapters", "fp8-weights", "fp8-cache", "priorities",
    "tenants", "target",
)  # fmt: skip
SHARED = (
    ("tp", "pp", "remote", "tuning", "4-bit"),
    ("tp", *WITH_RANKS),
    ("pp", *WITH_RANKS),
)
"""Features of each engine of several ranks. Those take seconds to start, so the pairs of one engine share it."""


def engine_of(pair: tuple[str, str]) -> tuple[str, ...]:
    """The features of the engine that serves a pair."""
    if not LAYOUTS & {*pair}:
        return pair
    return next(shared for shared in SHARED if {*pair} <= {*shared})


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


@pytest.mark.parametrize("pair", served_pairs(), ids="+".join)
def test_a_pair_shows_the_effects_of_both_and_gives_the_answers_of_a_plain_engine(
    pair: tuple[str, str], serve_once: Callable[[tuple[str, ...]], Seen]
) -> None:
    seen = serve_once(engine_of(pair))
    for feature in pair:
        EFFECTS[feature](seen)
    check_tokens(seen)


def options_of(place: Place, refusal: Refusal) -> dict[str, Any]:
    """Options that ask for both features."""
    first, second = (FEATURES[feature].options for feature in refusal.pair)
    asked = {**SMALL, "model": "plain", **first, **second, **refusal.options}
    models = {
        "plain": place.plain,
        "t5": place.encoder_decoder,
        "4-bit": place.four_bits,
        "t5-4-bit": place.encoder_decoder_four_bits,
    }
    return asked | {"model": str(models[asked["model"]])}


@pytest.mark.parametrize(
    "refusal", [each for each in REFUSALS if not each.starts], ids=lambda refusal: "+".join(refusal.pair)
)
def test_a_pair_that_is_refused_is_refused_with_the_words_of_the_table(place: Place, refusal: Refusal) -> None:
    with pytest.raises(ValueError) as refused:
        build_engine(EngineConfig(**options_of(place, refusal))).close()
    assert str(refused.value).startswith(refusal.reason)


@pytest.mark.parametrize(
    "refusal", [each for each in REFUSALS if each.starts], ids=lambda refusal: "+".join(refusal.pair)
)
def test_an_engine_that_starts_without_a_feature_reports_it_and_shows_no_effect(
    place: Place, refusal: Refusal
) -> None:
    seen = serve(place, refusal.pair)
    info = seen.bench.info
    assert refusal.reason in f"{info.precision}; {info.executor_reason}; {info.chunk_reason}"
    there, missing = refusal.pair
    EFFECTS[there](seen)
    with pytest.raises(AssertionError):
        EFFECTS[missing](seen)
    check_tokens(seen)
