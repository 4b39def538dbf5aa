"""Every pair of features that does not work is refused, or reported by the engine, with the words of the table."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.engine.process.build import build_engine
from holdfast.lm.config import EngineConfig
from tests.combinations.effects import EFFECTS, check_tokens
from tests.combinations.place import SMALL, Place
from tests.combinations.table import FEATURES, REFUSALS, Refusal
from tests.combinations.workload import serve


def options_of(place: Place, refusal: Refusal) -> dict[str, Any]:
    """Options that ask for both features."""
    first, second = (FEATURES[feature].options for feature in refusal.pair)
    asked = {**SMALL, "model": "plain", **first, **second, **dict(refusal.options)}
    models = {
        "plain": place.plain,
        "hybrid": place.hybrid,
        "t5": place.encoder_decoder,
        "4-bit": place.four_bits,
        "t5-4-bit": place.encoder_decoder_four_bits,
    }
    if "hybrid" in refusal.pair and "draft_model" in asked:
        asked["draft_model"] = str(place.head)
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
def test_an_engine_that_starts_without_a_feature_reports_it_and_shows_no_effect(place: Place, refusal: Refusal) -> None:
    seen = serve(place, refusal.pair)
    info = seen.bench.info
    assert refusal.reason in (info.precision, info.chunk_reason, *info.executor_reason.split("; ")[1:])
    there, missing = refusal.pair
    EFFECTS[there](seen)
    with pytest.raises(AssertionError):
        EFFECTS[missing](seen)
    check_tokens(seen, refusal.pair)
